"""Reads tensors out of a native checkpoint with h5py, without Tessera.

Usage: python read_native_with_h5py.py CHECKPOINT [TENSOR...]
"""

import contextlib
import sys
from pathlib import Path

import h5py
import numpy as np

with contextlib.suppress(ImportError):
    import hdf5plugin  # noqa: F401  the zstd filter, for checkpoints that are compressed


def open_index(checkpoint):
    return h5py.File(Path(checkpoint) / "index.h5")


def read_tensor(index, name):
    """Returns the whole tensor, from the files of all ranks. Returns bfloat16 as float32, which is exact."""
    dataset = index[name]
    array = np.asarray(dataset[()])
    if dataset.attrs["dtype"] == b"bfloat16":  # stored as uint16: the upper half of a float32
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array


if __name__ == "__main__":
    with open_index(sys.argv[1]) as index:
        for name in sys.argv[2:] or (key for key in index if key != "~tessera"):
            tensor = read_tensor(index, name)
            print(name, index[name].attrs["dtype"].decode(), list(tensor.shape), tensor.reshape(-1)[:4])
