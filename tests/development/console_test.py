import contextlib
import io
import tempfile
import unittest
from pathlib import Path

import modules  # noqa: F401
import console
import places


class ConsoleTest(unittest.TestCase):
    def test_table_aligns_numbers_to_the_right(self):
        rows = [["step", "bytes"], ["save", "12"], ["load", "3456"]]
        self.assertEqual(console.table(rows, right={1}).splitlines(),
                         ["step  bytes", "----  -----", "save     12", "load   3456"])

    def test_commands_are_shown_as_typed_from_the_root(self):
        command = [places.relative_to_root(word) for word in ["cat", places.ROOT / "a b", "*", Path("/elsewhere")]]
        self.assertEqual(console.shown(command), "cat 'a b' '*' /elsewhere")

    def test_quiet_run_keeps_output_in_the_log_and_returns_the_exit_code(self):
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "logs" / "run.log"
            with contextlib.redirect_stdout(io.StringIO()) as shown:
                exit_code = console.run_quietly(["sh", "-c", "echo out; echo err >&2; exit 3"], log)
            self.assertEqual(exit_code, 3)
            self.assertEqual(log.read_text().splitlines()[1:], ["out", "err"])
            self.assertEqual(shown.getvalue(), "")


if __name__ == "__main__":
    unittest.main()
