"""Imports verl without ray. Ray is half a gigabyte, and only verl's trainer needs it."""

import importlib.util
import sys
import types
from pathlib import Path

NEED_RAY = ("verl", "verl.utils.checkpoint")  # the two packages whose __init__.py imports ray


def find_verl() -> None:
    """Makes `import verl.…` work. The modules are verl's own; only the two __init__.py are skipped."""
    folder = Path(importlib.util.find_spec("verl").origin).parent
    for name in NEED_RAY:
        package = types.ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
