"""What comes back into PyTorch from every format, and whether a move says what it changes: the table of
docs/formats/what-each-holds.md, cell by cell."""

import collections
import io
import itertools
import json
import math
import os
import pickle
import shutil
import tarfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ckpt_tools import FORMATS as SIMPLE_FORMATS
from ckpt_tools import ROOT, reshard, run, succeed
from on_ranks import run_function
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

FORMATS = (*SIMPLE_FORMATS, "rank_files")
PAGE = ROOT / "docs" / "formats" / "what-each-holds.md"
COLUMNS = dict(zip(("native", "dcp", "safetensors", "torch", "rank_files"), range(1, 6))) | {"deepspeed": 6}


def read_table():
    """Returns {what: {format: cell, "kind": kind or None}}."""
    rows = [line.strip().strip("|").split("|") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in row] for row in rows]
    assert cells[0] == ["what", "native", "DCP", "safetensors", "torch.save", "rank_files", "DeepSpeed", "kind"]
    return {
        row[0]: {**{name: row[column] for name, column in COLUMNS.items()}, "kind": None if row[7] == "-" else row[7].strip("`")}
        for row in cells[1:]
    }


TABLE = read_table()


def w(value=1.0):
    return torch.tensor([value, 2.0])


def with_attribute(tensor):
    tensor.note = "mine"
    return tensor


def tied():
    tensor = w()
    return {"a": tensor, "b": tensor}


def overlapping():
    tensor = torch.arange(6.0)
    return {"a": tensor[:4], "b": tensor[2:]}


# Each object has the property of one row only. So `in_order` sorts the keys of all objects, except for the row about the order.
OBJECTS = {
    "nested dicts": lambda: {"a": {"b": {"w": w()}, "c": 1}},
    "nested lists": lambda: {"a": [w(), [w(3.0), 4], {"b": 5}], "b": [1, [2, 3]]},
    "an outermost list": lambda: [w(), {"b": w(3.0)}],
    "empty dicts and lists": lambda: {"a": {}, "b": [], "w": w()},
    "a key with a dot": lambda: {"a.b": w(), "a": {"c.d": 1}},
    "an outermost key `model.w`": lambda: {"model.b.w": w(3.0), "model.w": w(), "z": 1},
    "int keys": lambda: {"a": {1: w(), 2: 3}},
    "bool keys": lambda: {"a": {False: w(), True: 3}},
    "tuple keys": lambda: {"a": {("b", 1): w(), ("b", 2): 3}},
    "parameter numbers in optimizer state": lambda: {"state": {0: {"exp_avg": w()}, 1: {"exp_avg": w(3.0)}}, "w": w()},
    "parameter groups of an optimizer": lambda: {"w": w(), "optim": torch.optim.AdamW(
        [{"params": [w().requires_grad_()], "lr": 0.1}, {"params": [w().requires_grad_()], "betas": (0.8, 0.9)}]).state_dict()["param_groups"]},
    "extra state (tensor, bytes, None)": lambda: {"a._extra_state": torch.arange(5, dtype=torch.uint8), "b._extra_state": b"\x80\x04N.",
                                                  "c._extra_state": None, "w": w()},
    "io.BytesIO": lambda: {"a._extra_state": io.BytesIO(b"mine"), "w": w()},
    "order of keys": lambda: {"b": {"z": w(), "c": 1, "a": [w(4.0), {"y": 2, "x": w(5.0)}]}, "a": w(3.0), "c": 1, "B": 2},
    "None": lambda: {"a": None, "w": w()},
    "bytes": lambda: {"a": b"\x00\xff", "w": w()},
    "sets": lambda: {"a": {1, "b"}, "w": w()},
    "frozensets": lambda: {"a": frozenset((1, 2)), "w": w()},
    "frozensets in a set": lambda: {"a": {frozenset((1, frozenset())), (2, frozenset((3,)))}, "w": w()},
    "frozensets in keys in a tuple": lambda: {"a": ({frozenset((1,)): 2, (frozenset((3,)),): 4},), "w": w()},
    "tuples without tensors": lambda: {"a": (1, ("b", 2.5)), "w": w()},
    "tuples with tensors": lambda: {"a": (w(), 1)},
    "OrderedDict": lambda: {"a": collections.OrderedDict(b=w(), c=1)},
    "complex numbers": lambda: {"a": 1.5 - 2j, "w": w()},
    "NaN and infinities": lambda: {"a": math.nan, "b": -math.inf, "w": torch.tensor([math.nan, math.inf, -0.0])},
    "ints beyond 64 bits": lambda: {"a": 2**64, "b": -(2**200), "w": w()},
    "torch.Size": lambda: {"a": torch.Size((2, 3)), "w": w()},
    "torch.dtype and torch.device": lambda: {"a": torch.bfloat16, "b": torch.device("cuda", 3), "w": w()},
    "bytearray": lambda: {"a": bytearray(b"ab"), "w": w()},
    "0-d tensors": lambda: {"a": torch.tensor(7), "b": torch.tensor(1.5, dtype=torch.bfloat16)},
    "empty tensors": lambda: {"a": torch.zeros(0, 3), "b": torch.zeros(0, dtype=torch.int8)},
    "tensors that are not contiguous": lambda: {"a": torch.arange(6.0).reshape(2, 3).t(), "b": torch.arange(9)[::2]},
    "Parameter": lambda: {"a": torch.nn.Parameter(w())},
    "requires_grad": lambda: {"a": w().requires_grad_()},
    "attributes of tensors": lambda: {"a": with_attribute(w())},
    "tied tensors": tied,
    "tensors that overlap": overlapping,
}
# These rows have no object; separate tests check them.
BESIDE = {"texts beside the tensors", "extra files", "DTensor in one file"}


