"""Checkpoints that the Python peers wrote: what we read is what the trainer held."""

import json

import pytest
from ckpt_tools import FIXTURES, assert_same_state, expectation, listing, reshard, succeed, valid_fixtures

ALL = valid_fixtures()
every_fixture = pytest.mark.parametrize("path", [p for _, p in ALL], ids=[i for i, _ in ALL])


@every_fixture
def test_listing_equals_what_the_trainer_held(path):
    """Shows E2, E9, E14. Compares names, dtypes, shapes, bytes and values of every fixture."""
    found = listing(path)
    assert found["schema"] == 1
    assert_same_state(found, expectation(path))
    assert found["format"] == expectation(path)["format"]


@every_fixture
def test_verify_finds_nothing(path):
    """Shows A3, E7. A sound checkpoint has no findings."""
    succeed("ckpt-inspect", "verify", path)


@pytest.mark.parametrize("path", [p for i, p in ALL if "flat" not in i], ids=[i for i, _ in ALL if "flat" not in i])
def test_same_state_after_a_move_to_native(path, tmp_path):
    """Shows A2, A4, E1. Every fixture moves to the native format and keeps every tensor and value."""
    moved = reshard(path, tmp_path / "moved", "--to", "native")
    assert_same_state(listing(moved), expectation(path))
    succeed("ckpt-inspect", "verify", moved)


@pytest.mark.parametrize("name", ["fsdp1_flat", "fsdp1_flat_aligned"])
def test_flat_layout_gives_the_parameters_back(name, tmp_path):
    """Shows E2. With `--flat-layout`, bare flat vectors give the parameters that FSDP1 unflattens."""
    source = FIXTURES / "dcp" / "valid" / name
    layout = FIXTURES / "dcp" / "valid" / f"{name}.flat-layout.json"
    moved = reshard(source, tmp_path / "moved", "--to", "native", "--flat-layout", layout)
    assert_same_state(listing(moved), expectation(f"{source}.unflattened"))


def test_hybrid_replicas_are_listed_once():
    """Shows E2, E14. Replicas on a 2 x 2 mesh are listed as one tensor."""
    found = listing(FIXTURES / "dcp" / "valid" / "fsdp2_hybrid")
    names = [t["name"] for t in found["tensors"]]
    assert len(names) == len(set(names))
    assert names == sorted(names, key=str.encode)


def test_listing_is_strict_json():
    """Shows E6. NaN and infinity never reach the JSON output as bare words."""
    text = succeed("ckpt-inspect", "ls", FIXTURES / "dcp" / "valid" / "values", "--json", "--sha256")
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
