"""Moves a random state dict by random moves, and compares the end of each with what other libraries read."""

import collections
import hashlib
import json
import random
import re
import shlex
import shutil
from pathlib import Path

import torch
from changes import MISSING, glob_of, is_argument, random_change, selected
from ckpt_tools import files_of, run
from differences import SIMPLER, bytes_of, compare, flatten, is_opened, leaves, memory_of, tensors_of
from python_package import tessera
from readers import items_of, load, opened_state, texts_of
from sources import Source
from torch.distributed.checkpoint.api import CheckpointException

FORMATS = ["native", "dcp", "safetensors", "safetensors file", "torch", "rank_files"]
# Kinds of changes whose counts in the summary are compared with what is found.
COUNTED = ("parameters", "requires_grad", "tuples", "split_ties", "attributes")
# What PyTorch changes itself when it saves DCP, so no summary of a move tells of it.
OF_DCP = ("split_ties",)


class Stop(Exception):
    """Ends a walk: a move was refused."""


class Walk:
    """One seed. `faults` are the findings; `commands` repeat the walk up to them."""

    def __init__(self, seed, folder):
        self.folder, self.rng = folder, random.Random(seed * 104729 + 2)
        self.faults, self.commands = [], []
        self.source = Source(seed, folder, self.fault)
        self.path, self.state, self.has_order = self.source.path, self.source.state, self.source.has_order
        self.names, self.texts, self.extra_files = self.source.names, self.source.texts, self.source.extra_files
        self.values_vary = self.source.form == "whole_dcp"  # whether the names of values depend on the format
        self.likes, self.bases = [], []  # earlier checkpoints of the same state, for --like and --base

    def fault(self, kind, text):
        self.faults.append(f"{kind}: {str(text)[:1000]}\n  after {self.commands[-1] if self.commands else 'the save'}")

    def chance(self, probability):
        return self.rng.random() < probability

    def new_file(self, name, document):
        path = self.folder / f"{name}{len(list(self.folder.glob(name + '*')))}.json"
        path.write_text(json.dumps(document))
        return path

    def tool(self, tool, *arguments):
        self.commands.append(shlex.join([tool, *map(str, arguments)]))
        done = run(tool, *arguments)
        if done.returncode not in (0, 1, 2, 3, 4):
            self.fault("exit code", f"{done.returncode}: {done.stderr}")
        return done

    def succeeds(self, *arguments):
        done = self.tool("ckpt-reshard", *arguments)
        if done.returncode:
            self.fault("refused", done.stderr)
        return done.returncode == 0

    def expect_nothing_of(self, path, said):
        left = [other.name for other in self.folder.iterdir() if other.name.startswith(path.name)]
        if left:
            self.fault("left", f"{left} after {said}")

    # The walk

    def go(self):
        listed = self.tool("ckpt-inspect", "ls", self.path, "--json")
        if listed.returncode:
            return
        self.check_sound(self.path)
        self.has_refused = "$refused" in listed.stdout  # such a value may have several entries
        try:
            if not self.has_refused:
                self.check_listing(self.path, self.state)
                self.check_opened(self.path, self.state, self.has_order, {*SIMPLER, "split_ties"})
            for number in range(self.rng.choice([1, 2, 3, 3, 4, 5])):
                self.move(number)
                if self.chance(0.08):
                    self.merge_halves(number)
                if self.chance(0.2):
                    self.go_to_deepspeed_and_back(number)
            self.check_loaded(self.path, self.state)
        except Stop:
            pass

    def move(self, number):
        kind = self.rng.choice(FORMATS)
        format = kind.split()[0]
        suffix = {"torch": ".pt", "safetensors file": ".safetensors"}.get(kind, "")
        destination = self.folder / f"move{number}{suffix}"
        change = random_change(self.rng, self)
        options = ["--to", format, *self.layout_options(kind), *(change.options if change else [])]
        summary, said = self.plan_and_move(self.path, destination, options)
        if summary is None:
            return self.move_without_refused(number, said)
        found = self.loaded(destination, format)
        if "--only" in options:  # a list may lack items, so that it is other values in other formats
            self.values_vary |= any(isinstance(key, int) for path, _ in flatten(self.state).values() for key in path)
        is_ordered = self.has_order and format != "safetensors" and not change
        self.check_move(change.expect(found) if change else self.state, found, is_ordered, format, summary, said)
        num_left_out = change and change.num_left_out
        if num_left_out not in (None, sum(summary["left_out"].values())) and not self.has_refused:
            self.fault("left out", f"{summary['left_out']} in the summary, expected {num_left_out}")
        self.check_texts(destination, format, summary)
        self.check_extra_files(destination, summary)
        self.has_order = format != "safetensors" and "per_rank" not in found
        self.check_destination(destination, format, found, summary)
        if not change and not self.values_vary:
            self.check_equal(self.path, destination)
        self.move_again(self.path, destination, options)
        self.take(destination, found, keeps_state=not change)
        self.names = change.names if change and change.names is not None else self.names
        return None

    def take(self, path, state, keeps_state=False):
        self.path, self.state = path, state
        self.likes, self.bases = (self.likes, self.bases) if keeps_state else ([], [])
        self.likes += [path] if {".metadata", "index.h5"} & set(files_of(path)) else []
        self.bases += [path] if "index.h5" in files_of(path) else []

    def plan_and_move(self, source, destination, options):
        """Returns the summary, or None if the move is refused, and the messages. A dry run must say the same."""
        planned = self.tool("ckpt-reshard", source, destination, *options, "--json", "--dry-run")
        self.expect_nothing_of(destination, "a dry run")
        done = self.tool("ckpt-reshard", source, destination, *options, "--json")
        is_late = done.returncode == 3 and "--cast" in options  # a dry run reads no elements
        if (planned.returncode, planned.stderr) != (done.returncode, done.stderr) and not is_late:
            self.fault("dry run", f"{planned.returncode} {planned.stderr} instead of {done.returncode} {done.stderr}")
        if done.returncode:
            self.expect_nothing_of(destination, done.stderr)
            return None, done.stderr
        summary, plan = json.loads(done.stdout), json.loads(planned.stdout)
        differing = {key for key in summary if plan[key] != summary[key]} - {"written", "overflows", "underflows"}
        if differing:
            self.fault("dry run", f"another summary: {differing}")
        return summary, done.stderr

    def loaded(self, path, format):
        try:
            return load(path, format)
        except (Exception, CheckpointException) as error:
            if "Missing key in checkpoint state_dict" not in str(error):  # a list of values alone (docs/formats/dcp.md)
                self.fault(f"load {format}", repr(error))
            raise Stop from None

    # Options of moves that keep the state

    def layout_options(self, kind):
        choose, options = self.rng.choice, []
        if kind == "native":
            options += choose([[], [], ["--compress", choose(["zstd", "zstd:3", "zstd:-5"])]])
            options += choose([[], *(["--base", base, *choose([[], ["--changed-rows"]])] for base in self.bases[-1:])])
        if kind == "safetensors":
            options += choose([[], ["--max-shard-size", choose(["100B", "1KiB", "64B", "1MB"])]])
        if kind == "rank_files":
            options += choose([[], ["--device-mesh", choose(["cpu:fsdp", "cpu", "cuda:a,b"])]])
        if kind in ("native", "dcp", "rank_files"):
            world_size = ["--world-size", choose([1, 2, 3, 5])]
            options += choose([[], world_size, [*world_size, "--strategy", choose(["dim0", "dim1", "replicated"])],
                               ["--strategy", choose(["hybrid:2x2", "hybrid:3x1", "hybrid:1x3"])],
                               *(["--like", other] for other in self.likes[-1:] if kind != "rank_files")])
        return options

    # Checks of a move

    def check_move(self, expected, found, ordered, format, summary, said):
        """Each difference must be in the summary, and most are counted."""
        changes = {change["kind"]: change["count"] for change in summary["changes"]}
        differences, of_dcp = compare_moved(expected, found, ordered, changes), "dcp" in self.source.form
        for difference in differences:
            is_empty_dict = difference.kind == "missing" and format == "rank_files" and "left out" in said
            if not difference.is_said(changes) and not is_empty_dict and not (of_dcp and difference.kind in OF_DCP):
                self.fault(f"move to {format}", f"{difference}; the summary tells of {changes}")
        counted = collections.Counter(difference.kind for difference in differences)
        can_count = "nested_keys" not in changes and "--cast" not in self.commands[-1] and not of_dcp
        for kind in COUNTED if can_count else ():
            if counted[kind] != changes.get(kind, 0):
                self.fault(f"count to {format}", f"{counted[kind]} {kind}, {changes.get(kind, 0)} in the summary")

    def check_texts(self, destination, format, summary):
        if format == "safetensors":
            if (found := texts_of(destination)) != self.texts:
                self.fault("texts", f"{self.texts} became {found}")
        elif format != "native" and self.texts:
            if "annotations" not in {change["kind"] for change in summary["changes"]}:
                self.fault("texts", f"{self.texts} left out without a word")
            self.texts = {}

    def check_extra_files(self, destination, summary):
        if destination.is_dir():
            found = files_of(destination)
            if not self.extra_files.items() <= found.items():
                self.fault("extra files", f"missing or different: {self.extra_files.items() - found.items()}")
        elif self.extra_files:
            if {file["name"] for file in summary["left_files"]} != self.extra_files.keys():
                self.fault("extra files", f"left without a word: {summary['left_files']}")
            self.extra_files = {}

    def move_again(self, source, destination, options):
        """Makes the same move in another way. The files must have the same bytes."""
        copy = destination.with_name("again" + destination.suffix)
        way = self.rng.choice([self.move_in_parts, self.move_over_another])
        if not way(source, copy, options):
            return
        files = {file.replace("again", destination.stem, 1): data for file, data in self.all_files(copy).items()}
        theirs = self.all_files(destination)
        if files != theirs:
            names = [name for name in files.keys() | theirs.keys() if files.get(name) != theirs.get(name)]
            self.fault(way.__name__, f"other bytes in {names[:5]}")
        self.remove(copy)
        self.expect_nothing_of(copy, way.__name__)

    def all_files(self, path):
        """Returns the files of a checkpoint, with the values of a single safetensors file."""
        beside = Path(f"{path}.values.json")
        return files_of(path) | (files_of(beside) if beside.exists() else {})

    def remove(self, path):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        Path(f"{path}.values.json").unlink(missing_ok=True)

    def move_in_parts(self, source, copy, options):
        count = self.rng.randint(2, 4)
        order = self.rng.sample(range(count), count)
        return all([self.succeeds(source, copy, *options, "--part", f"{part}/{count}") for part in order])

    def move_over_another(self, source, copy, options):
        """Replaces an older checkpoint, with other threads. If this is refused, the old one must stay."""
        made = [p for p in self.folder.iterdir() if p.name.startswith(("move", "source")) and "values" not in p.name]
        before = self.rng.choice(made)
        (shutil.copytree if before.is_dir() else shutil.copy)(before, copy)
        if Path(f"{before}.values.json").exists():
            shutil.copy(f"{before}.values.json", f"{copy}.values.json")
        old = self.all_files(copy)
        limits = ["--threads", self.rng.choice([1, 3, 16]), "--memory", self.rng.choice(["17MiB", "64MiB", "1GiB"])]
        done = self.tool("ckpt-reshard", source, copy, *options, "--overwrite", *limits)
        if done.returncode:
            if self.all_files(copy) != old:
                self.fault("overwrite", f"refused, but changed: {done.stderr}")
            self.remove(copy)
        return done.returncode == 0

    # Checks of a checkpoint

    def check_destination(self, path, format, state, summary):
        listing = self.check_listing(path, state)
        tied = sum("alias_of" in row for row in listing["tensors"])
        counts = [len(listing["tensors"]) - tied, tied, len(items_of(listing["values"]))]
        said = [summary[key] for key in ("num_tensors", "num_aliases", "num_values")]
        if format != "rank_files" and not self.values_vary and counts != said:
            self.fault("counts of tensors, aliases and values", f"{counts} listed, {said} in the summary")
        self.check_sound(path)
        self.check_opened(path, state, self.has_order, set())

    def check_listing(self, path, state):
        """`ls` must have the same names, dtypes, shapes and bytes as the state. Returns its document."""
        done = self.tool("ckpt-inspect", "ls", path, "--json", "--sha256")
        if done.returncode:
            self.fault("ls", done.stderr)
            raise Stop
        listing = json.loads(done.stdout)
        tensors = tensors_of(state)
        expected = {name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.nbytes,
                           hashlib.sha256(bytes_of(tensor)).hexdigest()] for name, tensor in tensors.items()}
        listed = {row["name"]: [row["dtype"], row["shape"], row["nbytes"], row["sha256"]] for row in listing["tensors"]}
        differing = [name for name in listed.keys() | expected.keys() if listed.get(name) != expected.get(name)]
        for name in differing[:3]:
            self.fault("ls", f"{path.name}: {name!r}: expected {expected.get(name)}, listed {listed.get(name)}")
        values = leaves(state).keys() - tensors.keys()
        found = {name for name, _ in items_of(listing["values"])}
        if values != found and not self.values_vary:
            self.fault("ls", f"{path.name}: names of values: {sorted(values ^ found)[:5]}")
        return listing

    def check_opened(self, path, state, ordered, allowed):
        try:
            found = opened_state(path)
        except tessera.Error as error:
            return self.fault("tessera.open", f"{path.name}: {error}")
        for difference in compare(state, found, ordered):
            if difference.kind not in allowed:
                self.fault("tessera.open", f"{path.name}: {difference}")
        return None

    def check_sound(self, path):
        done = self.tool("ckpt-inspect", "verify", path)
        if done.returncode:
            self.fault("verify", f"{path.name}: exit {done.returncode}: {done.stdout} {done.stderr}")

    def check_loaded(self, path, state):
        """tessera.load must fill a state dict of the same names, whose tied tensors are tied."""
        made = {}

        def blank(value):
            if isinstance(value, torch.Tensor):
                zeros = torch.zeros(value.nbytes, dtype=torch.uint8).view(value.dtype).reshape(value.shape)
                return made.setdefault(memory_of(value), zeros)
            if isinstance(value, dict):
                return {key: blank(item) for key, item in value.items()}
            return type(value)(map(blank, value)) if is_opened(value) else None

        target = blank(state)
        try:
            tessera.load(target, path)
        except tessera.Error as error:
            return None if self.values_vary else self.fault("tessera.load", f"{path.name}: {error}")
        for difference in compare(state, target, ordered=False):
            self.fault("tessera.load", f"{path.name}: {difference}")
        return None

    def check_equal(self, a, b):
        done = self.tool("ckpt-inspect", "diff", a, b)
        if done.returncode:
            self.fault("diff", f"exit {done.returncode}: {done.stdout} {done.stderr}")
        hashes = [self.tool("ckpt-inspect", "hash", path).stdout for path in (a, b)]
        wholes = [re.findall(r"^whole: .*", text, re.MULTILINE) for text in hashes]
        if wholes[0] != wholes[1] or not wholes[0]:
            self.fault("hash", f"{a.name} {b.name}: {wholes}")

    # Other ways

    def move_without_refused(self, number, said):
        """Follows the advice of a refusal, which leaves out exactly what cannot be read."""
        patterns = [p.replace("'\\''", "'") for p in dict.fromkeys(re.findall(r"--only '(!(?:[^']|'\\'')*)'", said))]
        listing = json.loads(self.tool("ckpt-inspect", "ls", self.path, "--json").stdout)
        refused = {name for name, value in items_of(listing["values"]) if "$refused" in str(value)}
        is_exact = not any("?" in pattern or pattern.startswith("!=") for pattern in patterns)
        if not patterns or not is_exact or not refused or len(refused) > 8 or self.values_vary:
            raise Stop
        containers = tuple(name + "." for name in refused - flatten(self.state).keys())
        expected = selected(self.state, lambda name: name not in refused and not name.startswith(containers))
        destination = self.folder / f"without{number}"
        only = [word for pattern in patterns for word in ("--only", pattern)]
        done = self.tool("ckpt-reshard", self.path, destination, "--to", "native", *only, "--json")
        if done.returncode or expected is MISSING:
            raise Stop
        found, self.values_vary = self.loaded(destination, "native"), True
        self.check_move(expected, found, False, "native", json.loads(done.stdout), done.stderr)
        self.take(destination, found)

    def merge_halves(self, number):
        """Moves half of the outermost keys, and the rest, to two checkpoints, and merges them."""
        keys = [key for key in self.state if isinstance(key, str)]
        chosen = set(self.rng.sample(keys, len(keys) // 2))
        inside = [name for name, (path, _) in flatten(self.state).items() if path[0] in chosen]
        if not inside or "per_rank" in chosen or len(inside) > 60 or not all(map(is_argument, inside)):
            return
        halves, merged = [self.folder / f"half{number}.{i}" for i in range(2)], self.folder / f"merged{number}"
        for half, sign in zip(halves, ("=", "!=")):
            only = [word for name in inside for word in ("--only", sign + glob_of(name))]
            format = self.rng.choice(["native", "native" if "per_rank" in self.state else "safetensors"])
            if self.tool("ckpt-reshard", self.path, half, "--to", format, *only).returncode:
                return
        done = self.tool("ckpt-reshard", "merge", *halves, merged, "--json")
        if done.returncode:
            return
        found = self.loaded(merged, "native")
        changes = {change["kind"] for change in json.loads(done.stdout)["changes"]}
        for difference in compare(self.state, found, ordered=False):
            may_be_between_halves = difference.kind in {*SIMPLER, "split_ties"}
            if not may_be_between_halves and not difference.is_said(changes):
                self.fault("merge", difference)
        self.take(merged, found)

    def go_to_deepspeed_and_back(self, number):
        """Makes a universal checkpoint of DeepSpeed, if the state is that of a model with named optimizer state."""
        if not isinstance(self.state.get("model"), dict):
            return
        destination, back = self.folder / f"deepspeed{number}", self.folder / f"back{number}.pt"
        done = self.tool("ckpt-reshard", self.path, destination, "--to", "deepspeed", "--json")
        if done.returncode:
            return self.expect_nothing_of(destination, done.stderr)
        self.check_sound(destination)
        again = self.tool("ckpt-reshard", destination, back, "--json", "--only", "!deepspeed")
        if again.returncode:
            return self.fault("back from deepspeed", again.stderr)
        changes = {change["kind"] for document in (done, again) for change in json.loads(document.stdout)["changes"]}
        for difference in compare_moved(self.state, torch.load(back, weights_only=True), False, changes):
            is_new = difference.kind == "extra" and "param_groups" in difference.path
            of_engine = difference.path[:1] == ("deepspeed",)
            if not is_new and not of_engine and difference.kind not in SIMPLER and not difference.is_said(changes):
                self.fault("deepspeed", difference)
        return None


def compare_moved(expected, found, ordered, changes):
    """Returns the differences of state dicts. If the move made other dicts of keys, entries are compared by name."""
    differences = compare(expected, found, ordered)
    if "nested_keys" not in changes:
        return differences
    of_dicts = ("missing", "extra", "key_order")
    by_name = compare(leaves(expected), leaves(found), ordered=False)
    return [difference for difference in differences if difference.kind not in of_dicts] + by_name
