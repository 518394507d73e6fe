"""Trains with FSDP2 or with DeepSpeed, to compare losses after a resume from a universal checkpoint or from a ZeRO checkpoint.

Usage, on every rank: python universal_ranks.py fsdp2 GROUPS FOLDER
                      python universal_ranks.py fsdp2_from GROUPS DCP
                      python universal_ranks.py deepspeed GROUPS RUN HELD STAGE [CPU_ADAM]
                      python universal_ranks.py zero GROUPS RUN STAGE

`fsdp2` trains, saves the same state as FOLDER/dcp and FOLDER/held.pt, and continues training. `deepspeed` loads RUN, compares
it with the file HELD (empty: with nothing) and continues training; if RUN is a file of weights, it is loaded into the model.
`zero` trains with DeepSpeed, saves RUN and continues training. `fsdp2_from` loads DCP and continues training. All print the
losses of the steps after the save.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

STEPS = 3


class Model(nn.Module):
    """Its sizes are not divisible by any number of ranks used here."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.up = nn.Linear(5, 11)
        self.norm = nn.LayerNorm(11)
        self.down = nn.Linear(11, 7, bias=False)

    def forward(self, ids):
        return nn.functional.cross_entropy(self.down(torch.relu(self.norm(self.up(self.embedding(ids))))), ids.roll(1))


def groups_of(model, groups):
    parameters = list(model.parameters())
    if groups == 1:
        return [{"params": parameters, "weight_decay": 0.1}]
    return [{"params": [each for each in parameters if each.dim() > 1], "weight_decay": 0.1},
            {"params": [each for each in parameters if each.dim() < 2], "weight_decay": 0.0}]


def batch(step):
    return (torch.arange(6) * (step + 2) + step) % 7  # the same on all ranks, so that losses are comparable


def fsdp2_from(groups, source):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    torch.manual_seed(99)  # other weights than those saved
    model = Model()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(groups_of(model, groups), lr=1.0)  # the checkpoint has 0.05
    model_state, optim_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optim_state}
    dcp.load(state, checkpoint_id=source, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert optimizer.param_groups[0]["lr"] == 0.05 and tuple(optimizer.param_groups[0]["betas"]) == (0.8, 0.95)
    losses = []
    for step in range(STEPS, 2 * STEPS):
        loss = model(batch(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def zero(groups, run, stage):
    import deepspeed

    deepspeed.init_distributed("gloo")
    torch.manual_seed(5)
    model = Model()
    optimizer = torch.optim.AdamW(groups_of(model, groups), lr=0.05, betas=(0.8, 0.95))
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": int(stage)},
              "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    losses = []
    for step in range(2 * STEPS):
        if step == STEPS:
            engine.save_checkpoint(run)
        loss = engine(batch(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses[STEPS:]


def with_fsdp2(groups, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    torch.manual_seed(5)
    model = Model()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(groups_of(model, groups), lr=0.05, betas=(0.8, 0.95))
    losses = []
    for step in range(2 * STEPS):
        if step == STEPS:
            model_state, optim_state = get_state_dict(model, optimizer)
            dcp.save({"model": model_state, "optim": optim_state, "epoch": 4}, checkpoint_id=folder / "dcp")
            options = StateDictOptions(full_state_dict=True)
            model_state, optim_state = get_state_dict(model, optimizer, options=options)
            if dist.get_rank() == 0:
                torch.save({"model": model_state, "optim": optim_state["state"]}, folder / "held.pt")
        loss = model(batch(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[STEPS:]


def with_deepspeed(groups, run, held, stage, cpu_adam=""):
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    from safetensors.torch import load_file

    deepspeed.init_distributed("gloo")
    torch.manual_seed(99)  # other weights than those saved
    model = Model()
    if run.endswith(".safetensors"):
        model.load_state_dict(load_file(run))
    make = DeepSpeedCPUAdam if cpu_adam else torch.optim.AdamW
    optimizer = make(groups_of(model, groups), lr=1.0 if held else 0.05)  # the checkpoint has 0.05, or none
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": int(stage)},
              "zero_force_ds_cpu_optimizer": bool(cpu_adam), "checkpoint": {"load_universal": True}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    client_state = None if run.endswith(".safetensors") else engine.load_checkpoint(run)[1]
    if held:
        expected = torch.load(held, weights_only=True)
        assert client_state["epoch"] == 4, client_state
        for name, parameter in engine.module.named_parameters():
            assert torch.equal(safe_get_full_fp32_param(parameter), expected["model"][name]), name
            for kind in ("exp_avg", "exp_avg_sq"):
                found = safe_get_full_optimizer_state(parameter, kind)
                assert torch.equal(found, expected["optim"][name][kind]), (name, kind)
        assert engine.optimizer.param_groups[0]["lr"] == 0.05 and tuple(engine.optimizer.param_groups[0]["betas"]) == (0.8, 0.95)
    losses = []
    for step in range(STEPS, 2 * STEPS):
        loss = engine(batch(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    way, number, *rest = sys.argv[1:]
    ways = {"fsdp2": lambda groups, folder: with_fsdp2(groups, Path(folder)), "fsdp2_from": fsdp2_from,
            "deepspeed": with_deepspeed, "zero": zero}
    losses = ways[way](int(number), *rest)
    print("\n" + json.dumps(losses))
    sys.stdout.flush()
    os._exit(0)  # threads of DeepSpeed may abort at an ordinary exit
