"""A plain torch checkpoint, whose optimizer numbers its parameters, is moved to DCP with names. PyTorch then resumes from
it, and the next steps are equal to the bit to those of the run that was not interrupted."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ckpt_tools import reshard, run, succeed
from torch import nn
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_optimizer_state_dict,
                                                     set_model_state_dict, set_optimizer_state_dict)


class Net(nn.Module):
    """Some parameters have the same shape as others, one the shape of a buffer."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.down = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.emb.weight  # tied: the optimizer has it once

    def forward(self, ids):
        return self.head(self.down(torch.relu(self.norm(self.up(self.emb(ids))))))


def two_groups(model):
    """Returns the usual two groups: weights decay, biases and norms do not."""
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


OPTIMIZERS = {
    "adamw": lambda model: torch.optim.AdamW(two_groups(model), lr=1e-2, amsgrad=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
    "adagrad": lambda model: torch.optim.Adagrad(two_groups(model), lr=1e-2),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-2, momentum=0.9, centered=True),
}


def train(model, optimizer, first, last):
    for step in range(first, last):
        ids = torch.arange(8).mul(step + 3) % 11
        nn.functional.cross_entropy(model(ids), (ids + 1) % 11).backward()
        optimizer.step()
        optimizer.zero_grad()


def fresh(name, seed):
    torch.manual_seed(seed)
    model = Net()
    return model, OPTIMIZERS[name](model)


def write_names(model, optimizer, path):
    names = {id(p): n for n, p in model.named_parameters()}
    with open(path, "w") as f:
        json.dump([names[id(p)] for g in optimizer.param_groups for p in g["params"]], f)


def resumed(name, checkpoint, first, last):
    """Loads DCP into an optimizer as torch.distributed.checkpoint requires, and continues training."""
    model, optimizer = fresh(name, seed=99)
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer), "step": 0}
    dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    assert state["step"] == first
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])
    train(model, optimizer, first, last)
    return model.state_dict()


def assert_equal_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.fixture(params=OPTIMIZERS)
def trained(request, tmp_path):
    """Trains six steps and saves after three, as most scripts do."""
    model, optimizer = fresh(request.param, seed=0)
    train(model, optimizer, 0, 3)
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 3}, tmp_path / "plain.pt")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    torch.save(optimizer.state_dict(), tmp_path / "optim.pt")
    write_names(model, optimizer, tmp_path / "names.json")
    train(model, optimizer, 3, 6)
    return request.param, tmp_path, model.state_dict()


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("params", ["auto", "file"])
def test_torch_resumes_to_the_bit(trained, params, ranks):
    name, folder, expected = trained
    given = "auto" if params == "auto" else folder / "names.json"
    reshard(folder / "plain.pt", folder / "dcp", "--to", "dcp", "--world-size", ranks, "--optimizer-params", given)
    assert_equal_bits(resumed(name, folder / "dcp", 3, 6), expected)


@pytest.mark.parametrize("params", ["auto", "file"])
def test_a_merge_of_two_files_gets_the_same_names(trained, params):
    _, folder, _ = trained
    given = "auto" if params == "auto" else folder / "names.json"
    reshard(folder / "plain.pt", folder / "one", "--optimizer-params", folder / "names.json", "--only", "model",
            "--only", "optim")
    succeed("ckpt-reshard", "merge", f"model={folder}/model.pt", f"optim={folder}/optim.pt", folder / "merged",
            "--optimizer-params", given)
    succeed("ckpt-inspect", "diff", folder / "one", folder / "merged")


def test_the_names_are_those_that_torch_itself_gives(trained):
    name, folder, _ = trained
    model, optimizer = fresh(name, seed=0)
    train(model, optimizer, 0, 3)
    dcp.save({"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer), "step": 3},
             checkpoint_id=folder / "theirs", no_dist=True)
    reshard(folder / "plain.pt", folder / "ours", "--to", "dcp", "--optimizer-params", "auto")
    succeed("ckpt-inspect", "diff", folder / "ours", folder / "theirs")


def test_names_that_torch_stored_are_taken(tmp_path):
    """An optimizer that was made with named_parameters() stores the names as param_names."""
    model = Net()
    optimizer = torch.optim.AdamW(list(model.named_parameters())[::-1])
    if "param_names" not in optimizer.param_groups[0]:
        pytest.skip("torch before 2.6")
    train(model, optimizer, 0, 1)
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "plain.pt")
    moved = torch.load(reshard(tmp_path / "plain.pt", tmp_path / "moved.pt", "--optimizer-params", "auto"))
    for number, (name, _) in enumerate(list(model.named_parameters())[::-1]):
        mine = optimizer.state_dict()["state"][number]
        assert torch.equal(moved["optim"]["state"][name]["exp_avg"], mine["exp_avg"])
    assert moved["optim"]["param_groups"][0]["params"] == [name for name, _ in model.named_parameters()][::-1]


