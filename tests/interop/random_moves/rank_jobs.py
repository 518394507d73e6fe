"""What each rank of a job does: it cuts a state dict into DTensors, and saves its part."""

import os
import random
import sys

import torch
import torch.distributed as dist
from differences import contiguous, is_opened, memory_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def on_rank(function):
    """Joins the ranks, and calls function(rank, ranks) on each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    function(dist.get_rank(), dist.get_world_size())
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads can abort an ordinary exit


def sharded(state, seed):
    """Returns the state dict with DTensors in place of most tensors. Ties stay."""
    rng, made, ranks = random.Random(seed), {}, dist.get_world_size()
    has_two_axes = ranks == 4 and rng.random() < 0.5
    mesh = init_device_mesh("cpu", (2, 2) if has_two_axes else (ranks,), mesh_dim_names=("dp", "tp")[:1 + has_two_axes])

    def cut(tensor):
        choices = [rng.random() for _ in range(1 + mesh.ndim)]
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return tensor
        if not tensor.dim() or not tensor.numel() or choices[0] < 0.25 or tensor.dtype is torch.float4_e2m1fn_x2:
            return tensor.detach()
        placements = [Replicate() if c < 0.25 else Shard(int(c * 97) % tensor.dim()) for c in choices[1:]]
        return distribute_tensor(contiguous(tensor), mesh, placements, src_data_rank=None)

    def visit(value):
        if isinstance(value, torch.Tensor):
            if memory_of(value) not in made:
                made[memory_of(value)] = cut(value), value  # `value` is kept, so that no other tensor gets its memory
            return made[memory_of(value)][0]
        if isinstance(value, dict) and is_opened(value):
            return {key: visit(item) for key, item in value.items()}
        return type(value)(map(visit, value)) if is_opened(value) else value

    return visit(state)


def save_files_of_rank(rank, ranks, state, folder, has_kinds):
    """Saves `rank0.pt`, or a file of each kind of entries, as verl does."""
    kinds = [kind for kind in ("model", "optim", "extra_state") if has_kinds and isinstance(state.get(kind), dict)]
    for kind in kinds:
        torch.save(state.pop(kind), folder / f"{kind}_world_size_{ranks}_rank_{rank}.pt")
    if state:
        torch.save(state, folder / (f"world_size_{ranks}_rank_{rank}.pt" if has_kinds else f"rank{rank}.pt"))
