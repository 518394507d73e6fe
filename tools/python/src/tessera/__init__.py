"""Opens, checks and moves the checkpoints of distributed training, whatever format and sharding they have.

    with tessera.open("step-1000") as checkpoint:
        checkpoint["model.embedding.weight"][10:20].torch()   # reads these rows alone
    tessera.verify("step-1000")                               # a list of what is wrong
    tessera.scan("download")                                  # what its pickles would import and call
    tessera.reshard("step-1000", "step-1000.8", ranks=8)      # and merge, and split
"""

from . import _interface  # first: the others take the extension as it should be
from ._checkpoint import Checkpoint, open
from ._core import __version__
from ._errors import Error, MissingName, Problem, Refused
from ._moves import ExtraFile, LeftFile, Overflow, RankShare, Resharded, merge, reshard, split
from ._scan import Scanned, ScannedName, ScannedPlace, ScanProblem, scan
from ._symbol import Symbol
from ._tensor import Tensor
from ._verify import verify

__all__ = ["Checkpoint", "Error", "ExtraFile", "LeftFile", "MissingName", "Overflow", "Problem", "RankShare", "Refused",
           "Resharded", "ScanProblem", "Scanned", "ScannedName", "ScannedPlace", "Symbol", "Tensor", "__version__", "merge", "open",
           "reshard", "scan", "split", "verify"]
