"""Hostile and broken input: refused in one line, within the limits, with nothing left behind."""

import json
import os
import random
import shutil
import struct
import sys
from concurrent.futures import ThreadPoolExecutor

import h5py
import pytest
from ckpt_tools import FIXTURES, MAKE, files_of, reshard, run

sys.path.insert(0, str(MAKE))
from pickles import archive  # noqa: E402

TABLES = sorted(FIXTURES.glob("*/invalid/expect.json"))
CASES = [(table.parent / name, row) for table in TABLES for name, row in json.loads(table.read_text()).items()]
IDS = [f"{path.parts[-3]}/{path.name}" for path, _ in CASES]
REFUSED, FOUND, SYSTEM = 3, 1, 4


def assert_one_line(process, *words):
    """Standard error has one line for each problem, with the facts, besides notes. It has no traceback."""
    lines = process.stderr.splitlines()
    assert not any(ord(c) < 32 and c != "\t" for line in lines for c in line), process.stderr
    lines = [line for line in lines if not line.startswith("note: ")]
    assert lines and all(line.startswith("ckpt-") for line in lines), process.stderr
    missing = [word for word in words if not any(word in line for line in lines)]
    assert not missing, f"{missing} not in: {process.stderr}"


def refuse(path, cwd, *words):
    """Both tools refuse `path`, leave no file in `cwd` and run no code from the file. Returns the message."""
    before = sorted(cwd.iterdir())
    digests = run("ckpt-inspect", "hash", path, cwd=cwd, timeout=20)  # of every tensor and every value
    assert digests.returncode == REFUSED, (digests.returncode, digests.stderr, digests.stdout[-500:])
    assert_one_line(digests, *words)
    verify = run("ckpt-inspect", "verify", path, cwd=cwd, timeout=20)
    is_noted = "note: " in verify.stdout and "value: expected a value of plain types" in verify.stdout  # the value is an object of a class
    assert verify.returncode in (REFUSED, FOUND) or is_noted, (verify.returncode, verify.stderr)
    move = run("ckpt-reshard", path, cwd / "moved", "--to", "native", "--quiet", cwd=cwd, timeout=20)
    assert move.returncode == REFUSED, (move.returncode, move.stderr)
    assert_one_line(move)
    assert sorted(cwd.iterdir()) == before
    return digests.stderr


@pytest.mark.parametrize("path, row", CASES, ids=IDS)
def test_every_bad_file_is_refused(path, row, tmp_path):
    """Shows E3, E4, E7. Each file in the tables under fixtures/*/invalid."""
    assert row["exit"] == REFUSED
    refuse(path, tmp_path, path.name, *row["contains"])


@pytest.mark.parametrize("verb", ["ls", "tree", "stats", "layout", "show", "scan"])
def test_every_verb_survives_every_bad_file(verb, tmp_path):
    """Shows E3. No verb crashes, hangs or runs code from the file, whether it refuses the file or not."""

    def survive(path):
        more = ["*"] if verb == "show" else []
        process = run("ckpt-inspect", verb, path, *more, cwd=tmp_path, timeout=20)
        return (path, process) if process.returncode not in (0, FOUND, REFUSED) else None

    with ThreadPoolExecutor(2) as pool:
        assert [bad for bad in pool.map(survive, [path for path, _ in CASES]) if bad] == []
    assert list(tmp_path.iterdir()) == []


# --- truncation and flipped bits ---------------------------------------------------------------


def run_on_variants(make_variants, *verb):
    """Returns the exit codes of a tool on each variant; a variant is (label, path)."""
    with ThreadPoolExecutor(2) as pool:
        done = pool.map(lambda v: (v[0], run("ckpt-inspect", *verb[:1], v[1], *verb[1:], timeout=20)), make_variants)
        return [(label, process.returncode, process.stderr) for label, process in done]


def truncations(source, name, scratch, step):
    """Makes copies of the checkpoint `source` in which file `name` is cut at every `step`-th byte and near each
    multiple of 64."""
    content = files_of(source)
    whole = content[name]
    lengths = sorted({n for n in range(len(whole)) if n % step == 0 or n % 64 in (0, 63)})
    for length in lengths:
        folder = scratch / f"{length}"
        folder.mkdir()
        for file, data in content.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(whole[:length] if file == name else data)
        yield length, (folder / name if source.is_file() else folder)


TRUNCATED = [
    ("safetensors/valid/single.safetensors", "single.safetensors", 1),
    ("safetensors/valid/sharded", "model.safetensors.index.json", 8),
    ("safetensors/valid/sharded", "model-00001-of-00003.safetensors", 8),
    ("torch_zip/valid/protocol_4.pt", "protocol_4.pt", 2),
    ("dcp/valid/not_flattened", ".metadata", 2),
    ("dcp/valid/not_flattened", "__0_0.distcp", 16),
]


