"""Storage for `torch.distributed.checkpoint`: `load` reads every format that Tessera reads, `save` writes native.

    torch.distributed.checkpoint.load(state_dict, storage_reader=tessera.dcp.StorageReader("step-1000"))
    torch.distributed.checkpoint.save(state_dict, storage_writer=tessera.dcp.StorageWriter("step-1001"))
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple, Union

import torch
from torch.distributed.checkpoint.metadata import (BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex,
                                                   TensorProperties, TensorStorageMetadata)
from torch.distributed.checkpoint.planner import (LoadItemType, LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner,
                                                  WriteItem, WriteItemType)
from torch.distributed.checkpoint.storage import StorageReader as DcpStorageReader
from torch.distributed.checkpoint.storage import StorageWriter as DcpStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from . import _core
from ._arguments import MAX_COUNT, at_least_one, flag, nbytes, stored_path_bytes, text
from ._checkpoint import Checkpoint
from ._errors import Error, Problem, refused
from ._job_state import JobState, is_split
from ._job_tensors import check_plain, is_in_host_memory
from ._position import Position
from ._ranks import Ranks, last_part, require_same, require_same_checkpoint
from ._save import DEFAULT_BUFFERS_NBYTES, SaveSteps, core_job, merged_values, names_that_tell_kinds, tensor_digest
from ._symbol import with_constants

CheckpointId = Union[str, "os.PathLike[str]", None]
_DcpPath = tuple[Union[str, int], ...]

MAX_THREADS = 8  # threads that wait for reads; the core reads a large tensor with more threads


class StorageReader(DcpStorageReader):
    """Reads a checkpoint of any format and sharding for `torch.distributed.checkpoint.load`.

    DCP's planner decides what each rank reads. Each rank reads only these elements, and checks every checksum that
    covers them. Raises Error if the checkpoint is replaced while it is read. `options`: the options of `tessera.open`.
    """

    def __init__(self, path: CheckpointId = None, **options: Any):
        super().__init__()
        self._path = path
        self._options = options
        self._opened: Checkpoint | None = None

    def reset(self, checkpoint_id: CheckpointId = None) -> None:
        """Selects the checkpoint of the next load; None: that of the load before. DCP calls this at the begin of a load."""
        if checkpoint_id:
            self._path = checkpoint_id
        self._opened = None

    @property
    def checkpoint_id(self) -> CheckpointId:
        """The path of the checkpoint."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Returns whether something is at the path, on a local disk. DCP asks this if it is to choose a reader itself."""
        return checkpoint_id is not None and os.path.exists(checkpoint_id)

    def _checkpoint(self) -> Checkpoint:
        if self._opened is None:
            if self._path is None:
                raise ValueError("path: expected the path of a checkpoint, found None")
            self._opened = Checkpoint(self._path, **self._options)
        return self._opened

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns names, paths, dtypes and shapes, each tensor as one chunk, whatever its sharding. DCP calls this on the coordinator
        first."""
        self._opened = None  # the checkpoint may have been replaced since the last load
        checkpoint = self._checkpoint()
        stored_paths = checkpoint._paths()
        entries: dict[str, Any] = {}
        paths: dict[str, _DcpPath] = {}
        for name in checkpoint:
            # DCP takes numbers for positions in lists, and writes other keys as text.
            path = tuple(int(key) if isinstance(key, Position) else str(key) for key in stored_paths[name])
            found = checkpoint._metas.get(checkpoint.aliases.get(name, name))
            if found is None:
                items = _items_of(checkpoint, name, path)
                entries.update(dict.fromkeys(items, BytesStorageMetadata()))
                paths.update(items)
                continue
            paths[name] = path
            size = torch.Size(found.shape)
            whole = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
            properties = TensorProperties(dtype=getattr(torch, found.dtype))
            entries[name] = TensorStorageMetadata(properties=properties, size=size, chunks=[whole])
        storage = {MetadataIndex(name): name for name in entries}
        return Metadata(state_dict_metadata=_Entries(entries, checkpoint), planner_data=paths, storage_data=storage)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Refuses a part of a checkpoint, as `tessera.load` does. Not in `read_metadata`, because DCP discards its errors."""
        checkpoint = self._checkpoint()
        if checkpoint.part is not None:
            raise refused([checkpoint.path], (Problem.of_entry("error", "part", checkpoint.path, "a whole checkpoint", checkpoint.part),))

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Adds what this rank has opened. Called on all ranks."""
        checkpoint = self._checkpoint()
        return replace(plan, storage_data=(last_part(checkpoint.path), checkpoint._open_reader().identity()))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Checks that all ranks have opened the same checkpoint. Called on the coordinator."""
        opened = [plan.storage_data for plan in plans]
        if None not in opened:  # the planner has kept what prepare_local_plan added
            require_same_checkpoint(opened, self._checkpoint().path)
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads what the plan asks for into the planner's tensors. Returns when all is read."""
        checkpoint = self._checkpoint()
        targets = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                buffer = io.BytesIO()
                name = item.storage_index.fqn
                torch.save(with_constants(checkpoint[name] if name in checkpoint else checkpoint._item(name)), buffer)
                buffer.seek(0)
                planner.load_bytes(item, buffer)
            else:
                targets.append((item, planner.resolve_tensor(item).detach()))
        with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
            list(pool.map(lambda target: _read(checkpoint, *target), targets))
        checkpoint._open_reader().require_unchanged()
        checkpoint._last_value = None
        for item, target in targets:
            planner.commit_tensor(item, target)
        _warn_of_casts(checkpoint, targets)
        future: Future[None] = Future()
        future.set_result(None)
        return future


