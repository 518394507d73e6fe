"""Saving and loading the state of Python jobs: tessera.save, async_save and load, on several ranks and beside PyTorch."""

import argparse
import ast
import collections
import contextlib
import copy
import inspect
import itertools
import json
import math
import os
import random
import re
import signal
import socket
import sys
import threading
import time
import types
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

try:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
except ImportError:  # before torch 2.6
    from torch.distributed._composable.fsdp import fully_shard
    from torch.distributed._tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ckpt_tools import FIXTURES, reshard, succeed
from on_ranks import run_function
from python_package import tessera
from tessera import _save, _saved_memory
from tessera._shared_memory import require_apart

SUFFIX = {"native": "", "dcp": "", "safetensors": ".safetensors", "torch": ".pt"}


def everything():
    """Returns every kind of entry that a state dict of one rank can have."""
    weight = torch.randn(5, 7)
    return {"model": {"a.weight": weight, "tied": weight, "transposed": torch.arange(6).reshape(2, 3).t(),
                      "empty": torch.empty(0, 3), "scalar": torch.tensor(3.5, dtype=torch.bfloat16),
                      "fp8": torch.arange(4.0).to(torch.float8_e4m3fn), "complex": torch.randn(3, dtype=torch.complex64).conj()},
            "optim": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(5, 7)}},
                      "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0], "foreach": None}]},
            "list": [torch.ones(2), {"in": torch.zeros(1)}, 5],
            "step": 7, "big": -(2**80), "complex": 1 + 2j, "bytes": b"abc\0", "none": None, "dtype": torch.bfloat16,
            "nan": math.inf, "numbers": [1, 2, 3], "no keys": {}, "no items": [], "set": {1, 2}, "tuple": (1, "x", [2.5]),
            "device": torch.device("cuda:1"), "layout": torch.strided, "text": "\ud800é", "true": True}


