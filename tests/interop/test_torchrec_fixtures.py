"""Checkpoints of torchrec, moved from every sharding type to every other; no torchrec is needed."""

import json
import sys

import pytest
from ckpt_tools import FIXTURES, MAKE, assert_same_state, expectation, listing, reshard, succeed, tensors_by_name
from safetensors.torch import load_file

sys.path.insert(0, str(MAKE))

from expect import tensor_row  # noqa: E402

VALID = FIXTURES / "dcp" / "valid"
RULES = [
    {"sharding": "table_wise", "ranks": [3]},
    {"sharding": "column_wise", "ranks": [0, 2]},
    {"sharding": "row_wise", "ranks": [0, 1, 2, 3]},
    {"sharding": "table_row_wise", "ranks": [2, 3]},
    {"sharding": "table_column_wise", "ranks": [1, 0]},
    {"sharding": "grid", "ranks": [0, 1, 2, 3], "column_shards": 2},
    {"sharding": "data_parallel"},
]
COLUMN_SHARDS = [1, 2, 1, 1, 2, 2, 1]  # of RULES
TABLES = {
    "torchrec": ["t_tw", "t_cw", "t_rw", "t_twrw", "t_twcw", "t_grid", "t_dp"],
    "torchrec_adagrad": ["t_tw", "t_cw", "t_rw", "t_dp"],
    "torchrec_sgd": ["t_tw", "t_cw", "t_rw", "t_dp"],
}
# Within a plan the tables have different sharding types. Over all plans each table has every type.
MOVES = [(name, shift) for name in TABLES for shift in range(len(RULES))]


def plan_file(folder, name, shift):
    rules = {table: RULES[(i + shift) % len(RULES)] for i, table in enumerate(TABLES[name])}
    path = folder / "plan.json"
    path.write_text(json.dumps({"schema": 1, "world_size": 4, "tables": rules}))
    return path


@pytest.mark.parametrize(("name", "shift"), MOVES)
@pytest.mark.parametrize("to", ["native", "dcp"])
def test_canonical_state_is_equal_under_every_plan(name, shift, to, tmp_path):
    """Shows D7, D9, E10. Weights and state, with one accumulator per row, equal those of the trainer."""
    plan = plan_file(tmp_path, name, shift)
    moved = reshard(
        VALID / name, tmp_path / "moved", "--to", to, "--plan", plan, "--optimizer-names", "canonical", "--allow-lossy"
    )
    assert_same_state(listing(moved), expectation(VALID / f"{name}.canonical"))
    succeed("ckpt-inspect", "verify", moved)


@pytest.mark.parametrize("shift", range(len(RULES)))
def test_state_under_torchrecs_names_has_a_block_per_column_shard(shift, tmp_path):
    """Shows D9, E10. The names and shapes are those that torchrec's loader expects under the new plan."""
    source = VALID / "torchrec"
    whole = reshard(source, tmp_path / "whole.safetensors", "--optimizer-names", "canonical", "--allow-lossy")
    canonical = load_file(whole)
    plan = plan_file(tmp_path, "torchrec", shift)
    moved = reshard(source, tmp_path / "moved", "--to", "dcp", "--plan", plan, "--allow-lossy")
    held, expected = tensors_by_name(listing(moved)), tensors_by_name(expectation(source))
    for i, table in enumerate(TABLES["torchrec"][:-1]):
        weight = f"optim.state.ebc.embedding_bags.{table}.weight"
        num_shards = COLUMN_SHARDS[(i + shift) % len(RULES)]
        if num_shards != COLUMN_SHARDS[i]:
            row = tensor_row("", canonical[f"{weight}.row_sum"].repeat(num_shards))
            expected[f"{weight}.{table}.momentum1"] = (row["dtype"], row["shape"], row["nbytes"], row["sha256"])
    assert held == expected


@pytest.mark.parametrize("name", TABLES)
def test_names_come_back(name, tmp_path):
    """Shows D9. If no column shards were merged, a move to canonical names and back changes nothing."""
    merged = ("t_cw", "t_twcw", "t_grid") if name == "torchrec" else ()
    only = [word for table in merged for word in ("--only", f"!*.{table}.*")]
    canonical = reshard(VALID / name, tmp_path / "canonical", "--optimizer-names", "canonical", *only)
    assert "momentum1" not in succeed("ckpt-inspect", "ls", canonical)
    back = reshard(canonical, tmp_path / "back", "--to", "dcp", "--optimizer-names", "torchrec")
    expected = expectation(VALID / name)
    expected["tensors"] = [t for t in expected["tensors"] if not any(f".{table}." in t["name"] for table in merged)]
    assert_same_state(listing(back), expected)


def test_torchrecs_own_trip_loses_nothing(tmp_path):
    """Shows D9, E10. Moves to the native format and back, with the names as they are stored."""
    native = reshard(VALID / "torchrec", tmp_path / "native")
    back = reshard(native, tmp_path / "back", "--to", "dcp")
    assert_same_state(listing(back), expectation(VALID / "torchrec"))
