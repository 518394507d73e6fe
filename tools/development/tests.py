"""Runs the tests and counts what passed, by label."""

import dataclasses
import json
import os
import shutil
import subprocess
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from build import build, runtime_definitions
from console import Stop, heading, run_quietly, say, table, tail
from debian_packages import install_packages
from peer_packages import PEERS, peer_packages
from places import ROOT, locked
from python_environment import has_runtime, python_environment

PEER_LABELS = tuple(f"interop-{peer}" for peer in PEERS)
LABELS = ("unit", "property", "cli", "fuzz", "browser", "interop", "distributed", "cuda", "development", "slow",
          *PEER_LABELS)
NEED_PYTHON = {"cli", "interop", "distributed", "cuda", "slow", *PEER_LABELS}
ON_DEMAND = f"^(slow|{'|'.join(PEER_LABELS)})$"  # labels that only --label runs
CORE_LABELS = ("unit", "property", "cli", "fuzz")  # tests that also run under the sanitizers
ONLY_SANITIZED = {"fuzz"}  # tests that run only under the sanitizers
SANITIZED = ("unit_tests", "embedding_kernel_tests", "cuda_on_cpu_tests", "property_tests", "cli_unit_tests",
             "fuzz_replay", "ckpt-inspect", "ckpt-reshard", "ckpt-inspect_of_example", "ckpt-reshard_of_example")
# Tests that run the tools hundreds of times in ways that other tests cover: not run under AddressSanitizer.
NOT_UNDER_ASAN = "^cli\\.(killed_|json_schemas|formats_in_docs|tool\\.completion)"

SANITIZER_OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=1:strict_string_checks=1:check_initialization_order=1",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
}

# libtorch itself is not instrumented; the file lists what the sanitizer ignores because of that.
THREAD_SANITIZER_OPTIONS = {
    "TSAN_OPTIONS": f"history_size=4:halt_on_error=1:allocator_may_return_null=1:"
                    f"suppressions={ROOT / 'tests/runtime/tsan-suppressions.txt'}",
    "OMP_NUM_THREADS": "1",  # because OpenMP's library is not instrumented either
}
# Tests whose ranks are processes, and tests that measure memory: not run under ThreadSanitizer.
RANKS_AS_PROCESSES = "^(DeadRankTest|DropoutTest|KilledSaveTest|MemoryTest|StateMemoryTest|ResumeTrainingTest.*RandomNumbers)"


