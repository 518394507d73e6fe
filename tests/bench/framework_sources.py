"""Writes the checkpoints that the benchmark `frameworks` moves. Needs the packages of the label interop-frameworks.

    python framework_sources.py verl|zero|megatron FOLDER LAYERS
"""

import argparse
import json
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "interop"))
from on_ranks import run_function  # noqa: E402

RANKS = 2
HIDDEN, INTERMEDIATE, VOCABULARY = 2048, 5632, 32000


def save_rank_of_verl(folder: Path, layers: int) -> None:
    """On each rank: saves a model as verl's FSDPCheckpointManager saves it. Rank 0 also writes the other files that verl's merger reads."""
    import torch.distributed as dist
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    dist.init_process_group("gloo")
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=layers,
                         num_attention_heads=32, num_key_value_heads=8, architectures=["LlamaForCausalLM"])
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.save(model.state_dict(), folder / f"model_world_size_{RANKS}_rank_{dist.get_rank()}.pt")
    if dist.get_rank() == 0:
        (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": RANKS}))
        config.save_pretrained(folder / "huggingface")
        words = Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
        PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(folder / "huggingface")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads can abort an ordinary exit


def save_rank_of_zero(folder: Path, layers: int) -> None:
    """On each rank: trains one step with ZeRO stage 2 in bfloat16, and saves."""
    import deepspeed

    torch.manual_seed(0)
    deepspeed.init_distributed("gloo")
    model = torch.nn.Sequential(*(torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(3 * layers)))
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2},
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.backward(engine(torch.ones(1, HIDDEN, dtype=torch.bfloat16)).float().square().sum())
    engine.step()
    engine.save_checkpoint(str(folder))
    sys.stdout.flush()
    os._exit(0)


def save_megatron(folder: Path, layers: int) -> None:
    """Saves two tensor ranks of a GPT in Megatron-LM's classic layout, in bfloat16 and without an optimizer."""
    for rank in range(RANKS):
        cut = {"embedding.word_embeddings.weight": [VOCABULARY // RANKS, HIDDEN], "output_layer.weight": [VOCABULARY // RANKS, HIDDEN],
               "decoder.final_layernorm.weight": [HIDDEN]}
        for layer in range(layers):
            name = f"decoder.layers.{layer}."
            cut |= {f"{name}input_layernorm.weight": [HIDDEN], f"{name}self_attention.linear_qkv.weight": [3 * HIDDEN // RANKS, HIDDEN],
                    f"{name}self_attention.linear_proj.weight": [HIDDEN, HIDDEN // RANKS], f"{name}pre_mlp_layernorm.weight": [HIDDEN],
                    f"{name}mlp.linear_fc1.weight": [INTERMEDIATE // RANKS, HIDDEN],
                    f"{name}mlp.linear_fc2.weight": [HIDDEN, INTERMEDIATE // RANKS]}
        torch.manual_seed(0)
        model = {name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in cut.items()}
        arguments = argparse.Namespace(tensor_model_parallel_size=RANKS, pipeline_model_parallel_size=1, num_layers=layers,
                                       hidden_size=HIDDEN, num_attention_heads=32, iteration=1, world_size=RANKS)
        file = folder / "iter_0000001" / f"mp_rank_{rank:02}" / "model_optim_rng.pt"
        file.parent.mkdir(parents=True)
        torch.save({"args": arguments, "checkpoint_version": 3.0, "iteration": 1, "model": model}, file)
    (folder / "latest_checkpointed_iteration.txt").write_text("1")


if __name__ == "__main__":
    what, target, number = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    target.mkdir(parents=True)
    if what == "megatron":
        save_megatron(target, number)
    else:
        run_function({"verl": save_rank_of_verl, "zero": save_rank_of_zero}[what], RANKS, target, number)
