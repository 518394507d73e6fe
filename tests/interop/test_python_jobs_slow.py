"""Shows A4, E7. As `slow`: each form of training goes on as each other one, in Python and in C++; meshes of three axes; a
thousand saves."""

import itertools
import json
import sys
from pathlib import Path

import pytest
import resume_peer
import torch
import torch.distributed as dist
from ckpt_tools import BIN
from on_ranks import run_function, run_program
from python_package import tessera
from safetensors.torch import save_file
from test_python_jobs import Net, assert_holds, nbytes_that_saves_and_loads_keep, start, step
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
from peers_train_step import Transformer  # noqa: E402


# --- each form into each other

class App(Stateful):
    """A model and its optimizer, as PyTorch's examples of DCP save them."""

    def __init__(self, kind):
        torch.manual_seed(1)
        size = dist.get_world_size()
        net = Net()
        if kind == "fsdp1":
            net = FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True,
                                           device_mesh=init_device_mesh("cpu", (size,)))
        elif kind == "fsdp1 hybrid":
            net = FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True,
                                           device_mesh=init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicas", "shards")),
                                           sharding_strategy=ShardingStrategy.HYBRID_SHARD)
        elif kind == "fsdp2":
            fully_shard(net, mesh=init_device_mesh("cpu", (size,)))
        else:
            net = torch.nn.parallel.DistributedDataParallel(net)
        self.net, self.optimizer = net, torch.optim.AdamW(net.parameters(), lr=0.01)

    def train(self, steps):
        return [step(self.net, self.optimizer, i) for i in steps]

    def state_dict(self):
        model, optimizer = get_state_dict(self.net, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state):
        set_state_dict(self.net, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def train_and_save(kind, path):
    start()
    app = App(kind)
    app.train(range(3))
    tessera.async_save({"app": app}, path).result()
    losses = app.train(range(3, 6))
    if dist.get_rank() == 0:
        Path(f"{path}.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


def load_and_train(kind, path):
    start()
    app = App(kind)
    app.train([50])  # so that its state is another one
    tessera.load({"app": app}, path)
    assert app.train(range(3, 6)) == pytest.approx(json.loads(Path(f"{path}.json").read_text()), rel=1e-5)
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[("fsdp1", 2), ("fsdp1 hybrid", 4), ("fsdp2", 4), ("ddp", 2)], ids=str)
def saved(request, tmp_path_factory):
    path = str(tmp_path_factory.mktemp("saved") / "state")
    run_function(train_and_save, request.param[1], request.param[0], path)
    return path


@pytest.mark.parametrize("kind, ranks", [("fsdp2", 4), ("fsdp2", 1), ("fsdp1 hybrid", 4), ("ddp", 3)])
def test_every_form_of_training_goes_on_as_every_other(saved, kind, ranks):
    run_function(load_and_train, ranks, kind, saved)


# --- Python, C++, Python

MIDDLE, STEPS = 4, 10


class Storage:
    """Tessera in place of `torch.distributed.checkpoint`."""

    @staticmethod
    def load(state, checkpoint_id):
        tessera.load(state, checkpoint_id)

    @staticmethod
    def save(state, checkpoint_id):
        tessera.async_save(state, checkpoint_id).result()


@pytest.mark.parametrize("way, ranks", [("fsdp2", 2), ("fsdp2", 3), ("fsdp1", 2)])
def test_training_goes_on_in_cpp_and_in_python_again(monkeypatch, tmp_path, way, ranks):
    monkeypatch.setattr(resume_peer, "dcp", Storage)
    torch.manual_seed(0)
    values = dict(Transformer(19, 10, 3, 2, 6).state_dict()) | {"ids": torch.randint(19, (STEPS, 12, 7))}
    save_file(values, tmp_path / "input.safetensors")

    def losses():
        return json.loads((tmp_path / "losses-0.json").read_text())

    def in_python(way, ranks, first, last, begin="-", end="-"):
        run_function(resume_peer.train, ranks, str(tmp_path / "input.safetensors"), str(begin), str(end), way, first, last,
                     str(tmp_path / "losses-"))
        return losses()

    def in_cpp(way, ranks, first, last, begin, end="-"):
        run_program([BIN / "resume_parity", tmp_path / "input.safetensors", begin, end, "native", way, first, last,
                     tmp_path / "losses-"], ranks)
        return losses()

    in_one_go = in_python("fsdp2", 1, 0, STEPS)
    python, cpp = tmp_path / "python", tmp_path / "cpp"
    in_python(way, ranks, 0, MIDDLE, end=python)
    assert in_cpp("FULL_SHARD", 3, MIDDLE, STEPS, python) == pytest.approx(in_one_go[MIDDLE:], rel=1e-5)
    assert in_cpp("HYBRID_SHARD", 4, MIDDLE, MIDDLE + 2, python, cpp) == pytest.approx(in_one_go[MIDDLE:MIDDLE + 2], rel=1e-5)
    assert in_python(way, 4, MIDDLE + 2, STEPS, begin=cpp) == pytest.approx(in_one_go[MIDDLE + 2:], rel=1e-5)


# --- meshes of three axes

CUBE = [(Shard(0), Shard(0), Shard(0)), (Shard(0), Shard(1), Replicate()), (Replicate(), Shard(0), Shard(1)),
        (Shard(1), Replicate(), Shard(0)), (Replicate(), Replicate(), Replicate())]


def uneven():
    """Tensors whose sizes two does not divide, most with fewer rows than ranks."""
    return {"w": torch.arange(77.0).reshape(11, 7), "v": torch.arange(5.0), "e": torch.arange(72.0).reshape(3, 4, 6),
            "one": torch.ones(1), "scalar": torch.tensor(3.0)}


def laid_out(tensor, mesh, placements):
    fitting = [Replicate() if isinstance(each, Shard) and each.dim >= tensor.dim() else each for each in placements]
    return distribute_tensor(tensor.clone(), mesh, fitting)


def replicas_tensors_and_shards():
    """A model in HSDP over tensor parallelism, and its whole weights."""
    torch.manual_seed(1)
    net = Net()
    whole = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicas", "shards", "tp"))
    parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(net, mesh=mesh["replicas", "shards"])
    return net.state_dict(), whole


def save_on_a_cube(root):
    start()
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    for i, placements in enumerate(CUBE):
        state = {name: laid_out(tensor, mesh, placements) for name, tensor in uneven().items()}
        tessera.save(state, f"{root}/{i}", format="native" if i % 2 else "dcp")
    state, whole = replicas_tensors_and_shards()
    assert any(isinstance(each, _StridedShard) for each in state["up.weight"].placements)
    tessera.save(state, f"{root}/model")
    if dist.get_rank() == 0:
        torch.save(whole, f"{root}/whole.pt")
    dist.destroy_process_group()


def load_what_a_cube_saved(root):
    start()
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, 2, 2) if size == 8 else (size,))
    for i, placements in itertools.product(range(len(CUBE)), CUBE if size == 8 else [(Shard(0),)]):
        state = {name: laid_out(torch.zeros_like(tensor), mesh, placements) for name, tensor in uneven().items()}
        tessera.load(state, f"{root}/{i}")
        for name, tensor in uneven().items():
            assert_holds(state[name], tensor, f"{name} of {CUBE[i]} as {placements}")
    whole = torch.load(f"{root}/whole.pt")
    state = {name: laid_out(torch.zeros_like(tensor), mesh, [Shard(0)] * mesh.ndim) for name, tensor in whole.items()}
    tessera.load(state, f"{root}/model")
    for name, tensor in whole.items():
        assert_holds(state[name], tensor, name)
    dist.destroy_process_group()


def test_meshes_of_three_axes_load_into_each_other(tmp_path):
    run_function(save_on_a_cube, 8, str(tmp_path))
    for ranks in (8, 3):
        run_function(load_what_a_cube_saved, ranks, str(tmp_path))


# --- a long run

def test_a_thousand_saves_and_loads_keep_no_memory(tmp_path):
    assert nbytes_that_saves_and_loads_keep(tmp_path, 1000) < 4 << 20
