"""Trains one step with DeepSpeed's ZeRO 1 on the CPU and saves.

Usage, on every rank: python deepspeed_ranks.py FOLDER
"""

import sys

import deepspeed
import torch

if __name__ == "__main__":
    torch.manual_seed(5)
    deepspeed.init_distributed("gloo")
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    config = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1},
              "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.backward(engine(torch.ones(2, 6, dtype=torch.bfloat16)).float().square().sum())
    engine.step()
    engine.save_checkpoint(sys.argv[1])
