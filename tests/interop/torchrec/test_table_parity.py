"""torchrec and Tessera train the same tables side by side. Each resumes from what the other saved, under another plan."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from ckpt_tools import BIN, reshard  # noqa: E402

WORLD, STEPS = 2, 4
TABLES = [
    {"name": "a", "rows": 41, "columns": 8, "pooling": "sum"},
    {"name": "b", "rows": 17, "columns": 16, "pooling": "mean"},
    {"name": "c", "rows": 29, "columns": 4, "pooling": "sum"},
]
PLANS = {
    "table_wise": {"a": ("table_wise", [0]), "b": ("table_wise", [1]), "c": ("table_wise", [0])},
    "row_wise": {name: ("row_wise", [0, 1]) for name in "abc"},
    "mixed": {"a": ("row_wise", [0, 1]), "b": ("table_wise", [1]), "c": ("table_wise", [0])},
}


def plan_file(folder, name):
    rules = {table: {"sharding": sharding, "ranks": ranks} for table, (sharding, ranks) in PLANS[name].items()}
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"schema": 1, "world_size": WORLD, "tables": rules}))
    return path


@pytest.fixture
def folder(tmp_path):
    """Makes a folder with tables, first rows, the batches of all steps, and the batches of each half."""
    (tmp_path / "tables.json").write_text(json.dumps(TABLES))
    generator = torch.Generator().manual_seed(5)
    save_file({t["name"]: torch.randn(t["rows"], t["columns"], generator=generator) * 0.3 for t in TABLES},
              tmp_path / "initial.safetensors")
    batches = {}
    for step in range(STEPS):
        for rank in range(WORLD):
            lengths = torch.randint(0, 4, (5 * len(TABLES),), generator=generator)
            ids = [torch.randint(0, t["rows"], (int(lengths[5 * i : 5 * i + 5].sum()),), generator=generator)
                   for i, t in enumerate(TABLES)]
            batches |= {f"{step}.{rank}.lengths": lengths, f"{step}.{rank}.values": torch.cat(ids)}
    half = STEPS // 2
    save_file(batches, tmp_path / "all.safetensors")
    save_file({k: v for k, v in batches.items() if int(k.split(".")[0]) < half}, tmp_path / "first.safetensors")
    later = {k: v for k, v in batches.items() if int(k.split(".")[0]) >= half}
    save_file(later, tmp_path / "later.safetensors")
    renumbered = {f"{int(k.split('.')[0]) - half}.{k.split('.', 1)[1]}": v for k, v in later.items()}
    save_file(renumbered, tmp_path / "later_from_0.safetensors")
    return tmp_path


def run(command):
    process = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=300,
                             env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})
    assert process.returncode == 0, process.stderr


def train_torchrec(folder, plan, optimizer, batches, **options):
    """Returns the outputs by step and rank, and the state."""
    result = folder / "torchrec.safetensors"
    command = [sys.executable, "-B", HERE / "train_torchrec.py", "--tables", folder / "tables.json", "--plan",
               plan_file(folder, plan), "--optimizer", optimizer, "--batches", folder / f"{batches}.safetensors",
               "--result", result]
    for name, value in options.items():
        command += ["--tables-only"] if name == "tables_only" else [f"--{name}", value]
    run(command)
    return load_file(result)


def train_tessera(folder, plan, optimizer, batches, *, initial="-", load="-", first_step=0, save):
    outputs = folder / "tessera-outputs"
    shutil.rmtree(outputs, ignore_errors=True)
    run([Path(sys.executable).parent / "torchrun", "--standalone", "--no-python", "--nproc-per-node", WORLD,
         Path(BIN) / "tables_parity", folder / "tables.json", plan_file(folder, plan), optimizer, initial, load,
         folder / f"{batches}.safetensors", first_step, save, outputs])
    found = {}
    for rank in range(WORLD):
        for name, tensor in load_file(outputs / str(rank) / "outputs.safetensors").items():
            found[f"output.{int(name.rpartition('_')[2]) - first_step}.{rank}"] = tensor
    return found


def state_of(folder, checkpoint):
    """Returns the tensors of a checkpoint of Tessera under torchrec's names."""
    moved = reshard(checkpoint, folder / f"{checkpoint.name}.safetensors", "--to", "safetensors", "--optimizer-names",
                    "torchrec", "--only", "*.weight*", "--overwrite")
    return load_file(moved)


