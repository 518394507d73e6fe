"""Checkpoints of torchtitan through Tessera: `CheckpointManager.Config` in place of torchtitan's own."""

from __future__ import annotations

import warnings
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torchtitan.components.checkpointer.base import MODEL
from torchtitan.components.checkpointer.dcp import AsyncMode
from torchtitan.components.checkpointer.dcp import CheckpointManager as DcpCheckpointManager
from torchtitan.tools.utils import GarbageCollection

from ._arguments import local_folder
from ._checkpoint import open as open_checkpoint
from ._errors import Error, refused
from ._latest import numbered
from ._load import Loaded, load
from ._save import async_save, save


class CheckpointManager(DcpCheckpointManager):  # type: ignore[misc,unused-ignore]
    """torchtitan's manager, which saves and loads through Tessera: policies, names and folders are torchtitan's.

    Loads any format, so `initial_load_path` may be a checkpoint of another framework with torchtitan's names. Models for and
    from Hugging Face (`last_save_in_hf`, `initial_load_in_hf`) go through torchtitan's adapters as before.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(DcpCheckpointManager.Config):  # type: ignore[misc,unused-ignore]
        """torchtitan's settings, and the format of the checkpoints."""

        format: str = "native"
        """"native", or "dcp" for a checkpoint that PyTorch reads."""

        compress: str = "none"
        """"none", "zstd" or "zstd:LEVEL"; native format only."""

    def __init__(self, config: Config, **kwargs: Any):
        self._options = {"format": config.format, "compress": config.compress}
        for folder in (config.folder, str(kwargs.get("base_folder", ""))):
            if config.enable and folder:  # this class lists and removes steps on a local disk
                local_folder("folder", folder)
        super().__init__(config, **kwargs)
        if config.enable:
            self.stager: Any = _NoStager()  # otherwise torchtitan would make a stager that nothing uses

    @torch.no_grad()
    def dcp_save(self, state_dict: dict[str, Any], checkpoint_id: str, async_mode: AsyncMode,
                 enable_garbage_collection: bool = False, to_hf: bool = False) -> Any:
        """Saves a state dict, to Hugging Face's files as torchtitan does. Returns the future of a save in the background, or None."""
        if to_hf:
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        Path(checkpoint_id).parent.mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = {**self._options, "overwrite": True}
        response: Any = None
        if async_mode == AsyncMode.DISABLED:
            save(state_dict, checkpoint_id, **options)
        else:
            response = async_save(state_dict, checkpoint_id, **options)
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        if async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:  # the copy is complete by now
            copied: Future[None] = Future()
            copied.set_result(None)
            response = AsyncSaveResponse(copied, response)
        return response

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Loads into a state dict, from Hugging Face's files as torchtitan does."""
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        _require_all(load(state_dict, checkpoint_id, strict=False))  # as DCP: the checkpoint may have more
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)

    def _purge_stale_checkpoints(self) -> None:
        """Removes old steps, but nothing that a save is writing beside them."""
        if self._should_purge():
            for _, path in numbered(self.folder, "step-")[:-self.keep_latest_k]:
                self.purge_queue.put(str(path))

    def _find_load_step(self, folder: str = "") -> int:
        """Returns the newest step whose checkpoint can be opened; -1 if there is none."""
        for step, path in reversed(numbered(folder or self.folder, "step-")):
            try:
                open_checkpoint(path).close()
            except Error:
                continue
            return step
        return -1


class _NoStager:
    def close(self) -> None:
        pass


def _require_all(loaded: Loaded) -> None:
    """Raises Error if the checkpoint lacks names of the job, or is only a part. Warns on rank 0 of other remarks about it."""
    for note in loaded.notes:
        if note.rule == "part":
            raise refused([loaded.path], (note,), where=f"{loaded.path}: ")
        if torch.distributed.get_rank() == 0:
            warnings.warn(f"{loaded.path}: {note}", RuntimeWarning, stacklevel=3)
    if loaded.missing:
        raise Error(f"{loaded.path}: expected all names of the job, found that {len(loaded.missing)} are missing: "
                    f"{', '.join(loaded.missing[:5])}", kind="mismatch", path=loaded.path)
