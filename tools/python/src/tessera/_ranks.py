"""Messages between the ranks of a job, through torch.distributed."""

from __future__ import annotations

import atexit
import collections
import contextlib
import datetime
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from . import _core
from ._errors import Error

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

# Other ranks wait while rank 0 makes one large file. A rank that dies ends the wait at once. A lost machine, or a rank that does
# not make the call, is noticed only after this time.
_TIMEOUT = datetime.timedelta(hours=6)
_SHORT_NBYTES = 1024  # a longer message needs a second collective


class Ranks:
    """The ranks of a process group, as this rank sees them. Without torch.distributed, the job is one rank.

    Has its own Gloo group, so that the messages of a save in the background do not mix with the trainer's collectives.
    Creating it is collective.
    """

    _by_group: dict[tuple[Any, str], Ranks] = {}  # and by purpose
    _alone: dict[int, Ranks] = {}  # by global rank

    @classmethod
    def of(cls, process_group: Any, purpose: str = "calls") -> Ranks:
        """Returns the ranks of a process group; None: of the default group. The first call for each is collective.

        purpose: each purpose has its own messages, because DCP may save in the background while the trainer calls `tessera.save`.
        """
        import torch.distributed as dist

        if isinstance(process_group, Ranks):
            return process_group
        if not (dist.is_available() and dist.is_initialized()):
            if process_group is not None:
                raise ValueError("process_group: expected None, as torch.distributed is not initialized, found a group")
            return cls.alone()
        group = dist.group.WORLD if process_group is None else process_group
        if (group, purpose) not in cls._by_group:
            rank = dist.get_rank(group)
            if rank < 0:
                raise ValueError("process_group: expected a group that has this rank, found a group without it")
            cls._by_group[group, purpose] = cls(dist.get_process_group_ranks(group), rank, purpose)
        return cls._by_group[group, purpose]

    @classmethod
    def alone(cls) -> Ranks:
        """Returns this rank, as the only one of a job. Not collective."""
        import torch.distributed as dist

        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        if rank not in cls._alone:
            cls._alone[rank] = cls([rank])
        return cls._alone[rank]

    def __init__(self, global_ranks: list[int], rank: int = 0, purpose: str = ""):
        self.global_ranks = global_ranks  # by rank of the group
        self.rank = rank
        self._group: Any = _new_gloo(global_ranks, rank, purpose) if len(global_ranks) > 1 else None
        self.lock = threading.RLock()  # of the thread that starts a save: a second thread must not reuse its copies
        self._interrupted = False
        self._num_threads = 0
        self.rank_of = {rank: i for i, rank in enumerate(self.global_ranks)}

    @classmethod
    def leave_groups(cls) -> None:
        """Ends the Gloo groups. A thread of a group that still runs when Python ends may abort the process."""
        all_ranks, cls._by_group = list(cls._by_group.values()), {}
        for ranks in all_ranks:
            ranks._group = None

    @property
    def size(self) -> int:
        return len(self.global_ranks)

    def num_threads(self) -> int:
        """Returns how many threads this rank should use: its cores, shared with the ranks on this machine that may run on
        the same cores. Collective at the first call.
        """
        if self._num_threads == 0:
            import socket

            own = socket.gethostname(), os.sched_getaffinity(0)
            all_ranks = self.gather("counting cores", lambda: own)
            sharing = [1 for host, cores in all_ranks if host == own[0] and cores & own[1]]
            self._num_threads = max(1, min(_core.default_num_threads(), len(own[1]) // len(sharing)))
        return self._num_threads

    @contextlib.contextmanager
    def holding_interrupts(self) -> Iterator[None]:
        """Delays Ctrl-C until the next exchange between ranks, so that all ranks stop together."""
        is_held = (self._group is not None and threading.current_thread() is threading.main_thread()
                   and signal.getsignal(signal.SIGINT) is signal.default_int_handler)
        if not is_held:
            yield
            return

        def note(*_: Any) -> None:
            self._interrupted = True
            _core.set_held_interrupt(True)  # ends this rank's reads and its waits for servers, which may be long

        signal.signal(signal.SIGINT, note)
        try:
            yield
        except BaseException as error:
            if self._release_interrupts() and not isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt(f"{error}") from error
            raise
        if self._release_interrupts():
            raise KeyboardInterrupt

    def _release_interrupts(self) -> bool:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return self.take_interrupt()

    def take_interrupt(self) -> bool:
        """Returns whether a Ctrl-C is delayed, and forgets it. On other threads than the main thread, which delays it, returns False:
        it must not end a save in the background."""
        if threading.current_thread() is not threading.main_thread():
            return False
        was_interrupted, self._interrupted = self._interrupted, False
        _core.set_held_interrupt(False)
        return was_interrupted

    def gather(self, what: str, body: Callable[[], T]) -> list[T]:
        """Calls `body` on every rank and returns all results, by rank. Collective.

        If a body raises, all ranks raise. A rank whose body raised raises its own exception; the others raise an
        Error that names the lowest such rank.
        """
        own: tuple[bool, Any]
        raised: BaseException | None = None
        doing = what.split(" ", 1)[0]
        message = b""
        try:
            own = (True, body())
            if self.take_interrupt():
                raise KeyboardInterrupt
            if self._group is not None:
                message = pickle.dumps((doing, own))
        except BaseException as error:
            raised = error
            own = (False, (_kind_of(error), f"{error}" or type(error).__name__))
            message = pickle.dumps((doing, own))
        results: list[tuple[bool, Any]] = [own]
        if self._group is not None:
            results = self._exchange(what, message, raised)
        if raised is not None:
            raise raised
        good: list[T] = []
        for rank, (is_good, result) in enumerate(results):
            if not is_good:
                kind, text = result
                raise Error(f"rank {rank}: {text}", kind=kind)
            good.append(result)
        return good

    def _exchange(self, what: str, message: bytes, raised: BaseException | None) -> list[Any]:
        try:
            results = self._all_gather(message)
        except RuntimeError as error:
            if raised is not None:
                raise raised from None
            raise Error(f"{what}: rank {self.rank} got no answer from the other ranks: {error}", kind="io") from error
        for rank, (doing, _) in enumerate(results):
            if doing != what.split(" ", 1)[0]:
                raise Error(f"{what}: expected the same call on all ranks, found rank {rank} {doing}", kind="mismatch")
        return [result for _, result in results]

    def _all_gather(self, own: bytes) -> list[Any]:
        """Returns the unpickled messages of all ranks. Short messages need one collective; all_gather_object always uses two."""
        begins = self._exchange_short(len(own).to_bytes(8, "little") + own[:_SHORT_NBYTES])
        sizes = [int.from_bytes(begin[:8], "little") for begin in begins]
        if max(sizes) > _SHORT_NBYTES:
            messages = self._exchange_long(own, max(sizes))
        else:
            messages = [begin[8:] for begin in begins]
        return [pickle.loads(message[:size]) for message, size in zip(messages, sizes, strict=True)]

    def _exchange_short(self, message: bytes) -> list[bytes]:
        """Returns the messages of all ranks, padded with zeros to 8 + _SHORT_NBYTES bytes. Uses all-to-all: Gloo's
        all_gather is a ring, in which each rank waits for many others if there are more ranks than cores."""
        import torch

        sent = _as_tensor(message, 8 + _SHORT_NBYTES).repeat(self.size)
        received = torch.empty_like(sent)
        self._group.alltoall_base(received, sent, [], []).wait()
        return [each.numpy().tobytes() for each in received.view(self.size, -1)]

    def _exchange_long(self, message: bytes, nbytes: int) -> list[bytes]:
        import torch

        sent = _as_tensor(message, nbytes)
        received = [torch.empty_like(sent) for _ in range(self.size)]
        self._group.allgather([received], [sent]).wait()
        return [each.numpy().tobytes() for each in received]


def _kind_of(error: BaseException) -> str:
    """Returns the kind of the Error that other ranks raise if this rank raises `error`."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, (TypeError, ValueError)):
        return "invalid_argument"
    return getattr(error, "kind", "io")


# How many groups this process has made, by purpose and global ranks.
_num_groups: collections.Counter[tuple[str, tuple[int, ...]]] = collections.Counter()


def _new_gloo(global_ranks: list[int], rank: int, purpose: str) -> Any:
    """Returns a Gloo group of these ranks, unknown to torch.distributed. Collective among them.

    dist.new_group(use_local_synchronization=True) is not used: it derives the group's name from the number of groups that this
    process has, so ranks with other numbers of groups (pipelines, meshes of part of the ranks) would wait for each other forever.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    made = purpose, tuple(global_ranks)
    name = f"tessera/{purpose}/{'_'.join(map(str, global_ranks))}/{_num_groups[made]}"
    _num_groups[made] += 1
    return dist.ProcessGroupGloo(PrefixStore(name, _get_default_store()), rank, len(global_ranks), _TIMEOUT)


def require_same(what: str, by_rank: list[Any], path: str) -> None:
    """Raises Error if a rank has something else than rank 0."""
    for rank, found in enumerate(by_rank):
        if found != by_rank[0]:
            raise Error(f"{what}: expected {by_rank[0]!r}, as on rank 0, found {found!r} on rank {rank}", kind="mismatch", path=path)


def require_same_checkpoint(opened: list[tuple[str, str]], path: str) -> None:
    """Raises Error if ranks have opened different checkpoints. `opened`: each rank's last part of the path, for the message, and
    identity of the checkpoint. Paths may differ between machines."""
    first_name, first = opened[0]
    for rank, (name, identity) in enumerate(opened):
        if identity != first:
            found = "a different checkpoint of that name" if name == first_name else repr(name)
            raise Error(f"checkpoint to load: expected {first_name!r}, as on rank 0, found {found} on rank {rank} (do all ranks see the "
                        "same file system?)", kind="mismatch", path=path)


def last_part(path: str) -> str:
    if path.startswith(("http://", "https://")):
        path = path.partition("?")[0]  # a query may hold a signature
    return os.path.basename(path.rstrip("/"))


def _as_tensor(message: bytes, nbytes: int) -> torch.Tensor:
    import torch

    tensor = torch.zeros(nbytes, dtype=torch.uint8)
    tensor[:len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    return tensor


atexit.register(Ranks.leave_groups)
