"""Begins a training that resume_anywhere can resume, with DeepSpeed's ZeRO 3: the same model, text and schedule.

    torchrun --nproc-per-node 2 begin_deepspeed.py RUN TEXT... --steps 120 --save-at 40
"""

import argparse
import json
import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks on this machine

import deepspeed  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from go_on_fsdp2 import Text, Transformer  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="directory to save in")
    parser.add_argument("files", nargs="+", help="the text")
    parser.add_argument("--steps", type=int, default=120, help="number of the last step (default: 120)")
    parser.add_argument("--save-at", type=int, help="save after this step")
    parser.add_argument("--losses", help="append a line of JSON for each step to a file")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", verbose=False)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    who = f"DeepSpeed, {world_size} ranks, ZeRO 3"
    text = Text(arguments.files)
    torch.manual_seed(0)
    model = Transformer(text.vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=40, gamma=0.5)
    config = {"train_micro_batch_size_per_gpu": 16 // world_size, "gradient_clipping": 1.0,
              "zero_optimization": {"stage": 3}, "zero_allow_untested_optimizer": True,
              "zero_force_ds_cpu_optimizer": False, "steps_per_print": 1 << 30}
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)

    losses = open(arguments.losses, "a") if arguments.losses and rank == 0 else None
    for step in range(1, arguments.steps + 1):
        rows = text.batch(step).chunk(world_size)[rank]
        logits = engine(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        engine.backward(loss)
        engine.step()  # clips, and steps optimizer and scheduler

        mean = loss.detach() / world_size
        dist.all_reduce(mean)
        if losses:
            print(json.dumps({"step": step, "loss": mean.item(), "by": who}), file=losses, flush=True)
        if rank == 0 and step % 10 == 0:
            print(f"{who}: step {step}, loss {mean.item():.6f}", flush=True)
        if step == arguments.save_at:
            # go_on_fsdp2.py and resume_anywhere need these values in addition to model and optimizer.
            engine.save_checkpoint(arguments.run, client_state={"step": step, "scheduler": {"last_epoch": step}})
            if rank == 0:
                print(f"{who}: saved {arguments.run}/global_step{step}", flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads can abort an ordinary interpreter exit


if __name__ == "__main__":
    main()