@pytest.mark.parametrize("source, name, step", TRUNCATED)
def test_every_truncation_is_refused(source, name, step, tmp_path):
    """Shows E4. A file that ends early is never accepted as a complete one."""
    variants = truncations(FIXTURES / source, name, tmp_path, step)
    content = files_of(FIXTURES / source)[name]
    whole = len(content.rstrip()) if name.endswith(".json") else len(content)  # JSON may lack its last newline
    bad = [
        r for r in run_on_variants(variants, "ls", "--json", "--sha256")
        if r[0] < whole and (r[1] != REFUSED or r[2].count("\n") != 1)
    ]
    assert bad == []


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    path = tmp_path_factory.mktemp("native") / "native"
    return reshard(FIXTURES / "dcp" / "valid" / "not_flattened", path, "--to", "native", "--world-size", 2)


@pytest.mark.parametrize("name", ["index.h5", "rank-00000.h5", "rank-00001.h5"])
def test_every_truncation_of_a_native_file_is_found(native, name, tmp_path):
    """Shows E4. The same for the native format."""
    bad = [r for r in run_on_variants(truncations(native, name, tmp_path, 101), "verify") if r[1] not in (FOUND, REFUSED)]
    assert bad == []


@pytest.mark.parametrize("name", ["index.h5", "rank-00000.h5", "rank-00001.h5"])
def test_every_flipped_bit_in_a_native_file_is_found(native, name, tmp_path):
    """Shows E4. Every byte of the native format is under a checksum."""
    content = files_of(native)

    def variants():
        generator = random.Random(name)
        size = len(content[name])
        for position in sorted(generator.sample(range(size), min(size, 250))):
            folder = tmp_path / str(position)
            folder.mkdir()
            for file, data in content.items():
                if file == name:
                    data = bytearray(data)
                    data[position] ^= 1 << generator.randrange(8)
                (folder / file).write_bytes(data)
            yield position, folder

    bad = [r for r in run_on_variants(variants(), "verify") if r[1] not in (FOUND, REFUSED)]
    assert bad == []


@pytest.mark.parametrize(
    "source, name", [("torch_zip/valid/state_dict.pt", "state_dict.pt"), ("dcp/valid/not_flattened", "__0_0.distcp")]
)
def test_flipped_bits_in_tensor_bytes_are_found_by_their_crc(source, name, tmp_path):
    """Shows E4. The CRC-32 of the zip archive covers the bytes that PyTorch wrote."""
    content = files_of(FIXTURES / source)
    header = content[name].rindex(b"PK\x03\x04", 0, content[name].index(b"data/0"))
    start = header + 30 + sum(struct.unpack_from("<HH", content[name], header + 26))  # after the name and the padding

    def variants():
        for position in range(start, start + 16):
            folder = tmp_path / str(position)
            folder.mkdir()
            for file, data in content.items():
                if file == name:
                    data = bytearray(data)
                    data[position] ^= 1
                (folder / file).write_bytes(data)
            yield position, (folder / name if (FIXTURES / source).is_file() else folder)

    assert [r for r in run_on_variants(variants(), "verify") if r[1] not in (FOUND, REFUSED)] == []


def test_missing_crc_is_reported_as_absent():
    """Shows E4. A torch.save file without CRC-32 is sound, and a note says that it could not be checked."""
    process = run("ckpt-inspect", "verify", FIXTURES / "torch_zip" / "valid" / "no_crc.pt")
    assert process.returncode == 0
    assert "absent" in process.stdout + process.stderr


# --- files that are made here, because they are too large or too deep for the repository ---------------------


def safetensors_bytes(header, data=b""):
    return struct.pack("<Q", len(header)) + header + data


