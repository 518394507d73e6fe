"""Saves a small GPT with Megatron's dist_checkpointing on tensor-parallel ranks, or loads it and compares. On the CPU.

Usage, on every rank: python megatron_ranks.py save|load FOLDER
"""

import argparse
import sys
import warnings
from pathlib import Path

import torch

warnings.simplefilter("ignore")
SEED = 11


def gpt():
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.cuda.current_device = lambda: "cpu"  # Megatron puts its tensors on this device
    torch.cuda.synchronize = lambda *_: None
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=torch.distributed.get_world_size())
    torch.manual_seed(SEED)  # each rank makes the whole weights, and keeps its part
    config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, use_cpu_initialization=True,
                               tensor_model_parallel_size=torch.distributed.get_world_size(),
                               pipeline_dtype=torch.float32, gradient_accumulation_fusion=False)
    return GPTModel(config, get_gpt_layer_local_spec(), vocab_size=128, max_sequence_length=16)


def save(model, folder):
    from megatron.core import dist_checkpointing

    state = model.sharded_state_dict() | {"args": argparse.Namespace(lr=0.1, layers=2), "iteration": 7}
    dist_checkpointing.save(state, folder)


def load(model, folder):
    from megatron.core import dist_checkpointing

    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = dist_checkpointing.load(model.sharded_state_dict(), folder)
    assert state.pop("iteration") == 7 and state.pop("args").lr == 0.1
    model.load_state_dict(state, strict=False)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


if __name__ == "__main__":
    verb, folder = sys.argv[1:]
    Path(folder).mkdir(exist_ok=True)
    {"save": save, "load": load}[verb](gpt(), folder)