def in_order(state):
    """Returns the same object with the keys of all dicts sorted by name."""
    if isinstance(state, dict):
        return type(state)((key, in_order(state[key])) for key in sorted(state, key=str))
    if type(state) in (list, tuple):
        return type(state)(map(in_order, state))
    return state


def make(what):
    return OBJECTS[what]() if what == "order of keys" else in_order(OBJECTS[what]())


def shares_memory(state):
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)] if isinstance(state, dict) else []
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}) < sum(t.numel() > 0 for t in tensors)


def same_tensor(a, b):
    if a.dtype != b.dtype or a.shape != b.shape or a.requires_grad != b.requires_grad or vars(a) != vars(b):
        return False
    return a.detach().contiguous().view(torch.uint8).equal(b.detach().contiguous().view(torch.uint8)) if a.dim() else (
        a.detach().reshape(1).view(torch.uint8).equal(b.detach().reshape(1).view(torch.uint8)))


def same(a, b):
    """Returns whether two objects are equal, with equal types of containers, keys and values. Ignores the order of keys."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return same_tensor(a, b)
    if isinstance(a, dict):
        by_key = {(type(key), key): item for key, item in b.items()}
        return len(a) == len(b) and all((type(k), k) in by_key and same(v, by_key[type(k), k]) for k, v in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return math.isnan(a) and math.isnan(b) or a == b
    return a == b


def orders(state):
    """Returns the keys of all dicts, in their order, as text."""
    if isinstance(state, dict):
        return [(str(key), orders(value)) for key, value in state.items()]
    return [orders(item) for item in state] if isinstance(state, list) else None


def is_kept(what, before, after):
    if what == "order of keys":
        return orders(before) == orders(after)
    return same(before, after) and shares_memory(before) == shares_memory(after)


def loaded(path):
    with torch.serialization.safe_globals([frozenset]):  # the only plain type that weights_only refuses
        return torch.load(path, weights_only=True)


def move(source, destination, target):
    """Moves a checkpoint and returns the kinds of what changed."""
    document = json.loads(succeed("ckpt-reshard", source, destination, "--to", target, "--json"))
    assert all(change["count"] > 0 for change in document["changes"])
    kinds = {change["kind"] for change in document["changes"]}
    return kinds | ({"left_files"} if document["left_files"] else set())


class Moves:
    """The checkpoints that an object becomes on its ways through formats. Ways that begin alike share their first moves."""

    def __init__(self, folder, state):
        folder.mkdir()
        self.folder, self.made = folder, {(): (folder / "before.pt", set())}
        torch.save(state, folder / "before.pt")

    def along(self, *way):
        """Returns the checkpoint at the end of a way, and the kinds of what changed on it."""
        if way not in self.made:
            source, told = self.along(*way[:-1])
            destination = self.folder / "-".join(way)
            self.made[way] = destination, told | move(source, destination, way[-1])
        return self.made[way]


@pytest.fixture(scope="module")
def moves(tmp_path_factory):
    """Returns the moves of each object."""
    folder = tmp_path_factory.mktemp("moves")
    return {what: Moves(folder / str(number), make(what)) for number, what in enumerate(OBJECTS)}


def check(what, way, kept, told):
    """Expects that `kept`, and the changes that the moves reported, are what the table says of the formats on the way."""
    row = TABLE[what]
    says_kept = all(row[target] == "kept" for target in way)
    assert kept == says_kept, f"{what}, {' to '.join(way)}: {'kept' if kept else 'lost'}, unlike the table"
    other = told - {row["kind"]}
    assert not other, f"{what}, {' to '.join(way)}: the summary tells of {other}"
    if row["kind"] is not None:
        assert (row["kind"] in told) == (not says_kept), f"{what}, {' to '.join(way)}: told {told}"


def test_the_table_has_a_row_for_each_thing_and_each_row_is_tested():
    """Shows A2."""
    assert set(TABLE) == set(OBJECTS) | BESIDE


@pytest.mark.parametrize("way", [*((target,) for target in FORMATS), *itertools.permutations(FORMATS, 2)], ids=" ".join)
@pytest.mark.parametrize("what", OBJECTS)
def test_what_comes_back_is_what_the_table_says(what, way, moves):
    """Shows A2, E2. Objects move from torch.save into each format, and through each pair of formats, back to torch.save."""
    back, told = moves[what].along(*way, "torch")
    after = loaded(back)
    check(what, (*way, "torch"), is_kept(what, make(what), after), told)


@pytest.mark.parametrize("what", OBJECTS)
def test_what_deepspeed_keeps_beside_a_model_is_what_the_table_says(what, tmp_path):
    """Shows A2, F2. DeepSpeed returns entries beside the model as client state."""
    before = {"client": make(what), "model": {"w": w()}}
    torch.save(before, tmp_path / "before.pt")
    told = move(tmp_path / "before.pt", tmp_path / "run", "deepspeed") | move(tmp_path / "run", tmp_path / "back.pt", "torch")
    after = loaded(tmp_path / "back.pt")
    assert same(before["model"], after["model"])
    check(what, ("deepspeed", "torch"), is_kept(what, before["client"], after["client"]), told)


def tied_with_deepspeeds_parts():
    """Returns states in which tensors of one part of a DeepSpeed checkpoint are also in another, and how many ties are split."""
    tensor, other, step, buffer = w(), w(3.0), torch.tensor(7.0), torch.arange(3)
    group = {"params": ["a"], "lr": 0.1}
    return {
        "the weights": ({"model": {"a": tensor, "b": tensor}, "ema": {"a": tensor}, "best": tensor}, 1),
        "a bare model": ({"a": tensor, "ema": {"a": tensor}}, 1),
        "a buffer": ({"model": {"a": tensor, "buffer": buffer}, "buffer": buffer}, 1),
        "a frozen weight": ({"model": {"a": tensor, "frozen": other}, "teacher": {"frozen": other},
                             "optim": {"state": {"a": {"exp_avg": w(5.0), "step": step}}, "param_groups": [group]}}, 1),
        "state": ({"model": {"a": tensor, "b": other}, "optim": {
            "state": {"a": {"exp_avg": w(5.0), "step": step}, "b": {"exp_avg": tensor, "step": step}},
            "param_groups": [{**group, "params": ["a", "b"]}]}}, 2),
        "groups": ({"model": {"a": tensor, "b": other}, "optim": {
            "state": {}, "param_groups": [{"params": ["a"], "lr": step}, {"params": ["b"], "lr": step}]}}, 1),
    }


@pytest.mark.parametrize("what", tied_with_deepspeeds_parts())
def test_tensors_that_are_tied_across_deepspeeds_parts_are_kept_and_counted(what, tmp_path):
    """Shows A2, F2. DeepSpeed ties tensors of the model, and tensors of the client state, but none across."""
    state, num_split = tied_with_deepspeeds_parts()[what]
    torch.save(state, tmp_path / "before.pt")
    document = json.loads(succeed("ckpt-reshard", tmp_path / "before.pt", tmp_path / "run", "--to", "deepspeed", "--json"))
    move(tmp_path / "run", tmp_path / "back.pt", "torch")
    after = torch.load(tmp_path / "back.pt", weights_only=True)
    expected = state if "model" in state else {"model": {"a": state["a"]}, "ema": state["ema"]}
    assert same(after, expected)
    counted = {change["kind"]: change["count"] for change in document["changes"]}
    assert counted.get("split_ties") == num_split
    if what == "the weights":
        assert shares_memory(after["model"]) and shares_memory({"ema": after["ema"]["a"], "best": after["best"]})


@pytest.mark.parametrize("pair", list(itertools.permutations(FORMATS, 2)), ids=" ".join)
def test_there_and_back_is_the_same_to_diff(pair, moves):
    """Shows A4. After a move from A to B and back to A, `diff` finds no difference, whatever the table says of B."""
    for what in OBJECTS:
        first, _ = moves[what].along(pair[0])
        back, _ = moves[what].along(*pair, pair[0])
        process = run("ckpt-inspect", "diff", first, back)
        assert process.returncode == 0, f"{what}: {process.stdout}{process.stderr}"


@pytest.mark.parametrize("is_flattened", [True, False])
@pytest.mark.parametrize("what", [what for what, row in TABLE.items() if row["kind"] == "value_types"])
def test_values_of_pytorchs_dcp_that_get_plainer_types_are_told(what, is_flattened, tmp_path):
    """Shows A2. `.metadata` does not say the types of values: only the values themselves do."""
    source = tmp_path / "dcp"
    dcp.save(make(what), checkpoint_id=source, planner=dcp.DefaultSavePlanner(flatten_state_dict=is_flattened), no_dist=True)
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps({"schema": 1, "rest": "keep", "rules": [{"from": "w", "to": "v"}]}))
    for number, options in enumerate(([], ["--rename", "w=v"], ["--recipe", recipe], ["--only", "!a*"])):
        document = json.loads(succeed("ckpt-reshard", source, tmp_path / f"{number}.pt", "--to", "torch", "--json", *options))
        assert [(change["kind"], change["count"]) for change in document["changes"]] == ([] if "--only" in options else [("value_types", 1)]), options
    assert merge(f"s={source}", f"r={source}", tmp_path / "merged.pt") == {"value_types": 2}


def save_dtensors(path):
    """Saves a model and its optimizer as a trainer with one rank does, with `fully_shard`."""
    dist.init_process_group("gloo")
    model = torch.nn.Linear(3, 2)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.save(dict(zip(("model", "optim"), get_state_dict(model, optimizer))), path)
    dist.destroy_process_group()


@pytest.mark.parametrize("target", (*FORMATS, "deepspeed"))
def test_dtensors_in_one_file_become_tensors_and_are_counted(target, tmp_path):
    """Shows A2. `fully_shard` makes DTensors also with one rank: here the weight, the bias, and two states of each."""
    source = tmp_path / "before.pt"
    run_function(save_dtensors, 1, source)
    document = json.loads(succeed("ckpt-reshard", source, tmp_path / "moved", "--to", target, "--json"))
    counts = {change["kind"]: change["count"] for change in document["changes"]}
    assert counts.get("dtensors", 0) == (0 if TABLE["DTensor in one file"][target] == "kept" else 6)
    only = json.loads(succeed("ckpt-reshard", source, tmp_path / "bias.pt", "--only", "model.bias", "--json"))
    assert {change["kind"]: change["count"] for change in only["changes"]}["dtensors"] == 1
    if target == "rank_files":  # from there on, they are parts of ranks that a move joins
        assert "dtensors" not in move(tmp_path / "moved", tmp_path / "joined.pt", "torch")


@pytest.mark.parametrize("target", (*FORMATS, "deepspeed"))
def test_texts_beside_the_tensors_are_kept_or_told(target, tmp_path):
    """Shows A2."""
    from safetensors.torch import safe_open, save_file

    source = tmp_path / "model.safetensors"
    save_file({"w": w()}, source, metadata={"format": "pt", "note": "mine"})
    told = move(source, tmp_path / "moved", target) | move(tmp_path / "moved", tmp_path / "back.safetensors", "safetensors")
    with safe_open(tmp_path / "back.safetensors", "pt") as back:
        kept = back.metadata().get("note") == "mine"
    check("texts beside the tensors", (target,), kept, told - {"model_names"})
    assert ("model_names" in told) == (target == "deepspeed")


@pytest.mark.parametrize("origin", (*(format for format in FORMATS if format != "torch"), "deepspeed"))
def test_extra_files_are_kept_or_told(origin, tmp_path):
    """Shows A2. Moves a folder of each format into each format."""
    torch.save({"model": {"w": w()}}, tmp_path / "w.pt")
    source = tmp_path / "source"
    if origin == "safetensors":
        source.mkdir()
    reshard(tmp_path / "w.pt", source / "model.safetensors" if origin == "safetensors" else source, "--to", origin)
    (source / "notes.txt").write_text("mine")
    for target in (*FORMATS, "deepspeed"):
        moved = tmp_path / target
        told = move(source, moved, target)
        check("extra files", (target,), moved.is_dir() and any(path.read_text() == "mine" for path in moved.rglob("notes.txt")), told)


@pytest.mark.parametrize("has_config_beside", [True, False])
def test_an_adapter_and_its_optimizer_are_an_adapter(has_config_beside, tmp_path):
    """Shows A2. The optimizer's state is no weight of a model, so the merged folder keeps adapter_config.json and PEFT's name."""
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file({"base_model.model.q.lora_A.weight": torch.ones(1, 2), "base_model.model.q.lora_B.weight": torch.ones(2, 1)},
              adapter / "adapter_model.safetensors")
    config = adapter if has_config_beside else tmp_path / "config"
    config.mkdir(exist_ok=True)
    (config / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    torch.save({"state": {0: {"exp_avg": torch.ones(1, 2)}}, "param_groups": [{"params": [0]}]}, adapter / "optimizer.pt")
    options = [] if has_config_beside else ["--extra-files-from", config]
    succeed("ckpt-reshard", "merge", adapter, f"optim={adapter / 'optimizer.pt'}", tmp_path / "merged", "--to", "safetensors", *options)
    names = {path.name for path in (tmp_path / "merged").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors", "adapter_model.safetensors.values.json"}


def test_a_file_whose_name_is_gone_is_named(tmp_path):
    """Shows A2. LLaMA-Factory looks for value_head.safetensors, which becomes a part of model.safetensors."""
    source = tmp_path / "model"
    source.mkdir()
    save_file({"q.weight": torch.ones(2)}, source / "model.safetensors")
    save_file({"v_head.summary.weight": torch.ones(2)}, source / "value_head.safetensors")
    document = json.loads(succeed("ckpt-reshard", source, tmp_path / "moved", "--to", "safetensors", "--json"))
    expected = "files with the names of the source's, such as value_head.safetensors, if a loader looks for them"
    assert [note["expected"] for note in document["notes"] if note["rule"] == "extra files"] == [expected]


def test_sources_in_the_folder_of_the_extra_files_are_not_named_as_left(tmp_path):
    """Shows A2. As accelerate lays out the folders of the model and of the optimizer."""
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        dcp.save({name: {"w": torch.ones(2)}}, checkpoint_id=tmp_path / "run" / name, no_dist=True)
    (tmp_path / "run" / "random_states_0.pkl").write_bytes(b"mine")
    (tmp_path / "run" / "logs").mkdir()
    for folder in (tmp_path / "run", f"{tmp_path / 'run'}/"):
        document = json.loads(succeed("ckpt-reshard", "merge", tmp_path / "run" / "pytorch_model_fsdp_0", f"{tmp_path / 'run' / 'optimizer_0'}/",
                                      tmp_path / "merged", "--extra-files-from", folder, "--overwrite", "--json"))
        assert document["left_files"] == [{"name": "logs", "why": "a folder"}]
        assert [file["name"] for file in document["extra_files"]] == ["random_states_0.pkl"]


def test_what_may_be_of_an_optimizer_is_told_where_optimizers_are_left_out(tmp_path):
    """Shows A2. As NeMo saves with Lightning: float32 weights beside the state of the optimizer."""
    optimizer = {"state": {0: {"exp_avg": w()}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    torch.save({"state_dict": {"a": w()}, "optimizer_states": [{"optimizer": optimizer, "fp32_from_fp16_params": [[w()]]}]}, tmp_path / "run.ckpt")
    document = json.loads(succeed("ckpt-reshard", tmp_path / "run.ckpt", tmp_path / "weights.pt", "--drop-optimizer", "--json"))
    (note,) = [note for note in document["notes"] if note["rule"] == "optimizer left out"]
    assert "fp32_from_fp16_params" in note["name"] and "1 tensor that may be optimizer state is moved" in note["found"], note


@pytest.mark.parametrize("target", ["torch", "rank_files", "native"])
def test_numbers_of_parameters_that_are_text_are_told_where_an_optimizer_would_miss_them(target, tmp_path):
    """Shows A2. DCP makes text of the keys of `optimizer.state_dict()`, and torch.optim finds no state under text."""
    parameter = torch.nn.Parameter(w())
    optimizer = torch.optim.AdamW([parameter])
    parameter.sum().backward()
    optimizer.step()
    dcp.save({"model": {"a": parameter.detach()}, "optim": optimizer.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    told = "under text such as '0', where torch.optim finds no state"
    process = run("ckpt-reshard", tmp_path / "dcp", tmp_path / "moved", "--to", target)
    assert process.returncode == 0 and (told in process.stderr) == (target != "native"), process.stderr
    reshard(tmp_path / "dcp", tmp_path / "named", "--to", "dcp", "--optimizer-params", "auto")
    process = run("ckpt-reshard", tmp_path / "named", tmp_path / "numbered.pt", "--optimizer-params", "numbers")
    assert process.returncode == 0 and told not in process.stderr, process.stderr
    optimizer.state.clear()
    optimizer.load_state_dict(torch.load(tmp_path / "numbered.pt")["optim"])
    assert optimizer.state[parameter]["step"] == 1


def test_a_recipe_keeps_the_dict_around_flat_state(tmp_path):
    """Shows A2. `flatten_optimizer_state_dict=True` makes such names, as torchtitan has them."""
    state = {"model": {"0.weight": w(), "1._orig_mod.weight": w(3.0)},
             "optim": {"state.0.weight.exp_avg": w(4.0), "state.1._orig_mod.weight.exp_avg": w(5.0),
                       "param_groups.0.weight.lr": 0.1, "param_groups.1._orig_mod.weight.lr": 0.2}}
    torch.save(state, tmp_path / "source.pt")
    moved = torch.load(reshard(tmp_path / "source.pt", tmp_path / "moved.pt", "--recipe", ROOT / "recipes" / "remove-wrappers.json"))
    assert {name: set(entries) for name, entries in moved.items()} == {
        name: {entry.replace("._orig_mod", "") for entry in entries} for name, entries in state.items()}


@pytest.mark.parametrize("way", [["torch"], ["native", "torch"], ["rank_files"], ["deepspeed"]], ids=" ".join)
def test_a_tied_tensor_keeps_the_name_under_which_it_is_stored(way, tmp_path):
    """Shows A2. transformers ties `lm_head` to the embedding, so the embedding must be in the file. In the order of names it is the last."""
    weight = torch.ones(3, 2)
    torch.save({"model.embed.weight": weight, "lm_head.weight": weight, "model.q": w()}, tmp_path / "0.pt")
    source = reshard(tmp_path / "0.pt", tmp_path / "1.safetensors", "--to", "safetensors")
    for number, target in enumerate(way):
        source = reshard(source, tmp_path / f"{target}-{number}", "--to", target)
    names = ["--only", "model", "--rename", "model.="] if way == ["deepspeed"] else []
    back = reshard(source, tmp_path / "back.safetensors", "--to", "safetensors", *names)
    assert set(load_file(back)) == {"model.embed.weight", "model.q"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
@pytest.mark.parametrize("target", FORMATS)
def test_records_that_nothing_is_read_from_are_told(target, tmp_path):
    """Shows A2."""
    module = torch.jit.trace(torch.nn.Linear(2, 2), w())
    torch.jit.save(module, tmp_path / "module.pt", _extra_files={"notes.txt": "mine"})
    document = json.loads(succeed("ckpt-reshard", tmp_path / "module.pt", tmp_path / "moved", "--to", target, "--json"))
    assert any(note["rule"] == "records" and "module/extra/notes.txt" in note["found"] for note in document["notes"])


def test_members_of_a_tar_that_nothing_is_read_from_are_told(tmp_path):
    """Shows A2. torch.load ignores such members too."""
    source = tmp_path / "tar.pt"
    shutil.copy(ROOT / "fixtures" / "torch_zip" / "valid" / "tar.pt", source)
    document = json.loads(succeed("ckpt-reshard", source, tmp_path / "alone.pt", "--json"))
    assert document["notes"] == []
    (tmp_path / "notes.txt").write_text("mine")
    with tarfile.open(source, "a:") as tar:
        tar.add(tmp_path / "notes.txt", "notes.txt")
    assert torch.load(source, weights_only=False)["epoch"] == 7
    document = json.loads(succeed("ckpt-reshard", source, tmp_path / "moved.pt", "--json"))
    assert [(note["rule"], note["found"]) for note in document["notes"]] == [
        ("records", "1 other member, which a move leaves out: 'notes.txt'")]


class Python2:
    """A module that pickles an OrderedDict as Python 2 does: its entries are an argument, a list of lists of two."""

    class Pickler(pickle.Pickler):
        def reducer_override(self, item):
            if type(item) is not collections.OrderedDict:
                return NotImplemented
            return collections.OrderedDict, ([list(pair) for pair in item.items()],), vars(item) or None


def test_a_state_dict_that_python_2_saved_is_read(tmp_path):
    """Shows A2."""
    before = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).state_dict()
    before["nested"] = [collections.OrderedDict(b=w(), a=collections.OrderedDict())]
    torch.save(before, tmp_path / "before.pt", pickle_module=Python2)
    assert same(torch.load(tmp_path / "before.pt"), before)
    assert move(tmp_path / "before.pt", tmp_path / "after.pt", "torch") == {"dict_classes", "attributes"}
    after = torch.load(tmp_path / "after.pt")
    assert list(after) == list(before) and after["nested"][0]["a"] == {}
    assert same(dict(after), {**before, "nested": [{"b": w(), "a": {}}]})


def step_of(name):
    """Returns the state of an optimizer of torch.optim after one step."""
    model = torch.nn.Linear(3, 2)
    kind = getattr(torch.optim, name)
    optimizer = kind([model.weight] if name == "Muon" else model.parameters(), lr=torch.tensor(0.1) if name == "Adam" else 0.1)

    def loss():
        optimizer.zero_grad()
        result = model(torch.ones(1, 3)).sum()
        result.backward()
        if name == "SparseAdam":
            for parameter in model.parameters():
                parameter.grad = parameter.grad.to_sparse()
        return result

    optimizer.step(loss)
    return optimizer.state_dict()


def all_optimizers():
    kinds = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)}
    torch.manual_seed(3)
    return {name: step_of(name) for name in sorted(kinds - {"Optimizer"})}


def with_text_as_numbers(optimizers):
    """Returns the states with text keys instead of number keys, as a move to DCP makes them."""
    return {name: {**state, "state": {str(key): item for key, item in state["state"].items()}} for name, state in optimizers.items()}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_a_storage_beside_tensors_is_named_and_can_be_left_out(tmp_path):
    """Shows A2. A storage has neither dtype nor shape, so it is no tensor."""
    torch.save({"a": w().untyped_storage(), "b": [w(3.0), w().storage()], "w": w()}, tmp_path / "source.pt")
    process = run("ckpt-reshard", tmp_path / "source.pt", tmp_path / "moved.pt")
    assert process.returncode == 3 and all(f"{name}: " in process.stderr for name in ("a", "b.1")), process.stderr
    assert "found a storage: bytes without a dtype and a shape" in process.stderr and not (tmp_path / "moved.pt").exists()
    succeed("ckpt-reshard", tmp_path / "source.pt", tmp_path / "moved.pt", "--only", "!a", "--only", "!b.1")
    assert same(torch.load(tmp_path / "moved.pt"), {"b": [w(3.0)], "w": w()})


def save_without_flattening(folder):
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    for name, placement in (("sharded", Shard(0)), ("replicated", Replicate())):
        weight = distribute_tensor(torch.arange(14.0).reshape(7, 2), mesh, [placement])
        dcp.save({"model": {"w": weight}, "step": 3}, checkpoint_id=folder / name, planner=planner)
    dist.barrier()
    os._exit(0)  # Gloo's threads can abort an ordinary exit


def test_parts_of_dtensors_in_values_of_dcp_are_no_whole_tensors(tmp_path):
    """Shows F1. With flatten_state_dict=False, a value of DCP is a dict of rank 0, with this rank's parts of the tensors."""
    run_function(save_without_flattening, 2, tmp_path)
    moved = tmp_path / "moved.safetensors"
    process = run("ckpt-reshard", tmp_path / "sharded", moved)
    assert process.returncode == 3 and not moved.exists()
    assert "found one rank of several" in process.stderr and "the local parts of 1 tensor" in process.stderr, process.stderr
    assert load_file(reshard(tmp_path / "sharded", moved, "--as-is"))["model.w"].shape == (4, 2)
    whole = load_file(reshard(tmp_path / "replicated", tmp_path / "whole.safetensors"))
    assert torch.equal(whole["model.w"], torch.arange(14.0).reshape(7, 2))


