"""Does in Python what the tools do, in code as short and fast as possible. Each way is a command.

    peers.py list-dcp|list-torch|list-safetensors|list-safetensors-header PATH
    peers.py dcp-to-safetensors|dcp-to-torch|torch-to-dcp SRC DST
"""

import json
import os
import struct
import sys


def list_dcp(path: str) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    for name, entry in FileSystemReader(path).read_metadata().state_dict_metadata.items():
        print(name, getattr(entry, "size", ""))


def list_torch(path: str) -> None:
    import torch

    def walk(prefix: str, node) -> None:
        for name, child in node.items():
            walk(f"{prefix}{name}.", child) if isinstance(child, dict) else print(prefix + name, child.shape)

    walk("", torch.load(path, mmap=True, weights_only=True))


def list_safetensors(path: str) -> None:
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        for name in file.keys():
            print(name, file.get_slice(name).get_shape())


def list_safetensors_header(path: str) -> None:
    with open(path, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    for name, entry in header.items():
        print(name, entry.get("shape", ""))


def dcp_to_safetensors(source: str, destination: str) -> None:
    import torch
    from safetensors.torch import save_file
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict = {}  # does what dcp_to_torch_save does, but writes no torch.save file
    _load_state_dict(state, storage_reader=FileSystemReader(source), planner=_EmptyStateDictLoadPlanner(),
                     no_dist=True)
    flat: dict[str, torch.Tensor] = {}

    def walk(prefix: str, node) -> None:
        for name, child in node.items():
            if isinstance(child, dict):
                walk(f"{prefix}{name}.", child)
            elif isinstance(child, torch.Tensor):
                flat[prefix + name] = child

    walk("", state)
    save_file(flat, destination)
    sync(destination)


def dcp_to_torch(source: str, destination: str) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(source, destination)
    sync(destination)


def torch_to_dcp(source: str, destination: str) -> None:
    from torch.distributed.checkpoint.format_utils import torch_save_to_dcp

    torch_save_to_dcp(source, destination)  # syncs by itself


def sync(path: str) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


if __name__ == "__main__":
    ways = {"list-dcp": list_dcp, "list-torch": list_torch, "list-safetensors": list_safetensors,
            "list-safetensors-header": list_safetensors_header, "dcp-to-safetensors": dcp_to_safetensors,
            "dcp-to-torch": dcp_to_torch, "torch-to-dcp": torch_to_dcp}
    ways[sys.argv[1]](*sys.argv[2:])
