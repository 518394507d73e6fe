"""A destination on NFS: nothing is lost if a writer dies, and two hosts never write one destination.

A preloaded library makes the file system behave like NFS: it cannot exchange two names in one step, a directory's lock
excludes nobody (it is local to a host), and only a file that is open for writing can be locked. The library also kills the
process after a rename, and lets it wait at its first fsync.
"""

import os
import shutil
import subprocess
import time

import pytest
from ckpt_tools import BIN, FIXTURES

SOURCE = FIXTURES / "safetensors" / "valid" / "sharded"
LIBRARY = """
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
int renameat2(int a, const char* from, int b, const char* to, unsigned flags) {
    errno = EINVAL;
    return -1;
}
int rename(const char* from, const char* to) {
    static int number = 0;
    int result = syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
    const char* last = getenv("DIES_AFTER_RENAME");
    if (last && ++number == atoi(last)) _exit(99);
    return result;
}
int flock(int fd, int operation) {
    struct stat status;
    fstat(fd, &status);
    if (S_ISDIR(status.st_mode)) return 0;
    if ((operation & LOCK_EX) && (fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDONLY) {
        errno = EBADF;
        return -1;
    }
    return syscall(SYS_flock, fd, operation);
}
int fsync(int fd) {
    const char* go = getenv("WAITS_FOR");
    if (go) {
        char here[4096];
        snprintf(here, sizeof here, "%s.waits", go);
        close(open(here, O_CREAT | O_WRONLY, 0666));
        for (int i = 0; i < 6000 && access(go, F_OK) != 0; ++i) usleep(10000);
    }
    return syscall(SYS_fsync, fd);
}
"""


