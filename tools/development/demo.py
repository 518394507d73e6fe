"""Converts a PyTorch checkpoint through every format and back, and compares it byte for byte."""

import dataclasses
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

from build import build
from console import Stop, bold, heading, run, say, shown, table
from debian_packages import install_packages
from places import ROOT, relative_to_root
from python_environment import python_environment

SCRIPTS = ROOT / "docs" / "examples" / "demo"
WORK = ROOT / "build" / "demo"


@dataclasses.dataclass
class Action:
    name: str
    nbytes: int
    seconds: float
    differences: list[str]
    compared: int


def bytes_under(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def show_command(command: list[str]) -> list[str]:
    """Prints a command with paths relative to the root, and returns it. Run the result in the root."""
    command = [relative_to_root(word) for word in command]
    say(bold(f"$ {shown(command)}"))
    return command


def environment_with(python: Path) -> dict[str, str]:
    """Returns an environment whose PATH has the programs of a Python environment and of this build."""
    return os.environ | {
        "PATH": os.pathsep.join([str(ROOT / "build/bin"), str(python / "bin"), os.environ.get("PATH", "")]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def show_and_run(command: list[str], python: Path) -> float:
    """Prints a command, runs it, and returns its seconds."""
    command = show_command(command)
    begin = time.monotonic()
    exit_code = run(command, cwd=ROOT, environment=environment_with(python))
    seconds = time.monotonic() - begin
    say()
    if exit_code != 0:
        raise Stop(f"{command[0]} ended with exit code {exit_code}")
    return seconds


def differences(checkpoint: Path, digests: dict) -> list[str]:
    """Returns one line for each field of a tensor, such as its shape, that differs in the trainer."""
    command = [ROOT / "build/bin/ckpt-inspect", "ls", "--json", "--sha256", checkpoint]
    listing = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    found = {tensor["name"]: tensor for tensor in listing["tensors"]}
    expected = digests["tensors"]
    lines = []
    for name in sorted(found.keys() | expected.keys()):
        for field in ("dtype", "shape", "nbytes", "sha256"):
            here = found.get(name, {}).get(field)
            there = expected.get(name, {}).get(field)
            if here != there:
                lines.append(f"{checkpoint.name}: {name}: {field}: expected {there}, found {here}")
    return lines


def demo(*, torch_version: str | None) -> int:
    """Runs the demonstration. Returns 0 if every tensor is equal at every step."""
    install_packages({"build", "python"})
    python = python_environment(torch_version)
    build("dev", targets=("ckpt-inspect", "ckpt-reshard"))
    if WORK.exists():
        say(f"removing {WORK.relative_to(ROOT)} of an earlier run")
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)

    digest_file = WORK / "digests.json"
    saved = WORK / "step3-dcp"
    native = WORK / "step3-native"
    safetensors = WORK / "step3-safetensors"
    returned = WORK / "step3-dcp-again"
    actions = []

    def finished(name: str, checkpoint: Path, seconds: float) -> None:
        digests = json.loads(digest_file.read_text())
        actions.append(Action(name, bytes_under(checkpoint), seconds, differences(checkpoint, digests),
                              len(digests["tensors"])))

    def torchrun(processes: int, script: str, checkpoint: Path) -> list[str]:
        return ["torchrun", "--standalone", "--nproc-per-node", str(processes), str(SCRIPTS / script),
                str(checkpoint), "--digests", str(digest_file)]

    heading("PyTorch trains three steps on 4 ranks (FSDP2, AdamW) and saves")
    seconds = show_and_run(torchrun(4, "train_fsdp2.py", saved), python)
    finished("PyTorch saves, 4 ranks", saved, seconds)

    heading("What is in the checkpoint, which rank holds what, and is it whole?")
    show_and_run(["ckpt-inspect", "tree", str(saved), "--depth", "3"], python)
    show_and_run(["ckpt-inspect", "layout", str(saved), "model.*"], python)
    show_and_run(["ckpt-inspect", "verify", str(saved)], python)

    heading("To 8 ranks in the native format, to safetensors, and back to PyTorch at 2 ranks")
    moves = [
        ("to native, 8 ranks", saved, native, ["--to", "native", "--world-size", "8", "--strategy", "dim0"]),
        ("to safetensors", native, safetensors, ["--to", "safetensors"]),
        ("to PyTorch DCP, 2 ranks", safetensors, returned, ["--to", "dcp", "--world-size", "2", "--strategy", "dim0"]),
    ]
    for name, source, destination, options in moves:
        seconds = show_and_run(["ckpt-reshard", str(source), str(destination), *options], python)
        finished(name, destination, seconds)

    heading("PyTorch loads the result into a new model and optimizer on 2 ranks and compares")
    prompt_begin = time.monotonic()
    try:
        show_and_run(torchrun(2, "load_fsdp2.py", returned), python)
        unequal = []
    except Stop as stop:
        unequal = [f"PyTorch, 2 ranks: {stop}"]
    actions.append(Action("PyTorch loads, 2 ranks", bytes_under(returned), time.monotonic() - prompt_begin, unequal,
                          len(json.loads(digest_file.read_text())["tensors"])))

    for action in actions:
        for line in action.differences:
            say(line)
    rows = [["action", "bytes", "seconds", "equal"]]
    rows += [[action.name, f"{action.nbytes:,}", f"{action.seconds:.2f}",
              "NO" if action.differences else f"yes, {action.compared} tensors"] for action in actions]
    say(table(rows, right={1, 2}))
    say(f"\nThe checkpoints are in {WORK.relative_to(ROOT)}; look around with build/bin/ckpt-inspect --help.")
    return 1 if any(action.differences for action in actions) else 0
