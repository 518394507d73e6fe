"""Counts of numbers that became zero or were too large: each element of a tensor counts once."""

import json
import subprocess

import pytest
import torch
from ckpt_tools import BIN, reshard, succeed
from safetensors.torch import save_file

REPLICATED = ["--to", "rank_files", "--world-size", "3", "--strategy", "replicated"]


def counts(*arguments):
    """Returns {name: elements} of the numbers that became zero, and of those that were too large. Expects one line of
    the summary for each tensor of each kind."""
    document = json.loads(succeed("ckpt-reshard", *arguments, "--json"))
    lists = [document["underflows"], document["overflows"]]
    for rows in lists:
        assert len({row["name"] for row in rows}) == len(rows)
    return tuple({row["name"]: row["elements"] for row in rows} for rows in lists)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Makes a float32 tensor: half of its elements become zero in float16, one is too large for it."""
    path = tmp_path_factory.mktemp("source") / "model.safetensors"
    w = torch.ones(64, 48)
    w[::2] = 1e-12
    w[1, 1] = 1e9
    save_file({"w": w}, path)
    return path


ZEROS, LARGE = {"w": 32 * 48}, {"w": 1}


@pytest.mark.parametrize("options", [REPLICATED, ["--to", "rank_files", "--world-size", "4", "--strategy", "hybrid:2x2"],
                                     ["--to", "dcp", "--world-size", "3", "--strategy", "dim1"]], ids=" ".join)
def test_of_a_cast(source, options, tmp_path):
    """Shows E2."""
    assert counts(source, tmp_path / "moved", "--cast", "float16", "--on-overflow", "infinity", *options) == (ZEROS, LARGE)


@pytest.mark.parametrize("options", [REPLICATED, ["--to", "dcp", "--world-size", "3", "--strategy", "dim1"]], ids=" ".join)
def test_of_a_sum(source, options, tmp_path):
    """Shows E2. Elements of replicas count once. If a read also brings elements that the move does not need, these do not count."""
    half = reshard(source, tmp_path / "half", "--cast", "float16", "--on-overflow", "saturate", *REPLICATED)
    assert counts("combine", tmp_path / "sum", "--linear", f"1e-8={half}", *options) == ({"w": 32 * 48 - 1}, {})


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """Makes float8 codes with a small scale: the smallest numbers become zero in float16, and most others in float8."""
    folder = tmp_path_factory.mktemp("quantized")
    codes = torch.arange(256, dtype=torch.uint8).repeat(16, 1)
    codes[codes & 0x7F == 0x7F] = 0  # NaN
    save_file({"a.weight": codes.view(torch.float8_e4m3fn), "a.weight_scale": torch.tensor([1e-6])}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    return folder, codes.view(torch.float8_e4m3fn).float() * 1e-6


@pytest.mark.parametrize("options", [REPLICATED, ["--to", "dcp", "--world-size", "3", "--strategy", "dim1"]], ids=" ".join)
def test_of_dequantized_numbers_that_are_cast(quantized, options, tmp_path):
    """Shows E2. The summary has one line for each tensor, not one for each conversion."""
    folder, numbers = quantized
    half = numbers.half()
    zeros = int(((numbers != 0) & (half == 0)).sum()), int(((half != 0) & (half.to(torch.float8_e4m3fn).float() == 0)).sum())
    assert min(zeros) > 0
    assert counts(folder, tmp_path / "half", "--dequantize", "float16", *options) == ({"a.weight": zeros[0]}, {})
    assert counts(folder, tmp_path / "moved", "--dequantize", "float16", "--cast", "float8_e4m3fn", *options) == (
        {"a.weight": sum(zeros)}, {})


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("on_overflow", ["infinity", "saturate"])
def test_of_dequantized_numbers_that_are_too_large_twice(on_overflow, dtype, tmp_path):
    """Shows E2. A number that is too large for float16 counts once, although float8 is too small for what it became, too."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0  # NaN
    codes = codes.view(torch.float8_e4m3fn)
    folder = tmp_path / "quantized"
    folder.mkdir()
    save_file({"a.weight": codes.reshape(16, 16), "a.weight_scale": torch.tensor([1000.0])}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    half = (codes.float() * 1000).half()
    too_large = int((~half.to(dtype).float().isfinite()).sum())
    assert 0 < int(half.isinf().sum()) <= too_large < 256
    assert counts(folder, tmp_path / "moved", "--dequantize", "float16", "--cast", str(dtype).removeprefix("torch."), "--on-overflow",
                  on_overflow, "--to", "dcp") == ({}, {"a.weight": too_large})


def test_of_dequantized_numbers_with_a_base(quantized, tmp_path):
    """Shows E2. A move with a base reads each element twice: to compare it, and to write it. The element counts once."""
    folder, numbers = quantized
    save_file({"a.weight": numbers.half()}, tmp_path / "half.safetensors")
    old = reshard(tmp_path / "half.safetensors", tmp_path / "old", "--to", "native")
    for base in ([], ["--base", old]):
        zeros = counts(folder, tmp_path / f"new{len(base)}", "--dequantize", "float16", "--to", "native", *base)
        assert zeros == ({"a.weight": int(((numbers != 0) & (numbers.half() == 0)).sum())}, {})


def test_of_parts_that_one_worker_takes_over(source, tmp_path):
    """Shows E2. The summary has one line for each tensor, not one for each part."""
    assert counts(source, tmp_path / "moved", "--cast", "float16", "--on-overflow", "infinity", "--to", "dcp", "--world-size", "4",
                  "--part", "0/4", "--take-over") == (ZEROS, LARGE)


def test_of_a_sum_that_is_resumed(tmp_path):
    """Shows E2. Elements that the interrupted run had written count too."""
    w = torch.ones(64, 80_000, dtype=torch.float16)
    w[::2] = 1e-7
    save_file({"w": w}, tmp_path / "model.safetensors")
    combine = ["combine", tmp_path / "sum", "--linear", f"1e-2={tmp_path / 'model.safetensors'}", "--to", "native", "--threads", "1"]
    interrupted = subprocess.run(["bash", "-c", 'ulimit -f 6000; exec "$0" "$@"', BIN / "ckpt-reshard", *combine], capture_output=True,
                                 text=True, timeout=60)
    assert interrupted.returncode == 4 and "kept: " in interrupted.stderr
    assert counts(*combine, "--resume") == ({"w": 32 * 80_000}, {})
