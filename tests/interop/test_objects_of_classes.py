"""torch.save files and DCP checkpoints that hold objects of classes: what is beside them is read, and nothing of them runs."""

import argparse
import json
import pickle

import numpy
import pytest
import torch
import torch.distributed.checkpoint
from ckpt_tools import FIXTURES, assert_same_state, expectation, listing, reshard, run, succeed
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

CLASSES = [path.with_name(path.name.removesuffix(".expect.json")) for path in sorted(FIXTURES.glob("*/classes/*.expect.json"))]
MEGATRON = FIXTURES / "torch_zip" / "classes" / "megatron.pt"


def refused_in(document):
    """Returns {name: reason} of the values that are not read, and removes them from the document."""
    values = document["values"]
    refused = {name: value["$refused"] for name, value in values.items() if isinstance(value, dict) and "$refused" in value}
    for name in refused:
        del values[name]
    return refused


@pytest.mark.parametrize("path", CLASSES, ids=lambda path: path.stem)
def test_everything_beside_objects_of_classes_is_read(path, tmp_path):
    """Shows E2, E3."""
    expected = expectation(path)
    document = json.loads(succeed("ckpt-inspect", "ls", path, "--json", "--sha256", cwd=tmp_path))
    refused = refused_in(document)
    assert_same_state(document, expected)
    assert sorted(refused) == sorted(expected["refused"])
    for name, words in expected["refused"].items():
        assert all(word in refused[name] for word in words), refused[name]
    assert "sound" in succeed("ckpt-inspect", "verify", path, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", CLASSES, ids=lambda path: path.stem)
def test_a_move_names_each_refused_value_and_how_to_leave_it_out(path, tmp_path):
    """Shows E2, E7. The options that the refusal prints make the move succeed."""
    refused = expectation(path)["refused"]
    process = run("ckpt-reshard", path, tmp_path / "moved", "--to", "native")
    lines = process.stderr.splitlines()
    if not refused:
        assert process.returncode == 0
        return
    assert process.returncode == 3 and len(lines) == len(refused) and list(tmp_path.iterdir()) == []
    advised = [line.rsplit("--only '", 1)[1].split("'")[0] for line in lines]
    assert sorted(advised) == sorted(f"!{name}" for name in refused)
    only = [argument for pattern in advised for argument in ("--only", pattern)]
    assert_same_state(listing(reshard(path, tmp_path / "moved", "--to", "native", *only)), expectation(path))


class Codes(torch.Tensor):
    """A float32 tensor in 8 bits, such as the state of torchao's optimizers."""

    @staticmethod
    def __new__(cls, codes):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes):
        self.codes = codes

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.is_pinned.default:
            return False
        return cls(args[0].codes)  # detach and the like, which DCP calls

    def __reduce_ex__(self, protocol):
        return Codes, (self.codes,)


def test_tensors_of_classes_in_dcp_are_refused_values_and_no_damage(tmp_path):
    """Shows F1, E3. `.metadata` names no class: it says that each is an ordinary tensor."""
    state = {"w": torch.arange(4), "m": Codes(torch.zeros(4000, dtype=torch.uint8)), "v": Codes(torch.zeros(4, dtype=torch.uint8))}
    torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    checked = run("ckpt-inspect", "verify", "dcp", cwd=tmp_path)
    assert checked.returncode == 0 and checked.stdout.count("value: expected a value of plain types") == 2, checked.stdout
    process = run("ckpt-reshard", "dcp", "moved", "--to", "native", cwd=tmp_path)
    assert process.returncode == 3
    for name in "mv":
        assert f"(to leave it out, add --only '!{name}')" in process.stderr, process.stderr
    moved = reshard(tmp_path / "dcp", tmp_path / "moved", "--to", "native", "--only", "!m", "--only", "!v")
    assert [row["name"] for row in listing(moved)["tensors"]] == ["w"]


