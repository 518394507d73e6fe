"""Runs the tools while another program replaces their source, and while the disk fails after the new checkpoint is in place.

usage: other_programs_test.py --bin DIR --calls FILE    (FILE: the library of file_calls/file_calls.cpp)
"""

import argparse
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

FILES = {f"model-0000{i}-of-00002.safetensors": f"w{i}" for i in (1, 2)}
BAD_INPUT = 3


def write_model(path: Path, name: str, number: float, time: int) -> None:
    """Writes a tensor of four numbers, and sets the time of the file's last change."""
    header = json.dumps({name: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<4f", *[number] * 4))
    os.utime(path, (time, time))


def write_sharded(folder: Path, number: float, time: int) -> None:
    folder.mkdir()
    for file, name in FILES.items():
        write_model(folder / file, name, number, time)
    index = {"metadata": {"total_size": 32}, "weight_map": {name: file for file, name in FILES.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    os.utime(folder / "model.safetensors.index.json", (time, time))


class Runs:
    def __init__(self, tools: Path, library: Path, folder: Path):
        self.tools, self.library, self.folder = tools, library, folder
        self.failures: list[str] = []

    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess:
        environment = os.environ | {"LD_PRELOAD": str(self.library)} | variables
        command = [self.tools / words[0], *words[1:]]
        return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=self.folder)

    def require(self, what: str, is_true: bool, result: subprocess.CompletedProcess) -> None:
        if not is_true:
            self.failures.append(f"{what}: exit {result.returncode}, {result.stdout}{result.stderr}")

    def replaced_source(self, at: str, times: tuple[int, int]) -> None:
        """Exchanges the whole folder of the source by another one, just before the file `at` is opened."""
        for folder, number, time in zip(("source", "other"), (1.0, 2.0), times, strict=True):
            shutil.rmtree(self.folder / folder, ignore_errors=True)
            write_sharded(self.folder / folder, number, time)
        shutil.copytree(self.folder / "source", self.folder / "same", dirs_exist_ok=True)
        swap = {"TESSERA_SWAP_AT": at, "TESSERA_SWAP": "source:other"}
        commands = {"hash": (), "verify": (), "stats": (), "ls": ("--sha256",), "tree": (), "layout": (), "show": ("w*",),
                    "diff": ("same",), "report": ("-o", "page.html")}
        for verb, more in commands.items():
            result = self.run("ckpt-inspect", verb, "source", *more, **swap)
            says = "as it was before it was opened" in result.stderr
            self.require(f"{verb}, swapped at {at}, times {times}", result.returncode == BAD_INPUT and says, result)
            if verb in ("hash", "verify", "stats", "ls", "diff"):
                self.require(f"{verb}, swapped at {at}: no result", result.stdout == "", result)
        self.require(f"report, swapped at {at}: no page", not (self.folder / "page.html").exists(), result)
        result = self.run("ckpt-reshard", "source", "moved.pt", **swap)
        is_refused = result.returncode == BAD_INPUT and not (self.folder / "moved.pt").exists()
        self.require(f"move, swapped at {at}, times {times}", is_refused, result)

    def failing_disk(self) -> None:
        """The new checkpoint is in place, but looking for files that the old one left fails."""
        for number in (1.0, 2.0):
            write_model(self.folder / "model.safetensors", "w", number, 10)
            result = self.run("ckpt-reshard", "model.safetensors", "new.safetensors", "--overwrite", "--quiet",
                              TESSERA_FAIL_AFTER="new.safetensors" if number == 2.0 else "/none")
        says = "warning: could not look for a rest of the old checkpoint: new.safetensors" in result.stderr
        self.require("a complete move", result.returncode == 0 and says, result)
        digests = [self.run("ckpt-inspect", "hash", name).stdout for name in ("model.safetensors", "new.safetensors")]
        self.require("the new checkpoint", digests[0] == digests[1], result)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", type=Path, required=True)
    parser.add_argument("--calls", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        runs = Runs(options.bin.resolve(), options.calls.resolve(), Path(name))
        for times in ((10, 20), (10, 10)):
            for file in FILES:
                runs.replaced_source(file, times)
        runs.failing_disk()
    for failure in runs.failures:
        print(failure)
    return 1 if runs.failures else 0


if __name__ == "__main__":
    sys.exit(main())
