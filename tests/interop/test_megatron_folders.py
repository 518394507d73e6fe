"""Megatron's folders of ranks whose tensors are cut, or named, in ways that need more than the tensor's own name.

The tests write small folders as Megatron-LM's checkpointing.py does. What the whole model has follows from its code.
"""

import argparse
import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckpt_tools import FIXTURES, reshard, run, succeed

EMBEDDING = {"embedding.word_embeddings.weight": torch.arange(8.0).reshape(4, 2)}
EXPERTS = {f"decoder.layers.{layer}.mlp.experts.linear_fc{fc}.weight{expert}": torch.full((4, 2), 10.0 * layer + 2.0 * fc + expert)
           for layer in range(2) for fc in (1, 2) for expert in range(2)}


def embedding_of(rank):
    """Returns a tensor rank's part of the embedding."""
    return {"embedding.word_embeddings.weight": 10.0 * rank + torch.arange(8.0).reshape(4, 2)}


def save(folder, models, version=3.0, **args):
    """Saves the models of the tensor ranks. `version`: None for a file without `checkpoint_version`."""
    for rank, model in enumerate(models):
        of_rank = argparse.Namespace(tensor_model_parallel_size=len(models), rank=rank, **args)
        state = {"iteration": 1, "model": model, "args": of_rank} | ({} if version is None else {"checkpoint_version": version})
        path = folder / "iter_0000001" / f"mp_rank_{rank:02d}"
        path.mkdir(parents=True)
        torch.save(state, path / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("1")
    return folder


def model_in(folder, tmp_path):
    moved = reshard(folder, tmp_path / "moved.pt", "--to", "torch", "--only", "model")
    return torch.load(moved, weights_only=True)["model"]


def names_of(torch_dist):
    return set(dcp.FileSystemReader(torch_dist).read_metadata().state_dict_metadata)


def common_of(torch_dist):
    return torch.load(torch_dist / "common.pt", weights_only=False)


def test_a_module_that_each_rank_has_as_a_whole_is_read_once(tmp_path):
    """Shows F3. The MLP of Qwen3-VL's vision tower in transformers has layers `linear_fc1` and `linear_fc2`, which no tensor rank cuts."""
    tower = {f"vision_model.blocks.0.mlp.{name}": tensor for name, tensor in {
        "linear_fc1.weight": torch.arange(24.0).reshape(6, 4), "linear_fc1.bias": torch.zeros(6),
        "linear_fc2.weight": torch.arange(24.0).reshape(4, 6)}.items()}
    cut = {"decoder.layers.0.self_attention.linear_qkv.bias": torch.zeros(6)}  # equal, but it shows nothing
    ranks = [embedding_of(rank) | tower | cut | {"decoder.layers.0.self_attention.linear_qkv.weight": torch.full((6, 2), 1.0 + rank)}
             for rank in range(2)]
    folder = save(tmp_path / "run", ranks)
    assert "3 names without a rule, but equal on all tensor ranks" in run("ckpt-inspect", "verify", folder).stdout
    model = model_in(folder, tmp_path)
    assert all(torch.equal(model[name], tensor) for name, tensor in tower.items())
    assert {name: tuple(tensor.shape) for name, tensor in model.items() if "qkv" in name} == {
        "decoder.layers.0.self_attention.linear_qkv.weight": (12, 2), "decoder.layers.0.self_attention.linear_qkv.bias": (12,)}


def test_a_layer_of_zeros_follows_the_layers_beside_it(tmp_path):
    """Shows F3. A module that each rank has as a whole may begin with a projection of zeros, which alone shows nothing."""
    tower = {"visual.merger.linear_fc1.weight": torch.arange(24.0).reshape(6, 4), "visual.merger.linear_fc2.weight": torch.zeros(4, 6)}
    cut = {f"decoder.layers.0.mlp.{name}.weight": torch.zeros(shape) for name, shape in (("linear_fc1", (6, 4)), ("linear_fc2", (4, 6)))}
    model = model_in(save(tmp_path / "run", [embedding_of(rank) | tower | cut for rank in range(2)]), tmp_path)
    assert all(torch.equal(model[name], tensor) for name, tensor in tower.items())
    assert [model[name].shape for name in sorted(cut)] == [(12, 4), (4, 12)]


def test_a_model_beside_its_distributed_optimizer_is_a_part(tmp_path):
    """Shows A2. The file of a single rank holds the whole model, but its float32 weights are in the other file."""
    torch.save({"args": argparse.Namespace(tensor_model_parallel_size=1), "checkpoint_version": 3.0, "model": EMBEDDING}, tmp_path / "model_optim_rng.pt")
    options = [tmp_path / "model_optim_rng.pt", tmp_path / "moved.pt", "--only", "model"]
    (tmp_path / "distrib_optim.pt").write_bytes(b"")
    process = run("ckpt-reshard", *options)
    assert process.returncode == 3 and "one file of 2: Megatron-LM's model" in process.stderr and "distrib_optim.pt" in process.stderr, process.stderr
    succeed("ckpt-reshard", *options, "--as-is")
    (tmp_path / "distrib_optim.pt").unlink()
    succeed("ckpt-reshard", *options, "--overwrite")


@pytest.mark.parametrize("args", [{}, {"padded_vocab_size": 8}])
def test_a_value_head_is_read_once(args, tmp_path):
    """Shows F3. Critics of verl and slime have `output_layer` with one row, which no tensor rank cuts. A head for words is cut."""
    head = {"output_layer.weight": torch.tensor([[1.0, 2.0]]), "output_layer.bias": torch.tensor([3.0])}
    model = model_in(save(tmp_path / "critic", [embedding_of(rank) | head for rank in range(2)], **args), tmp_path)
    assert torch.equal(model["output_layer.weight"], head["output_layer.weight"])
    assert torch.equal(model["output_layer.bias"], head["output_layer.bias"])
    assert model["embedding.word_embeddings.weight"].shape == (8, 2)
    (tmp_path / "moved.pt").unlink()
    words = {"output_layer.weight": torch.zeros(4, 2), "output_layer.bias": torch.zeros(4)}  # equal on both ranks
    model = model_in(save(tmp_path / "words", [embedding_of(rank) | words for rank in range(2)], **args), tmp_path)
    assert model["output_layer.weight"].shape == (8, 2) and model["output_layer.bias"].shape == (8,)
    other = head | {"output_layer.weight": torch.tensor([[1.0, 3.0]])}
    process = run("ckpt-reshard", save(tmp_path / "other", [embedding_of(0) | head, embedding_of(1) | other], **args), tmp_path / "refused.pt",
                  "--to", "torch", "--only", "model")
    assert process.returncode != 0 and "no rule says how to join" in process.stderr, process.stderr


@pytest.mark.parametrize("args, numbered", [
    ({}, False), ({"moe_layer_freq": 1}, False), ({"moe_layer_freq": 2}, True), ({"moe_layer_freq": [1, 1]}, True),
    ({"linear_attention_freq": [0, 0]}, True), ({"hetereogenous_dist_checkpoint": True}, True),
    ({"heterogeneous_layers_config_path": "blocks.json"}, True), ({"heterogeneous_layers_config_path": None}, False)])
def test_torch_dist_numbers_layers_for_the_arguments_for_which_megatron_does(args, numbered, tmp_path):
    """Shows F3. See TransformerBlock.sharded_state_dict of megatron-core."""
    folder = save(tmp_path / "run", [EMBEDDING | EXPERTS], num_experts=2, **args)
    moved = reshard(folder, tmp_path / "moved", "--to", "megatron")
    assert ("decoder.layers.1.mlp.experts.experts.linear_fc1.weight" in names_of(moved)) == numbered
    assert ("decoder.layers.mlp.experts.experts.linear_fc1.weight" in names_of(moved)) != numbered
    assert common_of(moved)["content_metadata"]["non_homogeneous_layers"] == numbered
    again = reshard(moved, tmp_path / "again", "--to", "megatron")
    assert names_of(again) == names_of(moved)


def test_a_source_without_arguments_can_get_numbered_layers(tmp_path):
    """Shows F3. The move that stacks layers of experts without knowing says so."""
    torch.save(EMBEDDING | EXPERTS, tmp_path / "model.pt")
    torch.save({"content_metadata": {"non_homogeneous_layers": True}}, tmp_path / "numbered.pt")
    stacked = run("ckpt-reshard", tmp_path / "model.pt", tmp_path / "stacked", "--to", "megatron")
    assert "layers: expected args.moe_layer_freq" in stacked.stderr and stacked.returncode == 0
    numbered = run("ckpt-reshard", "merge", tmp_path / "model.pt", tmp_path / "numbered.pt", tmp_path / "moved", "--to", "megatron")
    assert "moe_layer_freq" not in numbered.stderr and numbered.returncode == 0
    assert "decoder.layers.1.mlp.experts.experts.linear_fc1.weight" in names_of(tmp_path / "moved")
    metadata = common_of(tmp_path / "moved")["content_metadata"]
    assert metadata["non_homogeneous_layers"] and metadata["distrib_optim_sharding_type"] == "fully_reshardable"


@pytest.mark.parametrize("name, shape, reason", [
    ("decoder.layers.0.mixer.in_proj.weight", (4, 2), "a state-space layer"),
    ("decoder.layers.0.mlp.experts.weight1", (2, 8), "experts in one matrix (GroupedMLP)")])
def test_weights_that_torch_dist_has_in_parts_are_refused(name, shape, reason, tmp_path):
    """Shows F3, E13."""
    torch.save(EMBEDDING | {name: torch.ones(shape)}, tmp_path / "model.pt")
    moved = run("ckpt-reshard", tmp_path / "model.pt", tmp_path / "moved", "--to", "megatron")
    assert moved.returncode == 3 and name in moved.stderr and reason in moved.stderr
    assert not (tmp_path / "moved").exists()


def test_layers_for_further_tokens_have_the_name_of_torch_dist(tmp_path):
    """Shows F3. Newer versions call their module `mtp_model_layer`, in folders of ranks only."""
    model = {"mtp.layers.0.enorm.weight": torch.ones(2), "mtp.layers.0.mtp_model_layer.self_attention.linear_qkv.weight": torch.ones(6, 2)}
    moved = reshard(save(tmp_path / "run", [EMBEDDING | model]), tmp_path / "moved", "--to", "megatron")
    assert "mtp.layers.0.transformer_layer.self_attention.linear_qkv.weight" in names_of(moved)
    assert not any("mtp_model_layer" in name for name in names_of(moved))


@pytest.mark.parametrize("owner, arg", [("experts", "moe_mlp_glu_interleave_size"), ("shared_experts", "moe_shared_expert_glu_interleave_size")])
@pytest.mark.parametrize("size", [None, 2])
def test_rows_of_gate_and_up_may_take_turns(owner, arg, size, tmp_path):
    """Shows F3. Each rank then has whole blocks of both; without it, a part of the gate and a part of the up projection."""
    number = "0" if owner == "experts" else ""
    fc1, fc2 = (f"decoder.layers.0.mlp.{owner}.linear_fc{i}.weight{number}" for i in (1, 2))
    gate, up = torch.arange(16.0).reshape(8, 2), torch.arange(16.0).reshape(8, 2) + 100
    if size is None:
        whole = torch.cat([gate, up])
        parts = [torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]]) for rank in range(2)]
    else:
        whole = torch.stack([gate.reshape(-1, size, 2), up.reshape(-1, size, 2)], 1).reshape(16, 2)
        parts = whole.chunk(2)
    columns = torch.arange(16.0).reshape(2, 8)
    models = [EMBEDDING | {fc1: parts[rank].clone(), fc2: columns.chunk(2, 1)[rank].clone()} for rank in range(2)]
    folder = save(tmp_path / "run", models, **{arg: size})
    model = model_in(folder, tmp_path)
    assert torch.equal(model[fc1], whole) and torch.equal(model[fc2], columns)
    notes = run("ckpt-inspect", "verify", folder).stdout
    assert ("1 tensor in which they take turns every 2 rows" in notes) == (size is not None)


