"""What --to megatron writes, read by PyTorch, and what Megatron wrote. Megatron itself loads it in frameworks/test_frameworks.py."""

import argparse
import io
import json
import shutil

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckpt_tools import FIXTURES, ROOT, flip_a_bit, reshard, run, succeed
from safetensors.torch import load_file
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

VALID = FIXTURES / "megatron" / "valid"
WRITTEN = FIXTURES / "dcp" / "megatron"  # by Megatron
LLAMA = ["--recipe", ROOT / "recipes" / "hf-to-megatron-llama.json"]
HEADS = {"heads": 4, "kv_heads": 2, "head_dim": 4}


def stacked(weights, name, *numbers):
    """Stacks the tensors whose names have these numbers of layers and experts in place of {}."""
    if not numbers:
        return weights[name]
    first, *rest = numbers
    return torch.stack([stacked(weights, name.replace("{}", str(i), 1), *rest) for i in range(first)])


def loaded(folder, tensors):
    """Loads tensors from a DCP checkpoint into tensors like these. They are filled before, so that a missing part shows."""
    found = {name: torch.full_like(tensor, 77) for name, tensor in tensors.items()}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found


@pytest.mark.parametrize("path, layers, experts", [("tp2_pp2", 3, 0), ("tp2_ep2_experts", 1, 4), ("tp2_pp2_distributed_bf16", 2, 0)])
@pytest.mark.parametrize("options", [[], ["--world-size", "3"]], ids=["as-stored", "dim0"])
def test_layers_experts_and_moments_are_stacked(tmp_path, path, layers, experts, options):
    """Shows F3. PyTorch finds each element of each layer under the names of dist_checkpointing."""
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
    """Shows F3. Because the model has experts, the optimizer is a chain of two. The arguments are a Namespace."""
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
    """Shows F3. Megatron has two groups; both are made from the one group of PyTorch's AdamW."""
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
    """Shows F3. Newer versions keep the common state in an object of the DCP files, and write no common.pt."""
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


def test_an_object_with_tensors_stays_one_object(tmp_path):
    """Shows A2, F3. Megatron looks for the state of its random numbers under this name. Other formats keep the object's file."""
    name, state = "rng_state/shard_0.0_1.1", [{"torch_rng_state": torch.arange(9, dtype=torch.uint8), "np_rng_state": np.random.get_state()}]
    dcp.save({name: state, "output_layer.weight": torch.ones(2, 3)}, checkpoint_id=tmp_path / "source", no_dist=True,
             planner=DefaultSavePlanner(flatten_state_dict=False))
    source = tmp_path / "source"
    for number, target in enumerate(("dcp", "native", "safetensors", "rank_files", "torch", "dcp")):
        moved = tmp_path / f"{number}"
        document = json.loads(succeed("ckpt-reshard", source, moved, "--to", target, "--json"))
        assert not {change["kind"] for change in document["changes"]} & {"value_types", "nested_keys"}, document["changes"]
        source = moved
        succeed("ckpt-inspect", "verify", source)
        if target == "torch":
            mark, saved = torch.load(moved)[name]
            assert mark == "torch.save"
            assert torch.equal(torch.load(io.BytesIO(saved), weights_only=False)[0]["torch_rng_state"], state[0]["torch_rng_state"])
        if target == "dcp":
            found = {name: io.BytesIO()}
            dcp.load(found, checkpoint_id=moved, no_dist=True)
            assert torch.equal(found[name][0]["torch_rng_state"], state[0]["torch_rng_state"])
            assert (found[name][0]["np_rng_state"][1] == state[0]["np_rng_state"][1]).all()


def test_code_in_the_place_of_an_object_is_never_made_one(tmp_path):
    """Shows A3. Bytes in a file of another format must not become a pickle that PyTorch runs."""
    class Hostile:
        def __reduce__(self):
            return (exec, ("raise SystemExit",))

    saved = io.BytesIO()
    torch.save([Hostile(), torch.ones(2)], saved)
    name = "rng_state/shard_0.0_1.1"
    torch.save({name: ("torch.save", saved.getvalue()), "w": torch.ones(2)}, tmp_path / "source.pt")
    moved = reshard(tmp_path / "source.pt", tmp_path / "moved", "--to", "dcp")
    found = {name: None}
    dcp.load(found, checkpoint_id=moved, no_dist=True)
    assert found[name] == ("torch.save", saved.getvalue())


