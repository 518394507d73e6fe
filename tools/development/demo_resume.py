"""Kills a training run while it saves, resumes it in C++ and in Python, and compares it with an uninterrupted run."""

import os
import shutil
import signal
import subprocess
import time
from itertools import groupby
from pathlib import Path

from build import build, runtime_definitions
from console import Stop, heading, run, say, styled, table
from debian_packages import install_packages
from demo import environment_with, show_and_run, show_command
from loss_curve import Stretch, largest_difference, plot, read_stretches, sampled
from places import ROOT
from python_environment import python_environment

WORK = ROOT / "build" / "demo-resume"
TEXT = "LICENSE"
KILLED_AT, MOVED_AT, STEPS = 60, 80, 120
TOLERANCE = 1e-4  # relative: other numbers of ranks add numbers in another order, and the difference grows over 100 steps
PLOT_HEIGHT = 6
COLOURS = (36, 33, 35)


def rank_process(launcher: int, rank: int) -> int | None:
    """Returns the process of a rank under torchrun; None before it has started."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            variables = (stat.parent / "environ").read_bytes().split(b"\0")
        except OSError:  # the process has ended, or belongs to another user
            continue
        if parent == launcher and f"RANK={rank}".encode() in variables:
            return int(stat.parent.name)
    return None


def kill_while_saving(launcher: subprocess.Popen, rank: int, checkpoint: Path) -> bool:
    """Kills a rank as soon as it writes `checkpoint`, and waits until torchrun has ended the others.

    Returns False if the job ended before that.
    """
    partial = checkpoint.with_name(checkpoint.name + ".partial")
    doomed = None
    while launcher.poll() is None:
        doomed = doomed or rank_process(launcher.pid, rank)
        if doomed and partial.exists():
            os.kill(doomed, signal.SIGKILL)
            launcher.wait()
            return True
        time.sleep(0.001 if doomed else 0.1)
    return False


def show_and_kill(command: list[str], rank: int, checkpoint: Path, python: Path, log: Path) -> None:
    """Prints a command, runs it, and kills one of its ranks while it saves. torchrun's messages go to `log`."""
    command = show_command(command)
    with log.open("w") as errors:
        launcher = subprocess.Popen(command, cwd=ROOT, env=environment_with(python), stdin=subprocess.DEVNULL,
                                    stderr=errors)
        try:
            if not kill_while_saving(launcher, rank, checkpoint):
                raise Stop(f"{command[0]} ended before {checkpoint.name} was saved (see {log})")
        finally:
            launcher.terminate()
            launcher.wait()
    say(f"rank {rank} was killed (SIGKILL) while {checkpoint.name} was being saved, and torchrun ended the other\n")


def in_colours(line: str, owners: list[int]) -> str:
    """Colours each column of a line by the part of the run that it shows."""
    columns = [list(group) for _, group in groupby(range(len(line)), lambda column: owners[column])]
    return "".join(styled(line[group[0] : group[-1] + 1], COLOURS[owners[group[0]] % len(COLOURS)]) for group in columns)


