"""Checkpoints of DeepSpeed with pipeline and tensor parallelism: what differs is noted, what cannot be joined is refused."""

import json
import shutil

import pytest
import torch
from ckpt_tools import assert_same_state, expectation, listing, reshard, run, succeed, tensors_by_name
from test_deepspeed import VALID, classes_of_deepspeed, edit, notes_of_move  # noqa: F401

MODELS = ("mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt")
STAGE_1 = ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "zero_pp_rank_1_mp_rank_01_optim_states.pt")


@pytest.fixture
def step_of(tmp_path, classes_of_deepspeed):  # noqa: F811
    """Returns a function that copies a fixture and returns the folder of its step."""
    return lambda name: shutil.copytree(VALID / name, tmp_path / name, copy_function=shutil.copyfile) / "global_step2"


def with_rules(step, **members):
    for file in MODELS:
        edit(step / file, lambda state: state["universal_checkpoint_info"].update(members))
    return step


def rows(path, *options):
    return tensors_by_name(json.loads(succeed("ckpt-inspect", "ls", path, "--json", "--sha256", *options)))


@pytest.mark.parametrize("name", ["pipeline", "tensor_pipeline", "autotp"])
def test_the_model_alone_becomes_safetensors(name, tmp_path):
    """Shows F2. The file has whole tensors, which other programs can load."""
    moved = reshard(VALID / name, tmp_path / "model.safetensors", "--only", "model", "--rename", "model.=")
    expected = {row["name"].removeprefix("model."): row["sha256"] for row in expectation(VALID / name)["tensors"]
                if row["name"].startswith("model.")}
    assert {row["name"]: row["sha256"] for row in listing(moved)["tensors"]} == expected


