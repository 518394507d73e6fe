"""An open checkpoint, as a mapping of names to tensors and values."""

from __future__ import annotations

import copy
import os
from collections.abc import ItemsView, Iterator, Mapping, Sequence, ValuesView
from types import TracebackType
from typing import Any

from . import _core
from ._arguments import PathLike, flag, names_bytes, optional_path_bytes, refuse_type, settings, stored_path_bytes
from ._errors import Error, MissingName, Refused
from ._html import html_of
from ._state_dict import Likeness, item_of, whole
from ._tensor import Tensor, TensorMeta


class Checkpoint(Mapping[str, Any]):
    """An open checkpoint: names to tensors (`Tensor`, which read nothing yet) and Python values.

    Names are sorted. Several threads may use it at once. It is closed by `close`, by the end of a `with`, or when
    nothing uses it any more.
    """

    def __init__(self, path: PathLike, *, flat_layout: PathLike | None = None, as_dict: str | Sequence[str] = (),
                 recipe: PathLike | None = None, inverse: bool = False, set: Mapping[str, int | str] | None = None,
                 endpoint: str | None = None):
        encoded = stored_path_bytes("path", path, endpoint)
        self.path: str = os.fsdecode(encoded)
        reader = _core.Reader(encoded, optional_path_bytes("flat_layout", flat_layout), names_bytes("as_dict", as_dict),
                              optional_path_bytes("recipe", recipe), flag("inverse", inverse), settings("set", set))
        self.format: str = reader.format
        self.world_size: int = reader.world_size
        self.aliases: dict[str, str] = dict(reader.aliases())
        """Maps each second name of a tensor (tied weights) to the tensor's own name."""
        self.opened_classes: dict[str, int] = dict(reader.opened_classes())
        """For each class, how many of its objects were read as dicts (`as_dict`), or as the state_dict() of a module."""
        self.part: str | None = reader.part()
        """Which part of a checkpoint this is, such as the file of one rank; None: a whole checkpoint."""
        self._reader: _core.Reader | None = reader
        self._metas = {name: TensorMeta(number, dtype, itemsize, shape)
                       for number, (name, dtype, itemsize, shape) in enumerate(reader.tensors())}
        self._values = {name: index for index, name in enumerate(reader.values())}
        self._names = sorted([*self._metas, *self._values, *self.aliases])
        self._last_value: tuple[str, Any] | None = None  # the value of which `_item` gave the last item

    def __getitem__(self, name: str) -> Any:
        """Returns the Tensor or value of that name. Raises MissingName (a KeyError) if there is none, and Refused if Tessera
        never reads the value."""
        entry = self._entry(name)
        if isinstance(entry, Refused):
            raise entry
        return entry

    def _entry(self, name: str) -> Any:
        """Returns the Tensor or value of that name, or a Refused if the value is never read."""
        reader = self._open_reader()
        meta = self._metas.get(self.aliases.get(name, name))
        if meta is not None:
            return Tensor._whole(self, name, meta)
        if name not in self._values:
            raise self._missing(name)
        try:
            return reader.read_value(self._values[name])
        except Error as error:
            if error.kind != "unsupported":
                raise
            return Refused(str(error), kind=error.kind, path=error.path, tensor=error.tensor,
                           byte_range=error.byte_range)

    def items(self) -> ItemsView[str, Any]:
        """Returns pairs of a name and its Tensor or value; a Refused for a value that Tessera never reads."""
        return _Items(self)

    def values(self) -> ValuesView[Any]:
        """Returns the Tensor or value of each name, in order; a Refused for a value that Tessera never reads."""
        return _Values(self)

    def __contains__(self, name: object) -> bool:
        return name in self._metas or name in self._values or name in self.aliases

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    # Mapping's own __eq__ and __repr__ would read all values.
    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return object.__hash__(self)

    def __repr__(self) -> str:
        return (f"<tessera.Checkpoint {self.path!r}: {len(self._metas)} tensors, {len(self._values)} values; "
                f"{self.format}{', closed' if self._reader is None else ''}>")

    def _repr_html_(self) -> str:
        """Returns HTML for notebooks: the tree of names, and a map of the sizes."""
        return html_of(self)

    def state_dict(self, *, like: Mapping[Any, Any] | Sequence[Any] | None = None, lazy: bool = False) -> Any:
        """Reads everything into nested dicts and lists, as they were in the program that saved the checkpoint.

        The result is a list if the program saved a list or a tuple. Dicts have the order of keys that the program gave
        them, if the checkpoint records it; else keys are sorted by name.
        Tensors become torch.Tensors on the CPU; tied names get the same tensor. Values keep their types.
        like: a state dict. Reads only the names that it has, and requires its shapes and dtypes. Does not change its
            tensors, which may be on the meta device.
        lazy: leave tensors unread, as `Tensor`. A module's `load_state_dict` takes them, and reads one at a time.

        Raises Error with a list of all names that do not fit `like`, if Tessera never reads a value, or if the checkpoint
        is replaced while it is open.
        """
        take = (lambda tensor: tensor) if flag("lazy", lazy) else Tensor.torch
        reader = self._open_reader()
        if like is not None:
            if not isinstance(like, (Mapping, list, tuple)):
                refuse_type("like", "a dict, a list or a tuple", like)
            found = Likeness(self, take).of(like)
        else:
            found = whole(self, self._paths(), take)
        reader.require_unchanged()
        self._last_value = None
        return found

    def close(self) -> None:
        """Closes the files. Names and shapes can still be used afterwards, but no tensor and no value can be read."""
        self._reader = None
        self._last_value = None

    def __enter__(self) -> Checkpoint:
        self._open_reader()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def __getstate__(self) -> Any:
        raise TypeError(f"{self.path}: an open checkpoint cannot be pickled or copied (open it in each process)")

    def _open_reader(self) -> _core.Reader:
        if self._reader is None:
            raise ValueError(f"{self.path}: the checkpoint is closed")
        return self._reader

    def _paths(self) -> dict[str, list[Any]]:
        """Returns the key path of each name."""
        return dict(zip([*self._metas, *self._values, *self.aliases], self._open_reader().paths()))

    def _item(self, name: str) -> Any:
        """Returns the item `args.lr` of a dict that the checkpoint has as one value, `args`. Raises KeyError if there is none."""
        end = name.rfind(".")
        while end > 0:
            above = name[:end]
            if above in self._values:
                last = self._last_value
                if last is None or last[0] != above:
                    value = self._entry(above)
                    last = self._last_value = (above, {} if isinstance(value, Refused) else value)
                return copy.deepcopy(item_of(last[1], name[end + 1:]))
            end = name.rfind(".", 0, end)
        raise KeyError(name)

    def _has_item(self, name: str) -> bool:
        try:
            self._item(name)
        except KeyError:
            return False
        return True

    def _missing(self, name: object) -> MissingName:
        if not isinstance(name, str):
            return MissingName(f"{self.path}: expected a name, found {name!r}", kind="not_found", path=self.path)
        nearest = self._nearest(name)
        hint = f" (did you mean {nearest!r}?)" if nearest is not None else ""
        return MissingName(f"{self.path}: {name!r}: no tensor and no value has this name{hint}", kind="not_found",
                           path=self.path, tensor=name)

    def _nearest(self, name: str) -> str | None:
        """Returns the name in the checkpoint that is nearest to a wrong name; None if none is similar."""
        try:
            encoded = name.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:  # no name in a file has such a character
            encoded = name.encode("utf-8", "replace")
        return self._open_reader().nearest_name(encoded)