def side_by_side(expected: list[float], stretches: list[Stretch], columns: int) -> str:
    """Returns both curves as text, side by side on one scale. The last line says which run trained each step."""
    losses = [loss for stretch in stretches for loss in stretch.losses]
    owner_of = [number for number, stretch in enumerate(stretches) for _ in stretch.losses]
    low, high = min(losses + expected), max(losses + expected)
    scale = [f"{high:.2f}", *[""] * (PLOT_HEIGHT - 2), f"{low:.2f}"]
    margin = max(map(len, scale)) + 1
    width = min((columns - margin - 3) // 2, len(losses))
    owners = [owner_of[place] for place in sampled(len(losses), width)]
    left = plot(expected, low=low, high=high, width=width, height=PLOT_HEIGHT)
    right = plot(losses, low=low, high=high, width=width, height=PLOT_HEIGHT)
    lines = [f"{'loss':{margin}}{'uninterrupted':{width}}   stopped, moved, resumed"]
    lines += [f"{mark:{margin}}{one}   {in_colours(other, owners)}".rstrip()
              for mark, one, other in zip(scale, left, right, strict=True)]
    runs = "".join(str(owner + 1) for owner in owners)
    lines.append(f"{'run':{margin}}{'0' * width}   {in_colours(runs, owners)}")
    return "\n".join(lines)


def comparison(expected: Stretch, stretches: list[Stretch]) -> str:
    """Returns a table with a row for each run: its steps, its last loss, and the difference from the first run."""
    rows = [["run", "trained by", "steps", "loss", "uninterrupted", "difference"],
            ["0", expected.by, f"{expected.first}-{expected.last}", "", f"{expected.losses[-1]:.6f}", ""]]
    for number, stretch in enumerate(stretches, 1):
        same_steps = expected.losses[stretch.first - 1 : stretch.last]
        rows.append([str(number), stretch.by, f"{stretch.first}-{stretch.last}", f"{stretch.losses[-1]:.6f}",
                     f"{same_steps[-1]:.6f}", f"{largest_difference(stretch.losses, same_steps):.1e}"])
    return table(rows, right={3, 4, 5})


def compare_runs(in_one_go: Path, moved: Path, tolerance: float) -> int:
    """Prints the losses of a run and of the same run in parts. Returns 0 if they differ by no more than `tolerance`."""
    [expected], stretches = read_stretches(in_one_go), read_stretches(moved)
    say(side_by_side(expected.losses, stretches, shutil.get_terminal_size().columns) + "\n")
    say(comparison(expected, stretches) + "\n")
    largest = largest_difference([loss for stretch in stretches for loss in stretch.losses], expected.losses)
    verdict = "the curves coincide" if largest <= tolerance else f"the curves differ by more than {tolerance}"
    say(f"largest relative difference of {len(expected.losses)} steps: {largest:.1e}; {verdict}")
    return 0 if largest <= tolerance else 1


def demo_resume(*, torch_version: str | None) -> int:
    """Returns 0 if the losses of the resumed run are within TOLERANCE of the uninterrupted run's, else 1."""
    install_packages({"build", "python"})
    python = python_environment(torch_version)
    build("dev", targets=("resume_anywhere", "ckpt-inspect"), definitions=runtime_definitions(python / "bin/python"))
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    checkpoints, in_one_go, moved = WORK / "checkpoints", WORK / "in-one-go.jsonl", WORK / "moved.jsonl"
    for_python = WORK / f"step-{MOVED_AT}-dcp"

    def trainer(ranks: int, directory: Path, losses: Path, *options: str) -> list[str]:
        return ["torchrun", "--standalone", "--no-python", "--nproc-per-node", str(ranks), "resume_anywhere",
                str(directory), TEXT, "--losses", str(losses), *options]

    heading("A C++ trainer learns the license on 2 ranks, without interruption")
    show_and_run(trainer(2, WORK / "in-one-go", in_one_go), python)

    heading("The same again, but a rank is killed while the others save")
    show_and_kill(trainer(2, checkpoints, moved), 1, checkpoints / f"step-{KILLED_AT}", python, WORK / "killed.log")
    run(show_command(["ls", str(checkpoints)]), cwd=ROOT)
    say()

    heading("It resumes from the newest complete checkpoint, on 4 ranks: 2 replicas, each sharded over 2")
    show_and_run(trainer(4, checkpoints, moved, "--strategy", "HYBRID_SHARD", "--steps", str(MOVED_AT),
                         "--dcp", str(for_python)), python)

    heading(f"PyTorch resumes from step {MOVED_AT}: FSDP2 on 2 ranks")
    show_and_run(["torchrun", "--standalone", "--nproc-per-node", "2",
                  "docs/examples/resume_anywhere/go_on_fsdp2.py", str(for_python), TEXT, "--losses", str(moved),
                  "--steps", str(STEPS)], python)

    return compare_runs(in_one_go, moved, TOLERANCE)