def test_an_old_archive_with_storages_out_of_order_has_the_order_of_its_pickle(tmp_path):
    """torch.save of a stream writes storages in any order; the names must be in the order of the pickle."""
    model, optimizer = fresh("adamw", seed=0)
    train(model, optimizer, 0, 1)
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    torch.save(state, tmp_path / "zip.pt")
    torch.save(state, tmp_path / "stream.pt", _use_new_zipfile_serialization=False)
    for form in ("zip", "stream"):
        reshard(tmp_path / f"{form}.pt", tmp_path / form, "--optimizer-params", "auto")
    succeed("ckpt-inspect", "diff", tmp_path / "zip", tmp_path / "stream")


@pytest.mark.parametrize("to", ["torch", "native"])
def test_what_was_moved_has_the_order_of_its_source(trained, to):
    _, folder, _ = trained
    moved = reshard(folder / "plain.pt", folder / f"moved_{to}", "--to", to)
    reshard(moved, folder / f"named_{to}", "--to", "native", "--optimizer-params", "auto")
    reshard(folder / "plain.pt", folder / f"by_list_{to}", "--to", "native", "--optimizer-params", folder / "names.json")
    succeed("ckpt-inspect", "diff", folder / f"named_{to}", folder / f"by_list_{to}")


def test_a_file_with_sorted_names_has_no_order(trained):
    """Sorted names put biases before weights, so they do not show the optimizer's order."""
    _, folder, _ = trained
    reshard(folder / "plain.pt", folder / "sorted.safetensors")
    reshard(folder / "sorted.safetensors", folder / "sorted.pt")
    refused = run("ckpt-reshard", folder / "sorted.pt", folder / "out", "--optimizer-params", "auto")
    assert refused.returncode == 3
    assert "shapes that tell which number is which parameter, found equal shapes: number" in refused.stderr
    assert "--optimizer-params FILE" in refused.stderr
    reshard(folder / "sorted.pt", folder / "out", "--optimizer-params", folder / "names.json")
    reshard(folder / "plain.pt", folder / "direct", "--optimizer-params", folder / "names.json")
    succeed("ckpt-inspect", "diff", folder / "out", folder / "direct")


def test_numbers_that_became_text_in_dcp_get_names(trained):
    name, folder, expected = trained
    reshard(folder / "plain.pt", folder / "text", "--to", "dcp")
    reshard(folder / "text", folder / "dcp", "--to", "dcp", "--optimizer-params", folder / "names.json")
    assert_equal_bits(resumed(name, folder / "dcp", 3, 6), expected)


def resumed_under_numbers(name, checkpoint, first, last):
    """Loads a torch.save file as most scripts do, and continues training."""
    model, optimizer = fresh(name, seed=99)
    state = torch.load(checkpoint, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optim"])
    train(model, optimizer, first, last)
    return model.state_dict()


@pytest.mark.parametrize("way", ["dcp", "native"])
def test_a_plain_optimizer_resumes_from_numbers_again(trained, way):
    """Shows F4. The source is what get_optimizer_state_dict saved. The result equals what the plain optimizer had saved."""
    name, folder, expected = trained
    model, optimizer = fresh(name, seed=0)
    train(model, optimizer, 0, 3)
    dcp.save({"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer), "step": 3},
             checkpoint_id=folder / "names", no_dist=True)
    source = folder / "names" if way == "dcp" else reshard(folder / "names", folder / "native")
    back = reshard(source, folder / "back.pt", "--optimizer-params", "numbers")
    assert_equal_bits(resumed_under_numbers(name, back, 3, 6), expected)
    found, saved = (torch.load(path, weights_only=True)["optim"] for path in (back, folder / "plain.pt"))
    assert found["state"].keys() == saved["state"].keys()
    assert [group["params"] for group in found["param_groups"]] == [group["params"] for group in saved["param_groups"]]


def test_an_optimizer_by_itself_gets_numbers_at_the_top(trained):
    """The result has the form of the HF Trainer's optimizer.pt."""
    name, folder, _ = trained
    reshard(folder / "plain.pt", folder / "named", "--optimizer-params", folder / "names.json")
    back = reshard(folder / "named", folder / "optimizer.pt", "--optimizer-params", "numbers", "--only", "optim",
                   "--rename", "optim.=")
    _, optimizer = fresh(name, seed=99)
    optimizer.load_state_dict(torch.load(back, weights_only=True))
    saved = torch.load(folder / "optim.pt", weights_only=True)
    for number, state in optimizer.state_dict()["state"].items():
        for kind, each in state.items():
            assert torch.equal(torch.as_tensor(each), torch.as_tensor(saved["state"][number][kind])), (number, kind)


def test_state_of_a_parameter_in_no_group_is_refused(trained):
    _, folder, _ = trained
    named = torch.load(reshard(folder / "plain.pt", folder / "named.pt", "--optimizer-params", folder / "names.json"))
    lost = named["optim"]["param_groups"][0]["params"].pop()
    torch.save(named, folder / "changed.pt")
    refused = run("ckpt-reshard", folder / "changed.pt", folder / "out", "--optimizer-params", "numbers")
    assert refused.returncode == 3 and f"optim.state.{lost}." in refused.stderr
    assert "found state of a parameter in none of these lists" in refused.stderr
    numbered = run("ckpt-reshard", folder / "plain.pt", folder / "out", "--optimizer-params", "numbers")
    assert numbered.returncode == 3 and "does its state have numbers already?" in numbered.stderr


def test_state_flattened_with_dots_moves_under_its_names(trained, tmp_path):
    """torchtitan saves this form. It does not store the order of parameters, so it cannot get numbers; PyTorch loads it
    into a plain optimizer by names."""
    name, _, expected = trained
    model, optimizer = fresh(name, seed=0)
    train(model, optimizer, 0, 3)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    dcp.save({"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer, options=flat)},
             checkpoint_id=tmp_path / "flat", no_dist=True)
    refused = run("ckpt-reshard", tmp_path / "flat", tmp_path / "numbers.pt", "--optimizer-params", "numbers")
    assert refused.returncode == 3 and "found fields for each parameter" in refused.stderr, refused.stderr
    assert "optimizer.param_groups." in refused.stderr and "flatten_optimizer_state_dict=True" in refused.stderr

    moved = reshard(tmp_path / "flat", tmp_path / "moved", "--to", "dcp", "--world-size", 2)
    model, optimizer = fresh(name, seed=99)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer, options=flat)}
    dcp.load(state, checkpoint_id=moved, no_dist=True)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=flat)
    train(model, optimizer, 3, 6)
    assert_equal_bits(model.state_dict(), expected)


