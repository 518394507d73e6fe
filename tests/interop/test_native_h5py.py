"""Native checkpoints through h5py: a second implementation reads every tensor out of index.h5."""

import hashlib
import json
import shutil
import subprocess
import sys

import h5py
import hdf5plugin  # noqa: F401  the zstd filter
import numpy as np
import pytest
import torch
from ckpt_tools import FIXTURES, ROOT, expectation, reshard, run, tensors_by_name
from safetensors.torch import save_file

EXAMPLE = ROOT / "docs" / "examples" / "read_native_with_h5py.py"
sys.path.insert(0, str(EXAMPLE.parent))
from read_native_with_h5py import open_index, read_tensor  # noqa: E402

sys.path.insert(0, str(FIXTURES / "make"))
from dtypes import all_dtypes  # noqa: E402

SOURCES = ["dcp/valid/fsdp2_adamw", "dcp/valid/dtypes", "dcp/valid/degenerate", "dcp/valid/tied", "dcp/valid/fsdp2_tp",
           "safetensors/valid/degenerate.safetensors", "torch_zip/valid/dtypes.pt"]  # fmt: skip
LAYOUTS = {
    "as it is": [],
    "dim0": ["--world-size", 3, "--strategy", "dim0"],
    "flat": ["--world-size", 3, "--strategy", "flat", "--units", "units.json"],
    "zstd": ["--world-size", 2, "--strategy", "flat", "--units", "units.json", "--compress", "zstd"],
}


def write_units(path, tensors):
    """Writes a JSON file with one flat unit per dtype. `tensors`: {name: (dtype, shape, ...)}."""
    by_dtype = {}
    for name, (dtype, shape, *_) in tensors.items():
        by_dtype.setdefault(dtype, []).append({"fqn": name, "shape": shape})
    units = [{"name": dtype, "dtype": dtype, "parameters": rows} for dtype, rows in by_dtype.items()]
    path.write_text(json.dumps({"schema": 1, "units": units}))


def options_for(layout, tensors, folder):
    write_units(folder / "units.json", tensors)
    return [folder / option if option == "units.json" else option for option in LAYOUTS[layout]]


def link_name(name):
    """Returns the HDF5 link name of a tensor by the rules of docs/formats/native.md."""
    plain = "".join(f"~{ord(c):02X}" if c in "/~" or ord(c) < 32 or ord(c) == 127 else c for c in name)
    return {"": "~empty", ".": "~2E", "..": "~2E~2E"}.get(name, plain)


def digest(array):
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("source", SOURCES)
def test_h5py_reads_every_whole_tensor(source, layout, tmp_path):
    """Shows E1, E14. All dtypes, 0-d and empty tensors, pieces of boxes and of flat ranges, tied weights."""
    expected = tensors_by_name(expectation(FIXTURES / source))
    options = options_for(layout, expected, tmp_path)
    native = reshard(FIXTURES / source, tmp_path / "native", "--to", "native", *options)
    with open_index(native) as index:
        assert sorted(index) == sorted([link_name(name) for name in expected] + ["~tessera"])
        for name, (dtype, shape, nbytes, sha256) in expected.items():
            dataset = index[link_name(name)]
            assert dataset.attrs["dtype"].decode() == dtype
            assert list(dataset.shape) == shape, name
            assert dataset.size * dataset.dtype.itemsize == nbytes
            assert digest(dataset[()]) == sha256, name


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Writes compressed tensors of several chunks on two ranks. Returns the path, and the tensors."""
    torch.manual_seed(3)
    state = {"w": torch.randn(700, 1001).bfloat16(), "v": torch.randn(300_001), "zeros": torch.zeros(512, 513)}
    folder = tmp_path_factory.mktemp("large")
    save_file(state, folder / "large.safetensors")
    rows = {name: (str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in state.items()}
    options = options_for("zstd", rows, folder)
    return reshard(folder / "large.safetensors", folder / "native", "--to", "native", *options), state


def test_h5py_reads_compressed_chunks(large):
    """Shows E1. HDF5's own filters, shuffle and zstd (32015), decode the chunks."""
    native, state = large
    with h5py.File(native / "rank-00001.h5") as file:
        filters = {name: piece._filters for name, piece in file.items() if name != "~tessera"}
        assert any("32015" in f and "shuffle" in f for f in filters.values()), filters
    with open_index(native) as index:
        for name, tensor in state.items():
            assert digest(index[name][()]) == digest(tensor.view(torch.uint8).numpy())


