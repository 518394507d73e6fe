"""Trains a small language model with FSDP2 and AdamW and saves it with PyTorch's distributed checkpoint.

    torchrun --standalone --nproc-per-node 4 train_fsdp2.py CHECKPOINT --digests DIGESTS.json
"""

import argparse
import json

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from language_model import (
    digests,
    join_process_group,
    leave_process_group,
    make_trainer,
    train_step,
    training_state,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", help="directory to write")
    parser.add_argument("--digests", required=True, help="JSON file to write the digest of every tensor to")
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()

    mesh = join_process_group()
    model, optimizer = make_trainer(mesh, seed=0)
    for step in range(arguments.steps):
        loss = train_step(model, optimizer, step)
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss:.4f} on rank 0", flush=True)

    state = training_state(model, optimizer)
    dcp.save(state, checkpoint_id=arguments.checkpoint)
    found = digests(state)
    if dist.get_rank() == 0:
        with open(arguments.digests, "w") as file:
            json.dump(found, file, indent=1)
        nbytes = sum(tensor["nbytes"] for tensor in found["tensors"].values())
        print(f"{dist.get_world_size()} ranks saved {len(found['tensors'])} tensors, {nbytes} bytes, "
              f"and {len(found['values'])} values", flush=True)
    leave_process_group()


if __name__ == "__main__":
    main()
