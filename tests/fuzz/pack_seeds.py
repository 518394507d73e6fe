"""Makes the seeds (first inputs) of the fuzz targets from fixtures and from earlier findings.

    pack_seeds.py FIXTURES OUT        writes OUT/<target>/<seed>

packed_files.h shows the layout of a packed checkpoint. The names of its files are in this script and in the target.
findings/<target> has inputs that once made a target crash. The bugs are fixed; each run tries these inputs again.
"""

import json
import pickle
import struct
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKED = {  # names as in <target>_fuzz.cpp; a fixture must have the first
    "dcp": (".metadata", "__0_0.distcp", "__1_0.distcp"),
    "bin": ("pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"),
    "rank_files": ("model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt"),
    "native": ("index.h5", "rank-00000.h5", "rank-00001.h5",
               "base-d942b813d119701d-00000.h5", "base-d942b813d119701d-00001.h5"),  # of fixtures/native/v4/patched
}
RANKS_OF_ZERO = tuple(f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1))
MODELS_OF_ZERO = {1: ("mp_rank_00_model_states.pt",),
                  3: tuple(f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in (0, 1))}
RANKS_OF_MEGATRON = {0: ("mp_rank_00/model_optim_rng.pt", "mp_rank_01/model_optim_rng.pt"),
                     1: ("mp_rank_00/model_optim_rng.pt", "mp_rank_00/distrib_optim.pt")}
SAVED_BY_RANKS = ("metadata.pkl", *(f"model_{rank}.safetensors" for rank in range(4)),
                  *(f"{item}_{rank}.pt" for item in ("model", "optimizer") for rank in range(3)))
SHARDS = ("model.safetensors.index.json", "model.safetensors.values.json", "model-00001-of-00002.safetensors",
          "model-00002-of-00002.safetensors")
TEXTS = {
    "table_plan": ('{"schema": 1, "world_size": 4, "tables": {"t0": {"sharding": "row_wise", "ranks": [0, 1, 2, 3]}, '
                   '"t1": {"sharding": "grid", "ranks": [0, 1, 2, 3], "column_shards": 2}, '
                   '"t2": {"sharding": "data_parallel"}}}',
                   '{"schema": 1, "world_size": 2, "tables": {"a": {"sharding": "column_wise", "ranks": [1, 0]}, '
                   '"b": {"sharding": "table_wise", "ranks": [1]}}}'),
    "table_notes": ('{"schema": 1, "tables": {"t0": {"features": 2, "pooling_factor": 20.5, "weighted": true, '
                    '"sharding": ["row_wise", "table_row_wise"], "ranks": [0, 1, 2, 3], "min_columns": 32, '
                    '"kernel": "dense"}, "t1": {"sharding": ["grid", "data_parallel"]}}}',),
    "flat_layout": ('{"schema": 1, "units": [{"name": "layers.0", "dtype": "float32", "parameters": '
                    '[{"fqn": "a", "shape": [10, 4]}, {"fqn": "b", "shape": []}, {"fqn": "c", "shape": [0, 7]}]}]}',),
}
BUCKET_PAGE = ('<?xml version="1.0"?><ListBucketResult><IsTruncated>true</IsTruncated><EncodingType>url</EncodingType>'
               '<NextContinuationToken>t</NextContinuationToken><Contents><Key>runs/a%2Bb</Key><Size>17</Size>'
               '<ETag>&quot;0f-2&quot;</ETag></Contents><CommonPrefixes><Prefix>runs/step-10/</Prefix></CommonPrefixes>'
               '</ListBucketResult>')
S3_ERROR = ("<Error><Code>AuthorizationHeaderMalformed</Code><Message>wrong &#x263A;</Message><Region>eu-central-1</Region>"
            "<Endpoint>e</Endpoint></Error>")
PARTS = ('<ListPartsResult><IsTruncated>false</IsTruncated><NextPartNumberMarker>1</NextPartNumberMarker><Part><PartNumber>1'
         '</PartNumber><Size>100</Size><ETag>"6d0bb00954ceb7fbee436bb55a8397a9"</ETag></Part></ListPartsResult>')
UPLOADS = ("<ListMultipartUploadsResult><IsTruncated>true</IsTruncated><EncodingType>url</EncodingType><NextKeyMarker>runs%2Fa"
           "</NextKeyMarker><NextUploadIdMarker>u</NextUploadIdMarker><Upload><Key>runs%2Fa</Key><UploadId>u</UploadId></Upload>"
           "</ListMultipartUploadsResult>")