def zeroed(value):
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value.clone())
    if isinstance(value, dict):
        return {key: zeroed(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(zeroed(item) for item in value)
    return None


def assert_equal(one, other, where=""):
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and one.shape == other.shape, where
        assert one.resolve_conj().contiguous().reshape(-1).view(torch.uint8).equal(
            other.resolve_conj().contiguous().reshape(-1).view(torch.uint8)), where
    elif isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            assert_equal(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        assert type(one) is type(other) and len(one) == len(other), where
        for i, (a, b) in enumerate(zip(one, other)):
            assert_equal(a, b, f"{where}[{i}]")
    else:
        assert type(one) is type(other) and one == other, f"{where}: {one!r}, {other!r}"


@pytest.fixture
def tensors_on_a_device(monkeypatch):
    """Makes a save read all contiguous tensors part by part, as it reads tensors on a GPU."""
    monkeypatch.setattr(_saved_memory, "is_read_in_parts",
                        lambda box: box.numel() > 0 and box.is_contiguous() and not (box.is_conj() or box.is_neg()))


@pytest.mark.parametrize("format", SUFFIX)
def test_tensors_on_a_device_are_read_in_parts(tensors_on_a_device, monkeypatch, tmp_path, format):
    reads = []
    read = _saved_memory.SavedMemory.read
    monkeypatch.setattr(_saved_memory.SavedMemory, "read", lambda self, *part: (reads.append(part), read(self, *part))[1])
    state = {"large": torch.randn(1500, 2000), "small": torch.arange(5), "bool": torch.tensor([True, False]),
             "transposed": torch.arange(6).reshape(2, 3).t(), "é\u2028": torch.ones(2)}
    path = tmp_path / f"checkpoint{SUFFIX[format]}"
    tessera.save(state, path, format=format)
    loaded = zeroed(state)
    tessera.load(loaded, path)
    assert_equal(loaded, state)
    assert sum(end - begin for _, _, begin, end, _ in reads) == sum(state[name].nbytes for name in state if name != "transposed")


@pytest.mark.parametrize("format", SUFFIX)
def test_large_tensors_in_another_order_are_not_copied_whole(monkeypatch, tmp_path, format):
    copied = []
    copy_to_host = _saved_memory.in_host_memory
    monkeypatch.setattr(_saved_memory, "in_host_memory", lambda tensor: (copied.append(tensor.nbytes), copy_to_host(tensor))[1])
    state = {"transposed": torch.randn(3000, 4000).t(), "conj": torch.randn(700, 300, dtype=torch.complex64).conj(),
             "every second": torch.arange(2_000_000)[::2]}
    path = tmp_path / f"checkpoint{SUFFIX[format]}"
    tessera.save(state, path, format=format)
    assert max(copied) < 20 << 20 and sum(copied) == sum(tensor.nbytes for tensor in state.values())
    loaded = zeroed(state)
    tessera.load(loaded, path)
    assert_equal(loaded, state)


def test_any_elements_of_a_tensor_are_read_in_order():
    rng = random.Random(5)
    for _ in range(200):
        shape = [rng.randint(1, 5) for _ in range(rng.randint(1, 4))]
        tensor = torch.arange(math.prod(shape)).reshape(shape).permute(rng.sample(range(len(shape)), len(shape)))
        end = rng.randint(0, tensor.numel())
        begin = rng.randint(0, end)
        parts = [part.flatten() for part in _saved_memory.row_major_parts(tensor, begin, end)]
        assert all(part.is_contiguous() for part in parts)
        assert torch.cat([torch.arange(0), *parts]).tolist() == tensor.flatten()[begin:end].tolist()


def test_a_failed_copy_from_a_device_leaves_nothing(tensors_on_a_device, monkeypatch, tmp_path):
    def fail(self, name, index, begin, end, address):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(_saved_memory.SavedMemory, "read", fail)
    with pytest.raises(tessera.Error, match="weight: copy from the device: .*CUDA error: out of memory"):
        tessera.save({"weight": torch.ones(3)}, tmp_path / "checkpoint")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format", SUFFIX)
def test_one_rank_gets_everything_back(tmp_path, format):
    state = everything()
    path = tmp_path / f"state{SUFFIX[format]}"
    saved = tessera.save(state, path, format=format)
    assert (saved.path, saved.format) == (str(path), format) and saved.nbytes > 0
    into = zeroed(state)
    loaded = tessera.load(into, path)
    assert loaded.format == format and loaded.missing == [] == loaded.unexpected
    assert_equal(state, into)


def test_keep_last_warns_of_what_it_leaves(tmp_path):
    for step in (1, 2, 3):
        tessera.save({"step": step}, tmp_path / f"step-{step}")
    (tmp_path / "step-1" / "plots").mkdir()
    (tmp_path / "step-2" / "notes.txt").write_text("of another program")
    with pytest.warns(RuntimeWarning, match="older checkpoint: not removed") as warned:
        tessera.save({"step": 4}, tmp_path / "step-4", keep_last=1)
    assert [str(each.message).removeprefix(str(tmp_path)) for each in warned] == [
        "/step-2: older checkpoint: not removed, because 'notes.txt' in its folder is not a part of it",
        "/step-1: older checkpoint: not removed, because 'plots' in its folder is not a part of it"]
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-2", "step-4"]


def test_namedtuples_and_frozensets_of_the_state_dict_stay_such(tmp_path):
    Place = collections.namedtuple("Place", "epoch position")
    tessera.save({"value": Place(3, 1200), "tensor": Place(3, torch.ones(2)), "seen": frozenset([1, 2])}, tmp_path / "state")
    into = {"value": Place(0, 0), "tensor": Place(0, torch.zeros(2)), "seen": frozenset()}
    tessera.load(into, tmp_path / "state")
    assert into["value"] == Place(3, 1200) and into["value"].position == 1200
    assert into["tensor"].epoch == 3 and into["tensor"].position.tolist() == [1.0, 1.0]
    assert into["seen"] == {1, 2} and isinstance(into["seen"], frozenset)


@pytest.mark.parametrize("format", SUFFIX)
def test_keys_that_are_tuples_stay_keys(tmp_path, format):
    """A tuple is a key like any other: it names no position in a list, and not its first item."""
    state = {"d": {("a", 1): 5, "a": 7}, "b": {"w": torch.ones(2)}, "one": {(2,): torch.ones(3)}, "values": {(0,): 3, (1,): 4},
             ("b", 1): 6, (0, 1): 8, "list": [{(0,): torch.zeros(1)}], "other": {("a", "b"): 9}}
    path = tmp_path / f"checkpoint{SUFFIX[format]}"
    tessera.save(state, path, format=format)
    with tessera.open(path) as checkpoint:
        if format != "dcp":  # its keys are text
            assert_same(checkpoint.state_dict(), state)
        assert_same(checkpoint.state_dict(like=state), state)
    loaded = zeroed(state)
    tessera.load(loaded, path)
    assert_same(loaded, state)


@pytest.mark.parametrize("format, changes", [("native", {}), ("torch", {}), ("dcp", {"text_keys": 3, "optimizer_keys": 1, "split_ties": 1})])
def test_changes_by_the_format_are_counted(tmp_path, format, changes):
    """Shows E13."""
    weight = torch.ones(2)
    state = {"a": {(1, 2): 4, None: weight, 7: {"x": 1}}, "optim": {"state": {0: {"step": torch.ones(())}}}, "tied": weight}
    assert tessera.save(state, tmp_path / f"one{SUFFIX[format]}", format=format).changes == changes
    saving = tessera.async_save(state, tmp_path / f"two{SUFFIX[format]}", format=format)
    assert saving.result().changes == changes


def test_keys_that_are_tuples_in_other_files_stay_keys(tmp_path):
    state = {"d": {(2,): torch.ones(2), ("a", 1): 3}, (1,): torch.ones(1), "list": [torch.ones(1), 2]}
    torch.save(state, tmp_path / "torch.pt")
    tessera.reshard(tmp_path / "torch.pt", tmp_path / "native")
    for path in ("torch.pt", "native"):
        with tessera.open(tmp_path / path) as checkpoint:
            assert_same(checkpoint.state_dict(), state)
        loaded = zeroed(state)
        tessera.load(loaded, tmp_path / path)
        assert_same(loaded, state)


def assert_same(one, other):
    """As assert_equal, but dicts may have another order."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys() and {type(key) for key in one} == {type(key) for key in other}
        for key in one:
            assert_same(one[key], other[key])
    else:
        assert_equal(one, other)


def test_a_tuple_without_tensors_stays_a_tuple(tmp_path):
    """As ckpt-reshard keeps it. A tuple with tensors, or with objects that have a state dict, becomes entries."""
    class Scheduler:
        def state_dict(self):
            return {"epoch": 3}

        def load_state_dict(self, state):
            self.loaded = state

    scheduler = Scheduler()
    state = {"value": (1, {"a": 2}), "in a list": [(1, {"a": 2}), {"b": 3}], "tensor": (1, {"w": torch.ones(2)}), "empty": (1, {}),
             "object": ({"scheduler": scheduler}, 4), "w": torch.ones(2)}
    tessera.save(state, tmp_path / "native")
    with tessera.open(tmp_path / "native") as checkpoint:
        found = checkpoint.state_dict()
    assert_same(found, {**state, "tensor": [1, {"w": torch.ones(2)}], "object": [{"scheduler": {"epoch": 3}}, 4]})
    loaded = {**state, "value": (0, {"a": 0}), "in a list": [(0, {"a": 0}), {"b": 0}]}
    tessera.load(loaded, tmp_path / "native")
    assert_equal(loaded, state)
    assert scheduler.loaded == {"epoch": 3}
    tessera.save({"value": [1, {"a": 2}]}, tmp_path / "split")  # as earlier releases saved such a tuple
    loaded = {"value": (0, {"a": 0})}
    tessera.load(loaded, tmp_path / "split")
    assert_equal(loaded, {"value": (1, {"a": 2})})


def test_a_tensor_tied_to_optimizer_state_is_loaded(tmp_path):
    """Tied names share one stored tensor, whatever kinds of state their names say."""
    step, average = torch.tensor(1.0), torch.ones(3)
    state = {"step": step, "ema": {"w": average}, "model": {"w": torch.zeros(3)},
             "optim": {"state": {"w": {"step": step, "exp_avg": average}}, "param_groups": [{"lr": step, "params": ["w"]}]}}
    reverse = dict(reversed(list(state.items())))
    for i, saved in enumerate((state, reverse)):
        for format, suffix in SUFFIX.items():
            path = tmp_path / f"{i}-{format}{suffix}"
            tessera.save(saved, path, format=format)
            for blank in (copy.deepcopy(state), copy.deepcopy(reverse), zeroed(state)):
                for tensor in (blank["step"], blank["ema"]["w"], blank["optim"]["state"]["w"]["exp_avg"]):
                    tensor.zero_()
                tessera.load(blank, path)
                assert_same(blank, state)


@pytest.mark.parametrize("optimizer", [torch.optim.Adagrad, torch.optim.AdamW])
def test_state_of_an_optimizer_of_any_name_is_loaded(optimizer, tmp_path):
    """The names in `state` alone say little: `optimizers.1.state.0.sum`. The groups beside it, which are values, say more."""
    parameters = [torch.randn(3, 2, requires_grad=True), torch.randn(2, requires_grad=True)]
    made = optimizer(parameters, lr=0.1)
    sum(parameter.sum() for parameter in parameters).backward()
    made.step()
    state = {"optim_d": made.state_dict(), "optimizers": [{"lr": 1}, made.state_dict()]}
    state["by_name"] = {"state": {"fc.w": made.state_dict()["state"][0]}, "param_groups": [{"lr": 0.1, "params": ["fc.w"]}]}
    tessera.save(state, tmp_path / "saved")
    tessera.save(state, tmp_path / "saved.pt", format="torch")
    reshard(tmp_path / "saved.pt", tmp_path / "native", "--to", "native", "--world-size", "2")
    reshard(tmp_path / "saved.pt", tmp_path / "safetensors", "--to", "safetensors")
    for path in ("saved", "saved.pt", "native", "safetensors"):
        blank = zeroed(state)
        tessera.load(blank, tmp_path / path)
        assert_same(blank, state)


def test_elements_that_a_cast_makes_zero_are_counted(tmp_path):
    tessera.save({"a": torch.tensor([1e-3, 1e-9, -1e-12, 0.0]), "b": torch.tensor([1e-9])}, tmp_path / "state")
    into = {"a": torch.ones(4, dtype=torch.float16), "b": torch.ones(1)}
    loaded = tessera.load(into, tmp_path / "state", allow_cast=True)
    assert loaded.underflows == {"a": 2} and into["a"].tolist()[1:] == [0, 0, 0] and into["b"] > 0
    assert tessera.load({"a": torch.ones(4), "b": torch.ones(1)}, tmp_path / "state").underflows == {}


def test_values_in_a_mapping_proxy_are_loaded(tmp_path):
    tessera.save({"x": {"a": 3, "w": torch.ones(2)}}, tmp_path / "state")
    weight = torch.zeros(2)
    into = {"x": types.MappingProxyType({"a": 5, "w": weight})}
    tessera.load(into, tmp_path / "state")
    assert isinstance(into["x"], types.MappingProxyType) and into["x"]["a"] == 3
    assert into["x"]["w"] is weight and weight.tolist() == [1, 1]
    with pytest.raises(TypeError, match="state_dict: expected a dict that can be changed, found mappingproxy"):
        tessera.load(types.MappingProxyType(into), tmp_path / "state")


def test_an_array_in_the_state_dict_is_named(tmp_path):
    tessera.save({"a": torch.ones(4)}, tmp_path / "state")
    with pytest.raises(tessera.Error, match="a: kind of entry: expected a value, found a tensor"):
        tessera.load({"a": np.zeros(4)}, tmp_path / "state")


@pytest.mark.parametrize("format", ["native", "dcp", "safetensors"])
def test_a_tensor_of_too_many_dimensions_is_refused_before_anything_is_replaced(tmp_path, format):
    first = tessera.save({"w": torch.ones(3)}, tmp_path / "step-1", format=format, keep_last=1)
    with pytest.raises(tessera.Error, match="w: shape: expected at most 32 dimensions, found 33 dimensions"):
        tessera.save({"w": torch.ones([1] * 33)}, tmp_path / "step-2", format=format, keep_last=1)
    assert tessera.latest_valid(tmp_path).path == first.path


@pytest.mark.parametrize("format", ["dcp", "safetensors"])
def test_a_checkpoint_that_is_replaced_during_a_load_is_refused(tmp_path, monkeypatch, format):
    for step in (1, 2):
        tessera.save({"w": torch.full((100,), float(step))}, tmp_path / f"step-{step}", format=format)
    num_threads = tessera._ranks.Ranks.num_threads

    def replace(ranks):  # called when the checkpoint is open and the tensors have not been read
        os.rename(tmp_path / "step-1", tmp_path / "old")
        os.rename(tmp_path / "step-2", tmp_path / "step-1")
        return num_threads(ranks)

    monkeypatch.setattr(tessera._ranks.Ranks, "num_threads", replace)
    with pytest.raises(tessera.Error, match="expected the file as it was before it was opened") as raised:
        tessera.load({"w": torch.zeros(100)}, tmp_path / "step-1")
    assert raised.value.kind == "mismatch"


def test_a_file_that_another_save_replaces_before_it_is_opened_is_noticed(tmp_path, monkeypatch):
    for step in (1, 2):
        tessera.save({"w": torch.full((100,), float(step))}, tmp_path / f"step-{step}", format="dcp")
    num_threads = tessera._ranks.Ranks.num_threads

    def replace(ranks):  # called after .metadata was read; DCP's save writes it last
        os.rename(tmp_path / "step-2" / "__0_0.distcp", tmp_path / "step-1" / "__0_0.distcp")
        return num_threads(ranks)

    monkeypatch.setattr(tessera._ranks.Ranks, "num_threads", replace)
    with pytest.raises(tessera.Error, match="__0_0.distcp: w: file: expected the file as it was before it was opened"):
        tessera.load({"w": torch.zeros(100)}, tmp_path / "step-1")


@pytest.mark.parametrize("way", ["state_dict", "StorageReader"])
@pytest.mark.parametrize("format", ["dcp", "safetensors"])
def test_a_checkpoint_that_is_replaced_while_it_is_read_is_refused(tmp_path, monkeypatch, format, way):
    import tessera.dcp

    for step in (1, 2):
        tessera.save({"w": torch.full((100,), float(step))}, tmp_path / f"step-{step}", format=format)
    entry = tessera.Checkpoint._entry

    def replace(checkpoint, name):  # called when the checkpoint is open and the tensors have not been read
        if (tmp_path / "step-2").exists():
            os.rename(tmp_path / "step-1", tmp_path / "old")
            os.rename(tmp_path / "step-2", tmp_path / "step-1")
        return entry(checkpoint, name)

    monkeypatch.setattr(tessera.Checkpoint, "_entry", replace)
    with pytest.raises(tessera.Error, match="expected the file as it was before it was opened"):
        if way == "state_dict":
            tessera.open(tmp_path / "step-1").state_dict()
        else:
            reader = tessera.dcp.StorageReader(tmp_path / "step-1")
            plan = DefaultLoadPlanner()
            plan.set_up_planner({"w": torch.zeros(100)}, reader.read_metadata(), True)
            reader.read_data(plan.create_local_plan(), plan)


def test_a_backward_after_a_load_does_not_use_the_new_elements(tmp_path):
    tessera.save({"w": torch.arange(4.0)}, tmp_path / "state")
    weight = torch.ones(4, requires_grad=True)
    loss = (weight * weight).sum()
    tessera.load({"w": weight}, tmp_path / "state")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        weight = torch.ones(4)
    tessera.load({"w": weight}, tmp_path / "state")
    assert weight.tolist() == [0, 1, 2, 3]


def test_a_backward_after_a_load_through_dcp_does_not_use_the_new_elements(tmp_path):
    import tessera.dcp

    tessera.save({"w": torch.arange(4.0)}, tmp_path / "state")
    weight = torch.ones(4, requires_grad=True)
    loss = (weight * weight).sum()
    dcp.load({"w": weight}, storage_reader=tessera.dcp.StorageReader(tmp_path / "state"))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_storage_writer_warns_of_tied_tensors(tmp_path):
    """DCP's planner gives each name to some rank, as tensors of its own."""
    import tessera.dcp

    w = torch.ones(2)
    with pytest.warns(RuntimeWarning, match=r"^b: is tied to a, but DCP saves it as a tensor of its own \(and 1 more\)$"):
        dcp.save({"a": w, "b": w, "c": w, "view": w[:1], "step": 1}, storage_writer=tessera.dcp.StorageWriter(tmp_path / "s"))
    assert tessera.open(tmp_path / "s").aliases == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        dcp.save({"a": w}, storage_writer=tessera.dcp.StorageWriter(tmp_path / "t"))


def test_the_storage_writer_refuses_tensors_without_memory(tmp_path):
    import tessera.dcp

    with pytest.raises(dcp.api.CheckpointException, match="w: tensor: expected memory of 16 bytes or more, found 0 bytes"):
        dcp.save({"w": with_storage_of(0)}, storage_writer=tessera.dcp.StorageWriter(tmp_path / "s"))
    assert os.listdir(tmp_path) == []


def warn_on_one_rank(root):
    start()
    import tessera.dcp

    w = torch.ones(2)
    state = {"a": w, "b": w if dist.get_rank() else torch.ones(2)}
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with pytest.raises(dcp.api.CheckpointException, match="b: is tied to a"):
            dcp.save(state, storage_writer=tessera.dcp.StorageWriter(f"{root}/s"))
    assert os.listdir(root) == []
    dist.barrier()
    dist.destroy_process_group()


def test_a_warning_that_is_an_error_on_one_rank_ends_the_save_on_all(tmp_path):
    run_function(warn_on_one_rank, 2, str(tmp_path))


def test_the_last_part_of_a_url_has_no_query():
    assert tessera._ranks.last_part("https://host/a/s.safetensors?signature=1") == "s.safetensors"
    assert tessera._ranks.last_part("s3://bucket/a?b/") == "a?b"


def test_an_object_whose_state_is_no_dict_is_named(tmp_path):
    class Listing:
        def state_dict(self):
            return [1, 2]

        def load_state_dict(self, state):
            raise AssertionError(state)

    with pytest.raises(tessera.Error, match=r"data\.loader: state_dict\(\): expected a dict, found an object of class list"):
        tessera.save({"data": {"loader": Listing()}}, tmp_path / "state")


def test_a_tensor_whose_elements_share_memory_is_not_loaded_into(tmp_path):
    tessera.save({"a": torch.ones(4), "b": torch.arange(4.0)}, tmp_path / "state")
    into = {"a": torch.zeros(4), "b": torch.zeros(1).expand(4)}
    with pytest.raises(tessera.Error, match="b: tensor to load into: .* found an expanded tensor"):
        tessera.load(into, tmp_path / "state")
    assert into["a"].tolist() == [0.0] * 4


@pytest.mark.parametrize("strides", [(1, 1), (2, 2), (3, 2)])
def test_a_tensor_whose_elements_share_memory_at_other_strides_is_not_loaded_into(strides, tmp_path):
    tessera.save({"a": torch.arange(12.0).reshape(3, 4)}, tmp_path / "state")
    into = torch.zeros(20).as_strided((3, 4), strides)
    with pytest.raises(tessera.Error, match=f"a: tensor to load into: .* found a tensor with strides {re.escape(str(list(strides)))}"):
        tessera.load({"a": into}, tmp_path / "state")
    assert into.sum() == 0
    tessera.load({"a": torch.zeros(20).as_strided((3, 4), (5, 1))}, tmp_path / "state")


def save_in_groups(root):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.new_group([0, 1])  # so rank 2 is in fewer groups
    odd = [dist.new_group([0]), dist.new_group([1, 2])][rank > 0]
    if rank > 0:
        tessera.save({"a": torch.ones(2)}, root / "part", process_group=odd)
    tessera.save({"a": torch.ones(2)}, root / "whole")
    dist.barrier()
    assert sorted(os.listdir(root)) == ["part", "whole"]
    dist.destroy_process_group()


def test_ranks_in_different_numbers_of_groups_save(tmp_path):
    run_function(save_in_groups, 3, tmp_path)


def save_to_two_paths(root):
    dist.init_process_group("gloo")
    import tessera.dcp

    with pytest.raises(dcp.api.CheckpointException, match="checkpoint to save: expected 'step-0', as on rank 0, found 'step-1' on rank 1"):
        dcp.save({"a": torch.ones(2)}, storage_writer=tessera.dcp.StorageWriter(root / f"step-{dist.get_rank()}"))
    dist.barrier()
    assert os.listdir(root) == []
    dist.destroy_process_group()


def test_the_storage_writer_refuses_ranks_with_different_paths(tmp_path):
    run_function(save_to_two_paths, 2, tmp_path)


def use_shards_of_another_dtype(root):
    dist.init_process_group("gloo")
    from torch.distributed._shard.sharded_tensor import Shard as LocalShard
    from torch.distributed._shard.sharded_tensor import init_from_local_shards

    tessera.save({"w": torch.ones(4)}, root / "whole")
    sharded = init_from_local_shards([LocalShard.from_tensor_and_offsets(torch.zeros(4), [0], 0)], 4)
    sharded.local_shards()[0].tensor = torch.zeros(4, dtype=torch.bfloat16)
    split = distribute_tensor(torch.zeros(4), init_device_mesh("cpu", (1,)), [Shard(0)])
    split._local_tensor = split._local_tensor.bfloat16()
    expected = "w: tensor: expected local elements of torch.float32, the dtype of the whole tensor, found torch.bfloat16"
    for tensor in (sharded, split):
        with pytest.raises(tessera.Error, match=expected):
            tessera.save({"w": tensor}, root / "sharded")
        with pytest.raises(tessera.Error, match=expected):
            tessera.load({"w": tensor}, root / "whole")
    dist.destroy_process_group()


def test_local_elements_of_another_dtype_are_refused(tmp_path):
    run_function(use_shards_of_another_dtype, 1, tmp_path)


def test_the_storage_writer_takes_what_the_planner_makes_of_tensors(tmp_path):
    import tessera.dcp

    class Planner(dcp.DefaultSavePlanner):
        def __init__(self, change):
            super().__init__()
            self.change = change

        def resolve_data(self, item):
            return self.change(super().resolve_data(item))

    def save(name, change):
        dcp.save({"w": torch.arange(8.0)}, storage_writer=tessera.dcp.StorageWriter(tmp_path / name), planner=Planner(change))

    save("half", torch.Tensor.half)
    found = tessera.open(tmp_path / "half")["w"].torch()
    assert found.dtype == torch.float16 and torch.equal(found, torch.arange(8.0).half())
    with pytest.raises(dcp.api.CheckpointException, match=r"w: tensor: expected elements of the shape \[8\], as in the plan, found \[2\]"):
        save("short", lambda tensor: tensor[:2])


def test_a_thread_that_saves_waits_until_another_has_copied(tmp_path):
    has_returned = threading.Event()

    def save_other():
        tessera.async_save({"w": torch.zeros(2)}, tmp_path / "other").result()
        has_returned.set()

    class Stateful:
        def state_dict(self):
            self.thread = threading.Thread(target=save_other)
            self.thread.start()
            assert not has_returned.wait(0.5)
            return {"w": torch.ones(2)}

        def load_state_dict(self, state):
            raise NotImplementedError

    model = Stateful()
    tessera.async_save({"model": model}, tmp_path / "first").result()
    model.thread.join()
    assert tessera.open(tmp_path / "first")["model.w"].torch().tolist() == [1, 1]
    assert tessera.open(tmp_path / "other")["w"].torch().tolist() == [0, 0]


def save_while_a_thread_loads(root):
    """Rank 0 would reach the messages of its save first, rank 1 those of its load."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tessera.save({"w": torch.full((2,), 3.0)}, root / "first")
    into = {"w": torch.zeros(2)}
    is_loading, read = threading.Event(), tessera._load._Load.read

    def slow_read(load, *arguments):
        is_loading.set()
        time.sleep(1 if rank == 0 else 0)
        return read(load, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tessera._load._Load, "read", slow_read)
        thread = threading.Thread(target=tessera.load, args=(into, root / "first"))
        thread.start()
        assert is_loading.wait(60)
        time.sleep(0 if rank == 0 else 0.5)
        tessera.save({"w": torch.full((2,), 4.0)}, root / "second")
        thread.join()
    assert into["w"].tolist() == [3, 3]
    dist.destroy_process_group()


def test_a_thread_that_saves_waits_until_another_has_loaded(tmp_path):
    run_function(save_while_a_thread_loads, 2, tmp_path)
    assert tessera.open(tmp_path / "second")["w"].torch().tolist() == [4, 4]


def save_two_kinds(root):
    dist.init_process_group("gloo")
    entry = 3 if dist.get_rank() == 0 else {"x": 1}
    for format, suffix in SUFFIX.items():
        with pytest.raises(tessera.Error, match="a.x: key path: expected a value at a, found a dict"):
            tessera.save({"a": entry}, root / f"state{suffix}", format=format)
    dist.barrier()  # rank 0 removes the staging directory
    assert os.listdir(root) == []


def test_a_value_on_one_rank_and_a_dict_on_another_are_refused(tmp_path):
    run_function(save_two_kinds, 2, tmp_path)


def save_keys_of_two_types(root):
    dist.init_process_group("gloo")
    key = 0 if dist.get_rank() == 0 else "0"
    for format, suffix in SUFFIX.items():
        for entry in (torch.ones(2), 5):
            with pytest.raises(tessera.Error, match=r"o.0: expected the keys \['o', 0\], as on rank 0, found \['o', '0'\] on rank 1"):
                tessera.save({"o": {key: entry}}, root / f"state{suffix}", format=format)
    items = [torch.ones(2)] if dist.get_rank() == 0 else {0: torch.ones(2)}
    with pytest.raises(tessera.Error, match=r"o.0: expected the keys \['o', \[0\]\], as on rank 0, found \['o', 0\] on rank 1"):
        tessera.save({"o": items}, root / "state")
    dist.barrier()  # rank 0 removes the staging directory
    assert os.listdir(root) == []


def test_keys_that_only_differ_in_their_type_are_refused(tmp_path):
    run_function(save_keys_of_two_types, 2, tmp_path)


def optimizers_of_stages(root):
    """Each rank has a pipeline stage, and the last one no parameters."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    start()
    rank = dist.get_rank()
    layers = ["l0", "l1"] if rank == 0 else ["l2"] if rank == 1 else []
    stage = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in layers})

    def optimizer(rate, decay=0.1):
        groups = [{"params": [p for p in stage.parameters() if p.dim() == dim], "weight_decay": decay if dim == 2 else 0} for dim in (2, 1)]
        return torch.optim.AdamW(groups, lr=rate)

    trained = optimizer(0.25 if layers else 0.5)
    if layers:
        sum(p.sum() for p in stage.parameters()).backward()
        trained.step()
        trained.zero_grad()
        state = get_optimizer_state_dict(stage, trained)
    else:
        state = {"state": {}, "param_groups": [dict(group) for group in trained.state_dict()["param_groups"]]}
    for again in range(2):
        tessera.save({"optim": state}, f"{root}/saved", overwrite=True)
    fresh = optimizer(0.7, 0.9)
    into = {"optim": get_optimizer_state_dict(stage, fresh) if layers else state}
    tessera.load(into, f"{root}/saved")
    if layers:
        assert_equal(into["optim"], state)  # also the lists of parameters, which are those of the stage
        set_optimizer_state_dict(stage, fresh, into["optim"])
        assert [(group["lr"], group["weight_decay"]) for group in fresh.param_groups] == [(0.25, 0.1), (0.25, 0)]
        assert_equal(get_optimizer_state_dict(stage, fresh), state)
    # Equal names on all ranks, but other parameters.
    same = {"param_groups": [{"lr": 1.0, "params": [f"w{rank}", "shared"]}]}
    into = {"param_groups": [{"lr": 0.0, "params": ["shared", f"w{rank}"]}]}
    tessera.save(same, f"{root}/same")
    tessera.load(into, f"{root}/same")
    assert into == {"param_groups": [{"lr": 1.0, "params": ["shared", f"w{rank}"]}]}
    of_two = {"param_groups": [{"lr": 0.0, "params": ["other"]}]}
    tessera.load(of_two, f"{root}/same")
    assert of_two["param_groups"][0]["params"] == ["w0", "shared", "w1", "w2"]
    same["param_groups"][0]["lr"] = 1.0 + (rank == 1)
    with pytest.raises(tessera.Error, match=r"param_groups.0.lr: expected 1.0, as on rank 0, found 2.0 on rank 1, whose group has other "
                                            r"parameters \(StateDictOptions"):
        tessera.save(same, f"{root}/bad")
    dist.barrier()
    assert not os.path.exists(f"{root}/bad")
    dist.destroy_process_group()


def test_pipeline_stages_get_their_optimizers_groups_back(tmp_path):
    """Before, the checkpoint had only the parameters of the first stage. torch's set_optimizer_state_dict then left out `lr` of others."""
    run_function(optimizers_of_stages, 3, str(tmp_path))
    groups = tessera.open(tmp_path / "saved").state_dict()["optim"]["param_groups"]
    assert [group["params"] for group in groups] == [[f"l{i}.{kind}" for i in range(3)] for kind in ("weight", "bias")]
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(0.25, 0.1), (0.25, 0)]
    with tessera.open(reshard(tmp_path / "saved", tmp_path / "numbers", "--optimizer-params", "numbers")) as found:
        assert found["optim.param_groups.0.params"] == [0, 1, 2] and found["optim.param_groups.1.params"] == [3, 4, 5]
        with tessera.open(tmp_path / "saved") as saved:
            for i, name in enumerate(f"l{i}.{kind}" for kind in ("weight", "bias") for i in range(3)):
                assert torch.equal(found[f"optim.state.{i}.exp_avg"].torch(), saved[f"optim.state.{name}.exp_avg"].torch())


