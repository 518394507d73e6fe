"""A position in a list, as a key of a path. The other keys are those of dicts, which may be any number or tuple."""

from __future__ import annotations


class Position(int):
    __slots__ = ()

    def __repr__(self) -> str:
        return f"[{int(self)}]"
