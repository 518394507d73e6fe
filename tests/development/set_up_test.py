"""Builds real Python environments from a package index that is a folder with one tiny wheel."""

import contextlib
import io
import multiprocessing
import os
import tempfile
import unittest
import zipfile
from pathlib import Path
from unittest import mock

import modules  # noqa: F401
import debian_packages
import places
import python_environment
from console import Stop


REQUIREMENTS = python_environment.requirements  # the tests replace it


def write_wheel(folder: Path, version: str) -> None:
    info = f"torch-{version}.dist-info"
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("torch.py", f"__version__ = '{version}'\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def hold_lock(folder: str, held, release) -> None:
    with places.locked(Path(folder), "a test"):
        held.set()
        release.wait()


class SetUpTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        write_wheel(self.folder, "1.2.3")
        environment = {"TESSERA_CACHE": str(self.folder / "cache"), "PIP_NO_INDEX": "1",
                       "PIP_FIND_LINKS": str(self.folder), "PIP_CONFIG_FILE": os.devnull}
        self.patches = contextlib.ExitStack()
        self.addCleanup(self.patches.close)
        enter = self.patches.enter_context
        enter(mock.patch.dict(os.environ, environment))
        enter(mock.patch.object(python_environment, "requirements", lambda version: f"torch=={version or '1.2.3'}\n"))
        enter(mock.patch.object(python_environment, "NEEDED_GIB", 0))
        self.shown = enter(contextlib.redirect_stdout(io.StringIO()))

    def test_environment_is_built_once_and_a_half_made_one_again(self):
        directory = python_environment.python_environment()
        self.assertTrue((directory / "bin/python").exists())
        self.assertEqual(self.shown.getvalue().count("building the Python environment"), 1)

        python_environment.python_environment()
        self.assertEqual(self.shown.getvalue().count("building the Python environment"), 1)

        (directory / "complete").unlink()  # what an interruption leaves
        (directory / "left-over").touch()
        python_environment.python_environment()
        self.assertEqual(self.shown.getvalue().count("building the Python environment"), 2)
        self.assertFalse((directory / "left-over").exists())

        (directory / "bin/python").unlink()  # its interpreter was removed from the system
        self.assertFalse(python_environment.is_complete(directory))

    def test_another_torch_is_another_environment(self):
        self.assertNotEqual(python_environment.environment_directory(None),
                            python_environment.environment_directory("1.2.4"))

    def test_the_oldest_and_the_newest_torch_have_names(self):
        numbers = {name: tuple(map(int, version.split("."))) for name, version in python_environment.NAMED_TORCH.items()}
        self.assertLess(numbers["oldest"], numbers["newest"])
        self.assertTrue(python_environment.has_runtime(None))
        self.assertTrue(python_environment.has_runtime("newest"))
        self.assertFalse(python_environment.has_runtime("oldest"))
        page = (places.ROOT / "docs/testing.md").read_text()
        for name, version in python_environment.NAMED_TORCH.items():
            with self.subTest(name):
                self.assertIn(f"torch=={version}", REQUIREMENTS(name))
                self.assertIn(f"| `--torch {name}` | {version} |", page)

    def test_unknown_torch_is_refused_by_name_and_never_counts_as_built(self):
        with self.assertRaisesRegex(Stop, r"no torch==9\.9 for Python"):
            python_environment.python_environment("9.9")
        self.assertFalse(python_environment.is_complete(python_environment.environment_directory("9.9")))

    def test_too_small_a_disk_is_refused_with_both_numbers(self):
        with mock.patch.object(python_environment, "NEEDED_GIB", 10**9):
            with self.assertRaisesRegex(Stop, r"expected 1000000000 GiB, found [0-9.]+ GiB"):
                python_environment.python_environment()

    def test_second_set_up_waits_for_the_first(self):
        context = multiprocessing.get_context("fork")
        held, release = context.Event(), context.Event()
        other = context.Process(target=hold_lock, args=(str(self.folder), held, release))
        other.start()
        held.wait()

        def let_go_once_we_wait(text):
            self.assertIn("another tools/dev is busy with a test", text)
            release.set()

        with mock.patch.object(places, "say", let_go_once_we_wait):
            with places.locked(self.folder, "a test"):
                self.assertTrue(release.is_set())
        other.join()


class RequirementsTest(unittest.TestCase):
    def test_every_requirement_is_pinned(self):
        for line in python_environment.requirements(None).splitlines():
            self.assertRegex(line, r"^[a-z0-9-]+==[0-9.]+( ; python_version .*)?$")

    def test_chosen_torch_replaces_the_pinned_one(self):
        self.assertIn("torch==2.5.1\n", python_environment.requirements("2.5.1"))
        self.assertEqual(python_environment.requirements("2.5.1").count("torch=="), 1)


class DebianPackagesTest(unittest.TestCase):
    def test_only_what_a_purpose_needs_is_chosen(self):
        self.assertIn("cmake", debian_packages.packages_for({"build"}))
        self.assertNotIn("clang-tidy-16", debian_packages.packages_for({"build"}))
        self.assertEqual(debian_packages.packages_for({"format"}), ["clang-format-16"])

    def test_every_package_has_a_known_purpose(self):
        known = {"build", "bench", "python", "test", "format", "lint", "fuzz", "docs"}
        listed = debian_packages.packages_for(known)
        lines = [line for line in (places.HERE / "debian-packages.txt").read_text().splitlines()
                 if line and not line.startswith("#")]
        self.assertEqual(len(listed), len(lines))
        self.assertEqual(len(set(listed)), len(listed))

    def test_without_root_the_exact_command_is_in_the_message(self):
        with contextlib.redirect_stdout(io.StringIO()), mock.patch.object(debian_packages, "privileged", lambda _: None):
            with self.assertRaisesRegex(Stop, r"as root, run: apt-get install cmake ninja-build$"):
                debian_packages.install_missing(["cmake", "ninja-build"])


if __name__ == "__main__":
    unittest.main()
