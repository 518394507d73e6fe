"""Saves the state of a running job: all ranks write one checkpoint together."""

from __future__ import annotations

import atexit
import functools
import hashlib
import itertools
import math
import multiprocessing.util
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from . import _core
from ._arguments import MAX_COUNT, PathLike, absolute, at_least_one, flag, name_bytes, nbytes, optional_path_bytes, stored_path_bytes, text
from ._errors import Error
from ._job_state import JobState, Path
from ._job_tensors import Box, Shard
from ._ranks import Ranks, last_part, require_same
from ._saved_memory import SavedMemory

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

DEFAULT_BUFFERS_NBYTES = 64 << 20
MAX_SAMPLES = 4096  # elements of a box that are compared between replicas
SAMPLE_NBYTES = 8  # of the digest of a box's sample
MAX_STATISTICS = 1 << 16  # elements of a vector that may differ between replicas, such as BatchNorm's statistics
MAX_PLANS = 4  # plans that are kept for later saves, one for each layout


class Saved(NamedTuple):
    """What a save did on this rank."""

    path: str
    format: str
    nbytes: int  # of tensors, written by this rank
    has_planned: bool  # False: reused the plan of an earlier save of the same layout
    stalled: float  # seconds for which the call blocked the trainer
    linked_nbytes: int = 0  # of tensors of this rank that stay in files of the base; nbytes does not count them
    changes: Mapping[str, int] = MappingProxyType({})  # how often the format makes each kind of change, as in Resharded


def save(state_dict: Mapping[Any, Any], path: PathLike, *, process_group: Any = None, format: str = "native",
         overwrite: bool = False, keep_last: int | None = None, compress: str = "none", base: PathLike | None = None,
         changed_rows: bool = False, memory: int | str = DEFAULT_BUFFERS_NBYTES, endpoint: str | None = None) -> Saved:
    """Saves a state dict. All ranks write one checkpoint together; it appears when it is complete. Collective.

    state_dict: nested dicts and lists of tensors, values, and objects with state_dict() and load_state_dict(). Tensors
    may be plain tensors, DTensors or ShardedTensors, on any device. If several ranks hold the same tensor or value,
    one copy is saved. The copy of a value, and of a short vector such as BatchNorm's statistics, is that of the lowest rank that has it.
    Some ranks may lack a name.
    path: of the checkpoint. Its folder must exist, on a file system that all ranks see. Or s3://BUCKET/PREFIX: then the
    ranks write into a folder in TMPDIR, which all of them must see, and upload from there.
    process_group: the ranks that save; None: all.
    format: "native", "dcp" (what torch.distributed.checkpoint writes), "safetensors" or "torch". All ranks write the
    first two in parallel. For the other two, all ranks write parts beside the destination, and rank 0
    makes the file from them.
    overwrite: replace the checkpoint at the path, in one step. On s3://, there is no checkpoint during the upload.
    keep_last: how many checkpoints to keep, including this one. Older ones are removed if their names differ only in the
    last number.
    compress: "none", "zstd" or "zstd:LEVEL"; native format only.
    base: the path of an older native checkpoint on the same file system, such as that of the save before. Pieces with
    the same bytes are not written again; hard links to the base's files hold them. The new checkpoint does not need the
    base afterwards. Every rank reads the base to compare its pieces. Native format only.
    changed_rows: with base: if only some rows of a table differ from the base, write these rows alone. Other programs
    that read HDF5 then do not see this table as one dataset.
    memory: bytes for this rank's buffers, as a number or a size such as "64MiB".
    endpoint: the S3 server for s3:// paths, as for `open`.

    If a rank fails, raises Error on all ranks, and nothing appears at the path. If only the removal of older
    checkpoints fails, the Error says that the new one is complete. If an earlier async_save failed and
    its result was never read, raises that error instead, before it saves.
    """
    begin = time.monotonic()
    ranks = Ranks.of(process_group)
    with ranks.lock, ranks.holding_interrupts():
        job = _Job.start(ranks, state_dict, path, format, overwrite, keep_last, compress, base,
                         changed_rows, memory, endpoint)
        job.run()
        job.warn()
    return job.with_linked(job.report(begin))


def async_save(state_dict: Mapping[Any, Any], path: PathLike, *, process_group: Any = None, format: str = "native",
               overwrite: bool = False, keep_last: int | None = None, compress: str = "none", base: PathLike | None = None,
               changed_rows: bool = False, memory: int | str = DEFAULT_BUFFERS_NBYTES, endpoint: str | None = None) -> Future[Saved]:
    """Saves as `save` does, but returns when the state is copied, and writes in the background. Collective.

    The trainer may change its tensors as soon as this returns. The copy takes as much memory as this rank writes; the
    next save reuses that memory. One save runs at a time: a second one waits for the first. `result()` of the future
    returns what `save` returns, or raises its error. If a rank has not called `result()`, the next save of these ranks raises
    the error on all of them, and does not save; without a next save it is printed at the end of the program.
    """
    begin = time.monotonic()
    ranks = Ranks.of(process_group)
    with ranks.lock, ranks.holding_interrupts():
        job = _Job.start(ranks, state_dict, path, format, overwrite, keep_last, compress, base,
                         changed_rows, memory, endpoint)
        job.copy_tensors()
        return _Background.start(job, job.report(begin))


