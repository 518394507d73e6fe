"""The peers read what Tessera writes: PyTorch with its strict planner and `torch.load`, safetensors."""

import functools
import hashlib
import json
import re
import sys
import zipfile

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from ckpt_tools import FIXTURES, MAKE, expectation, listing, reshard, succeed, tensors_by_name, valid_fixtures

sys.path.insert(0, str(MAKE))
import load_into_fsdp2  # noqa: E402
import ranks  # noqa: E402
from expect import flatten, tensor_row, value_json  # noqa: E402

# native files keep every dtype; the other formats refuse some dtypes or have no name for them
SOURCES = [(i, p) for i, p in valid_fixtures() if "flat" not in i]
NOT_TORCHSCRIPT = [(i, p) for i, p in SOURCES if "torchscript" not in i]
# torchrec's momentum per column shard can only be merged with --allow-lossy
DCP_SOURCES = [(i, p) for i, p in NOT_TORCHSCRIPT if "torchrec" not in i]
TORCH_SOURCES = [(i, p) for i, p in SOURCES if i not in {"dcp/valid/torchrec", "native/v1/plain"}]
SAFETENSORS_SOURCES = [(i, p) for i, p in NOT_TORCHSCRIPT if not i.endswith(("valid/dtypes.pt", "valid/stream_dtypes.pt", "valid/big_endian.pt", "dcp/valid/dtypes"))]


def parametrize(sources):
    return pytest.mark.parametrize("source", [p for _, p in sources], ids=[i for i, _ in sources])


def digest(tensor):
    row = tensor_row("", tensor)
    return (row["dtype"], row["shape"], row["nbytes"], row["sha256"])


def empty_from(row):
    dtype, shape, _, _ = row
    return torch.full(shape, 7, dtype=torch.float32).to(getattr(torch, dtype))


def load_strictly(path, expected):
    """Loads all of a DCP checkpoint under its flattened names, with PyTorch's default planner."""
    reader = dcp.FileSystemReader(path)
    rows, values = tensors_by_name(expected), expected.get("values", {})
    found = set(reader.read_metadata().state_dict_metadata)
    assert found == set(rows) | set(values) if "values" in expected else found >= set(rows)
    rows = {name: row for name, row in rows.items() if not row[0].startswith("float4")}  # torch cannot copy these
    state = {name: empty_from(row) for name, row in rows.items()} | dict.fromkeys(values)
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    assert {name: digest(state[name]) for name in rows} == rows
    loaded = {name: value_json(planner.state_dict[name]) for name in values}
    assert json.dumps(loaded, sort_keys=True) == json.dumps(values, sort_keys=True)


@parametrize(DCP_SOURCES)
def test_pytorch_loads_our_dcp(source, tmp_path):
    """Shows A2, A4, E2. DefaultLoadPlanner (strict) loads every tensor and value with equal bytes, flattened, from 3 ranks."""
    moved = reshard(source, tmp_path / "moved", "--to", "dcp", "--world-size", 3)
    load_strictly(moved, expectation(source))


@parametrize(DCP_SOURCES)
def test_pytorch_loads_our_dcp_nested(source, tmp_path):
    """Shows A2, A4, E2. As dcp_to_torch_save loads it: nested, every tensor with equal bytes, from 1 rank."""
    expected = expectation(source)
    moved = reshard(source, tmp_path / "moved", "--to", "dcp", "--world-size", 1)
    rows = {name: row for name, row in tensors_by_name(expected).items() if not row[0].startswith("float4")}  # torch cannot copy these
    nested = {}
    planner = _EmptyStateDictLoadPlanner(keys=set(rows) | set(expected.get("values", {})))
    _load_state_dict(nested, storage_reader=dcp.FileSystemReader(moved), planner=planner, no_dist=True)
    tensors = {name: tensor for name, tensor in flatten_state_dict(nested)[0].items() if torch.is_tensor(tensor)}
    assert {name: digest(tensor) for name, tensor in tensors.items()} == rows


NESTED = {
    "empty dicts": {"d": {"a": {}}, "e": {}, "l": [{"a": {}}, {}]},
    "sets": {"l": [set(), 1], "m": [{1, 2}, {"a": set()}]},
    "beside a tensor": {"l": [torch.ones(1), {}, set(), [[]]]},
}


