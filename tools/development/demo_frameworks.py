"""Trains with DeepSpeed, then with PyTorch's FSDP2, then with Tessera's C++ trainer; compares with DeepSpeed alone."""

import os
import shutil

from build import build, runtime_definitions
from console import heading
from debian_packages import install_packages
from demo import show_and_run
from demo_resume import STEPS, TEXT, TOLERANCE, compare_runs
from peer_packages import peer_packages
from places import ROOT
from python_environment import python_environment

WORK = ROOT / "build" / "demo-frameworks"
EXAMPLES = "docs/examples/resume_anywhere"
TO_FSDP2, TO_TESSERA = 40, 80


def demo_frameworks(*, torch_version: str | None) -> int:
    """Returns 0 if the run that moved twice has the same losses as the run that stayed in DeepSpeed."""
    install_packages({"build", "python"})
    python = python_environment(torch_version)
    os.environ["PYTHONPATH"] = str(peer_packages("frameworks", torch_version))
    build("dev", targets=("resume_anywhere", "ckpt-inspect", "ckpt-reshard"),
          definitions=runtime_definitions(python / "bin/python"))
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    zero, for_fsdp2, checkpoints = WORK / "zero", WORK / f"step-{TO_FSDP2}-dcp", WORK / "checkpoints"
    in_one_go, moved = WORK / "in-one-go.jsonl", WORK / "moved.jsonl"

    def torchrun(ranks: int, *command: str) -> list[str]:
        return ["torchrun", "--standalone", "--nproc-per-node", str(ranks), *command]

    heading("DeepSpeed's ZeRO 3 learns the license on 2 ranks, without interruption")
    show_and_run(torchrun(2, f"{EXAMPLES}/begin_deepspeed.py", str(WORK / "in-one-go"), TEXT, "--losses", str(in_one_go)),
                 python)

    heading(f"The same again, stopped after step {TO_FSDP2}")
    show_and_run(torchrun(2, f"{EXAMPLES}/begin_deepspeed.py", str(zero), TEXT, "--losses", str(moved),
                          "--steps", str(TO_FSDP2), "--save-at", str(TO_FSDP2)), python)

    heading("Tessera moves what DeepSpeed saved to PyTorch's distributed checkpoint, for 4 ranks")
    show_and_run(["ckpt-reshard", str(zero), str(for_fsdp2), "--to", "dcp", "--world-size", "4"], python)

    heading("PyTorch resumes from this checkpoint: FSDP2 on 4 ranks")
    checkpoints.mkdir()
    show_and_run(torchrun(4, f"{EXAMPLES}/go_on_fsdp2.py", str(for_fsdp2), TEXT, "--losses", str(moved),
                          "--steps", str(TO_TESSERA), "--save", str(checkpoints / f"step-{TO_TESSERA}")), python)

    heading("Tessera's C++ trainer resumes from PyTorch's checkpoint, on 1 rank")
    show_and_run(["resume_anywhere", str(checkpoints), TEXT, "--losses", str(moved), "--steps", str(STEPS)], python)

    return compare_runs(in_one_go, moved, TOLERANCE)
