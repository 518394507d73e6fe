"""Moves checkpoints: one, a subset of one, or several into one."""

from __future__ import annotations

import operator
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, cast

from . import _core
from ._arguments import (PathLike, at_least_one, flag, name_bytes, names_bytes, nbytes,
                         optional_path_bytes, optional_text, path_bytes, refuse_type, settings, text)
from ._errors import Problem, refused
from ._progress import Progress, progress_function

if TYPE_CHECKING:
    from typing_extensions import Unpack


class RankShare(NamedTuple):
    """The pieces and bytes that one rank writes."""

    rank: int
    pieces: int
    nbytes: int


class Overflow(NamedTuple):
    """The numbers of one tensor that were too large for the dtype of a cast."""

    tensor: str  # its name in the destination
    elements: int
    largest: float  # the largest magnitude of these numbers


class ExtraFile(NamedTuple):
    """A file beside the checkpoint, such as config.json, that was copied."""

    name: str
    nbytes: int
    edit: str | None  # what was changed in it: "torch_dtype: float32 to bfloat16"


class LeftFile(NamedTuple):
    """A file or folder beside the checkpoint that was not copied."""

    name: str
    why: str  # "looks like a checkpoint file"


class Resharded(NamedTuple):
    """The result of a move; with `dry_run`, what the move would write."""

    source_format: str
    format: str
    world_size: int
    num_tensors: int
    num_values: int
    num_aliases: int
    nbytes: int  # of tensors, before compression
    written: bool
    kept_nbytes: int  # how many of nbytes an interrupted move had already written
    plan: str  # a digest of the plan; equal plans have the same digest
    ranks: list[RankShare]  # one for each rank, in order
    extra_files: list[ExtraFile]  # by name
    left_files: list[LeftFile]  # by name
    notes: list[Problem]  # what allow_missing, allow_lossy or as_is permitted, and objects that were read as dicts
    overflows: list[Overflow]  # numbers that were too large for the cast, if on_overflow allows them
    underflows: dict[str, int]  # by tensor of the destination: how many elements that were not zero the cast made zero
    changes: dict[str, int]  # how often each kind of change by the formats happened: the `changes` of ckpt-reshard --json
    left_out: dict[str, int]  # how many tensors, values and aliases only, prefix and drop_optimizer left out
    uncast: int  # how many floating-point and complex tensors of another dtype the cast did not change
    linked_nbytes: int = 0  # with base: how many of nbytes are in files that are shared with the base
    missing_parts: list[int] = []  # with part: the parts that are not complete yet; if there are any, written is False


class MoveOptions(TypedDict, total=False):
    """The keywords that `merge` and `split` share with `reshard`. The docstring of `reshard` describes them."""

    to: str | None
    ranks: int | None
    world_size: int | None
    strategy: str | None
    plan: PathLike | None
    mesh: PathLike | None
    like: PathLike | None
    units: PathLike | None
    as_dict: str | Sequence[str]
    compress: str
    base: PathLike | None
    changed_rows: bool
    only: str | Sequence[str]
    rename: Mapping[str, str] | None
    drop_optimizer: bool
    optimizer_params: PathLike | None
    optimizer_names: str
    recipe: PathLike | None
    inverse: bool
    set: Mapping[str, int | str] | None
    cast: Any
    on_overflow: str
    max_shard_size: int | str | None
    device_mesh: str
    allow_missing: bool
    allow_lossy: bool
    as_is: bool
    extra_files: str
    extra_files_from: PathLike | None
    extra_files_limit: int | str
    memory: int | str
    threads: int | None
    spool: PathLike | None
    endpoint: str | None
    dry_run: bool
    overwrite: bool
    resume: bool
    discard: bool
    part: int | None
    parts: int | None
    take_over: bool
    progress: Progress


