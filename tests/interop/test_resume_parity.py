"""Shows A4, C8. PyTorch's FSDP1 and FSDP2 resume from Tessera's checkpoints, and Tessera from theirs, at other world sizes."""

import json
import sys
from pathlib import Path

import pytest
import resume_peer
import torch
from ckpt_tools import BIN, reshard, run
from on_ranks import run_function, run_program
from safetensors.torch import save_file

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "bench"))
from peers_train_step import Transformer  # noqa: E402

MIDDLE, STEPS, ROWS, SEQUENCE, VOCABULARY, WIDTH = 4, 14, 12, 6, 19, 10


class Trainers:
    """Runs trainers of both languages on the same data; returns the losses of all ranks together."""

    def __init__(self, work: Path):
        self.work = work
        torch.manual_seed(0)
        values = dict(Transformer(VOCABULARY, WIDTH, 3, 2, SEQUENCE).state_dict())
        values["ids"] = torch.randint(VOCABULARY, (STEPS, ROWS, SEQUENCE + 1))
        save_file(values, work / "input.safetensors")

    def python(self, way, ranks, first, last, begin="-", end="-"):
        run_function(resume_peer.train, ranks, str(self.work / "input.safetensors"), str(begin), str(end), way, first, last,
                     str(self.work / "losses-"))
        return self._losses()

    def ours(self, way, ranks, first, last, begin="-", end="-", form="dcp"):
        run_program([BIN / "resume_parity", self.work / "input.safetensors", begin, end, form, way, first, last,
                     self.work / "losses-"], ranks)
        return self._losses()

    def _losses(self) -> list[float]:
        return json.loads((self.work / "losses-0.json").read_text())


@pytest.fixture(scope="module")
def trainers(tmp_path_factory) -> Trainers:
    return Trainers(tmp_path_factory.mktemp("resume"))


def expect_same_checkpoint(a: Path, b: Path) -> None:
    """Every tensor and every value is equal bit for bit."""
    process = run("ckpt-inspect", "diff", a, b)
    assert process.returncode == 0, process.stdout


@pytest.mark.parametrize("way", ["fsdp1", "fsdp2"])
# Shows C8.
def test_tessera_goes_on_from_pytorch(trainers, tmp_path, way):
    trainers.python(way, 2, 0, MIDDLE, end=tmp_path / "theirs")
    expected = trainers.python(way, 2, MIDDLE, STEPS, begin=tmp_path / "theirs")
    losses = trainers.ours("FULL_SHARD", 3, MIDDLE, STEPS, begin=tmp_path / "theirs")
    assert losses == pytest.approx(expected, rel=1e-5)
    trainers.ours("HYBRID_SHARD", 4, MIDDLE, MIDDLE, begin=tmp_path / "theirs", end=tmp_path / "ours")
    expect_same_checkpoint(tmp_path / "theirs", tmp_path / "ours")


@pytest.fixture(scope="module")
def ours(trainers, tmp_path_factory):
    """Returns a checkpoint of Tessera's, and the losses of the steps that follow."""
    path = tmp_path_factory.mktemp("ours") / "ours"
    trainers.ours("HYBRID_SHARD", 4, 0, MIDDLE, end=path)
    return path, trainers.ours("FULL_SHARD", 2, MIDDLE, STEPS, begin=path)


@pytest.mark.parametrize("way", ["fsdp1", "fsdp2"])
# Shows C8.
def test_pytorch_goes_on_from_tessera(trainers, ours, tmp_path, way):
    checkpoint, expected = ours
    losses = trainers.python(way, 3, MIDDLE, STEPS, begin=checkpoint)
    assert losses == pytest.approx(expected, rel=1e-5)
    trainers.python(way, 2, MIDDLE, MIDDLE, begin=checkpoint, end=tmp_path / "theirs")
    expect_same_checkpoint(checkpoint, tmp_path / "theirs")


# Shows C7.
def test_flattened_optimizer_state_goes_both_ways(trainers, tmp_path):
    way = "fsdp2-flattened"
    trainers.ours("FULL_SHARD", 3, 0, MIDDLE, end=tmp_path / "ours", form="flattened")
    expected = trainers.ours("FULL_SHARD", 2, MIDDLE, STEPS, begin=tmp_path / "ours")
    assert trainers.python(way, 2, MIDDLE, STEPS, begin=tmp_path / "ours") == pytest.approx(expected, rel=1e-5)
    trainers.python(way, 2, MIDDLE, MIDDLE, begin=tmp_path / "ours", end=tmp_path / "theirs")
    expect_same_checkpoint(tmp_path / "ours", tmp_path / "theirs")
    assert trainers.ours("replicate", 1, MIDDLE, STEPS, begin=tmp_path / "theirs") == pytest.approx(expected, rel=1e-5)


# Shows A4.
def test_pytorch_goes_on_from_a_native_checkpoint_that_was_converted(trainers, tmp_path):
    trainers.ours("replicate", 2, 0, MIDDLE, end=tmp_path / "native", form="native")
    expected = trainers.ours("FULL_SHARD", 2, MIDDLE, STEPS, begin=tmp_path / "native")
    reshard(tmp_path / "native", tmp_path / "dcp", "--to", "dcp", "--world-size", "3")
    assert trainers.python("fsdp2", 2, MIDDLE, STEPS, begin=tmp_path / "dcp") == pytest.approx(expected, rel=1e-5)