def test_json_nested_100_000_deep(tmp_path):
    """Shows E7. The nesting depth is limited, so the stack does not overflow."""
    path = tmp_path / "deep.safetensors"
    for header in (b'{"a":' * 100_000, b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"):
        path.write_bytes(safetensors_bytes(header))
        refuse(path, tmp_path, "deep")


def test_pickles_nested_100_000_deep(tmp_path):
    """Shows E3. Lists, tuples and dicts are nested in each other."""
    deep = {
        "lists": b"]" * 100_000 + b"a" * 99_999,
        "tuples": b")" + b"\x85" * 100_000,
        "dicts": b"}" + b"X\x01\0\0\0a}" * 100_000 + b"s" * 100_000,
        "marks": b"(" * 100_000 + b"l" * 100_000,
    }
    for name, body in deep.items():
        path = tmp_path / f"{name}.pt"
        path.write_bytes(archive(b"\x80\x02" + body + b"."))
        refuse(path, tmp_path, name)


def test_pickle_of_many_small_objects_stays_within_the_memory_limit(tmp_path):
    """Shows E3. 32 MB of empty lists need 70 times that memory. The tool reads them or reports that memory is short; it
    never crashes."""
    path = tmp_path / "many.pt"
    path.write_bytes(archive(b"\x80\x02](" + b"]" * (32 << 20) + b"e."))
    process = run("ckpt-inspect", "ls", path, cwd=tmp_path, timeout=60)
    assert process.returncode == 0 or (process.returncode == SYSTEM and "memory" in process.stderr), process.stderr
    assert process.stderr.count("\n") <= 1


OUTSIDE = [
    ("safetensors/invalid/index_climbs", "secret.safetensors"),
    ("safetensors/invalid/index_link", "secret.safetensors"),
    ("dcp/invalid/path_climbs", "secret.distcp"),
    ("dcp/invalid/rank_file_link", "secret.distcp"),
]


@pytest.mark.parametrize("case, secret", OUTSIDE, ids=[case for case, _ in OUTSIDE])
def test_no_file_outside_is_opened(case, secret, tmp_path):
    """Shows E7. The file outside the checkpoint is a pipe, so a tool that opened it would hang."""
    shutil.copytree(FIXTURES / case, tmp_path / "checkpoint", symlinks=True)
    (tmp_path / "outside").mkdir()
    os.mkfifo(tmp_path / "outside" / secret)
    refuse(tmp_path / "checkpoint", tmp_path, "checkpoint")


@pytest.mark.parametrize("name", ["/dev/zero", "/dev/null", "pipe", "empty_directory", "directory_with_text", "no_such_path"])
def test_what_is_no_checkpoint_is_refused(name, tmp_path):
    """Shows E7. Devices, pipes, empty and foreign directories, and paths that do not exist are refused."""
    path = name if name.startswith("/") else tmp_path / name
    if name == "pipe":
        os.mkfifo(path)
    elif "directory" in name:
        path.mkdir()
    if name == "directory_with_text":
        (path / "README.txt").write_text("no checkpoint here\n")
    refuse(path, tmp_path, str(path))


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt", "x.h5", "x.distcp", "x"])
def test_empty_file_of_each_kind(name, tmp_path):
    """Shows E7. An empty file is refused, whatever its name."""
    (tmp_path / name).write_bytes(b"")
    refuse(tmp_path / name, tmp_path, name)


@pytest.mark.parametrize("kind", ["external_link", "external_storage", "virtual_dataset", "sparse_4_tib"])
def test_hdf5_files_that_reach_out_are_refused(kind, tmp_path):
    """Shows E7. Tessera refuses an index.h5 that another program wrote: external links, external storage, virtual
    datasets, 4 TiB of unwritten data."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("index.h5", "rank-00000.h5"):
        with h5py.File(folder / name, "w") as file:
            if kind == "external_link":
                file["weight"] = h5py.ExternalLink("../pipe", "/weight")
            elif kind == "external_storage":
                file.create_dataset("weight", (4,), "f4", external=[("../pipe", 0, 16)])
            elif kind == "virtual_dataset":
                layout = h5py.VirtualLayout((4,), "f4")
                layout[:] = h5py.VirtualSource("../pipe", "weight", (4,))
                file.create_virtual_dataset("weight", layout)
            else:
                file.create_dataset("weight", (1 << 40,), "f4", chunks=(1 << 20,))
    refuse(folder, tmp_path, "index.h5")


def test_hdf5_structure_added_to_a_native_file_is_refused(native, tmp_path):
    """Shows E4, E7. h5py adds an external link to a sound index.h5. This changes bytes under the checksum."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name, data in files_of(native).items():
        (folder / name).write_bytes(data)
    with h5py.File(folder / "index.h5", "r+") as file:
        file["evil"] = h5py.ExternalLink("/etc/hostname", "/")
    process = run("ckpt-inspect", "verify", folder)
    assert process.returncode in (FOUND, REFUSED)


def test_missing_rank_file_of_a_native_checkpoint(native, tmp_path):
    """Shows E4. The message names the missing file."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name, data in files_of(native).items():
        if name != "rank-00001.h5":
            (folder / name).write_bytes(data)
    refuse(folder, tmp_path, "rank-00001.h5")


# --- destinations -------------------------------------------------------------------------------


def test_an_existing_destination_is_left_alone(tmp_path):
    """Shows E4. The exit code is 2, and no byte changes."""
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "mine").write_text("keep")
    process = run("ckpt-reshard", FIXTURES / "dcp" / "valid" / "tied", tmp_path / "moved", "--to", "native")
    assert process.returncode == 2
    assert_one_line(process, "moved")
    assert files_of(tmp_path / "moved") == {"mine": b"keep"}


def test_dtypes_that_safetensors_lacks_are_listed(tmp_path):
    """Shows E2, E7. The move is refused before anything is written, and the message lists the tensors."""
    source = FIXTURES / "dcp" / "valid" / "dtypes"
    process = run("ckpt-reshard", source, tmp_path / "moved", "--to", "safetensors")
    assert process.returncode == REFUSED
    assert_one_line(process, "dtype.complex128", "dtype.complex32")
    assert list(tmp_path.iterdir()) == []


def test_bare_flat_vectors_are_refused_without_their_layout(tmp_path):
    """Shows E2. The message names `--flat-layout` as the remedy."""
    process = run("ckpt-reshard", FIXTURES / "dcp" / "valid" / "fsdp1_flat", tmp_path / "moved", "--to", "native", "--world-size", 2)
    assert process.returncode == REFUSED
    assert_one_line(process, "_flat_param", "--flat-layout")
    assert list(tmp_path.iterdir()) == []


