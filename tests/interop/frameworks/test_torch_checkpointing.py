"""Checkpoints of the live package torch_checkpointing, moved to FSDP2 on other ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
from ckpt_tools import MAKE, assert_same_state, expectation, listing, reshard  # noqa: E402
from on_ranks import run_program  # noqa: E402

PEER = [sys.executable, "-B", HERE / "checkpointing_ranks.py"]


def losses_of(said):
    losses = [json.loads(out.strip().splitlines()[-1]) for out in said]
    assert all(each == losses[0] for each in losses)
    return losses[0]


@pytest.mark.parametrize("form, ranks", [("names", 2), ("names", 3), ("numbers", 2)])
def test_fsdp2_goes_on_at_another_number_of_ranks(tmp_path, form, ranks):
    """Shows F5. Moves a folder with the package's metadata, and one without it."""
    expected = losses_of(run_program([*PEER, "save", tmp_path, form], 4))
    assert (tmp_path / "1" / "metadata.pkl").exists() and not (tmp_path / "2" / "metadata.pkl").exists()
    options = ["--to", "dcp", "--world-size", ranks, "--rename", "optimizer.=optim."]
    if form == "numbers":
        options += ["--optimizer-params", "auto"]
    for step in ("1", "2"):
        moved = reshard(tmp_path / step, tmp_path / f"dcp-{step}", *options)
        assert losses_of(run_program([*PEER, "load", moved], ranks)) == pytest.approx(expected, rel=1e-5)


def test_what_the_package_writes_is_what_the_trainer_held(tmp_path):
    """Shows F5. Like the test of the fixtures, but with folders that the installed package writes now."""
    subprocess.run([sys.executable, "-B", MAKE / "write_torch_checkpointing.py"], check=True, timeout=600,
                   env=os.environ | {"TESSERA_FIXTURES": str(tmp_path)})
    paths = [path for path in (tmp_path / "torch_checkpointing" / "valid").iterdir() if path.is_dir()]
    assert len(paths) == 5
    for path in paths:
        assert_same_state(listing(path), expectation(path))
