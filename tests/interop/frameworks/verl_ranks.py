"""A Llama trained by FSDP; verl's FSDPCheckpointManager saves and loads it, or verl's model merger makes one model of its files.

Usage, on each rank: python verl_ranks.py save|load FOLDER [fsdp2|hybrid|fsdp1]    (prints the losses of the three steps that follow)
                     python verl_ranks.py load-model|load-model-and-optimizer FOLDER    (the same, after verl loads only these)
Usage, in one process: python verl_ranks.py merge FOLDER DESTINATION
                       python verl_ranks.py merge-without-rounding FOLDER FILE
"""

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from verl_package import find_verl  # noqa: E402

find_verl()


def train(model, optimizer, first, number):
    losses = []
    for step in range(first, first + number):
        ids = torch.randint(0, 61, (2, 8), generator=torch.Generator().manual_seed(step))  # equal on all ranks
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def wrapped(model, strategy):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel
    from verl.utils.fsdp_utils import apply_fsdp2

    ranks = torch.distributed.get_world_size()
    if strategy == "hybrid":  # as verl with fsdp_size
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("ddp", "fsdp"))
    else:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
    if strategy == "fsdp1":
        return FullyShardedDataParallel(model, device_mesh=mesh, use_orig_params=False, device_id=torch.device("cpu"))
    apply_fsdp2(model, {"mesh": mesh}, {})
    return model


def on_rank(action, folder, strategy="fsdp2"):
    import torch.distributed as dist
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    dist.init_process_group("gloo")
    torch.manual_seed(7 if action == "save" else 8)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=61, hidden_size=16, intermediate_size=22, num_hidden_layers=2,
                                         num_attention_heads=2, num_key_value_heads=1, architectures=["LlamaForCausalLM"]))
    model = wrapped(model, strategy)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    words = Tokenizer(WordLevel({"[UNK]": 0, "one": 1, "two": 2}, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")  # the merger wants one
    contents = {"load-model": ["model"], "load-model-and-optimizer": ["model", "optimizer"]}.get(action)
    manager = FSDPCheckpointManager(model, optimizer, scheduler, tokenizer, {"load_contents": contents} if contents else None)
    if action == "save":
        train(model, optimizer, 0, 3)
        manager.save_checkpoint(folder, global_step=3)
    else:
        manager.load_checkpoint(folder)
    print("\n" + json.dumps(train(model, optimizer, 3, 3)))
    dist.barrier()
    dist.destroy_process_group()


def merge(folder, destination, *, rounds=True):
    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger

    merger = FSDPModelMerger(ModelMergerConfig("merge", "fsdp", target_dir=destination, local_dir=folder,
                                               hf_model_config_path=str(Path(folder) / "huggingface")))
    if not rounds:
        torch.Tensor.bfloat16 = lambda tensor: tensor
        merger.save_hf_model_and_tokenizer = lambda state: torch.save(state, destination)
    merger.merge_and_save()


if __name__ == "__main__":
    if sys.argv[1].startswith("merge"):
        merge(*sys.argv[2:], rounds=sys.argv[1] == "merge")
    else:
        on_rank(*sys.argv[1:])
