"""Moves checkpoints with a file for each rank. FSDP2 loads the results on other numbers of ranks."""

import json
import os
import sys

import pytest
import rank_files_peer
import torch
from ckpt_tools import FIXTURES, ROOT, assert_same_state, expectation, flip_a_bit, listing, reshard, run, succeed
from on_ranks import run_function
from python_package import tessera
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

VALID = FIXTURES / "rank_files" / "valid"
ALL = sorted(path for path in VALID.iterdir() if path.is_dir())


def of_model(rows):
    return {row["name"].removeprefix("model."): row for row in rows if row["name"].startswith("model.")}


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_dcp_for_other_ranks_holds_the_same(path, tmp_path):
    """Shows F1, A4. Moves to DCP for five ranks; PyTorch reads all of it."""
    moved = reshard(path, tmp_path / "dcp", "--to", "dcp", "--world-size", "5")
    assert_same_state(listing(moved), expectation(path))
    dcp_to_torch_save(moved, tmp_path / "whole.pt")
    state = torch.load(tmp_path / "whole.pt", weights_only=True)
    found = {name: list(tensor.shape) for name, tensor in state["model"].items()}
    assert found == {name: row["shape"] for name, row in of_model(expectation(path)["tensors"]).items()}


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_the_model_alone_becomes_safetensors(path, tmp_path):
    """Shows F1. safetensors loads the file, whose names are those of the module, and the module loads the tensors."""
    moved = reshard(path, tmp_path / "model.safetensors", "--only", "model", "--rename", "model.=")
    loaded = load_file(moved)
    expected = of_model(expectation(path)["tensors"])
    assert {name: list(tensor.shape) for name, tensor in loaded.items()} == {
        name: row["shape"] for name, row in expected.items()}
    assert sum(tensor.nbytes for tensor in loaded.values()) == sum(row["nbytes"] for row in expected.values())


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
def test_verify_finds_flipped_bits(path, tmp_path):
    """Shows F1, E4. `verify` checks the checksums of all archives."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in path.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    succeed("ckpt-inspect", "verify", copy)
    last = sorted(copy.glob("model_*"))[-1]
    flip_a_bit(last, "/data/3")
    assert run("ckpt-inspect", "verify", copy).returncode == 1


def save_flat_vectors(folder):
    """Saves FSDP1's LOCAL_STATE_DICT, on each rank. Rank 0's whole range belongs to one parameter."""
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = FullyShardedDataParallel(torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 3)), use_orig_params=True,
                                     device_id=torch.device("cpu"))
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        torch.save(model.state_dict(), folder / f"model_world_size_2_rank_{dist.get_rank()}.pt")
    dist.barrier()
    os._exit(0)  # Gloo's threads can abort an ordinary exit


def test_a_flat_vector_is_no_second_name_of_a_parameter(tmp_path):
    """Shows F1. This holds even if a rank's elements of the vector and of the parameter are the same."""
    run_function(save_flat_vectors, 2, tmp_path)
    found = {row["name"]: row["shape"] for row in listing(tmp_path)["tensors"]}
    assert found["model._flat_param"] == [108] and found["model.0.weight"] == [54]  # FSDP1 pads 103 elements


def test_a_flat_vector_beside_its_parameters_is_refused_by_name(tmp_path):
    """Shows F1, E3. use_orig_params=True saves each parameter twice: as each rank's part of it, and in the flat vector."""
    saved = tmp_path / "saved"
    saved.mkdir()
    run_function(save_flat_vectors, 2, saved)
    process = run("ckpt-reshard", saved, tmp_path / "moved", "--to", "dcp")
    assert process.returncode == 3 and "model._flat_param: flat vector: expected a layout that names its parameters" in process.stderr
    (tmp_path / "layout.json").write_text(json.dumps({"schema": 1, "units": [{
        "key": "model._flat_param", "dtype": "float32", "numel_padded": 108,
        "params": [{"fqn": "model.0.weight", "shape": [10, 6], "offset": 0}, {"fqn": "model.0.bias", "shape": [10], "offset": 60},
                   {"fqn": "model.1.weight", "shape": [3, 10], "offset": 72}, {"fqn": "model.1.bias", "shape": [3], "offset": 104}]}]}))
    process = run("ckpt-reshard", saved, tmp_path / "moved", "--to", "dcp", "--flat-layout", tmp_path / "layout.json")
    words = ("model.0.", "found two (does the checkpoint have both the parameter and its flat vector?)")
    assert process.returncode == 3 and all(word in process.stderr for word in words), process.stderr
    assert not (tmp_path / "moved").exists()