RANGE = '206\nContent-Range: bytes 0-4/5\nETag: "e"\nLast-Modified: Thu, 01 Jan 2026 00:00:00 GMT\n\nabcde'
STORE_TEXTS = (f"l{BUCKET_PAGE}", f"e{S3_ERROR}", "p[default]\naws_access_key_id = A # c\n[profile x]\nregion=r\n s3 =\n  a = b\n",
               "us3://bucket/a%20b?c+d", "uhttps://user:word@host:1/a?b")
STORE_ANSWERS = [  # what is asked, and the answers of the servers, one after the other
    ("l", f"200\n\n{BUCKET_PAGE}", f"200\n\n{BUCKET_PAGE.replace('true', 'false')}"),
    ("r", RANGE, RANGE, RANGE),
    ("f", f"200\n\n{UPLOADS}", f"200\n\n{UPLOADS.replace('true', 'false')}"),
    ("p", f"301\nx-amz-bucket-region: eu-central-1\n\n{S3_ERROR}", '200\nETag: "e"\n\n'),
    ("u", "200\n\n<R><UploadId>u</UploadId></R>", '200\nETag: "6d0bb00954ceb7fbee436bb55a8397a9"\n\n', f"200\n\n{PARTS}",
     '200\n\n<R><ETag>"a-1"</ETag></R>'),
    ("u", "200\nx-amz-checksum-algorithm: CRC32\n\n<R><UploadId>u</UploadId></R>", '200\nETag: "e"\nx-amz-checksum-crc32: mYjGyg==\n\n',
     "200\n\n<R><ChecksumAlgorithm>CRC32</ChecksumAlgorithm></R>", "200\n\n<R><ETag>e</ETag><ChecksumCRC32>6DtgbA==-1</ChecksumCRC32></R>"),
    ("h", '200\n\n{"sha": "c0"}', '200\nLink: <http://hub.test/api/next>; rel="next"\n\n[{"type": "file", "path": "a", "size": 5}, '
     '{"type": "directory", "path": "b"}]', "200\n\n[]"),
    ("g", '200\n\n{"sha": "c0"}', f"302\nLocation: http://other.test/x\n\n", RANGE, RANGE, RANGE),
    ("w", "200\nContent-Length: 5\nETag: e\n\nabcde", RANGE, RANGE),
]


def packed_bytes(parts: list[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(part)) + part for part in parts[:-1]) + parts[-1]


def packed(directory: Path, names: tuple[str, ...]) -> bytes:
    files = [directory / name for name in names]
    return packed_bytes([file.read_bytes() if file.is_file() else b"" for file in files])


def pickles(fixtures: Path):
    yield from (file.read_bytes() for name in (".metadata", "metadata.pkl") for file in sorted(fixtures.rglob(name)))
    for file in sorted(fixtures.rglob("*.pt")):
        try:
            with zipfile.ZipFile(file) as archive:
                yield from (archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))
        except (zipfile.BadZipFile, RuntimeError, OSError):
            pass  # one of the invalid ones


def native_indexes(fixtures: Path):
    """Yields the indexes of native files, each after the four bytes that native_index_fuzz.cpp describes."""
    for file in sorted(fixtures.rglob("*.h5")):
        content = file.read_bytes() if file.is_file() else b""
        if not content.startswith(b"\x89TSR") or len(content) < 4096:
            continue
        version, role, rank, world_size = struct.unpack_from("<IIII", content, 8)
        begin, end = struct.unpack_from("<QQ", content, 32)
        if max(version, role, rank, world_size) < 256:
            yield bytes((role, world_size, rank, version)) + content[begin:end]


def shards(fixtures: Path):
    for file in sorted(fixtures.rglob("*.index.json")):
        parts = sorted(file.parent.glob("*.safetensors"))[:2]
        contents = [part.read_bytes() for part in parts if part.is_file()]
        index = file.read_bytes()
        for part, name in zip(parts, SHARDS[2:]):
            index = index.replace(part.name.encode(), name.encode())
        yield packed_bytes([index, b"{}", *contents, *[b""] * (2 - len(contents))])


def zero_checkpoints(fixtures: Path):
    """Yields the packed files of two ranks of DeepSpeed, after the byte that deepspeed_fuzz.cpp describes."""
    for file in sorted(fixtures.rglob(RANKS_OF_ZERO[0])):
        for stage, models in MODELS_OF_ZERO.items():
            names = RANKS_OF_ZERO + models
            if all((file.parent / name).is_file() for name in names):
                yield bytes([stage]) + packed(file.parent, names)


