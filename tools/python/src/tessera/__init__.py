"""Saves, loads, opens, checks and moves checkpoints of training in many formats and any sharding.

    tessera.save(state_dict, "step-1000")                     # on all ranks; tessera.async_save in the background
    tessera.load(state_dict, "step-1000")                     # in place, on any number of ranks
    with tessera.open("step-1000") as checkpoint:
        checkpoint["model.embedding.weight"][10:20].torch()   # reads only these rows
    tessera.verify("step-1000")                               # a list of problems
    tessera.scan("download")                                  # the names that its pickles would import and call
    tessera.reshard("step-1000", "step-1000.8", ranks=8)      # and merge, and split
"""

from . import _interface  # first, because the others need the right extension
from ._checkpoint import Checkpoint, open
from ._core import __version__
from ._errors import Error, MissingName, Problem, Refused
from ._latest import LatestValid, Skipped, latest_valid
from ._load import Loaded, load
from ._moves import ExtraFile, LeftFile, Overflow, RankShare, Resharded, merge, reshard, split
from ._per_rank import PerRank, rng
from ._save import Saved, async_save, save
from ._scan import Scanned, ScannedName, ScannedPlace, ScanProblem, scan
from ._symbol import Symbol
from ._tensor import Tensor
from ._verify import verify

__all__ = ["Checkpoint", "Error", "ExtraFile", "LatestValid", "LeftFile", "Loaded", "MissingName", "Overflow", "PerRank", "Problem", "RankShare",
           "Refused", "Resharded", "Saved", "ScanProblem", "Scanned", "ScannedName", "ScannedPlace", "Skipped", "Symbol", "Tensor",
           "__version__", "async_save", "latest_valid", "load", "merge", "open", "reshard", "rng", "save", "scan", "split", "verify"]