def test_sources_that_share_a_dict_give_no_order(tmp_path):
    """`auto` uses the order of keys. Two files of one model do not say which of their keys come first."""
    names = ["z", "m", "a", "k"]
    model = {name: torch.full((3, 3), float(i)) for i, name in enumerate(names)}
    optim = {"state": {i: {"exp_avg": torch.full((3, 3), float(i))} for i in range(4)},
             "param_groups": [{"lr": 0.1, "params": [0, 1, 2, 3]}]}
    torch.save({name: model[name] for name in ("m", "z")}, tmp_path / "one.pt")
    torch.save({name: model[name] for name in ("a", "k")}, tmp_path / "two.pt")
    torch.save(optim, tmp_path / "optim.pt")
    succeed("ckpt-reshard", "merge", f"model={tmp_path}/one.pt", f"model={tmp_path}/two.pt", f"optim={tmp_path}/optim.pt",
            tmp_path / "merged")
    succeed("ckpt-reshard", tmp_path / "merged", tmp_path / "merged.pt")
    for source in ("merged", "merged.pt"):
        refused = run("ckpt-reshard", tmp_path / source, tmp_path / "named", "--optimizer-params", "auto")
        assert refused.returncode != 0 and "equal shapes" in refused.stderr, refused.stderr


def test_the_order_of_keys_is_no_text_of_the_user(tmp_path):
    from safetensors import safe_open
    from safetensors.torch import save_file
    save_file({"a": torch.ones(2), "b": torch.zeros(3)}, tmp_path / "m.safetensors",
              metadata={"tessera.key_order": "hello", "mine": "kept"})
    reshard(tmp_path / "m.safetensors", tmp_path / "native")
    succeed("ckpt-inspect", "verify", tmp_path / "native")
    reshard(tmp_path / "native", tmp_path / "back.safetensors")
    with safe_open(tmp_path / "back.safetensors", "pt") as back:
        assert back.metadata()["mine"] == "kept" and "tessera.key_order" not in back.metadata()


@pytest.mark.parametrize("of", ["merged sources", "names of parameters"])
def test_workers_with_another_order_are_refused(tmp_path, of):
    """Shows E4. All shapes are equal, so the plan does not show the order of the sources, or which state gets which name."""
    if of == "merged sources":
        for name in ("x.pt", "y.pt"):
            torch.save({"w": torch.ones(4)}, tmp_path / name)
        orders = [["merge", f"a={tmp_path}/x.pt", f"b={tmp_path}/y.pt"], ["merge", f"a={tmp_path}/y.pt", f"b={tmp_path}/x.pt"]]
    else:
        state = {number: {"exp_avg": torch.full((4,), float(number))} for number in range(2)}
        torch.save({"optim": {"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}}, tmp_path / "x.pt")
        orders = []
        for names in (["a", "b"], ["b", "a"]):
            file = tmp_path / f"{names[0]}.json"
            file.write_text(json.dumps(names))
            orders.append([tmp_path / "x.pt", "--only", "optim.state", "--optimizer-params", file])
    processes = []
    for part, (first, *more) in enumerate(orders):
        at = 2 if of == "merged sources" else 0  # DST comes after the sources
        arguments = [first, *more[:at], tmp_path / "moved", *more[at:], "--to", "dcp", "--part", f"{part}/2"]
        processes.append(run("ckpt-reshard", *arguments))
    assert processes[0].returncode == 0, processes[0].stderr
    assert processes[1].returncode != 0 and not (tmp_path / "moved").exists(), processes[1].stdout