@dataclasses.dataclass
class Tally:
    """Counts of one label in one build. Units: seconds are summed over tests, which run side by side."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0

    def __iadd__(self, other: "Tally") -> "Tally":
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped
        self.seconds += other.seconds
        return self


@dataclasses.dataclass
class Case:
    name: str
    label: str
    outcome: str  # "passed", "failed" or "skipped"
    seconds: float
    output: str
    variant: str = ""  # text after the label for a run under sanitizers, such as " (asan)"


def outcome_of(case: ElementTree.Element) -> str:
    """Returns "passed", "failed" or "skipped". A test that CTest could not start has failed; a disabled one is skipped."""
    if case.get("status") == "run":
        return "passed"
    skipped = case.find("skipped")
    if skipped is not None and skipped.get("message", "").startswith("SKIP_"):
        return "skipped"
    return "skipped" if case.get("status") == "disabled" else "failed"


def labels_by_test(directory: Path) -> dict[str, str]:
    """Returns the first label of every test in a build folder."""
    command = ["ctest", "--test-dir", str(directory), "--show-only=json-v1"]
    listing = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    labels = {}
    for test in listing["tests"]:
        found = [item["value"] for item in test.get("properties", []) if item["name"] == "LABELS"]
        labels[test["name"]] = found[0][0] if found and found[0] else "no label"
    return labels


def read_junit(path: Path, labels: dict[str, str], variant: str = "") -> list[Case]:
    return [Case(case.get("name"), labels.get(case.get("name"), "no label"), outcome_of(case),
                 float(case.get("time") or 0), case.findtext("system-out") or "", variant)
            for case in ElementTree.parse(path).getroot().iter("testcase")]


def cases_in_shard(shard: Case, reports: Path) -> list[Case]:
    """Returns the tests that a shard ran, as its program reported them. Returns the shard itself if it wrote no report, and
    with its tests if it failed but none of them did, as for a leak that is found when the program ends."""
    path = reports / f"{shard.name}.xml"
    if not path.exists():
        return [shard]
    cases = []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        failures = [failure.get("message", "") for failure in case.iter("failure")]
        skips = [skip.get("message", "") for skip in case.iter("skipped")]
        outcome = "failed" if failures else "skipped" if skips or case.get("result") == "skipped" else "passed"
        cases.append(Case(f"{case.get('classname')}.{case.get('name')}", shard.label, outcome,
                          float(case.get("time") or 0), "\n".join(failures + skips), shard.variant))
    if shard.outcome == "failed" and all(case.outcome != "failed" for case in cases):
        cases.append(shard)
    return cases


def run_ctest(directory: Path, selection: list[str], environment: dict[str, str], variant: str = "") -> list[Case]:
    """Runs the selected tests of a build folder. Prints what failed or was skipped. Returns these and what passed."""
    report = directory / "test-report.xml"
    reports_of_shards = directory / "test-reports"
    log = directory / "test-log.txt"
    num_at_once = (os.cpu_count() or 2) + 1  # one more than cores, because tests wait for the disk to sync
    command = ["ctest", "--test-dir", directory, "--parallel", str(num_at_once),
               "--output-on-failure", "--output-junit", report, *selection]
    with locked(directory, "running tests"):
        report.unlink(missing_ok=True)
        log.unlink(missing_ok=True)
        shutil.rmtree(reports_of_shards, ignore_errors=True)
        exit_code = run_quietly(command, log, environment=os.environ | environment)
        cases = read_junit(report, labels_by_test(directory), variant) if report.exists() else []
        cases = [case for shard in cases for case in cases_in_shard(shard, reports_of_shards)]
    failed = [case for case in cases if case.outcome == "failed"]
    lines = log.read_text(errors="replace").splitlines()
    for case in failed:
        verdict = next((line.rsplit("***")[-1] for line in lines if f": {case.name} ." in line and "***" in line), "")
        say(f"--- {case.label}{case.variant}: {case.name}: {verdict or 'Failed'}\n{case.output.rstrip()}\n")
    for case in cases:
        if case.outcome == "skipped":
            say(f"    skipped: {case.label}: {case.name}")
    if not cases or (exit_code != 0 and not failed):
        say(tail(log))
        raise Stop(f"ctest found no tests or could not run them (exit code {exit_code}, whole log: {log})")
    return cases


def tallies_by_label(cases: list[Case]) -> dict[str, Tally]:
    tallies: dict[str, Tally] = {}
    order = {label: position for position, label in enumerate(LABELS)}
    for case in sorted(cases, key=lambda case: (case.variant, order.get(case.label, len(order)))):
        tally = tallies.setdefault(case.label + case.variant, Tally())
        setattr(tally, case.outcome, getattr(tally, case.outcome) + 1)
        tally.seconds += case.seconds
    return tallies


def summary(tallies: dict[str, Tally]) -> str:
    rows = [["label", "passed", "failed", "skipped", "seconds"]]
    rows += [[label, str(tally.passed), str(tally.failed), str(tally.skipped), f"{tally.seconds:.1f}"]
             for label, tally in tallies.items()]
    return table(rows, right={1, 2, 3, 4})


def reason_to_skip(case: Case) -> str:
    """Returns the reason that a test of GoogleTest printed when it skipped itself."""
    _, _, said = case.output.partition(": Skipped\n")
    return said.partition("\n")[0].strip() or "not said"


def summary_by_suite(cases: list[Case]) -> str:
    """Returns a table with how many tests of each suite passed, failed and were skipped, and why they were skipped."""
    suites: dict[str, list[Case]] = {}
    for case in cases:
        suites.setdefault(case.name.rpartition(".")[0].rpartition("/")[2] or case.name, []).append(case)
    rows = [["suite", "passed", "failed", "skipped", "why skipped"]]
    for suite, members in sorted(suites.items()):
        counts = [str(sum(case.outcome == outcome for case in members)) for outcome in ("passed", "failed", "skipped")]
        reasons = {reason_to_skip(case) for case in members if case.outcome == "skipped"}
        rows.append([suite, *counts, "; ".join(sorted(reasons))])
    return table(rows, right={1, 2, 3})


def report(cases: list[Case], seconds: float) -> int:
    """Prints the counts, and what failed. Returns the exit code."""
    tallies = tallies_by_label(cases)
    total = Tally()
    for tally in tallies.values():
        total += tally
    heading(f"tests by label, {seconds:.0f} s in all")
    say(summary(tallies))
    say()
    for case in cases:
        if case.outcome == "failed":
            say(f"failed: {case.label}{case.variant}: {case.name}")
    say(f"{total.passed} passed, {total.failed} failed, {total.skipped} skipped")
    return 1 if total.failed else 0


TARGETS_WITH_THREADS = ("unit_tests", "property_tests", "embedding_kernel_tests", "cuda_on_cpu_tests",
                        "cuda_on_cpu_tests_without_syncwarp", "runtime_tests", "simulated_device_tests")


def test_threads(*, torch_version: str | None) -> int:
    """Runs the core's tests, and those of the runtime whose ranks are threads, under ThreadSanitizer. Returns the exit code."""
    begin = time.monotonic()
    install_packages({"build", "python"})
    definitions = runtime_definitions(python_environment(torch_version) / "bin/python")
    directory = build("tsan", targets=TARGETS_WITH_THREADS, definitions=definitions)
    heading("testing under ThreadSanitizer (the core; ranks as threads)")
    selection = ["-L", "^(distributed|unit|property)$", "-E", f"{RANKS_AS_PROCESSES}|launchers|mixture_of_experts|consumer"]
    cases = run_ctest(directory, selection, THREAD_SANITIZER_OPTIONS, " (tsan)")
    return report(cases, time.monotonic() - begin)


