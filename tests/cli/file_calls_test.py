"""Counts how often ckpt-reshard looks at each file of its source, and how often it opens and lists one.

usage: file_calls_test.py --bin DIR --counter FILE    (FILE: the library of file_calls/file_calls.cpp)

On a network file system each of these calls is a request to the server, and each of many workers makes them.
"""

import argparse
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

RANKS, WORKERS = 64, 16
MEGATRON = Path(__file__).parents[2] / "fixtures" / "dcp" / "megatron" / "llama"  # each rank's file has objects


def write_model(path: Path) -> None:
    """Writes four float32 tensors of zeros with a row for each rank."""
    nbytes = RANKS * 16
    header = {f"w{i}": {"dtype": "F32", "shape": [RANKS, 4], "data_offsets": [i * nbytes, (i + 1) * nbytes]} for i in range(4)}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4 * nbytes))


class Tool:
    def __init__(self, path: Path, counter: Path, folder: Path):
        self.path, self.counter, self.folder = path, counter, folder

    def calls(self, *words: object) -> Counter:
        """Runs the tool. Returns how often it made each call, by the name of the call and the path."""
        log = self.folder / "calls.txt"
        log.unlink(missing_ok=True)
        environment = os.environ | {"LD_PRELOAD": str(self.counter), "TESSERA_FILE_CALLS": str(log)}
        subprocess.run([self.path, *map(str, words), "--quiet", "--threads", "1"], check=True, env=environment, cwd=self.folder)
        return Counter(tuple(line.split(" ", 1)) for line in log.read_text().splitlines())


def most_for_one_file(calls: Counter, folder: str) -> dict[str, Counter]:
    """Returns, for each data file of `folder`, how often each call named it. A stat counts whether it follows links or not."""
    files = {}
    for (call, path), number in calls.items():
        if f"{folder}/__" in path:
            files.setdefault(Path(path).name, Counter())[call.removeprefix("l")] += number
    return files


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", type=Path, required=True)
    parser.add_argument("--counter", type=Path, required=True)
    options = parser.parse_args()
    failures = []

    def require(what: str, found: int, limit: int) -> None:
        if found > limit:
            failures.append(f"{what}: expected at most {limit}, found {found}")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tool = Tool(options.bin.resolve() / "ckpt-reshard", options.counter.resolve(), folder)
        write_model(folder / "model.safetensors")
        for form in ("dcp", "native"):
            tool.calls("model.safetensors", form, "--to", form, "--world-size", RANKS)
        begun = {}
        for run, words in {"one process": ("whole",), "one of many workers": ("parted", "--part", f"3/{WORKERS}")}.items():
            calls = tool.calls("dcp", *words, "--to", "dcp", "--world-size", RANKS // 2)
            files = most_for_one_file(calls, "dcp")
            if len(files) != RANKS:
                failures.append(f"{run}: expected calls for {RANKS} files, found {len(files)}")
            opened = [each for each in files.values() if each["open"]]
            for file, each in files.items():
                require(f"{run}: stats of {file}", each["stat"], 2)
                require(f"{run}: opens of {file}", each["open"], 1)
                if not each["open"]:
                    require(f"{run}: resolved links of {file}", each["realpath"], 0)
            begun[run] = len(opened)
            require(f"{run}: lists of the source", calls["opendir", "dcp"], 3)
            lists = sum(number for (call, path), number in calls.items() if call == "opendir" and path.endswith(".shares"))
            require(f"{run}: lists of the workers' folder", lists, 6)
            never_begun = sum(number for (_, path), number in calls.items() if "/share-" in path and "/share-3" not in path)
            require(f"{run}: calls for the parts of other workers", never_begun, 0)
        if begun["one process"] != RANKS:
            failures.append(f"one process: expected {RANKS} opened files, found {begun['one process']}")
        require("one of many workers: opened files", begun["one of many workers"], RANKS // WORKERS + 2)
        shutil.copytree(MEGATRON, folder / "megatron")
        (folder / "recipe.json").write_text('{"schema": 1, "megatron": "from", "rest": "keep", "rules": []}')
        calls = tool.calls("megatron", "renamed", "--to", "dcp", "--recipe", "recipe.json")
        for file, each in most_for_one_file(calls, "megatron").items():
            require(f"recipe for Megatron's names: opens of {file}", each["open"], 1)
        require("recipe for Megatron's names: opens of the recipe", calls["open", "recipe.json"], 1)
        require("recipe for Megatron's names: opens of .metadata", calls["open", "megatron/.metadata"], 2)
    for failure in failures:
        print(failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
