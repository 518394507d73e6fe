"""The Python package against what the peers wrote, what the trainer held, and what the tools do."""

import argparse
import ast
import copy
import hashlib
import itertools
import json
import os
import pickle
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ckpt_tools import BIN, FIXTURES, MAKE, ROOT, expectation, files_of, reshard, run, succeed, valid_fixtures
from python_package import tessera

sys.path.insert(0, str(MAKE))
from expect import flatten, raw_bytes, tensor_row, value_json  # noqa: E402

PACKAGE = ROOT / "tools" / "python"
ADAMW = FIXTURES / "dcp" / "valid" / "fsdp2_adamw"
TORCHREC = FIXTURES / "dcp" / "valid" / "torchrec"
FP8_BLOCKS = FIXTURES / "safetensors" / "valid" / "fp8_blocks"
LARGE_NUMBERS = FIXTURES / "safetensors" / "valid" / "large_numbers.safetensors"
FORMATS = ("native", "safetensors", "dcp", "torch")
IN_FLOAT32 = [getattr(torch, name) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
                                               "float8_e5m2fnuz", "float8_e8m0fnu") if hasattr(torch, name)]
SEED = int(os.environ.get("TESSERA_TEST_SEED", "7"))


def bits(tensor):
    return tuple(tensor.shape), tensor.dtype, raw_bytes(tensor)