SPLIT = {"schema": 1, "megatron": "to", "rest": "keep", "rules": [
    {"from": "layers.{L}.{E}.{p:gate|up}", "to": "decoder.layers.{L}.mlp.experts.local_experts.{E}.linear_fc1.weight", "ops": [{"concat": 0}], "optional": True},
    {"from": "layers.{L}.shared.{p:gate|up}", "to": "decoder.layers.{L}.mlp.shared_experts.linear_fc1.weight", "ops": [{"concat": 0}], "optional": True}]}


def in_turns(gate, up, size):
    return torch.stack([gate.reshape(-1, size, 2), up.reshape(-1, size, 2)], 1).reshape(16, 2)


@pytest.mark.parametrize("via_torch_dist", [False, True])
@pytest.mark.parametrize("owner, arg", [("experts", "moe_mlp_glu_interleave_size"), ("shared_experts", "moe_shared_expert_glu_interleave_size")])
def test_recipes_put_rows_that_take_turns_in_order(owner, arg, via_torch_dist, tmp_path):
    """Shows F3. The inverse of a recipe takes one half for the gate, as Megatron has it only without the argument."""
    gate, up = torch.arange(16.0).reshape(8, 2), torch.arange(16.0).reshape(8, 2) + 100
    number = "0" if owner == "experts" else ""
    model = EMBEDDING | {f"decoder.layers.0.mlp.{owner}.linear_fc1.weight{number}": in_turns(gate, up, 2),
                         f"decoder.layers.0.mlp.{owner}.linear_fc2.weight{number}": torch.ones(2, 8)}
    source = save(tmp_path / "run", [model], num_experts=1, **{arg: 2})
    if via_torch_dist:
        source = reshard(source, tmp_path / "torch_dist", "--to", "megatron")
    (tmp_path / "recipe.json").write_text(json.dumps(SPLIT))
    moved = reshard(source, tmp_path / "moved", "--to", "dcp", "--recipe", tmp_path / "recipe.json", "--inverse",
                    *(["--set", "prefix=model."] if not via_torch_dist else []))
    prefix = "" if via_torch_dist else "model."
    one = "0" if owner == "experts" else "shared"
    names = [f"{prefix}layers.0.{one}.{part}" for part in ("gate", "up")]
    state = {name: torch.empty(8, 2) for name in names}
    dcp.load(state, checkpoint_id=moved)
    assert torch.equal(state[names[0]], gate) and torch.equal(state[names[1]], up)
    assert arg not in " ".join(names_of(moved)), "the rows do not take turns any more"


