"""Values that each rank has for itself: tessera.PerRank, saved and loaded by the same and by another number of ranks."""

import random

import pytest
import torch
import torch.distributed as dist

from on_ranks import run_function
from python_package import tessera


class Position:
    """The position of a data loader."""

    def __init__(self, seen=-1):
        self.seen = seen

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def start():
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def save_on_ranks(path, format):
    rank, _ = start()
    torch.manual_seed(100 + rank)
    state = {"step": 5, "data": {"loader": tessera.PerRank(Position(10 * rank))}, "files": tessera.PerRank([f"{rank}a", f"{rank}b"]),
             "rng": tessera.PerRank(tessera.rng()), "number": tessera.PerRank(rank)}
    if format == "native":
        tessera.async_save(state, path).result()
    else:
        tessera.save(state, path, format=format)
    torch.save(torch.rand(4), f"{path}.drawn.{rank}")
    dist.destroy_process_group()


def load_on_as_many_ranks(path):
    rank, _ = start()
    loader = Position()
    state = {"step": 0, "data": {"loader": tessera.PerRank(loader)}, "files": tessera.PerRank([], "split"),
             "rng": tessera.PerRank(tessera.rng(), "split"), "number": tessera.PerRank(None, "merge")}
    wrappers = state["files"], state["number"]
    tessera.load(state, path)
    assert state["step"] == 5 and loader.seen == 10 * rank
    assert (state["files"], state["number"]) == wrappers
    assert state["files"].value == [f"{rank}a", f"{rank}b"]
    assert state["number"].value == [0, 1]
    assert torch.equal(torch.rand(4), torch.load(f"{path}.drawn.{rank}"))
    dist.destroy_process_group()


def load_on_three_ranks(path):
    rank, _ = start()
    loader = Position()
    state = {"step": 0, "data": {"loader": tessera.PerRank(loader, "replicate")}, "files": tessera.PerRank([], "split"),
             "rng": tessera.PerRank(tessera.rng(), "split"), "number": tessera.PerRank("kept", "drop")}
    tessera.load(state, path)
    assert loader.seen == 10 * (rank % 2)
    shares = [None] * 3
    dist.all_gather_object(shares, state["files"].value)
    assert sum(shares, []) == ["0a", "0b", "1a", "1b"] and max(map(len, shares)) == 2
    assert state["number"].value == "kept"
    drawn = [None] * 3
    dist.all_gather_object(drawn, torch.rand(4).tolist())
    assert drawn[:2] == [torch.load(f"{path}.drawn.{each}").tolist() for each in range(2)]
    assert drawn[2] not in drawn[:2]

    with pytest.raises(tessera.Error) as refused:
        tessera.load({"data": {"loader": tessera.PerRank(Position())}, "number": tessera.PerRank(0, "split"), "step": 0,
                      "files": tessera.PerRank([], "split"), "rng": tessera.PerRank(tessera.rng(), "drop")}, path)
    assert [str(problem) for problem in refused.value.problems] == [
        "data.loader.ranks: per rank: expected as many ranks as at the save, or a policy (replicate, merge, split, drop), found 2 ranks "
        "at the save, 3 now",
        "number.ranks: per rank: expected a list on each rank, or an object with branch(), found a value of type int"]
    dist.destroy_process_group()


@pytest.mark.parametrize("format", ["native", "dcp", "safetensors", "torch"])
def test_each_rank_gets_its_value_back(tmp_path, format):
    path = str(tmp_path / {"safetensors": "state.safetensors", "torch": "state.pt"}.get(format, "state"))
    run_function(save_on_ranks, 2, path, format)
    run_function(load_on_as_many_ranks, 2, path)
    if format == "native":
        run_function(load_on_three_ranks, 3, path)
    with tessera.open(path) as checkpoint:
        saved = checkpoint.state_dict()
        assert saved["number"] == {"ranks": [0, 1]} and saved["data"]["loader"] == {"ranks": [{"seen": 0}, {"seen": 10}]}


def only_some_ranks_have_it(path):
    rank, _ = start()
    with pytest.raises(tessera.Error, match="b.ranks: per rank: expected a PerRank of this name on all ranks, found none on rank 1"):
        tessera.save({"a": tessera.PerRank(1)} | ({"b": tessera.PerRank(2)} if rank == 0 else {}), path)
    with pytest.raises(tessera.Error, match="rank 1: a.ranks: value: expected" if rank == 0 else "^a.ranks: value: expected"):
        tessera.save({"a": tessera.PerRank(torch.ones(2) if rank else 1)}, path)
    tessera.save({"a": tessera.PerRank(1), "b": 1}, path)
    with pytest.raises(tessera.Error, match="b.ranks: missing: expected a value of that name, found none"):
        tessera.load({"a": tessera.PerRank(0), "b": tessera.PerRank(0)}, path)
    state = {"a": tessera.PerRank(0), "b": tessera.PerRank("kept", "drop")}
    tessera.load(state, path, strict=False)
    assert (state["a"].value, state["b"].value) == (1, "kept")
    dist.destroy_process_group()


def test_what_does_not_fit_is_told_on_all_ranks(tmp_path):
    run_function(only_some_ranks_have_it, 2, str(tmp_path / "state"))


def test_one_rank_alone(tmp_path):
    with pytest.raises(ValueError, match="policy: expected one of refuse, replicate, merge, split, drop, found 'copy'"):
        tessera.PerRank(1, "copy")
    state = {"number": tessera.PerRank(random.random()), "nested": [tessera.PerRank({"x": [1, (2,)]}), {"deep": tessera.PerRank(None)}]}
    tessera.save(state, tmp_path / "state")
    into = {"number": tessera.PerRank(0), "nested": [tessera.PerRank(0), {"deep": tessera.PerRank(0)}]}
    tessera.load(into, tmp_path / "state")
    assert repr(into) == repr(state)
