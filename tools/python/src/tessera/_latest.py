"""Finds the checkpoint to resume from."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from . import _core
from ._arguments import PathLike, flag, stored_path_bytes


class Skipped(NamedTuple):
    """A checkpoint that `latest_valid` rejected."""

    path: str
    why: str


class LatestValid(NamedTuple):
    """What `latest_valid` found."""

    path: str | None  # None: there is no valid checkpoint
    skipped: list[Skipped]  # newer than `path`, newest first: damaged ones, interrupted saves


def latest_valid(folder: PathLike, *, checksums: bool = False, endpoint: str | None = None) -> LatestValid:
    """Finds the newest valid checkpoint in a folder, of any format. `skipped` of the result lists newer ones that were rejected.

    folder: a path, or s3://BUCKET/PREFIX.

    The newest is the last by name, where runs of digits are numbers: step-1000 is newer than step-999. A checkpoint is
    valid if it opens, and each of its files exists, has the right size and belongs to it. If the folder does not exist,
    `path` is None. Not collective: call it on rank 0 and send the path to the others, so that all ranks load the same.

    checksums: also read every stored byte and compare it with its checksum.
    endpoint: the S3 server for s3:// paths, as for `open`.
    """
    path, skipped = _core.latest_valid(stored_path_bytes("folder", folder, endpoint), flag("checksums", checksums))
    return LatestValid(path, [Skipped(*each) for each in skipped])


def numbered(folder: str, prefix: str) -> list[tuple[int, Path]]:
    """Returns the paths in a folder whose names are `prefix` and a number, by number. Ignores names with more text after the number."""
    return sorted((int(number), path) for path in Path(folder).glob(f"{prefix}*")
                  if (number := path.name.removeprefix(prefix)).isdecimal())
