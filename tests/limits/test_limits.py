"""The promises of ckpt-reshard about memory, and about the destination after a failure.

Needs only the standard library. TESSERA_BIN names the folder with the tools.
"""
import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

import torch_save

RESHARD = str(Path(os.environ["TESSERA_BIN"]) / "ckpt-reshard")
MIB = 1 << 20
BEGUN_LINES, NEARLY_ALL_LINES = 20, 200  # of the 258 lines that the journal of a move of 1 GiB has in the end
NAMES_MIB = {"native": 120, "torch": 190}  # of 30,000 names, by format
DCP_NAME_NBYTES = {"8": 880, "1": 760}  # of a name in 8 pieces that moves to this number of native ranks


def write_safetensors(path: Path, tensors: dict[str, list[int]]) -> None:
    """Writes float32 tensors of zeros as a hole in the file, so that any size takes no disk space."""
    header, end = {}, 0
    for name, shape in tensors.items():
        nbytes = 4
        for size in shape:
            nbytes *= size
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def num_lines(journal: Path) -> int:
    """Returns 0 if the file does not exist."""
    try:
        return journal.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def run_measured(arguments: list[str], address_space: int | None = None) -> tuple[int, int, str]:
    """Runs ckpt-reshard; returns exit code, peak resident bytes and standard error."""
    def limit():
        if address_space is not None:
            resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))

    process = subprocess.Popen([RESHARD, *arguments], preexec_fn=limit, stdout=subprocess.DEVNULL,
                               stderr=subprocess.PIPE, text=True)
    errors = process.stderr.read()
    process.stderr.close()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, usage.ru_maxrss * 1024, errors


