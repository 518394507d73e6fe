"""Formats and lints the C++ sources."""

import subprocess

from build import build
from console import heading, run, say
from debian_packages import install_packages
from places import ROOT


def cpp_sources() -> list[str]:
    """Returns the C++ files that git tracks or would track, relative to the root."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--deduplicate", "*.h", "*.cpp"],
        cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for path in listed.stdout.splitlines() if (ROOT / path).exists()]


def format_sources(*, check: bool) -> int:
    """Formats all C++ files in place; with `check`, only lists the files that are not formatted."""
    install_packages({"format"})
    sources = cpp_sources()
    mode = ["--dry-run", "--Werror"] if check else ["-i"]
    exit_code = run(["clang-format-16", *mode, *sources], cwd=ROOT)
    say(f"{len(sources)} files {'checked' if check else 'formatted'}")
    return 1 if exit_code else 0


def lint() -> int:
    """Checks the formatting, and compiles the core and the tools with clang-tidy."""
    install_packages({"build", "format", "lint"})
    heading("formatting")
    exit_code = format_sources(check=True)
    build("tidy")
    return exit_code
