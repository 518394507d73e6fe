"""Starts the ranks of a trainer as torchrun does, without a launcher that imports torch first."""

import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

TIMEOUT = 300  # seconds, of all ranks together


def environments(ranks: int) -> list[dict[str, str]]:
    """Returns the environment variables that each rank gets in addition to those of this process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
              "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def run_program(command: list, ranks: int) -> list[str]:
    """Runs a program on every rank. Returns what each rank printed."""
    words = [str(word) for word in command]
    processes = [subprocess.Popen(words, env=os.environ | more, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                 for more in environments(ranks)]
    try:
        said = [process.communicate(timeout=TIMEOUT) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, (process, (_, error)) in enumerate(zip(processes, said)):
        assert process.returncode == 0, f"rank {rank}, exit code {process.returncode}: {error}"
    return [out for out, _ in said]


def _on_rank(environment: dict[str, str], function: Callable, arguments: tuple, only: dict[str, str] | None, log: Path | None) -> None:
    if only is not None:
        os.environ.clear()
        os.environ.update(only)
    os.environ.update(environment)
    if log:
        sys.stdout = sys.stderr = open(log, "w")
        os.dup2(sys.stdout.fileno(), 1)
        os.dup2(sys.stdout.fileno(), 2)
    function(*arguments)


def run_function(function: Callable, ranks: int, *arguments, only: dict[str, str] | None = None, logs: Path | None = None) -> None:
    """Runs a function on every rank, in forks of this process, so that imported modules are there already. If a rank
    fails, its traceback is on standard error, and the other ranks are ended.

    `only`: the environment variables of the ranks, if not those of this process. `logs`: a folder for what the ranks
    print, each in a file `<rank>.log`."""
    import torch._dynamo  # noqa: F401  (each rank would import it in its first optimizer step or DTensor, which takes 2 s)

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_on_rank, args=(each, function, arguments, only, logs and logs / f"{each['RANK']}.log"))
                 for each in environments(ranks)]
    for process in processes:
        process.start()
    end = time.monotonic() + TIMEOUT
    try:
        while any(process.is_alive() for process in processes) and not any(process.exitcode for process in processes):
            assert time.monotonic() < end, [process.exitcode for process in processes]
            time.sleep(0.02)
    finally:
        for process in processes:
            process.kill()
            process.join()
    printed = [log.read_text() for log in sorted(logs.glob("*.log"))] if logs else []
    assert [process.exitcode for process in processes] == [0] * ranks, printed
