"""Refuses an extension that was built with other Python files than these, before anything is half done with it.

What both have in common is the text of _core.pyi: the build puts its digest into the extension.
"""

import hashlib
import pathlib

from . import _core

_found = getattr(_core, "__interface__", None)
if _found != hashlib.sha256(pathlib.Path(__file__).with_name("_core.pyi").read_bytes()).hexdigest():
    raise ImportError(f"{_core.__file__}: expected the extension that belongs to the Python files beside it, found one built "
                      f"with others (version {_core.__version__}): install the package again, or build tessera_python again",
                      name=_core.__name__, path=_core.__file__)