def reshard(source: PathLike, destination: PathLike, *, to: str | None = None, ranks: int | None = None,
            world_size: int | None = None, strategy: str | None = None, plan: PathLike | None = None,
            mesh: PathLike | None = None, like: PathLike | None = None,
            units: PathLike | None = None, flat_layout: PathLike | None = None, as_dict: str | Sequence[str] = (),
            compress: str = "none", base: PathLike | None = None, changed_rows: bool = False,
            only: str | Sequence[str] = (), rename: Mapping[str, str] | None = None,
            drop_optimizer: bool = False, optimizer_params: PathLike | None = None,
            optimizer_names: str = "as-stored", recipe: PathLike | None = None, inverse: bool = False,
            set: Mapping[str, int | str] | None = None, cast: Any = None,
            on_overflow: str = "refuse", max_shard_size: int | str | None = None, device_mesh: str = "",
            allow_missing: bool = False, allow_lossy: bool = False, as_is: bool = False, extra_files: str = "carry",
            extra_files_from: PathLike | None = None, extra_files_limit: int | str = _core.DEFAULT_EXTRA_FILES_NBYTES,
            memory: int | str = _core.DEFAULT_MEMORY_NBYTES,
            threads: int | None = None, spool: PathLike | None = None, endpoint: str | None = None,
            dry_run: bool = False, overwrite: bool = False,
            resume: bool = False, discard: bool = False, part: int | None = None, parts: int | None = None,
            take_over: bool = False, progress: Progress = None) -> Resharded:
    """Moves a checkpoint between world sizes, sharding strategies and formats, as ckpt-reshard does.

    Copies the bytes in bounded memory and checks them against their checksums. The destination appears only when it
    is complete. Without ranks, strategy, plan, mesh and like, tensors keep the pieces that they have in the source.
    If only ranks is given, the strategy is dim0.

    to: "native", "safetensors", "dcp", "torch", "deepspeed", "megatron" or "rank_files"; None: by the destination's name
        (".safetensors"; ".pt", ".pth" and ".bin" are torch; all others native).
    ranks, or world_size, which is the same: the number of ranks to write for.
    strategy: "replicated", "flat" (FSDP1), "dim0" (FSDP2), "dim1", "hybrid:AxB", "hybrid-flat:AxB" (A replicas of B ranks).
    plan: a JSON file with the plan of the embedding tables.
    mesh: a JSON file with a mesh of ranks, and for each pattern of names the dimension that each axis of the mesh cuts.
    like: another checkpoint; each tensor is cut as that checkpoint cuts the tensor of the same name.
    units: a JSON file with the flat units (the parameters of each flat parameter) for the strategies flat and
        hybrid-flat; None: those that the source records.
    flat_layout: a JSON file that lists the parameters in the flat vectors of the source (FSDP1).
    as_dict: a class, or several, such as "argparse.Namespace": its objects are read as dicts of their attributes.
    compress: "none", "zstd" or "zstd:LEVEL"; native format only.
    base: an older checkpoint on the same file system. Writes only what differs from it; the rest becomes hard links to its
        files. You may remove the older checkpoint later. Native format only.
    changed_rows: with base: if only some rows of a table differ, writes these rows alone.
    only: globs of names, one or several, with all names below them; "=GLOB" takes no names below, "!GLOB" leaves names out.
    rename: {FROM: TO} replaces FROM at the start of names by TO; {"": TO} puts TO before every name.
    drop_optimizer: leave out optimizer state and param_groups.
    optimizer_params: gives names to state that an optimizer of PyTorch keeps under numbers: a JSON file that lists the
        names of its parameters in its order, or "auto", which finds them by order and shapes ("./auto" is a file).
        "numbers" is the opposite: the state under numbers, as optimizer.state_dict() has it.
    optimizer_names: the names of the state of fused optimizers of tables: "as-stored", "canonical" or "torchrec".
    recipe: a JSON file with rules that give the tensors other names and shapes (docs/recipes.md).
    inverse: apply the recipe backwards, from its new names to the old ones.
    set: {NAME: NUMBER} gives values to variables of the recipe; {"prefix": TEXT} puts TEXT before all names in its rules.
    cast: the dtype (torch's, or its name) to which floating-point tensors are converted: parameters, buffers, and
        optimizer state with one number per element or per row of its parameter. Tensors without dimensions keep their
        dtype.
    on_overflow: "refuse", "saturate" or "infinity": what a cast does with numbers that are too large. "refuse"
        raises Error, "saturate" takes the largest number of the dtype, "infinity" makes them infinite (NaN in
        float8_e4m3fn).
    max_shard_size: the largest size of one file, as a number of bytes or a text such as "5GB"; a larger tensor gets a file
        of its own; safetensors only.
    device_mesh: device type and axis names of the trainer's mesh, to write into each rank's file, such as "cuda:ddp,fsdp"
        or "cpu"; "" stands for "cuda:fsdp"; rank_files only.
    allow_missing: leave out tensors and values that are incomplete or missing in the source.
    allow_lossy: allow merging row-wise optimizer state (one number per row) of several column shards by a weighted
        mean, which loses the shards' own numbers.
    as_is: move one part of a checkpoint, such as the file of one rank, as if it were whole.
    extra_files: "carry" copies the other files in the source's folder (config.json, a tokenizer) into the destination's
        directory, "leave" does not copy them, "refuse" raises an error that names them.
    extra_files_from: a folder whose files are copied instead of those of the source. A recipe takes its variables from the
        config.json there if the source has none.
    extra_files_limit: the largest size of all such files together. If they are larger, the largest files are not copied.
    memory: bytes for all buffers, as a number or a size such as "64MiB".
    threads: the number of threads; None: the number of cores, at most 16.
    spool: a folder for the files of a destination s3://… before they are uploaded; None: TMPDIR, or /tmp.
    endpoint: the S3 server for s3:// paths, as for `open`.
    dry_run: plan the move, and raise the errors that it would raise at its start; write nothing.
    overwrite: replace the destination once the new one is complete. A RuntimeWarning names an old checkpoint that could
        not be removed.
    resume: resume the work of an interrupted call or an interrupted ckpt-reshard run, if there is any. If this call is
        interrupted, or a read or a write fails, keep its finished work. Without resume or discard, nothing is kept.
    discard: remove the work of an interrupted call, and start from the beginning. Keeps finished work as resume does.
    part: write only this part (from 0) of a move that `parts` workers share. Each worker makes this call with its own
        part, on a file system that all of them see. The worker that finishes last completes the destination; for the
        others, `written` is False. Finished work is kept, as with resume.
    parts: the number of workers.
    take_over: after its own part, this worker also writes the parts of workers that died or never started.
    progress: called with the bytes done and the total (with a base, bytes that are compared count too); True: a bar,
        with tqdm. An exception in the function stops the move, as Ctrl-C does.

    If there is work of an interrupted call, give resume or discard: without them the move is refused.

    Raises Error. Its kind is "mismatch", with all `problems`, if the source cannot be moved as asked.
    """
    options = locals()  # every argument, by its name
    return _move([(path_bytes("source", options.pop("source")), b"")], options.pop("destination"), options)


