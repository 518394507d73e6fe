"""Runs commands in turn, several rounds, and compares their medians.

Contenders alternate within each round, so that a slow minute of the machine slows all of them alike.
Seconds differ from machine to machine; ratios of one run differ less.
"""

import dataclasses
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path


@dataclasses.dataclass
class Contender:
    """One way of doing the work: a command that is timed from start to exit."""

    name: str
    command: list[str]
    prepare: Callable[[], None] = lambda: None  # before every run, not timed
    rounds: int | None = None  # fewer than the others, for a slow one


@dataclasses.dataclass
class Result:
    """Units: seconds of wall time, one per round; bytes."""

    benchmark: str
    name: str
    seconds: list[float]
    peak_nbytes: int
    baseline: str = ""
    ratio: float | None = None  # median of the baseline / median of this: above 1 is faster

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def run_once(command: list[str]) -> tuple[float, int]:
    """Runs a command with its output thrown away. Returns its seconds and its peak memory in bytes."""
    begin = time.perf_counter()
    process = subprocess.Popen([str(word) for word in command], stdin=subprocess.DEVNULL,
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}: exit code {process.returncode}\n"
                           f"{errors.decode(errors='replace')}")
    return seconds, usage.ru_maxrss * 1024


def compare(benchmark: str, contenders: list[Contender], *, rounds: int) -> list[Result]:
    """Runs all contenders `rounds` times, interleaved. The first one is the baseline of the ratios."""
    results = [Result(benchmark, contender.name, [], 0) for contender in contenders]
    for round_index in range(rounds):
        for contender, result in zip(contenders, results):
            if round_index >= (contender.rounds or rounds):
                continue
            contender.prepare()
            seconds, peak_nbytes = run_once(contender.command)
            result.seconds.append(seconds)
            result.peak_nbytes = max(result.peak_nbytes, peak_nbytes)
    return with_ratios(results)


def with_ratios(results: list[Result]) -> list[Result]:
    """Compares all results with the first."""
    for result in results[1:]:
        result.baseline = results[0].name
        result.ratio = results[0].median / result.median
    return results


def remove(path: Path) -> Callable[[], None]:
    """Returns a preparation that removes `path` and waits until the disk has written everything."""

    def prepare() -> None:
        shutil.rmtree(path, ignore_errors=True)
        path.unlink(missing_ok=True)
        os.sync()

    return prepare
