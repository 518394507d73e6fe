"""A nested state dict as a flat list of tensors and values, and back."""

from __future__ import annotations

import collections
import types
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from . import _core
from ._errors import Error, joined
from ._job_tensors import Box, JobTensor, LayoutDigests, describe
from ._per_rank import PerRank
from ._position import Position
from ._ranks import Ranks

if TYPE_CHECKING:
    import torch

Path = tuple[Any, ...]  # a Position is a position in a list; any other object is the key of a dict

MAX_DEPTH = 200  # of nested dicts; Python's own recursion allows about 300
MAX_HOLES = 1 << 20  # positions in lists without an entry, as in ckpt-reshard


class JobState:
    """The entries of a state dict by flattened name. A flattened name is the keys of the path joined by dots, as in DCP."""

    def __init__(self, state_dict: Mapping[Any, Any], ranks: Ranks):
        import torch

        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict: expected a dict, found {type(state_dict).__name__}")
        self._tensor_type = torch.Tensor
        self._ranks = ranks
        self._shared: dict[Any, str] = {}
        self.layout_digests = LayoutDigests()
        self.paths: dict[str, Path] = {}  # of all entries
        self.tensors: dict[str, JobTensor] = {}
        self.aliases: dict[str, str] = {}  # second names of tied tensors, and the first name of each
        self.values: dict[str, Any] = {}
        self.per_rank: dict[str, PerRank] = {}  # values for which the checkpoint stores a list of each rank's value
        self.objects: list[tuple[Path, Any]] = []  # objects with load_state_dict()
        self._refusals: list[Error] = []  # of tensors
        self.root = self._visit_dict((), state_dict)
        if self._refusals:
            raise joined(self._refusals, "tensors can be neither saved nor loaded")

    def _visit(self, path: Path, value: Any) -> Any:
        """Records an entry, or all entries below it. Returns the object that takes the place of `value` in `root`."""
        if isinstance(value, self._tensor_type):
            self._add_tensor(path, value)
            return value
        if isinstance(value, PerRank):
            name = self._name((*path, "ranks"))
            self.values[name] = value.state()
            self.per_rank[name] = value
            return value
        if _has_state(value):
            given = value.state_dict()
            if not isinstance(given, Mapping):
                raise Error(f"{self._spell(path)}: state_dict(): expected a dict, found an object of class {type(given).__name__}",
                            kind="invalid_argument", tensor=self._spell(path))
            state = self._visit_dict(path, given)
            if hasattr(given, "_metadata"):  # the versions of a module's state: load_state_dict() converts a state that has none
                state = collections.OrderedDict(state)
                state._metadata = given._metadata  # type: ignore[attr-defined]
            self.objects.append((path, value))
            return state
        if isinstance(value, Mapping) and value:
            return self._visit_dict(path, value)
        if isinstance(value, (list, tuple)) and self._is_split(path, value):
            items = [self._visit((*path, Position(i)), item) for i, item in enumerate(value)]
            return items if isinstance(value, list) else tuple(items)
        self.values[self._name(path)] = value
        return value

    def _is_split(self, path: Path, items: list[Any] | tuple[Any, ...]) -> bool:
        try:
            return is_split(items, self._tensor_type)
        except RecursionError:
            raise self._too_deep(path) from None

    def _too_deep(self, path: Path) -> Error:
        name = self._spell(path[:3])
        return Error(f"{name}: value: expected dicts and lists nested at most {MAX_DEPTH} deep, found deeper nesting, or a value that "
                     "contains itself", kind="invalid_argument", tensor=name)

    def _visit_dict(self, path: Path, mapping: Mapping[Any, Any]) -> dict[Any, Any]:
        if len(path) > MAX_DEPTH:
            raise self._too_deep(path)
        return {key: self._visit((*path, key), value) for key, value in mapping.items()}

    def _spell(self, path: Path) -> str:
        try:
            name = _core.spell_path(list(path))
            name.encode()
            return name
        except (TypeError, UnicodeError, RuntimeError) as error:
            keys = ".".join(repr(key) for key in path)
            raise Error(f"{keys}: name: expected keys that are numbers, or text that UTF-8 can hold, found other keys",
                        kind="invalid_argument") from error

    def _name(self, path: Path) -> str:
        name = self._spell(path)
        if name in self.paths:
            raise Error(f"{name}: name: expected one entry of this name, found two", kind="invalid_argument", tensor=name)
        self.paths[name] = path
        return name

    def _add_tensor(self, path: Path, tensor: torch.Tensor) -> None:
        name = self._name(path)
        try:
            found = describe(name, tensor, self._ranks)
        except Error as error:
            self._refusals.append(error)
            return
        same = _identity(found, self.layout_digests)
        if same is not None:
            first = self._shared.setdefault(same, name)
            if first != name:
                self.aliases[name] = first
                return
        self.tensors[name] = found

    def local_of_names(self) -> dict[str, list[tuple[Box, torch.Tensor]]]:
        """Returns the boxes of each tensor that this rank holds, also under the second names of tied tensors."""
        return {**{name: tensor.local for name, tensor in self.tensors.items()},
                **{alias: self.tensors[name].local for alias, name in self.aliases.items()}}

    def local_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Returns this rank's boxes of each tensor, each with the tensor's name. A tied tensor has only its first name."""
        return [(name, local) for name, tensor in self.tensors.items() for _, local in tensor.local]

    def replace(self, values: dict[str, Any]) -> None:
        """Replaces values in `root`. `values` maps names to new values."""
        for name, value in values.items():
            self.root = _replaced(self.root, self.paths[name], value)

    def at(self, path: Path) -> Any:
        value = self.root
        for key in path:
            value = value[key]
        return value


def is_split(items: list[Any] | tuple[Any, ...], tensor_type: type) -> bool:
    """Returns whether a list or tuple becomes entries by position, as in ckpt-reshard: a list with a tensor, a dict or
    such a list or tuple; a tuple with, at any depth, a tensor, or a dict with a PerRank or object with state_dict."""
    if isinstance(items, tuple):
        return any(_holds_tensor(item, tensor_type) for item in items)
    return any(isinstance(item, (Mapping, tensor_type)) or (isinstance(item, (list, tuple)) and is_split(item, tensor_type))
               for item in items)


def _holds_tensor(value: Any, tensor_type: type) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_holds_tensor(item, tensor_type) for item in value)
    if isinstance(value, Mapping):
        return any(_holds_tensor(item, tensor_type) or isinstance(item, PerRank) or _has_state(item) for item in value.values())
    return isinstance(value, tensor_type)


def _has_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _identity(tensor: JobTensor, layout_digests: LayoutDigests) -> Any:
    """Returns a key that is equal for tied tensors; None if unknown, as for tensors without elements."""
    if len(tensor.local) != 1:
        return None
    box, local = tensor.local[0]
    return (local.device, local.data_ptr(), local.dtype, tuple(local.shape), local.stride(), local.is_conj(), local.is_neg(), box,
            layout_digests.of(tensor.layout))


def _replaced(container: Any, path: Path, value: Any) -> Any:
    if not path:
        return value
    key = path[0]
    if isinstance(container, tuple):
        items = list(container)
        items[key] = _replaced(items[key], path[1:], value)
        return tuple(items)
    container[key] = _replaced(container[key], path[1:], value)
    return container


class Nesting:
    """Puts entries into nested dicts and lists, and adds those that are missing on the way."""

    def __init__(self, root: dict[Any, Any] | list[Any]):
        self.root = root
        self._holes_left = MAX_HOLES

    def put(self, name: str, keys: list[Any], value: Any) -> None:
        """Raises Error if names do not fit into one nested dict, such as those of a tensor `a` and a tensor `a.b`."""
        container: Any = self.root
        for i, key in enumerate(keys):
            is_last = i + 1 == len(keys)
            below: Any = value if is_last else ([] if isinstance(keys[i + 1], Position) else {})
            is_position = isinstance(key, Position)
            at = int(key) if is_position else key
            if not isinstance(container, list if is_position else dict):
                raise _misfit(name, keys[:i], container, "a list" if is_position else "a dict")
            if is_position:
                assert isinstance(container, list)
                if at < len(container) and container[at] is None:  # an earlier call counted this position as a hole
                    self._holes_left += 1
                self._extend(name, container, at)
                is_new = container[at] is None
            else:
                is_new = at not in container
            if is_new:
                container[at] = below
            elif is_last:
                raise _misfit(name, keys, container[at], _kind_of(value))
            container = container[at]

    def _extend(self, name: str, items: list[Any], position: int) -> None:
        num_holes = position - len(items)
        if num_holes > self._holes_left:
            raise Error(f"{name}: position in a list: expected at most {len(items) + self._holes_left}, because too many positions before it "
                        f"have no entry, found {position}", kind="unsupported", tensor=name)
        if num_holes >= 0:
            self._holes_left -= num_holes
            items.extend([None] * (num_holes + 1))


def _misfit(name: str, keys: list[Any], first: Any, second: str) -> Error:
    where = f"at {_core.spell_path(keys)}" if keys else "at the root"
    return Error(f"{name}: key path: expected {_kind_of(first)} {where}, found {second}", kind="mismatch", tensor=name)


def _kind_of(value: Any) -> str:
    if isinstance(value, dict):
        return "a dict"
    if isinstance(value, list):
        return "a list"
    return "a tensor" if hasattr(value, "dtype") and hasattr(value, "shape") else "a value"


def put_back(given: Any, loaded: Any) -> Any:
    """Does as `fill`, but leaves an object with load_state_dict() as it is: it gets its state later."""
    return given if _has_state(given) else fill(given, loaded)


def fill(given: Any, loaded: Any) -> Any:
    """Writes loaded values into the caller's own dicts and lists. Returns the object to use instead of `given`."""
    if isinstance(given, Mapping) and not isinstance(given, MutableMapping) and isinstance(loaded, dict):
        new = {key: put_back(given[key], value) if key in given else value for key, value in loaded.items()}
        if new.keys() == given.keys() and all(value is given[key] for key, value in new.items()):
            return given
        return types.MappingProxyType(new) if isinstance(given, types.MappingProxyType) else new
    if isinstance(given, MutableMapping) and isinstance(loaded, dict):
        new = {key: put_back(given[key], value) if key in given else value for key, value in loaded.items()}
        if list(new) != list(given):  # a dict inside a value
            given.clear()
        for key, value in new.items():
            if key not in given or value is not given[key]:
                given[key] = value
        return given
    if isinstance(given, list) and isinstance(loaded, list) and len(given) == len(loaded):
        given[:] = [put_back(one, other) for one, other in zip(given, loaded, strict=True)]
        return given
    if isinstance(given, tuple) and isinstance(loaded, tuple) and len(given) == len(loaded):
        items = tuple(put_back(one, other) for one, other in zip(given, loaded, strict=True))
        if all(a is b for a, b in zip(items, given, strict=True)):
            return given
        make = getattr(given, "_make", None)  # a namedtuple stays one
        return make(items) if make is not None else items
    if isinstance(given, frozenset) and isinstance(loaded, set):
        return frozenset(loaded)
    return loaded
