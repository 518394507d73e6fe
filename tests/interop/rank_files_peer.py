"""A trainer with FSDP2 whose ranks save and load files of their own, as verl's FSDPCheckpointManager does.

Every rank of a test calls `main`.
The optimizer's state is that of `optimizer.state_dict()` (numbers) or of `get_optimizer_state_dict` (names).
"""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 11)
        self.norm = nn.BatchNorm1d(11)  # its buffers are ordinary tensors
        self.down = nn.Linear(11, 1)  # one row
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.down(self.norm(torch.relu(self.up(x)))) * self.scale


def train(model, optimizer, first, number):
    losses = []
    for step in range(first, first + number):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))  # equal on all ranks
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def path_of(folder, item):
    return Path(folder) / f"{item}_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"


def save(model, optimizer, folder, form):
    train(model, optimizer, 0, 3)
    state = optimizer.state_dict() if form == "numbers" else get_optimizer_state_dict(model, optimizer)
    torch.save(model.state_dict(), path_of(folder, "model"))
    torch.save(state, path_of(folder, "optim"))
    torch.save({"lr_scheduler": {"last_epoch": 3}, "rng": {"cpu": torch.get_rng_state(), "rank": dist.get_rank()},
                "ranks": dist.get_world_size()}, path_of(folder, "extra_state"))


def load(model, optimizer, folder, form):
    model.load_state_dict(torch.load(path_of(folder, "model"), weights_only=False))
    state = torch.load(path_of(folder, "optim"), weights_only=False)
    if form == "numbers":
        optimizer.load_state_dict(state)
    else:
        set_optimizer_state_dict(model, optimizer, state)
    extra = torch.load(path_of(folder, "extra_state"), weights_only=False)
    saved_rank = dist.get_rank() if dist.get_rank() < extra["ranks"] else 0  # a rank that did not exist at the save gets rank 0's state
    assert extra["lr_scheduler"] == {"last_epoch": 3} and extra["rng"]["rank"] == saved_rank
    torch.set_rng_state(extra["rng"]["cpu"])


def main(action, folder, form, losses):
    """Saves or loads, and writes the losses of three more steps to the file `<losses>/<rank>.json`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(7 if action == "save" else 8)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    model = Model()
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    (save if action == "save" else load)(model, optimizer, folder, form)
    (Path(losses) / f"{dist.get_rank()}.json").write_text(json.dumps(train(model, optimizer, 3, 3)))
    dist.barrier()
    dist.destroy_process_group()
