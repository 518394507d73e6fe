"""Loads a checkpoint into a freshly built FSDP2 model and optimizer and compares it with what was saved.

    torchrun --standalone --nproc-per-node 2 load_fsdp2.py CHECKPOINT --digests DIGESTS.json

Ends with exit code 1 if any tensor or value differs from DIGESTS.json.
"""

import argparse
import json

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.state_dict import set_state_dict

from language_model import (
    digests,
    join_process_group,
    leave_process_group,
    make_trainer,
    train_step,
    training_state,
)


def differences(expected: dict, found: dict) -> list[str]:
    """Returns one line for every leaf that is missing, unexpected or different."""
    lines = []
    for kind in ("tensors", "values"):
        for key in sorted(expected[kind].keys() | found[kind].keys()):
            here = (expected[kind].get(key, "nothing"), found[kind].get(key, "nothing"))
            if here[0] != here[1]:
                lines.append(f"{key}: expected {here[0]}, found {here[1]}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", help="directory to read")
    parser.add_argument("--digests", required=True, help="JSON file that train_fsdp2.py wrote")
    arguments = parser.parse_args()

    mesh = join_process_group()
    model, optimizer = make_trainer(mesh, seed=1)  # another seed: nothing is equal by chance
    state = training_state(model, optimizer)
    dcp.load(state, checkpoint_id=arguments.checkpoint, planner=DefaultLoadPlanner(allow_partial_load=False))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])

    stored = FileSystemReader(arguments.checkpoint).read_metadata().state_dict_metadata
    found = digests(training_state(model, optimizer))
    loss = train_step(model, optimizer, step=3)
    exit_code = 0
    if dist.get_rank() == 0:
        with open(arguments.digests) as file:
            expected = json.load(file)
        lines = differences(expected, found)
        surplus = stored.keys() - expected["tensors"].keys() - expected["values"].keys()
        lines += [f"{key}: in the checkpoint, but train_fsdp2.py did not save it" for key in sorted(surplus)]
        for line in lines:
            print(line)
        exit_code = 1 if lines else 0
        equal = "every one equal" if not lines else f"{len(lines)} differ"
        print(f"{dist.get_world_size()} ranks loaded {len(found['tensors'])} tensors and "
              f"{len(found['values'])} values: {equal}", flush=True)
        print(f"step 4: loss {loss:.4f} on rank 0", flush=True)
    leave_process_group(exit_code)


if __name__ == "__main__":
    main()
