"""`Checkpoint.state_dict`: nested dicts, only the names of another state dict, lazy tensors; what notebooks show;
progress bars."""

import dataclasses
import pickle
import re
import sys
import types

import numpy
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

from python_package import tessera

FORMATS = ("native", "dcp", "torch")


def module():
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 3))


@pytest.fixture
def state():
    model = module()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 3, "empty": {},
            "list": [{"a": 1, "t": torch.ones(2)}, 5], "tied": model[0].weight.detach()}


def saved(state, folder, format):
    path = folder / ("state.pt" if format == "torch" else "state")
    tessera.save(state, path, format=format)
    return tessera.open(path)


def text_keys(value):
    """Returns the object with number keys as text, as DCP stores them."""
    if isinstance(value, dict):
        return {str(key): text_keys(item) for key, item in value.items()}
    return [text_keys(item) for item in value] if isinstance(value, list) else value


def assert_same(one, other):
    assert type(one) is type(other), (one, other)
    if isinstance(one, dict):
        assert list(one) == list(other) or sorted(map(str, one)) == sorted(map(str, other))
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other):
            assert_same(a, b)
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other) and one.dtype == other.dtype
    else:
        assert one == other


@pytest.mark.parametrize("format", FORMATS)
def test_nested_dicts_come_back_as_they_were(state, format, tmp_path):
    with saved(state, tmp_path, format) as checkpoint:
        found = checkpoint.state_dict()
    given = {key: dict(value) if key == "model" else value for key, value in state.items()}
    assert_same(found, text_keys(given) if format == "dcp" else given)
    if format != "dcp":  # DCP stores a tied tensor twice
        assert found["tied"] is found["model"]["0.weight"]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_states_of_numpys_generators_come_back_as_lists(protocol, tmp_path):
    generators = [numpy.random.get_state(legacy=False), numpy.random.PCG64(1).state, numpy.random.Philox(2).state, numpy.random.SFC64(3).state]
    torch.save({"generators": generators}, tmp_path / "states.pt", pickle_protocol=protocol)
    with tessera.open(tmp_path / "states.pt") as checkpoint:
        for state in checkpoint.state_dict()["generators"]:
            given = numpy.random.Generator(getattr(numpy.random, state["bit_generator"])(7))
            if state["bit_generator"] == "SFC64":  # the one that takes only an array
                state["state"]["state"] = numpy.array(state["state"]["state"], numpy.uint64)
            given.bit_generator.state = state
            expected = numpy.random.Generator(getattr(numpy.random, state["bit_generator"])(8))
            expected.bit_generator.state = next(each for each in generators if each["bit_generator"] == state["bit_generator"])
            assert (given.random(5) == expected.random(5)).all()


@pytest.mark.parametrize("format", ["native", "torch", "dcp"])
def test_dicts_have_the_order_of_the_program(format, tmp_path):
    torch.save({"b": {"z": torch.ones(1), "a": 1}, "a": torch.zeros(2), "c": [{"y": 1, "x": torch.ones(1)}]}, tmp_path / "source.pt")
    tessera.reshard(tmp_path / "source.pt", tmp_path / "moved", to=format)
    with tessera.open(tmp_path / "moved") as checkpoint:
        found = checkpoint.state_dict()
        assert list(checkpoint) == sorted(checkpoint)
    assert (list(found), list(found["b"]), list(found["c"][0])) == (["b", "a", "c"], ["z", "a"], ["y", "x"])


@pytest.mark.parametrize("format", ["native", "torch"])
def test_keys_and_lists_of_lists_are_what_they_were(format, tmp_path):
    state = {"m": {("a", 1): 2, (3, 4): torch.ones(1), 5: {"b": torch.ones(2)}}, "l": [[torch.ones(3)], [{"c": 6}]],
             "constants": {torch.int8: torch.ones(4), torch.device("cpu"): 7, (torch.int8, 8): 9}}
    with saved(state, tmp_path, format) as checkpoint:
        assert_same(checkpoint.state_dict(), state)
        assert_same(checkpoint.state_dict(like=state), state)


