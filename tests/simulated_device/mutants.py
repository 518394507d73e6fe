"""Removes one call at a time that puts streams in order, and checks that the tests then fail (mutation testing).

The calls are `make_wait`, `note_use` and `.wait()` in src/runtime/fsdp. A mutant is the source without one of these
calls. The script compiles a changed copy of the file, and links a second test binary with it in place of the library's
object. The source tree and the build do not change. Prints a table. Exits with 1 if the tests pass for a mutant that
EXPECTED_TO_PASS does not list.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src/runtime/fsdp"
BINARY = "simulated_device_tests"
CALL = re.compile(r"streams_->(?:make_wait|note_use)\([^;]*;|\b(?:\w+_)\.wait\(\);|\.wait\(\);")
FUNCTION = re.compile(r"^[\w:<>&*,~ ]*?(\w+::\w+|\w+)\([^;]*$", re.MULTILINE)

# Calls without which the tests still pass, and why the calls stay. If a test begins to fail without a call, remove the
# call from this list.
EXPECTED_TO_PASS = {
    "FlatParamGather::abort: pending_.wait()": "after a failure: the tensors are dropped",
    "FlatParamReduction::abort: pending_.wait()": "after a failure: the tensors are dropped",
    "FlatParamGather::join: all_gather(...).wait()": "c10d requires the call; the backend keeps the tensors anyway",
    "FlatParamGather::join: streams_->note_use(shard, streams_->unshard)":
        "later work of the pass is in order anyway, but the code does not rely on that",
    "FlatParamGather::reshard: streams_->make_wait(streams_->unshard, streams_->compute())":
        "later gathers of the pass are in order anyway, but the code does not rely on that",
}


@dataclass(frozen=True)
class Mutant:
    file: Path
    begin: int
    end: int
    function: str
    call: str
    line: int

    def source(self) -> str:
        text = self.file.read_text()
        # If the statement also starts the work (`all_gather(...).wait();`), only `.wait()` is removed.
        return text[: self.begin] + ";" + text[self.end:]


def mutants() -> list[Mutant]:
    found = []
    for file in sorted(SOURCES.glob("*.cpp")):
        text = file.read_text()
        if file.name == "streams.cpp":
            continue  # defines these calls
        for match in CALL.finditer(text):
            function = [each for each in FUNCTION.finditer(text, 0, match.start())
                        if not text[each.start()].isspace()][-1].group(1)
            call = " ".join(match.group().rstrip(";").split())
            if call == ".wait()":
                start = max(text.rfind(";", 0, match.start()), text.rfind("{", 0, match.start()),
                            text.rfind("}", 0, match.start())) + 1
                started = re.search(r"\b(all_gather|reduce_scatter|all_reduce|broadcast)\(",
                                    text[start:match.start()])
                call = (started.group(1) if started else "?") + "(...).wait()"
            found.append(Mutant(file, match.start(), match.end(), function, call,
                                text.count("\n", 0, match.start()) + 1))
    return found


def compile_command(build: Path, file: Path, source: Path, output: Path) -> list[str]:
    entries = json.loads((build / "compile_commands.json").read_text())
    entry = next(each for each in entries if Path(each["file"]) == file)
    words = shlex.split(entry["command"])
    words = [word for word in words if word not in ("-Werror", str(file)) and not word.endswith("ccache")]
    words[words.index("-o") + 1] = str(output)
    for option in ("-MF", "-MT"):
        if option in words:
            at = words.index(option)
            del words[at:at + 2]
    return [*(word for word in words if word not in ("-MD", "-c")), "-c", str(source)]


def link_command(build: Path, extra: Path, output: Path) -> list[str]:
    commands = subprocess.run(["ninja", "-C", str(build), "-t", "commands", BINARY], check=True, text=True,
                              capture_output=True).stdout.splitlines()
    words = shlex.split(commands[-1].removeprefix(": && ").removesuffix(" && :"))
    at = words.index("-o") + 1
    words[at] = str(output)
    # The object must come before the library, so that the linker does not take the library's object.
    words.insert(at + 1, str(extra))
    return words


def outcome_of(binary: Path, mode: str) -> str:
    """Returns how the tests under a schedule (`mode`) fail; empty if they pass."""
    try:
        run = subprocess.run([str(binary), f"--gtest_filter=*/{mode}", "--gtest_fail_fast"], text=True,
                             capture_output=True, timeout=300)
    except subprocess.TimeoutExpired:
        return "time-out"
    if run.returncode == 0:
        return ""
    if run.returncode < 0:
        return f"signal {-run.returncode}"
    ways = []
    if "without waiting for it" in run.stdout:
        ways.append("races")
    if "The difference between" in run.stdout or "allclose" in run.stdout:
        ways.append("wrong values")
    return " and ".join(ways) or "another failure"


def try_mutant(build: Path, mutant: Mutant, folder: Path) -> list[str]:
    source = folder / mutant.file.name
    source.write_text(mutant.source())
    built = folder / "mutant.o"
    binary = folder / BINARY
    subprocess.run(compile_command(build, mutant.file, source, built), check=True, cwd=build)
    subprocess.run(link_command(build, built, binary), check=True, cwd=build)
    return [outcome_of(binary, mode) for mode in ("Lazy", "Eager")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, default=ROOT / "build")
    parser.add_argument("--only", default="", help="try only calls in files whose name contains this text")
    parser.add_argument("--list", action="store_true", help="print the calls and stop")
    arguments = parser.parse_args()
    build = arguments.build.resolve()
    chosen = [each for each in mutants() if arguments.only in each.file.name]
    if arguments.list:
        for mutant in chosen:
            print(f"{mutant.file.name}:{mutant.line}: {mutant.function}: {mutant.call}")
        return 0
    for mode in ("Lazy", "Eager"):
        if outcome := outcome_of(build / "bin" / BINARY, mode):
            print(f"the tests fail without a mutant: {mode}: {outcome}")
            return 1
    num_passed = 0
    print("| removed call | lazy | eager |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for mutant in chosen:
            outcomes = try_mutant(build, mutant, Path(folder))
            note = ""
            if not any(outcomes):
                reason = EXPECTED_TO_PASS.get(f"{mutant.function}: {mutant.call}")
                note = f" ({reason})" if reason else " NO TEST FAILS"
                num_passed += reason is None
            name = f"`{mutant.function}`: `{mutant.call}`{note}"
            print(f"| {name} | {outcomes[0] or 'passes'} | {outcomes[1] or 'passes'} |", flush=True)
    print(f"{len(chosen)} mutants, {num_passed} that no test finds")
    return 1 if num_passed else 0


if __name__ == "__main__":
    sys.exit(main())
