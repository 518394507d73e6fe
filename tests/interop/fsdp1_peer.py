"""Trains a transformer with PyTorch's FSDP1 (use_orig_params=True) and writes what the run was like, on one rank.

tests/runtime/parity/fsdp_parity.cpp does the same with fully_shard.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))
from peers_train_step import Block, Transformer  # noqa: E402


def name_of(handle: FlatParamHandle, root: torch.nn.Module) -> str:
    for name, module in root.named_modules():
        if module is handle._fully_sharded_module:
            return clean_tensor_name(name + ".").rstrip(".")
    raise LookupError("a handle of no module")


def train(source: str, output: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    values = load_file(source)
    ids = values.pop("ids")
    vocabulary, width = values["embedding.weight"].shape
    model = Transformer(vocabulary, width, 3, 2, ids.shape[2] - 1)
    model.load_state_dict(values)
    model = Fsdp(model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True,
                 device_id=torch.device("cpu"), backward_prefetch=None)

    units = []
    for module in Fsdp.fsdp_modules(model):
        flat = module._handle.flat_param
        offsets, position = [], 0
        for numel, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask):
            if not is_padding:
                offsets.append(position)
            position += numel
        units.append({"name": name_of(module._handle, model), "fqns": list(flat._fqns), "offsets": offsets,
                      "sharded_numel": flat._sharded_size.numel()})
    shards = {clean_tensor_name(name): p.detach().flatten().tolist() for name, p in model.named_parameters()}

    order: list[str] = []
    unshard = FlatParamHandle.unshard

    def recording(handle: FlatParamHandle) -> None:
        if handle.needs_unshard():
            order.append(name_of(handle, model))
        unshard(handle)

    FlatParamHandle.unshard = recording
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses, norms = [], []
    for batch in ids:
        order.clear()
        rows = batch.chunk(dist.get_world_size())[dist.get_rank()]
        logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        norms.append(model.clip_grad_norm_(0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    Path(f"{output}{dist.get_rank()}.json").write_text(json.dumps(
        {"units": units, "shards": shards, "order": order, "losses": losses, "norms": norms}))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads can abort an ordinary interpreter exit
