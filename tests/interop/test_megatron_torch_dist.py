"""What --to megatron writes, read by PyTorch. Megatron itself loads it in frameworks/test_frameworks.py."""

import argparse
import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckpt_tools import FIXTURES, reshard, run, succeed

VALID = FIXTURES / "megatron" / "valid"


def stacked(weights, name, *numbers):
    """Stacks the tensors whose names have these numbers of layers and experts in place of {}."""
    if not numbers:
        return weights[name]
    first, *rest = numbers
    return torch.stack([stacked(weights, name.replace("{}", str(i), 1), *rest) for i in range(first)])


def loaded(folder, tensors):
    """Loads tensors like these from a DCP checkpoint; each is filled before, so that a missing part shows."""
    found = {name: torch.full_like(tensor, 77) for name, tensor in tensors.items()}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found


@pytest.mark.parametrize("path, layers, experts", [("tp2_pp2", 3, 0), ("tp2_ep2_experts", 1, 4), ("tp2_pp2_distributed_bf16", 2, 0)])
@pytest.mark.parametrize("options", [[], ["--world-size", "3"]], ids=["as-stored", "dim0"])
def test_layers_experts_and_moments_are_stacked(tmp_path, path, layers, experts, options):
    """Shows F3. Each element of each layer, under the names of dist_checkpointing."""
    moved = reshard(VALID / path, tmp_path / "torch_dist", "--to", "megatron", *options)
    state = torch.load(reshard(VALID / path, tmp_path / "whole.pt", "--only", "model", "--only", "optim"), weights_only=True)
    fc1 = "decoder.layers.{}.mlp." + ("experts.local_experts.{}." if experts else "") + "linear_fc1.weight"
    key = "decoder.layers.mlp." + ("experts.experts." if experts else "") + "linear_fc1.weight"
    numbers = (layers, experts) if experts else (layers,)
    norm = "decoder.layers.self_attention.linear_qkv.layer_norm_weight"
    weights, optim = state["model"], state["optim"]["state"]
    expected = {key: stacked(weights, fc1, *numbers), norm: stacked(weights, "decoder.layers.{}.input_layernorm.weight", layers),
                "embedding.word_embeddings.weight": weights["embedding.word_embeddings.weight"]}
    for kind in ("exp_avg", "exp_avg_sq"):
        expected[f"optimizer.state.{kind}.{key}"] = stacked({name: each[kind] for name, each in optim.items()}, fc1, *numbers)
    if "distributed" in path:
        expected[f"optimizer.state.param.{key}"] = expected[key]
    for name, tensor in loaded(moved, expected).items():
        assert torch.equal(tensor, expected[name]), name


def test_the_common_state_is_what_megatron_reads(tmp_path):
    """Shows F3. A chain of two optimizers, because the model has experts; arguments as a Namespace."""
    moved = reshard(VALID / "tp2_ep2_experts", tmp_path / "torch_dist", "--to", "megatron")
    with torch.serialization.safe_globals([argparse.Namespace]):
        common = torch.load(moved / "common.pt", weights_only=True)
    assert common["iteration"] == 3 and common["checkpoint_version"] == 3.0 and common["args"].num_experts == 4
    assert common["args"].no_save_rng is True and not hasattr(common["args"], "no_save_optim")
    assert common["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
    assert common["optimizer"].keys() == {0, 1}
    for number, optimizer in common["optimizer"].items():
        assert optimizer["state"]["common_step"] == 2
        assert [(group["wd_mult"], group["is_expert_parallel"]) for group in optimizer["param_groups"]][0] == (1.0, number == 1)
        assert all("params" not in group and group["step"] == 2 for group in optimizer["optimizer"]["param_groups"])
    extra = {"decoder.layers.mlp.experts.experts.linear_fc2._extra_state/shard_0.3_1.4": io.BytesIO()}
    dcp.load(extra, checkpoint_id=moved, no_dist=True)
    assert next(iter(extra.values())) == [None]


def test_fsdp2_moves_to_megatron_with_a_group_for_biases_and_norms(tmp_path):
    """Shows F3. One group of PyTorch's AdamW becomes the two that Megatron has."""
    weights = {f"decoder.layers.{i}.mlp.linear_fc{k}.{part}": torch.randn(4, 4) if part == "weight" else torch.randn(4)
               for i in range(2) for k in (1, 2) for part in ("weight", "bias")}
    state = {name: {"exp_avg": torch.randn_like(each), "exp_avg_sq": torch.rand_like(each), "step": torch.tensor(5.0)}
             for name, each in weights.items()}
    group = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "params": list(weights)}
    dcp.save({"model": weights, "optim": {"state": state, "param_groups": [group]}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    moved = reshard(tmp_path / "dcp", tmp_path / "torch_dist", "--to", "megatron")
    with torch.serialization.safe_globals([argparse.Namespace]):
        optimizer = torch.load(moved / "common.pt", weights_only=True)["optimizer"]
    groups = optimizer["optimizer"]["param_groups"]
    assert [(g["wd_mult"], g["weight_decay"], g["step"], g["lr"]) for g in groups] == [(1.0, 0.1, 5, 0.1), (0.0, 0.0, 5, 0.1)]
    key = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.bias"
    expected = {key: torch.stack([state[f"decoder.layers.{i}.mlp.linear_fc1.bias"]["exp_avg"] for i in range(2)])}
    assert torch.equal(loaded(moved, expected)[key], expected[key])


def test_objects_of_newer_versions_are_carried(tmp_path):
    """Shows F3. They keep the common state in an object of the DCP files, and write no common.pt."""
    name = "common_state/shard_0_1"
    saved = io.BytesIO()
    torch.save([{"iteration": 7, "lr": [0.5]}], saved)
    dcp.save({name: saved, "decoder.layers.mlp.linear_fc1.weight": torch.ones(2, 3)}, checkpoint_id=tmp_path / "source", no_dist=True)
    moved = reshard(tmp_path / "source", tmp_path / "moved", "--to", "dcp", "--world-size", "2")
    found = {name: io.BytesIO()}
    dcp.load(found, checkpoint_id=moved, no_dist=True)
    each = found[name]
    each = each if not isinstance(each, (bytes, io.BytesIO)) else torch.load(io.BytesIO(bytes(each) if isinstance(each, bytes) else each.getvalue()))
    assert each == [{"iteration": 7, "lr": [0.5]}]


def test_objects_of_newer_versions_with_arguments_are_refused_by_name(tmp_path):
    name = "common_state/shard_0_1"
    dcp.save({name: [{"args": argparse.Namespace(lr=0.1)}], "output_layer.weight": torch.ones(2, 3)}, checkpoint_id=tmp_path / "source", no_dist=True)
    refused = run("ckpt-reshard", tmp_path / "source", tmp_path / "moved", "--to", "dcp")
    assert refused.returncode == 3 and name in refused.stderr and "argparse.Namespace" in refused.stderr
    assert succeed("ckpt-reshard", tmp_path / "source", tmp_path / "moved", "--to", "dcp", "--only", f"!{name}")
