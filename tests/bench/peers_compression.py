"""Saves and loads one tensor by h5py with the filters shuffle and zstd. Also makes the values that are saved.

    peers_compression.py make bfloat16|float32|exp_avg_sq NBYTES FILE
    peers_compression.py save VALUES ITEMSIZE FILE ROUNDS
    peers_compression.py load FILE ROUNDS

Prints JSON. Seconds are those of the calls; a save includes the sync to the disk.
"""

import json
import os
import sys
import time

import numpy as np

CHUNK_NBYTES = 1 << 20


def make(kind: str, nbytes: int, path: str) -> None:
    """Writes values like those of initialised weights, or of Adam's exp_avg_sq after some steps."""
    generator = np.random.default_rng(0)
    numel = nbytes // (2 if kind == "bfloat16" else 4)
    if kind == "exp_avg_sq":
        values = np.zeros(numel, np.float32)
        for _ in range(10):
            gradients = generator.standard_normal(numel, np.float32) * np.float32(1e-3)
            values = np.float32(0.999) * values + np.float32(0.001) * gradients * gradients
    else:
        values = generator.standard_normal(numel, np.float32) * np.float32(0.02)
    if kind == "bfloat16":
        words = values.view(np.uint32)
        values = ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype(np.uint16)
    values.tofile(path)


def report(seconds: list[float], nbytes: int, path: str) -> None:
    print(json.dumps({"seconds": seconds, "nbytes": nbytes, "stored_nbytes": os.path.getsize(path)}))


def save(values_path: str, itemsize: int, path: str, rounds: int) -> None:
    import h5py
    import hdf5plugin

    values = np.fromfile(values_path, np.dtype(f"u{itemsize}"))
    seconds = []
    for _ in range(rounds):
        if os.path.exists(path):
            os.remove(path)
        begin = time.perf_counter()
        with h5py.File(path, "w") as file:
            file.create_dataset("weight", data=values, chunks=(CHUNK_NBYTES // itemsize,), shuffle=True,
                                **hdf5plugin.Zstd(clevel=1))
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        seconds.append(time.perf_counter() - begin)
    report(seconds, values.nbytes, path)


def load(path: str, rounds: int) -> None:
    import h5py
    import hdf5plugin  # noqa: F401: registers the filter

    seconds = []
    with h5py.File(path) as file:
        out = np.empty(file["weight"].shape, file["weight"].dtype)
    for _ in range(rounds):
        begin = time.perf_counter()
        with h5py.File(path) as file:
            file["weight"].read_direct(out)
        seconds.append(time.perf_counter() - begin)
    report(seconds, out.nbytes, path)


if __name__ == "__main__":
    way, *words = sys.argv[1:]
    if way == "make":
        make(words[0], int(words[1]), words[2])
    elif way == "save":
        save(words[0], int(words[1]), words[2], int(words[3]))
    else:
        load(words[0], int(words[1]))
