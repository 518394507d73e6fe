"""Where the numbers of a torch_dist checkpoint are after moves to other formats, by a recipe to other names, and back.

PyTorch writes the sources, as Megatron does: with rows of the gate and of the up projection that take turns, with numbers for
layers, or neither.
"""

import argparse
import io
import json
import shutil

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
ONLY_EMBEDDING = {"schema": 1, "megatron": "to", "rest": "keep", "rules": [{"from": "words", "to": "embedding.word_embeddings.weight"}]}
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
    halves = {name: tensor for name, tensor in found.items() if name.endswith((".gate", ".up"))}
    assert_equal({name: half for name, half in halves.items() if "state.param." not in name}, ALL_HALVES)


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


@pytest.mark.parametrize("format", ["dcp", "native", "safetensors"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_recipe_leads_to_other_names_and_back_any_number_of_times(kind, format, tmp_path):
    """`common.pt` stays beside the new names only while it tells the truth about the order of rows."""
    recipe = save_recipe(tmp_path)
    source = save_torch_dist(tmp_path / "source", kind)
    halved = reshard(source, tmp_path / "halved", "--to", format, *recipe, "--inverse")
    assert_halves(halved, tmp_path)
    stays = kind != "turns" and format != "safetensors"
    assert (halved / "common.pt").exists() == (halved / "metadata.json").exists() == stays
    back = reshard(halved, tmp_path / "back", "--to", "megatron", *recipe)
    found = flat_in(back, tmp_path)
    expected = tensors_of(kind if stays else "plain", 0)
    copies = [] if stays else [FC1.replace(".{}", "")]  # of the weights with moments
    assert_equal(found, expected | {f"optimizer.state.param.{name}": expected[name] for name in copies})
    common = torch.load(back / "common.pt", weights_only=False)
    assert ("iteration" in common) == stays and not hasattr(common["args"], "moe_mlp_glu_interleave_size")
    assert_halves(reshard(back, tmp_path / "again", "--to", "dcp", *recipe, "--inverse"), tmp_path)


def test_a_recipe_that_puts_rows_in_order_says_so_and_leaves_common_out(tmp_path):
    moved = run("ckpt-reshard", save_torch_dist(tmp_path / "source", "turns"), tmp_path / "moved", "--to", "dcp", *save_recipe(tmp_path), "--inverse")
    assert moved.returncode == 0
    assert f"{LAYERS * EXPERTS} tensors in which rows of gate and up took turns every 2" in moved.stderr
    assert "2 extra files not copied: common.pt, metadata.json (says that rows of experts take turns, which a recipe changed)" in moved.stdout


def test_the_check_of_a_recipe_knows_that_it_puts_rows_in_order(tmp_path):
    source = save_torch_dist(tmp_path / "source", "turns")
    checked = run("ckpt-inspect", "recipe", "check", save_recipe(tmp_path)[1], source, "--inverse")
    assert checked.returncode == 0 and f"{LAYERS * EXPERTS} tensors in which rows of gate and up took turns" in checked.stdout + checked.stderr, checked


def test_a_recipe_without_a_rule_for_these_rows_keeps_their_order(tmp_path):
    recipe = save_recipe(tmp_path, ONLY_EMBEDDING)
    source = save_torch_dist(tmp_path / "source", "turns")
    moved = run("ckpt-reshard", source, tmp_path / "moved", "--to", "dcp", *recipe, "--inverse")
    assert moved.returncode == 0 and "rows" not in moved.stderr
    back = reshard(tmp_path / "moved", tmp_path / "back", "--to", "megatron", *recipe)
    assert_equal(flat_in(back, tmp_path), flat_in(source, tmp_path))
    assert (back / "common.pt").read_bytes() == (source / "common.pt").read_bytes()


@pytest.mark.parametrize("where", ["beside", "given"])
def test_common_that_says_that_rows_take_turns_does_not_go_to_rows_that_a_recipe_makes(where, tmp_path):
    """Such a file is beside tensors that an older version moved, or in a folder of `--extra-files-from`."""
    recipe = save_recipe(tmp_path)
    source = save_torch_dist(tmp_path / "source", "turns")
    halved = tmp_path / "halved"
    dcp.save(ALL_HALVES | {"embedding.word_embeddings.weight": torch.ones(4, 2)}, checkpoint_id=halved, no_dist=True)
    given = ["--extra-files-from", source] if where == "given" else []
    if where == "beside":
        for name in ("common.pt", "metadata.json"):
            shutil.copyfile(source / name, halved / name)
    moved = run("ckpt-reshard", halved, tmp_path / "moved", "--to", "megatron", *recipe, *given)
    assert moved.returncode == 0 and "rows of experts: expected rows of gate and up that take turns every 2" in moved.stderr, moved.stderr
    assert not hasattr(torch.load(tmp_path / "moved" / "common.pt", weights_only=False)["args"], "moe_mlp_glu_interleave_size")
    assert_halves(reshard(tmp_path / "moved", tmp_path / "again", "--to", "dcp", *recipe, "--inverse"), tmp_path)


def save_other(tmp_path):
    torch.save({"extra": {"x": torch.ones(2)}}, tmp_path / "other.pt")
    return tmp_path / "other.pt"


@pytest.mark.parametrize("prefix", ["", "run"])
@pytest.mark.parametrize("is_first", [True, False])
def test_each_source_of_a_merge_has_its_own_arguments(prefix, is_first, tmp_path):
    source = save_torch_dist(tmp_path / "source", "turns")
    sources = [f"{prefix}={source}" if prefix else source, save_other(tmp_path)]
    options = ["--to", "dcp", *save_recipe(tmp_path), "--inverse", *(["--set", f"prefix={prefix}."] if prefix else [])]
    moved = run("ckpt-reshard", "merge", *(sources if is_first else sources[::-1]), tmp_path / "moved", *options)
    assert moved.returncode == 0, moved.stderr
    found = flat_in(tmp_path / "moved", tmp_path)
    start = f"{prefix}." if prefix else ""
    assert_equal({name: tensor for name, tensor in found.items() if name.startswith(f"{start}layers.")},
                 {start + name: half for name, half in halves().items()})


def test_sources_with_rows_in_other_orders_are_refused(tmp_path):
    """Also if only one of them has arguments that say so."""
    turns, plain = (save_torch_dist(tmp_path / kind, kind) for kind in ("turns", "plain"))
    recipe = ["--to", "dcp", *save_recipe(tmp_path), "--inverse", "--set", "prefix=a."]
    moved = run("ckpt-reshard", "merge", f"a={turns}", f"b={plain}", tmp_path / "moved", *recipe)
    assert moved.returncode == 3 and f"{plain}: {FC1.replace('.{}', '')}: order of rows: expected rows that take turns every 2" in moved.stderr, moved.stderr
    alike = reshard(turns, tmp_path / "alike", "--to", "dcp")
    assert run("ckpt-reshard", "merge", f"a={turns}", f"b={alike}", tmp_path / "moved", *recipe).returncode == 0


@pytest.mark.parametrize("kinds, code", [(("turns", "plain"), 3), (("plain", "turns"), 3), (("turns", "turns"), 0)])
def test_a_combination_of_rows_in_other_orders_is_refused_by_a_recipe(kinds, code, tmp_path):
    sources = [f"--linear=0.5={save_torch_dist(tmp_path / str(i), kind)}" for i, kind in enumerate(kinds)]
    options = ["--to", "dcp", "--drop-optimizer", "--only", "!optimizer", *save_recipe(tmp_path), "--inverse"]
    moved = run("ckpt-reshard", "combine", tmp_path / "moved", *sources, *options)
    assert moved.returncode == code, moved.stderr
    assert (" in source 2" in moved.stderr) == (code == 3), moved.stderr
    if code == 0:
        found = flat_in(tmp_path / "moved", tmp_path)
        assert_equal({name: found[name] for name in halves()}, halves())


class Arguments:
    """As another program may save them."""

    moe_mlp_glu_interleave_size = 2


@pytest.mark.parametrize("damage", ["other class", "truncated"])
def test_rows_whose_order_is_not_known_are_refused_if_a_rule_uses_them(damage, tmp_path):
    source = save_torch_dist(tmp_path / "source", "turns", {"args": Arguments()} if damage == "other class" else None)
    if damage == "truncated":
        (source / "common.pt").write_bytes((source / "common.pt").read_bytes()[:200])
    moved = run("ckpt-reshard", source, tmp_path / "moved", "--to", "dcp", *save_recipe(tmp_path), "--inverse")
    assert moved.returncode == 3 and "order of rows: expected arguments in common.pt" in moved.stderr, moved.stderr
    kept = run("ckpt-reshard", source, tmp_path / "moved", "--to", "dcp", *save_recipe(tmp_path, ONLY_EMBEDDING), "--inverse")
    assert kept.returncode == 0, kept.stderr


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


@pytest.mark.parametrize("version, code", [(None, 3), (3.0, 0)])
@pytest.mark.parametrize("prefix", ["", "run"])
@pytest.mark.parametrize("is_first", [True, False])
def test_the_version_counts_for_the_source_that_states_it(is_first, prefix, version, code, tmp_path):
    """Version 0, also of a file that states none, has the rows of Q, K and V in another order."""
    name = "language_model.transformer.layers.0.attention.query_key_value.weight"
    rank = tmp_path / "run" / "iter_0000001" / "mp_rank_00"
    rank.mkdir(parents=True)
    args = argparse.Namespace(tensor_model_parallel_size=1, rank=0)
    torch.save({"iteration": 1, "model": {name: torch.ones(12, 2)}, "args": args} | ({"checkpoint_version": version} if version else {}), rank / "model_optim_rng.pt")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("1")
    start = f"{prefix}." if prefix else ""
    recipe = save_recipe(tmp_path, {"schema": 1, "megatron": "from", "rest": "keep", "rules": [{"from": f"{start}model.{name}", "to": "qkv"}]})
    sources = [f"{prefix}={tmp_path / 'run'}" if prefix else tmp_path / "run", save_other(tmp_path)]
    moved = run("ckpt-reshard", "merge", *(sources if is_first else sources[::-1]), tmp_path / "moved", "--to", "dcp", *recipe)
    assert moved.returncode == code and ("expected checkpoint_version 2 or later" in moved.stderr) == (code == 3), moved.stderr


OBJECT = "common_state/shard_0_1"


class MegatronPlanner(dcp.DefaultSavePlanner):
    """Megatron saves the objects itself, so a buffer is written as it is."""

    def transform_object(self, write_item, object):
        return object if isinstance(object, io.BytesIO) else super().transform_object(write_item, object)


def save_with_object(folder, kind="turns", common=None, is_flattened=False):
    """Saves torch_dist as newer versions of Megatron do: with an object in place of `common.pt`."""
    saved = io.BytesIO()
    torch.save([common or {"iteration": 5, "args": argparse.Namespace(tensor_model_parallel_size=1, moe_mlp_glu_interleave_size=2)}], saved)
    planner = MegatronPlanner(flatten_state_dict=is_flattened)
    dcp.save(tensors_of(kind, 2 if kind == "turns" else 0) | {OBJECT: saved}, checkpoint_id=folder, no_dist=True, planner=planner)
    (folder / "metadata.json").write_text(TORCH_DIST)
    return folder


@pytest.mark.parametrize("is_flattened", [False, True])
def test_the_object_in_place_of_common_says_whether_rows_take_turns(is_flattened, tmp_path):
    source = save_with_object(tmp_path / "source", is_flattened=is_flattened)
    moved = run("ckpt-reshard", source, tmp_path / "moved", "--to", "dcp", *save_recipe(tmp_path), "--inverse")
    assert moved.returncode == 0 and f"{LAYERS * EXPERTS} tensors in which rows of gate and up took turns every 2" in moved.stderr, moved.stderr
    assert_halves(tmp_path / "moved", tmp_path)
    assert "1 extra file not copied: metadata.json" in moved.stdout and not (tmp_path / "moved" / "metadata.json").exists()
    checked = run("ckpt-inspect", "verify", tmp_path / "moved")
    assert checked.returncode == 0, checked.stdout
    checked = run("ckpt-inspect", "recipe", "check", save_recipe(tmp_path)[1], source, "--inverse")
    assert "tensors in which rows of gate and up took turns" in checked.stdout + checked.stderr


def test_an_object_of_plain_values_says_so_in_other_formats(tmp_path):
    source = save_with_object(tmp_path / "source", common={"args": {"moe_mlp_glu_interleave_size": 2}})
    native = reshard(source, tmp_path / "native", "--to", "native")
    for prefix in ("", "run."):
        sources = [f"run={native}", save_other(tmp_path)] if prefix else [native]
        options = ["--to", "dcp", *save_recipe(tmp_path), "--inverse", *(["--set", f"prefix={prefix}"] if prefix else [])]
        moved = run("ckpt-reshard", *(["merge"] if prefix else []), *sources, tmp_path / f"moved{prefix}", *options)
        assert moved.returncode == 0, moved.stderr
        found = flat_in(tmp_path / f"moved{prefix}", tmp_path)
        assert_equal({name: each for name, each in found.items() if name.startswith(f"{prefix}layers.")},
                     {prefix + name: half for name, half in halves().items()})


def test_a_recipe_that_leaves_out_the_object_leaves_out_the_file_that_describes_it(tmp_path):
    source = save_with_object(tmp_path / "source", "plain", {"args": argparse.Namespace(tensor_model_parallel_size=1)})
    moved = run("ckpt-reshard", source, tmp_path / "moved", "--to", "dcp", *save_recipe(tmp_path), "--inverse")
    assert moved.returncode == 0 and "metadata.json (describes Megatron's common state, which a recipe left out)" in moved.stdout, moved.stdout
    assert_halves(tmp_path / "moved", tmp_path)


@pytest.mark.parametrize("is_flattened", [False, True])
@pytest.mark.parametrize("damage", ["other class", "bytes"])
def test_rows_are_refused_if_the_object_cannot_be_read(damage, is_flattened, tmp_path):
    common = {"args": Arguments()} if damage == "other class" else None
    source = save_with_object(tmp_path / "source", common=common, is_flattened=is_flattened)
    if damage == "bytes":
        data = (source / "__0_0.distcp").read_bytes()
        (source / "__0_0.distcp").write_bytes(data.replace(b"moe_mlp_glu_interleave_size", b"moe_mlp_glu_interleave_sizE"))
    moved = run("ckpt-reshard", source, tmp_path / "moved", "--to", "dcp", *save_recipe(tmp_path), "--inverse")
    assert moved.returncode == 3 and "or in the object common_state" in moved.stderr and "an object that cannot be read" in moved.stderr, moved.stderr


@pytest.mark.parametrize("size, code", [(2, 0), (4, 3)])
def test_both_common_and_the_object_must_say_the_same(size, code, tmp_path):
    source = save_with_object(tmp_path / "source")
    torch.save({"args": argparse.Namespace(tensor_model_parallel_size=1, moe_mlp_glu_interleave_size=size)}, source / "common.pt")
    moved = run("ckpt-reshard", source, tmp_path / "moved", "--to", "dcp", *save_recipe(tmp_path), "--inverse")
    assert moved.returncode == code, moved.stderr
    assert ("moe_mlp_glu_interleave_size 4 in common.pt and 2 in the object" in moved.stderr) == (code == 3), moved.stderr


def test_an_object_that_is_wrong_after_a_recipe_does_not_stay(tmp_path):
    """It is beside tensors of other names, as an older version moved them."""
    saved = io.BytesIO()
    torch.save([{"args": {"moe_mlp_glu_interleave_size": 2}}], saved)
    dcp.save(ALL_HALVES | {"embedding.word_embeddings.weight": torch.ones(4, 2), OBJECT: saved}, checkpoint_id=tmp_path / "halved",
             no_dist=True, planner=MegatronPlanner())
    moved = run("ckpt-reshard", tmp_path / "halved", tmp_path / "moved", "--to", "megatron", *save_recipe(tmp_path))
    assert moved.returncode == 0 and "rows of experts: expected rows of gate and up that take turns every 2" in moved.stderr, moved.stderr
    assert OBJECT not in dcp.FileSystemReader(tmp_path / "moved").read_metadata().state_dict_metadata


def test_verify_knows_the_object_with_arguments(tmp_path):
    checked = run("ckpt-inspect", "verify", save_with_object(tmp_path / "source"))
    assert checked.returncode == 0 and "incomplete" not in checked.stdout, checked.stdout
