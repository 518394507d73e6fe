"""The contents of a checkpoint as nested dicts and lists, as they were in the program that saved it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from . import _core
from ._errors import Problem, Refused, refused
from ._job_state import Nesting, is_split
from ._position import Position
from ._symbol import with_constants

if TYPE_CHECKING:
    from ._checkpoint import Checkpoint
    from ._tensor import Tensor


def whole(checkpoint: Checkpoint, paths: dict[str, list[Any]], tensor: Callable[[Tensor], Any]) -> dict[Any, Any] | list[Any]:
    """Returns the whole state dict. Tied names get the same tensor, as in the program that saved them."""
    is_list = bool(paths) and all(isinstance(path[0], Position) for path in paths.values())
    nesting = Nesting([] if is_list else {})
    read: dict[str, Any] = {}
    for name in checkpoint._open_reader().dict_order():
        first = checkpoint.aliases.get(name, name)
        if first not in read:
            entry = checkpoint._entry(first)
            if isinstance(entry, Refused):
                raise entry
            read[first] = tensor(entry) if first in checkpoint._metas else with_constants(entry)
        nesting.put(name, with_constants(paths[name]), read[first])
    return nesting.root


def item_of(value: Any, name: str) -> Any:
    """Returns the item of nested dicts and lists whose keys, joined by dots, are `name`. Raises KeyError if there is none."""
    for end in [*(place for place, letter in enumerate(name) if letter == "."), len(name)]:
        try:
            item = _item_at(value, name[:end])
            return item if end == len(name) else item_of(item, name[end + 1:])
        except KeyError:
            continue
    raise KeyError(name)


def _item_at(value: Any, key: str) -> Any:
    if isinstance(value, dict) and key in value:
        return value[key]
    if isinstance(value, dict):
        for each, item in value.items():
            if not isinstance(each, str) and str(each) == key:
                return item
    elif isinstance(value, (list, tuple)) and key.isdecimal() and int(key) < len(value):
        return value[int(key)]
    raise KeyError(key)


class Likeness:
    """Builds state dicts that have the structure of a given one and the contents of a checkpoint."""

    def __init__(self, checkpoint: Checkpoint, tensor: Callable[[Tensor], Any]):
        import torch

        self._checkpoint = checkpoint
        self._tensor = tensor
        self._tensor_type = torch.Tensor
        self._read: dict[str, Any] = {}
        self._problems: list[Problem] = []

    def of(self, like: Mapping[Any, Any] | Sequence[Any]) -> Any:
        """Returns new dicts and lists with the keys of `like`. Raises Error with a list of all entries that do not fit."""
        wanted: list[tuple[str, Any]] = []
        self._visit([], like, lambda name, value: wanted.append((name, value)))
        for name, value in wanted:
            self._check(name, value)
        if self._problems:
            raise refused([self._checkpoint.path], tuple(self._problems), "entries do not fit the state dict",
                          f"{self._checkpoint.path}: ")
        return self._visit([], like, lambda name, _: self._take(name))

    def _visit(self, path: list[Any], value: Any, leaf: Callable[[str, Any], Any]) -> Any:
        if isinstance(value, Mapping) and (value or not path):
            return {key: self._visit([*path, key], item, leaf) for key, item in value.items()}
        if isinstance(value, (list, tuple)) and is_split(value, self._tensor_type):
            items = [self._visit([*path, Position(i)], item, leaf) for i, item in enumerate(value)]
            return items if isinstance(value, list) else tuple(items)
        return leaf(_core.spell_path(path), value)

    def _check(self, name: str, value: Any) -> None:
        if name not in self._checkpoint and not self._checkpoint._has_item(name):
            nearest = self._checkpoint._nearest(name)
            self._add("missing", name, "a tensor or a value of that name",
                      "none" if nearest is None else f"none (did you mean {nearest!r}?)")
            return
        meta = self._checkpoint._metas.get(self._checkpoint.aliases.get(name, name))
        if not isinstance(value, self._tensor_type):
            if meta is not None:
                self._add("kind", name, type(value).__name__, "a tensor")
            return
        dtype = str(value.dtype).removeprefix("torch.")
        if hasattr(value, "placements"):
            self._add("kind", name, "a plain tensor (tessera.load fills DTensors)", "a DTensor in the state dict")
        elif meta is None:
            self._add("kind", name, "a tensor", "a value")
        elif tuple(value.shape) != meta.shape:
            self._add("shape", name, str(list(value.shape)), str(list(meta.shape)))
        elif dtype != meta.dtype:
            self._add("dtype", name, dtype, meta.dtype)

    def _add(self, rule: str, name: str, expected: str, found: str) -> None:
        self._problems.append(Problem.of_entry("error", rule, name, expected, found))

    def _take(self, name: str) -> Any:
        first = self._checkpoint.aliases.get(name, name)
        if first not in self._read:
            entry = self._checkpoint[first] if first in self._checkpoint else self._checkpoint._item(first)
            self._read[first] = self._tensor(entry) if first in self._checkpoint._metas else with_constants(entry)
        return self._read[first]