def test_a_dict_called_per_rank_is_kept(tmp_path):
    """Shows A2. Names such as `per_rank.1.5` are also those of entries that differ between ranks."""
    state = {"per_rank": {1.5: None, "1": {"w": w()}}, "w": w(3.0)}
    torch.save(state, tmp_path / "source.pt")
    assert move(tmp_path / "source.pt", tmp_path / "back.pt", "torch") == set()
    assert same(torch.load(tmp_path / "back.pt"), state)


@pytest.mark.parametrize("state", [
    {"d": {1: w(), "1": [w(), 2]}}, {"d": {1: {"a": w()}, "1": {"b": w()}}}, {1: w(), "1": {"a": 3}}, {"d": {True: {"a": w()}, "True": {}}, "w": w()}])
def test_keys_that_differ_only_by_type_are_refused_where_keys_become_text(state, tmp_path):
    """Shows A2. DCP would make one key of the two, and what they hold would be one dict or unreadable."""
    torch.save(state, tmp_path / "two.pt")
    process = run("ckpt-reshard", tmp_path / "two.pt", tmp_path / "dcp", "--to", "dcp")
    assert process.returncode == 3 and "keys: expected keys of a dict that differ as text" in process.stderr, process.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["two.pt"]
    move(tmp_path / "two.pt", tmp_path / "back.pt", "torch")
    assert same(torch.load(tmp_path / "back.pt"), state)


