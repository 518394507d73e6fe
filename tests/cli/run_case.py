#!/usr/bin/env python3
"""Runs a tool as a user does, and compares what it prints with files.

A case is a folder:
  cmd                     a bash script; the tools are on PATH, `fixtures` is a link to fixtures/
  stdout.exact            what it must print; or stdout.glob, or neither: nothing
  stderr.exact, .glob     the same for standard error
  exit                    its exit status; without the file 0
  terminal                `COLUMNSxROWS`: both streams are one such terminal, compared as stdout
  interrupt               seconds after which SIGINT is sent to the script's process group

A .glob file is compared line by line with shell patterns; a line `...` stands for any lines.
The script runs in an empty folder of its own, with a bare environment.

`run_case.py --update ...` rewrites stdout.exact, stderr.exact and exit from what happens; read the
difference before you commit it. Files that are globs stay as they are.
"""

import argparse
import fcntl
import fnmatch
import os
import pathlib
import pty
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading

TIME_LIMIT = 120  # seconds


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", required=True, type=pathlib.Path, help="folder of the tools")
    parser.add_argument("--fixtures", required=True, type=pathlib.Path)
    parser.add_argument("--update", action="store_true", help="rewrite the expectations")
    parser.add_argument("cases", nargs="+", type=pathlib.Path)
    return parser.parse_args()


def read(path, default=None):
    return path.read_text(encoding="utf-8") if path.exists() else default


def read_terminal(fd):
    """Returns all that is written to a terminal until every process has closed it."""
    received = b""
    while True:
        try:
            part = os.read(fd, 65536)
        except OSError:  # how Linux says that the other end is closed
            return received
        if not part:
            return received
        received += part


def run(case, options):
    """Returns the exit status, stdout and stderr of the case."""
    environment = {"PATH": f"{options.bin.resolve()}:/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
    with tempfile.TemporaryDirectory(prefix="tessera-cli-") as folder:
        os.symlink(options.fixtures.resolve(), os.path.join(folder, "fixtures"))
        command = ["bash", "-c", read(case / "cmd")]
        settings = {"cwd": folder, "env": environment, "stdin": subprocess.DEVNULL,
                    "start_new_session": True}
        size = read(case / "terminal")
        if size is None:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                       **settings)
            outputs = None
        else:
            columns, rows = map(int, size.split("x"))
            ours, theirs = pty.openpty()
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
            environment["TERM"] = "xterm"
            process = subprocess.Popen(command, stdout=theirs, stderr=theirs, **settings)
            os.close(theirs)
            outputs = ours
        interrupt = read(case / "interrupt")
        if interrupt is not None:
            timer = threading.Timer(float(interrupt),
                                    lambda: os.killpg(process.pid, signal.SIGINT))
            timer.start()
        try:
            if outputs is None:
                stdout, stderr = process.communicate(timeout=TIME_LIMIT)
            else:
                stdout, stderr = read_terminal(outputs), b""
                os.close(outputs)
                process.wait(TIME_LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return "timed out", "", ""
    text = stdout.decode("utf-8", "backslashreplace")
    if outputs is not None:
        text = text.replace("\r\n", "\n")
    return process.returncode, text, stderr.decode("utf-8", "backslashreplace")


def matches_glob(lines, patterns):
    """Says whether lines match patterns, of which `...` is any number of lines."""
    reachable = {0}
    for pattern in patterns:
        if pattern == "...":
            reachable = set(range(min(reachable), len(lines) + 1))
        else:
            reachable = {at + 1 for at in reachable
                         if at < len(lines) and fnmatch.fnmatchcase(lines[at], pattern)}
        if not reachable:
            return False
    return len(lines) in reachable


def compare_stream(case, name, found):
    pattern = read(case / f"{name}.glob")
    if pattern is not None:
        if matches_glob(found.splitlines(), pattern.splitlines()):
            return []
        return [f"{name} does not match {name}.glob:", pattern, "found:", found]
    expected = read(case / f"{name}.exact", "")
    if expected == found:
        return []
    return [f"{name}: expected:", expected or "(nothing)\n", "found:", found or "(nothing)\n"]


def compare(case, status, stdout, stderr):
    failures = []
    expected_status = read(case / "exit", "0").strip()
    if expected_status != str(status):
        failures.append(f"exit status: expected {expected_status}, found {status}")
    failures += compare_stream(case, "stdout", stdout)
    failures += compare_stream(case, "stderr", stderr)
    return failures


def write_or_remove(path, text):
    if text:
        path.write_text(text, encoding="utf-8")
    else:
        path.unlink(missing_ok=True)


def update(case, status, stdout, stderr):
    write_or_remove(case / "exit", "" if status == 0 else f"{status}\n")
    for name, found in (("stdout", stdout), ("stderr", stderr)):
        if not (case / f"{name}.glob").exists():
            write_or_remove(case / f"{name}.exact", found)


def main():
    options = arguments()
    num_failed = 0
    for case in options.cases:
        status, stdout, stderr = run(case, options)
        if options.update:
            update(case, status, stdout, stderr)
        failures = compare(case, status, stdout, stderr)
        if failures:
            num_failed += 1
            print(f"{case}:", *failures, sep="\n")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
