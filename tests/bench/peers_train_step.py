"""Times training steps of a transformer with PyTorch's own FSDP and DDP; run under torchrun.

Prints one JSON object on rank 0. Model and output are those of tests/bench/train_step.cpp.
"""

import contextlib
import json
import os
import resource
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peer_device import begin_on, wait_for
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, _ = x.shape
        q, k, v = self.qkv(x).view(batch, sequence, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(batch, sequence, -1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, sequence: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(sequence, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.position[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Traffic:
    """Counts the bytes that are passed to functions of torch.distributed, as tessera::dist::Traffic does."""

    def __init__(self) -> None:
        self.nbytes = 0
        for name, position, keyword in (("all_gather_into_tensor", 0, "output_tensor"), ("all_gather", 0, "tensor_list"),
                                        ("reduce_scatter_tensor", 1, "input"), ("all_reduce", 0, "tensor")):
            setattr(dist, name, self.counting(getattr(dist, name), position, keyword))

    def counting(self, function, position: int, keyword: str):
        def call(*args, **kwargs):
            whole = args[position] if len(args) > position else kwargs[keyword]
            self.nbytes += sum(part.nbytes for part in whole) if isinstance(whole, list) else whole.nbytes
            return function(*args, **kwargs)

        return call


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main() -> None:
    device_type, name = sys.argv[1:3]
    way = name.removesuffix("_fused")
    width, layers, heads, sequence, batch, backwards, steps = map(int, sys.argv[3:])
    torch.set_num_threads(1)
    device = begin_on(device_type)
    traffic = Traffic()
    # Imported before the memory of a run is measured.
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    torch.mm(torch.ones(512, 512, requires_grad=True), torch.ones(512, 512)).sum().backward()
    before = resident_nbytes() if device_type == "cpu" else 0
    torch.manual_seed(0)
    model = Transformer(256, width, layers, heads, sequence).to(device)
    if way == "fsdp1":
        model = Fsdp1(model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True,
                      device_id=device, forward_prefetch=True)
    elif way == "fsdp2":
        mesh = dist.device_mesh.init_device_mesh(device_type, (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif way == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
        traffic.nbytes = sum(p.nbytes for p in model.parameters())  # DDP's reducer does not call the functions that are counted
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=name != way or None)
    ids = torch.randint(256, (batch, sequence + 1), device=device)

    def train_on_ids() -> torch.Tensor:
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        return loss

    @contextlib.contextmanager
    def no_sync():
        if way != "fsdp2":
            with model.no_sync():
                yield
            return
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    seconds = []
    cpu_seconds = []
    sent = traffic.nbytes
    for _ in range(steps):
        so_far = traffic.nbytes
        wait_for(device)
        cpu_begin = time.process_time()
        begin = time.perf_counter()
        for _ in range(backwards - 1):
            with no_sync():
                train_on_ids()
        loss = train_on_ids()
        optimizer.step()
        optimizer.zero_grad()
        wait_for(device)
        seconds.append(time.perf_counter() - begin)
        cpu_seconds.append(time.process_time() - cpu_begin)
        sent = traffic.nbytes if way == "ddp" else traffic.nbytes - so_far
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if device_type == "cpu"
            else torch.cuda.max_memory_allocated()) - before
    if dist.get_rank() == 0:
        print(json.dumps({name: {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_nbytes": peak, "nbytes_sent": sent,
                                "loss": loss.item()}}))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads can abort an ordinary interpreter exit


if __name__ == "__main__":
    main()
