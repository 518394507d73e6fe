"""Moves one checkpoint with eight workers under mpirun, kills two of them, resumes, and compares with one process.
Then eight workers read the same checkpoint from an S3 server on this machine.
"""

import contextlib
import filecmp
import json
import os
import shutil
import signal
import struct
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from build import build
from console import Stop, heading, run, say
from debian_packages import install_packages
from demo import show_command
from places import ROOT
from python_environment import python_environment

WORK = ROOT / "build" / "demo-scale"
WORKERS, KILLED = 8, (2, 5)
NUM_TENSORS, ROWS, COLUMNS = 48, 2048, 2048  # bfloat16: 384 MiB

SERVER = """
import time
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
time.sleep(3600)
"""


def write_model(path: Path) -> None:
    nbytes = 2 * ROWS * COLUMNS
    header = json.dumps({f"layers.{i}.weight": {"dtype": "BF16", "shape": [ROWS, COLUMNS],
                                                "data_offsets": [i * nbytes, (i + 1) * nbytes]}
                         for i in range(NUM_TENSORS)}).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for _ in range(NUM_TENSORS):
            file.write(os.urandom(nbytes))


def environment() -> dict[str, str]:
    """Returns an environment in which mpirun finds the tools, and may also run as root."""
    return os.environ | {"PATH": os.pathsep.join([str(ROOT / "build/bin"), os.environ.get("PATH", "")]),
                         "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def under_mpirun(*arguments: str) -> list[str]:
    return ["mpirun", "--oversubscribe", "-n", str(WORKERS), "ckpt-reshard", *arguments]


def holder_of(share: int, shares: Path) -> int | None:
    """Returns the ID of the process that writes a part; None before it has begun."""
    lock = shares / f"share-{share}.lock"
    words = lock.read_text().rsplit(" ", 1) if lock.exists() else []
    return int(words[1]) if len(words) == 2 else None


def show_and_kill(command: list[str], shares: Path) -> None:
    """Runs a command and kills the workers KILLED as soon as they have begun. mpirun then ends the others, too."""
    process = subprocess.Popen(show_command(command), cwd=ROOT, env=environment(), stderr=subprocess.DEVNULL)
    waiting = set(KILLED)
    while waiting and process.poll() is None:
        for share in sorted(waiting):
            if (pid := holder_of(share, shares)) is not None:
                try:
                    os.kill(pid, signal.SIGKILL)
                    say(f"killed: the worker of part {share}")
                except ProcessLookupError:
                    pass
                waiting.discard(share)
        time.sleep(0.001)
    process.wait()
    say()


def show_and_run(command: list[str], expected: int = 0) -> None:
    exit_code = run(show_command(command), cwd=ROOT, environment=environment())
    say()
    if exit_code != expected:
        raise Stop(f"{command[0]} ended with exit code {exit_code}")


def require_same_files(expected: Path, found: Path) -> None:
    files = sorted(file.name for file in expected.iterdir())
    _, different, missing = filecmp.cmpfiles(expected, found, files, shallow=False)
    if different or missing or files != sorted(file.name for file in found.iterdir()):
        raise Stop(f"expected the bytes of one process, found differences in {different + missing}")
    say(f"{len(files)} files, equal byte for byte to those of one process")
    say()


@contextlib.contextmanager
def s3_server(python: Path) -> Iterator[None]:
    """Runs an S3 server with an empty bucket `demo`, and lets the tools find it."""
    server = subprocess.Popen([python / "bin/python", "-c", SERVER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        endpoint = f"http://127.0.0.1:{server.stdout.readline().strip()}"
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/demo", method="PUT")).close()
        os.environ |= {"AWS_ENDPOINT_URL_S3": endpoint, "AWS_NO_SIGN_REQUEST": "1"}
        yield
    finally:
        server.kill()
        server.wait()


def demo_scale(*, torch_version: str | None) -> int:
    """Returns 0 if eight workers write the bytes of one process."""
    install_packages({"build", "test", "python"})
    python = python_environment(torch_version)
    build("dev", targets=("ckpt-reshard", "ckpt-inspect"))
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    model, alone, many = WORK / "model.safetensors", WORK / "alone", WORK / "many"
    write_model(model)
    words = ["--to", "dcp", "--world-size", "3"]

    heading("One process")
    show_and_run(["ckpt-reshard", str(model), str(alone), *words])

    heading(f"{WORKERS} workers, two of which are killed")
    command = under_mpirun(str(model), str(many), *words, "--threads", "1", "--workers", "auto")
    show_and_kill(command, Path(f"{many}.partial.shares"))
    if many.exists():
        raise Stop("the workers were too fast to be killed; run the demonstration again")

    heading("What is missing")
    show_and_run(["ckpt-reshard", "finish", str(many)], expected=3)

    heading("The same command with --resume")
    show_and_run([*command, "--resume"])
    require_same_files(alone, many)

    with s3_server(python):
        heading(f"{WORKERS} workers read the model from an S3 server")
        stored, fetched = "s3://demo/model.safetensors", WORK / "fetched"
        show_and_run(["ckpt-reshard", str(model), stored])
        show_and_run(under_mpirun(stored, str(fetched), *words, "--threads", "1", "--workers", "auto"))
        require_same_files(alone, fetched)
    shutil.rmtree(WORK)
    return 0
