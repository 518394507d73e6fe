"""Checkpoints are written to `s3://` as to a local path: the same bytes, complete or not at all.

The server is moto's. The proxy in front of it counts requests and fails on demand.
"""

import base64
import contextlib
import hashlib
import json
import os
import re
import signal
import struct
import subprocess
import threading
import time

import numpy as np
import pytest
from ckpt_tools import BIN, FIXTURES, reshard
from faulty_proxy import Proxy, crc32_text, s3_error
from on_ranks import run_function
from safetensors.numpy import save_file
from test_object_stores import SECRET, TOKEN, bucket, environment, fail, local_files, moto, proxy, run, signature_of, succeed  # noqa: F401

SOURCE = FIXTURES / "dcp" / "valid" / "fsdp2_adamw"
MODEL = FIXTURES / "safetensors" / "valid" / "sharded"
MIB = 1 << 20
MARK = ".tessera-incomplete"  # the object of a folder that holds no complete checkpoint
NO_OBJECT = ".tessera-none"  # an object that does not exist, whose removal shows whether the keys may remove objects
# Options, and whether the destination is one file.
FORMATS = {
    "native": (("--to", "native", "--world-size", 3), False),
    "zstd": (("--to", "native", "--compress", "zstd"), False),
    "dcp": (("--to", "dcp", "--world-size", 2), False),
    "safetensors": (("--to", "safetensors"), False),
    "sharded": (("--to", "safetensors", "--max-shard-size", 2000), False),
    "rank_files": (("--to", "rank_files", "--world-size", 2), False),
    "many_files": (("--to", "rank_files", "--world-size", 40), False),  # so many that threads sync them (FileSyncs)
    "torch": ((), ".pt"),
    "one_file": ((), ".safetensors"),
}


@pytest.fixture
def keys(bucket):  # noqa: F811
    """Returns the keys and bytes of all objects below a prefix; empties the bucket's test folder at the end."""

    def read(prefix):
        pages = bucket.get_paginator("list_objects_v2").paginate(Bucket="checkpoints", Prefix=prefix)
        found = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
        return {key: bucket.get_object(Bucket="checkpoints", Key=key)["Body"].read() for key in found}

    read.client = bucket
    yield read
    while found := names(read, "new"):
        bucket.delete_objects(Bucket="checkpoints", Delete={"Objects": [{"Key": key} for key in found]})
    for upload in uploads(bucket):
        bucket.abort_multipart_upload(Bucket="checkpoints", Key=upload["Key"], UploadId=upload["UploadId"])


def names(keys, prefix):
    listed = keys.client.list_objects_v2(Bucket="checkpoints", Prefix=prefix)
    return sorted(entry["Key"] for entry in listed.get("Contents", []))


def unmarked(keys, prefix):
    return [name for name in names(keys, prefix) if not name.endswith(MARK)]