def save_as_accelerate_does(folder):
    """Saves on each rank what accelerate saves with LOCAL_STATE_DICT and use_orig_params=False; rank 0 also saves all
    parameters."""
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    sys.path.insert(0, str(ROOT / "docs" / "examples"))
    from write_flat_layout import write_flat_layout

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inner = FullyShardedDataParallel(torch.nn.Linear(10, 3), use_orig_params=False, device_id=torch.device("cpu"))
    model = FullyShardedDataParallel(torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.BatchNorm1d(10), inner),
                                     use_orig_params=False, device_id=torch.device("cpu"))
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        torch.save(model.state_dict(), folder / f"pytorch_model_fsdp_rank{dist.get_rank()}.bin")
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        whole = model.state_dict()
    if dist.get_rank() == 0:
        write_flat_layout(model, folder.parent / "layout.json")
        torch.save(whole, folder.parent / "whole.pt")
    dist.barrier()
    os._exit(0)  # Gloo's threads can abort an ordinary exit


def test_flat_vectors_of_accelerate_become_parameters(tmp_path):
    """Shows F1, F4. All names begin with a prefix from the file names; the layout lacks this prefix."""
    saved = tmp_path / "pytorch_model_fsdp_0"
    saved.mkdir()
    run_function(save_as_accelerate_does, 2, saved)
    loaded = load_file(reshard(saved, tmp_path / "model.safetensors", "--flat-layout", tmp_path / "layout.json",
                               "--rename", "pytorch_model_fsdp.="))
    expected = torch.load(tmp_path / "whole.pt")
    assert loaded.keys() == expected.keys() and len(expected) == 9
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name


def save_on_three_dimensions(folder):
    """Saves tensors of a 2 x 2 x 2 mesh, with uneven rows and columns, on each of eight ranks."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tensor"))
    placements = {"r": Shard(0), "c": Shard(1), "-": Replicate()}
    state = {name: distribute_tensor(tensor, mesh, [Replicate(), *(placements[cut] for cut in cuts)])
             for name, (tensor, cuts) in of_three_dimensions().items()}
    torch.save(state, folder / f"model_world_size_8_rank_{dist.get_rank()}.pt")
    dist.barrier()
    os._exit(0)  # Gloo's threads can abort an ordinary exit


def of_three_dimensions():
    """Returns tensors, and how the last two dimensions of the mesh cut them: `r`: rows, `c`: columns, `-`: not at all."""
    return {f"weight{cuts}": (torch.arange(21.0).reshape(7, 3) + i, cuts) for i, cuts in enumerate(("rc", "cr", "rr", "r-", "-c", "--"))}


def test_meshes_of_three_dimensions_are_joined(tmp_path):
    """Shows F1. Hybrid sharding with tensor parallelism: torch cuts the tensors, Tessera joins them."""
    saved = tmp_path / "saved"
    saved.mkdir()
    run_function(save_on_three_dimensions, 8, saved)
    loaded = load_file(reshard(saved, tmp_path / "model.safetensors", "--only", "model", "--rename", "model.="))
    assert loaded.keys() == of_three_dimensions().keys()
    for name, (tensor, _) in of_three_dimensions().items():
        assert torch.equal(loaded[name], tensor), name


def save_partial(folder):
    """Saves a tensor whose placement is `Partial`, on each rank: the tensor is the sum of the ranks' parts."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    dist.init_process_group("gloo")
    partial = DTensor.from_local(torch.ones(3, 2), init_device_mesh("cpu", (2,)), [Partial()])
    torch.save({"fine": torch.ones(2), "summed": partial}, folder / f"model_world_size_2_rank_{dist.get_rank()}.pt")
    dist.barrier()
    os._exit(0)  # Gloo's threads can abort an ordinary exit


def test_a_sum_that_is_not_formed_is_refused_by_name(tmp_path):
    """Shows F1, E3. With a placement `Partial`, no rank has the tensor."""
    saved = tmp_path / "saved"
    saved.mkdir()
    run_function(save_partial, 2, saved)
    process = run("ckpt-reshard", saved, tmp_path / "moved", "--to", "dcp")
    assert process.returncode == 3 and "summed" in process.stderr and "Partial" in process.stderr, process.stderr
    assert not (tmp_path / "moved").exists()