def test_other_numbers_in_a_layer_and_in_a_shared_module_are_noted(step_of, tmp_path):
    """Shows F2, E13. Tessera reads the master weights; for a shared module it reads those of the first stage."""
    step = step_of("pipeline")
    edit(step / "layer_03-model_states.pt", lambda state: state["down"].view(-1)[47].add_(1))
    for file in STAGE_1:
        edit(step / file, lambda state: state["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].detach()[:1].add_(1))
    assert notes_of_move(step, tmp_path / "moved.pt") == [
        "copies: 2 names with different numbers in the copies, such as '3.down'; the master weights are read",
        "replicas: 1 name with different numbers in the copies, such as 'tied_modules.embed.weight'; "
        "the copies of the first rank are read"]


@pytest.mark.parametrize("masters", [None, "fp32_groups_flat", "fp32_groups"])
def test_master_weights_without_names_are_noted(masters, step_of, tmp_path):
    """Shows F2, E13. In fp16 without ZeRO, the optimizer has more exact weights, but no file says which is whose."""
    step = step_of("pipeline_fp32_without_zero")
    for file in step.glob("mp_rank_*"):
        edit(file, lambda state: state["optimizer"].update({masters: [torch.ones(4)]}) if masters else None)
    moved = run("ckpt-reshard", step, tmp_path / "moved.pt", "--only", "model")
    assert moved.returncode == 0, moved.stderr
    assert ("fp32 master weights (saved only with ZeRO), found none; the weights of the module are read" in moved.stderr) == bool(masters)


@pytest.mark.parametrize("name, file, key, place", [
    ("pipeline_bf16", "layer_03-model_states.pt", "down", "in the files of layers"),
    ("autotp", MODELS[1], "model.norm.weight", "the dicts 'module' of all mp_rank_*_model_states.pt")])
def test_newer_copies_of_zenflow_are_named_on_every_rank(name, file, key, place, step_of, tmp_path):
    """Shows F2, E13."""
    step = step_of(name)
    for each in step.glob("*_states.pt"):
        edit(each, lambda state: state["ds_config"]["zero_optimization"].update(zenflow={"topk_ratio": 0.1}) if "ds_config" in state else None)
    edit(step / file, lambda state: state.get("module", state)[key].view(-1)[1].add_(1))
    assert any(note.endswith(f"the master weights are read, but with ZenFlow the module's copies are newer; they are {place}")
               for note in notes_of_move(step, tmp_path / "moved.pt"))


@pytest.mark.parametrize("name, file, key, parameter", [
    ("pipeline_bf16", "layer_03-model_states.pt", "down", "3.down"),
    ("autotp", MODELS[1], "model.norm.weight", "model.norm.weight")])
def test_other_numbers_in_a_copy_of_16_bits_are_noted(name, file, key, parameter, step_of, tmp_path):
    """Shows F2, E13. Each tensor rank's part is compared with the master weights of that rank."""
    step = step_of(name)
    plain = notes_of_move(step, tmp_path / "plain.pt")
    assert not any("different numbers" in note for note in plain)
    edit(step / file, lambda state: state.get("module", state)[key].view(-1)[1].add_(1))
    assert set(notes_of_move(step, tmp_path / "moved.pt")) - set(plain) == {
        f"copies: 1 name with different numbers in the copies, such as '{parameter}'; the master weights are read"}


def test_a_frozen_layer_like_a_shared_module_keeps_its_number(step_of):
    """Shows F2, A4. Tessera takes a layer for a shared module only if the numbers are equal. So nothing is lost if they
    differ."""
    step = step_of("pipeline")
    edit(step / "layer_00-model_states.pt", lambda state: state["weight"].view(-1)[0].add_(1))
    assert rows(step)["model.0.weight"][1] == [8, 6]


def test_what_else_a_layer_saves_is_there(step_of):
    """Shows A4. Files of layers also have buffers, extra state of modules and values."""
    step = step_of("tensor_pipeline")
    for tensor in (0, 1):
        edit(step / f"layer_03-model_0{tensor}-model_states.pt",
             lambda state: state.update({"norm._extra_state": {"calls": [tensor], "at": torch.tensor([tensor])}}))
    found = listing(step)
    assert found["values"]["model.3.norm._extra_state.calls"] == [0]
    assert found["values"]["per_rank.5.model.3.norm._extra_state.calls"] == [1]
    assert {"model.3.norm._extra_state.at", "per_rank.5.model.3.norm._extra_state.at"} < tensors_by_name(found).keys()


def test_extra_state_that_differs_between_tensor_ranks_stays_apart(step_of, tmp_path):
    """Shows F2, E13. No entry of a dict of one rank gets into that of another rank."""
    for first, second in (({"a": {"x": 1}, "n": 0}, {"a": {"y": 2}, "n": 1}), ({"a": {"x": 1}}, None), (None, {"a": torch.ones(1)}), ([torch.ones(1)], [3, 4])):
        step = step_of("tensor_pipeline")
        for tensor, state in enumerate((first, second)):
            edit(step / f"layer_03-model_0{tensor}-model_states.pt", lambda whole: whole.update({"norm._extra_state": state}))
        whole = torch.load(reshard(step, tmp_path / "whole.pt", "--overwrite"), weights_only=True)
        found = [whole["model"]["3.norm._extra_state"], whole["per_rank"]["5"]["model"]["3.norm._extra_state"]]
        assert str(found) == str([first, second])
        shutil.rmtree(step.parent)


def test_a_frozen_parameter_is_joined_by_its_rule(step_of):
    """Shows F2. A frozen parameter that no rule names is joined along the first dimension if the ranks have different
    numbers."""
    step = step_of("tensor")
    for tensor in (0, 1):
        edit(step / f"layer_01-model_0{tensor}-model_states.pt", lambda state: state["frozen"].fill_(tensor))
        edit(step / f"layer_03-model_0{tensor}-model_states.pt", lambda state: state["frozen"].fill_(tensor))
    with_rules(step, parameter_with_row_parallelism_patterns=[r"\d+.down$", r"3\.frozen"])
    moved = torch.load(reshard(step, step.parent / "moved.pt", "--to", "torch"), weights_only=True)["model"]
    assert torch.equal(moved["1.frozen"], torch.tensor([0.0, 1.0]).repeat_interleave(2)[:, None].expand(4, 6))
    assert torch.equal(moved["3.frozen"], torch.tensor([0.0, 1.0]).repeat_interleave(6).expand(2, 12))


def test_equal_sizes_as_a_number_are_read(step_of):
    """Shows F2. Older files give only the number of parameters in a fused parameter; their sizes are then equal."""
    step = with_rules(step_of("tensor"), parameter_with_sub_params=[{"patterns": [r"\d+\.qkv"], "shape": (3, -1), "partition_dim": 0}])
    whole = torch.load(reshard(step, step.parent / "moved.pt", "--to", "torch"), weights_only=True)["model"]["1.qkv.weight"]
    plain = torch.load(reshard(VALID / "tensor", step.parent / "plain.pt", "--to", "torch"), weights_only=True)["model"]["1.qkv.weight"]
    query, key, value = plain.split((8, 2, 2))
    parts = [torch.cat([each.chunk(2)[tensor] for each in (query, key, value)]) for tensor in (0, 1)]
    assert torch.equal(whole, torch.cat([part.chunk(3)[i] for i in range(3) for part in parts]))


REFUSED = {
    "sub_params": ("tensor", {"parameter_with_sub_params": [{"patterns": [".*qkv"], "shape": ((9, 2, 1), -1), "partition_dim": 0}]},
                   ("1.qkv.weight", "expected sizes that are multiples of 2 (tensor ranks), or sub_param_shard_widths, found (9, 2, 1)")),
    "elements": ("tensor", {"parameter_with_sub_params": [{"patterns": [".*qkv"], "shape": ((8, 2, 2), 5), "partition_dim": 0}]},
                 ("1.qkv.weight", "expected a shape of 36 elements")),
    "widths": ("tensor", {"universal_checkpoint_version": 0.4, "sub_param_shard_widths": {r"\d+\.qkv\.weight": [[4, 4], [1, 1], [1, 2]]}},
               ("1.qkv.weight", "expected sizes of all ranks that add up to (8, 2, 2), found [[4, 4], [1, 1], [1, 2]]")),
    "dimension": ("tensor", {"parameter_with_row_parallelism_patterns": [".*down$", ".*up_bias"]},
                  ("1.up_bias", "expected shapes that differ only in dimension 1, found [4] and [4]")),
    "vocabulary": ("tensor", {"original_vocab_size": None},
                   ("tied_modules.embed.weight", "original_vocab_size: expected the number of rows without padding, found none")),
    "unsupported": ("autotp", {"autotp_unsupported_parameter_patterns": {r"^lm_head\.weight$": "is cut by columns and rows"}},
                    ("lm_head.weight", "found 'is cut by columns and rows'")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_parameter_that_cannot_be_joined_is_refused_alone(case, step_of, tmp_path):
    """Shows F2, E3. The other parameters are read. A move has to leave this one out."""
    name, members, words = REFUSED[case]
    step = with_rules(step_of(name), **members)
    process = run("ckpt-reshard", step, tmp_path / "moved", "--to", "native")
    assert process.returncode == 3 and all(word in process.stderr for word in words), process.stderr
    of_both_layers = "*" + words[0].removeprefix("1")
    moved = reshard(step, tmp_path / "rest", "--to", "native", "--only", f"!model.{of_both_layers}", "--only", f"!optim.state.{of_both_layers}")
    expected = {row["name"]: row["sha256"] for row in expectation(VALID / name)["tensors"]}
    found = {row["name"]: row["sha256"] for row in listing(moved)["tensors"]}
    assert len(expected) > len(found) > 30 and found.items() < expected.items()


@pytest.mark.parametrize("members, words", [
    ({"tp_replicated_parameter_patterns": {"norm": 1}}, "tp_replicated_parameter_patterns: expected patterns of names, found a dict"),
    ({"parameter_with_sub_params": [{"shape": [[8, 2, 2], -1], "partition_dim": 0}]},
     "parameter_with_sub_params: expected patterns of names, found none"),
    ({"parameter_with_sub_params": ["qkv"]}, "parameter_with_sub_params: expected a list of dicts, found ['qkv']"),
    ({"affine_map": ["qkv"]}, "affine_map: expected a dict, found ['qkv']"),
    ({"affine_map": {"version": "1"}}, "affine_map.version: expected 1, found '1'"),
    ({"autotp_unsupported_parameter_patterns": ["qkv"]},
     "autotp_unsupported_parameter_patterns: expected a dict of patterns, found ['qkv']"),
    ({"universal_checkpoint_version": 0.5}, "universal_checkpoint_version: expected a number up to 0.4, found 0.5"),
    ({"universal_checkpoint_version": "0.4"}, "universal_checkpoint_version: expected a number up to 0.4, found '0.4'"),
    ({"sub_param_shard_widths": [[4, 4]]}, "sub_param_shard_widths: expected a dict of patterns, found [[4, 4]]"),
])
def test_rules_of_another_form_are_refused(members, words, step_of):
    """Shows E3. If such a rule were ignored, its parameters would be joined in another way. The user's file is checked
    like this too."""
    step = with_rules(step_of("tensor"), **members)
    process = run("ckpt-inspect", "ls", step)
    assert process.returncode == 3 and f"{MODELS[0]}: universal_checkpoint_info: {words}" in process.stderr, process.stderr
    file = step / "universal_checkpoint_info.json"
    file.write_text(json.dumps(RULES | members))
    process = run("ckpt-inspect", "ls", step)
    assert process.returncode == 3 and f"{file.name}: universal_checkpoint_info: {words}" in process.stderr, process.stderr


def test_unknown_rules_are_noted(step_of, tmp_path):
    """Shows E13. A newer DeepSpeed could cut parameters by rules that Tessera does not know."""
    step = with_rules(step_of("tensor"), parameter_with_other_cuts=[".*"])
    added = set(notes_of_move(step, tmp_path / "other.pt")) - set(notes_of_move(VALID / "tensor", tmp_path / "plain.pt"))
    assert added == {"universal_checkpoint_info: 1 other member, such as 'parameter_with_other_cuts'; not applied"}


def test_other_rules_on_another_rank_are_noted(step_of, tmp_path):
    """Shows E13. There is no note if the user's file has rules, because these are used instead."""
    step = step_of("tensor")
    edit(step / MODELS[1], lambda state: state["universal_checkpoint_info"].update(original_vocab_size=5))
    words = "universal_checkpoint_info: different rules in mp_rank_01_model_states.pt; the rules in mp_rank_00_model_states.pt are applied"
    assert notes_of_move(step, tmp_path / "moved.pt").count(words) == 1
    (step / "universal_checkpoint_info.json").write_text(json.dumps(RULES))
    assert words not in notes_of_move(step, tmp_path / "again.pt")


def test_equal_parts_without_a_rule_are_noted(step_of, tmp_path):
    """Shows E13. If a parameter is replicated, but no rule says so, its joined tensor is twice as large."""
    without_norm = {"tp_replicated_parameter_patterns": [r"\d+.down_bias", r"4\.(weight|bias)"]}
    words = "tensor parallelism: 4 names without a rule, such as '1.norm.weight'; the parts are joined along dimension 0"
    step = with_rules(step_of("tensor"), **without_norm)
    assert words in notes_of_move(step, tmp_path / "moved.pt")
    (step / "universal_checkpoint_info.json").write_text(json.dumps(RULES | without_norm))
    assert words in notes_of_move(step, tmp_path / "again.pt")


def test_a_layer_that_was_frozen_during_the_training_is_read_once(step_of):
    """Shows F2. Stage 3 saves its parameters also as frozen ones."""
    step = step_of("autotp_zero3")
    for file in step.glob("zero_pp_rank_*_model_states.pt"):
        def freeze(state):
            shape = state["param_shapes"][0]["lm_head.weight"]
            state["frozen_param_shapes"] = (state["frozen_param_shapes"] or {}) | {"lm_head.weight": shape}
            state["frozen_param_fragments"] = (state["frozen_param_fragments"] or {}) | {"lm_head.weight": torch.zeros(shape.numel() // 2)}
        edit(file, freeze)
    assert_same_state(listing(step), expectation(VALID / "autotp_zero3"))


def test_equal_frozen_parts_of_stage_3_without_a_rule_are_noted(step_of, tmp_path):
    """Shows E13. The note is the same as for trained parameters."""
    step = step_of("autotp_zero3")
    replicated = [r".*embed_tokens", r".*post_attention_layernorm", r"model\.norm"]
    for file in step.glob("zero_pp_rank_*_model_states.pt"):
        edit(file, lambda state: state["universal_checkpoint_info"].update(affine_map={}, tp_replicated_parameter_patterns=replicated))
    assert ("tensor parallelism: 1 name without a rule, such as 'model.layers.0.input_layernorm.weight'; "
            "the parts are joined along dimension 0"
            in notes_of_move(step, tmp_path / "moved.pt"))


def test_a_vocabulary_with_other_rows_is_noted_with_them(step_of, tmp_path):
    """Shows E13. If these rows are not padding, leaving them out loses data. Frozen parameters are counted too."""
    of_frozen = {"vocabulary_parameter_patterns": [r"tied_modules\.embed\.weight", r"1\.frozen"]}
    step = with_rules(step_of("tensor"), original_vocab_size=100, **of_frozen)
    assert "padding: 2 names with fewer rows, such as 'tied_modules.embed.weight' with 8 rows" in notes_of_move(step, tmp_path / "moved.pt")
    (step / "universal_checkpoint_info.json").write_text(json.dumps(RULES | of_frozen | {"original_vocab_size": 3}))
    assert ("padding: 2 names with more rows (padding, left out), such as 'tied_modules.embed.weight' with 8 rows"
            in notes_of_move(step, tmp_path / "again.pt"))


@pytest.mark.parametrize("change, words", [
    (lambda piece: piece.update(scale=2.0), "expected pieces with the scale 1.0, found 2.0"),
    (lambda piece: piece.update(source=[0, [4, 2]]), "expected pieces that are boxes of [8, 8], found [0, [4, 2]]"),
    (lambda piece: piece.update(source=[60, [8, 1]]), "expected pieces that are boxes of [8, 8], found [60, [8, 1]]"),
    (lambda piece: piece.update(shape=[2**32, 2**32]), "affine_map: expected shape, found [4294967296, 4294967296]"),
    (lambda piece: piece.update(shape=[2, 8]), "expected 32 elements in the pieces of rank 0, found 16"),
], ids=["scaled", "strides", "outside", "overflow", "hole"])
def test_a_map_that_is_not_of_boxes_is_refused(change, words, step_of):
    """Shows F2, E3. The format of AutoTP's maps could describe cuts that are not boxes."""
    step = step_of("autotp")
    for file in MODELS:
        edit(step / file, lambda state: [change(map_of["ranks"][0]["pieces"][0]) for name, map_of in
                                         state["universal_checkpoint_info"]["affine_map"]["params"].items() if "q_proj" in name])
    process = run("ckpt-reshard", step, step.parent / "moved", "--to", "native")
    assert process.returncode == 3 and "q_proj" in process.stderr and words in process.stderr, process.stderr


def test_the_sizes_of_parts_may_be_uneven(step_of):
    """Shows F2. Version 0.4 of the rules records the size of each rank's part."""
    step = with_rules(step_of("tensor"), universal_checkpoint_version=0.4, sub_param_shard_widths={r"\d+\.qkv\.weight": [[3, 5], [1, 1], [2, 0]]})
    whole = torch.load(reshard(step, step.parent / "moved.pt", "--to", "torch"), weights_only=True)["model"]["1.qkv.weight"]
    plain = torch.load(reshard(VALID / "tensor", step.parent / "plain.pt", "--to", "torch"), weights_only=True)["model"]["1.qkv.weight"]
    first, second = (torch.cat([each.chunk(2)[tensor] for each in plain.split((8, 2, 2))]) for tensor in (0, 1))
    expected = [first[:3], second[:5], first[3:4], second[5:6], first[4:6]]
    assert torch.equal(whole, torch.cat(expected))


def test_frozen_parameters_of_a_universal_checkpoint_are_joined(step_of):
    """Shows F2. The folder of a frozen parameter has only the first tensor rank's part; the module files of all ranks
    have all parts."""
    step = step_of("universal_autotp").parent / "global_step2_universal"
    for tensor, file in enumerate(MODELS):
        edit(step / file, lambda state: state["module"].update({"frozen.o_proj.weight": torch.full((3, 2), float(tensor))}))
        edit(step / file, lambda state: state["universal_checkpoint_info"].update(parameter_with_row_parallelism_patterns=[".*o_proj"]))
    (step / "zero" / "frozen.o_proj.weight").mkdir()
    torch.save({"param": torch.zeros(3, 2)}, step / "zero" / "frozen.o_proj.weight" / "fp32.pt")
    moved = torch.load(reshard(step, step.parent / "moved.pt", "--to", "torch"), weights_only=True)["model"]
    assert torch.equal(moved["frozen.o_proj.weight"], torch.tensor([[0.0, 0, 1, 1]] * 3))


def test_missing_model_states_of_data_ranks_are_refused_in_a_universal_checkpoint(step_of):
    """Shows F2, E7. ds_to_universal.py copies those of all data ranks of stage 3."""
    step = step_of("universal_autotp_zero3").parent / "global_step2_universal"
    for file in step.glob("zero_pp_rank_1_*"):
        file.unlink()
    process = run("ckpt-inspect", "ls", step)
    assert process.returncode == 3 and ("files of ranks: expected model states of 2 ranks, as dp_world_size of zero_pp_rank_0_mp_rank_00_model_states.pt "
                                        "says, found model states of 1") in process.stderr, process.stderr


def test_a_universal_checkpoint_needs_no_rules_but_for_frozen_parts(step_of):
    """Shows F2, E3. Trained parameters of a universal checkpoint are whole."""
    step = step_of("universal_autotp").parent / "global_step2_universal"
    for file in MODELS:
        edit(step / file, lambda state: state.pop("universal_checkpoint_info"))
    assert_same_state(listing(step), expectation(VALID / "universal_autotp"))
    for tensor, file in enumerate(MODELS):
        edit(step / file, lambda state: state["module"].update({"frozen": torch.full((3, 2), float(tensor))}))
    process = run("ckpt-reshard", step, step.parent / "moved", "--to", "native")
    words = ("model.frozen", "tensor parallelism: expected 'universal_checkpoint_info', which says how each parameter is cut, found none")
    assert process.returncode == 3 and all(word in process.stderr for word in words), process.stderr


def test_a_frozen_part_of_stage_3_with_another_size_is_refused(step_of):
    """Shows F2, E3. Each data rank must have an equal part of what its tensor rank has."""
    step = step_of("autotp_zero3")
    file = "zero_pp_rank_1_mp_rank_01_model_states.pt"
    edit(step / file, lambda state: state["frozen_param_fragments"].update({"model.layers.0.self_attn.o_proj.weight": torch.zeros(3)}))
    process = run("ckpt-inspect", "ls", step)
    assert process.returncode == 3 and f"{file}: model.layers.0.self_attn.o_proj.weight: parts of ranks: expected a vector of 16" in process.stderr


RULES = {
    "original_vocab_size": 7,
    "vocabulary_parameter_patterns": [r"tied_modules\.embed\.weight"],
    "tp_replicated_parameter_patterns": [r"\d+\.norm\.(weight|bias)$", r"\d+.down_bias", r"4\.(weight|bias)"],
    "parameter_to_average_patterns": [r"[0-9]+\.scale"],
    "parameter_with_row_parallelism_patterns": [r"\d+.down$"],
    "parameter_with_2_sub_params_cat_dim_0": [r".*gate_up"],
    "parameter_with_sub_params": [{"patterns": [r"\d+\.qkv\.weight"], "shape": [[8, 2, 2], -1], "partition_dim": 0}],
}


@pytest.fixture
def without_rules(step_of):
    """Makes a step in which no file says how tensors are cut. Returns its folder, and the path of the file in which the
    user can say it."""
    step = step_of("tensor_pipeline")
    for file in step.glob("mp_rank_*_model_states.pt"):
        edit(file, lambda state: state.pop("universal_checkpoint_info"))
    return step, step / "universal_checkpoint_info.json"


def test_rules_of_the_user_join_the_parts(without_rules, tmp_path):
    """Shows F2. The user writes the rules into a file beside the model states, under DeepSpeed's names. A move does not
    copy this file."""
    step, file = without_rules
    process = run("ckpt-inspect", "ls", step)
    assert process.returncode == 3 and "write these rules into universal_checkpoint_info.json beside this file" in process.stderr
    file.write_text(json.dumps(RULES))
    assert_same_state(listing(step), expectation(VALID / "tensor_pipeline"))
    moved = reshard(step, tmp_path / "dcp", "--to", "dcp", "--world-size", "2")
    assert_same_state(listing(moved), expectation(VALID / "tensor_pipeline"))
    assert not (moved / file.name).exists()


def test_what_autotp_saves_may_be_in_the_users_file(step_of):
    """Shows F2. The user's file can also have AutoTP's maps of boxes."""
    step = step_of("autotp")
    rules = torch.load(step / MODELS[0], weights_only=False)["universal_checkpoint_info"]
    for file in MODELS:
        edit(step / file, lambda state: state.pop("universal_checkpoint_info"))
    (step / "universal_checkpoint_info.json").write_text(json.dumps(rules))
    assert_same_state(listing(step), expectation(VALID / "autotp"))


@pytest.mark.parametrize("text, words", [
    ('{"tp_replicated_patterns": []}', "expected a rule of DeepSpeed, such as 'tp_replicated_parameter_patterns', found 'tp_replicated_patterns'"),
    ("[]", "expected a JSON object with rules, found list"),
    ("{", "universal_checkpoint_info.json"),
    ('{"tp_replicated_parameter_patterns": [1]}', "tp_replicated_parameter_patterns: expected patterns of names, found 1"),
    ('{"parameter_with_sub_params": [{"patterns": ["x"], "shape": [2]}]}',
     "parameter_with_sub_params: expected a shape, and a partition_dim that is one of its dimensions"),
], ids=["member", "list", "text", "pattern", "dimension"])
def test_a_file_that_has_no_rules_is_refused(without_rules, text, words):
    """Shows F2, E3."""
    step, file = without_rules
    file.write_text(text)
    process = run("ckpt-inspect", "ls", step)
    assert process.returncode == 3 and str(file) in process.stderr and words in process.stderr, process.stderr


def test_a_pattern_of_the_user_that_matches_nothing_is_noted(without_rules):
    """Shows F2, E13. The pattern may be mistyped; then another rule joins the parameter."""
    step, file = without_rules
    file.write_text(json.dumps(RULES | {"parameter_to_average_patterns": [r"[0-9]+\.scale", "6.scale"]}))
    stderr = run("ckpt-inspect", "ls", step).stderr
    assert "1 pattern in universal_checkpoint_info.json that no parameter uses, such as '6.scale'" in stderr, stderr


def test_rules_of_the_user_come_before_the_files_own(step_of):
    """Shows F2, E13."""
    step = step_of("tensor")
    (step / "universal_checkpoint_info.json").write_text(json.dumps(RULES | {"tp_replicated_parameter_patterns": []}))
    assert "in the model states, and universal_checkpoint_info.json; the rules in this file are used" in run("ckpt-inspect", "ls", step).stderr
    assert rows(step)["model.1.norm.weight"][1] == [12]
