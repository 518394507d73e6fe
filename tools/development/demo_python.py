"""Kills a Python trainer while it saves, resumes it on more ranks as HSDP, and measures saves and loads beside PyTorch's DCP."""

import os
import shutil
import subprocess

from build import build, runtime_definitions
from console import Stop, heading
from debian_packages import install_packages
from demo import environment_with, show_and_run
from demo_resume import compare_runs, show_and_kill
from places import ROOT
from python_environment import python_environment

WORK = ROOT / "build" / "demo-python"
TRAINER = "docs/examples/python_trainer/train.py"
KILLED_AT, STEPS = 30, 60
TOLERANCE = 1e-3  # relative: other numbers of ranks add numbers in another order


def demo_python(*, torch_version: str | None) -> int:
    """Returns 0 if the run that was killed and resumed has the same losses as an uninterrupted run."""
    install_packages({"build", "python"})
    python = python_environment(torch_version)
    build("dev", targets=("tessera_python", "ckpt-inspect"), definitions=runtime_definitions(python / "bin/python"))
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    os.environ["PYTHONPATH"] = str(ROOT / "build" / "python")
    checkpoints, alone, moved = WORK / "checkpoints", WORK / "alone.jsonl", WORK / "moved.jsonl"

    def trainer(ranks: int, *arguments: object) -> list[str]:
        return ["torchrun", "--standalone", "--nproc-per-node", str(ranks), TRAINER, *map(str, arguments)]

    heading("FSDP2 on 1 rank learns the license")
    show_and_run(trainer(1, WORK / "alone", "LICENSE", "--steps", STEPS, "--losses", alone), python)

    heading(f"The same on 2 ranks; one is killed while step {KILLED_AT} is saved")
    show_and_kill(trainer(2, checkpoints, "LICENSE", "--steps", STEPS, "--losses", moved), 1,
                  checkpoints / f"step-{KILLED_AT}", python, WORK / "killed.log")

    heading("It resumes from the newest complete checkpoint, on 4 ranks as HSDP")
    show_and_run(trainer(4, checkpoints, "LICENSE", "--steps", STEPS, "--hybrid", "--losses", moved), python)
    show_and_run(["ckpt-inspect", "tree", str(checkpoints / f"step-{STEPS}"), "--depth", "2"], python)
    result = compare_runs(alone, moved, TOLERANCE)

    heading("Beside PyTorch's DCP, 2 ranks, 0.6 GB of state")
    measured = subprocess.run([python / "bin/python", "-B", "tests/bench/python_state.py", WORK / "bench", "--layers", "3",
                               "--rounds", "3"], cwd=ROOT, env=environment_with(python), stderr=subprocess.DEVNULL, check=False)
    if measured.returncode != 0:
        raise Stop("the comparison with DCP failed: python tests/bench/python_state.py shows why")
    return result
