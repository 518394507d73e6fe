"""Moves with a recipe, against `cp` with sync: a Llama of 1.3 GB, and all names of DeepSeek-V3 with small tensors. Checks a recipe on 100,000 names."""

import json
import shutil
import struct
from pathlib import Path

from side_by_side import Contender, Result, compare, remove, run_once

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
HIDDEN, INTERMEDIATE, VOCABULARY, HEADS, KV_HEADS = 2048, 5632, 32000, 32, 8


def llama(num_layers: int) -> dict[str, list[int]]:
    """Returns names and shapes."""
    kv = HIDDEN // HEADS * KV_HEADS
    of_layer = {"self_attn.q_proj": [HIDDEN, HIDDEN], "self_attn.k_proj": [kv, HIDDEN], "self_attn.v_proj": [kv, HIDDEN],
                "self_attn.o_proj": [HIDDEN, HIDDEN], "mlp.gate_proj": [INTERMEDIATE, HIDDEN],
                "mlp.up_proj": [INTERMEDIATE, HIDDEN], "mlp.down_proj": [HIDDEN, INTERMEDIATE],
                "input_layernorm": [HIDDEN], "post_attention_layernorm": [HIDDEN]}
    shapes = {"model.embed_tokens.weight": [VOCABULARY, HIDDEN], "model.norm.weight": [HIDDEN],
              "lm_head.weight": [VOCABULARY, HIDDEN]}
    for layer in range(num_layers):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    return shapes


def deepseek_v3(num_layers: int) -> dict[str, list[int]]:
    """Returns all names of DeepSeek-V3 (61 layers, 256 experts), with shapes that are a 64th or less of the real ones."""
    hidden, dense, expert = 112, 288, 32
    attention = {"q_a_proj": [24, hidden], "q_b_proj": [384, 24], "kv_a_proj_with_mqa": [9, hidden], "kv_b_proj": [512, 8],
                 "o_proj": [hidden, 256], "q_a_layernorm": [24], "kv_a_layernorm": [8]}
    shapes = {"model.embed_tokens.weight": [2020, hidden], "model.norm.weight": [hidden], "lm_head.weight": [2020, hidden]}
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{norm}.weight": [hidden] for norm in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{prefix}self_attn.{name}.weight": shape for name, shape in attention.items()}
        mlps = {"mlp.": dense}
        if layer >= 3:
            shapes |= {f"{prefix}mlp.gate.weight": [256, hidden], f"{prefix}mlp.gate.e_score_correction_bias": [256]}
            mlps = {"mlp.shared_experts.": expert} | {f"mlp.experts.{number}.": expert for number in range(256)}
        for mlp, size in mlps.items():
            shapes |= {f"{prefix}{mlp}{part}_proj.weight": [hidden, size] if part == "down" else [size, hidden]
                       for part in ("gate", "up", "down")}
    return shapes


def write_model(folder: Path, shapes: dict[str, list[int]], *, is_sparse: bool = False) -> None:
    """Writes one safetensors file of bfloat16 tensors. Their bytes are noise; with `is_sparse`, a hole in the file."""
    folder.mkdir(parents=True)
    header, at = {}, 0
    for name, shape in shapes.items():
        end = at + 2 * (shape[0] * (shape[1] if len(shape) > 1 else 1))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    noise = bytes(range(256)) * 4096 + b"\x3f\x00\x01"
    with open(folder / "model.safetensors", "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        if is_sparse:
            out.truncate(8 + len(text) + at)
        else:
            for _ in range(at // len(noise)):
                out.write(noise)
            out.write(noise[:at % len(noise)])
    (folder / "config.json").write_text(json.dumps({
        "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}))


def bench(tools: Path, python: Path, work: Path, *, quick: bool) -> list[Result]:
    folder = work / "recipe"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    source, moved = folder / "llama", folder / "moved.safetensors"
    write_model(source, llama(1 if quick else 11))
    turned = folder / "turned.json"
    turned.write_text(json.dumps({"schema": 1, "rest": "keep", "rules": [
        {"from": "{x:*}_proj.weight", "to": "{x:*}_proj.turned", "ops": [{"transpose": [0, 1]}]},
        {"from": ["model.embed_tokens.weight", "lm_head.weight"], "to": ["embed.turned", "head.turned"],
         "ops": [{"concat": 1}, {"transpose": [0, 1]}, {"split": 0}]}]}))

    def move(name: str, *options: object) -> Contender:
        command = [tools / "ckpt-reshard", "--quiet", source, moved, "--to", "safetensors", "--extra-files", "leave", *options]
        return Contender(name, command, prepare=remove(moved))

    nbytes = (source / "model.safetensors").stat().st_size
    copy = ["sh", "-c", 'cp "$1" "$2" && sync "$2"', "copy", source / "model.safetensors", moved]
    results = compare(f"bfloat16 safetensors, {nbytes / 1e9:.2g} GB", [
        Contender("cp and sync", copy, prepare=remove(moved)),
        move("ckpt-reshard"),
        move("ckpt-reshard, hf-to-megatron-llama", "--recipe", RECIPES / "hf-to-megatron-llama.json"),
        move("ckpt-reshard, hf-to-meta-llama", "--recipe", RECIPES / "hf-to-meta-llama.json"),
        move("ckpt-reshard, all tensors transposed", "--recipe", turned),
    ], rounds=2 if quick else 7)
    shutil.rmtree(source)
    num_layers = 4 if quick else 61
    write_model(source, deepseek_v3(num_layers))
    (source / "config.json").write_text(json.dumps({"num_hidden_layers": num_layers}))
    results += compare(f"DeepSeek-V3 in small, {len(deepseek_v3(num_layers)):,} names", [
        Contender("cp and sync", copy, prepare=remove(moved)),
        move("ckpt-reshard, hf-to-megatron-deepseek-v3", "--recipe", RECIPES / "hf-to-megatron-deepseek-v3.json"),
    ], rounds=2 if quick else 7)
    shutil.rmtree(source)
    many, num_layers = folder / "many", 110 if quick else 11_111
    write_model(many, {name: [16, 8] if len(shape) > 1 else [8] for name, shape in llama(num_layers).items()}, is_sparse=True)
    results += compare(f"{len(llama(num_layers)):,} names", [
        Contender("ckpt-inspect ls", [tools / "ckpt-inspect", "ls", many]),
        Contender("ckpt-inspect recipe check", [tools / "ckpt-inspect", "recipe", "check",
                                                RECIPES / "hf-to-megatron-llama.json", many,
                                                "--set", "heads=8", "--set", "kv_heads=8", "--set", "head_dim=2"]),
    ], rounds=2 if quick else 7)
    run_once(["sync"])
    shutil.rmtree(folder)
    return results