def uploads(bucket):  # noqa: F811
    return bucket.list_multipart_uploads(Bucket="checkpoints").get("Uploads", [])


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A safetensors file of 33 MiB: two tensors of several parts each, and a small one. It is uploaded as 5 parts, and in
    another format as 3 or 4, because parts of files whose size is not known at the start are larger."""
    return write_model(tmp_path_factory.mktemp("large"), 20 * MIB, 13 * MIB + 4096)


@pytest.fixture(scope="module")
def medium(tmp_path_factory):
    """As `large`, but of 17 MiB: 3 parts, and 2 in another format."""
    return write_model(tmp_path_factory.mktemp("medium"), 12 * MIB, 5 * MIB + 4096)


def write_model(folder, *sizes):
    path = folder / "model.safetensors"
    sizes = {"a.weight": sizes[0], "b.weight": sizes[1], "c.bias": 64}
    header, begin = {}, 0
    for name, nbytes in sizes.items():
        header[name] = {"dtype": "U8", "shape": [nbytes], "data_offsets": [begin, begin + nbytes]}
        begin += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    blocks = b"".join(hashlib.sha256(str(i).encode()).digest() for i in range(MIB // 32))
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for i in range(0, begin, MIB):
            file.write((bytes([i // MIB]) + blocks[1:])[: min(MIB, begin - i)])
    return path


def expect_same(found, key, local):
    """Compares objects with the local files of a checkpoint, byte by byte."""
    if local.is_dir():
        expected = {f"{key}/{file.relative_to(local)}": file.read_bytes() for file in local_files(local)}
    else:  # with its side files
        folder = key.rsplit("/", 1)[0]
        expected = {f"{folder}/{file.name}": file.read_bytes() for file in local.parent.glob(local.stem + "*")}
    assert sorted(found) == sorted(expected)
    for name, content in expected.items():
        assert found[name] == content, name


def is_part(request):
    return request.method == "PUT" and "partNumber=" in request.path


def is_completion(request):
    return request.method == "POST" and "uploadId=" in request.path


def writes(proxy):  # noqa: F811
    return [request for request in proxy.requests if request.method in ("PUT", "POST", "DELETE")]


@pytest.mark.parametrize("name", FORMATS)
def test_the_objects_are_the_files_of_a_local_move(proxy, keys, name, tmp_path):  # noqa: F811
    options, suffix = FORMATS[name]
    key = f"new/{name}{suffix or ''}"
    local = reshard(SOURCE, tmp_path / f"{name}{suffix or ''}", *options)
    out = succeed(proxy, "ckpt-reshard", SOURCE, f"s3://checkpoints/{key}", *options, "--spool", tmp_path)
    assert f"s3://checkpoints/{key}: " in out
    expect_same(keys(f"new/{name}"), key, local)
    succeed(proxy, "ckpt-inspect", "verify", f"s3://checkpoints/{key}")
    assert not list(tmp_path.glob("tessera-spool-*"))


@pytest.mark.parametrize("options", [("--to", "native"), ("--to", "dcp"), ("--to", "safetensors", "--max-shard-size", "21MiB"), "x.pt"], ids=str)
def test_large_files_are_uploaded_in_parts_that_nobody_sees(proxy, keys, large, options, tmp_path):  # noqa: F811
    key = "new/large" if options != "x.pt" else "new/" + options
    options = options if options != "x.pt" else ()
    local = reshard(large, tmp_path / key.split("/")[1], *options)
    seen = []
    proxy.refuse = lambda request: seen.append((request, unmarked(keys, key))) if request.method != "GET" else None
    succeed(proxy, "ckpt-reshard", large, f"s3://checkpoints/{key}", *options)
    expect_same(keys(key), key, local)
    assert len([request for request, _ in seen if is_part(request)]) >= 3
    for request, visible in seen:
        if is_part(request):
            assert visible == []
    last, visible = [each for each in seen if each[0].method != "DELETE"][-1]  # DELETE removes a claim or the mark
    final = sorted(keys(key))
    index = [name for name in final if name.endswith(("index.h5", ".metadata", ".index.json"))] or final
    assert last.path.startswith("/checkpoints/" + index[0]) and visible == [name for name in final if name != index[0]]
    assert uploads(keys.client) == []


@pytest.mark.parametrize("knows_crc32", [True, False], ids=["crc32", "md5"])
def test_every_body_has_a_checksum_and_every_request_a_signature(proxy, keys, large, knows_crc32, tmp_path):  # noqa: F811
    options = ("--to", "native", "--world-size", 2)
    if not knows_crc32:
        proxy.refuse = without_crc32
    succeed(proxy, "ckpt-reshard", large, "s3://checkpoints/new/signed ä", *options)
    expect_same(keys("new/signed ä"), "new/signed ä", reshard(large, tmp_path / "local", *options))
    assert {request.method for request in writes(proxy)} == {"PUT", "POST", "DELETE"}
    for request in proxy.requests:
        assert request.header("x-amz-security-token") == TOKEN
        assert request.header("x-amz-content-sha256") == hashlib.sha256(request.body).hexdigest()
        if knows_crc32:
            assert request.header("authorization").rsplit("Signature=", 1)[1] == signature_of(request, SECRET), request.path
        if request.method == "PUT":
            kind, value = checksums(request)[0]
            assert kind == ("crc32" if knows_crc32 else "md5")
            assert value == (crc32_text(request.body) if knows_crc32 else md5_text(request.body))
            assert {"crc32": "x-amz-checksum-crc32", "md5": "content-md5"}[kind] in request.header("authorization")


def md5_text(body):
    return base64.b64encode(hashlib.md5(body).digest()).decode()


def checksums(request):
    found = [("crc32", request.header("x-amz-checksum-crc32")), ("md5", request.header("content-md5"))]
    return [(kind, value) for kind, value in found if value]


def without_crc32(request):
    """Behaves like a server of before 2022: ignores headers that it does not know."""
    for name in [name for name in request.headers if name.lower().startswith("x-amz-checksum-")]:
        del request.headers[name]


def test_a_server_that_refuses_headers_of_crcs_gets_md5(proxy, keys, medium, tmp_path):  # noqa: F811
    def refuse(request):
        if any(name.lower().startswith("x-amz-checksum-") for name in request.headers):
            refused.append(request)
            return s3_error(501, "NotImplemented", "Header 'x-amz-checksum-algorithm' with value 'CRC32' not implemented")

    for name, source, options in (("medium", medium, ("--to", "native")), ("small", SOURCE, ("--to", "native", "--world-size", 2))):
        refused = []
        proxy.refuse = refuse
        succeed(proxy, "ckpt-reshard", source, f"s3://checkpoints/new/{name}", *options, AWS_MAX_ATTEMPTS="1")
        expect_same(keys(f"new/{name}"), f"new/{name}", reshard(source, tmp_path / name, *options))
        assert 1 <= len(refused) <= 4
        assert all(checksums(request)[-1] == ("md5", md5_text(request.body)) for request in proxy.requests if request.method == "PUT"
                   and request not in refused)


def test_a_server_that_does_not_repeat_the_crc_of_a_part_gets_md5_too(proxy, keys, medium, tmp_path):  # noqa: F811
    """Nothing shows that the server checks the CRC, so MD5 is sent too. The CRC is still sent, because the upload was
    begun with CRCs."""
    def change(request, answer):
        if request.method == "PUT":
            answer.headers.pop("x-amz-checksum-crc32", None)

    proxy.change = change
    succeed(proxy, "ckpt-reshard", medium, "s3://checkpoints/new/silent", "--to", "safetensors")
    expect_same(keys("new/silent"), "new/silent", reshard(medium, tmp_path / "local", "--to", "safetensors"))
    last = {request.part_number: request for request in proxy.requests if is_part(request)}
    assert len(last) == 3
    for request in last.values():
        assert checksums(request) == [("crc32", crc32_text(request.body)), ("md5", md5_text(request.body))]


@pytest.mark.parametrize("what", ["part", "object"])
@pytest.mark.parametrize("knows_crc32", [True, False], ids=["crc32", "md5"])
def test_bytes_that_are_damaged_on_their_way_are_sent_again(proxy, keys, medium, what, knows_crc32, tmp_path):  # noqa: F811
    damaged = []

    def damage(request):
        is_hit = is_part(request) and request.part_number == 2 if what == "part" else request.method == "PUT" and not is_part(request)
        if is_hit and not damaged:
            damaged.append(request.path)
            request.body = bytes([request.body[0] ^ 1]) + request.body[1:]

    proxy.knows_crc32, proxy.damage = knows_crc32, damage
    options = ("--to", "native", "--world-size", 1)
    # Without credentials there is no SHA-256 in the signature.
    succeed(proxy, "ckpt-reshard", medium, "s3://checkpoints/new/damaged", *options, AWS_NO_SIGN_REQUEST="1")
    expect_same(keys("new/damaged"), "new/damaged", reshard(medium, tmp_path / "local", *options))
    assert sum(request.path == damaged[0] for request in proxy.requests) == 2


def test_bytes_that_are_always_damaged_on_their_way_are_an_error(proxy, keys, medium):  # noqa: F811
    def damage(request):
        if is_part(request):
            request.body = request.body[:-1] + bytes([request.body[-1] ^ 128])

    proxy.damage = damage
    message = fail(proxy, "ckpt-reshard", medium, "s3://checkpoints/new/damaged", "--to", "native", AWS_NO_SIGN_REQUEST="1")
    assert "s3://checkpoints/new/damaged/rank-00000.h5: upload of part" in message and "BadDigest" in message
    assert keys("new/damaged") == {}


def lost(request, answer):
    """The server carries out the request, but its answer is lost."""
    if request.method != "GET" and request.number % 2 == 0:
        answer.cut_after, answer.declared_nbytes = 0, len(answer.body) + 1
    return answer


def overloaded(request, answer):
    return s3_error(503, "SlowDown") if request.number % 3 == 0 else answer


def late_error(request, answer):
    """S3 can answer 200 before it knows that the completion fails."""
    if is_completion(request) and not late_error.told:
        late_error.told = True
        return type(answer)(200, {"Content-Type": "application/xml"}, b"<Error><Code>InternalError</Code></Error>")
    return answer


def damaged_checksum(request, answer):
    """The server received other bytes than were sent; the checksum in its answer shows this."""
    if is_part(request) and request.part_number == 2 and not damaged_checksum.told:
        damaged_checksum.told = True
        answer.headers["x-amz-checksum-crc32" if request.header("x-amz-checksum-crc32") else "ETag"] = '"%s"' % ("0" * 32)
    return answer


@pytest.mark.parametrize(
    ("fault", "options", "knows_crc32"),
    [(lost, ("--to", "native", "--world-size", 2), True), (lost, ("--to", "safetensors"), True), (lost, ("--to", "safetensors"), False),
     (overloaded, ("--to", "native"), True), (late_error, ("--to", "safetensors"), True),
     (damaged_checksum, ("--to", "native"), True), (damaged_checksum, ("--to", "native"), False)],
    ids=lambda value: getattr(value, "__name__", ""))
def test_faults_that_pass_do_not_show(proxy, keys, large, medium, fault, options, knows_crc32, tmp_path):  # noqa: F811
    proxy.knows_crc32 = knows_crc32
    source = large if "--world-size" in options else medium
    local = reshard(source, tmp_path / "local", *options)
    fault.told = False
    proxy.change = fault
    succeed(proxy, "ckpt-reshard", source, "s3://checkpoints/new/faults", *options, AWS_MAX_ATTEMPTS="8")
    expect_same(keys("new/faults"), "new/faults", local)


@pytest.mark.parametrize("what", ["part", "object", "completion"])
def test_a_server_that_stays_overloaded_is_an_error_and_shows_nothing(proxy, keys, medium, what):  # noqa: F811
    def refuse(request):
        is_hit = {"part": is_part(request), "object": request.method == "PUT" and not is_part(request), "completion": is_completion(request)}
        return s3_error(503, "SlowDown") if is_hit[what] else None

    proxy.refuse = refuse
    message = fail(proxy, "ckpt-reshard", medium, "s3://checkpoints/new/overloaded", "--to", "native")
    assert "s3://checkpoints/new/overloaded" in message and "503 SlowDown" in message
    assert "/tessera-spool" not in message
    assert ("kept: " in message) == (what != "part")
    assert "new/overloaded/index.h5" not in names(keys, "new/overloaded")


@pytest.mark.parametrize(("knows_crc32", "name", "wrong", "words"), [
    (True, "x-amz-checksum-crc32", "AAAAAA==", "CRC-32"), (False, "ETag", '"%s"' % ("0" * 32), "ETag")], ids=["crc32", "md5"])
def test_a_checksum_that_stays_wrong_is_an_error(proxy, keys, medium, knows_crc32, name, wrong, words):  # noqa: F811
    def change(request, answer):
        if is_part(request):
            answer.headers[name] = wrong

    proxy.change, proxy.knows_crc32 = change, knows_crc32
    message = fail(proxy, "ckpt-reshard", medium, "s3://checkpoints/new/etag", "--to", "native")
    assert f"expected {words} " in message and f"found {words} " + wrong.strip('"') in message
    assert keys("new/etag") == {}


@pytest.mark.parametrize("knows_crc32", [True, False], ids=["crc32", "md5"])
def test_an_object_of_other_parts_is_an_error(proxy, keys, medium, knows_crc32):  # noqa: F811
    """The server joined other parts than those in the request."""
    def change(request, answer):
        if is_completion(request):
            wrong = (rb"<ChecksumCRC32>....", b"<ChecksumCRC32>AAAA") if knows_crc32 else (rb"[0-9a-f]{32}-", b"0" * 32 + b"-")
            answer.body = re.sub(*wrong, answer.body)

    proxy.change, proxy.knows_crc32 = change, knows_crc32
    message = fail(proxy, "ckpt-reshard", medium, "s3://checkpoints/new/joined.safetensors")
    assert "completion of the upload: expected " + ("CRC-32" if knows_crc32 else "ETag") in message


def test_refusals_say_what_to_do(proxy, keys):  # noqa: F811
    proxy.refuse = lambda request: s3_error(403, "AccessDenied") if request.method == "PUT" else None
    message = fail(proxy, "ckpt-reshard", SOURCE, "s3://checkpoints/new/denied")
    assert "s3:PutObject" in message and "s3://checkpoints/new/denied" in message
    proxy.refuse = None
    for url, expected in (
        ("https://example.org/new", "expected a local path, or s3://BUCKET/PREFIX"),
        ("hf://owner/name", "expected a local path, or s3://BUCKET/PREFIX"),
        ("s3://checkpoints/", "expected s3://BUCKET/PREFIX, found a whole bucket"),
        ("s3://no-such-bucket/new", "a bucket 'no-such-bucket'"),
    ):
        assert expected in fail(proxy, "ckpt-reshard", SOURCE, url)
    message = fail(proxy, "ckpt-reshard", SOURCE, "s3://checkpoints/new/parts", "--part", "0/2")
    assert "expected a local path" in message
    message = fail(proxy, "ckpt-reshard", SOURCE, "local", "--spool", "/tmp")
    assert "--spool: expected DST on s3://" in message
    assert keys("new") == {}


@pytest.mark.parametrize("options", [("--to", "safetensors", "--max-shard-size", "20MiB"), ("--to", "deepspeed"), ("--to", "rank_files", "--world-size", "2"),
                                     ("--to", "native", "--overwrite")], ids=str)
def test_a_missing_right_to_remove_is_told_before_the_upload(proxy, keys, large, options):  # noqa: F811
    """The right is needed at the end: to remove the mark, or the old checkpoint."""
    url = "s3://checkpoints/new/unremovable"
    if "--overwrite" in options:
        succeed(proxy, "ckpt-reshard", SOURCE, url, "--to", "native")
    before = keys("new/unremovable")
    proxy.requests.clear()
    proxy.refuse = lambda request: s3_error(403, "AccessDenied") if request.method == "DELETE" else None
    message = fail(proxy, "ckpt-reshard", large if "safetensors" in options else SOURCE, url, *options)
    proxy.refuse = None
    assert "expected permission to remove objects (s3:DeleteObject)" in message
    assert {request.method for request in writes(proxy)} == {"DELETE"}  # no upload has begun
    assert keys("new/unremovable") == before


def test_no_right_to_remove_is_needed_without_the_mark(proxy, keys, tmp_path):  # noqa: F811
    """Moves that write an index last, or a single file, end with no removal but that of the claim, an upload."""
    proxy.refuse = lambda request: s3_error(403, "AccessDenied") if request.method == "DELETE" and not request.upload_id else None
    for name in ("native", "dcp", "safetensors"):
        succeed(proxy, "ckpt-reshard", SOURCE, f"s3://checkpoints/new/{name}", "--to", name)
    proxy.refuse = None


def test_an_existing_checkpoint_is_refused_and_replaced_on_request(proxy, keys, tmp_path):  # noqa: F811
    url = "s3://checkpoints/new/replaced"
    succeed(proxy, "ckpt-reshard", SOURCE, url, "--to", "native", "--world-size", 4)
    before = keys("new/replaced")
    message = fail(proxy, "ckpt-reshard", SOURCE, url, "--to", "dcp")
    assert f"{url}: the destination exists (--overwrite replaces it)" in message
    assert keys("new/replaced") == before
    proxy.requests.clear()
    succeed(proxy, "ckpt-reshard", SOURCE, url, "--to", "native", "--world-size", 2, "--overwrite")
    expect_same(keys("new/replaced"), "new/replaced", reshard(SOURCE, tmp_path / "local", "--to", "native", "--world-size", 2))
    changes = [(request.method, request.path.rsplit("/", 1)[1]) for request in writes(proxy) if "?" not in request.path]
    assert changes[:4] == [("DELETE", NO_OBJECT), ("DELETE", MARK), ("PUT", MARK), ("DELETE", "index.h5")] and changes[-2:] == [("DELETE", MARK), ("PUT", "index.h5")]
    assert uploads(keys.client) == []


@pytest.mark.parametrize("options", [FORMATS["rank_files"][0], FORMATS["safetensors"][0], ("--to", "deepspeed")], ids=str)
def test_a_folder_without_an_index_is_replaced_whole(proxy, keys, tmp_path, options):  # noqa: F811
    """The old files are removed before the first new one appears. A run that fails there is resumed."""
    url, new = "s3://checkpoints/new/whole", reshard(MODEL, tmp_path / "local", *options)
    succeed(proxy, "ckpt-reshard", SOURCE, url, *options)
    old = names(keys, "new/whole")
    proxy.requests.clear()
    proxy.refuse = lambda request: s3_error(403, "AccessDenied") if (
        request.method == "PUT" and MARK not in request.path and unmarked(keys, "new/whole")) else None
    process = run(proxy, "ckpt-reshard", MODEL, url, *options, "--overwrite")
    proxy.refuse = None
    if process.returncode:
        assert 1 <= len(unmarked(keys, "new/whole")) < len(local_files(new))
        changes = [request.method for request in writes(proxy) if "?" not in request.path]
        assert changes[:len(old) + 3] == ["DELETE", "DELETE", "PUT"] + ["DELETE"] * len(old)
        assert MARK in fail(proxy, "ckpt-inspect", "ls", url)
        succeed(proxy, "ckpt-reshard", MODEL, url, *options, "--overwrite", "--resume")
    else:
        assert names(keys, "new/whole") == ["new/whole/model.safetensors"]
    expect_same(keys("new/whole"), "new/whole", new)
    succeed(proxy, "ckpt-inspect", "verify", url)
    succeed(proxy, "ckpt-reshard", MODEL, url, *options, "--overwrite")
    expect_same(keys("new/whole"), "new/whole", new)


@pytest.mark.parametrize("options", [FORMATS["rank_files"][0], FORMATS["native"][0]], ids=str)
@pytest.mark.parametrize(("method", "path"), [("DELETE", ""), ("DELETE", r"protected/[^.]"), ("PUT", MARK)])
def test_an_old_checkpoint_that_cannot_be_removed_stays_readable(proxy, keys, options, method, path):  # noqa: F811
    """The user may not remove objects (or not those of the checkpoint), or not write the mark."""
    url = "s3://checkpoints/new/protected"
    succeed(proxy, "ckpt-reshard", SOURCE, url, *options)
    old = keys("new/protected")
    proxy.refuse = lambda request: s3_error(403, "AccessDenied") if (
        request.method == method and not request.upload_id and re.search(path, request.path)) else None
    message = fail(proxy, "ckpt-reshard", MODEL, url, *options, "--overwrite")
    proxy.refuse = None
    assert ("s3:DeleteObject" if method == "DELETE" else "s3:PutObject") in message
    assert "the rest of the old checkpoint" not in message
    assert keys("new/protected") == old
    succeed(proxy, "ckpt-inspect", "verify", url)


@pytest.mark.parametrize("config", [(403, "AccessDenied"), (503, "SlowDown")], ids=str)
def test_a_cast_needs_a_readable_config(proxy, keys, tmp_path, config):  # noqa: F811
    """The file says that the numbers are codes, which a cast would destroy."""
    save_file({"l.weight": np.ones((8, 8), np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "somemethod"}}))
    for path in local_files(tmp_path):
        keys.client.put_object(Bucket="checkpoints", Key=f"new/codes/{path.name}", Body=path.read_bytes())
    proxy.refuse = lambda request: s3_error(*config) if "config.json" in request.path and not request.is_list else None
    options = ("--to", "native", "--extra-files", "leave")
    assert "config.json" in fail(proxy, "ckpt-reshard", "s3://checkpoints/new/codes", tmp_path / "cast", *options, "--cast", "float16")
    assert not (tmp_path / "cast").exists()
    succeed(proxy, "ckpt-reshard", "s3://checkpoints/new/codes", tmp_path / "moved", *options)


@pytest.mark.parametrize(("name", "format"), [("step", "safetensors"), ("step.safetensors", "safetensors"), ("step.pt", "torch")])
def test_one_object_is_replaced_in_one_step(proxy, keys, tmp_path, name, format):  # noqa: F811
    url = f"s3://checkpoints/new/{name}"
    succeed(proxy, "ckpt-reshard", MODEL, url, "--to", format)
    proxy.requests.clear()
    succeed(proxy, "ckpt-reshard", MODEL, url, "--to", format, "--cast", "float16", "--overwrite")
    assert [request.method for request in writes(proxy)] == ["PUT"]
    expect_same(keys("new/step"), f"new/{name}", reshard(MODEL, tmp_path / name, "--to", format, "--cast", "float16"))


def write_shards(folder, number):
    """Writes a model of 4 tensors of 16 KB. Two such models have files of the same names and sizes."""
    folder.mkdir()
    save_file({f"layer.{i}.weight": np.full((1000, 4), number, np.float32) for i in range(4)}, folder / "model.safetensors")
    return folder


def test_sharded_models_of_equal_names_are_not_mixed(proxy, keys, tmp_path):  # noqa: F811
    """The shards can be read without the index, so no old one may be there when the first new one appears."""
    url, options = "s3://checkpoints/new/shards", ("--to", "safetensors", "--max-shard-size", 20000)
    old, new = write_shards(tmp_path / "old", 1), write_shards(tmp_path / "new", 2)
    succeed(proxy, "ckpt-reshard", old, url, *options)
    names_of_old = names(keys, "new/shards")
    proxy.refuse = lambda request: s3_error(403, "AccessDenied") if request.method == "PUT" and "model-00002-of" in request.path else None
    fail(proxy, "ckpt-reshard", new, url, *options, "--overwrite")
    proxy.refuse = None
    there, expected = keys("new/shards"), reshard(new, tmp_path / "local", *options)
    assert there.pop(f"new/shards/{MARK}")
    assert sorted(names_of_old) == sorted(f"new/shards/{file.name}" for file in local_files(expected))
    for key, content in there.items():
        assert content == (expected / key.rsplit("/", 1)[1]).read_bytes(), key
    assert "new/shards/model-00002-of-00004.safetensors" not in there
    succeed(proxy, "ckpt-reshard", new, url, *options, "--overwrite", "--resume")
    expect_same(keys("new/shards"), "new/shards", expected)
    assert uploads(keys.client) == []


@pytest.mark.parametrize("old", ["dcp", "safetensors"])
def test_a_replacement_is_resumed_when_only_an_extra_file_has_appeared(old, proxy, keys, tmp_path):  # noqa: F811
    url, options = "s3://checkpoints/new/half", ("--to", "native", "--world-size", 2, "--overwrite")
    succeed(proxy, "ckpt-reshard", SOURCE, url, "--to", old)
    source = write_shards(tmp_path / "source", 1)
    (source / "config.json").write_text("{}")
    proxy.refuse = lambda request: s3_error(503, "SlowDown") if request.method == "PUT" and ".h5" in request.path else None
    assert "--resume continues it" in fail(proxy, "ckpt-reshard", source, url, *options)
    assert unmarked(keys, "new/half") == ["new/half/config.json"]
    proxy.refuse = None
    succeed(proxy, "ckpt-reshard", source, url, *options, "--resume")
    expect_same(keys("new/half"), "new/half", reshard(source, tmp_path / "local", "--to", "native", "--world-size", 2))
    assert uploads(keys.client) == []


def test_a_folder_that_no_interrupted_run_left_is_not_replaced_by_resume(proxy, keys, bucket, tmp_path):  # noqa: F811
    url = "s3://checkpoints/new/notes"
    bucket.put_object(Bucket="checkpoints", Key="new/notes/config.json", Body=b"{}")
    source = write_shards(tmp_path / "source", 1)
    (source / "config.json").write_text("{}")
    assert "no checkpoint" in fail(proxy, "ckpt-reshard", source, url, "--to", "native", "--overwrite", "--resume")
    assert names(keys, "new/notes") == ["new/notes/config.json"]


@pytest.mark.parametrize("resume", [(), ("--resume",)], ids=str)
def test_a_checkpoint_on_a_store_does_not_replace_itself(resume, proxy, keys):  # noqa: F811
    url = "s3://checkpoints/new/itself"
    succeed(proxy, "ckpt-reshard", SOURCE, url)
    proxy.requests.clear()
    message = fail(proxy, "ckpt-reshard", url, url + "/", "--world-size", 3, "--overwrite", *resume)
    assert "expected a URL other than that of the source, found the same URL" in message
    assert writes(proxy) == []


def test_the_index_appears_after_extra_files_with_names_like_an_index(proxy, keys, tmp_path):  # noqa: F811
    source = write_shards(tmp_path / "source", 1)
    (source / "voices.index.json").write_text(json.dumps({"voices": "x" * 5000}))
    succeed(proxy, "ckpt-reshard", source, "s3://checkpoints/new/voices", "--to", "safetensors", "--max-shard-size", 20000)
    put = [request.path.rsplit("/", 1)[1] for request in writes(proxy) if request.method == "PUT"]
    assert "voices.index.json" in put and put[-1] == "model.safetensors.index.json"


def test_an_object_and_a_folder_of_one_name_are_not_replaced(proxy, keys, bucket):  # noqa: F811
    url = "s3://checkpoints/new/both"
    succeed(proxy, "ckpt-reshard", SOURCE, url)
    bucket.put_object(Bucket="checkpoints", Key="new/both", Body=b"a note")
    before = keys("new/both")
    for options in ((), ("--overwrite",), ("--overwrite", "--resume")):
        fail(proxy, "ckpt-reshard", MODEL, url, *options)
    assert "found both: an object of this name, and 5 below it, such as 'index.h5'" in fail(proxy, "ckpt-reshard", MODEL, url, "--overwrite")
    assert keys("new/both") == before


def test_files_of_others_are_not_replaced(proxy, keys, bucket):  # noqa: F811
    url = "s3://checkpoints/new/others"
    succeed(proxy, "ckpt-reshard", SOURCE, url, "--to", "native")
    bucket.put_object(Bucket="checkpoints", Key="new/others/thesis.tex", Body=b"years of work")
    before = keys("new/others")
    message = fail(proxy, "ckpt-reshard", SOURCE, url, "--to", "native", "--overwrite")
    assert "thesis.tex" in message
    assert keys("new/others") == before


def test_an_object_that_appears_meanwhile_is_not_replaced(proxy, keys, bucket):  # noqa: F811
    def refuse(request):
        if request.method == "PUT" and request.path.endswith("/index.h5"):
            bucket.put_object(Bucket="checkpoints", Key="new/race/index.h5", Body=b"of another program")

    proxy.refuse = refuse
    message = fail(proxy, "ckpt-reshard", SOURCE, "s3://checkpoints/new/race", "--to", "native")
    assert "s3://checkpoints/new/race/index.h5: object: expected no object at this URL, found an object" in message
    assert keys("new/race")["new/race/index.h5"] == b"of another program"


def test_a_checkpoint_that_changes_meanwhile_is_not_replaced(proxy, keys, bucket, medium):  # noqa: F811
    url = "s3://checkpoints/new/changed"
    succeed(proxy, "ckpt-reshard", SOURCE, url, "--to", "native")

    def refuse(request):
        if is_part(request):
            bucket.put_object(Bucket="checkpoints", Key="new/changed/later.tex", Body=b"x")

    proxy.refuse = refuse
    message = fail(proxy, "ckpt-reshard", medium, url, "--to", "native", "--overwrite")
    assert f"{url}/later.tex: object to replace: expected the object that was there at the start: none" in message
    assert "new/changed/index.h5" in names(keys, "new/changed")


def without_conditions(request):
    """Behaves like a server that ignores `If-None-Match`."""
    for header in [header for header in request.headers if header.lower() == "if-none-match"]:
        del request.headers[header]


def test_a_late_writer_cannot_damage_a_checkpoint_without_conditions(proxy, keys, tmp_path):  # noqa: F811
    """One writer stops before its first file appears. Meanwhile another writer must not complete a checkpoint."""
    url, others, options = "s3://checkpoints/new/late", [], ("--to", "native", "--world-size", 1)

    def refuse(request):
        without_conditions(request)
        if request.method == "PUT" and not others:
            others.append(None)
            others[0] = run(proxy, "ckpt-reshard", MODEL, url, *options, TMPDIR=str(tmp_path))  # another spool, as on another machine

    proxy.refuse = refuse
    succeed(proxy, "ckpt-reshard", SOURCE, url, *options)
    assert others[0].returncode == 2
    assert f"{url}: uploads: an interrupted run has left" in others[0].stderr
    expect_same(keys("new/late"), "new/late", reshard(SOURCE, tmp_path / "local", *options))
    succeed(proxy, "ckpt-inspect", "verify", url)
    assert uploads(keys.client) == []


@pytest.mark.parametrize("name", ["together", "together.safetensors"])
def test_of_two_writers_that_begin_together_both_see_each_other(proxy, keys, bucket, name):  # noqa: F811
    """The other writer's claim begins after this writer has listed the uploads at its start."""
    other = f"new/{name}/.tessera-claim-other"

    def refuse(request):
        without_conditions(request)
        if request.method == "POST" and f"/checkpoints/new/{name}/.tessera-claim-" in request.path:
            bucket.create_multipart_upload(Bucket="checkpoints", Key=other)

    proxy.refuse = refuse
    process = run(proxy, "ckpt-reshard", SOURCE, f"s3://checkpoints/new/{name}", "--to", "native" if name == "together" else "safetensors")
    assert process.returncode == 2, process.stderr
    assert f"s3://checkpoints/new/{name}: claim: expected no upload of another program, found '{other}'" in process.stderr
    assert keys("new/together") == {}
    assert [upload["Key"] for upload in uploads(bucket)] == [other]