@pytest.mark.parametrize("target", FORMATS)
def test_positions_in_lists_that_renames_make_text_are_counted(target, tmp_path):
    """Shows A2. The list becomes a dict."""
    torch.save({"groups": [{"lr": 1}, {"lr": 2}], "w": w(), "others": [[5, w()], [6, w()]]}, tmp_path / "lists.pt")
    for number, (renames, count) in enumerate((
            (["groups.0=groups.1", "groups.1=groups.0"], 2), (["groups.0=first", "groups.1=second"], 2), (["groups=mine"], 0),
            (["groups.0.lr=groups.0.rate"], 0), (["others.0=list"], 1), (["others.0.1=others.0.0"], 1), (["w=groups.0.w"], 0))):
        options = [option for rename in renames for option in ("--rename", rename)]
        if renames == ["others.0.1=others.0.0"]:
            options += ["--only", "!others.0.0"]
        document = json.loads(succeed("ckpt-reshard", tmp_path / "lists.pt", tmp_path / f"{number}", "--to", target, "--json", *options))
        assert sum(change["count"] for change in document["changes"] if change["kind"] == "text_keys") == count, renames


def test_the_outermost_order_is_kept_or_told_where_ranks_have_several_files(tmp_path):
    """Shows A2. model, optim and extra_state are in separate files, and no file stores the order of all keys."""
    roots = {"optim": {"z": w(), "a": 1}, "model": {"b": w(3.0), "a": w()}, "epoch": 3, "args": {"y": 1, "x": 2}}
    tensor = w()
    for number, (state, is_kept) in enumerate((
            (roots, False), (dict(sorted(roots.items())), True), ({"model": roots["model"]}, True),
            ({"b": w(), "args": roots["args"]}, True), ({"z": w(), "model.w": w()}, False),
            ({"optim": {"w": tensor}, "model": {"w": tensor}}, True))):  # tied: all is in one file
        torch.save(state, tmp_path / f"{number}.pt")
        told = move(tmp_path / f"{number}.pt", tmp_path / f"{number}-ranks", "rank_files")
        move(tmp_path / f"{number}-ranks", tmp_path / f"{number}-back.pt", "torch")
        back = torch.load(tmp_path / f"{number}-back.pt", weights_only=True)
        assert ("key_order" in told) == (not is_kept), (number, told)
        assert sorted(back) == list(back) if not is_kept else orders(back) == orders(state), number
        if number == 0:
            assert [list(back[key]) for key in ("optim", "model", "args")] == [["z", "a"], ["b", "a"], ["y", "x"]]


