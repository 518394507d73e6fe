"""Moves of 2 GB, against `cp -r` with sync, and against the same in Python."""

import shutil
from pathlib import Path

from side_by_side import Contender, Result, compare, remove, run_once

PEERS = Path(__file__).with_name("peers.py")


def bench(tools: Path, python: Path, work: Path, *, quick: bool) -> list[Result]:
    nbytes = 100_000_000 if quick else 2_000_000_000
    rounds = 2 if quick else 7
    folder = work / "reshard"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    dcp, native, compressed, moved = (folder / name for name in ("dcp-4", "native-4", "native-4-zstd", "moved"))
    reshard = [tools / "ckpt-reshard", "--quiet"]
    to_native = ["--to", "native", "--strategy", "dim0"]
    run_once([python, PEERS.with_name("make_checkpoint.py"), "large", "--bytes", str(nbytes), "--ranks", "4",
              "--dcp", dcp])
    run_once([*reshard, dcp, native, *to_native, "--world-size", "4", "--compress", "none"])
    run_once([*reshard, dcp, compressed, *to_native, "--world-size", "4", "--compress", "zstd"])

    def copy(source: Path) -> list[str]:
        return ["sh", "-c", 'cp -r "$1" "$2" && find "$2" | xargs sync', "copy", source, moved]

    def contender(name: str, command: list[str]) -> Contender:
        return Contender(name, command, prepare=remove(moved))

    title = f"{nbytes / 1e9:g} GB"
    results = compare(f"native 4 to 8 ranks, {title}", [
        contender("cp -r and sync", copy(native)),
        contender("ckpt-reshard, plain", [*reshard, native, moved, *to_native, "--world-size", "8",
                                          "--compress", "none"]),
        contender("ckpt-reshard, plain to zstd", [*reshard, native, moved, *to_native, "--world-size", "8",
                                                  "--compress", "zstd"]),
    ], rounds=rounds)
    results += compare(f"native 4 to 8 ranks, zstd, {title}", [
        contender("cp -r and sync", copy(compressed)),
        contender("ckpt-reshard, zstd", [*reshard, compressed, moved, *to_native, "--world-size", "8",
                                         "--compress", "zstd"]),
    ], rounds=rounds)
    results += compare(f"from DCP, {title}", [
        contender("Python: DCP to safetensors", [python, PEERS, "dcp-to-safetensors", dcp, moved]),
        contender("ckpt-reshard: DCP to safetensors", [*reshard, dcp, moved, "--to", "safetensors"]),
        contender("ckpt-reshard: DCP to native, 8 ranks", [*reshard, dcp, moved, *to_native, "--world-size", "8"]),
        contender("cp -r and sync", copy(dcp)),
    ], rounds=min(rounds, 5))
    safetensors, torch_file = folder / "safetensors", folder / "model.pt"
    run_once([*reshard, dcp, safetensors, "--to", "safetensors"])
    results += compare(f"from safetensors, {title}", [
        contender("cp -r and sync", copy(safetensors)),
        contender("ckpt-reshard: safetensors to native, 8 ranks",
                  [*reshard, safetensors, moved, *to_native, "--world-size", "8"]),
    ], rounds=rounds)
    shutil.rmtree(safetensors)
    run_once([*reshard, dcp, torch_file, "--to", "torch"])
    results += compare(f"DCP to torch.save, {title}", [
        contender("PyTorch dcp_to_torch_save", [python, PEERS, "dcp-to-torch", dcp, moved]),
        contender("ckpt-reshard", [*reshard, dcp, moved, "--to", "torch"]),
        contender("cp -r and sync", copy(dcp)),
    ], rounds=min(rounds, 5))
    results += compare(f"torch.save to DCP, {title}", [
        contender("PyTorch torch_save_to_dcp", [python, PEERS, "torch-to-dcp", torch_file, moved]),
        contender("ckpt-reshard, 4 ranks", [*reshard, torch_file, moved, "--to", "dcp", "--world-size", "4",
                                            "--strategy", "dim0"]),
        contender("cp -r and sync", copy(torch_file)),
    ], rounds=min(rounds, 5))
    shutil.rmtree(folder)
    return results
