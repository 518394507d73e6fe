"""Reads, compares and draws the losses of training runs."""

import dataclasses
import json
from pathlib import Path

BARS = " ▁▂▃▄▅▆▇█"


@dataclasses.dataclass
class Stretch:
    """Consecutive steps that one job trained."""

    by: str
    first: int
    losses: list[float]

    @property
    def last(self) -> int:
        return self.first + len(self.losses) - 1


def read_stretches(path: Path) -> list[Stretch]:
    """Reads lines of JSON with step, loss and job. If a step was trained twice, uses the later line."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    by_step = {line["step"]: line for line in lines}
    stretches: list[Stretch] = []
    for step in sorted(by_step):
        line = by_step[step]
        if not stretches or stretches[-1].by != line["by"] or stretches[-1].last != step - 1:
            stretches.append(Stretch(line["by"], step, []))
        stretches[-1].losses.append(line["loss"])
    return stretches


def largest_difference(found: list[float], expected: list[float]) -> float:
    """Returns the largest relative difference of losses, pair by pair."""
    return max(abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True))


def sampled(count: int, width: int) -> list[int]:
    """Returns the indices of the values, out of `count`, that the columns of a plot show."""
    return [column * (count - 1) // (width - 1) for column in range(width)]


def plot(losses: list[float], *, low: float, high: float, width: int, height: int) -> list[str]:
    """Draws losses as lines of bars, top line first. A loss of `high` fills the height; a loss of `low` is still visible."""
    levels = len(BARS) - 1
    steps = height * levels - 1
    bars = [1 + round((losses[place] - low) / ((high - low) or 1) * steps) for place in sampled(len(losses), width)]
    return ["".join(BARS[max(0, min(bar - levels * line, levels))] for bar in bars) for line in reversed(range(height))]
