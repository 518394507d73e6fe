"""mypy and pyright over the Python package, and over a program that uses it. Needs no build."""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[2] / "tools" / "python" / "src"
FRAMEWORKS = ("lightning", "lightning_fabric", "transformers", "torchtitan")  # need not be installed


def output_of(tmp_path, command, **variables):
    process = subprocess.run(command, cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True)
    assert process.returncode in (0, 1), process.stderr  # others: the checker did not run
    return process.stdout


def mypy(tmp_path, *arguments):
    """Returns what mypy's strict mode says."""
    settings = tmp_path / "mypy.ini"
    settings.write_text("[mypy]\nstrict = True\n" + "".join(
        f"[mypy-{framework}.*]\nignore_missing_imports = True\n" for framework in FRAMEWORKS))
    command = [sys.executable, "-m", "mypy", "--config-file", settings, "--cache-dir", tmp_path / "cache", *arguments]
    return output_of(tmp_path, command, MYPYPATH=str(SOURCES))


def pyright(tmp_path, *arguments, **settings):
    """Returns what pyright says. Its JavaScript and node come with its packages, so it downloads nothing."""
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"pythonVersion": "3.10", **settings}))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, *arguments]
    path = os.pathsep.join([str(SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])])
    return json.loads(output_of(tmp_path, command, PYTHONPATH=path, PYRIGHT_PYTHON_IGNORE_WARNINGS="1"))


def lines_of(report):
    return [f"{each['file']}:{each['range']['start']['line'] + 1}: {each['message']}" for each in report["generalDiagnostics"]]


def test_mypy_accepts_the_package_and_a_program_that_uses_it(tmp_path):
    assert mypy(tmp_path, "-p", "tessera").startswith("Success: no issues found in ")
    assert mypy(tmp_path, HERE / "public_calls.py") == "Success: no issues found in 1 source file\n"


def test_pyright_accepts_a_program_that_uses_the_package_in_its_strict_mode(tmp_path):
    report = pyright(tmp_path, include=[os.path.relpath(HERE / "public_calls.py", tmp_path)], typeCheckingMode="strict",
                     reportUnnecessaryTypeIgnoreComment=True, reportMissingModuleSource=False)
    assert lines_of(report) == [] and report["summary"]["filesAnalyzed"] == 1


def test_pyright_accepts_the_package(tmp_path):
    """Its standard mode: the strict one refuses what torch leaves untyped, and checks of what programs without types pass."""
    report = pyright(tmp_path, include=[os.path.relpath(SOURCES / "tessera", tmp_path)], typeCheckingMode="standard",
                     reportMissingImports=False, reportMissingModuleSource=False)
    assert lines_of(report) == [] and report["summary"]["filesAnalyzed"] > 20


def test_pyright_knows_the_type_of_each_public_name(tmp_path):
    report = pyright(tmp_path, "--verifytypes", "tessera", "--ignoreexternal")["typeCompleteness"]
    of_frameworks = tuple(f"tessera.{framework}." for framework in FRAMEWORKS)
    found = [f"{symbol['name']}: {each['message']}" for symbol in report["symbols"] if not symbol["name"].startswith(of_frameworks)
             for each in symbol["diagnostics"] if each["severity"] == "error"]
    # It doesn't look up base classes in other packages.
    assert [line for line in found if not line.endswith(("base class unknown", "metaclass unknown"))] == [] and len(report["symbols"]) > 50