# The iterators of the two classes below can continue after an item that could not be read.
# Generators cannot.


class _Items(ItemsView[str, Any]):
    _mapping: Checkpoint

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return map(lambda name: (name, self._mapping._entry(name)), self._mapping)


class _Values(ValuesView[Any]):
    _mapping: Checkpoint

    def __iter__(self) -> Iterator[Any]:
        return map(self._mapping._entry, self._mapping)

    def __contains__(self, value: object) -> bool:
        return any(found is value or found == value for found in self)


def open(path: PathLike, *, flat_layout: PathLike | None = None, as_dict: str | Sequence[str] = (),
         recipe: PathLike | None = None, inverse: bool = False,
         set: Mapping[str, int | str] | None = None, endpoint: str | None = None) -> Checkpoint:
    """Opens a checkpoint of any format that Tessera reads, such as safetensors, PyTorch DCP or a `torch.save` file.

    Reads only the metadata, no tensor. `flat_layout` is a JSON file that lists the parameters in the flat vectors of
    FSDP1. `as_dict` names classes, such as "argparse.Namespace", whose objects are read as dicts of their attributes;
    names are compared as text, and nothing is imported. `recipe` is a JSON file with rules that give the tensors other
    names and shapes, `inverse` applies it backwards, from its new names to the old ones, and `set` gives values to its
    variables. `endpoint` is the S3 server for s3:// paths, such as "http://localhost:9000"; None: AWS_ENDPOINT_URL, or else
    AWS. Later calls for the same bucket use it too. Raises Error if there is no checkpoint, or if it cannot be read.
    """
    return Checkpoint(path, flat_layout=flat_layout, as_dict=as_dict, recipe=recipe, inverse=inverse, set=set, endpoint=endpoint)
