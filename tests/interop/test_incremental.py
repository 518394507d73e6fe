"""ckpt-reshard --base: a checkpoint that shares files with an older one. What the tools show, what h5py reads, copies
by cp, keep_last, interrupted runs."""

import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from ckpt_tools import BIN, ROOT, listing, reshard, run, succeed, tensors_by_name

sys.path.insert(0, str(ROOT / "docs" / "examples"))
from read_native_with_h5py import open_index, read_tensor  # noqa: E402


def disk_nbytes(*folders):
    """Returns the bytes on the disk. A file with several names counts once."""
    blocks = {}
    for folder in folders:
        for file in folder.rglob("*"):
            status = file.stat()
            if file.is_file():
                blocks[status.st_ino] = status.st_blocks
    return sum(blocks.values()) * 512


def state(step, seed=0):
    frozen = torch.Generator().manual_seed(seed)
    trained = torch.Generator().manual_seed(1000 + step)
    layers = {f"layers.{i}.weight": torch.randn(128, 256, generator=frozen, dtype=torch.float32).bfloat16() for i in range(9)}
    small = {f"layers.{i}.norm": torch.randn(64, generator=frozen) for i in range(9)}
    return layers | small | {"head.weight": torch.randn(128, 256, generator=trained).bfloat16(), "step": step}


def write(path, step, *options, seed=0):
    torch.save(state(step, seed), path.with_suffix(".pt"))
    reshard(path.with_suffix(".pt"), path, "--to", "native", *options)
    path.with_suffix(".pt").unlink()
    return path


def assert_holds(path, step):
    succeed("ckpt-inspect", "verify", path)
    wanted = state(step)
    with open_index(path) as index:
        for name, tensor in wanted.items():
            if name != "step":
                assert np.array_equal(read_tensor(index, name), tensor.float().numpy()), name


@pytest.mark.parametrize("options", [[], ["--world-size", 2, "--strategy", "dim0"], ["--compress", "zstd"]])
def test_any_hdf5_reader_sees_whole_tensors(tmp_path, options):
    write(tmp_path / "1", 1, *options)
    write(tmp_path / "2", 2, "--base", tmp_path / "1", *options)
    write(tmp_path / "3", 3, "--base", tmp_path / "2", *options)
    shutil.rmtree(tmp_path / "1")
    for step in (2, 3):
        assert_holds(tmp_path / str(step), step)
    assert disk_nbytes(tmp_path) < 1.4 * disk_nbytes(tmp_path / "3")


def test_many_small_pieces_are_linked_too(tmp_path):
    frozen = {f"frozen.{i}": torch.full((40,), i, dtype=torch.int64) for i in range(1500)}
    for step in (1, 2, 3):
        torch.save(frozen | {"trained": torch.full((40,), -step)}, tmp_path / "s.pt")
        base = ["--base", tmp_path / str(step - 1)] if step > 1 else []
        reshard(tmp_path / "s.pt", tmp_path / str(step), "--to", "native", "--world-size", 2, "--strategy", "dim0", *base)
    assert any(file.name.startswith("base-") for file in (tmp_path / "3").iterdir())
    shutil.rmtree(tmp_path / "1")
    succeed("ckpt-inspect", "verify", tmp_path / "3")
    with open_index(tmp_path / "3") as index:
        for i in (0, 1, 700, 1499):
            assert read_tensor(index, f"frozen.{i}").tolist() == [i] * 40
        assert read_tensor(index, "trained").tolist() == [-3] * 40


def test_long_names_are_found_in_linked_files(tmp_path):
    names = ["n" * 1200 + str(i) for i in range(3)]
    for step in (1, 2, 3):
        tensors = {name: torch.full((40_000,), float(i)) for i, name in enumerate(names)}
        torch.save(tensors | {"a": torch.full((10,), step), f"b{step}": torch.zeros(2)}, tmp_path / "s.pt")
        base = ["--base", tmp_path / str(step - 1)] if step > 1 else []
        reshard(tmp_path / "s.pt", tmp_path / str(step), "--to", "native", *base)
    with open_index(tmp_path / "3") as index:
        links = [link for link in index if link.startswith("n")]
        assert sorted(read_tensor(index, link)[39_999] for link in links) == [0.0, 1.0, 2.0]


def test_a_copy_is_whole_and_a_move_reads_it(tmp_path):
    write(tmp_path / "1", 1)
    write(tmp_path / "2", 2, "--base", tmp_path / "1")
    subprocess.run(["cp", "-r", tmp_path / "2", tmp_path / "copy"], check=True)
    shutil.rmtree(tmp_path / "1")
    shutil.rmtree(tmp_path / "2")
    assert_holds(tmp_path / "copy", 2)
    reshard(tmp_path / "copy", tmp_path / "full")
    assert not any(file.name.startswith("base-") for file in (tmp_path / "full").iterdir())
    assert tensors_by_name(listing(tmp_path / "copy")) == tensors_by_name(listing(tmp_path / "full"))


