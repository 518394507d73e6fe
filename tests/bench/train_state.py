"""A trainer's saves and loads of 2 GB, against PyTorch's distributed checkpoint, `cp`, a plain read and a memcpy."""

import dataclasses
import shutil
from pathlib import Path

from bench_device import Device
from side_by_side import Result, remove, run_once, with_ratios
from torchrun import run_on_ranks

PEERS = Path(__file__).with_name("peers_train_state.py")


@dataclasses.dataclass
class Setup:
    device: Device
    trainer: Path
    python: Path
    folder: Path
    layers: int  # of 201 MB each, with AdamW's state
    rounds: int

    @property
    def title(self) -> str:
        return f"{self.layers * 4096 * 4096 * 12 / 1e9:.1f} GB" + (" on GPUs" if self.device.name == "cuda" else "")

    def ours(self, way: str, path: Path, form: str, ranks: int, rounds: int) -> dict:
        return run_on_ranks([self.trainer, way, path, form, self.layers, rounds], self.device.ranks(ranks), self.python)

    def peer(self, way: str, path: Path, ranks: int, rounds: int) -> dict:
        return run_on_ranks([PEERS, self.device.name, way, path, self.layers, rounds],
                            self.device.ranks(ranks), self.python)


def add(result: Result, seconds: list[float], peak_nbytes: int) -> None:
    result.seconds += seconds
    result.peak_nbytes = max(result.peak_nbytes, peak_nbytes)


def saving(setup: Setup) -> list[Result]:
    """Times saves, and a copy; both include the sync to the disk. Only the first save of a process plans."""
    original, copied, saved = (setup.folder / name for name in ("original", "copied", "saved"))
    setup.ours("save", original, "native", 2, 1)
    benchmark = f"save by {setup.device.ranks(2)} ranks, {setup.title}"
    copy, native, dcp, peer = (Result(benchmark, name, [], 0) for name in (
        "cp -r and sync", "tessera, native", "tessera, DCP", "PyTorch DCP"))
    for _ in range(setup.rounds):
        remove(copied)()
        add(copy, [run_once(
            ["sh", "-c", 'cp -r "$1" "$2" && find "$2" | xargs sync', "copy", original, copied])[0]], 0)
        remove(copied)()
        for result, form in ((native, "native"), (dcp, "dcp")):
            measured = setup.ours("save", saved, form, 2, 2)
            add(result, measured["seconds"], measured["peak_nbytes"])
            if measured["num_plans"] != 1:
                raise RuntimeError("an unchanged layout was planned again")
            remove(saved)()
        measured = setup.peer("save", saved, 2, 2)
        add(peer, measured["seconds"], measured["peak_nbytes"])
        remove(saved)()
    return with_ratios([copy, native, dcp, peer])


def stalling(setup: Setup) -> list[Result]:
    """Times how long a save in the background blocks the trainer. Leaves out the first save of a process, which allocates buffers."""
    saved = setup.folder / "saved"
    benchmark = f"stall of a save in the background, {setup.device.ranks(2)} ranks, {setup.title}"
    memcpy, ours, peer = (Result(benchmark, name, [], 0) for name in (
        "memcpy of the rank's share", "tessera", "PyTorch DCP async_save"))
    for _ in range(max(setup.rounds // 2, 1)):
        measured = setup.ours("async", saved, "native", 2, 4)
        add(memcpy, measured["memcpy"][1:], 0)
        add(ours, measured["stall"][1:], measured["peak_nbytes"])
        remove(saved)()
        measured = setup.peer("async", saved, 2, 4)
        add(peer, measured["stall"][1:], measured["peak_nbytes"])
        remove(saved)()
    return with_ratios([memcpy, ours, peer])


def loading(setup: Setup) -> list[Result]:
    """Times loads, from the page cache, of what 4 ranks saved."""
    native, dcp = setup.folder / "native", setup.folder / "dcp"
    setup.ours("save", native, "native", 4, 1)
    setup.peer("save", dcp, 4, 1)
    benchmark = f"load {setup.device.ranks(4)} to {setup.device.ranks(8)} ranks, {setup.title}"
    read, ours, ours_dcp, peer = (Result(benchmark, name, [], 0) for name in (
        "cat of all files", "tessera, native", "tessera, DCP", "PyTorch DCP"))
    nbytes_read = {}
    for _ in range(setup.rounds):
        add(read, [run_once(["sh", "-c", 'find "$1" -type f | xargs cat > /dev/null', "read", native])[0]], 0)
        for result, path in ((ours, native), (ours_dcp, dcp)):
            measured = setup.ours("load", path, "native", 8, 2)
            add(result, measured["seconds"], measured["peak_nbytes"])
            nbytes_read[result.name] = measured["nbytes_read"] / measured["nbytes"]
        needed = measured["nbytes"]
        measured = setup.peer("load", dcp, 8, 2)
        add(peer, measured["seconds"], measured["peak_nbytes"])
        nbytes_read[peer.name] = measured["nbytes_read"] / needed
    for result in (ours, ours_dcp, peer):
        result.name += f" ({nbytes_read[result.name]:.3f} bytes read per byte needed)"
    return with_ratios([read, ours, ours_dcp, peer])


def bench(tools: Path, python: Path, work: Path, *, quick: bool, device: Device) -> list[Result]:
    trainer = device.build("train_state", tools=tools, python=python)
    folder = work / "state"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    setup = Setup(device, trainer, python, folder, layers=1 if quick else 10, rounds=1 if quick else 5)
    results = saving(setup) + stalling(setup) + loading(setup)
    shutil.rmtree(folder)
    return results
