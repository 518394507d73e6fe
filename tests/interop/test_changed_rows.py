"""--changed-rows and tessera.save(..., base=..., changed_rows=True): tables of which a checkpoint stores the changed rows."""

import json
import shutil
import subprocess
import sys

import h5py
import numpy as np
import pytest
import torch
import torch.distributed as dist
from ckpt_tools import ROOT, listing, reshard, run, succeed, tensors_by_name
from on_ranks import run_function
from python_package import tessera
from test_incremental import disk_nbytes, interrupt
from torch.distributed.device_mesh import init_device_mesh

try:
    from torch.distributed.tensor import Shard, distribute_tensor
except ImportError:  # before torch 2.6
    from torch.distributed._tensor import Shard, distribute_tensor

sys.path.insert(0, str(ROOT / "docs" / "examples"))
from read_native_with_h5py import open_index, read_tensor  # noqa: E402

torch.set_num_threads(1)  # the threads of OpenMP do not survive the fork of run_function

ROWS, COLUMNS = 20_000, 16


class Trainer:
    """An EmbeddingBag with row-wise Adagrad (one number of state for each row), and a layer on top of it."""

    def __init__(self):
        torch.manual_seed(7)
        self.random = np.random.default_rng(7)
        self.bag = torch.nn.EmbeddingBag(ROWS, COLUMNS, mode="sum", sparse=True)
        self.layer = torch.nn.Linear(COLUMNS, 1)
        self.sums = torch.zeros(ROWS)
        self.steps = 0

    @torch.no_grad()
    def adagrad(self, learning_rate=0.05):
        gradient = self.bag.weight.grad.coalesce()
        rows = gradient.indices()[0]
        self.sums[rows] += gradient.values().square().mean(1)
        self.bag.weight[rows] -= learning_rate * gradient.values() / (self.sums[rows].sqrt() + 1e-8)[:, None]
        self.bag.weight.grad = None

    def step(self, lookups=200):
        indices = torch.from_numpy(self.random.zipf(1.05, lookups) % ROWS)
        self.layer.zero_grad()
        loss = self.layer(self.bag(indices.reshape(-1, 4))).square().sum()
        loss.backward()
        self.adagrad()
        with torch.no_grad():
            self.layer.weight -= 0.01 * self.layer.weight.grad
        self.steps += 1

    def state(self):
        return {"model": {"bag.weight": self.bag.weight.detach(), "layer": self.layer.state_dict()},
                "optimizer": {"bag.weight.sum": self.sums}, "step": self.steps}


def assert_is(path, state):
    assert tessera.verify(path) == []
    with tessera.open(path) as found:
        for name, tensor in {"model.bag.weight": state["model"]["bag.weight"],
                             "model.layer.weight": state["model"]["layer"]["weight"],
                             "optimizer.bag.weight.sum": state["optimizer"]["bag.weight.sum"]}.items():
            assert torch.equal(found[name].torch(), tensor), name


def encoding(path, name):
    return json.loads(succeed("ckpt-inspect", "show", path, name, "--json"))["tensors"][0]["pieces"][0]["encoding"]


def test_a_series_of_a_trained_table_takes_little_room(tmp_path):
    """Ten steps, each saved with the one before as its base."""
    trainer = Trainer()
    base, written, states = None, [], {}
    for step in range(1, 11):
        trainer.step()
        path = tmp_path / f"step-{step}"
        before = disk_nbytes(tmp_path)
        saved = tessera.save(trainer.state(), path, base=base, changed_rows=True)
        written.append(disk_nbytes(tmp_path) - before)
        states[step] = {"model": {"bag.weight": trainer.bag.weight.detach().clone(),
                                  "layer": {"weight": trainer.layer.weight.detach().clone()}},
                        "optimizer": {"bag.weight.sum": trainer.sums.clone()}}
        base = saved.path
    print("bytes of each checkpoint:", written)
    assert encoding(base, "model.bag.weight") == encoding(base, "optimizer.bag.weight.sum") == "patched"
    assert max(written[1:]) < 0.15 * written[0]
    assert saved.linked_nbytes > 0.9 * ROWS * (COLUMNS + 1) * 4 and saved.nbytes < 0.1 * ROWS * (COLUMNS + 1) * 4
    for step in (1, 3, 4, 9):
        shutil.rmtree(tmp_path / f"step-{step}")
    for step in (2, 5, 8, 10):
        assert_is(tmp_path / f"step-{step}", states[step])


