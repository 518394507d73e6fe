"""Makes the folder with the torchrec packages. Only tests against the live torchrec need it, so the set-up does not."""

import hashlib
import shutil
from pathlib import Path

from console import heading, say
from places import HERE, cache_directory, locked
from python_environment import PIP_INSTALL, install, python_environment

REQUIREMENTS = HERE / "torchrec-requirements.txt"


def torchrec_packages(torch_version: str | None = None) -> Path:
    """Returns a folder for PYTHONPATH that adds torchrec to the environment. Makes it if necessary."""
    environment = python_environment(torch_version)
    identity = environment.name + REQUIREMENTS.read_text()
    directory = cache_directory() / f"torchrec-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    if not (directory / "complete").exists():
        with locked(cache_directory(), "the set-up"):
            if not (directory / "complete").exists():
                make_packages(directory, environment)
    return directory


def make_packages(directory: Path, environment: Path) -> None:
    heading("fetching torchrec for the CPU: about 20 MB to download")
    say(f"    in {directory}")
    shutil.rmtree(directory, ignore_errors=True)
    log = cache_directory() / "logs" / f"{directory.name}.log"
    log.unlink(missing_ok=True)
    # Some packages exist only as source, so no --only-binary. torch itself is that of the environment.
    install([environment / "bin/python", *PIP_INSTALL, "--no-deps", "--target", directory, "-r", REQUIREMENTS], log)
    (directory / "complete").touch()
