"""Storage for `torch.distributed.checkpoint`, so that its `load` reads every format that Tessera reads.

    torch.distributed.checkpoint.load(state_dict, storage_reader=tessera.dcp.StorageReader("step-1000"))
"""

from __future__ import annotations

import io
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Union

import torch
from torch.distributed.checkpoint.metadata import (BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex,
                                                   TensorProperties, TensorStorageMetadata)
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from ._checkpoint import Checkpoint
from ._symbol import with_constants

CheckpointId = Union[str, "os.PathLike[str]", None]

MAX_THREADS = 8  # that wait for reads; large reads use more threads below


class StorageReader(storage.StorageReader):
    """Reads a checkpoint of any format and sharding for `torch.distributed.checkpoint.load`.

    DCP's planner decides what each rank reads. Each rank reads only these elements, and every checksum that covers
    them is checked. `options` are those of `tessera.open`.
    """

    def __init__(self, path: CheckpointId = None, **options: Any):
        super().__init__()
        self._path = path
        self._options = options
        self._opened: Checkpoint | None = None

    def reset(self, checkpoint_id: CheckpointId = None) -> None:
        if checkpoint_id:
            self._path = checkpoint_id
        self._opened = None

    @property
    def checkpoint_id(self) -> CheckpointId:
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        return checkpoint_id is not None and os.path.exists(checkpoint_id)

    def _checkpoint(self) -> Checkpoint:
        if self._opened is None:
            if self._path is None:
                raise ValueError("path: expected the path of a checkpoint, found None")
            self._opened = Checkpoint(self._path, **self._options)
        return self._opened

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        checkpoint = self._checkpoint()
        entries: dict[str, Any] = {}
        for name in checkpoint:
            found = checkpoint._metas.get(checkpoint.aliases.get(name, name))
            if found is None:
                entries[name] = BytesStorageMetadata()
                continue
            size = torch.Size(found.shape)
            whole = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
            properties = TensorProperties(dtype=getattr(torch, found.dtype))
            entries[name] = TensorStorageMetadata(properties=properties, size=size, chunks=[whole])
        storage = {MetadataIndex(name): name for name in entries}
        return Metadata(state_dict_metadata=entries, storage_data=storage)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._checkpoint()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        checkpoint = self._checkpoint()
        targets = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                buffer = io.BytesIO()
                torch.save(with_constants(checkpoint[item.storage_index.fqn]), buffer)
                buffer.seek(0)
                planner.load_bytes(item, buffer)
            else:
                targets.append((item, planner.resolve_tensor(item).detach()))
        with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
            list(pool.map(lambda target: _read(checkpoint, *target), targets))
        for item, target in targets:
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future


def _read(checkpoint: Checkpoint, item: ReadItem, target: torch.Tensor) -> None:
    """Fills a tensor with a box of a tensor of the checkpoint."""
    box = checkpoint[item.storage_index.fqn][
        tuple(slice(offset, offset + size) for offset, size in zip(item.storage_offsets, item.lengths, strict=True))]
    if target.shape != item.lengths:
        raise ValueError(f"{item.storage_index.fqn}: expected room for {tuple(item.lengths)}, found {tuple(target.shape)}")
    is_plain = target.device.type == "cpu" and target.is_contiguous() and not (target.is_conj() or target.is_neg())
    if is_plain and str(target.dtype) == f"torch.{box.dtype}":
        box._read_into(target.reshape(-1).view(torch.uint8))
    else:
        target.copy_(box.torch())
