"""Checks that includes point to lower layers, and that public headers leak no library.

usage: check_layers.py SOURCE_DIRECTORY
"""
import pathlib
import re
import sys

# A folder sees those with a lower number; folders of equal number do not see each other.
LAYERS = {"base": 1, "layout": 2, "formats": 3, "reshard": 4, "inspect": 4, "runtime": 5}
RUNTIME_LAYERS = {"dist": 1, "registry": 2, "embedding": 3, "fsdp": 3, "recompute": 3, "replicate": 3, "state": 3}
FOREIGN = re.compile(r"#include\s*[<\"](hdf5|H5|zstd|xxhash|nlohmann|CLI/|libdeflate|nettle|zlib|torch/|ATen/|c10/)")
INCLUDE = re.compile(r"#include\s*\"(?:tessera/)?(\w+)/(\w+)")


def problems(root: pathlib.Path):
    for tree in ("include/tessera", "src"):
        for path in sorted((root / tree).rglob("*")):
            if path.suffix not in (".h", ".cpp"):
                continue
            own, below = (*path.relative_to(root / tree).parts, "")[:2]
            if own not in LAYERS:
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


def main() -> int:
    found = list(problems(pathlib.Path(sys.argv[1])))
    print("\n".join(found) or "includes point downwards")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