def test_the_example_reads_bfloat16_exactly(large):
    """Shows E1. Runs the snippet of docs/formats/native.md unchanged."""
    native, state = large
    with open_index(native) as index:
        assert np.array_equal(read_tensor(index, "w"), state["w"].float().numpy())
        assert np.array_equal(read_tensor(index, "v"), state["v"].numpy())
    process = subprocess.run([sys.executable, EXAMPLE, native], capture_output=True, text=True, check=True)
    assert [line.split()[:2] for line in process.stdout.splitlines()] == [
        ["v", "float32"], ["w", "bfloat16"], ["zeros", "float32"]]  # fmt: skip
    assert EXAMPLE.read_text().strip() in (ROOT / "docs" / "formats" / "native.md").read_text()


def test_a_missing_rank_file_shows_as_nan_and_is_refused(large, tmp_path):
    """Shows E7. HDF5 silently returns the fill value. Fill values cannot be mistaken for data, and Tessera refuses the
    checkpoint."""
    native = tmp_path / "native"
    shutil.copytree(large[0], native)
    (native / "rank-00001.h5").unlink()
    with open_index(native) as index:
        v = index["v"][()]
        assert np.isnan(v).any() and not np.isnan(v).all()
        assert (index["w"][()] == 0x7FC0).any()
    process = run("ckpt-inspect", "ls", native, "--json", "--sha256")
    assert process.returncode == 3
    assert "rank-00001.h5" in process.stderr


def test_values_are_there_as_json(tmp_path):
    """Shows E1. Any HDF5 reader can read the values as JSON; they are stored beside the binary index."""
    source = FIXTURES / "dcp" / "valid" / "values"
    native = reshard(source, tmp_path / "native", "--to", "native")
    with open_index(native) as index:
        values = json.loads(index["~tessera/values"][()])
    assert json.dumps(values, sort_keys=True) == json.dumps(expectation(source)["values"], sort_keys=True)


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A torch.save file with more than 1,000 tensors of all dtypes: most are small, so a move packs them."""
    state = {}
    for copy in range(60):
        for name, tensor in all_dtypes().items():
            state[f"layers.{copy}.{name}"] = tensor
    state |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 7), "a/b~": torch.tensor([3]), "ü" * 700: torch.ones(5)}
    state |= {"big": torch.randn(300, 200), "edge": torch.arange(65536 + 65535).to(torch.uint8)}
    state |= {"tied": state["big"], "step": 3}
    path = tmp_path_factory.mktemp("many") / "many.pt"
    torch.save(state, path)
    return path, state


@pytest.mark.parametrize("layout", LAYOUTS)
def test_h5py_reads_every_packed_tensor(many, layout, tmp_path):
    """Shows E1, E14. Version 2: small pieces lie in one dataset per dtype, and Tessera itself writes index.h5."""
    source, state = many
    listing = json.loads(run("ckpt-inspect", "ls", source, "--json", "--sha256").stdout)
    expected = {t["name"]: (t["dtype"], t["shape"], t["nbytes"], t["sha256"]) for t in listing["tensors"]}
    native = reshard(source, tmp_path / "native", "--to", "native", *options_for(layout, expected, tmp_path))
    assert (native / "index.h5").read_bytes()[8] == 2
    with h5py.File(native / "rank-00000.h5") as file:
        assert len(file) < 10
        assert file["~tessera/packed_bfloat16"].attrs["dtype"] == b"bfloat16"
    with open_index(native) as index:
        names = {link_name(name) for name in state if len(name) < 500} - {"step"}
        assert names <= set(index)
        assert len(index) == len(state)  # the value has no link, but `~tessera` is one more
        assert index["tied"] == index["big"]
        for name, (dtype, shape, nbytes, sha256) in expected.items():
            dataset = index[link_name(name) if len(name) < 500 else next(key for key in index if "~long" in key)]
            assert dataset.attrs["dtype"].decode() == dtype
            assert list(dataset.shape) == shape, name
            assert dataset.size * dataset.dtype.itemsize == nbytes
            assert digest(dataset[()]) == sha256, name
        assert json.loads(index["~tessera/values"][()]) == {"step": 3}
    assert run("ckpt-inspect", "diff", source, native).returncode == 0
    for file in native.glob("rank-*.h5"):
        file.unlink()
    with open_index(native) as index:
        assert np.isnan(index["scalar"][()])
