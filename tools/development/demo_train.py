"""Trains the example on one rank and on two, and shows that the loss curves coincide."""

import csv
import shutil
from pathlib import Path

from build import build, runtime_definitions
from console import heading, say, table
from debian_packages import install_packages
from demo import show_and_run
from loss_curve import plot
from places import ROOT
from python_environment import python_environment

WORK = ROOT / "build" / "demo-train"
TOLERANCE = 1e-3  # two ranks add numbers in another order, and the difference grows over 100 steps


def read_losses(path: Path) -> list[float]:
    with path.open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def demo_train(*, torch_version: str | None) -> int:
    """Returns 0 if both runs have the same losses at every step."""
    install_packages({"build", "python"})
    python = python_environment(torch_version)
    build("dev", targets=("train_transformer",), definitions=runtime_definitions(python / "bin/python"))
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    text = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
    curves = {}
    for ranks in (1, 2):
        heading(f"A character-level transformer learns this project's documents on {ranks} rank(s)")
        file = WORK / f"losses-{ranks}.csv"
        launch = ["torchrun", "--no-python", "--standalone", "--nproc-per-node", "2"] if ranks > 1 else []
        show_and_run([*launch, "train_transformer", *text, "--steps", "100", "--losses", str(file)], python)
        curves[ranks] = read_losses(file)

    rows = [["step", "loss, 1 rank", "loss, 2 ranks", "difference"]]
    for step in (0, 19, 39, 59, 79, 99):
        one, two = curves[1][step], curves[2][step]
        rows.append([str(step + 1), f"{one:.5f}", f"{two:.5f}", f"{abs(one - two):.1e}"])
    say(table(rows, right={0, 1, 2, 3}))
    for ranks, losses in curves.items():
        line = plot(losses, low=min(losses), high=max(losses), width=50, height=1)[0]
        say(f"{ranks} rank(s)  {losses[0]:.2f} {line} {losses[-1]:.2f}")
    largest = max(abs(one - two) for one, two in zip(curves[1], curves[2], strict=True))
    verdict = "the curves coincide" if largest <= TOLERANCE else f"the curves differ by more than {TOLERANCE}"
    say(f"largest difference of 100 steps: {largest:.1e}; {verdict}")
    return 0 if largest <= TOLERANCE else 1