def save_replicas_that_differ(folder):
    """Saves a tensor with two replicas. The part of each rank consists of the rank's number."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    local = torch.full((2, 2), float(dist.get_rank()))
    w = DTensor.from_local(local, mesh, [Replicate(), Shard(0)], run_check=False)
    torch.save({"w": w}, folder / f"model_world_size_4_rank_{dist.get_rank()}.pt")
    dist.barrier()
    os._exit(0)  # Gloo's threads can abort an ordinary exit


def test_all_parts_come_from_the_first_of_replicas_that_differ(tmp_path):
    """Shows F1."""
    saved = tmp_path / "saved"
    saved.mkdir()
    run_function(save_replicas_that_differ, 4, saved)
    for ranks in (1, 2, 3, 4):
        moved = tmp_path / f"moved{ranks}"
        process = run("ckpt-reshard", saved, moved, "--to", "dcp", "--world-size", str(ranks))
        assert process.returncode == 0 and "model_world_size_4_rank_2.pt: model.w: replicas" in process.stderr, process.stderr
        dcp_to_torch_save(moved, tmp_path / "whole.pt")
        assert torch.load(tmp_path / "whole.pt")["model"]["w"][:, 0].tolist() == [0, 0, 1, 1], ranks
    state = {"model": {"w": torch.empty(4, 2), "other": torch.empty(1)}}
    loaded = tessera.load(state, saved, strict=False)
    assert state["model"]["w"][:, 0].tolist() == [0, 0, 1, 1]
    assert [(note.rule, note.tensor, note.expected) for note in loaded.notes] == [("replicas", "model.w", f"the bytes of rank {rank}")
                                                                                   for rank in (0, 1)]
    with pytest.raises(tessera.Error, match="other"):
        tessera.load(state, saved)
    assert tessera.load({"other": torch.empty(1)}, saved, strict=False).notes == []


def save_stages(folder):
    """Saves two pipeline stages whose tensors have equal names. The ranks of a stage have a mesh of their own."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))["shard"]
    local = {"w": torch.full((4, 2), float(rank)), "equal": torch.full((1,), float(rank % 2)), "large": torch.full((400,), float(rank % 2))}
    sharded = {name: DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False) for name, tensor in local.items()}
    for folder, names in ((folder / "all", ("w", "equal")), (folder / "experts", ("w", "large")), (folder / "equal", ("equal",))):
        folder.mkdir(exist_ok=True)
        torch.save({name: sharded[name] for name in names}, folder / f"model_world_size_4_rank_{rank}.pt")
    dist.barrier()
    os._exit(0)  # Gloo's threads can abort an ordinary exit


def test_stages_with_equal_names_are_refused(tmp_path):
    """Shows F1. They are no replicas: only the first stage would be moved."""
    run_function(save_stages, 4, tmp_path)
    for saved in ("all", "experts"):
        process = run("ckpt-reshard", tmp_path / saved, tmp_path / "moved.safetensors")
        assert process.returncode == 3 and not (tmp_path / "moved.safetensors").exists()
        assert "model_world_size_4_rank_2.pt: model.w: replicas: expected the bytes of rank 0" in process.stderr, process.stderr
        assert "(pipeline stages, or experts? give those of each group names of their own)" in process.stderr
    assert load_file(reshard(tmp_path / "equal", tmp_path / "equal.safetensors"))["model.equal"].tolist() == [0, 1]


def test_a_tensor_that_cannot_be_read_on_one_rank_is_one_refused_value(tmp_path):
    """Shows F1. All other tensors can be moved, and `verify` tells it once."""
    saved = tmp_path / "saved"
    saved.mkdir()
    for rank in range(2):
        torch.save({"w": torch.arange(3)}, saved / f"model_world_size_2_rank_{rank}.pt")
        state = torch.zeros(2) if rank == 1 else torch.zeros(2).to_sparse()
        torch.save({"state": {0: {"exp_avg": state, "tied": state}}}, saved / f"optim_world_size_2_rank_{rank}.pt")
    moved = reshard(saved, tmp_path / "model.safetensors", "--only", "model")
    assert load_file(moved)["model.w"].tolist() == [0, 1, 2]
    process = run("ckpt-reshard", saved, tmp_path / "all.pt")
    assert process.returncode == 3 and "(to leave it out, add --only '!optim.state.0.exp_avg')" in process.stderr, process.stderr
    assert process.stderr.count("optim_world_size_2_rank_0.pt") == 2
    checked = succeed("ckpt-inspect", "verify", saved)
    told = [line for line in checked.splitlines() if "state.0.exp_avg" in line]
    assert len(told) == 1 and "optim_world_size_2_rank_0.pt: optim.state.0.exp_avg: " in told[0], checked


