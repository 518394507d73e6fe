"""Feeds damaged input to the readers for a while, with libFuzzer and the sanitizers."""

import os
import shutil

from build import build_directory, build
from console import Stop, heading, run, say, shown
from debian_packages import install_packages
from places import ROOT


def fuzz(*, seconds: int, only: str | None) -> int:
    """Runs each fuzz target for `seconds`. Returns 1 if one of them found something."""
    install_packages({"build", "fuzz"})
    build("fuzz")
    directory = build_directory("fuzz")
    targets = sorted(path for path in (directory / "bin").glob("fuzz_*") if os.access(path, os.X_OK))
    if only:
        targets = [path for path in targets if path.name == f"fuzz_{only}"]
    if not targets:
        raise Stop(f"no fuzz target {only or ''} in {directory / 'bin'}")
    found = []
    for target in targets:
        corpus = directory / "corpus" / target.name
        findings = directory / "findings" / target.name
        corpus.mkdir(parents=True, exist_ok=True)
        findings.mkdir(parents=True, exist_ok=True)
        seeds = ROOT / "tests" / "fuzz" / "seeds" / target.name.removeprefix("fuzz_")
        command = [target, f"-max_total_time={seconds}", "-rss_limit_mb=1024", "-timeout=10",
                   "-print_final_stats=1", f"-artifact_prefix={findings}/", corpus]
        if seeds.is_dir():
            command.append(seeds)
        heading(f"{target.name} for {seconds} s")
        say(f"$ {shown(command, ROOT)}")
        if run(command, cwd=ROOT) != 0:
            found.append(target.name)
    say(f"{len(targets)} targets, {len(found)} with findings{': ' + ', '.join(found) if found else ''}")
    return 1 if found else 0
