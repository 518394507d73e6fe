"""Ways through formats, world sizes and strategies that must all end in the same state."""

import itertools
import json

import pytest
from ckpt_tools import FIXTURES, FORMATS, WHOLE_TENSORS, assert_same_state, expectation, files_of, listing, reshard, run, succeed

DCP, TORCH = FIXTURES / "dcp" / "valid", FIXTURES / "torch_zip" / "valid"
SOURCES = [DCP / "fsdp2_adamw", DCP / "fsdp2_tp", DCP / "tied", DCP / "nested", TORCH / "training_state.pt", TORCH / "shared.pt"]
STRATEGIES = [
    ("replicated", 2),
    ("dim0", 1),
    ("dim0", 3),
    ("dim0", 16),  # more ranks than rows
    ("hybrid:2x2", 4),
]

each_source = pytest.mark.parametrize("source", SOURCES, ids=[s.name for s in SOURCES])


@each_source
@pytest.mark.parametrize("strategy, world_size", STRATEGIES)
@pytest.mark.parametrize("target", ["native", "dcp"])
def test_every_strategy_keeps_the_state(source, strategy, world_size, target, tmp_path):
    """Shows A2, A4, E14. Any strategy and world size, in both formats that have ranks, holds the same state."""
    options = ["--strategy", strategy, "--world-size", world_size]
    moved = reshard(source, tmp_path / "moved", "--to", target, *options)
    assert_same_state(listing(moved), expectation(source))
    succeed("ckpt-inspect", "verify", moved)
    back = reshard(moved, tmp_path / "back", "--to", "dcp", "--world-size", 2)
    assert_same_state(listing(back), expectation(source))


@pytest.fixture(scope="module")
def along(tmp_path_factory):
    """Returns a function that moves a source through formats and compares the state after each move. Ways that begin
    alike share their first moves."""
    folder, made = tmp_path_factory.mktemp("ways"), {}

    def move(source, *way):
        if not way:
            return source
        if (source, way) not in made:
            here, target = move(source, *way[:-1]), way[-1]
            world_size = [] if target in WHOLE_TENSORS else ["--world-size", 4 - len(way)]
            there = reshard(here, folder / "-".join([source.name, *way]), "--to", target, *world_size)
            assert_same_state(listing(there), expectation(source))
            made[source, way] = there
        return made[source, way]

    return move


@each_source
@pytest.mark.parametrize("way", list(itertools.permutations(FORMATS, 3)), ids="-".join)
def test_every_way_through_the_formats_ends_in_the_same_state(source, way, along):
    """Shows A4, E2, E9. A move from A to B to C keeps tensors. Values, nesting and aliases are kept through safetensors
    and torch.save too."""
    along(source, *way)


@pytest.mark.parametrize("target", FORMATS)
def test_equal_state_gives_equal_bytes(target, tmp_path):
    """Shows E11. The same move twice, with one thread and with four, gives the same files."""
    world_size = [] if target in WHOLE_TENSORS else ["--world-size", 3]
    for threads in (1, 4):
        (tmp_path / f"{threads}").mkdir()
        reshard(DCP / "fsdp2_adamw", tmp_path / f"{threads}" / "moved", "--to", target, *world_size, "--threads", threads)
    assert files_of(tmp_path / "1") == files_of(tmp_path / "4")


def test_compression_changes_nothing_but_the_bytes(tmp_path):
    """Shows E1. A compressed and a plain checkpoint are the same to `diff`."""
    plain = reshard(DCP / "torchrec", tmp_path / "plain", "--to", "native", "--compress", "none")
    packed = reshard(plain, tmp_path / "packed", "--to", "native", "--compress", "zstd:3")
    succeed("ckpt-inspect", "diff", plain, packed)
    succeed("ckpt-inspect", "diff", DCP / "torchrec", packed)


def test_state_per_column_shard_is_merged_only_by_leave(tmp_path):
    """Shows E7, E10. torchrec's accumulators per column shard are merged only with --allow-lossy."""
    options = ["--to", "native", "--world-size", 3]
    refused = run("ckpt-reshard", DCP / "torchrec", tmp_path / "moved", *options)
    assert refused.returncode == 3
    assert "--allow-lossy" in refused.stderr and "t_cw.momentum1" in refused.stderr
    assert list(tmp_path.iterdir()) == []
    moved = reshard(DCP / "torchrec", tmp_path / "moved", *options, "--allow-lossy")
    shapes = {t["name"]: t["shape"] for t in listing(moved)["tensors"]}
    assert shapes["optim.state.ebc.embedding_bags.t_cw.weight.t_cw.momentum1"] == [13]


def test_index_is_rebuilt_from_the_rank_files(tmp_path):
    """Shows E12. A lost index.h5 comes back byte for byte."""
    moved = reshard(DCP / "fsdp2_adamw", tmp_path / "moved", "--to", "native", "--world-size", 3)
    before = files_of(moved)
    (moved / "index.h5").unlink()
    succeed("ckpt-reshard", "rebuild-index", moved)
    assert files_of(moved) == before


def test_only_and_rename_and_cast(tmp_path):
    """Shows E7. The options select, rename and cast, and change nothing else."""
    moved = reshard(
        DCP / "fsdp2_adamw", tmp_path / "moved", "--to", "native", "--only", "model.layers.*", "--rename", "model.=net.", "--cast", "bfloat16"
    )
    found = {t["name"]: t["dtype"] for t in listing(moved)["tensors"]}
    expected = {
        t["name"].replace("model.", "net.", 1): "bfloat16"
        for t in expectation(DCP / "fsdp2_adamw")["tensors"]
        if t["name"].startswith("model.layers.")
    }
    assert found == expected


def test_dry_run_writes_nothing(tmp_path):
    """Shows A2. `--dry-run` says how many bytes would move and leaves nothing."""
    out = succeed("ckpt-reshard", DCP / "fsdp2_adamw", tmp_path / "moved", "--to", "native", "--dry-run", "--json")
    assert json.loads(out)["schema"] == 1
    assert list(tmp_path.iterdir()) == []
