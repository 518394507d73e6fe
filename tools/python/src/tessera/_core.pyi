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
    allow_missing: bool
    allow_lossy: bool
    as_is: bool
    extra_files: str
    extra_files_from: bytes
    extra_files_limit: int
    memory: int
    threads: int
    dry_run: bool
    overwrite: bool
    resume: bool
    discard: bool

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
    def opened_classes(self) -> list[tuple[str, int]]: ...
    def part(self) -> str | None: ...
    def tensor(self, tensor_index: int) -> TensorSource: ...
    def read_value(self, value_index: int) -> Any: ...
    def nearest_name(self, name: bytes) -> str | None: ...

def parse_size(text: bytes) -> int | None: ...
def to_float32(dtype: str, bytes: Any, out: Any) -> None: ...
def verify(path: bytes, flat_layout: bytes, as_dict: Sequence[bytes], values: bool, memory: int, threads: int,
           progress: Callable[[int, int], object] | None) -> list[_Finding]: ...
def scan(paths: Sequence[bytes]) -> tuple[list[_ScannedName], list[_ScanProblem], int, int]: ...
def move(sources: Sequence[tuple[bytes, bytes]], destination: bytes, options: _MoveOptions,
         progress: Callable[[int, int], object] | None) -> _Summary: ...
