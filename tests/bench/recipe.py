"""Moving 1.3 GB with a recipe, against `cp` with sync; proving a recipe on 100,000 names."""

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


def write_model(folder: Path, shapes: dict[str, list[int]], *, is_sparse: bool = False) -> None:
    """Writes bfloat16 tensors of noise, or of a hole in the file, as one safetensors file."""
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
        move("ckpt-reshard, hf-to-torchtitan-llama", "--recipe", RECIPES / "hf-to-torchtitan-llama.json"),
        move("ckpt-reshard, all tensors transposed", "--recipe", turned),
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