def merge(sources: Mapping[str, PathLike] | Iterable[PathLike | tuple[str, PathLike]], destination: PathLike, *,
          prefer: str | None = None, **options: Unpack[MoveOptions]) -> Resharded:
    """Moves several checkpoints, of any formats and world sizes, into one, as `ckpt-reshard merge` does.

    sources: {PREFIX: path} puts PREFIX and a dot before every name in that checkpoint ("" puts nothing). Or a list of
        paths, with (PREFIX, path) for those that get a prefix.
    prefer: "first" or "last": if several sources have a name, take it from the first or the last of them. None: such
        names are an error that lists all of them.

    All other keywords are those of `reshard`; `only` and `rename` see the names with their prefixes.
    """
    return _move(_sources(sources), destination, _known("merge", options), prefer=optional_text("prefer", prefer))


def split(source: PathLike, destination: PathLike, *, prefix: str | Sequence[str] = (), keep_prefix: bool = False,
          flat_layout: PathLike | None = None, **options: Unpack[MoveOptions]) -> Resharded:
    """Moves a subset of a checkpoint, as `ckpt-reshard split` does.

    Moves everything under the prefixes, and removes the prefix from the names. `only` adds more names and does not
    change them. `drop_optimizer` alone moves everything except optimizers.

    prefix: whole components of names ("model.encoder"), one or several.
    keep_prefix: do not remove the prefix from names.

    All other keywords are those of `reshard`.
    """
    prefixes = names_bytes("prefix", prefix)
    if b"" in prefixes:
        raise ValueError("prefix: expected the first components of names, found an empty one")
    if not (prefixes or options.get("only") or options.get("drop_optimizer")):
        raise ValueError("split: expected prefix, only or drop_optimizer, found none of them")
    return _move([(path_bytes("source", source), b"")], destination,
                 {"flat_layout": flat_layout, **_known("split", options)},
                 prefixes=prefixes, keep_prefix=flag("keep_prefix", keep_prefix))


