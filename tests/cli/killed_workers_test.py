#!/usr/bin/env python3
"""Moves checkpoints with several workers, kills some of them at random moments, and lets others finish."""

import argparse
import fcntl
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from killed_moves import contents, write_source

OPTIONS = None
DESTINATIONS = (
    ("native", ["--world-size", "5"]),
    ("zstd", ["--world-size", "3", "--compress", "zstd"]),
    ("one.safetensors", []),
    ("shards", ["--to", "safetensors", "--max-shard-size", "5MiB"]),
    ("dcp", ["--to", "dcp", "--world-size", "2"]),
    ("one.pt", []),
    ("cast", ["--to", "dcp", "--cast", "float32"]),
)
NUM_WORKERS = (1, 2, 3, 8)


def on_host(name):
    """Returns a command prefix that simulates another host: the command gets its own hostname, network and PIDs."""
    return ["unshare", "--map-root-user", "--uts", "--net", "--pid", "--fork", "--kill-child", "sh", "-c",
            'hostname "$0" && exec "$@"', name]


class KilledWorkers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.seed = int(os.environ.get("TESSERA_TEST_SEED", random.SystemRandom().randrange(1 << 32)))
        cls.folder = tempfile.TemporaryDirectory(prefix="tessera-workers-")
        cls.root = pathlib.Path(cls.folder.name)
        cls.source, cls.old_source = cls.root / "source.safetensors", cls.root / "old.safetensors"
        write_source(cls.source, 1)
        write_source(cls.old_source, 2)
        cls.extra = cls.root / "extra"
        cls.extra.mkdir()
        (cls.extra / "config.json").write_text("{}")
        cls.expected = {}
        cls.seconds = {}

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def setUp(self):
        folder = tempfile.TemporaryDirectory(dir=self.root)
        self.addCleanup(folder.cleanup)
        self.work = pathlib.Path(folder.name)

    def start(self, name, options, source=None, host=None):
        extra = [] if pathlib.Path(name).suffix else ["--extra-files-from", self.extra]
        command = [*(on_host(host) if host else []), OPTIONS.bin / "ckpt-reshard", source or self.source, self.work / name, *options, *extra,
                   "--threads", "1"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run_tool(self, name, options, code=0, source=None):
        """Runs the tool, and returns what it printed."""
        process = self.start(name, options, source)
        stdout, stderr = process.communicate()
        self.assertEqual(process.returncode, code, stderr)
        return stdout + stderr

    def finish(self, name, *options, code=0):
        done = subprocess.run([OPTIONS.bin / "ckpt-reshard", "finish", self.work / name, *options],
                              capture_output=True, text=True)
        self.assertEqual(done.returncode, code, done.stderr)
        return done.stdout + done.stderr

    def by_one_process(self, name, options):
        if name not in self.expected:
            with tempfile.TemporaryDirectory(dir=self.root) as alone:
                work, self.work = getattr(self, "work", None), pathlib.Path(alone)
                start = time.monotonic()
                self.run_tool(name, options)
                self.seconds[name] = time.monotonic() - start
                self.expected[name] = contents(self.work / name)
                self.work = work
        return self.expected[name]

    def assert_finished(self, name, options):
        self.assertEqual(contents(self.work / name), self.by_one_process(name, options))
        self.assertEqual([each.name for each in self.work.iterdir() if ".partial" in each.name], [])

    def test_any_number_of_workers_gives_the_bytes_of_one_process(self):
        for name, options in DESTINATIONS:
            expected = self.by_one_process(name, options)
            for number in NUM_WORKERS:
                with self.subTest(name=name, number=number):
                    work, self.work = self.work, self.work / f"{name}-{number}"
                    self.work.mkdir()
                    workers = [self.start(name, [*options, "--part", f"{i}/{number}"]) for i in range(number)]
                    for worker in workers:
                        _, stderr = worker.communicate()
                        self.assertEqual(worker.returncode, 0, stderr)
                    self.assertEqual(contents(self.work / name), expected)
                    self.assertEqual([e.name for e in self.work.iterdir() if ".partial" in e.name], [])
                    self.work = work

    def test_killed_at_any_moment(self):
        draw = random.Random(self.seed)
        num_killed = 0
        while num_killed < OPTIONS.kills:
            name, options = draw.choice(DESTINATIONS)
            expected = self.by_one_process(name, options)
            number = draw.choice((2, 3, 5, 16))
            replaces, takes_over = draw.random() < 0.25, draw.random() < 0.3
            with self.subTest(seed=self.seed, name=name, number=number, replaces=replaces, takes_over=takes_over), \
                 tempfile.TemporaryDirectory(dir=self.root) as folder:
                self.work = pathlib.Path(folder)
                before = {}
                if replaces:
                    self.run_tool(name, options, source=self.old_source)
                    before = contents(self.work / name)
                    self.assertNotEqual(before, expected)
                num_killed += self.kill_and_go_on(draw, name, [*options, *["--overwrite"] * replaces], number,
                                                  takes_over, before, expected)

    def kill_and_go_on(self, draw, name, options, number, takes_over, before, expected):
        parts = [[*options, "--part", f"{i}/{number}"] for i in range(number)]
        workers = [self.start(name, part) for part in parts]
        doomed = draw.sample(range(number), draw.randint(1, number))
        for i in doomed:
            time.sleep(draw.uniform(0, self.seconds[name]))
            workers[i].kill()
        is_complete = [False] * number
        for i, worker in enumerate(workers):
            _, stderr = worker.communicate()
            is_complete[i] = worker.returncode == 0
            if i not in doomed:
                self.assertEqual(worker.returncode, 0, stderr)
        found = contents(self.work / name)
        self.assertIn(found, (before, expected), "neither the old nor the new one, whole")
        if found == expected and not list(self.work.glob("*.partial*")):
            return len(doomed)  # all had ended, or a worker was killed after the last step
        if found == expected != before:
            self.finish(name)  # killed between the appearance and the removal of what was beside it
            self.assertEqual(contents(self.work / name), expected)
            return len(doomed)
        if takes_over:
            self.run_tool(name, [*parts[draw.randrange(number)], "--take-over", "--resume"])
        else:
            for i in range(number):  # one that was killed at its end may find that others have finished
                if not is_complete[i] and contents(self.work / name) != expected:
                    self.run_tool(name, [*parts[i], "--resume"])
            if all(is_complete):
                self.finish(name)
        self.assertEqual(contents(self.work / name), expected)
        self.assertEqual([each.name for each in self.work.iterdir() if ".partial" in each.name], [])
        return len(doomed)

    def test_workers_on_several_hosts(self):
        if subprocess.run([*on_host("a"), "true"], capture_output=True).returncode:
            self.skipTest("no namespaces of users, networks and processes here")
        for name, options in DESTINATIONS:
            with self.subTest(name=name):
                workers = [self.start(name, [*options, "--part", f"{i}/4"], host=f"host-{i % 2}") for i in range(4)]
                workers[3].kill()
                for worker in workers:
                    _, stderr = worker.communicate()
                    self.assertIn(worker.returncode, (0, -signal.SIGKILL), stderr)
                if contents(self.work / name) != self.by_one_process(name, options):
                    last = self.start(name, [*options, "--part", "0/4", "--take-over", "--resume"], host="host-2")
                    _, stderr = last.communicate()
                    self.assertEqual(last.returncode, 0, stderr)
                self.assert_finished(name, options)

    def test_a_part_that_another_host_writes_is_refused_with_its_name(self):
        if subprocess.run([*on_host("a"), "true"], capture_output=True).returncode:
            self.skipTest("no namespaces of users, networks and processes here")
        name, options = "dcp", ["--to", "dcp", "--world-size", "2", "--part", "0/2"]
        first = self.stopped_worker(name, options, "host-1")
        second = self.start(name, options, host="host-2")
        _, stderr = second.communicate()
        os.kill(self.child_of(first), signal.SIGCONT)
        first.communicate()
        self.assertEqual((first.returncode, second.returncode), (0, 2), stderr)
        self.assertIn("part 0 of 2 is being written by host-1, process ", stderr)
        self.run_tool(name, [*options[:-1], "1/2"])

    def stopped_worker(self, name, options, host):
        """Starts a worker on a host. Suspends it (SIGSTOP) while it writes its part, and returns it."""
        shares = self.work / (name + ".partial.shares")
        while True:
            worker = self.start(name, options, host=host)
            while worker.poll() is None:
                has_begun = (shares / "share-0.lock").exists() and (shares / "share-0.lock").read_text()
                child = self.child_of(worker)
                if has_begun and child and self.is_stopped(child):
                    # A worker that holds the lock of all workers would make the others wait.
                    if not (shares / "share-0.done").exists() and self.is_free(shares / "lock"):
                        return worker
                    os.kill(child, signal.SIGCONT)
                time.sleep(0.001)
            worker.communicate()  # it ended too early
            self.finish(name, "--discard")

    @staticmethod
    def is_stopped(process_id):
        """Suspends a process. Returns false if it ended before that."""
        try:
            os.kill(process_id, signal.SIGSTOP)
            while True:
                state = pathlib.Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
                if state in "TZX":
                    return state == "T"
        except (FileNotFoundError, ProcessLookupError):
            return False

    @staticmethod
    def is_free(path):
        try:
            with open(path, "r+") as lock:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except (FileNotFoundError, BlockingIOError):
            return False

    @staticmethod
    def child_of(process):
        try:
            children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return int(children[0]) if children else None

    def test_two_workers_of_one_part(self):
        for name, options in DESTINATIONS:
            with self.subTest(name=name):
                self.run_tool(name, [*options, "--part", "0/2"])
                with open(self.work / (name + ".partial.shares") / "share-1.lock", "w") as lock:
                    fcntl.lockf(lock, fcntl.LOCK_EX)  # as another worker does
                    lock.write("host-7, process 123")
                    lock.flush()
                    for flags in ([], ["--resume"], ["--discard"]):
                        said = self.run_tool(name, [*options, "--part", "1/2", *flags], code=2)
                        self.assertIn("part 1 of 2 is being written by host-7, process 123", said)
                    self.assertIn("several workers write this checkpoint", self.run_tool(name, options, code=2))
                    self.assertIn("is being written", self.run_tool(name, [*options, "--discard"], code=2))
                    self.assertIn("is being written", self.finish(name, "--discard", code=2))
                    self.assertIn("part 1 is being written by host-7", self.finish(name, code=3))
                    said = self.run_tool(name, [*options, "--part", "0/2", "--take-over"])
                    self.assertIn("1 of 2 parts are not complete yet: 1", said)
                self.run_tool(name, [*options, "--part", "1/2"])
                self.assert_finished(name, options)

    def test_another_plan_source_or_number_is_refused_by_name(self):
        name, options = "dcp", ["--to", "dcp", "--world-size", "2"]
        self.run_tool(name, [*options, "--part", "0/2"])
        for other, said in ((["--to", "dcp", "--world-size", "3", "--part", "1/2"], "world-size"),
                            ([*options, "--part", "1/3"], "number of workers: expected 2, found 3"),
                            ([*options, "--cast", "float16", "--part", "1/2"], "cast")):
            found = self.run_tool(name, other, code=3)
            self.assertIn("the workers' source or options differ", found)
            self.assertIn(said, found)
        found = self.run_tool(name, [*options, "--part", "1/2"], code=3, source=self.old_source)
        self.assertIn("source old.safetensors", found)
        self.run_tool(name, [*options, "--part", "1/2"])
        self.assert_finished(name, options)

    def test_finish_names_missing_parts_and_a_worker_takes_them_over(self):
        name, options = "shards", ["--to", "safetensors", "--max-shard-size", "5MiB"]
        self.run_tool(name, [*options, "--part", "2/4"])
        said = self.finish(name, code=3)
        self.assertIn("expected 4 complete parts, found 1", said)
        for part in (0, 1, 3):
            self.assertIn(f"part {part} was never begun", said)
        self.run_tool(name, [*options, "--part", "0/4", "--take-over"])
        self.assert_finished(name, options)
        self.assertIn("is the move finished already?", self.finish(name, code=3))

    def base_and_next(self, parts=3, distance=256):
        """Returns a base, and a new source. In the first of `parts` parts of the source, every `distance`-th byte differs."""
        base, following = self.work / "base", self.work / "next.safetensors"
        self.run_tool("base", ["--world-size", "4"])
        found = bytearray(self.source.read_bytes())
        end_of_header = 8 + int.from_bytes(found[:8], "little")
        changed = (len(found) - end_of_header) // parts
        found[end_of_header:end_of_header + changed:distance] = bytes(1 for _ in range(0, changed, distance))
        following.write_bytes(found)
        return base, following

    @staticmethod
    def linked(base, path):
        """Returns the names of the files that a checkpoint shares with its base."""
        of_base = {each.stat().st_ino for each in base.iterdir()}
        return {each.name for each in path.iterdir() if each.stat().st_ino in of_base}

    def take_over_with_base(self, begin, changed_rows=False):
        """Calls `begin`, which starts some of three parts. One worker then takes over. Compares with one process alone."""
        base, following = self.base_and_next(parts=1, distance=40_000) if changed_rows else self.base_and_next()
        options = ["--world-size", "4", "--base", base, *["--changed-rows"] * changed_rows]
        start = time.monotonic()
        self.run_tool("alone", options, source=following)
        seconds = time.monotonic() - start
        links = self.linked(base, self.work / "alone")
        self.assertEqual(len(links), 4)
        self.assertEqual((self.work / "alone" / "index.h5").read_bytes()[8], 4 if changed_rows else 3)
        parts = [[*options, "--part", f"{i}/3"] for i in range(3)]
        begin(following, parts, seconds)
        if not (self.work / "shared").exists():  # else all parts ended before they were killed
            self.run_tool("shared", [*parts[0], "--take-over", "--resume"], source=following)
        self.assertEqual(contents(self.work / "shared"), contents(self.work / "alone"))
        self.assertEqual(self.linked(base, self.work / "shared"), links)
        self.assertEqual([each.name for each in self.work.iterdir() if ".partial" in each.name], [])

    def test_a_worker_takes_over_parts_with_a_base_that_were_never_begun(self):
        self.take_over_with_base(lambda source, parts, _: self.run_tool("shared", parts[2], source=source))

    def test_a_worker_takes_over_parts_with_a_base_that_were_killed(self):
        draw = random.Random(self.seed)

        def begin(source, parts, seconds):
            workers = [self.start("shared", part, source) for part in parts]
            for worker in workers:
                time.sleep(draw.uniform(0, seconds / 2))
                worker.kill()
                worker.communicate()

        for changed_rows in (False, False, True, True):
            with self.subTest(seed=self.seed), tempfile.TemporaryDirectory(dir=self.root) as folder:
                self.work = pathlib.Path(folder)
                self.take_over_with_base(begin, changed_rows)

    def test_a_take_over_with_another_base_is_refused(self):
        base, following = self.base_and_next()
        self.run_tool("other", ["--world-size", "4"], source=self.old_source)
        self.run_tool("shared", ["--world-size", "4", "--base", base, "--part", "1/2"], source=following)
        for others, found in (([], "none"), (["--base", self.work / "other"], "0x")):
            said = self.run_tool("shared", ["--world-size", "4", *others, "--part", "0/2", "--take-over"], code=3,
                                 source=following)
            self.assertRegex(said, f"options differ: base: expected 0x[0-9a-f]+, found {found}")
        self.run_tool("shared", ["--world-size", "4", "--base", base, "--part", "0/2", "--take-over"], source=following)
        self.assertEqual(len(self.linked(base, self.work / "shared")), 4)

    def test_the_work_of_all_can_be_discarded(self):
        for name, options in DESTINATIONS:
            with self.subTest(name=name):
                self.run_tool(name, [*options, "--part", "0/2"])
                self.assertIn("several workers", self.run_tool(name, options, code=2))
                self.finish(name, "--discard")
                self.assertEqual([each.name for each in self.work.iterdir() if each.name.startswith(name)], [])
                self.run_tool(name, [*options, "--part", "0/3"])
                self.run_tool(name, [*options, "--discard"])
                self.assert_finished(name, options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", required=True, type=pathlib.Path, help="folder of the tools")
    parser.add_argument("--kills", type=int, default=30)
    OPTIONS, rest = parser.parse_known_args()
    unittest.main(argv=[sys.argv[0], *rest], verbosity=2)  # the names tell where a run hangs