def continue_with_fsdp1(action, folder, losses):
    """Trains with FSDP1 as verl does, and saves or loads a file for each rank. Writes the next losses of this rank."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType

    dist.init_process_group("gloo")
    torch.manual_seed(0 if action == "save" else 1)
    rank = dist.get_rank()
    model = FullyShardedDataParallel(torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)), device_id=torch.device("cpu"),
                                     device_mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-1)
    path = {item: folder / f"{item}_world_size_2_rank_{rank}.pt" for item in ("model", "optim")}

    def train(steps):
        for step in steps:
            loss = model(torch.randn(8, 5, generator=torch.Generator().manual_seed(step))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.item()

    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(),
                                                  ShardedOptimStateDictConfig()):
        if action == "save":
            list(train(range(3)))
            torch.save(model.state_dict(), path["model"])
            torch.save(optimizer.state_dict(), path["optim"])
        else:
            model.load_state_dict(torch.load(path["model"], weights_only=False))
            optimizer.load_state_dict(torch.load(path["optim"], weights_only=False))
    (losses / f"{action}{rank}.json").write_text(json.dumps(list(train(range(3, 6)))))
    dist.barrier()
    os._exit(0)  # Gloo's threads can abort an ordinary exit


def test_fsdp1_continues_with_its_flat_parameters(tmp_path):
    """Shows F1. The state of flat parameters, which FSDP1 keeps under numbers, stays in ordinary vectors."""
    saved = tmp_path / "saved"
    saved.mkdir()
    run_function(continue_with_fsdp1, 2, "save", saved, tmp_path)
    moved = reshard(saved, tmp_path / "moved", "--to", "rank_files", "--device-mesh", "cpu:fsdp")
    run_function(continue_with_fsdp1, 2, "load", moved, tmp_path)
    expected = json.loads((tmp_path / "save0.json").read_text())
    for rank in range(2):
        assert json.loads((tmp_path / f"load{rank}.json").read_text()) == expected
    process = run("ckpt-reshard", saved, tmp_path / "moved4", "--to", "rank_files", "--world-size", "4")
    assert process.returncode == 0 and "which FSDP1 cannot load (move without the optimizer)" in process.stderr, process.stderr


def save_equal_parts(folder):
    """Saves three DTensors of one storage on each rank: a whole tensor twice, and a part of a longer one."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    dist.init_process_group("gloo")
    mesh, local = init_device_mesh("cpu", (2,)), torch.ones(4)
    placed = {"a": Replicate(), "b": Shard(0), "c": Replicate()}
    state = {name: DTensor.from_local(local, mesh, [placement], run_check=False) for name, placement in placed.items()}
    torch.save(state, folder / f"model_world_size_2_rank_{dist.get_rank()}.pt")
    dist.barrier()
    os._exit(0)  # Gloo's threads can abort an ordinary exit


def test_equal_parts_of_different_wholes_are_not_tied(tmp_path):
    """Shows F1, E13."""
    saved = tmp_path / "saved"
    saved.mkdir()
    run_function(save_equal_parts, 2, saved)
    model = torch.load(reshard(saved, tmp_path / "whole.pt"), weights_only=True)["model"]
    assert {name: list(tensor.shape) for name, tensor in model.items()} == {"a": [4], "b": [8], "c": [4]}
    assert model["a"].data_ptr() == model["c"].data_ptr() != model["b"].data_ptr()


@pytest.mark.parametrize("name", [path.name for path in ALL if path.name.startswith("fsdp1") and "gpu" not in path.name])  # has names
def test_flat_state_of_fsdp1_gets_names_and_shapes(name, tmp_path):
    """Shows F1. State gets the name and the shape of its parameter, as DCP and FSDP2 need it."""
    held = {row["name"]: row for row in expectation(VALID / name)["tensors"]}
    moved = reshard(VALID / name, tmp_path / "dcp", "--to", "dcp", "--world-size", "3", "--optimizer-params", "auto")
    found = {row["name"]: row for row in listing(moved)["tensors"]}
    order = ["scale", "up.weight", "up.bias", "down.weight", "down.bias", "norm.weight", "norm.bias"]
    for number, parameter in enumerate(order):
        for kind in ("exp_avg", "exp_avg_sq"):
            state = found[f"optim.state.{parameter}.{kind}"]
            assert state["shape"] == held[f"model.{parameter}"]["shape"]
            assert state["sha256"] == held[f"optim.state.{number}.{kind}"]["sha256"]
    dcp_to_torch_save(moved, tmp_path / "whole.pt")
    state = torch.load(tmp_path / "whole.pt", weights_only=True)["optim"]["state"]
    assert list(state["down.weight"]["exp_avg"].shape) == [6, 10]


