"""Trains a mixture of experts on one rank, and again on two and then four ranks that use different experts."""

import shutil

from build import build, runtime_definitions
from console import heading
from debian_packages import install_packages
from demo import show_and_run
from demo_resume import compare_runs
from places import ROOT
from python_environment import python_environment

WORK = ROOT / "build" / "demo-moe"
MOVED_AT, STEPS = 30, 60
TOLERANCE = 1e-3  # relative: other numbers of ranks add numbers in another order


def demo_moe(*, torch_version: str | None) -> int:
    """Returns 0 if the run on two and four ranks has the same losses as the run on one rank."""
    install_packages({"build", "python"})
    python = python_environment(torch_version)
    build("dev", targets=("mixture_of_experts", "ckpt-inspect"), definitions=runtime_definitions(python / "bin/python"))
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    checkpoints, alone, moved = WORK / "checkpoints", WORK / "alone.jsonl", WORK / "moved.jsonl"

    def trainer(ranks: int, *arguments: object) -> list[str]:
        launch = ["torchrun", "--standalone", "--no-python", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        return [*launch, "mixture_of_experts", *map(str, arguments)]

    heading("A mixture of experts learns the license on 1 rank")
    show_and_run(trainer(1, WORK / "alone", "LICENSE", "--steps", STEPS, "--losses", alone), python)

    heading(f"The same on 2 ranks, stopped after step {MOVED_AT}")
    show_and_run(trainer(2, checkpoints, "LICENSE", "--steps", MOVED_AT, "--losses", moved), python)

    heading("It resumes from this checkpoint on 4 ranks")
    show_and_run(trainer(4, checkpoints, "LICENSE", "--steps", STEPS, "--losses", moved), python)
    show_and_run(["ckpt-inspect", "tree", str(checkpoints / f"step-{STEPS}"), "--depth", "2"], python)

    return compare_runs(alone, moved, TOLERANCE)