def megatron_checkpoints(fixtures: Path):
    """Yields the packed files of Megatron's ranks, after the byte that megatron_fuzz.cpp describes."""
    for file in sorted(fixtures.rglob("mp_rank_00/model_optim_rng.pt")):
        for kind, names in RANKS_OF_MEGATRON.items():
            if all((file.parent.parent / name).is_file() for name in names):
                yield bytes([kind]) + packed(file.parent.parent, names)


def saved_by_ranks(fixtures: Path):
    """Yields two checkpoints of torch_checkpointing: three ranks with torch.save, and a model of four ranks as safetensors."""
    valid = fixtures / "torch_checkpointing/valid"
    yield packed(valid / "fsdp2", SAVED_BY_RANKS)
    metadata = pickle.loads((valid / "fsdp2_tp_other_forms" / SAVED_BY_RANKS[0]).read_bytes())
    del metadata["metadata"]["optimizer"]  # its files are in folders, but SAVED_BY_RANKS has no folder
    parts = [pickle.dumps(metadata, protocol=4)]
    parts += [(valid / "fsdp2_tp_other_forms" / name).read_bytes() for name in SAVED_BY_RANKS[1:5]]
    yield packed_bytes([*parts, b""])


def structured() -> bytes:
    """Returns a safetensors file with every member of `tessera.structure` (docs/formats/safetensors.md)."""
    structure = {"schema": 1, "key_paths": {"a.0": ["a", [0]]}, "kinds": {"a.0": "pointwise"},
                 "parameters": {"a.0": "b"}, "units": [{"name": "u", "dtype": "uint8", "parameters": [
                     {"fqn": "b", "shape": [1], "offset": 0}]}]}
    header = json.dumps({"__metadata__": {"tessera.structure": json.dumps(structure)},
                         "a.0": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
                         "b": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}).encode()
    return struct.pack("<Q", len(header)) + header + b"\0\1"


def manifests():
    for file in sorted((HERE.parent / "cli/cases/hash").glob("*/stdout.exact")):
        yield file.read_bytes()


def seeds(fixtures: Path):
    """Yields pairs of a target's name and an input."""
    for target, names in PACKED.items():
        for file in sorted(fixtures.rglob(names[0])):
            if file.is_file():
                yield target, packed(file.parent, names)
    for file in sorted(fixtures.rglob("*.safetensors")):
        if file.is_file():
            yield "safetensors", file.read_bytes()
    yield "safetensors", structured()
    for file in sorted(fixtures.rglob("*.pt")):
        if file.is_file():
            yield "torch_zip", file.read_bytes()
            yield "zip", file.read_bytes()
    for file in sorted((fixtures / "pickle_scan").rglob("*")):
        if file.is_file() and file.stat().st_size < 4096 and file.parent.name != "gadgets":
            yield "pickle_scan", file.read_bytes()
    for content in pickles(fixtures):
        yield "pickle", content
    for file in sorted(fixtures.rglob("*.json")):
        yield "json", file.read_bytes()
        if file.name.endswith("flat-layout.json"):
            yield "flat_layout", file.read_bytes()
    for file in sorted([*(fixtures / "recipes").glob("*.json"), *(fixtures.parent / "recipes").glob("*.json")]):
        yield "recipe", file.read_bytes()
    for content in native_indexes(fixtures):
        yield "native_index", content
    for content in shards(fixtures):
        yield "safetensors_shards", content
    for content in zero_checkpoints(fixtures):
        yield "deepspeed", content
    for content in megatron_checkpoints(fixtures):
        yield "megatron", content
    for content in saved_by_ranks(fixtures):
        yield "torch_checkpointing", content
    for content in manifests():
        yield "manifest", content
    for text in STORE_TEXTS:
        yield "store_texts", text.encode()
    for choice, *answers in STORE_ANSWERS:
        yield "store_server", (choice + "\n====\n".join(answers)).encode()
    for target, texts in TEXTS.items():
        yield from ((target, text.encode()) for text in texts)
    for file in sorted(HERE.glob("findings/*/*")):
        yield file.parent.name, file.read_bytes()


def main() -> None:
    fixtures, out = map(Path, sys.argv[1:])
    for number, (target, content) in enumerate(seeds(fixtures)):
        (out / target).mkdir(parents=True, exist_ok=True)
        (out / target / f"{number:04}").write_bytes(content)


if __name__ == "__main__":
    main()
