"""Optimizer state of Hugging Face's `Trainer` through Tessera: `Trainer(..., callbacks=[tessera.transformers.SaveCallback()])`."""

from __future__ import annotations

import os
import random
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ._arguments import PathLike, local_folder
from ._checkpoint import open as open_checkpoint
from ._errors import Error
from ._latest import numbered
from ._load import load
from ._save import Saved, async_save
from ._tensor import Tensor

FOLDER = "tessera"  # name of the folder in each checkpoint folder of the Trainer
STATE_FILE = "trainer_state.json"  # the file that the Trainer writes last


class SaveCallback(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Saves the optimizer, the scheduler, the gradient scaler and the random numbers beside each model that the Trainer saves,
    in the background.

    Use it with `TrainingArguments(save_only_model=True)`: the Trainer then saves the model, and this callback the rest,
    in `checkpoint-N/tessera`. All ranks write together. `trainer.train(resume_from_checkpoint=tessera.transformers.latest(output_dir))`
    loads it again, on any number of ranks.

    format, compress: as for `tessera.save`.
    """

    def __init__(self, *, format: str = "native", compress: str = "none"):
        self._format, self._compress = format, compress
        self._saving: Future[Saved] | None = None
        self._random: dict[str, Any] | None = None  # set right before the first step, because the data loader draws numbers before it

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Refuses arguments that do not fit this callback. If the Trainer resumes, loads what `on_save` saved."""
        if not args.save_only_model:
            raise ValueError("TrainingArguments: expected save_only_model=True beside tessera's SaveCallback, found False "
                             "(the Trainer would save the optimizer too)")
        if args.save_total_limit == 1:
            raise ValueError("TrainingArguments: expected save_total_limit=2 or more, or None, beside tessera's SaveCallback, "
                             "found 1 (the Trainer would remove the last checkpoint before the new one is complete)")
        if state.trial_params is not None and state.trial_name is None:
            raise ValueError("hyperparameter_search: expected hp_name, a function that names the trial's folder, beside tessera's "
                             "SaveCallback, found none (the callback cannot see the names that the Trainer gives: "
                             'hp_name=lambda trial: f"run-{trial.number}" gives those of Optuna)')
        local_folder("output_dir", args.output_dir)
        if state.global_step:
            self._load(_folder(args, state), kwargs)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Before the first step after a resume: sets the random generators."""
        if self._random is not None:
            _set_random_state(self._random)
            self._random = None

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """If the Trainer saves next: waits for the save before."""
        if control.should_save:
            self.wait()  # the Trainer may remove old folders next

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """As `on_step_end`."""
        if control.should_save:
            self.wait()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Waits for the save in the background."""
        self.wait()  # save_strategy="best": the Trainer decides after this call whether to save

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Begins to save in the background, when the Trainer has saved the model."""
        self.wait()
        folder = _folder(args, state)
        folder.mkdir(parents=True, exist_ok=True)
        contents = self._state(kwargs)
        contents["random"] = {f"rank-{args.process_index}": _random_state()}
        self._saving = async_save(contents, folder / FOLDER, overwrite=True, format=self._format,
                                  compress=self._compress)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Waits for the last save."""
        self.wait()

    def wait(self) -> None:
        """Waits for the save in the background. Raises its error."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    @staticmethod
    def _state(kwargs: dict[str, Any]) -> dict[str, Any]:
        state = {"optimizer": get_optimizer_state_dict(kwargs["model"], _optimizer(kwargs)),
                 "scheduler": kwargs["lr_scheduler"].state_dict()}
        scaler = getattr(kwargs["optimizer"], "scaler", None)  # of accelerate's optimizer, with fp16=True
        if scaler is not None and scaler.is_enabled():
            state["scaler"] = scaler.state_dict()
        return state

    def _load(self, folder: Path, kwargs: dict[str, Any]) -> None:
        if not (folder / FOLDER).exists():
            raise Error(f"{folder}: expected {FOLDER} with the optimizer's state, which SaveCallback writes, found none "
                        f"(tessera.transformers.latest({str(folder.parent)!r}) is the newest complete one)",
                        kind="not_found", path=str(folder))
        contents = self._state(kwargs)
        with open_checkpoint(folder / FOLDER) as checkpoint:
            saved = checkpoint.state_dict(lazy=True)
            rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
            found = saved["random"].get(f"rank-{rank}")  # None: there are more ranks now
            if found is not None:
                self._random = {name: value.torch() if isinstance(value, Tensor) else value for name, value in found.items()}
        if "scaler" in contents and "scaler" not in saved:
            warnings.warn(f"{folder / FOLDER}: scaler: expected the state of the gradient scaler, because fp16=True, found none; "
                          "the scaler starts anew", RuntimeWarning, stacklevel=2)
            del contents["scaler"]
        load(contents, folder / FOLDER, only=[f"{name}.*" for name in contents])
        set_optimizer_state_dict(kwargs["model"], _optimizer(kwargs), contents["optimizer"])
        kwargs["lr_scheduler"].load_state_dict(contents["scheduler"])
        if "scaler" in contents:
            kwargs["optimizer"].scaler.load_state_dict(contents["scaler"])


def latest(output_dir: PathLike) -> str | None:
    """Returns the newest `checkpoint-N` of a Trainer that is complete, for `resume_from_checkpoint`; None if there is none."""
    for _, folder in reversed(numbered(local_folder("output_dir", output_dir), "checkpoint-")):
        if not (folder / STATE_FILE).exists() or not (folder / FOLDER).exists():
            continue
        try:
            open_checkpoint(folder / FOLDER).close()
        except Error:
            continue
        return str(folder)
    return None


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    """Returns the folder of the Trainer's checkpoint. In a hyperparameter search, each trial has a folder in output_dir."""
    folder = Path(args.output_dir)
    if state.trial_params is not None:
        folder /= state.trial_name
    return folder / f"checkpoint-{state.global_step}"


def _optimizer(kwargs: dict[str, Any]) -> Any:
    return getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])  # accelerate wraps it


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    try:
        import numpy

        found: Any = numpy.random.get_state()
        kind, keys, *rest = found
        state["numpy"] = [kind, keys.tolist(), *rest]
    except ImportError:
        pass
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state:
        import numpy

        numpy.random.set_state(tuple(state["numpy"]))
