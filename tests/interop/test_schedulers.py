"""Shows C8. A run that moves between PyTorch and Tessera has, step by step, the learning rates that it would have had."""

import subprocess
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckpt_tools import BIN
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

STEPS = 14
MOVES = (0, 1, 2, 3, 5, 6, 9, STEPS)
warnings.filterwarnings("ignore")


def in_cpp(kind, first, last, begin="-", end="-") -> list[float]:
    words = [BIN / "scheduler_parity", kind, begin, end, last]
    process = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr
    rates = [float(line) for line in process.stdout.split()]
    assert len(rates) == last - first
    return rates


def in_python(kind, first, last, begin=None, end=None, whole_state=True) -> list[float]:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def make_scheduler():
        if kind == "plateau":
            return ReduceLROnPlateau(optimizer, factor=0.5, patience=1, cooldown=2)
        return StepLR(optimizer, 3, 0.5)

    scheduler = None
    if begin:
        # The fields to load: `last_epoch` of StepLR, or all fields of ReduceLROnPlateau that libtorch has too.
        saved = {"last_epoch": 0} if kind == "step" else fields_of(make_scheduler())
        for group in optimizer.param_groups:
            group.pop("initial_lr", None)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optim": optimizer_state, "scheduler": saved, "step": 0}
        dcp.load(state, checkpoint_id=begin, no_dist=True)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        assert state["step"] == first
        scheduler = make_scheduler()
        scheduler.load_state_dict(state["scheduler"])
    else:
        scheduler = make_scheduler()
    rates = []
    for step in range(first, last):
        optimizer.step()
        scheduler.step(*([4.0 - step if step < 2 else 3.5] if kind == "plateau" else []))
        rates.append(optimizer.param_groups[0]["lr"])
    if end:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        saved = fields_of(scheduler) if whole_state else {"last_epoch": scheduler.last_epoch}
        dcp.save({"model": model_state, "optim": optimizer_state, "scheduler": saved, "step": last}, checkpoint_id=end, no_dist=True)
    return rates


def fields_of(scheduler) -> dict:
    return {name: value for name, value in scheduler.state_dict().items() if name != "_last_lr"}


@pytest.mark.parametrize("kind", ["step", "plateau"])
# Shows C8.
def test_a_run_that_moves_from_python_has_pythons_rates(tmp_path, kind):
    expected = in_python(kind, 0, STEPS)
    assert expected[-1] < 0.3
    for move in MOVES:
        rates = in_python(kind, 0, move, end=tmp_path / str(move), whole_state=move % 2 == 0 or kind == "plateau")
        assert rates + in_cpp(kind, move, STEPS, begin=tmp_path / str(move)) == expected, move


@pytest.mark.parametrize("kind", ["step", "plateau"])
# Shows C8.
def test_a_run_that_moves_to_python_and_back_has_the_rates_of_cpp(tmp_path, kind):
    expected = in_cpp(kind, 0, STEPS)
    for move in MOVES[:-1]:
        to, back = tmp_path / f"to-{move}", tmp_path / f"back-{move}"
        rates = in_cpp(kind, 0, move, end=to)
        rates += in_python(kind, move, move + 1, begin=to, end=back)
        rates += in_cpp(kind, move + 1, STEPS, begin=back)
        assert rates == expected, move


# Shows C8.
def test_a_step_when_the_scheduler_is_made_gives_pythons_rates():
    assert in_cpp("as-python", 0, STEPS) == in_python("step", 0, STEPS)
    assert in_cpp("step", 0, STEPS)[1:] == in_python("step", 0, STEPS)[:-1]


# Shows C8.
def test_another_step_size_is_refused(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    scheduler = StepLR(optimizer, 4, 0.5)
    dcp.save({"model": model_state, "optim": optimizer_state, "scheduler": scheduler.state_dict(), "step": 0},
             checkpoint_id=tmp_path / "other", no_dist=True)
    process = subprocess.run([str(BIN / "scheduler_parity"), "step", str(tmp_path / "other"), "-", "1"],
                             capture_output=True, text=True, timeout=60)
    assert process.returncode == 1
    assert "scheduler: value: expected a value that can be loaded, found step_size of a scheduler" in process.stderr
