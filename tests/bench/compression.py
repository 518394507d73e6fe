"""Size and speed of compressed tensors of each kind, on one thread, against h5py with shuffle and zstd level 1. Then moves of
compressed checkpoints, which copy chunks or encode them again, against `cp` and sync.
"""

import json
import shutil
import struct
import subprocess
from pathlib import Path

from build import build
from side_by_side import Contender, Result, compare, remove, run_once, with_ratios

PEERS = Path(__file__).with_name("peers_compression.py")
ITEMSIZE = {"bfloat16": 2, "float32": 4, "exp_avg_sq": 4}


def measured(command: list) -> dict:
    """Runs a command that prints JSON."""
    process = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}: exit code {process.returncode}\n{process.stderr}")
    return json.loads(process.stdout)


def interleaved(benchmark: str, ways: dict[str, list], rounds: int) -> list[Result]:
    """Runs all commands `rounds` times in turn. Each prints JSON: `seconds` (a list), `nbytes` and `stored_nbytes`."""
    results = [Result(benchmark, name, [], 0) for name in ways]
    told = {}
    for _ in range(rounds):
        for result, command in zip(results, ways.values()):
            outcome = measured(command)
            result.seconds += outcome["seconds"]
            told[result.name] = outcome
    for result in results:
        outcome = told[result.name]
        result.name += (f" ({outcome['nbytes'] / result.median / 1e9:.2f} GB/s, "
                        f"{outcome['nbytes'] / outcome['stored_nbytes']:.3f} : 1)")
    return with_ratios(results)


def write_rows(path: Path, values: Path, num_tensors: int) -> None:
    """Writes tensors of 4096 columns in bfloat16 as safetensors, with the bytes of a file."""
    nbytes = values.stat().st_size // num_tensors
    header = json.dumps({f"layers.{i}.w": {"dtype": "BF16", "shape": [nbytes // 8192, 4096],
                                           "data_offsets": [i * nbytes, (i + 1) * nbytes]}
                         for i in range(num_tensors)}).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as out, values.open("rb") as data:
        out.write(struct.pack("<Q", len(header)) + header)
        shutil.copyfileobj(data, out)


def moves(tools: Path, python: Path, folder: Path, nbytes: int, rounds: int) -> list[Result]:
    """Moves from zstd on 4 ranks to zstd on other numbers of ranks."""
    values, model, source, moved = (folder / name for name in ("values", "model.safetensors", "zstd-4", "moved"))
    subprocess.run([python, PEERS, "make", "bfloat16", str(nbytes), values], check=True)
    write_rows(model, values, 16)
    values.unlink()
    reshard = [tools / "ckpt-reshard", "--quiet"]
    run_once([*reshard, model, source, "--world-size", "4", "--compress", "zstd"])

    def contender(name: str, command: list) -> Contender:
        return Contender(name, command, prepare=remove(moved))

    def move(name: str, world_size: int, compression: str = "zstd") -> Contender:
        return contender(name, [*reshard, source, moved, "--world-size", str(world_size), "--compress", compression])

    return compare(f"zstd on 4 ranks to zstd, {nbytes / 1e9:.2f} GB", [
        contender("cp -r and sync", ["sh", "-c", 'cp -r "$1" "$2" && find "$2" | xargs sync', "copy", source, moved]),
        move("ckpt-reshard to 8 ranks: chunks as they are", 8),
        move("ckpt-reshard to 3 ranks: other cuts, most chunks encoded again", 3),
        move("ckpt-reshard to 8 ranks with a level: all chunks encoded again", 8, "zstd:1"),
    ], rounds=rounds)


def bench(tools: Path, python: Path, work: Path, *, quick: bool) -> list[Result]:
    build("release", targets=("native_compression",))
    ours = tools / "native_compression"
    folder = work / "compression"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    nbytes, rounds = (1 << 25, 1) if quick else (1 << 29, 5)
    results = []
    parts = []
    for kind, itemsize in ITEMSIZE.items():
        values, h5_file, native, plain = (folder / name for name in ("values", "h5py.h5", "native", "plain"))
        subprocess.run([python, PEERS, "make", kind, str(nbytes), values], check=True)
        dtype = kind if kind == "bfloat16" else "float32"
        title = f"{kind}, {nbytes / 1e9:.2f} GB, one thread"
        results += interleaved(f"save {title}", {
            "h5py, shuffle and zstd 1": [python, PEERS, "save", values, itemsize, h5_file, 1],
            "tessera, zstd": [ours, "save", values, dtype, native, "zstd", 1],
            "tessera, plain": [ours, "save", values, dtype, plain, "none", 1],
        }, rounds)
        results += interleaved(f"load {title}", {
            "h5py, shuffle and zstd 1": [python, PEERS, "load", h5_file, 2],
            "tessera, zstd": [ours, "load", native, 2],
            "tessera, plain": [ours, "load", plain, 2],
        }, rounds)
        for name, path in (("plain", plain), ("zstd", native)):
            outcome = measured([ours, "load-part", path])
            stored_part = outcome["nbytes_read"] / outcome["nbytes"]
            parts.append(Result(f"load 1/8 of {kind}", f"tessera, {name} ({stored_part:.4f} bytes read per byte of the result)",
                                outcome["seconds"], 0))
    results += parts + moves(tools, python, folder, nbytes, rounds)
    shutil.rmtree(folder)
    return results