def test_device_memory(*, torch_version: str | None) -> int:
    """Runs the tests on the simulated device under AddressSanitizer and UBSan. Returns the exit code."""
    begin = time.monotonic()
    install_packages({"build", "python"})
    definitions = runtime_definitions(python_environment(torch_version) / "bin/python")
    directory = build("asan", targets=("simulated_device_tests",), definitions=definitions)
    heading("testing under AddressSanitizer and UBSan (the simulated device)")
    # Tests make allocations that are too large. As without the sanitizer, these must return a null pointer.
    options = SANITIZER_OPTIONS | {"ASAN_OPTIONS": SANITIZER_OPTIONS["ASAN_OPTIONS"] + ":allocator_may_return_null=1"}
    cases = run_ctest(directory, ["-R", "^simulated_device", "-E", "mutants"], options, " (asan)")
    return report(cases, time.monotonic() - begin)


def test(*, label: str | None, quick: bool, torch_version: str | None) -> int:
    """Runs all tests except those on demand, or the tests of one label. Returns the exit code."""
    begin = time.monotonic()
    if quick and label in ONLY_SANITIZED:
        raise Stop(f"{label}: runs only under the sanitizers, which --quick leaves out")
    install_packages({"build", "python", "test"})
    definitions: tuple[str, ...] = ()
    if label is None or label in NEED_PYTHON:
        definitions = runtime_definitions(python_environment(torch_version) / "bin/python", torch_version)
        if not has_runtime(torch_version):
            say("without the C++ runtime, which needs a newer torch")
    if label in PEER_LABELS:
        peer = label.removeprefix("interop-")
        definitions += (f"TESSERA_{peer.upper()}_PACKAGES={peer_packages(peer, torch_version)}",)

    cases: list[Case] = []
    if label not in ONLY_SANITIZED:
        directory = build("dev", definitions=definitions)
        heading(f"testing ({label or 'all but those on demand'})")
        selection = ["-L", f"^{label}$"] if label else ["-LE", ON_DEMAND]
        cases += run_ctest(directory, selection, {})

    if not quick and (label is None or label in CORE_LABELS):
        python = tuple(item for item in definitions if item.startswith("TESSERA_PYTHON="))  # has CUDA's headers
        directory = build("asan", targets=SANITIZED, definitions=python)
        again = [label] if label else CORE_LABELS
        heading(f"testing under AddressSanitizer and UBSan ({', '.join(again)})")
        selection = ["-L", f"^({'|'.join(again)})$", "-LE", "^slow$"]
        cases += run_ctest(directory, [*selection, "-E", NOT_UNDER_ASAN], SANITIZER_OPTIONS, " (asan)")

    if label == "cuda":
        heading("tests that need a GPU, or say what happens without one")
        say(summary_by_suite(cases))
    return report(cases, time.monotonic() - begin)