def test_flat_buffers_are_of_the_optimizer(tmp_path):
    """Shows B15. Their names (`dp_reshardable`) have no parameter's name. They are left out with the optimizer, and never rounded."""
    begin = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0."
    state = {"output_layer.weight": torch.rand(2, 3)} | {begin + kind: torch.rand(9) for kind in ("exp_avg", "exp_avg_sq", "param")}
    dcp.save(state, checkpoint_id=tmp_path / "source", no_dist=True)
    weights = reshard(tmp_path / "source", tmp_path / "weights", "--to", "torch", "--drop-optimizer")
    assert set(torch.load(weights)) == {"output_layer.weight"}
    cast = torch.load(reshard(tmp_path / "source", tmp_path / "cast", "--to", "torch", "--cast", "bfloat16"))
    assert {name: tensor.dtype == torch.bfloat16 for name, tensor in cast.items()} == {name: name == "output_layer.weight" for name in state}


def test_objects_of_newer_versions_with_arguments_are_refused_by_name(tmp_path):
    name = "common_state/shard_0_1"
    dcp.save({name: [{"args": argparse.Namespace(lr=0.1)}], "output_layer.weight": torch.ones(2, 3)}, checkpoint_id=tmp_path / "source", no_dist=True)
    refused = run("ckpt-reshard", tmp_path / "source", tmp_path / "moved", "--to", "dcp")
    assert refused.returncode == 3 and name in refused.stderr and "argparse.Namespace" in refused.stderr
    assert succeed("ckpt-reshard", tmp_path / "source", tmp_path / "moved", "--to", "dcp", "--only", f"!{name}")


def test_what_megatron_wrote_goes_to_hugging_face_by_the_recipe_back(tmp_path):
    """Shows F3. Four ranks wrote the source. The inverse recipe unstacks layers and splits QKV and the gate. It takes
    the sizes from the model's config.json."""
    model = tmp_path / "model"
    model.mkdir()
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "hidden_size": 8}
    (model / "config.json").write_text(json.dumps(config))
    weights = ["--inverse", "--only", "model", "--only", "lm_head"]
    moved = reshard(WRITTEN / "llama", tmp_path / "hf", "--to", "safetensors", *LLAMA, *weights, "--extra-files-from", model)
    assert sorted(path.name for path in moved.iterdir()) == ["config.json", "model.safetensors"]
    found, expected = load_file(moved / "model.safetensors"), torch.load(WRITTEN / "llama.hugging_face.pt", weights_only=True)
    assert found.keys() == expected.keys() and len(found) == 39
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    settings = [f"--set={name}={value}" for name, value in HEADS.items()]
    assert "proved" in succeed("ckpt-inspect", "recipe", "check", LLAMA[1], WRITTEN / "llama", "--inverse", *settings)


@pytest.mark.parametrize("name", ["experts", "prefixed"])
def test_the_optimizer_of_experts_follows_its_parameters(tmp_path, name):
    """Shows F3. Two expert ranks saved the distributed optimizer as fully_reshardable: fp32 weights and moments move,
    by layer and expert."""
    recipe = tmp_path / "recipe.json"
    recipe.write_text('{"schema": 1, "megatron": "from", "rest": "keep", "rules": []}')
    moved = reshard(WRITTEN / name, tmp_path / "moved", "--to", "dcp", "--world-size", "3")
    held = torch.load(WRITTEN / "experts.held.pt", weights_only=True)
    found = torch.load(reshard(moved, tmp_path / "whole.pt", "--recipe", recipe), weights_only=True)
    flat = {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}
    flat = {key.split("optimizer.state.")[-1]: value for key, value in flat.items()}
    assert len(flat) == 4 * len(held["param"])  # weights, their fp32 copies, two moments
    for kind, tensors in held.items():
        for parameter, tensor in tensors.items():
            assert torch.equal(flat[f"{kind}.{parameter}"], tensor), (kind, parameter)
    assert all(torch.equal(flat[parameter], tensor.bfloat16()) for parameter, tensor in held["param"].items())


def test_state_of_another_shape_than_its_parameter_is_refused_by_name(tmp_path):
    """`fully_sharded_model_space` of older versions has flat state. A recipe cannot cut it; a move without a recipe
    keeps it unchanged."""
    name = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight"
    dcp.save({"decoder.layers.mlp.linear_fc2.weight": torch.ones(2, 3, 4), name: torch.ones(2, 1, 1, 12)}, checkpoint_id=tmp_path / "run", no_dist=True)
    refused = run("ckpt-reshard", tmp_path / "run", tmp_path / "hf", "--to", "safetensors", *LLAMA, "--inverse", *(f"--set={n}={v}" for n, v in HEADS.items()))
    assert refused.returncode == 3 and name in refused.stderr
    assert torch.equal(loaded(reshard(tmp_path / "run", tmp_path / "moved", "--to", "dcp"), {name: torch.zeros(2, 1, 1, 12)})[name], torch.ones(2, 1, 1, 12))


