"""Compares two state dicts as a user would: every bit of tensors, ties, types of values, keys and their order.

Each difference has the kind under which docs/formats/what-each-holds.md lists it, or a kind of FAULTS, which no move
may make.
"""

import collections
import copy
import io
import math
import pathlib
import struct
from dataclasses import dataclass

import numpy as np
import torch

FAULTS = {"tensor", "missing", "extra", "container", "value", "new_tie", "length"}
# What every reader of Tessera makes simpler.
SIMPLER = {"parameters", "requires_grad", "shared_memory", "dict_class", "tuples", "attributes", "value_types"}
SAID_AS = {"text_keys": {"text_keys", "optimizer_keys"}, "dict_class": {"dict_classes", "value_types"},
           "value_types": {"value_types", "dict_classes"}}


@dataclass(frozen=True)
class Difference:
    kind: str
    path: tuple
    text: str = ""

    def __str__(self):
        return f"{self.kind} at {list(self.path)!r}: {self.text}"[:500]

    def is_said(self, kinds):
        """Returns whether the kinds of changes in a summary tell of this difference."""
        return self.kind not in FAULTS and bool(SAID_AS.get(self.kind, {self.kind}) & set(kinds))


def spelled(key):
    """Returns a dict's key as Tessera's names spell it."""
    if isinstance(key, complex):
        return f"complex:{key.real!r},{key.imag!r}"
    if isinstance(key, torch.device):
        return f"device:{key}"
    if isinstance(key, frozenset) and key:
        return str(set(key))
    return str(tuple(key)) if isinstance(key, torch.Size) else str(key)


def remade(original, items):
    """Returns a dict of the same class, and with the same attributes, that has other items."""
    made = copy.copy(original)
    made.clear()
    made.update(items)
    return made


def name_of(path):
    return ".".join(map(spelled, path))


def has_tensor(value):
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return isinstance(value, torch.Tensor) or any(map(has_tensor, items))


def is_opened(value):
    """Returns whether a container becomes entries, not one value (docs/formats/torch_zip.md)."""
    if isinstance(value, dict):
        return bool(value)
    if isinstance(value, tuple):
        return has_tensor(value)
    return isinstance(value, list) and any(isinstance(item, (torch.Tensor, dict)) or is_opened(item) for item in value)


def flatten(state):
    """Returns {name: (path, tensor or value)} of the entries of a state dict."""
    found = {}

    def visit(value, path):
        if path and not is_opened(value):
            found[name_of(path)] = (path, value)
            return
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            visit(item, (*path, key))

    visit(state if isinstance(state, (dict, list, tuple)) else {}, ())
    return found


def leaves(state):
    """Returns the flat state dict {name: tensor or value}, sorted by name."""
    return {name: leaf for name, (_, leaf) in sorted(flatten(state).items())}


def tensors_of(state):
    return {name: leaf for name, leaf in leaves(state).items() if isinstance(leaf, torch.Tensor)}


def contiguous(tensor):
    return tensor.detach().resolve_conj().resolve_neg().contiguous().clone(memory_format=torch.contiguous_format)


