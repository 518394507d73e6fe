from collections.abc import Callable, Sequence
from typing import Any, TypedDict

__version__: str
__interface__: str
DEFAULT_MEMORY_NBYTES: int
DEFAULT_EXTRA_FILES_NBYTES: int

_Finding = tuple[str, str, str | None, str | None, tuple[int, int] | None, str, str, str]

_ScannedName = tuple[str, str, str | None, bool, int, list[tuple[str, str | None, int]]]
_ScanProblem = tuple[str, str, str | None, int | None, str, str]

class _Summary(TypedDict):
    source_format: str
    format: str
    world_size: int
    num_tensors: int
    num_values: int
    num_aliases: int
    nbytes: int
    written: bool
    kept_nbytes: int
    plan: str
    ranks: list[tuple[int, int]]
    overflows: list[tuple[str, int, float]]
    underflows: dict[str, int]
    changes: dict[str, int]
    left_out: dict[str, int]
    uncast: int
    missing_parts: list[int]
    extra_files: list[tuple[str, int, str | None]]
    left_files: list[tuple[str, str]]
    notes: list[_Finding]
    problems: list[_Finding]
    left_over: str | None

class _MoveOptions(TypedDict):
    prefer: str | None
    prefixes: Sequence[bytes]
    keep_prefix: bool
    to: str | None
    world_size: int
    strategy: str | None
    plan: bytes
    mesh: bytes
    like: bytes
    units: bytes
    flat_layout: bytes
    as_dict: Sequence[bytes]
    compress: str
    only: Sequence[bytes]
    rename: Sequence[tuple[bytes, bytes]]
    drop_optimizer: bool
    optimizer_params: bytes
    recipe: bytes
    inverse: bool
    set: Sequence[bytes]
    optimizer_names: str
    cast: str | None
    on_overflow: str
    max_shard_size: int
    device_mesh: str
    allow_missing: bool
    allow_lossy: bool
    as_is: bool
    extra_files: str
    extra_files_from: bytes
    extra_files_limit: int
    memory: int
    threads: int
    spool: bytes
    dry_run: bool
    overwrite: bool
    resume: bool
    discard: bool
    part: tuple[int, int] | None
    take_over: bool

class TensorSource:
    def read(self, offsets: Sequence[int], sizes: Sequence[int], buffer: Any) -> None: ...

class Reader:
    def __init__(self, path: bytes, flat_layout: bytes, as_dict: Sequence[bytes], recipe: bytes, inverse: bool,
                 set: Sequence[bytes]) -> None: ...
    @property
    def format(self) -> str: ...
    @property
    def world_size(self) -> int: ...
    def tensors(self) -> list[tuple[str, str, int, tuple[int, ...]]]: ...
    def values(self) -> list[str]: ...
    def aliases(self) -> list[tuple[str, str]]: ...
    def paths(self) -> list[list[Any]]: ...
    def opened_classes(self) -> list[tuple[str, int]]: ...
    def part(self) -> str | None: ...
    def tensor(self, tensor_index: int) -> TensorSource: ...
    def read_value(self, value_index: int) -> Any: ...
    def nearest_name(self, name: bytes) -> str | None: ...

_Shard = tuple[Sequence[int], Sequence[int], Sequence[int]]
_HeldBoxes = dict[str, list[tuple[list[int], list[int]]]]

class Job:
    def __init__(self, world_size: int, tensors: Sequence[tuple[Sequence[Any], str, Sequence[int], Sequence[_Shard]]],
                 aliases: Sequence[tuple[Sequence[Any], str]]) -> None: ...
    def digest(self, format: str) -> str: ...

class SavePlan:
    def __init__(self, job: Job, format: str, rank: int, held: _HeldBoxes) -> None: ...
    @property
    def nbytes(self) -> int: ...
    def boxes_read(self) -> dict[str, list[int]]: ...

class Save:
    def __init__(self, path: bytes, format: str, rank: int, overwrite: bool, keep_last: int, compress: str,
                 memory: int) -> None: ...
    @property
    def is_one_file(self) -> bool: ...
    def stage(self) -> bytes: ...
    def set_contents(self, plan: SavePlan, directory: bytes, values: Sequence[tuple[Sequence[Any], Any]]) -> None: ...
    def start_one_file(self) -> None: ...
    def write(self, plan: SavePlan, addresses: dict[str, list[int]]) -> None: ...
    def join(self) -> int: ...
    def seal(self, token: int) -> None: ...
    def finish(self) -> None: ...
    def abandon(self) -> None: ...

class Load:
    def __init__(self, path: bytes) -> None: ...
    @property
    def format(self) -> str: ...
    @property
    def world_size(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def values(self) -> list[tuple[str, list[Any]]]: ...
    def read_value(self, value_index: int) -> Any: ...
    def plan(self, job: Job, rank: int, held: _HeldBoxes, value_names: Sequence[bytes], allow_missing: bool,
             allow_unexpected: bool, allow_cast: bool, only: Sequence[bytes],
             rename: Sequence[tuple[bytes, bytes]]) -> list[_Finding]: ...
    def loaded(self) -> list[str]: ...
    def read(self, addresses: dict[str, list[int]], memory: int, threads: int,
             progress: Callable[[int, int], object] | None) -> None: ...

class Selection:
    def __init__(self, patterns: Sequence[bytes]) -> None: ...
    def selects(self, name: bytes) -> bool: ...

def latest_valid(directory: bytes, checksums: bool) -> tuple[str | None, list[tuple[str, str]]]: ...
def spell_path(path: Sequence[Any]) -> str: ...
def check_value(path: Sequence[Any], value: Any) -> None: ...
def parse_size(text: bytes) -> int | None: ...
def to_float32(dtype: str, bytes: Any, out: Any) -> None: ...
def verify(path: bytes, flat_layout: bytes, as_dict: Sequence[bytes], values: bool, memory: int, threads: int,
           progress: Callable[[int, int], object] | None) -> list[_Finding]: ...
def scan(paths: Sequence[bytes]) -> tuple[list[_ScannedName], list[_ScanProblem], int, int]: ...
def move(sources: Sequence[tuple[bytes, bytes]], destination: bytes, options: _MoveOptions,
         progress: Callable[[int, int], object] | None) -> _Summary: ...
