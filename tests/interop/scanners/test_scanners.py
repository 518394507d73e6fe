"""`ckpt-inspect scan` beside picklescan, modelscan and fickling. None of them loads a file, and this test loads none."""

import json
import logging
import sys
import zipfile
from pathlib import Path

import pytest
from fickling.analysis import UnsafeImportsML
from fickling.fickle import UNSAFE_IMPORTS
from modelscan.settings import DEFAULT_SETTINGS
from picklescan.scanner import _unsafe_globals, scan_file_path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ckpt_tools import FIXTURES, run  # noqa: E402

FOLDER = FIXTURES / "pickle_scan"
# picklescan also calls all of `uuid` dangerous, and getattr with constant names.
HARMLESS = {"harmless/values.pkl", "harmless/enumeration.pkl"}
SOME_NAME = "some_name"


def names(table):
    """Yields (module, name) of a table {module: "*" or names}."""
    for module, attributes in table.items():
        for attribute in [SOME_NAME] if attributes == "*" else [attributes] if isinstance(attributes, str) else attributes:
            yield module, attribute


def listed():
    yield from names(_unsafe_globals)
    for table in DEFAULT_SETTINGS["unsafe_globals"].values():
        yield from names(table)
    yield from names(UnsafeImportsML.UNSAFE_IMPORTS)
    for module in [*UnsafeImportsML.UNSAFE_MODULES, *UNSAFE_IMPORTS]:
        yield module, SOME_NAME


def scan(path):
    return json.loads(run("ckpt-inspect", "scan", "--json", path).stdout)


def issues_of_picklescan(path):
    try:
        return scan_file_path(str(path)).issues_count
    except (OSError, zipfile.BadZipFile):  # an empty file, or an archive that Python refuses
        return 0


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_what_picklescan_finds_is_found():
    """Shows A3, E3."""
    missed = []
    for name in json.loads((FOLDER / "expect.json").read_text()):
        if issues_of_picklescan(FOLDER / name) > 0 and scan(FOLDER / name)["clean"]:
            missed.append(name)
    assert set(missed) == HARMLESS


def test_what_others_list_is_dangerous(tmp_path):
    """Shows A3. fickling's list also names `compile`, `exec` and `eval`, which are builtins, not modules."""
    wanted = {(module, name) for module, name in listed() if module not in ("compile", "exec", "eval")}
    pickle = b"\x80\x02" + b"".join(f"c{module}\n{name}\n0".encode() for module, name in sorted(wanted)) + b"N."
    (tmp_path / "all").write_bytes(pickle)
    verdicts = {(each["module"], each["name"]): each["verdict"] for each in scan(tmp_path / "all")["names"]}
    assert wanted <= verdicts.keys()
    assert {each: verdicts[each] for each in wanted if verdicts[each] != "dangerous"} == {}