def bytes_of(tensor):
    return contiguous(tensor).reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def memory_of(tensor):
    """Returns what tied tensors have in common."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return id(tensor)
    return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())


def typed(value):
    return f"{type(value).__name__}:{value!r}"


def exact(value):
    """Returns a text that tells values apart by their types and bits, whatever the order of keys."""
    match value:
        case float(): return struct.pack(">d", value).hex()
        case complex(): return f"{exact(value.real)}+{exact(value.imag)}j"
        case dict(): return f"{type(value)} {sorted((exact(key), exact(item)) for key, item in value.items())}"
        case set() | frozenset(): return f"{type(value)} {sorted(map(exact, value))}"
        case list() | tuple(): return f"{type(value)} {list(map(exact, value))}"
    return f"{type(value)} {value!r}"


def plainer(value):
    """Returns a value as Tessera reads it, and the types that became plainer ones."""
    changed = set()

    def made(original, plain):
        changed.add(type(original).__name__)
        return plain

    def key_of(key):
        if isinstance(key, frozenset):
            return made(key, str(key))
        return tuple(map(key_of, key)) if isinstance(key, tuple) else key

    def visit(value):
        match value:
            case np.bool_() | np.integer() | np.floating(): return made(value, value.item())
            case np.ndarray(): return made(value, value.tolist())
            case torch.Size(): return made(value, tuple(value))
            case frozenset(): return made(value, set(map(visit, value)))
            case bytearray(): return made(value, bytes(value))
            case io.BytesIO(): return made(value, value.getvalue())
            case pathlib.PurePath(): return made(value, str(value))
            case list() | tuple(): return type(value)(map(visit, value))
            case dict():
                plain = {key_of(key): visit(item) for key, item in value.items()}
                return plain if type(value) is dict else made(value, plain)
        return value

    return visit(value), changed


def second_names(state):
    """Returns the keys of the dict under which a tensor is that is also under an earlier key. torch.save files have them after the
    name under which the tensor was stored."""
    seen = set()
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            if memory_of(value) in seen:
                yield key
            seen.add(memory_of(value))


class Comparison:
    """Collects the differences of two state dicts. `ordered`: also those in the order of keys."""

    def __init__(self, expected, found, ordered):
        self.ordered = ordered
        self.differences = []
        self.pairs = []  # (expected, found, path) of tensors
        self.walk(expected, found, ())
        self.compare_ties()

    def add(self, kind, path, text=""):
        self.differences.append(Difference(kind, path, text))

    def walk(self, a, b, path):
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            self.tensor(a, b, path)
        elif isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
            self.add("container", path, f"{a!r:.80} became {b!r:.80}")
        elif isinstance(a, dict) and (is_opened(a) or is_opened(b)):
            self.mapping(a, b, path)
        elif isinstance(a, (list, tuple)) and (is_opened(a) or is_opened(b)):
            self.sequence(a, b, path)
        else:
            self.value(a, b, path)

    def tensor(self, a, b, path):
        if a.dtype != b.dtype or a.shape != b.shape:
            return self.add("tensor", path, f"{a.dtype} {list(a.shape)} became {b.dtype} {list(b.shape)}")
        if bytes_of(a) != bytes_of(b):
            self.add("tensor", path, f"{a.dtype} {list(a.shape)}: other bits")
        self.pairs.append((a, b, path))
        if isinstance(a, torch.nn.Parameter) and not isinstance(b, torch.nn.Parameter):
            self.add("parameters", path)
        elif a.requires_grad and not b.requires_grad:
            self.add("requires_grad", path)
        if vars(a) and not vars(b):
            self.add("attributes", path)
        return None

    def mapping(self, a, b, path):
        if not isinstance(b, dict):
            return self.add("container", path, f"a dict became {type(b)} {b!r:.100}")
        if type(a) is not type(b):
            self.add("dict_class", path, f"{type(a).__name__} became {type(b).__name__}")
        if hasattr(a, "_metadata") and not hasattr(b, "_metadata"):
            self.add("attributes", path)
        left, order = {typed(key): key for key in b}, []
        for key, value in a.items():
            kind, new = self.key_in(left, key)
            if new is None:
                self.add("missing", (*path, key), f"{value!r:.80}")
                continue
            if kind:
                self.add(kind, (*path, key), f"{key!r} became {new!r}")
            order.append(left.pop(new))
            self.walk(value, b[order[-1]], (*path, key))
        for key in left.values():
            self.add("extra", (*path, key), f"{b[key]!r:.80}")
        names = set(map(typed, b)) - set(map(typed, second_names(b))) - left.keys()
        if self.ordered and [text for text in map(typed, order) if text in names] != [text for text in map(typed, b) if text in names]:
            self.add("key_order", path, f"{order!r:.200} became {list(b)!r:.200}")
        return None

    @staticmethod
    def key_in(left, key):
        """Returns what a key has become: the kind of the difference, and the new key, typed; None if it is missing."""
        text = typed(spelled(key))
        if typed(key) in left:
            return None, typed(key)
        if text in left:
            return "value_types" if isinstance(key, frozenset) else "text_keys", text
        plain = typed(plainer(key)[0])
        return "value_types", plain if plain in left else None

    def sequence(self, a, b, path):
        if not isinstance(b, (list, tuple)):
            return self.add("container", path, f"{type(a).__name__} became {type(b)} {b!r:.100}")
        if type(a) is not type(b):
            kind = "tuples" if isinstance(a, tuple) and type(b) is list else "container"
            self.add(kind, path, f"{type(a).__name__} became {type(b).__name__}")
        if len(a) != len(b):
            return self.add("length", path, f"{len(a)} items became {len(b)}: {b!r:.100}")
        for index, (x, y) in enumerate(zip(a, b)):
            self.walk(x, y, (*path, index))
        return None

    def value(self, a, b, path):
        plain, changed = plainer(a)
        if exact(a) == exact(b):
            return
        if exact(plain) == exact(b) and changed:
            self.add("value_types", path, f"{changed} {a!r:.60}")
        else:
            self.add("value", path, f"{typed(a):.150} became {typed(b):.150}")

    def compare_ties(self):
        by_memory, by_storage, owners = collections.defaultdict(list), collections.defaultdict(dict), {}
        for a, b, path in (pair for pair in self.pairs if pair[0].numel()):
            by_memory[memory_of(a)].append((memory_of(b), path))
            by_storage[a.untyped_storage().data_ptr()].setdefault(memory_of(a), (b.untyped_storage().data_ptr(), path))
        for memory, members in by_memory.items():
            found = {other for other, _ in members}
            for _ in range(len(found) - 1):
                self.add("split_ties", members[-1][1], f"of {[path for _, path in members]!r:.300}")
            if any(owners.setdefault(other, memory) != memory for other in found):
                self.add("new_tie", members[0][1])
        for views in by_storage.values():
            if len({storage for storage, _ in views.values()}) > 1:
                self.add("shared_memory", next(iter(views.values()))[1])


def compare(expected, found, ordered=True):
    return Comparison(expected, found, ordered).differences
