"""Loads a DCP of a Llama and AdamW's state into FSDP2, and compares what the ranks hold with a file of torch.save.

Usage, on each rank: python llama_ranks.py CHECKPOINT CONFIG_FOLDER HELD
HELD has {"model": {name: tensor}, "optim": {name: {"exp_avg": …, "exp_avg_sq": …, "step": …}}}.
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def main(checkpoint, config, held):
    dist.init_process_group("gloo")
    torch.manual_seed(99)  # other weights than those saved
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": {"state": optimizer_state["state"]}}
    # lm_head.weight is the embedding; Hugging Face's files have it once.
    dcp.load(state, checkpoint_id=checkpoint, planner=DefaultLoadPlanner(allow_partial_load=True))
    state["model"]["lm_head.weight"] = state["model"]["model.embed_tokens.weight"]
    set_state_dict(model, optimizer, model_state_dict=state["model"],
                   optim_state_dict=optimizer_state | {"state": state["optim"]["state"]})
    expected = torch.load(held)
    for name, tensor in model.state_dict().items():
        assert torch.equal(whole(tensor), expected["model"][name]), name
    parameters = dict(model.named_parameters())
    assert parameters.keys() == expected["optim"].keys()
    for name, state in expected["optim"].items():
        for key, tensor in state.items():
            assert torch.equal(whole(optimizer.state[parameters[name]][key]), tensor), (name, key)


if __name__ == "__main__":
    main(*sys.argv[1:])