def test_the_tools_say_what_is_shared(tmp_path):
    write(tmp_path / "1", 1)
    torch.save(state(2), tmp_path / "s.pt")
    said = succeed("ckpt-reshard", tmp_path / "s.pt", tmp_path / "2", "--base", tmp_path / "1")
    assert "592128 bytes (578.2 KiB) of them in files of the base" in said, said
    torch.save(state(3), tmp_path / "s.pt")
    summary = json.loads(succeed("ckpt-reshard", tmp_path / "s.pt", tmp_path / "3", "--base", tmp_path / "2", "--json"))
    assert summary["linked_nbytes"] == 9 * (128 * 256 * 2 + 64 * 4)
    dry = succeed("ckpt-reshard", tmp_path / "s.pt", tmp_path / "4", "--base", tmp_path / "2", "--dry-run")
    assert "in files of the base" in dry and not (tmp_path / "4").exists()
    assert "shared with other checkpoints" in succeed("ckpt-inspect", "ls", tmp_path / "3")
    assert "shared with other checkpoints" in succeed("ckpt-inspect", "verify", tmp_path / "3")
    assert json.loads(succeed("ckpt-inspect", "ls", tmp_path / "3", "--json"))["shared_nbytes"] > 9 * 128 * 256 * 2
    assert "shared" not in succeed("ckpt-inspect", "ls", write(tmp_path / "alone", 1))


def interrupt(options, partial, is_killed):
    """Starts ckpt-reshard. Kills it once it has a rank file in `partial`, or lets a limit on the file size (10 MB) stop it."""

    def limit():
        if not is_killed:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10 << 20, 10 << 20))

    process = subprocess.Popen([BIN / "ckpt-reshard", *map(str, options)], preexec_fn=limit, stderr=subprocess.PIPE)
    while is_killed and process.poll() is None and not (partial / "rank-00000.h5").exists():
        time.sleep(0.001)
    if is_killed:
        process.kill()
    process.communicate()
    assert process.returncode == (-signal.SIGKILL if is_killed else 4)


@pytest.mark.parametrize("is_killed", [False, True])
def test_an_interrupted_run_is_resumed_with_the_same_base(tmp_path, is_killed):
    """The run is killed, or a limit on the file size (10 MB) stops it."""
    frozen, trained = torch.randn(2 << 20), torch.randn(3_500_000)
    torch.save({"frozen": frozen}, tmp_path / "f.pt")
    torch.save({"frozen": frozen, "trained": trained}, tmp_path / "s.pt")
    base = reshard(tmp_path / "f.pt", tmp_path / "base", "--to", "native")
    whole = reshard(tmp_path / "s.pt", tmp_path / "whole", "--to", "native", "--base", base)
    options = [tmp_path / "s.pt", tmp_path / "out", "--to", "native", "--threads", 1, "--base", base]
    partial = tmp_path / "out.partial"
    interrupt(options, partial, is_killed)
    assert any(file.name.startswith("base-") for file in partial.iterdir())
    assert not (tmp_path / "out").exists()
    if not is_killed:
        other = run("ckpt-reshard", *options[:-2], "--resume")
        assert other.returncode == 3 and "source or options have changed: base: expected" in other.stderr, other.stderr
    said = succeed("ckpt-reshard", *options, "--resume")
    assert is_killed or "from the interrupted run" in said
    assert not partial.exists()
    for file in whole.iterdir():
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes(), file.name


def shared_move(folder, part, *more):
    return ["ckpt-reshard", folder / "s.pt", folder / "out", "--to", "native", "--world-size", 4, "--base", folder / "1",
            "--part", f"{part}/3", *more]


def prepare_shared_move(folder):
    """Returns the files that one process writes."""
    succeed("ckpt-reshard", write(folder / "0", 1), folder / "1", "--to", "native", "--world-size", 4)
    torch.save(state(2), folder / "s.pt")
    whole = folder / "whole"
    said = succeed("ckpt-reshard", folder / "s.pt", whole, "--to", "native", "--world-size", 4, "--base", folder / "1")
    assert "in files of the base" in said and any(file.name.startswith("base-") for file in whole.iterdir())
    return whole


def require_same_files(whole, found):
    assert sorted(file.name for file in whole.iterdir()) == sorted(file.name for file in found.iterdir())
    for file in whole.iterdir():
        assert file.read_bytes() == (found / file.name).read_bytes(), file.name
        assert (file.stat().st_nlink > 1) == ((found / file.name).stat().st_nlink > 1), file.name
    assert not (found.parent / (found.name + ".partial.shares")).exists()