@pytest.mark.parametrize("name", ["index.h5", "model.safetensors", "rank-00000.h5"])
def test_a_checkpoint_that_another_machine_writes_meanwhile_is_not_mixed(proxy, keys, bucket, medium, name):  # noqa: F811
    """The server ignores `If-None-Match`. The other machine's object appears after the list at the start."""
    def refuse(request):
        without_conditions(request)
        if is_completion(request) and name != "rank-00000.h5":
            bucket.put_object(Bucket="checkpoints", Key="new/mixed/" + name, Body=b"of another machine")

    def change(request, answer):
        if is_completion(request) and name == "rank-00000.h5":
            bucket.put_object(Bucket="checkpoints", Key="new/mixed/" + name, Body=b"of another machine")

    proxy.refuse, proxy.change = refuse, change
    process = run(proxy, "ckpt-reshard", medium, "s3://checkpoints/new/mixed", "--to", "native")
    assert process.returncode == 2, process.stderr
    assert f"s3://checkpoints/new/mixed/{name}: object: expected " in process.stderr
    assert "another program writes here" in process.stderr
    assert keys("new/mixed")["new/mixed/" + name] == b"of another machine"
    assert name == "index.h5" or "new/mixed/index.h5" not in names(keys, "new/mixed")


def test_files_that_appear_with_the_index_are_named(proxy, keys, bucket):  # noqa: F811
    def refuse(request):
        if request.method == "PUT" and request.path.endswith("/index.h5"):
            bucket.put_object(Bucket="checkpoints", Key="new/both/model.safetensors", Body=b"of another machine")

    proxy.refuse = refuse
    process = run(proxy, "ckpt-reshard", SOURCE, "s3://checkpoints/new/both", "--to", "native")
    assert process.returncode == 2
    assert "s3://checkpoints/new/both/model.safetensors: object: expected none, found 18 bytes" in process.stderr


