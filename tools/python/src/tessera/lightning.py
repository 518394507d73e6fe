"""Checkpoints of Lightning through Tessera: `Trainer(plugins=[tessera.lightning.CheckpointIO()])`."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypedDict

import torch.distributed as dist

try:
    from lightning.fabric.plugins import TorchCheckpointIO
except ImportError:  # installed as pytorch-lightning
    from lightning_fabric.plugins import TorchCheckpointIO

from ._arguments import flag, path_bytes, text
from ._checkpoint import open as open_checkpoint
from ._ranks import Ranks
from ._save import Saved, _Background, async_save, save


_FILE_FORMATS = ("safetensors", "torch")


class _SaveOptions(TypedDict):
    """Options of `save` and `async_save`."""

    format: str
    compress: str
    overwrite: bool
    process_group: Ranks


class CheckpointIO(TorchCheckpointIO):  # type: ignore[misc,unused-ignore]
    """Saves Lightning's checkpoints in a format of Tessera, and loads any checkpoint that Tessera reads.

    Use it with strategies in which one rank has the whole state: one device, or DDP. Files that Lightning itself wrote
    are loaded as before.

    asynchronous: write in the background. The next save, and the end of the run, wait for it and raise its error.
    format, compress: as for `tessera.save`.
    """

    def __init__(self, *, asynchronous: bool = False, format: str = "native", compress: str = "none"):
        self._is_asynchronous = flag("asynchronous", asynchronous)
        self._format = text("format", format)
        self._compress = text("compress", compress)
        self._saving: Future[Saved] | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike[str],
                        storage_options: Any | None = None) -> None:
        """Saves the dict. Lightning calls this on one rank. `storage_options` must be None."""
        if storage_options is not None:
            raise TypeError(f"storage_options: expected None, found {type(storage_options).__name__}")
        self._wait()
        options: _SaveOptions = {"format": self._format, "compress": self._compress, "overwrite": True,
                                 "process_group": Ranks.alone()}
        if _is_url(path):
            if self._is_asynchronous:
                self._saving = async_save(checkpoint, path, **options)
            else:
                save(checkpoint, path, **options)
            return
        target = Path(path).absolute()  # a save in the background ends after the program may have changed its working directory
        target.parent.mkdir(parents=True, exist_ok=True)
        end = _set_aside(target, self._format)
        try:
            if self._is_asynchronous:
                _reserve(target, self._format)
                self._saving = async_save(checkpoint, target, **options)
                # Not self._saving.exception(): it records that the caller has seen the error, so that no later save raises it.
                self._saving.add_done_callback(lambda saving: end(Future.exception(saving) is None))
            else:
                save(checkpoint, target, **options)
        except BaseException:
            end(False)
            raise
        if not self._is_asynchronous:
            end(True)

    def load_checkpoint(self, path: str | os.PathLike[str], map_location: Any | None = None,
                        weights_only: bool | None = None) -> dict[str, Any]:
        """Returns the dict that was saved, with tensors on the CPU; a file is loaded as Lightning does. Lightning calls this on
        all ranks."""
        try:
            self._wait()
        finally:
            if self._is_asynchronous and dist.is_available() and dist.is_initialized():
                dist.barrier()  # the other ranks wait for the save of rank 0
        if not _is_url(path, ("s3://", "hf://", "https://", "http://")) and Path(path).is_file():
            found: dict[str, Any] = super().load_checkpoint(path, map_location, weights_only)
            return found
        with open_checkpoint(path) as checkpoint:
            saved: dict[str, Any] = checkpoint.state_dict()
            return saved

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Removes a file, or a checkpoint's folder, after the save in the background. Lightning calls this on one rank."""
        self._wait()
        if _is_url(path):
            super().remove_checkpoint(path)  # through fsspec, with which Lightning also lists such folders
        elif Path(path).is_dir() and not Path(path).is_symlink():
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)

    def teardown(self) -> None:
        """Waits for the last save. Lightning calls this at the end of the run."""
        self._wait()
        super().teardown()

    def _wait(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            _Background.finish(Ranks.alone())  # and the old file is removed, or has its name back
            saving.result()


def _is_url(path: str | os.PathLike[str], schemes: tuple[str, ...] = ("s3://",)) -> bool:
    """Whether a path is a URL of `schemes`. Raises ValueError for other URLs: as a local path, one would name a folder such as "gs:"."""
    text = os.fspath(path)
    if "://" in text and not text.startswith(schemes):
        raise ValueError(f"path: expected a local path, or s3://BUCKET/PREFIX, found {text!r}")
    path_bytes("path", path)  # refuses s3:/…, which pathlib makes of a URL
    return "://" in text


def _set_aside(target: Path, format: str) -> Callable[[bool], None]:
    """If a folder is to replace a file, such as "last.ckpt" of an earlier run without this plugin, gives the file another name.
    Returns a function to call after the save: with True it removes the file, with False the file gets its name back."""
    if format == "torch" or not target.is_file():
        return lambda is_saved: None if is_saved else _remove_reservation(target)
    aside = next(name for name in _old_names(target) if not os.path.lexists(name))
    os.replace(target, aside)

    def end(is_saved: bool) -> None:
        if is_saved:
            aside.unlink()
            return
        _remove_reservation(target)
        if not os.path.lexists(target):
            os.replace(aside, target)

    return end


def _reserve(target: Path, format: str) -> None:
    """Makes an empty folder or file, which a save in the background replaces: ModelCheckpoint takes a name that does not exist for
    free, and would give it to the next checkpoint too."""
    if not os.path.lexists(target):
        target.touch() if format in _FILE_FORMATS else target.mkdir()


def _remove_reservation(target: Path) -> None:
    if target.is_dir() and not target.is_symlink() and not any(target.iterdir()):
        target.rmdir()
    elif target.is_file() and target.stat().st_size == 0:
        target.unlink()


def _old_names(target: Path) -> Iterator[Path]:
    return (target.with_name(f"{target.name}.old{i or ''}") for i in itertools.count())