def test_what_differs_between_ranks_keeps_its_place_among_the_keys(tmp_path):
    """Shows A2, F1."""
    source, native = tmp_path / "ranks", tmp_path / "native"
    source.mkdir()
    states = [{"z": rank, "c": w(float(rank)), "b": 1, "a": [rank, w(float(rank))]} for rank in range(2)]
    for rank, state in enumerate(states):
        torch.save(state, source / f"extra_state_world_size_2_rank_{rank}.pt")
    assert move(source, native, "native") == set()
    assert move(native, tmp_path / "back", "rank_files") == set()
    for rank, state in enumerate(states):
        back = torch.load(tmp_path / "back" / f"extra_state_world_size_2_rank_{rank}.pt")
        assert same(back, state) and orders(back) == orders(state)


def merge(*arguments):
    """Merges, and returns the changes that the summary counts."""
    return {change["kind"]: change["count"] for change in json.loads(succeed("ckpt-reshard", "merge", *arguments, "--json"))["changes"]}


def test_a_merge_keeps_the_order_of_keys_that_its_sources_have(tmp_path):
    """Shows A2. The outermost dict has the keys of the first source, then those of the next."""
    one, two, merged = tmp_path / "one.pt", tmp_path / "two.pt", tmp_path / "merged.pt"
    first, second = {"b": w(), "a": {"y": w(), "x": 1}}, {"d": {"2": w(), "1": w()}, "c": 3}
    torch.save(first, one)
    torch.save(second, two)
    assert merge(one, two, merged) == {}
    assert orders(torch.load(merged)) == orders(first | second)
    assert merge(one, f"aa={two}", tmp_path / "in_native") == {}
    move(tmp_path / "in_native", tmp_path / "back.pt", "torch")
    assert orders(torch.load(tmp_path / "back.pt")) == orders(first | {"aa": second})
    assert merge(f"s={one}", f"r={two}", tmp_path / "apart.pt") == {}
    assert orders(torch.load(tmp_path / "apart.pt")) == orders({"s": first, "r": second})
    assert merge(f"s={one}", f"r={two}", tmp_path / "apart.safetensors") == {"key_order": 5}
    torch.save({"c": w()}, tmp_path / "sorted.pt")
    assert merge(tmp_path / "sorted.pt", f"d={tmp_path / 'sorted.pt'}", tmp_path / "sorted") == {}


