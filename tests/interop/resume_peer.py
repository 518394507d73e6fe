"""Trains a transformer with PyTorch from given values, or from a checkpoint, and saves it at the end, on one rank.

tests/runtime/parity/resume_parity.cpp does the same with Tessera.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
from peers_train_step import Block, Transformer  # noqa: E402


def shard(model: torch.nn.Module, way: str) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if way == "fsdp1":
        return Fsdp(model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True,
                    device_mesh=mesh, device_id=torch.device("cpu"))
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(source: str, begin: str, end: str, way: str, first: int, last: int, output: str) -> None:
    """`begin`, `end`: `-` for none. `way`: fsdp1, fsdp2, or fsdp2-flattened, with `flatten_optimizer_state_dict`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    values = load_file(source)
    ids = values.pop("ids")
    vocabulary, width = values["embedding.weight"].shape
    model = Transformer(vocabulary, width, 3, 2, ids.shape[2] - 1)
    model.load_state_dict(values)
    model = shard(model, way)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    form = StateDictOptions(flatten_optimizer_state_dict=way == "fsdp2-flattened")
    if begin != "-":
        model_state, optimizer_state = get_state_dict(model, optimizer, options=form)
        state = {"model": model_state, "optim": optimizer_state}
        dcp.load(state, checkpoint_id=begin)  # the default planner is strict about missing keys
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"],
                       options=form)
    losses = []
    for batch in ids[first:last]:
        rows = batch.chunk(dist.get_world_size())[dist.get_rank()]
        logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    Path(f"{output}{dist.get_rank()}.json").write_text(json.dumps(losses))
    if end != "-":
        model_state, optimizer_state = get_state_dict(model, optimizer, options=form)
        dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=end)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads can abort an ordinary interpreter exit
