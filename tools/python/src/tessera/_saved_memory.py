"""Where a save reads the elements of its tensors: at addresses in host memory, or part by part on a device."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from ._job_tensors import in_host_memory, is_row_major

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

SMALL_NBYTES = 1 << 20  # smaller tensors are copied whole at the start: many tiny copies would be slower


class SavedMemory:
    """The boxes of a save: the parts of tensors that this rank holds. Large boxes on a GPU are copied part by part while the
    save writes, so that the host needs no memory for all of them, and copies and writes overlap."""

    def __init__(self, boxes: Mapping[str, Sequence[torch.Tensor | None]]):
        self._kept: list[torch.Tensor] = []  # keeps alive the memory that the addresses point to
        self._on_device: dict[tuple[str, int], torch.Tensor] = {}  # the bytes of each box that is read in parts
        self._streams: dict[Any, Any] = {}
        self.addresses: dict[str, list[int]] = {
            name: [0 if box is None else self._address(name, i, box) for i, box in enumerate(of_name)]
            for name, of_name in boxes.items()}

    def _address(self, name: str, index: int, box: torch.Tensor) -> int:
        """Returns the address of a box; 0 if it is read in parts."""
        if is_read_in_parts(box):
            self._on_device[name, index] = _bytes_of(box)
            self._stream_of(box)  # waits for the kernels that compute the box, but not for kernels that the trainer starts later
            return 0
        in_memory = in_host_memory(box)
        self._kept.append(in_memory)
        return in_memory.data_ptr()

    def read(self, name: str, index: int, begin: int, end: int, address: int) -> None:
        """Copies bytes [begin, end) of a box to the host. Several threads call it at the same time."""
        import torch

        of_box = self._on_device[name, index][begin:end]
        with torch.inference_mode(False), torch.no_grad():
            staged = torch.empty(end - begin, dtype=torch.uint8, pin_memory=of_box.is_cuda)
            if of_box.is_cuda:
                stream = self._stream_of(of_box)
                with torch.cuda.stream(stream):
                    staged.copy_(of_box, non_blocking=True)
                    copied = stream.record_event()
                copied.synchronize()
            else:
                staged.copy_(of_box)
        ctypes.memmove(address, staged.data_ptr(), end - begin)

    def _stream_of(self, box: torch.Tensor) -> Any:
        import torch

        if not box.is_cuda:
            return None
        if box.device not in self._streams:
            stream = torch.cuda.Stream(box.device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(box.device))
            self._streams[box.device] = stream
        return self._streams[box.device]


def is_read_in_parts(box: torch.Tensor) -> bool:
    return box.is_cuda and box.nbytes >= SMALL_NBYTES and is_row_major(box)


def _bytes_of(box: torch.Tensor) -> torch.Tensor:
    import torch

    return box.detach().reshape(-1).view(torch.uint8)
