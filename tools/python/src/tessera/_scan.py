"""Finds the names that the pickles in files would import and call."""

from __future__ import annotations

from typing import NamedTuple

from . import _core
from ._arguments import PathLike, stored_path_bytes


class ScannedPlace(NamedTuple):
    """Where a pickle imports a name."""

    path: str
    member: str | None  # of an archive; None: the file itself
    offset: int  # position of the opcode in the member or the file, in bytes


class ScannedName(NamedTuple):
    """A class or function that pickles import."""

    verdict: str  # "dangerous", "opaque", "plain" or "known"
    name: str  # "os.system"
    reason: str | None  # why it is dangerous; None for other verdicts
    called: bool  # the pickle calls it; otherwise only imports it
    times: int
    places: list[ScannedPlace]  # of the first 100 pickles


class ScanProblem(NamedTuple):
    """A part that the scan could not look at, or an error in a file that normal writers never produce."""

    kind: str  # "broken pickle", "archive" or "not looked at"
    path: str
    member: str | None
    offset: int | None
    expected: str
    found: str


class Scanned(NamedTuple):
    """The result of `scan`."""

    names: list[ScannedName]  # the worst first
    problems: list[ScanProblem]
    files: int
    pickles: int

    @property
    def clean(self) -> bool:
        """True if no name is dangerous and there is no problem."""
        return not self.problems and all(name.verdict != "dangerous" for name in self.names)


def scan(path: PathLike, *more: PathLike, endpoint: str | None = None) -> Scanned:
    """Returns what the pickles in files and folders would import and call when Python loads them, as ckpt-inspect scan does.

    Runs and imports nothing. Looks into files of any kind, and continues after a problem. Searches folders and all
    folders below them.

    endpoint: the S3 server for s3:// paths, as for `open`.

    Raises Error if a path is missing.
    """
    paths = [stored_path_bytes("path", each, endpoint) for each in (path, *more)]
    names, problems, files, pickles = _core.scan(paths)
    return Scanned([ScannedName(verdict, name, reason, called, times, [ScannedPlace(*place) for place in places])
                    for verdict, name, reason, called, times, places in names],
                   [ScanProblem(*problem) for problem in problems], files, pickles)
