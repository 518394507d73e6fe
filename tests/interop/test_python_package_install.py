"""`pip install ./tools/python` into a new environment, from a clone. test_python_wheel.py has the wheel and the sdist."""

import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
import scikit_build_core
import torch

from ckpt_tools import ROOT, reshard

PACKAGE = ROOT / "tools" / "python"
PIP = ["-m", "pip", "--disable-pip-version-check", "--no-input"]
OFFLINE = ["--no-build-isolation", "--no-index", "--no-deps"]


def succeed(*command, environment=None, cwd=None):
    process = subprocess.run([str(word) for word in command], env=os.environ | (environment or {}), cwd=cwd,
                             capture_output=True, text=True, check=False)
    assert process.returncode == 0, f"{command}: {process.stdout}\n{process.stderr}"
    return process.stdout


@pytest.fixture
def python(tmp_path):
    """The interpreter of a new environment with nothing in it."""
    succeed(sys.executable, "-m", "venv", tmp_path / "venv")
    return tmp_path / "venv" / "bin" / "python"


BUILDERS = {"PYTHONPATH": str(Path(scikit_build_core.__file__).parents[1])}  # and nanobind beside it


def try_it(python, tmp_path):
    """Reads, checks and moves in an environment that has neither torch nor NumPy."""
    torch.save({"w": torch.arange(12, dtype=torch.int16).reshape(3, 4), "step": 7}, tmp_path / "w.pt")
    reshard(tmp_path / "w.pt", tmp_path / "native")
    program = """
        import importlib.metadata, importlib.util, tessera
        assert importlib.util.find_spec("numpy") is None and importlib.util.find_spec("torch") is None
        assert importlib.metadata.version("tessera") == tessera.__version__
        assert importlib.metadata.requires("tessera") is None
        for path in ("w.pt", "native"):
            with tessera.open(path) as checkpoint:
                assert checkpoint["w"][1:, 2:].tobytes() == b"\\6\\0\\7\\0\\12\\0\\13\\0", checkpoint["w"][1:, 2:].tobytes()
                assert checkpoint["step"] == 7
            assert tessera.verify(path) == []
        assert tessera.reshard("w.pt", "moved", ranks=2, compress="zstd").written
    """
    succeed(python, "-c", textwrap.dedent(program), cwd=tmp_path, environment={"PYTHONPATH": ""})


def test_from_a_clone(python, tmp_path):
    succeed(python, *PIP, "wheel", *OFFLINE, "--wheel-dir", tmp_path / "wheels", PACKAGE, environment=BUILDERS)
    [wheel] = (tmp_path / "wheels").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if name.startswith("tessera/") and not name.endswith("/")}
    [extension] = [name for name in files if name.endswith(".so")]
    assert files - {extension} == {f"tessera/{path.name}" for path in (PACKAGE / "src" / "tessera").iterdir() if path.is_file()}
    succeed(python, *PIP, "install", "--no-index", wheel)
    try_it(python, tmp_path)