@pytest.mark.parametrize("at_once", [False, True], ids=["one after the other", "at once"])
def test_workers_share_files_with_a_base_as_one_process_does(tmp_path, at_once):
    whole = prepare_shared_move(tmp_path)
    if at_once:
        workers = [subprocess.Popen([BIN / word if i == 0 else str(word) for i, word in enumerate(shared_move(tmp_path, part))],
                                    stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for part in range(3)]
        for worker in workers:
            assert worker.wait() == 0, worker.stderr.read()
    else:
        for part in range(3):
            succeed(*shared_move(tmp_path, part))
    require_same_files(whole, tmp_path / "out")


def flip_bit(path, after):
    """Changes the first byte of some bytes in a file, in place."""
    at = path.read_bytes().find(after)
    assert at >= 0
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(bytes([after[0] ^ 1]))


def test_a_worker_takes_the_comparisons_of_others_and_waits_for_living_ones(tmp_path):
    whole = prepare_shared_move(tmp_path)
    shares = tmp_path / "out.partial.shares"
    shares.mkdir()
    with open(shares / "base-2.lock", "w") as held:
        fcntl.lockf(held, fcntl.LOCK_EX)
        worker = subprocess.Popen([BIN / "ckpt-reshard", *map(str, shared_move(tmp_path, 0)[1:])], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not (shares / "base-1").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (shares / "base-0").exists() and worker.poll() is None
        refused = run("ckpt-reshard", "finish", tmp_path / "out", "--discard")
        assert refused.returncode == 2 and "base-2.lock" in refused.stderr, refused.stderr
        assert not (tmp_path / "out.partial").exists()
    assert worker.wait() == 0
    # Pieces that have been compared are not read again. So damage to the base is found only by the next move.
    frozen = state(1)["layers.3.weight"].view(torch.int16).numpy().tobytes()[:64]
    [damaged] = [file for file in (tmp_path / "1").glob("rank-*.h5") if frozen in file.read_bytes()]
    flip_bit(damaged, frozen)
    succeed(*shared_move(tmp_path, 1))
    flip_bit(damaged, bytes([frozen[0] ^ 1]) + frozen[1:])
    succeed(*shared_move(tmp_path, 2))
    require_same_files(whole, tmp_path / "out")


def test_workers_of_another_source_compare_anew(tmp_path):
    whole = prepare_shared_move(tmp_path)
    shares = tmp_path / "out.partial.shares"
    shares.mkdir()
    for share in range(3):
        (shares / f"base-{share}").write_text("0" * 64 + "\nleft by another move")
    for part in range(3):
        succeed(*shared_move(tmp_path, part))
    require_same_files(whole, tmp_path / "out")


REFUSALS = {
    "missing": (["--base", "none"], 3, "none"),
    "another format": (["--base", "s.pt"], 3, "a native checkpoint"),
    "the destination": (["--base", "1", "--overwrite"], 2, "the destination itself"),
    "to dcp": (["--base", "1", "--to", "dcp"], 2, "--base: expected --to native"),
    "a URL": (["--base", "https://example.org/x"], 2, "a URL"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_base_that_cannot_serve_is_refused(tmp_path, case):
    options, code, text = REFUSALS[case]
    write(tmp_path / "1", 1)
    torch.save(state(2), tmp_path / "s.pt")
    destination = "1" if case == "the destination" else "out"
    before = sorted(file.name for file in tmp_path.iterdir())
    found = run("ckpt-reshard", "s.pt", destination, *options, cwd=tmp_path)
    assert found.returncode == code and text in found.stderr, (found.returncode, found.stderr)
    assert sorted(file.name for file in tmp_path.iterdir()) == before


def test_a_damaged_base_is_refused_with_file_and_tensor(tmp_path):
    write(tmp_path / "1", 1)
    file = tmp_path / "1" / "rank-00000.h5"
    content = bytearray(file.read_bytes())
    at = content.find(state(1)["layers.3.weight"].view(torch.int16).numpy().tobytes())
    content[at + 70_00] ^= 1
    file.write_bytes(content)
    torch.save(state(2), tmp_path / "s.pt")
    found = run("ckpt-reshard", tmp_path / "s.pt", tmp_path / "out", "--to", "native", "--base", tmp_path / "1")
    assert found.returncode == 3 and "rank-00000.h5" in found.stderr and "layers.3.weight" in found.stderr
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


def test_a_base_on_another_file_system_is_refused(tmp_path):
    other = "/dev/shm" if os.stat("/dev/shm").st_dev != os.stat(tmp_path).st_dev else None
    if other is None:
        pytest.skip("needs two file systems")
    base = write(tmp_path / "1", 1)
    found = run("ckpt-reshard", base, f"{other}/out-{os.getpid()}", "--base", base)
    assert found.returncode == 2 and "another file system" in found.stderr, found.stderr
