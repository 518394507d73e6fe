"""Shows D7, D9, D10, C9. docs/examples/dlrm trains on two ranks, gets another plan for three, and continues there with
the losses of a run that stayed on two."""

import json
import sys
from pathlib import Path

import pytest
from ckpt_tools import BIN, succeed
from on_ranks import run_program

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools" / "development"))
from loss_curve import read_stretches  # noqa: E402

MOVED_AT, STEPS = 100, 200


def train(ranks: int, *arguments) -> list[str]:
    return run_program([BIN / "dlrm", *arguments], ranks)


def losses_in(path: Path) -> list[float]:
    return [loss for stretch in read_stretches(path) for loss in stretch.losses]


def test_a_new_plan_changes_no_loss(tmp_path):
    in_one_go, moved, plan = tmp_path / "in-one-go.jsonl", tmp_path / "moved.jsonl", tmp_path / "plan.json"
    train(2, tmp_path / "in-one-go", "--steps", STEPS, "--losses", in_one_go)
    train(2, tmp_path / "moved", "--steps", MOVED_AT, "--losses", moved)
    succeed("ckpt-inspect", "plan", tmp_path / "moved" / f"step-{MOVED_AT}", "--world-size", 3,
            "--memory-per-rank", "4500KiB", "--output", plan)
    assert len({rule["sharding"] for rule in json.loads(plan.read_text())["tables"].values()}) > 1
    partial = tmp_path / "moved" / f"step-{STEPS}.partial"  # as if a save had died
    partial.mkdir()
    said = train(3, tmp_path / "moved", "--steps", STEPS, "--plan", plan, "--losses", moved)
    assert f"skipped {partial}: an unfinished save" in said[0]

    expected = losses_in(in_one_go)
    assert len(expected) == STEPS
    assert sum(expected[-20:]) < 0.97 * sum(expected[:20])
    assert losses_in(moved) == pytest.approx(expected, rel=1e-3)  # sums run in another order on other ranks