def test_a_merge_counts_the_dicts_whose_order_of_keys_is_lost(tmp_path):
    """Shows A2. No file says how the keys of two files follow each other in one dict."""
    one, two, merged = tmp_path / "one.pt", tmp_path / "two.pt", tmp_path / "merged.pt"
    torch.save({"model": {"d": w(), "b": {"z": w(), "y": w()}}, "epoch": 1}, one)
    torch.save({"model": {"a": w(), "c": w()}, "args": {"2": 2, "1": w()}}, two)
    assert merge(one, two, merged) == {"key_order": 1}
    assert orders(torch.load(merged)) == orders({"model": {"a": 1, "b": {"z": 1, "y": 1}, "c": 1, "d": 1}, "epoch": 1, "args": {"2": 1, "1": 1}})
    # Parts of one flat state dict: their order would tell the numbers of parameters.
    torch.save({"z": w(), "m": w()}, tmp_path / "part.pt")
    torch.save({"k": w(), "b": {"y": w(), "x": w()}}, tmp_path / "parts.pt")
    assert merge(tmp_path / "part.pt", tmp_path / "parts.pt", tmp_path / "flat.pt") == {"key_order": 1}
    assert orders(torch.load(tmp_path / "flat.pt")) == orders({"b": {"y": 1, "x": 1}, "k": 1, "m": 1, "z": 1})
    # A dict of one source, and the other source by its prefix.
    torch.save({"e": w(), "a": w()}, two)
    assert merge(one, f"model.x={two}", tmp_path / "x.pt") == {}
    assert merge(one, f"model={two}", tmp_path / "prefix.pt") == {"key_order": 1}
    torch.save({"m": {"b": w(), "d": w(), "a": w()}}, one)
    torch.save({"m": {"b": w(3.0), "a": w(4.0)}}, two)
    assert merge(one, two, merged, "--prefer", "last", "--overwrite") == {}
    assert list(torch.load(merged)["m"]) == ["b", "d", "a"]
    # The sources have the same keys in other orders. That matters only if keys are taken from both.
    torch.save({"a": w(), "b": w()}, one)
    torch.save({"b": w(), "a": w()}, two)
    assert merge(one, two, merged, "--prefer", "last", "--overwrite") == {}
    assert list(torch.load(merged)) == ["b", "a"]
    torch.save({"a": w(), "c": w(), "b": w()}, one)
    assert merge(one, two, merged, "--prefer", "last", "--overwrite") == {"key_order": 1}
    assert list(torch.load(merged)) == ["a", "b", "c"]


