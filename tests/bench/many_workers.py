"""Many names, and many workers.

- Moves 100,000 tensors in 400,000 pieces, and lists 800,000 pieces.
- Simulates one move of 10 TB by 1,000 workers: the cost of the plan, and the bytes and files that each worker reads.
- Runs one of 1,000 workers on as many files, but with small tensors: counts its calls to a file system and its requests to a store.
"""

import json
import re
import shutil
import struct
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from build import build
from console import say, table
from side_by_side import Contender, Result, compare, remove, run_once

WORKERS, SAMPLED = 1000, 25
ROWS, COLUMNS = 131_072, 16_384  # of a tensor: 8 GiB in float32
MOVES = ((4096, 2048), (4096, 3000))  # ranks of the source and of the destination


# The calls that strace shows, and their names in the table. Locks are fcntl calls.
CALLS = {"openat": "opens", "open": "opens", "stat": "stats", "newfstatat": "stats", "statx": "stats", "lstat": "stats",
         "fstat": "stats of open files", "readlink": "links read", "statfs": "stats of file systems", "getdents64": "list calls", "mkdir": "creates",
         "rename": "renames", "renameat2": "renames", "unlink": "removals", "unlinkat": "removals", "rmdir": "removals",
         "fsync": "syncs", "fdatasync": "syncs", "fcntl": "locks", "link": "links"}


def bench(tools: Path, python: Path, work: Path, *, quick: bool) -> list[Result]:
    folder = work / "scale"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    results = move_many_names(tools, folder, quick=quick)
    results += simulate(tools, quick=quick)
    count_operations(tools, folder, quick=quick)
    shutil.rmtree(folder)
    return results


def write_names(path: Path, num_tensors: int, rows: int) -> None:
    """Writes float32 tensors [rows, 4] of zeros."""
    nbytes = rows * 16
    header = {f"layers.{i // 10}.w{i % 10}": {"dtype": "F32", "shape": [rows, 4], "data_offsets": [i * nbytes, (i + 1) * nbytes]}
              for i in range(num_tensors)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + num_tensors * nbytes)


def move_many_names(tools: Path, folder: Path, *, quick: bool) -> list[Result]:
    results, rounds = [], 1 if quick else 5
    for num_tensors in [10_000] if quick else [100_000, 1_000_000]:
        source, listed = folder / f"{num_tensors}.safetensors", folder / f"{num_tensors}-dcp-8"
        write_names(source, num_tensors, 8)
        move = [tools / "ckpt-reshard", source, "--quiet"]
        name = f"{num_tensors:,} tensors of 8 x 4"
        ways = [Contender(f"{form}, 4 ranks", [*move, folder / form, "--to", form, "--world-size", "4"], remove(folder / form))
                for form in ("native", "dcp")]
        if num_tensors > 100_000:
            results += compare(name, ways[:1], rounds=1)
            continue
        run_once([*move, listed, "--to", "dcp", "--world-size", "8"])
        ways.append(Contender("ls of DCP, 8 ranks", [tools / "ckpt-inspect", "ls", listed]))
        results += compare(name, ways, rounds=rounds)
    return results


def count_operations(tools: Path, folder: Path, *, quick: bool) -> None:
    """Runs one of many workers under strace, from files and from a store."""
    source_ranks, ranks, workers = (64, 32, 16) if quick else (4096, 2048, 1000)
    model, dcp = folder / "model.safetensors", folder / "many-ranks"
    write_names(model, 8, source_ranks)
    run_once([tools / "ckpt-reshard", model, dcp, "--to", "dcp", "--world-size", source_ranks, "--quiet"])
    part = ["--to", "dcp", "--world-size", ranks, "--part", f"{workers // 2}/{workers}", "--quiet"]
    say(f"calls and requests of one of {workers} workers, {source_ranks} to {ranks} ranks, DCP, 8 small tensors:")
    if shutil.which("strace"):
        log = folder / "strace.txt"
        run_once(["strace", "-f", "-o", log, "-e", f"trace={','.join(f'?{name}' for name in CALLS)}",
                  tools / "ckpt-reshard", dcp, folder / "parted", *part])
        calls = count_calls(log.read_text(errors="replace"), str(folder))
        say(table([["of the file system", "calls"], *([name, str(count)] for name, count in calls)], right={1}))
    else:
        say("strace is not installed: calls of the file system are not counted")
    log = folder / "requests.txt"
    server = subprocess.Popen([sys.executable, Path(__file__).with_name("store_server.py"), "--latency-ms", "0",
                               "--bytes-per-second", "1e9", "--log", log], stdout=subprocess.PIPE, text=True)
    try:
        port = server.stdout.readline().strip()
        on_store = ["env", f"AWS_ENDPOINT_URL_S3=http://127.0.0.1:{port}", "AWS_NO_SIGN_REQUEST=1", f"TMPDIR={folder}",
                    tools / "ckpt-reshard"]
        run_once([*on_store, dcp, "s3://bucket/dcp", "--to", "dcp", "--quiet"])
        before = len(log.read_text().splitlines())
        run_once([*on_store, "s3://bucket/dcp", folder / "from-store", *part])
        lines = log.read_text().splitlines()[before:]
    finally:
        server.kill()
        server.wait()
    kinds = Counter("lists" if "list-type" in line else "heads" if line.startswith("HEAD") else
                    "ranges of .metadata" if "/.metadata" in line else "ranges of tensor files" for line in lines)
    say(table([["of the store", "requests"], *([name, str(count)] for name, count in kinds.most_common())], right={1}))


def count_calls(text: str, folder: str) -> list[tuple[str, int]]:
    """Counts the system calls that name a file in `folder`, and calls on open files."""
    counts = Counter()
    for line in text.splitlines():
        found = re.match(r"\d+ +(\w+)\((.*)", line)
        if not found or found[1] not in CALLS:
            continue
        name, arguments = found.groups()
        if name == "fcntl" and "SETLK" not in arguments:
            continue
        if arguments.startswith(('"', "AT_FDCWD")) and folder not in arguments:
            continue  # a file of a library
        counts["creates" if name.startswith("open") and "O_CREAT" in arguments else CALLS[name]] += 1
    return counts.most_common()


def simulate(tools: Path, *, quick: bool) -> list[Result]:
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
