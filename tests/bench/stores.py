"""Moves from and to an object store with a latency of 50 ms, compared with the speed of its link."""

import shutil
import subprocess
import sys
from pathlib import Path

from console import say, table
from side_by_side import Contender, Result, compare, remove, run_once

HERE = Path(__file__).parent
LATENCY_MS = 50
LINK = 500_000_000  # bytes a second


def bench(tools: Path, python: Path, work: Path, *, quick: bool) -> list[Result]:
    nbytes = 50_000_000 if quick else 1_000_000_000
    rounds = 1 if quick else 5
    folder = work / "stores"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    dcp, local = folder / "dcp", folder / "model.safetensors"
    run_once([python, HERE / "make_checkpoint.py", "large", "--bytes", str(nbytes), "--ranks", "4", "--dcp", dcp])
    run_once([tools / "ckpt-reshard", "--quiet", dcp, local, "--to", "safetensors"])
    nbytes = local.stat().st_size
    server = subprocess.Popen([sys.executable, HERE / "store_server.py", "--latency-ms", str(LATENCY_MS),
                               "--bytes-per-second", str(LINK)], stdout=subprocess.PIPE, text=True)
    try:
        port = server.stdout.readline().strip()
        results = measure(tools, folder, local, port, nbytes, rounds)
    finally:
        server.kill()
        server.wait()
    show(results, nbytes)
    shutil.rmtree(folder)
    return results


def measure(tools: Path, folder: Path, local: Path, port: str, nbytes: int, rounds: int) -> list[Result]:
    def move(source, destination, *options) -> list:
        return ["env", f"AWS_ENDPOINT_URL_S3=http://127.0.0.1:{port}", "AWS_NO_SIGN_REQUEST=1", f"TMPDIR={folder}",
                tools / "ckpt-reshard", "--quiet", source, destination, *options]

    def plain(way: str, path: str) -> list:
        return [sys.executable, HERE / "store_peer.py", way, port, path, str(nbytes)]

    to_native = ["--to", "native", "--world-size", "8"]
    run_once(move(local, "s3://bucket/model.safetensors", "--to", "safetensors"))
    results = compare("move from a store", [
        Contender("plain Python, 16 connections, bytes discarded", plain("read", "/bucket/model.safetensors")),
        Contender("safetensors to native for 8 ranks", move("s3://bucket/model.safetensors", folder / "native", *to_native),
                  remove(folder / "native")),
        Contender("safetensors to safetensors", move("s3://bucket/model.safetensors", folder / "copy.safetensors"),
                  remove(folder / "copy.safetensors")),
        Contender("ckpt-inspect verify, safetensors", ["env", f"AWS_ENDPOINT_URL_S3=http://127.0.0.1:{port}",
                                                       "AWS_NO_SIGN_REQUEST=1", tools / "ckpt-inspect", "verify",
                                                       "s3://bucket/model.safetensors"]),
    ], rounds=rounds)
    results += compare("move to a store", [
        Contender("plain Python, 8 connections, parts of 8 MiB", plain("write", "/bucket/plain")),
        Contender("safetensors to safetensors", move(local, "s3://bucket/new.safetensors", "--overwrite")),
        Contender("safetensors to native for 8 ranks", move(local, "s3://bucket/native", "--overwrite", *to_native)),
    ], rounds=rounds)
    return results


def show(results: list[Result], nbytes: int) -> None:
    rows = [["benchmark", "way", "MB/s", "of the link"]]
    for result in results:
        speed = nbytes / result.median
        rows.append([result.benchmark, result.name, f"{speed / 1e6:.0f}", f"{speed / LINK:.0%}"])
    say(f"{nbytes / 1e6:.0f} MB; a latency of {LATENCY_MS} ms and a link of {LINK / 1e6:.0f} MB/s:")
    say(table(rows, right={2, 3}))