@pytest.mark.parametrize("format", ["native", "torch", "safetensors"])
@pytest.mark.parametrize("state", [[torch.ones(2), {"b": torch.zeros(1), "c": 5}], (torch.ones(2), 5), [[torch.ones(1)], [2]],
                                   {0: torch.ones(1), 1: 2}], ids=["list", "tuple", "lists", "int keys"])
def test_an_outermost_list_is_a_list(state, format, tmp_path):
    torch.save(state, tmp_path / "source.pt")
    tessera.reshard(tmp_path / "source.pt", tmp_path / "moved", to=format)
    with tessera.open(tmp_path / "moved") as checkpoint:
        assert_same(checkpoint.state_dict(), list(state) if isinstance(state, tuple) else state)
        assert_same(checkpoint.state_dict(like=state), state)
        with pytest.raises(TypeError, match="^like: expected a dict, a list or a tuple, found Tensor"):
            checkpoint.state_dict(like=torch.ones(2))


@pytest.mark.parametrize("format", FORMATS)
def test_a_module_takes_lazy_tensors(state, format, tmp_path):
    model = module()
    with saved(state, tmp_path, format) as checkpoint:
        lazy = checkpoint.state_dict(lazy=True)["model"]
        assert all(isinstance(tensor, tessera.Tensor) for tensor in lazy.values())
        model.load_state_dict(lazy)
    assert_same(dict(model.state_dict()), dict(state["model"]))


def test_functions_of_torch_take_lazy_tensors(state, tmp_path):
    with saved(state, tmp_path, "native") as checkpoint:
        assert torch.equal(torch.cat([checkpoint["model.0.bias"], checkpoint["model.1.bias"]]),
                           torch.cat([state["model"]["0.bias"], state["model"]["1.bias"]]))
        assert torch.allclose(checkpoint["model.0.bias"], other=checkpoint["model.0.bias"])


@pytest.mark.parametrize("format", FORMATS)
def test_like_takes_what_it_has_even_on_the_meta_device(state, format, tmp_path):
    with torch.device("meta"):
        model = module()
    with saved(state, tmp_path, format) as checkpoint:
        found = checkpoint.state_dict(like={"model": model.state_dict(), "list": [{"t": torch.zeros(2)}]})
    assert_same(found, {"model": dict(state["model"]), "list": [{"t": torch.ones(2)}]})
    model.load_state_dict(found["model"], assign=True)
    assert model[0].weight.device.type == "cpu"


def test_like_lists_all_that_does_not_fit(state, tmp_path):
    like = {"model": {"0.weight": torch.ones(3), "x": torch.ones(3), "1.bias": torch.ones(3).half(), "1.weight": 4},
            "stp": 1, "step": torch.ones(1)}
    with saved(state, tmp_path, "native") as checkpoint, pytest.raises(tessera.Error) as refused:
        checkpoint.state_dict(like=like)
    assert [(problem.tensor, problem.rule, problem.expected, problem.found) for problem in refused.value.problems] == [
        ("model.0.weight", "shape", "[3]", "[5, 4]"),
        ("model.x", "missing", "a tensor or a value of that name", "none"),
        ("model.1.bias", "dtype", "float16", "float32"),
        ("model.1.weight", "kind", "int", "a tensor"),
        ("stp", "missing", "a tensor or a value of that name", "none (did you mean 'step'?)"),
        ("step", "kind", "a tensor", "a value")]


def test_notebooks_show_names_and_sizes(tmp_path):
    torch.save({"m": {f"layers.{i}.<w>": torch.zeros(100, 10) for i in range(100)}, "step": 1}, tmp_path / "m.pt")
    with tessera.open(tmp_path / "m.pt") as checkpoint:
        page = checkpoint._repr_html_()
    assert "100 tensors, 1 values, 390.6 KiB" in page and "and 61 more" in page and "&lt;w&gt;" in page and "<w>" not in page
    areas = [float(w) * float(h) for w, h in re.findall(r'width="([\d.]+)" height="([\d.]+)" fill="#(?!fff)', page)]
    assert len(areas) == 40 and max(areas) < 1.1 * min(areas)


