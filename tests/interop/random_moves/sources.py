"""Saves random state dicts in the forms that Tessera reads, and says what they hold."""

import json
import random
import shutil

import framework_folders
import rank_jobs
import torch
import torch.distributed.checkpoint as dcp
from ckpt_tools import run
from differences import SIMPLER, compare, contiguous, flatten, tensors_of
from on_ranks import run_function
from python_package import tessera
from random_state import StateMaker, random_state, trained_names
from readers import load, load_dcp, load_rank_files, opened_state
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor

NOT_IN_SAFETENSORS = {torch.complex32, torch.complex128, torch.float4_e2m1fn_x2}
FORMS = {"torch": 8, "legacy": 1, "dcp": 2, "whole_dcp": 1, "safetensors": 1, "hf_folder": 1, "bin_folder": 1,
         "tessera": 4, "rank_files": 4, "dcp_of_ranks": 2, "hf_of_ranks": 1, "tessera_of_ranks": 1, "deepspeed": 1,
         "quantized": 1}


class Unusable(Exception):
    """A library refuses the state dict of this seed, or does not load what it saved."""


def usable(function, *arguments, **options):
    """Calls a function of PyTorch."""
    try:
        return function(*arguments, **options)
    except (Exception, dcp.api.CheckpointException) as error:
        raise Unusable(f"{error!r:.200}") from None