def _known(function: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in options:
        if name not in MoveOptions.__annotations__:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    return options


def _sources(sources: Mapping[str, PathLike] | Iterable[PathLike | tuple[str, PathLike]]) -> list[tuple[bytes, bytes]]:
    """Returns paths and their prefixes."""
    if isinstance(sources, (str, bytes, os.PathLike)) or not isinstance(sources, Iterable):
        refuse_type("sources", "several paths, or a mapping of prefixes to paths", sources)
    named: list[tuple[Any, Any]] = list(sources.items()) if isinstance(sources, Mapping) else [
        source if isinstance(source, tuple) and len(source) == 2 else ("", source) for source in sources]
    found = [(path_bytes("sources", path), name_bytes("sources", prefix)) for prefix, path in named]
    if len(found) < 2:
        raise ValueError(f"sources: expected two or more, found {len(found)}")
    if any(prefix == b"." for _, prefix in found):
        raise ValueError("sources: expected a prefix, or '' for none, found '.'")
    return found


def _move(sources: list[tuple[bytes, bytes]], destination: PathLike, options: Mapping[str, Any], *,
          prefer: str | None = None, prefixes: Sequence[bytes] = (), keep_prefix: bool = False) -> Resharded:
    """Checks and runs a move. `options` are keywords of `reshard`; missing ones get the default that `reshard` has."""
    given = {**(reshard.__kwdefaults__ or {}), **options}
    ranks, world_size = given["ranks"], given["world_size"]
    if ranks is not None and world_size is not None:
        raise ValueError(f"ranks: expected one of ranks and world_size, found both ({ranks} and {world_size})")
    if given["resume"] and given["discard"]:
        raise ValueError("resume: expected one of resume and discard, found both")
    encoded = {name: encode(name, given[name]) for name, encode in _ENCODERS.items()}
    encoded["part"] = _part(given["part"], given["parts"])
    if encoded["take_over"] and encoded["part"] is None:
        raise ValueError("take_over: expected part and parts with it, found neither")
    encoded |= {"prefer": prefer, "prefixes": prefixes, "keep_prefix": keep_prefix,
                "world_size": at_least_one("ranks", ranks) or at_least_one("world_size", world_size)}
    result = _core.move(sources, path_bytes("destination", destination), cast("_core._MoveOptions", encoded),
                        progress_function(given["progress"], "move"))
    problems = tuple(Problem(*row) for row in result["problems"])
    if problems:
        raise refused([os.fsdecode(path) for path, _ in sources], problems)
    if result["left_over"] is not None:
        warnings.warn(f"{result['left_over']}: could not remove the old checkpoint (remove it yourself)",
                      RuntimeWarning, stacklevel=3)
    for warning in result["warnings"]:
        warnings.warn(f"{os.fspath(destination)!s}: {warning}", RuntimeWarning, stacklevel=3)
    return Resharded(
        source_format=result["source_format"], format=result["format"], world_size=result["world_size"],
        num_tensors=result["num_tensors"], num_values=result["num_values"], num_aliases=result["num_aliases"],
        nbytes=result["nbytes"], written=result["written"], kept_nbytes=result["kept_nbytes"], plan=result["plan"],
        linked_nbytes=result["linked_nbytes"],
        ranks=[RankShare(rank, *share) for rank, share in enumerate(result["ranks"])],
        extra_files=[ExtraFile(*row) for row in result["extra_files"]],
        left_files=[LeftFile(*row) for row in result["left_files"]],
        notes=[Problem(*row) for row in result["notes"]],
        overflows=[Overflow(*row) for row in result["overflows"]],
        underflows=result["underflows"], changes=result["changes"], left_out=result["left_out"],
        uncast=result["uncast"], missing_parts=result["missing_parts"])


def _part(part: int | None, parts: int | None) -> tuple[int, int] | None:
    """Returns (part, parts); None if one process writes the whole checkpoint."""
    if part is None and parts is None:
        return None
    if part is None or parts is None:
        raise ValueError(f"part: expected both part and parts, found part={part} and parts={parts}")
    number = at_least_one("parts", parts)
    if isinstance(part, bool) or not hasattr(type(part), "__index__"):
        refuse_type("part", "a number", part)
    if not 0 <= part < number:
        raise ValueError(f"part: expected a number from 0 to {number - 1}, found {part}")
    return (operator.index(part), number)


def _renames(name: str, renames: Mapping[str, str] | None) -> list[tuple[bytes, bytes]]:
    if not renames:
        return []
    if not isinstance(renames, Mapping):
        refuse_type(name, "a mapping of FROM to TO", renames)
    if renames.get("") == "":
        raise ValueError(f"{name}: expected a prefix of names, or the text that replaces it, found both empty")
    return [(name_bytes(name, before), name_bytes(name, after)) for before, after in renames.items()]


def _dtype_name(name: str, dtype: Any) -> str | None:
    return None if dtype is None else str(dtype)


def _optional_nbytes(name: str, size: int | str | None) -> int:
    """Returns the size in bytes; 0 for None, which means that it is not given."""
    return 0 if size is None else nbytes(name, size)


# For each option of a move: the function that checks its value and converts it for the extension.
_ENCODERS: dict[str, Callable[[str, Any], Any]] = {
    "to": optional_text,
    "strategy": optional_text,
    "plan": optional_path_bytes,
    "mesh": optional_path_bytes,
    "like": optional_path_bytes,
    "units": optional_path_bytes,
    "flat_layout": optional_path_bytes,
    "as_dict": names_bytes,
    "compress": text,
    "base": optional_path_bytes,
    "changed_rows": flag,
    "only": names_bytes,
    "rename": _renames,
    "drop_optimizer": flag,
    "optimizer_params": optional_path_bytes,
    "optimizer_names": text,
    "recipe": optional_path_bytes,
    "inverse": flag,
    "set": settings,
    "cast": _dtype_name,
    "on_overflow": text,
    "max_shard_size": _optional_nbytes,
    "device_mesh": text,
    "allow_missing": flag,
    "allow_lossy": flag,
    "as_is": flag,
    "extra_files": text,
    "extra_files_from": optional_path_bytes,
    "extra_files_limit": nbytes,
    "memory": nbytes,
    "threads": at_least_one,
    "spool": optional_path_bytes,
    "endpoint": optional_text,
    "dry_run": flag,
    "overwrite": flag,
    "resume": flag,
    "discard": flag,
    "take_over": flag,
}
