"""Saves Megatron's model and optimizer as torch_dist, or loads them and compares with what they must hold. On the CPU.

Usage, on every rank:
    python megatron_torch_dist.py save CASE FOLDER EXPECTED FORM
    python megatron_torch_dist.py load CASE FOLDER EXPECTED
FORM: of the distributed optimizer's state, such as dp_reshardable. CASE: the fields of write_megatron.Case as JSON. EXPECTED: a
file of torch.save with `model`, a dict of weights by their names in the whole model, and `optim.state` unless only weights were
moved.
"""

import argparse
import json
import multiprocessing
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "fixtures" / "make"))
os.environ.setdefault("TESSERA_FIXTURES", os.devnull)
import write_megatron as megatron  # noqa: E402


def sharded_state(chunks, optimizer, metadata):
    """Returns what Megatron's training passes to `dist_checkpointing.load`."""
    state = {"model" if len(chunks) == 1 else f"model{i}": chunk.module.sharded_state_dict(metadata=metadata)
             for i, chunk in enumerate(chunks)}
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(dict(state), is_loading=True, metadata=metadata)
    return state


def save(chunks, optimizer, folder, form):
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    metadata = {"distrib_optim_sharding_type": form, "chained_optim_avoid_prefix": True}
    (chunk,) = chunks
    state = {"model": chunk.module.sharded_state_dict(metadata=metadata)}
    state["optimizer"] = optimizer.sharded_state_dict(dict(state), metadata=metadata)
    # Newer versions of Megatron keep the content of common.pt in such an object.
    state["newer"] = ShardedObject("common_state", {"iteration": 7, "scheduler": {"lr": 0.5, "steps": [1, 2]}}, (1,), (0,),
                                   replica_id=torch.distributed.get_rank())
    if torch.distributed.get_rank() == 0:
        Path(folder).mkdir()
    torch.distributed.barrier()
    dist_checkpointing.save(state | {"iteration": 7, "args": argparse.Namespace(lr=0.1)}, folder, content_metadata=metadata)


def load(chunks, optimizer, folder):
    from megatron.core import dist_checkpointing

    common = dist_checkpointing.load_common_state_dict(folder)
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    state = dist_checkpointing.load(sharded_state(chunks, optimizer, metadata), folder)
    for i, chunk in enumerate(chunks):
        chunk.module.load_state_dict(state["model" if len(chunks) == 1 else f"model{i}"])
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
    return common


def keep_steps():
    """Lets the distributed optimizer load the state of torch's Adam. Megatron expects a fused Adam, which has no steps there, so
    it gives all parameters one tensor of steps. torch's Adam would then count it up once for each parameter."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    copy = DistributedOptimizer._set_main_param_and_optimizer_states

    def copy_all_but_step(self, model_param, tensors):
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        state["step"] = state["step"].clone()
        copy(self, model_param, {"step": state["step"], **tensors})

    DistributedOptimizer._set_main_param_and_optimizer_states = copy_all_but_step


def held(chunks, kind):
    """Returns the whole tensors that all ranks hold: the weights, or a kind of their state."""
    return megatron.gathered(shard[1:] for chunk in chunks for shard in megatron.shards_of(chunk, kind))


def compare(chunks, optimizer, expected):
    weights = held(chunks, lambda parameter: parameter)
    for name, tensor in weights.items():
        assert torch.equal(tensor, expected["model"][name].to(tensor.dtype)), name
    if optimizer is None:
        return len(weights)
    is_distributed = hasattr(megatron.optimizers_of(optimizer)[0], "model_param_gbuf_map")
    for kind in ("param", *megatron.STATE) + (() if is_distributed else ("step",)):
        for name, tensor in held(chunks, lambda parameter: state_of(optimizer, parameter, kind)).items():
            wanted = expected["model"][name] if kind == "param" else expected["optim"]["state"][name][kind]
            assert torch.equal(tensor, wanted.expand(tensor.shape)), (name, kind)
    return len(weights)


def state_of(optimizer, parameter, kind):
    found = megatron.state_of(optimizer, parameter)[kind]
    return found.expand(parameter.shape).contiguous()


def whole_state(chunks, optimizer):
    """Returns what the ranks hold, as EXPECTED has it."""
    state = {}
    for kind in megatron.STATE:
        for name, tensor in held(chunks, lambda parameter: state_of(optimizer, parameter, kind)).items():
            state.setdefault(name, {})[kind] = tensor
    return {"model": held(chunks, lambda parameter: state_of(optimizer, parameter, "param")), "optim": {"state": state}}


def main(verb, case, folder, expected, *form):
    torch.distributed.init_process_group("gloo")
    megatron.on_the_cpu()
    case = {key: getattr(torch, value) if key == "dtype" else value for key, value in json.loads(case).items()}
    case = megatron.Case(**case)
    chunks = megatron.model_of(case)
    if verb == "save":
        optimizer = megatron.optimizer_of(case, chunks)
        megatron.train(chunks, optimizer)
        save(chunks, optimizer, folder, *form)
        state = whole_state(chunks, optimizer)
        if torch.distributed.get_rank() == 0:
            torch.save(state, expected)
        return end()
    expected = torch.load(expected, weights_only=True)
    optimizer = megatron.optimizer_of(case, chunks) if "optim" in expected else None
    if case.distributed:
        keep_steps()
        megatron.train(chunks, optimizer)  # before its first step, torch's Adam has no `step`, which Megatron needs
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.module.parameters():
                parameter.fill_(7)
    common = load(chunks, optimizer, folder)
    count = compare(chunks, optimizer, expected)
    if torch.distributed.get_rank() == 0:
        print(count, "weights;", vars(common["args"]), common.get("iteration"))
    end()


def end():
    torch.distributed.barrier()
    for child in multiprocessing.active_children():  # Megatron started them to save; they would keep standard output open
        child.terminate()
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads may abort at an ordinary exit


if __name__ == "__main__":
    main(*sys.argv[1:])
