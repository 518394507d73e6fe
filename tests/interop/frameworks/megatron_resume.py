"""Trains a small GPT with Megatron's schedules on tensor and pipeline parallel ranks, and prints the losses. On the CPU.

Usage, on every rank:
    python megatron_resume.py begin TENSOR PIPELINE DISTRIBUTED legacy|torch_dist FOLDER
    python megatron_resume.py resume TENSOR PIPELINE DISTRIBUTED FOLDER
`begin` saves after two steps and takes three more; `resume` takes these three from what was saved.
"""

import contextlib
import dataclasses
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import megatron_torch_dist
from megatron_torch_dist import megatron

MICRO_BATCHES, MICRO_BATCH, LENGTH = 2, 2, 4
CONFIG_OF = megatron.config_of


def config_of(case):
    """Returns a configuration without dropout and without options that need a GPU."""
    from megatron.core.distributed import finalize_model_grads

    config = dataclasses.replace(CONFIG_OF(case), hidden_dropout=0.0, attention_dropout=0.0, bias_activation_fusion=False,
                                 bias_dropout_fusion=False, masked_softmax_fusion=False, persist_layer_norm=False)
    config.finalize_model_grads_func = finalize_model_grads
    return config


def tokens(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(20, (MICRO_BATCHES, MICRO_BATCH, LENGTH + 1), generator=generator)


def forward(batches, model):
    batch = next(batches)
    mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]
    places = torch.arange(LENGTH).expand(MICRO_BATCH, LENGTH)
    losses = model(batch[:, :-1], places, mask, labels=batch[:, 1:])
    return losses, lambda each: (each.mean(), {"loss": each.mean().detach()})


def train(chunk, optimizer, steps):
    """Returns the loss of each step, on all ranks."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    losses = []
    for step in steps:
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        found = get_forward_backward_func()(
            forward_step_func=forward, data_iterator=iter(tokens(step)), model=[chunk], num_microbatches=MICRO_BATCHES,
            seq_length=LENGTH, micro_batch_size=MICRO_BATCH, forward_only=False)
        optimizer.step()
        loss = torch.stack([each["loss"] for each in found]).mean() if found else torch.tensor(0.0)
        dist.broadcast(loss, dist.get_world_size() - 1)  # the last stage is on the last rank
        losses.append(loss.item())
    return losses


def save_torch_dist(chunk, optimizer, folder):
    from megatron.core import dist_checkpointing

    metadata = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
    state = {"model": chunk.module.sharded_state_dict(metadata=metadata)}
    state["optimizer"] = optimizer.sharded_state_dict(dict(state), metadata=metadata)
    if dist.get_rank() == 0:
        Path(folder).mkdir()
    dist.barrier()
    dist_checkpointing.save(state, folder, content_metadata=metadata)


def save_legacy(case, chunk, optimizer, folder):
    """Saves one folder for each rank, as write_megatron.save does."""
    from megatron.core import parallel_state

    tensor, stage = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
    folder = Path(folder) / "iter_0000002" / f"mp_rank_{tensor:02d}_{stage:03d}"
    folder.mkdir(parents=True)
    if case.distributed:
        optimizer.save_parameter_state(str(folder / "distrib_optim.pt"))
    state = {"args": megatron.args_of(case, dist.get_rank()), "checkpoint_version": 3.0, "iteration": 2,
             "model": chunk.module.state_dict_for_save_checkpoint(), "optimizer": optimizer.state_dict()}
    torch.save(state, folder / "model_optim_rng.pt")
    (folder.parents[1] / "latest_checkpointed_iteration.txt").write_text("2")


def main(verb, tensor, pipeline, distributed, *rest):
    from megatron.core.tensor_parallel import random

    dist.init_process_group("gloo")
    megatron.on_the_cpu()
    random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    megatron.config_of = config_of
    case = megatron.Case(tensor=int(tensor), pipeline=int(pipeline), layers=4, tied=False, distributed=distributed == "True")
    (chunk,) = megatron.model_of(case)
    optimizer = megatron.optimizer_of(case, [chunk])
    if verb == "begin":
        train(chunk, optimizer, (0, 1))
        form, folder = rest
        save_torch_dist(chunk, optimizer, folder) if form == "torch_dist" else save_legacy(case, chunk, optimizer, folder)
    else:
        if case.distributed:
            megatron_torch_dist.keep_steps()
            train(chunk, optimizer, (9,))  # before its first step, torch's Adam has no `step`
        megatron_torch_dist.load([chunk], optimizer, rest[0])
    losses = train(chunk, optimizer, (2, 3, 4))
    if dist.get_rank() == 0:
        print(json.dumps(losses))
    megatron_torch_dist.end()


if __name__ == "__main__":
    main(*sys.argv[1:])
