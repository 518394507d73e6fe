"""The extra state of layers as TransformerEngine writes it: its bytes arrive unchanged.

TransformerEngine has no package for CPUs, so the tests write what `get_extra_state` of its modules returns
(transformer_engine/pytorch/module/base.py): until version 1 an io.BytesIO with what torch.save wrote, later a uint8 tensor
with a pickle, without elements if the layer does not compute in fp8.
"""

import io
import json
import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckpt_tools import FIXTURES, reshard, run, succeed

STATE = {"scale_fwd": torch.tensor([1.0, 2.0, 4.0]), "amax_history_fwd": torch.zeros(4, 3), "extra_fp8_variables": {"num_gemms": 1}}


def bytes_io(number):
    file = io.BytesIO()
    torch.save(STATE | {"number": number}, file)
    return file


def uint8_tensor(number):
    return torch.frombuffer(bytearray(pickle.dumps(STATE | {"number": number})), dtype=torch.uint8)


FORMS = {"bytes_io": bytes_io, "uint8_tensor": uint8_tensor, "empty": lambda _: torch.empty(0, dtype=torch.uint8)}
FC1 = "decoder.layers.0.mlp.linear_fc1._extra_state"


def raw(extra_state):
    if isinstance(extra_state, torch.Tensor):
        return bytes(extra_state.tolist())
    return extra_state if isinstance(extra_state, bytes) else extra_state.getvalue()


@pytest.mark.parametrize("form", FORMS)
def test_folders_of_ranks_keep_its_bytes(form, tmp_path):
    """Shows F3, A4. Each tensor rank has extra state of its own."""
    run_folder = shutil.copytree(FIXTURES / "megatron" / "valid" / "tp2", tmp_path / "run", copy_function=shutil.copyfile)
    saved = []
    for rank, file in enumerate(sorted(run_folder.glob("*/mp_rank_*/*.pt"))):
        state = torch.load(file, weights_only=False)
        saved.append(FORMS[form](rank))
        state["model"][FC1] = saved[-1]
        torch.save(state, file)
    moved = torch.load(reshard(run_folder, tmp_path / "moved.pt", "--to", "torch", "--only", "!args"), weights_only=True)
    assert raw(moved["model"][FC1]) == raw(saved[0])
    if form != "empty":  # equal on both ranks
        assert raw(moved["per_rank"]["1"]["model"][FC1]) == raw(saved[1]) != raw(saved[0])


def test_dicts_that_differ_between_folders_of_ranks_stay_apart(tmp_path):
    """Shows F3, E13. No entry of a dict of one rank gets into that of another rank."""
    run_folder = shutil.copytree(FIXTURES / "megatron" / "valid" / "tp2", tmp_path / "run", copy_function=shutil.copyfile)
    saved = [{"seen": [1, torch.ones(1)], "loader": {"position": 5}}, {"seen": [2, torch.ones(1), torch.zeros(1)], "loader": None}]
    for state, file in zip(saved, sorted(run_folder.glob("*/mp_rank_*/*.pt")), strict=True):
        torch.save(torch.load(file, weights_only=False) | state, file)
    moved = torch.load(reshard(run_folder, tmp_path / "moved.pt", "--to", "torch", "--only", "!args"), weights_only=True)
    for state, found in zip(saved, (moved, moved["per_rank"]["1"]), strict=True):
        assert str({name: found[name] for name in state}) == str(state)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", ["native", "dcp"])
def test_torch_dist_keeps_its_bytes(way, form, tmp_path):
    """Shows F3, A4. Megatron saves each extra state as a separate object, with its position in the name."""
    names = [f"decoder.layers.mlp.linear_fc1._extra_state/shard_{layer}_2" for layer in range(2)]
    saved = {name: FORMS[form](number) for number, name in enumerate(names)}
    dcp.save(saved | {"decoder.layers.mlp.linear_fc1.weight": torch.ones(2, 3)}, checkpoint_id=tmp_path / "source", no_dist=True)
    source = reshard(tmp_path / "source", tmp_path / "moved", "--to", way)
    if way == "native":
        source = reshard(source, tmp_path / "again", "--to", "dcp")
    found = {name: torch.empty_like(each) if isinstance(each, torch.Tensor) else b"" for name, each in saved.items()}
    dcp.load(found, checkpoint_id=source, no_dist=True)
    for name, each in saved.items():
        assert raw(found[name]) == raw(each), name


def test_no_code_of_it_runs(tmp_path):
    """Shows E3. A pickle inside the bytes is never opened."""
    class Payload:
        def __reduce__(self):
            return (open, (str(tmp_path / "written"), "w"))

    torch.save({"fc1._extra_state": torch.frombuffer(bytearray(pickle.dumps(Payload())), dtype=torch.uint8)}, tmp_path / "source.pt")
    reshard(tmp_path / "source.pt", tmp_path / "moved", "--to", "native")
    assert run("ckpt-inspect", "ls", tmp_path / "moved").returncode == 0 and not (tmp_path / "written").exists()


def notes_of_changed(name, tmp_path, file, change):
    """Changes the file of the first rank that has it, and returns the notes of a move."""
    run_folder = shutil.copytree(FIXTURES / "megatron" / "valid" / name, tmp_path / "run", copy_function=shutil.copyfile)
    path = sorted(run_folder.glob(f"*/mp_rank_*/{file}"))[0]
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)
    document = json.loads(succeed("ckpt-reshard", run_folder, tmp_path / "moved.pt", "--only", "!args", "--json"))
    return [note["rule"] + ": " + note["found"] for note in document["notes"]]


@pytest.mark.parametrize("name", ["tp2_fp16", "tp2_pp2_distributed_bf16", "dp2_distributed"])
def test_a_weight_of_the_model_with_other_numbers_than_the_optimizers_is_noted(name, tmp_path):
    """Shows F3, E13. The first numbers are equal: they prove the order of the parameters."""
    weight = "decoder.layers.0.mlp.linear_fc1.weight"
    found = notes_of_changed(name, tmp_path, "model_optim_rng.pt", lambda state: state["model"][weight].view(-1)[-1].add_(1))
    assert f"copies: 1 name with different numbers in the copies, such as 'model.{weight}'; the fp32 weights of the optimizer are read" in found


def test_values_beside_the_vectors_of_the_optimizer_are_noted(tmp_path):
    """Shows F3, E13. Megatron itself writes sizes there, which are not noted."""
    assert any(note.endswith("distrib_optim.pt: left out") for note in notes_of_changed(
        "tp2_pp2_distributed_bf16", tmp_path / "a", "distrib_optim.pt", lambda state: state.update(mine=5)))
    assert not any(note.startswith("members") for note in notes_of_changed(
        "tp2_pp2_distributed_bf16", tmp_path / "b", "distrib_optim.pt", lambda state: None))
