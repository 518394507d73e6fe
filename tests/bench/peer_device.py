"""The device on which the peers train, as device.h is for Tessera's programs."""

import os

import torch
import torch.distributed as dist


def begin_on(device_type: str) -> torch.device:
    """Connects the ranks that torchrun has started. Returns this rank's device. Collective."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)
    if device_type == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device(device_type, int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def wait_for(device: torch.device) -> None:
    """Waits until the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