class _Kept(dict[Any, T]):
    """The entries of the last layouts."""

    def __setitem__(self, key: Any, entry: T) -> None:
        self.pop(key, None)
        while len(self) >= MAX_PLANS:
            del self[next(iter(self))]
        super().__setitem__(key, entry)


class SaveSteps:
    """The steps of one save on this rank. All ranks take each step together."""

    plan: _core.SavePlan
    boxes: dict[str, list[torch.Tensor | None]]  # by tensor, its boxes; None: this rank does not write the box
    _replicas: ClassVar[_Kept[Replicas]] = _Kept()

    def __init__(self, ranks: Ranks, what: str):
        self.ranks = ranks
        self.what = what
        self.failure: BaseException | None = None  # of this rank; the other ranks do not know it yet
        self.has_base = False
        self.notes: list[str] = []  # warnings that rank 0 gives when the checkpoint is complete
        self._save: _core.Save | None = None

    def together(self, body: Callable[[], T]) -> list[T]:
        """Calls `body` on every rank. If it raises on one rank, the save ends on all."""
        try:
            return self.ranks.gather(self.what, body)
        except BaseException:
            self._abandon()
            raise

    def on_all(self, body: Callable[[], T]) -> T:
        """Calls `body`, which raises on all ranks or on none. If it raises, the save ends."""
        try:
            return body()
        except Error:
            self._abandon()
            raise

    def compare_replicas(self, path: str, state: JobState, digests: Sequence[str], has_plan: bool = True,
                         choice: str = "those of the lowest rank are saved") -> list[Description] | None:
        """Raises Error if groups of ranks have different weights of equal names. Collective. Compares in every save, because replicas
        that begin equal may be trained apart.

        digests: of the tensors of each rank. has_plan: False if this rank needs the ranks' descriptions, to make a plan. choice: which
        replicas are saved, for a warning. Returns the descriptions; None if the ranks did not need to exchange them.
        """
        if len(set(digests)) == 1:
            return None
        key = self.ranks.rank, tuple(self.ranks.global_ranks), tuple(digests)
        descriptions = None
        if not all(self.together(lambda: has_plan and key in self._replicas)):
            descriptions = of_first_with(digests, self.together(
                lambda: describe_job(state) if is_first_with(digests, self.ranks.rank) else None))
            self._replicas[key] = replicas_of(descriptions, self.ranks.rank)
        replicas = self._replicas[key]
        if replicas.holders:
            different = self._different_replicas(state, replicas)
            note = self.on_all(lambda: judge_replicas(path, different, replicas.num_tensors, choice))
            if note and self.ranks.rank == 0:
                self.notes.append(note)
        return descriptions

    def _different_replicas(self, state: JobState, replicas: Replicas) -> list[Difference]:
        """Compares the replicas of each box by a sample. Collective. Equal replicas cost one digest for each set of ranks. Only if
        digests differ, these ranks send the samples, and the first of them the names."""
        own: dict[int, bytes] = {}

        def digests() -> dict[int, bytes]:
            own.update({i: samples_of(state, boxes) for i, boxes in replicas.own.items()})
            return {i: short_digest(samples) for i, samples in own.items()}

        by_rank = self.together(digests)
        sets = [i for i, of_set in enumerate(replicas.holders) if len({by_rank[rank][i] for rank in of_set}) > 1]
        if not sets:
            return []
        samples = self.together(lambda: {i: own[i] for i in sets if i in own})
        found: list[tuple[int, int, int]] = []  # a set, the position of a box in it, and the first rank with another replica
        for i in sets:
            expected = samples[replicas.holders[i][0]][i]
            for at in range(0, len(expected), SAMPLE_NBYTES):
                box = slice(at, at + SAMPLE_NBYTES)
                odd = next((rank for rank in replicas.holders[i] if samples[rank][i][box] != expected[box]), None)
                if odd is not None:
                    found.append((i, at // SAMPLE_NBYTES, odd))
        named = self.together(lambda: {(i, at): replicas.own[i][at] for i, at, _ in found if replicas.holders[i][0] == self.ranks.rank})
        return [Difference(*named[replicas.holders[i][0]][i, at], replicas.holders[i][0], odd) for i, at, odd in found]

    def _abandon(self) -> None:
        if self._save is not None:
            self._save.abandon()

    @property
    def save(self) -> _core.Save:
        assert self._save is not None  # set in the first exchange, which raises otherwise
        return self._save

    def run(self) -> None:
        """Writes each rank's part, checks that all parts exist (`join`), marks each as a part of this checkpoint (`seal`), and makes
        the checkpoint appear. Collective."""
        first = self.ranks.rank == 0
        if self.has_base:
            texts = self.together(self._compare)
            self._holding_failure(lambda: self.save.link_equal_pieces(texts))
        self.together(self._write)
        tokens = self.together(lambda: self.save.join() if first else 0)
        self.together(lambda: self.save.seal(tokens[0]))
        interrupted = self.together(self._finish)
        if interrupted[self.ranks.rank] or self.ranks.take_interrupt():
            raise KeyboardInterrupt("after the save: the new checkpoint is complete")
        if True in interrupted:
            raise Error(f"rank {interrupted.index(True)}: interrupted after the save: the new checkpoint is complete",
                        kind="interrupted")

    def warn(self) -> None:
        """Gives the warnings of the save. Call it after `run`, because with `python -W error` they are errors, of a save that is
        complete."""
        for line in (*self.notes, *self.save.left_checkpoints):  # on rank 0
            warnings.warn(line, RuntimeWarning, stacklevel=3)

    def _finish(self) -> bool:
        """Returns whether Ctrl-C came on this rank. It must not look like an error of the save, which is complete."""
        if self.ranks.rank == 0:
            self.save.finish()
        return self.ranks.take_interrupt()

    def _write(self) -> None:
        self._with_memory(self.save.write)

    def _compare(self) -> str:
        return self._with_memory(self.save.compare_with_base)

    def _with_memory(self, action: Callable[[_core.SavePlan, dict[str, list[int]], Callable[..., None]], T]) -> T:
        self.raise_failure()
        memory = SavedMemory(self.boxes)
        return action(self.plan, memory.addresses, memory.read)

    def _holding_failure(self, body: Callable[[], None]) -> None:
        """Calls `body`. If it raises on this rank, the next exchange tells the other ranks."""
        try:
            body()
        except BaseException as error:
            self.failure = error

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure


class _Plan(NamedTuple):
    """A plan, and what later saves of the same layout need beside it."""

    save_plan: _core.SavePlan
    num_split_ties: int  # ties that are not kept, because ranks hold different ones


class _Job(SaveSteps):
    """One save, on this rank."""

    path: str
    format: str
    state: JobState
    _plans: ClassVar[_Kept[_Plan]] = _Kept()
    _copies: dict[Any, dict[tuple[str, int], torch.Tensor]] = {}  # by ranks; of the last save in the background

    @classmethod
    def start(cls, ranks: Ranks, state_dict: Mapping[Any, Any], path: PathLike, format: str, overwrite: bool,
              keep_last: int | None, compress: str, base: PathLike | None, changed_rows: bool, memory: int | str, endpoint: str | None) -> _Job:
        _Background.wait(ranks)
        return cls(ranks, state_dict, path, format, overwrite, keep_last, compress, base, changed_rows, memory, endpoint)

    def __init__(self, ranks: Ranks, state_dict: Mapping[Any, Any], path: PathLike, format: str, overwrite: bool,
                 keep_last: int | None, compress: str, base: PathLike | None, changed_rows: bool, memory: int | str,
                 endpoint: str | None):
        super().__init__(ranks, f"saving {path!r}")
        self.has_planned = False
        self.num_split_ties = 0
        self.has_base = base is not None

        def begin() -> dict[str, Any]:
            encoded = absolute(stored_path_bytes("path", path, endpoint))
            self.path = os.fsdecode(encoded)
            self.format = text("format", format)
            self.state = JobState(state_dict, ranks)
            # Pickle can send plain values, and any rank can unpickle them.
            self.state.values = {name: _core.plain_value(list(self.state.paths[name]), value)
                                 for name, value in self.state.values.items()}
            self._save = _core.Save(encoded, self.format, ranks.rank, flag("overwrite", overwrite),
                                    at_least_one("keep_last", keep_last, MAX_COUNT), text("compress", compress),
                                    nbytes("memory", memory), absolute(optional_path_bytes("base", base)),
                                    flag("changed_rows", changed_rows))
            own = tensor_digest(self.state)
            return {"tensors": own, "names": names_digest(self.state), "groups": groups_digest(self.state), "checkpoint": last_part(self.path),
                    "format": format, "options": f"overwrite={overwrite}, keep_last={keep_last}, compress={compress!r}, "
                               f"base={None if base is None else last_part(os.fsdecode(base))!r}, "
                               f"changed_rows={changed_rows}",
                    "values": self._values() if ranks.rank == 0 else None,
                    "per rank": {name: self.state.values[name] for name in self.state.per_rank},
                    "directory": self.save.stage() if ranks.rank == 0 else None}

        by_rank = self.together(begin)
        first = by_rank[0]

        def check() -> None:
            for key, what in (("checkpoint", "checkpoint to save"), ("format", "format of the checkpoint"), ("options", "arguments")):
                require_same(what, [message[key] for message in by_rank], self.path)

        self.on_all(check)
        values = first["values"]
        if len({(message["names"], message["groups"]) for message in by_rank}) > 1:
            values_by_rank = self.together(self._values)
            values = self.on_all(lambda: merged_values(self.path, values_by_rank))
            empty = [tuple(keys) for keys, value in values if _is_empty(value)]
            if empty:
                filled = set[Path]().union(*self.together(lambda: filled_of(empty, self.state.paths.values())))
                values = [(keys, value) for keys, value in values if not (_is_empty(value) and tuple(keys) in filled)]
        digests = tuple(message["tensors"] for message in by_rank)
        self.value_names = names_that_tell_kinds(values)
        descriptions = self.compare_replicas(self.path, self.state, digests, has_plan=self._cache_key(digests) in self._plans)
        try:
            values = with_all_ranks(values, [message["per rank"] for message in by_rank])
            self.plan, self.num_split_ties = self._plan(digests, descriptions)
            self.boxes = self._boxes()
            self.save.set_contents(self.plan, first["directory"], values)
        except BaseException as error:
            self.failure = error
        if self.save.is_one_file:
            self.together(self._start_one_file)

    def _values(self) -> list[tuple[list[Any], Any]]:
        return [(list(self.state.paths[name]), value) for name, value in self.state.values.items()]

    def _cache_key(self, digests: tuple[str, ...]) -> Any:
        return (self.ranks.rank, tuple(self.ranks.global_ranks), self.format, digests, self.value_names)

    def _plan(self, digests: tuple[str, ...], descriptions: list[Description] | None) -> _Plan:
        key = self._cache_key(digests)
        found = self._plans.get(key)
        if found is None:
            self.has_planned = True
            if descriptions:
                tensors, _ = merged(self.path, descriptions)
                aliases, num_split = ties_of_all(descriptions)
                tensors = {name: tensor for name, tensor in tensors.items() if name not in aliases}
            else:
                tensors, aliases = describe_job(self.state)
                num_split = 0
            job = core_job(self.ranks, (of_lowest_ranks(tensors), aliases), self.value_names)
            found = _Plan(_core.SavePlan(job, self.format, self.ranks.rank, held_boxes(self.state)), num_split)
            self._plans[key] = found
        return found

    def _boxes(self) -> dict[str, list[torch.Tensor | None]]:
        """Returns, by tensor, its boxes; None in place of a box that this rank does not write."""
        read = self.plan.boxes_read()
        return {name: [local if i in read.get(name, ()) else None for i, (_, local) in enumerate(tensors)]
                for name, tensors in self.state.local_of_names().items()}

    def _start_one_file(self) -> None:
        self.raise_failure()
        if self.ranks.rank == 0:
            self.save.start_one_file()

    def copy_tensors(self) -> None:
        """Replaces the tensors that this rank writes by copies, so that the trainer can continue."""
        if self.failure is not None:
            return
        try:
            self._copy_tensors()
        except BaseException as error:
            self.failure = error

    def _copy_tensors(self) -> None:
        import torch

        old = self._copies.setdefault(self.ranks, {})
        new: dict[tuple[str, int], torch.Tensor] = {}
        by_device: dict[Any, Any] = {}
        with torch.inference_mode(False), torch.no_grad():
            for name, boxes in self.boxes.items():
                for i, tensor in enumerate(boxes):
                    if tensor is None:
                        continue
                    copy = old.pop((name, i), None)
                    if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
                    if tensor.is_cuda:
                        self._copy_on_side_stream(copy, tensor, by_device)
                    else:
                        copy.copy_(tensor)
                    boxes[i] = new[name, i] = copy
            for stream in by_device.values():
                stream.synchronize()
        self._copies[self.ranks] = new

    @staticmethod
    def _copy_on_side_stream(copy: torch.Tensor, tensor: torch.Tensor, by_device: dict[Any, Any]) -> None:
        import torch

        if tensor.device not in by_device:
            by_device[tensor.device] = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
            by_device[tensor.device].wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(by_device[tensor.device]):
            copy.copy_(tensor, non_blocking=True)

    def report(self, begin: float) -> Saved:
        written = self.plan.nbytes if self.failure is None else 0
        changes = self.save.changes
        if self.num_split_ties:
            changes["split_ties"] = changes.get("split_ties", 0) + self.num_split_ties
        return Saved(self.path, self.format, written, self.has_planned, time.monotonic() - begin, changes=changes)

    def with_linked(self, report: Saved) -> Saved:
        """Returns the report with `linked_nbytes`, the bytes that stay in files of the base. Subtracts them from `nbytes`."""
        linked = self.save.linked_nbytes
        return report._replace(nbytes=report.nbytes - linked, linked_nbytes=linked)


class _Background:
    """A save in the background. There is at most one for each `Ranks`."""

    _running: dict[Any, _Background] = {}
    _process: int | None = None  # the process that has started a save; a fork is another one

    @classmethod
    def start(cls, job: _Job, report: Saved) -> Future[Saved]:
        if cls._process != os.getpid():
            cls._process = os.getpid()
            # Python calls no function of atexit at the end of a forked process of multiprocessing.
            multiprocessing.util.Finalize(None, cls.wait_for_all, exitpriority=10)
        it = cls._running[job.ranks] = cls(job, report)
        return it.future

    @classmethod
    def finish(cls, ranks: Ranks) -> None:
        """Waits for the save of these ranks, whether it fails or not."""
        it = cls._running.get(ranks)
        if it is not None:
            it.thread.join()

    @classmethod
    def wait(cls, ranks: Ranks) -> None:
        """Waits for the save of these ranks. If it failed on a rank that has not called `result()`, raises on all ranks."""
        cls.finish(ranks)
        it = cls._running.pop(ranks, None)
        if it is not None:
            it.print_unasked_warning()
            ranks.gather("waiting for the save before", it.raise_unasked)

    @classmethod
    def wait_for_all(cls) -> None:
        while cls._running:
            _, it = cls._running.popitem()
            it.thread.join()
            it.print_unasked_warning()
            if it.failure is not None and not it.future.was_asked:
                print(f"tessera: a save in the background failed, and nobody called result(): {it.failure}",
                      file=sys.stderr)

    def __init__(self, job: _Job, report: Saved):
        self.future = _SaveFuture()
        self.failure: BaseException | None = None
        self.warning: Warning | None = None
        self.future.set_running_or_notify_cancel()
        self.thread = threading.Thread(target=self._run, args=(job, report), name="tessera save", daemon=True)
        self.thread.start()

    def print_unasked_warning(self) -> None:
        if self.warning is not None and not self.future.was_asked:
            print(f"tessera: {self.warning}", file=sys.stderr)

    def raise_unasked(self) -> None:
        if self.failure is not None and not self.future.was_asked:
            raise self.failure

    def _run(self, job: _Job, report: Saved) -> None:
        try:
            job.run()
        except BaseException as error:
            self.failure = error
            self.future.set_exception(error)
            return
        try:
            job.warn()
        except Warning as warning:  # with `python -W error`. The save is complete, so later saves do not raise it
            self.warning = warning
            self.future.set_exception(warning)
        else:
            self.future.set_result(job.with_linked(report))


class _SaveFuture(Future[Saved]):
    """A future that remembers whether `result` or `exception` was called."""

    was_asked = False

    def result(self, timeout: float | None = None) -> Saved:
        outcome = super().exception(timeout)
        self.was_asked = True
        if outcome is not None:
            raise outcome
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        outcome = super().exception(timeout)
        self.was_asked = True
        return outcome


atexit.register(_Background.wait_for_all)

# The tensors of a rank, by name: path, dtype, shape and layout. Then its aliases, by name: path and target.
Description = tuple[dict[str, tuple[list[Any], str, list[int], Any]], dict[str, tuple[list[Any], str]]]


def describe_job(state: JobState) -> Description:
    tensors = {name: (list(state.paths[name]), tensor.dtype, tensor.shape, tensor.layout)
               for name, tensor in state.tensors.items()}
    return tensors, {alias: (list(state.paths[alias]), name) for alias, name in state.aliases.items()}


def is_first_with(digests: Sequence[Any], rank: int) -> bool:
    """Returns whether no rank before this one has the same digest. Then this rank describes its job for all that have it."""
    return digests.index(digests[rank]) == rank


def of_first_with(digests: Sequence[Any], by_rank: list[T | None]) -> list[T]:
    """Returns, by rank, what the first rank with the same digest has sent."""
    found: list[T] = []
    for digest in digests:
        sent = by_rank[digests.index(digest)]
        assert sent is not None
        found.append(sent)
    return found


def tensor_digest(state: JobState) -> str:
    tensors, aliases = describe_job(state)
    digest = hashlib.sha256()
    for name, (path, dtype, shape, layout) in sorted(tensors.items()):
        digest.update(repr((path, dtype, shape, state.layout_digests.of(layout))).encode("utf-8", "surrogatepass"))
    digest.update(repr(sorted(aliases.items())).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def names_digest(state: JobState) -> str:
    paths = [(name, state.paths[name], _is_empty(state.values[name])) for name in sorted(state.values)]
    return hashlib.sha256(repr(paths).encode("utf-8", "surrogatepass")).hexdigest()


def groups_digest(state: JobState) -> str:
    """Returns a digest of the lists of parameters in optimizers' groups, which differ between pipeline stages."""
    lists = [(name, value) for name, value in sorted(state.values.items()) if lists_parameters(state.paths[name])]
    return hashlib.sha256(repr(lists).encode("utf-8", "surrogatepass")).hexdigest()


def names_that_tell_kinds(values: list[tuple[list[Any], Any]]) -> tuple[str, ...]:
    """Returns the names of values that may tell which tensors are optimizer state, such as `optim.param_groups`."""
    names = (_core.spell_path(path) for path, _ in values)
    return tuple(sorted(name for name in names if not {"state", "param_groups"}.isdisjoint(name.split("."))))


def core_job(ranks: Ranks, described: Description, value_names: Sequence[str] = ()) -> _core.Job:
    tensors, aliases = described
    return _core.Job(ranks.size, [(path, dtype, shape, layout or []) for path, dtype, shape, layout in tensors.values()],
                     list(aliases.values()), [name_bytes("name", name) for name in value_names])


def held_boxes(state: JobState) -> dict[str, list[tuple[list[int], list[int]]]]:
    return {name: [(list(offsets), list(sizes)) for (offsets, sizes), _ in local]
            for name, local in state.local_of_names().items()}


def merged(path: str, by_rank: list[Description]) -> Description:
    """Merges the descriptions of all ranks. Aliases become tensors. Raises Error naming each tensor that differs."""
    names = {name: None for tensors, aliases in by_rank for name in (*tensors, *aliases)}
    untied_of = {id(of_rank): untied(of_rank)[0] for of_rank in by_rank}  # ranks may share a description
    untied_by_rank = [untied_of[id(of_rank)] for of_rank in by_rank]
    joined: dict[Any, tuple[list[list[Shard]], list[Shard]]] = {}  # by shape, ranks and layouts, because many tensors have the same
    tensors_of_all: dict[str, tuple[list[Any], str, list[int], Any]] = {}
    problems: list[str] = []
    for name in names:
        found = [(rank, tensors[name]) for rank, tensors in enumerate(untied_by_rank) if name in tensors]
        first_rank, (its_path, dtype, shape, layout) = found[0]
        odd = next(((rank, other) for rank, other in found if other[1:3] != (dtype, shape)), None)
        other_keys = next(((rank, other[0]) for rank, other in found if repr(other[0]) != repr(its_path)), None)
        if other_keys is not None:
            rank, odd_path = other_keys
            problems.append(f"{name}: expected the keys {its_path}, as on rank {first_rank}, found {odd_path} on rank {rank}")
        elif odd is not None:
            rank, (_, odd_dtype, odd_shape, _) = odd
            problems.append(f"{name}: expected {dtype} {shape}, as on rank {first_rank}, found "
                            f"{odd_dtype} {odd_shape} on rank {rank}")
        elif any(other[3] != layout for _, other in found) or (layout is None and len(found) < len(by_rank)):
            key = tuple(shape), tuple(rank for rank, _ in found), tuple(id(other[3]) for _, other in found)
            if key not in joined:
                known = _layouts(shape, [(rank, other[3]) for rank, other in found])
                joined[key] = known, _joined(known)
            known, layout = joined[key]
            crossing = _crossing(layout) if len(layout) > len(known[0]) else None
            if _may_differ(layout):  # a vector must not have elements of two replicas
                layout = min(known, key=_lowest_holder)
            if crossing is not None:
                problems.append(f"{name}: expected parts that do not overlap, found {' and '.join(map(_in_words, crossing))}")
        tensors_of_all[name] = (its_path, dtype, shape, layout)
    if problems:
        raise Error("\n  ".join([f"{path}: the ranks hold different tensors under {len(problems)} "
                                 f"{'name' if len(problems) == 1 else 'names'}:", *problems[:100]]), kind="mismatch", path=path)
    return tensors_of_all, {}


def untied(described: Description) -> Description:
    """Returns a job in which each name of a tied tensor is a tensor of its own."""
    tensors, aliases = described
    return tensors | {alias: (path, *tensors[target][1:]) for alias, (path, target) in aliases.items()}, {}


def names_to_join(by_rank: list[Description]) -> list[str]:
    """Returns the names of tensors whose layouts differ between ranks."""
    layouts: dict[str, Any] = {}
    names: dict[str, None] = {}
    for described in by_rank:
        for name, (_, _, _, layout) in untied(described)[0].items():
            if layouts.setdefault(name, layout) != layout:
                names[name] = None
    return list(names)


class Replicas(NamedTuple):
    """The boxes of joined tensors of which several groups of ranks have a replica each."""

    num_tensors: int  # that are joined
    holders: list[tuple[int, ...]]  # sets of one rank of each group, which have the same boxes; the same on all ranks
    own: dict[int, list[tuple[str, Box]]]  # for each set with this rank: its boxes, in the same order on all ranks of the set


class Difference(NamedTuple):
    """A box of which two ranks have different replicas."""

    name: str
    box: Box
    first_rank: int
    other_rank: int


def replicas_of(by_rank: list[Description], rank: int) -> Replicas:
    """Returns what this rank must compare with others in each save. In each layout of a tensor, the first holder of a box has the
    replica that counts."""
    names = sorted(names_to_join(by_rank))  # the order must not depend on that of the state dict: ranks may have kept older plans
    holders: dict[tuple[str, Box], list[int]] = {}
    for each, described in enumerate(by_rank):
        tensors = untied(described)[0]
        first_held: dict[int, list[Box]] = {}  # by id of a layout, because many tensors of a rank share one list
        for name in names:
            if name not in tensors:
                continue
            _, _, shape, layout = tensors[name]
            if layout is None:
                boxes = [((0,) * len(shape), tuple(shape))]
            else:
                if id(layout) not in first_held:
                    first_held[id(layout)] = [(tuple(offsets), tuple(sizes)) for offsets, sizes, ranks in layout if each == min(ranks)]
                boxes = first_held[id(layout)]
            for box in boxes:
                if 0 not in box[1]:
                    holders.setdefault((name, box), []).append(each)
    sets: dict[tuple[int, ...], list[tuple[str, Box]]] = {}
    for of_name, ranks in holders.items():
        if len(ranks) > 1:
            sets.setdefault(tuple(ranks), []).append(of_name)
    return Replicas(len(names), list(sets), {i: boxes for i, (ranks, boxes) in enumerate(sets.items()) if rank in ranks})


def samples_of(state: JobState, boxes: list[tuple[str, Box]]) -> bytes:
    """Returns one digest of some elements of each box."""
    import torch

    local_of_names = state.local_of_names()
    samples = []
    for name, box in boxes:
        local = next((local for its_box, local in local_of_names[name] if its_box == box), None)
        if local is None:
            raise Error(f"{name}: tensor: expected a shard at {box[0]} of the sizes {box[1]} on this rank, as its layout says, found none",
                        kind="mismatch", tensor=name)
        samples.append(short_digest(some_elements(local).view(torch.uint8).numpy()))
    return b"".join(samples)


def some_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Returns at most MAX_SAMPLES elements of a tensor in host memory, in row-major order; of a large one the first, the last, and
    others spread over its rows and columns. Copies no others."""
    from torch import int8, int16, int32, int64

    tensor = tensor.detach()
    if tensor.numel() > MAX_SAMPLES:
        integers = {1: int8, 2: int16, 4: int32, 8: int64}.get(tensor.element_size())
        if integers is not None and not (tensor.is_conj() or tensor.is_neg()):  # because `take` lacks some dtypes of 8 bits
            tensor = tensor.view(integers)
        tensor = tensor.take(_sample_positions(tensor.numel(), tensor.device))
    return tensor.to("cpu", copy=True).resolve_conj().resolve_neg().contiguous().reshape(-1)


@functools.lru_cache(maxsize=64)
def _sample_positions(numel: int, device: torch.device) -> torch.Tensor:
    """Returns one position in each of MAX_SAMPLES equal parts of [0, numel), at a place that changes from part to part: equal
    steps would only see some columns of most matrices."""
    import torch

    bounds = [i * numel // MAX_SAMPLES for i in range(MAX_SAMPLES + 1)]
    positions = [begin + i * 0x9E3779B1 % (end - begin) for i, (begin, end) in enumerate(itertools.pairwise(bounds))]
    positions[-1] = numel - 1
    with torch.inference_mode(False):  # the cache outlives the caller's mode
        return torch.tensor(positions, device=device)


def short_digest(data: Any) -> bytes:
    return hashlib.sha256(data).digest()[:SAMPLE_NBYTES]


def judge_replicas(path: str, different: list[Difference], num_joined: int, choice: str) -> str | None:
    """Raises Error naming the tensors of which groups of ranks have different replicas, if these are weights, such as those of
    pipeline stages or experts, because only one replica would be saved. Returns a warning if they are a few short vectors, such as
    the statistics of BatchNorm; None if there are none. `num_joined`: of tensors of which groups have a replica each. `choice`: which replicas
    are saved, for the warning."""
    if not different:
        return None
    problems: dict[str, str] = {}
    for name, _, first_rank, other_rank in different:
        problems.setdefault(name, f"{name}: expected equal elements on the ranks {first_rank} and {other_rank}, found different ones")
    are_weights = any(not _is_short(sizes) for _, (_, sizes), _, _ in different)
    what = f"{path}: groups of ranks hold different elements under {len(problems)} {'name' if len(problems) == 1 else 'names'}"
    if are_weights or 2 * len(problems) > num_joined:
        raise Error("\n  ".join([f"{what} (pipeline stages, or experts? give those of each group names of their own):",
                                 *itertools.islice(problems.values(), 100)]), kind="mismatch", path=path)
    return f"{what}, such as {next(iter(problems))}; {choice}; the new checkpoint is complete"


def _layouts(shape: list[int], by_rank: list[tuple[int, list[Shard] | None]]) -> list[list[Shard]]:
    """Returns the different layouts of a tensor that ranks know. There are several if each group of ranks has a replica of its own,
    as with tensor parallelism on one axis of a mesh."""
    known: list[list[Shard]] = []
    for rank, layout in by_rank:
        if layout is None:
            layout = [([0] * len(shape), shape, [rank])]
        if layout not in known:
            known.append(layout)
    return known


def _joined(layouts: list[list[Shard]]) -> list[Shard]:
    holders: dict[Box, set[int]] = {}
    for offsets, sizes, ranks in itertools.chain.from_iterable(layouts):
        holders.setdefault((tuple(offsets), tuple(sizes)), set()).update(ranks)
    return [(list(offsets), list(sizes), sorted(ranks)) for (offsets, sizes), ranks in sorted(holders.items())]


def _lowest_holder(layout: list[Shard]) -> int:
    return min(min(ranks) for _, _, ranks in layout)


def _may_differ(layout: list[Shard]) -> bool:
    """Returns whether replicas of the tensor may differ, as the statistics of BatchNorm do."""
    return any(_is_short(sizes) for _, sizes, _ in layout)


def _is_short(sizes: Sequence[int]) -> bool:
    return len(sizes) < 2 and math.prod(sizes) <= MAX_STATISTICS


def of_lowest_ranks(tensors: dict[str, tuple[list[Any], str, list[int], Any]]) -> dict[str, tuple[list[Any], str, list[int], Any]]:
    """Returns layouts in which short vectors have one holder for each box, the lowest rank: if replicas differ, the mean and the
    variance of one BatchNorm must be those of one rank."""
    lowest: dict[int, list[Shard]] = {}  # by id of a layout, because many tensors share one list
    result = {}
    for name, (path, dtype, shape, layout) in tensors.items():
        if layout is None and _is_short(shape):
            layout = [([0] * len(shape), shape, [0])]
        elif len(shape) < 2 and layout and _may_differ(layout):
            if id(layout) not in lowest:
                lowest[id(layout)] = [(offsets, sizes, [min(ranks)]) for offsets, sizes, ranks in layout]
            layout = lowest[id(layout)]
        result[name] = path, dtype, shape, layout
    return result


def _crossing(layout: list[Shard]) -> tuple[Shard, Shard] | None:
    """Returns two boxes that have elements in common; None if there are none."""
    def have_common(one: Shard, other: Shard) -> bool:
        return all(max(a, b) < min(a + m, b + n) for a, m, b, n in zip(*one[:2], *other[:2], strict=True))

    return next((pair for pair in itertools.combinations(layout, 2) if have_common(*pair)), None)


def _in_words(shard: Shard) -> str:
    offsets, sizes, ranks = shard
    box = ", ".join(f"{begin}:{begin + size}" for begin, size in zip(offsets, sizes, strict=True))
    return f"[{box}] on {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def ties_of_all(by_rank: list[Description]) -> tuple[dict[str, tuple[list[Any], str]], int]:
    """Returns the aliases that have the same target on all ranks that hold elements of them, and the number of others."""
    aliases = {name: alias for _, of_rank in by_rank for name, alias in of_rank.items()}
    tied = {name: alias for name, alias in aliases.items()
            if all(_may_be_tied(rank, name, alias, of_rank) for rank, of_rank in enumerate(by_rank))}
    return tied, len(aliases) - len(tied)


def _may_be_tied(rank: int, name: str, alias: tuple[list[Any], str], described: Description) -> bool:
    tensors, aliases = described
    if name not in tensors:
        return aliases.get(name, alias) == alias
    layout = tensors[name][3]
    return layout is not None and not any(rank in holders for _, _, holders in layout)


def with_all_ranks(values: list[tuple[list[Any], Any]], per_rank: list[dict[str, Any]]) -> list[tuple[list[Any], Any]]:
    """Replaces each PerRank value by a list of the values of all ranks. Raises Error if a rank lacks one."""
    for rank, of_rank in enumerate(per_rank):
        for name in sorted(set().union(*per_rank).difference(of_rank)):
            raise Error(f"{name}: per rank: expected a PerRank of this name on all ranks, found none on rank {rank}", kind="mismatch",
                        tensor=name)
    return [(path, [of_rank[name] for of_rank in per_rank] if (name := _core.spell_path(path)) in per_rank[0] else value)
            for path, value in values]


def merged_values(path: str, by_rank: list[list[tuple[list[Any], Any]]]) -> list[tuple[list[Any], Any]]:
    """Merges the values of all ranks. If several ranks have a name, takes the value of the lowest rank. Exception: optimizers' groups
    (see `_join_groups`). Raises Error if they spell the name with different keys, such as 0 and "0"."""
    merged: dict[str, tuple[int, list[Any], Any]] = {}
    lists: dict[str, list[tuple[int, Any]]] = {}  # by name of a list of parameters: that of each rank
    for rank, values in enumerate(by_rank):
        for keys, value in values:
            name = _core.spell_path(keys)
            first_rank, first_keys, _ = merged.setdefault(name, (rank, keys, value))
            if repr(keys) != repr(first_keys):
                raise Error(f"{path}: {name}: expected the keys {first_keys}, as on rank {first_rank}, found {keys} on rank {rank}",
                            kind="mismatch", path=path, tensor=name)
            if lists_parameters(keys) and isinstance(value, list) and value:
                lists.setdefault(name, []).append((rank, value))
    result = {name: (keys, value) for name, (_, keys, value) in merged.items()}
    for name, of_ranks in lists.items():
        if any(each != result[name][1] for _, each in of_ranks):
            _join_group(path, name, of_ranks, by_rank, result)
    return list(result.values())


def _join_group(path: str, name: str, lists: list[tuple[int, list[Any]]], by_rank: list[list[tuple[list[Any], Any]]],
                result: dict[str, tuple[list[Any], Any]]) -> None:
    """Joins an optimizer's group of which ranks have different parameters, as pipeline stages do: the group gets the parameters of
    all ranks. A rank without parameters does not count. Raises Error if the other entries of the group, such as `lr`, differ.

    name: of the list of parameters. lists: those that are not empty, with their ranks.
    """
    keys = result[name][0]
    result[name] = keys, list({repr(parameter): parameter for _, each in lists for parameter in each}.values())
    expected: dict[str, tuple[int, Any]] = {}  # by name of another entry of the group: the first rank with it, and its value
    for rank, of_rank in lists:
        for its_keys, value in by_rank[rank]:
            if its_keys[:len(keys) - 1] != keys[:-1] or its_keys == keys:
                continue
            field = _core.spell_path(its_keys)
            first_rank, first = expected.setdefault(field, (rank, value))
            if repr(value) != repr(first) and of_rank != lists[0][1]:
                raise Error(f"{path}: {field}: expected {first!r}, as on rank {first_rank}, found {value!r} on rank {rank}, whose group has "
                            "other parameters (StateDictOptions(flatten_optimizer_state_dict=True) gives each parameter values of its own)",
                            kind="mismatch", path=path, tensor=field)
            result[field] = its_keys, first


def lists_parameters(keys: Sequence[Any]) -> bool:
    return "param_groups" in keys and keys[-1] == "params"


def _is_empty(value: Any) -> bool:
    return isinstance(value, (dict, list, tuple)) and not value


def filled_of(empty: list[Path], paths: Iterable[Path]) -> set[Path]:
    """Returns the paths in `empty`, of empty dicts, lists or tuples, below which a rank has entries. `paths`: of its entries."""
    return {path[:i] for path in paths for i in range(len(path))}.intersection(empty)
