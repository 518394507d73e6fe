"""The tensors of a running job: which ranks hold which boxes, and where a box is in this rank's memory."""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ._errors import Error, Problem
from ._ranks import Ranks

if TYPE_CHECKING:
    import torch

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes
Shard = tuple[list[int], list[int], list[int]]  # offsets, sizes, and the ranks that hold the box


class JobTensor(NamedTuple):
    """A tensor as all ranks know it, and the boxes that this rank holds."""

    dtype: str
    shape: list[int]
    layout: list[Shard] | None  # None: a plain tensor, which every rank holds
    local: list[tuple[Box, torch.Tensor]]  # boxes with elements


class LayoutDigests:
    """Digests of layouts, one for each list: tensors of one shape share a list, which is long if there are many ranks."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[list[Shard], str]] = {}  # with the list, so that no other list gets its id

    def of(self, layout: list[Shard] | None) -> str:
        """Returns equal texts for equal layouts only. A list must not change after the first call."""
        if layout is None:
            return ""
        if id(layout) not in self._by_id:
            self._by_id[id(layout)] = layout, hashlib.sha256(repr(layout).encode()).hexdigest()
        return self._by_id[id(layout)][1]


def describe(name: str, tensor: torch.Tensor, ranks: Ranks) -> JobTensor:
    """Describes a plain tensor, a DTensor or a ShardedTensor. Raises Error naming the tensor for other kinds."""
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor

    if isinstance(tensor, ShardedTensor):
        return _of_sharded_tensor(name, tensor, ranks)
    placements = getattr(tensor, "placements", None)
    if placements is not None and hasattr(tensor, "device_mesh"):
        return _of_dtensor(name, tensor, tuple(placements), ranks)
    check_plain(name, tensor)
    shape = list(tensor.shape)
    local = [(_whole(shape), tensor.detach())] if tensor.numel() else []
    return JobTensor(_dtype_name(tensor), shape, None, local)


def is_in_host_memory(tensor: torch.Tensor) -> bool:
    """Returns whether the tensor is on the CPU, contiguous, and has no pending conj or neg: then `data_ptr` points to its elements, in order."""
    return tensor.device.type == "cpu" and is_row_major(tensor)


def is_row_major(tensor: torch.Tensor) -> bool:
    """Returns whether the tensor is contiguous and has no pending conj or neg: then its memory has its elements, in order."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def in_host_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor if `is_in_host_memory` is true for it, otherwise a copy for which it is true."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _dtype_name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _whole(shape: Sequence[int]) -> Box:
    return (0,) * len(shape), tuple(shape)


def _refuse(name: str, expected: str, found: str) -> Error:
    problem = Problem.of_entry("error", "tensor", name, expected, found)
    return Error(str(problem), kind="unsupported", tensor=name, problems=(problem,))


