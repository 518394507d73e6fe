"""Shows A4, E4. docs/examples/resume_anywhere is killed during a save, and resumes on other ranks: in C++, in Python,
and in C++ again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ckpt_tools import BIN
from on_ranks import run_program

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools" / "development"))
from demo_resume import kill_while_saving  # noqa: E402
from loss_curve import read_stretches  # noqa: E402

TORCHRUN = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
GO_ON = ROOT / "docs" / "examples" / "resume_anywhere" / "go_on_fsdp2.py"
TEXT = ROOT / "LICENSE"


def in_cpp(directory: Path, losses: Path, steps: int, *options) -> list[str]:
    return [*map(str, [BIN / "resume_anywhere", directory, TEXT, "--save-every", 6, "--losses", losses, "--steps", steps, *options])]


def in_python(checkpoint: Path, losses: Path, steps: int, to: Path) -> list[str]:
    return [*map(str, [sys.executable, GO_ON, checkpoint, TEXT, "--losses", losses, "--steps", steps, "--save", to])]


def losses_in(path: Path) -> list[float]:
    return [loss for stretch in read_stretches(path) for loss in stretch.losses]


# Shows A4, E4.
def test_losses_are_those_of_a_run_that_never_stopped(tmp_path):
    in_one_go, moved, checkpoints = tmp_path / "in-one-go.jsonl", tmp_path / "moved.jsonl", tmp_path / "checkpoints"
    run_program(in_cpp(tmp_path / "in-one-go", in_one_go, 54), 2)

    doomed = subprocess.Popen([*TORCHRUN, "2", "--no-python", *in_cpp(checkpoints, moved, 54)], env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    assert kill_while_saving(doomed, 1, checkpoints / "step-36")
    assert doomed.returncode != 0

    # At step 40 the learning rate halves. The resumed runs must keep the halved rate, and not halve it again.
    said = run_program(in_cpp(checkpoints, moved, 40, "--strategy", "HYBRID_SHARD", "--dcp", tmp_path / "dcp"), 4)[0]
    assert f"resumes from {checkpoints}/step-3" in said
    run_program(in_python(tmp_path / "dcp", moved, 47, checkpoints / "step-47"), 2)
    said = run_program(in_cpp(checkpoints, moved, 54, "--strategy", "NO_SHARD"), 1)[0]
    assert f"resumes from {checkpoints}/step-47, saved by 2 ranks" in said

    assert [stretch.by for stretch in read_stretches(moved)][1:] == [
        "Tessera, 4 ranks, HYBRID_SHARD", "PyTorch, 2 ranks, FSDP2", "Tessera, 1 rank, NO_SHARD"]
    expected = losses_in(in_one_go)
    assert len(expected) == 54 and expected[-1] < 0.7 * expected[0]
    assert losses_in(moved) == pytest.approx(expected, rel=1e-5)
