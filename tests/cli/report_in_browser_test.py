#!/usr/bin/env python3
"""Opens the pages of `ckpt-inspect report` in a headless Chromium and uses them. Shows row A3.

Skipped (exit status 77) where there is no Chromium."""

import argparse
import json
import pathlib
import struct
import subprocess
import sys
import tempfile
import unittest

import browser

OPTIONS = None
SKIPPED = 77
MAX_ELEMENTS = 4000  # of a page, however many tensors it shows


def write_safetensors(path, tensors):
    """Writes float32 vectors, given as lists, by name."""
    header, data = {}, b""
    for name, numbers in tensors.items():
        raw = struct.pack(f"<{len(numbers)}f", *numbers)
        header[name] = {"dtype": "F32", "shape": [len(numbers)], "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def training_state(num_layers):
    """Returns four tensors a layer: a weight and AdamW's state of it."""
    tensors = {}
    for layer in range(num_layers):
        name = f"layers.{layer}.weight"
        tensors[f"model.{name}"] = [layer, 0.5, -1.5]
        tensors[f"optim.state.{name}.exp_avg"] = [0.25, 0, 0]
        tensors[f"optim.state.{name}.exp_avg_sq"] = [1, 2, 3]
        tensors[f"optim.state.{name}.step"] = [10]
    return tensors


class ReportInBrowserTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.scratch = tempfile.TemporaryDirectory(prefix="tessera-report-")
        cls.folder = pathlib.Path(cls.scratch.name)
        cls.browser = browser.Browser(browser.find())

    @classmethod
    def tearDownClass(cls):
        cls.browser.close()
        cls.scratch.cleanup()

    def setUp(self):
        self.browser.complaints.clear()

    def tearDown(self):
        self.assertEqual(self.browser.complaints, [])  # no exception, nothing asked for elsewhere

    def open(self, *arguments, **settings):
        page = self.folder / f"{self.id()}.html"
        subprocess.run([OPTIONS.bin / "ckpt-inspect", "report", *arguments, "-o", page, "--overwrite"], check=True,
                       stdout=subprocess.DEVNULL)
        self.browser.open(page, **settings)
        self.assertEqual(self.evaluate("document.documentElement.dataset.drawn"), "yes")

    def evaluate(self, expression):
        return self.browser.evaluate(expression)

    def act(self, expression):
        self.evaluate(expression)
        self.browser.settle()

    def names(self):
        """Returns the full names (tooltips) in the table's rows."""
        return self.evaluate("[...document.querySelectorAll('#table .name')].map((name) => name.title)")

    def filter(self, words):
        self.act(f"{{ const box = document.querySelector('#filter'); box.value = {json.dumps(words)};"
                 "box.dispatchEvent(new Event('input')); }")

    def test_names_are_text_and_nothing_else(self):
        hostile = ["</script><script>document.title = 'broken'</script>", "<!--<script>",
                   "\"'><img src=x onerror=document.title='broken'>", "a\\u003c/script>", "${document.title='broken'}", "\u202etxt.\u2028\x07", "<b>bold</b>.weight"]
        escaped = {"\u202etxt.\u2028\x07": "\\u202etxt.\\u2028\\u0007"}
        # Tests each name alone, because one may hide the effect of another, and all together.
        for names in [*([name] for name in hostile), hostile]:
            with self.subTest(names=names):
                path = write_safetensors(self.folder / "<i>names.safetensors", {name: [1, 2] for name in names})
                self.open(path)
                self.assertEqual(sorted(self.names()), sorted(escaped.get(name, name) for name in names))
                for i in range(len(names)):
                    self.act(f"document.querySelectorAll('#table .name')[{i}].click()")
                self.act("document.querySelectorAll('.box').forEach("
                         "(box) => box.dispatchEvent(new PointerEvent('pointermove')))")
                self.assertEqual(self.evaluate("document.scripts.length"), 2)
                self.assertEqual(self.evaluate("document.querySelectorAll('img, i:not(#path i), main b').length"), 0)
                self.assertEqual(self.evaluate("document.title"), "<i>names.safetensors")

    def test_odd_names(self):
        names = ["", ".", "..", "a", "a.b", "x" * 65000, ".".join(f"d{i}" for i in range(1000)), "__proto__",
                 "constructor.b"]
        self.open(write_safetensors(self.folder / "odd.safetensors", {name: [1, 2] for name in names}), width=400)
        self.assertEqual(sorted(self.names()), sorted(names))
        self.assertLessEqual(self.evaluate("document.documentElement.scrollWidth"), 400)
        self.act("[...document.querySelectorAll('.box')].forEach((box) => box.click())")
        self.act("document.querySelector('#path button').click()")
        self.assertEqual(len(self.names()), len(names))

    def test_ten_thousand_tensors_make_few_elements(self):
        tensors = training_state(2500)
        tensors["model.layers.1700.weight"][1] = float("nan")
        self.open(write_safetensors(self.folder / "many.safetensors", tensors))
        self.assertIn("10,000", self.evaluate("document.querySelector('#tiles').textContent"))
        self.assertLess(self.evaluate("document.getElementsByTagName('*').length"), MAX_ELEMENTS)
        self.act("document.querySelector('#table .scroll').scrollTop = 1e9")
        self.assertEqual(self.names()[-1], "optim.state.layers.999.weight.step")
        self.assertLess(self.evaluate("document.getElementsByTagName('*').length"), MAX_ELEMENTS)
        self.filter("LAYERS.17 avg_sq")
        self.assertIn("optim.state.layers.1700.weight.exp_avg_sq", self.names())
        self.assertIn("111 of 10,000", self.evaluate("document.querySelector('#num-shown').textContent"))
        self.filter("")
        self.act("document.querySelector('#alarm-only input').click()")
        self.assertEqual(self.names(), ["model.layers.1700.weight"])
        self.assertEqual(self.evaluate("document.querySelector('#table .flag').textContent"), "NaN")

    def test_state_stands_beside_its_weight(self):
        self.open(OPTIONS.fixtures / "dcp/valid/fsdp2_adamw")
        self.assertEqual(self.names()[:4], ["model.emb.weight", "optim.state.emb.weight.exp_avg",
                                            "optim.state.emb.weight.exp_avg_sq", "optim.state.emb.weight.step"])
        self.act("document.querySelectorAll('#table .name')[2].click()")
        self.assertEqual(self.evaluate("document.querySelector('#details h3').textContent"), "model.emb.weight")
        titles = "[...document.querySelectorAll('#details h4')].map((title) => title.textContent)"
        self.assertEqual(self.evaluate(titles), ["weight", "exp_avg", "exp_avg_sq", "step"])
        self.assertIn("−3.31", self.evaluate("document.querySelector('#details dl').textContent"))

    def test_rows_are_sorted_by_a_click_and_back_by_the_third(self):
        self.open(OPTIONS.fixtures / "dcp/valid/fsdp2_adamw")
        click = ("[...document.querySelectorAll('#table .head button')]"
                 ".find((title) => title.textContent.startsWith('bytes')).click()")
        unsorted = self.names()
        self.act(click)
        self.assertEqual(self.names()[0], "model.emb.weight")
        self.act(click)
        self.assertTrue(self.names()[0].endswith(("step", "temperature")))
        self.act(click)
        self.assertEqual(self.names(), unsorted)

    def test_a_click_on_a_prefix_goes_there_and_the_path_back(self):
        self.open(OPTIONS.fixtures / "dcp/valid/fsdp2_adamw")
        self.act("[...document.querySelectorAll('.box')].find((box) => box.textContent.startsWith('model')).click()")
        self.assertEqual(self.evaluate("document.querySelector('#path').textContent"), "all›model 908 bytes")
        self.assertTrue(all(name.startswith("model.") for name in self.names()))
        self.act("document.querySelector('#path button').click()")
        self.assertEqual(self.evaluate("document.querySelector('#path').textContent"), "all 2.5 KiB")
        self.assertTrue(self.evaluate("[...document.querySelectorAll('.box')].every((box) => box.offsetLeft >= 0 && "
                                      "box.offsetLeft + box.offsetWidth <= treemap.clientWidth + 1 && "
                                      "box.offsetTop + box.offsetHeight <= treemap.clientHeight + 1)"))

    def test_light_and_dark_wide_and_narrow(self):
        backgrounds = set()
        for scheme in ("light", "dark"):
            for width in (1400, 400):
                with self.subTest(scheme=scheme, width=width):
                    self.open(OPTIONS.fixtures / "dcp/valid/fsdp2_adamw", scheme=scheme, width=width)
                    self.assertLessEqual(self.evaluate("document.documentElement.scrollWidth"), width)
                    backgrounds.add(self.evaluate("getComputedStyle(document.body).backgroundColor"))
        self.assertEqual(len(backgrounds), 2)

    def test_pages_of_every_kind_of_checkpoint_draw(self):
        for name in ("dcp/valid/degenerate", "dcp/valid/dtypes", "dcp/valid/values", "dcp/valid/torchrec",
                     "torch_zip/valid/shared.pt", "torch_zip/valid/degenerate.pt",
                     "safetensors/valid/no_tensors.safetensors"):
            with self.subTest(name=name):
                self.open(OPTIONS.fixtures / name)
                self.open(OPTIONS.fixtures / name, "--no-stats")

    def test_differences(self):
        a = write_safetensors(self.folder / "a.safetensors", training_state(3))
        changed = training_state(3)
        changed["model.layers.1.weight"] = [7, 0.5, float("nan")]
        del changed["optim.state.layers.2.weight.step"]
        b = write_safetensors(self.folder / "b.safetensors", changed)
        self.open(a, b)
        self.assertEqual(self.names(), ["model.layers.1.weight", "optim.state.layers.2.weight.step"])
        self.assertIn("2differences", self.evaluate("document.querySelector('#tiles').textContent"))
        self.act("document.querySelector('#table .name').click()")
        details = self.evaluate("document.querySelector('#details').textContent")
        self.assertIn("2 of 3, first at [0]: 1 → 7", details)
        self.assertIn("1 NaN on one side", details)
        self.assertEqual(self.evaluate("document.querySelectorAll('#details svg').length"), 2)
        self.open(a, a)
        self.assertIn("equal", self.evaluate("document.querySelector('#tiles').textContent"))

    def test_an_infinite_difference_is_the_largest(self):
        numbers = {"finite": [1.0, 2.0], "infinite": [1.0, 2.0], "no number": [1.0, 2.0]}
        a = write_safetensors(self.folder / "finite.safetensors", numbers)
        changed = {"finite": [1.0, 9.0], "infinite": [1.0, float("inf")], "no number": [1.0, float("nan")]}
        self.open(a, write_safetensors(self.folder / "infinite.safetensors", changed))
        self.act("[...document.querySelectorAll('#table .head button')]"
                 ".find((title) => title.textContent.startsWith('max')).click()")
        self.assertEqual(self.names(), ["infinite", "finite", "no number"])
        self.act("document.querySelector('#table .name').click()")
        self.assertIn("largest difference ∞", self.evaluate("document.querySelector('#details').textContent"))


def main():
    global OPTIONS
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", required=True, type=pathlib.Path)
    parser.add_argument("--fixtures", required=True, type=pathlib.Path)
    OPTIONS, rest = parser.parse_known_args()
    if browser.find() is None:
        print("no Chromium: none of", *browser.NAMES)
        sys.exit(SKIPPED)
    unittest.main(argv=[sys.argv[0], *rest])


if __name__ == "__main__":
    main()
