"""Checks that the pages that list formats have the same formats as the tools.

usage: formats_in_docs_test.py --bin DIRECTORY --docs DIRECTORY
"""
import argparse
import pathlib
import re
import subprocess
import unittest

OPTIONS = argparse.ArgumentParser()
OPTIONS.add_argument("--bin", type=pathlib.Path, required=True)
OPTIONS.add_argument("--docs", type=pathlib.Path, required=True)

PAGES = {"torch": "torch_zip.md"}  # a page is named as its format, but for these


def formats(tool: str) -> dict[str, str]:
    """Returns the formats in a tool's help: names and descriptions."""
    text = subprocess.run([ARGUMENTS.bin / tool, "--help"], capture_output=True, text=True, check=True).stdout
    section = text[text.index("\nFormats\n"):].split("\n\n")[0]
    rows = re.findall(r"^  (\S+)  +(\S.*(?:\n   +\S.*)*)", section, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text) for name, text in rows}


class FormatsInDocsTest(unittest.TestCase):
    def test_both_tools_know_the_same_formats(self):
        self.assertIn("native", formats("ckpt-inspect"))
        self.assertEqual(formats("ckpt-inspect"), formats("ckpt-reshard"))

    def test_the_table_of_formats_is_that_of_the_help(self):
        page = (ARGUMENTS.docs / "formats" / "README.md").read_text()
        rows = re.findall(r"^\| \[(\w+)\]\((\S+)\) \| (.*) \|$", page, re.MULTILINE)
        self.assertEqual(rows, [(name, PAGES.get(name, f"{name}.md"), text)
                                for name, text in formats("ckpt-inspect").items()])

    def test_the_option_to_lists_each_format_that_is_written(self):
        page = (ARGUMENTS.docs / "cli" / "ckpt-reshard.md").read_text()
        row = re.search(r"^\| `--to FORMAT` \|(.*)$", page, re.MULTILINE)[1]
        listed = re.findall(r"`(\w+)`", row.split("Default")[0])
        refusal = subprocess.run([ARGUMENTS.bin / "ckpt-reshard", "./a", "./b", "--to", "?"], capture_output=True, text=True)
        written = re.search(r"expected (.*), found", refusal.stderr)[1]
        written = re.split(", | or ", written)
        self.assertEqual(sorted(listed), sorted(written))


if __name__ == "__main__":
    ARGUMENTS, rest = OPTIONS.parse_known_args()
    unittest.main(argv=[__file__, *rest])
