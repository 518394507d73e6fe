"""Tensors that are cut along a mesh: as PyTorch cuts them, and as another checkpoint has them."""

import json
import random

import pytest
import torch
from ckpt_tools import FIXTURES, reshard, run, succeed
from safetensors.torch import save_file
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

FSDP2_TP = FIXTURES / "dcp" / "valid" / "fsdp2_tp"  # PyTorch saved it on a mesh of 2 x 2
RULES = [{"names": "*.up.*", "placements": ["Shard(0)", "Shard(0)"]},
         {"names": "*.down.weight", "placements": ["Shard(0)", "Shard(1)"]},
         {"names": "*", "placements": ["Shard(0)", "Replicate"]}]


def write_mesh(path, mesh, rules):
    path.write_text(json.dumps({"schema": 1, "mesh": mesh, "rules": rules}))
    return path


def pieces(path):
    """Returns {name: {(rank, offsets, sizes)}}."""
    listing = json.loads(succeed("ckpt-inspect", "layout", path, "--json"))
    return {row["name"]: {(piece["rank"], tuple(piece["region"]["offsets"]), tuple(piece["region"]["sizes"]))
                          for piece in row["pieces"]} for row in listing["tensors"]}


def test_fsdp2_over_tensor_parallelism_is_cut_as_pytorch_cuts_it(tmp_path):
    """Shows E14. All tensors that all four ranks share have the same boxes on the same ranks."""
    moved = reshard(FSDP2_TP, tmp_path / "dcp", "--to", "dcp", "--mesh", write_mesh(tmp_path / "mesh.json", [2, 2], RULES))
    before, after = pieces(FSDP2_TP), pieces(moved)
    cut = [name for name in before if len(before[name]) == 4]
    assert len(cut) > 6
    for name in cut:
        assert after[name] == before[name]
    for name in set(before) - set(cut):  # either replica may have written it
        assert {box[1:] for box in after[name]} == {box[1:] for box in before[name]} or name.endswith(("positions", "temperature"))


def test_like_gives_the_pieces_of_another_checkpoint(tmp_path):
    """Shows E14. The tensors go through one file, which stores no pieces, and back."""
    whole = reshard(FSDP2_TP, tmp_path / "whole.pt")
    back = reshard(whole, tmp_path / "dcp", "--to", "dcp", "--like", FSDP2_TP)
    before, after = pieces(FSDP2_TP), pieces(back)
    assert {name: {box[1:] for box in boxes} for name, boxes in after.items()} == {
        name: {box[1:] for box in boxes} for name, boxes in before.items()}
    succeed("ckpt-inspect", "diff", FSDP2_TP, back)


def box_of_rank(shape, mesh, placements, rank):
    """Returns offsets and sizes of PyTorch's shard; None for an empty one."""
    index, rest = [], rank
    for size in reversed(mesh):
        index.insert(0, rest % size)
        rest //= size
    sizes, offsets = _compute_local_shape_and_global_offset(shape, mesh, index, placements)
    return None if 0 in sizes else (tuple(offsets), tuple(sizes))


@pytest.mark.parametrize("seed", range(20))
def test_random_placements_give_the_boxes_of_dtensor(seed, tmp_path):
    """Shows E14. Random meshes have one to three axes and uneven sizes. One axis at most cuts each dimension."""
    draw = random.Random(seed)
    mesh = [draw.randint(1, 4) for _ in range(draw.randint(1, 3))]
    shape = [draw.randint(1, 9) for _ in range(3)]
    dimensions = draw.sample([0, 1, 2, None, None], len(mesh))
    placements = [Replicate() if dimension is None else Shard(dimension) for dimension in dimensions]
    words = ["Replicate" if dimension is None else f"Shard({dimension})" for dimension in dimensions]
    source = tmp_path / "x.safetensors"
    save_file({"w": torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)}, source)
    rules = write_mesh(tmp_path / "mesh.json", mesh, [{"names": "w", "placements": words}])
    moved = reshard(source, tmp_path / "dcp", "--to", "dcp", "--mesh", rules)
    world_size = torch.Size(mesh).numel()
    expected = {box_of_rank(shape, mesh, placements, rank) for rank in range(world_size)} - {None}
    assert {box[1:] for box in pieces(moved)["w"]} == expected


@pytest.mark.parametrize("rows", range(1, 13))
def test_two_axes_that_cut_one_dimension_are_strided(rows, tmp_path):
    """Shows E14. PyTorch's placements of FSDP2 over tensor parallelism are (_StridedShard, Shard)."""
    mesh = [2, 3]
    source = tmp_path / "x.safetensors"
    save_file({"w": torch.arange(rows, dtype=torch.float32)}, source)
    rules = write_mesh(tmp_path / "mesh.json", mesh, [{"names": "w", "placements": ["Shard(0)", "Shard(0)"]}])
    moved = reshard(source, tmp_path / "dcp", "--to", "dcp", "--mesh", rules)
    placements = [_StridedShard(0, split_factor=3), Shard(0)]
    expected = {(rank, *box) for rank in range(6) if (box := box_of_rank([rows], mesh, placements, rank))}
    assert pieces(moved)["w"] == expected


def test_a_rule_for_each_name(tmp_path):
    """Shows E14, E4."""
    rules = write_mesh(tmp_path / "mesh.json", [2, 2], RULES[:2])
    process = run("ckpt-reshard", FSDP2_TP, tmp_path / "dcp", "--mesh", rules)
    assert process.returncode == 3
    assert "rules of the mesh: expected a rule whose names match, such as a last rule for *, found none" in process.stderr
    assert not (tmp_path / "dcp").exists()
