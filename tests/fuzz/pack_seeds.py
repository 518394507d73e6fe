"""Makes the fuzz targets' first inputs out of the fixtures.

    pack_seeds.py FIXTURES OUT        writes OUT/<target>/<seed>

The form of a packed checkpoint is drawn in packed_files.h; the names of its files stand here and in the target.
"""

import struct
import sys
import zipfile
from pathlib import Path

PACKED = {  # names as in <target>_fuzz.cpp; the first must be there
    "dcp": (".metadata", "__0_0.distcp", "__1_0.distcp"),
    "native": ("index.h5", "rank-00000.h5", "rank-00001.h5"),
}


def packed(directory: Path, names: tuple[str, ...]) -> bytes:
    parts = []
    for name in names:
        file = directory / name
        content = file.read_bytes() if file.is_file() else b""
        parts.append(content if name == names[-1] else struct.pack("<I", len(content)) + content)
    return b"".join(parts)


def pickles(fixtures: Path):
    yield from (file.read_bytes() for file in sorted(fixtures.rglob(".metadata")))
    for file in sorted(fixtures.rglob("*.pt")):
        try:
            with zipfile.ZipFile(file) as archive:
                yield from (archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))
        except (zipfile.BadZipFile, NotImplementedError, OSError):
            pass  # one of the invalid ones


def seeds(fixtures: Path):
    """Yields pairs of target and content."""
    for target, names in PACKED.items():
        for file in sorted(fixtures.rglob(names[0])):
            if file.is_file():
                yield target, packed(file.parent, names)
    for file in sorted(fixtures.rglob("*.safetensors")):
        if file.is_file():
            yield "safetensors", file.read_bytes()
    for file in sorted(fixtures.rglob("*.pt")):
        if file.is_file():
            yield "torch_zip", file.read_bytes()
    for content in pickles(fixtures):
        yield "pickle", content
    for file in sorted(fixtures.rglob("*.json")):
        yield "json", file.read_bytes()


def main() -> None:
    fixtures, out = map(Path, sys.argv[1:])
    for number, (target, content) in enumerate(seeds(fixtures)):
        (out / target).mkdir(parents=True, exist_ok=True)
        (out / target / f"{number:04}").write_bytes(content)


if __name__ == "__main__":
    main()
