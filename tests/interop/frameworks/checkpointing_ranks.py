"""A trainer with FSDP2 that saves with torch_checkpointing, and one that resumes from a distributed checkpoint.

Usage, on each rank: python checkpointing_ranks.py save FOLDER numbers|names
                     python checkpointing_ranks.py load DCP        (both print the losses of three steps)
`save` writes FOLDER/1 and FOLDER/2: the package writes `metadata.pkl` only into the first folder of a manager that saves
synchronously. It gathers its metadata with CUDA; here Gloo does it.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from rank_files_peer import Model, train  # noqa: E402


def manager():
    from torch_checkpointing import CheckpointManager, DefaultMetadataManager, ItemSpec, SyncCheckpointSaverConfig
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    def gather(self, data, process_group=None):
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, data)
        return dict(enumerate(parts))

    DefaultMetadataManager._all_gather_pickled_data = gather
    spec = ItemSpec(resharder=DefaultResharder())
    return CheckpointManager.Config(items={"model": spec, "optimizer": spec}, save=SyncCheckpointSaverConfig(),
                                    storage_config=LocalFileSystemStorageConfig(use_direct_io=False)).build()


def save(model, optimizer, folder, form):
    from torch_checkpointing import optimizer_transform_pre

    train(model, optimizer, 0, 3)
    state = optimizer.state_dict()
    state = {"model": model.state_dict(), "optimizer": optimizer_transform_pre(state) if form == "names" else state,
             "step": 3, "rng": torch.get_rng_state() + dist.get_rank()}
    saver = manager()
    for step in ("1", "2"):
        saver.save(f"{folder}/{step}", state)
    saver.close()


def load(model, optimizer, source):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optimizer_state}
    dcp.load(state, checkpoint_id=source, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert optimizer.param_groups[0]["lr"] == 1e-2


def main(action, folder, *form):
    dist.init_process_group("gloo")
    torch.manual_seed(7 if action == "save" else 8)
    model = Model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.named_parameters(), 1e-2 if action == "save" else 1.0)
    (save if action == "save" else load)(model, optimizer, folder, *form)
    print(json.dumps(train(model, optimizer, 3, 3)))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads can abort an ordinary exit


if __name__ == "__main__":
    main(*sys.argv[1:])
