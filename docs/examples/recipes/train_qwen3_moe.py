"""Trains a tiny Qwen3-MoE for two steps with Adam. Saves the model and Adam's moments, with the names of transformers 4.

Usage: python train_qwen3_moe.py FOLDER
"""

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

CONFIG = {"model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
HIDDEN, HEADS, KV_HEADS, HEAD_DIM = (CONFIG[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads",
                                                             "head_dim"))


def linear(columns: int, rows: int) -> nn.Linear:
    return nn.Linear(columns, rows, bias=False)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (linear(HIDDEN, count * HEAD_DIM) for count in (HEADS, KV_HEADS, KV_HEADS))
        self.o_proj = linear(HEADS * HEAD_DIM, HIDDEN)
        self.q_norm, self.k_norm = nn.RMSNorm(HEAD_DIM), nn.RMSNorm(HEAD_DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotated(self.q_norm(q)), rotated(self.k_norm(k))
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(found.transpose(1, 2).flatten(2))


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding: rotates each pair of elements i and i + HEAD_DIM / 2 by an angle for the position."""
    angles = torch.arange(x.shape[-2])[:, None] / 1e6 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    first, second = x.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        inner = CONFIG["moe_intermediate_size"]
        self.gate_proj, self.up_proj, self.down_proj = linear(HIDDEN, inner), linear(HIDDEN, inner), linear(inner, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = linear(HIDDEN, CONFIG["num_experts"])
        self.experts = nn.ModuleList(Expert() for _ in range(CONFIG["num_experts"]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(CONFIG["num_experts_per_tok"])
        weights = weights / weights.sum(-1, keepdim=True)
        share = torch.zeros(*x.shape[:-1], len(self.experts)).scatter(-1, chosen, weights)
        return sum(share[..., i, None] * expert(x) for i, expert in enumerate(self.experts))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(), Experts()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(CONFIG["vocab_size"], HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(CONFIG["num_hidden_layers"]))
        self.norm = nn.RMSNorm(HIDDEN)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.lm_head = Body(), linear(HIDDEN, CONFIG["vocab_size"])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(self.model.norm(x))


def main(folder: Path) -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    ids = torch.arange(64)[None] * 5 % CONFIG["vocab_size"]
    for step in range(2):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(ids)[0, :-1], ids[0, 1:])
        loss.backward()
        optimizer.step()
        print(f"step {step + 1}: loss {loss.item():.4f}")
    names = [name for name, _ in model.named_parameters()]
    state = {names[number]: of for number, of in optimizer.state_dict()["state"].items()}
    folder.mkdir(parents=True)
    torch.save({"model": model.state_dict(), "optim": {"state": state}}, folder / "step2.pt")
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