def check_plain(name: str, tensor: torch.Tensor) -> None:
    """Raises Error naming the tensor if its elements are not plain numbers in its own memory."""
    import torch

    if torch.nn.parameter.is_lazy(tensor):
        raise _refuse(name, "a tensor with a shape", "an uninitialized parameter (run the module once first)")
    if tensor.is_nested:
        raise _refuse(name, "a tensor with one shape", "a nested tensor")
    if tensor.layout is not torch.strided:
        raise _refuse(name, "a dense tensor", f"a tensor of layout {tensor.layout}")
    if tensor.is_quantized:
        raise _refuse(name, "a tensor of numbers", "a quantized tensor")
    if tensor.device.type == "meta":
        raise _refuse(name, "a tensor with elements", "a tensor on the meta device (call to_empty first)")
    plain = (torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.nn.Parameter))
    kind: Any = type(tensor)
    usual: Any = torch.Tensor
    if kind not in plain and kind.__torch_dispatch__ is not usual.__torch_dispatch__:
        raise _refuse(name, "torch.Tensor, DTensor or ShardedTensor", f"{kind.__module__}.{kind.__qualname__}")
    if tensor.numel() and tensor.device.type in ("cpu", "cuda"):  # others may have no storage that torch sees
        last = tensor.storage_offset() + sum(stride * (size - 1) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        needed, found = (last + 1) * tensor.element_size(), tensor.untyped_storage().nbytes()
        if found < needed:
            raise _refuse(name, f"memory of {needed} bytes or more", f"{found} bytes (resize_ of its storage frees memory)")


def _of_dtensor(name: str, tensor: Any, placements: tuple[Any, ...], ranks: Ranks) -> JobTensor:
    mesh = tensor.device_mesh
    shape = list(tensor.shape)
    layout = _shards(name, shape, mesh, placements, ranks)
    local = tensor.to_local().detach()
    if hasattr(local, "wait"):  # an asynchronous collective
        local = local.wait()
    check_plain(name, local)
    _check_dtype(name, local, tensor.dtype)
    held: list[tuple[Box, torch.Tensor]] = []
    for offsets, sizes, holders in layout:
        if ranks.rank in holders and 0 not in shape:
            if list(local.shape) != sizes:
                raise _refuse(name, f"a local shape of {sizes} for {_placements_text(placements)}", str(list(local.shape)))
            held.append(((tuple(offsets), tuple(sizes)), local))
    if not held and local.numel() and 0 not in shape and mesh.get_coordinate() is not None:
        raise _refuse(name, f"no elements on rank {ranks.rank} for {_placements_text(placements)}",
                      f"a local shape of {list(local.shape)}")
    return JobTensor(_dtype_name(tensor), shape, layout, held)


def _check_dtype(name: str, local: torch.Tensor, dtype: torch.dtype) -> None:
    """Raises Error if the local elements have another dtype than the whole tensor says, for example because the program
    replaced them. Their bytes would be taken for elements of that dtype."""
    if local.dtype != dtype:
        raise _refuse(name, f"local elements of {dtype}, the dtype of the whole tensor", str(local.dtype))


def _placements_text(placements: tuple[Any, ...]) -> str:
    return "(" + ", ".join(repr(placement) for placement in placements) + ")"


def _shards(name: str, shape: list[int], mesh: Any, placements: tuple[Any, ...], ranks: Ranks) -> list[Shard]:
    """Returns the boxes of the tensor as `_held_boxes` does. Do not change the lists: other calls return them too."""
    cuts: list[tuple[int, int]] = []  # for each axis of the mesh: the dimension that it cuts (-1: none), and the split factor
    for placement in placements:
        if placement.is_partial():
            raise _refuse(name, "Shard or Replicate", f"the placement {placement!r} (call redistribute first)")
        factor = getattr(placement, "split_factor", 1)
        dim = getattr(placement, "dim", -1)
        if dim < 0 and not placement.is_replicate():
            raise _refuse(name, "Shard or Replicate", f"the placement {placement!r}")
        cuts.append((dim, factor))
    mesh_shape, mesh_ranks = _mesh_of(mesh)
    stranger = next((rank for rank in mesh_ranks if rank not in ranks.rank_of), None)
    if stranger is not None:
        raise _refuse(name, "a mesh of ranks of the process group", f"rank {stranger}, which is not in the group")
    held = _held_boxes(tuple(shape), mesh_shape, tuple(cuts), tuple(ranks.rank_of[rank] for rank in mesh_ranks))
    if held is None:
        raise _refuse(name, "placements that give each rank one box", _placements_text(placements))
    return held


_meshes: weakref.WeakKeyDictionary[Any, tuple[tuple[int, ...], tuple[int, ...]]] = weakref.WeakKeyDictionary()


def _mesh_of(mesh: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the mesh's shape and its global ranks, row-major. Cached, because torch computes them at each access."""
    found = _meshes.get(mesh)
    if found is None:
        found = _meshes[mesh] = (tuple(mesh.mesh.shape), tuple(mesh.mesh.flatten().tolist()))
    return found


@functools.lru_cache(maxsize=4096)
def _held_boxes(shape: tuple[int, ...], mesh_shape: tuple[int, ...], cuts: tuple[tuple[int, int], ...],
                holders: tuple[int, ...]) -> list[Shard] | None:
    """Returns each different box that has elements, sorted, and the ranks that hold it; for a tensor without elements one empty
    box, on all ranks. None if a rank would have more than one box. `holders`: the ranks of the mesh, row-major."""
    boxes = _boxes(shape, mesh_shape, cuts)
    if boxes is None:
        return None
    shards: dict[Box, list[int]] = {}
    for box, rank in zip(boxes, holders, strict=True):
        if 0 not in box[1]:
            shards.setdefault(box, []).append(rank)
    if not shards:  # a tensor without elements
        return [([0] * len(shape), list(shape), sorted(holders))]
    return [(list(box[0]), list(box[1]), sorted(of_box)) for box, of_box in sorted(shards.items())]


def _boxes(shape: tuple[int, ...], mesh_shape: tuple[int, ...],
           cuts: tuple[tuple[int, int], ...]) -> tuple[Box, ...] | None:
    """Returns the box of each rank of the mesh, row-major; None if a rank would have more than one box.

    A split factor above 1 (`_StridedShard`) means that later axes of the mesh cut the dimension first, as in FSDP over
    tensor parallelism. The factor is the product of the sizes of these axes.
    """
    order: list[int] = []
    remaining = list(range(len(cuts)))
    while remaining:
        for axis in remaining:
            dim, factor = cuts[axis]
            cut_before = math.prod(mesh_shape[other] for other in order if other > axis and cuts[other][0] == dim)
            if dim < 0 or factor == cut_before:
                order.append(axis)
                remaining.remove(axis)
                break
        else:
            return None
    boxes = []
    for place in itertools.product(*(range(size) for size in mesh_shape)):
        offsets, sizes = [0] * len(shape), list(shape)
        for axis in order:
            dim = cuts[axis][0]
            if dim < 0:
                continue
            chunk = -(-sizes[dim] // mesh_shape[axis])  # as torch.chunk cuts
            begin = min(place[axis] * chunk, sizes[dim])
            end = min(begin + chunk, sizes[dim])
            offsets[dim] += begin
            sizes[dim] = end - begin
        boxes.append((tuple(offsets), tuple(sizes)))
    return tuple(boxes)


def _of_sharded_tensor(name: str, tensor: Any, ranks: Ranks) -> JobTensor:
    metadata = tensor.metadata()
    shape = list(metadata.size)
    shards: dict[Box, list[int]] = {}
    for shard in metadata.shards_metadata:
        rank = shard.placement.rank()
        if rank not in ranks.rank_of:
            raise _refuse(name, "shards on ranks of the process group", f"a shard on rank {rank}")
        box = (tuple(shard.shard_offsets), tuple(shard.shard_sizes))
        if 0 not in box[1]:
            shards.setdefault(box, []).append(ranks.rank_of[rank])
    held: list[tuple[Box, torch.Tensor]] = []
    for shard in tensor.local_shards():
        check_plain(name, shard.tensor)
        _check_dtype(name, shard.tensor, metadata.tensor_properties.dtype)
        box = (tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes))
        if ranks.rank not in shards.get(box, []) and shard.tensor.numel():
            raise _refuse(name, f"the shards that its metadata gives to rank {ranks.rank}", f"a shard at {box[0]}")
        if shard.tensor.numel():
            held.append((box, shard.tensor.detach().reshape(box[1])))
    held.sort(key=lambda of_box: of_box[0])  # because plans count boxes, and the order may differ in the next state dict
    layout: list[Shard] = [(list(box[0]), list(box[1]), sorted(holders)) for box, holders in sorted(shards.items())]
    if not layout:
        layout = [([0] * len(shape), shape, [0])]
    return JobTensor(str(metadata.tensor_properties.dtype).removeprefix("torch."), shape, layout, held)
