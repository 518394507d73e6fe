"""Trains embedding tables with torchrec on CPU ranks, under a plan, from batches in a file.

Usage: python train_torchrec.py --tables tables.json --plan plan.json --optimizer row_wise_adagrad
           [--initial weights.safetensors] [--load DCP] [--batches batches.safetensors] [--save DCP] [--result FILE] [--tables-only]
           [--through dcp|tessera]

tables.json   [{"name": "t0", "rows": 11, "columns": 8, "pooling": "sum", "weighted": false}, ...]; each has one feature
plan.json     as `ckpt-reshard --plan` reads it; the number of ranks is its world size
initial       `<table>`: whole weights
batches       `<step>.<rank>.lengths`: int64, of every table in order, its bags; `<step>.<rank>.values`: int64, the ids;
              `<step>.<rank>.weights`: float32, one per id, where tables are weighted
result        `output.<step>.<rank>`: [bags, columns of all tables side by side] before the step's update; then the whole
              state under the names that DCP has

The loss of a rank is the sum of squares of its output; torchrec trains on the mean of the ranks' losses.

--load fills the model strictly from a checkpoint before the first step; --save writes one after the last. Both use PyTorch's
DCP, or with `--through tessera` Tessera's Python package.
"""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "fixtures" / "make"), str(ROOT / "tests" / "interop")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
import torchrec  # noqa: E402
from ranks import run  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torchrec_tables import OPTIMIZERS, ShardedTables, gathered  # noqa: E402


def features_of(tables, batches, step):
    """Returns this rank's batch of a step; None after the last step."""
    key = f"{step}.{dist.get_rank()}"
    if f"{key}.lengths" not in batches:
        return None
    return torchrec.KeyedJaggedTensor(
        keys=[f"f_{t['name']}" for t in tables],
        values=batches[f"{key}.values"],
        lengths=batches[f"{key}.lengths"],
        weights=batches.get(f"{key}.weights"),
    )


def storage(name):
    """Returns two functions: one loads a state dict in place from a path, one saves it."""
    if name == "dcp":
        return (lambda state, path: dcp.load(state, checkpoint_id=path)), (lambda state, path: dcp.save(state, checkpoint_id=path))
    from python_package import tessera

    return tessera.load, tessera.save


def train(arguments, tables, plan):
    host_size = arguments.host_size or dist.get_world_size()
    sharded = ShardedTables(tables, plan, host_size, arguments.optimizer, arguments.lr, arguments.eps,
                            has_over=not arguments.tables_only)
    if arguments.initial:
        sharded.set_weights(load_file(arguments.initial))
    if arguments.load:
        state = sharded.state()
        load, _ = storage(arguments.through)
        load(state, arguments.load)
        sharded.set_state(state)

    outputs = {}
    batches = load_file(arguments.batches) if arguments.batches else {}
    while (features := features_of(tables, batches, len(outputs))) is not None:
        outputs[f"output.{len(outputs)}.{dist.get_rank()}"] = sharded.step(features)

    state = sharded.state()
    if arguments.save:
        _, save = storage(arguments.through)
        save(state, arguments.save)
    if arguments.result:
        ranks = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, outputs)
        merged = gathered(state)
        if dist.get_rank() == 0:
            result = {k: v for k, v in merged.items() if isinstance(v, torch.Tensor)}
            for of_rank in ranks:
                result |= of_rank
            save_file({name: tensor.contiguous() for name, tensor in result.items()}, arguments.result)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", required=True)
    parser.add_argument("--tables-only", action="store_true", help="no layer beside the tables")
    parser.add_argument("--plan", required=True)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="row_wise_adagrad")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--eps", type=float, default=1e-6)
    parser.add_argument("--host-size", type=int, help="ranks of one host (default: all)")
    parser.add_argument("--through", choices=("dcp", "tessera"), default="dcp")
    for name in ("--initial", "--load", "--batches", "--save", "--result"):
        parser.add_argument(name)
    arguments = parser.parse_args()
    plan = json.loads(Path(arguments.plan).read_text())
    run(plan["world_size"], train, arguments, json.loads(Path(arguments.tables).read_text()), plan)


if __name__ == "__main__":
    main()
