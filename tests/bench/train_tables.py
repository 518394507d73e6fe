"""Steps of embedding tables against torchrec and torch.nn.EmbeddingBag, and the speed at which this machine reads and updates random rows."""

import json
import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench_device import Device
from side_by_side import Result, with_ratios
from peer_packages import peer_packages
from torchrun import run_on_ranks

PEERS = Path(__file__).with_name("peers_train_tables.py")
TABLES, ROWS, BATCH, POOLING = 20, 100_000, 4096, 10
NUM_WARM_UP = 2
OPTIMIZERS = {"row_wise_adagrad": "row-wise Adagrad", "sgd": "SGD"}


def seconds_of_rows_alone(kernels: Path, measured: dict, *, columns: int, threads: int) -> float:
    """Returns how many seconds this machine needs only to read the rows that a step looks up, and to update the rows that it
    changes, in random order and in huge pages."""
    nbytes = columns * 4
    lines = subprocess.run([kernels, "--huge-pages", "--bandwidth", str(nbytes), str(threads)], capture_output=True,
                           text=True, check=True).stdout
    bandwidth = json.loads(lines)
    return (measured["num_ids"] * nbytes / bandwidth["read_GB_per_second"]
            + 2 * measured["num_touched_rows"] * nbytes / bandwidth["update_GB_per_second"]) / 1e9


def compare(benchmark: str, contenders: dict[str, list], *, ranks: int, rounds: int, steps: int,
            python: Path, rows_alone: Callable[[dict], float] | None) -> list[Result]:
    """Interleaves runs of all contenders, of which the last is ours; seconds are those of steps after the first few."""
    results = {name: Result(benchmark, name, [], 0) for name in contenders}
    alone = Result(benchmark, "the rows alone, at random", [], 0)
    for _ in range(rounds):
        for name, command in contenders.items():
            measured = run_on_ranks([*command, steps], ranks, python)
            results[name].seconds += measured["seconds"][NUM_WARM_UP:]
            results[name].peak_nbytes = max(results[name].peak_nbytes, measured["peak_nbytes"])
        if rows_alone:
            alone.seconds.append(rows_alone(measured))
    every = [*results.values(), *([alone] if rows_alone else [])]
    for result in every:
        result.name += f" ({BATCH / result.median:,.0f} samples/s)"
    return with_ratios(every)


def bench(tools: Path, python: Path, work: Path, *, quick: bool, device: Device) -> list[Result]:
    trainer = device.build("train_tables", "embedding_kernels", tools=tools, python=python)
    os.environ["PYTHONPATH"] = str(peer_packages("torchrec_cuda" if device.name == "cuda" else "torchrec"))
    rounds, steps = (1, 4) if quick else (3, 8)
    rows = 1_000 if quick else ROWS
    # columns, distribution of ids, threads, ranks
    cases = [(64, "uniform", 1, 1), (64, "uniform", 2, 1), (64, "uniform", 1, 2), (64, "zipf", 2, 1),
             (16, "uniform", 2, 1), (256, "uniform", 2, 1)]
    if device.name == "cuda":
        cases = [(64, "uniform", 1, 1), (64, "zipf", 1, 1), (256, "uniform", 1, 1), (64, "uniform", 1, 2)]
        cases = [case for case in cases if case[-1] <= device.num_gpus]
    results = []
    for columns, distribution, threads, ranks in cases:
        shape = [TABLES, rows, columns, BATCH, POOLING, distribution, threads]
        rows_alone = partial(seconds_of_rows_alone, tools / "embedding_kernels", columns=columns,
                             threads=threads) if ranks == 1 and device.name == "cpu" else None
        title = f"{TABLES} tables of {rows:,} x {columns}, {distribution} ids, {device.name}, {threads} threads, {ranks} ranks"
        for optimizer, name in OPTIMIZERS.items():
            contenders = {"torchrec": [PEERS, device.name, f"torchrec_{optimizer}", *shape]}
            if ranks == 1 and optimizer == "sgd":
                contenders["EmbeddingBag, sparse gradients"] = [PEERS, device.name, "embedding_bag_sgd", *shape]
            contenders["tessera"] = [trainer, optimizer, *shape]
            results += compare(f"{name}: {title}", contenders, ranks=ranks, rounds=rounds, steps=steps, python=python,
                               rows_alone=rows_alone)
    return results
