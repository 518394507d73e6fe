"""Trains with accelerate's FSDP on the CPU, saves its state, and continues training.

Usage, on every rank: python accelerate_ranks.py FOLDER     (prints the losses of the three steps after the save)
accelerate uses FSDP only on GPUs; this program makes it believe that it has some.
"""

import json
import os
import sys
from pathlib import Path

import torch

os.environ["ACCELERATE_USE_CPU"] = "true"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from accelerate import Accelerator  # noqa: E402
from accelerate.state import PartialState  # noqa: E402
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin  # noqa: E402
from rank_files_peer import Model, train  # noqa: E402


class Progress:
    def state_dict(self):
        return {"epoch": 3}

    def load_state_dict(self, state):
        pass


def main(folder):
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", auto_wrap_policy="no_wrap",
                                            cpu_ram_efficient_loading=False)
    accelerator = Accelerator(fsdp_plugin=plugin)
    torch.manual_seed(7)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    accelerator.register_for_checkpointing(Progress())
    train(model, optimizer, 0, 3)
    accelerator.save_state(folder)
    print("\n" + json.dumps(train(model, optimizer, 3, 3)))
    accelerator.wait_for_everyone()
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads can abort an ordinary exit


if __name__ == "__main__":
    main(sys.argv[1])