@pytest.mark.parametrize("origin", ["torch", "dcp"])
def test_a_tensor_of_too_many_dimensions_does_not_keep_the_others(origin, tmp_path):
    source, moved = tmp_path / "source", tmp_path / "moved.pt"
    state = {"a": w(), "deep": torch.ones([1] * 33)}
    if origin == "torch":
        torch.save(state, source)
    else:
        dcp.save(state, checkpoint_id=source, no_dist=True)
    assert "33 dimensions" in succeed("ckpt-inspect", "ls", source, "--values")
    refused = run("ckpt-reshard", source, moved)
    assert refused.returncode == 3 and "deep" in refused.stderr and "33" in refused.stderr, refused.stderr
    reshard(source, moved, "--only", "!deep")
    assert same({"a": w()}, torch.load(moved))


@pytest.mark.parametrize("rows", [0, 2])
def test_an_empty_chunk_at_the_place_of_a_full_one_is_no_second_place(rows, tmp_path):
    """PyTorch finds an item by name and offset alone, so a key of the full chunk may have the index of the empty one."""
    source = tmp_path / "source"
    dcp.save({"w": torch.arange(12.0).reshape(4, 3)[:rows]}, checkpoint_id=source, no_dist=True)
    metadata = pickle.loads((source / ".metadata").read_bytes())
    chunks = metadata.state_dict_metadata["w"].chunks
    chunks.insert(0, ChunkStorageMetadata(offsets=chunks[0].offsets, sizes=torch.Size([0, 3])))
    (source / ".metadata").write_bytes(pickle.dumps(metadata))
    expected = {"w": torch.zeros(rows, 3)}
    dcp.load(expected, checkpoint_id=source, no_dist=True)
    reshard(source, tmp_path / "moved.pt")
    assert same(expected, torch.load(tmp_path / "moved.pt"))
    assert "sound" in succeed("ckpt-inspect", "verify", source)


@pytest.fixture(scope="module")
def optimizers(tmp_path_factory):
    """Returns the states of all optimizers, and their moves."""
    before = all_optimizers()
    assert len(before) >= 13
    return before, Moves(tmp_path_factory.mktemp("optimizers") / "moves", before)


@pytest.mark.parametrize("way", [("torch",), *itertools.permutations(FORMATS, 2)], ids=" ".join)
def test_each_option_and_each_state_of_an_optimizer_comes_back(way, optimizers):
    """Shows A2, E2. Moves the state of every optimizer of torch.optim from A to B and back to A."""
    before, moves = optimizers
    back, told = moves.along(*way, way[0], "torch")
    after = torch.load(back, weights_only=True)
    through_dcp = "dcp" in way
    for name, state in (with_text_as_numbers(before) if through_dcp else before).items():
        assert same(state, after[name]), name
    assert told == ({"optimizer_keys"} if through_dcp else set()) | ({"key_order"} if "safetensors" in way else set())
    if "safetensors" not in way:
        assert orders(before) == orders(after)
