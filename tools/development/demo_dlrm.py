"""Trains a recommendation model on two ranks, makes a new plan for three, and resumes there."""

import shutil

from build import build, runtime_definitions
from console import heading
from debian_packages import install_packages
from demo import show_and_run
from demo_resume import compare_runs
from places import ROOT
from python_environment import python_environment

WORK = ROOT / "build" / "demo-dlrm"
MOVED_AT, STEPS = 300, 600
TOLERANCE = 1e-3  # relative: other ranks add numbers in another order, and Adagrad's first steps magnify the difference


def demo_dlrm(*, torch_version: str | None) -> int:
    """Returns 0 if the run with moved tables has the same losses as the run without."""
    install_packages({"build", "python"})
    python = python_environment(torch_version)
    build("dev", targets=("dlrm", "ckpt-inspect"), definitions=runtime_definitions(python / "bin/python"))
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    checkpoints, plan = WORK / "checkpoints", WORK / "plan.json"
    in_one_go, moved = WORK / "in-one-go.jsonl", WORK / "moved.jsonl"

    def trainer(ranks: int, *arguments: object) -> list[str]:
        return ["torchrun", "--standalone", "--no-python", "--nproc-per-node", str(ranks), "dlrm",
                *map(str, arguments)]

    heading("A recommendation model learns made-up clicks on 2 ranks, without interruption")
    show_and_run(trainer(2, WORK / "in-one-go", "--steps", STEPS, "--losses", in_one_go), python)

    heading(f"The same again, stopped after step {MOVED_AT}")
    show_and_run(trainer(2, checkpoints, "--steps", MOVED_AT, "--losses", moved), python)

    heading("Which rank is to hold which table, on 3 ranks with little memory?")
    show_and_run(["ckpt-inspect", "plan", str(checkpoints / f"step-{MOVED_AT}"), "--world-size", "3",
                  "--memory-per-rank", "4500KiB", "--output", str(plan)], python)

    heading("It resumes with this plan")
    show_and_run(trainer(3, checkpoints, "--steps", STEPS, "--plan", plan, "--losses", moved), python)
    show_and_run(["ckpt-inspect", "layout", str(checkpoints / f"step-{STEPS}"), "model.tables.*"], python)

    return compare_runs(in_one_go, moved, TOLERANCE)
