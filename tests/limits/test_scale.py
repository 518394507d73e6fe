"""How far the tools go: many tensors, many ranks, long and deep names, tensors larger than memory.

Needs only the standard library, and 21 GB on the disk for a while. TESSERA_BIN names the folder with the tools. Each
command's seconds and peak memory are printed, for docs/performance.md.
"""
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

from test_limits import MIB, write_safetensors
from torch_save import Size, Tensor, save

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))
from recipe import RECIPES, deepseek_v3, write_model

BIN = Path(os.environ["TESSERA_BIN"])
FORMATS = {"native": "", "dcp": "", "safetensors": ".safetensors", "torch": ".pt"}


class Scale(unittest.TestCase):
    def setUp(self):
        self.folder = Path(tempfile.mkdtemp(prefix="tessera-scale-"))
        self.addCleanup(shutil.rmtree, self.folder)

    def run_tool(self, tool: str, *arguments) -> int:
        """Runs a tool that has to succeed. Returns its peak resident bytes."""
        begin = time.monotonic()
        process = subprocess.Popen([BIN / tool, *map(str, arguments)], stdout=subprocess.DEVNULL,
                                   stderr=subprocess.PIPE, text=True)
        errors = process.stderr.read()
        process.stderr.close()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        self.assertEqual((process.returncode, errors), (0, ""), f"{tool} {arguments}")
        words = " ".join(word.name if isinstance(word, Path) else str(word) for word in arguments)
        print(f"    {time.monotonic() - begin:8.2f} s, {usage.ru_utime + usage.ru_stime:7.2f} s of processor, "
              f"{usage.ru_maxrss / 1024:5.0f} MiB: {tool} {words[:90]}", flush=True)
        return usage.ru_maxrss * 1024

    def source(self, name: str, tensors: dict[str, list[int]]) -> Path:
        path = self.folder / f"{name}.safetensors"
        write_safetensors(path, tensors)
        return path

    def small_tensors(self, name: str, count: int) -> Path:
        """Writes tensors of 8 x 4. Does so in a child process, to keep this process small: Linux counts its memory in the peak of
        the tools that it starts."""
        child = os.fork()
        if child == 0:
            self.source(name, {f"layers.{i // 10}.w{i % 10}": [8, 4] for i in range(count)})
            os._exit(0)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        return self.folder / f"{name}.safetensors"

    # Shows A3.
    def test_memory_grows_with_the_number_of_tensors_and_no_faster(self):
        peaks = {}
        for count in (10_000, 100_000):
            source = self.small_tensors(f"{count}", count)
            native, dcp = self.folder / f"native-{count}", self.folder / f"dcp-{count}"
            peaks[count] = [
                self.run_tool("ckpt-inspect", "ls", source),
                self.run_tool("ckpt-reshard", source, native, "--world-size", 4, "--quiet"),
                self.run_tool("ckpt-inspect", "ls", native),
                self.run_tool("ckpt-inspect", "verify", native),
                self.run_tool("ckpt-reshard", native, dcp, "--to", "dcp", "--world-size", 8, "--quiet"),
                self.run_tool("ckpt-inspect", "ls", dcp),
                self.run_tool("ckpt-inspect", "diff", native, dcp),
            ]
        for few, many in zip(*peaks.values()):
            self.assertLess(many, 11 * few + 16 * MIB)

    # Shows A3.
    def test_many_small_pieces_take_little_memory(self):
        source = self.small_tensors("many", 100_000)
        peak = self.run_tool("ckpt-reshard", source, self.folder / "many", "--world-size", 4, "--quiet")
        self.assertLess(peak, 80 * MIB)  # 455 before pieces were packed

    # Shows A3.
    def test_each_further_name_costs_a_move_little_memory(self):
        """Bounds the peak with 200,000 names minus the peak with 100,000. docs/performance.md has the measured numbers."""
        count = 100_000
        few, many = (self.small_tensors(str(times), times * count) for times in (1, 2))

        def each(options, sources, bound):
            peaks = []
            for source in sources:
                moved = self.folder / ("moved.safetensors" if "safetensors" in options else "moved")
                peaks.append(self.run_tool("ckpt-reshard", source, moved, *options, "--quiet"))
                moved.rename(self.folder / f"{'-'.join(options)}-{len(peaks)}")
            self.assertLess((peaks[1] - peaks[0]) / count, bound, options)
            return [self.folder / f"{'-'.join(options)}-{times}" for times in (1, 2)]

        each(["--to", "safetensors"], [few, many], 560)
        native = each(["--to", "native", "--world-size", "4"], [few, many], 520)
        each(["--to", "native", "--world-size", "8"], native, 650)
        wide = each(["--to", "dcp", "--world-size", "8"], [few, many], 680)
        each(["--to", "native", "--world-size", "1"], wide, 620)  # 1,406 before
        dcp = each(["--to", "dcp", "--world-size", "4"], [few, many], 520)
        each(["--to", "native", "--world-size", "3"], dcp, 620)  # 896 before

    # Shows A3.
    def test_a_list_of_800_000_pieces_takes_little_memory(self):
        source = self.small_tensors("many", 100_000)
        moved = self.folder / "dcp"
        self.run_tool("ckpt-reshard", source, moved, "--to", "dcp", "--world-size", 8, "--quiet")
        self.assertLess(self.run_tool("ckpt-inspect", "ls", moved), 176 * MIB)  # 1,104 before

    # Shows A3.
    def test_a_list_of_1_600_000_pieces_is_read(self):
        """Its pickle has more than 2^26 objects, but each entry is dropped once it is read."""
        moved = self.folder / "dcp"
        self.run_tool("ckpt-reshard", self.small_tensors("many", 200_000), moved, "--to", "dcp", "--world-size", 8, "--quiet")
        self.assertLess(self.run_tool("ckpt-inspect", "ls", moved), 640 * MIB)

    def bytes_per_name_and_rank(self, write, num_ranks: int) -> float:
        """Returns the bytes of memory that `ls` takes for each further name and rank. `write(folder, count)` writes a checkpoint."""
        peaks = []
        for count in (10_000, 20_000):
            folder = self.folder / f"{write.__name__}-{count}"
            write(folder, count)
            peaks.append(self.run_tool("ckpt-inspect", "ls", folder))
        return (peaks[1] - peaks[0]) / (10_000 * num_ranks)

    # Shows A3.
    def test_rank_files_of_many_names_take_little_memory(self):
        def rank_files(folder: Path, count: int):
            source = self.source(f"{count}", {f"layers.{i // 10}.w{i % 10}": [64, 4] for i in range(count)})
            self.run_tool("ckpt-reshard", source, folder, "--to", "rank_files", "--world-size", 8, "--quiet")

        self.assertLess(self.bytes_per_name_and_rank(rank_files, 8), 1100)  # 3,753 before

    # Shows A3.
    def test_a_zero_folder_of_many_names_takes_little_memory(self):
        """Stage 3: each of eight ranks has all names, and an eighth of the elements of each."""
        def zero(folder: Path, count: int):
            names = [f"layers.{i // 10}.w{i % 10}" for i in range(count)]
            model = {"module": {name: Tensor(0) for name in names}, "buffer_names": [],
                     "param_shapes": [{name: Size(8, 4) for name in names}],
                     "frozen_param_shapes": None, "shared_params": {}}
            vector = Tensor(count * 4)
            state = {"state": {0: {"step": 1, "exp_avg": vector, "exp_avg_sq": vector}},
                     "param_groups": [{"lr": 0.1, "params": [0]}]}
            optimizer = {"optimizer_state_dict": {"zero_stage": 3, "partition_count": 8, "fp32_flat_groups": [vector],
                                                  "optimizer_state_dict": state}}
            for kind, saved in (("model", model), ("optim", optimizer)):
                first = folder / f"zero_pp_rank_0_mp_rank_00_{kind}_states.pt"
                save(saved, first)
                for rank in range(1, 8):
                    shutil.copy(first, folder / f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt")

        self.assertLess(self.bytes_per_name_and_rank(zero, 8), 2000)  # 4,935 before

    # Shows A3.
    def test_a_megatron_folder_of_many_names_takes_little_memory(self):
        """The classic layout of Megatron-LM: a folder for each of eight tensor ranks."""
        def megatron(folder: Path, count: int):
            names = [f"decoder.layers.{i // 2}.mlp.linear_fc{i % 2 + 1}.weight" for i in range(count)]
            first = folder / "mp_rank_00"
            save({"args": {"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 1, "num_layers": count // 2},
                  "checkpoint_version": 3.0, "iteration": 1, "model": {name: Tensor(8, 4) for name in names}},
                 first / "model_optim_rng.pt")
            for rank in range(1, 8):
                shutil.copytree(first, folder / f"mp_rank_{rank:02}")

        self.assertLess(self.bytes_per_name_and_rank(megatron, 8), 1100)  # 3,279 before

    # Shows A3.
    def test_a_recipe_over_the_names_of_deepseek_v3_takes_little_memory(self):
        model = self.folder / "deepseek"
        write_model(model, deepseek_v3(61), is_sparse=True)
        (model / "config.json").write_text('{"num_hidden_layers": 61}')
        peak = self.run_tool("ckpt-reshard", model, self.folder / "megatron.safetensors", "--extra-files", "leave", "--quiet",
                             "--recipe", RECIPES / "hf-to-megatron-deepseek-v3.json")
        self.assertLess(peak, 256 * MIB)

    # Shows A2.
    def test_thousands_of_ranks(self):
        source = self.source("model", {f"layers.{i}.w": [8192, 16] for i in range(64)})
        wide = self.folder / "wide"
        self.run_tool("ckpt-reshard", source, wide, "--to", "dcp", "--world-size", 4096, "--quiet")
        self.run_tool("ckpt-inspect", "layout", wide)
        self.run_tool("ckpt-reshard", wide, self.folder / "narrow", "--world-size", 8, "--quiet")
        self.run_tool("ckpt-inspect", "diff", source, self.folder / "narrow")
        peak = self.run_tool("ckpt-reshard", source, self.folder / "none", "--world-size", 10_000, "--dry-run")
        self.assertLess(peak, 1024 * MIB)

    # Shows A3.
    def test_names_of_64_kB_and_prefixes_1000_deep(self):
        names = {
            "long": {"x" * 65_000 + str(i): [4] for i in range(50)},
            "deep": {".".join(f"p{step}" for step in range(1000)) + f".{i}": [4] for i in range(50)},
        }
        for kind, tensors in names.items():
            source = self.source(kind, tensors)
            for form, suffix in FORMATS.items():
                moved = self.folder / f"{kind}-{form}{suffix}"
                self.run_tool("ckpt-reshard", source, moved, "--to", form, "--quiet")
                for verb in ("tree", "ls", "layout", "stats", "verify"):
                    self.run_tool("ckpt-inspect", verb, moved)
                self.run_tool("ckpt-inspect", "diff", source, moved)

    # Shows A2.
    def test_a_tensor_of_20_GB(self):
        source = self.source("large", {"w": [5 << 20, 1000]})
        if shutil.disk_usage(self.folder).free < 25e9:
            self.skipTest("less than 25 GB are free on the disk")
        self.assertLess(self.run_tool("ckpt-inspect", "stats", source), 256 * MIB)
        moved = self.folder / "moved"
        self.assertLess(self.run_tool("ckpt-reshard", source, moved, "--world-size", 3, "--quiet"), (256 + 64) * MIB)
        self.assertLess(self.run_tool("ckpt-inspect", "verify", moved), 256 * MIB)

    # Shows E6.
    def test_few_open_files_and_little_address_space(self):
        source = self.source("model", {f"layers.{i}.w": [64, 64] for i in range(64)})

        def limit():
            resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
            resource.setrlimit(resource.RLIMIT_AS, (2097152 * 1024, 2097152 * 1024))

        for form, suffix in FORMATS.items():
            moved, again = self.folder / f"{form}{suffix}", self.folder / f"{form}-again"
            ranks = ["--world-size", "256"] if not suffix else []
            for command in (["ckpt-reshard", source, moved, "--to", form, *ranks], ["ckpt-inspect", "verify", moved],
                            ["ckpt-reshard", moved, again, "--to", "native"], ["ckpt-inspect", "diff", source, again]):
                done = subprocess.run([BIN / command[0], *command[1:]], preexec_fn=limit, capture_output=True, text=True)
                self.assertEqual((done.returncode, done.stderr), (0, ""), command)


if __name__ == "__main__":
    unittest.main()
