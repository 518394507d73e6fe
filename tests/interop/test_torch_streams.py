"""What torch.save writes without a zip archive, as before PyTorch 1.6."""

import collections

import pytest
import torch

from ckpt_tools import reshard, run, succeed


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.reshape(-1).view(torch.uint8).equal(b.reshape(-1).view(torch.uint8))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
def test_a_stream_of_every_protocol_is_what_torch_loads(protocol, tmp_path):
    """Shows E2. The stream holds a training state: tied weights, views, an optimizer, numbers as keys."""
    torch.manual_seed(protocol)
    model = torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7, bias=False), torch.nn.BatchNorm1d(7))
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randint(0, 7, (3,))).square().sum().backward()
    optimizer.step()
    base = torch.randn(6, 8).to(torch.bfloat16)
    state = {"model": dict(model.state_dict()), "optim": optimizer.state_dict(), "views": [base.t(), base[1::2, 3:5], base[0].unsqueeze(1)],
             "shape": [3, 4], "step": 2**70}  # fmt: skip
    torch.save(state, tmp_path / "old.pt", pickle_protocol=protocol, _use_new_zipfile_serialization=False)
    reshard(tmp_path / "old.pt", tmp_path / "moved.pt")
    assert same(torch.load(tmp_path / "moved.pt"), torch.load(tmp_path / "old.pt", weights_only=False))
    torch.save(state, tmp_path / "new.pt", pickle_protocol=protocol)
    succeed("ckpt-inspect", "diff", tmp_path / "old.pt", tmp_path / "new.pt")


def test_a_whole_module_in_a_stream_is_its_state_dict(tmp_path):
    """Shows E2. Such a stream names the classes of modules by persistent ids, with their source."""
    model = torch.nn.Sequential(collections.OrderedDict(a=torch.nn.Linear(3, 2), b=torch.nn.Linear(2, 3), c=torch.nn.BatchNorm1d(3)))
    torch.save({"net": model, "epoch": 3}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    reshard(tmp_path / "old.pt", tmp_path / "moved.pt")
    moved = torch.load(tmp_path / "moved.pt")
    assert moved["epoch"] == 3 and same(moved["net"]["a.weight"], model.a.weight.detach())
    assert {name for name in moved["net"] if name.startswith("c.")} == {f"c.{name}" for name in model.c.state_dict()}


def test_two_objects_in_one_stream_are_refused(tmp_path):
    """torch.load reads only the first object; a move would silently lose the others."""
    with open(tmp_path / "two.pt", "wb") as file:
        for number in range(2):
            torch.save({"weight": torch.full((2,), number)}, file, _use_new_zipfile_serialization=False)
    process = run("ckpt-inspect", "ls", tmp_path / "two.pt")
    assert process.returncode == 3 and "expected one saved object" in process.stderr