def test_rows_that_take_turns_on_several_ranks_of_torch_dist_are_refused_by_a_recipe(tmp_path):
    """Shows F3. Megatron cuts each rank's rows in halves, and stores the first halves of all ranks first."""
    torch_dist = tmp_path / "torch_dist"
    dcp.save({"decoder.layers.mlp.experts.experts.linear_fc1.weight": torch.ones(1, 1, 16, 2)}, checkpoint_id=torch_dist, no_dist=True)
    torch.save({"args": argparse.Namespace(tensor_model_parallel_size=2, moe_mlp_glu_interleave_size=2)}, torch_dist / "common.pt")
    (torch_dist / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (tmp_path / "recipe.json").write_text(json.dumps(SPLIT))
    moved = run("ckpt-reshard", torch_dist, tmp_path / "moved", "--to", "dcp", "--recipe", tmp_path / "recipe.json", "--inverse")
    assert moved.returncode == 3 and "one tensor rank" in moved.stderr and "linear_fc1" in moved.stderr, moved.stderr


@pytest.mark.parametrize("owner, arg", [("experts", "moe_mlp_glu_interleave_size"), ("shared_experts", "moe_shared_expert_glu_interleave_size")])
def test_rows_that_take_turns_on_several_ranks(owner, arg, tmp_path):
    """Shows F3. Megatron would read the whole rows as the first halves of all ranks, then the second ones. A recipe and the
    order of one rank are as they were before."""
    gate, up = torch.arange(16.0).reshape(8, 2), torch.arange(16.0).reshape(8, 2) + 100
    number, one = ("0", "0") if owner == "experts" else ("", "shared")
    fc1 = f"decoder.layers.0.mlp.{owner}.linear_fc1.weight{number}"
    whole = in_turns(gate, up, 2)
    models = [EMBEDDING | {fc1: part.clone(), fc1.replace("fc1", "fc2"): torch.ones(2, 4)} for part in whole.chunk(2)]
    folder = save(tmp_path / "run", models, num_experts=1, **{arg: 2})
    moved = run("ckpt-reshard", folder, tmp_path / "torch_dist", "--to", "megatron")
    assert moved.returncode == 3 and f"{fc1}: order of rows: expected one tensor rank" in moved.stderr, moved.stderr
    one_rank = reshard(folder, tmp_path / "one_rank", "--to", "megatron", "--only", "!args.tensor_model_parallel_size")
    names = [name for name in names_of(one_rank) if name.endswith("linear_fc1.weight")]
    state = {names[0]: torch.empty(1, 1, 16, 2) if owner == "experts" else torch.empty(1, 16, 2)}
    dcp.load(state, checkpoint_id=one_rank)
    assert torch.equal(state[names[0]].reshape(16, 2), whole)
    (tmp_path / "recipe.json").write_text(json.dumps(SPLIT))
    for source in (folder, one_rank):
        prefix = "model." if source == folder else ""
        setting = ["--set", f"prefix={prefix}"] if prefix else []
        halves = reshard(source, tmp_path / f"halves{prefix}", "--to", "dcp", "--recipe", tmp_path / "recipe.json", "--inverse", *setting)
        state = {f"{prefix}layers.0.{one}.{part}": torch.empty(8, 2) for part in ("gate", "up")}
        dcp.load(state, checkpoint_id=halves)
        assert torch.equal(state[f"{prefix}layers.0.{one}.gate"], gate) and torch.equal(state[f"{prefix}layers.0.{one}.up"], up)


@pytest.mark.parametrize("name", ["tp2_pp2", "tp2_pp2_distributed_bf16"])
def test_a_recipe_leads_to_other_names_and_back_to_torch_dist(name, tmp_path):
    """Shows F3. On the way, `common.pt` stays beside tensors that are not torch_dist's any more."""
    source = reshard(FIXTURES / "megatron" / "valid" / name, tmp_path / "torch_dist", "--to", "megatron")
    recipe = {"schema": 1, "megatron": "to", "rest": "keep", "rules": [{"from": "blocks.{L}.{rest:*}", "to": "decoder.layers.{L}.{rest}"}]}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    other = reshard(source, tmp_path / "other", "--to", "dcp", "--recipe", tmp_path / "recipe.json", "--inverse")
    assert "optimizer.state.exp_avg.blocks.1.mlp.linear_fc1.weight" in names_of(other)
    back = reshard(other, tmp_path / "back", "--to", "megatron", "--recipe", tmp_path / "recipe.json")
    assert names_of(back) == names_of(source)
    compared = run("ckpt-inspect", "diff", source, back)
    assert compared.returncode == 0, compared.stdout


@pytest.mark.parametrize("side", ["from", None])
def test_rows_in_the_order_of_older_versions_are_refused_by_a_recipe(side, tmp_path):
    """Shows F3. A recipe without "megatron" may expect the order."""
    name = "language_model.transformer.layers.0.attention.query_key_value.weight"
    folder = save(tmp_path / "run", [{name: torch.arange(24.0).reshape(12, 2)}], None)
    recipe = {"schema": 1, "rest": "keep", "rules": [{"from": f"model.{name}", "to": "qkv"}]} | ({"megatron": side} if side else {})
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    moved = run("ckpt-reshard", folder, tmp_path / "moved.pt", "--to", "torch", "--recipe", tmp_path / "recipe.json", "--only", "!args")
    assert (moved.returncode == 3) == (side is not None), moved.stderr
    if side:
        assert "expected checkpoint_version 2 or later" in moved.stderr and name in moved.stderr


@pytest.mark.parametrize("version", [None, 0, 1.0, 3.0])
@pytest.mark.parametrize("name, num", [("attention.query_key_value", 3), ("inter_attention.key_value", 2)])
def test_older_versions_order_the_rows_of_fused_projections_otherwise(version, name, num, tmp_path):
    """Shows F3. Version 0 has rows [3, heads, head_dim]; later ones have the heads first. Each tensor rank has some heads."""
    name = f"language_model.transformer.layers.0.{name}.weight"
    whole = torch.arange(num * 4 * 2 * 3.0).reshape(num, 4, 2, 3)  # projections, heads, head_dim, hidden
    if version:
        whole = whole.transpose(0, 1)
    parts = [part.reshape(-1, 3).clone() for part in whole.chunk(2, 0 if version else 1)]
    folder = save(tmp_path / "run", [{name: part} for part in parts], version)
    model = torch.load(reshard(folder, tmp_path / "moved.pt", "--to", "torch", "--only", "!args"), weights_only=True)["model"]
    assert torch.equal(model[name], whole.reshape(-1, 3))
    notes = run("ckpt-inspect", "verify", folder).stdout
    assert ("order of rows: expected checkpoint_version 2 or later" in notes) == (version != 3.0)


@pytest.mark.parametrize("offsets", [torch.zeros(4), torch.arange(4.0)])
def test_each_rank_has_the_sinks_of_its_heads(offsets, tmp_path):
    """Shows F3. Also if they are equal on all ranks, as at the beginning of a training."""
    name = "decoder.layers.0.self_attention.core_attention.softmax_offset"
    folder = save(tmp_path / "run", [EMBEDDING | {name: part.clone()} for part in offsets.chunk(2)])
    assert torch.equal(model_in(folder, tmp_path)[name], offsets)


@pytest.mark.parametrize("is_cut", [True, False])
def test_down_projections_are_cut_or_whole_as_the_arguments_say(is_cut, tmp_path):
    """Shows F3. The parts may be equal, such as moments that are zero."""
    q, kv = (f"decoder.layers.0.self_attention.linear_{part}_down_proj.weight" for part in ("q", "kv"))
    whole = {q: torch.zeros(4, 2), kv: torch.arange(12.0).reshape(6, 2)}
    models = [EMBEDDING | {name: (each.chunk(2)[rank].clone() if is_cut else each) for name, each in whole.items()} for rank in range(2)]
    folder = save(tmp_path / "run", models, q_lora_rank=4, kv_lora_rank=4, qk_pos_emb_head_dim=2)
    model = model_in(folder, tmp_path)
    assert all(torch.equal(model[name], each) for name, each in whole.items())


def test_recipes_know_both_names_of_layers_for_further_tokens(tmp_path):
    """Shows F3."""
    torch.save({"mtp.layers.0.mtp_model_layer.mlp.linear_fc2.weight": torch.ones(2, 2)}, tmp_path / "model.pt")
    recipe = {"schema": 1, "megatron": "from", "rules": [{"from": "mtp.layers.{M}.transformer_layer.mlp.linear_fc2.weight", "to": "next.{M}"}]}
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    moved = reshard(tmp_path / "model.pt", tmp_path / "moved.pt", "--to", "torch", "--recipe", tmp_path / "recipe.json")
    assert torch.equal(torch.load(moved, weights_only=True)["next.0"], torch.ones(2, 2))