def assert_close(found, expected):
    """Everything that Tessera has is in torchrec's result too, equal to 1e-5 of the largest element."""
    assert found
    for name, tensor in found.items():
        scale = 1e-6 + expected[name].abs().max().item()
        difference = (tensor - expected[name]).abs().max().item() / scale
        assert difference <= 1e-5, (name, difference)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("optimizer", ["row_wise_adagrad", "adagrad", "sgd"])
def test_the_same_steps_give_the_same_tables(folder, plan, optimizer):
    """Shows D8, D9. Compares outputs, weights and state after four steps."""
    initial = folder / "initial.safetensors"
    theirs = train_torchrec(folder, plan, optimizer, "all", initial=initial)
    ours = train_tessera(folder, plan, optimizer, "all", initial=initial, save=folder / "saved")
    assert_close(ours, theirs)
    assert_close(state_of(folder, folder / "saved"), theirs)


@pytest.mark.parametrize("optimizer", ["row_wise_adagrad", "sgd"])
def test_tessera_goes_on_from_what_torchrec_saved(folder, optimizer):
    """Shows D9. Tessera resumes under another plan."""
    initial = folder / "initial.safetensors"
    theirs = train_torchrec(folder, "table_wise", optimizer, "all", initial=initial)
    train_torchrec(folder, "table_wise", optimizer, "first", initial=initial, save=folder / "half")
    ours = train_tessera(folder, "mixed", optimizer, "later", load=folder / "half", first_step=STEPS // 2,
                         save=folder / "saved")
    assert_close(ours, {f"output.{step - STEPS // 2}.{rank}": theirs[f"output.{step}.{rank}"]
                        for step in range(STEPS // 2, STEPS) for rank in range(WORLD)})
    assert_close(state_of(folder, folder / "saved"), theirs)


@pytest.mark.parametrize("optimizer", ["row_wise_adagrad", "adagrad", "sgd"])
def test_torchrec_goes_on_from_what_tessera_saved(folder, optimizer):
    """Shows D9. torchrec resumes under another plan, with its strict loader."""
    initial = folder / "initial.safetensors"
    expected = train_torchrec(folder, "row_wise", optimizer, "all", initial=initial, tables_only=True)
    train_tessera(folder, "mixed", optimizer, "first", initial=initial, save=folder / "half")
    moved = reshard(folder / "half", folder / "moved", "--to", "dcp", "--optimizer-names", "torchrec", "--plan",
                    plan_file(folder, "row_wise"))
    theirs = train_torchrec(folder, "row_wise", optimizer, "later_from_0", load=moved, tables_only=True)
    for step in range(STEPS // 2, STEPS):
        for rank in range(WORLD):
            expected[f"output.{step - STEPS // 2}.{rank}"] = expected.pop(f"output.{step}.{rank}")
    assert_close(theirs, expected)


@pytest.mark.parametrize("optimizer", ["row_wise_adagrad", "adagrad", "sgd"])
@pytest.mark.parametrize(("saved", "loaded"), [("table_wise", "mixed"), ("mixed", "row_wise"), ("row_wise", "table_wise")])
def test_torchrec_goes_on_through_the_python_package(folder, optimizer, saved, loaded):
    """A torchrec trainer saves with tessera.save and loads with tessera.load, under another plan."""
    initial = folder / "initial.safetensors"
    expected = train_torchrec(folder, saved, optimizer, "all", initial=initial)
    train_torchrec(folder, saved, optimizer, "first", initial=initial, save=folder / "half", through="tessera")
    found = train_torchrec(folder, loaded, optimizer, "later_from_0", load=folder / "half", through="tessera")
    for step in range(STEPS // 2, STEPS):
        for rank in range(WORLD):
            expected[f"output.{step - STEPS // 2}.{rank}"] = expected.pop(f"output.{step}.{rank}")
    assert set(found) <= set(expected)
    assert_close(found, expected)


@pytest.mark.parametrize("optimizer", ["row_wise_adagrad", "sgd"])
def test_a_cpp_trainer_goes_on_from_what_torchrec_saved_through_the_python_package(folder, optimizer):
    initial = folder / "initial.safetensors"
    expected = train_torchrec(folder, "table_wise", optimizer, "all", initial=initial, tables_only=True)
    train_torchrec(folder, "table_wise", optimizer, "first", initial=initial, save=folder / "half", through="tessera", tables_only=True)
    train_tessera(folder, "mixed", optimizer, "later", load=folder / "half", first_step=STEPS // 2, save=folder / "saved")
    assert_close(state_of(folder, folder / "saved"), expected)
