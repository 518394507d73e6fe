"""The wheel for CPython 3.12 and later, built, installed and used in a Debian 13 with Python 3.13. On demand:

    TESSERA_DEBIAN=/tmp/trixie python -m pytest tests/interop/test_python_stable_abi.py

makes that folder, which a later run uses again. It needs root, debootstrap and a network, 8 GB for the folder (of which torch
takes 5), and half an hour on two cores.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ckpt_tools import FIXTURES, ROOT

DEBIAN = os.environ.get("TESSERA_DEBIAN")
SUITE, MIRROR = "trixie", "http://deb.debian.org/debian"
PACKAGES = "python3,python3-venv,python3-dev,ca-certificates,git"
OF_THE_NETWORK = ("etc/resolv.conf", "etc/hosts", "etc/pip.conf", "etc/ssl/certs/ca-certificates.crt")
LARGEST_WHEEL = 15_000_000
LONGEST_IMPORT = 0.050  # seconds
ENTER = 'mount -t proc proc "$0/proc" && mount --rbind /dev "$0/dev" && exec chroot "$0" "$@"'
JOBS = ("test_every_layout_loads_into_every_other", "test_one_rank_gets_everything_back", "test_ranks_that_hold_different_things",
        "test_dcp_saves_through_the_storage_writer")

pytestmark = pytest.mark.skipif(not DEBIAN, reason="on demand: TESSERA_DEBIAN names the folder for a Debian")


class Debian:
    """A root file system with a Debian. Its folder `tessera` is a copy of this tree."""

    def __init__(self, root):
        self.root = root

    def run(self, *command, **variables):
        environment = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/root", "LANG": "C.UTF-8", **variables}
        words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", ENTER, self.root, *command]
        process = subprocess.run([str(word) for word in words], env=environment, capture_output=True, text=True, check=False)
        assert process.returncode == 0, f"{command}: {process.stdout[-5000:]}\n{process.stderr[-5000:]}"
        return process.stdout

    def make(self):
        if (self.root / "complete").exists():
            return
        subprocess.run(["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, self.root, MIRROR], check=True)
        (self.root / "complete").touch()

    def copy_network(self):
        for name in OF_THE_NETWORK:
            if (Path("/") / name).exists():
                shutil.copy(Path("/") / name, self.root / name)

    def copy_tree(self):
        tree = self.root / "tessera"
        shutil.rmtree(tree, ignore_errors=True)
        listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                                capture_output=True, text=True, check=True).stdout
        for name in set(filter(None, listed.split("\0"))):
            if (ROOT / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, tree / name)
        self.run("git", "-C", "/tessera", "init", "--quiet")  # `tools/dev wheel` packs the files that git lists

    def environment(self, name, *packages):
        """Returns the interpreter of a virtual environment in which the packages are installed, once."""
        python, complete = f"/opt/{name}/bin/python", self.root / "opt" / name / "complete"
        if not complete.exists():
            self.run("python3", "-m", "venv", "--clear", f"/opt/{name}")
            if packages:
                self.run(python, "-m", "pip", "install", "--quiet", *packages)
            complete.touch()
        return python


@pytest.fixture(scope="module")
def debian():
    if os.geteuid() != 0 or not shutil.which("debootstrap"):
        pytest.skip("needs root and debootstrap")
    made = Debian(Path(DEBIAN).resolve())
    made.make()
    made.copy_network()
    made.copy_tree()
    return made


@pytest.fixture(scope="module")
def wheel(debian):
    debian.run("python3", "/tessera/tools/dev", "wheel")
    [built] = (debian.root / "tessera" / "build" / "wheel").glob("*.whl")
    return built


def install(debian, python, wheel):
    debian.run(python, "-m", "pip", "install", "--quiet", "--no-index", "--force-reinstall",
               f"/{wheel.relative_to(debian.root)}")


def test_one_wheel_is_for_all_versions_from_3_12(wheel):
    assert wheel.name.endswith(f"-cp312-abi3-manylinux_2_28_{os.uname().machine}.whl")
    assert wheel.stat().st_size <= LARGEST_WHEEL


def test_package_and_commands_work_in_a_fresh_environment(debian, wheel):
    python = debian.environment("fresh")
    install(debian, python, wheel)
    shutil.rmtree(debian.root / "work", ignore_errors=True)
    shutil.copytree(FIXTURES / "dcp" / "valid" / "fsdp2_adamw", debian.root / "work" / "dcp")
    program = """
import os, sys, time
begin = time.perf_counter()
import tessera
passed = time.perf_counter() - begin
os.chdir("/work")
assert tessera.__file__.startswith("/opt/fresh/") and ".abi3.so" in tessera._core.__file__
assert not {"torch", "numpy"}.intersection(sys.modules)
assert tessera.reshard("dcp", "native", ranks=3, compress="zstd", overwrite=True).written
assert tessera.reshard("native", "back", to="dcp", overwrite=True).written
with tessera.open("dcp") as one, tessera.open("back") as other:
    assert list(one) == list(other)
    for name, entry in one.items():
        assert entry == other[name] if not isinstance(entry, tessera.Tensor) else entry.tobytes() == other[name].tobytes(), name
assert tessera.verify("native") == [] and tessera.scan("dcp").clean
print(passed)
"""
    assert min(float(debian.run(python, "-c", program)) for _ in range(5)) <= LONGEST_IMPORT
    for tool in ("ckpt-inspect", "ckpt-reshard"):
        assert "0.1.0" in debian.run(f"/opt/fresh/bin/{tool}", "--version")
    debian.run("/opt/fresh/bin/ckpt-inspect", "diff", "/work/native", "/work/dcp")
    debian.run("/opt/fresh/bin/ckpt-reshard", "/work/native", "/work/two", "--world-size", "2")


def test_jobs_save_and_load(debian, wheel):
    """A part of test_python_jobs.py, with the installed wheel."""
    requirements = (ROOT / "tools" / "development" / "python-requirements.txt").read_text().splitlines()
    torch = next(line for line in requirements if line.startswith("torch=="))
    python = debian.environment("job", torch, "numpy", "pytest")
    install(debian, python, wheel)
    said = debian.run(python, "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider", "/tessera/tests/interop/test_python_jobs.py",
                      "-k", " or ".join(JOBS), TESSERA_BIN="/opt/job/bin")
    assert " passed" in said and "skipped" not in said
