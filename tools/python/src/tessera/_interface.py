"""Checks at import that the extension was built with these Python files.

The build puts a digest of _core.pyi into the extension. It must be the digest of the _core.pyi beside this file.
"""

import hashlib
import pathlib

from . import _core

_found = getattr(_core, "__interface__", None)
if _found != hashlib.sha256(pathlib.Path(__file__).with_name("_core.pyi").read_bytes()).hexdigest():
    raise ImportError(f"{_core.__file__}: expected an extension built with the Python files beside it, found one built with "
                      f"other files (version {_core.__version__}): install the package again, or build tessera_python again",
                      name=_core.__name__, path=_core.__file__)