class _Entries(dict[str, Any]):
    """The entries of a checkpoint. If the checkpoint has a dict as one value, `args`, as DCP saves it with flatten_state_dict=False,
    the dict's items are entries, `args.lr`; other names of its parts, such as `args`, are answered too, but not listed. Otherwise DCP's
    planner would take the checkpoint for one of torch 2.3, and ask for names that no checkpoint has."""

    def __init__(self, entries: dict[str, Any], checkpoint: Checkpoint):
        super().__init__(entries)
        self._checkpoint = checkpoint

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and (name in self._checkpoint or self._checkpoint._has_item(name)))

    def __missing__(self, name: str) -> BytesStorageMetadata:
        if name not in self:
            raise KeyError(name)
        return BytesStorageMetadata()

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def _items_of(checkpoint: Checkpoint, name: str, path: _DcpPath) -> dict[str, _DcpPath]:
    """Returns the names that DCP's planner gives to the items of a value that is a dict, and their paths. For any other value: its name
    and path."""
    if "." in name:  # DCP saves only top-level dicts as one value
        return {name: path}
    try:
        value = checkpoint._entry(name)
    except Error:  # `read_data` raises it, if the value is asked for; DCP would discard it here
        return {name: path}

    def items_in(name: str, path: _DcpPath, value: Any) -> dict[str, _DcpPath]:
        is_list = isinstance(value, list) and is_split(value, torch.Tensor)
        items: Iterable[tuple[str | int, Any]] = enumerate(value) if is_list else ()
        if isinstance(value, dict):
            items = ((str(key), item) for key, item in value.items())
        found: dict[str, _DcpPath] = {}
        for key, item in items:
            found.update(items_in(f"{name}.{key}", (*path, key), item))
        return found or {name: path}

    return items_in(name, path, value)


def _read(checkpoint: Checkpoint, item: ReadItem, target: torch.Tensor) -> None:
    """Fills a tensor with a box of a tensor of the checkpoint."""
    box = checkpoint[item.storage_index.fqn][
        tuple(slice(offset, offset + size) for offset, size in zip(item.storage_offsets, item.lengths, strict=True))]
    if target.shape != item.lengths:
        raise ValueError(f"{item.storage_index.fqn}: expected room for {tuple(item.lengths)}, found {tuple(target.shape)}")
    if is_in_host_memory(target) and str(target.dtype) == f"torch.{box.dtype}":
        torch.autograd.graph.increment_version(target)  # a backward that needs the old elements raises an error
        box._read_into(target.reshape(-1).view(torch.uint8))
    else:
        target.copy_(box.torch())


def _warn_of_casts(checkpoint: Checkpoint, targets: list[tuple[ReadItem, torch.Tensor]]) -> None:
    """Warns if tensors have another dtype in the state dict. As with any storage of DCP, their elements are converted."""
    casts = {}
    for item, target in targets:
        stored = checkpoint[item.storage_index.fqn].dtype
        if str(target.dtype) != f"torch.{stored}":
            casts[item.storage_index.fqn] = f"{stored} is converted to {str(target.dtype).removeprefix('torch.')}"
    if casts:
        first = min(casts)
        more = f" (and {len(casts) - 1} more)" if len(casts) > 1 else ""
        warnings.warn(f"{first}: {casts[first]}, the dtype in the state dict{more}", RuntimeWarning, stacklevel=3)


