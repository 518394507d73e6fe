"""Calls of the Python package, as programs make them. Never runs: mypy checks it. Each `type: ignore` is a call that must not pass."""

from concurrent.futures import Future
from typing import Any

import numpy
import tessera
import tessera.dcp
import torch
from typing_extensions import assert_type

state: dict[str, Any] = {"w": torch.zeros(3), "step": 1}


def save_and_load() -> None:
    saved = tessera.save(state, "a", format="dcp", keep_last=3, memory="64MiB")
    assert_type(saved, tessera.Saved)
    assert_type(saved.nbytes, int)
    saving = tessera.async_save(state, b"b", base=saved.path, overwrite=True)
    assert_type(saving, Future[tessera.Saved])
    tessera.save(state, "a", keep_last="3")  # type: ignore[arg-type]
    tessera.save(state, "a", form="dcp")  # type: ignore[call-arg]
    own = {"data": tessera.PerRank({"epoch": 3}, "replicate"), "rng": tessera.PerRank(tessera.rng(), "split")}
    loaded = tessera.load({**state, **own}, "a", only=["w"], progress=lambda done, total: None)
    assert_type(loaded.missing, list[str])
    assert_type(loaded.underflows, dict[str, int])
    assert_type(own["data"].value, Any)
    assert_type(tessera.latest_valid("folder").path, str | None)


def look() -> None:
    with tessera.open("a") as checkpoint:
        for name, entry in checkpoint.items():
            assert_type(name, str)
            if isinstance(entry, tessera.Tensor):
                assert_type(entry[0:3], tessera.Tensor)
                assert_type(entry[..., 1].torch(), torch.Tensor)
                assert_type(entry.dtype, str)
                print(entry.numpy("float32").sum(), entry.item(), entry.tobytes(), numpy.asarray(entry))
        print(checkpoint.state_dict(like=state, lazy=True)["w"])
    for problem in tessera.verify("a", values=True):
        assert_type(problem, tessera.Problem)
    for found in tessera.scan("a").names:
        assert_type(found.places[0], tessera.ScannedPlace)


def move() -> None:
    moved = tessera.reshard("a", "b", ranks=8, only="model.*", rename={"model.": ""}, cast="bfloat16")
    assert_type(moved, tessera.Resharded)
    assert_type(moved.ranks[0].nbytes, int)
    tessera.merge({"model": "a", "optim": "b"}, "c.pt", prefer="first")
    tessera.split("a", "b", prefix="model")
    tessera.reshard("a", "b", ranks="8")  # type: ignore[arg-type]
    tessera.merge(["a"], "b", rank=8)  # type: ignore[call-arg]


def through_dcp() -> None:
    tessera.dcp.StorageReader("a", flat_layout="layout.json").reset("b")
    tessera.dcp.StorageWriter("a", keep_last=3).reset("b")


def fail() -> None:
    try:
        tessera.open("a")["w"]
    except tessera.MissingName:
        pass
    except tessera.Error as error:
        assert_type(error.kind, str)
