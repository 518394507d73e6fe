"""The terminal: headings, commands, and one line that shows the progress of long work."""

import os
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path


class Stop(Exception):
    """Ends tools/dev with one line of explanation and exit code 1."""


def on_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def say(text: str = "") -> None:
    print(text, flush=True)


def styled(text: str, code: int) -> str:
    """Returns text in a style or colour, if standard output is a terminal that shows it."""
    return f"\033[{code}m{text}\033[0m" if on_terminal() and not os.environ.get("NO_COLOR") else text


def bold(text: str) -> str:
    return styled(text, 1)


def heading(text: str) -> None:
    say(bold(f"==> {text}"))


def shown(command: list[str]) -> str:
    """Returns a command as a person would type it."""
    return shlex.join(str(word) for word in command)


def run(command: list[str], *, cwd: Path, environment: dict[str, str] | None = None) -> int:
    """Runs a command and shows its output unchanged. Returns its exit code."""
    sys.stdout.flush()
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, close_fds=False,
                          check=False).returncode


def run_quietly(command: list[str], log: Path, *, environment: dict[str, str] | None = None) -> int:
    """Runs a long command with its output in `log`, and shows its progress. Returns its exit code.

    On a terminal, one line always shows the elapsed time and the latest line of output. Elsewhere, such a line
    is printed every 15 seconds.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    latest = ""
    begin = time.monotonic()
    done = threading.Event()

    def show_progress() -> None:
        interval = 0.5 if on_terminal() else 15
        while not done.wait(interval):
            line = f"    {time.monotonic() - begin:4.0f} s  {latest}"
            if on_terminal():
                width = os.get_terminal_size(sys.stdout.fileno()).columns - 1
                print(f"\r\033[K{line[:max(width, 20)]}", end="", flush=True)
            else:
                print(line[:140], flush=True)

    progress = threading.Thread(target=show_progress, daemon=True)
    with log.open("a") as file:
        file.write(f"$ {shown(command)}\n")
        file.flush()
        process = subprocess.Popen(
            [str(word) for word in command], env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", close_fds=False)
        progress.start()
        try:
            for line in process.stdout:
                file.write(line)
                latest = line.strip() or latest
            return process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
            process.stdout.close()
            done.set()
            progress.join()
            if on_terminal():
                print("\r\033[K", end="", flush=True)


def tail(log: Path, lines: int = 20) -> str:
    return "\n".join(f"    {line}" for line in log.read_text(errors="replace").splitlines()[-lines:])


def table(rows: list[list[str]], *, right: set[int] = frozenset()) -> str:
    """Returns rows as aligned columns; the first row is the header, `right` the right-aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def line(row: list[str]) -> str:
        cells = [cell.rjust(width) if column in right else cell.ljust(width)
                 for column, (cell, width) in enumerate(zip(row, widths))]
        return "  ".join(cells).rstrip()

    return "\n".join([line(rows[0]), line(["-" * width for width in widths]), *map(line, rows[1:])])
