"""Shows B10. Ranks choose experts by their own data. The losses are those of one rank, also after a save and a resume
on another number of ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TRAINER = Path(os.environ["TESSERA_BIN"]) / "mixture_of_experts"
TORCHRUN = Path(sys.executable).parent / "torchrun"
TIMEOUT = 240  # seconds


def train(ranks: int, directory: Path, steps: int) -> str:
    """Returns what rank 0 printed. Losses go to `directory`.jsonl."""
    launch = [str(TORCHRUN), "--no-python", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [*launch, str(TRAINER), str(directory), str(ROOT / "LICENSE"), "--steps", str(steps),
               "--losses", f"{directory}.jsonl"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


def losses(directory: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in Path(f"{directory}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> list[float]:
    directory = tmp_path_factory.mktemp("alone") / "run"
    train(1, directory, 20)
    values = losses(directory)
    assert len(values) == 20 and values[-1] < values[0]
    return values


# Shows B10.
def test_two_ranks_then_four(expected, tmp_path):
    said = train(2, tmp_path / "run", 10)
    [line] = [line for line in said.splitlines() if "step 10" in line]
    assert "ranks used" in line
    partial = tmp_path / "run" / "step-20.partial"  # as if a save had died
    partial.mkdir()
    said = train(4, tmp_path / "run", 20)
    assert f"skipped {partial}: an unfinished save" in said
    assert "begins after step 10" in said
    assert not partial.exists(), "the next save to step-20 has taken it over"
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-3)


# Shows B10.
def test_four_ranks_then_one(expected, tmp_path):
    said = train(4, tmp_path / "run", 10)
    used = [int(word) for word in said.split("ranks used")[1].splitlines()[0].split()]
    assert len(used) == 4 and min(used) < 16, "every rank used every expert: this test shows nothing"
    train(1, tmp_path / "run", 20)
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-3)
