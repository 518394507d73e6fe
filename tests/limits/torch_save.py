"""Writes files as torch.save does, of small tensors of zeros, with the standard library alone."""
import io
import pickle
import struct
import sys
import types
import zipfile
from collections import OrderedDict
from pathlib import Path


def stand_in(module: str, name: str):
    """Returns an object that a pickle names `module.name`. pickle checks that this name exists before it writes it."""
    owner = sys.modules.setdefault(module, types.ModuleType(module))

    def named(*_arguments):
        raise NotImplementedError(f"{module}.{name} is only a name")

    named.__module__, named.__qualname__, named.__name__ = module, name, name
    setattr(owner, name, named)
    return named


class Pickler(pickle.Pickler):
    """Pickles Tensor and Size as torch pickles its own."""

    def __init__(self, file):
        super().__init__(file, protocol=2)
        self.storages = []  # numbers of elements

    def persistent_id(self, obj):
        if not isinstance(obj, Storage):
            return None
        self.storages.append(obj.numel)
        return ("storage", FLOAT_STORAGE, str(len(self.storages) - 1), "cpu", obj.numel)

    def reducer_override(self, obj):
        if isinstance(obj, Size):
            return SIZE, (obj.sizes,)
        if isinstance(obj, Tensor):
            return REBUILD, (Storage(obj.numel), 0, obj.shape, obj.strides, False, OrderedDict())
        return NotImplemented


class Storage:
    def __init__(self, numel: int):
        self.numel = numel


class Tensor:
    """A float32 tensor of zeros."""

    def __init__(self, *shape: int):
        self.shape, self.strides, self.numel = shape, (), 1
        for size in reversed(shape):
            self.strides = (max(self.numel, 1), *self.strides)
            self.numel *= size


class Size:
    """A torch.Size."""

    def __init__(self, *sizes: int):
        self.sizes = sizes


REBUILD = stand_in("torch._utils", "_rebuild_tensor_v2")
SIZE = stand_in("torch", "Size")
FLOAT_STORAGE = stand_in("torch", "FloatStorage")


def save(state: dict, path: Path) -> None:
    """Writes `state`, with Tensor and Size in it, as torch.save would."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = io.BytesIO()
    pickler = Pickler(text)
    pickler.dump(state)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", text.getvalue())
        archive.writestr("archive/byteorder", "little")
        for number, numel in enumerate(pickler.storages):
            archive.writestr(f"archive/data/{number}", bytes(4 * numel))
        archive.writestr("archive/version", "3\n")


def save_stream(state: dict, path: Path) -> None:
    """Writes `state` as torch.save did before torch 1.6. The bytes of the storages are holes in the file."""
    text = io.BytesIO()
    pickler = Pickler(text)
    pickler.dump(state)
    keys = [str(number) for number in range(len(pickler.storages))]
    machine = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
    with open(path, "wb") as file:
        for part in (0x1950a86a20f9469cfc6c, 1001, machine):
            pickle.dump(part, file, protocol=2)
        file.write(text.getvalue())
        pickle.dump(keys, file, protocol=2)
        for numel in pickler.storages:
            file.write(struct.pack("<q", numel))
            file.seek(4 * numel, 1)
        file.truncate()
