"""Where the numbers of a torch_dist checkpoint are after moves to other formats, by a recipe to other names, and back.

PyTorch writes the sources, as Megatron does: with rows of the gate and of the up projection that take turns, with numbers for
layers, or neither.
"""

import argparse
import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckpt_tools import reshard, run
from safetensors.torch import load_file

LAYERS, EXPERTS = 2, 2
TORCH_DIST = '{"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}'
FC1 = "decoder.layers.{}.mlp.experts.experts.linear_fc1.weight"
SPLIT = {"schema": 1, "megatron": "to", "rest": "keep", "rules": [
    {"from": "layers.{L}.{E}.{p:gate|up}", "to": "decoder.layers.{L}.mlp.experts.local_experts.{E}.linear_fc1.weight", "ops": [{"concat": 0}]}]}
KINDS = ("turns", "numbered", "plain")


def halves(state=0):
    """What a recipe gives: `<layer>.<expert>.<gate or up>`, of the weights or of their moments."""
    count = iter(range(1000 * state, 1000 * (state + 1), 16))
    return {f"layers.{layer}.{expert}.{part}": torch.arange(16.0).reshape(8, 2) + next(count)
            for layer in range(LAYERS) for expert in range(EXPERTS) for part in ("gate", "up")}


ALL_HALVES = halves() | {f"optimizer.state.exp_avg.{name}": half for name, half in halves(1).items()}


def fused(gate, up, turns):
    return torch.stack([gate.reshape(-1, turns, 2), up.reshape(-1, turns, 2)], 1).reshape(16, 2) if turns else torch.cat([gate, up])


def tensors_of(kind, turns):
    """The tensors of torch_dist, by name."""
    tensors = {"embedding.word_embeddings.weight": torch.arange(8.0).reshape(4, 2)}
    for prefix, of in (("", halves()), ("optimizer.state.exp_avg.", halves(1))):
        layers = [torch.stack([fused(of[f"layers.{layer}.{e}.gate"], of[f"layers.{layer}.{e}.up"], turns) for e in range(EXPERTS)])
                  for layer in range(LAYERS)]
        stacked = {FC1.replace(".{}", ""): torch.stack(layers)}
        tensors |= {prefix + name: t for name, t in (({FC1.format(i): t for i, t in enumerate(layers)}) if kind == "numbered" else stacked).items()}
    return tensors


def save_torch_dist(folder, kind, common=None):
    dcp.save(tensors_of(kind, 2 if kind == "turns" else 0), checkpoint_id=folder, no_dist=True)
    args = {"turns": {"moe_mlp_glu_interleave_size": 2}, "numbered": {"moe_layer_freq": [1, 1]}, "plain": {}}[kind]
    torch.save(common or {"iteration": 5, "args": argparse.Namespace(tensor_model_parallel_size=1, **args)}, folder / "common.pt")
    (folder / "metadata.json").write_text(TORCH_DIST)
    return folder


def save_recipe(tmp_path, recipe=SPLIT):
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    return ["--recipe", tmp_path / "recipe.json"]


def flat_in(folder, tmp_path):
    """Returns all tensors of a checkpoint, read by PyTorch and safetensors if they can."""
    if (folder / ".metadata").exists():
        metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        found = {name: torch.full(tuple(each.size), 77.0) for name, each in metadata.items() if hasattr(each, "size")}
        dcp.load(found, checkpoint_id=folder, no_dist=True)
        return found
    if (folder / "model.safetensors").exists():
        return load_file(folder / "model.safetensors")
    return torch.load(reshard(folder, tmp_path / f"{folder.name}.pt", "--to", "torch"), weights_only=True)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


def assert_halves(folder, tmp_path):
    found = flat_in(folder, tmp_path)
    assert_equal({name: tensor for name, tensor in found.items() if name.endswith((".gate", ".up"))}, ALL_HALVES)


@pytest.mark.parametrize("format", ["dcp", "native", "safetensors", "megatron"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_move_keeps_names_and_numbers_and_a_recipe_finds_them(kind, format, tmp_path):
    source = save_torch_dist(tmp_path / "source", kind)
    moved = reshard(source, tmp_path / "moved", "--to", format)
    assert_equal(flat_in(moved, tmp_path), tensors_of(kind, 2 if kind == "turns" else 0))
    back = reshard(moved, tmp_path / "back", "--to", "megatron")
    assert_equal(flat_in(back, tmp_path), flat_in(source, tmp_path))
    assert (back / "common.pt").read_bytes() == (source / "common.pt").read_bytes()
    assert_halves(reshard(back, tmp_path / "halves", "--to", "dcp", *save_recipe(tmp_path), "--inverse"), tmp_path)


@pytest.mark.parametrize("common, is_noted", [
    ({"content_metadata": {"non_homogeneous_layers": True}}, False), ({"args": argparse.Namespace(moe_layer_freq=2)}, False),
    ({"iteration": 5}, False), ({"content_metadata": {"non_homogeneous_layers": False}}, True)])
def test_layers_with_numbers_keep_them_without_objects_that_have_them(common, is_noted, tmp_path):
    """`--only` may leave out the extra state of layers. A move does not make it anew."""
    source = save_torch_dist(tmp_path / "source", "numbered", common)
    moved = run("ckpt-reshard", source, tmp_path / "moved", "--to", "megatron")
    assert moved.returncode == 0 and ("expected stacked layers, as content_metadata" in moved.stderr) == is_noted, moved.stderr
    names = set(dcp.FileSystemReader(tmp_path / "moved").read_metadata().state_dict_metadata)
    assert names == tensors_of("numbered", 0).keys()


def test_norms_keep_the_names_of_the_layers_that_wrote_them(tmp_path):
    """Megatron's own layers have a norm apart, TransformerEngine's have it in the next linear layer."""
    source = tmp_path / "source"
    tensors = {"decoder.layers.input_layernorm.weight": torch.ones(2, 4), "decoder.layers.self_attention.linear_qkv.weight": torch.ones(2, 12, 4)}
    dcp.save(tensors, checkpoint_id=source, no_dist=True)
    torch.save({"iteration": 5}, source / "common.pt")
    (source / "metadata.json").write_text(TORCH_DIST)
    assert_equal(flat_in(reshard(source, tmp_path / "moved", "--to", "megatron"), tmp_path), tensors)
