"""Functions for tests that kill moves: they write a source, and read the files of a destination."""

import json
import random
import struct


def write_source(path, seed):
    """Writes a safetensors file of 24 MiB whose bytes compress as well as weights."""
    rows, columns, num_tensors = 1024, 1024, 12
    nbytes = rows * columns * 2
    header = {f"layers.{i}.weight": {"dtype": "BF16", "shape": [rows, columns],
                                     "data_offsets": [i * nbytes, (i + 1) * nbytes]}
              for i in range(num_tensors)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    noise = bytearray(random.Random(seed).randbytes(nbytes))
    noise[1::2] = bytes(0x38 + byte % 4 for byte in noise[1::2])
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for i in range(num_tensors):
            noise[0:2] = struct.pack("<H", i)
            out.write(noise)


def contents(path):
    """Returns the bytes of each file of a checkpoint, by name. Without a checkpoint: an empty dict."""
    if path.is_file():
        return {path.name: path.read_bytes()}
    return {each.name: each.read_bytes() for each in path.iterdir()} if path.exists() else {}