class StorageWriter(DcpStorageWriter):
    """Writes a native checkpoint for `torch.distributed.checkpoint.save` and `async_save`.

    DCP's planner decides which rank writes which elements. The checkpoint appears when it is complete. Create the writer on
    all ranks together. process_group: the group that is passed to DCP's `save`; None: all ranks. no_dist: what is passed to DCP's
    `save`; True: this rank saves alone, and the writer can be created on this rank alone. The other options are those of
    `tessera.save`.
    """

    def __init__(self, path: CheckpointId = None, *, process_group: Any = None, no_dist: bool = False, overwrite: bool = False,
                 keep_last: int | None = None, compress: str = "none", memory: int | str = DEFAULT_BUFFERS_NBYTES,
                 endpoint: str | None = None):
        super().__init__()
        self._path = path
        self._group = process_group
        self._is_alone = flag("no_dist", no_dist)
        self._endpoint = endpoint
        self._options = (flag("overwrite", overwrite), at_least_one("keep_last", keep_last, MAX_COUNT),
                         text("compress", compress), nbytes("memory", memory))
        self._ranks()  # the first call is collective, so it must not be on the thread of an async_save

    def _ranks(self) -> Ranks:
        return Ranks.alone() if self._is_alone else Ranks.of(self._group, "dcp")

    def reset(self, checkpoint_id: CheckpointId = None) -> None:
        """Selects the path of the next save; None: that of the save before. DCP calls this at the begin of a save."""
        if checkpoint_id:
            self._path = checkpoint_id

    @property
    def checkpoint_id(self) -> CheckpointId:
        """The path of the checkpoint."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Returns whether a path is given. DCP asks this if it is to choose a writer itself."""
        return checkpoint_id is not None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Refuses a save without a path. DCP calls this on all ranks."""
        if self._path is None:
            raise ValueError("path: expected the path of a checkpoint, found None")
        self._has_all_plans = kwargs.get("use_collectives", True)
        self._ranks()  # collective. The next method runs on the coordinator alone

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Returns the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Checks that the ranks of DCP are those of this writer. Called on the coordinator."""
        expected = self._ranks().size
        if self._has_all_plans and len(plans) != expected:
            raise Error(f"{self._path}: ranks of DCP's save: expected {expected}, as of the StorageWriter, found {len(plans)} "
                        "(give no_dist and process_group to both)", kind="mismatch")
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes the whole checkpoint, together with the other ranks. Returns when it is complete."""
        assert self._path is not None
        job = _PlannedSave(self._ranks(), self._path, self._endpoint, self._options, plan.items, planner)
        job.run()
        job.warn()
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(index=item.index, size_in_bytes=item.tensor_storage_size() or 0,
                                               storage_data=None) for item in plan.items])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Does nothing: `write_data` has finished the checkpoint on all ranks."""


def _tensors_of(planner: SavePlanner, ranks: Ranks) -> JobState | None:
    """Returns the tensors of this rank's state dict; None if only the planner knows the pieces of one of them."""
    state = getattr(planner, "state_dict", {})
    try:
        return JobState({name: entry for name, entry in state.items() if isinstance(entry, torch.Tensor)}, ranks)
    except Error:  # `_take` checks the pieces
        return None


def _warn_of_ties(aliases: dict[str, str]) -> None:
    """Warns of tied tensors of this rank, because DCP's planner makes a tensor of each name."""
    if aliases:
        name = min(aliases)
        more = f" (and {len(aliases) - 1} more)" if len(aliases) > 1 else ""
        warnings.warn(f"{name}: is tied to {aliases[name]}, but DCP saves it as a tensor of its own{more}", RuntimeWarning, stacklevel=7)


# By name of a tensor: its path, dtype, shape, and the boxes that one rank writes.
_Pieces = dict[str, tuple[list[Any], str, list[int], list[tuple[list[int], list[int]]]]]


class _Begun(NamedTuple):
    """What each rank tells the others at the begin of a save."""

    pieces: _Pieces
    values: list[tuple[list[Any], Any]]
    tensors: str | None  # digest of the rank's tensors and their layouts, if they are known
    staged: bytes | None  # the staging directory, from rank 0
    checkpoint: str  # the last part of the path
    options: str