def test_odd_keys_are_written_as_they_are_named(proxy, keys):  # noqa: F811
    for key in ("new/a//b", "new/./c", "new/../d"):
        succeed(proxy, "ckpt-reshard", SOURCE, "s3://checkpoints/" + key, "--to", "native")
        assert key + "/index.h5" in names(keys, key), key
        succeed(proxy, "ckpt-inspect", "diff", "s3://checkpoints/" + key, SOURCE)
    for key in ("new/e/.", "new/e/.."):
        message = fail(proxy, "ckpt-reshard", SOURCE, "s3://checkpoints/" + key)
        assert f"s3://checkpoints/{key}: destination: expected a URL that ends in a name" in message
        assert "/tessera-spool" not in message


def test_a_spool_that_does_not_exist(proxy, keys, tmp_path):  # noqa: F811
    process = run(proxy, "ckpt-reshard", SOURCE, "s3://checkpoints/new/spool", "--spool", tmp_path / "none")
    assert process.returncode == 4
    assert f"{tmp_path}/none: spool: expected an existing folder to write into, found none" in process.stderr


def test_a_server_without_conditional_writes(proxy, keys):  # noqa: F811
    proxy.refuse = lambda request: s3_error(501, "NotImplemented") if "If-None-Match" in request_names(request) else None
    succeed(proxy, "ckpt-reshard", SOURCE, "s3://checkpoints/new/old-server", "--to", "native", AWS_MAX_ATTEMPTS="1")
    succeed(proxy, "ckpt-inspect", "verify", "s3://checkpoints/new/old-server")


def request_names(request):
    return {"-".join(word.capitalize() for word in name.split("-")) for name in request.headers}