@pytest.mark.parametrize("nested", NESTED.values(), ids=NESTED)
def test_pytorch_converts_our_dcp(nested, tmp_path):
    """Shows E2. `dcp_to_torch_save` restores empty dicts and lists too."""
    torch.save({"w": torch.ones(1)} | nested, tmp_path / "source.pt")
    moved = reshard(tmp_path / "source.pt", tmp_path / "moved", "--to", "dcp")
    dcp_to_torch_save(moved, tmp_path / "converted.pt")
    assert torch.load(tmp_path / "converted.pt", weights_only=True) == {"w": torch.ones(1)} | nested


def test_pytorch_converts_a_list_that_lacks_items(tmp_path):
    """Shows E2. `dcp_to_torch_save` restores a list of which a move left out items: with None in their places."""
    items = [torch.ones(1), 7, torch.ones(1), {"a": [torch.ones(1), torch.ones(1)]}]
    torch.save({"l": items, "w": torch.ones(1)}, tmp_path / "source.pt")
    moved = reshard(tmp_path / "source.pt", tmp_path / "moved", "--to", "dcp", "--only", "!l.[02]", "--only", "!l.3.a.0")
    dcp_to_torch_save(moved, tmp_path / "converted.pt")
    expected = {"l": [None, 7, None, {"a": [None, torch.ones(1)]}], "w": torch.ones(1)}
    assert torch.load(tmp_path / "converted.pt", weights_only=True) == expected


@parametrize(TORCH_SOURCES)
def test_torch_load_reads_ours(source, tmp_path):
    """Shows A2, A4, E2, E9. torch.load with `weights_only` reads every tensor and value under its name, also from memory
    that is mapped; tied names share memory."""
    expected = expectation(source)
    moved = reshard(source, tmp_path / "moved.pt")
    assert zipfile.ZipFile(moved).testzip() is None
    aliases = listing(source).get("aliases", [])
    for mmap in (False, True):
        state = torch.load(moved, weights_only=True, mmap=mmap)
        leaves = dict(flatten(state, empty_mappings=True))
        tensors = {name: leaf for name, leaf in leaves.items() if torch.is_tensor(leaf)}
        assert {name: digest(tensor) for name, tensor in tensors.items()} == tensors_by_name(expected)
        if "values" in expected:
            values = {name: leaf for name, leaf in leaves.items() if name not in tensors}
            for name in expected["values"].keys() - values.keys():  # torch 2.2 saved a list of dicts as one value
                values = {key: leaf for key, leaf in values.items() if not key.startswith(f"{name}.")}
                values[name] = functools.reduce(lambda dict_, key: dict_[key], name.split("."), state)
            found = {name: value_json(leaf) for name, leaf in values.items()}
            assert json.dumps(found, sort_keys=True) == json.dumps(expected["values"], sort_keys=True)
        for alias in aliases:
            assert tensors[alias["name"]].data_ptr() == tensors[alias["target"]].data_ptr()
    succeed("ckpt-inspect", "verify", moved)