@pytest.mark.parametrize("damage, found", [
    (lambda folder: (folder / "common.pt").unlink(), "common.pt: structure: expected this file of Megatron's torch_dist"),
    (lambda folder: (folder / "metadata.json").unlink(), "metadata.json: structure: expected the file that Megatron writes last"),
    (lambda folder: (folder / "metadata.json").write_text("{"), "metadata.json: structure: expected an object with"),
    (lambda folder: flip_a_bit(folder / "common.pt", "data.pkl"), "common.pt: "),
], ids=["no-common", "no-config", "other-config", "flipped"])
def test_verify_finds_damage_beside_the_tensors(tmp_path, damage, found):
    """Shows F3. Megatron refuses such a folder. If `verify` is divided into parts, exactly one part finds the damage."""
    folder = tmp_path / "run"
    shutil.copytree(WRITTEN / "llama", folder)
    assert succeed("ckpt-inspect", "verify", folder).startswith("sound")
    damage(folder)
    whole = run("ckpt-inspect", "verify", folder)
    assert whole.returncode == 1 and found in whole.stderr + whole.stdout
    parts = [run("ckpt-inspect", "verify", folder, "--json", "--part", f"{i}/3") for i in range(3)]
    assert sorted(part.returncode for part in parts) == [0, 0, 1]


class Hostile:
    def __reduce__(self):
        return (exec, ("raise SystemExit",))


def test_verify_notes_foreign_names_of_common(tmp_path):
    """Shows F3. Megatron's own classes get no note: `args` is an argparse.Namespace in each of its files."""
    folder = shutil.copytree(WRITTEN / "llama", tmp_path / "run", copy_function=shutil.copyfile)
    assert succeed("ckpt-inspect", "verify", folder).startswith("sound:")
    common = torch.load(folder / "common.pt", weights_only=False)
    torch.save(common | {"other": Hostile()}, folder / "common.pt")
    verified = succeed("ckpt-inspect", "verify", folder)
    assert "common.pt: foreign: expected only classes" in verified and "found builtins.exec; nothing was executed" in verified, verified


def test_a_dry_run_refuses_steps_that_differ(tmp_path):
    """Shows F3. Megatron's format has one number of steps for all parameters."""
    weights = {f"decoder.layers.{i}.mlp.linear_fc2.weight": torch.randn(4, 4) for i in range(2)}
    state = {name: {"exp_avg": torch.ones_like(each), "step": torch.tensor(float(i + 3))} for i, (name, each) in enumerate(weights.items())}
    dcp.save({"model": weights, "optim": {"state": state}}, checkpoint_id=tmp_path / "run", no_dist=True)
    for dry in ([], ["--dry-run"]):
        refused = run("ckpt-reshard", tmp_path / "run", tmp_path / "torch_dist", "--to", "megatron", *dry)
        assert refused.returncode == 3, dry  # which of the two steps is named first, depends on threads
        assert "mlp.linear_fc2.weight.step: step: expected" in refused.stderr and "Megatron keeps one number" in refused.stderr
    assert not (tmp_path / "torch_dist").exists()


def test_bf16_weights_get_copies_in_fp32_and_a_note(tmp_path):
    """Shows F3. The source's `global_step` becomes `iteration` in common.pt, where Megatron reads it."""
    weights = {"decoder.layers.0.mlp.linear_fc2.weight": torch.randn(4, 4).bfloat16(), "output_layer.weight": torch.randn(6, 4).bfloat16()}
    state = {name: {"exp_avg": torch.randn(each.shape)} for name, each in weights.items()}
    dcp.save({"model": weights, "optim": {"state": state}, "global_step": 9}, checkpoint_id=tmp_path / "run", no_dist=True)
    moved = run("ckpt-reshard", tmp_path / "run", tmp_path / "torch_dist", "--to", "megatron")
    assert moved.returncode == 0 and "expected a copy in fp32 in the state of the optimizer, as Megatron has it, found none for this weight and 1 more" in moved.stderr
    name = "optimizer.state.param.output_layer.weight"
    assert torch.equal(loaded(tmp_path / "torch_dist", {name: torch.zeros(6, 4)})[name], weights["output_layer.weight"].float())
    with torch.serialization.safe_globals([argparse.Namespace]):
        assert torch.load(tmp_path / "torch_dist" / "common.pt", weights_only=True)["iteration"] == 9


def test_keys_of_the_common_state_keep_their_order(tmp_path):
    """Shows F3. Keys have the order of the first rank's file. Keys that Tessera adds for Megatron come after them. The optimizer
    comes just before its scheduler."""
    moved = reshard(VALID / "tp2", tmp_path / "torch_dist", "--to", "megatron")
    with torch.serialization.safe_globals([argparse.Namespace]):
        common = torch.load(moved / "common.pt", weights_only=True)
        (file,) = (VALID / "tp2").glob("iter_*/mp_rank_00/model_optim_rng.pt")
        saved = torch.load(file, weights_only=True)

    def begins(found, expected):
        return [key for key in found if key in expected] == [key for key in expected if key in found] and list(expected)[0] == list(found)[0]

    outermost = [key for key in saved if key in common]
    assert outermost.index("optimizer") + 1 == outermost.index("opt_param_scheduler")
    assert [key for key in common if key in saved] == outermost
    assert begins(vars(common["args"]), vars(saved["args"]))
    assert begins(common["optimizer"]["param_groups"][0], {key: 0 for key in saved["optimizer"]["param_groups"][0] if key != "params"})
    assert begins(common["opt_param_scheduler"], saved["opt_param_scheduler"])


