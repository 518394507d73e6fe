"""Moves a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from . import _core
from ._errors import Error, Problem
from ._paths import PathLike, at_least_one, optional_path_bytes, path_bytes
from ._verify import DEFAULT_MEMORY

MAX_LISTED = 100  # problems in an Error's text; all are in its `problems`


class Resharded(NamedTuple):
    """What a move wrote, or with `dry_run` would have written."""

    source_format: str
    format: str
    world_size: int
    num_tensors: int
    num_values: int
    num_aliases: int
    nbytes: int  # of tensors, before compression
    written: bool
    notes: list[Problem]  # what a relaxation let pass


def reshard(source: PathLike, destination: PathLike, *, to: str | None = None, ranks: int | None = None,
            world_size: int | None = None, strategy: str | None = None, plan: PathLike | None = None,
            units: PathLike | None = None, flat_layout: PathLike | None = None, compress: str = "none",
            only: str | Sequence[str] = (), rename: Mapping[str, str] | None = None,
            drop_optimizer: bool = False, optimizer_names: str = "as-stored", cast: Any = None,
            max_shard_size: int | None = None,
            allow_missing: bool = False, allow_lossy: bool = False, memory: int = DEFAULT_MEMORY,
            threads: int | None = None, dry_run: bool = False, overwrite: bool = False,
            progress: Callable[[int, int], object] | None = None) -> Resharded:
    """Moves a checkpoint between world sizes, sharding strategies and formats, as ckpt-reshard does.

    Bytes are streamed in bounded memory and checked against their checksums; the destination appears whole or not at
    all. Without ranks, strategy and plan the pieces stay as they are; ranks alone means the strategy dim0.

    to: "native", "safetensors", "dcp" or "torch"; None: as the destination's name suggests.
    ranks, or world_size, which is the same: ranks to write for.
    strategy: "replicated", "flat" (FSDP1), "dim0" (FSDP2), "hybrid:AxB", "hybrid-flat:AxB".
    plan: a plan of embedding tables, a JSON file.
    units: the units for flat, a JSON file, where the source records none.
    flat_layout: what the flat vectors of FSDP1 in the source are made of, a JSON file.
    compress: "none", "zstd" or "zstd:LEVEL"; native only.
    only: a glob of names, or several; "!GLOB" leaves out.
    rename: {FROM: TO}, leading parts of names.
    drop_optimizer: leave out optimizers' state and param_groups.
    optimizer_names: "as-stored", "canonical" or "torchrec".
    cast: the dtype (torch's, or its name) that floating tensors get, scalar optimizer state aside.
    max_shard_size: the most bytes in one file; safetensors only.
    allow_missing: leave out what is incomplete or not in the source.
    allow_lossy: merge row-wise state that is kept per column shard.
    memory: bytes for buffers.
    threads: None for as many as there are cores.
    dry_run: plan, and write nothing.
    overwrite: replace the destination when the new one is complete.
    progress: called with the bytes done and the bytes to do; an exception out of it stops the move, as Ctrl-C does.

    Work that ckpt-reshard has kept for the destination is refused: its --resume goes on with it.

    Raises Error; of kind "mismatch" with all `problems` where the source cannot be moved as asked.
    """
    if ranks is not None and world_size is not None:
        raise ValueError(f"ranks: expected one of ranks and world_size, found both ({ranks} and {world_size})")
    result = _core.reshard(
        path_bytes(source), path_bytes(destination), to=to,
        world_size=at_least_one("ranks", ranks) or at_least_one("world_size", world_size), strategy=strategy or "",
        plan=optional_path_bytes(plan), units=optional_path_bytes(units), flat_layout=optional_path_bytes(flat_layout),
        compress=compress, only=[only] if isinstance(only, str) else list(only),
        rename=_renames(rename or {}), optimizer_names=optimizer_names,
        cast=None if cast is None else str(cast), max_shard_size=at_least_one("max_shard_size", max_shard_size),
        drop_optimizer=drop_optimizer, allow_missing=allow_missing, allow_lossy=allow_lossy, memory=at_least_one("memory", memory),
        threads=at_least_one("threads", threads), dry_run=dry_run, overwrite=overwrite, progress=progress)
    problems = tuple(Problem(*row) for row in result.pop("problems"))
    if problems:
        raise _refused(os.fsdecode(source), problems)
    notes = [Problem(*row) for row in result.pop("notes")]
    return Resharded(**result, notes=notes)


def _renames(renames: Mapping[str, str]) -> list[tuple[str, str]]:
    if not isinstance(renames, Mapping):
        raise TypeError(f"rename: expected a mapping of FROM to TO, found {type(renames).__name__}")
    if "" in renames:
        raise ValueError("rename: expected the leading part of a name, found an empty one")
    return list(renames.items())


def _refused(source: str, problems: tuple[Problem, ...]) -> Error:
    lines = [str(problem) for problem in problems[:MAX_LISTED]]
    if len(problems) > MAX_LISTED:
        lines.append(f"and {len(problems) - MAX_LISTED} more")
    first = problems[0] if len(problems) == 1 else None
    message = lines[0] if first else "\n  ".join([f"{source}: {len(problems)} problems:", *lines])
    return Error(message, kind="mismatch", path=source, tensor=first.tensor if first else None, problems=problems)
