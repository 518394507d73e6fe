"""Times a step of embedding tables with torchrec or torch.nn.EmbeddingBag; the peers of train_tables.cpp.

    peers_train_tables.py cpu|cuda torchrec_sgd|torchrec_row_wise_adagrad|embedding_bag_sgd TABLES ROWS COLUMNS BATCH POOLING \
        uniform|zipf THREADS STEPS
"""

import json
import math
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from peer_device import begin_on, wait_for
from torch import nn


def make_ids(distribution: str, rows: int, number: int) -> torch.Tensor:
    """`zipf`: the chance of id k falls as 1 / (k + 1)."""
    if distribution == "zipf":
        ids = torch.exp(torch.rand(number, dtype=torch.float64) * math.log(rows)).long() - 1
        return ids.clamp(0, rows - 1)
    return torch.randint(rows, (number,))


class EmbeddingBags:
    """One EmbeddingBag for each table, with sparse gradients and SGD."""

    def __init__(self, tables: int, rows: int, columns: int, device: torch.device) -> None:
        self.device = device
        self.bags = nn.ModuleList([
            nn.EmbeddingBag(rows, columns, mode="sum", sparse=True, include_last_offset=True, device=device) for _ in range(tables)])
        self.optimizer = torch.optim.SGD(self.bags.parameters(), lr=0.01)

    def batch(self, distribution: str, rows: int, samples: int, pooling: int) -> list:
        offsets = torch.arange(0, samples * pooling + 1, pooling, device=self.device)
        return [(make_ids(distribution, rows, samples * pooling).to(self.device), offsets) for _ in self.bags]

    def step(self, batch: list, gradient: torch.Tensor) -> None:
        pooled = torch.cat([bag(ids, offsets) for bag, (ids, offsets) in zip(self.bags, batch)], dim=1)
        pooled.backward(gradient)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Torchrec:
    """A sharded EmbeddingBagCollection with an optimizer fused into its backward."""

    def __init__(self, optimizer: str, tables: int, rows: int, columns: int, device: torch.device) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.model_parallel import DistributedModelParallel
        from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
        from torchrec.distributed.types import ShardingEnv, ShardingPlan

        kinds = {"sgd": EmbOptimType.EXACT_SGD, "row_wise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
        self.tables = tables
        self.device = device
        world = dist.get_world_size()
        collection = EmbeddingBagCollection(device=torch.device("meta" if device.type == "cuda" else "cpu"), tables=[
            EmbeddingBagConfig(name=f"t{i}", num_embeddings=rows, embedding_dim=columns, feature_names=[f"f{i}"])
            for i in range(tables)])
        sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": kinds[optimizer], "learning_rate": 0.01})
        plan = construct_module_sharding_plan(
            collection, {f"t{i}": table_wise(rank=i % world, compute_kernel="fused") for i in range(tables)}, sharder,
            local_size=world, world_size=world, device_type=device.type)
        model = nn.Sequential(collection)
        self.model = DistributedModelParallel(
            model, env=ShardingEnv.from_process_group(dist.group.WORLD), device=device,
            plan=ShardingPlan({"0": plan}), sharders=[sharder])

    def batch(self, distribution: str, rows: int, samples: int, pooling: int):
        from torchrec import KeyedJaggedTensor

        return KeyedJaggedTensor(
            keys=[f"f{i}" for i in range(self.tables)], values=make_ids(distribution, rows, self.tables * samples * pooling),
            lengths=torch.full((self.tables * samples,), pooling, dtype=torch.int64)).to(self.device)

    def step(self, batch, gradient: torch.Tensor) -> None:
        self.model(batch).values().backward(gradient)


def peak_nbytes() -> int:
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) * 1024


def main(device_type: str, way: str, tables: int, rows: int, columns: int, batch: int, pooling: int, distribution: str, threads: int,
         steps: int) -> None:
    torch.set_num_threads(threads)
    device = begin_on(device_type)
    samples = batch // dist.get_world_size()
    library, _, optimizer = way.partition("_")
    contender = (Torchrec(optimizer, tables, rows, columns, device) if library == "torchrec"
                 else EmbeddingBags(tables, rows, columns, device))
    batches = [contender.batch(distribution, rows, samples, pooling) for _ in range(4)]
    gradient = torch.randn(samples, tables * columns, device=device)
    seconds = []
    for step in range(steps):
        wait_for(device)
        begin = time.perf_counter()
        contender.step(batches[step % len(batches)], gradient)
        wait_for(device)
        seconds.append(time.perf_counter() - begin)
    if dist.get_rank() == 0:
        print(json.dumps({"seconds": seconds, "peak_nbytes": peak_nbytes() if device_type == "cpu" else torch.cuda.max_memory_allocated()}))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads can abort an ordinary exit of the interpreter


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:8]), sys.argv[8], *map(int, sys.argv[9:]))
