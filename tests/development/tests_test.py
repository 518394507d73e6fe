import contextlib
import io
import tempfile
import unittest
from pathlib import Path

import modules  # noqa: F401
import tests
from console import Stop

# What CTest 3.25 writes for each way a test can end.
REPORT = """<?xml version="1.0" encoding="UTF-8"?>
<testsuite name="x" tests="6">
  <testcase name="good" time="0.5" status="run"><system-out>fine</system-out></testcase>
  <testcase name="bad" time="1.5" status="fail"><failure message=""/><system-out>boom</system-out></testcase>
  <testcase name="skipped" time="0" status="notrun"><skipped message="SKIP_RETURN_CODE=77"/></testcase>
  <testcase name="skipped too" time="0" status="notrun"><skipped message="SKIP_REGULAR_EXPRESSION_MATCHED"/></testcase>
  <testcase name="disabled" time="0" status="disabled"><system-out>Disabled</system-out></testcase>
  <testcase name="x_NOT_BUILT" time="0" status="notrun"><skipped message="Unable to find executable"/></testcase>
</testsuite>
"""
SHARD_REPORT = """<?xml version="1.0" encoding="UTF-8"?>
<testsuites tests="3" failures="1"><testsuite name="Sums">
  <testcase name="Add/0" value_param="1" status="run" result="completed" time="0.25" classname="Sums"/>
  <testcase name="Carry" status="run" result="completed" time="0.5" classname="Sums">
    <failure message="a_test.cpp:3&#x0A;1 == 2" type=""><![CDATA[a_test.cpp:3]]></failure></testcase>
</testsuite><testsuite name="Gpu">
  <testcase name="Adds" status="run" result="skipped" time="0" classname="Gpu">
    <skipped message="a_test.cpp:9&#x0A;no GPU"><![CDATA[no GPU]]></skipped></testcase>
</testsuite></testsuites>
"""
LABELS = {"good": "unit", "bad": "unit", "skipped": "interop", "skipped too": "unit", "disabled": "unit"}


class TestsTest(unittest.TestCase):
    def setUp(self):
        with tempfile.NamedTemporaryFile("w", suffix=".xml") as file:
            file.write(REPORT)
            file.flush()
            self.cases = tests.read_junit(Path(file.name), LABELS, " (asan)")

    def test_what_could_not_run_counts_as_failed_and_what_chose_not_to_as_skipped(self):
        self.assertEqual([case.outcome for case in self.cases],
                         ["passed", "failed", "skipped", "skipped", "skipped", "failed"])

    def test_tallies_are_by_label_in_the_order_of_labels(self):
        tallies = tests.tallies_by_label(self.cases)
        self.assertEqual(tallies, {
            "unit (asan)": tests.Tally(passed=1, failed=1, skipped=2, seconds=2.0),
            "interop (asan)": tests.Tally(skipped=1),
            "no label (asan)": tests.Tally(failed=1),
        })
        self.assertEqual(list(tallies), ["unit (asan)", "interop (asan)", "no label (asan)"])

    def test_what_failed_is_named_at_the_end(self):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            self.assertEqual(tests.report(self.cases, 2.0), 1)
        self.assertEqual(out.getvalue().splitlines()[-3:], [
            "failed: unit (asan): bad", "failed: no label (asan): x_NOT_BUILT", "1 passed, 2 failed, 3 skipped"])

    def test_each_suite_says_why_its_tests_were_skipped(self):
        skipped = "[ RUN      ] A.One\n../tests/a_test.cpp:3: Skipped\nno GPU\n\n[  SKIPPED ] A.One (0 ms)\n"
        cases = [tests.Case("A.One", "cuda", "skipped", 0, skipped), tests.Case("A.Two", "cuda", "passed", 0, ""),
                 tests.Case("Gpu/B.Three/0", "cuda", "skipped", 0, "nothing said")]
        self.assertEqual([line.split() for line in tests.summary_by_suite(cases).splitlines()[2:]], [
            ["A", "1", "0", "1", "no", "GPU"], ["B", "0", "0", "1", "not", "said"]])

    def test_a_shard_counts_as_the_tests_that_it_ran(self):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "x.1_of_2.xml").write_text(SHARD_REPORT)
            shard = tests.Case("x.1_of_2", "unit", "failed", 9, "boom")
            cases = tests.cases_in_shard(shard, Path(folder))
            self.assertEqual([(case.name, case.outcome) for case in cases],
                             [("Sums.Add/0", "passed"), ("Sums.Carry", "failed"), ("Gpu.Adds", "skipped")])
            self.assertIn("1 == 2", cases[1].output)

            Path(folder, "x.1_of_2.xml").write_text(SHARD_REPORT.replace("failure", "property"))
            self.assertEqual(tests.cases_in_shard(shard, Path(folder))[-1], shard, "it failed beside its tests")
            crashed = tests.Case("x.2_of_2", "unit", "failed", 9, "boom")
            self.assertEqual(tests.cases_in_shard(crashed, Path(folder)), [crashed], "it died before it wrote a report")

    def test_what_runs_under_the_sanitizers_alone_is_refused_without_them(self):
        with self.assertRaisesRegex(Stop, "fuzz: .*--quick"):
            tests.test(label="fuzz", quick=True, torch_version=None)


if __name__ == "__main__":
    unittest.main()
