"""A format that one registered driver adds is known to every tool and to the Python package.

usage: example_format_test.py --bin DIRECTORY [--python PYTHON --package DIRECTORY]
"""
import argparse
import json
import os
import pathlib
import subprocess
import tempfile
import unittest

OPTIONS = argparse.ArgumentParser()
OPTIONS.add_argument("--bin", type=pathlib.Path, required=True)
OPTIONS.add_argument("--python")
OPTIONS.add_argument("--package")

ROWS = "rows 1\nlayer.weight 2x3 1 2 3 4 5 6\nlayer.bias 2 0.5 -1\n"
PYTHON = """
import sys, tessera
with tessera.open(sys.argv[1]) as checkpoint:
    print(checkpoint.format, sorted(checkpoint), checkpoint["layer.bias"].tobytes().hex())
try:
    tessera.reshard(sys.argv[1], sys.argv[2], to="rows")
except Exception as error:
    print(error)
tessera.reshard(sys.argv[1], sys.argv[2], to="dcp")
"""


class MadeUpFormatTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.rows = self.folder / "model.rows"
        self.rows.write_text(ROWS)

    def run_tool(self, *arguments, code=0):
        tool, *rest = map(str, arguments)
        result = subprocess.run([ARGUMENTS.bin / tool, *rest], capture_output=True, text=True)
        self.assertEqual(result.returncode, code, result.stderr)
        return result.stdout + result.stderr

    def test_it_is_listed_and_verified(self):
        listed = json.loads(self.run_tool("ckpt-inspect", "ls", self.rows, "--json"))
        self.assertEqual(listed["format"], "rows")
        self.assertEqual([tensor["name"] for tensor in listed["tensors"]], ["layer.bias", "layer.weight"])
        self.assertIn("rows", self.run_tool("ckpt-inspect", "verify", self.rows))
        self.assertIn("-1", self.run_tool("ckpt-inspect", "show", self.rows, "layer.bias"))

    def test_it_moves_to_every_format_that_is_written(self):
        for name in ("native", "dcp", "safetensors", "torch"):
            moved = self.folder / f"moved-{name}"
            self.run_tool("ckpt-reshard", self.rows, moved, "--to", name)
            self.run_tool("ckpt-inspect", "diff", self.rows, moved)

    def test_it_is_refused_as_a_destination_by_the_formats_that_write(self):
        said = self.run_tool("ckpt-reshard", self.rows, self.folder / "out", "--to", "rows", code=2)
        for name in ("native", "dcp", "safetensors", "torch"):
            self.assertIn(name, said)
        self.assertFalse((self.folder / "out").exists())

    def test_help_names_it(self):
        for tool in ("ckpt-inspect", "ckpt-reshard"):
            self.assertIn("Rows of numbers: a file; read only", self.run_tool(tool, "--help"))

    def test_python_knows_it(self):
        result = subprocess.run([ARGUMENTS.python, "-c", PYTHON, self.rows, self.folder / "moved"],
                                env={**os.environ, "PYTHONPATH": ARGUMENTS.package}, capture_output=True, text=True)
        self.assertEqual(result.returncode, 0, result.stderr)
        first, refusal = result.stdout.splitlines()[:2]
        self.assertEqual(first, "rows ['layer.bias', 'layer.weight'] 0000003f000080bf")
        self.assertIn("native, dcp, safetensors, rank_files, deepspeed, megatron or torch", refusal)
        self.run_tool("ckpt-inspect", "diff", self.rows, self.folder / "moved")


if __name__ == "__main__":
    ARGUMENTS, rest = OPTIONS.parse_known_args()
    if ARGUMENTS.python is None:  # built without the Python package
        del MadeUpFormatTest.test_python_knows_it
    unittest.main(argv=[__file__, *rest])