def test_keep_last_leaves_what_others_need(tmp_path):
    trainer, base = Trainer(), None
    for step in range(1, 6):
        trainer.step()
        base = tessera.async_save(trainer.state(), tmp_path / f"step-{step}", base=base, changed_rows=True,
                                  keep_last=2).result().path
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-4", "step-5"]
    assert_is(base, trainer.state())


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Three checkpoints of a series, the last one also saved whole, and its state by torch.save."""
    folder = tmp_path_factory.mktemp("three")
    trainer, base = Trainer(), None
    for step in (1, 2, 3):
        trainer.step()
        torch.save(trainer.state(), folder / f"{step}.pt")
        options = ["--base", base, "--changed-rows"] if base else []
        base = reshard(folder / f"{step}.pt", folder / str(step), "--to", "native", "--world-size", 2, "--strategy", "dim0",
                       *options)
    shutil.rmtree(folder / "1")
    assert encoding(base, "model.bag.weight") == "patched"
    reshard(folder / "3.pt", folder / "whole", "--to", "native", "--world-size", 2, "--strategy", "dim0")
    return folder


@pytest.mark.parametrize("verb", [["ls", "--sha256"], ["tree"], ["stats"], ["hash"]], ids=lambda verb: verb[0])
def test_every_verb_shows_the_same_values(three, verb):
    said = [succeed("ckpt-inspect", *verb, name, cwd=three) for name in ("3", "whole")]
    lines = [[line.split("; native, 2 ranks")[0] for line in text.splitlines()] for text in said]
    assert lines[0] == lines[1]
    assert succeed("ckpt-inspect", "diff", "3", "whole", cwd=three)


@pytest.mark.parametrize("to", ["native", "safetensors", "dcp", "torch"])
def test_a_move_reads_it(three, tmp_path, to):
    suffix = {"safetensors": ".safetensors", "torch": ".pt"}.get(to, "")
    moved = reshard(three / "3", tmp_path / f"moved{suffix}", "--to", to)
    assert tensors_by_name(listing(moved)) == tensors_by_name(listing(three / "whole"))
    narrow = reshard(three / "3", tmp_path / "narrow", "--to", "native", "--world-size", 3, "--strategy", "dim1")
    assert tensors_by_name(listing(narrow)) == tensors_by_name(listing(three / "whole"))


def test_a_copy_is_whole(three, tmp_path):
    subprocess.run(["cp", "-r", three / "3", tmp_path / "copy"], check=True)
    assert tensors_by_name(listing(tmp_path / "copy")) == tensors_by_name(listing(three / "whole"))
    succeed("ckpt-inspect", "verify", tmp_path / "copy")


def test_other_hdf5_readers_see_the_table(three):
    with open_index(three / "3") as found, open_index(three / "whole") as whole:
        assert set(found) == set(whole)
        for name in set(whole) - {"~tessera"}:
            assert np.array_equal(read_tensor(found, name), read_tensor(whole, name)), name
            assert dict(found[name].attrs) == dict(whole[name].attrs)


def test_tables_with_very_many_runs_are_named_instead(tmp_path):
    table, sums = torch.randn(60_000, 8), torch.zeros(60_000)
    torch.save({"table": table, "sums": sums}, tmp_path / "1.pt")
    table[::12] += 1  # 5,000 runs
    sums[7] = 1
    torch.save({"table": table, "sums": sums}, tmp_path / "2.pt")
    reshard(tmp_path / "1.pt", tmp_path / "1")
    reshard(tmp_path / "2.pt", tmp_path / "2", "--base", tmp_path / "1", "--changed-rows")
    with h5py.File(tmp_path / "2" / "index.h5") as index:
        assert "table" not in index and index["sums"][7] == 1
        [[name, why]] = json.loads(index["~tessera/hidden"][()]).items()
        assert name == "table" and "more than 600 runs" in why and "ckpt-reshard" in why
    with tessera.open(tmp_path / "2") as found:
        assert torch.equal(found["table"].torch(), table)
    reshard(tmp_path / "2", tmp_path / "whole")
    with open_index(tmp_path / "whole") as index:
        assert np.array_equal(read_tensor(index, "table"), table.numpy())


def test_zstd_pieces_are_patched(tmp_path):
    table = torch.randn(20_000, 4).bfloat16().float()
    torch.save({"table": table}, tmp_path / "1.pt")
    table[5:500:5] *= -1
    torch.save({"table": table}, tmp_path / "2.pt")
    reshard(tmp_path / "1.pt", tmp_path / "1", "--compress", "zstd")
    assert encoding(tmp_path / "1", "table") == "zstd"
    reshard(tmp_path / "2.pt", tmp_path / "2", "--compress", "zstd", "--base", tmp_path / "1", "--changed-rows")
    assert encoding(tmp_path / "2", "table") == "patched"
    moved = reshard(tmp_path / "2", tmp_path / "moved", "--compress", "zstd")  # no chunk may move as it is
    for path in (tmp_path / "2", moved):
        with tessera.open(path) as found:
            assert torch.equal(found["table"].torch(), table)


def files_of(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_workers_write_what_one_process_writes(three, tmp_path):
    options = ["--to", "native", "--world-size", 2, "--strategy", "dim0", "--base", three / "2", "--changed-rows"]
    reshard(three / "3.pt", tmp_path / "alone", *options)
    for part in range(3):
        succeed("ckpt-reshard", three / "3.pt", tmp_path / "shared", *options, "--part", f"{part}/3")
    assert files_of(tmp_path / "shared") == files_of(tmp_path / "alone") == files_of(three / "3")
    of_python = {"world_size": 2, "strategy": "dim0", "base": three / "2", "changed_rows": True}
    tessera.reshard(three / "3.pt", tmp_path / "python", **of_python)
    for part in range(2):
        tessera.reshard(three / "3.pt", tmp_path / "parts", **of_python, part=part, parts=2)
    assert files_of(tmp_path / "python") == files_of(tmp_path / "parts") == files_of(tmp_path / "alone")


@pytest.mark.parametrize("is_killed", [False, True])
def test_an_interrupted_run_is_resumed(tmp_path, is_killed):
    """The run is killed, or its file may not grow beyond 10 MB."""
    table, dense = torch.randn(1 << 20, 8), torch.randn(3_000_000)
    torch.save({"table": table, "z": torch.zeros(1)}, tmp_path / "1.pt")
    table[torch.arange(0, 1 << 20, 11)] += 1
    torch.save({"table": table, "the rest": dense, "z": torch.ones(1)}, tmp_path / "2.pt")
    base = reshard(tmp_path / "1.pt", tmp_path / "base")
    more = ["--base", base, "--changed-rows"]
    whole = reshard(tmp_path / "2.pt", tmp_path / "whole", *more)
    assert encoding(whole, "table") == "patched"
    options = [tmp_path / "2.pt", tmp_path / "out", "--threads", 1, *more]
    partial = tmp_path / "out.partial"
    interrupt(options, partial, is_killed)
    assert not (tmp_path / "out").exists()
    if not is_killed:
        other = run("ckpt-reshard", *options[:-1], "--resume")
        assert other.returncode == 3 and "source or options have changed: changed-rows: expected given, found none" in other.stderr, other.stderr
    said = succeed("ckpt-reshard", *options, "--resume")
    assert is_killed or "from the interrupted run" in said
    assert files_of(whole) == files_of(tmp_path / "out")


def save_on_two_ranks(folder):
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    table = torch.randn(30_000, 8, generator=torch.Generator().manual_seed(0))
    base = None
    for step in (1, 2, 3):
        # The first rank's rows do not change in the second step.
        table[15_000 + step:: 5000] += 1
        if step == 3:
            table[step::5000] += 1
        state = {"table": distribute_tensor(table, mesh, [Shard(0)]), "same": torch.ones(40_000), "step": step}
        saved = tessera.save(state, folder / str(step), base=base, changed_rows=True)
        base = saved.path
    assert saved.nbytes < 1000, saved
    again = {"table": distribute_tensor(torch.zeros_like(table), mesh, [Shard(0)]), "same": torch.zeros(40_000), "step": 0}
    tessera.load(again, folder / "3")
    assert torch.equal(again["table"].to_local(), state["table"].to_local())
    if dist.get_rank() == 0:
        torch.save(table, folder / "table.pt")
    dist.destroy_process_group()


def test_two_ranks_write_their_own_rows(tmp_path):
    run_function(save_on_two_ranks, 2, tmp_path)
    shutil.rmtree(tmp_path / "1")
    shutil.rmtree(tmp_path / "2")
    assert tessera.verify(tmp_path / "3") == []
    with tessera.open(tmp_path / "3") as found:
        assert torch.equal(found["table"].torch(), torch.load(tmp_path / "table.pt"))


def test_it_needs_a_base_in_a_move(tmp_path):
    torch.save({"a": torch.ones(3)}, tmp_path / "s.pt")
    found = run("ckpt-reshard", tmp_path / "s.pt", tmp_path / "out", "--changed-rows")
    assert found.returncode == 2 and "--changed-rows: expected --base PREVIOUS too" in found.stderr
    with pytest.raises(tessera.Error, match="changed_rows: expected base too"):
        tessera.reshard(tmp_path / "s.pt", tmp_path / "out", changed_rows=True)
