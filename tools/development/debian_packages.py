"""Installs the Debian packages that are missing, and only those."""

import os
import re
import shutil
import subprocess
import sys

from console import Stop, heading, run_quietly, say, tail
from places import HERE, cache_directory, locked

NO_NETWORK = re.compile(
    r"Temporary failure (in name resolution|resolving)|Could not (resolve|connect)|Network is unreachable"
    r"|Name or service not known|Failed to establish a new connection|Unable to connect|Connection (timed out|refused)")


def packages_for(purposes: set[str]) -> list[str]:
    """Returns the packages of debian-packages.txt that are for any of `purposes`."""
    packages = []
    for line in (HERE / "debian-packages.txt").read_text().splitlines():
        words = line.split("#")[0].split()
        if words and purposes.intersection(words[1:]):
            packages.append(words[0])
    return packages


def missing_packages(packages: list[str]) -> list[str]:
    query = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *packages],
        capture_output=True, text=True, check=False)
    installed = {line.split()[0] for line in query.stdout.splitlines() if line.endswith(" installed")}
    return [package for package in packages if package not in installed]


def privileged(command: list[str]) -> list[str] | None:
    """Returns `command`, with sudo unless this user is root; None if sudo fails. May ask for the password."""
    if os.geteuid() == 0:
        return command
    if not shutil.which("sudo"):
        return None
    ask = ["sudo", "-v"] if sys.stdin.isatty() else ["sudo", "-n", "-v"]
    if subprocess.run(ask, check=False, stderr=None if sys.stdin.isatty() else subprocess.DEVNULL).returncode:
        return None
    return ["sudo", "--preserve-env=DEBIAN_FRONTEND", *command]


def install_packages(purposes: set[str]) -> None:
    """Makes sure that the packages for `purposes` are installed. Without dpkg, installs nothing."""
    packages = packages_for(purposes)
    if not shutil.which("dpkg-query"):
        heading("not a Debian system: using the compilers and libraries that are installed")
        return
    if not missing_packages(packages):
        return
    with locked(cache_directory(), "the set-up"):
        missing = missing_packages(packages)
        if missing:
            install_missing(missing)


def install_missing(missing: list[str]) -> None:
    by_hand = f"apt-get install {' '.join(missing)}"
    heading(f"installing {len(missing)} Debian packages: {' '.join(missing)}")
    apt_get = privileged(["apt-get", "-q", "-y", "-o", "Dpkg::Use-Pty=0", "-o", "DPkg::Lock::Timeout=600"])
    if apt_get is None:
        raise Stop(f"{len(missing)} Debian packages are missing and this user is not root; as root, run: {by_hand}")
    log = cache_directory() / "logs" / "debian-packages.log"
    log.unlink(missing_ok=True)
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}

    if subprocess.run(["dpkg", "--audit"], capture_output=True, check=False).stdout:
        say("    finishing an installation that was interrupted")
        run_quietly(privileged(["dpkg", "--configure", "-a"]), log, environment=environment)
    steps = [apt_get + ["update"], apt_get + ["install", "--no-install-recommends", *missing]]
    for step in steps:
        if run_quietly(step, log, environment=environment) != 0:
            break
    left = missing_packages(missing)
    if not left:
        return
    if NO_NETWORK.search(log.read_text(errors="replace")):
        raise Stop(f"no network: the Debian archive cannot be reached, and {len(left)} packages are missing; "
                   f"connect and run this again, or install them by hand: {by_hand}")
    say(tail(log))
    raise Stop(f"apt-get could not install {' '.join(left)} (whole log: {log})")
