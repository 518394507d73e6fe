"""Checks that a test shows each row of docs/requirements.md, that docs/testing.md names no other rows, and that no test has a row's
number in its name."""

import re
import subprocess
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROW = r"[A-F]\d{1,2}"
MARK = re.compile(rf"\bShows ({ROW}(?:, {ROW})*)\.")
NAME_WITH_A_ROW = re.compile(rf"(?:TEST(?:_[FP])?|RC_GTEST_PROP)\(\w+,\s*{ROW}[_A-Z]|def test_{ROW}_", re.IGNORECASE)


def sources() -> dict[str, str]:
    paths = subprocess.run(["git", "ls-files", "tests/*.cpp", "tests/*.cu", "tests/*.py"], cwd=ROOT, check=True,
                           capture_output=True, text=True).stdout.split()
    return {path: (ROOT / path).read_text() for path in paths}


def rows() -> list[str]:
    return re.findall(rf"^\| ({ROW}) \|", (ROOT / "docs/requirements.md").read_text(), re.MULTILINE)


class RequirementsTest(unittest.TestCase):
    def test_every_row_has_a_test_and_every_mark_a_row(self):
        shown = {row for text in sources().values() for marks in MARK.findall(text) for row in marks.split(", ")}
        self.assertGreater(len(rows()), 40)
        self.assertEqual(shown, set(rows()))

    def test_every_row_in_the_page_about_tests_is_a_requirement(self):
        cells = re.findall(rf"^\| ({ROW}(?:, {ROW})*) \|", (ROOT / "docs/testing.md").read_text(), re.MULTILINE)
        named = {row for cell in cells for row in cell.split(", ")}
        self.assertGreater(len(named), 40)
        self.assertEqual(named - set(rows()), set())

    def test_no_test_is_named_for_a_row(self):
        for path, text in sources().items():
            self.assertEqual(NAME_WITH_A_ROW.findall(text), [], path)


if __name__ == "__main__":
    unittest.main()
