"""Python jobs on an object store. A test runs each function on some ranks, in forks of its process."""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import python_package  # noqa: F401  (makes the package importable)
import tessera
import tessera.dcp


def save(format, saves):
    """Saves one after the other; each is a URL, a step, keywords, and None or a part of the error."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = lambda tensor: tensor  # noqa: E731
    if ranks > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (ranks,))
        place = lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)])  # noqa: E731
    for url, step, options, expected in saves:
        large = torch.arange(6 << 20, dtype=torch.float32).reshape(3, -1) + step
        state = {"model": {"large": place(large), "small": place(torch.arange(10.0))}, "step": step}
        options = dict(options)
        try:
            if options.pop("in_background", False):
                tessera.async_save(state, url, format=format, **options).result()
            else:
                tessera.save(state, url, format=format, **options)
        except tessera.Error as error:
            assert expected and expected in str(error), error
            print(error)
            continue
        assert expected is None, f"the save to {url} did not fail"
        if rank == 0:
            found = tessera.latest_valid(url.rsplit("/", 1)[0])
            assert found.path == url and not found.skipped, found
            assert tessera.open(url)["model.large"].numpy().tobytes() == large.numpy().tobytes()
            assert tessera.verify(url) == []
        if ranks > 1:
            dist.barrier()
    if ranks > 1:
        dist.destroy_process_group()


def fails(function, kind):
    try:
        function()
    except tessera.Error as error:
        assert error.kind == kind, error
        return str(error)
    raise AssertionError(f"{function} succeeded")


def use_every_function_with_an_endpoint(endpoint, source, folder):
    """AWS_ENDPOINT_URL names a port where nothing answers."""
    at = {"endpoint": endpoint}
    dist.init_process_group("gloo")
    url = "s3://checkpoints/new/named/step-%d"

    def on_rank_0(function):
        if dist.get_rank() == 0:
            function()
        dist.barrier()

    def before_any_endpoint():
        fails(lambda: tessera.open(url % 0), "io")
        message = fails(lambda: tessera.open(url % 0, endpoint="localhost:9000"), "invalid_argument")
        assert "http://localhost:9000" in message and "'localhost:9000'" in message, message
        tessera.open(source, endpoint="localhost:9000")  # local files have no endpoint

    on_rank_0(before_any_endpoint)
    state = {"weight": torch.arange(12.0), "step": 7}
    tessera.save(state, url % 1, **at)
    tessera.async_save(state, url % 2, keep_last=2, **at).result()
    dist.barrier()
    loaded = {"weight": torch.zeros(12), "step": 0}
    tessera.load(loaded, url % 2, **at)
    assert loaded["step"] == 7 and torch.equal(loaded["weight"], state["weight"])

    def others():
        assert tessera.latest_valid(url.rsplit("/", 1)[0], **at).path == url % 2
        assert tessera.open(url % 2, **at)["weight"][3:5].tobytes() == state["weight"][3:5].numpy().tobytes()
        assert tessera.verify(url % 2, **at) == []
        moved = url.replace("step-%d", "moved.pt")
        assert tessera.reshard(source, moved, spool=folder, **at).written
        assert tessera.scan(moved, **at).pickles == 1
        assert tessera.split(moved, folder + "/back", only="*", **at).written
        assert tessera.open(moved).format == "torch"  # a bucket stays where it is

    on_rank_0(others)
    dcp.save(state, storage_writer=tessera.dcp.StorageWriter(url % 3, **at))
    dcp.load(loaded, storage_reader=tessera.dcp.StorageReader(url % 3, **at))
    dist.barrier()
    os._exit(0)  # Gloo's threads can abort an ordinary interpreter exit


def save_with_new_keys(url):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for step, key in ((1, "FIRSTKEY"), (2, "SECONDKEY")):
        os.environ["AWS_ACCESS_KEY_ID"] = key
        tessera.save({f"weight{rank}": torch.arange(12.0) + step}, url % step)
        dist.barrier()
    os._exit(0)  # Gloo's threads can abort an ordinary interpreter exit


def reshard(source, url, folder):
    tessera.reshard(source, url, ranks=2, spool=folder)


def replace(source, url, folder):
    message = fails(lambda: tessera.reshard(source, url, to="native", overwrite=True, spool=folder), "already_exists")
    assert "an interrupted run has left this checkpoint incomplete" in message, message
    assert tessera.reshard(source, url, to="native", overwrite=True, discard=True, spool=folder).written


def read_from_three_servers(one, other, moved):
    first = tessera.open("s3://checkpoints/runs/dcp", endpoint=one)
    second = tessera.open("s3://others/dcp", endpoint=other)
    tensors = [name for name, entry in first.items() if isinstance(entry, tessera.Tensor)]
    for name in tensors:  # the files with elements are opened only now
        assert first[name].tobytes() == second[name].tobytes(), name
    third = tessera.open("s3://checkpoints/runs/dcp", endpoint=moved)
    assert third[tensors[0]].tobytes() == second[tensors[0]].tobytes()
