"""Shows A4. The two trainers of docs/migrating.md, exactly as printed there, resume from each other's checkpoints."""

import re
import runpy
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch.distributed.checkpoint.state_dict  # noqa: F401  (here, before ranks are forked: each would import it)
import torch.distributed.fsdp  # noqa: F401
from ckpt_tools import BIN, reshard
from on_ranks import run_function, run_program

PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"
LOSS = re.compile(r"^step (\d+), loss (\S+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> Path:
    [code] = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    path = tmp_path_factory.mktemp("page") / "train.py"
    path.write_text(code)
    return path


def losses_in(said: list[str]) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in LOSS.findall("".join(said))}


def run_script(*words) -> None:
    sys.argv = [str(word) for word in words]
    runpy.run_path(sys.argv[0], run_name="__main__")


def in_python(ranks: int, script: Path, *arguments) -> dict[int, float]:
    logs = Path(tempfile.mkdtemp())
    run_function(run_script, ranks, script, *arguments, logs=logs)
    losses = losses_in([log.read_text() for log in logs.iterdir()])
    shutil.rmtree(logs)
    return losses


def in_cpp(ranks: int, *arguments) -> dict[int, float]:
    return losses_in(run_program([BIN / "migrating", *arguments], ranks))


# Shows A4.
def test_the_trainers_of_the_page_go_on_from_each_other(script, tmp_path):
    expected = in_python(2, script, "-", tmp_path / "3") | in_python(2, script, tmp_path / "3", tmp_path / "6")
    expected |= in_python(2, script, tmp_path / "6", tmp_path / "9")
    assert list(expected) == list(range(1, 10))
    assert in_cpp(4, tmp_path / "3", tmp_path / "cpp-6") == pytest.approx({step: expected[step] for step in (4, 5, 6)}, rel=1e-5)
    assert in_python(1, script, tmp_path / "cpp-6", tmp_path / "9-again") == pytest.approx(
        {step: expected[step] for step in (7, 8, 9)}, rel=1e-5)
    assert in_cpp(2, "-", tmp_path / "cpp-3") == pytest.approx(
        {step: expected[step] for step in (1, 2, 3)}, rel=1e-5)  # the same initial values


PLAIN_LOOP = """
import sys
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8)
    def forward(self, x):
        return self.down(torch.relu(self.up(x)))
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(1, 7):
    x = torch.sin(torch.arange(16.0) * step).view(2, 8)
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}, loss {loss.item():.6f}")
    if step == 3:
        torch.save({"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 3}, sys.argv[1])
"""


def test_a_plain_checkpoint_goes_on_in_cpp_once_its_optimizer_has_names(tmp_path):
    (tmp_path / "plain.py").write_text(PLAIN_LOOP)
    expected = in_python(1, tmp_path / "plain.py", tmp_path / "plain.pt")
    for form in ("native", "dcp"):
        named = reshard(tmp_path / "plain.pt", tmp_path / form, "--to", form, "--optimizer-params", "auto")
        assert in_cpp(2, named, tmp_path / f"{form}-6") == pytest.approx({step: expected[step] for step in (4, 5, 6)}, rel=1e-5)
