"""Checks that each option of ckpt-reshard exists on the command line, in Python, in the journal and on its page.

TESSERA_BIN, if set, is the folder of a built ckpt-reshard: its --help must then list the same options.
"""

import ast
import os
import re
import subprocess
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BIN = os.environ.get("TESSERA_BIN")

# Options that Python, or the journal, lacks on purpose.
NOT_IN_PYTHON = {
    "quiet", "json", "color",  # a function prints nothing, and returns its summary
    "workers",  # Python's `part` and `parts` are numbers; it reads no launcher's variables
    "dequantize",  # only the tool can compute new numbers; Python has no `combine` either
}
NOT_IN_JOURNAL = {
    "dequantize",  # the journal has an entry for it outside the plan
    "to", "compress", "base", "changed-rows", "max-shard-size", "device-mesh",  # part of the journal's destination, not of its plan
    "extra-files", "extra-files-from", "extra-files-limit",  # the journal names the files that they select
    "memory", "threads", "spool", "dry-run", "overwrite", "resume", "discard", "quiet", "json", "progress", "color",  # may differ
    "endpoint",  # may differ; changed source objects are refused in any case
    "part", "workers", "take-over",  # the journal has an entry for the number of workers
}
ANOTHER_NAME_IN_PYTHON = {"ranks": "world-size", "parts": "part"}  # Python also has world_size and part
# Options of merge and split, which other sections of the page describe.
JOURNAL_OF_OTHER_VERBS = {"prefix", "sources", "prefer"}
EXTENSION_OF_OTHER_VERBS = {"prefix", "keep-prefix", "prefer"}


def text(path: str) -> str:
    return (ROOT / path).read_text()


def function(path: str, signature: str) -> str:
    """Returns the text of a C++ function up to the first line that is a single brace."""
    source = text(path)
    begin = source.index(signature)
    return source[begin:source.index("\n}\n", begin)]


def option_names(names) -> set[str]:
    return {name.replace("_", "-") for name in names}


def command_line() -> set[str]:
    body = function("tools/ckpt-reshard/move_options.cpp", "void add_move_options(")
    body += function("tools/ckpt-reshard/move_options.cpp", "void add_run_options(")
    body += function("tools/ckpt-reshard/move_options.cpp", "void add_flat_layout_option(")
    body += function("tools/ckpt-reshard/move_options.cpp", "void add_base_option(")
    body += function("tools/ckpt-reshard/worker_options.cpp", "void add_worker_options(")
    body += function("tools/cli/threads_option.cpp", "void add_threads_option(")
    body += function("tools/cli/progress.cpp", "void add_progress_option(")
    body += function("tools/cli/recipe_option.cpp", "void add_recipe_options(")
    body += function("tools/cli/command_line.cpp", "void CommandLine::add_common_options(")
    return set(re.findall(r'(?:option|choice|flag)\(\s*"--([\w-]+)"', body))


def python_keywords() -> set[str]:
    module = ast.parse(text("tools/python/src/tessera/_moves.py"))
    [reshard] = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == "reshard"]
    return option_names(ANOTHER_NAME_IN_PYTHON.get(argument.arg, argument.arg) for argument in reshard.args.kwonlyargs)


def described_keywords() -> set[str]:
    module = ast.parse(text("tools/python/src/tessera/_moves.py"))
    [reshard] = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == "reshard"]
    described = re.findall(r"^([a-z_]+)(?:, or ([a-z_]+),)?.*?:", ast.get_docstring(reshard), re.MULTILINE)
    names = (name for line in described for name in line if name)
    return option_names(ANOTHER_NAME_IN_PYTHON.get(name, name) for name in names)


def extension_members() -> set[str]:
    """Returns the options that Python passes to the extension, and `progress`, which is a separate argument."""
    stub = ast.parse(text("tools/python/src/tessera/_core.pyi"))
    [options] = [node for node in stub.body if isinstance(node, ast.ClassDef) and node.name == "_MoveOptions"]
    members = {"prefix" if node.target.id == "prefixes" else node.target.id for node in options.body}
    return option_names(members) | {"progress"}


def extension_reads() -> set[str]:
    body = function("tools/python/extension/bind_move.cpp", "MoveOptions move_options(")
    members = re.findall(r'\.read\w*\("(\w+)"', body)
    return option_names("prefix" if name == "prefixes" else name for name in members) | {"progress"}


def journal() -> set[str]:
    return set(re.findall(r'explanation\.add\w*\("([\w-]+)"', text("src/reshard/journaled_options.cpp")))


def given_members() -> set[str]:
    header = text("src/reshard/journaled_options.h")
    struct = header[header.index("struct JournaledOptions {"):header.index("\n};")]
    return set(re.findall(r"^  [\w:<>]+ (\w+)(?: = |\{)", struct, re.MULTILINE))


def page() -> set[str]:
    return set(re.findall(r"^\| `--([\w-]+)", text("docs/cli/ckpt-reshard.md"), re.MULTILINE))


class MoveOptionsTest(unittest.TestCase):
    def test_options_are_found_where_they_are_looked_for(self):
        self.assertLessEqual({"to", "world-size", "progress"}, command_line())

    def test_exceptions_are_options(self):
        self.assertLessEqual(NOT_IN_PYTHON | NOT_IN_JOURNAL, command_line())

    def test_python_has_the_options_of_the_command_line(self):
        self.assertEqual(python_keywords(), command_line() - NOT_IN_PYTHON)

    def test_the_docstring_describes_them_all(self):
        self.assertEqual(described_keywords(), python_keywords())

    def test_the_extension_is_given_and_reads_them_all(self):
        self.assertEqual(extension_members(), python_keywords() | EXTENSION_OF_OTHER_VERBS)
        self.assertEqual(extension_reads(), extension_members())

    def test_the_journal_has_the_options_that_kept_work_depends_on(self):
        self.assertEqual(journal(), (command_line() - NOT_IN_JOURNAL) | JOURNAL_OF_OTHER_VERBS)

    def test_the_tool_and_the_package_fill_the_journal_alike(self):
        self.assertEqual(len(given_members()), len(journal()))
        tool = function("tools/ckpt-reshard/move_options.cpp", "formats::CreateOptions create_options(")
        package = text("tools/python/extension/move_request.cpp")
        self.assertEqual(set(re.findall(r"\.(\w+) = [\w.]+(?:\(options\.renames\))?[,}]", tool)), given_members())
        self.assertEqual(set(re.findall(r"\bgiven\.(\w+)(?: = |\.push_back|, prefixes\.)", package)), given_members())

    def test_the_page_has_a_row_for_each(self):
        self.assertEqual(page(), command_line())

    @unittest.skipUnless(BIN, "needs TESSERA_BIN")
    def test_the_help_lists_them(self):
        said = subprocess.run([Path(BIN) / "ckpt-reshard", "--help"], capture_output=True, text=True, check=True).stdout
        options = said[said.index("\nOptions\n"):said.index("\nExamples\n")]
        self.assertEqual(set(re.findall(r"^  --([\w-]+)", options, re.MULTILINE)), command_line() | {"help"})


if __name__ == "__main__":
    unittest.main()