class Source:
    """A saved state dict. `state` is what other libraries than Tessera read; `fault` gets what Tessera does wrong."""

    def __init__(self, seed, folder, fault):
        self.seed, self.folder, self.fault = seed, folder, fault
        self.rng = random.Random(seed * 7919 + 1)
        self.is_wild = self.rng.random() < 0.4
        self.texts, self.extra_files = {}, {}
        self.has_order = True  # of the keys of dicts
        self.path = folder / "source"
        self.form = self.rng.choices(list(FORMS), FORMS.values())[0]
        self.state = state = self.random_state()
        model = state.get("model")
        self.names = trained_names(model) if isinstance(model, dict) else []  # of what an optimizer numbers
        getattr(self, "save_" + self.form)(state)
        if self.path.is_dir() and self.rng.random() < 0.25:
            self.extra_files = {"config.json": b'{"hidden_size": 4}', "notes.txt": b"mine"}
            for name, content in self.extra_files.items():
                (self.path / name).write_bytes(content)

    def random_state(self):
        return random_state(self.seed, self.is_wild)

    # One process

    def save_torch(self, state, **options):
        self.path = self.folder / "source.pt"
        torch.save(state, self.path, pickle_protocol=self.rng.choice([2, 2, 2, 3, 4, 5]), **options)
        self.state = usable(torch.load, self.path, weights_only=False)

    def save_legacy(self, state):
        self.save_torch(state, _use_new_zipfile_serialization=False)

    def save_dcp(self, state, **options):
        writer = dcp.FileSystemWriter(self.path, thread_count=self.rng.choice([1, 3]))
        usable(dcp.save, state, storage_writer=writer, no_dist=True, **options)
        self.state = usable(load_dcp, self.path)

    def save_whole_dcp(self, state):
        self.save_dcp(state, planner=dcp.DefaultSavePlanner(flatten_state_dict=False))

    def tensors_for_safetensors(self, state):
        found = {name: contiguous(tensor) for name, tensor in tensors_of(state).items() if not tensor.is_quantized
                 and tensor.dtype not in NOT_IN_SAFETENSORS and tensor.layout is torch.strided
                 and name != "__metadata__" and "\ud800" not in name}
        if not found:
            raise Unusable("no tensors")
        self.has_order = False
        return found

    def save_safetensors(self, state):
        """Saves texts beside the tensors. If a text is a tensor's name, its key is a second name of the tensor."""
        self.path = self.folder / "source.safetensors"
        self.state = self.tensors_for_safetensors(state)
        largest = max(self.state, key=lambda name: self.state[name].numel())
        texts = self.rng.choice([{}, {"format": "pt"}, {"epoch": "3", "note Ж": "a\nb", "second": largest}])
        save_file(self.state, self.path, texts or None)
        if "second" in texts:
            self.state["second"] = self.state[texts["second"]]
        self.texts = {key: text for key, text in texts.items() if key not in ("format", "second")}

    def save_in_files(self, tensors, name, suffix, write):
        """Saves a model in up to three files with an index, as transformers does. Returns the files."""
        self.path.mkdir()
        count = self.rng.randint(1, min(3, len(tensors)))
        files = {self.path / f"{name}-{i + 1:05}-of-{count:05}.{suffix}": list(tensors)[i::count] for i in range(count)}
        for file, names in files.items():
            write({name: tensors[name] for name in names}, file)
        weight_map = {name: file.name for file, names in files.items() for name in names}
        (self.path / f"{name}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return files

    def save_hf_folder(self, state):
        self.state = self.tensors_for_safetensors(state)
        self.save_in_files(self.state, "model", "safetensors", save_file)

    def save_bin_folder(self, state):
        tensors = {name: leaf for name, (_, leaf) in flatten(state).items() if isinstance(leaf, torch.Tensor)}
        if not tensors:
            raise Unusable("no tensors")
        self.state = {}
        for file in self.save_in_files(tensors, "pytorch_model", "bin", torch.save):
            self.state |= usable(torch.load, file, weights_only=False)

    def save_tessera(self, state):
        format = self.rng.choice(["native", "native", "dcp", "safetensors", "torch"])
        try:
            saved = tessera.save(state, self.path, format=format)
        except (tessera.Error, TypeError, ValueError) as error:
            if list(self.folder.glob("source*")):
                self.fault("left by tessera.save", f"{list(self.folder.iterdir())} after {error!r:.300}")
            raise Unusable(f"refused by tessera.save: {str(error)[:200]}") from None
        self.take_saved(state, format, saved.changes)

    def take_saved(self, state, format, changes):
        """Compares the state with what tessera.save has written and said."""
        said = {kind for kind, count in changes.items() if count}
        self.state, self.has_order = usable(load, self.path, format), format != "safetensors"
        for difference in compare(state, self.state, ordered=False):
            if difference.kind not in SIMPLER and not difference.is_said(said):
                self.fault(f"tessera.save to {format}", difference)

    # Several ranks

    def on_ranks(self, function):
        logs = self.folder / "logs"
        logs.mkdir()
        try:
            run_function(rank_jobs.on_rank, self.rng.choice([2, 3, 4]), function, logs=logs)
        except AssertionError as error:
            raise Unusable(f"on ranks: {str(error)[-500:]}") from None
        finally:
            shutil.rmtree(logs)

    def save_rank_files(self, state):
        has_kinds, has_own = self.rng.random() < 0.5, self.rng.random() < 0.5
        if any(not isinstance(key, str) for key in state):
            raise Unusable("outermost keys that are no text")
        self.path.mkdir()

        def save(rank, num_ranks):
            mine = rank_jobs.sharded(self.random_state(), self.seed)
            if has_own:
                mine["extra_state"] = {"rng": torch.arange(5, dtype=torch.uint8) + rank, "rank": rank, "same": 3}
                mine["loader"] = {"position": [rank, 1], "text": "a" * rank}
            rank_jobs.save_files_of_rank(rank, num_ranks, mine, self.path, has_kinds)

        self.on_ranks(save)
        self.state, self.has_order = usable(load_rank_files, self.path), False

    def save_dcp_of_ranks(self, state):
        writer = dcp.FileSystemWriter(self.path)
        self.on_ranks(lambda rank, _: dcp.save(rank_jobs.sharded(self.random_state(), self.seed), storage_writer=writer))
        self.state = usable(load_dcp, self.path)
        if any(isinstance(tensor, DTensor) for tensor in tensors_of(self.state).values()):
            raise Unusable("PyTorch pickles DTensors in lists and tuples as values")

    def save_hf_of_ranks(self, state):
        self.state = self.tensors_for_safetensors(state)
        writer = HuggingFaceStorageWriter(str(self.path), save_distributed=True)
        self.on_ranks(lambda rank, _: dcp.save(rank_jobs.sharded(self.state, self.seed), storage_writer=writer))

    def save_tessera_of_ranks(self, state):
        format = self.rng.choice(["native", "native", "dcp", "safetensors", "torch"])

        def save(rank, _):
            saved = tessera.save(rank_jobs.sharded(self.random_state(), self.seed), self.path, format=format)
            if rank == 0:
                (self.folder / "changes.json").write_text(json.dumps(dict(saved.changes)))

        try:
            self.on_ranks(save)
        except Unusable as error:
            if list(self.folder.glob("source*")) or "tessera" not in str(error):
                self.fault("tessera.save on ranks", error)
            raise
        self.take_saved(state, format, json.loads((self.folder / "changes.json").read_text()))

    # Folders of frameworks

    def save_deepspeed(self, state):
        known = framework_folders.write_deepspeed(self.path, self.rng, StateMaker(self.rng, wild=False))
        self.take_known(known, opened_state(self.path))

    def save_quantized(self, state):
        known, dtype = framework_folders.write_quantized(self.path, self.rng, StateMaker(self.rng, wild=False))
        self.take_converted(known, "--dequantize", str(dtype).removeprefix("torch."), "--extra-files", "leave")

    def take_known(self, known, found):
        """Takes what Tessera has found as the state, after a comparison with what is known to be there."""
        for difference in compare(known, {key: found.get(key) for key in known}, ordered=False):
            if difference.kind not in SIMPLER:
                self.fault(f"source {self.form}", difference)
        self.state, self.has_order = found, False

    def take_converted(self, known, *options):
        """Moves a source that needs options, and takes the result as the source."""
        result = run("ckpt-reshard", self.path, self.folder / "converted", "--to", "native", *options)
        if result.returncode:
            self.fault(f"source {self.form}", f"{options}: {result.stderr}")
            raise Unusable("not converted")
        shutil.rmtree(self.path)
        self.path = self.folder / "converted"
        self.take_known(known, load(self.path, "native"))
