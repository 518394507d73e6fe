"""torchrec saves, ckpt-reshard moves, torchrec loads: under another plan, with torchrec's names, and through Tessera's
names."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from ckpt_tools import reshard, run, succeed  # noqa: E402

WORLD, HOST = 4, 2
RULES = {
    "table_wise": {"sharding": "table_wise", "ranks": [1]},
    "column_wise": {"sharding": "column_wise", "ranks": [3, 0, 2, 1]},
    "row_wise": {"sharding": "row_wise", "ranks": [0, 1, 2, 3]},
    "table_row_wise": {"sharding": "table_row_wise", "ranks": [2, 3]},
    "table_column_wise": {"sharding": "table_column_wise", "ranks": [1, 0]},
    "grid": {"sharding": "grid", "ranks": [0, 1, 2, 3], "column_shards": 2},
}
TYPES = list(RULES)
# Uneven rows, but enough for each rank, because torchrec fails if a rank has none. In a grid, its shards have at least 128 columns.
ROWS = [7, 8, 10, 11, 13, 14]
TABLES = [{"name": f"t{i}", "rows": rows, "columns": 256} for i, rows in enumerate(ROWS)] + [{"name": "dp", "rows": 5, "columns": 4}]


def plan_for(shift):
    """Table i is sharded by type i + shift, so that all shifts together move every type to every other."""
    rules = {f"t{i}": RULES[TYPES[(i + shift) % len(TYPES)]] for i in range(len(TYPES))}
    return {"schema": 1, "world_size": WORLD, "tables": rules | {"dp": {"sharding": "data_parallel"}}}


def num_column_shards(plan, table):
    rule = plan["tables"][table]
    by_columns = {"column_wise": len(rule.get("ranks", [])), "table_column_wise": HOST, "grid": rule.get("column_shards")}
    return by_columns.get(rule["sharding"], 1)


def train(folder, plan, optimizer, **options):
    """Runs train_torchrec.py and returns the final state, without the outputs."""
    (folder / "tables.json").write_text(json.dumps(TABLES))
    (folder / "plan.json").write_text(json.dumps(plan))
    result = folder / "result.safetensors"
    arguments = ["--tables", folder / "tables.json", "--plan", folder / "plan.json", "--optimizer", optimizer]
    arguments += ["--host-size", HOST, "--result", result]
    for name, value in options.items():
        arguments += [f"--{name}", value]
    process = subprocess.run(
        [sys.executable, "-B", HERE / "train_torchrec.py", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return {name: tensor for name, tensor in load_file(result).items() if not name.startswith("output.")}


def batches(seed):
    """Makes batches for two steps; some bags are empty, some ids occur twice."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for step in range(2):
        for rank in range(WORLD):
            lengths = torch.randint(0, 4, (3 * len(TABLES),), generator=generator)
            ids = [
                torch.randint(0, t["rows"], (int(lengths[3 * i : 3 * i + 3].sum()),), generator=generator)
                for i, t in enumerate(TABLES)
            ]
            found |= {f"{step}.{rank}.lengths": lengths, f"{step}.{rank}.values": torch.cat(ids)}
    return found


@pytest.fixture(scope="module")
def saved(request, tmp_path_factory):
    """Returns (optimizer, checkpoint, state that torchrec held) of a run under the first plan."""
    folder = tmp_path_factory.mktemp(request.param)
    save_file(batches(3), folder / "batches.safetensors")
    held = train(folder, plan_for(0), request.param, batches=folder / "batches.safetensors", save=folder / "saved")
    return request.param, folder / "saved", held


def row_wise_state(held):
    """Returns (name, table) of the state that torchrec keeps once per row and column shard."""
    return [(n, n.split(".")[-2]) for n, tensor in held.items() if n.endswith(".momentum1") and tensor.dim() == 1]


def by_row(held, plan):
    """Merges the accumulators of the column shards into one per row: their mean, because all shards are equally wide."""
    found = dict(held)
    for name, table in row_wise_state(held):
        found[name] = held[name].double().view(num_column_shards(plan, table), -1).mean(0).to(held[name].dtype)
    return found


def by_column_shard(held, plan):
    """Copies one accumulator per row to each column shard."""
    return held | {name: held[name].repeat(num_column_shards(plan, table)) for name, table in row_wise_state(held)}


