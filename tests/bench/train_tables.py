"""Steps of embedding tables against torchrec and torch.nn.EmbeddingBag, and the speed at which this machine reaches random rows."""

import os
from pathlib import Path

from build import build, runtime_definitions
from side_by_side import Result, with_ratios
from torchrec_packages import torchrec_packages
from torchrun import run_on_ranks

PEERS = Path(__file__).with_name("peers_train_tables.py")
TABLES, ROWS, BATCH, POOLING = 20, 100_000, 4096, 10
NUM_WARM_UP = 2


def compare(benchmark: str, contenders: dict[str, list], *, ranks: int, rounds: int, steps: int,
            python: Path) -> list[Result]:
    """Interleaves runs of all contenders; seconds are those of steps after the first few."""
    results = {name: Result(benchmark, name, [], 0) for name in contenders}
    for _ in range(rounds):
        for name, command in contenders.items():
            measured = run_on_ranks([*command, steps], ranks, python)
            results[name].seconds += measured["seconds"][NUM_WARM_UP:]
            results[name].peak_nbytes = max(results[name].peak_nbytes, measured["peak_nbytes"])
    for result in results.values():
        result.name += f" ({BATCH / result.median:,.0f} samples/s)"
    return with_ratios(list(results.values()))


def bench(tools: Path, python: Path, work: Path, *, quick: bool) -> list[Result]:
    build("release", targets=("train_tables",), definitions=runtime_definitions(python))
    os.environ["PYTHONPATH"] = str(torchrec_packages())
    trainer = tools / "train_tables"
    rounds, steps = (1, 4) if quick else (5, 8)
    rows = 1_000 if quick else ROWS
    # columns, distribution of ids, threads, ranks
    cases = [(64, "uniform", 1, 1), (64, "uniform", 2, 1), (64, "uniform", 1, 2), (64, "zipf", 2, 1),
             (16, "uniform", 2, 1), (256, "uniform", 2, 1)]
    results = []
    for columns, distribution, threads, ranks in cases:
        shape = [TABLES, rows, columns, BATCH, POOLING, distribution, threads]
        contenders = {"torchrec, row-wise Adagrad": [PEERS, "torchrec_row_wise_adagrad", *shape],
                      "tessera, row-wise Adagrad": [trainer, "row_wise_adagrad", *shape],
                      "torchrec, SGD": [PEERS, "torchrec_sgd", *shape],
                      "tessera, SGD": [trainer, "sgd", *shape]}
        if ranks == 1:
            contenders["EmbeddingBag, sparse SGD"] = [PEERS, "embedding_bag_sgd", *shape]
        title = f"{TABLES} tables of {rows:,} x {columns}, {distribution} ids, {threads} threads, {ranks} ranks"
        results += compare(title, contenders, ranks=ranks, rounds=rounds, steps=steps, python=python)
    return results
