"""Moves what verl saves. The result equals that of verl's own model merger, and verl loads it on other ranks. Needs its
package (see CMakeLists.txt)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
from ckpt_tools import reshard, run  # noqa: E402
from on_ranks import run_program  # noqa: E402

VERL = [sys.executable, "-B", HERE / "verl_ranks.py"]


@pytest.fixture(scope="module", params=[("fsdp2", 1), ("fsdp2", 3), ("hybrid", 4), ("fsdp1", 2)], ids=lambda each: f"{each[0]}-{each[1]}")
def saved(request, tmp_path_factory):
    """A folder that verl saved on some ranks, and the losses of the steps after it."""
    strategy, ranks = request.param
    folder = tmp_path_factory.mktemp("verl") / "actor"
    said = run_program([*VERL, "save", folder, strategy], ranks)
    return folder, json.loads(said[0].strip().splitlines()[-1])


def merged_by_tessera(folder, destination, *options):
    from safetensors.torch import load_file

    moved = reshard(folder, destination, "--to", "safetensors", "--only", "model", "--rename", "model.=",
                    "--extra-files-from", folder / "huggingface", *options)
    return load_file(moved / "model.safetensors")


def assert_equal(found, expected):
    assert found.keys() == expected.keys() and len(expected) > 20
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_the_merger_finds_the_same_before_it_rounds(saved, tmp_path):
    """Shows F1. verl's merger casts every tensor to bfloat16 before it joins them. This test skips the cast and compares."""
    folder, _ = saved
    subprocess.run([*VERL, "merge-without-rounding", folder, tmp_path / "verl.pt"], check=True, timeout=120)
    expected = torch.load(tmp_path / "verl.pt")
    assert all(tensor.dtype == torch.float32 for tensor in expected.values())
    assert_equal(merged_by_tessera(folder, tmp_path / "tessera"), expected)


def test_the_merger_writes_what_a_cast_gives(saved, tmp_path):
    """Shows F1. The model of verl's merger equals the one of `--cast bfloat16`; transformers loads both."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    folder, _ = saved
    subprocess.run([*VERL, "merge", folder, tmp_path / "verl"], check=True, timeout=120)
    assert_equal(merged_by_tessera(folder, tmp_path / "tessera", "--cast", "bfloat16"), load_file(tmp_path / "verl" / "model.safetensors"))
    ids = torch.arange(8).reshape(1, 8)
    logits = [AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto")(ids).logits for name in ("verl", "tessera")]
    assert logits[0].dtype == torch.bfloat16 and torch.equal(*logits)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_verl_continues_on_other_ranks(saved, tmp_path, ranks):
    """Shows F1. verl's FSDP2 loads model, optimizer, scheduler and random generators, and has the losses of an
    uninterrupted run."""
    folder, expected = saved
    if json.loads((folder / "fsdp_config.json").read_text())["FSDP_version"] == 1:
        pytest.skip("FSDP1 keeps the optimizer's state in flat vectors")
    moved = reshard(folder, tmp_path / "actor", "--to", "rank_files", "--world-size", ranks, "--device-mesh", "cpu:fsdp")
    for said in run_program([*VERL, "load", moved], ranks):
        assert json.loads(said.strip().splitlines()[-1]) == pytest.approx(expected, rel=1e-5)


def losses_after(action, folder, ranks):
    """The losses of each rank's next steps, after verl has loaded the folder."""
    return [json.loads(said.strip().splitlines()[-1]) for said in run_program([*VERL, action, folder], ranks)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_verl_loads_a_model_of_hugging_face(saved, tmp_path, ranks):
    """Shows F1. The source's names lack the prefix `model.`. Without --rename, a note says so, and verl does not load
    the result."""
    folder, _ = saved
    merged_by_tessera(folder, tmp_path / "llama")
    options = ["--to", "rank_files", "--world-size", ranks, "--device-mesh", "cpu:fsdp", "--extra-files", "leave"]
    bare = run("ckpt-reshard", tmp_path / "llama", tmp_path / "bare", *options)
    assert bare.returncode == 0 and "note: " in bare.stderr and "lm_head.weight: names of the model" in bare.stderr
    assert "--rename =model." in bare.stderr
    moved = reshard(tmp_path / "llama", tmp_path / "actor", *options, "--rename", "=model.")
    expected = reshard(folder, tmp_path / "again", *options[:-2], "--only", "model")
    assert losses_after("load-model", moved, ranks) == losses_after("load-model", expected, ranks)


def test_verl_continues_with_the_optimizer_of_fsdp2(saved, tmp_path):
    """Shows F1. The optimizer's state has parameter names in DCP, as get_optimizer_state_dict gives them, and numbers
    in verl's files."""
    folder, expected = saved
    if json.loads((folder / "fsdp_config.json").read_text())["FSDP_version"] == 1:
        pytest.skip("FSDP1 keeps the optimizer's state in flat vectors")
    named = reshard(folder, tmp_path / "named", "--to", "dcp", "--world-size", 2, "--optimizer-params", "auto", "--only", "!extra_state",
                    "--only", "!per_rank")
    moved = reshard(named, tmp_path / "actor", "--to", "rank_files", "--world-size", 2, "--device-mesh", "cpu:fsdp",
                    "--optimizer-params", "numbers")
    for losses in losses_after("load-model-and-optimizer", moved, 2):
        assert losses == pytest.approx(expected, rel=1e-5)
