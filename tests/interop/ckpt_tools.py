"""Runs ckpt-inspect and ckpt-reshard as a user does, and compares what they show with expectations."""

import json
import os
import struct
import subprocess
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "fixtures"
MAKE = FIXTURES / "make"
BIN = Path(os.environ.get("TESSERA_BIN", ROOT / "build" / "bin"))
ADDRESS_SPACE = 2 << 30  # bytes; both tools promise to work within it (ulimit -v 2097152)

FORMATS = ("native", "safetensors", "dcp", "torch")
WHOLE_TENSORS = ("safetensors", "torch")  # formats without ranks


def run(tool, *arguments, cwd=None, timeout=60):
    """Runs a tool under the address-space limit and returns the finished process, whatever its exit code."""
    return subprocess.run(
        ["prlimit", f"--as={ADDRESS_SPACE}", BIN / tool, *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )


def succeed(tool, *arguments, **options):
    process = run(tool, *arguments, **options)
    assert process.returncode == 0, f"{tool} {' '.join(map(str, arguments))}: exit {process.returncode}: {process.stderr}"
    return process.stdout


WITHOUT_OPTIMIZER = "pipeline_fp32_without_zero"  # a fixture whose optimizer has no names, so that a move refuses it


def reshard(source, destination, *options):
    """Moves a checkpoint and returns the destination. Leaves out the optimizer of the one fixture whose optimizer every
    move refuses."""
    without = ["--only", "!optim"] if Path(source).name == WITHOUT_OPTIMIZER else []
    succeed("ckpt-reshard", source, destination, "--quiet", *without, *options)
    return destination


def flip_a_bit(archive, record, byte=0):
    """Flips a bit in a byte of a record of a torch.save file: of the record whose name ends with `record`. The stored
    checksum stays."""
    content = bytearray(archive.read_bytes())
    with zipfile.ZipFile(archive) as records:
        header = next(info.header_offset for info in records.infolist() if info.filename.endswith(record))
    name_and_extra = struct.unpack_from("<HH", content, header + 26)
    content[header + 30 + sum(name_and_extra) + byte] ^= 1
    archive.write_bytes(content)


def listing(path):
    """Returns the output of `ckpt-inspect ls --json --sha256`."""
    return json.loads(succeed("ckpt-inspect", "ls", path, "--json", "--sha256"))


def tensors_by_name(document):
    """Returns {name: (dtype, shape, nbytes, sha256)}, with every alias as a tensor of its own."""
    found = {t["name"]: (t["dtype"], t["shape"], t["nbytes"], t["sha256"]) for t in document["tensors"]}
    for alias in document.get("aliases", []):
        assert alias["name"] not in found
        found[alias["name"]] = found[alias["target"]]
    return found


def expectation(path):
    return json.loads(Path(f"{path}.expect.json").read_text())


def assert_same_state(found, expected, *, values=True):
    """`found` (a listing) has exactly the tensors of `expected`, and the same values if `expected` lists values."""
    found_tensors, expected_tensors = tensors_by_name(found), tensors_by_name(expected)
    assert sorted(found_tensors) == sorted(expected_tensors)
    differing = {
        name: (found_tensors[name], row) for name, row in expected_tensors.items() if found_tensors[name] != row
    }
    assert not differing, f"(found, expected) by name: {differing}"
    if values and "values" in expected:
        # by text: 1 and 1.0, 0.0 and -0.0 are equal in Python
        assert json.dumps(found["values"], sort_keys=True) == json.dumps(expected["values"], sort_keys=True)


def valid_fixtures():
    """Returns (id, path) of every fixture that is a whole checkpoint of plain values."""
    found = []
    for path in sorted(FIXTURES.glob("*/*/*.expect.json")):
        source = Path(str(path).removesuffix(".expect.json"))
        if source.exists() and source.parent.name not in ("invalid", "classes", "no_collectives", "parts"):
            found.append((str(source.relative_to(FIXTURES)), source))
    return found


def files_of(path):
    """Returns {relative path: bytes} of a file or of all files under a directory."""
    path = Path(path)
    if path.is_file():
        return {path.name: path.read_bytes()}
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}