def under_plan(held, before, after):
    """Returns what torchrec must hold under another plan: the same state if the columns stay, else copies of the mean."""
    found = by_column_shard(by_row(held, before), after)
    for name, table in row_wise_state(held):
        if num_column_shards(before, table) == num_column_shards(after, table):
            found[name] = held[name]
    return found


def assert_equal(found, expected):
    assert sorted(found) == sorted(expected)
    differing = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not differing, differing


def write_plan(path, plan):
    path.write_text(json.dumps(plan))
    return path


OPTIMIZERS = ("row_wise_adagrad", "adagrad", "sgd")
each_optimizer = pytest.mark.parametrize("saved", OPTIMIZERS, indirect=True)
# row-wise state, which is hard to move: every type to every other
MOVES = [("row_wise_adagrad", shift) for shift in range(len(TYPES))] + [(o, shift) for o in OPTIMIZERS[1:] for shift in (1, 3)]


@pytest.mark.parametrize(("saved", "shift"), MOVES, indirect=["saved"])
def test_torchrec_loads_what_was_moved_to_another_plan(saved, shift, tmp_path):
    """Shows D9, E10. Weights and state are equal under every sharding type. The stored names are torchrec's."""
    optimizer, source, held = saved
    plan = plan_for(shift)
    moved = reshard(source, tmp_path / "moved", "--to", "dcp", "--plan", write_plan(tmp_path / "to.json", plan), "--allow-lossy")
    assert_equal(train(tmp_path, plan, optimizer, load=moved), under_plan(held, plan_for(0), plan))


@each_optimizer
def test_torchrec_loads_what_went_by_way_of_canonical_names(saved, tmp_path):
    """Shows D9, E10. Moves to the native format under Tessera's names, another plan and number of ranks, and back to
    torchrec."""
    optimizer, source, held = saved
    between = write_plan(tmp_path / "between.json", plan_for(3) | {"world_size": 6})
    native = reshard(source, tmp_path / "native", "--plan", between, "--optimizer-names", "canonical", "--allow-lossy")
    names = succeed("ckpt-inspect", "ls", native)
    assert "momentum1" not in names
    assert ("row_sum" in names) == (optimizer == "row_wise_adagrad")

    plan = plan_for(5)
    back = reshard(
        native, tmp_path / "back", "--to", "dcp", "--plan", write_plan(tmp_path / "to.json", plan), "--optimizer-names", "torchrec"
    )
    expected = by_column_shard(by_row(held, plan_for(0)), plan)
    assert_equal(train(tmp_path, plan, optimizer, load=back), expected)


@each_optimizer
def test_torchrec_goes_on_as_if_nothing_had_been_moved(saved, tmp_path):
    """Shows D9. After a move to another plan and back, two more steps equal those of a run that was never moved, bit
    for bit."""
    optimizer, source, _ = saved
    save_file(batches(4), tmp_path / "batches.safetensors")
    plan = plan_for(0)
    swap = dict(zip(("table_wise", "row_wise", "table_row_wise"), ("row_wise", "table_row_wise", "table_wise")))
    swap |= {"grid": "table_column_wise", "table_column_wise": "grid", "column_wise": "column_wise"}
    other = {name: RULES[swap[rule["sharding"]]] for name, rule in plan["tables"].items() if name != "dp"}
    other["dp"] = plan["tables"]["dp"]
    there = reshard(source, tmp_path / "there", "--plan", write_plan(tmp_path / "other.json", plan | {"tables": other}))
    back = reshard(there, tmp_path / "back", "--to", "dcp", "--plan", write_plan(tmp_path / "to.json", plan))
    more = {"batches": tmp_path / "batches.safetensors"}
    assert_equal(train(tmp_path, plan, optimizer, load=back, **more), train(tmp_path, plan, optimizer, load=source, **more))


@each_optimizer
def test_state_per_column_shard_is_not_merged_without_leave(saved, tmp_path):
    """Shows E7, E10. A move that would lose something is refused; the error names the state."""
    optimizer, source, _ = saved
    process = run("ckpt-reshard", source, tmp_path / "moved", "--to", "dcp", "--plan", write_plan(tmp_path / "to.json", plan_for(2)))
    if optimizer == "row_wise_adagrad":
        assert process.returncode == 3 and "--allow-lossy" in process.stderr
    else:
        assert process.returncode == 0, process.stderr