def save_ranks(folder, ranks):
    """Saves the file of each rank, as Megatron-LM does. `ranks`: by the name of the rank's folder, the arguments and the rest."""
    for name, (arguments, state) in ranks.items():
        (folder / "iter_0000001" / name).mkdir(parents=True)
        torch.save({"args": argparse.Namespace(**arguments), "checkpoint_version": 3.0, "iteration": 1} | state,
                   folder / "iter_0000001" / name / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("1")
    return folder


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_tensor_without_a_rule_is_named_or_refused(tmp_path, is_trained):
    """Shows F3, A2. Equal on both tensor ranks, as a new LoRA matrix is. If its optimizer state is not equal, the ranks have parts of it."""
    own = "decoder.layers.0.mlp.lora_up.weight"

    def of_rank(rank):
        weights = {"embedding.word_embeddings.weight": torch.full((4, 2), 1.0 + rank), own: torch.zeros(2, 2)}
        state = {i: {"exp_avg": torch.full_like(weight, 1.0 + rank), "step": torch.tensor(3.0)} for i, weight in enumerate(weights.values())}
        group = {"lr": 0.1, "wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "params": [0, 1]}
        optimizer = {"optimizer": {"state": state, "param_groups": [group]}} if is_trained else {}
        return {"rank": rank, "tensor_model_parallel_size": 2}, {"model": weights} | optimizer

    folder = save_ranks(tmp_path / "run", {f"mp_rank_0{rank}": of_rank(rank) for rank in range(2)})
    process = run("ckpt-reshard", folder, tmp_path / "moved.pt", "--only", "model")
    if is_trained:
        assert process.returncode == 3 and "with different optimizer state on the tensor ranks" in process.stderr
    else:
        assert f"1 name without a rule, but equal on all tensor ranks, such as '{own}'; read as the whole tensor" in process.stderr


def test_layers_without_tensors_are_noted(tmp_path):
    """Shows F3. The second layer of the first stage does nothing and has no tensors, so the next stage's layers get other numbers."""
    norm = "decoder.layers.{}.input_layernorm.weight"
    weights = [{norm.format(0): torch.zeros(2)}, {norm.format(0): torch.ones(2), norm.format(1): torch.ones(2)}]
    folder = save_ranks(tmp_path / "run", {
        f"mp_rank_00_00{stage}": ({"rank": stage, "pipeline_model_parallel_size": 2, "num_layers": 4}, {"model": weights[stage]}) for stage in range(2)})
    assert "expected tensors in each of the 4 layers of args.num_layers, found layers with tensors: 3" in run("ckpt-inspect", "ls", folder).stderr


@pytest.mark.parametrize("groups, decay, found", [
    ([["decoder.final_layernorm.weight", "embedding.word_embeddings.weight"]], 0.0, None),  # as Adam has it by default
    ([["embedding.word_embeddings.weight"], ["decoder.final_layernorm.weight"]], 0.1, None),
    ([["decoder.final_layernorm.weight"], ["embedding.word_embeddings.weight"]], 0.1, "for this weight and 1 more"),
    ([["embedding.word_embeddings.weight", "decoder.final_layernorm.weight"]], 0.1, "for this weight (in Megatron")])
def test_weights_that_get_the_fields_of_another_group_are_named(tmp_path, groups, decay, found):
    """Shows F3. Megatron gives vectors no weight decay, and matrices some."""
    model = {"embedding.word_embeddings.weight": torch.ones(4, 2), "decoder.final_layernorm.weight": torch.ones(2)}
    state = {name: {"exp_avg": torch.zeros_like(weight), "step": torch.tensor(3.0)} for name, weight in model.items()}
    fields = [{"lr": 1e-3, "weight_decay": decay}, {"lr": 1e-4, "weight_decay": 0.0}]
    listed = [each | {"params": names} for each, names in zip(fields, groups)]
    torch.save({"model": model, "optim": {"state": state, "param_groups": listed}}, tmp_path / "saved.pt")
    process = run("ckpt-reshard", tmp_path / "saved.pt", tmp_path / "moved", "--to", "megatron")
    assert process.returncode == 0
    assert f"found another group {found}" in process.stderr if found else "param_groups" not in process.stderr
