"""tessera.save(..., base=...): a series of checkpoints that share files, on one and on two ranks."""

import shutil

import pytest
import torch
import torch.distributed as dist
from ckpt_tools import reshard
from on_ranks import run_function
from python_package import tessera
from test_incremental import disk_nbytes
from torch.distributed.device_mesh import init_device_mesh

try:
    from torch.distributed.tensor import Shard, distribute_tensor
except ImportError:  # before torch 2.6
    from torch.distributed._tensor import Shard, distribute_tensor

torch.set_num_threads(1)  # the threads of OpenMP do not survive the fork of run_function


def trainer(layers=9, numel=96 * 1024):
    """A model in which nine of ten layers are frozen."""
    generator = torch.Generator().manual_seed(0)
    return {"model": {f"layers.{i}": torch.randn(numel // 512, 512, generator=generator) for i in range(layers + 1)},
            "step": 0}


def train(state, step):
    generator = torch.Generator().manual_seed(step)
    last = list(state["model"])[-1]
    state["model"][last].copy_(torch.randn(state["model"][last].shape, generator=generator))
    state["step"] = step


def assert_is(path, state):
    assert tessera.verify(path) == []
    into = {"model": {name: torch.zeros_like(tensor) for name, tensor in state["model"].items()}, "step": -1}
    tessera.load(into, path)
    assert into["step"] == state["step"]
    assert all(torch.equal(into["model"][name], tensor) for name, tensor in state["model"].items())


def test_a_hundred_steps_of_a_frozen_model_take_little_room(tmp_path):
    """If a tenth of a model is trained, 100 checkpoints take at most 0.15 of the disk space of 100 full ones."""
    state = trainer()
    (tmp_path / "series").mkdir()
    base = None
    for step in range(1, 101):
        train(state, step)
        saved = tessera.save(state, tmp_path / "series" / f"step-{step}", base=base)
        base = saved.path
    assert saved.linked_nbytes == 9 * 96 * 1024 * 4 and saved.nbytes == 96 * 1024 * 4
    tessera.save(state, tmp_path / "full")
    ratio = disk_nbytes(tmp_path / "series") / (100 * disk_nbytes(tmp_path / "full"))
    print(f"ratio {ratio:.3f}")
    assert ratio <= 0.15
    for step in (1, 50):
        shutil.rmtree(tmp_path / "series" / f"step-{step}")
    for step in (2, 51, 99, 100):
        train(state, step)
        assert_is(tmp_path / "series" / f"step-{step}", state)


def test_a_file_of_which_little_is_used_is_let_go(tmp_path):
    """Each step changes another layer. The files of a checkpoint never have more than twice the bytes of its pieces."""
    state = trainer(layers=9)
    names = list(state["model"])
    base = None
    for step in range(25):
        state["model"][names[step % 10]].add_(1)
        state["step"] = step
        base = tessera.save(state, tmp_path / f"step-{step}", base=base, keep_last=2).path
        assert disk_nbytes(tmp_path / f"step-{step}") < 2.1 * 10 * 96 * 1024 * 4
    assert sorted(file.name for file in tmp_path.iterdir()) == ["step-23", "step-24"]
    assert_is(tmp_path / "step-24", state)


def test_async_save_takes_a_base(tmp_path):
    state = trainer()
    first = tessera.async_save(state, tmp_path / "1").result()
    train(state, 2)
    saved = tessera.async_save(state, tmp_path / "2", base=first.path).result()
    assert saved.linked_nbytes == 9 * 96 * 1024 * 4
    assert_is(tmp_path / "2", state)


def test_other_options_of_compression_hold_for_new_pieces_alone(tmp_path):
    state = trainer()
    tessera.save(state, tmp_path / "1")
    train(state, 2)
    state["model"]["layers.9"].zero_()
    tessera.save(state, tmp_path / "2", base=tmp_path / "1", compress="zstd:3")
    train(state, 3)
    tessera.save(state, tmp_path / "3", base=tmp_path / "2", compress="none")
    assert_is(tmp_path / "3", state)
    assert disk_nbytes(tmp_path) < 1.3 * disk_nbytes(tmp_path / "1")


@pytest.mark.parametrize("base, kind, text", [("none", "not_found", "none"), ("out", "invalid_argument", "the destination itself"),
                                              ("dcp", "unsupported", "a native checkpoint")])
def test_a_base_that_cannot_serve_raises(tmp_path, base, kind, text):
    state = trainer(layers=1)
    tessera.save(state, tmp_path / "dcp", format="dcp")
    tessera.save(state, tmp_path / "out")
    with pytest.raises(tessera.Error, match=text) as caught:
        tessera.save(state, tmp_path / "out", base=tmp_path / base, overwrite=True)
    assert caught.value.kind == kind
    assert_is(tmp_path / "out", state)
    with pytest.raises(tessera.Error, match="base"):
        tessera.save(state, tmp_path / "x", base=tmp_path / "out", format="dcp")
    with pytest.raises(TypeError, match="base"):
        tessera.save(state, tmp_path / "x", base=3)


def test_a_move_writes_what_the_tool_writes(tmp_path):
    state = trainer()
    tessera.save(state, tmp_path / "1")
    train(state, 2)
    torch.save(state, tmp_path / "s.pt")
    moved = tessera.reshard(tmp_path / "s.pt", tmp_path / "2", base=tmp_path / "1")
    assert moved.linked_nbytes == 9 * 96 * 1024 * 4
    reshard(tmp_path / "s.pt", tmp_path / "of_tool", "--to", "native", "--base", tmp_path / "1")
    for file in (tmp_path / "2").iterdir():
        assert file.read_bytes() == (tmp_path / "of_tool" / file.name).read_bytes(), file.name
    with pytest.raises(tessera.Error, match="base"):
        tessera.reshard(tmp_path / "s.pt", tmp_path / "3", base=tmp_path / "1", to="dcp")
    for part in range(2):
        tessera.reshard(tmp_path / "s.pt", tmp_path / "3", base=tmp_path / "1", part=part, parts=2)
    for file in (tmp_path / "2").iterdir():
        assert file.read_bytes() == (tmp_path / "3" / file.name).read_bytes(), file.name


def sharded(mesh, shape=(512, 1024), seed=0):
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return distribute_tensor(whole, mesh, [Shard(0)])


def save_on_two_ranks(folder):
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    state = {"frozen": sharded(mesh), "same": torch.ones(64 * 1024), "trained": sharded(mesh, (64, 1024), 1), "step": 1}
    tessera.save(state, folder / "1")
    state["trained"] = sharded(mesh, (64, 1024), 2)
    state["step"] = 2
    saved = tessera.save(state, folder / "2", base=folder / "1")
    assert saved.linked_nbytes >= 512 * 1024 * 4 // 2, saved
    # The base has another layout: one rank wrote it. Its pieces are whole tensors.
    state["step"] = 3
    saved = tessera.save(state, folder / "3", base=folder / "of_one")
    again = {"frozen": sharded(mesh, seed=9), "same": torch.zeros(64 * 1024), "trained": sharded(mesh, (64, 1024), 9), "step": 0}
    for step in (2, 3):
        tessera.load(again, folder / str(step))
        assert again["step"] == step and torch.equal(again["frozen"].to_local(), state["frozen"].to_local())
        assert torch.equal(again["trained"].to_local(), state["trained"].to_local())
    # If one rank fails, all ranks raise an error.
    compare = tessera._save.SaveSteps._compare
    if rank == 1:
        tessera._save.SaveSteps._compare = lambda job: 1 / 0
    with pytest.raises(ZeroDivisionError if rank == 1 else tessera.Error, match="division"):
        tessera.save(state, folder / "4", base=folder / "2")
    tessera._save.SaveSteps._compare = compare
    dist.barrier()
    assert not (folder / "4").exists() and not (folder / "4.partial").exists()
    dist.barrier()
    # The ranks give different bases.
    with pytest.raises(tessera.Error, match="arguments"):
        tessera.save(state, folder / "4", base=folder / str(rank + 1))
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks_share_files_with_a_base_of_any_layout(tmp_path):
    whole = torch.randn((512, 1024), generator=torch.Generator().manual_seed(0))
    tessera.save({"frozen": whole, "same": torch.ones(64 * 1024)}, tmp_path / "of_one")
    run_function(save_on_two_ranks, 2, tmp_path)
    shutil.rmtree(tmp_path / "1")
    for name in ("2", "3"):
        assert tessera.verify(tmp_path / name) == []
        assert torch.equal(tessera.open(tmp_path / name)["frozen"].torch(), whole)


def test_a_base_at_a_url_is_refused(tmp_path):
    """Hard links need files on the destination's file system."""
    with pytest.raises(tessera.Error, match="base: expected a local path, found a URL"):
        tessera.save(trainer(1, 1024), tmp_path / "new", base="s3://bucket/old", changed_rows=True)
    assert list(tmp_path.iterdir()) == []
