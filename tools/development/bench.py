"""Runs the benchmarks of tests/bench and prints medians and ratios."""

import importlib
import json
import os
import platform
import sys
from pathlib import Path

from build import build
from console import Stop, heading, say, table
from debian_packages import install_packages
from places import ROOT
from python_environment import python_environment

NAMES = {"listing": "listing", "reshard": "reshard", "compression": "compression", "verify": "verify",
         "recipe": "recipe", "scale": "many_workers", "stores": "stores",
         "build": "core_build", "train": "train_step",
         "state": "train_state", "tables": "train_tables", "frameworks": "frameworks"}
ON_DEMAND = ("frameworks",)  # benchmarks that fetch the packages of a large peer; run only if they are named
TRAINING = ("train", "state", "tables")  # benchmarks that can run on a GPU


def seconds_text(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def bench(*, names: list[str], device: str, quick: bool, json_file: str | None, torch_version: str | None) -> int:
    unknown = set(names) - NAMES.keys()
    if unknown:
        raise Stop(f"no benchmark {', '.join(sorted(unknown))}: expected {', '.join(NAMES)}")
    if device != "cpu" and not set(names) <= set(TRAINING):
        raise Stop(f"--device {device}: expected {', '.join(TRAINING)}, found {', '.join(sorted(set(names) - set(TRAINING)))}")
    install_packages({"build", "bench", "python"})
    python = python_environment(torch_version) / "bin/python"
    tools = build("release") / "bin"
    work = ROOT / "build" / "bench"
    work.mkdir(parents=True, exist_ok=True)

    sys.path.insert(0, str(ROOT / "tests" / "bench"))
    from bench_device import find_device
    results = []
    for name in names or ([name for name in NAMES if name not in ON_DEMAND] if device == "cpu" else TRAINING):
        heading(f"measuring: {name}")
        try:
            where = {"device": find_device(device, python)} if name in TRAINING else {}
            measured = importlib.import_module(NAMES[name]).bench(tools, python, work, quick=quick, **where)
        except RuntimeError as error:
            raise Stop(str(error)) from error
        results += measured
        rows = [["benchmark", "way", "median", "fastest", "peak MiB", "times as fast as the first"]]
        previous = ""
        for result in measured:
            rows.append(["" if result.benchmark == previous else result.benchmark, result.name,
                         seconds_text(result.median), seconds_text(min(result.seconds)),
                         f"{result.peak_nbytes / 2**20:.0f}", f"{result.ratio:.2f}" if result.ratio else ""])
            previous = result.benchmark
        say(table(rows, right={2, 3, 4, 5}))
    if json_file:
        document = {
            "schema": 1,
            "machine": {"cpus": os.cpu_count(), "architecture": platform.machine(), "system": platform.system()},
            "device": device,
            "quick": quick,
            "results": [{"benchmark": result.benchmark, "name": result.name, "seconds": result.seconds,
                         "median": result.median, "peak_nbytes": result.peak_nbytes,
                         "baseline": result.baseline or None, "ratio": result.ratio} for result in results],
        }
        Path(json_file).write_text(json.dumps(document, indent=1) + "\n")
        say(f"every measurement: {json_file}")
    return 0
