"""Checks which layer includes which, and that formats and options are named only where they may be.

- Includes point to lower layers; public headers leak no library.
- Only the registry and a format's own folder name a format.
- The core does not spell options of a command line.

usage: check_layers.py SOURCE_DIRECTORY
"""
import pathlib
import re
import sys

# A folder may include folders with a lower number, but not other folders with the same number.
LAYERS = {"base": 1, "layout": 2, "object_store": 2, "embedding_kernels": 2, "formats": 3, "reshard": 4, "inspect": 4, "recipe": 5,
          "arithmetic": 6,
          "runtime": 6, "nccl": 7, "cuda_tables": 7}
RUNTIME_LAYERS = {"dist": 1, "registry": 2, "embedding": 3, "fsdp": 3, "optim": 3, "recompute": 3, "replicate": 3, "state": 3}
TOOLS_SEE = set(LAYERS) - {"runtime", "nccl", "cuda_tables", "embedding_kernels"}  # so they start without libtorch
SOURCES = (".h", ".cpp", ".cu", ".cuh")
NO_LAYER = {"cmake"}

FOREIGN = re.compile(r"#include\s*[<\"](hdf5|H5|zstd|xxhash|nlohmann|CLI/|libdeflate|nettle|zlib|torch/|ATen/|c10/)")
INCLUDE = re.compile(r"#include\s*\"(?:tessera/)?(\w+)/(\w+)")

FORMAT = re.compile(r"\bFormat::(native|dcp|safetensors|torch_zip)\b")
FORMAT_FOLDERS = {"native": "native", "dcp": "dcp", "safetensors": "safetensors", "torch_zip": "torch_zip"}
FORMAT_REGISTRY = {"include/tessera/formats/format.h"}

# `torch.distributed.checkpoint.metadata` and `….sharded_tensor.metadata` are Python modules, not file names.
FILE_NAMES = {"native": re.compile(r"\"[^\"]*(index\.h5|rank-)"),
              "dcp": re.compile(r"\"[^\"]*(?<!checkpoint)(?<!sharded_tensor)\.(metadata|distcp)\b"),
              "safetensors": re.compile(r"\"[^\"]*\.safetensors"), "bin": re.compile(r"\"[^\"]*pytorch_model")}

OPTION = re.compile(r"\"(?:[^\"\\]|\\.)*(?<![\w-])--[a-z][a-z-]+")
CORE = ("base", "layout", "object_store", "formats", "reshard", "inspect", "recipe", "arithmetic")


def sources(root: pathlib.Path, tree: str):
    return (path for path in sorted((root / tree).rglob("*")) if path.suffix in SOURCES)


def layer_problems(root: pathlib.Path):
    for tree in ("include/tessera", "src"):
        for path in sources(root, tree):
            own, below = (*path.relative_to(root / tree).parts, "")[:2]
            if own in ("tessera.h", "core.h"):
                continue
            if own not in LAYERS:
                yield f"{path.relative_to(root)}: {own} is in no layer"
                continue
            for number, line in enumerate(path.read_text().splitlines(), 1):
                where = f"{path.relative_to(root)}:{number}"
                found = INCLUDE.match(line)
                if found and found[1] in LAYERS and found[1] != own and LAYERS[found[1]] >= LAYERS[own]:
                    yield f"{where}: {own} includes {found[1]}, which is not below it"
                if found and found[1] == own == "runtime" and below in RUNTIME_LAYERS:
                    if found[2] != below and RUNTIME_LAYERS.get(found[2], 0) >= RUNTIME_LAYERS[below]:
                        yield f"{where}: runtime/{below} includes runtime/{found[2]}, which is not below it"
                if tree == "include/tessera" and own != "runtime" and FOREIGN.match(line):
                    yield f"{where}: a public header of the core includes a library: {line.strip()}"
                if tree == "include/tessera" and found and not line.startswith('#include "tessera/'):
                    yield f"{where}: a public header includes a private one: {line.strip()}"
    for folder in sorted(path.name for path in (root / "src").iterdir() if path.is_dir()):
        if folder not in LAYERS and folder not in NO_LAYER:
            yield f"src/{folder}: is in no layer"
    for path in sources(root, "tools"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found = INCLUDE.match(line)
            if found and found[1] in LAYERS and found[1] not in TOOLS_SEE:
                yield f"{path.relative_to(root)}:{number}: a tool includes {found[1]}, which needs libtorch"


def format_problems(root: pathlib.Path):
    for tree in ("include", "src", "tools"):
        for path in sources(root, tree):
            name = str(path.relative_to(root))
            if name in FORMAT_REGISTRY:
                continue
            for number, line in enumerate(path.read_text().splitlines(), 1):
                found = FORMAT.search(line)
                if found and not name.startswith(f"src/formats/{FORMAT_FOLDERS[found[1]]}/"):
                    yield f"{name}:{number}: names the format {found[1]}; ask its driver (format_driver.h)"
                for folder, names in FILE_NAMES.items():
                    code = line.split("//")[0]
                    if tree == "src" and not name.startswith(f"src/formats/{folder}/") and names.search(code):
                        yield f"{name}:{number}: names a file of the format {folder}; ask its driver"


def option_problems(root: pathlib.Path):
    for tree in ("include/tessera", "src"):
        for path in sources(root, tree):
            if path.relative_to(root / tree).parts[0] not in CORE:
                continue
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if not line.lstrip().startswith("//") and OPTION.search(line):
                    yield f"{path.relative_to(root)}:{number}: spells an option of a command line; use a Remedy"


def problems(root: pathlib.Path):
    yield from layer_problems(root)
    yield from format_problems(root)
    yield from option_problems(root)


def main() -> int:
    found = list(problems(pathlib.Path(sys.argv[1])))
    print("\n".join(found) or "includes point downwards; formats and options are known where they belong")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