class _PlannedSave(SaveSteps):
    """A save of the items that DCP's planner gives to this rank."""

    _state: JobState | None

    def __init__(self, ranks: Ranks, path: str | os.PathLike[str], endpoint: str | None,
                 options: tuple[bool, int, str, int], items: list[WriteItem], planner: SavePlanner):
        super().__init__(ranks, f"saving {path!r}")
        self._paths = getattr(planner, "mappings", {})
        self._tensors: dict[str, list[torch.Tensor]] = {}

        def begin() -> _Begun:
            self._state = _tensors_of(planner, ranks)
            _warn_of_ties(self._state.aliases if self._state else {})  # here, because an error (python -W error) must reach all ranks
            encoded = stored_path_bytes("path", path, endpoint)
            self._save = _core.Save(encoded, "native", ranks.rank, *options, b"", False)
            pieces, values = self._take(items, planner)
            values = [(value_path, _core.plain_value(value_path, value)) for value_path, value in values]
            return _Begun(pieces, values, tensor_digest(self._state) if self._state else None,
                          self.save.stage() if ranks.rank == 0 else None, last_part(os.fsdecode(encoded)),
                          str(options[:3]))  # without `memory`, which may differ

        by_rank = self.together(begin)
        self._compare_replicas(os.fspath(path), [begun.tensors for begun in by_rank])
        try:
            require_same("checkpoint to save", [begun.checkpoint for begun in by_rank], os.fspath(path))
            require_same("arguments", [begun.options for begun in by_rank], os.fspath(path))
            values = merged_values(os.fspath(path), [begun.values for begun in by_rank])
            job = core_job(ranks, (_joined([begun.pieces for begun in by_rank]), {}), names_that_tell_kinds(values))
            held = {name: pieces[3] for name, pieces in by_rank[ranks.rank].pieces.items()}
            self.plan = _core.SavePlan(job, "native", ranks.rank, held)
            self.boxes = {name: list(tensors) for name, tensors in self._tensors.items()}
            directory = by_rank[0].staged
            assert directory is not None
            self.save.set_contents(self.plan, directory, values)
        except BaseException as error:
            self.failure = error

    def _compare_replicas(self, path: str, digests: list[str | None]) -> None:
        """Raises Error if groups of ranks have different weights of equal names, because DCP's planner saves only one of them.
        `digests`: of the tensors of each rank."""
        known = [digest for digest in digests if digest is not None]
        if self._state is not None and len(known) == len(digests):
            self.compare_replicas(path, self._state, known, choice="DCP's planner chooses which of them are saved (DefaultSavePlanner("
                                  "dedup_save_to_lowest_rank=True): those of the lowest rank)")

    def _take(self, items: list[WriteItem], planner: SavePlanner) -> tuple[_Pieces, list[tuple[list[Any], Any]]]:
        pieces: _Pieces = {}
        values = []
        for item in items:
            name = item.index.fqn
            path = [Position(key) if isinstance(key, int) else key for key in self._paths.get(name, (name,))]
            data = planner.resolve_data(item)
            if item.type == WriteItemType.BYTE_IO:
                # This is safe to unpickle, because this process has just pickled it.
                assert isinstance(data, io.BytesIO)
                data.seek(0)
                values.append((path, torch.load(data, weights_only=False)))
                continue
            assert item.tensor_data is not None and isinstance(data, torch.Tensor)
            wait = getattr(data, "wait", None)
            if wait is not None:  # an asynchronous collective
                data = wait()
            check_plain(name, data)
            shape = list(item.tensor_data.size)
            chunk = item.tensor_data.chunk
            if list(data.shape) != list(chunk.sizes):
                raise Error(f"{name}: tensor: expected elements of the shape {list(chunk.sizes)}, as in the plan, found "
                            f"{list(data.shape)} from the planner's resolve_data", kind="mismatch", tensor=name)
            dtype = str(data.dtype).removeprefix("torch.")  # a planner's resolve_data may convert the elements
            boxes = pieces.setdefault(name, (path, dtype, shape, []))[3]
            _require_dtype(name, pieces[name][1], dtype)
            boxes.append((list(chunk.offsets), list(chunk.sizes)))
            self._tensors.setdefault(name, []).append(data.detach())
        return pieces, values


def _require_dtype(name: str, expected: str, found: str, where: str = "") -> None:
    """Raises Error if a planner's resolve_data has given pieces of one tensor different dtypes."""
    if found != expected:
        raise Error(f"{name}: tensor: expected elements of {expected}, as in the first piece, found {found}{where}", kind="mismatch",
                    tensor=name)


def _joined(by_rank: list[_Pieces]) -> dict[str, tuple[list[Any], str, list[int], Any]]:
    """Merges the pieces of all ranks: each tensor gets the boxes of every rank."""
    joined: dict[str, tuple[list[Any], str, list[int], Any]] = {}
    for rank, pieces in enumerate(by_rank):
        for name, (path, dtype, shape, boxes) in pieces.items():
            layout = joined.setdefault(name, (path, dtype, shape, []))[3]
            _require_dtype(name, joined[name][1], dtype, f" on rank {rank}")
            layout.extend((offsets, sizes, [rank]) for offsets, sizes in boxes)
    return joined
