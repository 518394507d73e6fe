"""Configures and compiles a preset of CMakePresets.json."""

import hashlib
import os
from pathlib import Path

from console import Stop, heading, run, say, shown
from places import ROOT, locked, relative_to_root
from python_environment import has_runtime

BUILD_DIRECTORIES = {"dev": ROOT / "build"}  # the other presets build in build/<preset>


def build_directory(preset: str) -> Path:
    return BUILD_DIRECTORIES.get(preset, ROOT / "build" / preset)


def build_environment() -> dict[str, str]:
    """Returns environment variables with which several copies of the repository share ccache's results."""
    return {"CCACHE_BASEDIR": str(ROOT), "CCACHE_NOHASHDIR": "1",
            "CCACHE_SLOPPINESS": "pch_defines,time_macros"} | os.environ


def runtime_definitions(python: Path, torch_version: str | None = None) -> tuple[str, ...]:
    """Returns the CMake arguments for the runtime, with the torch of this Python environment. Leaves the runtime out if it does
    not compile with this torch."""
    return (f"TESSERA_PYTHON={python}", f"TESSERA_RUNTIME={'ON' if has_runtime(torch_version) else 'OFF'}")


def announce_and_run(command: list[str]) -> int:
    say(f"$ {shown([relative_to_root(word) for word in command])}")
    return run(command, cwd=ROOT, environment=build_environment())


def build(preset: str, *, targets: tuple[str, ...] = (), definitions: tuple[str, ...] = ()) -> Path:
    """Builds `targets` of a preset (default: all). Returns the build folder."""
    directory = build_directory(preset)
    heading(f"building ({preset})")
    with locked(directory, f"building {preset}"):
        configure = ["cmake", "--preset", preset, *(f"-D{definition}" for definition in definitions)]
        recipe = "\n".join(configure) + (ROOT / "CMakePresets.json").read_text()
        stamp = directory / ".configured"
        digest = hashlib.sha256(recipe.encode()).hexdigest()
        configured = (directory / "build.ninja").exists() and stamp.exists() and stamp.read_text() == digest
        if not configured:
            if announce_and_run(configure) != 0:
                raise Stop(f"CMake could not configure the preset {preset}")
            stamp.write_text(digest)
        compile_command = ["cmake", "--build", "--preset", preset]
        if targets:
            compile_command += ["--target", *targets]
        if announce_and_run(compile_command) != 0:
            raise Stop(f"the preset {preset} does not compile")
    return directory
