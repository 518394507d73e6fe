"""Times PyTorch's saving and loading of an FSDP2 model with AdamW's state; the peer of train_state.cpp, under torchrun.

    peers_train_state.py cpu|cuda save|async|load PATH LAYERS ROUNDS
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peer_device import begin_on
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WIDTH = 4096


def status_nbytes(name: str) -> int:
    """Returns the bytes in a line of /proc/self/status, such as VmRSS."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) * 1024


def begin_peak() -> int:
    """Resets the peak of resident memory (VmHWM). Returns the bytes that are resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_nbytes("VmRSS")


def nbytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def sum_over_ranks(value: float, device: torch.device) -> float:
    total = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.item()


def seconds_of(body: Callable[[], None], end: Callable[[], None]) -> float:
    """Returns the seconds that `body` and `end` take. Starts when all ranks have called this function."""
    dist.barrier()
    begin = time.perf_counter()
    body()
    end()
    return time.perf_counter() - begin


class Trainer:
    def __init__(self, layers: int, device: torch.device):
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        self.model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False, device=device) for _ in range(layers)])
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict:
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        return {"model": model_state, "optim": optimizer_state}

    def save(self, path: Path) -> None:
        dcp.save(self.state(), checkpoint_id=path)

    def save_async(self, path: Path) -> None:
        self.saving = dcp.async_save(self.state(), checkpoint_id=path)

    def load(self, path: Path) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def make_room(path: Path) -> None:
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
        os.sync()
    dist.barrier()


def main() -> None:
    way, path, layers, rounds = sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
    torch.set_num_threads(1)
    device = begin_on(sys.argv[1])
    trainer = Trainer(layers, device)
    seconds = []
    read = 0.0
    before = begin_peak()
    for _ in range(rounds):
        so_far = nbytes_read()
        if way == "load":
            seconds.append(seconds_of(lambda: trainer.load(path), dist.barrier))
            read = sum_over_ranks(nbytes_read() - so_far, device)
        elif way == "save":
            make_room(path)
            seconds.append(seconds_of(lambda: trainer.save(path), dist.barrier))
        else:
            make_room(path)
            seconds.append(seconds_of(lambda: trainer.save_async(path), lambda: None))
            trainer.saving.result()
    if dist.get_rank() == 0:
        print(json.dumps({"stall" if way == "async" else "seconds": seconds, "nbytes_read": read,
                          "peak_nbytes": status_nbytes("VmHWM") - before}))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads can abort an ordinary interpreter exit


if __name__ == "__main__":
    main()