class Limits(unittest.TestCase):
    def setUp(self):
        self.folder = Path(tempfile.mkdtemp(prefix="tessera-limits-"))
        self.addCleanup(shutil.rmtree, self.folder)
        self.destination = self.folder / "dst"

    def source(self, **tensors: list[int]) -> Path:
        path = self.folder / "src.safetensors"
        write_safetensors(path, tensors or {"w": [16 * MIB, 4]})
        return path

    def assert_nothing_there(self):
        self.assertFalse(self.destination.exists(), "the destination exists")

    # Shows A2.
    def test_memory_is_bounded_whatever_the_size_of_a_tensor(self):
        source = self.source(w=[192 * MIB])  # 768 MiB in one tensor
        code, peak, errors = run_measured(
            [str(source), str(self.destination), "--memory", "64MiB", "--world-size", "3"],
            address_space=2097152 * 1024)
        self.assertEqual((code, errors), (0, ""))
        self.assertLess(peak, (64 + 64) * MIB)

    # Shows A2.
    def test_memory_is_bounded_when_columns_are_cut(self):
        source = self.source(**{"embedding_bags.t.weight": [MIB, 64]})  # 256 MiB
        plan = self.folder / "plan.json"
        plan.write_text(json.dumps({"schema": 1, "world_size": 4, "tables": {
            "t": {"sharding": "column_wise", "ranks": [0, 1, 2, 3]}}}))
        code, peak, errors = run_measured([str(source), str(self.destination), "--plan", str(plan)])
        self.assertEqual((code, errors), (0, ""))
        self.assertLess(peak, (256 + 64) * MIB)

    # Shows A2.
    def test_memory_is_bounded_for_a_stream_of_torch_save(self):
        source = self.folder / "src.pt"
        torch_save.save_stream({"w": torch_save.Tensor(128 * MIB)}, source)  # 512 MiB in one tensor
        code, peak, errors = run_measured([str(source), str(self.destination), "--memory", "64MiB"])
        self.assertEqual((code, errors), (0, ""))
        self.assertLess(peak, (64 + 64) * MIB)

    # Shows A2.
    def test_memory_is_bounded_for_a_folder_of_bin_files(self):
        source = self.folder / "src"
        for number in (1, 2):
            torch_save.save({f"w{number}": torch_save.Tensor(64 * MIB)},  # 256 MiB in each
                            source / f"pytorch_model-0000{number}-of-00002.bin")
        code, peak, errors = run_measured([str(source), str(self.destination), "--memory", "64MiB"])
        self.assertEqual((code, errors), (0, ""))
        self.assertLess(peak, (64 + 64) * MIB)

    # Shows A2. The bounds are 1.5 times what was measured.
    def test_memory_for_the_names_of_torch_save_is_bounded(self):
        state = {f"model.layers.{i}.mlp.experts.{j}.down_proj.weight": torch_save.Tensor(1)
                 for i in reversed(range(100)) for j in range(300)}
        stream, folder = self.folder / "src.pt", self.folder / "src"
        torch_save.save_stream(state, stream)
        names = list(state)
        for number in range(4):
            torch_save.save({name: state[name] for name in names[number::4]},
                            folder / f"pytorch_model-0000{number + 1}-of-00004.bin")
        for source in (stream, folder):
            for target, bound in NAMES_MIB.items():
                with self.subTest(source=source.name, target=target):
                    destination = self.folder / f"{source.name}-{target}"
                    code, peak, errors = run_measured([str(source), str(destination), "--to", target])
                    self.assertEqual((code, errors), (0, ""))
                    self.assertLess(peak, bound * MIB)

    # Shows A2. The bounds are 1.5 times what was measured.
    def test_memory_for_the_names_of_dcp_is_bounded(self):
        counts, peaks = (10_000, 20_000), {}
        for count in counts:
            source, dcp = self.folder / f"{count}.safetensors", self.folder / f"dcp-{count}"
            child = os.fork()  # keeps this process small: Linux counts its memory in the peak of what it starts
            if child == 0:
                write_safetensors(source, {f"layers.{i // 10}.w{i % 10}": [8, 4] for i in range(count)})
                os._exit(0)
            self.assertEqual(os.waitpid(child, 0)[1], 0)
            self.assertEqual(run_measured([str(source), str(dcp), "--to", "dcp", "--world-size", "8"])[0], 0)
            for ranks in DCP_NAME_NBYTES:
                destination = str(self.folder / f"{ranks}-{count}")
                runs = [run_measured([str(dcp), destination, "--world-size", ranks, "--overwrite"]) for _ in range(3)]
                self.assertEqual([(code, errors) for code, _, errors in runs], [(0, "")] * 3)
                peaks[ranks, count] = min(peak for _, peak, _ in runs)  # single runs differ by megabytes
        for ranks, bound in DCP_NAME_NBYTES.items():
            with self.subTest(ranks=ranks):
                self.assertLess((peaks[ranks, counts[1]] - peaks[ranks, counts[0]]) / (counts[1] - counts[0]), bound)

    def start_and_suspend(self, source: Path) -> subprocess.Popen:
        """Returns a run that is suspended (SIGSTOP) when it has finished some blocks, but not all."""
        journal = self.folder / "dst.partial.journal"
        for _ in range(50):
            process = subprocess.Popen([RESHARD, str(source), str(self.destination)],
                                       stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            self.addCleanup(process.kill)
            # Wait until the run has finished some blocks, or has ended. The journal gets a line for each block.
            while process.poll() is None and num_lines(journal) < BEGUN_LINES:
                time.sleep(0.002)
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            # If the run is suspended and has many blocks left, the test can use it.
            if process.poll() is None and num_lines(journal) < NEARLY_ALL_LINES:
                return process
            process.send_signal(signal.SIGCONT)  # it was faster than this test: try again
            _, errors = process.communicate(timeout=120)
            self.assertEqual(process.returncode, 0, errors)
            shutil.rmtree(self.destination)
        self.fail("all runs ended before they could be stopped")

    def assert_kept_and_resumed(self, source: Path):
        self.assert_nothing_there()
        code, _, errors = run_measured([str(source), str(self.destination)])
        self.assertEqual(code, 2, "a run without --resume accepted the kept work")
        self.assertIn("--resume", errors)
        code, _, errors = run_measured([str(source), str(self.destination), "--resume"])
        self.assertEqual((code, errors), (0, ""))
        self.assertEqual(sorted(path.name for path in self.folder.glob("dst*")), ["dst"])
        shutil.rmtree(self.destination)

    # Shows E4.
    def test_interrupt_keeps_the_work_and_says_130(self):
        source = self.source(w=[256 * MIB])
        for number in (signal.SIGINT, signal.SIGTERM):
            with self.subTest(signal=number.name):
                process = self.start_and_suspend(source)
                process.send_signal(number)
                process.send_signal(signal.SIGCONT)
                _, errors = process.communicate(timeout=120)
                self.assertEqual(process.returncode, 130, errors)
                self.assertIn("--resume", errors)
                self.assert_kept_and_resumed(source)

    # Shows E4.
    def test_kill_keeps_the_work(self):
        source = self.source(w=[256 * MIB])
        process = self.start_and_suspend(source)
        process.kill()
        process.communicate()
        self.assert_kept_and_resumed(source)

    # Shows E4.
    def test_full_disk_leaves_no_destination_and_says_4(self):
        disk = self.folder / "disk"
        disk.mkdir()
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)],
                                 capture_output=True, text=True)
        if mounted.returncode != 0:
            self.skipTest("mounting a small disk needs root")
        self.addCleanup(subprocess.run, ["umount", str(disk)], check=True)
        source = self.folder / "noise.safetensors"
        write_safetensors(source, {"w": [32 * MIB]})
        with open(source, "r+b") as file:  # bytes that do not compress
            file.seek(4096)
            for _ in range(127):
                file.write(os.urandom(MIB))
        for arguments in (["--to", "native"], ["--to", "native", "--compress", "zstd"],
                          ["--to", "safetensors"], ["--to", "dcp"]):
            with self.subTest(arguments=arguments):
                code, _, errors = run_measured([str(source), str(disk / "dst"), "--discard", *arguments])
                self.assertEqual(code, 4, errors)
                self.assertIn("No space left", errors)
                self.assertFalse((disk / "dst").exists())
                self.assertEqual([path.name for path in disk.iterdir() if not path.name.startswith("dst.partial")],
                                 [])

    # Shows E4. HDF5 crashes if an allocation fails inside it. So the tool must find out first.
    def test_no_memory_leaves_no_destination_and_says_4(self):
        source = self.source(**{f"w{number}": [64, 64] for number in range(20)})
        native, destination = self.folder / "native", self.folder / "out" / "dst"
        self.assertEqual(run_measured([str(source), str(native), "--world-size", "4"])[0], 0)
        least = next(kib for kib in range(20_000, 200_000, 200)
                     if run_measured(["--version"], address_space=kib * 1024)[0] == 0)
        codes = set()
        for arguments in (["--threads", "1"], ["--threads", "1", "--compress", "zstd"], ["--to", "dcp"]):
            for kib in (*range(least, least + 6000, 300), *range(least + 6000, least + 60_000, 3000)):
                with self.subTest(arguments=arguments, kib=kib):
                    destination.parent.mkdir()
                    code, _, errors = run_measured([str(native), str(destination), *arguments], address_space=kib * 1024)
                    codes.add(code)
                    self.assertIn(code, (0, 4), errors)
                    is_kept = "kept: " in errors
                    self.assertEqual(sorted(path.name for path in destination.parent.iterdir()),
                                     ["dst"] if code == 0 else ["dst.partial", "dst.partial.journal"] if is_kept else [],
                                     errors)
                    self.assertEqual(len(errors.splitlines()), 0 if code == 0 else 2 if is_kept else 1, errors)
                shutil.rmtree(destination.parent)
        self.assertEqual(codes, {0, 4}, "the limits are not those around which memory runs out")

    # Shows E4.
    def test_refused_source_leaves_nothing(self):
        source = self.source(w=[MIB])
        os.truncate(source, 1000)
        code, _, errors = run_measured([str(source), str(self.destination)])
        self.assertEqual(code, 3, errors)
        self.assertEqual(errors.count("\n"), 1, errors)
        self.assert_nothing_there()
        self.assertFalse((self.folder / "dst.partial").exists())

    # Shows E4.
    def test_overwrite_replaces_only_when_the_new_one_is_whole(self):
        good = self.source(w=[MIB])
        self.assertEqual(run_measured([str(good), str(self.destination)])[0], 0)
        before = (self.destination / "index.h5").read_bytes()
        bad = self.folder / "bad.safetensors"
        write_safetensors(bad, {"v": [MIB]})
        os.truncate(bad, 100_000)
        self.assertEqual(run_measured([str(bad), str(self.destination), "--overwrite"])[0], 3)
        self.assertEqual((self.destination / "index.h5").read_bytes(), before)
        self.assertEqual(run_measured([str(good), str(self.destination)])[0], 2)
        self.assertEqual(run_measured([str(good), str(self.destination), "--overwrite"])[0], 0)


if __name__ == "__main__":
    unittest.main()
