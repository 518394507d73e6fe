"""Paths as the extension takes them."""

from __future__ import annotations

import os

PathLike = str | bytes | os.PathLike[str] | os.PathLike[bytes]


def path_bytes(path: PathLike) -> bytes:
    encoded = os.fsencode(path)
    if not encoded:
        raise ValueError("path: expected a name, found an empty one")
    if b"\0" in encoded:
        raise ValueError(f"path: expected no NUL byte, found {encoded!r}")
    return encoded


def optional_path_bytes(path: PathLike | None) -> bytes:
    return b"" if path is None else path_bytes(path)


def at_least_one(name: str, number: int | None) -> int:
    """Returns 0 for None: not given."""
    if number is None:
        return 0
    if number < 1:
        raise ValueError(f"{name}: expected a number from 1 on, found {number}")
    return number
