"""Files that each rank saved: what is moved, FSDP2 loads at other numbers of ranks."""


import pytest
import torch
from ckpt_tools import FIXTURES, assert_same_state, expectation, flip_a_bit, listing, reshard, run, succeed
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

VALID = FIXTURES / "rank_files" / "valid"
ALL = sorted(path for path in VALID.iterdir() if path.is_dir())


def of_model(rows):
    return {row["name"].removeprefix("model."): row for row in rows if row["name"].startswith("model.")}


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_dcp_for_other_ranks_holds_the_same(path, tmp_path):
    """Shows F1, A4. Into DCP for five ranks; PyTorch reads all of it."""
    moved = reshard(path, tmp_path / "dcp", "--to", "dcp", "--world-size", "5")
    assert_same_state(listing(moved), expectation(path))
    dcp_to_torch_save(moved, tmp_path / "whole.pt")
    state = torch.load(tmp_path / "whole.pt", weights_only=True)
    found = {name: list(tensor.shape) for name, tensor in state["model"].items()}
    assert found == {name: row["shape"] for name, row in of_model(expectation(path)["tensors"]).items()}


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_the_model_alone_becomes_safetensors(path, tmp_path):
    """Shows F1. One file under the names of the module, loaded by safetensors and into the module."""
    moved = reshard(path, tmp_path / "model.safetensors", "--only", "model", "--rename", "model.=")
    loaded = load_file(moved)
    expected = of_model(expectation(path)["tensors"])
    assert {name: list(tensor.shape) for name, tensor in loaded.items()} == {
        name: row["shape"] for name, row in expected.items()}
    assert sum(tensor.nbytes for tensor in loaded.values()) == sum(row["nbytes"] for row in expected.values())


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_verify_finds_flipped_bits(path, tmp_path):
    """Shows F1, E4. The checksums of all archives are checked."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in path.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    succeed("ckpt-inspect", "verify", copy)
    last = sorted(copy.glob("model_*"))[-1]
    flip_a_bit(last, "/data/3")
    assert run("ckpt-inspect", "verify", copy).returncode == 1
