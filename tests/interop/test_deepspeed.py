"""Moves ZeRO checkpoints of DeepSpeed. FSDP2 loads the results on other numbers of ranks and continues training."""

import collections
import enum
import importlib.abc
import importlib.machinery
import json
import shutil
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ckpt_tools import (
    FIXTURES, MAKE, WITHOUT_OPTIMIZER, assert_same_state, expectation, flip_a_bit, listing, reshard, run, succeed, tensors_by_name)
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(MAKE))
import ranks  # noqa: E402
from expect import flatten, tensor_row, write_expect  # noqa: E402
from write_deepspeed import Model, groups_of  # noqa: E402

VALID = FIXTURES / "deepspeed" / "valid"
ALL = sorted(path for path in VALID.iterdir() if path.is_dir())
ZERO = [path for path in ALL if path.name.startswith("zero")]  # of the class Model


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_dcp_for_other_ranks_holds_the_same(path, tmp_path):
    """Shows F2, A4. A move to DCP for four ranks keeps the whole state."""
    moved = reshard(path, tmp_path / "dcp", "--to", "dcp", "--world-size", "4")
    assert_same_state(listing(moved), expectation(path))


ROUND_ROBIN = "zero2_bf16"


def keys_of_module(path):
    """The names of the module's tensors, as the files of the first rank and of the layers have them."""
    names = []
    for file in sorted(path.glob("*/*model_states.pt")):
        state = torch.load(file, weights_only=False)
        if file.name.startswith("layer_"):
            names += [f"{int(file.name[6:8])}.{name}" for name in state]
        elif not names and state["module"]:
            names += state["module"]
    return list(dict.fromkeys(names))


def orders(state):
    """The keys of all dicts, in their order."""
    if isinstance(state, dict):
        return [(key, orders(value)) for key, value in state.items()]
    return [orders(item) for item in state] if isinstance(state, list) else None


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_the_order_of_keys_is_that_of_the_files(path, tmp_path, classes_of_deepspeed):
    """Shows A2. The module's as its state dict has it, the optimizer's as the groups list the parameters (with round_robin_gradients, as
    the vectors hold them)."""
    whole = torch.load(reshard(path, tmp_path / "whole.pt"), weights_only=True)
    expected = [name for name in keys_of_module(path) if name in whole["model"]]
    assert len(expected) > 2 or path.name == "universal_tensor_pipeline"  # has neither module nor layers
    assert [name for name in whole["model"] if name in expected] == expected
    if path.name != WITHOUT_OPTIMIZER:
        assert list(whole["optim"]) == ["state", "param_groups"]
        for group in whole["optim"]["param_groups"]:  # stages follow each other, each with parameters of all groups
            of_group = [name for name in whole["optim"]["state"] if name in group["params"]]
            if path.name == ROUND_ROBIN:
                of_group.sort(key=group["params"].index)
            assert of_group == group["params"]
    if path in ZERO:
        optimizer = torch.load(next(path.glob("*/*_rank_0_*optim_states.pt")), weights_only=False)["optimizer_state_dict"]
        base = optimizer.get("base_optimizer_state", optimizer.get("optimizer_state_dict"))
        assert list(whole["model"]) == expected
        assert list(whole["optim"]["param_groups"][0]) == list(base["param_groups"][0])
    if path.name != WITHOUT_OPTIMIZER:
        run_folder = reshard(path, tmp_path / "run", "--to", "deepspeed")
        back = torch.load(reshard(run_folder, tmp_path / "back.pt"), weights_only=True)
        assert orders(back) == orders(whole)


def test_numbers_are_those_of_the_optimizer_with_round_robin_gradients(tmp_path):
    """Shows A2. The vectors of stages 1 and 2 then have the parameters in another order than the optimizer's group."""
    named = torch.load(reshard(VALID / ROUND_ROBIN, tmp_path / "named.pt"), weights_only=True)["optim"]
    numbered = torch.load(reshard(VALID / ROUND_ROBIN, tmp_path / "numbered.pt", "--optimizer-params", "numbers"), weights_only=True)["optim"]
    groups = [["embedding.weight", "up.weight", "down.weight"], ["scale", "up.bias", "norm.weight", "norm.bias"]]
    for number, name in enumerate(sum(groups, [])):
        assert torch.equal(numbered["state"][number]["exp_avg"], named["state"][name]["exp_avg"]), name