@pytest.mark.parametrize("damage", ["flipped bit", "missing file"])
def test_each_piece_of_a_refused_tensor_in_dcp_is_checked(damage, tmp_path):
    """Shows E3, F1. Tessera does not read `m`, which has two pieces, but `verify` finds damage in the second one, too."""
    writer = torch.distributed.checkpoint.FileSystemWriter(tmp_path / "dcp", single_file_per_rank=False)
    state = {"w": torch.arange(4), **{f"m{i}": Codes(torch.full((4000,), 7, dtype=torch.uint8)) for i in range(2)}}
    torch.distributed.checkpoint.save(state, storage_writer=writer, no_dist=True)
    metadata = pickle.loads((tmp_path / "dcp" / ".metadata").read_bytes())
    whole, pieces = metadata.state_dict_metadata.pop("m0"), {}
    del metadata.state_dict_metadata["m1"]
    for index in [index for index in metadata.storage_data if index.fqn != "w"]:
        offset = torch.Size([4000 * int(index.fqn[1])])
        pieces[offset] = metadata.storage_data.pop(index)
        metadata.storage_data[MetadataIndex("m", offset)] = pieces[offset]
    whole.size = torch.Size([8000])
    whole.chunks = [ChunkStorageMetadata(offset, torch.Size([4000])) for offset in sorted(pieces)]
    metadata.state_dict_metadata["m"] = whole
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))
    assert run("ckpt-inspect", "verify", "dcp", cwd=tmp_path).returncode == 0
    second = tmp_path / "dcp" / pieces[torch.Size([4000])].relative_path
    if damage == "missing file":
        second.unlink()
    else:
        content = bytearray(second.read_bytes())
        content[content.index(bytes([7]) * 4000)] ^= 1
        second.write_bytes(content)
    checked = run("ckpt-inspect", "verify", "dcp", cwd=tmp_path)
    assert checked.returncode == 1, checked.stdout
    assert second.name in checked.stdout, checked.stdout
    if damage == "missing file":
        process = run("ckpt-reshard", "dcp", "moved", cwd=tmp_path)
        assert process.returncode == 3 and second.name in process.stderr, process.stderr


def test_an_object_read_as_a_dict_is_one_after_the_move(tmp_path):
    """Shows E2. torch.load then returns vars() of the object."""
    leave_out = ["--only", "!args.model_type"]
    moved = tmp_path / "moved.pt"
    process = run("ckpt-reshard", MEGATRON, moved, "--as-dict", "argparse.Namespace", *leave_out)
    assert process.returncode == 0
    assert "2 objects of class argparse.Namespace, read as dicts" in process.stderr
    args = torch.load(moved, weights_only=True)["args"]
    assert torch.equal(args.pop("scale"), torch.tensor(2.0))
    assert args == {"lr": 3e-4, "betas": (0.9, 0.95), "data_path": ["a", "b"], "params_dtype": torch.bfloat16, "nested": {"depth": 2}}


def test_a_class_without_an_object_is_an_error():
    """Shows E7."""
    process = run("ckpt-inspect", "ls", MEGATRON, "--as-dict", "argparse.Namespaces")
    assert process.returncode == 2 and "argparse.Namespaces" in process.stderr


def test_both_sides_of_a_diff_may_have_the_class(tmp_path):
    """It is enough if one of the two checkpoints has an object of the class."""
    torch.save({"args": argparse.Namespace(lr=0.1)}, tmp_path / "object.pt")
    torch.save({"args": {"lr": 0.1}}, tmp_path / "dict.pt")
    succeed("ckpt-inspect", "diff", tmp_path / "object.pt", tmp_path / "dict.pt", "--as-dict", "argparse.Namespace")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_whole_modules_of_every_protocol_are_their_state_dict(protocol, tmp_path):
    """Shows E2. A module of the same class loads the moved state dict."""
    torch.manual_seed(protocol)
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    model.register_buffer("steps", torch.tensor(3))
    model.register_buffer("scratch", torch.ones(4), persistent=False)
    torch.save(model, tmp_path / "model.pt", pickle_protocol=protocol)
    reshard(tmp_path / "model.pt", tmp_path / "moved.pt")
    moved = torch.load(tmp_path / "moved.pt", weights_only=True)
    expected = model.state_dict()
    assert sorted(flat_names(moved)) == sorted(expected)
    assert all(torch.equal(flat_names(moved)[name], tensor) for name, tensor in expected.items())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_quantized_modules_are_refused_by_name(tmp_path):
    """Shows E7. Their weights are packed objects, not parameters."""
    layers = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.LSTM(4, 4), torch.nn.Linear(4, 4))
    model = torch.ao.quantization.quantize_dynamic(layers, {torch.nn.LSTM, torch.nn.Linear})
    torch.save(model, tmp_path / "model.pt")
    process = run("ckpt-reshard", tmp_path / "model.pt", tmp_path / "moved.pt")
    assert process.returncode == 3 and not (tmp_path / "moved.pt").exists()
    assert "!1._all_weight_values.0" in process.stderr and "!2'" in process.stderr and "quantized module" in process.stderr
    left_out = ["--only", "!1._all_weight_values.0", "--only", "!2"]
    succeed("ckpt-reshard", tmp_path / "model.pt", tmp_path / "moved.pt", *left_out)
    assert list(torch.load(tmp_path / "moved.pt")) == ["0.weight"]
    torch.save(model[2], tmp_path / "alone.pt")
    process = run("ckpt-reshard", tmp_path / "alone.pt", tmp_path / "moved_alone.pt")
    assert process.returncode == 3 and "quantized module" in process.stderr


