"""The installed versions of PyTorch and safetensors write, and Tessera reads."""

import os
import runpy
import sys
import warnings
from pathlib import Path

import pytest
import torch.distributed.checkpoint  # noqa: F401  (here, before the scripts are forked: each would import it)
import torch.distributed.fsdp  # noqa: F401
from ckpt_tools import MAKE, assert_same_state, expectation, listing
from on_ranks import run_function

SCRIPTS = ("write_torch_zip.py", "write_bin.py", "write_safetensors.py", "write_dcp.py", "write_rank_files.py")


def run_script(name, folder):
    os.environ["TESSERA_FIXTURES"] = str(folder)
    warnings.simplefilter("ignore")
    sys.argv = [str(MAKE / name)]
    sys.path.insert(0, str(MAKE))
    runpy.run_path(sys.argv[0], run_name="__main__")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Writes all fixtures again with the installed peers: torch.save, safetensors, and DCP from one to four processes."""
    folder = tmp_path_factory.mktemp("written")
    for script in SCRIPTS:
        run_function(run_script, 1, script, folder)
    paths = [Path(str(p).removesuffix(".expect.json")) for p in sorted(folder.glob("*/valid/*.expect.json"))]
    return [path for path in paths if path.exists()]


@pytest.mark.parametrize("format_name, at_least", [("torch_zip", 21), ("bin", 3), ("safetensors", 7), ("dcp", 19), ("rank_files", 5)])
def test_listing_equals_what_the_trainer_held(written, format_name, at_least):
    """Shows E2, E9, E14. Like the test of the fixtures, but with the torch and safetensors installed here."""
    paths = [path for path in written if path.parts[-3] == format_name]
    assert len(paths) >= at_least
    for path in paths:
        assert_same_state(listing(path), expectation(path))
