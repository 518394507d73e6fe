"""Folders of prime-rl, OLMo and composer: written as the code of these trainers does it, then moved."""

import os
import random
import sys

import numpy
import pytest
import torch
from ckpt_tools import listing, reshard, run, succeed
from on_ranks import run_function
from safetensors.torch import load_file


def model_of(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 11), torch.nn.ReLU(), torch.nn.Linear(11, 3))


def train(model, optimizer):
    for step in range(2):
        model(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def generators():
    return {"python": random.getstate(), "numpy": numpy.random.get_state(), "torch": torch.random.get_rng_state()}


def finish():
    import torch.distributed as dist

    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads can abort an ordinary exit


@pytest.fixture(scope="module")
def expected():
    """Returns the weights and moments that all trainers in this file have after two steps."""
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    train(model, optimizer)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, {
        name: optimizer.state[parameter] for name, parameter in model.named_parameters()}


def assert_holds(moved, expected, optimizer_prefix="optim.state."):
    """Expects that `moved`, a safetensors file or folder, has the tensors model.<name> and optim.state.<name>.exp_avg."""
    loaded = load_file(moved)
    for name, weight in expected[0].items():
        torch.testing.assert_close(loaded[f"model.{name}"], weight)
        for kind in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(loaded[f"{optimizer_prefix}{name}.{kind}"], expected[1][name][kind])


# --- prime-rl: a distributed checkpoint of FSDP2, and a file of each rank's data loader


def save_as_prime_rl(folder):
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model = model_of()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    train(model, optimizer)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    trainer = folder / "step_2" / "trainer"
    (trainer / "dataloader").mkdir(parents=True, exist_ok=True)
    torch.save({"position": dist.get_rank()}, trainer / "dataloader" / f"rank_{dist.get_rank()}.pt")
    dcp.save({"app": {"model": model_state, "optimizers": optimizer_state, "scheduler": {"last_epoch": 2},
                      "progress": {"step": 2, "total_tokens": 64}}}, checkpoint_id=trainer)
    finish()


def test_a_checkpoint_of_prime_rl_gets_the_names_of_fsdp2(expected, tmp_path):
    """Shows F1, F4. The summary names the folder of the data loaders' files, which is copied by hand."""
    run_function(save_as_prime_rl, 2, tmp_path)
    trainer = tmp_path / "step_2" / "trainer"
    renames = ["--rename", "app.optimizers.=optim.", "--rename", "app.="]
    assert_holds(reshard(trainer, tmp_path / "moved.safetensors", *renames), expected)
    process = run("ckpt-reshard", trainer, tmp_path / "dcp", "--to", "dcp", "--world-size", "3", *renames)
    assert process.returncode == 0 and "not copied: dataloader (a folder)" in process.stdout + process.stderr
    assert listing(tmp_path / "dcp")["values"]["progress.step"] == 2


# --- OLMo: three forms of one FSDP1 run


def fsdp1(**options):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(model_of(), device_id=torch.device("cpu"), **options)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    train(model, optimizer)
    return model, optimizer


def sharded_state(model, optimizer):
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType

    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(),
                                                  ShardedOptimStateDictConfig()):
        return {"model": model.state_dict(), "optim": FullyShardedDataParallel.optim_state_dict(model, optimizer)}


def save_as_olmo(folder):
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    random.seed(rank)
    numpy.random.seed(rank)
    model, optimizer = fsdp1(use_orig_params=True)
    state = sharded_state(model, optimizer)
    trainer_state = {"epoch": 0, "global_step": 2, "world_size": 2, "checkpoints": [folder], "rng": generators()}
    legacy, newer, local = folder / "legacy", folder / "newer", folder / "local"
    for made in (legacy, newer / "train", *(local / item for item in ("model", "optim", "train"))):
        made.mkdir(parents=True, exist_ok=True)
    torch.save(state | trainer_state, legacy / f"rank{rank}.pt")
    (legacy / "config.yaml").write_text("run_name: test\n")
    torch.save(trainer_state, newer / "train" / f"rank{rank}.pt")
    dcp.save(state, checkpoint_id=newer / "model_and_optim")
    flat = model._handle.flat_param
    handle = {"flat_param.data": flat.detach(), "flat_param._fqns": flat._fqns, "flat_param._shapes": flat._shapes,
              "flat_param._numels": flat._numels, "flat_param._shard_param_infos": flat._shard_param_infos}
    torch.save({"modules": [{"handles": [handle], "name": ""}]}, local / "model" / f"rank{rank}.pt")
    torch.save(optimizer.state_dict(), local / "optim" / f"rank{rank}.pt")
    torch.save(trainer_state, local / "train" / f"rank{rank}.pt")
    (local / "metadata.yaml").write_text("world_size: 2\n")
    finish()