def as_trained(value):
    """Returns the value with torch's constants instead of their names."""
    if isinstance(value, tessera.Symbol):
        return value.torch()
    if isinstance(value, dict):
        return {as_trained(key): as_trained(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value)(as_trained(item) for item in value)
    return value


# --- what is in a checkpoint -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [p for _, p in valid_fixtures()], ids=[i for i, _ in valid_fixtures()])
def test_a_fixture_holds_what_the_trainer_held(path):
    expected = expectation(path)
    with tessera.open(path) as checkpoint:
        assert checkpoint.format == expected["format"]
        rows = {row["name"]: row for row in expected["tensors"]}
        rows |= {alias["name"]: rows[alias["target"]] | {"name": alias["name"]} for alias in expected.get("aliases", [])}
        tensors = {name: found for name, found in checkpoint.items() if isinstance(found, tessera.Tensor)}
        assert tensors.keys() == rows.keys()
        # torch 2.4 lacks some dtypes.
        assert all(tensor_row(name, found.torch()) == rows[name] for name, found in tensors.items() if hasattr(torch, found.dtype))
        for name, found in tensors.items():
            assert (found.dtype, list(found.shape)) == (rows[name]["dtype"], rows[name]["shape"])
            assert hashlib.sha256(found.tobytes()).hexdigest() == rows[name]["sha256"]
            if hasattr(np, found.dtype):
                assert found.numpy().tobytes() == found.tobytes() and found.numpy().shape == found.shape
        if "values" in expected:
            values = {name: value_json(as_trained(checkpoint[name])) for name in checkpoint if name not in tensors}
            assert json.dumps(values, sort_keys=True) == json.dumps(expected["values"], sort_keys=True)


def test_flat_layout_gives_the_parameters_back():
    source = FIXTURES / "dcp" / "valid" / "fsdp1_flat"
    checkpoint = tessera.open(source, flat_layout=f"{source}.flat-layout.json")
    expected = {row["name"]: row for row in expectation(f"{source}.unflattened")["tensors"]}
    assert {name: tensor_row(name, checkpoint[name].torch()) for name in expected} == expected


def test_it_is_a_mapping():
    checkpoint = tessera.open(ADAMW)
    names = list(checkpoint)
    assert names == sorted(names) == list(checkpoint.keys()) and len(checkpoint) == len(names)
    assert "model.emb.weight" in checkpoint and "model.emb" not in checkpoint and 7 not in checkpoint
    assert checkpoint.get("model.emb") is None
    assert checkpoint["trainer.step"] == 2
    assert checkpoint == checkpoint and checkpoint != tessera.open(ADAMW) and len({checkpoint}) == 1
    assert repr(checkpoint) == f"<tessera.Checkpoint '{ADAMW}': 34 tensors, 25 values; dcp>"
    with pytest.raises(KeyError) as caught:
        checkpoint["model.emb.wieght"]
    assert isinstance(caught.value, tessera.Error)
    assert str(caught.value) == (f"{ADAMW}: 'model.emb.wieght': no tensor and no value has this name (did you mean "
                                 "'model.emb.weight'?)")
    assert (caught.value.kind, caught.value.tensor) == ("not_found", "model.emb.wieght")
    restored = pickle.loads(pickle.dumps(caught.value))
    assert (str(restored), vars(restored)) == (str(caught.value), vars(caught.value))
    with pytest.raises(KeyError, match="expected a name, found 3"):
        checkpoint[3]


def test_tied_weights_are_one_tensor_under_two_names():
    checkpoint = tessera.open(FIXTURES / "torch_zip" / "valid" / "shared.pt")
    assert checkpoint.aliases
    for name, target in checkpoint.aliases.items():
        assert checkpoint[name].name == name and bits(checkpoint[name].torch()) == bits(checkpoint[target].torch())


def test_a_value_that_is_never_read_does_not_keep_the_others(tmp_path):
    state = {"a": 1, "args": argparse.Namespace(lr=0.1), "w": torch.ones(2), "z": {"deep": [3]}}
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    checkpoint = tessera.open(tmp_path / "dcp")
    found = dict(checkpoint.items())
    assert list(found) == list(checkpoint) == ["a", "args", "w", "z.deep"] and len(checkpoint.values()) == 4
    refused = found["args"]
    assert isinstance(refused, tessera.Refused) and isinstance(refused, tessera.Error)
    assert (refused.kind, refused.tensor) == ("unsupported", "args") and "argparse.Namespace" in str(refused)
    assert (found["a"], found["z.deep"]) == (1, [3]) and bits(found["w"].torch()) == bits(state["w"])
    assert [type(entry) for entry in checkpoint.values()] == [type(entry) for entry in found.values()]
    assert [3] in checkpoint.values() and 4 not in checkpoint.values()
    with pytest.raises(tessera.Refused) as caught:
        checkpoint["args"]
    assert str(caught.value) == str(refused) and str(pickle.loads(pickle.dumps(refused))) == str(refused)


MEGATRON = FIXTURES / "torch_zip" / "classes" / "megatron.pt"


def test_objects_of_named_classes_are_dicts():
    checkpoint = tessera.open(MEGATRON, as_dict="argparse.Namespace")
    assert checkpoint.opened_classes == {"argparse.Namespace": 2} and tessera.open(MEGATRON).opened_classes == {}
    assert checkpoint["args.lr"] == 3e-4 and checkpoint["args.scale"].torch().item() == 2.0
    assert isinstance(dict(tessera.open(MEGATRON).items())["args"], tessera.Refused)
    found = tessera.verify(MEGATRON, notes=True, as_dict=["argparse.Namespace"])
    assert {problem.severity for problem in found} == {"note"} and "class" in {problem.rule for problem in found}
    for call in (lambda: tessera.open(MEGATRON, as_dict="a.B"), lambda: tessera.verify(MEGATRON, as_dict=("a.B",))):
        with pytest.raises(tessera.Error, match="as_dict: .*'a.B'") as caught:
            call()
        assert caught.value.kind == "invalid_argument"


@pytest.mark.parametrize("path", [Path("s3://bucket/run"), "S3://bucket/run", "gs://bucket/run", "s3a://bucket/run", "file:///tmp"], ids=str)
def test_a_path_that_begins_like_a_url_is_refused(monkeypatch, tmp_path, path):
    """As a local path it would name a folder such as "s3:", and a job would find no checkpoint to resume from."""
    monkeypatch.chdir(tmp_path)
    for call in (tessera.latest_valid, tessera.open, tessera.verify, lambda path: tessera.save({"step": 1}, path),
                 lambda path: tessera.reshard(MEGATRON, path), lambda path: tessera.reshard(path, "moved")):
        with pytest.raises(tessera.Error, match="path: expected a local path, or a URL that begins with s3://") as caught:
            call(path)
        assert caught.value.kind == "invalid_argument"
    assert os.listdir(tmp_path) == []
    assert tessera.latest_valid("./s3:/bucket/run").path is None
    tessera.save({"step": 1}, "run:1")
    assert tessera.open("run:1")["step"] == 1


def test_one_part_of_a_checkpoint_says_so_and_is_moved_only_as_it_is(tmp_path):
    file = FIXTURES / "torch_zip" / "parts" / "model_world_size_2_rank_1.pt"
    part = "one rank of 2: FSDP or tensor parallelism, the local parts of 1 tensor"
    assert tessera.open(file).part == part and tessera.open(MEGATRON).part is None
    with pytest.raises(tessera.Error, match=r"expected a whole checkpoint, found one rank of 2: .*\(as_is=True moves"):
        tessera.reshard(file, tmp_path / "moved")
    moved = tessera.reshard(file, tmp_path / "moved", as_is=True)
    assert [(note.rule, note.found) for note in moved.notes] == [("part", part)]
    assert tessera.open(tmp_path / "moved").part is None


def test_values_of_dcp_are_dicts_too(tmp_path):
    dcp.save({"args": argparse.Namespace(lr=0.1), "w": torch.ones(2)}, checkpoint_id=tmp_path / "dcp")
    checkpoint = tessera.open(tmp_path / "dcp", as_dict="argparse.Namespace")
    assert checkpoint["args"] == {"lr": 0.1} and checkpoint.opened_classes == {"argparse.Namespace": 1}


@pytest.mark.parametrize("verb", ["reshard", "split", "merge"])
def test_a_move_reads_objects_of_named_classes_as_the_tool_does(verb, tmp_path):
    options = {"as_dict": "argparse.Namespace", "to": "torch", "only": ["args", "!args.model_type"]}
    command = ["--as-dict", "argparse.Namespace", "--to", "torch", "--only", "args", "--only", "!args.model_type"]
    torch.save({"w": torch.ones(1)}, tmp_path / "other.pt")
    if verb == "merge":
        source, paths = [MEGATRON, tmp_path / "other.pt"], ["merge", MEGATRON, tmp_path / "other.pt"]
    else:
        source, paths = MEGATRON, [MEGATRON] if verb == "reshard" else ["split", MEGATRON]
    moved = moved_alike(tmp_path, lambda folder: getattr(tessera, verb)(source, folder / "moved", **options), *paths, "moved", *command)
    assert torch.load(moved / "moved", weights_only=True)["args"]["nested"] == {"depth": 2}


def test_a_damaged_value_does_not_end_an_iterator(tmp_path):
    dcp.save({"a": "first" * 30, "b": "second" * 30}, checkpoint_id=tmp_path / "dcp")
    [data] = (tmp_path / "dcp").glob("*.distcp")
    data.write_bytes(data.read_bytes().replace(b"first", b"fir\xffst"[:5]))
    items = iter(tessera.open(tmp_path / "dcp").items())
    with pytest.raises(tessera.Error) as caught:
        next(items)
    assert caught.value.kind == "corruption" and next(items) == ("b", "second" * 30)


def test_values_keep_what_python_distinguishes(tmp_path):
    values = {"none": None, "true": True, "one": 1, "float": 1.0, "big": -(10**30), "text": "ü", "bytes": b"\0\xff",
              "tuple": (1, [2, (3,)]), "set": {1, 2}, "frozen": {(1, frozenset({2}))}, "complex": 1.5 - 2j,
              "keys": {1: "a", (2, 3): "b"}, "inf": float("inf"), "dtype": torch.bfloat16, "device": torch.device("cpu")}
    torch.save({"values": [torch.ones(1), values], "alone": 3}, tmp_path / "values.pt")
    checkpoint = tessera.open(tmp_path / "values.pt")
    found = {name.removeprefix("values.1."): checkpoint[name] for name in checkpoint if name.startswith("values.1.")}
    flat = {"keys.1": "a", "keys.(2, 3)": "b"}
    for name, value in values.items():
        if name in found:
            assert as_trained(found[name]) == value and type(as_trained(found[name])) is type(value), name
        else:
            flat_names = [key for key in found if key.startswith(f"{name}.")]
            assert flat_names and set(flat_names) <= set(flat), (name, sorted(found))
    assert repr(found["dtype"]) == "Symbol('torch.bfloat16')"
    with pytest.raises(ValueError, match="torch.load: expected the name of a dtype"):
        tessera.Symbol("torch.load").torch()


def test_complex_numbers_keep_their_bits(tmp_path):
    nans = [struct.unpack("<d", struct.pack("<Q", bits))[0] for bits in (0x7FF8000000001234, 0xFFF8000000000000)]
    given = [complex(nans[0], -0.0), complex(float("-inf"), nans[1]), complex(-0.0, 1e-320)]
    tessera.save({"z": given, "w": torch.ones(1)}, tmp_path / "saved")
    found = tessera.open(tmp_path / "saved")["z"]
    assert [struct.pack("<dd", z.real, z.imag) for z in found] == [struct.pack("<dd", z.real, z.imag) for z in given]


@pytest.mark.parametrize("use", [pickle.dumps, copy.deepcopy])
def test_an_open_checkpoint_says_why_it_cannot_be_pickled(use, tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "w.safetensors")
    with tessera.open(tmp_path / "w.safetensors") as checkpoint:
        for part in (checkpoint, checkpoint["w"]):
            with pytest.raises(TypeError, match="an open checkpoint cannot be pickled or copied \\(open it in each process\\)$"):
                use(part)


# --- tensors and their slices --------------------------------------------------------------------------------------


def generated():
    torch.manual_seed(SEED)
    state = {
        "rows": torch.randn(37, 11),
        "cube": torch.randint(-100, 100, (5, 6, 7), dtype=torch.int16),
        "half": torch.randn(23, 5).to(torch.bfloat16),
        "byte": torch.randn(16, 9).to(torch.float8_e4m3fn),
        "flags": torch.rand(41) < 0.5,
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "none": torch.empty(0, 4),
    }
    return state


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    """Returns {writer: (path, {name: tensor as the writer's own library reads it})}."""
    here = tmp_path_factory.mktemp("states")
    state = generated()
    torch.save(state, here / "state.pt")
    save_file(state, here / "state.safetensors")
    dcp.save(state, checkpoint_id=here / "dcp")
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(loaded, checkpoint_id=here / "dcp")
    with safe_open(here / "state.safetensors", "pt") as file:
        in_safetensors = {name: file.get_tensor(name) for name in file.keys()}
    reshard(here / "dcp", here / "native", "--to", "native", "--world-size", 3, "--strategy", "dim0")
    reshard(here / "dcp", here / "compressed", "--to", "native", "--world-size", 2, "--compress", "zstd")
    return {
        "torch": (here / "state.pt", torch.load(here / "state.pt", weights_only=True)),
        "safetensors": (here / "state.safetensors", in_safetensors),
        "dcp": (here / "dcp", loaded),
        "native": (here / "native", state),
        "compressed": (here / "compressed", state),
    }


@pytest.mark.parametrize("writer", ["torch", "safetensors", "dcp", "native", "compressed"])
def test_any_slice_is_what_torch_takes_out_of_the_whole(states, writer):
    path, state = states[writer]
    checkpoint = tessera.open(path)
    assert list(checkpoint) == sorted(state)
    choose = random.Random(SEED)

    def slice_of(size):
        if size and choose.random() < 0.3:
            return choose.randrange(-size, size)
        return slice(*choose.choices([None, *range(-size - 2, size + 3)], k=2), choose.choice([None, 1]))

    for name, tensor in state.items():
        assert bits(checkpoint[name].torch()) == bits(tensor)
        for _ in range(60):
            index = tuple(slice_of(size) for size in tensor.shape[:choose.randrange(tensor.ndim + 1)])
            if choose.random() < 0.3:
                index = (*index, ...)
            found = checkpoint[name][index]
            assert bits(found.torch()) == bits(tensor[index]), (SEED, name, index)
            assert found.shape == tuple(tensor[index].shape) and found.numel == tensor[index].numel()
        if tensor.ndim:
            assert [bits(row.torch()) for row in checkpoint[name]] == [bits(row) for row in tensor]
    assert bits(checkpoint["cube"][1:4, ..., 2:][1:, 3][0, -1:].torch()) == bits(state["cube"][2:4, 3, 2:][0, -1:])


def test_pieces_of_columns_are_put_together(tmp_path):
    """The tensor is sharded along both dimensions, so a slice reads from many files."""
    source = FIXTURES / "dcp" / "valid" / "fsdp2_tp"
    checkpoint = tessera.open(source)
    names = [name for name, found in checkpoint.items() if isinstance(found, tessera.Tensor) and found.ndim == 2]
    for name in names:
        whole = checkpoint[name].torch()
        rows, columns = whole.shape
        for top, left in itertools.product(range(rows), range(columns)):
            assert bits(checkpoint[name][top:, left:left + 3].torch()) == bits(whole[top:, left:left + 3])


def test_slices_that_are_no_plain_range_are_refused():
    tensor = tessera.open(ADAMW)["model.emb.weight"]  # [13, 7]
    refused = {
        "step 2": (IndexError, slice(None, None, 2)), "step -1": (IndexError, slice(None, None, -1)),
        "at most 2": (IndexError, (0, 0, 0)), "-13 to 12": (IndexError, 13), "-7 to 6": (IndexError, (0, -8)),
        "one `...`": (IndexError, (..., ...)), "found list": (TypeError, [0, 1]), "found float": (TypeError, 1.0),
        "found bool": (TypeError, True), "found Tensor (read first": (TypeError, torch.tensor(True)),
        "found ndarray": (TypeError, np.array([1])), "found NoneType": (TypeError, None),
        "found Tensor": (TypeError, torch.ones(13, dtype=torch.bool)), "found str": (TypeError, "rows"),
    }
    for words, (kind, index) in refused.items():
        with pytest.raises(kind, match=f"^model.emb.weight: index: .*{re.escape(words)}"):
            tensor[index]
    assert tensor[np.int64(3)].shape == (7,) and tensor[torch.tensor(3)].shape == (7,)
    assert repr(tensor[3, 2:5]) == "<tessera.Tensor 'model.emb.weight': float32 [3], [3, 2:5] of [13, 7]>"
    assert repr(tensor) == "<tessera.Tensor 'model.emb.weight': float32 [13, 7]>"
    with pytest.raises(TypeError, match="no length"):
        len(tensor[0, 0])
    with pytest.raises(TypeError, match="neither true nor false"):
        bool(tensor)
    with pytest.raises(TypeError, match="cannot be created directly"):
        tessera.Tensor()


def test_numpy_gets_what_it_has_a_dtype_for(states):
    path, state = states["native"]
    checkpoint = tessera.open(path)
    rows = checkpoint["rows"]
    assert np.array_equal(np.asarray(rows), state["rows"].numpy()) and np.asarray(rows).dtype == np.float32
    assert np.array_equal(np.asarray(rows[3:5], dtype=np.float64), state["rows"][3:5].double().numpy())
    assert np.array_equal(np.from_dlpack(rows[:2]), state["rows"][:2].numpy())
    assert bits(torch.from_dlpack(rows[:2])) == bits(state["rows"][:2])
    assert bits(torch.from_dlpack(checkpoint["half"])) == bits(state["half"])
    with pytest.raises(ValueError, match="rows: reading a tensor makes a copy"):
        np.asarray(rows, copy=False)
    with pytest.raises(TypeError, match=r"^half: NumPy has no bfloat16 \(use \.torch\(\), which keeps it, \.numpy\('float32'\), which has"):
        np.asarray(checkpoint["half"])
    assert np.array_equal(np.asarray(checkpoint["half"], dtype="float32"), state["half"].float().numpy())
    assert checkpoint["scalar"].item() == 2.5 and checkpoint["half"][2, 1].item() == state["half"][2, 1].item()
    with pytest.raises(ValueError, match=r"rows: expected one element, found 407 in the shape \[37, 11\]"):
        rows.item()


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # signalling NaNs, to float64
@pytest.mark.parametrize("dtype", IN_FLOAT32, ids=str)
def test_small_floats_are_the_same_numbers_in_float32(dtype, tmp_path):
    every = torch.arange(256 ** dtype.itemsize).to(torch.uint16 if dtype.itemsize == 2 else torch.uint8).view(dtype)
    torch.save({"w": every}, tmp_path / "w.pt")
    tensor = tessera.open(tmp_path / "w.pt")["w"]
    assert bits(tensor.torch()) == bits(every)
    assert np.array_equal(tensor.numpy("float32"), every.float().numpy(), equal_nan=True)
    assert np.array_equal(tensor.numpy("float64"), every.double().numpy(), equal_nan=True)


def test_dtypes_that_numpy_could_not_hold_are_torchs_alone(tmp_path):
    torch.save({"w": torch.zeros(3, dtype=torch.complex32)}, tmp_path / "w.pt")
    with pytest.raises(TypeError, match=r"^w: NumPy has no complex32 \(use \.torch\(\), which keeps it, or \.tobytes\(\), which gives the bytes\)"):
        tessera.open(tmp_path / "w.pt")["w"].numpy("complex64")


def test_dtypes_that_this_torch_lacks_are_told(states, monkeypatch):
    monkeypatch.delattr(torch, "float8_e4m3fn")
    with pytest.raises(TypeError, match=r"^byte: torch 2\S+ has no float8_e4m3fn \(\.tobytes\(\) gives the bytes\)"):
        tessera.open(states["native"][0])["byte"].torch()


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Makes a tensor of 64 MiB in 16384 rows, on four ranks, plain and compressed."""
    here = tmp_path_factory.mktemp("large")
    torch.manual_seed(SEED)
    save_file({"table": torch.randn(16384, 1024)}, here / "state.safetensors")
    reshard(here / "state.safetensors", here / "plain", "--world-size", 4)
    reshard(here / "state.safetensors", here / "compressed", "--world-size", 4, "--compress", "zstd")
    return here


@pytest.mark.parametrize("name, most_nbytes", [("state.safetensors", 1 << 20), ("plain", 1 << 20), ("compressed", 4 << 20)])
def test_rows_of_a_large_tensor_read_and_hold_little(large, name, most_nbytes):
    program = f"""
        import resource, sys
        sys.path.insert(0, {str(Path(tessera.__file__).parents[1])!r})
        import numpy, tessera

        def bytes_read():
            return int(next(line.split()[1] for line in open("/proc/self/io") if line.startswith("rchar")))

        tensor = tessera.open({str(large / name)!r})["table"]
        tensor[0].numpy()  # what is set up once
        before = bytes_read(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for first in (0, 5000, 16374):
            assert tensor[first:first + 10].numpy().shape == (10, 1024)
        print(bytes_read() - before[0], (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before[1]) << 10)
    """
    out = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    num_read, num_held = map(int, out.stdout.split())
    assert 3 * 40960 <= num_read < most_nbytes
    assert num_held < 16 << 20


def test_a_large_tensor_is_read_whole_by_several_threads(large):
    with safe_open(large / "state.safetensors", "pt") as file:
        expected = file.get_tensor("table")
    for name in ("plain", "compressed"):
        table = tessera.open(large / name)["table"]
        assert torch.equal(table.torch(), expected)
        assert torch.equal(table[:, 100:103].torch(), expected[:, 100:103])
        assert torch.equal(table[100:16200, 5:].torch(), expected[100:16200, 5:])


def test_threads_share_a_checkpoint(states):
    path, state = states["compressed"]
    checkpoint = tessera.open(path)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: checkpoint["rows"][i % 37].torch(), range(400)))
    assert all(torch.equal(row, state["rows"][i % 37]) for i, row in enumerate(found))


def test_closed_checkpoints_say_so(states):
    with tessera.open(states["native"][0]) as checkpoint:
        rows = checkpoint["rows"]
        rows[0].numpy()
    for use in (rows.numpy, rows[1].torch, lambda: checkpoint["rows"], checkpoint.__enter__):
        with pytest.raises(ValueError, match="native: the checkpoint is closed"):
            use()
    assert rows.shape == (37, 11) and len(checkpoint) == 7 and "closed" in repr(checkpoint)


# --- errors and checks ---------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(states, tmp_path):
    """Makes a native checkpoint with one flipped bit in `rows`."""
    moved = reshard(states["dcp"][0], tmp_path / "damaged", "--only", "rows")
    data = moved / "rank-00000.h5"
    content = bytearray(data.read_bytes())
    content[content.find(raw_bytes(states["dcp"][1]["rows"]))] ^= 1
    data.write_bytes(content)
    return moved


def test_errors_say_what_the_tools_say(damaged, tmp_path):
    with pytest.raises(tessera.Error) as caught:
        tessera.open(damaged)["rows"][0].torch()
    error = caught.value
    assert error.kind == "corruption" and error.tensor == "rows" and error.path == str(damaged / "rank-00000.h5")
    assert error.byte_range[0] < error.byte_range[1] and error.problems == ()
    assert str(error).startswith(f"{damaged}/rank-00000.h5: rows: bytes [{error.byte_range[0]}, {error.byte_range[1]}): ")
    with pytest.raises(tessera.Error, match="expected a checkpoint, found nothing") as caught:
        tessera.open(tmp_path / "nothing")
    assert (caught.value.kind, caught.value.path, caught.value.tensor) == ("not_found", str(tmp_path / "nothing"), None)
    for path in FIXTURES.glob("*/invalid/*"):
        if path.suffix in (".pt", ".safetensors"):
            process = run("ckpt-inspect", "ls", path)
            if process.returncode == 3:
                with pytest.raises(tessera.Error) as caught:
                    tessera.open(path)
                assert process.stderr.strip() == f"ckpt-inspect: {caught.value}"
    for path in ("", b"a\0b"):
        with pytest.raises(ValueError, match="^path: "):
            tessera.open(path)


@pytest.mark.parametrize("call, words", [
    (lambda to: tessera.open(3), "path: expected a path .str, bytes or os.PathLike., found int"),
    (lambda to: tessera.open(None), "path: expected a path .* found NoneType"),
    (lambda to: tessera.open(ADAMW, flat_layout=3), "flat_layout: expected a path .* found int"),
    (lambda to: tessera.verify(ADAMW, values=1), "values: expected a bool, found int"),
    (lambda to: tessera.verify(ADAMW, notes="yes"), "notes: expected a bool, found str"),
    (lambda to: tessera.verify(ADAMW, threads="2"), "threads: expected an int, found str"),
    (lambda to: tessera.verify(ADAMW, memory=None), "memory: expected an int, or a size as a str, found NoneType"),
    (lambda to: tessera.verify(ADAMW, progress=3), "progress: expected a function, or True for a bar, found int"),
    (lambda to: tessera.reshard(3, to), "source: expected a path .* found int"),
    (lambda to: tessera.reshard(ADAMW, 3), "destination: expected a path .* found int"),
    (lambda to: tessera.reshard(ADAMW, to, to=3), "to: expected a str, found int"),
    (lambda to: tessera.reshard(ADAMW, to, ranks=2.0), "ranks: expected an int, found float"),
    (lambda to: tessera.reshard(ADAMW, to, ranks=True), "ranks: expected an int, found bool"),
    (lambda to: tessera.reshard(ADAMW, to, strategy=2), "strategy: expected a str, found int"),
    (lambda to: tessera.reshard(ADAMW, to, compress=None), "compress: expected a str, found NoneType"),
    (lambda to: tessera.reshard(ADAMW, to, only=3), "only: expected a str or several, found int"),
    (lambda to: tessera.reshard(ADAMW, to, only=["model", 3]), "only: expected a str, found int"),
    (lambda to: tessera.reshard(ADAMW, to, rename=["a"]), "rename: expected a mapping of FROM to TO, found list"),
    (lambda to: tessera.reshard(ADAMW, to, rename={"a": None}), "rename: expected a str, found NoneType"),
    (lambda to: tessera.reshard(ADAMW, to, overwrite=1), "overwrite: expected a bool, found int"),
    (lambda to: tessera.reshard(ADAMW, to, plan={}), "plan: expected a path .* found dict"),
    (lambda to: tessera.split(ADAMW, to, prefix=3), "prefix: expected a str or several, found int"),
])
def test_an_argument_of_the_wrong_type_is_named(call, words, tmp_path):
    with pytest.raises(TypeError, match=f"^{words}"):
        call(tmp_path / "moved")
    assert list(tmp_path.iterdir()) == []


def test_numbers_of_other_libraries_are_numbers(tmp_path):
    assert tessera.reshard(ADAMW, tmp_path / "moved", ranks=np.int64(2), threads=np.uint8(1)).world_size == 2
    with pytest.raises(ValueError, match="ranks: expected a number up to 2147483647, found 2147483648"):
        tessera.reshard(ADAMW, tmp_path / "more", ranks=1 << 31)


def test_paths_need_not_be_text(states, tmp_path):
    path = os.fsencode(tmp_path) + b"/not-utf-8-\xff"
    tessera.reshard(states["dcp"][0], path, ranks=2)
    assert tessera.open(path).path == os.fsdecode(path)
    assert torch.equal(tessera.open(os.fsdecode(path))["rows"].torch(), states["dcp"][1]["rows"])
    with pytest.raises(tessera.Error) as caught:
        tessera.open(path + b"-nothing")
    assert os.fsencode(caught.value.path) == path + b"-nothing"


def test_verify_returns_all_that_is_wrong(damaged):
    told = []
    assert tessera.verify(ADAMW, progress=lambda *progress: told.append(progress)) == []
    assert told and told[-1][0] == told[-1][1] > 0
    [problem] = tessera.verify(damaged)
    found = json.loads(run("ckpt-inspect", "verify", damaged, "--json").stdout)["findings"]
    assert [problem._asdict() | {"byte_range": list(problem.byte_range)}] == [
        {"severity": "error", "rule": f["rule"], "path": f["file"], "tensor": f["name"], "byte_range": f["byte_range"],
         "expected": f["expected"], "found": f["found"], "text": str(problem)} for f in found]
    assert run("ckpt-inspect", "verify", damaged).stdout.splitlines()[0] == f"error: {problem}"
    with pytest.raises(tessera.Error, match="found nothing"):
        tessera.verify(damaged / "nothing")


def test_scan_finds_what_the_tool_finds():
    folder = FIXTURES / "pickle_scan"
    for path in (folder / "zip", folder / "harmless", folder / "extension.pkl", folder / "cut_short.pkl"):
        scanned = tessera.scan(path)
        found = json.loads(run("ckpt-inspect", "scan", path, "--json").stdout)
        assert scanned.clean == found["clean"] == (path.name == "harmless")
        assert (scanned.files, scanned.pickles) == (found["files"], found["pickles"])
        assert [(name.verdict, name.called, name.times) for name in scanned.names] == [
            (name["verdict"], name["called"], name["times"]) for name in found["names"]]
        assert [(place.path, place.member or "", place.offset) for name in scanned.names for place in name.places] == [
            (place["file"], place["member"], place["offset"]) for name in found["names"] for place in name["places"]]
        assert [(problem.kind, problem.path, problem.expected) for problem in scanned.problems] == [
            (problem["kind"], problem["file"], problem["expected"]) for problem in found["problems"]]
    with pytest.raises(tessera.Error, match="nothing"):
        tessera.scan(folder / "nothing")


def test_verify_refuses_a_checkpoint_that_is_replaced_meanwhile(tmp_path):
    numel = 1 << 27  # a sparse file of zeros: long enough for a call of `progress`
    header = json.dumps({"w": {"dtype": "F32", "shape": [numel], "data_offsets": [0, 4 * numel]}}).encode()
    for name in ("step-1.safetensors", "step-2.safetensors"):
        with open(tmp_path / name, "wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            file.truncate(file.tell() + 4 * numel)
        os.utime(tmp_path / name, (1e9, 1e9))

    def replace(*progress):
        if (tmp_path / "step-2.safetensors").exists():
            os.rename(tmp_path / "step-2.safetensors", tmp_path / "step-1.safetensors")

    with pytest.raises(tessera.Error, match="found another file of the same size and time") as caught:
        tessera.verify(tmp_path / "step-1.safetensors", values=True, threads=1, progress=replace)
    assert caught.value.kind == "mismatch"


def test_verify_looks_at_numbers_and_notes_when_asked(tmp_path):
    save_file({"w": torch.tensor([1.0, float("nan")])}, tmp_path / "w.safetensors")
    path = tmp_path / "w.safetensors"
    assert tessera.verify(path) == []
    assert [problem.rule for problem in tessera.verify(path, values=True)] == ["finite"]
    assert all(problem.severity == "note" for problem in tessera.verify(path, notes=True))


# --- moves ---------------------------------------------------------------------------------------------------------


def moved_alike(tmp_path, move, *command):
    """Asserts that a move of the package writes the same files as the tool. Returns their path."""
    (tmp_path / "ours").mkdir()
    (tmp_path / "theirs").mkdir()
    summary = json.loads(succeed("ckpt-reshard", *command, "--json", cwd=tmp_path / "theirs"))
    moved = move(tmp_path / "ours")
    assert files_of(tmp_path / "ours") == files_of(tmp_path / "theirs")
    shared = ("source_format", "format", "world_size", "num_tensors", "num_values", "num_aliases", "nbytes", "written")
    assert {name: getattr(moved, name) for name in shared} == {name: summary[name] for name in shared}
    assert moved.plan == summary["plan"] and [share._asdict() for share in moved.ranks] == summary["ranks"]
    return tmp_path / "ours"


@pytest.mark.parametrize("keywords, options", [
    ({}, []),
    ({"ranks": 3}, ["--world-size", 3]),
    ({"world_size": 4, "strategy": "hybrid:2x2", "to": "dcp"}, ["--world-size", 4, "--strategy", "hybrid:2x2", "--to", "dcp"]),
    ({"to": "safetensors", "max_shard_size": 1000}, ["--to", "safetensors", "--max-shard-size", "1000"]),
    ({"to": "safetensors", "max_shard_size": "1KiB"}, ["--to", "safetensors", "--max-shard-size", "1KiB"]),
    ({"to": "rank_files", "ranks": 2, "device_mesh": "cpu"}, ["--to", "rank_files", "--world-size", 2, "--device-mesh", "cpu"]),
    ({"only": "model", "rename": {"": "net."}}, ["--only", "model", "--rename", "=net."]),
    ({"to": "torch"}, ["--to", "torch"]),
    ({"drop_optimizer": True, "ranks": 2}, ["--drop-optimizer", "--world-size", 2]),
    ({"only": "model.*", "rename": {"model.": "net."}, "cast": torch.bfloat16, "compress": "zstd:3"},
     ["--only", "model.*", "--rename", "model.=net.", "--cast", "bfloat16", "--compress", "zstd:3"]),
    ({"only": ["model", "!*.bias"], "threads": 2, "memory": "64MiB"},
     ["--only", "model", "--only", "!*.bias", "--threads", 2, "--memory", "64MiB"]),
    ({"cast": "float16", "on_overflow": "saturate"}, ["--cast", "float16", "--on-overflow", "saturate"]),
], ids=lambda argument: "-".join(argument) if isinstance(argument, dict) else "")
def test_a_move_writes_what_the_tool_writes(keywords, options, tmp_path):
    moved_alike(tmp_path, lambda folder: tessera.reshard(ADAMW, folder / "moved", **keywords), ADAMW, "moved", *options)


def test_workers_share_a_move(tmp_path):
    def by_three(folder):
        first, last = (tessera.reshard(ADAMW, folder / "moved", to="dcp", ranks=2, part=part, parts=3) for part in (2, 0))
        assert (first.written, first.missing_parts, last.missing_parts) == (False, [0, 1], [1])
        with pytest.raises(tessera.Error, match="number of workers: expected 3, found 4"):
            tessera.reshard(ADAMW, folder / "moved", to="dcp", ranks=2, part=1, parts=4)
        with pytest.raises(tessera.Error, match="several workers write this checkpoint"):
            tessera.reshard(ADAMW, folder / "moved", to="dcp", ranks=2)
        return tessera.reshard(ADAMW, folder / "moved", to="dcp", ranks=2, part=2, parts=3, take_over=True, resume=True)

    moved_alike(tmp_path, by_three, ADAMW, "moved", "--to", "dcp", "--world-size", 2)
    for keywords, said in (({"part": 0}, "both part and parts"), ({"part": 2, "parts": 2}, "from 0 to 1"),
                           ({"take_over": True}, "part and parts")):
        with pytest.raises(ValueError, match=said):
            tessera.reshard(ADAMW, tmp_path / "refused", **keywords)


def test_the_tool_and_the_package_share_a_move(tmp_path):
    def by_both(folder):
        succeed("ckpt-reshard", ADAMW, "moved", "--part", "0/2", cwd=folder)
        return tessera.reshard(ADAMW, folder / "moved", part=1, parts=2)

    moved_alike(tmp_path, by_both, ADAMW, "moved")


def test_the_tool_completes_a_move_that_the_package_began(tmp_path):
    options = ("--to", "dcp", "--world-size", 2, "--cast", "bfloat16")
    began = tessera.reshard(ADAMW, tmp_path / "moved", to="dcp", ranks=2, cast="bfloat16", part=1, parts=2)
    assert began.missing_parts == [0]
    assert "part 0 was never begun" in run("ckpt-reshard", "finish", "moved", cwd=tmp_path).stderr
    succeed("ckpt-reshard", ADAMW, "moved", *options, "--part", "0/2", "--resume", cwd=tmp_path)
    succeed("ckpt-reshard", ADAMW, "expected", *options, cwd=tmp_path)
    assert files_of(tmp_path / "moved") == files_of(tmp_path / "expected")


def test_numbers_of_an_optimizer_get_names_as_with_the_tool(tmp_path):
    source = FIXTURES / "torch_zip" / "valid" / "training_state.pt"
    names = tmp_path / "names.json"
    names.write_text('["emb.weight", "up.weight", "norm.weight"]')
    folder = moved_alike(tmp_path, lambda folder: tessera.reshard(source, folder / "moved", optimizer_params=names, resume=True),
                         source, "moved", "--optimizer-params", names)
    with tessera.open(folder / "moved") as checkpoint:
        assert checkpoint["optim.param_groups.1.params"] == ["up.weight", "norm.weight"]
    part = tessera.split(source, tmp_path / "part", prefix="optim.state.up", optimizer_params=names)
    assert part.num_tensors == 4
    with pytest.raises(tessera.Error, match=r"found none for number 2 of shape \[7\] \(give the names with optimizer_params=FILE"):
        tessera.reshard(source, tmp_path / "refused", optimizer_params="auto")
    assert tessera.merge({"": FIXTURES / "torch_zip" / "valid" / "stream.pt", "none": ADAMW}, tmp_path / "merged",
                         optimizer_params="auto", only="!none").num_tensors == 25
    names.write_text('["emb.weight"]')
    with pytest.raises(tessera.Error, match="expected 3, as the groups of 'optim.param_groups' have"):
        tessera.reshard(source, tmp_path / "refused", optimizer_params=names)
    with pytest.raises(ValueError, match="optimizer_params: expected a path, found an empty one"):
        tessera.reshard(source, tmp_path / "refused", optimizer_params="")
    assert not (tmp_path / "refused").exists()


def test_extra_files_are_carried_left_or_refused(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(ADAMW, source)
    (source / "config.json").write_text('{"torch_dtype": "float32"}')
    (source / "folder").mkdir()
    moved = tessera.reshard(source, tmp_path / "moved", cast=torch.bfloat16)
    assert moved.extra_files == [("config.json", 27, "torch_dtype: float32 to bfloat16")]
    assert moved.left_files == [("folder", "a folder")]
    assert json.loads((tmp_path / "moved/config.json").read_text()) == {"torch_dtype": "bfloat16"}
    left = tessera.reshard(source, tmp_path / "left", extra_files="leave")
    assert left.extra_files == [] and left.left_files[0] == ("config.json", "as asked")
    small = tessera.split(source, tmp_path / "small", prefix="model", extra_files_limit=1)
    assert small.left_files[0].why == "26 bytes, over the limit of 1 byte for all"
    given = tessera.reshard(ADAMW, tmp_path / "given", extra_files_from=source)
    assert [file.name for file in given.extra_files] == ["config.json"]
    with pytest.raises(tessera.Error, match=r"found 2: config.json, folder \(extra_files='leave' copies none") as caught:
        tessera.reshard(source, tmp_path / "refused", extra_files="refuse")
    assert caught.value.kind == "mismatch" and caught.value.problems[0].rule == "extra files"
    with pytest.raises(tessera.Error, match="extra_files: expected carry, leave or refuse, found 'drop'"):
        tessera.reshard(source, tmp_path / "refused", extra_files="drop")
    with pytest.raises(tessera.Error, match="extra_files_from: expected extra_files='carry', found 'leave'"):
        tessera.reshard(ADAMW, tmp_path / "refused", extra_files="leave", extra_files_from=source)
    assert not (tmp_path / "refused").exists()


def test_extra_files_are_replaced_by_equal_ones_only(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(ADAMW, source)
    (source / "config.json").write_text("{}")
    for _ in range(2):
        tessera.reshard(source, tmp_path / "moved", overwrite=True, ranks=2)
    (source / "config.json").write_text("{ }")
    with pytest.raises(tessera.Error, match="config.json: overwrite=True: expected the bytes that the new checkpoint gets"):
        tessera.reshard(source, tmp_path / "moved", overwrite=True)
    assert (tmp_path / "moved/config.json").read_text() == "{}"
    assert not (tmp_path / "moved.partial").exists()


def test_a_move_tells_its_progress_and_can_be_tried_first(tmp_path):
    told = []
    planned = tessera.reshard(ADAMW, tmp_path / "moved", ranks=2, dry_run=True)
    assert not planned.written and list(tmp_path.iterdir()) == []
    moved = tessera.reshard(ADAMW, tmp_path / "moved", ranks=2, progress=lambda *progress: told.append(progress))
    assert moved == planned._replace(written=True) and told[-1] == (moved.nbytes, moved.nbytes)
    tessera.reshard(ADAMW, tmp_path / "next", ranks=2, base=tmp_path / "moved", progress=lambda *progress: told.append(progress))
    assert told[-1] == (2 * moved.nbytes, 2 * moved.nbytes)  # all was compared, then moved: such small files are not linked
    (tmp_path / "other.pt.partial").symlink_to("nowhere")
    for destination, words in (("moved", "the destination exists"), ("other.pt", "expected an unused name.*, found a link")):
        with pytest.raises(tessera.Error, match=words) as caught:
            tessera.reshard(ADAMW, tmp_path / destination, dry_run=True)
        assert caught.value.kind == "already_exists"


def test_a_move_that_does_not_fit_lists_all_its_problems(tmp_path):
    with pytest.raises(tessera.Error) as caught:
        tessera.reshard(TORCHREC, tmp_path / "moved", ranks=3)
    stderr = run("ckpt-reshard", TORCHREC, tmp_path / "moved", "--world-size", 3).stderr.splitlines()
    error = caught.value
    assert error.kind == "mismatch" and error.path == str(TORCHREC) and list(tmp_path.iterdir()) == []
    told = [f"ckpt-reshard: {problem}".replace("(allow_lossy=True ", "(--allow-lossy ") for problem in error.problems]
    assert told == stderr and "(allow_lossy=True merges" in str(error)
    assert all(str(problem) in str(error) for problem in error.problems)
    moved = tessera.reshard(TORCHREC, tmp_path / "moved", ranks=3, allow_lossy=True)
    assert moved.written and {note.severity for note in moved.notes} == {"note"}


def test_a_load_of_state_of_other_column_shards_says_which_move_makes_it_fit(tmp_path):
    table = "ebc.embedding_bags.t_cw.weight"
    state = {"model": {table: torch.zeros(13, 8)}, "optim": {"state": {table: {"t_cw.momentum1": torch.zeros(13)}}}}
    with pytest.raises(tessera.Error) as caught:
        tessera.load(state, TORCHREC, only="*t_cw*")
    assert "(tessera.reshard with allow_lossy=True makes a checkpoint that fits, by a weighted mean)" in str(caught.value)
    tessera.reshard(TORCHREC, tmp_path / "moved", ranks=1, allow_lossy=True)
    tessera.load(state, tmp_path / "moved", only="*t_cw*")
    assert state["optim"]["state"][table]["t_cw.momentum1"].gt(0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e5m2, torch.float8_e4m3fn], ids=str)
def test_numbers_too_large_for_a_cast_are_refused_saturated_or_as_torch_makes_them(dtype, tmp_path):
    with pytest.raises(tessera.Error, match="cast: expected finite numbers up to .*on_overflow='saturate'") as caught:
        tessera.reshard(LARGE_NUMBERS, tmp_path / "moved.safetensors", cast=dtype)
    assert caught.value.kind == "mismatch" and caught.value.tensor == "a.weight" and list(tmp_path.iterdir()) == []
    source = load_file(LARGE_NUMBERS)
    largest = torch.finfo(dtype).max
    for on_overflow in ("infinity", "saturate"):
        moved = tessera.reshard(LARGE_NUMBERS, tmp_path / "moved.safetensors", cast=dtype, on_overflow=on_overflow,
                                overwrite=True)
        too_large = {}
        for name, tensor in load_file(tmp_path / "moved.safetensors").items():
            as_torch_casts = source[name].to(dtype)
            has_infinity = dtype != torch.float8_e4m3fn
            lost = ~as_torch_casts.float().isfinite() & (source[name].isfinite() if has_infinity else ~source[name].isnan())
            if lost.any():
                too_large[name] = (int(lost.sum()), float(source[name][lost].abs().max()))
            expected = as_torch_casts.float()
            if on_overflow == "saturate":
                expected = torch.where(lost, source[name].float().sign() * largest, expected)
            assert torch.equal(tensor.float().nan_to_num(-1), expected.nan_to_num(-1)), (name, on_overflow)
        assert {each.tensor: (each.elements, each.largest) for each in moved.overflows} == too_large


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn], ids=str)
def test_numbers_that_a_cast_makes_zero_are_counted(dtype, tmp_path):
    numbers = torch.ldexp(torch.ones(150), -torch.arange(150))
    save_file({"a": numbers, "b": torch.cat([numbers * 1.25, torch.zeros(3)]), "fits": torch.ones(3)}, tmp_path / "a.safetensors")
    moved = tessera.reshard(tmp_path / "a.safetensors", tmp_path / "moved.safetensors", cast=dtype)
    became_zero = {name: int(((tensor.to(dtype).float() == 0) & (tensor != 0)).sum())
                   for name, tensor in load_file(tmp_path / "a.safetensors").items()}
    assert moved.underflows == {name: count for name, count in became_zero.items() if count}


def test_advice_about_a_name_with_quotes_can_be_pasted(tmp_path):
    torch.save({"it's": bin, "itXs": 1, "a\\b": bin, "aXb": 2}, tmp_path / "objects.pt")
    with pytest.raises(tessera.Error) as caught:
        tessera.reshard(tmp_path / "objects.pt", tmp_path / "moved")
    advice = [re.search(r"to leave it out, add only=(.*)\)$", str(problem)).group(1) for problem in caught.value.problems]
    tessera.reshard(tmp_path / "objects.pt", tmp_path / "moved", only=[ast.literal_eval(text) for text in advice])
    with tessera.open(tmp_path / "moved") as checkpoint:
        assert list(checkpoint) == ["aXb", "itXs"]


def test_quantized_weights_are_not_cast(tmp_path):
    with pytest.raises(tessera.Error) as caught:
        tessera.reshard(FP8_BLOCKS, tmp_path / "moved.safetensors", cast="bfloat16")
    codes, scales = caught.value.problems
    assert (codes.tensor, scales.tensor) == ("model.up.weight", "model.up.weight_scale_inv")
    assert codes.found == "codes of block-scaled fp8 (fp8 in config.json); the scales are model.up.weight_scale_inv"
    assert "(move without cast, or leave it out with only='!model.up.weight')" in str(codes)
    assert list(tmp_path.iterdir()) == []
    tessera.reshard(FP8_BLOCKS, tmp_path / "moved.safetensors")
    moved, source = load_file(tmp_path / "moved.safetensors"), load_file(FP8_BLOCKS / "model.safetensors")
    assert all(torch.equal(moved[name].view(torch.uint8), source[name].view(torch.uint8)) for name in source)


def test_the_folder_of_extra_files_says_that_weights_are_quantized(tmp_path):
    scales = tmp_path / "scales" / "model.safetensors"
    scales.parent.mkdir()
    tessera.reshard(FP8_BLOCKS, scales, only="*_scale_inv")
    with pytest.raises(tessera.Error, match=r"config.json calls quantized \(fp8\), which may be scales"):
        tessera.reshard(scales.parent, tmp_path / "moved", to="safetensors", cast="bfloat16", extra_files_from=FP8_BLOCKS)
    tessera.reshard(scales.parent, tmp_path / "moved", to="safetensors", cast="bfloat16")


def test_words_that_mean_nothing_are_refused(tmp_path):
    moved = tmp_path / "moved"
    refused = [
        ({"to": "hdf5"}, tessera.Error, "to: expected native, dcp, safetensors, rank_files, deepspeed, megatron or torch, found 'hdf5'"),
        ({"compress": "gzip"}, tessera.Error, "compress: expected none, zstd or zstd:LEVEL .* found 'gzip'"),
        ({"compress": "zstd", "to": "dcp"}, tessera.Error, "compress: expected none, because only the native format is compressed, found"),
        ({"max_shard_size": 10, "to": "dcp"}, tessera.Error, "max_shard_size: expected to=safetensors, found 'dcp'"),
        ({"cast": "bf16"}, tessera.Error, "cast: expected a dtype of torch such as bfloat16, found 'bf16'"),
        ({"on_overflow": "clip"}, tessera.Error, "on_overflow: expected refuse, saturate or infinity, found 'clip'"),
        ({"optimizer_names": "x"}, tessera.Error, "optimizer_names: expected as-stored, canonical or torchrec, found 'x'"),
        ({"strategy": "rows"}, tessera.Error, "rows"),
        ({"only": "no.such"}, tessera.Error, "^names to move: expected a pattern that matches a name, found 'no.such'"),
        ({"rename": {"no.": ""}}, tessera.Error, "^rename: expected a rule that fits a name that is moved, found 'no.'"),
        ({"to": "torch", "ranks": 2}, tessera.Error, "^format torch: expected no option that cuts tensors"),
        ({"strategy": "flat", "ranks": 2}, tessera.Error, r"expected flat units, .* \(give them with units=FILE\)"),
        ({"plan": tmp_path / "plan.json"}, tessera.Error, "plan.json"),
        ({"ranks": 0}, ValueError, "ranks: expected a number of 1 or more, found 0"),
        ({"threads": -1}, ValueError, "threads: expected a number of 1 or more, found -1"),
        ({"memory": 0}, ValueError, "memory: expected a number of 1 or more, found 0"),
        ({"resume": True, "discard": True}, ValueError, "resume: expected one of resume and discard"),
        ({"ranks": 2, "world_size": 2}, ValueError, "ranks: expected one of ranks and world_size"),
        ({"memory": "64 MB of it"}, ValueError, "memory: expected a size such as 256MiB, found '64 MB of it'"),
        ({"rename": {"": ""}}, ValueError, "rename: expected a prefix of names"),
        ({"world": 2}, TypeError, "world"),
    ]
    for keywords, kind, words in refused:
        with pytest.raises(kind, match=words):
            tessera.reshard(ADAMW, moved, **keywords)
        assert list(tmp_path.iterdir()) == []
    moved.write_text("mine")
    with pytest.raises(tessera.Error, match=r"the destination exists \(overwrite=True replaces only a checkpoint") as caught:
        tessera.reshard(ADAMW, moved)
    assert caught.value.kind == "already_exists"
    with pytest.raises(tessera.Error, match="overwrite=True: expected a checkpoint to replace"):
        tessera.reshard(ADAMW, moved, overwrite=True)
    assert moved.read_text() == "mine"
    moved.unlink()
    tessera.reshard(ADAMW, moved)
    assert tessera.reshard(ADAMW, moved, only="model", overwrite=True).num_values == 0


# Shows E4.
def test_what_was_replaced_and_cannot_be_removed_is_a_warning():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        shutil.copytree(ADAMW, folder / "source")
        moved = shutil.copytree(ADAMW, folder / "moved")
        moved.chmod(0o555)
        (folder / "source").chmod(0o755)
        is_root = os.geteuid() == 0
        try:
            if is_root:
                os.seteuid(65534)
            with pytest.warns(RuntimeWarning, match=r"moved\.partial: could not remove the old checkpoint") as warned:
                tessera.reshard(folder / "source", moved, overwrite=True)
            assert warned[0].filename == __file__
            with pytest.raises(tessera.Error, match="cannot remove what an earlier run left here: .*denied"):
                tessera.reshard(folder / "source", moved, overwrite=True)
        finally:
            if is_root:
                os.seteuid(0)
            (folder / "moved.partial").chmod(0o755)


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """Saves a model, its optimizer after one step, and an adapter in separate files, as PyTorch programs do."""
    here = tmp_path_factory.mktemp("apart")
    torch.manual_seed(SEED)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 6)).sum().backward()
    optimizer.step()
    torch.save(model.state_dict(), here / "model.pt")
    torch.save(optimizer.state_dict(), here / "optimizer.pt")
    save_file({"0.weight": torch.randn(4, 6), "2.weight": torch.randn(3)}, here / "patch.safetensors")
    return here, model.state_dict(), optimizer.state_dict()


def test_what_was_saved_apart_is_merged(apart, tmp_path):
    here, weights, optim = apart
    sources = {"model": here / "model.pt", "optim.": here / "optimizer.pt"}
    moved = moved_alike(tmp_path, lambda folder: tessera.merge(sources, folder / "merged", to="dcp", ranks=2),
                        "merge", f"model={here / 'model.pt'}", f"optim={here / 'optimizer.pt'}", "merged", "--to", "dcp",
                        "--world-size", 2)
    loaded = {f"model.{name}": torch.zeros_like(tensor) for name, tensor in weights.items()}
    loaded |= {f"optim.state.{number}.{name}": torch.zeros_like(state)
               for number, states in optim["state"].items() for name, state in states.items()}
    dcp.load(loaded, checkpoint_id=moved / "merged")
    for name, tensor in weights.items():
        assert bits(loaded[f"model.{name}"]) == bits(tensor)
    for number, states in optim["state"].items():
        for name, state in states.items():
            assert bits(loaded[f"optim.state.{number}.{name}"]) == bits(state)
    pairs = [("model", here / "model.pt"), here / "patch.safetensors"]
    tessera.merge(pairs, tmp_path / "pairs.pt")
    assert set(torch.load(tmp_path / "pairs.pt", weights_only=True)) == {"model", "0.weight", "2.weight"}


def test_names_that_collide_are_refused_or_chosen(apart, tmp_path):
    here, weights, _ = apart
    sources = [here / "model.pt", here / "patch.safetensors"]
    with pytest.raises(tessera.Error) as caught:
        tessera.merge(sources, tmp_path / "merged")
    [problem] = caught.value.problems
    assert (caught.value.kind, problem.rule, problem.tensor) == ("mismatch", "merge", "0.weight")
    assert "(prefer takes one of them; {PREFIX: SRC} keeps both)" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    patch = safe_open(here / "patch.safetensors", "pt").get_tensor("0.weight")
    for prefer, tensor in (("first", weights["0.weight"]), ("last", patch)):
        (tmp_path / prefer).mkdir()
        moved = moved_alike(tmp_path / prefer, lambda folder: tessera.merge(sources, folder / "m.pt", prefer=prefer),
                            "merge", *sources, "m.pt", "--prefer", prefer)
        state = torch.load(moved / "m.pt", weights_only=True)
        assert bits(state["0.weight"]) == bits(tensor) and set(state) == {*weights, "2.weight"}
        model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 2))
        model.load_state_dict({name: state[name] for name in weights})


@pytest.mark.parametrize("keywords, options", [
    ({"prefix": "model.layers.0"}, ["--prefix", "model.layers.0"]),
    ({"prefix": ["model.layers.0.", "model.emb"], "keep_prefix": True, "to": "dcp"},
     ["--prefix", "model.layers.0.", "--prefix", "model.emb", "--keep-prefix", "--to", "dcp"]),
    ({"prefix": "model", "only": "optim.state.emb", "rename": {"optim.state.": "state."}, "cast": "bfloat16"},
     ["--prefix", "model", "--only", "optim.state.emb", "--rename", "optim.state.=state.", "--cast", "bfloat16"]),
    ({"drop_optimizer": True, "ranks": 3}, ["--drop-optimizer", "--world-size", 3]),
], ids=["prefix", "keep_prefix", "only", "drop_optimizer"])
def test_a_part_is_split_off_as_the_tool_does(keywords, options, tmp_path):
    moved_alike(tmp_path, lambda folder: tessera.split(ADAMW, folder / "part", **keywords), "split", ADAMW, "part", *options)


def test_pytorch_loads_what_is_split_off(tmp_path):
    whole = tessera.open(ADAMW)
    prefix = "model.layers.0."
    expected = {name.removeprefix(prefix): whole[name].torch() for name in whole if name.startswith(prefix)}
    tessera.split(ADAMW, tmp_path / "layer.pt", prefix=prefix)
    tessera.split(ADAMW, tmp_path / "layer.safetensors", prefix=prefix)
    tessera.split(ADAMW, tmp_path / "dcp", prefix=prefix, to="dcp", ranks=2)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(loaded, checkpoint_id=tmp_path / "dcp")
    in_torch = dict(flatten(torch.load(tmp_path / "layer.pt", weights_only=True)))
    for state in (loaded, in_torch, load_file(tmp_path / "layer.safetensors")):
        assert {name: bits(tensor) for name, tensor in state.items()} == {
            name: bits(tensor) for name, tensor in expected.items()}


def test_parts_and_sources_that_mean_nothing_are_refused(apart, tmp_path):
    here, *_ = apart
    pair, moved = [here / "model.pt", here / "optimizer.pt"], tmp_path / "moved"
    for call, kind, words in [
        (lambda: tessera.split(ADAMW, moved, prefix="model.layer"), tessera.Error,
         "^prefix: expected a prefix of a name, found 'model.layer.'"),
        (lambda: tessera.split(ADAMW, moved), ValueError, "^split: expected prefix, only or drop_optimizer"),
        (lambda: tessera.split(ADAMW, moved, prefix=""), ValueError, "^prefix: expected the first components"),
        (lambda: tessera.split(ADAMW, moved, prefix="model", worlds=2), TypeError, r"^split\(\) got .* 'worlds'"),
        (lambda: tessera.merge(pair, moved, flat_layout="x"), TypeError, r"^merge\(\) got .* 'flat_layout'"),
        (lambda: tessera.merge(here / "model.pt", moved), TypeError, "^sources: expected several paths"),
        (lambda: tessera.merge(str(here / "model.pt"), moved), TypeError, "^sources: expected several paths"),
        (lambda: tessera.merge(pair[:1], moved), ValueError, "^sources: expected two or more, found 1"),
        (lambda: tessera.merge({".": pair[0], "b": pair[1]}, moved), ValueError, "^sources: expected a prefix"),
        (lambda: tessera.merge({1: pair[0], "b": pair[1]}, moved), TypeError, "^sources: expected a str, found int"),
        (lambda: tessera.merge(pair, moved, prefer="newest"), tessera.Error, "prefer: expected first or last, found 'newest'"),
        (lambda: tessera.merge([*pair, tmp_path / "none"], moved), tessera.Error, "none: .*found nothing"),
        (lambda: tessera.merge([tmp_path, pair[0]], moved), tessera.Error, "a folder that contains|inside"),
    ]:
        with pytest.raises(kind, match=words):
            call()
        assert list(tmp_path.iterdir()) == []


def test_plans_and_units_are_files(tmp_path):
    succeed("ckpt-inspect", "plan", TORCHREC, "--world-size", 2, "--memory-per-rank", "4MiB", "--output", tmp_path / "plan.json")
    ours = tessera.reshard(TORCHREC, tmp_path / "ours", plan=tmp_path / "plan.json", allow_lossy=True)
    reshard(TORCHREC, tmp_path / "theirs", "--plan", tmp_path / "plan.json", "--allow-lossy")
    assert ours.world_size == 2 and files_of(tmp_path / "ours") == files_of(tmp_path / "theirs")

    shapes = {name: list(tensor.shape) for name, tensor in tessera.open(ADAMW).items() if name.startswith("model.layers.0.")}
    units = [{"name": "model.layers.0", "dtype": "float32",
              "parameters": [{"fqn": name, "shape": shape} for name, shape in shapes.items()]}]
    (tmp_path / "units.json").write_text(json.dumps({"schema": 1, "units": units}))
    flat = {"units": tmp_path / "units.json", "strategy": "flat", "ranks": 2, "only": "model.layers.0"}
    tessera.reshard(ADAMW, tmp_path / "flat", **flat)
    reshard(ADAMW, tmp_path / "flat-by-tool", "--units", tmp_path / "units.json", "--strategy", "flat", "--world-size", 2,
            "--only", "model.layers.0")
    assert files_of(tmp_path / "flat") == files_of(tmp_path / "flat-by-tool")
    flat_pieces = tessera.open(tmp_path / "flat")
    for name in shapes:  # the flat pieces end in the middle of rows
        assert bits(flat_pieces[name][1:].torch()) == bits(tessera.open(ADAMW)[name][1:].torch())


def test_ctrl_c_stops_a_move_and_leaves_nothing(large, tmp_path):
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        tessera.reshard(large / "plain", tmp_path / "moved", compress="zstd:19", threads=1)
    assert time.monotonic() - begin < 5
    assert list(tmp_path.iterdir()) == []


def test_an_exception_out_of_progress_stops_a_move(large, tmp_path):
    def progress(done, total):
        raise RuntimeError(f"enough: {done < total}")

    with pytest.raises(RuntimeError, match="enough: True"):
        tessera.reshard(large / "plain", tmp_path / "moved", compress="zstd:19", threads=1, progress=progress)
    assert list(tmp_path.iterdir()) == []


def test_an_exception_after_a_move_says_that_the_destination_is_complete(tmp_path):
    def progress(done, total):
        if done == total:
            raise RuntimeError("too late")

    with pytest.raises(RuntimeError, match="too late") as caught:
        tessera.reshard(ADAMW, tmp_path / "moved", progress=progress)
    assert caught.value.__notes__ == [f"{tmp_path / 'moved'} is complete: the exception came after the move"]
    assert tessera.verify(tmp_path / "moved") == []


def test_a_move_counts_what_the_formats_change(tmp_path):
    tensor = torch.ones(2)
    torch.save({"a": tensor, "b": tensor, "c": {1: 2}}, tmp_path / "tied.pt")
    assert tessera.reshard(tmp_path / "tied.pt", tmp_path / "dcp", to="dcp").changes == {"text_keys": 1, "split_ties": 1}
    assert tessera.reshard(tmp_path / "tied.pt", tmp_path / "native").changes == {}


def test_a_move_counts_what_it_is_asked_to_leave_out(tmp_path):
    torch.save({"args": 1, "args.weight": torch.ones(2), "b": torch.ones(2)}, tmp_path / "a.pt")
    above = tessera.reshard(tmp_path / "a.pt", tmp_path / "above", only="!args")
    assert above.left_out == {"tensors": 1, "values": 1, "aliases": 0}
    alone = tessera.reshard(tmp_path / "a.pt", tmp_path / "alone", only="!=args")
    assert alone.left_out == {"tensors": 0, "values": 1, "aliases": 0}


def test_a_name_that_no_file_can_have_is_missing():
    with tessera.open(ADAMW) as checkpoint, pytest.raises(KeyError) as caught:
        checkpoint["\ud800"]
    assert isinstance(caught.value, tessera.MissingName) and r"'\ud800'" in str(caught.value)


def stopped(source, destination, **options):
    """Stops a move after a part of the work, and expects that the finished work is kept."""

    def progress(done, total):
        if 0 < done < total:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        tessera.reshard(source, destination, compress="zstd:8", threads=1, progress=progress, **options)
    assert Path(f"{destination}.partial").exists() and Path(f"{destination}.partial.journal").exists()


def test_a_move_goes_on_where_it_was_stopped(large, tmp_path):
    moved, options = tmp_path / "moved", {"compress": "zstd:8", "cast": "float16"}
    stopped(large / "plain", moved, resume=True, cast="float16")
    for keywords, kind, words in (({}, "already_exists", r"partial: staging: .* is kept here "
                                   r"\(resume=True continues it, discard=True starts from the beginning\)$"),
                                  ({"resume": True, "cast": "bfloat16"}, "mismatch",
                                   r"source or options have changed: plan, cast: expected float16, found bfloat16 \(discard=True")):
        before = files_of(tmp_path)
        with pytest.raises(tessera.Error, match=words) as caught:
            tessera.reshard(large / "plain", moved, **(options | keywords))
        assert caught.value.kind == kind and files_of(tmp_path) == before
    for use in (tessera.open, tessera.verify, lambda path: tessera.reshard(path, tmp_path / "other")):
        with pytest.raises(tessera.Error, match=r"unfinished checkpoint: .* \(resume=True continues it, discard=True"):
            use(f"{moved}.partial")
    done = tessera.reshard(large / "plain", moved, resume=True, **options)
    assert 0 < done.kept_nbytes < done.nbytes and done.written
    whole = tessera.reshard(large / "plain", tmp_path / "whole", **options)
    assert whole.kept_nbytes == 0 and files_of(moved) == files_of(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["moved", "whole"]


def test_kept_work_is_discarded_when_asked(large, tmp_path):
    stopped(large / "plain", tmp_path / "moved", discard=True)  # with `discard` too, a stopped call keeps its work
    done = tessera.reshard(large / "plain", tmp_path / "moved", only="table", discard=True)
    assert done.kept_nbytes == 0 and [path.name for path in tmp_path.iterdir()] == ["moved"]


def test_kept_work_of_another_flat_layout_is_refused(tmp_path):
    source, moved, layout, other = (tmp_path / name for name in ("flat.pt", "moved", "layout.json", "other.json"))
    torch.save({"_flat_param": torch.rand(1 << 22)}, source)
    layout.write_text(json.dumps({"schema": 1, "units": [
        {"key": "_flat_param", "dtype": "float32", "numel_padded": 1 << 22, "params": [
            {"fqn": name, "shape": [1 << 21], "offset": offset} for name, offset in (("a", 0), ("b", 1 << 21))]}]}))
    other.write_text(layout.read_text().replace('"b"', '"c"'))
    stopped(source, moved, resume=True, flat_layout=layout)
    with pytest.raises(tessera.Error, match="changed: flat-layout: expected a file of digest .*discard=True starts from the beginning"):
        tessera.reshard(source, moved, compress="zstd:8", resume=True, flat_layout=other)
    assert tessera.reshard(source, moved, compress="zstd:8", resume=True, flat_layout=layout).written


def test_the_tool_and_the_package_go_on_with_each_others_work(large, tmp_path):
    tool = ("ckpt-reshard", large / "plain", "moved", "--compress", "zstd:8")
    stopped(large / "plain", tmp_path / "moved", resume=True)
    refused = run(*tool, cwd=tmp_path)
    assert refused.returncode == 2 and "is kept here" in refused.stderr
    refused = run(*tool, "--resume", "--cast", "float16", cwd=tmp_path)
    assert "plan, cast: expected none, found float16" in refused.stderr
    assert "of them from the interrupted run" in succeed(*tool, "--resume", cwd=tmp_path)
    whole = files_of(tmp_path / "moved")
    (tmp_path / "again").mkdir()
    tool = [str(word) for word in (BIN / tool[0], *tool[1:], "--threads", 1, "--progress", "json")]
    with subprocess.Popen(tool, cwd=tmp_path / "again", stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if line.startswith("{") and json.loads(line)["done_nbytes"] > 0:
                process.send_signal(signal.SIGINT)
                break
        assert "kept: moved.partial" in process.stderr.read()
    assert process.returncode == 130
    done = tessera.reshard(large / "plain", tmp_path / "again" / "moved", compress="zstd:8", resume=True)
    assert 0 < done.kept_nbytes < done.nbytes and files_of(tmp_path / "again" / "moved") == whole


@pytest.mark.parametrize("leave, code", [("sys.exit(7)", 7), ("return", 8)])
def test_a_child_forked_meanwhile_is_no_part_of_the_move(leave, code, large, tmp_path):
    program = f"""
        import os, sys, tessera

        def progress(done, total):
            if not children and (child := os.fork()):
                children.append(child)
            elif not children:
                {leave}

        children = []
        try:
            tessera.reshard({str(large / "plain")!r}, "moved", compress="zstd:8", threads=1, progress=progress)
        except RuntimeError as error:
            assert "not in the child" in str(error)
            os._exit(8)
        assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == {code}
        assert tessera.verify("moved") == []
    """
    environment = os.environ | {"PYTHONPATH": str(Path(tessera.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], cwd=tmp_path, env=environment, timeout=60,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_other_threads_of_python_go_on_meanwhile(large, tmp_path):
    ticks = []

    def tick():
        while not done.wait(0.005):
            ticks.append(time.monotonic())

    done = threading.Event()
    ticker = threading.Thread(target=tick)
    ticker.start()
    begin = time.monotonic()
    tessera.reshard(large / "plain", tmp_path / "moved", compress="zstd:8", threads=1)
    end = time.monotonic()
    done.set()
    ticker.join()
    inner = (begin + (end - begin) / 4, end - (end - begin) / 4)  # leaves out ticks just before and after the move
    assert sum(inner[0] < tick < inner[1] for tick in ticks) > 2, (begin, end, ticks)


# --- the package itself --------------------------------------------------------------------------------------------


def test_the_stub_names_what_the_extension_has():
    import tessera._core as core

    def names(members):
        return {name for name in members if not name.startswith("_")}

    stub = ast.parse((PACKAGE / "src" / "tessera" / "_core.pyi").read_text())
    classes = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}
    functions = {node.name: node for node in stub.body if isinstance(node, ast.FunctionDef)}
    constants = {node.target.id for node in stub.body if isinstance(node, ast.AnnAssign)}
    assert names({*classes, *functions, *constants}) == names(vars(core))
    for name in names(classes):
        assert names(node.name for node in classes[name].body) == names(vars(getattr(core, name)))
    for name, node in functions.items():
        arguments = [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
        assert arguments == re.findall(r"(\w+):", getattr(core, name).__doc__.split("->")[0]), name


def test_merge_and_split_take_what_reshard_takes():
    import tessera._moves as moves

    shared = set(tessera.reshard.__kwdefaults__)
    assert set(moves.MoveOptions.__annotations__) == shared - {"flat_layout"}
    assert set(moves._ENCODERS) == shared - {"ranks", "world_size", "part", "parts", "progress"}  # _move itself reads these


def test_every_public_name_is_documented():
    page = (ROOT / "docs" / "python.md").read_text()
    for name in tessera.__all__:
        assert getattr(tessera, name).__doc__ and (name.startswith("__") or f"`{name}" in page or f"tessera.{name}" in page), name


def test_every_public_class_method_and_function_has_a_docstring():
    defining = (ast.ClassDef, ast.FunctionDef)

    def lacking(where, body):
        for node in body:
            if isinstance(node, defining) and not node.name.startswith("_"):
                if ast.get_docstring(node) is None and "overload" not in map(ast.unparse, node.decorator_list):
                    yield f"{where}.{node.name}"
                if isinstance(node, ast.ClassDef):
                    yield from lacking(f"{where}.{node.name}", node.body)

    found = []
    for path in (PACKAGE / "src" / "tessera").glob("*.py"):  # the sources, because the frameworks' modules need the frameworks
        body = ast.parse(path.read_text()).body
        if path.name.startswith("_"):
            body = [node for node in body if isinstance(node, defining) and node.name in tessera.__all__]
        found += lacking(path.stem, body)
    assert found == []


def test_versions_agree():
    project = (PACKAGE / "pyproject.toml").read_text()
    assert succeed("ckpt-inspect", "--version").split()[-1] == tessera.__version__
    assert f'\nversion = "{tessera.__version__}"\n' in project
    pins = re.findall(r'"([\w-]+==[\d.]+)"', project.split("[project]")[0])
    installed = (ROOT / "tools" / "development" / "python-requirements.txt").read_text().splitlines()
    assert len(pins) == 2 and set(pins) <= set(installed)


def test_an_extension_of_other_python_files_is_refused_at_import(tmp_path):
    shutil.copytree(Path(tessera.__file__).parent, tmp_path / "tessera")
    interface = tmp_path / "tessera" / "_core.pyi"

    def imported():
        return subprocess.run([sys.executable, "-B", "-c", "import tessera"], cwd=tmp_path, capture_output=True, text=True)

    assert imported().returncode == 0
    interface.write_text(interface.read_text().replace("ranks: list", "shares: list"))
    assert re.search(r"ImportError: .*/tessera/_core.*\.so: expected an extension built with the Python files beside it, "
                     r"found one built with other files", imported().stderr)


def test_the_extension_shows_its_own_symbol_alone():
    [extension] = Path(tessera.__file__).parent.glob("_core*.so")
    shown = subprocess.run(["nm", "-D", "--defined-only", "-C", extension], capture_output=True, text=True, check=True)
    assert "PyInit__core" in shown.stdout and "tessera::" not in shown.stdout


def test_the_examples_of_the_page_run(tmp_path, monkeypatch, capsys):
    state = {"model": {"embedding.weight": torch.randn(100, 16), "head.weight": torch.randn(10, 16).bfloat16()}, "step": 1000}
    flat = dict(flatten(state))
    dcp.save(flat, checkpoint_id=tmp_path / "step-1000")
    torch.save({"embedding.weight": torch.zeros(100, 16)}, tmp_path / "old.pt")
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "python.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(examples) > 4
    (tmp_path / "checkpoints").mkdir()
    model = torch.nn.Linear(3, 2)
    names = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "step": 1000}
    for example in examples:
        if "import ray" in example:  # ray is not installed here
            continue
        exec(compile(example, "docs/python.md", "exec"), names)
    assert names["step"] == 1000
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {
        "step-1000", "step-1010", "step-1020", "tuned-1000", "tuned-1010"}
    assert (tmp_path / "step-1000.8" / "index.h5").exists()
    assert torch.equal(names["rows"], flat["model.embedding.weight"][10:20])


def test_a_recipe_takes_its_variables_from_the_folder_of_extra_files(tmp_path):
    """Shows F3. Megatron's torch_dist has no config.json, so the recipe needs the one in extra_files_from."""
    (tmp_path / "model").mkdir()
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "hidden_size": 8}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    llama = FIXTURES / "dcp" / "megatron" / "llama"
    tessera.reshard(llama, tmp_path / "hf", to="safetensors", recipe=ROOT / "recipes" / "hf-to-megatron-llama.json", inverse=True,
                    only=["model", "lm_head"], extra_files_from=tmp_path / "model")
    found, expected = load_file(tmp_path / "hf" / "model.safetensors"), torch.load(f"{llama}.hugging_face.pt", weights_only=True)
    assert found.keys() == expected.keys() and all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
