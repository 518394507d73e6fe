"""mypy's strict mode over the Python package, and over a program that uses it. Needs no build."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[2] / "tools" / "python" / "src"


def check(tmp_path, *arguments):
    """Returns what mypy says about the sources. Lightning, transformers and torchtitan need not be installed."""
    settings = tmp_path / "mypy.ini"
    settings.write_text("[mypy]\nstrict = True\n" + "".join(
        f"[mypy-{framework}.*]\nignore_missing_imports = True\n"
        for framework in ("lightning", "lightning_fabric", "transformers", "torchtitan")))
    command = [sys.executable, "-m", "mypy", "--config-file", settings, "--cache-dir", tmp_path / "cache", *arguments]
    process = subprocess.run(command, cwd=tmp_path, env=os.environ | {"MYPYPATH": str(SOURCES)}, capture_output=True,
                             text=True)
    return process.stdout + process.stderr


def test_the_package_and_a_program_that_uses_it_are_strictly_typed(tmp_path):
    assert check(tmp_path, "-p", "tessera").startswith("Success: no issues found in ")
    assert check(tmp_path, HERE / "public_calls.py") == "Success: no issues found in 1 source file\n"
