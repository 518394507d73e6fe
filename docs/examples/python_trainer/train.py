"""Trains a small language model on a text file with FSDP2 or HSDP. Saves in the background, and resumes on any number of ranks.

    torchrun --standalone --nproc-per-node 2 train.py CHECKPOINTS TEXT --steps 60
    torchrun --standalone --nproc-per-node 4 train.py CHECKPOINTS TEXT --steps 60 --hybrid
"""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tessera

LENGTH, BATCH, WIDTH, LAYERS, SAVE_EVERY = 32, 8, 256, 3, 10


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text):
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        x = self.bytes(text) + self.places(torch.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


def batch_of(text, step, rank, ranks):
    """Returns this rank's rows of the step's batch. The whole batch is the same for any number of ranks."""
    starts = torch.randint(len(text) - LENGTH - 1, (BATCH,), generator=torch.Generator().manual_seed(step))
    rows = torch.stack([text[start : start + LENGTH + 1] for start in starts[rank::ranks].tolist()])
    return rows[:, :-1], rows[:, 1:]


def newest(folder):
    """Returns the newest valid checkpoint, the same on all ranks; None if there is none. Prints what it skips."""
    path = [None]
    if dist.get_rank() == 0:
        found = tessera.latest_valid(folder)
        path = [found.path]
        for skipped in found.skipped:
            print(f"skipped {skipped.path}: {skipped.why}", flush=True)
    dist.broadcast_object_list(path)
    return path[0]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoints", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--hybrid", action="store_true", help="HSDP: two replicas, each sharded")
    parser.add_argument("--losses", type=Path, help="append a line of JSON for each step")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    who = f"{ranks} {'rank' if ranks == 1 else 'ranks'}, {'HSDP' if options.hybrid else 'FSDP2'}"
    if rank == 0:
        options.checkpoints.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", (ranks,))
    if options.hybrid:
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicas", "shards"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def state():
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optim": optimizer_state, "step": step}

    step = 0
    if (path := newest(options.checkpoints)) is not None:
        loaded = state()
        report = tessera.load(loaded, path)
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
        step = loaded["step"]
        if rank == 0:
            print(f"{who}: resumed {path}, saved by {report.world_size} ranks", flush=True)

    text = torch.tensor(list(options.text.read_bytes()))
    saving = None
    while step < options.steps:
        inputs, targets = batch_of(text, step, rank, ranks)
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        loss = loss.detach() / ranks
        dist.all_reduce(loss)
        if rank == 0 and options.losses:
            with options.losses.open("a") as file:
                file.write(json.dumps({"step": step, "loss": loss.item(), "by": who}) + "\n")
        if step % SAVE_EVERY == 0:
            saving = tessera.async_save(state(), options.checkpoints / f"step-{step}", keep_last=2)
    if saving is not None:
        saved = saving.result()
        if rank == 0:
            print(f"{who}: saved {saved.path}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
