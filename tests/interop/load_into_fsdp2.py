"""Loads a DCP checkpoint into a fresh FSDP2 model and AdamW, and writes down what they then hold.

Every rank of a test calls `load`.
"""

import sys

from ckpt_tools import MAKE

sys.path.insert(0, str(MAKE))
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from expect import flatten, write_expect  # noqa: E402
from ranks import whole  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from write_dcp import Model, adamw  # noqa: E402


def load(checkpoint, result):
    """Writes `<result>.expect.json`."""
    torch.manual_seed(99)  # other weights than those saved
    model = Model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optimizer_state}
    dcp.load(state, checkpoint_id=checkpoint)  # the default planner is strict about missing keys
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    model_state, optimizer_state = get_state_dict(model, optimizer)
    held = [(key, whole(leaf)) for key, leaf in flatten({"model": model_state, "optim": optimizer_state})]
    if dist.get_rank() == 0:
        write_expect(result, "dcp", held)

