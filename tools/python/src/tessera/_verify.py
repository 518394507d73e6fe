"""Checks a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from . import _core
from ._arguments import PathLike, at_least_one, flag, names_bytes, nbytes, optional_path_bytes, stored_path_bytes
from ._errors import Problem
from ._progress import Progress, progress_function


def verify(path: PathLike, *, values: bool = False, notes: bool = False, flat_layout: PathLike | None = None,
           as_dict: str | Sequence[str] = (),
           memory: int | str = _core.DEFAULT_MEMORY_NBYTES, threads: int | None = None,
           endpoint: str | None = None, progress: Progress = None) -> list[Problem]:
    """Checks a checkpoint and returns all its problems: an empty list if it has none.

    Checks the structure, that pieces cover their tensors, and all checksums. Continues after a problem.

    values: also report numbers that are NaN or infinite as problems.
    notes: also return notes about what the format does not protect, with the severity "note".
    flat_layout: a JSON file that lists the parameters in the flat vectors (FSDP1).
    as_dict: a class, or several, such as "argparse.Namespace": its objects are read as dicts.
    memory: bytes for the elements of all threads together, as a number or a size such as "64MiB".
    threads: the number of threads; None: the number of cores, at most 16.
    endpoint: the S3 server for s3:// paths, as for `open`.
    progress: called with the bytes done and the total; True: a bar, with tqdm.

    Raises Error if it cannot check: the path is missing, is not a checkpoint, or its index cannot be read.
    """
    flag("notes", notes)
    found = _core.verify(stored_path_bytes("path", path, endpoint), optional_path_bytes("flat_layout", flat_layout),
                         names_bytes("as_dict", as_dict), flag("values", values),
                         nbytes("memory", memory), at_least_one("threads", threads), progress_function(progress, "verify"))
    return [problem for problem in (Problem(*row) for row in found) if notes or problem.severity == "error"]
