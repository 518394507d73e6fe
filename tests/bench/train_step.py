"""Training steps of a sharded transformer against PyTorch's FSDP1, FSDP2 and DDP, and the overhead of wrappers that have nothing to do."""

from pathlib import Path

from bench_device import Device
from side_by_side import Result, with_ratios
from torchrun import run_on_ranks

PEERS = Path(__file__).with_name("peers_train_step.py")
BENCHMARK = "step of {size}M parameters, {ranks} rank(s), {device}, batch {batch}, backwards {backwards}"
# Millions of parameters, and width, layers, heads, sequence. A GPU computes the small model faster than the host launches it.
SHAPES = {"quick": ("0.1", ["64", "2", "2", "16"]), "cpu": ("50", ["640", "10", "10", "64"]),
          "cuda": ("800", ["2048", "16", "16", "512"])}
OVERHEAD = "step of 1M parameters, 1 rank, batch 1"
NUM_WARM_UP = 3


def compare(benchmark: str, contenders: dict[str, list], *, ranks: int, rounds: int, steps: int,
            python: Path) -> list[Result]:
    """Interleaves runs of all contenders; seconds are those of steps after the first few.

    Also compares processor times: other programs on the machine change these much less than the seconds.
    """
    results = {name: Result(benchmark, name, [], 0) for name in contenders}
    cpu_results = {name: Result(benchmark + ", CPU time of rank 0", name, [], 0) for name in contenders}
    sent = {}
    for _ in range(rounds):
        for name, command in contenders.items():
            measured, = run_on_ranks([*command, str(steps)], ranks, python).values()
            results[name].seconds += measured["seconds"][NUM_WARM_UP:]
            cpu_results[name].seconds += measured["cpu_seconds"][NUM_WARM_UP:]
            results[name].peak_nbytes = max(results[name].peak_nbytes, measured["peak_nbytes"])
            sent[name] = measured["nbytes_sent"]
    for name, result in results.items():
        result.name += f" ({sent[name] / 1e6:.0f} MB sent)" if sent[name] else ""
    return with_ratios(list(results.values())) + with_ratios(list(cpu_results.values()))


def wrapper_overhead(trainer: Path, shape: list[str], *, steps: int, python: Path) -> list[Result]:
    """Compares plain modules with sharded ones on one rank, where sharding has nothing to do. They take turns, step by step, in one process."""
    ways = "plain,NO_SHARD,FULL_SHARD"
    measured = run_on_ranks([trainer, ways, *shape, "1", str(steps)], 1, python)
    return with_ratios([Result(OVERHEAD, f"tessera {way}", figures["seconds"][NUM_WARM_UP:], figures["peak_nbytes"])
                        for way, figures in measured.items()])


def bench(tools: Path, python: Path, work: Path, *, quick: bool, device: Device) -> list[Result]:
    trainer = device.build("train_step", tools=tools, python=python)
    results = []
    size, shape = SHAPES["quick" if quick else device.name]
    ranks = device.ranks(2)
    for batch, backwards in (("8", "1"), ("2", "1"), ("4", "2")):
        # In "lockstep" each rank trains alone, and ranks only wait for each other after the last backward: no step can be faster.
        peers = ["fsdp1", "fsdp2", "ddp"]
        ways = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "replicate", "lockstep"]
        if not quick or batch == "8":  # steps of AdamW(fused=True), and of tessera::fused_step
            peers += ["fsdp2_fused", "ddp_fused"]
            ways += ["FULL_SHARD+fused", "NO_SHARD+fused", "replicate+fused"]
        contenders = {way: [PEERS, device.name, way, *shape, batch, backwards] for way in peers}
        contenders |= {f"tessera {way}": [trainer, way, *shape, batch, backwards] for way in ways}
        results += compare(BENCHMARK.format(size=size, ranks=ranks, device=device.name, batch=batch, backwards=backwards),
                           contenders, ranks=ranks, rounds=1 if quick else 3, steps=5 if quick else 8, python=python)
    small = ["64", "2", "2", "16", "1"] if quick else ["128", "5", "4", "64", "1"]
    results += wrapper_overhead(trainer, small, steps=10 if quick else 1000, python=python)
    return results
