"""Errors, and problems that were found in a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

MAX_LISTED = 100  # most problems in an Error's text; `problems` has all of them


class Problem(NamedTuple):
    """One problem of a checkpoint, or a note about it. `str()` is the line that the tools print."""

    severity: str  # "error" or "note"
    rule: str  # a stable word: "checksum", "coverage", "structure", ...
    path: str | None
    tensor: str | None  # or the name of a value
    byte_range: tuple[int, int] | None  # half-open, within the file at `path`
    expected: str
    found: str
    text: str

    def __str__(self) -> str:
        return self.text

    @classmethod
    def of_entry(cls, severity: str, rule: str, name: str, expected: str, found: str) -> Problem:
        """Returns a problem of a tensor or value, with the text that the tools would print."""
        return cls(severity, rule, None, name, None, expected, found, f"{name}: {rule}: expected {expected}, found {found}")

    @classmethod
    def of_error(cls, rule: str, error: Error) -> Problem:
        """Returns the problem that an error is about. Its text is that of the error."""
        return cls("error", rule, error.path, error.tensor, error.byte_range, "an entry that can be loaded", str(error), str(error))


class Error(Exception):
    """A failure. The text says where, what was expected and what was found.

    `kind` is `not_found`, `corruption`, `unsupported`, `invalid_argument`, `mismatch`, `already_exists`, `io` or
    `interrupted`. `path`, `tensor` and `byte_range` are None if they are unknown. `problems` has every reason why a
    checkpoint, or a state dict, was refused.
    """

    def __init__(self, message: str, *, kind: str, path: str | None = None, tensor: str | None = None,
                 byte_range: tuple[int, int] | None = None, problems: tuple[Problem, ...] = ()):
        super().__init__(message)
        self.kind = kind
        self.path = path
        self.tensor = tensor
        self.byte_range = byte_range
        self.problems = problems

    def __reduce__(self) -> tuple[Any, ...]:
        # Lets pickle carry the error from another process.
        facts = {name: getattr(self, name) for name in ("kind", "path", "tensor", "byte_range", "problems")}
        return _restored, (type(self), self.args[0], facts)


def _restored(kind: type[Error], message: str, facts: dict[str, Any]) -> Error:
    return kind(message, **facts)


class Refused(Error):
    """Stands for a value that Tessera never reads, such as an object of a class. Its text says why.

    `checkpoint[name]` raises it. `items()` and `values()` return it in place of the value, so that the other values
    can still be read.
    """


class MissingName(Error, KeyError):
    """A checkpoint does not have a name: a KeyError that suggests a similar name."""

    def __str__(self) -> str:
        return Exception.__str__(self)  # KeyError.__str__ would put the message into quotes


def refused(paths: list[str], problems: tuple[Problem, ...], summary: str = "problems", where: str = "",
            lines: Sequence[str] | None = None, hints: Sequence[str] = ()) -> Error:
    """Returns the error that lists why these checkpoints are refused. If there is one problem, `where` comes before it. `lines`: the
    text, if it is shorter than a line for each problem."""
    listed = _at_most_listed([str(problem) for problem in problems] if lines is None else lines)
    first = problems[0] if len(problems) == 1 else None
    head = [where + listed[0]] if first else [f"{' + '.join(paths)}: {len(problems)} {summary}:", *listed]
    return Error("\n  ".join([*head, *(f"hint: {hint}" for hint in hints)]), kind="mismatch",
                 path=paths[0] if len(paths) == 1 else None, tensor=first.tensor if first else None, problems=problems)


def joined(errors: Sequence[Error], summary: str) -> Error:
    """Returns one error that lists several of one kind; if there is only one, that one."""
    if len(errors) == 1:
        return errors[0]
    text = "\n  ".join([f"{len(errors)} {summary}:", *_at_most_listed([str(error) for error in errors])])
    problems = tuple(problem for error in errors for problem in (error.problems or (Problem.of_error("value", error),)))
    return Error(text, kind=errors[0].kind, problems=problems)


def _at_most_listed(lines: Sequence[str]) -> list[str]:
    return [*lines[:MAX_LISTED], *([f"and {len(lines) - MAX_LISTED} more"] if len(lines) > MAX_LISTED else [])]
