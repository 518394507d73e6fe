"""Reads checkpoints with torch, DCP, safetensors and h5py, by the pages of docs/formats."""

import collections
import json
import re
from pathlib import Path

import h5py
import hdf5plugin  # noqa: F401  (zstd)
import numpy as np
import torch
from differences import bytes_of, exact, memory_of, plainer, remade, spelled, tensors_of
from python_package import tessera
from safetensors import safe_open
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.tensor import DTensor

RANK_FILE = re.compile(r"(?:(model|optim|extra_state)_)?world_size_(\d+)_rank_(\d+)\.pt|rank(\d+)\.pt")


def items_of(document):
    """Returns the pairs of a JSON object, which is `$dict` if one of its keys begins with a dollar."""
    return [tuple(pair) for pair in document["$dict"]] if set(document) == {"$dict"} else list(document.items())


def texts_of(path):
    """Returns the texts beside the tensors of a safetensors file or folder that Tessera wrote."""
    index, texts = path / "model.safetensors.index.json", {}
    if index.exists():
        texts |= {key: text for key, text in json.loads(index.read_text())["metadata"].items() if key != "total_size"}
    for file in safetensors_files(path):
        with safe_open(file, "pt") as opened:
            texts |= opened.metadata() or {}
    moved = dict(items_of(json.loads(texts.get("tessera.texts", "{}"))))
    return {key: texts[key] for key in texts if key != "format" and not key.startswith("tessera.")} | moved


def safetensors_files(path):
    index = path / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"].values() if index.exists() else ["model.safetensors"]
    return [path] if path.is_file() else sorted({path / name for name in names})


def load_safetensors(path):
    """Returns the state dict by Tessera, after safetensors has found the same bytes of each tensor that is stored."""
    state = opened_state(path)
    tensors = tensors_of(state)
    for file in safetensors_files(path):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():
                assert same_tensor(opened.get_tensor(name), tensors[name]), f"safetensors reads {name!r} otherwise"
    return state


def opened_state(path):
    with tessera.open(path) as opened:
        return opened.state_dict()


def load_dcp(path):
    state = {}
    _load_state_dict(state, storage_reader=FileSystemReader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return state


def load_native(path):
    """Returns the state dict by Tessera, after h5py has found the same bytes of each tensor."""
    state = opened_state(path)
    with h5py.File(path / "index.h5") as index:
        for name, tensor in tensors_of(state).items():
            if name in ("", ".", "..", "~tessera") or set(name) & {"/", "\0"} or name not in index:
                continue  # a name that HDF5 cannot have
            assert np.ascontiguousarray(index[name][()]).tobytes() == bytes_of(tensor), f"h5py reads {name!r} otherwise"
            assert index[name].attrs["dtype"].decode() == str(tensor.dtype).removeprefix("torch."), name
    return state


def load_rank_files(path):
    state = RankFiles(path).state
    return {} if state == {"model": {}} else state  # an empty state dict


def same_tensor(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and bytes_of(a) == bytes_of(b)


def load(path, format):
    """Returns the state dict of a checkpoint. All tensors, and what PyTorch can load, are read without Tessera."""
    return {"torch": lambda path: torch.load(path, weights_only=True), "dcp": load_dcp, "native": load_native,
            "safetensors": load_safetensors, "rank_files": load_rank_files}[format](path)


def merged(a, b):
    """Returns the union of two nested dicts."""
    both = isinstance(a, dict) and isinstance(b, dict)
    return {**a, **b, **{key: merged(a[key], b[key]) for key in a.keys() & b.keys()}} if both else b


class RankFiles:
    """Joins what the ranks saved. Values that differ between ranks are in `per_rank` (docs/formats/rank_files.md)."""

    def __init__(self, path):
        ranks, kinds = collections.defaultdict(dict), set()
        for file, match in ((file, RANK_FILE.fullmatch(file.name)) for file in sorted(Path(path).iterdir())):
            if match:
                loaded = torch.load(file, weights_only=False)
                ranks[int(match[3] or match[4])] |= {match[1]: loaded} if match[1] else loaded
                kinds.add(match[1])
        self.per_rank, self.whole = {}, {}
        self.state = self.join(dict(sorted(ranks.items())), ())
        if self.per_rank:
            self.state["per_rank"] = merged(self.state.get("per_rank", {}), self.per_rank)
        if len(kinds) > 1:
            keys = sorted(self.state, key=lambda key: (not isinstance(key, str), spelled(key)))
            self.state = {key: self.state[key] for key in keys}

    def join(self, values, path):
        """Joins {rank: value} of one key path."""
        listed, first = list(values.values()), next(iter(values.values()))
        if any(isinstance(value, DTensor) for value in listed):
            return self.join_dtensors(values)
        if all(isinstance(value, dict) for value in listed):
            return self.join_dicts(values, path)
        is_list = isinstance(first, (list, tuple)) and all(type(value) is type(first) for value in listed)
        if is_list and len({len(value) for value in listed}) == 1 and any(
                isinstance(item, (torch.Tensor, dict, list, tuple)) for item in first):
            return type(first)([self.join({r: v[i] for r, v in values.items()}, (*path, i)) for i in range(len(first))])
        for rank, value in values.items():
            if not self.same(first, value):
                node = self.per_rank.setdefault(str(rank), {})
                for key in path[:-1]:
                    node = node.setdefault(key, {})
                node[path[-1]] = value
        return first

    def join_dicts(self, values, path):
        first = next(iter(values.values()))
        keys = dict.fromkeys(key for value in values.values() for key in value)
        made = {key: self.join({r: v[key] for r, v in values.items() if key in v}, (*path, key)) for key in keys}
        return remade(first, made)

    @staticmethod
    def same(a, b):
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            return same_tensor(a, b)
        return exact(plainer(a)[0]) == exact(plainer(b)[0])

    def join_dtensors(self, values):
        """Returns the whole tensor; the same one for DTensors that share the memory of their parts."""
        first = next(iter(values.values()))
        parts = tuple((r, memory_of(t._local_tensor)) for r, t in values.items() if t._local_tensor.numel())
        if (parts, str(first._spec)) not in self.whole:
            self.whole[parts, str(first._spec)] = self.put_together(values, first)
        return self.whole[parts, str(first._spec)]

    @staticmethod
    def put_together(values, first):
        whole, filled = torch.empty(first.shape, dtype=first.dtype), torch.zeros(first.shape, dtype=torch.bool)
        for rank, tensor in values.items():
            mesh, local = tensor._spec.mesh.mesh, tensor._local_tensor
            part, is_filled = whole.view(torch.uint8) if local.element_size() == 1 else whole, filled
            for axis, placement in enumerate(tensor._spec.placements):
                if placement.is_shard():
                    index = (mesh == rank).nonzero()[0].tolist()[axis]
                    size = -(-part.size(placement.dim) // mesh.size(axis))
                    index = [slice(None)] * placement.dim + [slice(index * size, (index + 1) * size)]
                    part, is_filled = part[index], is_filled[index]
            assert part.shape == local.shape, f"rank {rank}: a part of {list(local.shape)}, expected {list(part.shape)}"
            part.copy_(local.view(torch.uint8) if local.element_size() == 1 else local)
            is_filled.fill_(True)
        assert bool(filled.all()), "elements that no rank has"
        return whole
