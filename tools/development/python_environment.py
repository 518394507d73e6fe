"""Builds the Python environment (PyTorch and related packages) outside the repository, once per list of requirements."""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from console import Stop, heading, run_quietly, say, tail
from debian_packages import NO_NETWORK
from places import HERE, cache_directory, locked

OLDEST_PYTHON = (3, 10)
NEEDED_GIB = 8  # disk space that pip needs while it unpacks torch and its CUDA libraries

# The versions of torch that `--torch oldest` and `--torch newest` stand for. The C++ runtime needs OLDEST_FOR_RUNTIME.
NAMED_TORCH = {"oldest": "2.4.1", "newest": "2.15.0"}
OLDEST_FOR_RUNTIME = (2, 11)

PIP_INSTALL = ("-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--progress-bar", "off",
               "--retries", "2")

PROBE = ("import sys, platform, ensurepip, venv; "
         "print('.'.join(map(str, sys.version_info[:3])), platform.machine(), sys.base_prefix)")


def has_runtime(torch_version: str | None) -> bool:
    """Returns whether the C++ runtime compiles with this version of torch."""
    version = NAMED_TORCH.get(torch_version, torch_version)
    return version is None or tuple(int(part) for part in version.split(".")[:2]) >= OLDEST_FOR_RUNTIME


def requirements(torch_version: str | None) -> str:
    """Returns the requirements file, with another version of torch if one is chosen."""
    torch_version = NAMED_TORCH.get(torch_version, torch_version)
    text = (HERE / "python-requirements.txt").read_text()
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if torch_version:
        lines = [f"torch=={torch_version}" if line.startswith("torch==") else line for line in lines]
    return "\n".join(lines) + "\n"


def interpreter() -> tuple[str, str]:
    """Returns a Python that can create virtual environments, and its identity."""
    seen = []
    for candidate in dict.fromkeys([sys.executable, "/usr/bin/python3"]):
        if not os.access(candidate, os.X_OK):
            continue
        probe = subprocess.run([candidate, "-c", PROBE], capture_output=True, text=True, check=False)
        if probe.returncode != 0:
            seen.append(f"{candidate} has no venv module")
            continue
        identity = probe.stdout.strip()
        version = tuple(int(part) for part in identity.split()[0].split("."))
        if version >= OLDEST_PYTHON:
            return candidate, identity
        seen.append(f"{candidate} is {identity.split()[0]}")
    raise Stop(f"Python {'.'.join(map(str, OLDEST_PYTHON))} or newer with venv is needed; "
               f"{'; '.join(seen)} (apt-get install python3-venv?)")


def environment_directory(torch_version: str | None) -> Path:
    """Returns the folder of the environment for these requirements and this interpreter, built or not."""
    identity = requirements(torch_version) + interpreter()[1]
    return cache_directory() / f"python-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"


def is_complete(directory: Path) -> bool:
    """Returns whether an environment is complete and its interpreter still starts."""
    if not (directory / "complete").exists():
        return False
    try:
        return subprocess.run([directory / "bin/python", "-c", ""], check=False).returncode == 0
    except OSError:
        return False


def python_environment(torch_version: str | None = None) -> Path:
    """Returns the environment's folder. Builds it if necessary."""
    directory = environment_directory(torch_version)
    if not is_complete(directory):
        with locked(cache_directory(), "the set-up"):
            if not is_complete(directory):
                build_environment(directory, requirements(torch_version))
    return directory


def install(pip: list, log: Path) -> None:
    """Runs pip. If it fails, ends tools/dev with the reason."""
    if run_quietly(pip, log) == 0:
        return
    text = log.read_text(errors="replace")
    if NO_NETWORK.search(text):
        raise Stop("no network: pip cannot reach its package index; connect (or set HTTPS_PROXY or PIP_INDEX_URL) "
                   "and run this again")
    say(tail(log))
    unknown = re.search(r"No matching distribution found for (\S+)", text)
    why = (f"no {unknown.group(1)} for Python {platform.python_version()} on {platform.machine()}"
           if unknown else "pip failed")
    raise Stop(f"{why} (whole log: {log})")


def build_environment(directory: Path, wanted: str) -> None:
    torch = re.search(r"^torch==(\S+)", wanted, re.MULTILINE).group(1)
    heading(f"building the Python environment with torch {torch}: about 3 GB to download once, 5 GB on disk")
    say(f"    in {directory}")
    if directory.exists():
        say("    starting again: an earlier set-up was interrupted")
        shutil.rmtree(directory)
    free_gib = shutil.disk_usage(cache_directory()).free / 2**30
    if free_gib < NEEDED_GIB:
        raise Stop(f"{cache_directory()}: not enough room: expected {NEEDED_GIB} GiB, found {free_gib:.1f} GiB "
                   "(TESSERA_CACHE chooses another place)")

    begin = time.monotonic()
    python, _ = interpreter()
    log = cache_directory() / "logs" / f"{directory.name}.log"
    log.unlink(missing_ok=True)
    if run_quietly([python, "-m", "venv", directory], log) != 0:
        say(tail(log))
        raise Stop(f"{python} -m venv failed (whole log: {log})")
    (directory / "requirements.txt").write_text(wanted)
    pip = [directory / "bin/python", *PIP_INSTALL, "--only-binary", ":all:", "-r", directory / "requirements.txt"]
    install(pip, log)
    (directory / "complete").touch()
    say(f"    ready after {time.monotonic() - begin:.0f} s")