def test_a_module_loads_what_went_through_every_format(tmp_path):
    """Shows A4, E2. The state dict has been native, DCP and safetensors; `load_state_dict` loads it strictly."""
    torch.manual_seed(0)
    model, other = (torch.nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    here = tmp_path / "model.pt"
    for target in ("native", "dcp", "safetensors", "torch"):
        here = reshard(here, tmp_path / target, "--to", target)
    other.load_state_dict(torch.load(here, weights_only=True), strict=True)
    for key, tensor in model.state_dict().items():
        assert digest(other.state_dict()[key]) == digest(tensor)


def train_step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("way", [["native", "torch"], ["safetensors", "torch"], ["torch"]], ids="-".join)
def test_an_optimizer_goes_on_from_its_state_under_numbers(way, tmp_path):
    """Shows E2, C8. The keys of `state` are numbers again after the moves, and the next step is the same."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    optimizer = torch.optim.Adam(model.parameters())
    train_step(model, optimizer)
    here = tmp_path / "0.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "k": {(1, "a"): {None: 2.5}, "0": True}}, here)
    for step, target in enumerate(way):
        here = reshard(here, tmp_path / f"{step + 1}-{target}", "--to", target)
    saved = torch.load(here, weights_only=True)
    assert list(saved["optimizer"]["state"]) == [0, 1, 2, 3]
    assert saved["k"] == {(1, "a"): {None: 2.5}, "0": True}
    other = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    other_optimizer = torch.optim.Adam(other.parameters())
    other.load_state_dict(saved["model"])
    other_optimizer.load_state_dict(saved["optimizer"])
    train_step(model, optimizer)
    train_step(other, other_optimizer)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))


def test_split_and_rename_keep_the_nesting(tmp_path):
    """Shows A2. Entries below a renamed key, or in a part that is split off, keep their nested dicts."""
    torch.save({"a": {0: {"w": torch.ones(1)}, "n": [{"x": 1}]}, "b": 2}, tmp_path / "0.pt")
    reshard(tmp_path / "0.pt", tmp_path / "renamed.pt", "--rename", "a=c")
    assert torch.load(tmp_path / "renamed.pt") == {"c": {0: {"w": torch.ones(1)}, "n": [{"x": 1}]}, "b": 2}
    succeed("ckpt-reshard", "split", "--prefix", "a", tmp_path / "0.pt", tmp_path / "split.pt")
    assert torch.load(tmp_path / "split.pt") == {0: {"w": torch.ones(1)}, "n": [{"x": 1}]}


def test_nesting_survives_a_move(tmp_path):
    """Shows E2. Nested lists and dicts are nested again after a move, also through the other formats."""
    source = FIXTURES / "dcp" / "valid" / "nested"
    native = reshard(source, tmp_path / "native", "--to", "native", "--world-size", 2)
    moved = reshard(native, tmp_path / "dcp", "--to", "dcp", "--world-size", 2)
    original, back = {}, {}
    _load_state_dict(original, storage_reader=dcp.FileSystemReader(source), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    _load_state_dict(back, storage_reader=dcp.FileSystemReader(moved), planner=_EmptyStateDictLoadPlanner(), no_dist=True)

    def plain(state):
        if isinstance(state, dict):
            return {key: plain(value) for key, value in state.items()}
        if isinstance(state, list):
            return [plain(value) for value in state]
        return ("tensor", digest(state)) if torch.is_tensor(state) else state

    assert plain(back) == plain(original)
    assert plain(torch.load(reshard(moved, tmp_path / "moved.pt"), weights_only=True)) == plain(original)


# Left out: state per column shard, which whole tensors cannot hold without loss; dtypes that have no name in safetensors.
NOT_FOR_SAFETENSORS = {"dcp/valid/torchrec", "native/v1/plain", "native/v2/packed"}


@parametrize([(i, p) for i, p in SAFETENSORS_SOURCES if i not in NOT_FOR_SAFETENSORS])
@pytest.mark.parametrize("limit", [None, "1KiB"], ids=["single", "sharded"])
def test_safetensors_reads_ours(source, limit, tmp_path):
    """Shows A2, A4, E2, E9. Single and sharded files have equal bytes; tied names are in the metadata, values in the
    JSON file beside."""
    expected = tensors_by_name(expectation(source))
    name = "moved" if limit else "moved.safetensors"
    options = ["--max-shard-size", limit] if limit else []
    moved = reshard(source, tmp_path / name, "--to", "safetensors", *options)
    files, index = [moved], None
    if moved.is_dir():
        files = sorted(moved.glob("*.safetensors"))
        if len(files) > 1:  # a single file needs no index
            index = json.loads((moved / "model.safetensors.index.json").read_text())
            assert {file.name for file in files} == set(index["weight_map"].values())
    found, aliases = {}, {}
    for file in files:
        with safe_open(file, "pt") as handle:
            for key in handle.keys():
                assert index is None or index["weight_map"][key] == file.name
                found[key] = digest(handle.get_tensor(key))
            aliases |= json.loads((handle.metadata() or {}).get("tessera.aliases", "{}"))
    for second, first in aliases.items():
        found[second] = found[first]
    assert found == expected


def test_fsdp2_loads_what_was_moved_to_another_world_size(tmp_path):
    """Shows A4, C8, E2. FSDP2 and AdamW at 2 ranks load, with set_state_dict, what 4 ranks had saved."""
    source = FIXTURES / "dcp" / "valid" / "fsdp2_adamw"
    moved = reshard(source, tmp_path / "moved", "--to", "dcp", "--world-size", 2)
    ranks.run(2, load_into_fsdp2.load, moved, tmp_path / "loaded")
    assert tensors_by_name(expectation(tmp_path / "loaded")) == tensors_by_name(expectation(source))
