"""Tensors of a checkpoint, which are read only when their elements are needed."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from types import EllipsisType
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex

from . import _core

if TYPE_CHECKING:
    import torch
    from numpy import ndarray

    from ._checkpoint import Checkpoint

Index = SupportsIndex | slice | EllipsisType

# The dtypes that NumPy has, with NumPy's names.
NUMPY_NAMES = {name: name for name in (
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64",
    "complex64", "complex128")}
# Dtypes that NumPy lacks, but whose numbers float32 can hold exactly. (complex32 and float4_e2m1fn_x2 are not among them.)
EXACT_IN_FLOAT32 = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")


class TensorMeta(NamedTuple):
    number: int  # index in the reader's tensors
    dtype: str
    itemsize: int
    shape: tuple[int, ...]


class Tensor:
    """A tensor of a checkpoint, or a slice of a tensor. Its elements are read only when a method needs them.

    `t[10:20, :, 3]` is also a Tensor: the index may have ints, slices of step 1 and `...`, as in NumPy. Each call of
    `t.torch()` or `t.numpy()` (or `numpy.asarray(t)`) reads the elements again.
    """

    __slots__ = ("_checkpoint", "_dims", "_meta", "_offsets", "_sizes", "_source", "name")

    _checkpoint: Checkpoint
    _meta: TensorMeta
    _offsets: tuple[int, ...]  # of the box of the whole tensor that this object is
    _sizes: tuple[int, ...]
    _dims: tuple[int, ...]  # the dimensions that remain: an int in an index removes a dimension
    _source: list[_core.TensorSource]  # shared by all slices of a tensor; filled by the first read
    name: str
    """The name in the checkpoint."""

    def __init__(self) -> None:
        raise TypeError("a Tensor cannot be created directly: use tessera.open(path)[name]")

    @classmethod
    def _make(cls, checkpoint: Checkpoint, name: str, meta: TensorMeta, offsets: tuple[int, ...],
              sizes: tuple[int, ...], dims: tuple[int, ...], source: list[_core.TensorSource]) -> Tensor:
        self = cls.__new__(cls)
        self._checkpoint, self.name, self._meta = checkpoint, name, meta
        self._offsets, self._sizes, self._dims, self._source = offsets, sizes, dims, source
        return self

    @classmethod
    def _whole(cls, checkpoint: Checkpoint, name: str, meta: TensorMeta) -> Tensor:
        ndim = len(meta.shape)
        return cls._make(checkpoint, name, meta, (0,) * ndim, meta.shape, tuple(range(ndim)), [])

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes, outermost first; `()` for a 0-d tensor."""
        return tuple(self._sizes[d] for d in self._dims)

    @property
    def dtype(self) -> str:
        """torch's name of the dtype: "float32", "bfloat16", "float8_e4m3fn"."""
        return self._meta.dtype

    @property
    def itemsize(self) -> int:
        """The bytes of one element."""
        return self._meta.itemsize

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self._dims)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self._sizes)

    @property
    def nbytes(self) -> int:
        """The bytes of the elements, which is the least memory that a read needs."""
        return self.numel * self.itemsize

    def __len__(self) -> int:
        if not self._dims:
            raise TypeError(f"{self.name}: a 0-d tensor has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def __bool__(self) -> bool:
        raise TypeError(f"{self.name}: a tensor is neither true nor false (`item()` reads its one element)")

    def __repr__(self) -> str:
        return f"<tessera.Tensor {self.name!r}: {self.dtype} {list(self.shape)}{self._slice_in_words()}>"

    def _slice_in_words(self) -> str:
        """Returns the end of `__repr__` for a slice, such as `, [0:4, 3] of [8, 8]`; empty for the whole tensor."""
        if self._sizes == self._meta.shape and self.ndim == len(self._meta.shape):
            return ""
        ranges = [f"{begin}:{begin + size}" if d in self._dims else str(begin)
                 for d, (begin, size) in enumerate(zip(self._offsets, self._sizes))]
        return f", [{', '.join(ranges)}] of {list(self._meta.shape)}"

    def __getitem__(self, index: Index | tuple[Index, ...]) -> Tensor:
        """Returns a slice of the tensor, without reading it."""
        indices = list(index) if isinstance(index, tuple) else [index]
        gaps = [position for position, step in enumerate(indices) if step is Ellipsis]
        num_given = len(indices) - len(gaps)
        if len(gaps) > 1:
            raise IndexError(f"{self.name}: index: expected one `...` at most, found {len(gaps)}")
        if num_given > self.ndim:
            raise IndexError(f"{self.name}: index: expected at most {self.ndim} items for the shape {list(self.shape)}, "
                             f"found {num_given}")
        gap = gaps[0] if gaps else len(indices)
        indices[gap:gap + 1] = [slice(None)] * (self.ndim - num_given)

        offsets, sizes, dims = list(self._offsets), list(self._sizes), []
        for d, step in zip(self._dims, indices):
            begin, size = self._range_of(step, d)
            offsets[d] += begin
            sizes[d] = 1 if size is None else size
            if size is not None:
                dims.append(d)
        return self._make(self._checkpoint, self.name, self._meta, tuple(offsets), tuple(sizes), tuple(dims),
                          self._source)

    def _range_of(self, step: Any, dim: int) -> tuple[int, int | None]:
        """Returns the first position, and the number of positions. The number is None for an int, which removes the dimension."""
        size = self._sizes[dim]
        if isinstance(step, slice):
            if step.step is not None and operator.index(step.step) != 1:
                raise IndexError(f"{self.name}: index: expected slices of step 1, found step {step.step} (read first: "
                                 f"the result of .torch() or .numpy() can be indexed in any way)")
            begin, end, _ = step.indices(size)
            return begin, max(0, end - begin)
        is_mask = isinstance(step, bool) or str(getattr(step, "dtype", "")) in ("bool", "torch.bool")
        if is_mask or not hasattr(step, "__index__") or getattr(step, "ndim", 0) != 0:
            raise TypeError(f"{self.name}: index: expected ints, slices and `...`, found {type(step).__name__} (read "
                            f"first: the result of .torch() or .numpy() can be indexed in any way)")
        position = operator.index(step)
        if not -size <= position < size:
            raise IndexError(f"{self.name}: index: expected {-size} to {size - 1} in dimension {dim} of "
                             f"{list(self._meta.shape)}, found {position}")
        return position % size, None

    def _read_into(self, buffer: Any) -> None:
        """Fills a writable one-dimensional array of `nbytes` uint8."""
        reader = self._checkpoint._open_reader()
        if not self._source:
            self._source.append(reader.tensor(self._meta.number))
        self._source[0].read(self._offsets, self._sizes, buffer)

    def tobytes(self) -> bytes:
        """Reads the elements in row-major order, little-endian."""
        buffer = bytearray(self.nbytes)
        if buffer:
            self._read_into(buffer)
        return bytes(buffer)

    def numpy(self, dtype: Any = None) -> ndarray[Any, Any]:
        """Reads the elements into a new array.

        NumPy has no bfloat16, float8, complex32 and float4. For bfloat16 and float8, pass another dtype: "float32" (or
        wider) has the same numbers, and the dtype of the same name in `ml_dtypes` has the same bits.
        """
        import numpy

        wanted = None if dtype is None else numpy.dtype(dtype)
        is_own = self.dtype in NUMPY_NAMES
        elsewhere = wanted if wanted is not None and wanted.name == self.dtype else None  # a dtype of ml_dtypes
        if not is_own and elsewhere is None and (wanted is None or self.dtype not in EXACT_IN_FLOAT32):
            raise TypeError(self._no_numpy())
        raw = numpy.empty(self.nbytes, numpy.uint8)
        if raw.size:
            self._read_into(raw)
        array: ndarray[Any, Any]
        if is_own:
            array = raw.view(NUMPY_NAMES[self.dtype])
        elif elsewhere is not None:
            array = raw.view(elsewhere)
        else:
            array = numpy.empty(self.numel, numpy.float32)
            _core.to_float32(self.dtype, raw, array)
        array = array.reshape(self.shape)
        return array if wanted is None else array.astype(wanted, copy=False)

    def _no_numpy(self) -> str:
        ways = "use .torch(), which keeps it"
        if self.dtype in EXACT_IN_FLOAT32:
            ways += ", .numpy('float32'), which has the same numbers"
        return f"{self.name}: NumPy has no {self.dtype} ({ways}, or .tobytes(), which gives the bytes)"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> ndarray[Any, Any]:
        if copy is False:
            raise ValueError(f"{self.name}: reading a tensor makes a copy of it")
        return self.numpy(dtype)

    def torch(self) -> torch.Tensor:
        """Reads the elements into a new torch.Tensor of the same dtype, on the CPU."""
        import torch

        dtype = getattr(torch, self.dtype, None)
        if dtype is None:
            raise TypeError(f"{self.name}: torch {torch.__version__} has no {self.dtype} (.tobytes() gives the bytes)")
        raw = torch.empty(self.nbytes, dtype=torch.uint8)
        if self.nbytes:
            self._read_into(raw)
        return raw.view(dtype).reshape(self.shape)

    is_meta = False  # a module's load_state_dict reads this attribute

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Makes torch's functions accept a Tensor: reads it into a torch.Tensor for this call."""
        def read(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.torch()
            return type(value)(map(read, value)) if type(value) in (list, tuple) else value

        return function(*map(read, args), **{key: read(value) for key, value in (kwargs or {}).items()})

    def __dlpack__(self, **options: Any) -> Any:
        return self._exchangeable().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)  # kDLCPU

    def _exchangeable(self) -> Any:
        return self.numpy() if self.dtype in NUMPY_NAMES else self.torch()

    def item(self) -> bool | int | float | complex:
        """Reads the one element, as a Python number."""
        if self.numel != 1:
            raise ValueError(f"{self.name}: expected one element, found {self.numel} in the shape {list(self.shape)}")
        number: bool | int | float | complex = self.numpy("float32" if self.dtype in EXACT_IN_FLOAT32 else None).item()
        return number
