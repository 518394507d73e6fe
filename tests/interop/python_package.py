"""The Python package, as the build made it."""

import sys

from ckpt_tools import BIN

sys.path.insert(0, str(BIN.parent / "python"))
import tessera  # noqa: E402, F401
