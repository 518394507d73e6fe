"""Python jobs with failures: a rank killed while it writes, a full disk, a flipped bit, a fork."""

import os
import random
import resource
import signal
import sys
import time

import pytest
import torch
import torch._dynamo  # here, before ranks are forked: each would import it with its first DTensor
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ckpt_tools import BIN
from on_ranks import environments, run_function, run_program
from python_package import tessera

ROWS = 4096  # 16 MiB of each tensor
torch.set_num_threads(1)  # ranks are forks, which lack the OpenMP threads of the parent


def state(fill):
    return {"model": {f"w{i}": torch.full((ROWS, 1024), float(fill + i)) for i in range(3)}, "step": fill}


def start():
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def sharded(fill):
    # Calls no collective (as `distribute_tensor` would), because torch's scatter waits for a rank that was killed.
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = state(fill)
    whole["model"] = {name: DTensor.from_local(tensor.chunk(dist.get_world_size())[dist.get_rank()].clone(), mesh, [Shard(0)], run_check=False)
                      for name, tensor in whole["model"].items()}
    return whole


def save_until_killed(root):
    start()
    for fill in range(2, 200):
        tessera.save(sharded(fill), root / f"step-{fill}", keep_last=2)


@pytest.mark.parametrize("seed", range(3))
def test_a_rank_that_is_killed_while_it_saves_leaves_complete_checkpoints_only(tmp_path, seed):
    """Rank 1 is killed at a random moment of many saves; rank 0 then ends with an error without outside help."""
    import multiprocessing

    tessera.save(state(1), tmp_path / "step-1")
    context = multiprocessing.get_context("fork")

    def on_rank(environment):
        os.environ.update(environment)
        save_until_killed(tmp_path)

    ranks = [context.Process(target=on_rank, args=(environment,)) for environment in environments(2)]
    for rank in ranks:
        rank.start()
    try:
        end = time.monotonic() + 120
        while not (tmp_path / "step-3").exists():
            assert time.monotonic() < end and all(rank.is_alive() for rank in ranks)
            time.sleep(0.01)
        time.sleep(random.Random(seed).uniform(0, 0.5))
        os.kill(ranks[1].pid, signal.SIGKILL)
        ranks[0].join(120)
        assert ranks[0].exitcode not in (0, None)  # its save raised
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    newest = tessera.latest_valid(tmp_path)
    assert newest.path is not None and newest.skipped == []
    found = {"model": {f"w{i}": torch.zeros(ROWS, 1024) for i in range(3)}, "step": 0}
    tessera.load(found, newest.path)
    fill = found["step"]
    assert newest.path.endswith(f"step-{fill}") and fill >= 3
    assert all(torch.equal(found["model"][f"w{i}"], torch.full((ROWS, 1024), float(fill + i))) for i in range(3))
    tessera.save(state(fill + 1), tmp_path / f"step-{fill + 1}", keep_last=2)  # the path may still have an unfinished save
    assert tessera.latest_valid(tmp_path).path.endswith(f"step-{fill + 1}")
    assert set(os.listdir(tmp_path)) == {f"step-{fill}", f"step-{fill + 1}"}


def save_beyond_the_limit(root):
    rank, _ = start()
    tessera.save(sharded(1), root / "good")
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    with pytest.raises(tessera.Error) as failed:
        tessera.save(sharded(2), root / "bad")
    assert failed.value.kind == "io" and ("rank 1" in str(failed.value) or rank == 1), str(failed.value)
    with pytest.raises(tessera.Error):
        tessera.save(sharded(2), root / "good", overwrite=True)
    saving = tessera.async_save(sharded(2), root / "bad")
    with pytest.raises(tessera.Error):
        saving.result()
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    found = sharded(0)
    tessera.load(found, root / "good")
    assert found["step"] == 1 and found["model"]["w1"].to_local().eq(2).all()
    tessera.save(sharded(3), root / "bad")  # now succeeds


def test_a_disk_that_takes_no_more_ends_the_save_and_changes_nothing(tmp_path):
    run_function(save_beyond_the_limit, 2, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["bad", "good"]
    assert tessera.verify(tmp_path / "bad") == tessera.verify(tmp_path / "good") == []


def flip(path, position):
    with open(path, "r+b") as file:
        file.seek(position)
        [byte] = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 0x10]))


def load_damaged(root, only):
    start()
    with pytest.raises(tessera.Error) as failed:
        tessera.load(sharded(0), root / "step-1", only=only)
    assert failed.value.kind == "corruption", failed.value


def load_sound(root, only):
    start()
    found = sharded(0)
    tessera.load(found, root / "step-1", only=only)
    assert found["model"]["w0"].to_local().eq(1).all()


def test_a_flipped_bit_is_found_by_whoever_reads_it(tmp_path):
    tessera.save(state(1), tmp_path / "step-1")
    path = tmp_path / "step-1" / "rank-00000.h5"
    pattern = torch.full((64,), 3.0).numpy().tobytes()  # the elements of w2
    position = path.read_bytes().index(pattern)
    flip(path, position)
    run_function(load_damaged, 2, tmp_path, "*")
    run_function(load_sound, 2, tmp_path, ["model.w0", "model.w1", "step"])  # do not read w2
    [problem] = tessera.verify(tmp_path / "step-1")
    assert (problem.rule, problem.tensor) == ("checksum", "model.w2")


def test_a_forked_child_saves_and_loads_too(tmp_path):
    tessera.save(state(1), tmp_path / "step-1")
    tessera.async_save(state(2), tmp_path / "step-2").result()
    child = os.fork()
    if not child:
        try:
            tessera.async_save(state(3), tmp_path / "step-3").result()
            found = state(0)
            tessera.load(found, tmp_path / "step-2")
            os._exit(0 if found["step"] == 2 else 1)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert tessera.verify(tmp_path / "step-3") == []


def test_a_process_of_multiprocessing_ends_after_its_saves(tmp_path):
    """Python calls no functions of atexit at the end of such a process."""
    import multiprocessing

    def save(name):
        tessera.async_save(state(1), tmp_path / name)

    tessera.async_save(state(1), tmp_path / "of parent").result()
    for name in ("1", "2"):
        process = multiprocessing.get_context("fork").Process(target=save, args=(name,))
        process.start()
        process.join()
        assert process.exitcode == 0 and tessera.verify(tmp_path / name) == []


ENDING = """
import atexit, pathlib, sys
import torch, torch.distributed as dist

def at_the_end():  # registered first, so it runs last
    names = [comm.read_text().strip() for comm in pathlib.Path("/proc/self/task").glob("*/comm")]
    print([name for name in names if "gloo" in name])

atexit.register(at_the_end)
sys.path.insert(0, sys.argv[2])
import tessera

dist.init_process_group("gloo")
tessera.save({"step": 1}, sys.argv[1])
dist.destroy_process_group()
"""


def test_no_thread_of_a_save_outlives_the_program(tmp_path):
    """If a Gloo thread needs the GIL while the interpreter shuts down, the process aborts (exit code 134)."""
    said = run_program([sys.executable, "-c", ENDING, tmp_path / "saved", BIN.parent / "python"], 2)
    assert said == ["[]\n", "[]\n"]