@pytest.fixture(scope="module")
def olmo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("olmo")
    run_function(save_as_olmo, 2, folder)
    return folder


def test_files_of_olmos_ranks_are_one_checkpoint(olmo, expected, tmp_path):
    """Shows F1. The form `torch_legacy` has one file for each rank, with everything in it."""
    assert_holds(reshard(olmo / "legacy", tmp_path / "moved.safetensors"), expected)
    values = listing(olmo / "legacy")["values"]
    assert values["global_step"] == 2 and "per_rank.1.rng.python" in values
    assert values["rng.numpy"]["$tuple"][0] == "MT19937" and "per_rank.1.rng.numpy" in values


def test_olmos_newer_form_is_a_distributed_checkpoint(olmo, expected, tmp_path):
    """Shows F1. The forms `torch_new` and `olmo_core` have model_and_optim, and the state of each rank's trainer in train."""
    moved = tmp_path / "moved.safetensors"
    succeed("ckpt-reshard", "merge", olmo / "newer" / "model_and_optim", f"train={olmo / 'newer' / 'train'}", moved, "--quiet")
    assert_holds(moved, expected)
    assert listing(moved)["values"]["train.global_step"] == 2


def test_olmos_local_form_is_refused(olmo, tmp_path):
    """Shows F1, E3. The form `local` has flat vectors in a list of modules. Only objects of FSDP1 say which parameters
    are in them."""
    process = run("ckpt-reshard", olmo / "local" / "model", tmp_path / "moved", "--to", "dcp")
    assert process.returncode == 3 and "flat_param" in process.stderr, process.stderr
    assert not (tmp_path / "moved").exists()


# --- composer: a distributed checkpoint, or the file of rank 0


def save_as_composer(folder):
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    dist.init_process_group("gloo")
    model, optimizer = fsdp1(use_orig_params=True)
    state = sharded_state(model, optimizer)
    of_ranks = [None] * 2
    dist.all_gather_object(of_ranks, generators())

    def whole(model_state, optimizer_state):
        return {"state": {"model": model_state, "optimizers": {"AdamW": optimizer_state}, "timestamp": {"Timestamp": {"batch": 2}},
                          "algorithms": [("FusedLayerNorm", {})], "metadata": {"composer_env_info": {"composer_version": "0.32"}}}}

    saved = whole(state["model"], state["optim"])
    dcp.save(saved | ({"rng": of_ranks} if dist.get_rank() == 0 else {}), checkpoint_id=folder / "ep0-ba2")
    (folder / "old").mkdir(exist_ok=True)
    torch.save(saved | {"rng": of_ranks}, folder / "old" / f"ep0-ba2-rank{dist.get_rank()}.pt")  # before torch 2.0
    if dist.get_rank() == 0:
        (folder / "full").mkdir()
        single = model_of()
        adam = torch.optim.AdamW(single.parameters(), 1e-2)
        train(single, adam)
        names = [name for name, _ in single.named_parameters()]
        moments = {"state": {names[number]: state for number, state in adam.state_dict()["state"].items()}}
        torch.save(whole(single.state_dict(), moments) | {"rng": of_ranks}, folder / "full" / "ep0-ba2-rank0.pt")
    finish()


@pytest.fixture(scope="module")
def composer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("composer")
    run_function(save_as_composer, 2, folder)
    return folder


@pytest.mark.parametrize("form", ["ep0-ba2", "old", "full/ep0-ba2-rank0.pt"])
def test_checkpoints_of_composer_get_the_names_of_fsdp2(composer, expected, tmp_path, form):
    """Shows F1, F4. Tests three forms: sharded (a distributed checkpoint), sharded before torch 2.0 (a file for each
    rank), and full."""
    word = "ep0-ba2." if form == "old" else ""
    moved = reshard(composer / form, tmp_path / "moved.safetensors", "--rename", f"{word}state.optimizers.AdamW.=optim.",
                    "--rename", f"{word}state.=")
    assert_holds(moved, expected)
    assert listing(moved)["values"]["timestamp.Timestamp.batch"] == 2