def save_containers_filled_on_one_rank(root):
    dist.init_process_group("gloo")
    filled = dist.get_rank() == 1

    def state(number):
        return {"optim": {"state": {"w": {"exp_avg": torch.full((2,), number)}} if filled else {},
                          "param_groups": [{"lr": 0.1, "params": [number, 4] if filled else []}]},
                "values": {"seen": number} if filled else {}, "items": [torch.full((2,), number)] if filled else [],
                "pair": (torch.full((2,), number),) if filled else (), "pending": [number, 4] if filled else [], "none pending": [],
                "kind": "text" if filled else [], "empty": {}}

    for format, suffix in SUFFIX.items():
        for _ in range(2):  # the second time with the plan of the first
            tessera.save(state(3.0), root / f"state{suffix}", format=format, overwrite=True)
        into = state(0.0)
        tessera.load(into, root / f"state{suffix}")
        expected = state(3.0)
        expected["optim"]["param_groups"][0]["params"] = [3.0, 4]
        expected["pending"], expected["kind"] = [], []
        assert_equal(into, expected)
    dist.destroy_process_group()


def test_a_container_that_is_empty_on_one_rank_has_what_others_have(tmp_path):
    run_function(save_containers_filled_on_one_rank, 2, tmp_path)
    found = tessera.open(tmp_path / "state").state_dict()
    assert found["optim"]["state"]["w"]["exp_avg"].tolist() == [3, 3] and found["values"] == {"seen": 3.0} and found["empty"] == {}
    assert [each.tolist() for each in (*found["items"], *found["pair"])] == [[3, 3], [3, 3]]
    assert found["optim"]["param_groups"] == [{"lr": 0.1, "params": [3.0, 4]}]
    assert (found["pending"], found["none pending"], found["kind"]) == ([], [], [])  # of rank 0: a mix is a state that no rank had


def test_tensors_are_filled_in_place_and_objects_are_called(tmp_path):
    class Counter:
        def __init__(self, count):
            self.count = count

        def state_dict(self):
            return {"count": self.count, "seen": torch.full((2,), self.count)}

        def load_state_dict(self, state):
            self.count = state["count"] + int(state["seen"][0])

    model = torch.nn.Linear(3, 2)
    tessera.save({"model": model, "counter": Counter(4), "last": {"x": 1}}, tmp_path / "s")
    other, counter, last = torch.nn.Linear(3, 2), Counter(0), {"x": 0}
    weight = other.weight
    memory = other.weight.data_ptr()
    tessera.load({"model": other, "counter": counter, "last": last}, tmp_path / "s")
    assert other.weight is weight and weight.data_ptr() == memory
    assert torch.equal(other.weight, model.weight) and torch.equal(other.bias, model.bias)
    assert counter.count == 8 and last == {"x": 1}


class Doubled(torch.nn.Linear):
    """Its first version stored the weight doubled."""

    _version = 2

    def _load_from_state_dict(self, state, prefix, metadata, *rest):
        if metadata.get("version", 1) < 2:
            state[prefix + "weight"] = state[prefix + "weight"] / 2
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def test_modules_get_the_versions_of_their_state(tmp_path):
    module = torch.nn.Sequential(Doubled(2, 2))
    weight = module[0].weight.detach().clone()
    tessera.save({"model": module}, tmp_path / "saved")
    tessera.load({"model": module}, tmp_path / "saved")
    assert torch.equal(module[0].weight, weight)


def test_what_torch_wrote_is_loaded_and_torch_loads_what_is_written(tmp_path):
    state = {"w": torch.randn(4, 3), "deep": {"list": [1, {"x": torch.ones(2)}], "lr": 0.5}}
    dcp.save(state, checkpoint_id=tmp_path / "of_torch")
    torch.save(state, tmp_path / "of_torch.pt")
    tessera.save(state, tmp_path / "ours", format="dcp")
    for path in ("of_torch", "of_torch.pt", "ours"):
        into = zeroed(state)
        tessera.load(into, tmp_path / path)
        assert_equal(state, into)
    into = zeroed(state)
    dcp.load(into, checkpoint_id=tmp_path / "ours")
    assert_equal(state, into)


def test_all_that_does_not_fit_is_told_before_anything_is_read(tmp_path):
    tessera.save({"a": torch.ones(2), "b": torch.ones(3), "old": torch.ones(1), "step": 1, "more": 2}, tmp_path / "s")
    into = {"a": torch.zeros(2), "b": torch.zeros(4), "new": torch.zeros(1), "step": 0, "lr": 0.1}
    with pytest.raises(tessera.Error) as caught:
        tessera.load(into, tmp_path / "s")
    assert caught.value.kind == "mismatch"
    assert {(problem.tensor, problem.rule) for problem in caught.value.problems} == {
        ("b", "shape"), ("new", "missing"), ("old", "unexpected"), ("lr", "missing"), ("more", "unexpected")}
    assert into["a"].sum() == 0 and into["step"] == 0
    del into["b"]
    loaded = tessera.load(into, tmp_path / "s", strict=False)
    assert loaded.missing == ["new", "lr"] and loaded.unexpected == ["b", "more", "old"]
    assert into["a"].sum() == 2 and into["step"] == 1 and into["lr"] == 0.1
    with pytest.raises(tessera.Error, match="dtype"):
        tessera.load({"a": torch.zeros(2, dtype=torch.float16)}, tmp_path / "s", strict=False)
    half = {"a": torch.zeros(2, dtype=torch.float16)}
    tessera.load(half, tmp_path / "s", strict=False, allow_cast=True)
    assert half["a"].sum() == 2
    some = {"a": torch.zeros(2), "b": torch.zeros(3)}
    tessera.load(some, tmp_path / "s", only="a")
    assert some["a"].sum() == 2 and some["b"].sum() == 0
    renamed = {"z": torch.zeros(2)}
    tessera.load(renamed, tmp_path / "s", rename={"a": "z"}, only="z")
    assert renamed["z"].sum() == 2


def test_a_pattern_asks_for_what_single_ranks_have_too():
    saved = FIXTURES / "rank_files/valid/fsdp2"  # each of its three ranks has its own `extra_state.rng`
    held = {"extra_state": {"rng": {"cpu": torch.zeros(4, dtype=torch.int64), "rank": -1}}}
    with pytest.raises(tessera.Error) as refused:
        tessera.load(held, saved, only="extra_state.rng")
    assert {problem.tensor for problem in refused.value.problems} == {f"per_rank.{rank}.extra_state.rng.{key}"
                                                                      for rank in (1, 2) for key in ("cpu", "rank")}
    assert tessera.load(held, saved, only="extra_state.rng", strict=False).unexpected == sorted(
        problem.tensor for problem in refused.value.problems)
    tessera.load(held, saved, only=["extra_state.rng", "!per_rank"])
    assert held["extra_state"]["rng"]["rank"] == 0

    run = {"run": {}}  # the names below `run` after the rename are not those of its own entries
    loaded = tessera.load(run, saved, rename={"": "run."}, only="run", strict=False)
    assert "per_rank.1.extra_state.rng.rank" in loaded.unexpected
    assert "per_rank" not in run["run"]


class Odd:
    """An object of a type that cannot be saved."""


def nested(depth):
    value = {}
    for _ in range(depth):
        value = {"x": value}
    return value


def containing_itself():
    items = [1]
    items.append(items)
    return items


@pytest.mark.parametrize("state, told", [
    ({"w": torch.empty(2, device="meta")}, "w: tensor: expected a tensor with elements, found a tensor on the meta device"),
    ({"w": torch.eye(2).to_sparse()}, "w: tensor: expected a dense tensor, found a tensor of layout torch.sparse_coo"),
    ({"deep": {"x": Odd()}}, "deep.x: value: expected .*, found an object of class .*Odd"),
    ({"a.b": 1, "a": {"b": 2}}, "a.b: name: expected one entry of this name, found two"),
    ({"a": {"\ud800": torch.ones(1)}}, r"'a'\.'\\ud800': name: expected keys that are numbers, or text that UTF-8 can hold"),
    ({"deep": nested(1000)}, "deep.x.x: value: expected dicts and lists nested at most 200 deep"),
    ({"own": containing_itself()}, "own: value: expected dicts and lists nested at most 200 deep"),
    ({"w": torch.nested.nested_tensor([torch.ones(2), torch.ones(1)])}, "w: tensor: expected .*, found a nested tensor"),
    ({"w": torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)}, "w: tensor: expected .*quantized"),
])
def test_bad_state_is_refused_by_name(tmp_path, state, told):
    with pytest.raises(tessera.Error, match=told):
        tessera.save(state, tmp_path / "s")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("call", [tessera.save, tessera.async_save, tessera.load])
def test_all_tensors_that_are_refused_are_told_at_once(tmp_path, call):
    bad = {"meta": torch.empty(2, device="meta"), "good": torch.ones(2), "list": [torch.eye(2).to_sparse()],
           "lazy": torch.nn.LazyLinear(3, bias=False)}
    with pytest.raises(tessera.Error) as caught:
        call(bad, tmp_path / "s")
    head, *lines = str(caught.value).split("\n  ")
    assert head == "3 tensors can be neither saved nor loaded:" and caught.value.kind == "unsupported"
    assert [line.split(": tensor: expected ")[0] for line in lines] == ["meta", "list.0", "lazy.weight"]
    assert [str(problem) for problem in caught.value.problems] == lines
    with pytest.raises(tessera.Error) as caught:
        call({"meta": torch.nn.ParameterList(torch.empty(1, device="meta") for _ in range(105))}, tmp_path / "s")
    lines = str(caught.value).split("\n  ")
    assert lines[0].startswith("105 tensors") and len(lines) == 102 and lines[-1] == "and 5 more" and len(caught.value.problems) == 105
    assert os.listdir(tmp_path) == []


def with_storage_of(nbytes):
    """Returns a tensor of 4 elements, whose storage was made smaller afterwards."""
    tensor = torch.zeros(4)
    tensor.untyped_storage().resize_(nbytes)
    return tensor


@pytest.mark.parametrize("state, told", [
    ({"m": torch.nn.LazyLinear(3)}, "m.weight: tensor: expected a tensor with a shape, found an uninitialized parameter"),
    ({"w": with_storage_of(0)}, r"w: tensor: expected memory of 16 bytes or more, found 0 bytes \(resize_ of its storage frees memory\)"),
    ({"w": with_storage_of(12)}, "w: tensor: expected memory of 16 bytes or more, found 12 bytes"),
])
@pytest.mark.parametrize("call", [tessera.save, tessera.async_save, tessera.load])
def test_tensors_that_lack_memory_are_refused_by_name(tmp_path, call, state, told):
    with pytest.raises(tessera.Error, match=told):
        call(state, tmp_path / "s")
    assert os.listdir(tmp_path) == []


def test_bad_arguments_are_refused(tmp_path):
    with pytest.raises(TypeError, match="state_dict: expected a dict, found list"):
        tessera.save([1], tmp_path / "s")
    with pytest.raises(ValueError, match="process_group"):
        tessera.save({}, tmp_path / "s", process_group=object())
    with pytest.raises(tessera.Error, match="format|to"):
        tessera.save({"x": 1}, tmp_path / "s", format="gguf")
    with pytest.raises(tessera.Error):
        tessera.save({"x": 1}, tmp_path / "no folder" / "s")
    tessera.save({"x": 1}, tmp_path / "s")
    with pytest.raises(tessera.Error) as caught:
        tessera.save({"x": 1}, tmp_path / "s")
    assert caught.value.kind == "already_exists"
    tessera.save({"x": 2}, tmp_path / "s", overwrite=True)
    assert tessera.open(tmp_path / "s")["x"] == 2


def test_a_save_in_the_background_is_isolated_and_keeps_its_errors(tmp_path, monkeypatch):
    state = {"w": torch.zeros(1 << 20), "step": 1}
    for step in range(1, 5):
        state["w"].fill_(step)
        state["step"] = step
        future = tessera.async_save(state, tmp_path / f"step-{step}", keep_last=2)
        state["w"].fill_(-1)
        state["step"] = -1
    assert future.result().nbytes == 4 << 20
    assert sorted(os.listdir(tmp_path)) == ["step-3", "step-4"]
    assert tessera.open(tmp_path / "step-4")["step"] == 4
    assert tessera.open(tmp_path / "step-4")["w"].numpy().min() == 4

    tessera.async_save({"w": torch.zeros(1)}, tmp_path / "x.safetensors", format="safetensors").result()
    # Another program takes the destination while the save runs: it may not be replaced.
    is_taken = threading.Event()
    write = tessera._save.SaveSteps._write
    monkeypatch.setattr(tessera._save.SaveSteps, "_write", lambda job: (is_taken.wait(), write(job)))
    lost = tessera.async_save({"w": torch.zeros(1)}, tmp_path / "lost")
    (tmp_path / "lost").mkdir()
    (tmp_path / "lost" / "theirs").write_text("theirs")
    is_taken.set()
    with pytest.raises(tessera.Error):
        tessera.save({"w": torch.zeros(1)}, tmp_path / "next")  # raises the error of the previous save
    assert lost.done() and os.listdir(tmp_path / "lost") == ["theirs"]
    tessera.save({"w": torch.zeros(1)}, tmp_path / "next")


