"""Holds the pages that list formats to the list of the tools.

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


def formats(tool: str) -> list[str]:
    text = subprocess.run([ARGUMENTS.bin / tool, "--help"], capture_output=True, text=True, check=True).stdout
    section = text[text.index("\nFormats\n"):].split("\n\n")[0]
    return re.findall(r"^  (\S+)  ", section, re.MULTILINE)


class FormatsInDocsTest(unittest.TestCase):
    def test_both_tools_know_the_same_formats(self):
        self.assertIn("native", formats("ckpt-inspect"))
        self.assertEqual(formats("ckpt-inspect"), formats("ckpt-reshard"))

    def test_each_format_has_a_page(self):
        for name in formats("ckpt-inspect"):
            self.assertTrue((ARGUMENTS.docs / "formats" / PAGES.get(name, f"{name}.md")).exists(), name)

    def test_the_option_to_lists_each_format_that_is_written(self):
        page = (ARGUMENTS.docs / "cli" / "ckpt-reshard.md").read_text()
        row = re.search(r"^\| `--to FORMAT` \|(.*)$", page, re.MULTILINE)[1]
        listed = re.findall(r"`(\w+)`", row.split("Default")[0])
        refusal = subprocess.run([ARGUMENTS.bin / "ckpt-reshard", "./a", "./b", "--to", "?"], capture_output=True, text=True)
        written = re.search(r"expected (.*), found", refusal.stderr)[1].split(" or ")
        self.assertEqual(sorted(listed), sorted(written))


if __name__ == "__main__":
    ARGUMENTS, rest = OPTIONS.parse_known_args()
    unittest.main(argv=[__file__, *rest])
