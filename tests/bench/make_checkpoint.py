"""Writes the checkpoints that the benchmarks read, with PyTorch.

    make_checkpoint.py many-tensors --tensors 291 --dcp DIR --torch FILE
    make_checkpoint.py large --bytes 2000000000 --ranks 4 --dcp DIR
"""

import argparse
import os
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

LAYER = [  # the nine tensors of one transformer layer
    "attention.wq.weight", "attention.wk.weight", "attention.wv.weight", "attention.wo.weight",
    "feed_forward.w1.weight", "feed_forward.w2.weight", "feed_forward.w3.weight",
    "attention_norm.weight", "ffn_norm.weight",
]


def tensor_names(count: int) -> list[str]:
    """Returns `count` names of tensors of a transformer (a model of 32 layers has 291)."""
    names = ["tok_embeddings.weight", "norm.weight", "output.weight"]
    layer = 0
    while len(names) < count:
        names += [f"layers.{layer}.{name}" for name in LAYER]
        layer += 1
    return names[:count]


def many_tensors(arguments: argparse.Namespace) -> None:
    """Writes many small tensors. The cost of a listing does not depend on their bytes."""
    torch.manual_seed(0)
    state = {"model": {name: torch.randn(16, 32).to(torch.bfloat16) for name in tensor_names(arguments.tensors)}}
    dcp.save(state, checkpoint_id=arguments.dcp, no_dist=True)
    torch.save(state, arguments.torch)


def save_rank(rank: int, arguments: argparse.Namespace) -> None:
    """Saves this rank's rows of bfloat16 parameters and of float32 Adam state."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(arguments.ranks), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=arguments.port, GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (arguments.ranks,))
    torch.manual_seed(rank)
    names = [name for name in tensor_names(32) if "norm" not in name]
    numel = arguments.bytes // (10 * len(names))  # 2 bytes of bfloat16 and 8 of Adam for each
    rows = numel // 2048 // arguments.ranks

    def sharded(dtype: torch.dtype) -> DTensor:
        return DTensor.from_local(torch.randn(rows, 2048).to(dtype), mesh, [Shard(0)])

    model, optimizer = {}, {}
    for name in names:
        model[name] = sharded(torch.bfloat16)
        optimizer[name] = {"exp_avg": sharded(torch.float32), "exp_avg_sq": sharded(torch.float32),
                           "step": torch.tensor(3.0)}
    dcp.save({"model": model, "optim": {"state": optimizer}}, checkpoint_id=arguments.dcp)
    dist.barrier()
    os._exit(0)


def large(arguments: argparse.Namespace) -> None:
    arguments.port = str(20000 + os.getpid() % 20000)
    processes = [multiprocessing.get_context("fork").Process(target=save_rank, args=(rank, arguments))
                 for rank in range(arguments.ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit("a rank failed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = parser.add_subparsers(required=True)
    many = kinds.add_parser("many-tensors")
    many.add_argument("--tensors", type=int, required=True)
    many.add_argument("--torch", required=True)
    many.set_defaults(write=many_tensors)
    one = kinds.add_parser("large")
    one.add_argument("--bytes", type=int, required=True)
    one.add_argument("--ranks", type=int, required=True)
    one.set_defaults(write=large)
    for kind in (many, one):
        kind.add_argument("--dcp", required=True)
    arguments = parser.parse_args()
    if Path(arguments.dcp).exists():
        shutil.rmtree(arguments.dcp)
    arguments.write(arguments)


if __name__ == "__main__":
    main()
