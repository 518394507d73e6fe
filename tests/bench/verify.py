"""Checks of 2 GB in the page cache, against a plain read and against programs that print digests of files."""

import shutil
from pathlib import Path

from side_by_side import Contender, Result, compare, run_once


def bench(tools: Path, python: Path, work: Path, *, quick: bool) -> list[Result]:
    nbytes = 100_000_000 if quick else 2_000_000_000
    folder = work / "verify"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    dcp, native, compressed, torch_file = (folder / name for name in ("dcp", "native", "native-zstd", "model.pt"))
    reshard = [tools / "ckpt-reshard", "--quiet", dcp]
    to_native = ["--to", "native", "--strategy", "dim0", "--world-size", "4"]
    run_once([python, Path(__file__).with_name("make_checkpoint.py"), "large", "--bytes", str(nbytes),
              "--ranks", "4", "--dcp", dcp])
    run_once([*reshard, native, *to_native])
    run_once([*reshard, compressed, *to_native, "--compress", "zstd"])
    run_once([*reshard, torch_file, "--to", "torch"])

    def over_all_files(command: str, path: Path) -> list:
        return ["sh", "-c", f'find "$1" -type f | xargs {command} > /dev/null', "all", path]

    def verified(name: str, path: Path) -> Contender:
        return Contender(f"ckpt-inspect verify, {name}", [tools / "ckpt-inspect", "verify", path])

    results = compare(f"verify {nbytes / 1e9:g} GB", [
        Contender("cat", over_all_files("cat", native)),
        Contender("xxhsum (XXH3)", over_all_files("xxhsum -H3", native)),
        Contender("sha256sum", over_all_files("sha256sum", native)),
        verified("native", native),
        verified("native with zstd", compressed),
        verified("torch.save", torch_file),
    ], rounds=2 if quick else 7)
    shutil.rmtree(folder)
    return results