def test_a_save_in_the_background_does_not_follow_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    tessera.save({"w": torch.ones(1 << 16)}, "base")
    go_on = threading.Event()
    write = tessera._save.SaveSteps._write
    monkeypatch.setattr(tessera._save.SaveSteps, "_write", lambda job: (go_on.wait(), write(job)))
    saving = tessera.async_save({"w": torch.ones(1 << 16)}, "s", base="base")
    os.chdir("elsewhere")
    go_on.set()
    assert saving.result().linked_nbytes == 4 << 16
    assert sorted(os.listdir(tmp_path)) == ["base", "elsewhere", "s"] and os.listdir() == []


def test_a_save_to_an_absolute_path_needs_no_working_directory(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    os.rmdir(tmp_path / "gone")
    tessera.save({"step": 1}, tmp_path / "s")
    tessera.async_save({"step": 2}, tmp_path / "t").result()
    assert tessera.open(tmp_path / "s")["step"] == 1 and tessera.open(tmp_path / "t")["step"] == 2


def test_views_of_one_memory_are_not_taken_for_tied(tmp_path):
    x = torch.complex(torch.arange(3.0), torch.arange(3.0) + 1)
    state = {"a": x, "b": x.conj(), "c": x.imag, "d": x.conj().imag}
    tessera.save(state, tmp_path / "s")
    into = {name: torch.zeros(3, dtype=tensor.dtype) for name, tensor in state.items()}
    tessera.load(into, tmp_path / "s")
    for name in state:
        assert torch.equal(into[name], state[name]), name


def test_tied_tensors_of_the_job_get_one_value_or_an_error(tmp_path):
    tessera.save({"a": torch.ones(3), "b": torch.ones(3) * 2}, tmp_path / "apart")
    tessera.save({"a": torch.ones(3), "b": torch.ones(3)}, tmp_path / "equal")
    tied = torch.zeros(3)
    with pytest.raises(tessera.Error, match="b: tied tensors: expected the same elements as a in the checkpoint"):
        tessera.load({"a": tied, "b": tied}, tmp_path / "apart")
    tessera.load({"a": tied, "b": tied}, tmp_path / "equal")
    assert tied.sum() == 3


@pytest.mark.parametrize("second, other", [
    (lambda w: w, torch.zeros(2, 2)), (lambda w: w.view(4), torch.zeros(4)), (lambda w: w.T, torch.ones(2, 2).tril()),
    (lambda w: w.view(torch.int32), torch.zeros(2, 2, dtype=torch.int32))])
def test_names_that_share_all_memory_get_one_value_or_an_error(tmp_path, second, other):
    """Also if the state dict's first name for a tied tensor is not loaded."""
    whole = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    tessera.save({"b": whole, "c": second(whole).clone()}, tmp_path / "equal")
    tessera.save({"b": whole, "c": other}, tmp_path / "apart")
    into = torch.zeros(2, 2)
    for state in ({"a": into, "b": into, "c": second(into)}, {"a": into.view(2, 2), "b": into, "c": second(into)}):
        for how in ({"only": ["b", "c"]}, {"strict": False}):
            into.zero_()
            tessera.load(state, tmp_path / "equal", **how)
            assert torch.equal(into, whole)
            with pytest.raises(tessera.Error, match="c: tied tensors: expected the same elements as b in the checkpoint"):
                tessera.load(state, tmp_path / "apart", **how)


def test_tensors_that_partly_share_memory_are_not_loaded(tmp_path):
    tessera.save({"a": torch.ones(4), "b": torch.ones(4) * 2}, tmp_path / "s")
    memory = torch.zeros(6)
    with pytest.raises(tessera.Error, match="b: tensor to load into: expected memory of its own, found memory that it shares with a"):
        tessera.load({"a": memory[:4], "b": memory[2:]}, tmp_path / "s")
    assert memory.sum() == 0
    memory = torch.zeros(8)
    tessera.load({"a": memory[::2], "b": memory[1::2]}, tmp_path / "s")
    assert memory.tolist() == [1, 2] * 4
    tessera.load({"a": memory[:4], "b": memory[4:]}, tmp_path / "s")
    assert memory.tolist() == [1] * 4 + [2] * 4


def test_views_that_cross_are_not_loaded(tmp_path):
    tessera.save({"a": torch.ones(4), "b": torch.ones(4) * 2}, tmp_path / "s")
    memory = torch.zeros(4, 4)
    with pytest.raises(tessera.Error, match="b: tensor to load into: expected memory of its own, found memory that it shares with a"):
        tessera.load({"a": memory.diagonal(), "b": memory[1]}, tmp_path / "s")
    assert memory.sum() == 0
    tessera.load({"a": memory[:, 0], "b": memory[:, 2]}, tmp_path / "s")
    assert memory.sum(0).tolist() == [4, 0, 8, 0]


def test_shared_elements_are_found_as_by_looking_at_each_element():
    rng = random.Random(5)
    num_apart = 0
    for _ in range(3000):
        memory = torch.arange(64, dtype=torch.uint8)
        views = []
        while len(views) < 2:
            dtype = rng.choice([torch.uint8, torch.int16, torch.int32])
            of_dtype = memory.view(dtype)
            sizes = [rng.randint(1, 4) for _ in range(rng.randint(0, 3))]
            strides = [rng.choice([1, 2, 3, 4, 8, 16]) for _ in sizes]
            room = of_dtype.numel() - 1 - sum(stride * (size - 1) for size, stride in zip(sizes, strides))
            if room >= 0:
                views.append(of_dtype.as_strided(sizes, strides, rng.randint(0, room)))
        found = [set(), set()]
        is_apart = True
        for own, view in zip(found, views):
            for index in itertools.product(*map(range, view.shape)):
                begin = view[index].data_ptr() - memory.data_ptr()
                is_apart &= begin not in own
                own.update(range(begin, begin + view.element_size()))
            is_apart &= len(own) == view.numel() * view.element_size()
        is_contiguous = all(len(own) == max(own) + 1 - min(own) for own in found)
        first, other = (sorted((stride * view.element_size(), size) for size, stride in zip(view.shape, view.stride()) if size > 1)
                        + [view.element_size()] for view in views)
        are_same = found[0] == found[1] and (is_contiguous or first == other)
        expected = is_apart and (are_same or not found[0] & found[1])
        try:
            require_apart([("a", views[0]), ("b", views[1])])
            assert expected, views
            num_apart += 1
        except tessera.Error:
            assert not expected, views
    assert 300 < num_apart < 2700


def test_a_value_below_another_of_the_checkpoint_is_not_lost(tmp_path):
    tessera.save({"lr": 0.1, "lr.decay": 0.5}, tmp_path / "s")
    into = {"lr": 0.0}
    with pytest.raises(tessera.Error, match="lr.decay: unexpected"):
        tessera.load(into, tmp_path / "s")
    assert tessera.load(into, tmp_path / "s", strict=False).unexpected == ["lr.decay"] and into == {"lr": 0.1}
    into = {"lr": 0.0, "lr.decay": 0.0}
    tessera.load(into, tmp_path / "s")
    assert into == {"lr": 0.1, "lr.decay": 0.5}


def test_a_dict_inside_a_value_is_replaced(tmp_path):
    state = {"x": (1, {"a": 5, "b": {"c": 1}}), "y": [(collections.OrderedDict(b=1, a=2),)], "empty": ({},)}
    tessera.save(state, tmp_path / "s")
    kept = {"old": 1}
    into = {"x": (0, {"b": {"old": 2}, "old": 2, "a": 1}), "y": [(collections.OrderedDict(a=1, b=2),)], "empty": (kept,)}
    tessera.load(into, tmp_path / "s")
    assert_equal(into, {**state, "y": [(collections.OrderedDict(b=1, a=2),)]})
    assert isinstance(into["y"][0][0], collections.OrderedDict) and into["empty"][0] is kept


def test_an_object_that_is_a_dict_takes_its_own_state(tmp_path):
    class Settings(dict):
        def state_dict(self):
            return {"kept": self["kept"]}

        def load_state_dict(self, state):
            assert self["kept"] == 0
            self.update(state)

    tessera.save({"s": Settings(kept=1, other=2)}, tmp_path / "s")
    into = Settings(kept=0, other=9)
    tessera.load({"s": into}, tmp_path / "s")
    assert into == {"kept": 1, "other": 9}


def test_the_state_dict_itself_may_have_such_methods(tmp_path):
    class TrainState(dict):
        def state_dict(self):
            return dict(self)

        def load_state_dict(self, state):
            raise AssertionError(state)

    tessera.save(TrainState(step=3, inner={"lr": 0.1}, w=torch.ones(2)), tmp_path / "s")
    inner = {"lr": 0.0}
    into = TrainState(step=0, inner=inner, w=torch.zeros(2))
    tessera.load(into, tmp_path / "s")
    assert into["step"] == 3 and into["inner"] is inner and inner == {"lr": 0.1} and into["w"].tolist() == [1, 1]


def test_values_fill_empty_containers(tmp_path):
    state = {"metrics": {"best": 0.1, "epoch": 4}, "list": [{"x": 1}], "w": torch.ones(1)}
    tessera.save(state, tmp_path / "s")
    metrics = {}
    into = {"metrics": metrics, "list": [{}], "w": torch.zeros(1)}
    tessera.load(into, tmp_path / "s")
    assert_equal(state, into)
    assert metrics == state["metrics"]
    dcp.save({"w": torch.ones(1), "none": {}, "nothing": []}, checkpoint_id=tmp_path / "of_dcp")
    tessera.load({"w": torch.zeros(1), "none": {}, "nothing": []}, tmp_path / "of_dcp")


def state_of_dicts(scale):
    weight = torch.full((2,), float(scale))
    return {"args": {"lr": 0.5 * scale, "betas": [0.9 * scale, 0.95], "nested": {"x": [scale, {"y": scale}]}},
            "w": weight, "model": {"v": weight.clone(), "steps": scale, "config": {"depth": scale}},
            "optim": {"state": {"v": {"step": scale}}, "param_groups": [{"lr": 0.1 * scale, "params": ["v"] * scale}]}}


def test_a_dict_that_is_one_value_of_the_checkpoint_fills_a_nested_state_dict(tmp_path):
    import tessera.dcp

    state, path = state_of_dicts(1), tmp_path / "s"
    dcp.save(state, checkpoint_id=path, planner=dcp.DefaultSavePlanner(flatten_state_dict=False))
    assert {"args", "optim", "model.config.depth"} <= set(tessera.open(path))
    loaded, read = state_of_dicts(0), state_of_dicts(0)
    tessera.load(loaded, path)
    dcp.load(read, storage_reader=tessera.dcp.StorageReader(path))
    assert_equal(state, loaded)
    assert_equal(state, read)
    assert_equal(state, tessera.open(path).state_dict(like=state_of_dicts(0)))
    for asked in (None, {}):
        into = state_of_dicts(0) | {"args": asked}
        tessera.load(into, path)
        assert_equal(state, into)
    renamed = state_of_dicts(0)
    renamed["config"] = renamed.pop("args")
    tessera.load(renamed, path, rename={"args": "config"})
    assert_equal(state["args"], renamed["config"])
    part = {"args": {"lr": 0.0}}
    tessera.load(part, path, only="args.lr")
    assert part == {"args": {"lr": 0.5}}


def test_items_of_a_dict_that_is_one_value_are_missing_and_unexpected_by_their_names(tmp_path):
    import tessera.dcp

    path = tmp_path / "s"
    dcp.save(state_of_dicts(1), checkpoint_id=path, planner=dcp.DefaultSavePlanner(flatten_state_dict=False))
    other = state_of_dicts(0)
    other["args"]["rate"] = other["args"].pop("lr")
    with pytest.raises(tessera.Error, match="args.lr: unexpected: (?s:.*)args.rate: missing: ") as caught:
        tessera.load(other, path)
    assert {(problem.rule, problem.tensor) for problem in caught.value.problems} == {("unexpected", "args.lr"), ("missing", "args.rate")}
    found = tessera.load(other, path, strict=False)
    assert (found.missing, found.unexpected) == (["args.rate"], ["args.lr"]) and other["args"]["betas"] == [0.9, 0.95]
    with pytest.raises(dcp.api.CheckpointException, match="args.rate"):
        dcp.load(other, storage_reader=tessera.dcp.StorageReader(path))
    with pytest.raises(tessera.Error, match="args.rate: missing"):
        tessera.open(path).state_dict(like=other)


def layers(name, dtype=torch.float32):
    names = [f"{i}.{name}.{part}" for i in range(2) for part in ("weight", "bias")] + ["out.weight"]
    tensors = {each: torch.full((3, 2) if "weight" in each else (3,), i + 1.0, dtype=dtype) for i, each in enumerate(names)}
    return {"model": tensors, "optim": {"state": {each: {"exp_avg": 10 * tensor} for each, tensor in tensors.items()},
                                        "param_groups": [{"lr": 0.1, "params": names}]}}


def refusal_of(state, path, **options):
    with pytest.raises(tessera.Error) as caught:
        tessera.load(state, path, **options)
    return caught.value


@pytest.mark.parametrize("optimizer", ["optim", "optimizer"])
def test_renamed_layers_are_a_line_each_and_a_hint(tmp_path, optimizer):
    """Shows E7. The optimizer's state and groups follow the rename that the hint shows."""
    saved, state = layers("fc"), zeroed(layers("up"))
    for each in (saved, state):
        each[optimizer] = each.pop("optim")
    tessera.save(saved, tmp_path / "s")
    state[optimizer]["param_groups"][0]["params"] = list(state["model"])
    error = refusal_of(state, tmp_path / "s")
    head, *lines = str(error).split("\n  ")
    assert head == f"{tmp_path / 's'}: {len(error.problems)} entries do not fit the state dict:" and len(error.problems) == 16
    assert [line.split(":")[0] for line in lines[:-1]] == [
        f"'model.{i}.fc.' in the checkpoint, 'model.{i}.up.' in the state dict" for i in range(2)]
    hint = "hint: rename={'model.0.fc.': 'model.0.up.', 'model.1.fc.': 'model.1.up.'} loads them under the names of the state dict"
    assert lines[-1] == hint
    tessera.load(state, tmp_path / "s", rename={"model.0.fc.": "model.0.up.", "model.1.fc.": "model.1.up."})
    expected = layers("up")
    expected[optimizer] = expected.pop("optim")
    assert_equal(expected, state)


def test_a_rename_of_the_model_leaves_other_state_alone(tmp_path):
    """Shows E7."""
    state = {"model": {"fc": torch.ones(2)}, "loader": {"state": {"position": 7}}, "rnn": {"state": {"0": torch.ones(1)}}}
    tessera.save(state, tmp_path / "s")
    job = zeroed({"model": {"net": state["model"]}}) | {"loader": {"state": {"position": 0}}, "rnn": {"state": {"0": torch.zeros(1)}}}
    tessera.load(job, tmp_path / "s", rename={"model.": "model.net."})
    assert job["loader"]["state"]["position"] == 7 and job["rnn"]["state"]["0"].item() == 1


def test_all_values_that_cannot_be_read_are_told_at_once(tmp_path):
    """Shows E7. A file of `torch.save` may hold objects of classes, which Tessera never makes."""
    source = tmp_path / "s.pt"
    objects = {"args": argparse.Namespace(lr=1), "more": {"time": argparse.Namespace()}, "w": torch.ones(2), "step": 3}
    torch.save(objects, source)
    state = {"args": 1, "more": {"time": 2}, "w": torch.zeros(2), "step": 0}
    error = refusal_of(state, source)
    assert [problem.tensor for problem in error.problems] == ["args", "more.time"] and error.kind == "unsupported"
    lines = str(error).split("\n  ")
    assert lines[0] == f"2 values of {source} cannot be read:" and all("class argparse.Namespace" in line for line in lines[1:])
    error = refusal_of(state | {"w": torch.zeros(3), "other": 1}, source)
    assert {(problem.rule, problem.tensor) for problem in error.problems} == {
        ("shape", "w"), ("missing", "other"), ("value", "args"), ("value", "more.time")}
    assert refusal_of(state, source, only=["w", "step", "args"]).tensor == "args"
    assert state["step"] == 0 and state["w"].sum() == 0
    tessera.load(state, source, only=["w", "step"])
    assert state["step"] == 3 and state["w"].sum() == 2


@pytest.mark.parametrize("strict", [True, False])
def test_a_value_is_not_left_out_because_the_checkpoint_has_a_tensor(tmp_path, strict):
    """Shows E7."""
    tessera.save({"model": {"w": torch.ones(2)}, "step": torch.tensor(500)}, tmp_path / "s")
    with pytest.raises(tessera.Error, match="step: kind of entry: expected a value, found a tensor"):
        tessera.load({"model": {"w": torch.zeros(2)}, "step": 0}, tmp_path / "s", strict=strict)


def test_a_refused_load_ends_with_hints(tmp_path):
    """Shows E7."""
    saved = layers("fc")
    tessera.save(saved | {"step": 3, "rng": torch.zeros(4)}, tmp_path / "s")
    error = refusal_of(zeroed(saved) | {"step": 0}, tmp_path / "s")
    assert str(error).endswith("found a tensor\n  hint: only=['model', 'optim', 'step'] loads only what the state dict has")
    only_model = zeroed({"model": saved["model"]})
    assert "hint: only=['model'] loads" in str(refusal_of(only_model, tmp_path / "s"))
    tessera.load(only_model, tmp_path / "s", only=["model"])
    assert_equal(saved["model"], only_model["model"])

    halves = {"model": {name: tensor.bfloat16() for name, tensor in saved["model"].items()}}
    error = refusal_of(halves, tmp_path / "s", only="model")
    assert str(error).endswith("hint: allow_cast=True converts tensors to the dtypes of the state dict") and "only=" not in str(error)
    assert "hint: only=['model'] loads" in str(refusal_of(halves, tmp_path / "s")) and "allow_cast" in str(refusal_of(halves, tmp_path / "s"))

    typed = zeroed(saved) | {"stop": 0, "rng": torch.zeros(4)}
    assert "hint: the name in the checkpoint that is nearest to 'stop' is 'step'" in str(refusal_of(typed, tmp_path / "s"))

    flat = {f"weight{i}": torch.zeros(i + 1) for i in range(20)}
    tessera.save(flat | {"more": torch.zeros(50)}, tmp_path / "flat")
    assert "hint: strict=False loads only what the state dict has" in str(refusal_of(flat, tmp_path / "flat"))


def test_state_by_numbers_is_refused_with_a_hint(tmp_path):
    """Shows E7."""
    named = layers("fc")
    by_number = {"state": dict(enumerate(named["optim"]["state"].values())), "param_groups": [{"lr": 0.1, "params": list(range(5))}]}
    tessera.save({"model": named["model"], "optim": by_number}, tmp_path / "s")
    error = refusal_of(zeroed(named), tmp_path / "s")
    assert "hint: the checkpoint has numbers instead of parameter names" in str(error)


def options_in(error):
    """Returns the options that the hints of a refused load name."""
    hints = "\n".join(line for line in str(error).split("\n") if line.startswith("  hint: "))
    found = re.findall(r"(rename|only|allow_cast|strict)=(\{[^}]*\}|\[[^]]*\]|True|False)", hints)
    return {name: ast.literal_eval(value) for name, value in found}


def job_of(key, name_of, optimizer, dtype=torch.float32):
    """Returns a state dict whose model is under `key`, or at the top level."""
    state = layers("fc", dtype)
    model = {name_of(name): tensor for name, tensor in state["model"].items()}
    by_name = {name_of(name): entry for name, entry in state["optim"]["state"].items()}
    of_optimizer = {"names": {"state": by_name, "param_groups": [{"lr": 0.1, "params": list(model)}]},
                    "numbers": {"state": dict(enumerate(by_name.values())), "param_groups": [{"lr": 0.1, "params": list(range(5))}]},
                    "groups": {"param_groups": [{"lr": 0.1, "params": list(model)}]}}  # such as SGD
    return ({} if optimizer == "none" else {"optim": of_optimizer[optimizer]}) | ({key: model} if key else model)


def fc(name):
    return name


def up(name):
    return name.replace("fc", "up")


def module(name):
    return f"module.{name}"


@pytest.mark.parametrize("key", ["model", "", "net"])
@pytest.mark.parametrize("saved, wanted", [("none", "none"), ("names", "none"), ("names", "names"), ("numbers", "names"),
                                           ("numbers", "none"), ("groups", "groups")])
@pytest.mark.parametrize("old, new", [(fc, up), (module, fc), (fc, module)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_load_with_the_options_of_the_hints_succeeds(tmp_path, key, saved, wanted, old, new, dtype):
    """Shows E7."""
    tessera.save(job_of(key, old, saved), tmp_path / "s")
    expected = job_of(key, new, wanted, dtype)
    state = zeroed(expected)
    if wanted != "none":
        state["optim"]["param_groups"] = copy.deepcopy(expected["optim"]["param_groups"])
    if saved == "numbers" and wanted == "names":
        expected["optim"] = copy.deepcopy(state["optim"])
    error = refusal_of(state, tmp_path / "s")
    if (key, new) == ("", module) and saved != "none":  # the optimizer would get the prefix, too
        assert not {"rename", "only"} & options_in(error).keys() - ({"only"} if saved == "numbers" else set())
        return
    assert "nearest" not in str(error)
    tessera.load(state, tmp_path / "s", **options_in(error))
    assert_equal(expected, state)


def test_flat_vectors_are_loaded_with_their_layout(tmp_path):
    import tessera.dcp

    source = FIXTURES / "dcp" / "valid" / "fsdp1_flat"
    layout = f"{source}.flat-layout.json"
    with tessera.open(source, flat_layout=layout) as checkpoint:
        state = checkpoint.state_dict()
    told = r"(?s)model.emb.weight: missing: .*model\.\S*_flat_param: flat vector: [^\n]* \(give it with flat_layout=FILE\)"
    with pytest.raises(tessera.Error, match=told) as refused:
        tessera.load(zeroed(state), source)
    assert str(refused.value).endswith("hint: flat_layout=FILE says which parameters the flat vectors of FSDP1 consist of")
    tessera.reshard(source, tmp_path / "moved", flat_layout=layout)
    moved, read, loaded = zeroed(state), zeroed(state), zeroed(state)
    tessera.load(moved, tmp_path / "moved")
    tessera.load(loaded, source, flat_layout=layout)
    assert_equal(state, loaded)
    notes = tessera.load(zeroed(state), source, strict=False).notes
    assert notes and all(str(note).endswith("(give it with flat_layout=FILE)") for note in notes)
    dcp.load(read, storage_reader=tessera.dcp.StorageReader(source, flat_layout=layout))
    assert_equal(state, moved)
    assert_equal(state, read)


def test_a_plan_is_used_again_only_for_the_same_structure(tmp_path):
    for i, state in enumerate([{"a": [torch.ones(3)]}, {"a": {"0": torch.ones(3)}}, {"a": {0: torch.ones(3)}},
                               {"a.0": torch.ones(3)}]):
        tessera.save(state, tmp_path / f"{i}.pt", format="torch")
        assert_equal(torch.load(tmp_path / f"{i}.pt"), state)


def test_other_modes_of_torch_do_not_matter(tmp_path):
    state = {"w": torch.arange(6.0).reshape(2, 3)}
    with torch.inference_mode():
        tessera.async_save(state, tmp_path / "1").result()
    tessera.async_save(state, tmp_path / "2").result()
    transposed = torch.zeros(3, 2).t()
    torch.set_default_device("meta")
    try:
        tessera.async_save({"w": state["w"][:1]}, tmp_path / "3").result()
        tessera.load({"w": transposed}, tmp_path / "2")
    finally:
        torch.set_default_device("cpu")
    assert torch.equal(transposed, state["w"])


def test_the_reader_sees_a_checkpoint_that_was_replaced(tmp_path):
    import tessera.dcp

    reader = tessera.dcp.StorageReader(tmp_path / "s")
    for value in (1.0, 2.0):
        tessera.save({"w": torch.full((2,), value)}, tmp_path / "s", overwrite=True)
        into = {"w": torch.zeros(2)}
        dcp.load(into, storage_reader=reader)
        assert into["w"].tolist() == [value, value]


def test_the_newest_valid_checkpoint_is_found(tmp_path):
    assert tessera.latest_valid(tmp_path / "nothing") == (None, [])
    for step in (9, 10, 11):
        tessera.save({"w": torch.zeros(9), "step": step}, tmp_path / f"step-{step}")
    assert tessera.latest_valid(tmp_path) == (str(tmp_path / "step-11"), [])
    (tmp_path / "step-11" / "rank-00000.h5").unlink()
    found = tessera.latest_valid(tmp_path)
    assert found.path == str(tmp_path / "step-10")
    [skipped] = found.skipped
    assert skipped.path == str(tmp_path / "step-11") and "rank-00000.h5" in skipped.why
    with open(tmp_path / "step-10" / "rank-00000.h5", "r+b") as file:
        data = bytearray(file.read())
        place = data.rfind(bytes(36))
        data[place] ^= 1
        file.seek(0)
        file.write(data)
    assert tessera.latest_valid(tmp_path, checksums=True).path == str(tmp_path / "step-9")


# --- several ranks

def start():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")


def whole_weights():
    return {"w": torch.arange(77.0).reshape(11, 7), "v": torch.arange(13.0), "e": torch.arange(48.0).reshape(2, 4, 6)}


def layouts(size):
    """Returns, by name, how to lay out a tensor on this many ranks."""
    mesh = init_device_mesh("cpu", (size,))
    found = {"whole": lambda t: t.clone(), "replicate": lambda t: distribute_tensor(t, mesh, [Replicate()]),
             "rows": lambda t: distribute_tensor(t, mesh, [Shard(0)]),
             "columns": lambda t: distribute_tensor(t, mesh, [Shard(t.dim() - 1)])}
    if size == 4:
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        found["hybrid"] = lambda t: distribute_tensor(t, grid, [Replicate(), Shard(0)])
        found["twice"] = lambda t: distribute_tensor(t, grid, [Shard(0), Shard(0)])
        found["both"] = lambda t: distribute_tensor(t, grid, [Shard(0), Shard(t.dim() - 1)])
    return found


def assert_holds(laid_out, whole, where):
    full = laid_out.full_tensor() if isinstance(laid_out, DTensor) else laid_out
    assert torch.equal(full, whole), where


def save_layouts(root, format):
    start()
    for name, layout in layouts(dist.get_world_size()).items():
        state = {key: layout(tensor) for key, tensor in whole_weights().items()}
        tessera.save({"model": state, "step": 3}, f"{root}/{name}", format=format)
    dist.destroy_process_group()


def load_layouts(root):
    start()
    for (name, layout), saved in itertools.product(layouts(dist.get_world_size()).items(), sorted(os.listdir(root))):
        state = {key: layout(torch.zeros_like(tensor)) for key, tensor in whole_weights().items()}
        outer = {"model": state, "step": 0}
        tessera.load(outer, f"{root}/{saved}")
        assert outer["step"] == 3
        for key, tensor in whole_weights().items():
            assert_holds(state[key], tensor, f"{key} of {saved} as {name}")
    dist.destroy_process_group()


@pytest.mark.parametrize("format", ["native", "dcp"])
def test_every_layout_loads_into_every_other(tmp_path, format):
    for ranks in (3, 4):
        root = tmp_path / str(ranks)
        root.mkdir()
        run_function(save_layouts, ranks, str(root), format)
        run_function(load_layouts, 7 - ranks, str(root))
        for path in root.iterdir():
            assert tessera.verify(path) == []


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(6, 10)
        self.down = torch.nn.Linear(10, 6)

    def forward(self, x):
        return self.down(self.up(x).relu())


def make_trainer(kind):
    torch.manual_seed(1)
    net = Net()
    size = dist.get_world_size()
    if kind == "fsdp1":
        net = FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)
        FullyShardedDataParallel.set_state_dict_type(
            net, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(_use_dtensor=False))
    elif kind == "fsdp2":
        mesh = init_device_mesh("cpu", (size,))
        fully_shard(net.up, mesh=mesh)
        fully_shard(net, mesh=mesh)
    elif kind == "hsdp":
        fully_shard(net, mesh=init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicas", "shards")))
    elif kind == "tp_and_fsdp2":
        grid = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(net, grid["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(net, mesh=grid["dp"])
    elif kind == "ddp":
        net = torch.nn.parallel.DistributedDataParallel(net)
    return net, torch.optim.AdamW(net.parameters(), lr=0.01)


def step(net, optimizer, i):
    torch.manual_seed(100 + i)
    loss = net(torch.randn(4, 6)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def train_and_save(kind, path, losses):
    start()
    net, optimizer = make_trainer(kind)
    for i in range(3):
        step(net, optimizer, i)
    model_state, optimizer_state = get_state_dict(net, optimizer)
    state = {"model": model_state, "optim": optimizer_state}
    tessera.async_save(state, path).result()
    later = [step(net, optimizer, i) for i in range(3, 6)]
    if dist.get_rank() == 0:
        torch.save(later, losses)
    dist.destroy_process_group()


def load_and_train(kind, path, losses):
    start()
    net, optimizer = make_trainer(kind)
    model_state, optimizer_state = get_state_dict(net, optimizer)
    state = {"model": model_state, "optim": optimizer_state}
    tessera.load(state, path)
    set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    later = [step(net, optimizer, i) for i in range(3, 6)]
    torch.testing.assert_close(later, torch.load(losses), rtol=1e-5, atol=1e-6)
    dist.destroy_process_group()


@pytest.mark.skipif(torch.__version__.startswith("2.4.") and not torch.cuda.is_available(), reason="FSDP2 of torch 2.4 needs CUDA")
@pytest.mark.parametrize("saved, loaded", [(("fsdp2", 2), ("hsdp", 4)), (("hsdp", 4), ("fsdp2", 3)),
                                           (("tp_and_fsdp2", 4), ("fsdp2", 2)), (("fsdp2", 3), ("tp_and_fsdp2", 4)),
                                           (("ddp", 2), ("fsdp2", 1)), (("fsdp1", 2), ("fsdp2", 3)), (("fsdp2", 2), ("fsdp1", 4))])
def test_training_goes_on_in_another_form(tmp_path, saved, loaded):
    path, losses = str(tmp_path / "state"), str(tmp_path / "losses.pt")
    run_function(train_and_save, saved[1], saved[0], path, losses)
    run_function(load_and_train, loaded[1], loaded[0], path, losses)


def recorded_kinds(path):
    shown = json.loads(succeed("ckpt-inspect", "show", path, "*", "--json"))
    return {tensor["name"]: tensor["kind"] for tensor in shown["tensors"]}


def test_a_save_records_the_same_kinds_as_a_move(tmp_path):
    w, odd = torch.ones(3), torch.ones(2)
    adam = {"exp_avg": w.clone(), "odd": odd.clone()}
    states = [
        {"state": {"model": {"fc.w": w}, "opt": {"state": {"fc.w": adam}}}},
        {"state": {"model": {"fc.w": w}, "opt": {"state": {"x": {"odd": odd}}, "param_groups": [{"lr": 0.1}]}}},
        {"state": {"model": {"fc.w": w}, "opt": {"state": {"x": {"odd": odd}}}}},  # the same tensors, other values
        {"state": {"fc.w": w}, "opt": {"state": {0: {"odd": odd, "step": 3}}}},
    ]
    found = []
    for i, state in enumerate(states):
        tessera.save(state, tmp_path / f"saved-{i}")
        torch.save(state, tmp_path / f"{i}.pt")
        reshard(tmp_path / f"{i}.pt", tmp_path / f"moved-{i}")
        found.append(recorded_kinds(tmp_path / f"saved-{i}"))
        assert found[i] == recorded_kinds(tmp_path / f"moved-{i}"), i
    assert found[0]["state.model.fc.w"] == "plain" and found[0]["state.opt.state.fc.w.exp_avg"] == "pointwise"
    assert [kinds.get("state.opt.state.x.odd") for kinds in found[1:3]] == ["opaque", "plain"]
    assert found[3] == {"opt.state.0.odd": "opaque", "state.fc.w": "plain"}


def only_the_last_rank_has_groups(root):
    start()
    import tessera.dcp

    tensors = {"model": {"w": torch.ones(2)}, "opt": {"state": {"x": {"odd": torch.ones(2)}}}}
    for i in range(2):  # the second time with the plan of the first
        if dist.get_rank() == dist.get_world_size() - 1:
            tensors["opt"]["param_groups"] = [{"lr": 0.1}]
        saved = tessera.save(tensors, f"{root}/saved", overwrite=True)
        assert saved.has_planned == (i == 0)
    dcp.save(tensors, storage_writer=tessera.dcp.StorageWriter(f"{root}/dcp"))
    dist.destroy_process_group()


def test_values_of_all_ranks_tell_kinds(tmp_path):
    run_function(only_the_last_rank_has_groups, 2, str(tmp_path))
    for name in ("saved", "dcp"):
        assert recorded_kinds(tmp_path / name)["opt.state.x.odd"] == "opaque", name


def ranks_that_differ(root):
    start()
    rank = dist.get_rank()
    own = torch.full((3,), float(rank))
    state = {"shared": torch.ones(2), f"stage.{rank}": own, f"loader.{rank}": {"seen": rank}, "step": 5}
    first = tessera.save(state, f"{root}/stages")
    again = tessera.save(state, f"{root}/stages", overwrite=True)
    assert first.has_planned and not again.has_planned
    into = {"shared": torch.zeros(2), f"stage.{rank}": torch.zeros(3), f"loader.{rank}": {"seen": -1}, "step": 0}
    tessera.load(into, f"{root}/stages")
    assert_equal(state, into)

    with pytest.raises(tessera.Error, match=r"w: expected float32 \[2\], as on rank 0, found float32 \[3\] on rank 1"):
        tessera.save({"w": torch.ones(2 + rank)}, f"{root}/bad")
    half = DTensor.from_local(torch.ones(1), init_device_mesh("cpu", (2,)), [Shard(0)])
    with pytest.raises(tessera.Error, match=r"w: expected parts that do not overlap, found \[0:1\] on rank 0 and \[0:2\] on rank 1"):
        tessera.save({"w": torch.ones(2) if rank else half}, f"{root}/bad")
    with pytest.raises(tessera.Error, match="checkpoint to save: expected 'x0', as on rank 0, found 'x1' on rank 1"):
        tessera.save(state, f"{root}/x{rank}")
    partial = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Partial()])
    with pytest.raises(tessera.Error, match="w: tensor: expected Shard or Replicate, found the placement Partial"):
        tessera.save({"w": partial}, f"{root}/bad")
    for call in (tessera.save, tessera.async_save, tessera.load):
        told = r"2 tensors can be neither saved nor loaded:\n  w: tensor: .*Partial.*\n  x: tensor: .* on the meta device"
        with pytest.raises(tessera.Error, match=("^rank 1: " if rank == 0 else "^") + told):
            call({"w": partial, "x": torch.empty(2, device="meta")} if rank else dict(into), f"{root}/{'stages' if call is tessera.load else 'bad'}")
    with pytest.raises(tessera.Error, match=("rank 1: " if rank == 0 else "^") + "w: value: expected"):
        tessera.save({"w": Odd() if rank else 1}, f"{root}/bad")
    with pytest.raises(tessera.Error, match="new: missing"):
        tessera.load({"new": torch.zeros(2)} if rank else dict(into), f"{root}/stages")
    with pytest.raises(tessera.Error, match="arguments: expected"):
        tessera.save(state, f"{root}/bad", keep_last=rank + 1)
    empty = distribute_tensor(torch.empty(4, 0), init_device_mesh("cpu", (2,)), [Shard(0)])
    tessera.save({"empty": empty}, f"{root}/stages", overwrite=True)
    tessera.load({"empty": empty}, f"{root}/stages")

    class Failing:
        def state_dict(self):
            return {"x": 1}

        def load_state_dict(self, state):
            if rank == 1:
                raise ValueError("cannot be loaded")

    tessera.save({"object": Failing()}, f"{root}/stages", overwrite=True)
    with pytest.raises(ValueError if rank == 1 else tessera.Error, match="cannot be loaded"):
        tessera.load({"object": Failing()}, f"{root}/stages")
    dist.barrier()
    assert os.listdir(root) == ["stages"]
    dist.barrier()  # before rank 1 writes another one
    half = dist.new_group([1])
    if rank == 1:
        tessera.save({"x": torch.ones(2)}, f"{root}/one", process_group=half)
        assert tessera.open(f"{root}/one").world_size == 1
    dist.barrier()
    dist.destroy_process_group()


def test_ranks_that_hold_different_things(tmp_path):
    run_function(ranks_that_differ, 2, str(tmp_path))


def replicas_of_groups(root):
    """Two pairs of ranks have a replica each, and each pair knows only its own."""
    from torch.distributed._shard.sharded_tensor import Shard as LocalShard, init_from_local_shards

    start()
    rank = dist.get_rank()
    whole = torch.arange(24.0).reshape(6, 4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]

    def state(of):
        rows = of.chunk(2)[rank % 2].clone()
        shards = [LocalShard.from_tensor_and_offsets(rows, [3 * (rank % 2), 0], rank)]
        return {"w": distribute_tensor(of.clone(), mesh, [Shard(0)]), "shards": init_from_local_shards(shards, 6, 4, process_group=pair),
                "bias": distribute_tensor(of[0].clone(), mesh, [Replicate()])}

    for again in range(2):
        saved = tessera.save(state(whole), f"{root}/saved", overwrite=True)
        assert saved.has_planned == (again == 0)
    nbytes = torch.tensor(saved.nbytes)
    dist.all_reduce(nbytes)
    assert nbytes == 2 * whole.nbytes + whole[0].nbytes  # nothing twice
    into = state(torch.zeros(6, 4))
    tessera.load(into, f"{root}/saved")
    rows = whole.chunk(2)[rank % 2]
    assert torch.equal(into["w"].to_local(), rows) and torch.equal(into["shards"].local_shards()[0].tensor, rows)
    assert torch.equal(into["bias"].to_local(), whole[0])

    crossing = {"w": distribute_tensor(torch.zeros(6, 4), mesh, [Shard(rank // 2)])}
    with pytest.raises(tessera.Error, match=r"w: expected parts that do not overlap, found \[0:3, 0:4\] on rank 0 and \[0:6, 0:2\] on rank 2"):
        tessera.save(crossing, f"{root}/crossing")
    with pytest.raises(tessera.Error, match=r"elements under 1 name \(pipeline stages.*\n  w: expected equal elements on the ranks 0 and 2"):
        tessera.save({"w": state(whole + 100 * (rank // 2))["w"]}, f"{root}/stages")
    with pytest.raises(tessera.Error, match=r"elements under 3 names"):  # with the plan of a save in which the replicas were equal
        tessera.save(state(whole + 100 * (rank // 2)), f"{root}/stages")
    experts = {"expert": state(whole + 100 * (rank // 2))["w"]}  # fewer than the other tensors
    with pytest.raises(tessera.Error, match=r"elements under 1 name .*experts.*\n  expert: expected equal elements on the ranks 0 and 2"):
        tessera.save(state(whole) | experts, f"{root}/stages")
    assert not os.path.exists(f"{root}/stages")
    # The statistics of one layer may differ between groups.
    for difference in (0, 100):  # the second save has the plan of the first
        mean = state(whole + difference * (rank // 2))["bias"]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tessera.save(state(whole) | {"mean": mean}, f"{root}/means{difference}")
        told = [str(each.message) for each in caught if "groups of ranks" in str(each.message)]
        assert told == [f"{root}/means100: groups of ranks hold different elements under 1 name, such as mean; those of the lowest rank "
                        "are saved; the new checkpoint is complete"] * (rank == 0 and difference > 0)
        assert torch.equal(tessera.open(f"{root}/means{difference}")["mean"].torch(), whole[0])
    trained = state(whole) | {"mean": state(whole + 100 * (rank // 2))["bias"]}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*groups of ranks")
        for i, save in enumerate((tessera.save, lambda *of_save: tessera.async_save(*of_save).result())):
            path = f"{root}/error{i}"
            with pytest.raises(RuntimeWarning, match="groups of ranks") if rank == 0 else contextlib.nullcontext():
                save(trained, path)
            assert torch.equal(tessera.open(path)["mean"].torch(), whole[0])  # complete; the next save gets no message of this one
    tessera.load(crossing, f"{root}/saved", only="w")
    assert torch.equal(crossing["w"].to_local(), whole.chunk(2, rank // 2)[rank % 2])
    dist.barrier()
    dist.destroy_process_group()


def test_groups_of_ranks_with_a_replica_each_are_joined(tmp_path):
    run_function(replicas_of_groups, 4, str(tmp_path))
    found = tessera.open(tmp_path / "saved")
    assert sorted(found) == ["bias", "shards", "w"] and tessera.verify(tmp_path / "saved") == []
    assert found["w"].torch().flatten().tolist() == found["shards"].torch().flatten().tolist() == list(range(24))


def statistics_that_differ(root):
    """The statistics of BatchNorm differ on all ranks. Pairs of ranks know only their own replica of some."""
    start()
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    own = torch.full((4,), float(rank))
    half = torch.full((2,), float(rank // 2))
    state = {"model": {}, "w": DTensor.from_local(torch.ones(1 - rank % 2, 8), mesh, [Shard(0)], shape=(1, 8), stride=(8, 1))}
    for i in range(3):
        state["model"][f"bn{i}"] = {"mean": own.clone(), "var": own.clone(), "num_batches_tracked": torch.tensor(rank)}
        state["model"][f"weight{i}"] = DTensor.from_local(torch.ones(2, 8), mesh, [Shard(0)])
        state["model"][f"bias{i}"] = DTensor.from_local(torch.ones(8), mesh, [Replicate()], run_check=False)
        if i == 2:  # of the tensors that groups know, fewer than half may differ
            break
        state["model"][f"pair{i}"] = {"mean": DTensor.from_local(own.clone(), mesh, [Replicate()], run_check=False),
                                      "var": DTensor.from_local(own.clone(), mesh, [Replicate()], run_check=False)}
        state["model"][f"split{i}"] = DTensor.from_local(half.clone(), mesh, [Shard(0)])
    state["model"]["some"] = {f"{name}{i}": own.clone() for i in range(3) for name in ("mean", "var") if rank > 0}
    for format in ("native", "dcp"):
        for again in range(2):
            tessera.save(state, f"{root}/{format}", format=format, overwrite=True)
    dist.destroy_process_group()


def test_statistics_that_differ_are_all_those_of_the_lowest_rank(tmp_path):
    """Before, the ranks wrote the replicas in turn: the mean of one BatchNorm and its variance came from different ranks."""
    run_function(statistics_that_differ, 4, str(tmp_path))
    for format in ("native", "dcp"):
        with tessera.open(tmp_path / format) as saved:
            found = {name: saved[name].torch().unique().tolist() for name in saved if "weight" not in name and "bias" not in name}
        assert len(found) == 1 + 3 * 3 + 2 * 3 + 6
        assert found.pop("w") == [1]
        assert found == {name: [1 if ".some." in name else 0] for name in found}


@pytest.mark.parametrize("shape", [(4096, 4096), (1 << 20, 1), (1, 1 << 20), (1000, 999), (65536, 64), (2, 3), (64, 64)])
def test_replicas_are_compared_in_all_rows_and_columns(shape):
    """Before, only the first column of a matrix with 4096 columns was compared."""
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    found = _save.some_elements(numbers)
    assert found[0] == 0 and found[-1] == numbers.numel() - 1 and found.tolist() == sorted(set(found.tolist()))
    assert len(found) == min(numbers.numel(), _save.MAX_SAMPLES)
    for dim, seen in enumerate(torch.unravel_index(found, shape)):
        assert len(seen.unique()) >= min(shape[dim], _save.MAX_SAMPLES) * 0.6
    assert torch.equal(_save.some_elements(numbers.t().contiguous().t()), found)
    for dtype in (torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.complex128):
        some = _save.some_elements(numbers.to(dtype))
        assert some.dtype.itemsize == dtype.itemsize and torch.equal(some.view(dtype).view(torch.uint8), found.to(dtype).view(torch.uint8))
    assert torch.equal(_save.some_elements((numbers * 1j).conj()), found * -1j)


def test_a_comparison_of_replicas_copies_no_tensor_whole():
    assert len(_save.some_elements(torch.ones(()).expand(1 << 20, 1 << 20))) == _save.MAX_SAMPLES  # 4 TiB


def stages_through_dcp(root):
    """Two pairs of ranks know only their own replica, and save it through DCP."""
    start()
    import tessera.dcp

    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))["tp"]

    def save(name, weight, mean):
        state = {key: DTensor.from_local(torch.full((2, 2), float(weight)), mesh, [Shard(0)]) for key in "abc"}
        state["mean"] = DTensor.from_local(torch.full((2,), float(mean)), mesh, [Shard(0)])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dcp.save(state, storage_writer=tessera.dcp.StorageWriter(f"{root}/{name}"))
        return [str(each.message) for each in caught if "groups of ranks" in str(each.message)]

    assert save("equal", 1, 1) == []
    assert save("mean", 1, rank // 2) == [
        f"{root}/mean: groups of ranks hold different elements under 1 name, such as mean; DCP's planner chooses which of them are saved "
        "(DefaultSavePlanner(dedup_save_to_lowest_rank=True): those of the lowest rank); the new checkpoint is complete"] * (rank == 0)
    with pytest.raises(dcp.api.CheckpointException, match=r"under 4 names \(pipeline stages(.|\n)*b: expected equal elements on the ranks 0 and 2"):
        save("stages", rank // 2, rank // 2)
    dist.barrier()
    assert sorted(os.listdir(root)) == ["equal", "mean"]
    dist.destroy_process_group()


def test_the_storage_writer_refuses_weights_that_differ_between_groups(tmp_path):
    """Before, DCP's planner took one box from one stage and the next from another, without a word."""
    run_function(stages_through_dcp, 4, str(tmp_path))
    assert tessera.open(tmp_path / "equal")["a"].torch().unique().tolist() == [1]


def nbytes_sent(save):
    """Returns the largest message that each exchange of a save sends on this rank."""
    from tessera._ranks import Ranks

    sent = []
    all_gather = Ranks._all_gather
    Ranks._all_gather = lambda self, own: (sent.append(len(own)), all_gather(self, own))[1]
    try:
        save()
    finally:
        Ranks._all_gather = all_gather
    return sent


def replicas_of_many_tensors(root):
    from tessera._job_state import JobState
    from tessera._ranks import _SHORT_NBYTES, Ranks

    start()
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    state = {"values": {"of all": [1] * 9, "of a rank": {}, f"rank{rank}": 1}}
    for i in range(150):
        state[f"layers.{i}.attention.output.weight"] = distribute_tensor(torch.full((4, 2), float(i)), mesh, [Shard(0)])
        state[f"layers.{i}.norm.weight"] = distribute_tensor(torch.full((2,), float(i)), mesh, [Replicate()])
    save = lambda name: lambda: tessera.save(state, f"{root}/{name}", overwrite=True)
    sent = max(nbytes_sent(save("saved")))
    assert sent > 150 * 100 if rank in (0, 2) else sent <= _SHORT_NBYTES  # the first rank of each pair describes its tensors
    for _ in range(2):  # the layout is the same: no names
        assert max(nbytes_sent(save("saved"))) <= _SHORT_NBYTES
    sent = max(nbytes_sent(lambda: tessera.load(state, f"{root}/saved")))
    assert sent > 150 * 100 if rank in (0, 2) else sent <= _SHORT_NBYTES
    digests = JobState(state, Ranks.of(None)).layout_digests
    assert len(digests._by_id) == 2  # one for each shape and placement: on many ranks, each layout is long
    state["layers.7.norm.weight"].to_local().add_(rank // 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert max(nbytes_sent(save("saved"))) < 300 * 8 + 500  # a digest of each tensor, and one name
    assert ["such as layers.7.norm.weight" in str(each.message) for each in caught] == [True] * (rank == 0)
    state["layers.9.attention.output.weight"].to_local().add_(rank // 2)
    with pytest.raises(tessera.Error, match=r"under 2 names .*\n  layers.7.norm.weight: expected equal elements on the ranks 0 and 2, "
                                            r"found different ones\n  layers.9.attention.output.weight: .*the ranks 0 and 2"):
        save("bad")()
    state["layers.9.attention.output.weight"].to_local().sub_(rank // 2)
    if rank == 3:
        state["layers.11.attention.output.weight"].to_local()[1, 1] = -1
    with pytest.raises(tessera.Error, match=r"(?s)under 2 names .*\n  layers.11.attention.output.weight: .*the ranks 1 and 3"):
        save("bad")()
    dist.destroy_process_group()


def test_a_save_of_the_same_layout_sends_no_names(tmp_path):
    run_function(replicas_of_many_tensors, 4, str(tmp_path))
    assert os.listdir(tmp_path) == ["saved"] and tessera.verify(tmp_path / "saved") == []


def sharded_rows(in_order):
    from torch.distributed._shard.sharded_tensor import Shard as LocalShard, ShardedTensor
    from torch.distributed._shard.sharding_spec import ShardMetadata

    rank = dist.get_rank()
    shards = [LocalShard(torch.full((1, 2), float(row)), ShardMetadata([row, 0], [1, 2], f"rank:{rank}/cpu"))
              for row in (2 * rank, 2 * rank + 1)]
    return ShardedTensor._init_from_local_shards(shards if in_order else shards[::-1], [4, 2])


def save_awkward_things(root):
    start()
    rank = dist.get_rank()
    # The second save reuses the plan of the first.
    for name, in_order in (("rows", True), ("rows again", False)):
        saved = tessera.save({"w": sharded_rows(in_order)}, f"{root}/{name}")
        into = sharded_rows(not in_order)
        for shard in into.local_shards():
            shard.tensor.zero_()
        tessera.load({"w": into}, f"{root}/{name}")
        assert {shard.metadata.shard_offsets[0]: shard.tensor[0, 0] for shard in into.local_shards()} == {2 * rank: 2 * rank, 2 * rank + 1: 2 * rank + 1}
    assert not saved.has_planned

    # Values that pickle cannot send, or that only one rank can unpickle, are saved as on one rank: as the plain type.
    class Own(str):
        pass

    state = {"seen": collections.defaultdict(lambda: 0), "own": Own("text"), "dtype": torch.bfloat16, "random": tessera.PerRank(Own(rank))}
    tessera.save(state, f"{root}/values")
    tessera.save({**state, f"of {rank}": Own("x")}, f"{root}/more values")
    with pytest.raises(tessera.Error, match="bad: value: expected"):
        tessera.save({"bad": (collections.defaultdict(Odd, a=Odd()),)}, f"{root}/bad")

    # The names of both ranks are one text if a line break joins them.
    tessera.save({"a\nb": 1} if rank == 0 else {"a": 2, "b": 3}, f"{root}/names")
    dist.barrier()
    dist.destroy_process_group()


def test_awkward_things_are_saved_as_they_are(tmp_path):
    run_function(save_awkward_things, 2, str(tmp_path))
    for name in ("rows", "rows again"):
        assert tessera.open(tmp_path / name)["w"].torch()[:, 0].tolist() == [0, 1, 2, 3], name
    expected = {"seen": {}, "own": "text", "dtype": torch.bfloat16, "random": {"ranks": ["0", "1"]}}
    assert tessera.open(tmp_path / "values").state_dict() == expected
    assert tessera.open(tmp_path / "more values").state_dict() == {**expected, "of 0": "x", "of 1": "x"}
    assert tessera.open(tmp_path / "names").state_dict() == {"a\nb": 1, "a": 2, "b": 3}


def tied_state(rank):
    """a and b are tied, and c is tied to a where it is. x and y are tied on rank 1 alone."""
    a, x = torch.ones(4), torch.zeros(2)
    mesh = init_device_mesh("cpu", (2,))
    row = distribute_tensor(torch.ones(1, 3), mesh, [Shard(0)])  # rank 1 has no elements of it
    return {"a": a, "b": a, "row": row, "row again": row, **({"c": a} if rank == 0 else {"more": torch.ones(1)}),
            "x": x, "y": x if rank else x.clone()}


def save_ties(root):
    start()
    for i, has_planned in enumerate((True, False)):
        saved = tessera.save(tied_state(dist.get_rank()), f"{root}/{i}")
        assert (saved.has_planned, saved.changes) == (has_planned, {"split_ties": 1})
    saved = tessera.save(tied_state(dist.get_rank()), f"{root}/dcp", format="dcp")
    assert saved.changes == {"split_ties": 4}
    into = tied_state(dist.get_rank())
    for tensor in into.values():
        tensor.fill_(9)
    for name in ("0", "dcp"):
        tessera.load(into, f"{root}/{name}")
        for tensor, wanted in zip(into.values(), tied_state(dist.get_rank()).values()):
            tensor, wanted = (t.to_local() if isinstance(t, DTensor) else t for t in (tensor, wanted))
            assert torch.equal(tensor, wanted)
    dist.destroy_process_group()


def test_ties_stay_if_all_ranks_that_hold_the_names_have_them(tmp_path):
    run_function(save_ties, 2, str(tmp_path))
    for name in ("0", "1"):
        assert tessera.open(tmp_path / name).aliases == {"b": "a", "c": "a", "row again": "row"}
        assert tessera.verify(tmp_path / name) == []


def load_different_things(root):
    start()
    from tessera.dcp import StorageReader
    rank = dist.get_rank()
    into = {"w": distribute_tensor(torch.zeros(4), init_device_mesh("cpu", (2,)), [Shard(0)]), "v": torch.zeros(2), "step": 0}
    for path, told in (("one/s" if rank else "two/t", "expected 't', as on rank 0, found 's' on rank 1"),
                       (("one/s", "two/s")[rank], "expected 's', as on rank 0, found a different checkpoint of that name on rank 1"),
                       (("one/s", "next/s")[rank], "expected 's', as on rank 0, found a different checkpoint of that name on rank 1")):
        with pytest.raises(tessera.Error, match=f"checkpoint to load: {told}") as caught:
            tessera.load(into, f"{root}/{path}")
        assert caught.value.kind == "mismatch"
        with pytest.raises(dcp.api.CheckpointException, match=f"checkpoint to load: {told}"):
            dcp.load(into, storage_reader=StorageReader(f"{root}/{path}"))
    for options in ({"only": ["w", "v"][rank]}, {"strict": bool(rank)}, {"allow_cast": bool(rank)}, {"rename": {"a": "b"} if rank else None}):
        with pytest.raises(tessera.Error, match=f"arguments: expected .*{next(iter(options))}=.*, as on rank 0, found .* on rank 1"):
            tessera.load(into, f"{root}/one/s", **options)
    assert into["v"].sum() == 0 and into["w"].to_local().sum() == 0 and into["step"] == 0
    with pytest.raises(tessera.Error, match="SHA-256") as caught:
        tessera.load(into, f"{root}/one/s", only=["w", *(f"{i}.{rank}" for i in range(10_000))])
    assert len(str(caught.value)) < 2000
    node_local = f"{root}/{('one/s', 'copy/of s')[rank]}"
    tessera.load(into, node_local, only=["w", ["w"]][rank])
    tessera.load(into, node_local, only=(["w", "v*"], ["v*", "w"])[rank],  # as sets give them
                 rename=(collections.defaultdict(str, w="w"), {"w": "w"})[rank])
    dcp.load(into, storage_reader=StorageReader(node_local))
    assert into["w"].to_local().tolist() == [1, 1] and into["v"].sum() == 2
    dist.barrier()
    dist.destroy_process_group()


def test_all_ranks_load_one_checkpoint_with_the_same_arguments(tmp_path):
    """Copies of one checkpoint, as on disks of several machines, count as one. `next/s` is a step at which all tensors are frozen."""
    for path, fill, step in (("one/s", 1.0, 1), ("copy/of s", 1.0, 1), ("two/s", 2.0, 1), ("two/t", 2.0, 1), ("next/s", 1.0, 2)):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        tessera.save({"w": torch.full((4,), fill), "v": torch.ones(2), "step": step}, tmp_path / path)
    run_function(load_different_things, 2, str(tmp_path))


# --- PyTorch's own planner over Tessera's reader

def load_layouts_through_dcp(root):
    start()
    import tessera.dcp

    for (name, layout), saved in itertools.product(layouts(dist.get_world_size()).items(), sorted(os.listdir(root))):
        state = {key: layout(torch.zeros_like(tensor)) for key, tensor in whole_weights().items()}
        outer = {"model": state, "step": 0}
        dcp.load(outer, storage_reader=tessera.dcp.StorageReader(f"{root}/{saved}"))
        assert outer["step"] == 3
        for key, tensor in whole_weights().items():
            assert_holds(state[key], tensor, f"{key} of {saved} as {name}")
    # Without dist.destroy_process_group(): after DCP's load, torch 2.4 sometimes waits in it forever.


def test_dcp_loads_through_the_storage_reader(tmp_path):
    run_function(save_layouts, 3, str(tmp_path), "native")
    run_function(load_layouts_through_dcp, 4, str(tmp_path))


@pytest.mark.parametrize("format", SUFFIX)
def test_dcp_gets_everything_of_one_rank_through_the_storage_reader(tmp_path, format):
    import tessera.dcp

    state = {"w": torch.randn(3, 4), "half": torch.ones(2, dtype=torch.bfloat16), "t": torch.arange(6).reshape(2, 3).t(),
             "empty": torch.empty(0, 2), "scalar": torch.tensor(2), "deep": {"list": [1, 2], "lr": 0.5, "none": None}}
    path = tmp_path / f"s{SUFFIX[format]}"
    tessera.save(state, path, format=format)
    into = zeroed(state)
    dcp.load(into, checkpoint_id=path, storage_reader=tessera.dcp.StorageReader())
    assert_equal(state, into)
    with pytest.raises(dcp.api.CheckpointException):
        dcp.load({"other": torch.ones(1)}, storage_reader=tessera.dcp.StorageReader(path))


def load_optimizer_through_dcp(root):
    start()
    import tessera.dcp
    from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict

    def entries_of(found):
        return {key: {rank.metadata.shard_offsets[0]: rank.tensor for rank in entry.local_shards()} if hasattr(entry, "local_shards") else entry
                for key, entry in sorted(found.items())}

    model = torch.nn.Linear(4, 6)
    expected = load_sharded_optimizer_state_dict(model.state_dict(), "optim", dcp.FileSystemReader(f"{root}/dcp"))["optim"]
    for saved in ("dcp", "native"):
        reader = tessera.dcp.StorageReader(f"{root}/{saved}")
        found = load_sharded_optimizer_state_dict(model.state_dict(), "optim", reader)["optim"]
        assert found.keys() == expected.keys() and found["param_groups"] == expected["param_groups"]
        for name, state in expected["state"].items():
            assert_equal(entries_of(state), entries_of(found["state"][name]))
    # Without dist.destroy_process_group(), as above.


def test_dcp_loads_an_optimizer_that_it_builds_from_the_checkpoint(tmp_path):
    model = torch.nn.Linear(4, 6)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optimizer_state}
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    tessera.save(state, tmp_path / "native")
    run_function(load_optimizer_through_dcp, 2, str(tmp_path))


@pytest.mark.parametrize("is_flat", [True, False])
def test_dcp_builds_the_whole_state_dict_from_the_storage_reader(tmp_path, is_flat):
    import tessera.dcp
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state = {"args": {"betas": [0.9, {"x": 1}], "lr": 0.5}, "w": torch.ones(2)}
    if is_flat:
        state |= {"layers": [{"w": torch.ones(2)}, {"w": torch.zeros(3)}], "by_number": {"3": {"s": torch.ones(1)}}}
    dcp.save(state, checkpoint_id=tmp_path / "s", planner=dcp.DefaultSavePlanner(flatten_state_dict=is_flat))
    tessera.save(state, tmp_path / "native")
    for path in ("s", "native"):
        found = {}
        _load_state_dict(found, storage_reader=tessera.dcp.StorageReader(tmp_path / path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
        assert_equal(state, {name: found[name] for name in state})


def test_the_storage_reader_refuses_a_part_of_a_checkpoint():
    """Before, every rank got the elements of that part."""
    import tessera.dcp

    part = FIXTURES / "rank_files" / "valid" / "fsdp2_hybrid" / "model_world_size_4_rank_1.pt"
    with tessera.open(part) as found:
        into = {name: torch.zeros_like(found[name].torch()) for name in found}
    told = f"{re.escape(str(part))}: part: expected a whole checkpoint, found one rank of 4"
    with pytest.raises(tessera.Error, match=told):
        tessera.load(into, part)
    with pytest.raises(dcp.api.CheckpointException, match=told):
        dcp.load(into, storage_reader=tessera.dcp.StorageReader(part))


def test_the_storage_reader_warns_of_tensors_that_get_another_dtype(tmp_path):
    """Shows A2. DCP converts the elements, also those that the dtype cannot hold."""
    import tessera.dcp

    state = {"b": torch.tensor([1e30, 2.5]), "a": torch.ones(2), "same": torch.ones(2)}
    tessera.save(state, tmp_path / "s")
    into = {"b": torch.zeros(2, dtype=torch.int64), "a": torch.zeros(2, dtype=torch.float16), "same": torch.zeros(2)}
    with pytest.warns(RuntimeWarning, match=r"^a: float32 is converted to float16, the dtype in the state dict \(and 1 more\)$"):
        dcp.load(into, storage_reader=tessera.dcp.StorageReader(tmp_path / "s"))
    assert into["b"][1] == 2 and into["a"].sum() == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        dcp.load(zeroed(state), storage_reader=tessera.dcp.StorageReader(tmp_path / "s"))


def save_beside_a_dead_rank(root):
    start()
    state = {"w": torch.ones(2)}
    tessera.save(state, f"{root}/before")
    if dist.get_rank() == 1:
        os._exit(0)
    with pytest.raises(tessera.Error, match="rank 0 got no answer from the other ranks") as caught:
        tessera.save(state, f"{root}/after")
    assert caught.value.kind == "io"
    assert os.listdir(root) == ["before"]
    os._exit(0)


def test_a_dead_rank_ends_a_save_and_leaves_nothing(tmp_path):
    run_function(save_beside_a_dead_rank, 2, str(tmp_path))


def resident_nbytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def nbytes_that_saves_and_loads_keep(folder, count):
    """Returns by how much `count` saves and loads make this process grow, after the first 30."""
    state = {f"layer.{i}": torch.zeros(256) for i in range(50)} | {"values": list(range(100))}

    def rounds(count):
        for _ in range(count):
            tessera.async_save(state, folder / "s", overwrite=True).result()
            tessera.load(state, folder / "s")

    rounds(30)
    before = resident_nbytes()
    rounds(count)
    return resident_nbytes() - before


def test_many_saves_and_loads_keep_no_memory(tmp_path):
    assert nbytes_that_saves_and_loads_keep(tmp_path, 120) < 4 << 20


def save_through_dcp_and_load(root, ranks):
    start()
    import tessera.dcp

    for name, layout in layouts(ranks).items():
        state = {key: layout(tensor) for key, tensor in whole_weights().items()}
        outer = {"model": state, "step": 3, "groups": [{"lr": 0.1, "params": ["w"]}]}
        dcp.save(outer, storage_writer=tessera.dcp.StorageWriter(f"{root}/{name}"))
        into = {"model": {key: layout(torch.zeros_like(tensor)) for key, tensor in whole_weights().items()},
                "step": 0, "groups": [{"lr": 0.0, "params": ["?"]}]}
        tessera.load(into, f"{root}/{name}")
        assert into["step"] == 3 and into["groups"] == outer["groups"]
        for key, tensor in whole_weights().items():
            assert_holds(into["model"][key], tensor, f"{key} as {name}")
        writer = tessera.dcp.StorageWriter(overwrite=True, keep_last=9)
        dcp.async_save(outer, checkpoint_id=f"{root}/{name}", storage_writer=writer).result()
    # From CPython 3.13 on, torch 2.11 cannot send the traceback of a failed save to other ranks, with any storage.
    told = (dcp.api.CheckpointException, "exists") if sys.version_info < (3, 13) else (Exception, "exists|cannot pickle code objects")
    with pytest.raises(told[0], match=told[1]):
        dcp.save(outer, storage_writer=tessera.dcp.StorageWriter(f"{root}/{name}"))
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_dcp_saves_through_the_storage_writer(tmp_path, ranks):
    run_function(save_through_dcp_and_load, ranks, str(tmp_path), ranks)
    for path in tmp_path.iterdir():
        assert tessera.verify(path) == []


def save_beside_dcp(root):
    """Rank 0 reaches the messages of its `tessera.save` first, rank 1 those of DCP's save in the background."""
    start()
    import tessera.dcp

    rank = dist.get_rank()
    write, has_saved, has_written = tessera.dcp._PlannedSave._write, threading.Event(), threading.Event()

    def in_order(save):
        if rank == 0:
            assert has_saved.wait(60)
        write(save)
        has_written.set()

    tessera.save({"warm": 1}, root / "calls" / "step-0")
    state = {"w": torch.full((4,), 7.0), "step": 5}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tessera.dcp._PlannedSave, "_write", in_order)
        saving = dcp.async_save({"v": torch.ones(3)}, storage_writer=tessera.dcp.StorageWriter(root / "dcp" / "step-1"))
        if rank == 1:
            assert has_written.wait(60)
            time.sleep(0.2)  # until the background waits for rank 0
        tessera.save(state, root / "calls" / "step-1")
        into = {"w": torch.zeros(4), "step": 0}
        tessera.load(into, root / "calls" / "step-1")
        has_saved.set()
        saving.result()
    assert_equal(into, state)
    dist.destroy_process_group()


def test_a_save_by_dcp_in_the_background_has_messages_of_its_own(tmp_path):
    for folder in ("calls", "dcp"):
        (tmp_path / folder).mkdir()
    run_function(save_beside_dcp, 2, tmp_path)
    saved = tmp_path / "dcp" / "step-1"
    assert tessera.verify(saved) == [] and tessera.open(saved)["v"].torch().tolist() == [1, 1, 1]


def save_through_dcp_alone(root):
    start()
    from tessera.dcp import StorageWriter

    state = {"w": torch.ones(3), "step": 5}
    if dist.get_rank() == 0:
        dcp.save(state, storage_writer=StorageWriter(f"{root}/alone", no_dist=True), no_dist=True)
    writer = StorageWriter(f"{root}/together")
    if dist.get_rank() == 0:
        with pytest.raises(dcp.api.CheckpointException, match="together: ranks of DCP's save: expected 2, as of the StorageWriter, found 1"):
            dcp.save(state, storage_writer=writer, no_dist=True)
    dist.barrier()
    dcp.save(state, storage_writer=writer)
    dist.destroy_process_group()


@pytest.mark.skipif("no_dist" not in inspect.signature(dcp.save).parameters, reason="torch 2.4")
def test_dcp_saves_on_one_rank_alone(tmp_path):
    run_function(save_through_dcp_alone, 2, str(tmp_path))
    for name in ("alone", "together"):
        assert tessera.verify(tmp_path / name) == [] and tessera.open(tmp_path / name)["w"].torch().tolist() == [1, 1, 1]


def fail_and_interrupt(root):
    start()
    rank = dist.get_rank()
    state = {"w": torch.ones(2)}
    write = tessera._save.SaveSteps._write

    def failing(job):
        if rank == 1:
            raise OSError("the disk is on fire")
        write(job)

    tessera._save.SaveSteps._write = failing
    saving = tessera.async_save(state, f"{root}/lost")
    if rank == 0:
        with pytest.raises(tessera.Error, match="rank 1: the disk is on fire"):
            saving.result()
    tessera.load({"w": torch.zeros(2)}, f"{root}/first")  # waits for the failed save; its error is raised by the next save
    tessera._save.SaveSteps._write = write
    with pytest.raises((tessera.Error, OSError), match="the disk is on fire"):
        tessera.save(state, f"{root}/next")
    tessera.save(state, f"{root}/next")

    run = tessera._save.SaveSteps.run
    if rank == 0:
        tessera._save.SaveSteps.run = lambda job: (run(job), 1 / 0)
    tessera.async_save(state, f"{root}/alone")
    with pytest.raises(ZeroDivisionError if rank == 0 else tessera.Error, match="^division" if rank == 0 else "^rank 0: division"):
        tessera.save(state, f"{root}/next", overwrite=True)
    tessera._save.SaveSteps.run = run
    tessera.save(state, f"{root}/next", overwrite=True)

    def interrupting(job):
        if rank == 0:
            os.kill(os.getpid(), signal.SIGINT)
        write(job)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGINT)

    tessera._save.SaveSteps._write = interrupting
    with pytest.raises(KeyboardInterrupt):
        tessera.save(state, f"{root}/interrupted")
    tessera._save.SaveSteps._write = write
    tessera.save(state, f"{root}/last")

    finish = tessera._save.SaveSteps._finish
    for interrupted in range(2):
        if rank == interrupted:
            tessera._save.SaveSteps._finish = lambda job: (os.kill(os.getpid(), signal.SIGINT), finish(job))[1]
        told = "after the save: the new checkpoint is complete"
        with pytest.raises((KeyboardInterrupt, tessera.Error),
                           match=f"^{told}" if rank == interrupted else f"^rank {interrupted}: interrupted {told}") as caught:
            tessera.save({"w": torch.full((2,), float(interrupted))}, f"{root}/last", overwrite=True)
        assert rank == interrupted or caught.value.kind == "interrupted"
        tessera._save.SaveSteps._finish = finish
        assert tessera.open(f"{root}/last")["w"].torch()[0] == interrupted
        dist.barrier()
    with pytest.raises(tessera.Error, match="expected the same call on all ranks, found rank . (saving|loading)"):
        if rank == 0:
            tessera.save(state, f"{root}/other")
        else:
            tessera.load({"w": torch.zeros(2)}, f"{root}/last")
    dist.barrier()
    assert sorted(os.listdir(root)) == ["alone", "first", "last", "next"]
    dist.destroy_process_group()


def test_failures_and_interrupts_end_a_save_on_all_ranks(tmp_path):
    tessera.save({"w": torch.ones(2)}, tmp_path / "first")
    run_function(fail_and_interrupt, 2, str(tmp_path))


class Raising:
    """Presses Ctrl-C, or raises an error, when a save or load asks for its state."""

    def __init__(self, error=None, interrupts=True):
        self.error, self.interrupts = error, interrupts

    def state_dict(self):
        if self.interrupts:
            os.kill(os.getpid(), signal.SIGINT)
        if self.error is not None:
            raise self.error
        return {"x": 1}

    def load_state_dict(self, state):
        pass


def tell_kinds_of_failures(root):
    start()
    rank = dist.get_rank()
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def caught(object_of_rank_1):
        with pytest.raises(BaseException) as found:
            tessera.save({"object": object_of_rank_1 if rank == 1 else Raising(interrupts=False)}, f"{root}/saved")
        return found.value

    for error in (ValueError("mine"), TypeError("mine")):
        found = caught(Raising(error, interrupts=False))
        assert found is error if rank == 1 else (str(found), found.kind) == ("rank 1: mine", "invalid_argument")
    found = caught(Raising())
    assert isinstance(found, KeyboardInterrupt) if rank == 1 else (str(found), found.kind) == ("rank 1: KeyboardInterrupt", "interrupted")
    # Ctrl-C is not forgotten if the call fails for another reason.
    found = caught(Raising(ValueError("mine")))
    if rank == 1:
        assert isinstance(found, KeyboardInterrupt) and str(found) == "mine" and isinstance(found.__cause__, ValueError)
    else:
        assert found.kind == "invalid_argument"
    dist.barrier()
    assert os.listdir(root) == []
    dist.destroy_process_group()


def test_other_ranks_are_told_the_kind_of_a_failure_and_ctrl_c_is_not_forgotten(tmp_path):
    run_function(tell_kinds_of_failures, 2, str(tmp_path))


def interrupt_a_load_beside_a_save(root):
    start()
    rank = dist.get_rank()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tessera.save({"x": torch.ones(2)}, f"{root}/first")
    write = tessera._save.SaveSteps._write
    tessera._save.SaveSteps._write = lambda job: (time.sleep(0.5), write(job))[1]
    saving = tessera.async_save({"w": torch.ones(2)}, f"{root}/second")
    into = {"x": torch.zeros(2)}
    if rank == 1:
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt if rank == 1 else tessera.Error) as caught:
        tessera.load(into, f"{root}/first")
    assert rank == 1 or caught.value.kind == "interrupted"
    assert into["x"].sum() == 0 and saving.result().path == f"{root}/second"
    assert tessera.verify(f"{root}/second") == []
    dist.barrier()
    dist.destroy_process_group()


def test_ctrl_c_in_a_load_does_not_end_the_save_in_the_background(tmp_path):
    run_function(interrupt_a_load_beside_a_save, 2, str(tmp_path))


def interrupt_loads_from_a_silent_server(port):
    start()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
    dist.barrier()
    begin = time.monotonic()
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()  # as a shell does: to all ranks
    with pytest.raises(KeyboardInterrupt):
        tessera.load({"w": torch.zeros(2)}, "s3://bucket/x", endpoint=f"http://127.0.0.1:{port}")
    assert time.monotonic() - begin < 30
    dist.barrier()
    dist.destroy_process_group()


def test_ctrl_c_ends_a_load_of_several_ranks_from_a_silent_server():
    """Before, they waited for all attempts, two minutes, and raised the error of the server."""
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts connections, but does not answer
        run_function(interrupt_loads_from_a_silent_server, 2, server.getsockname()[1])


def save_in_one_folder(root):
    start()
    rank = dist.get_rank()
    own = [dist.new_group([0]), dist.new_group([1])][rank]
    write = tessera._save.SaveSteps._write

    def slow(job):
        dist.barrier()  # both save at the same time
        write(job)
        dist.barrier()

    tessera._save.SaveSteps._write = slow
    tessera.save({"w": torch.ones(2)}, f"{root}/stage-{rank}", process_group=own)
    tessera._save.SaveSteps._write = lambda job: (dist.barrier(), dist.barrier(), write(job))[2]
    if rank == 0:
        tessera.save({"w": torch.ones(2)}, f"{root}/one", process_group=own)
    else:
        dist.barrier()
        with pytest.raises(tessera.Error, match="another process is writing to the same destination") as caught:
            tessera.save({"w": torch.ones(2)}, f"{root}/one", process_group=own)
        assert caught.value.kind == "already_exists"
        dist.barrier()
    dist.barrier()
    dist.destroy_process_group()


def test_two_groups_save_into_one_folder_at_the_same_time(tmp_path):
    """Before, the second one was refused, although it had a path of its own."""
    run_function(save_in_one_folder, 2, str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["one", "stage-0", "stage-1"]
    for name in os.listdir(tmp_path):
        assert tessera.verify(tmp_path / name) == []


def test_a_warning_that_is_an_error_does_not_make_a_save_in_the_background_fail(tmp_path, capfd):
    """Before, the next save raised the warning, and did not save."""
    for step in (1, 2):
        tessera.save({"step": step}, tmp_path / f"step-{step}")
        (tmp_path / f"step-{step}" / "notes.txt").write_text("of another program")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tessera.async_save({"step": 3}, tmp_path / "step-3", keep_last=1)
        tessera.save({"step": 4}, tmp_path / "step-4")
        assert "step-2: older checkpoint: not removed" in capfd.readouterr().err
        assert tessera.open(tmp_path / "step-3")["step"] == 3
        with pytest.raises(RuntimeWarning, match="step-2: older checkpoint: not removed"):
            tessera.async_save({"step": 5}, tmp_path / "step-5", keep_last=1).result()
        assert tessera.save({"step": 6}, tmp_path / "step-6").path
    assert capfd.readouterr().err == ""


def count_threads(expected):
    """Each rank has a machine and a set of cores; `expected` is the number of threads that Tessera then uses."""
    from tessera._ranks import Ranks
    rank = int(os.environ["RANK"])
    machines = ["a", "a", "a", "b"]
    cores = {"all on one set": [range(32)] * 4, "a set for each": [range(8 * i, 8 * i + 8) for i in range(4)],
             "more than enough": [range(100)] * 4, "fewer than ranks": [range(2)] * 4}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("socket.gethostname", lambda: machines[rank])
        patch.setattr("tessera._core.default_num_threads", lambda: 16)  # of a machine with many cores
        dist.init_process_group("gloo")
        gloo = dist.ProcessGroupGloo
        timeouts = []
        patch.setattr("torch.distributed.ProcessGroupGloo", lambda *given: (timeouts.append(given[-1]), gloo(*given))[1])
        for what, sets in cores.items():
            patch.setattr("os.sched_getaffinity", lambda _, sets=sets: set(sets[rank]))
            assert Ranks.of(None, what).num_threads() == expected[what][rank], what
        assert min(timeouts).total_seconds() >= 6 * 3600  # rank 0 may write a large file alone
    dist.barrier()


def test_ranks_share_the_cores_of_their_machine():
    run_function(count_threads, 4, {"all on one set": [10, 10, 10, 16], "a set for each": [8] * 4,
                                    "more than enough": [16] * 4, "fewer than ranks": [1, 1, 1, 2]})
