"""Loads a checkpoint of any format and sharding into the state of a running job."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _core
from ._arguments import PathLike, at_least_one, flag, name_bytes, names_bytes, nbytes, optional_path_bytes, stored_path_bytes
from ._errors import Error, Problem, joined, refused
from ._job_state import JobState, Nesting, fill
from ._job_tensors import in_host_memory, is_in_host_memory
from ._position import Position
from ._progress import Progress, progress_function
from ._ranks import Ranks, last_part, require_same, require_same_checkpoint
from ._save import (Description, _Background, core_job, describe_job, held_boxes, is_first_with, lists_parameters, names_digest,
                    tensor_digest, untied)
from ._shared_memory import memory_key, require_apart
from ._symbol import with_constants

if TYPE_CHECKING:
    import torch

MAX_HELD = 8  # names in a hint
MAX_SHORT = 500  # characters of arguments that are shown whole


class Loaded(NamedTuple):
    """What a load did on this rank."""

    path: str
    format: str
    world_size: int  # number of ranks that saved
    nbytes: int  # of tensors, read by this rank
    missing: list[str]  # names that the checkpoint lacks; they kept their values (strict=False)
    unexpected: list[str]  # names that the state dict lacks; they were not read (strict=False)
    underflows: dict[str, int]  # by tensor: how many elements of this rank a cast made zero (allow_cast=True)
    notes: list[Problem]  # of the checkpoint's reader, such as which of several differing replicas was read


def load(state_dict: MutableMapping[Any, Any], path: PathLike, *, process_group: Any = None, strict: bool = True,
         allow_cast: bool = False, only: str | Sequence[str] = (), rename: Mapping[str, str] | None = None,
         flat_layout: PathLike | None = None, memory: int | str = _core.DEFAULT_MEMORY_NBYTES, threads: int | None = None,
         endpoint: str | None = None, progress: Progress = None) -> Loaded:
    """Loads a checkpoint into a state dict, in place: fills its tensors and replaces its values. Collective.

    The checkpoint may have any format that Tessera reads, and may be saved by any number of ranks in any layout. Each
    rank reads only what it holds, and checks it against the checksums. For objects in the state dict that have
    load_state_dict(), calls it with the loaded state.

    state_dict: as for `save`. It says which names to load, and which rank holds what.
    process_group: the ranks that load; None: all.
    strict: the state dict and the checkpoint must have the same names. False: lists the differences in the result.
    allow_cast: cast floating-point tensors to the dtype of the state dict.
    only: a glob of names to load, or several; the others keep their values.
    rename: {FROM: TO} replaces FROM, at the start of names in the checkpoint, by TO. If several fit a name, the first counts.
    {"model.fc.": "model.up."} also renames the optimizer state of these parameters, and their names in the optimizer's groups.
    flat_layout: a JSON file that lists the parameters in the flat vectors of FSDP1, as for `open`.
    memory: bytes for the buffers of all threads of this rank. Copies in host memory of tensors on a GPU, and of tensors that
    are not contiguous, are not counted.
    threads: the number of threads of this rank; None: as many as there are cores for each rank on this machine, at most 16.
    endpoint: the S3 server for s3:// paths, as for `open`.
    progress: called with the bytes read on this rank and the total; True: a bar, with tqdm.

    All ranks must load the same checkpoint with the same `strict`, `allow_cast`, `only` and `rename`, and all or none with
    `flat_layout`, or all ranks raise an Error. Checkpoints are compared by the names, dtypes and shapes of tensors, and by a few elements of up to eight tensors.
    If anything does not fit, raises Error on all ranks before any tensor is read. Its `problems` lists everything that does not fit;
    its text ends with hints at arguments that would help.
    After the load, raises Error on all ranks if names of one tensor or memory have different elements in the checkpoint, or if
    another program changes or replaces a local file that a rank reads: tensors may then mix both checkpoints.
    """
    ranks = Ranks.of(process_group)
    load = _Load(ranks)
    what = f"loading {path!r}"
    with ranks.lock, ranks.holding_interrupts():
        _Background.finish(ranks)
        begun = ranks.gather(what, lambda: load.begin(state_dict, path, endpoint, flag("strict", strict), flag("allow_cast", allow_cast),
                                                      names_bytes("only", only), rename, flat_layout))
        require_same("arguments", [each.options for each in begun], load.path)
        require_same_checkpoint([each.opened for each in begun], load.path)
        if len({each.digests for each in begun}) > 1:
            tensors, names = zip(*(each.digests for each in begun), strict=True)
            described = ranks.gather(what, lambda: load.description(is_first_with(tensors, ranks.rank), is_first_with(names, ranks.rank)))
            ranks.gather(what, lambda: load.plan_of_all(described))
        elif not all(each.fits for each in begun):
            ranks.gather(what, load.raise_refusal)
        num_threads = ranks.num_threads()
        has_steps = ranks.gather(what,
                                 lambda: load.read(nbytes("memory", memory), at_least_one("threads", threads) or num_threads,
                                                   progress_function(progress, f"load, rank {ranks.rank}")))
        if any(has_steps):
            ranks.gather(what, lambda: load.put_back(state_dict))
        else:  # no code of the user runs here, so nothing fails
            load.put_back(state_dict)
    return load.report()


class _Begun(NamedTuple):
    """What the ranks tell each other at the begin of a load."""

    opened: tuple[str, str]  # last part of the checkpoint's path, and identity of the checkpoint
    options: str
    digests: tuple[str, str]  # of the rank's tensors, and of its names of values
    fits: bool  # the state dict fits the checkpoint, if all ranks have the same state dict


class _Load:
    """One load, on this rank."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.refusal: Exception | None = None  # why the state dict does not fit, if all ranks have the same state dict
        self.missing: list[str] = []
        self.unexpected: list[str] = []

    def begin(self, state_dict: MutableMapping[Any, Any], path: PathLike, endpoint: str | None, strict: bool, allow_cast: bool, only: list[bytes],
              rename: Mapping[str, str] | None, flat_layout: PathLike | None) -> _Begun:
        """Opens the checkpoint, and plans as if all ranks had the same tensors and names of values.

        In the usual case, all ranks have the same digests. Then no other exchange is needed.
        """
        encoded = stored_path_bytes("path", path, endpoint)
        self.path = os.fsdecode(encoded)
        self.strict, self.allow_cast, self.only, self.rename = strict, allow_cast, only, rename or {}
        renames = [(name_bytes("rename", one), name_bytes("rename", other)) for one, other in self.rename.items()]
        self.state = JobState(state_dict, self.ranks)
        if self.state.values and not isinstance(state_dict, MutableMapping):
            raise TypeError(f"state_dict: expected a dict that can be changed, found {type(state_dict).__name__}")
        require_apart(self.state.local_tensors())
        self.load = _core.Load(encoded, optional_path_bytes("flat_layout", flat_layout), renames)
        try:
            # The checkpoint may store tied tensors of the job as separate tensors.
            self._plan(untied(describe_job(self.state)), set(self.state.values))
        except Exception as error:
            self.refusal = error
        identity = self.load.identity(only) if self.ranks.size > 1 else ""
        patterns = sorted(pattern.decode("utf-8", "surrogateescape") for pattern in only)  # their order means nothing
        # The path of the layout may differ between machines.
        layout = "" if flat_layout is None else ", with flat_layout"
        options = _in_short(f"strict={strict}, allow_cast={allow_cast}, only={patterns}, rename={dict(self.rename)}{layout}")
        return _Begun(opened=(last_part(self.path), identity), options=options,
                      digests=(tensor_digest(self.state), names_digest(self.state)), fits=self.refusal is None)

    def raise_refusal(self) -> None:
        if self.refusal is not None:
            raise self.refusal

    def description(self, of_tensors: bool, of_values: bool) -> tuple[Description | None, list[str] | None]:
        return describe_job(self.state) if of_tensors else None, list(self.state.values) if of_values else None

    def plan_of_all(self, described: list[tuple[Description | None, list[str] | None]]) -> None:
        """Plans again, with the names of all ranks. Each rank compares what it holds with the checkpoint. `described`: None in place
        of what an earlier rank describes in the same way."""
        tensors: dict[str, Any] = {}
        for of_rank in (*(each for each, _ in described if each is not None), describe_job(self.state)):
            tensors.update(untied(of_rank)[0])
        self._plan((tensors, {}), set(self.state.values).union(*(names for _, names in described if names is not None)))

    def _plan(self, tensors: Description, names: set[str]) -> None:
        self.load.set_names([name_bytes("name", name) for name in (*names, *tensors[0])])
        self.saved = _SavedValues(self.load, names)
        rows = self.load.plan(core_job(self.ranks, tensors), self.ranks.rank, held_boxes(self.state),
                              [name_bytes("name", name) for name in self.saved.wanted], not self.strict, not self.strict,
                              self.allow_cast, self.only)
        problems = [Problem(*row) for row in rows]
        selection = _core.Selection(self.only)
        self.selected = [name for name in self.state.values if selection.selects(name_bytes("name", name))]
        # DCP stores nothing for an empty dict or list.
        left = {name for name in self.selected if name not in self.saved.found}
        of_tensors = {str(problem.tensor) for problem in problems if problem.rule == "unexpected" and problem.found == "a tensor"}
        problems += [Problem.of_entry("error", "kind of entry", name, "a value", "a tensor") if name in of_tensors
                     else _missing_value(name, self.strict)
                     for name in self.selected if name in left and (name in of_tensors or not self._may_be_missing(name))]
        unread: list[Error] = []
        self.of_ranks = self._values_of_ranks(problems, unread)
        self.values = self._values(unread)
        errors = tuple(problem for problem in problems if problem.severity == "error")
        if not errors and unread:
            raise joined(unread, f"values of {self.path} cannot be read")
        if errors:
            errors += tuple(Problem.of_error("value", error) for error in unread)
            raise self._refused(errors, num_planned=sum(Problem(*row).severity == "error" for row in rows))
        self.missing = [str(p.tensor) for p in problems if p.rule == "missing"]
        self.unexpected = [str(p.tensor) for p in problems if p.rule == "unexpected"]
        self.notes = [problem for problem in problems if problem.rule not in ("missing", "unexpected")]

    def _refused(self, errors: tuple[Problem, ...], num_planned: int) -> Error:
        """Returns the error that lists why the state dict does not fit, with hints. Problems that one rename would fix share a line.
        `num_planned`: how many of the problems come first, from the core's plan."""
        held = sorted({name.split(".", 1)[0] for name in self.state.paths})
        hints = self.load.hints([(problem.rule, name_bytes("name", problem.tensor or "")) for problem in errors[num_planned:]],
                                [name_bytes("name", name) for name in held])
        left = [problem for problem, is_renamed in zip(errors, hints["is_renamed"], strict=True) if not is_renamed]
        after_renames = tuple(Problem(*row) for row in hints["after_renames"])
        texts = []
        if hints["renames"]:
            texts.append(f"rename={dict(self.rename) | dict(hints['renames'])} loads them under the names of the state dict")
        left_out = [name for prefix in hints["numbered"] for name in ([prefix[:-1]] if prefix else ["state", "param_groups"])]
        listed = [name for name in held if name not in left_out]
        lists_names = hints["has_more"] and len(listed) <= MAX_HELD
        only = listed if lists_names else [*(os.fsdecode(pattern) for pattern in self.only), *(f"!{name}" for name in left_out)]
        if left_out:
            texts.append("the checkpoint has numbers instead of parameter names, as from an optimizer's own state_dict(): save it with "
                         f"get_state_dict; only={only} loads the rest")
        elif lists_names:
            texts.append(f"only={only} loads only what the state dict has")
        if hints["has_more"] and not lists_names:
            texts.append("strict=False loads only what the state dict has, and accepts that the checkpoint lacks names")
        if any(problem.rule == "flat vector" for problem in errors):
            texts.append("flat_layout=FILE says which parameters the flat vectors of FSDP1 consist of")
        if hints["may_cast"]:
            texts.append("allow_cast=True converts tensors to the dtypes of the state dict")
        if hints["nearest"] is not None:
            missing, nearest = hints["nearest"]
            texts.append(f"the name in the checkpoint that is nearest to {missing!r} is {nearest!r}")
        return refused([self.path], errors + after_renames, "entries do not fit the state dict", f"{self.path}: ",
                       [*hints["lines"], *(str(problem) for problem in (*left, *after_renames))], texts)

    def _may_be_missing(self, name: str) -> bool:
        per_rank = self.state.per_rank.get(name)
        if per_rank is not None:
            return per_rank.is_left(None, self.ranks.size)
        value = self.state.values[name]
        return isinstance(value, (dict, list, tuple)) and not value

    def _values(self, unread: list[Error]) -> dict[str, Any]:
        """Returns the values that the state dict gets, without those of PerRank. Adds the error of each that cannot be read."""
        values = {}
        for name in self.selected:
            if name in self.saved.found and name not in self.state.per_rank:
                try:
                    values[name] = self._saved_value(name)
                except Error as error:
                    unread.append(error)
        return values

    def _values_of_ranks(self, problems: list[Problem], unread: list[Error]) -> dict[str, Any]:
        """Returns this rank's value of each PerRank that gets one. Adds a problem for each that the policy does not allow, and the error
        of each that cannot be read."""
        found = {}
        for name, per_rank in self.state.per_rank.items():
            if name not in self.selected or name not in self.saved.found:
                continue
            try:
                saved = self.saved.value(name)
            except Error as error:
                unread.append(error)
                continue
            if not isinstance(saved, list) or not saved:
                problems.append(Problem.of_entry("error", "per rank", name, "a list of each rank's value", f"{type(saved).__name__}"))
            elif not per_rank.is_left(len(saved), self.ranks.size):
                try:
                    found[name] = per_rank.value_for(name, saved, self.ranks.rank, self.ranks.size)
                except Error as error:
                    problems += error.problems
        return found

    def read(self, memory: int, threads: int, progress: Callable[[int, int], object] | None) -> bool:
        """Reads the tensors. Returns whether `put_back` calls methods of the user's objects."""
        import torch

        addresses: dict[str, list[int]] = {}
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # target, source
        filled: dict[Any, str] = {}  # by memory: the name whose elements it gets
        tied: list[tuple[str, str, torch.Tensor, torch.Tensor]] = []  # both names, the first one's tensor, the other's copy
        local = self.state.local_of_names()
        loaded = set(self.load.loaded())
        for name in self.state.paths:
            if name not in loaded:
                continue
            addresses[name] = []
            for _, tensor in local.get(name, []):
                first = filled.setdefault(memory_key(tensor), name)
                if first == name:
                    addresses[name].append(self._address(tensor, copies))
                else:
                    tied.append((first, name, tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")))
                    addresses[name].append(tied[-1][3].data_ptr())
        self.underflows = self.load.read(addresses, memory, threads, progress)
        with torch.no_grad():
            for to, copy in copies:
                to.copy_(copy)
        for first, name, tensor, copy in tied:
            if not _are_same_bits(tensor, copy):
                raise Error(f"{name}: tied tensors: expected the same elements as {first} in the checkpoint, because both names have one "
                            "memory in the state dict, found other elements", kind="mismatch", path=self.path, tensor=name)
        return bool(self.state.objects or self.of_ranks)

    def _saved_value(self, name: str) -> Any:
        value = self.saved.value(name)
        own = self.state.values[name]
        if lists_parameters(self.state.paths[name]) and _are_some_names(own, value):  # of a pipeline stage
            return list(own)
        is_tuple = isinstance(value, list) and isinstance(own, tuple) and self.saved.is_split(name)
        return tuple(value) if is_tuple else value

    @staticmethod
    def _address(tensor: torch.Tensor, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> int:
        import torch

        if is_in_host_memory(tensor):
            torch.autograd.graph.increment_version(tensor)  # a backward that needs the old elements raises an error
            return tensor.data_ptr()
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        copies.append((tensor, copy))
        return copy.data_ptr()

    def put_back(self, state_dict: MutableMapping[Any, Any]) -> None:
        self.state.replace(self.values)
        fill(state_dict, self.state.root)
        for name, value in self.of_ranks.items():
            self.state.per_rank[name].accept(value)
        for path, found in self.state.objects:
            found.load_state_dict(self.state.at(path))

    def report(self) -> Loaded:
        return Loaded(self.path, self.load.format, self.load.world_size, self.load.nbytes, self.missing, self.unexpected,
                      self.underflows, self.notes)


def _are_some_names(own: Any, saved: Any) -> bool:
    """Returns whether both are lists of names, and the first has some of those in the second. Lists of numbers are not: their
    numbers may mean other parameters."""
    are_names = all(isinstance(names, list) and names and all(isinstance(name, str) for name in names) for names in (own, saved))
    return are_names and set(own) < set(saved)


def _in_short(text: str) -> str:
    """Returns the text, or if it is long, its beginning and a digest."""
    if len(text) <= MAX_SHORT:
        return text
    return f"{text[:300]}… (SHA-256 {hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()})"


def _are_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    import torch

    one = in_host_memory(one).reshape(-1)
    return torch.equal(one.view(torch.uint8), other.reshape(-1).view(torch.uint8))


class _SavedValues:
    """The values of a checkpoint, by the names of a state dict.

    The state dict may have one value where the checkpoint has several below that name, such as the items of a list.
    """

    def __init__(self, load: _core.Load, names: set[str]):
        self._load = load
        self._index: dict[str, int] = {}
        self._paths: dict[str, list[Any]] = {}
        self._below: dict[str, list[str]] = {}  # by name of the state dict: the checkpoint's names below it
        self.wanted: list[str] = []  # names of the checkpoint that become values of the state dict, or items in them
        self.found: set[str] = set()
        for i, (new, path) in enumerate(load.values()):
            self._index[new] = i
            self._paths[new] = path
        for new in self._index:
            above = self._ancestor(new, names)
            if new in names:
                self.found.add(new)
            elif above is not None and above not in self._index:
                self._below.setdefault(above, []).append(new)
                self.found.add(above)
            else:
                continue
            self.wanted.append(new)

    @staticmethod
    def _ancestor(name: str, names: set[str]) -> str | None:
        end = name.rfind(".")
        while end > 0:
            if name[:end] in names:
                return name[:end]
            end = name.rfind(".", 0, end)
        return None

    def is_split(self, name: str) -> bool:
        """Returns whether the checkpoint has several values below a name of the state dict, instead of one."""
        return name not in self._index

    def value(self, name: str) -> Any:
        if not self.is_split(name):
            return self._read(name)
        keys = {each: self._keys_below(each, name) for each in self._below[name]}
        nesting = Nesting([] if all(isinstance(path[0], Position) for path in keys.values()) else {})
        for each, path in keys.items():
            nesting.put(each, path, self._read(each))
        return nesting.root

    def _read(self, name: str) -> Any:
        return with_constants(self._load.read_value(self._index[name]))

    def _keys_below(self, each: str, name: str) -> list[Any]:
        path = self._paths[each]
        for i in range(1, len(path)):
            if _core.spell_path(path[:i]) == name:
                return path[i:]
        return [each[len(name) + 1:]]


def _missing_value(name: str, is_error: bool) -> Problem:
    return Problem.of_entry("error" if is_error else "note", "missing", name, "a value of that name", "none")
