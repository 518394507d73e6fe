"""Progress of long work: the caller's function, or a bar."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Union

from ._arguments import refuse_type

Progress = Union[Callable[[int, int], object], bool, None]


def progress_function(progress: Progress, what: str) -> Callable[[int, int], object] | None:
    """Returns a function that the extension calls with the bytes done and the total. If `progress` is True, it shows a bar."""
    if progress is None or progress is False:
        return None
    if progress is True:
        return _Bar(what)
    if not callable(progress):
        refuse_type("progress", "a function, or True for a bar", progress)
    return progress


class _Bar:
    """A bar of tqdm, which appears with the first bytes and stays as a line when the work is done."""

    def __init__(self, what: str):
        try:
            from tqdm.auto import tqdm  # type: ignore[import-untyped,unused-ignore]
        except ImportError:
            raise ValueError("progress: expected tqdm to be installed for progress=True (pip install tqdm), found none") from None
        self._make: Callable[[int], Any] = lambda total: tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024,
                                                              desc=what)
        self._bar: Any = None

    def __call__(self, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = self._make(total)
        self._bar.update(done - self._bar.n)
        if done >= total:
            self._bar.close()
