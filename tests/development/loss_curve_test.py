import json
import tempfile
import unittest
from pathlib import Path

import modules  # noqa: F401
import demo_resume
from loss_curve import Stretch, largest_difference, plot, read_stretches


def written(lines: list[tuple[int, float, str]]) -> list[Stretch]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "losses.jsonl"
        path.write_text("".join(json.dumps({"step": step, "loss": loss, "by": by}) + "\n" for step, loss, by in lines))
        return read_stretches(path)


class LossCurveTest(unittest.TestCase):
    def test_of_a_step_that_was_trained_twice_the_later_one_counts(self):
        lines = [(1, 4.0, "two"), (2, 3.0, "two"), (3, 9.0, "two"), (3, 2.5, "four"), (4, 2.0, "four")]
        self.assertEqual(written(lines), [Stretch("two", 1, [4.0, 3.0]), Stretch("four", 3, [2.5, 2.0])])

    def test_a_gap_ends_a_stretch(self):
        self.assertEqual([(each.first, each.last) for each in written([(1, 4.0, "a"), (2, 3.0, "a"), (5, 2.0, "a")])],
                         [(1, 2), (5, 5)])

    def test_difference_is_relative_and_needs_a_partner_for_each_loss(self):
        self.assertAlmostEqual(largest_difference([2.0, 4.0], [2.0, 5.0]), 0.2)
        with self.assertRaises(ValueError):
            largest_difference([2.0], [2.0, 5.0])

    def test_the_largest_fills_the_height_and_the_smallest_still_shows(self):
        self.assertEqual(plot([8.0, 4.0, 0.0], low=0.0, high=8.0, width=3, height=2), ["█▁ ", "██▁"])

    def test_a_flat_curve_is_drawn(self):
        self.assertEqual(plot([1.0, 1.0], low=1.0, high=1.0, width=4, height=1), ["▁▁▁▁"])


class SideBySideTest(unittest.TestCase):
    def test_both_curves_fit_into_the_terminal_and_tell_who_trained_what(self):
        losses = [5.0 - step / 30 for step in range(120)]
        stretches = [Stretch("two", 1, losses[:50]), Stretch("four", 51, losses[50:])]
        for columns in (60, 80, 120):
            lines = demo_resume.side_by_side(losses, stretches, columns).splitlines()
            self.assertLessEqual(max(map(len, lines)), columns)
            self.assertEqual(len(lines), demo_resume.PLOT_HEIGHT + 2)
            _, one, other = lines[-1].split()
            self.assertEqual(len(one), len(other))
            self.assertAlmostEqual(other.index("2") / len(other), 50 / 120, delta=0.03)

    def test_a_run_that_parts_shows_by_how_much(self):
        table = demo_resume.comparison(Stretch("one", 1, [4.0, 2.0]), [Stretch("two", 1, [4.0, 2.5])])
        self.assertTrue(table.splitlines()[-1].endswith("2.5e-01"), table)


if __name__ == "__main__":
    unittest.main()
