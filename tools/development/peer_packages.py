"""Makes a folder with the packages of a large peer. Only the tests of one label need them, so the usual set-up leaves them out."""

import hashlib
import shutil
from pathlib import Path

from console import heading, say
from places import HERE, cache_directory, locked
from python_environment import PIP_INSTALL, install, python_environment

PEERS = ("torchrec", "frameworks", "scanners", "models", "types")  # each has tests under the label interop-<peer>
SIZES = {"torchrec": "about 20 MB", "torchrec_cuda": "about 400 MB", "frameworks": "about 35 MB",
         "scanners": "about 2 MB", "models": "about 110 MB", "types": "about 90 MB"}  # size of the download, without torch


def peer_packages(peer: str, torch_version: str | None = None) -> Path:
    """Returns a folder for PYTHONPATH that adds <peer>-requirements.txt to the environment. Makes it if necessary."""
    environment = python_environment(torch_version)
    requirements = HERE / f"{peer}-requirements.txt"
    identity = environment.name + requirements.read_text()
    directory = cache_directory() / f"{peer}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    if not (directory / "complete").exists():
        with locked(cache_directory(), "the set-up"):
            if not (directory / "complete").exists():
                make_packages(directory, requirements, environment)
    return directory


def make_packages(directory: Path, requirements: Path, environment: Path) -> None:
    peer = requirements.name.removesuffix("-requirements.txt")
    heading(f"fetching {peer}: {SIZES[peer]} to download")
    say(f"    in {directory}")
    shutil.rmtree(directory, ignore_errors=True)
    log = cache_directory() / "logs" / f"{directory.name}.log"
    log.unlink(missing_ok=True)
    # Some packages exist only as source, so no --only-binary. torch itself is that of the environment.
    install([environment / "bin/python", *PIP_INSTALL, "--no-deps", "--target", directory, "-r", requirements], log)
    (directory / "complete").touch()
