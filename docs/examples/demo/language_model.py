"""The model and the state that the demo trains, saves and loads again."""

import hashlib
import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

VOCABULARY = 4001  # odd, so that no world size splits the rows evenly
WIDTH = 192
DEPTH = 4
CONTEXT = 64


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, num_heads=4, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class LanguageModel(nn.Module):
    """A small transformer whose output projection is tied to its embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(WIDTH) for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.register_buffer("tokens_seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.tokens_seen += tokens.numel()
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def join_process_group():
    """Connects the processes that torchrun started on this machine, over the loopback interface."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return init_device_mesh("cpu", (dist.get_world_size(),))


def leave_process_group(exit_code: int = 0) -> None:
    """Ends this process by os._exit, because Gloo's threads can abort an ordinary exit of the interpreter."""
    dist.barrier()
    os._exit(exit_code)


def make_trainer(mesh, seed: int):
    """Returns a fully sharded model and its optimizer."""
    torch.manual_seed(seed)
    model = LanguageModel()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    return model, optimizer


def train_step(model, optimizer, step: int) -> float:
    """Runs one step on random tokens, different on each rank. Returns the loss."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    tokens = torch.randint(VOCABULARY, (4, CONTEXT + 1), generator=generator)
    logits = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def training_state(model, optimizer) -> dict:
    """Returns the nested state that torch.distributed.checkpoint saves and loads."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optim": optimizer_state}


def digests(state: dict) -> dict:
    """Returns a digest of every tensor, and every other value itself, by flattened key. All ranks must call it.

    The digest of a tensor has its dtype, its shape and the SHA-256 of the bytes of the whole tensor in row-major order.
    """
    flat, _ = flatten_state_dict(state)
    tensors, values = {}, {}
    for key in sorted(flat):
        leaf = flat[key]
        if isinstance(leaf, torch.Tensor):
            whole = leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
            raw = whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            tensors[key] = {
                "dtype": str(whole.dtype).removeprefix("torch."),
                "shape": list(whole.shape),
                "nbytes": raw.numel(),
                "sha256": hashlib.sha256(raw.numpy()).hexdigest(),
            }
        else:
            values[key] = json.loads(json.dumps(leaf))
    return {"tensors": tensors, "values": values}
