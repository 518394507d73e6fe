#!/usr/bin/env python3
"""Kills ckpt-reshard at random moments, and resumes with other runs. Shows row E4."""

import argparse
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from killed_moves import contents, write_source

OPTIONS = None
RECIPES = pathlib.Path(__file__).resolve().parents[2] / "fixtures" / "recipes"
# Names of destinations, each with its options.
DESTINATIONS = (
    ("native", []),
    ("ranks", ["--world-size", "3", "--threads", "3"]),
    ("zstd", ["--compress", "zstd"]),
    ("one.safetensors", []),
    ("shards", ["--to", "safetensors", "--max-shard-size", "5MiB"]),
    ("dcp", ["--to", "dcp", "--world-size", "2"]),
    ("one.pt", []),
    ("turned", ["--recipe", RECIPES / "turned_layers.json", "--world-size", "2"]),
    ("turned.safetensors", ["--recipe", RECIPES / "turned_layers.json"]),
)


class KilledReshard(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.seed = int(os.environ.get("TESSERA_TEST_SEED", random.SystemRandom().randrange(1 << 32)))
        cls.folder = tempfile.TemporaryDirectory(prefix="tessera-killed-")
        cls.root = pathlib.Path(cls.folder.name)
        cls.source, cls.old_source = cls.root / "source.safetensors", cls.root / "old.safetensors"
        cls.extra = cls.root / "extra"
        cls.extra.mkdir()
        (cls.extra / "config.json").write_text("{}")
        (cls.extra / "vocab.txt").write_bytes(bytes(1 << 20))
        write_source(cls.source, 1)
        write_source(cls.old_source, 2)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def start(self, source, name, options):
        extra = [] if pathlib.Path(name).suffix else ["--extra-files-from", self.extra]
        command = [OPTIONS.bin / "ckpt-reshard", source, self.work / name, *options, *extra]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def move(self, source, name, options):
        process = self.start(source, name, options)
        stdout, stderr = process.communicate()
        self.assertEqual(process.returncode, 0, stderr)
        return stdout

    def whole(self, source, name, options):
        """Returns the files that an uninterrupted run writes, and its seconds."""
        with tempfile.TemporaryDirectory(dir=self.root) as folder:
            self.work = pathlib.Path(folder)
            start = time.monotonic()
            self.move(source, name, options)
            return contents(self.work / name), time.monotonic() - start

    def test_killed_at_any_moment(self):
        draw = random.Random(self.seed)
        new, old, seconds = {}, {}, {}
        for name, options in DESTINATIONS:
            new[name], seconds[name] = self.whole(self.source, name, options)
            old[name] = self.whole(self.old_source, name, options)[0]
        num_resumed, enough = 0, OPTIONS.kills // 10
        for number in range(10 * OPTIONS.kills):
            if number >= OPTIONS.kills and num_resumed > enough:
                break
            name, options = draw.choice(DESTINATIONS)
            replaces, num_kills = draw.random() < 0.25, draw.choice((1, 1, 2, 3))
            with tempfile.TemporaryDirectory(dir=self.root) as folder, \
                 self.subTest(seed=self.seed, number=number, name=name, replaces=replaces):
                self.work = pathlib.Path(folder)
                before = {}
                if replaces:
                    self.move(self.old_source, name, options)
                    before = old[name]
                self.assertEqual(contents(self.work / name), before)
                num_resumed += self.kill_and_go_on(draw, name, options + ["--overwrite"] * replaces,
                                                   num_kills, seconds, before, new[name])
        self.assertGreater(num_resumed, enough, "too few of the killed runs had begun")

    def kill_and_go_on(self, draw, name, options, num_kills, seconds, before, after):
        """Kills runs, then lets one run finish. Returns whether that run resumed the work of a killed one.

        Decreases `seconds` if the first run ended before it was killed; increases it if nothing was resumed.
        """
        path = self.work / name
        for attempt in range(num_kills):
            process = self.start(self.source, name, options + ["--resume"] * (attempt > 0))
            time.sleep(draw.uniform(0, seconds[name]))
            process.kill()
            process.communicate()
            found = contents(path)
            self.assertIn(found, (before, after), "neither the old nor the new one, whole")
            if found == after:
                seconds[name] *= 0.8 if attempt == 0 else 1
                return False
        stdout = self.move(self.source, name, options + ["--resume"])
        self.assertEqual(contents(path), after)
        self.assertEqual([each.name for each in self.work.iterdir() if ".partial" in each.name], [])
        has_resumed = re.search(r"bytes .* of them from the interrupted run", stdout) is not None
        seconds[name] *= 1 if has_resumed else 1.1
        return has_resumed

    def test_a_second_run_is_refused_and_the_first_ends_well(self):
        for name, options in DESTINATIONS:
            expected, _ = self.whole(self.source, name, options)
            with tempfile.TemporaryDirectory(dir=self.root) as folder, self.subTest(name=name):
                self.work = pathlib.Path(folder)
                first = self.start(self.source, name, options)
                journal = self.work / (name + ".partial.journal")  # made under the lock
                while not journal.exists() and first.poll() is None:
                    pass
                first.send_signal(signal.SIGSTOP)
                if (self.work / name).exists():
                    self.skipTest("the first run was too fast")
                for flags in ([], ["--resume"], ["--discard"]):
                    second = self.start(self.source, name, options + flags)
                    _, stderr = second.communicate()
                    self.assertEqual(second.returncode, 2, stderr)
                    self.assertIn("another process is writing to the same destination", stderr)
                first.send_signal(signal.SIGCONT)
                _, stderr = first.communicate()
                self.assertEqual(first.returncode, 0, stderr)
                self.assertEqual(contents(self.work / name), expected)

    def test_another_recipe_does_not_resume(self):
        """Checks that --resume with another recipe is refused, and with the same recipe gives the expected files."""
        draw = random.Random(self.seed)
        name, options = next(each for each in DESTINATIONS if each[0] == "turned")
        expected, seconds = self.whole(self.source, name, options)
        other = self.root / "other.json"
        # This recipe makes the same names and shapes, but other elements.
        other.write_text((RECIPES / "turned_layers.json").read_text().replace('{"transpose": [0, 1]}', ""))
        for _ in range(100):
            with tempfile.TemporaryDirectory(dir=self.root) as folder:
                self.work = pathlib.Path(folder)
                first = self.start(self.source, name, options)
                time.sleep(draw.uniform(0, seconds))
                first.kill()
                first.communicate()
                if (self.work / name).exists():
                    seconds *= 0.9
                    continue
                second = self.start(self.source, name, ["--recipe", other, "--world-size", "2", "--resume"])
                _, stderr = second.communicate()
                if "no interrupted run to resume" in stderr:  # the first had not finished anything
                    continue
                self.assertEqual(second.returncode, 3, stderr)
                self.assertIn("source or options have changed: recipe: expected a file of digest", stderr)
                self.move(self.source, name, options + ["--resume"])
                self.assertEqual(contents(self.work / name), expected)
                return
        self.fail("none of the killed runs had begun")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", required=True, type=pathlib.Path, help="folder of the tools")
    parser.add_argument("--kills", type=int, default=40)
    OPTIONS, rest = parser.parse_known_args()
    unittest.main(argv=[sys.argv[0], *rest])