def killed(proxy, large, url, *options):  # noqa: F811
    """Kills a move when its second part has arrived."""
    arrived, release = threading.Event(), threading.Event()
    parts = []

    def change(request, answer):
        if is_part(request):
            parts.append(request)
            if len(parts) >= 2:
                arrived.set()
                release.wait(30)

    proxy.change = change
    process = subprocess.Popen(
        [BIN / "ckpt-reshard", large, url, *options], env=environment(proxy), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert arrived.wait(60)
    process.send_signal(signal.SIGKILL)
    process.wait()
    proxy.change = None
    release.set()
    time.sleep(0.2)
    proxy.requests.clear()


@pytest.mark.parametrize(("options", "knows_crc32"), [(("--to", "native"), True), (("--to", "safetensors"), True), (("--to", "native"), False)], ids=str)
def test_a_killed_move_shows_nothing_and_is_resumed(proxy, keys, large, options, knows_crc32, tmp_path):  # noqa: F811
    url = "s3://checkpoints/new/killed"
    proxy.knows_crc32 = knows_crc32
    arguments = ("ckpt-reshard", large, url, *options, "--spool", tmp_path)
    killed(proxy, *arguments[1:])
    assert keys("new/killed") == {}
    assert len(uploads(keys.client)) == 1
    message = fail(proxy, *arguments)
    assert f"{url}: uploads: an interrupted run has left 1 unfinished upload at this URL" in message
    assert "--resume" in message and "--discard" in message
    proxy.requests.clear()
    succeed(proxy, *arguments, "--resume")
    sent = {request.path.split("partNumber=")[1].split("&")[0] for request in proxy.requests if is_part(request)}
    num_parts = 3 if "native" in options else 5
    assert len(sent) < num_parts and "1" in sent, sent  # the first part is always sent last
    expect_same(keys("new/killed"), "new/killed", reshard(large, tmp_path / "local", *options))
    assert uploads(keys.client) == []
    assert not list(tmp_path.glob("tessera-spool-*"))


def test_a_run_that_resumes_otherwise_leaves_no_parts(proxy, keys, large, tmp_path):  # noqa: F811
    """The interrupted run wrote native, and the resumed run writes another format. It removes the parts of the first
    run, which would cost money."""
    killed(proxy, large, "s3://checkpoints/new/otherwise", "--to", "native", "--spool", tmp_path)
    succeed(proxy, "ckpt-reshard", large, "s3://checkpoints/new/otherwise", "--to", "dcp", "--spool", tmp_path, "--resume")
    assert uploads(keys.client) == []


def test_the_spool_of_a_killed_move_is_removed_by_a_later_move_to_another_url(proxy, keys, large, tmp_path):  # noqa: F811
    for name, options in (("native", ("--to", "native")), ("file.safetensors", ())):
        killed(proxy, large, f"s3://checkpoints/new/{name}", *options, "--spool", tmp_path)
    spools = list(tmp_path.glob("tessera-spool-*"))
    (tmp_path / "tessera-spool-notes").mkdir()
    assert len(spools) == 2
    for number, expected in ((1, [*spools, tmp_path / "tessera-spool-notes"]), (2, [tmp_path / "tessera-spool-notes"])):
        succeed(proxy, "ckpt-reshard", SOURCE, f"s3://checkpoints/new/later{number}", "--spool", tmp_path)
        assert sorted(tmp_path.iterdir()) == sorted(expected)
        for path in tmp_path.rglob("*"):
            os.utime(path, (time.time() - 25 * 3600,) * 2)


def wait_until_unchanged(folder, nbytes):
    """Waits until the files have at least so many bytes, and none has changed for half a second."""
    before = None
    for _ in range(120):
        states = {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}
        if states == before and sum(size for size, _ in states.values()) >= nbytes:
            return
        before = states
        time.sleep(0.5)
    raise AssertionError(before)


def test_the_spool_of_a_living_move_stays(proxy, keys, large, tmp_path):  # noqa: F811
    """However long the move has written nothing."""
    arrived, release = threading.Event(), threading.Event()

    def change(request, answer):
        if is_part(request):
            arrived.set()
            release.wait(60)

    proxy.change = change
    url = "s3://checkpoints/new/living"
    move = subprocess.Popen([BIN / "ckpt-reshard", large, url, "--to", "safetensors", "--spool", tmp_path, "--quiet"], env=environment(proxy))
    assert arrived.wait(60)
    (living,) = tmp_path.glob("tessera-spool-*")
    wait_until_unchanged(living, large.stat().st_size)
    for path in tmp_path.rglob("*"):
        os.utime(path, (time.time() - 25 * 3600,) * 2)
    proxy.change = None
    succeed(proxy, "ckpt-reshard", SOURCE, "s3://checkpoints/new/second", "--spool", tmp_path)
    assert all(path.stat().st_mtime < time.time() - 24 * 3600 for path in living.rglob("*"))
    assert list(living.glob("living.partial/*"))
    release.set()
    assert move.wait(60) == 0
    expect_same(keys("new/living"), "new/living", reshard(large, tmp_path / "local", "--to", "safetensors"))


def test_a_refused_discard_leaves_no_spool(proxy, keys, large, tmp_path):  # noqa: F811
    url = "s3://checkpoints/new/forbidden"
    killed(proxy, large, url, "--to", "native")
    proxy.refuse = lambda request: s3_error(403, "AccessDenied") if request.method == "DELETE" else None
    message = fail(proxy, "ckpt-reshard", large, url, "--to", "native", "--spool", tmp_path, "--discard")
    assert "s3:AbortMultipartUpload" in message
    assert os.listdir(tmp_path) == []


def test_an_interrupted_move_says_what_is_kept(proxy, keys, large):  # noqa: F811
    """The signal is sent when a part has arrived. The source's last bytes are delivered only after the signal."""
    url = "s3://checkpoints/new/interrupted"
    keys.client.put_object(Bucket="checkpoints", Key="new/source.safetensors", Body=large.read_bytes())
    process, has_signal = None, threading.Event()

    def refuse(request):
        begin = request.range.removeprefix("bytes=").split("-")[0]
        if request.method == "GET" and begin and int(begin) > 24 * MIB:
            has_signal.wait(30)
            time.sleep(0.3)

    def change(request, answer):
        if is_part(request) and not has_signal.is_set():
            process.send_signal(signal.SIGINT)
            has_signal.set()

    proxy.refuse, proxy.change = refuse, change
    process = subprocess.Popen(
        [BIN / "ckpt-reshard", "s3://checkpoints/new/source.safetensors", url, "--to", "safetensors"],
        env=environment(proxy), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    message = process.communicate(timeout=60)[1]
    assert process.returncode == 130, message
    assert "kept: " in message and f" bytes of unfinished uploads at {url}" in message and "--resume" in message
    assert keys("new/interrupted") == {}


def test_a_file_replaces_a_folder_and_a_folder_a_file(proxy, keys):  # noqa: F811
    url = "s3://checkpoints/new/kind.pt"
    for options in (("--to", "native"), ("--to", "torch"), ("--to", "dcp")):
        succeed(proxy, "ckpt-reshard", SOURCE, url, *options, "--overwrite")
        succeed(proxy, "ckpt-inspect", "diff", url, SOURCE)
        assert (names(keys, "new/kind.pt") == ["new/kind.pt"]) == (options[1] == "torch")


def test_a_killed_move_is_discarded(proxy, keys, large, tmp_path):  # noqa: F811
    url = "s3://checkpoints/new/discarded"
    killed(proxy, large, url, "--to", "native", "--spool", tmp_path)
    succeed(proxy, "ckpt-reshard", large, url, "--to", "native", "--spool", tmp_path, "--discard")
    assert any(request.method == "DELETE" for request in proxy.requests)
    assert uploads(keys.client) == []
    succeed(proxy, "ckpt-inspect", "verify", url)


def test_a_move_interrupted_at_its_end_is_resumed(proxy, keys, tmp_path):  # noqa: F811
    """The data files have appeared, the index has not. A second run must not take them for another checkpoint."""
    url = "s3://checkpoints/new/end"
    proxy.refuse = lambda request: s3_error(503, "SlowDown") if request.method == "PUT" and "index.h5" in request.path else None
    fail(proxy, "ckpt-reshard", SOURCE, url, "--to", "native", "--world-size", 2)
    assert len(keys("new/end")) == 2
    proxy.refuse = None
    assert "destination exists" in fail(proxy, "ckpt-reshard", SOURCE, url, "--to", "native", "--world-size", 2)
    succeed(proxy, "ckpt-reshard", SOURCE, url, "--to", "native", "--world-size", 2, "--resume")
    expect_same(keys("new/end"), "new/end", reshard(SOURCE, tmp_path / "local", "--to", "native", "--world-size", 2))


@pytest.mark.parametrize("options", [("--to", "native"), ("--to", "safetensors", "--max-shard-size", "13MiB")], ids=str)
@pytest.mark.parametrize("ignores_conditions", [False, True])
def test_a_complete_checkpoint_is_resumed(options, ignores_conditions, proxy, keys, medium, tmp_path):  # noqa: F811
    """The first run ended after its last file had appeared, before it could say so."""
    url = "s3://checkpoints/new/complete"
    proxy.refuse = without_conditions if ignores_conditions else None
    for _ in "ab":
        succeed(proxy, "ckpt-reshard", medium, url, *options, "--resume")
    expect_same(keys("new/complete"), "new/complete", reshard(medium, tmp_path / "local", *options))
    assert uploads(keys.client) == []


class OtherEtags:
    """Makes the ETags of a proxy no MD5 digests, as those of encrypted objects (SSE-KMS) are."""

    ETAG = rb"(?<=<ETag>)(?:\"|&quot;)?([0-9a-f]{32})([-0-9]*)(?:\"|&quot;)?(?=</ETag>)"

    def __init__(self, proxy, says_so):  # noqa: F811
        self.says_so, self.md5s = says_so, {}
        proxy.refuse, proxy.change = self.restore, self.change

    def other(self, found):
        etag = hashlib.md5(b"salt" + found[1]).hexdigest().encode()
        self.md5s[etag] = found[1]
        return b'"' + etag + found[2] + b'"'

    def restore(self, request):
        for name in [name for name in request.headers if name.lower() == "if-match"]:
            del request.headers[name]
        request.body = re.sub(self.ETAG, lambda found: b'"' + self.md5s[found[1]] + b'"', request.body)
        request.headers["Content-Length"] = str(len(request.body))

    def change(self, request, answer):
        for name in [name for name in answer.headers if name.lower() == "etag"]:
            answer.headers[name] = re.sub(rb'"([0-9a-f]{32})([-0-9]*)"', self.other, answer.headers[name].encode()).decode()
        if b"<ETag>" in answer.body:
            answer.body = re.sub(self.ETAG, self.other, answer.body)
        if self.says_so:
            answer.headers["x-amz-server-side-encryption"] = "aws:kms"


@pytest.mark.parametrize("says_so", [True, False])
def test_objects_whose_etags_are_no_digests_are_resumed(says_so, proxy, keys, large, medium, tmp_path):  # noqa: F811
    """The first run ended after its last file had appeared. The bytes are compared, so that another checkpoint stays."""
    OtherEtags(proxy, says_so)
    for name, source, options in (("small", SOURCE, ("--world-size", 2)), ("parts", medium, ("--to", "safetensors"))):
        arguments = ("ckpt-reshard", source, f"s3://checkpoints/new/{name}", *options)
        succeed(proxy, *arguments)
        succeed(proxy, *arguments, "--resume")
        expect_same(keys(f"new/{name}"), f"new/{name}", reshard(source, tmp_path / name, *options))
    assert uploads(keys.client) == []
    old, new = write_shards(tmp_path / "old", 1), write_shards(tmp_path / "new", 2)
    succeed(proxy, "ckpt-reshard", old, "s3://checkpoints/new/other", "--world-size", 2)
    before = keys("new/other")
    message = fail(proxy, "ckpt-reshard", new, "s3://checkpoints/new/other", "--world-size", 2, "--resume")
    assert "object to resume: expected the bytes that this run writes" in message
    assert keys("new/other") == before


@pytest.mark.parametrize("source", ["small", "parts"])
def test_a_lost_answer_does_no_harm_if_etags_are_no_digests(source, proxy, keys, medium, tmp_path):  # noqa: F811
    """The repeated request finds the object of the first one."""
    etags = OtherEtags(proxy, says_so=True)

    def change(request, answer):
        etags.change(request, answer)
        if answer.status < 300 and (is_completion(request) or (request.method == "PUT" and not is_part(request))):
            lost.add(request.path)
            answer.cut_after, answer.declared_nbytes = 0, len(answer.body) + 1

    def refuse(request):
        etags.restore(request)
        if request.path in lost and is_completion(request):
            return s3_error(404, "NoSuchUpload")

    lost, proxy.change, proxy.refuse = set(), change, refuse
    source = {"small": SOURCE, "parts": medium}[source]
    succeed(proxy, "ckpt-reshard", source, "s3://checkpoints/new/lost", "--to", "native", AWS_MAX_ATTEMPTS="4")
    assert lost
    expect_same(keys("new/lost"), "new/lost", reshard(source, tmp_path / "lost", "--to", "native"))


@pytest.mark.parametrize("options", [("--to", "native", "--world-size", 4), ("--to", "native", "--world-size", 2),
                                     ("--to", "dcp", "--world-size", 2)], ids=str)
@pytest.mark.parametrize("ignores_conditions", [False, True])
def test_a_run_that_resumes_changes_no_other_checkpoint(options, ignores_conditions, proxy, keys, tmp_path):  # noqa: F811
    url = "s3://checkpoints/new/other"
    old, new = write_shards(tmp_path / "old", 1), write_shards(tmp_path / "new", 2)
    succeed(proxy, "ckpt-reshard", old, url, "--world-size", 2)
    before = keys("new/other")
    proxy.refuse = without_conditions if ignores_conditions else None
    message = fail(proxy, "ckpt-reshard", new, url, *options, "--resume")
    assert "object to resume: expected " in message
    assert keys("new/other") == before


@pytest.mark.parametrize(("old", "new", "last"), [("dcp", "native", "rank-00001.h5"), ("native", "dcp", "__1_0.distcp"),
                                                  ("safetensors", "dcp", "__1_0.distcp")])
def test_a_replacement_by_another_format_is_resumed_after_its_files_began_to_appear(old, new, last, proxy, keys, tmp_path):  # noqa: F811
    """The old index is gone, and not all new files are there."""
    url = "s3://checkpoints/new/formats"
    succeed(proxy, "ckpt-reshard", SOURCE, url, "--to", old)
    arguments = ("ckpt-reshard", SOURCE, url, "--to", new, "--world-size", 2, "--overwrite", "--resume")
    proxy.refuse = lambda request: s3_error(503, "SlowDown") if request.method == "PUT" and last in request.path else None
    fail(proxy, *arguments)
    proxy.refuse = None
    assert keys("new/formats")
    succeed(proxy, *arguments)
    expect_same(keys("new/formats"), "new/formats", reshard(SOURCE, tmp_path / "local", "--to", new, "--world-size", 2))


def half_replaced(proxy, url):  # noqa: F811
    """A move was killed when it had removed the index and the first file of sharded safetensors."""
    succeed(proxy, "ckpt-reshard", SOURCE, url, *FORMATS["sharded"][0])
    refuse_after(proxy, 3, is_removal)  # the first is of the mark, which is not there yet
    fail(proxy, "ckpt-reshard", SOURCE, url, "--to", "native", "--overwrite", AWS_MAX_ATTEMPTS="1")
    proxy.refuse = None


@pytest.mark.parametrize("option", ["--resume", "--discard"])
def test_a_half_removed_checkpoint_is_replaced(option, proxy, keys, large, tmp_path):  # noqa: F811
    """Also after a further run was killed before it removed anything."""
    url = "s3://checkpoints/new/half"
    half_replaced(proxy, url)
    left = names(keys, "new/half")
    assert len(left) == 3 and left[0].endswith(MARK)
    message = fail(proxy, "ckpt-reshard", SOURCE, url, "--to", "native", "--overwrite")
    assert f"{url}: destination: an interrupted run has left this checkpoint incomplete" in message
    assert "--resume" in message and "--discard" in message
    succeed(proxy, "ckpt-reshard", SOURCE, url, "--to", "native", "--overwrite", option, "--dry-run")
    killed(proxy, large, url, "--to", "native", "--overwrite", option)
    assert names(keys, "new/half") == left
    succeed(proxy, "ckpt-reshard", SOURCE, url, "--to", "native", "--overwrite", option)
    expect_same(keys("new/half"), "new/half", reshard(SOURCE, tmp_path / "local", "--to", "native"))
    assert uploads(keys.client) == []


def test_python_replaces_a_half_removed_checkpoint(proxy, keys, jobs, tmp_path):  # noqa: F811
    url = "s3://checkpoints/new/half"
    half_replaced(proxy, url)
    run_job(environment(proxy), tmp_path, 1, jobs.replace, str(SOURCE), url, str(tmp_path))
    expect_same(keys("new/half"), "new/half", reshard(SOURCE, tmp_path / "local", "--to", "native"))
    assert uploads(keys.client) == []


def test_a_dry_run_writes_nothing(proxy, keys):  # noqa: F811
    succeed(proxy, "ckpt-reshard", SOURCE, "s3://checkpoints/new/dry", "--dry-run")
    assert writes(proxy) == [] and keys("new/dry") == {}


def test_extra_files_and_a_source_on_the_store(proxy, keys, bucket, tmp_path):  # noqa: F811
    for file in local_files(MODEL):
        bucket.put_object(Bucket="checkpoints", Key=f"new/source/{file.name}", Body=file.read_bytes())
    extra = {"config.json": b"{}", "empty.txt": b""}
    for name, content in extra.items():
        bucket.put_object(Bucket="checkpoints", Key=f"new/source/{name}", Body=content)
    succeed(proxy, "ckpt-reshard", "s3://checkpoints/new/source", "s3://checkpoints/new/moved", "--to", "native")
    assert {name: keys("new/moved")[f"new/moved/{name}"] for name in extra} == extra
    succeed(proxy, "ckpt-inspect", "diff", "s3://checkpoints/new/moved", MODEL)


@pytest.mark.parametrize("destination", ["a.safetensors", "a.safetensors/"])
def test_a_sum_does_not_replace_its_own_source(destination, proxy, bucket, tmp_path):  # noqa: F811
    for name, number in (("a", 1.0), ("b", 3.0)):
        save_file({"w": np.array([number])}, tmp_path / name)
        bucket.put_object(Bucket="checkpoints", Key=f"new/{name}.safetensors", Body=(tmp_path / name).read_bytes())
    sources = [f"s3://checkpoints/new/{name}.safetensors" for name in "ab"]
    process = run(proxy, "ckpt-reshard", "combine", "s3://checkpoints/new/" + destination, "--average", *sources, "--overwrite")
    assert process.returncode == 2 and "expected a path that is not a source" in process.stderr
    assert writes(proxy) == []


# Interrupted while objects appear or are removed
def is_object(request):
    """Whether the request makes an object appear."""
    return is_completion(request) or (request.method == "PUT" and not is_part(request))


def is_removal(request):
    return request.method == "DELETE" and not request.upload_id and NO_OBJECT not in request.path


def refuse_after(proxy, number, is_counted):  # noqa: F811
    """The keys lose their permissions after some requests of the kind. Returns the list of such requests."""
    seen = []

    def refuse(request):
        if not is_counted(request):
            return None
        seen.append(request)  # several threads do this at the same time
        return s3_error(403, "AccessDenied") if seen.index(request) >= number else None

    proxy.refuse = refuse
    return seen


@pytest.mark.parametrize("option", ["--resume", "--discard"])
@pytest.mark.parametrize("options", [("--to", "rank_files", "--world-size", 1), ("--to", "rank_files", "--world-size", 2),
                                     ("--to", "safetensors"), FORMATS["sharded"][0], ("--to", "deepspeed")], ids=str)
def test_objects_of_an_interrupted_move_are_no_checkpoint_and_do_not_block(options, option, proxy, keys, tmp_path):  # noqa: F811
    """Also files of ranks of one rank, where the names do not show that a whole item, such as the optimizer, is missing."""
    local = reshard(SOURCE, tmp_path / "local", *options)
    num_files = len(list(local_files(local)))
    num_first = 1 if num_files > 8 else 0
    for number in {*range(num_first, num_files, 1 + num_files // 8), num_files - 1}:
        url = f"s3://checkpoints/new/move{number}"
        refuse_after(proxy, number, is_object)
        message = fail(proxy, "ckpt-reshard", SOURCE, url, *options, AWS_MAX_ATTEMPTS="1")
        proxy.refuse = None
        assert ("kept: " in message and "--discard" in message) == bool(names(keys, f"new/move{number}/"))
        fail(proxy, "ckpt-inspect", "ls", url)
        fail(proxy, "ckpt-inspect", "verify", url)
        succeed(proxy, "ckpt-reshard", SOURCE, url, *options, option)
        expect_same(keys(f"new/move{number}/"), f"new/move{number}", local)


def test_a_download_of_an_incomplete_checkpoint_is_refused_too(proxy, keys, tmp_path):  # noqa: F811
    options = ("--to", "rank_files", "--world-size", 1)
    refuse_after(proxy, 3, is_object)
    fail(proxy, "ckpt-reshard", SOURCE, "s3://checkpoints/new/half", *options, AWS_MAX_ATTEMPTS="1")
    (tmp_path / "half").mkdir()
    for key, content in keys("new/half/").items():
        (tmp_path / "half" / key.rsplit("/", 1)[1]).write_bytes(content)
    message = fail(proxy, "ckpt-inspect", "ls", tmp_path / "half")
    assert f"{tmp_path / 'half'}: checkpoint: expected a complete one, found '{MARK}' beside its files" in message


@pytest.mark.parametrize("old", ["rank_files", "safetensors", "deepspeed"])
def test_an_interrupted_replacement_shows_no_part_of_a_checkpoint(old, proxy, keys, tmp_path):  # noqa: F811
    options = ("--to", "rank_files", "--world-size", 1)
    local = reshard(SOURCE, tmp_path / "local", *options)
    for number in range(0, 100, 7 if old == "deepspeed" else 1):
        url = f"s3://checkpoints/new/replaced{number}"
        succeed(proxy, "ckpt-reshard", SOURCE, url, *(options if old == "rank_files" else ("--to", old)))
        before = keys(f"new/replaced{number}/")
        seen = refuse_after(proxy, number, lambda request: is_object(request) or is_removal(request))
        process = run(proxy, "ckpt-reshard", SOURCE, url, *options, "--overwrite", AWS_MAX_ATTEMPTS="1")
        proxy.refuse = None
        if len(seen) <= number:
            break
        assert process.returncode == 4, process.stderr
        if keys(f"new/replaced{number}/") != before:
            fail(proxy, "ckpt-inspect", "ls", url)
            if names(keys, f"new/replaced{number}/") != [f"new/replaced{number}/{MARK}"]:
                assert "--discard" in fail(proxy, "ckpt-reshard", SOURCE, url, *options, "--overwrite")
        succeed(proxy, "ckpt-reshard", SOURCE, url, *options, "--overwrite", "--discard")
        expect_same(keys(f"new/replaced{number}/"), f"new/replaced{number}", local)
    assert process.returncode == 0 and number >= 7


@pytest.mark.parametrize("name", ["sharded", "rank_files", "dcp"])
def test_discard_alone_replaces_no_complete_checkpoint(name, proxy, keys):  # noqa: F811
    url = "s3://checkpoints/new/whole"
    succeed(proxy, "ckpt-reshard", SOURCE, url, *FORMATS[name][0])
    before = keys("new/whole/")
    assert "destination exists" in fail(proxy, "ckpt-reshard", SOURCE, url, *FORMATS[name][0], "--discard")
    keys.client.put_object(Bucket="checkpoints", Key="new/notes/model.safetensors.values.json", Body=b"of somebody else")
    assert "destination exists" in fail(proxy, "ckpt-reshard", SOURCE, "s3://checkpoints/new/notes", "--discard")
    assert keys("new/whole/") == before and len(keys("new/notes/")) == 1


@pytest.mark.parametrize(("options", "index"), [(FORMATS["sharded"][0], "model.safetensors.index.json"),
                                               (("--to", "deepspeed"), "latest_universal")], ids=["sharded", "deepspeed"])
def test_discard_alone_replaces_no_files_that_are_complete_without_their_index(options, index, proxy, keys, jobs, tmp_path):  # noqa: F811
    url = "s3://checkpoints/new/whole"
    succeed(proxy, "ckpt-reshard", SOURCE, url, *options)
    keys.client.delete_object(Bucket="checkpoints", Key="new/whole/" + index)
    before = keys("new/whole/")
    for option in ((), ("--discard",)):
        assert "destination exists" in fail(proxy, "ckpt-reshard", SOURCE, url, *options, *option)
    save(proxy, jobs, tmp_path, "native", [[url, 1, {}, "destination exists"]], 1)
    assert keys("new/whole/") == before and len(before) > 1
    succeed(proxy, "ckpt-reshard", SOURCE, url, *options, "--overwrite")
    expect_same(keys("new/whole/"), "new/whole", reshard(SOURCE, tmp_path / "local", *options))


def test_old_files_are_removed_at_the_same_time(proxy, keys):  # noqa: F811
    url, together, removals = "s3://checkpoints/new/many", threading.Barrier(8), []
    succeed(proxy, "ckpt-reshard", SOURCE, url, *FORMATS["many_files"][0])

    def refuse(request):
        if is_removal(request) and MARK not in request.path:
            removals.append(request)
            if removals.index(request) < together.parties:
                with contextlib.suppress(threading.BrokenBarrierError):
                    together.wait(20)

    proxy.refuse = refuse
    succeed(proxy, "ckpt-reshard", SOURCE, url, "--to", "native", "--world-size", 1, "--overwrite")
    assert not together.broken
    assert names(keys, "new/many") == ["new/many/index.h5", "new/many/rank-00000.h5"]


# Trainers
@pytest.fixture(scope="module")
def jobs():
    """The functions that the ranks of a job run. Imports torch, once for all ranks, which are forks."""
    if not list((BIN.parent / "python").glob("tessera/_core*.so")):
        pytest.skip("the Python package is not built")
    import store_jobs

    return store_jobs


def run_job(variables, folder, ranks, function, *arguments):
    """Runs a function on some ranks, with these environment variables alone. Returns what the ranks printed."""
    (folder / "logs").mkdir()
    run_function(function, ranks, *arguments, only=variables, logs=folder / "logs")
    said = [(folder / "logs" / f"{rank}.log").read_text() for rank in range(ranks)]
    for text in said:
        assert SECRET not in text and TOKEN not in text
    return said


def save(proxy, jobs, folder, format, saves, ranks):  # noqa: F811
    """Runs a trainer on some ranks. Returns what the ranks printed."""
    said = run_job(environment(proxy, TMPDIR=str(folder)), folder, ranks, jobs.save, format, saves)
    assert not list(folder.glob("tessera-spool-*"))
    return said


@pytest.mark.parametrize(("format", "ranks"), [("native", 2), ("dcp", 2), ("safetensors", 1)])
def test_trainers_save_and_find_the_latest(proxy, keys, jobs, tmp_path, format, ranks):  # noqa: F811
    """keep_last keeps two of three saves. The last save runs in the background and is then replaced."""
    end = ".safetensors" if format == "safetensors" else ""
    url = f"s3://checkpoints/new/{format}{ranks}/step-%d{end}"
    save(proxy, jobs, tmp_path, format, [
        [url % 9, 9, {}, None],
        [url % 10, 10, {"keep_last": 2}, None],
        [url % 11, 11, {"keep_last": 2, "in_background": True}, None],
        [url % 11, 12, {}, "exists"],
        [url % 11, 12, {"overwrite": True}, None],
    ], ranks)
    kept = {key.split("/")[2].removesuffix(".values.json").removesuffix(end) for key in names(keys, f"new/{format}{ranks}")}
    assert kept == {"step-10", "step-11"}
    assert uploads(keys.client) == []


def test_keys_made_for_folders_do_not_stop_keep_last(proxy, keys, jobs, tmp_path, bucket):  # noqa: F811
    """S3 consoles create a key `step-5/` for a folder."""
    url = "s3://checkpoints/new/folders/step-%d"
    for key in ("step-5/", "step-99/"):
        bucket.put_object(Bucket="checkpoints", Key="new/folders/" + key, Body=b"")
    save(proxy, jobs, tmp_path, "native", [[url % step, step, {"keep_last": 1}, None] for step in (8, 9, 10)], 1)
    kept = {key.split("/")[2] for key in names(keys, "new/folders")}
    assert kept == {"step-5", "step-10", "step-99"}


@pytest.mark.parametrize("options", [FORMATS["safetensors"][0], FORMATS["rank_files"][0], ("--to", "deepspeed")], ids=str)
def test_a_save_does_not_replace_a_checkpoint_without_an_index(options, proxy, keys, jobs, tmp_path):  # noqa: F811
    url = "s3://checkpoints/new/kept/step-1"
    succeed(proxy, "ckpt-reshard", SOURCE, url, *options)
    before = keys("new/kept")
    save(proxy, jobs, tmp_path, "native", [[url, 1, {}, "destination exists"]], 1)
    assert keys("new/kept") == before


def test_keep_last_leaves_an_object_with_the_name_of_a_checkpoint(proxy, keys, jobs, tmp_path, bucket):  # noqa: F811
    url = "s3://checkpoints/new/beside/step-%d"
    bucket.put_object(Bucket="checkpoints", Key="new/beside/step-1", Body=b"a note")
    bucket.put_object(Bucket="checkpoints", Key="new/beside/step-2", Body=b"a note")
    for name in local_files(reshard(SOURCE, tmp_path / "old")):
        bucket.put_object(Bucket="checkpoints", Key=f"new/beside/step-1/{name.name}", Body=name.read_bytes())
    save(proxy, jobs, tmp_path, "native", [[url % 3, 3, {"keep_last": 1}, None]], 1)
    found = names(keys, "new/beside")
    assert found[:2] == ["new/beside/step-1", "new/beside/step-2"]
    assert {key.split("/")[2] for key in found[2:]} == {"step-3"}


@pytest.mark.parametrize("format", ["native", "dcp"])
def test_a_removal_by_keep_last_that_fails_leaves_no_checkpoint_and_is_continued(format, proxy, keys, jobs, tmp_path):  # noqa: F811
    url = "s3://checkpoints/new/removed/step-%d"
    removals = []

    def refuse(request):
        if request.method == "DELETE" and "/step-1/" in request.path and not request.upload_id:
            removals.append(request.path)
            return s3_error(403, "AccessDenied") if len(removals) > 1 else None

    proxy.refuse = refuse
    local = tmp_path / "1"
    local.mkdir()
    save(proxy, jobs, local, format, [[url % 1, 1, {}, None], [url % 2, 2, {"keep_last": 1}, "s3:DeleteObject"]], 1)
    left = names(keys, "new/removed/step-1/")
    assert removals[0].endswith(("index.h5", ".metadata")) and len(left) == 1
    assert "was the save interrupted?" in (message := fail(proxy, "ckpt-inspect", "ls", url % 1)) or "rebuild-index" in message
    proxy.refuse = None
    local = tmp_path / "2"
    local.mkdir()
    save(proxy, jobs, local, format, [[url % 3, 3, {"keep_last": 1}, None]], 1)
    assert {key.split("/")[2] for key in names(keys, "new/removed")} == {"step-3"}


def test_a_values_file_that_an_interrupted_removal_left_is_removed(proxy, keys, jobs, tmp_path, bucket):  # noqa: F811
    url = "s3://checkpoints/new/values/step-%d.safetensors"
    proxy.refuse = lambda request: s3_error(403, "AccessDenied") if request.method == "DELETE" and request.path.endswith(".values.json") else None
    for folder in ("1", "2"):
        (tmp_path / folder).mkdir()
    save(proxy, jobs, tmp_path / "1", "safetensors", [[url % 1, 1, {}, None], [url % 2, 2, {"keep_last": 1}, "s3:DeleteObject"]], 1)
    assert "new/values/step-1.safetensors.values.json" in (left := names(keys, "new/values")) and "new/values/step-1.safetensors" not in left
    proxy.refuse = None
    for name in ("step-0.safetensors.values.json", "step-1.safetensors.txt", "step-9.safetensors.values.json"):
        bucket.put_object(Bucket="checkpoints", Key="new/values/" + name, Body=b"a note")
    save(proxy, jobs, tmp_path / "2", "safetensors", [[url % 3, 3, {"keep_last": 1}, None]], 1)
    assert names(keys, "new/values") == [f"new/values/step-{name}" for name in (
        "0.safetensors.values.json", "1.safetensors.txt", "3.safetensors", "3.safetensors.values.json", "9.safetensors.values.json")]


def test_each_rank_saves_with_the_keys_of_the_moment(proxy, keys, jobs, tmp_path):  # noqa: F811
    run_job(environment(proxy, TMPDIR=str(tmp_path)), tmp_path, 2, jobs.save_with_new_keys, "s3://checkpoints/new/keys/step-%d")
    of_step = {step: {request.headers["Authorization"].split("Credential=")[1].split("/")[0] for request in writes(proxy)
                      if f"/step-{step}/" in request.path} for step in (1, 2)}
    assert of_step == {1: {"FIRSTKEY"}, 2: {"SECONDKEY"}}


def test_a_save_that_fails_is_no_checkpoint_and_is_replaced(proxy, keys, jobs, tmp_path):  # noqa: F811
    url = "s3://checkpoints/new/failed/step-1"
    failed = []

    def refuse(request):
        if request.method == "PUT" and request.path.endswith("/index.h5") and len(failed) < 3:  # AWS_MAX_ATTEMPTS
            failed.append(names(keys, "new/failed"))
            return s3_error(503, "SlowDown")
        return None

    proxy.refuse = refuse
    said = save(proxy, jobs, tmp_path, "native", [[url, 1, {}, "503 SlowDown"], [url, 2, {}, None]], 2)
    assert all(url + "/index.h5" in text for text in said)
    assert failed[0] == ["new/failed/step-1/rank-00000.h5", "new/failed/step-1/rank-00001.h5"]
    assert "new/failed/step-1/index.h5" in names(keys, "new/failed")


def test_python_moves_to_a_url(proxy, keys, jobs, tmp_path):  # noqa: F811
    run_job(environment(proxy), tmp_path, 1, jobs.reshard, SOURCE, "s3://checkpoints/new/python", tmp_path)
    expect_same(keys("new/python"), "new/python", reshard(SOURCE, tmp_path / "local", "--world-size", 2, "--strategy", "dim0"))


def test_python_names_the_endpoint(proxy, keys, jobs, tmp_path):  # noqa: F811
    variables = environment(proxy, AWS_ENDPOINT_URL="http://127.0.0.1:9", AWS_MAX_ATTEMPTS="1", TMPDIR=str(tmp_path))
    source = str(FIXTURES / "torch_zip" / "valid" / "state_dict.pt")
    run_job(variables, tmp_path, 2, jobs.use_every_function_with_an_endpoint, proxy.url, source, str(tmp_path))
    assert {key.split("/")[2] for key in names(keys, "new/named")} == {"step-1", "step-2", "step-3", "moved.pt"}


def test_each_bucket_has_an_endpoint_of_its_own(moto, proxy, keys, jobs, tmp_path):  # noqa: F811
    """Two checkpoints on two servers are open at the same time, and read in turn. Then one bucket moves to a third server."""
    keys.client.create_bucket(Bucket="others")
    for file in local_files(SOURCE):
        keys.client.put_object(Bucket="others", Key=f"dcp/{file.name}", Body=file.read_bytes())
    with Proxy(moto) as other, Proxy(moto) as moved:
        variables = environment(proxy, AWS_ENDPOINT_URL="http://127.0.0.1:9")
        run_job(variables, tmp_path, 1, jobs.read_from_three_servers, proxy.url, other.url, moved.url)
        buckets = [{request.path.split("/")[1].split("?")[0] for request in each.requests} for each in (proxy, other, moved)]
        assert buckets == [{"checkpoints"}, {"others"}, {"checkpoints"}]


def test_a_save_replaces_the_values_that_an_interrupted_save_left(proxy, keys, jobs, tmp_path):  # noqa: F811
    """The tensors appear after the values, so only the values are there."""
    url = "s3://checkpoints/new/model/step-1"
    refuse_after(proxy, 1, is_object)
    (tmp_path / "1").mkdir()
    save(proxy, jobs, tmp_path / "1", "safetensors", [[url, 1, {}, "AccessDenied"]], 1)
    assert names(keys, "new/model/") == ["new/model/step-1/model.safetensors.values.json"]
    proxy.refuse = None
    (tmp_path / "2").mkdir()
    save(proxy, jobs, tmp_path / "2", "safetensors", [[url, 2, {}, None], [url, 3, {}, "destination exists"]], 1)


@pytest.mark.parametrize("format", ["native", "safetensors"])
@pytest.mark.parametrize("old", ["rank_files", "sharded", "dcp"])
def test_a_save_over_another_format_that_was_interrupted_is_repeated(old, format, proxy, keys, jobs, tmp_path):  # noqa: F811
    """At each step, nothing is read of the old checkpoint once it lacks a file."""
    for number in (1, 3):
        url = f"s3://checkpoints/new/over{number}/last"
        succeed(proxy, "ckpt-reshard", SOURCE, url, *FORMATS[old][0])
        before = keys(f"new/over{number}/")
        seen = refuse_after(proxy, number, lambda request: is_removal(request) or is_object(request))
        folder = tmp_path / f"{number}.1"
        folder.mkdir()
        save(proxy, jobs, folder, format, [[url, 1, {"overwrite": True}, "AccessDenied"]], 1)
        assert len(seen) > number
        proxy.refuse = None
        if keys(f"new/over{number}/") != before:
            fail(proxy, "ckpt-inspect", "ls", url)
        folder = tmp_path / f"{number}.2"
        folder.mkdir()
        save(proxy, jobs, folder, format, [[url, 1, {"overwrite": True}, None]], 1)
        assert len(names(keys, f"new/over{number}/")) == 2


@pytest.mark.parametrize("number", [1, 2])
def test_keep_last_leaves_no_part_of_files_of_ranks(number, proxy, keys, jobs, tmp_path):  # noqa: F811
    url = "s3://checkpoints/new/series/step-%d"
    succeed(proxy, "ckpt-reshard", SOURCE, url % 1, "--to", "rank_files", "--world-size", 1)
    refuse_after(proxy, number, is_removal)
    for step, expected in ((2, "AccessDenied"), (3, None)):
        (tmp_path / str(step)).mkdir()
        save(proxy, jobs, tmp_path / str(step), "native", [[url % step, step, {"keep_last": 1}, expected]], 1)
        if expected:
            assert MARK in fail(proxy, "ckpt-inspect", "ls", url % 1)
            proxy.refuse = None
    assert {key.split("/")[2] for key in names(keys, "new/series")} == {"step-3"}
