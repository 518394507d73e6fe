"""Checks arguments and converts them for the extension. Errors name the argument."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from . import _core

PathLike = str | bytes | os.PathLike[str] | os.PathLike[bytes]

MAX_COUNT = (1 << 31) - 1  # of ranks and threads
MAX_NBYTES = (1 << 63) - 1


def refuse_type(name: str, expected: str, found: Any) -> NoReturn:
    raise TypeError(f"{name}: expected {expected}, found {type(found).__name__}") from None


def path_bytes(name: str, path: PathLike) -> bytes:
    if not isinstance(path, (str, bytes, os.PathLike)):
        refuse_type(name, "a path (str, bytes or os.PathLike)", path)
    encoded = os.fsencode(path)
    if not encoded:
        raise ValueError(f"{name}: expected a path, found an empty one")
    if b"\0" in encoded:
        raise ValueError(f"{name}: expected no NUL byte, found {encoded!r}")
    return _core.keep_query(encoded)  # the query of a web URL may be a secret signature


def stored_path_bytes(name: str, path: PathLike, endpoint: str | None) -> bytes:
    """Returns a path as bytes. Sets the server of an s3:// path's bucket to `endpoint`, also for later calls; None: no change."""
    encoded = path_bytes(name, path)
    if endpoint is not None:
        _core.set_bucket_endpoint(encoded, name_bytes("endpoint", endpoint))
    return encoded


def local_folder(name: str, path: PathLike) -> str:
    """Returns a path. Refuses URLs, of which `pathlib.Path` would make a local folder such as "s3:"."""
    found = os.fsdecode(path)
    if "://" in found:
        raise ValueError(f"{name}: expected a local path, found {found!r}")
    return os.fsdecode(path_bytes(name, path))


def optional_path_bytes(name: str, path: PathLike | None) -> bytes:
    return b"" if path is None else path_bytes(name, path)


def absolute(path: bytes) -> bytes:
    """Returns a path that stays the same if the working directory changes. URLs, and an empty path, stay as they are."""
    return path if not path or b"://" in path or os.path.isabs(path) else os.path.join(os.getcwdb(), path)


def text(name: str, value: str) -> str:
    if not isinstance(value, str):
        refuse_type(name, "a str", value)
    return value


def optional_text(name: str, value: str | None) -> str | None:
    return None if value is None else text(name, value)


def name_bytes(name: str, value: str) -> bytes:
    """Returns a name as bytes. Lone surrogates in the str become bytes that are not UTF-8."""
    return text(name, value).encode("utf-8", "surrogateescape")


def names_bytes(name: str, values: str | Iterable[str]) -> list[bytes]:
    """Returns a list of names or patterns as bytes. `values` is one str or several."""
    if isinstance(values, str):
        return [name_bytes(name, values)]
    if isinstance(values, bytes) or not isinstance(values, Iterable):
        refuse_type(name, "a str or several", values)
    return [name_bytes(name, value) for value in values]


def settings(name: str, values: Mapping[str, int | str] | None) -> list[bytes]:
    """Returns `NAME=VALUE` for each variable of a recipe."""
    if values is None:
        return []
    if not isinstance(values, Mapping):
        refuse_type(name, "a mapping of names to numbers", values)
    return [name_bytes(name, f"{variable}={value}") for variable, value in values.items()]


def flag(name: str, value: bool) -> bool:
    if not isinstance(value, bool):
        refuse_type(name, "a bool", value)
    return value


def at_least_one(name: str, number: int | None, most: int = MAX_COUNT) -> int:
    """Returns a number from 1 to `most`; 0 for None, which means that it is not given."""
    if number is None:
        return 0
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        refuse_type(name, "an int", number)
    number = operator.index(number)
    if not 1 <= number <= most:
        expected = "a number of 1 or more" if number < 1 else f"a number up to {most}"
        raise ValueError(f"{name}: expected {expected}, found {number}")
    return number


def nbytes(name: str, size: int | str) -> int:
    """Returns a number of bytes. `size` is a number, or a text such as "64MiB"."""
    if isinstance(size, str):
        number = _core.parse_size(size.encode("utf-8", "surrogateescape"))
        if number is None:
            raise ValueError(f"{name}: expected a size such as 256MiB, found {size!r}")
        return at_least_one(name, number, MAX_NBYTES)
    if size is None:
        refuse_type(name, "an int, or a size as a str", size)
    return at_least_one(name, size, MAX_NBYTES)
