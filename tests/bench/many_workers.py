"""Simulates one move of 10 TB by 1,000 workers: what the plan costs, and what each worker reads and opens."""

import json
import subprocess
import time
from pathlib import Path

from build import build
from console import say, table
from side_by_side import Result

WORKERS, SAMPLED = 1000, 25
ROWS, COLUMNS = 131_072, 16_384  # of a tensor: 8 GiB in float32
MOVES = ((4096, 2048), (4096, 3000))  # ranks of the source and of the destination


def bench(tools: Path, python: Path, work: Path, *, quick: bool) -> list[Result]:
    build("release", targets=("many_workers",))
    tensors = 12 if quick else 1200
    results = []
    rows = [["ranks", "bytes", "writes", "reads", "read per byte written", "read calls", "source files", "files"]]
    for source_ranks, ranks in MOVES:
        begin = time.perf_counter()
        command = [tools / "many_workers", tensors, ROWS, COLUMNS, source_ranks, ranks, WORKERS, SAMPLED]
        found = json.loads(subprocess.run([str(word) for word in command], check=True, capture_output=True).stdout)
        name = f"{source_ranks} to {ranks} ranks, {found['nbytes'] / 1e12:.1f} TB"
        results += [Result(name, "plan", [found["plan_seconds"]], found["peak_nbytes"]),
                    Result(name, f"divide among {WORKERS} workers", [found["divide_seconds"]], found["peak_nbytes"]),
                    Result(name, f"all, with {found['workers_run']} simulated workers", [time.perf_counter() - begin],
                           found["peak_nbytes"])]
        rows.append([f"{source_ranks} to {ranks}", f"{found['nbytes'] / 1e12:.1f} TB", f"{found['nbytes_written'] / 1e9:.1f} GB",
                     f"{found['nbytes_read'] / 1e9:.1f} GB", f"{found['most_read_per_written']:.3f}",
                     str(found["reads"]), str(found["source_files"]), str(found["files"])])
    say(f"the most that one of {WORKERS} workers does ({SAMPLED} of them simulated):")
    say(table(rows, right=set(range(1, len(rows[0])))))
    return results
