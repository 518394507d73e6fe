#!/usr/bin/env python3
"""Checks the tools' JSON output against the schemas in docs/cli/json-schema.md. Shows row E6."""

import argparse
import json
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

OPTIONS = None
KEYWORDS = {"$id", "type", "properties", "required", "items", "additionalProperties", "enum", "const",
            "minimum", "anyOf", "$ref"}
TYPES = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
}


def read_schemas():
    """Returns the schema named `definitions`, and all other schemas by their $id."""
    text = OPTIONS.schemas.read_text(encoding="utf-8")
    schemas = {}
    for block in re.findall(r"```json\n(.*?)```", text, re.DOTALL):
        schema = json.loads(block)
        schemas[schema.pop("$id")] = schema
    return schemas.pop("definitions"), schemas


def faults(value, schema, definitions, where="document"):
    """Returns a text for each difference between a value and its schema."""
    unknown = schema.keys() - KEYWORDS
    if unknown:
        raise ValueError(f"the schema of {where} uses {unknown}")
    if "$ref" in schema:
        return faults(value, definitions[schema["$ref"]], definitions, where)
    if "anyOf" in schema:
        attempts = [faults(value, each, definitions, where) for each in schema["anyOf"]]
        return [] if not all(attempts) else [f"{where}: fits none of: {attempts}"]
    found = []
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if types and not any(TYPES[each](value) for each in types):
        return [f"{where}: expected {schema['type']}, found {value!r}"]
    if "const" in schema and value != schema["const"]:
        found.append(f"{where}: expected {schema['const']!r}, found {value!r}")
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{where}: expected one of {schema['enum']}, found {value!r}")
    if "minimum" in schema and value < schema["minimum"]:
        found.append(f"{where}: expected at least {schema['minimum']}, found {value}")
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        for name in schema.get("required", []):
            if name not in value:
                found.append(f"{where}: {name} is missing")
        for name, member in value.items():
            if name in properties:
                found += faults(member, properties[name], definitions, f"{where}.{name}")
            elif schema.get("additionalProperties") is False:
                found.append(f"{where}: {name} is not in the schema")
    if isinstance(value, list) and "items" in schema:
        for i, item in enumerate(value):
            found += faults(item, schema["items"], definitions, f"{where}[{i}]")
    return found


def undocumented(value, schema, definitions, where="document"):
    """Returns the members that the schema does not name, so that no member stays undocumented."""
    if "$ref" in schema:
        return undocumented(value, definitions[schema["$ref"]], definitions, where)
    if "anyOf" in schema:
        fitting = [each for each in schema["anyOf"] if not faults(value, each, definitions)]
        return undocumented(value, fitting[0], definitions, where) if fitting else []
    found = []
    if isinstance(value, dict) and "properties" in schema:
        for name, member in value.items():
            if name not in schema["properties"]:
                found.append(f"{where}.{name}")
            else:
                found += undocumented(member, schema["properties"][name], definitions,
                                      f"{where}.{name}")
    if isinstance(value, list) and "items" in schema:
        for i, item in enumerate(value):
            found += undocumented(item, schema["items"], definitions, f"{where}[{i}]")
    return found


class JsonSchemasTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.definitions, cls.schemas = read_schemas()
        cls.checked = set()
        cls.folder = tempfile.TemporaryDirectory(prefix="tessera-json-")

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def output(self, *command):
        tool, *arguments = command
        done = subprocess.run([OPTIONS.bin / tool, *arguments], capture_output=True, text=True,
                              check=False)
        self.assertIn(done.returncode, (0, 1, 3), done.stderr)
        return done.stdout

    def check(self, schema_name, *command):
        document = json.loads(self.output(*command))
        schema = self.schemas[schema_name]
        self.assertEqual(faults(document, schema, self.definitions), [], command)
        self.assertEqual(undocumented(document, schema, self.definitions), [], command)
        self.checked.add(schema_name)
        return document

    def fixtures(self):
        return [OPTIONS.fixtures / name for name in (
            "dcp/valid/fsdp2_adamw", "dcp/valid/dtypes", "dcp/valid/torchrec", "dcp/valid/values",
            "torch_zip/valid/training_state.pt", "torch_zip/valid/shared.pt",
            "torch_zip/valid/values.pt", "torch_zip/valid/degenerate.pt", "torch_zip/valid/shared.pt",
            "safetensors/valid/sharded", "safetensors/valid/no_tensors.safetensors",
            "megatron/valid/tp2_pp2")]

    def test_the_mesh_of_files_of_ranks(self):
        self.check("ckpt-inspect layout", "ckpt-inspect", "layout", "--json", "--mesh", OPTIONS.fixtures / "rank_files/valid/fsdp2_tp")

    def test_every_verb_on_every_kind_of_checkpoint(self):
        for path in self.fixtures():
            with self.subTest(path=path.name):
                self.check("ckpt-inspect ls", "ckpt-inspect", "ls", "--json", "--sha256", path)
                self.check("ckpt-inspect tree", "ckpt-inspect", "tree", "--json", path)
                self.check("ckpt-inspect stats", "ckpt-inspect", "stats", "--json", path)
                self.check("ckpt-inspect stats --part", "ckpt-inspect", "stats", "--json", "--part", "0/2", path)
                self.check("ckpt-inspect layout", "ckpt-inspect", "layout", "--json", path)
                self.check("ckpt-inspect verify", "ckpt-inspect", "verify", "--json", path)
                self.check("ckpt-inspect verify --part", "ckpt-inspect", "verify", "--json", "--part", "0/2", path)
                self.check("ckpt-inspect diff", "ckpt-inspect", "diff", "--json", path, path)
                self.check("ckpt-inspect hash", "ckpt-inspect", "hash", "--json", path)
                if path.name != "no_tensors.safetensors":  # no name to show
                    self.check("ckpt-inspect show", "ckpt-inspect", "show", "--json", path, "*")

    def test_findings(self):
        invalid = OPTIONS.fixtures / "dcp/invalid"
        for name in ("flipped_bit", "piece_missing", "piece_overlap", "rank_file_missing"):
            document = self.check("ckpt-inspect verify", "ckpt-inspect", "verify", "--json",
                                  invalid / name)
            self.assertFalse(document["sound"])
            for part in ("0/2", "1/2"):
                self.check("ckpt-inspect verify --part", "ckpt-inspect", "verify", "--json", "--part", part, invalid / name)
        valid = OPTIONS.fixtures / "dcp/valid"
        document = self.check("ckpt-inspect diff", "ckpt-inspect", "diff", "--json", valid / "dtypes",
                              valid / "degenerate")
        self.assertFalse(document["equal"])

    def test_scan(self):
        scanned = OPTIONS.fixtures / "pickle_scan"
        for name in ("harmless", "zip", "extension.pkl", "computed_names.pkl", "cut_short.pkl"):
            document = self.check("ckpt-inspect scan", "ckpt-inspect", "scan", "--json", scanned / name)
            self.assertEqual(document["clean"], name == "harmless")

    def test_recipe(self):
        recipes = OPTIONS.fixtures / "recipes"
        for name in ("stacked.json", "wrong_sizes.json"):
            document = self.check("ckpt-inspect recipe", "ckpt-inspect", "recipe", "--json", "check", recipes / name,
                                  OPTIONS.fixtures / "dcp/valid/fsdp2_adamw", "--set", "prefix=model.")
            self.assertEqual(document["fits"], name == "stacked.json")

    def test_hash_check(self):
        valid = OPTIONS.fixtures / "dcp"
        manifest = pathlib.Path(self.folder.name) / "manifest"
        manifest.write_text(self.output("ckpt-inspect", "hash", valid / "v2.2/ddp"), encoding="utf-8")
        document = self.check("ckpt-inspect hash --check", "ckpt-inspect", "hash", "--json",
                              valid / "v2.11/ddp", "--check", manifest)
        self.assertEqual({each["kind"] for each in document["differences"]}, {"missing", "extra"})

    def test_plan(self):
        source = OPTIONS.fixtures / "dcp/valid/torchrec"
        document = self.check("ckpt-inspect plan", "ckpt-inspect", "plan", "--json", source,
                              "--memory-per-rank", "16MiB", "--ranks-per-host", "2")
        plan = pathlib.Path(self.folder.name) / "plan.json"
        self.output("ckpt-inspect", "plan", source, "--memory-per-rank", "16MiB", "--ranks-per-host",
                    "2", "--output", plan)
        self.assertEqual(json.loads(plan.read_text(encoding="utf-8")), document["plan"])

    def test_reshard(self):
        source = OPTIONS.fixtures / "dcp/valid/fsdp2_adamw"
        destination = pathlib.Path(self.folder.name) / "native"
        self.check("ckpt-reshard", "ckpt-reshard", "--json", source, destination, "--cast", "bfloat16")
        self.check("ckpt-reshard", "ckpt-reshard", "--json", "--dry-run", "--overwrite", source, destination)
        self.check("ckpt-reshard", "ckpt-reshard", "--json",
                   OPTIONS.fixtures / "dcp/invalid/piece_missing", destination.with_name("other"))
        document = self.check("ckpt-inspect diff", "ckpt-inspect", "diff", "--json", "--ignore-dtype",
                              source, destination)
        self.assertIn("elements", [each["kind"] for each in document["differences"]])
        self.check("ckpt-inspect show", "ckpt-inspect", "show", "--json", destination, "*")

    def test_workers(self):
        words = ("ckpt-reshard", "--json", OPTIONS.fixtures / "dcp/valid/fsdp2_adamw",
                 pathlib.Path(self.folder.name) / "by_two_workers", "--part")
        document = self.check("ckpt-reshard", *words, "1/2")
        self.assertFalse(document["written"])
        self.assertEqual(document["workers"]["missing"], [{"part": 0, "state": "was never begun"}])
        document = self.check("ckpt-reshard", *words, "0/2")
        self.assertTrue(document["written"])
        self.assertEqual([each["part"] for each in document["workers"]["written"]], [0])

    def test_extra_files(self):
        folder = pathlib.Path(self.folder.name)
        source = folder / "with_extra_files"
        shutil.copytree(OPTIONS.fixtures / "dcp/valid/ddp", source)
        (source / "config.json").write_text('{"dtype": "float32"}', encoding="utf-8")
        (source / "folder").mkdir()
        document = self.check("ckpt-reshard", "ckpt-reshard", "--json", source, folder / "extra", "--cast", "bfloat16")
        self.assertEqual([file["edit"] for file in document["extra_files"]], ["dtype: float32 to bfloat16"])
        self.assertEqual(document["left_files"], [{"name": "folder", "why": "a folder"}])
        for verb in ("ls", "tree", "hash"):
            document = self.check(f"ckpt-inspect {verb}", "ckpt-inspect", verb, "--json", source)
            self.assertEqual([file["name"] for file in document["extra_files"]], ["config.json"])
        manifest = folder / "manifest_of_extra_files"
        manifest.write_text(self.output("ckpt-inspect", "hash", "--json", source), encoding="utf-8")
        document = self.check("ckpt-inspect hash --check", "ckpt-inspect", "hash", "--json",
                              OPTIONS.fixtures / "dcp/valid/ddp", "--check", manifest)
        self.assertEqual([(each["kind"], each["extra_file"]) for each in document["differences"]], [("missing", True)])

    def test_merge(self):
        source = OPTIONS.fixtures / "dcp/valid/ddp"
        destination = pathlib.Path(self.folder.name) / "merged"
        document = self.check("ckpt-reshard", "ckpt-reshard", "merge", "--json", source, source, destination)
        self.assertIn("merge", [each["rule"] for each in document["problems"]])
        self.check("ckpt-reshard", "ckpt-reshard", "merge", "--json", f"a={source}", f"b={source}", destination)

    def test_combine(self):
        lora = OPTIONS.fixtures / "arithmetic" / "lora"
        destination = pathlib.Path(self.folder.name) / "combined"
        document = self.check("ckpt-reshard", "ckpt-reshard", "combine", "--json", destination, "--base", lora / "base",
                              "--lora", lora / "many")
        self.assertEqual(document["combination"]["adapters"][0]["replaced"], 7)

    def progress(self, status, *command, **settings):
        """Returns the events of each phase, and what else the tool printed to standard error."""
        tool, *arguments = command
        done = subprocess.run([OPTIONS.bin / tool, *arguments, "--progress", "json"], capture_output=True,
                              text=True, check=False, **settings)
        self.assertEqual(done.returncode, status, done.stderr)
        if "--json" in arguments and status in (0, 1):
            json.loads(done.stdout)
        lines = done.stderr.splitlines()
        events = [json.loads(line) for line in lines if line.startswith("{")]
        phases = []
        for event in events:
            self.assertEqual(faults(event, self.schemas["progress"], self.definitions), [], command)
            self.assertEqual(undocumented(event, self.schemas["progress"], self.definitions), [], command)
            if not phases or phases[-1][-1]["state"] != "running":
                phases.append([])
            phases[-1].append(event)
        self.checked.add("progress")
        for phase in phases:
            self.assertEqual((phase[0]["state"], phase[0]["done_nbytes"]), ("running", 0))
            self.assertNotEqual(phase[-1]["state"], "running")
            self.assertEqual(len({(event["verb"], event["phase"], event["total_nbytes"]) for event in phase}), 1)
            for before, event in zip(phase, phase[1:]):
                self.assertLessEqual(before["done_nbytes"], event["done_nbytes"])
                self.assertLessEqual(before["kept_nbytes"], event["kept_nbytes"])
                self.assertLessEqual(before["seconds"], event["seconds"])
            if phase[-1]["state"] == "done":
                self.assertEqual(phase[-1]["done_nbytes"], phase[-1]["total_nbytes"])
        return phases, [line for line in lines if not line.startswith("{")]

    def test_progress_of_every_verb_that_has_some(self):
        source = OPTIONS.fixtures / "dcp/valid/fsdp2_adamw"
        folder = pathlib.Path(self.folder.name)
        for names, verb, *arguments in (
                (["sha256"], "ls", "--json", "--sha256", source), (["stats"], "stats", "--json", source),
                (["hash"], "hash", "--json", source), (["verify"], "verify", "--json", source),
                (["diff"], "diff", "--json", source, source),
                (["show", "show"], "show", "--json", source, "model.emb.weight", "model.head.weight"),
                (["report"], "report", source, "-o", folder / "one.html"),
                (["diff", "report", "report"], "report", source, source, "-o", folder / "two.html")):
            phases, others = self.progress(0, "ckpt-inspect", verb, *arguments)
            self.assertEqual([phase[-1]["phase"] for phase in phases], names)
            self.assertEqual({(phase[-1]["verb"], phase[-1]["state"]) for phase in phases}, {(verb, "done")})
            self.assertEqual(others, [])
        moves = (("reshard", [source]), ("merge", [source, f"other={source}"]), ("split", [source, "--prefix", "model"]),
                 ("combine", ["--base", source, "--drop-optimizer"]))
        for verb, arguments in moves:
            words = [word for word in (verb, *arguments, folder / verb) if word != "reshard"]
            planned = json.loads(self.output("ckpt-reshard", *words, "--json", "--dry-run"))
            [phase], _ = self.progress(0, "ckpt-reshard", *words, "--json", "--quiet")
            self.assertEqual((phase[-1]["verb"], phase[-1]["done_nbytes"]), (verb, planned["nbytes"]))

    def test_progress_of_the_comparison_with_a_base(self):
        source = OPTIONS.fixtures / "dcp/valid/fsdp2_adamw"
        base, moved = (pathlib.Path(self.folder.name) / name for name in ("base", "on_base"))
        self.output("ckpt-reshard", source, base, "--to", "native", "--quiet")
        words = ("ckpt-reshard", source, moved, "--to", "native", "--base", base, "--quiet")
        nbytes = json.loads(self.output(*words, "--json", "--dry-run"))["nbytes"]
        for more, names in (((), ["compare", "reshard"]), (("--part", "0/2"), ["compare", "compare", "reshard"]),
                            (("--part", "1/2"), ["reshard"])):
            if "1/2" not in more:
                shutil.rmtree(moved, ignore_errors=True)
            phases, others = self.progress(0, *words, *more)
            self.assertEqual([phase[-1]["phase"] for phase in phases], names)
            self.assertEqual(others, [])
            compared = [phase[-1]["done_nbytes"] for phase in phases if phase[-1]["phase"] == "compare"]
            self.assertIn(sum(compared), (nbytes, 0))

    def test_progress_comes_ten_times_a_second_at_most(self):
        path = pathlib.Path(self.folder.name) / "zeros.safetensors"
        nbytes = 512 << 20
        header = json.dumps({"zeros": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}).encode()
        with path.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + nbytes)
        [phase], _ = self.progress(0, "ckpt-inspect", "ls", "--sha256", "--threads", "1", path)
        running = [event["seconds"] for event in phase[:-1]]
        self.assertGreater(len(running), 1, phase)
        for before, after in zip(running, running[1:]):
            self.assertGreater(after - before, 0.098)  # rounded to milliseconds

    def test_progress_of_work_that_fails_and_is_gone_on_with(self):
        [phase], others = self.progress(3, "ckpt-inspect", "stats", OPTIONS.fixtures / "dcp/invalid/flipped_bit")
        self.assertEqual(phase[-1]["state"], "failed")
        self.assertTrue(others[0].startswith("ckpt-inspect: "), others)
        source = OPTIONS.fixtures / "dcp/valid/fsdp2_adamw"
        destination = pathlib.Path(self.folder.name) / "resumed"
        words = ("ckpt-reshard", source, destination, "--world-size", "2", "--threads", "1", "--json")

        def little_disk():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (9 << 10, 9 << 10))

        [phase], others = self.progress(4, *words, preexec_fn=little_disk)
        self.assertEqual(phase[-1]["state"], "failed")
        self.assertIn("kept: ", others[-1])
        [phase], others = self.progress(0, *words, "--resume")
        last = phase[-1]
        self.assertEqual((last["state"], others), ("done", []))
        self.assertTrue(0 < last["kept_nbytes"] < last["done_nbytes"], last)

    def test_the_checker_finds_faults(self):
        schema = {"type": "object", "required": ["a"], "additionalProperties": False,
                  "properties": {"a": {"type": "integer", "minimum": 0}}}
        for wrong in ([], {}, {"a": "1"}, {"a": True}, {"a": -1}, {"a": 1, "b": 2}):
            self.assertTrue(faults(wrong, schema, {}), wrong)
        self.assertEqual(faults({"a": 1}, schema, {}), [])

    def test_z_every_schema_was_used(self):
        self.assertEqual(self.checked, set(self.schemas))


def main():
    global OPTIONS
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bin", required=True, type=pathlib.Path)
    parser.add_argument("--fixtures", required=True, type=pathlib.Path)
    parser.add_argument("--schemas", required=True, type=pathlib.Path)
    OPTIONS, rest = parser.parse_known_args()
    unittest.main(argv=[sys.argv[0], *rest])


if __name__ == "__main__":
    main()
