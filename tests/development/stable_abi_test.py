"""Checks that the Python extension calls only the stable ABI, because one wheel is for CPython 3.12 and all later versions.

A build for an older Python accepts forbidden calls, so this test reads the sources. tests/interop/test_python_stable_abi.py
compiles such a wheel, but only on demand.
"""

import re
import unittest
from pathlib import Path

EXTENSION = Path(__file__).resolve().parents[2] / "tools" / "python" / "extension"
# Macros that read Python's structs, such as PyFloat_AS_DOUBLE and PyList_GET_ITEM, and complex numbers as a struct.
NOT_STABLE = re.compile(r"\bPy\w*_(?:AS|GET|SET)_[A-Z]+\b|\bPy_complex\b|\bPyComplex_(?:As|From)CComplex\b|\b_Py\w+")


class StableAbiTest(unittest.TestCase):
    def test_no_source_calls_what_the_stable_abi_lacks(self):
        sources = sorted(EXTENSION.glob("*.cpp")) + sorted(EXTENSION.glob("*.h"))
        self.assertGreater(len(sources), 10)
        found = [f"{source.name}:{number}: {name}" for source in sources
                 for number, line in enumerate(source.read_text().splitlines(), 1) for name in NOT_STABLE.findall(line)]
        self.assertEqual(found, [])


if __name__ == "__main__":
    unittest.main()
