"""Compares saving and loading the state of an FSDP2 model with AdamW from Python: Tessera and PyTorch's DCP, in turn.

    PYTHONPATH=build/python python tests/bench/python_state.py FOLDER [--layers N] [--ranks N] [--load-ranks N] [--rounds N]
    PYTHONPATH=build/python python tests/bench/python_state.py FOLDER --tensors N     many small tensors instead

A layer has 64 MiB of parameters and 128 MiB of optimizer state. Prints medians of seconds, their ratio to DCP's, and the peak
of memory in addition to the state. Three ways show how fast the machine is without any other work: `write` writes the bytes of
each rank's tensors to a file and syncs it, `read` reads as many bytes into the tensors, and `memcpy` copies the bytes that a
rank writes into memory that was used before.
"""

import argparse
import os
import shutil
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "interop"))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from on_ranks import run_function  # noqa: E402
from peers_train_state import Trainer, begin_peak, make_room, seconds_of, status_nbytes  # noqa: E402

import tessera  # noqa: E402


class SmallTensors:
    """Many small tensors, cut by rows."""

    def __init__(self, count: int):
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        from torch.distributed.tensor import Shard, distribute_tensor

        self._state = {f"layers.{i}.weight": distribute_tensor(torch.randn(16, 16), mesh, [Shard(0)]) for i in range(count)}

    def state(self) -> dict:
        return dict(self._state)


def local_tensors(state: dict) -> list[torch.Tensor]:
    found = []
    for value in state.values():
        if isinstance(value, dict):
            found += local_tensors(value)
        elif isinstance(value, torch.Tensor):
            found.append(value.to_local() if hasattr(value, "to_local") else value)
    return found


def write(tensors: list[torch.Tensor], folder: Path) -> None:
    """Writes the bytes of tensors, and nothing else, to a file of this rank."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{dist.get_rank()}.bytes", "wb", buffering=0) as out:
        for tensor in tensors:
            bytes_left = memoryview(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
            while bytes_left:
                bytes_left = bytes_left[out.write(bytes_left):]
        os.fsync(out.fileno())


def read(tensors: list[torch.Tensor], folder: Path) -> None:
    """Fills tensors with this rank's share of the bytes that `write` wrote on all ranks."""
    files = sorted(folder.glob("*.bytes"), key=lambda file: int(file.stem))
    sizes = [file.stat().st_size for file in files]
    at = sum(sizes) * dist.get_rank() // dist.get_world_size()
    for tensor in tensors:
        wanted = memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())
        while wanted:
            number, offset = 0, at % sum(sizes)
            while offset >= sizes[number]:
                offset -= sizes[number]
                number += 1
            with open(files[number], "rb", buffering=0) as file:
                file.seek(offset)
                nbytes = file.readinto(wanted)
            wanted = wanted[nbytes:]
            at += nbytes


def measure(options: argparse.Namespace, way: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trainer = SmallTensors(options.tensors) if options.tensors else Trainer(options.layers, torch.device("cpu"))
    root = Path(options.folder)
    seconds: dict[str, list[float]] = {}
    peaks: dict[str, list[int]] = {}
    copies = [torch.zeros_like(tensor) for tensor in local_tensors(trainer.state())] if way == "stall" else []

    def memcpy(_: Path) -> None:
        for copy, tensor in zip(copies, local_tensors(trainer.state()), strict=True):
            copy.copy_(tensor)

    futures = []
    ways = {"save": {"DCP": lambda path: dcp.save(trainer.state(), checkpoint_id=path),
                     "Tessera": lambda path: tessera.save(trainer.state(), path),
                     "Tessera, dcp": lambda path: tessera.save(trainer.state(), path, format="dcp"),
                     "write": lambda path: write(local_tensors(trainer.state()), path)},
            "stall": {"DCP": lambda path: futures.append(dcp.async_save(trainer.state(), checkpoint_id=path)),
                      "Tessera": lambda path: futures.append(tessera.async_save(trainer.state(), path)), "memcpy": memcpy},
            "load": {"DCP": lambda path: dcp.load(trainer.state(), checkpoint_id=path),
                     "Tessera": lambda path: tessera.load(trainer.state(), path),
                     "read": lambda path: read(local_tensors(trainer.state()), path.with_name("of write"))}}[way]
    for i in range(options.rounds + 1):  # the first round warms up
        for name, run in ways.items():
            path = root / f"of {name.split(',')[0]}"
            if way != "load":
                make_room(path)
            before = begin_peak()
            passed = seconds_of(lambda run=run, path=path: run(path), dist.barrier if way != "stall" else lambda: None)
            if futures:
                futures.pop().result()
            if i > 0:
                seconds.setdefault(name, []).append(passed)
                peaks.setdefault(name, []).append(status_nbytes("VmHWM") - before)
            dist.barrier()
    if dist.get_rank() == 0:
        base = statistics.median(seconds["DCP"])
        for name, its in seconds.items():
            median = statistics.median(its)
            print(f"{way:6} {name:14} {median:8.3f} s   {base / median:5.2f} times DCP's speed   "
                  f"{statistics.median(peaks[name]) / 2**20:7.0f} MiB", flush=True)
    dist.barrier()
    os._exit(0)  # Gloo's threads can abort an ordinary interpreter exit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--load-ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tensors", type=int, default=0)
    options = parser.parse_args()
    Path(options.folder).mkdir(parents=True, exist_ok=True)
    run_function(measure, options.ranks, options, "save")
    run_function(measure, options.load_ranks, options, "load")
    run_function(measure, options.ranks, options, "stall")
    shutil.rmtree(options.folder)


if __name__ == "__main__":
    main()