def run_peer(action, folder, form, ranks, losses):
    """Returns the losses on each rank, which are written to a folder."""
    losses.mkdir(exist_ok=True)
    run_function(rank_files_peer.main, ranks, action, folder, form, losses)
    return [json.loads((losses / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module", params=["numbers", "names"])
def saved(request, tmp_path_factory):
    """Returns what four ranks saved, the form of the optimizer's state, and the losses of the following steps."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, request.param, run_peer("save", folder, request.param, 4, tmp_path_factory.mktemp("losses"))[0]


@pytest.mark.parametrize("between, ranks", [(None, 2), (None, 3), (None, 4), ("native", 3), ("dcp", 2)])
def test_fsdp2_continues_on_other_ranks(saved, tmp_path, between, ranks):
    """Shows F1. A run of four ranks continues on 2 and 3 with the same losses, from files that Tessera wrote."""
    folder, form, expected = saved
    if form == "numbers" and between == "dcp":
        pytest.skip("DCP makes text of the optimizer's numbers")
    source = reshard(folder, tmp_path / between, "--to", between) if between else folder
    source = reshard(source, tmp_path / "moved", "--to", "rank_files", "--world-size", ranks, "--device-mesh", "cpu:fsdp")
    if ranks == 4:
        assert_same_state(listing(source), listing(folder))
    for losses in run_peer("load", source, form, ranks, tmp_path / "losses"):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_fsdp2_continues_on_more_ranks(tmp_path):
    """Shows F1. Three ranks continue from what two ranks saved."""
    saved = tmp_path / "saved"
    saved.mkdir()
    expected = run_peer("save", saved, "names", 2, tmp_path / "losses")[0]
    moved = reshard(saved, tmp_path / "moved", "--to", "rank_files", "--world-size", 3, "--device-mesh", "cpu:fsdp")
    for losses in run_peer("load", moved, "names", 3, tmp_path / "losses"):
        assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name)
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_files_for_other_ranks_hold_the_same(path, tmp_path, ranks):
    """Shows F1, A2. Moves to another number of ranks, and back to one file."""
    moved = reshard(path, tmp_path / "moved", "--to", "rank_files", "--world-size", ranks)
    assert_same_state(listing(moved), expectation(path))
    whole = reshard(moved, tmp_path / "whole.pt")
    assert_same_state(listing(whole), expectation(path))


def test_hybrid_shards_are_loaded_as_dtensors(tmp_path):
    """Shows F1. The mesh has two axes with names: two replicas of two shards each."""
    source = tmp_path / "model.pt"
    torch.save({"w": torch.arange(15.0).reshape(5, 3)}, source)
    moved = reshard(source, tmp_path / "moved", "--to", "rank_files", "--strategy", "hybrid:2x2", "--rename", "=model.",
                    "--device-mesh", "cpu:ddp,fsdp")
    state = torch.load(moved / "model_world_size_4_rank_3.pt", weights_only=False)
    placed = state["w"]
    assert placed.device_mesh.mesh.tolist() == [[0, 1], [2, 3]] and placed.device_mesh.mesh_dim_names == ("ddp", "fsdp")
    assert str(placed.placements) == "(Replicate(), Shard(dim=0))"
    assert placed.placements[0].is_replicate()  # the process crashes if the object is not initialised
    assert placed.to_local().equal(torch.arange(15.0).reshape(5, 3)[3:])


def test_a_column_cut_by_columns_is_a_dtensor_on_every_rank(tmp_path):
    """Shows F1. Rank 0 has the only column of `lora_B`, as of a LoRA of rank 1; rank 1 has an empty part."""
    source = tmp_path / "model.pt"
    torch.save({"lora_B": torch.arange(4.0).reshape(4, 1), "w": torch.ones(4, 2)}, source)
    moved = reshard(source, tmp_path / "moved", "--to", "rank_files", "--world-size", 2, "--strategy", "dim1", "--rename", "=model.",
                    "--device-mesh", "cpu")
    for rank in range(2):
        placed = torch.load(moved / f"model_world_size_2_rank_{rank}.pt", weights_only=False)["lora_B"]
        assert str(placed.placements) == "(Shard(dim=1),)"
        assert placed.to_local().equal(torch.arange(4.0).reshape(4, 1)[:, rank:])


def test_state_of_a_parameter_whose_name_begins_with_a_number_is_not_joined(tmp_path):
    """Shows F2. `nn.Sequential` gives such names. If the parameter is whole on each rank, so is its state: no flat vector of FSDP1."""
    state = {"model": {"0.weight": torch.arange(8.0).reshape(4, 2), "1.bias": torch.arange(3.0)}}
    state["optim"] = {"state": {name: {"exp_avg": weight + 1} for name, weight in state["model"].items()}}
    torch.save(state, tmp_path / "source.pt")
    (tmp_path / "mesh.json").write_text(json.dumps({"schema": 1, "mesh": [2], "rules": [
        {"names": "*0.weight*", "placements": ["Shard(0)"]}, {"names": "*", "placements": ["Replicate"]}]}))
    folder = reshard(tmp_path / "source.pt", tmp_path / "ranks", "--to", "rank_files", "--mesh", tmp_path / "mesh.json")
    found = torch.load(reshard(folder, tmp_path / "back.pt"), weights_only=True)
    for name, weight in state["model"].items():
        assert found["optim"]["state"][name]["exp_avg"].equal(weight + 1), name


def test_state_under_numbers_that_is_whole_beside_sharded_state_is_not_joined(tmp_path):
    """Shows F2. FSDP2 shards all state but that of parameters which it ignores."""
    state = {"model": {"w": torch.ones(4, 2)}, "optim": {"state": {number: {"exp_avg": torch.ones(4, 2)} for number in (0, 1)}}}
    torch.save(state, tmp_path / "source.pt")
    folder = reshard(tmp_path / "source.pt", tmp_path / "ranks", "--to", "rank_files", "--world-size", 2)
    for file in folder.glob("optim*"):
        optimizer = torch.load(file, weights_only=False)
        optimizer["state"][1]["exp_avg"] = torch.arange(3.0)
        torch.save(optimizer, file)
    found = torch.load(reshard(folder, tmp_path / "back.pt"), weights_only=True)
    assert found["optim"]["state"][1]["exp_avg"].tolist() == [0, 1, 2]


def save_flat_state(folder):
    """Saves a sharded model, and on each rank state with a vector of the rank's elements, as FSDP1 has it. Numbers 0 and 4 have
    the codes of an 8-bit optimizer, with one scale for each block of codes."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    model = {"a": DTensor.from_local(torch.ones(4), mesh, [Shard(0)]), "b": DTensor.from_local(torch.ones(3), mesh, [Shard(0)])}
    torch.save(model, folder / f"model_world_size_2_rank_{rank}.pt")
    codes = {"state1": torch.arange(4, dtype=torch.uint8) + rank, "unchanged": torch.zeros(4, dtype=torch.uint8),
             "absmax1": torch.ones(1) + rank, "qmap1": torch.arange(256.0), "scale": torch.ones(1)}
    state = {0: codes, 1: {"unchanged": torch.zeros(3)}, 2: {"rotation": torch.arange(3.0)},
             3: {"exp_avg": torch.ones(3) + rank, "exp_avg_diff": torch.ones(3) - rank, "norms": torch.ones(2) + rank},
             4: {"__bnb_optimizer_quant_state__": {name: codes[name].clone() for name in ("state1", "absmax1")}},
             5: {"exp_avg": torch.arange(4, dtype=torch.uint8) + rank}, 6: {"m": torch.ones(3) + rank, "n": torch.ones(5) + rank}}
    torch.save({"state": state}, folder / f"optim_world_size_2_rank_{rank}.pt")
    dist.barrier()
    os._exit(0)  # Gloo's threads can abort an ordinary exit


def test_only_vectors_of_one_element_for_each_element_are_joined(tmp_path):
    """Shows A2, F1. Equal vectors are joined only if they can be ranges of a vector that still has its first value. Codes, scales,
    and vectors of another length than state of a known name, stay on their ranks. Codes and scales come back from rank files."""
    source = tmp_path / "saved"
    source.mkdir()
    run_function(save_flat_state, 2, source)
    shapes = {row["name"].removeprefix("optim.state."): row["shape"] for row in listing(source)["tensors"] if "optim" in row["name"]}
    inner = "4.__bnb_optimizer_quant_state__"
    own = {"0.state1": [4], "0.absmax1": [1], "3.norms": [2], f"{inner}.state1": [4], f"{inner}.absmax1": [1], "5.exp_avg": [4],
           "6.n": [5]}
    expected = {"0.unchanged": [4], "0.qmap1": [256], "0.scale": [1], "1.unchanged": [6], "2.rotation": [3],
                "3.exp_avg": [6], "3.exp_avg_diff": [6], "6.m": [6]} | own
    assert shapes == expected | {f"per_rank.1.optim.state.{name}": shape for name, shape in own.items()}
    document = json.loads(succeed("ckpt-reshard", source, tmp_path / "moved", "--to", "rank_files", "--json"))
    assert [note["found"] for note in document["notes"] if "8-bit" in note["found"]] == [
        "8 vectors of other state, as of 8-bit optimizers, such as 'optim.state.0.absmax1' (each rank keeps its own, of use only for "
        "the same number of ranks)"]
    for rank in range(2):
        before, after = (torch.load(folder / f"optim_world_size_2_rank_{rank}.pt", weights_only=False)["state"]
                         for folder in (source, tmp_path / "moved"))
        for name in own.keys() - {"3.norms", "6.n"}:  # codes and their scales
            *path, last = name.split(".")
            a, b = before[int(path[0])], after[int(path[0])]
            a, b = (a[path[1]], b[path[1]]) if path[1:] else (a, b)
            assert a[last].equal(b[last]) and a[last].dtype == b[last].dtype, (rank, name)


def test_state_of_any_name_comes_back_from_rank_files(tmp_path):
    """Shows A2, F1. State under numbers whose name says nothing, as a vector; two moves to rank files."""
    state = {"model": {"w": torch.ones(4, 2), "b": torch.ones(4)}}
    state["optim"] = {"state": {0: {"m": torch.ones(4, 2)}, 1: {"m": torch.arange(4.0)}}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    torch.save(state, tmp_path / "source.pt")
    folder = reshard(tmp_path / "source.pt", tmp_path / "two", "--to", "rank_files", "--world-size", 2)
    again = reshard(folder, tmp_path / "four", "--to", "rank_files", "--world-size", 4)
    for each in (folder, again):
        succeed("ckpt-inspect", "diff", tmp_path / "source.pt", each)


@pytest.mark.parametrize("has_model", [True, False], ids=["replicated model", "no model"])
def test_state_under_numbers_without_a_sharded_model_is_not_joined(has_model, tmp_path):
    """Shows A2, F1. Vectors without a shard beside them, as a plain optimizer has them. An earlier entry of the folder
    must not make a difference."""
    for rank in range(2):
        model = {"a": torch.ones(3), "b": torch.zeros(2)}
        state = {"exp_avg": torch.ones(2), "exp_avg_sq": torch.full((2,), float(rank))}
        if has_model:
            torch.save(model, tmp_path / f"model_world_size_2_rank_{rank}.pt")
        torch.save({"state": {0: state}}, tmp_path / f"optim_world_size_2_rank_{rank}.pt")
    shapes = {row["name"]: row["shape"] for row in listing(tmp_path)["tensors"] if ".state." in row["name"]}
    assert shapes == {"optim.state.0.exp_avg": [2], "optim.state.0.exp_avg_sq": [2],
                      "per_rank.1.optim.state.0.exp_avg_sq": [2]}


def test_items_of_a_list_that_differ_come_back_from_one_file(tmp_path):
    """Shows F1. If only some items of a list differ between ranks, and if all do. The tensors of a rank are tied."""
    source = tmp_path / "saved"
    source.mkdir()

    def lists(rank):
        tensor = torch.arange(3) + rank
        return {"last": [1, 2, tensor], "value": [5, 6 + rank, torch.ones(1)], "all": [rank, tensor, [rank, tensor]]}

    for rank in range(3):
        torch.save(lists(rank), source / f"extra_state_world_size_3_rank_{rank}.pt")
    back = reshard(reshard(source, tmp_path / "whole.pt"), tmp_path / "back", "--to", "rank_files", "--world-size", 3)
    for rank in range(3):
        held = torch.load(back / f"extra_state_world_size_3_rank_{rank}.pt")
        assert repr(held) == repr(lists(rank))


def test_keys_have_the_order_of_the_lowest_rank(tmp_path):
    source = tmp_path / "saved"
    source.mkdir()
    for rank, keys in enumerate(("bdac", "abced", "edcba")):
        torch.save({key: torch.ones(2) for key in keys}, source / f"model_world_size_3_rank_{rank}.pt")
    assert "".join(torch.load(reshard(source, tmp_path / "whole.pt"))["model"]) == "bdace"  # e: the fourth key, as on rank 1


def test_files_with_empty_dicts_are_told(tmp_path):
    """Shows A2. No entry stands for an empty dict that is all of a file."""
    source = tmp_path / "saved"
    source.mkdir()
    for rank in range(2):
        torch.save({"w": torch.ones(3, 2)}, source / f"model_world_size_2_rank_{rank}.pt")
        torch.save({}, source / f"optim_world_size_2_rank_{rank}.pt")
        torch.save({"rng": 1} if rank else {}, source / f"extra_state_world_size_2_rank_{rank}.pt")
    document = json.loads(succeed("ckpt-reshard", source, tmp_path / "moved.pt", "--json"))
    assert [note["found"] for note in document["notes"] if "empty" in note["found"]] == [
        "only empty dicts in the files of 'optim' (left out by a move)"]
    assert set(torch.load(tmp_path / "moved.pt")) == {"model", "extra_state"}


@pytest.mark.parametrize("form", ["native", "dcp"])
def test_tied_tensors_of_each_rank_come_back(form, tmp_path):
    """Shows F1, A2. DCP stores tied tensors under each name, also those that a rank has for itself."""
    source = tmp_path / "saved"
    source.mkdir()
    states = [{"a": tensor, "b": [tensor], "c": {0: tensor}} for tensor in (torch.arange(3), torch.arange(3), torch.arange(3) + 9)]
    for rank, state in enumerate(states):
        torch.save(state, source / f"extra_state_world_size_3_rank_{rank}.pt")
    between = reshard(source, tmp_path / "between", "--to", form)
    back = reshard(between, tmp_path / "back", "--to", "rank_files", "--world-size", 3)
    for rank, state in enumerate(states):
        held = torch.load(back / f"extra_state_world_size_3_rank_{rank}.pt")
        assert repr(held) == repr(state).replace("{0:", "{'0':" if form == "dcp" else "{0:")


@pytest.mark.parametrize("shape, form", [((), None), ((1,), None), ((1,), "model.pt"), ((1, 4), "native"), ((16,), None)])
def test_tensors_of_each_rank_stay_whole_on_their_rank(shape, form, tmp_path):
    """Shows F1. Ranks replicate the model, as DDP does, and each rank also has a tensor of its own. Also moves through
    one file."""
    source = tmp_path / "saved"
    source.mkdir()
    for rank in range(2):
        torch.save({"w": torch.ones(3, 2)}, source / f"model_world_size_2_rank_{rank}.pt")
        torch.save({"rng": torch.full(shape, 100.0 + rank)}, source / f"extra_state_world_size_2_rank_{rank}.pt")
    between = reshard(source, tmp_path / form) if form else source
    for ranks in (2, 3):
        moved = reshard(between, tmp_path / f"moved{ranks}", "--to", "rank_files", "--world-size", ranks)
        for rank in range(ranks):
            held = torch.load(moved / f"extra_state_world_size_{ranks}_rank_{rank}.pt")["rng"]
            assert type(held) is torch.Tensor and held.equal(torch.full(shape, 100.0 + (rank == 1)))


def test_entries_of_each_rank_follow_a_rename(tmp_path):
    """The source has `loader.position` and `per_rank.<rank>.loader.position`."""
    source = FIXTURES / "torch_checkpointing" / "valid" / "fsdp2"
    moved = reshard(source, tmp_path / "moved", "--to", "rank_files", "--rename", "loader.=extra_state.data.")
    for rank in range(3):
        expected = torch.load(source / f"loader_{rank}.pt", weights_only=True)
        found = torch.load(moved / f"extra_state_world_size_3_rank_{rank}.pt", weights_only=False)
        assert found["data"]["position"] == expected["position"]
    positions = {torch.load(source / f"loader_{rank}.pt", weights_only=True)["position"] for rank in range(3)}
    assert len(positions) == 3
    names = reshard(source, tmp_path / "all.pt", "--rename", "=run.")
    state = torch.load(names, weights_only=True)
    assert set(state) == {"run", "per_rank"}
    assert "position" in state["per_rank"]["1"]["run"]["loader"]


def test_entries_of_each_rank_follow_a_pattern(tmp_path):
    source = FIXTURES / "torch_checkpointing" / "valid" / "fsdp2"
    moved = reshard(source, tmp_path / "moved", "--to", "rank_files", "--only", "loader", "--rename", "loader=extra_state")
    for rank in range(3):
        expected = torch.load(source / f"loader_{rank}.pt", weights_only=True)
        found = torch.load(moved / f"extra_state_world_size_3_rank_{rank}.pt", weights_only=False)
        assert found["position"] == expected["position"]
    others = reshard(source, tmp_path / "others.pt", "--only", "!loader")
    assert "loader" not in str(torch.load(others, weights_only=True).keys()) and "loader" not in str(torch.load(others)["per_rank"])
    per_rank = reshard(source, tmp_path / "rank.pt", "--only", "per_rank.1", "--only", "!*position")
    assert set(torch.load(per_rank, weights_only=True)) == {"per_rank"}


@pytest.mark.parametrize("make", [torch.optim.Adafactor, torch.optim.LBFGS], ids=["adafactor", "lbfgs"])
@pytest.mark.parametrize("strategy", ["dim0", "dim1", "hybrid:1x2", "replicated"])
def test_vectors_of_a_plain_optimizer_come_back(make, strategy, tmp_path):
    """The state is under numbers, and has vectors that are not of the parameter's shape."""
    model = torch.nn.Linear(3, 4, bias=make is torch.optim.LBFGS)
    optimizer = make(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(5, 3)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    state = optimizer.state_dict()
    for each in state["state"].values():  # a vector in place of a row: what other kinds of Adafactor keep
        each.update({name: row.flatten() for name, row in each.items() if name in ("row_var", "col_var")})
    torch.save({"model": model.state_dict(), "optim": state}, tmp_path / "s.pt")
    files = reshard(tmp_path / "s.pt", tmp_path / "files", "--to", "rank_files", "--world-size", 2, "--strategy", strategy)
    back = torch.load(reshard(files, tmp_path / "back.pt"), weights_only=True)
    assert repr(back["optim"]["state"]) == repr(state["state"])


def test_entries_of_each_rank_get_the_prefix_of_a_merge(tmp_path):
    """The value of each rank stays its own, as with `--rename =a.`."""
    source = tmp_path / "saved"
    source.mkdir()
    for rank in range(2):
        torch.save({"w": torch.ones(3, 2), "n": rank}, source / f"world_size_2_rank_{rank}.pt")
    torch.save({"v": torch.ones(3)}, tmp_path / "other.pt")
    other = f"b={tmp_path / 'other.pt'}"
    succeed("ckpt-reshard", "merge", f"a={source}", other, tmp_path / "merged", "--to", "rank_files")
    for rank in range(2):
        held = torch.load(tmp_path / "merged" / f"world_size_2_rank_{rank}.pt", weights_only=False)
        assert set(held) == {"a", "b"} and held["a"]["n"] == rank
