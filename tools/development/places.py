"""Paths of the repository and of the cache outside it, and locks on both."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from console import Stop, say

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent


def relative_to_root(word: str | Path) -> str:
    """Returns a path below the root relative to it, and any other word unchanged."""
    return os.path.relpath(word, ROOT) if str(word).startswith(f"{ROOT}/") else str(word)


def cache_directory() -> Path:
    """Returns the cache folder, for results that take long to build. You may delete it at any time."""
    chosen = os.environ.get("TESSERA_CACHE")
    if chosen:
        return Path(chosen).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).absolute() / "tessera"


@contextlib.contextmanager
def locked(directory: Path, purpose: str) -> Iterator[None]:
    """Locks `directory` for this process. If another tools/dev has locked it, says so and waits.

    Child processes inherit the lock: if tools/dev is killed, its children hold the lock until they end.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / ".tools-dev.lock").open("a+")
    except OSError as error:
        raise Stop(f"cannot write to {directory}: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"    another tools/dev is busy with {purpose}; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        os.set_inheritable(file.fileno(), True)
        yield
