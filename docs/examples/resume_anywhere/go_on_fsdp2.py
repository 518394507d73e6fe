"""Resumes with PyTorch's FSDP2, on the same text, from a checkpoint that resume_anywhere saved in PyTorch's own format.

    torchrun --nproc-per-node 2 go_on_fsdp2.py CHECKPOINT TEXT... --steps 120 --save checkpoints/step-120
"""

import argparse
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WIDTH, LAYERS, HEADS, SEQUENCE = 128, 4, 4, 64
ROWS = 16  # of the batch of all ranks


class Block(nn.Module):
    """The model of train_transformer/model.h in Python. Checkpoints fit because the parameters have the same names."""

    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, _ = x.shape
        q, k, v = self.qkv(x).view(batch, sequence, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(batch, sequence, -1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, vocabulary: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.position = nn.Parameter(torch.zeros(SEQUENCE, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.position[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Text:
    """Gives characters the same numbers, and steps the same batches, as train_transformer/text.h."""

    STRIDE = 2_654_435_761

    def __init__(self, files: list[str]):
        characters = b"".join(Path(file).read_bytes() for file in files)
        distinct = sorted(set(characters))
        number_of = {character: number for number, character in enumerate(distinct)}
        self.vocabulary = len(distinct)
        self.ids = torch.tensor([number_of[character] for character in characters])

    def batch(self, step: int) -> torch.Tensor:
        """Returns the whole batch of a step. Each row has one character more, for the targets."""
        num_places = len(self.ids) - SEQUENCE
        begins = [(step * ROWS + row) * self.STRIDE % num_places for row in range(ROWS)]
        return torch.stack([self.ids[begin : begin + SEQUENCE + 1] for begin in begins])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", help="directory of the checkpoint to resume from")
    parser.add_argument("files", nargs="+", help="the text")
    parser.add_argument("--steps", type=int, default=120, help="number of the last step (default: 120)")
    parser.add_argument("--save", help="directory to save in at the end")
    parser.add_argument("--losses", help="append a line of JSON for each step to a file")
    arguments = parser.parse_args()

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks on this machine
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    who = f"PyTorch, {world_size} ranks, FSDP2"

    text = Text(arguments.files)
    model = Transformer(text.vocabulary)
    mesh = init_device_mesh("cpu", (world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4)

    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optimizer_state, "scheduler": {"last_epoch": 0}, "step": 0}
    dcp.load(state, checkpoint_id=arguments.checkpoint)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    # Create the scheduler after loading, because it adds a field to the optimizer's groups that C++ does not have.
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=40, gamma=0.5)
    scheduler.load_state_dict(state["scheduler"])
    if rank == 0:
        print(f"{who}: resumes from {arguments.checkpoint}, step {state['step']}", flush=True)

    losses = open(arguments.losses, "a") if arguments.losses and rank == 0 else None
    for step in range(state["step"] + 1, arguments.steps + 1):
        rows = text.batch(step).chunk(world_size)[rank]
        logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

        mean = loss.detach() / world_size
        dist.all_reduce(mean)
        if losses:
            print(json.dumps({"step": step, "loss": mean.item(), "by": who}), file=losses, flush=True)
        if rank == 0 and step % 10 == 0:
            print(f"{who}: step {step}, loss {mean.item():.6f}", flush=True)

    if arguments.save:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        scheduler_state = {"last_epoch": scheduler.last_epoch}
        dcp.save({"model": model_state, "optim": optimizer_state, "scheduler": scheduler_state,
                  "step": arguments.steps}, checkpoint_id=arguments.save)
        if rank == 0:
            print(f"{who}: saved {arguments.save}", flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads can abort an ordinary interpreter exit


if __name__ == "__main__":
    main()
