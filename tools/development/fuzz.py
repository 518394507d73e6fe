"""Feeds damaged input to the readers for a while, with libFuzzer and the sanitizers."""

import os
import shutil
import sys

from build import build
from console import Stop, heading, run, run_quietly, say, shown, tail
from debian_packages import install_packages
from places import ROOT, relative_to_root
from tests import SANITIZER_OPTIONS


def fuzz(*, seconds: int, only: str | None) -> int:
    """Runs each fuzz target for `seconds`. Returns 1 if one of them found something."""
    install_packages({"build", "fuzz"})
    directory = build("fuzz")
    targets = sorted(path for path in (directory / "bin").glob("fuzz_*") if os.access(path, os.X_OK))
    if only:
        targets = [path for path in targets if path.name == f"fuzz_{only}"]
    if not targets:
        raise Stop(f"no fuzz target {only or ''} in {directory / 'bin'}")
    seeds = directory / "seeds"
    shutil.rmtree(seeds, ignore_errors=True)
    if run([sys.executable, ROOT / "tests/fuzz/pack_seeds.py", ROOT / "fixtures", seeds], cwd=ROOT) != 0:
        raise Stop("the fixtures could not be packed as seeds")

    found = []
    for target in targets:
        name = target.name.removeprefix("fuzz_")
        corpus = directory / "corpus" / name  # not removed, so that the next run begins with it
        findings = directory / "findings" / name
        for folder in (corpus, findings, seeds / name):
            folder.mkdir(parents=True, exist_ok=True)
        command = [target, f"-max_total_time={seconds}", "-rss_limit_mb=2048", "-timeout=10", "-verbosity=1",
                   f"-artifact_prefix={findings}/", corpus, seeds / name]
        heading(f"{target.name} for {seconds} s")
        say(f"$ {shown([relative_to_root(word) for word in command])}")
        log = directory / f"{target.name}.log"
        log.unlink(missing_ok=True)
        if run_quietly(command, log, environment=os.environ | SANITIZER_OPTIONS) != 0:
            say(tail(log, 40))
            found.append(name)
    say(f"{len(targets)} targets, {len(found)} with findings{': ' + ', '.join(found) if found else ''}")
    return 1 if found else 0