@pytest.fixture(scope="module")
def nfs(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("nfs")
    (folder / "nfs.c").write_text(LIBRARY)
    subprocess.run([compiler, "-shared", "-fPIC", folder / "nfs.c", "-o", folder / "nfs.so"], check=True)
    return os.environ | {"LD_PRELOAD": str(folder / "nfs.so")}


def run(tool, *arguments, environment=None):
    command = [str(BIN / tool), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def move(*arguments, environment=None):
    process = run("ckpt-reshard", *arguments, "--quiet", environment=environment)
    assert process.returncode == 0, process.stderr


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("d"))


def start_waiting(nfs, folder, *arguments):
    """Starts a move that waits at its first fsync until `folder`/go exists."""
    process = subprocess.Popen([str(BIN / "ckpt-reshard"), *map(str, arguments), "--quiet"], env=nfs | {"WAITS_FOR": str(folder / "go")})
    for _ in range(3000):
        if (folder / "go.waits").exists():
            return process
        time.sleep(0.01)
    process.kill()
    raise AssertionError("the move never came to an fsync")


@pytest.fixture
def pair(tmp_path):
    """Two checkpoints with different numbers."""
    move(SOURCE, tmp_path / "old.pt", "--cast", "float16")
    move(SOURCE, tmp_path / "new.pt")
    return tmp_path / "old.pt", tmp_path / "new.pt"


@pytest.mark.parametrize("name", ["d", "d.pt", "d.safetensors"])
def test_a_replacement_that_dies_in_the_middle_is_undone_or_finished(nfs, pair, tmp_path, name):
    old, new = pair
    destination = tmp_path / name
    died = 0
    for number in range(1, 4):
        move(old, destination)
        process = run("ckpt-reshard", new, destination, "--overwrite", environment=nfs | {"DIES_AFTER_RENAME": str(number)})
        assert process.returncode == 99, process.stderr
        if not destination.exists():
            died += 1
            assert f"old checkpoint at {destination}.partial.old" in run("ckpt-inspect", "ls", destination).stderr
            refused = run("ckpt-reshard", new, destination, environment=nfs)  # puts it back
            assert refused.returncode == 2 and "destination exists" in refused.stderr
            assert run("ckpt-inspect", "diff", old, destination).returncode == 0
        move(new, destination, "--overwrite", "--resume", environment=nfs)
        assert run("ckpt-inspect", "diff", new, destination).returncode == 0
        assert names(tmp_path) == [name]
        shutil.rmtree(destination) if destination.is_dir() else destination.unlink()
    assert died == 1


@pytest.mark.parametrize("has_values", [True, False])
def test_the_old_tensors_have_their_values_until_they_are_replaced(nfs, tmp_path, has_values):
    old = FIXTURES / "torch_zip" / "valid" / "lists.pt"
    new = tmp_path / "new.safetensors"
    move(SOURCE, new)
    if has_values:
        move(FIXTURES / "torch_zip" / "valid" / "training_state.pt", new, "--overwrite")
    destination = tmp_path / "d.safetensors"
    died = 0
    for number in range(1, 8):
        move(old, destination, "--overwrite")
        dies = nfs | {"DIES_AFTER_RENAME": str(number)}
        process = run("ckpt-reshard", new, destination, "--overwrite", environment=dies)
        if process.returncode == 0:
            break
        assert process.returncode == 99, process.stderr
        died += 1
        if not destination.exists():
            refused = run("ckpt-reshard", new, destination, environment=nfs)  # puts it back
            assert refused.returncode == 2 and "destination exists" in refused.stderr
        is_old = run("ckpt-inspect", "diff", old, destination).returncode == 0
        assert is_old or run("ckpt-inspect", "diff", new, destination).returncode == 0
        move(new, destination, "--overwrite", "--resume", environment=nfs)
        assert run("ckpt-inspect", "diff", new, destination).returncode == 0
        assert names(tmp_path) == ["d.safetensors", "d.safetensors.values.json"][: 1 + has_values]
    assert died == (6 if has_values else 3)


@pytest.mark.parametrize("option", [None, "--discard"])
def test_the_work_of_several_workers_is_finished_or_discarded(nfs, pair, tmp_path, option):
    old, new = pair
    destination = tmp_path / "d"
    arguments = [new, destination, "--to", "native", "--overwrite"]
    missing = 0
    for number in range(1, 8):
        move(old, destination, "--to", "native")
        move(*arguments, "--part", "0/2", environment=nfs)
        process = run("ckpt-reshard", *arguments, "--part", "1/2", environment=nfs | {"DIES_AFTER_RENAME": str(number)})
        if process.returncode == 0:
            break
        assert process.returncode == 99, process.stderr
        missing += not destination.exists()
        is_new = run("ckpt-inspect", "diff", new, destination).returncode == 0
        process = run("ckpt-reshard", "finish", destination, *([option] if option else []), environment=nfs)
        assert process.returncode == 0, process.stderr
        expected = old if option and not is_new else new
        assert run("ckpt-inspect", "diff", expected, destination).returncode == 0
        assert names(tmp_path) == ["d"]
        shutil.rmtree(destination)
    assert missing == 1


def test_a_replacement_never_replaces_another_file(nfs, pair, tmp_path):
    old, new = pair
    destination = tmp_path / "d.pt"
    move(old, destination)
    (tmp_path / "d.pt.replaced").write_text("mine")
    move(new, destination, "--overwrite", environment=nfs)
    assert (tmp_path / "d.pt.replaced").read_text() == "mine"
    (tmp_path / "d.pt.partial.old").write_text("mine too")
    refused = run("ckpt-reshard", old, destination, "--overwrite", environment=nfs)
    assert refused.returncode == 2 and "d.pt.partial.old: staging: expected an unused name" in refused.stderr
    assert (tmp_path / "d.pt.partial.old").read_text() == "mine too"
    assert run("ckpt-inspect", "diff", new, destination).returncode == 0


@pytest.mark.parametrize("form", ["dcp", "native", "torch"])
def test_two_hosts_never_write_one_destination(nfs, pair, tmp_path, form):
    old, new = pair
    first = start_waiting(nfs, tmp_path, new, tmp_path / "d", "--to", form)
    try:
        second = run("ckpt-reshard", old, tmp_path / "d", "--to", form, environment=nfs)
        assert second.returncode == 2 and "another process is writing" in second.stderr
    finally:
        (tmp_path / "go").touch()
        assert first.wait(60) == 0
    assert run("ckpt-inspect", "diff", new, tmp_path / "d").returncode == 0
    assert names(tmp_path) == ["d"]


@pytest.mark.parametrize("option", ["--resume", "--discard"])
def test_an_interrupted_move_to_a_file_goes_on(nfs, pair, tmp_path, option):
    _, new = pair
    first = start_waiting(nfs, tmp_path, new, tmp_path / "d.pt")
    first.kill()
    first.wait()
    move(new, tmp_path / "d.pt", option, environment=nfs)
    assert run("ckpt-inspect", "diff", new, tmp_path / "d.pt").returncode == 0
    assert names(tmp_path) == ["d.pt"]
