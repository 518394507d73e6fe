"""Compiles the core in a clean folder, without a compiler cache."""

import shutil
from pathlib import Path

from side_by_side import Contender, Result, compare

ROOT = Path(__file__).resolve().parents[2]


def bench(tools: Path, python: Path, work: Path, *, quick: bool) -> list[Result]:
    folder = work / "core-build"

    def clean() -> None:
        shutil.rmtree(folder, ignore_errors=True)

    script = 'cmake -S "$1" -B "$2" -G Ninja -DCMAKE_BUILD_TYPE=Release -DTESSERA_TESTS=OFF && cmake --build "$2" '
    commands = {"core": script + "--target tessera_core", "core and tools": script}
    if quick:
        commands = {"configure only": script.split("&&")[0]}
    results = compare("build from clean", [
        Contender(name, ["env", "CCACHE_DISABLE=1", "sh", "-c", command, "build", ROOT, folder], prepare=clean)
        for name, command in commands.items()
    ], rounds=1)
    for result in results:
        result.baseline, result.ratio = "", None
    clean()
    return results
