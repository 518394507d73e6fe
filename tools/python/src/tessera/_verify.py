"""Checks a checkpoint."""

from __future__ import annotations

from collections.abc import Callable

from . import _core
from ._arguments import PathLike, at_least_one, callback, flag, nbytes, optional_path_bytes, path_bytes
from ._errors import Problem

DEFAULT_MEMORY = 256 << 20


def verify(path: PathLike, *, values: bool = False, notes: bool = False, flat_layout: PathLike | None = None,
           memory: int | str = DEFAULT_MEMORY, threads: int | None = None,
           progress: Callable[[int, int], object] | None = None) -> list[Problem]:
    """Returns all that is wrong with a checkpoint: an empty list where it is sound.

    Checks structure, coverage and every stored byte against its checksum, and goes on after a problem.

    values: numbers that are NaN or infinite are problems too.
    notes: also return what the format leaves unchecked, with the severity "note".
    flat_layout: what the flat vectors of FSDP1 are made of, a JSON file.
    memory: bytes for elements, all threads together, as a number or a size such as "64MiB".
    threads: None for as many as there are cores.
    progress: called with the bytes done and the bytes to do.

    Raises Error where the check cannot be made: nothing is there, it is no checkpoint, its index cannot be read.
    """
    flag("notes", notes)
    found = _core.verify(path_bytes("path", path), optional_path_bytes("flat_layout", flat_layout), flag("values", values),
                         nbytes("memory", memory), at_least_one("threads", threads), callback("progress", progress))
    return [problem for problem in (Problem(*row) for row in found) if notes or problem.severity == "error"]