def test_a_move_names_tensors_of_a_module_without_parameters(tmp_path):
    """Shows E7."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Identity())
    model[1].inverse_frequencies = torch.arange(6.0)
    torch.save(model, tmp_path / "model.pt")
    process = run("ckpt-reshard", tmp_path / "model.pt", tmp_path / "moved.pt")
    assert process.returncode == 0 and "1 tensor, dict or module loses attributes (inverse_frequencies)" in process.stdout


@pytest.mark.parametrize(("number", "expected"), [(10, "a0, a1, a2, a3, a4, a5, a6, a7, a8, a9"),
                                                  (12, "a0, a1, a10, a2, a3, a4, a5, a6, a7, a8, and more")])
def test_a_long_list_of_lost_attributes_says_that_it_has_more(number, expected, tmp_path):
    """Shows E2. Of one tensor, dict or module."""
    weight = torch.ones(2)
    for i in range(number):
        setattr(weight, f"a{i}", i)
    torch.save({"w": weight}, tmp_path / "model.pt")
    process = run("ckpt-reshard", tmp_path / "model.pt", tmp_path / "moved.safetensors")
    assert f"1 tensor, dict or module loses attributes ({expected})" in process.stdout, process.stdout


def test_a_move_prints_ten_attributes_and_reports_all(tmp_path):
    """Shows E7."""
    model = torch.nn.Linear(2, 2)
    names = [f"scale_{letter}" for letter in "abcdefghijk"]
    for name in names:
        setattr(model, name, torch.ones(1))
    torch.save(model, tmp_path / "model.pt")
    printed = succeed("ckpt-reshard", tmp_path / "model.pt", tmp_path / "moved.pt")
    assert "loses attributes (" + ", ".join(names[:10]) + ", and more)" in printed
    report = json.loads(succeed("ckpt-reshard", tmp_path / "model.pt", tmp_path / "again.pt", "--json"))
    (change,) = (change for change in report["changes"] if change["kind"] == "attributes")
    assert change["names"] == names


def flat_names(state, prefix=""):
    found = {}
    for key, value in state.items():
        found |= flat_names(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


class Runs:
    """Unpickling this creates a file."""

    def __reduce__(self):
        return (eval, ("open('tessera-ran-code', 'w')",))


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_nothing_of_a_hostile_object_runs(protocol, tmp_path):
    """Shows E3. The object is a value, in a state, a key, or in a tensor's class. Tries every verb, with and without
    --as-dict."""
    namespace = argparse.Namespace(run=Runs(), weight=torch.ones(2))
    state = {"weight": torch.arange(3.0), "a": Runs(), "b": [Runs()], "c": namespace, "d": {(1, Runs()): 2}}
    torch.save(state, tmp_path / "hostile.pt", pickle_protocol=protocol)
    before = sorted(tmp_path.iterdir())
    for options in ([], ["--as-dict", "argparse.Namespace"], ["--as-dict", "builtins.eval"]):
        for verb in (["ls", "--values"], ["tree"], ["stats"], ["verify"], ["hash"], ["show", "--json"]):
            process = run("ckpt-inspect", verb[0], tmp_path / "hostile.pt", *(["*"] if verb[0] == "show" else []), *verb[1:], *options, cwd=tmp_path)
            expected = 2 if options[-1:] == ["builtins.eval"] else 3 if verb[0] == "hash" else 0
            assert process.returncode == expected, (verb, options, process.stderr)
    listed = succeed("ckpt-inspect", "ls", "--values", tmp_path / "hostile.pt")
    assert "builtins.eval" in listed and "weight" in listed
    assert sorted(tmp_path.iterdir()) == before


def test_deep_and_endless_objects_cost_little(tmp_path):
    """Shows E3. Objects are nested in each other, or refer to each other in a ring, beside a tensor."""
    deep = argparse.Namespace()
    inner = deep
    for _ in range(150):
        inner.next = argparse.Namespace()
        inner = inner.next
    inner.next = deep
    torch.save({"deep": deep, "weight": torch.ones(2)}, tmp_path / "deep.pt")
    assert "weight" in succeed("ckpt-inspect", "ls", tmp_path / "deep.pt")
    process = run("ckpt-inspect", "ls", tmp_path / "deep.pt", "--as-dict", "argparse.Namespace")
    assert process.returncode == 3 and "at most 64 levels" in process.stderr


def test_a_numpy_array_is_named_by_its_dtype_and_shape(tmp_path):
    """The installed NumPy pickles the array."""
    torch.save({"array": numpy.zeros((2, 3), "int16"), "weight": torch.ones(1)}, tmp_path / "x.pt")
    document = json.loads(succeed("ckpt-inspect", "ls", tmp_path / "x.pt", "--json"))
    assert refused_in(document) == {"array": "pickle: NumPy array int16 [2, 3]; nothing was executed"}
