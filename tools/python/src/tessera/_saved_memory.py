"""Where a save reads the elements of its tensors: at addresses in host memory, or part by part."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from ._job_tensors import in_host_memory, is_row_major

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

SMALL_NBYTES = 1 << 20  # smaller tensors are copied whole at the start: many tiny copies would be slower


class SavedMemory:
    """The boxes of a save: the parts of tensors that this rank holds. Large boxes on a GPU, or not row-major in host memory,
    are copied part by part while the save writes, so that the host needs no memory for all of them, and copies and writes
    overlap."""

    def __init__(self, boxes: Mapping[str, Sequence[torch.Tensor | None]]):
        self._kept: list[torch.Tensor] = []  # keeps alive the memory that the addresses point to
        self._in_parts: dict[tuple[str, int], torch.Tensor] = {}  # each box that is read in parts
        self._streams: dict[Any, Any] = {}
        self.addresses: dict[str, list[int]] = {
            name: [0 if box is None else self._address(name, i, box) for i, box in enumerate(of_name)]
            for name, of_name in boxes.items()}

    def _address(self, name: str, index: int, box: torch.Tensor) -> int:
        """Returns the address of a box; 0 if it is read in parts."""
        if is_read_in_parts(box):
            self._in_parts[name, index] = box.detach()
            if box.is_cuda:
                # Waits for the kernels that compute the box, but not for kernels that the trainer starts later.
                self._stream_of(box)
            return 0
        in_memory = in_host_memory(box)
        self._kept.append(in_memory)
        return in_memory.data_ptr()

    def read(self, name: str, index: int, begin: int, end: int, address: int) -> None:
        """Copies bytes [begin, end) of a box to `address`. Several threads call it at the same time."""
        import torch

        box = self._in_parts[name, index]
        with torch.inference_mode(False), torch.no_grad():
            if box.is_cuda:
                staged = self._staged(box.reshape(-1).view(torch.uint8)[begin:end])
                ctypes.memmove(address, staged.data_ptr(), end - begin)
                return
            for part in row_major_parts(box, begin // box.element_size(), end // box.element_size()):
                ctypes.memmove(address, part.data_ptr(), part.nbytes)
                address += part.nbytes

    def _staged(self, of_box: torch.Tensor) -> torch.Tensor:
        import torch

        staged = torch.empty(of_box.numel(), dtype=torch.uint8, pin_memory=True)
        stream = self._stream_of(of_box)
        with torch.cuda.stream(stream):
            staged.copy_(of_box, non_blocking=True)
            copied = stream.record_event()
        copied.synchronize()
        return staged

    def _stream_of(self, box: torch.Tensor) -> Any:
        import torch

        if box.device not in self._streams:
            stream = torch.cuda.Stream(box.device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(box.device))
            self._streams[box.device] = stream
        return self._streams[box.device]


def is_read_in_parts(box: torch.Tensor) -> bool:
    if box.nbytes < SMALL_NBYTES:
        return False
    return is_row_major(box) if box.is_cuda else box.device.type == "cpu" and not is_row_major(box)


def row_major_parts(box: torch.Tensor, begin: int, end: int) -> Iterator[torch.Tensor]:
    """Yields elements [begin, end) of a tensor on the CPU, in row-major order. Copies no others."""
    if begin == end:
        return
    if box.dim() < 2:
        yield in_host_memory(box.reshape(-1)[begin:end])
        return
    row = box[0].numel()
    first, last = -(-begin // row), end // row  # the rows that are wanted whole
    if first > last:
        yield from row_major_parts(box[last], begin - last * row, end - last * row)
        return
    if begin < first * row:
        yield from row_major_parts(box[first - 1], begin - (first - 1) * row, row)
    if first < last:
        yield in_host_memory(box[first:last])
    if last * row < end:
        yield from row_major_parts(box[last], 0, end - last * row)
