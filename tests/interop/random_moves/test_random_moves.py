"""Random state dicts, in many forms, take random moves to random formats. What PyTorch, safetensors and h5py read at
the end of each move is what they read before, but for what the summary of the move says.

TESSERA_RANDOM_MOVES is the number of seeds, TESSERA_TEST_SEED the first one."""

import logging
import os
import random
import sys
import warnings
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
from sources import Unusable  # noqa: E402
from walk import Walk  # noqa: E402

COUNT = os.environ.get("TESSERA_RANDOM_MOVES")
FIRST = int(os.environ.get("TESSERA_TEST_SEED", random.SystemRandom().randrange(1 << 32) if COUNT else 1))


@pytest.mark.parametrize("seed", range(FIRST, FIRST + int(COUNT or 80)))
def test_what_a_move_changes_is_in_its_summary(seed, tmp_path):
    """Shows A2, A4, E2."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        walk = Walk(seed, tmp_path)
    except Unusable:
        return
    walk.go()
    if walk.faults:
        again = f"TESSERA_TEST_SEED={seed} TESSERA_RANDOM_MOVES=1 repeats these commands, and keeps the files:"
        pytest.fail("\n".join([again, *walk.commands, "", *walk.faults]), pytrace=False)
