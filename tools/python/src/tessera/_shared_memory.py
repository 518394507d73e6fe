"""Finds tensors that share elements in memory, so that loading one would change another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ._errors import Error

if TYPE_CHECKING:
    import torch


class _Place(NamedTuple):
    """Where a tensor's bytes are. An element is at the address `begin` + the sum of index * stride, with strides in bytes."""

    begin: int
    end: int
    dimensions: tuple[tuple[int, int], ...]  # (stride, size) of dimensions with two indices or more; the last is an element's bytes
    is_contiguous: bool
    name: str


def require_apart(tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Raises Error if two tensors partly share memory, because loading one would change a part of the other.
    Also raises Error if elements of one tensor share memory, as in a tensor that `expand` made.

    Accepts views whose elements alternate in memory, such as columns of one matrix.
    """
    places: dict[str, list[_Place]] = {}
    for name, tensor in tensors:
        if not tensor.numel():
            continue
        place = _place_of(name, tensor)
        if not _are_elements_apart(place):
            kind = "an expanded tensor" if 0 in dict(place.dimensions) else f"a tensor with strides {list(tensor.stride())}"
            raise Error(f"{name}: tensor to load into: expected memory of its own for each element, found {kind} "
                        "(call clone first)", kind="invalid_argument", tensor=name)
        places.setdefault(str(tensor.device), []).append(place)
    for of_device in places.values():
        active: list[_Place] = []  # earlier places that end after the begin of the current one
        for place in sorted(of_device):
            active = [other for other in active if other.end > place.begin]
            for other in active:
                if _share_elements(other, place):
                    raise Error(f"{place.name}: tensor to load into: expected memory of its own, found memory that it shares with {other.name}",
                                kind="invalid_argument", tensor=place.name)
            active.append(place)


def memory_key(tensor: torch.Tensor) -> object:
    """Returns a key that is equal for tensors with exactly the same bytes."""
    place = _place_of("", tensor)
    return str(tensor.device), place.begin, place.end, () if place.is_contiguous else place.dimensions


def _place_of(name: str, tensor: torch.Tensor) -> _Place:
    nbytes = tensor.element_size()
    dimensions = [(stride * nbytes, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    dimensions = sorted(dimensions, reverse=True) + [(1, nbytes)]
    begin = tensor.data_ptr()
    end = begin + _extent(dimensions)
    return _Place(begin, end, tuple(dimensions), end - begin == tensor.numel() * nbytes, name)


def _extent(dimensions: Sequence[tuple[int, int]]) -> int:
    """Returns the number of bytes from the first byte to the last one, both included."""
    return 1 + sum(stride * (size - 1) for stride, size in dimensions)


def _are_elements_apart(place: _Place) -> bool:
    if all(stride >= _extent(place.dimensions[i + 1:]) for i, (stride, _) in enumerate(place.dimensions)):
        return True
    if 0 in dict(place.dimensions):
        return False
    import torch

    offsets = torch.zeros(1, dtype=torch.int64)
    for stride, size in place.dimensions:
        offsets = (offsets[:, None] + torch.arange(size) * stride).flatten()
    return bool(torch.unique(offsets).numel() == offsets.numel())


def _share_elements(one: _Place, other: _Place) -> bool:
    """Returns whether two tensors share bytes. Returns False if both have exactly the same bytes (`memory_key`), because a load then
    fills one and compares the other. Requires: `other` does not begin before `one`."""
    if one[:3] == other[:3]:
        return False
    if one.is_contiguous and other.is_contiguous:
        return (one.begin, one.end) != (other.begin, other.end)
    strides = sorted({stride for place in (one, other) for stride, _ in place.dimensions}, reverse=True)
    of_one, of_other = (_indices(strides, place, one.begin) for place in (one, other))
    if of_one and of_other:
        return all(first < end and begin < last for (first, last), (begin, end) in zip(of_one, of_other, strict=True))
    return _have_common_bytes(one, other)


def _indices(strides: Sequence[int], place: _Place, origin: int) -> list[tuple[int, int]] | None:
    """Returns the range of indices, [begin, end), that the tensor has in each dimension of a grid of bytes with these strides and
    this origin. None if the tensor is not a box of this grid, because an index would reach the next larger stride."""
    sizes = dict(place.dimensions)
    rest = place.begin - origin
    indices = []
    nbytes = 1  # from the origin to the last byte, counting only the dimensions with smaller strides
    for stride in strides:
        indices.append((rest // stride, rest // stride + sizes.get(stride, 1)))
        rest %= stride
    if len(sizes) != len(place.dimensions):
        return None  # two dimensions of one stride
    for stride, (_, end) in zip(reversed(strides), reversed(indices), strict=True):
        if nbytes > stride:
            return None
        nbytes += stride * (end - 1)
    return indices


def _have_common_bytes(one: _Place, other: _Place) -> bool:
    import torch

    begin = min(one.begin, other.begin)
    unit = math.gcd(other.begin - one.begin, *(stride for place in (one, other) for stride, _ in place.dimensions[:-1]),
                    one.dimensions[-1][1], other.dimensions[-1][1])
    in_memory = torch.zeros((max(one.end, other.end) - begin) // unit, dtype=torch.bool)

    def view(place: _Place) -> torch.Tensor:
        (*dimensions, (_, nbytes)) = place.dimensions
        dimensions.append((unit, nbytes // unit))
        return in_memory.as_strided([size for _, size in dimensions], [stride // unit for stride, _ in dimensions],
                                    (place.begin - begin) // unit)

    view(one).fill_(True)
    return bool(view(other).any())
