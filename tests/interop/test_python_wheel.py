"""What `tools/dev wheel` builds: a wheel that runs in a root with nothing but Python and glibc, and an sdist."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import textwrap
import zipfile
from pathlib import Path

import pytest
import scikit_build_core
import torch

from ckpt_tools import ROOT, run

LARGEST_WHEEL = 15_000_000
IN_ROOT = ["unshare", "--map-root-user", "--root"]


def succeed(*command, environment=None, cwd=None):
    process = subprocess.run([str(word) for word in command], env=environment or os.environ, cwd=cwd, capture_output=True,
                             text=True, check=False)
    assert process.returncode == 0, f"{command}: {process.stdout}\n{process.stderr}"
    return process.stdout


@pytest.fixture(scope="module")
def built():
    """The folder with the wheel and the sdist."""
    succeed(sys.executable, ROOT / "tools" / "dev", "wheel", "--python", Path(sys.base_prefix) / "bin" / "python3")
    return ROOT / "build" / "wheel"


GLIBC = ("libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1")  # since glibc 2.34 in libc.so.6, too


def the(folder, pattern):
    [found] = folder.glob(pattern)
    return found


def libraries_of(file):
    """The shared libraries that a program or an extension needs, as paths."""
    listing = subprocess.run(["ldd", file], capture_output=True, text=True, check=False).stdout
    words = [word for line in listing.splitlines() for word in line.split() if word.startswith("/")]
    return {Path(word) for word in words if Path(word).exists()}


def put(root, file):
    target = root / file.relative_to("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        shutil.copy2(file, target)  # follows links


@pytest.fixture(scope="module")
def bare(built, tmp_path_factory):
    """A root that has Python, what Python links to, and the installed wheel; no shell, no compiler, no other library."""
    root = tmp_path_factory.mktemp("bare")
    python = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    library = Path(sysconfig.get_path("stdlib"))
    put(root, python)
    shutil.copytree(library, root / library.relative_to("/"), ignore=shutil.ignore_patterns("site-packages", "test", "__pycache__"))
    (root / library.relative_to("/") / "site-packages").mkdir(exist_ok=True)
    for file in [python, *library.glob("lib-dynload/*.so")]:
        for needed in libraries_of(file.resolve()):
            put(root, needed)
            for part in GLIBC if needed.name == "libc.so.6" else ():
                put(root, needed.with_name(part))
    for folder in ("tmp", "dev"):
        (root / folder).mkdir()
    (root / "dev" / "null").touch()
    wheel = the(built, "*.whl")
    shutil.copy(wheel, root / "tmp")
    works = subprocess.run([*IN_ROOT, root, python, "-c", ""], capture_output=True, text=True, check=False)
    if works.returncode:
        pytest.skip(f"no user namespaces here: {works.stderr.strip()}")
    enter = [*IN_ROOT, root, python]
    clean = {"PATH": "/bin", "HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"}
    succeed(*enter, "-m", "ensurepip", environment=clean)
    succeed(*enter, "-m", "pip", "install", "--no-index", "--prefix", "/tmp/prefix", f"/tmp/{wheel.name}", environment=clean)
    site = f"/tmp/prefix/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    return root, enter, clean | {"PYTHONPATH": site}


def test_the_wheel_is_small_and_for_old_systems(built):
    wheel = the(built, "*.whl")
    assert wheel.stat().st_size <= LARGEST_WHEEL
    assert wheel.name.endswith(f"manylinux_2_28_{os.uname().machine}.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    data = "tessera-0.1.0.data/"
    assert {name for name in names if name.startswith(f"{data}scripts/") and not name.endswith("/")} == {f"{data}scripts/ckpt-inspect", f"{data}scripts/ckpt-reshard"}
    for share in ("man/man1/ckpt-inspect.1", "bash-completion/completions/ckpt-reshard", "zsh/site-functions/_ckpt-inspect",
                  "fish/vendor_completions.d/ckpt-reshard.fish", "tessera/recipes/hf-to-megatron-llama.json"):
        assert f"{data}data/share/{share}" in names
    assert {path.name for path in (ROOT / "tools/python/src/tessera").iterdir() if path.is_file()} <= {
        name.removeprefix("tessera/") for name in names}
    licenses = [name for name in names if "/licenses/" in name]
    for library in ("hdf5", "zstd", "nettle", "zlib", "xxhash", "libdeflate", "json", "cli11"):
        assert any(f"/{library}/" in name for name in licenses), (library, licenses)


def test_it_runs_where_there_is_nothing_else(bare, tmp_path):
    root, enter, environment = bare
    torch.save({"w": torch.arange(12, dtype=torch.int16).reshape(3, 4), "step": 7}, root / "tmp" / "w.pt")
    program = """
        import importlib.metadata, os, tessera
        os.chdir("/tmp")
        assert importlib.metadata.version("tessera") == tessera.__version__
        assert tessera.reshard("w.pt", "native", ranks=2, compress="zstd").written
        assert tessera.reshard("native", "back", to="safetensors", allow_lossy=True).written
        for path in ("w.pt", "native", "back"):
            assert tessera.verify(path) == []
            with tessera.open(path) as checkpoint:
                assert checkpoint["w"][1:, 2:].tobytes() == b"\\6\\0\\7\\0\\12\\0\\13\\0"
        try:
            tessera.open("nothing")
        except tessera.Error as error:
            assert error.kind == "not_found", error.kind
        maps = {line.split()[-1] for line in open("/proc/self/maps")} if os.path.exists("/proc/self/maps") else set()
        assert not any("hdf5" in name or "libstdc++" in name for name in maps)
    """
    succeed(*enter, "-c", textwrap.dedent(program), environment=environment)
    for tool in ("ckpt-inspect", "ckpt-reshard"):
        assert "0.1.0" in succeed(*IN_ROOT, root, f"/tmp/prefix/bin/{tool}", "--version", environment=environment)
    listing = succeed(*IN_ROOT, root, "/tmp/prefix/bin/ckpt-inspect", "ls", "/tmp/native", environment=environment)
    assert listing == run("ckpt-inspect", "ls", root / "tmp" / "native").stdout.replace(str(root), "")


def test_importing_it_loads_neither_torch_nor_numpy(bare):
    root, enter, environment = bare
    loaded = succeed(*enter, "-c", "import sys, tessera; print(*sorted(sys.modules))", environment=environment).split()
    assert "tessera._core" in loaded and not {"torch", "numpy", "tqdm", "ctypes"}.intersection(loaded)


def test_the_sdist_has_all_that_a_compiler_needs(built):
    with tarfile.open(the(built, "*.tar.gz")) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    for name in ("PKG-INFO", "pyproject.toml", "core/src/base/error.cpp", "core/include/tessera/base/error.h",
                 "core/tools/ckpt-inspect/main.cpp", "dependencies/hdf5/src/H5F.c", "dependencies/zstd/lib/zstd.h",
                 "dependencies/nettle/sha256.c", "dependencies/hdf5/COPYING"):
        assert name in names, name
    assert not any("/tests/" in name or name.startswith("core/docs") for name in names if "dependencies" not in name)


def test_the_sdist_builds_with_a_compiler_alone(built, tmp_path):
    """The machine has a compiler and its own HDF5, but no pkg-config, so the build cannot find the machine's libraries
    and uses those of the sdist."""
    environment = os.environ | {"PYTHONPATH": str(Path(scikit_build_core.__file__).parents[1]), "PKG_CONFIG": "/nothing"}
    succeed(sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-index", "--no-deps", "--wheel-dir", tmp_path,
            the(built, "*.tar.gz"), environment=environment)
    with zipfile.ZipFile(the(tmp_path, "*.whl")) as archive:
        archive.extractall(tmp_path / "site")
    [extension] = (tmp_path / "site" / "tessera").glob("_core*.so")
    assert not [path for path in libraries_of(extension) if "hdf5" in path.name or "zstd" in path.name]
    program = "import tessera; print(tessera.scan('.').files)"
    assert succeed(sys.executable, "-c", program, environment=os.environ | {"PYTHONPATH": str(tmp_path / "site")}, cwd=tmp_path)
