"""Workers on NFS are warned when two of them write into one file: NFS clients write whole pages.

A preloaded library replaces statfs(2), so that the file system seems to be NFS.
"""

import os
import shutil
import subprocess
import sys

import pytest
from ckpt_tools import BIN, FIXTURES

SOURCE = FIXTURES / "safetensors" / "valid" / "sharded"
WORDS = "begins or ends within a file on NFS"
STATFS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/vfs.h>
#define ANSWER(NAME) \\
    int NAME(const char* path, struct NAME* system) { \\
        int (*real)(const char*, struct NAME*) = dlsym(RTLD_NEXT, #NAME); \\
        int result = real(path, system); \\
        system->f_type = 0x6969; \\
        return result; \\
    }
ANSWER(statfs)
ANSWER(statfs64)
"""


@pytest.fixture(scope="module")
def nfs(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("nfs")
    (folder / "statfs.c").write_text(STATFS)
    subprocess.run([compiler, "-shared", "-fPIC", folder / "statfs.c", "-o", folder / "statfs.so", "-ldl"], check=True)
    return os.environ | {"LD_PRELOAD": str(folder / "statfs.so")}


def worker(destination, part, environment, *options):
    command = [BIN / "ckpt-reshard", SOURCE, destination, "--part", part, *options]
    process = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr
    return process.stderr


def test_a_part_that_divides_a_file_is_told(nfs, tmp_path):
    one_file = tmp_path / "model.safetensors"
    for part in (0, 1):
        said = worker(one_file, f"{part}/2", nfs)
        assert f"warning: {one_file}: part {part} {WORDS}" in said and said.count("warning") == 1


def test_parts_that_end_with_files_and_other_file_systems_are_not(nfs, tmp_path):
    assert worker(tmp_path / "native", "0/2", nfs, "--to", "native", "--world-size", 2) == ""
    assert worker(tmp_path / "whole.safetensors", "0/1", nfs) == ""
    assert worker(tmp_path / "local.safetensors", "0/2", os.environ) == ""


def test_python_warns(nfs, tmp_path):
    if not list((BIN.parent / "python").glob("tessera/_core*.so")):
        pytest.skip("the Python package is not built")
    program = f"import tessera; tessera.reshard({str(SOURCE)!r}, {str(tmp_path / 'model.safetensors')!r}, part=1, parts=2)"
    process = subprocess.run([sys.executable, "-W", "always", "-c", program], env=nfs | {"PYTHONPATH": str(BIN.parent / "python")},
                             capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
    assert "RuntimeWarning" in process.stderr and f"part 1 {WORDS}" in process.stderr
