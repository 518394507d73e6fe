"""Converts names and shapes with a recipe, and for comparison with the converters of transformers and mbridge. On the CPU.

    PYTHONPATH=PACKAGES python tests/bench/recipe_peers.py TOOLS FOLDER

TOOLS: the folder of ckpt-reshard. PACKAGES: what `tools/dev test --label interop-models` fetched, and mbridge
(`pip install --no-deps --target mbridge mbridge==0.15.1`). Both ways end with a file of torch.save, synced; the script
fails if their tensors differ.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from recipe import HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, RECIPES, VOCABULARY, llama, write_model
from side_by_side import Contender, compare, remove

EXPERTS = 8
LAYERS = {"llama": 11, "mixtral": 4}


def mixtral() -> dict[str, list[int]]:
    """Returns names and shapes, as version 4 of transformers has them."""
    shapes = {name: shape for name, shape in llama(LAYERS["mixtral"]).items() if ".mlp." not in name}
    for layer in range(LAYERS["mixtral"]):
        moe = f"model.layers.{layer}.block_sparse_moe."
        shapes[moe + "gate.weight"] = [EXPERTS, HIDDEN]
        for expert in range(EXPERTS):
            for name, shape in (("w1", [INTERMEDIATE // 4, HIDDEN]), ("w2", [HIDDEN, INTERMEDIATE // 4]), ("w3", [INTERMEDIATE // 4, HIDDEN])):
                shapes[f"{moe}experts.{expert}.{name}.weight"] = shape
    return shapes


def write_config(folder: Path, kind: str) -> None:
    config = {"model_type": kind, "architectures": [{"llama": "LlamaForCausalLM", "mixtral": "MixtralForCausalLM"}[kind]],
              "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": VOCABULARY,
              "num_hidden_layers": LAYERS[kind], "torch_dtype": "bfloat16", "rms_norm_eps": 1e-6, "head_dim": HIDDEN // HEADS,
              "intermediate_size": INTERMEDIATE if kind == "llama" else INTERMEDIATE // 4, "tie_word_embeddings": False}
    if kind == "mixtral":
        config["num_local_experts"] = EXPERTS
    (folder / "config.json").write_text(json.dumps(config))


def save(state: dict, path: str) -> None:
    import torch

    torch.save(state, path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def convert_with_transformers(source: str, path: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    save(AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).state_dict(), path)


def convert_with_mbridge(source: str, path: str) -> None:
    """Loads the weights into modules that have the parameters of Megatron's GPTModel with TransformerEngine."""
    import torch
    from mbridge import AutoBridge
    from megatron.core import parallel_state

    def parameter(*shape: int) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.empty(*shape, dtype=torch.bfloat16), requires_grad=False)

    def module(**members: object) -> torch.nn.Module:
        made = torch.nn.Module()
        for name, member in members.items():
            setattr(made, name, member)
        return made

    def layer(number: int) -> torch.nn.Module:
        rows = HIDDEN + 2 * KV_HEADS * (HIDDEN // HEADS)
        attention = module(linear_qkv=module(weight=parameter(rows, HIDDEN), layer_norm_weight=parameter(HIDDEN)),
                           linear_proj=module(weight=parameter(HIDDEN, HIDDEN)))
        mlp = module(linear_fc1=module(weight=parameter(2 * INTERMEDIATE, HIDDEN), layer_norm_weight=parameter(HIDDEN)),
                     linear_fc2=module(weight=parameter(HIDDEN, INTERMEDIATE)))
        return module(self_attention=attention, mlp=mlp, layer_number=number)

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    bridge = AutoBridge.from_pretrained(source)
    layers = torch.nn.ModuleList(layer(i + 1) for i in range(LAYERS["llama"]))
    model = module(config=bridge.config, embedding=module(word_embeddings=module(weight=parameter(VOCABULARY, HIDDEN))),
                   decoder=module(layers=layers, final_layernorm=module(weight=parameter(HIDDEN))),
                   output_layer=module(weight=parameter(VOCABULARY, HIDDEN)))
    bridge.load_weights([model], source)
    save(model.state_dict(), path)


PEERS = {"transformers": convert_with_transformers, "mbridge": convert_with_mbridge}


def tensors_of(path: Path) -> dict[str, object]:
    """Returns tensors, as int16, by Megatron's names without TransformerEngine, which puts norms into linear layers."""
    import torch

    new_names = {"self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
                 "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight"}
    found = {}
    for name, tensor in torch.load(path, mmap=True).items():
        for old, new in new_names.items():
            name = name.replace(old, new)
        found[name] = tensor.view(torch.int16)
    return found


def require_equal(one: Path, other: Path) -> None:
    import torch

    ours, theirs = tensors_of(one), tensors_of(other)
    if ours.keys() != theirs.keys() or not all(torch.equal(ours[name], theirs[name]) for name in ours):
        raise SystemExit(f"{one} and {other} differ: {sorted(ours.keys() ^ theirs.keys())[:4]}")


def main(tools: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for kind, peer, recipe in (("llama", "mbridge", "hf-to-megatron-llama"), ("mixtral", "transformers", "transformers-v4-to-v5-mixtral")):
        source, ours, theirs = folder / kind, folder / "ours.pt", folder / "theirs.pt"
        write_model(source, llama(LAYERS[kind]) if kind == "llama" else mixtral())
        write_config(source, kind)
        nbytes = (source / "model.safetensors").stat().st_size
        convert = [tools / "ckpt-reshard", "--quiet", source, ours, "--recipe", RECIPES / f"{recipe}.json", "--extra-files", "leave"]
        for result in compare(f"{kind}, bfloat16, {nbytes / 1e9:.2g} GB", [
                Contender(peer, [sys.executable, __file__, peer, source, theirs], prepare=remove(theirs)),
                Contender(f"ckpt-reshard, {recipe}", convert, prepare=remove(ours))], rounds=3):
            print(f"{result.benchmark:32} {result.name:46} {result.median:7.2f} s {result.peak_nbytes / 2**20:7.0f} MiB "
                  f"{result.ratio or 1:6.2f}", flush=True)
        subprocess.run([sys.executable, __file__, "require-equal", ours, theirs], check=True)  # in a process of its own, so that this one stays small
        subprocess.run(["rm", "-r", source, ours, theirs], check=True)


if __name__ == "__main__":
    if sys.argv[1] == "require-equal":
        require_equal(Path(sys.argv[2]), Path(sys.argv[3]))
    elif sys.argv[1] in PEERS:
        PEERS[sys.argv[1]](*sys.argv[2:])
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
