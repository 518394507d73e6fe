"""Moves of damaged files of torch.save of whose storages a move needs only a part: rows without padding, columns, parts of replicas, slices of one
buffer. One CRC covers a whole storage, so the move has to read all of it. Fixtures: fixtures/."""

import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckpt_tools import FIXTURES, flip_a_bit, run, succeed

CASES = {  # fixture, damaged file, member, byte, options
    "gaps_in_a_flat_buffer": ("megatron/valid/dp2_distributed", "iter_0000003/mp_rank_00/distrib_optim.pt", "data/0", 1003, ["--only", "!args"]),
    "weights_compared_on_opening": ("megatron/valid/tp2_fp16", "iter_0000003/mp_rank_00/model_optim_rng.pt", "data/65", 203, ["--only", "!args"]),
    "weights_of_a_chunk": ("megatron/valid/pp2_vpp2_bf16", "iter_0000003/mp_rank_00_001/model_optim_rng.pt", "data/108", 203, ["--only", "!args"]),
    "padding_of_the_last_rank": ("rank_files/valid/fsdp2", "model_world_size_3_rank_2.pt", "data/2", 3, []),
    "torch_checkpointing": ("torch_checkpointing/valid/fsdp2", "model_2.pt", "data/2", 3, []),
    "parts_of_replicas": ("rank_files/valid/fsdp2_hybrid", "model_world_size_4_rank_0.pt", "data/2", 3, ["--world-size", "5"]),
    "columns": ("rank_files/valid/fsdp1_sharded_tensor", "model_world_size_2_rank_0.pt", "data/1", 3, ["--world-size", "2", "--strategy", "dim1"]),
    "padding_of_zero": ("deepspeed/valid/zero1", "global_step2/zero_pp_rank_1_mp_rank_00_optim_states.pt", "data/1", 3, []),
}


def assert_refused(source, destination, *options) -> None:
    moved = run("ckpt-reshard", source, destination, *options)
    assert moved.returncode == 3 and "CRC-32 of '" in moved.stderr, moved.stderr
    assert not destination.exists()


@pytest.mark.parametrize("name", CASES)
def test_a_damaged_storage_is_found_although_a_part_is_needed(tmp_path, name):
    """Shows F2."""
    fixture, file, member, byte, options = CASES[name]
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / fixture, source, copy_function=shutil.copyfile)
    succeed("ckpt-reshard", source, tmp_path / "whole", *options)
    flip_a_bit(source / file, f"/{member}", byte)
    assert_refused(source, tmp_path / "destination", *options)


@pytest.mark.parametrize("strategy", ["dim0", "dim1"])
@pytest.mark.parametrize("kind", ["torch", "transposed", "dcp", "universal"])
def test_a_damaged_storage_is_found_whatever_the_cut(tmp_path, kind, strategy):
    """Shows F2. Each file has more bytes than one read takes, and more files than a reader keeps open."""
    torch.manual_seed(7)
    big = torch.randn(1000, 1500)
    state = {"big": big.t() if kind == "transposed" else big} | {f"w{i}": torch.randn(40, 30) for i in range(30)}
    source = tmp_path / "source.pt"
    torch.save(state, source)
    if kind == "dcp":
        source = tmp_path / "source"
        dcp.save(state, checkpoint_id=source, no_dist=True)
    elif kind == "universal":
        torch.save({"model": state}, tmp_path / "model.pt")
        succeed("ckpt-reshard", tmp_path / "model.pt", tmp_path / "source", "--to", "deepspeed")
        source = tmp_path / "source"
    options = ["--to", "native", "--world-size", "3", "--strategy", strategy]
    succeed("ckpt-reshard", source, tmp_path / "whole", *options)
    for name, tensor in (("big", big), ("w3", state["w3"])):
        damaged = tmp_path / f"damaged-{name}"
        if source.is_dir():
            shutil.copytree(source, damaged)
        else:
            shutil.copyfile(source, damaged)
        content = tensor.contiguous().numpy().tobytes()[400:464]
        (file,) = [path for path in ([damaged] if damaged.is_file() else damaged.rglob("*")) if path.is_file() and content in path.read_bytes()]
        found = bytearray(file.read_bytes())
        found[found.index(content) + 5] ^= 1
        file.write_bytes(found)
        assert_refused(damaged, tmp_path / "destination", *options)


def test_what_a_worker_has_moved_is_not_kept_if_its_storage_is_damaged(tmp_path):
    """Shows F2. The storage has 2 % more bytes than the tensor."""
    source = tmp_path / "source.pt"
    torch.save({"a": torch.randn(1020)[:1000], "b": torch.randn(1000)}, source)
    flip_a_bit(source, "/data/0", 7)
    destination = tmp_path / "destination"
    for _ in range(2):
        moved = [run("ckpt-reshard", source, destination, "--to", "native", "--part", f"{part}/2", "--resume") for part in range(2)]
        assert sorted(each.returncode for each in moved) == [0, 3], [each.stderr for each in moved]
        assert "CRC-32 of '" in "".join(each.stderr for each in moved)
        assert not destination.exists()