def test_dicts_and_lists_within_a_model_come_back(tmp_path):
    """Shows A2, F2. DeepSpeed has flat names of parameters."""
    one = torch.ones(2)
    tied = one + 3
    model = {"head": {"w": one, "b": one + 1}, "layers": [one + 2, {"w": tied}], "count": {"n": torch.tensor([1])}, "again": {"w": tied}, 7: {8: one}}
    trained = {"model": {"up": {"w": one}, "down": {"w": one + 1}},
               "optim": {"state": {"up.w": {"exp_avg": one + 2, "step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1, "params": ["up.w"]}]}}
    mixed = {"model": {"layers": [one, torch.tensor([1]), 5, one + 1, None], "up._extra_state": [torch.tensor([3.0]), 4]}, "list": [7, one + 2]}
    for number, state in enumerate(({"model": model, "epoch": 1}, trained, mixed)):
        torch.save(state, tmp_path / f"{number}.pt")
        run_folder = tmp_path / f"{number}-run"
        document = json.loads(succeed("ckpt-reshard", tmp_path / f"{number}.pt", run_folder, "--to", "deepspeed", "--json"))
        assert document["changes"] == []
        back = torch.load(reshard(run_folder, tmp_path / f"{number}-back.pt"), weights_only=True)
        assert orders(back) == orders(state)
        assert {name: float(tensor[0]) for name, tensor in flatten(back) if torch.is_tensor(tensor) and tensor.dim()} == {
            name: float(tensor[0]) for name, tensor in flatten(state) if torch.is_tensor(tensor) and tensor.dim()}


def test_outermost_keys_that_are_no_text_are_kept_or_refused(tmp_path, classes_of_deepspeed):
    """Shows A2, F2. A move from DeepSpeed keeps number keys of client state. A move to DeepSpeed refuses them."""
    copy = shutil.copytree(VALID / "zero1", tmp_path / "copy", copy_function=shutil.copyfile)
    edit(copy / "global_step2" / "mp_rank_00_model_states.pt", lambda state: state.update({7: torch.ones(2), 8: 9}))
    back = torch.load(reshard(copy, tmp_path / "back.pt"), weights_only=True)
    assert torch.equal(back[7], torch.ones(2)) and back[8] == 9
    process = run("ckpt-reshard", copy, tmp_path / "run", "--to", "deepspeed")
    assert process.returncode == 3 and "expected a text as the first key, found 7" in process.stderr
    torch.save({7: torch.ones(2), "w": torch.zeros(2)}, tmp_path / "bare.pt")
    reshard(tmp_path / "bare.pt", tmp_path / "bare", "--to", "deepspeed")
    assert list(torch.load(reshard(tmp_path / "bare", tmp_path / "bare-back.pt"), weights_only=True)["model"]) == [7, "w"]


def test_a_dict_of_the_user_called_deepspeed_stays_one(tmp_path):
    """Shows A2, F2. DeepSpeed's own members go to its files; others, such as a configuration, are client state."""
    state = {"model": {"w": torch.ones(2)}, "deepspeed": {"zero_optimization": {"stage": 2}, "global_steps": 5, 0: 1, "module": 3}}
    torch.save(state, tmp_path / "source.pt")
    reshard(tmp_path / "source.pt", tmp_path / "run", "--to", "deepspeed")
    back = torch.load(reshard(tmp_path / "run", tmp_path / "back.pt"), weights_only=True)
    assert back.keys() == state.keys() and back["deepspeed"] == state["deepspeed"]


def test_two_entries_of_one_name_are_refused(tmp_path):
    """Shows A2, F2. A bare state dict's `w` becomes `model.w`."""
    torch.save({"w": torch.ones(2), "model.w": 3}, tmp_path / "bare.pt")
    process = run("ckpt-reshard", tmp_path / "bare.pt", tmp_path / "run", "--to", "deepspeed")
    assert process.returncode == 3 and "model.w: names: expected one entry of this name" in process.stderr, process.stderr
    assert not (tmp_path / "run").exists()


def load(path):
    return torch.load(path, weights_only=True)


def of_client_state(folder, **members):
    """Copies a checkpoint of ZeRO 1 and adds what the trainer saved."""
    copy = shutil.copytree(VALID / "zero1", folder, copy_function=shutil.copyfile)
    edit(copy / "global_step2" / "mp_rank_00_model_states.pt", lambda state: state.update(members))
    return copy


@pytest.mark.parametrize("members", [
    {"deepspeed": {"foo": 1, "global_steps": 99}}, {"deepspeed": {}}, {"deepspeed": 5}, {"deepspeed": []}, {"optim": {}}, {"optim": 3},
    {"optim": {"foo": 1}}, {"model": None}, {"model": {"up.weight": 3}}, {"per_rank": [1, 2]}, {"per_rank": {"0": {"epoch": 99}}, "epoch": 4},
    {"deepspeed": {"global_steps": 99}, "client_state": 7}, {"deepspeed": {"global_steps": 99}, "per_rank": {"0": {"a": 5}}}], ids=str)
def test_client_state_that_clashes_is_told_apart(members, tmp_path, classes_of_deepspeed):
    """Shows A2, F2. It is read as `client_state.<member>`, and a note says so. No other value changes."""
    run_ = of_client_state(tmp_path / "run", **members)
    assert "client_state: expected members with other names" in succeed("ckpt-inspect", "verify", run_)
    state = load(reshard(run_, tmp_path / "run.pt"))
    expected = load(reshard(VALID / "zero1", tmp_path / "without.pt"))
    key = "client_state2" if "client_state" in members else "client_state"
    clashing = {name: value for name, value in members.items() if name in ("deepspeed", "optim", "model", "per_rank")}
    assert state.pop(key) == clashing
    others = {name: value for name, value in members.items() if name not in clashing}
    assert str(state) == str({name: state[name] for name in state if name in expected or name in others})
    for name, value in (expected | others).items():
        assert str(state[name]) == str(value), name
    reshard(run_, tmp_path / "ranks", "--to", "rank_files", "--world-size", "3")
    of_ranks, again = (load(reshard(source, tmp_path / f"{source.name}-again.pt")) for source in (tmp_path / "ranks", run_))
    assert sorted(map(str, flatten(of_ranks))) == sorted(map(str, flatten(again)))
    reshard(run_, tmp_path / "universal", "--to", "deepspeed")
    back = load(reshard(tmp_path / "universal", tmp_path / "back.pt"))
    assert back.pop(key) == clashing and str(back) == str(state)
    saved = torch.load(next((tmp_path / "universal").glob("*/mp_rank_00_model_states.pt")), weights_only=False)
    if key == "client_state":
        assert saved.get(key, {}) | {name: saved[name] for name in clashing if name in saved} == clashing
        assert set(saved.get(key, {})) <= {"per_rank"}
    succeed("ckpt-reshard", run_, tmp_path / "left.pt", "--quiet", "--only", "!" + key)
    assert key not in load(tmp_path / "left.pt")


def test_names_of_a_model_without_its_key_are_told(tmp_path):
    """Shows A2, F2. DeepSpeed's files store a module, so the names of a bare state dict get the prefix `model.`."""
    torch.save({"w": torch.ones(2), "b": torch.ones(2), "epoch": 3}, tmp_path / "bare.pt")
    document = json.loads(succeed("ckpt-reshard", tmp_path / "bare.pt", tmp_path / "run", "--to", "deepspeed", "--json"))
    assert document["changes"] == [{"kind": "model_names", "count": 2}]
    assert set(listing(tmp_path / "run")["values"]) == {"epoch"}
    assert set(tensors_by_name(listing(tmp_path / "run"))) == {"model.w", "model.b"}
    torch.save({"model": {"w": torch.ones(2)}, "a": torch.ones(2)}, tmp_path / "nested.pt")
    document = json.loads(succeed("ckpt-reshard", tmp_path / "nested.pt", tmp_path / "nested", "--to", "deepspeed", "--json"))
    assert document["changes"] == []


@pytest.mark.parametrize("path", ZERO, ids=lambda path: path.name)
def test_the_model_alone_becomes_safetensors(path, tmp_path):
    """Shows F2. safetensors loads the fp32 weights under the names of the module."""
    moved = reshard(path, tmp_path / "model.safetensors", "--only", "model", "--rename", "model.=")
    loaded = load_file(moved)
    expected = {row["name"].removeprefix("model."): row for row in expectation(path)["tensors"]
                if row["name"].startswith("model.")}
    del expected["head.weight"]  # tied: safetensors has it once
    assert {name: tensor_row(name, tensor) for name, tensor in loaded.items()} == {
        name: row | {"name": name} for name, row in expected.items()}
    Model().load_state_dict(loaded | {"head.weight": loaded["embedding.weight"]})


def load_and_train(checkpoint, result):
    torch.manual_seed(99)  # other weights than those saved
    model = Model()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(groups_of(model), lr=1.0)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optimizer_state}
    # DeepSpeed's own Adams have fewer fields of groups than PyTorch's
    planner = dcp.DefaultLoadPlanner(allow_partial_load="cpu_adam" in str(checkpoint))
    dcp.load(state, checkpoint_id=checkpoint, planner=planner)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    model_state, optimizer_state = get_state_dict(model, optimizer)
    held = [(key, ranks.whole(leaf)) for key, leaf in flatten({"model": model_state, "optim": optimizer_state})]
    if dist.get_rank() == 0:
        write_expect(result, "dcp", held)
    model(torch.arange(6) % 7).backward()
    optimizer.step()


def load_files_of_ranks(folder, whole):
    """Loads the files of this rank as verl does, compares its shards with those of the whole tensors, and takes the next step."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = Model()
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",)))
    optimizer = torch.optim.AdamW(groups_of(model), lr=1.0)
    model.load_state_dict(torch.load(folder / f"model_world_size_{world_size}_rank_{rank}.pt", weights_only=False))
    optimizer.load_state_dict(torch.load(folder / f"optim_world_size_{world_size}_rank_{rank}.pt", weights_only=False))
    expected = torch.load(whole, weights_only=True)

    def compare(tensor, whole_tensor):
        shards = whole_tensor.chunk(world_size)
        shard = shards[rank] if rank < len(shards) else whole_tensor[:0]
        assert torch.equal(tensor.to_local(), shard.to(tensor.dtype))

    names = [name for group in expected["optim"]["param_groups"] for name in group["params"]]
    parameters = dict(model.named_parameters())
    assert [id(parameter) for group in optimizer.param_groups for parameter in group["params"]] == [id(parameters[name]) for name in names]
    for name, parameter in parameters.items():
        compare(parameter.data, expected["model"][name])
    assert torch.equal(model.seen, expected["model"]["seen"])
    for name in names:
        state = optimizer.state[parameters[name]]
        for kind in ("exp_avg", "exp_avg_sq"):
            compare(state[kind], expected["optim"]["state"][name][kind])
        assert float(state["step"]) == float(expected["optim"]["state"][name]["step"])
    model(torch.arange(6) % 7).backward()
    optimizer.step()


@pytest.mark.parametrize("name, world_size", [("zero1", 3), ("zero2_cpu_adam", 2), ("zero2_cpu_adam", 3), ("zero3", 2), ("zero3", 3)])
def test_fsdp2_loads_files_of_ranks_and_trains_on(name, world_size, tmp_path, monkeypatch):
    """Shows F1, F2. Each parameter and its moments are DTensors, also where ZeRO has the parameter on one rank."""
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    whole = reshard(VALID / name, tmp_path / "whole.pt")
    moved = reshard(VALID / name, tmp_path / "moved", "--to", "rank_files", "--world-size", world_size, "--optimizer-params", "numbers",
                    "--device-mesh", "cpu:fsdp")
    ranks.run(world_size, load_files_of_ranks, moved, whole)


@pytest.mark.parametrize("path", ZERO, ids=lambda path: path.name)
def test_fsdp2_loads_it_and_trains_on(path, tmp_path, monkeypatch):
    """Shows F2, A4. FSDP2 holds DeepSpeed's weights, frozen weights, buffers, moments, steps and groups, and can take
    the next step."""
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    moved = reshard(path, tmp_path / path.name, "--to", "dcp", "--world-size", "2", "--strategy", "dim0")
    ranks.run(2, load_and_train, moved, tmp_path / "held")
    held, expected = expectation(tmp_path / "held"), expectation(path)
    found = tensors_by_name(held)
    # FSDP2's model has fp32 weights and buffers; what DeepSpeed kept in 16 bits is compared after the same cast
    of_16_bits = {name for name, row in tensors_by_name(expected).items() if row[0] in ("bfloat16", "float16")}
    wanted = {name: row for name, row in tensors_by_name(expected).items() if name.startswith(("model.", "optim."))}
    assert found.keys() == wanted.keys()
    assert {name for name in wanted if found[name] != wanted[name]} <= of_16_bits
    for name, value in held["values"].items():
        of_deepspeed = expected["values"].get(name, value)
        is_list = isinstance(value, list)  # names of parameters: DeepSpeed may have shuffled them
        assert sorted(value) == sorted(of_deepspeed) if is_list else value == of_deepspeed, name


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_verify_finds_flipped_bits(path, tmp_path):
    """Shows F2, E4. `verify` checks the checksums of all archives."""
    copy = shutil.copytree(path, tmp_path / "copy", copy_function=shutil.copyfile)
    succeed("ckpt-inspect", "verify", copy)
    last = sorted([*copy.glob("*/*_optim_states.pt"), *copy.glob("*/zero/*/exp_avg.pt"), *copy.glob("*/layer_*.pt")])[-1]
    flip_a_bit(last, "/data/1" if "optim_states" in last.name else "/data/0")
    assert run("ckpt-inspect", "verify", copy).returncode == 1


def test_what_a_module_keeps_beside_tensors_is_there(tmp_path):
    """Shows F2. A module's state can be a value that is not a tensor, such as what get_extra_state returns."""
    copy = shutil.copytree(VALID / "zero1", tmp_path / "copy", copy_function=shutil.copyfile)
    file = copy / "global_step2" / "mp_rank_00_model_states.pt"
    state = torch.load(file, weights_only=False)
    state["module"] |= {"up._extra_state": {"scale": torch.ones(2), "recipe": {"margin": 3}}, "down._extra_state": 4}
    torch.save(state, file)
    found = listing(copy)
    assert tensors_by_name(found)["model.up._extra_state.scale"][:2] == ("float32", [2])
    assert found["values"]["model.up._extra_state.recipe.margin"] == 3
    assert found["values"]["model.down._extra_state"] == 4


@pytest.mark.parametrize(("name", "counts", "steps"), [("zero1", {"global_steps": 5}, 5), ("zero3", {"global_steps": 5, "skipped_steps": 1}, 4),
                                                       ("zero3", {"global_steps": 5, "skipped_steps": 3}, None),
                                                       ("tensor_pipeline", {"global_steps": 3}, 3)])
def test_a_note_says_that_the_optimizer_is_of_another_step(name, counts, steps, tmp_path, classes_of_deepspeed):
    """Shows F2. The optimizer has taken two steps."""
    copy = shutil.copytree(VALID / name, tmp_path / "copy", copy_function=shutil.copyfile)
    for file in copy.glob("*/*mp_rank_*_model_states.pt"):
        torch.save(torch.load(file, weights_only=False) | counts, file)
    found = run("ckpt-inspect", "ls", copy).stderr
    assert ("steps: expected optimizer state after" in found) == (steps is not None)
    assert steps is None or f"expected optimizer state after {steps} steps, as " in found and ", found 2 steps in " in found
    assert "steps: expected" not in run("ckpt-inspect", "ls", VALID / name).stderr


@pytest.fixture
def classes_of_deepspeed(monkeypatch):
    """Lets torch.load create objects of DeepSpeed's classes without DeepSpeed."""
    class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        def find_spec(self, name, path=None, target=None):
            is_ours = name.split(".")[0] == "deepspeed"
            return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_ours else None

        def exec_module(self, module):
            module.__getattr__ = lambda name: vars(module).setdefault(name, made(module.__name__, name))

    def made(module, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "ZeroStageEnum":
            return enum.IntEnum(name, {f"stage{number}": number for number in range(4)}, module=module)
        return type(name, (), {"__module__": module})

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed"]:
        del sys.modules[name]


def with_ranks_apart(path, copy):
    """Copies a checkpoint of ZeRO. In the copy, each rank has entries of its own in both of its files."""
    shutil.copytree(path, copy, copy_function=shutil.copyfile)
    for kind in ("model", "optim"):
        for rank, file in enumerate(sorted(copy.glob(f"*/zero_pp_rank_*_{kind}_states.pt"))):
            state = torch.load(file, weights_only=False)
            if kind == "model":
                state |= {"rng": torch.tensor([rank]), "epoch": 4, "skipped_steps": rank, "seen": {"by": [rank]}}
                state["module"]["up._extra_state"] = {"calls": rank}
                if rank == 1:
                    state["only"] = "here"
            else:
                state |= {"top": rank, "all": torch.ones(2)}
                state["optimizer_state_dict"] |= {"mine": [rank], "overflow": rank == 1}
                of_optimizer = state["optimizer_state_dict"].get("base_optimizer_state", state["optimizer_state_dict"].get("optimizer_state_dict"))
                of_optimizer["extra"] = rank
            torch.save(state, file)
    return copy


def test_what_each_rank_of_stage_3_saves_for_itself_is_there(tmp_path, classes_of_deepspeed):
    """Shows F2, E13. The entry of rank 0 keeps the name; the names of the others have the rank in them, and a note
    counts them."""
    copy = with_ranks_apart(VALID / "zero3", tmp_path / "run")
    found = listing(copy)
    tensors, values = tensors_by_name(found), found["values"]
    assert {name for name in tensors if "rng" in name} == {"rng", "per_rank.1.rng", "per_rank.2.rng"}
    assert values["epoch"] == 4 and "per_rank.1.epoch" not in values and values["only"] == "here"
    for rank, front in enumerate(("", "per_rank.1.", "per_rank.2.")):
        assert values[front + "deepspeed.skipped_steps"] == rank and values[front + "seen.by"] == [rank]
        assert values[front + "model.up._extra_state.calls"] == rank
        assert values[front + "deepspeed.optim_states.top"] == rank
        assert values[front + "deepspeed.optimizer_state_dict.mine"] == [rank]
        assert values[front + "deepspeed.optimizer_state_dict.base_optimizer_state.extra"] == rank
    document = json.loads(succeed("ckpt-reshard", copy, tmp_path / "whole.pt", "--json"))
    assert [note["found"] for note in document["notes"] if "per_rank" in note["found"]] == [
        "8 names with different copies, such as 'deepspeed.optim_states.top' (the copy of the lowest rank keeps the name, "
        "other copies are per_rank.<rank>.<name>)"]
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert whole["per_rank"]["2"]["rng"].tolist() == [2] and whole["rng"].tolist() == [0]
    again = listing(reshard(copy, tmp_path / "again", "--to", "deepspeed"))["values"]
    assert again["per_rank.2.deepspeed.skipped_steps"] == 2
    assert again["deepspeed.optimizer_state_dict.base_optimizer_state.extra"] == 0


def test_what_a_rank_has_beside_its_optimizer_state_is_there(tmp_path, classes_of_deepspeed):
    """Shows F2, E13. Files of optimizer states can have members that DeepSpeed does not write."""
    for name in ("zero1", "zero2_fp16"):
        found = listing(with_ranks_apart(VALID / name, tmp_path / name))
        values = found["values"]
        assert tensors_by_name(found)["deepspeed.optim_states.all"][1] == [2]
        for rank, front in enumerate(("", "per_rank.1.")):
            assert values[front + "deepspeed.optim_states.top"] == rank
            assert values[front + "deepspeed.optimizer_state_dict.overflow"] == (rank == 1)
            assert values[front + "deepspeed.optimizer_state_dict.base_optimizer_state.extra"] == rank
        assert not [name for name in values if name.startswith("per_rank") and name.split(".")[-1] not in ("top", "mine", "overflow", "extra")]


@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_what_lies_beside_the_state_of_vectors_is_there(name, tmp_path, classes_of_deepspeed):
    """Shows F2, E13. An optimizer can keep values and tensors of its own in the dict that has the state of its parameters."""
    copy = shutil.copytree(VALID / name, tmp_path / "run", copy_function=shutil.copyfile)
    for rank, file in enumerate(sorted(copy.glob("*/zero_pp_rank_*_optim_states.pt"))):
        edit(file, lambda state: state["optimizer_state_dict"].get("base_optimizer_state", state["optimizer_state_dict"].get("optimizer_state_dict"))[
            "state"].update({"calls": 5, "seen": torch.arange(3) + rank, "none": {}}))
    for path in (copy, reshard(copy, tmp_path / "again", "--to", "deepspeed")):
        found = listing(path)
        where = "deepspeed.optimizer_state_dict.base_optimizer_state.state."
        assert found["values"][where + "calls"] == 5
        assert {tensor for tensor in tensors_by_name(found) if where in tensor} >= {where + "seen", "per_rank.1." + where + "seen"}


def test_a_tensor_of_the_module_that_only_some_ranks_have_is_noted(tmp_path, classes_of_deepspeed):
    """Shows F2, E13. `_extra_state` can be a tensor, and is no buffer."""
    for number, tensors in enumerate(([torch.zeros(2), torch.ones(2), torch.zeros(2)], [None, None, torch.ones(2)])):
        copy = shutil.copytree(VALID / "zero3", tmp_path / f"{number}", copy_function=shutil.copyfile)
        for file, tensor in zip(sorted(copy.glob("*/zero_pp_rank_*_model_states.pt")), tensors):
            edit(file, lambda state: state["module"].update({"seen": torch.zeros(7)} | ({"up._extra_state": tensor} if tensor is not None else {})))
        assert notes_of_move(copy, tmp_path / f"{number}.pt") == [
            "ranks: 1 name with other bytes on some rank, such as 'up._extra_state'; the buffers of rank 0 are read"]


@pytest.mark.parametrize("name", ["zero3", "autotp_zero3"])
def test_a_parameter_in_the_module_of_a_later_rank_is_noted(name, tmp_path, classes_of_deepspeed):
    """Shows F2, E13."""
    path = shutil.copytree(VALID / name, tmp_path / name)
    plain = notes_of_move(path, tmp_path / "plain.pt")
    parameter, shape = next(iter(torch.load(next(path.glob("*/zero_pp_rank_1_*_model_states.pt")), weights_only=False)["param_shapes"][0].items()))
    edit(next(path.glob("*/zero_pp_rank_1_*_model_states.pt")), lambda state: state["module"].update({parameter: torch.ones(shape)}))
    assert set(notes_of_move(path, tmp_path / "moved.pt")) - set(plain) == {
        f"ranks: 1 name with other bytes on some rank, such as '{parameter}'; the copies are left out"}


@pytest.mark.parametrize("item", [torch.ones(3), torch.zeros(0), 5], ids=["vector", "empty", "value"])
def test_a_vector_that_only_a_later_rank_has_is_refused(item, tmp_path, classes_of_deepspeed):
    """Shows F2, E7."""
    path = shutil.copytree(VALID / "zero1", tmp_path / "zero1")
    edit(path / "global_step2" / "zero_pp_rank_1_mp_rank_00_optim_states.pt",
         lambda state: state["optimizer_state_dict"]["single_partition_of_fp32_groups"].append(item))
    result = run("ckpt-reshard", path, tmp_path / "moved.pt", "--to", "torch")
    assert result.returncode == 3 and "fp32 weights: expected flat vector 2" in result.stderr


@pytest.mark.parametrize("of_ranks", [
    [[torch.zeros(1)], [torch.ones(1)] * 2, [torch.ones(1) * 2]], [[1, 2], [torch.ones(2), torch.ones(1)], [1, 2]],
    [{"position": 5}, None, {"position": 6}], [None, {"position": 5}, None], [{}, {"position": torch.ones(1)}, {}],
    [{"a": {"x": 1}, "b": 1}, {"a": {"y": 1}, "b": 2}, {"a": {"x": 3}, "b": 1}], [torch.ones(1), 3, {"a": 1}],
    [[[1, torch.ones(1)], 2], [[1, torch.ones(1)]], [[1], 2]]], ids=range(8))
def test_dicts_and_lists_that_differ_between_ranks_stay_apart(of_ranks, tmp_path, classes_of_deepspeed):
    """Shows F2, E13. No entry of a dict or list of one rank gets into that of another rank."""
    def text(value):
        return repr(value).replace("tensor([", "t([")

    copy = shutil.copytree(VALID / "zero3", tmp_path / "run", copy_function=shutil.copyfile)
    for rank, value in enumerate(of_ranks):
        edit(copy / "global_step2" / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", lambda state: state.update(loader=value))
        edit(copy / "global_step2" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
             lambda state: state["optimizer_state_dict"].update(mine=value))
    reshard(copy, tmp_path / "dcp", "--to", "dcp")
    whole = torch.load(reshard(copy, tmp_path / "whole.pt"), weights_only=True)
    found = [whole["loader"], whole["deepspeed"]["optimizer_state_dict"]["mine"]]
    assert [text(value) for value in found] == [text(of_ranks[0])] * 2
    for rank in (1, 2):
        own = whole["per_rank"].get(str(rank), {})
        for value in (own.get("loader", of_ranks[0]), own.get("deepspeed", {"optimizer_state_dict": {"mine": of_ranks[0]}})["optimizer_state_dict"]["mine"]):
            is_part = all(isinstance(each, dict) for each in (value, of_ranks[0], of_ranks[rank])) and of_ranks[rank].keys() == of_ranks[0].keys()
            assert text(value) == text(of_ranks[rank]) or is_part and value.items() <= of_ranks[rank].items()
    notes = json.loads(succeed("ckpt-inspect", "verify", copy, "--json"))["findings"]
    assert any("with others, such as 'deepspeed.optimizer_state_dict.mine" in note["found"] for note in notes)
    if isinstance(of_ranks[0], torch.Tensor) or isinstance(of_ranks[1], list) and len(of_ranks[1]) < len(of_ranks[0]):
        return  # a DTensor; a list that rank files cannot tell from one in which only some positions differ
    state = torch.load(reshard(copy, tmp_path / "ranks", "--to", "rank_files", "--world-size", "3") / "world_size_3_rank_1.pt", weights_only=False)
    assert text(state["loader"]) == text(of_ranks[0]).replace("'b': 1", "'b': 2")
    assert "loader" in state["per_rank"]["1"]


def test_what_a_move_makes_simpler_is_told(tmp_path, classes_of_deepspeed):
    """Shows F2, A2. The summary counts simplified objects in what the trainer saved beside the model, as for torch.save
    files."""
    def with_classes(rank):
        return {"t": (torch.ones(2), rank), "fs": frozenset((1,)), "od": collections.OrderedDict(a=1), "p": torch.nn.Parameter(torch.ones(2))}

    kinds = {"tuples", "value_types", "dict_classes", "parameters"}
    for name in ("zero1", "zero3"):
        copy = shutil.copytree(VALID / name, tmp_path / name, copy_function=shutil.copyfile)
        plain = json.loads(succeed("ckpt-reshard", copy, tmp_path / f"{name}.plain", "--to", "torch", "--json"))["changes"]
        for rank, file in enumerate(sorted(copy.glob("*/*_model_states.pt"))):
            state = torch.load(file, weights_only=False)
            torch.save(state | with_classes(rank), file)
        changes = json.loads(succeed("ckpt-reshard", copy, tmp_path / f"{name}.pt", "--to", "torch", "--json"))["changes"]
        counts = {change["kind"]: change["count"] for change in changes}
        for change in plain:
            counts[change["kind"]] -= change["count"]
        assert {kind for kind, count in counts.items() if count} == kinds
        assert {counts[kind] for kind in kinds - {"tuples"}} == {1} and counts["tuples"] == (1 if name == "zero1" else 3)


def test_a_configuration_of_a_rank_alone_is_there(tmp_path, classes_of_deepspeed):
    """Shows F2, E13. In stages 1 and 2 the configuration of a rank is in its optimizer states."""
    copy = shutil.copytree(VALID / "zero1", tmp_path / "run", copy_function=shutil.copyfile)
    edit(copy / "global_step2" / "zero_pp_rank_1_mp_rank_00_optim_states.pt", lambda state: state["ds_config"].update(train_micro_batch_size_per_gpu=7))
    values = listing(copy)["values"]
    assert values["per_rank.1.deepspeed.ds_config.train_micro_batch_size_per_gpu"] == 7
    assert sum(name.startswith("per_rank") for name in values) == 1


def test_ranks_of_runs_with_different_stages_are_refused(tmp_path, classes_of_deepspeed):
    """Shows F2, E3. The shapes, groups and steps of the runs are equal."""
    copy = shutil.copytree(VALID / "zero1", tmp_path / "run", copy_function=shutil.copyfile)
    edit(copy / "global_step2" / "zero_pp_rank_1_mp_rank_00_optim_states.pt", lambda state: state["ds_config"]["zero_optimization"].update(stage=2))
    result = run("ckpt-reshard", copy, tmp_path / "moved.pt", "--to", "torch")
    assert result.returncode == 3 and ("zero_pp_rank_1_mp_rank_00_optim_states.pt: ds_config.zero_optimization.stage: expected 1, as in "
                                       "zero_pp_rank_0_mp_rank_00_optim_states.pt, found 2") in result.stderr, result.stderr


def test_an_optimizer_without_state_gets_state_without_items(tmp_path, classes_of_deepspeed):
    """Shows F2, E13. PyTorch's SGD without momentum loads what becomes of it."""
    def drop_state(state):
        of_optimizer = state["optimizer_state_dict"]
        of_optimizer.get("base_optimizer_state", of_optimizer.get("optimizer_state_dict"))["state"] = {}

    for name in ("zero1", "zero3", "tensor_pipeline"):
        copy = shutil.copytree(VALID / name, tmp_path / name, copy_function=shutil.copyfile)
        for file in copy.glob("*/*_optim_states.pt"):
            edit(file, drop_state)
        expected = list(listing(VALID / name)["values"])
        assert sorted(expected + ["optim.state"]) == sorted(listing(copy)["values"])
        run_folder = reshard(copy, tmp_path / f"{name}.run", "--to", "deepspeed")
        for source in (copy, run_folder):
            optim = torch.load(reshard(source, tmp_path / "whole.pt", "--to", "torch", "--overwrite"), weights_only=True)["optim"]
            assert optim["state"] == {} and optim["param_groups"][0]["params"]


def test_a_rank_with_only_padding_of_a_vector_has_no_state_of_it(tmp_path, classes_of_deepspeed):
    """Shows F2. For SGD without momentum, the ranks with elements of the vector have a dict without items."""
    for of_ranks in ([{0: {}, 1: {}}, {0: {}}], [{0: {}}, {0: {}, 1: {}}]):
        copy = shutil.copytree(VALID / "zero1", tmp_path / f"{len(list(tmp_path.iterdir()))}", copy_function=shutil.copyfile)
        for file, state in zip(sorted(copy.glob("*/*_optim_states.pt")), of_ranks, strict=True):
            edit(file, lambda whole: whole["optimizer_state_dict"]["base_optimizer_state"].update(state=state))
        succeed("ckpt-inspect", "verify", copy)


def test_without_groups_a_note_says_so(tmp_path, classes_of_deepspeed):
    """Shows F2, E13. With elastic_checkpoint DeepSpeed saves a list of state, and no groups."""
    copy = shutil.copytree(VALID / "zero1", tmp_path / "run", copy_function=shutil.copyfile)
    for file in copy.glob("*/*_optim_states.pt"):
        edit(file, lambda whole: whole["optimizer_state_dict"].update(
            base_optimizer_state=list(whole["optimizer_state_dict"]["base_optimizer_state"]["state"].values())))
    assert notes_of_move(copy, tmp_path / "whole.pt") == [
        "groups: none in zero_pp_rank_0_mp_rank_00_optim_states.pt, so learning rate, weight decay and other fields are missing "
        "(DeepSpeed saves none with elastic_checkpoint)"]


def notes_of_move(source, destination):
    document = json.loads(succeed("ckpt-reshard", source, destination, "--to", "torch", "--json"))
    return [note["rule"] + ": " + note["found"] for note in document["notes"]]


def edit(file, change):
    state = torch.load(file, weights_only=False)
    change(state)
    torch.save(state, file)


def test_bf16_without_zero_lists_no_shapes(tmp_path, classes_of_deepspeed):
    """Shows F2. The names are those that the ranks recorded; shapes and ties are those of the module."""
    copy = shutil.copytree(VALID / "zero1_bf16", tmp_path / "run", copy_function=shutil.copyfile)
    file = copy / "global_step2" / "mp_rank_00_model_states.pt"
    optimizer = torch.load(next(copy.glob("*/*_optim_states.pt")), weights_only=False)["optimizer_state_dict"]
    edit(file, lambda state: state.update(param_shapes=None, shared_params=None, optimizer=optimizer))
    found, expected = listing(copy), expectation(VALID / "zero1_bf16")
    assert tensors_by_name(found) == tensors_by_name(expected)
    edit(file, lambda state: state["module"].pop("up.weight"))
    process = run("ckpt-inspect", "ls", copy)
    assert process.returncode == 3 and "up.weight: parts of ranks: expected a parameter of 55 elements in the module, found none" in process.stderr


@pytest.mark.parametrize("name", ["zero1", "zero1_bf16", "zero2_bf16", "zero2_cpu_adam", "zero2_fp16"])
def test_a_copy_in_the_module_with_other_numbers_is_noted(name, tmp_path, classes_of_deepspeed):
    """Shows F2, E13. A copy of 16 bits must equal the fp32 weights, cast to its dtype."""
    copy = shutil.copytree(VALID / name, tmp_path / "run", copy_function=shutil.copyfile)
    plain = notes_of_move(copy, tmp_path / "plain.pt")
    assert not any("different numbers" in note for note in plain)
    edit(next(copy.glob("*/mp_rank_00_model_states.pt")), lambda state: state["module"]["up.weight"].view(-1)[39].add_(1))
    assert notes_of_move(copy, tmp_path / "whole.pt") == [
        *plain, "copies: 1 name with different numbers in the copies, such as 'up.weight'; the master weights are read"]


@pytest.mark.parametrize("name", ["zero1", "zero2_bf16"])
def test_a_copy_under_a_tied_name_with_other_numbers_is_noted(name, tmp_path, classes_of_deepspeed):
    """Shows F2, E13."""
    copy = shutil.copytree(VALID / name, tmp_path / "run", copy_function=shutil.copyfile)
    plain = notes_of_move(copy, tmp_path / "plain.pt")

    def untie(state):
        state["shared_params"] = {"again.weight": "up.weight"}
        state["module"]["again.weight"] = state["module"]["up.weight"] + 1

    edit(next(copy.glob("*/mp_rank_00_model_states.pt")), untie)
    assert sorted({*notes_of_move(copy, tmp_path / "whole.pt")} - {*plain})[0] == (
        "copies: 1 name with different numbers in the copies, such as 'again.weight'; the master weights are read")


def test_a_frozen_fragment_with_other_numbers_than_the_module_is_noted(tmp_path, classes_of_deepspeed):
    """Shows F2, E13. Stage 2 saves frozen parameters twice, stage 3 as parts only."""
    copy = shutil.copytree(VALID / "zero2_bf16", tmp_path / "run", copy_function=shutil.copyfile)
    (file,) = copy.glob("*/mp_rank_00_model_states.pt")
    plain = notes_of_move(copy, tmp_path / "plain.pt")
    edit(file, lambda state: state["frozen_param_fragments"].update(frozen=state["module"]["up.weight"].clone()))
    edit(file, lambda state: state["module"].update(frozen=state["module"]["up.weight"].clone()))
    assert notes_of_move(copy, tmp_path / "same.pt") == plain
    edit(file, lambda state: state["module"]["frozen"].view(-1)[3].add_(1))
    assert notes_of_move(copy, tmp_path / "other.pt") == [
        *plain, "copies: 1 tensor that 'module' does not have, such as 'frozen_param_fragments.frozen'; 'module' is read"]


def test_buffers_without_checksums_are_compared_between_ranks(tmp_path, classes_of_deepspeed):
    """Shows F2, E13. The archive has one checksum for each storage, so a part of a storage has none."""
    copy = shutil.copytree(VALID / "zero3", tmp_path / "run", copy_function=shutil.copyfile)
    for rank, file in enumerate(sorted(copy.glob("*/*_model_states.pt"))):
        edit(file, lambda state: state["module"].update(extra=torch.tensor([7.0, float(rank)])[rank:][:1]))
    assert any("such as 'extra'" in note for note in notes_of_move(copy, tmp_path / "moved.pt"))


def test_what_differs_between_data_ranks_with_tensor_parallelism_is_noted(tmp_path, classes_of_deepspeed):
    """Shows F2, E13. Stage 3 saves model states of each data rank; those of the first are read."""
    copy = shutil.copytree(VALID / "autotp_zero3", tmp_path / "run", copy_function=shutil.copyfile)
    for rank, file in enumerate(sorted(copy.glob("*/zero_pp_rank_*_mp_rank_01_model_states.pt"))):
        edit(file, lambda state: state["module"].update(extra=torch.full((2,), float(rank))))
        edit(file, lambda state: state["universal_checkpoint_info"].update(universal_checkpoint_version=0.4 + rank))
    notes = notes_of_move(copy, tmp_path / "moved.pt")
    assert any("with other bytes on some rank, such as 'extra'" in note for note in notes), notes
    assert any("different rules in zero_pp_rank_1_mp_rank_01_model_states.pt" in note for note in notes), notes


def test_a_rank_of_another_run_in_16_bits_is_noted(tmp_path, classes_of_deepspeed):
    """Shows F2, E13. Both runs have the same configuration, groups and step, but other numbers."""
    copy = shutil.copytree(VALID / "zero2_bf16", tmp_path / "run", copy_function=shutil.copyfile)
    edit(next(copy.glob("*/*zero_pp_rank_1_*optim_states.pt")),
         lambda state: [vector.detach().neg_() for vector in state["optimizer_state_dict"]["single_partition_of_fp32_groups"]])
    assert "different numbers in the copies, such as" in succeed("ckpt-inspect", "verify", copy)


@pytest.mark.parametrize("name", ["zero3", "zero3_bf16"])
def test_a_layer_that_was_frozen_during_the_training_is_read_once(name, tmp_path, classes_of_deepspeed):
    """Shows F2, E13. Stage 3 saves the parameters of such a layer also as frozen ones, in the dtype of the model."""
    copy = shutil.copytree(VALID / name, tmp_path / "run", copy_function=shutil.copyfile)
    plain = notes_of_move(copy, tmp_path / "plain.pt")
    files = sorted(copy.glob("*/*_model_states.pt"))
    weight = load(tmp_path / "plain.pt")["model"]["up.weight"]
    parts = weight.new_zeros(len(files), -(-weight.numel() // len(files)))
    parts.view(-1)[:weight.numel()] = weight.view(-1)

    def freeze(file, part):
        def add(state):
            dtype = state["frozen_param_fragments"]["frozen.weight"].dtype
            state["frozen_param_shapes"]["up.weight"] = weight.shape
            state["frozen_param_fragments"]["up.weight"] = part.to(dtype)
        edit(file, add)

    for file, part in zip(files, parts):
        freeze(file, part)
    assert_same_state(listing(copy), expectation(VALID / name))
    assert notes_of_move(copy, tmp_path / "whole.pt") == plain
    freeze(files[1], parts[1] + 1)
    assert notes_of_move(copy, tmp_path / "other.pt") == [
        *plain, "copies: 1 name with different numbers in the copies, such as 'up.weight'; the master weights are read"]


def test_a_frozen_parameter_without_elements_keeps_its_dtype(tmp_path, classes_of_deepspeed):
    """Shows F2, E14."""
    copy = shutil.copytree(VALID / "zero3", tmp_path / "run", copy_function=shutil.copyfile)
    for file in copy.glob("*/*_model_states.pt"):
        def add(state):
            state["frozen_param_shapes"]["empty"] = torch.Size([0, 3])
            state["frozen_param_fragments"]["empty"] = torch.zeros(0, dtype=torch.float16)
        edit(file, add)
    assert tensors_by_name(listing(copy))["model.empty"][:2] == ("float16", [0, 3])


def test_a_step_that_is_a_number_becomes_a_tensor_and_is_counted(tmp_path):
    """Shows F2, E13. A move to DeepSpeed makes the step a tensor; other formats keep the number."""
    state = {"w": {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2), "step": 7}}
    torch.save({"model": {"w": torch.ones(2)}, "optim": {"param_groups": [{"lr": 0.1, "params": ["w"]}], "state": state}}, tmp_path / "source.pt")
    for to, changes in (("deepspeed", [{"kind": "tensor_steps", "count": 1}]), ("native", [])):
        document = json.loads(succeed("ckpt-reshard", tmp_path / "source.pt", tmp_path / to, "--to", to, "--json"))
        assert document["changes"] == changes


@pytest.mark.parametrize("groups", [[{"lr": 0.1, "params": ["w"]}, {"lr": 0.2, "params": []}], [{"lr": 0.1}, {"lr": 0.2}]], ids=["empty", "unlisted"])
def test_a_group_without_parameters_comes_back(groups, tmp_path):
    """Shows F2. A universal checkpoint keeps the fields of a group that lists no parameters, and of one without a list, as
    Megatron's distributed optimizer has them."""
    state = {"w": {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2), "step": torch.tensor(7.0)}}
    torch.save({"model": {"w": torch.ones(2)}, "optim": {"state": state, "param_groups": groups}}, tmp_path / "source.pt")
    moved = reshard(tmp_path / "source.pt", tmp_path / "run", "--to", "deepspeed")
    back = reshard(moved, tmp_path / "back.pt", "--to", "torch")
    assert torch.load(back)["optim"]["param_groups"] == groups


def test_a_step_that_float32_cannot_hold_is_refused_with_the_number(tmp_path):
    """Shows E3, E7."""
    state = {"w": {"exp_avg": torch.ones(2), "step": 2**24 + 1}}
    torch.save({"model": {"w": torch.ones(2)}, "optim": {"state": state}}, tmp_path / "source.pt")
    result = run("ckpt-reshard", tmp_path / "source.pt", tmp_path / "run", "--to", "deepspeed")
    assert result.returncode == 3 and "expected one number that float32 holds exactly, found 16777217" in result.stderr


def zero1_of_one_weight(folder, weight):
    """Writes a checkpoint of ZeRO stage 1 on one rank, in fp32, whose optimizer has no moments. Returns the folder of
    the step."""
    step = folder / "global_step1"
    step.mkdir(parents=True)
    (folder / "latest").write_text(step.name)
    of_both = {"ds_version": "0.19.8"}
    torch.save(of_both | {"module": {"w": weight}, "param_shapes": [{"w": weight.shape}], "dp_world_size": 1}, step / "mp_rank_00_model_states.pt")
    optimizer = {"single_partition_of_fp32_groups": [weight.flatten().clone()], "zero_stage": 1, "partition_count": [1],
                 "base_optimizer_state": {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}}
    torch.save(of_both | {"optimizer_state_dict": optimizer}, step / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    return step


@pytest.mark.parametrize("member, value, message", [
    ("module", None, "module: expected a dict of tensors, found None"), ("module", 3, "module: expected a dict of tensors, found 3"),
    ("shared_params", {"head.weight": "up.weight"}, "model.head.weight: shape in 'module': expected [11, 5], found [7, 5]"),
    ("up.weight", torch.ones(5, 11), "model.up.weight: shape in 'module': expected [11, 5], found [5, 11]")])
def test_a_module_that_does_not_fit_is_refused(member, value, message, tmp_path, classes_of_deepspeed):
    """Shows F2, E3."""
    copy = shutil.copytree(VALID / "zero1", tmp_path / "run", copy_function=shutil.copyfile)
    edit(copy / "global_step2" / "mp_rank_00_model_states.pt",
         lambda state: (state["module"] if member == "up.weight" else state).update({member: value}))
    result = run("ckpt-inspect", "verify", copy)
    assert result.returncode == 3 and message in result.stderr, result.stderr


def test_weights_that_are_not_flat_are_refused_with_their_shape(tmp_path, classes_of_deepspeed):
    """Shows F2, E7."""
    step = zero1_of_one_weight(tmp_path, torch.arange(6, dtype=torch.float32))
    edit(step / "zero_pp_rank_0_mp_rank_00_optim_states.pt",
         lambda state: state["optimizer_state_dict"].update(single_partition_of_fp32_groups=[torch.ones(2, 3)]))
    result = run("ckpt-inspect", "ls", step)
    assert result.returncode == 3 and ("expected flat vector 0, a one-dimensional tensor 'single_partition_of_fp32_groups.0', "
                                       "found a tensor of shape [2, 3]") in result.stderr, result.stderr


def add_momentum_of_whole_parameters(folder):
    """Adds state as DeepSpeed's Muon has it in stages 1 and 2: on each rank, that of all parameters of which the rank has a part, one
    after the other. Its numbers are those of the weights."""
    for model in sorted(folder.glob("*/mp_rank_*_model_states.pt")):
        files = sorted(model.parent.glob(f"*_pp_rank_*_{model.name.removesuffix('_model_states.pt')}_optim_states.pt"))
        states = [torch.load(file, weights_only=False) for file in files]
        for group, shapes in enumerate(torch.load(model, weights_only=False)["param_shapes"]):
            vectors = [state["optimizer_state_dict"]["single_partition_of_fp32_groups"][group] for state in states]
            whole, begin = torch.cat(vectors), 0
            ends = torch.tensor([shape.numel() for shape in shapes.values()]).cumsum(0).tolist()
            for state, vector in zip(states, vectors):
                touched = [(first, end) for first, end in zip([0, *ends], ends) if first < begin + len(vector) and end > begin]
                momentum = whole[touched[0][0]:touched[-1][1]].clone() if touched else torch.ones(3)
                state["optimizer_state_dict"]["base_optimizer_state"]["state"][group]["momentum_buffer"] = momentum
                begin += len(vector)
        for file, state in zip(files, states):
            torch.save(state, file)


@pytest.mark.parametrize("name", ["zero1", "zero2_bf16", "autotp"])
def test_momentum_of_whole_parameters_is_cut_by_parameters(name, tmp_path, classes_of_deepspeed):
    """Shows F2. Also if the state of some rank is as long as its fp32 weights."""
    copy = shutil.copytree(VALID / name, tmp_path / "run", copy_function=shutil.copyfile)
    add_momentum_of_whole_parameters(copy)
    whole = torch.load(reshard(copy, tmp_path / "whole.pt"), weights_only=True)
    assert len(whole["optim"]["state"]) > 5
    for parameter, state in whole["optim"]["state"].items():
        assert torch.equal(state["momentum_buffer"], whole["model"][parameter]), parameter


def test_state_of_another_size_on_one_rank_does_not_hide_the_weights(tmp_path, classes_of_deepspeed):
    """Shows F2, E3. The state is refused, and a check finds damage."""
    copy = shutil.copytree(VALID / "zero2_bf16", tmp_path / "run", copy_function=shutil.copyfile)

    def shorten(state):
        of_vector = state["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
        of_vector["exp_avg"] = of_vector["exp_avg"][1:]

    edit(sorted(copy.glob("*/*_optim_states.pt"))[0], shorten)
    result = run("ckpt-reshard", copy, tmp_path / "all.pt")
    assert result.returncode == 3 and ".exp_avg: parts of ranks: expected a vector as long as the fp32 weights" in result.stderr
    result = run("ckpt-inspect", "verify", copy)
    assert result.returncode == 1 and "error: " in result.stdout and "expected a vector as long as the fp32 weights" in result.stdout
    moved, source = (load_file(reshard(path, tmp_path / f"{path.name}.safetensors", "--only", "model")) for path in (copy, VALID / "zero2_bf16"))
    assert moved.keys() == source.keys() and all(torch.equal(moved[name], source[name]) for name in source)


def test_frozen_codes_without_scales_are_refused(tmp_path, classes_of_deepspeed):
    """Shows F2, E3. Stage 3 with zero_quantized_nontrainable_weights saves int8 codes of frozen parameters."""
    copy = shutil.copytree(VALID / "zero3", tmp_path / "run", copy_function=shutil.copyfile)

    def quantize(state):
        state["ds_config"]["zero_optimization"]["zero_quantized_nontrainable_weights"] = True
        fragments = state.get("frozen_param_fragments") or {}
        fragments.update({name: (part * 100).round().to(torch.int8) for name, part in fragments.items()})

    for file in copy.glob("*/*_states.pt"):
        edit(file, quantize)
    result = run("ckpt-reshard", copy, tmp_path / "all.pt")
    assert result.returncode == 3 and "frozen.bias: " in result.stderr and "whose scales DeepSpeed saves in no file" in result.stderr
    moved = load_file(reshard(copy, tmp_path / "model.safetensors", "--only", "model", "--only", "!model.frozen"))
    source = load_file(reshard(VALID / "zero3", tmp_path / "source.safetensors", "--only", "model", "--only", "!model.frozen"))
    assert moved.keys() == source.keys() and all(torch.equal(moved[name], source[name]) for name in source)


def test_newer_copies_of_zenflow_are_named(tmp_path, classes_of_deepspeed):
    """Shows F2, E13. With ZenFlow, the module is newer than the fp32 weights in selected columns."""
    copy = shutil.copytree(VALID / "zero2_bf16", tmp_path / "run", copy_function=shutil.copyfile)

    def change(state):
        state["ds_config"]["zero_optimization"]["zenflow"] = {"topk_ratio": 0.1}
        if "module" in state:
            state["module"]["up.weight"] += 1

    for file in copy.glob("*/*_states.pt"):
        edit(file, change)
    result = run("ckpt-inspect", "verify", copy)
    assert "the master weights are read, but with ZenFlow the module's copies are newer" in result.stdout, result.stdout
    file = next(copy.glob("*/mp_rank_00_model_states.pt"))
    model = load_file(reshard(file, tmp_path / "model.safetensors", "--as-is", "--only", "module", "--rename", "module.="))
    assert torch.equal(model["up.weight"], torch.load(file, weights_only=False)["module"]["up.weight"])


@pytest.mark.parametrize("name", ["zero1", "zero3", "autotp"])
def test_state_of_another_size_than_the_weights_is_listed_and_left_out(name, tmp_path, classes_of_deepspeed):
    """Shows F2, E3, E7. 8-bit Adam keeps a table of 256 numbers for each parameter."""
    copy = shutil.copytree(VALID / name, tmp_path / "run", copy_function=shutil.copyfile)

    def add_table(state):
        optimizer = state["optimizer_state_dict"]
        of_vectors = optimizer.get("base_optimizer_state", optimizer.get("optimizer_state_dict"))["state"]
        for of_vector in of_vectors.values():
            of_vector.update(qmap1=torch.ones(256), scale=torch.ones(2, 3))

    for file in copy.glob("*/*_optim_states.pt"):
        edit(file, add_table)
    source, found = listing(VALID / name), listing(copy)
    assert tensors_by_name(found) == tensors_by_name(source)
    names = [row["name"].removesuffix(".exp_avg") for row in found["tensors"] if row["name"].endswith(".exp_avg")]
    assert found["values"].keys() - source["values"].keys() == {f"{name}.{kind}" for name in names for kind in ("qmap1", "scale")}
    result = run("ckpt-reshard", copy, tmp_path / "all.pt")
    assert result.returncode == 3 and "expected a vector as long as the fp32 weights, found a tensor of shape [256]" in result.stderr
    model = load_file(reshard(copy, tmp_path / "model.safetensors", "--only", "model"))
    assert model.keys() >= {name.replace("optim.state.", "model.") for name in names}
    reshard(copy, tmp_path / "rest", "--to", "dcp", "--only", "!*.qmap1", "--only", "!*.scale")


def test_a_large_copy_is_compared_to_its_end(tmp_path, classes_of_deepspeed):
    """Shows F2, E13. Copies in small models are compared when the checkpoint is opened. For larger ones a note says
    that only `verify` compares all elements."""
    differs = "copies: 1 name with different numbers in the copies, such as 'w'; the master weights are read"
    for numel, of_move in ((100_000, [differs]),
                           (5_000_000, ["copies: only the first 8192 elements of each rank compared, in 1 name, such as 'w'; "
                                        "verify compares all elements"])):
        step = zero1_of_one_weight(tmp_path / f"{numel}", torch.arange(numel, dtype=torch.float32))
        edit(step / "mp_rank_00_model_states.pt", lambda state: state["module"]["w"][-1].add_(1))
        assert notes_of_move(step, tmp_path / f"{numel}.pt") == of_move
        findings = json.loads(succeed("ckpt-inspect", "verify", step, "--json"))["findings"]
        assert [finding["rule"] + ": " + finding["found"] for finding in findings] == [differs]


def test_what_only_a_later_rank_has_is_refused(tmp_path, classes_of_deepspeed):
    """Shows F2, E3. The later rank has an additional entry of the optimizer's state, or another number in a group's tensor."""
    def change_state(state):
        of_vector = state["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
        of_vector["mine"] = of_vector["exp_avg"].clone()

    def change_group(number):
        def change(state):
            state["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][0]["lr"] = torch.tensor(number)
        return change

    def add_vector(state):
        state["optimizer_state_dict"]["base_optimizer_state"]["state"][7] = {"exp_avg": torch.ones(3)}

    where = "optimizer_state_dict.base_optimizer_state."
    for changes, message in (([None, change_state], where + "state.0.mine: expected no entry, as in zero_pp_rank_0"),
                             ([change_group(0.5), change_group(0.25)], where + "param_groups.0.lr: expected the tensor that zero_pp_rank_0"),
                             ([add_vector, add_vector], where + "state.7.exp_avg: expected the state of a vector of fp32 weights")):
        copy = shutil.copytree(VALID / "zero1", tmp_path / f"{len(list(tmp_path.iterdir()))}", copy_function=shutil.copyfile)
        for rank, change in enumerate(changes):
            if change is not None:
                edit(copy / "global_step2" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", change)
        result = run("ckpt-reshard", copy, tmp_path / "moved.pt", "--to", "torch")
        assert result.returncode == 3 and message in result.stderr, result.stderr


def test_what_a_universal_checkpoint_has_besides_is_noted(tmp_path, classes_of_deepspeed):
    """Shows F2, E13. Files of other ranks are read. A note names unknown members of files."""
    run_folder = reshard(VALID / "zero1", tmp_path / "run", "--to", "deepspeed")
    (folder,) = run_folder.glob("global_step*")
    assert notes_of_move(folder, tmp_path / "plain.pt") == []
    edit(folder / "zero" / "scale" / "fp32.pt", lambda state: state.update(mine=5, sub_param_shape=(1,)))
    copy = folder / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    for rank in (1, 0):
        state = torch.load(copy, weights_only=False)
        torch.save(state | {"epoch": rank + 7}, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    edit(folder / "mp_rank_00_model_states.pt", lambda state: state.update(epoch=3))
    assert notes_of_move(folder, tmp_path / "whole.pt") == [
        "members: 1 file with other members, such as 'mine' in zero/scale/fp32.pt: they are left out",
        "members: 1 file with other rules for tensor parallelism, such as 'sub_param_shape' in zero/scale/fp32.pt: they are left out",
        "copies: 1 name with another value, such as 'epoch': left out",
        "ranks: 1 name with different copies, such as 'epoch' (the copy of the lowest rank keeps the name, "
        "other copies are per_rank.<rank>.<name>)"]
    values = listing(folder)["values"]
    assert values["epoch"] == 3 and values["per_rank.1.epoch"] == 8


@pytest.mark.parametrize("name", ["universal_autotp", "universal_autotp_zero3"])
def test_copies_in_the_modules_of_tensor_ranks_are_told(name, tmp_path, classes_of_deepspeed):
    """Shows F2, E13. A tensor rank has a part of a weight, and the file of the parameter has the whole."""
    notes = notes_of_move(VALID / name, tmp_path / "moved.pt")
    assert not any("different numbers" in note for note in notes), notes
    assert any("whose copies were not compared" in note for note in notes) == (name == "universal_autotp"), notes


@pytest.mark.parametrize("name", ["zero1", "zero3", "tensor", "autotp_zero3", "universal_tensor_pipeline"])
def test_a_tied_name_without_its_tensor_is_noted(name, tmp_path, classes_of_deepspeed):
    """Shows F2, E13."""
    path = shutil.copytree(VALID / name, tmp_path / name)
    plain = notes_of_move(path, tmp_path / "plain.pt")
    assert not any("shared_params" in note for note in plain)
    files = sorted(path.glob("*/*mp_rank_00_model_states.pt"))
    for file in files:
        edit(file, lambda state: state.update(shared_params={"second.weight": "first.weight"}))
    notes = notes_of_move(path, tmp_path / "moved.pt")
    assert "ties: 1 name without one, such as 'second.weight': left out" in notes, notes


def test_rules_for_tensor_parallelism_that_are_left_out_are_noted(tmp_path, classes_of_deepspeed):
    """Shows F2, E13. Without rules, or with those that every file of Tessera has, DeepSpeed cuts along the first dimension."""
    (folder,) = reshard(VALID / "zero1", tmp_path / "run", "--to", "deepspeed").glob("global_step*")
    file = folder / "zero" / "up.weight" / "fp32.pt"
    for number, rules in enumerate(({"cat_dim": 1}, {"vocab_tensor": True}, {"sub_param_shape": [2, 3]},
                                    {"cat_dim": 0}, {"vocab_tensor": False})):
        tensor = torch.load(file)["param"]
        torch.save({"param": tensor} | rules, file)
        notes = [note for note in notes_of_move(folder, tmp_path / f"{number}.pt") if "tensor parallelism" in note]
        assert notes == [f"members: 1 file with other rules for tensor parallelism, such as '{next(iter(rules))}' in "
                         "zero/up.weight/fp32.pt: they are left out"] * (number < 3), notes


def test_a_copy_in_the_module_of_a_universal_checkpoint_is_compared(tmp_path, classes_of_deepspeed):
    """Shows F2, E13."""
    run_folder = reshard(VALID / "zero1_bf16", tmp_path / "run", "--to", "deepspeed")
    (folder,) = run_folder.glob("global_step*")
    weight = torch.load(folder / "zero" / "up.weight" / "fp32.pt", weights_only=False)["param"]
    file = folder / "mp_rank_00_model_states.pt"
    edit(file, lambda state: state["module"].update({"up.weight": weight.bfloat16()}))
    plain = notes_of_move(folder, tmp_path / "same.pt")
    assert not any("different numbers" in note for note in plain)
    edit(file, lambda state: state["module"]["up.weight"].view(-1)[39].add_(1))
    assert notes_of_move(folder, tmp_path / "other.pt") == [
        *plain, "copies: 1 name with different numbers in the copies, such as 'up.weight'; the files of parameters are read"]


def left_and_carried(source, destination, *options):
    document = json.loads(succeed("ckpt-reshard", source, destination, "--to", "native", "--json", *options))
    assert {file["name"] for file in document["extra_files"]} == {path.name for path in destination.iterdir() if path.suffix != ".h5"}
    return {left["name"]: left["why"] for left in document["left_files"]}, {file["name"] for file in document["extra_files"]}


def test_files_beside_a_step_are_carried_or_named(tmp_path):
    """Shows F2, E13."""
    folder = shutil.copytree(VALID / "zero1", tmp_path / "run", copy_function=shutil.copyfile)
    shutil.copytree(folder / "global_step2", folder / "global_step1", copy_function=shutil.copyfile)
    (folder / "zero_to_fp32.py").write_text("")
    (folder / "global_step2" / "random_states_0.pkl").write_text("")
    (folder / "global_step2" / "more").mkdir()
    left, carried = left_and_carried(folder, tmp_path / "moved")
    assert left.pop("global_step1").startswith("a DeepSpeed checkpoint, with the float32 weights")
    assert left == {"more": "a folder"}
    assert carried == {"random_states_0.pkl", "zero_to_fp32.py"}
    for name in ("config.json", "global_step2/config.json"):
        (folder / name).write_text(name)
    left, carried = left_and_carried(folder, tmp_path / "again")
    assert left["config.json"] == "differs between the sources" and "config.json" not in carried


def test_files_within_a_universal_checkpoint_are_carried_or_named(tmp_path):
    """Shows F2, E13."""
    folder = reshard(VALID / "zero1", tmp_path / "run", "--to", "deepspeed")
    assert left_and_carried(folder, tmp_path / "plain") == ({}, set())
    (step,) = folder.glob("global_step*")
    for name in ("note.txt", "zero/top.pt", "zero/scale/notes.txt", "bf16_notes.txt"):
        (step / name).write_text("")
    inside = {name: "in a folder of the checkpoint" for name in ("zero/scale/notes.txt", "zero/top.pt")}
    assert left_and_carried(step, tmp_path / "step") == (inside, {"bf16_notes.txt", "note.txt"})
    inside = {f"{step.name}/{name}": why for name, why in inside.items()}
    assert left_and_carried(folder, tmp_path / "whole") == (inside, {"bf16_notes.txt", "note.txt"})


def write_universal(path, folder):
    """Writes what ds_to_universal.py makes of a checkpoint of stage 1: a file for each parameter and kind of state."""
    folder.mkdir(parents=True)
    one_file = reshard(path, folder.parent / "whole.pt", "--to", "torch")
    whole = torch.load(one_file, weights_only=True)
    one_file.unlink()
    for name, state in whole["optim"]["state"].items():
        zero = folder / "zero" / name
        zero.mkdir(parents=True)
        for kind, tensor in {"fp32": whole["model"][name], **state}.items():
            torch.save(tensor if kind == "step" else {"cat_dim": 0, "param": tensor}, zero / f"{kind}.pt")
    groups = [group | {"params": [number]} for number, group in enumerate(whole["optim"]["param_groups"])]
    members = whole["deepspeed"]["optimizer_state_dict"]
    torch.save(members | {"param_groups": groups}, folder / "zero" / "optimizer_state.pt")
    model = "mp_rank_00_model_states.pt"
    shutil.copyfile(next(path.glob(f"*/{model}")), folder / model)
    (folder.parent / "latest_universal").write_text(folder.name)


def test_a_universal_checkpoint_holds_the_same(tmp_path):
    """Shows F2."""
    write_universal(VALID / "zero1", tmp_path / "run" / "universal")
    for path in (tmp_path / "run" / "universal", tmp_path / "run"):
        assert_same_state(listing(path), expectation(VALID / "zero1"))
    succeed("ckpt-inspect", "verify", tmp_path / "run")
    moved = reshard(tmp_path / "run", tmp_path / "dcp", "--to", "dcp", "--world-size", "3")
    assert_same_state(listing(moved), expectation(VALID / "zero1"))


@pytest.mark.parametrize("change, words", [
    (lambda zero: (zero / "up.weight" / "fp32.pt").unlink(), ("up.weight", "zero/up.weight/fp32.pt, found none")),
    (lambda zero: shutil.rmtree(zero / "scale"), ("scale", "zero/scale/fp32.pt, found none")),
    (lambda zero: (zero / "up.weight" / "exp_avg.pt").unlink(), ("up.weight", "expected zero/up.weight/exp_avg.pt, as", "found none")),
    (lambda zero: torch.save({"param": torch.ones(5, 11)}, zero / "up.weight" / "fp32.pt"),
     ("up.weight", "expected a tensor of the shape in param_shapes, [11, 5], or of one dimension, found [5, 11]")),
    (lambda zero: torch.save({"param": torch.ones(54)}, zero / "up.weight" / "exp_avg.pt"),
     ("up.weight", "expected a tensor of 55 elements, for [11, 5], found [54]")),
    (lambda zero: (zero / "up.weight").rename(zero / "other"), ("up.weight",)),
    (lambda zero: shutil.copytree(zero / "up.weight", zero / "other"), ("zero/other", "the name of a parameter in mp_rank_00_model_states.pt")),
    (lambda zero: (zero / "optimizer_state.pt").unlink(), ("optimizer_state.pt",)),
    (lambda zero: shutil.copyfile(zero.parent / "mp_rank_00_model_states.pt", zero.parent / "mp_rank_01_model_states.pt"),
     ("mp_rank_01_model_states.pt", "saved as mp_rank_00_model_states.pt")),
    (lambda zero: shutil.copyfile(zero / "up.weight" / "fp32.pt", zero / "optimizer_state.pt"),
     ("zero/optimizer_state.pt", "param_groups: expected the parameter groups of the optimizer, found none")),
    (lambda zero: torch.save(torch.ones(6), zero / "up.weight" / "step.pt"), ("up.weight", "step: expected one number, found a tensor of shape [6]")),
], ids=["weights", "parameter", "moment", "shape", "size", "name", "another", "optimizer", "tensor_parallel", "groups", "step"])
def test_a_damaged_universal_checkpoint_is_refused(change, words, tmp_path):
    """Shows F2, E7."""
    write_universal(VALID / "zero1", tmp_path / "universal")
    change(tmp_path / "universal" / "zero")
    process = run("ckpt-inspect", "ls", tmp_path / "universal")
    assert process.returncode == 3 and all(word in process.stderr for word in words), process.stderr


@pytest.mark.parametrize("path", [path for path in ALL if path.name != WITHOUT_OPTIMIZER], ids=lambda path: path.name)
def test_what_is_written_for_deepspeed_holds_the_same(path, tmp_path):
    """Shows F2, A4. The state moves to a universal checkpoint and from there to DCP. PyTorch reads each file of a parameter."""
    run_folder = reshard(path, tmp_path / "run", "--to", "deepspeed")
    assert_same_state(listing(run_folder), expectation(path))
    succeed("ckpt-inspect", "verify", run_folder)
    folder = run_folder / (run_folder / "latest_universal").read_text()
    whole = torch.load(reshard(path, tmp_path / "whole.pt", "--to", "torch"), weights_only=True)
    for name, state in whole["optim"]["state"].items():
        for kind, tensor in {"fp32": whole["model"][name], **state}.items():
            found = torch.load(folder / "zero" / name / f"{kind}.pt", weights_only=True)
            if kind != "step":
                assert found["cat_dim"] == 0
                found = found["param"]
            assert torch.equal(found, tensor) and found.dtype == tensor.dtype, (name, kind)
    back = reshard(run_folder, tmp_path / "dcp", "--to", "dcp", "--world-size", "3")
    assert_same_state(listing(back), expectation(path))


def test_parameters_that_an_optimizer_gives_no_step_get_none(tmp_path):
    """Shows A2, F2. Muon beside Adam: the step that ZeRO stage 3 keeps for all parameters is not that of Muon's."""
    adam = {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2), "step": torch.tensor(3.0)}
    state = {"model": {"a": torch.ones(2), "b": torch.ones(2)},
             "optim": {"state": {"a": adam, "b": {"momentum_buffer": torch.ones(2)}},
                       "param_groups": [{"lr": 0.1, "params": ["a"]}, {"lr": 0.2, "params": ["b"]}]}}
    torch.save(state, tmp_path / "run.pt")
    reshard(tmp_path / "run.pt", tmp_path / "universal", "--to", "deepspeed")
    back = load(reshard(tmp_path / "universal", tmp_path / "back.pt"))
    assert {name: set(state) for name, state in back["optim"]["state"].items()} == {"a": set(adam), "b": {"momentum_buffer"}}


def test_what_is_written_for_deepspeed_is_replaced_only_as_asked(tmp_path):
    """Shows F2, E4."""
    run_folder = reshard(VALID / "zero1", tmp_path / "run", "--to", "deepspeed")
    assert run("ckpt-reshard", VALID / "zero3", run_folder, "--to", "deepspeed").returncode == 2
    succeed("ckpt-reshard", VALID / "zero3", run_folder, "--to", "deepspeed", "--overwrite")
    assert_same_state(listing(run_folder), expectation(VALID / "zero3"))
    note = next(run_folder.glob("*/zero/up.weight")) / "note.txt"
    note.write_text("mine")
    process = run("ckpt-reshard", VALID / "zero1", run_folder, "--to", "deepspeed", "--overwrite")
    assert process.returncode == 2 and "note.txt" in process.stderr and note.exists(), process.stderr


class Hostile:
    def __reduce__(self):
        return (exec, ("raise SystemExit",))


def test_verify_names_functions_that_are_not_deepspeeds(tmp_path):
    """Shows F3. In a file of a rank, and in one of a universal checkpoint that is opened when it is read."""
    folder = shutil.copytree(VALID / "zero1", tmp_path / "run", copy_function=shutil.copyfile)
    assert "foreign" not in succeed("ckpt-inspect", "verify", folder)
    (states,) = folder.glob("global_step*/mp_rank_00_model_states.pt")
    torch.save(torch.load(states, weights_only=False) | {"other": Hostile()}, states)
    assert "foreign: expected only classes and functions of tensors and plain values, found builtins.exec" in succeed("ckpt-inspect", "verify", folder)
    reshard(VALID / "zero1", tmp_path / "universal", "--to", "deepspeed")
    (weights,) = (tmp_path / "universal").rglob("embedding.weight/fp32.pt")
    torch.save(torch.load(weights) | {"other": Hostile()}, weights)
    for parts in (1, 3):
        outputs = []
        for part in range(parts):
            outputs.append(tmp_path / f"{part}-of-{parts}")
            outputs[-1].write_text(succeed("ckpt-inspect", "verify", tmp_path / "universal", "--part", f"{part}/{parts}", "--json"))
        joined = succeed("ckpt-inspect", "verify", tmp_path / "universal", *(word for output in outputs for word in ("--join", output)))
        assert joined.count("builtins.exec") == 1, joined


def test_experts_of_a_universal_checkpoint_have_the_shape_of_their_file(tmp_path, classes_of_deepspeed):
    """Shows F2. With AutoEP, `param_shapes` has the experts of one rank, and the parameter's file has all experts."""
    folder = reshard(VALID / "zero1", tmp_path / "run", "--to", "deepspeed")
    (states,) = folder.glob("*/mp_rank_00_model_states.pt")
    (weights,) = folder.glob("*/zero/up.weight")

    def halve(state):
        state["module"].pop("up.weight", None)
        for shapes in state["param_shapes"]:
            if "up.weight" in shapes:
                shapes["up.weight"] = torch.Size([shapes["up.weight"][0] // 2, *shapes["up.weight"][1:]])

    for file in (states, states.with_name("zero_pp_rank_0_mp_rank_00_model_states.pt")):
        edit(file, halve)
    result = run("ckpt-inspect", "ls", folder)
    assert result.returncode == 3 and "elements, for [5, 5]" in result.stderr, result.stderr
    for kind in ("fp32", "exp_avg", "exp_avg_sq"):
        edit(weights / f"{kind}.pt", lambda state: state.update(is_expert_param=True, ep_num_experts=len(state["param"])))
    moved, source = (torch.load(reshard(path, tmp_path / f"{path.name}.pt"), weights_only=True) for path in (folder, VALID / "zero1"))
    for name, state in {"model": moved["model"], **moved["optim"]["state"]}.items():
        expected = source["model"] if name == "model" else source["optim"]["state"][name]
        assert state.keys() == expected.keys() and all(torch.equal(state[key], expected[key]) for key in expected), name
