"""Compares three ways to save a series of checkpoints of an embedding table with Adagrad: in full, with a base, with changed rows.

    PYTHONPATH=build/python python tests/bench/changed_rows.py FOLDER [--rows N] [--columns N] [--lookups N] [--checkpoints N]
        [--state pointwise|row-wise] [--cold]

Between two checkpoints, `--lookups` rows are drawn from a Zipf distribution (exponent 1.05) and changed; a row may be drawn several times. The
frequent rows are at random places in the table. Prints medians over all checkpoints but the first: the seconds of tessera.save, the bytes
that it adds to the disk, and the share of rows that differ from the first checkpoint. `--cold` takes the base out of the page cache before
each save, so that it is read from the disk.
"""

import argparse
import os
import shutil
import statistics
import time
from pathlib import Path

import numpy as np
import torch

import tessera

EXPONENT = 1.05
WAYS = {"in full": {}, "with a base": {"base": True}, "with changed rows": {"base": True, "changed_rows": True}}


class Table:
    """A table with the state of Adagrad, trained with random gradients."""

    def __init__(self, rows: int, columns: int, state: str):
        self.random = np.random.default_rng(1)
        self.place = torch.from_numpy(self.random.permutation(rows))  # of the most frequent row, the second, ...
        self.frequency = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -EXPONENT)
        self.frequency /= self.frequency[-1]
        self.weight = torch.randn(rows, columns)
        self.sum = torch.zeros(rows, columns) if state == "pointwise" else torch.zeros(rows)
        self.changed = torch.zeros(rows, dtype=torch.bool)

    def train(self, lookups: int) -> None:
        ranks = np.unique(np.searchsorted(self.frequency, self.random.random(lookups)))
        rows = self.place[torch.from_numpy(ranks)]
        gradient = torch.randn(len(rows), self.weight.shape[1])
        if self.sum.dim() == 2:
            self.sum[rows] += gradient.square()
            self.weight[rows] -= 0.01 * gradient / self.sum[rows].sqrt()
        else:
            self.sum[rows] += gradient.square().mean(1)
            self.weight[rows] -= 0.01 * gradient / self.sum[rows].sqrt()[:, None]
        self.changed[rows] = True

    def state(self) -> dict:
        return {"weight": self.weight, "sum": self.sum}


def disk_nbytes(folder: Path) -> int:
    """Returns the bytes that the .h5 files use on the disk. A file with several names counts once."""
    return 512 * sum({status.st_ino: status.st_blocks for status in (file.stat() for file in folder.rglob("*.h5"))}.values())


def evict(folder: Path) -> None:
    """Takes the files of a checkpoint out of the page cache."""
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def save(table: Table, folder: Path, number: int, options: dict, cold: bool) -> tuple[float, int]:
    """Saves one checkpoint of a series. Returns the seconds, and the bytes that are new on the disk."""
    previous = folder / str(number - 1)
    base = previous if options.get("base") and number > 0 else None
    if base is not None and cold:
        evict(base)
    before = disk_nbytes(folder)
    begin = time.perf_counter()
    tessera.save(table.state(), folder / str(number), base=base, changed_rows=options.get("changed_rows", False))
    seconds = time.perf_counter() - begin
    nbytes = disk_nbytes(folder) - before
    if number > 0:
        shutil.rmtree(previous)
    return seconds, nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--columns", type=int, default=64)
    parser.add_argument("--lookups", type=int, default=100_000)
    parser.add_argument("--checkpoints", type=int, default=10)
    parser.add_argument("--state", choices=("pointwise", "row-wise"), default="pointwise")
    parser.add_argument("--cold", action="store_true")
    arguments = parser.parse_args()
    table = Table(arguments.rows, arguments.columns, arguments.state)
    series = {way: arguments.folder / way.replace(" ", "-") for way in WAYS}
    for folder in series.values():
        folder.mkdir(parents=True)
    results = {way: [] for way in WAYS}
    for number in range(arguments.checkpoints):
        if number > 0:
            table.train(arguments.lookups)
        for way, options in WAYS.items():
            results[way].append(save(table, series[way], number, options, arguments.cold))
        print(f"checkpoint {number}: {table.changed.float().mean():.4f} of the rows differ from the first;",
              "; ".join(f"{way} {found[-1][0]:.2f} s, {found[-1][1]:,} bytes" for way, found in results.items()), flush=True)
    for way, found in results.items():
        seconds, nbytes = zip(*found[1:])
        print(f"{way:<18} {statistics.median(seconds):7.2f} s  {statistics.median(nbytes):13,.0f} bytes  last {nbytes[-1]:13,} bytes")
    shutil.rmtree(arguments.folder)


if __name__ == "__main__":
    main()