def test_progress_can_be_a_bar(state, tmp_path, monkeypatch):
    bars = []

    class Bar:
        def __init__(self, **options):
            self.options, self.n, self.is_closed = options, 0, False
            bars.append(self)

        def update(self, more):
            self.n += more

        def close(self):
            self.is_closed = True

    monkeypatch.setitem(sys.modules, "tqdm", types.ModuleType("tqdm"))
    auto = types.ModuleType("tqdm.auto")
    auto.tqdm = Bar
    monkeypatch.setitem(sys.modules, "tqdm.auto", auto)
    saved(state, tmp_path, "native").close()
    tessera.verify(tmp_path / "state", progress=True)
    tessera.load(state, tmp_path / "state", progress=True)
    tessera.reshard(tmp_path / "state", tmp_path / "moved", ranks=2, progress=True)
    assert len(bars) == 3 and all(bar.is_closed and bar.n == bar.options["total"] > 0 for bar in bars)

    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ValueError, match="expected tqdm to be installed"):
        tessera.verify(tmp_path / "state", progress=True)


def test_positions_that_come_later_are_no_holes(monkeypatch):
    """In the order of names, "a.10" and "a.100" come before "a.2"."""
    monkeypatch.setattr(tessera._job_state, "MAX_HOLES", 100)
    nesting = tessera._job_state.Nesting({})
    for key in "abc":
        for i in sorted(range(101), key=str):
            nesting.put(f"{key}.{i}", [key, tessera._position.Position(i)], i)
    assert nesting.root == {key: list(range(101)) for key in "abc"}


@pytest.mark.parametrize("state, rename, told", [
    ({"b": {"a": torch.ones(1)}, "a": {"q": torch.ones(2)}}, {"b.": ""}, "key path: expected a tensor at a, found a dict"),
    ({"b": {"a": 5}, "a": {"q": torch.ones(2)}}, {"b.": ""}, "key path: expected a value at a, found a dict"),
    ({"b": {"a": torch.ones(1)}, "a": [torch.ones(2)]}, {"b.": ""}, "key path: expected a tensor at a, found a list"),
    ({"b": {"q": torch.ones(1)}, "a": [torch.ones(1), torch.ones(2)]}, {"b.": "a."}, "key path: expected a list at a, found a dict")])
def test_names_that_form_no_nested_dict_are_refused(state, rename, told, tmp_path):
    torch.save(state, tmp_path / "source.pt")
    for to in ("native", "safetensors"):
        with pytest.raises(tessera.Error, match=re.escape(told)) as caught:
            tessera.reshard(tmp_path / "source.pt", tmp_path / "moved", to=to, rename=rename)
        assert caught.value.kind == "mismatch"
    assert not (tmp_path / "moved").exists()


@pytest.mark.parametrize("positions, told", [
    ((0, 20_000_000), "a.20000000: position in a list: expected at most 1048577, because too many positions before it have no entry, "
                      "found 20000000"),
    ((900_000, 1_800_000), "a.1800000: position in a list: expected at most 1048577, because too many")])
def test_a_list_with_too_many_holes_is_refused(tmp_path, positions, told):
    torch_dcp.save({"a": [torch.ones(2), torch.ones(3)]}, checkpoint_id=tmp_path / "s")
    path = tmp_path / "s" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    names = {f"a.{i}": f"a.{position}" for i, position in enumerate(positions)}
    metadata.planner_data = {name: ("a", position) for name, position in zip(names.values(), positions)}
    metadata.state_dict_metadata = {names[name]: found for name, found in metadata.state_dict_metadata.items()}
    metadata.storage_data = {dataclasses.replace(index, fqn=names[index.fqn]): found for index, found in metadata.storage_data.items()}
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(tessera.Error, match=re.escape(told)) as caught:
        tessera.open(tmp_path / "s").state_dict()
    assert caught.value.kind == "unsupported"
