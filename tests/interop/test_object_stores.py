"""The tools read checkpoints on object stores and web servers as they read local ones: `s3://`, `http://`, `hf://`.

The S3 server is moto's. Between it and the tools stands a proxy that counts, checks signatures and fails on demand.
"""

import datetime
import http.server
import ipaddress
import json
import os
import shutil
import signal
import ssl
import struct
import subprocess
import sys
import threading
import time
import urllib.parse
from pathlib import Path

import pytest
from ckpt_tools import BIN, FIXTURES, reshard
from faulty_proxy import Answer, Proxy, s3_error

boto3 = pytest.importorskip("boto3")
botocore_auth = pytest.importorskip("botocore.auth")
moto_server = pytest.importorskip("moto.server")
werkzeug = pytest.importorskip("werkzeug.serving")

KEY = "AKIDTESTTESTTESTTEST"
SECRET = "sEcReT/that+must=never-be-seen"
TOKEN = "session-token-that-must-never-be-seen"
CHECKPOINTS = {
    "dcp": FIXTURES / "dcp" / "valid" / "fsdp2_adamw",
    "native": FIXTURES / "native" / "v1" / "small",
    "safetensors": FIXTURES / "safetensors" / "valid" / "sharded",
    "torch": FIXTURES / "torch_zip" / "valid" / "state_dict.pt",
}


def environment(proxy, **more):
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH") if name in os.environ}
    return kept | {
        "AWS_ENDPOINT_URL": proxy.url,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_SESSION_TOKEN": TOKEN,
        "AWS_REGION": "us-east-1",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_MAX_ATTEMPTS": "3",
    } | more


def run(proxy, tool, *arguments, timeout=120, **variables):
    process = subprocess.run(
        [BIN / tool, *map(str, arguments)],
        env=environment(proxy, **variables),
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )
    for secret in (SECRET, TOKEN):
        assert secret not in process.stdout + process.stderr
    return process


def succeed(proxy, tool, *arguments, **options):
    process = run(proxy, tool, *arguments, **options)
    assert process.returncode == 0, process.stderr
    return process.stdout


def fail(proxy, tool, *arguments, **options):
    process = run(proxy, tool, *arguments, **options)
    assert process.returncode not in (0, 70, -6, -11), process.stderr
    return process.stderr


def local_files(folder):
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


@pytest.fixture(scope="module")
def moto():
    os.environ["MOTO_S3_DEFAULT_MAX_KEYS"] = "20"  # in a page of a list
    werkzeug.WSGIRequestHandler.disable_nagle_algorithm = True  # otherwise each answer waits 40 ms
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()
    server.stop()


@pytest.fixture(scope="module")
def bucket(moto):
    """Uploads the checkpoints, once for all tests that do not change them."""
    client = s3_client(moto)
    client.create_bucket(Bucket="checkpoints")
    for name, path in CHECKPOINTS.items():
        upload(client, path, f"runs/{name}" if path.is_dir() else f"runs/{name}{path.suffix}")
    return client


def s3_client(moto):
    return boto3.client(
        "s3", endpoint_url="http://%s:%d" % moto, region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b"
    )


def upload(client, path, key, **options):
    if path.is_file():
        client.put_object(Bucket="checkpoints", Key=key, Body=path.read_bytes(), **options)
        return
    for file in local_files(path):
        client.put_object(Bucket="checkpoints", Key=f"{key}/{file.relative_to(path)}", Body=file.read_bytes(), **options)


@pytest.fixture
def proxy(moto, bucket):
    with Proxy(moto) as started:
        yield started


def url_of(name):
    return f"s3://checkpoints/runs/{name}{CHECKPOINTS[name].suffix if CHECKPOINTS[name].is_file() else ''}"


def without_path(text, path):
    return text.replace(str(path), "PATH")


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("verb", [("ls", "--json", "--sha256"), ("hash", "--json"), ("verify",), ("tree",)], ids=lambda v: v[0])
def test_a_url_shows_what_the_local_path_shows(proxy, name, verb):
    local, remote = CHECKPOINTS[name], url_of(name)
    expected = succeed(proxy, "ckpt-inspect", verb[0], local, *verb[1:])
    found = succeed(proxy, "ckpt-inspect", verb[0], remote, *verb[1:])
    assert without_path(found, remote) == without_path(expected, local)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_url_and_the_local_path_do_not_differ(proxy, name):
    succeed(proxy, "ckpt-inspect", "diff", url_of(name), CHECKPOINTS[name])


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_move_from_a_url_writes_what_a_move_from_the_local_path_writes(proxy, name, tmp_path):
    expected = reshard(CHECKPOINTS[name], tmp_path / "expected", "--to", "native", "--world-size", 3)
    succeed(proxy, "ckpt-reshard", url_of(name), tmp_path / "found", "--to", "native", "--world-size", 3, "--quiet")
    assert [f.name for f in local_files(expected)] == [f.name for f in local_files(tmp_path / "found")]
    for file in local_files(expected):
        assert file.read_bytes() == (tmp_path / "found" / file.name).read_bytes(), file.name


@pytest.mark.parametrize("verb", ["scan", "stats", "layout"])
@pytest.mark.parametrize("name", ["dcp", "torch"])
def test_other_verbs_read_urls(proxy, verb, name):
    expected = succeed(proxy, "ckpt-inspect", verb, CHECKPOINTS[name])
    assert succeed(proxy, "ckpt-inspect", verb, url_of(name)) == expected


def test_a_merge_of_a_url_and_a_local_path(proxy, tmp_path):
    for name, torch in (("expected", CHECKPOINTS["torch"]), ("found", url_of("torch"))):
        succeed(proxy, "ckpt-reshard", "merge", f"a={torch}", f"b={CHECKPOINTS['dcp']}", tmp_path / name, "--quiet")
    succeed(proxy, "ckpt-inspect", "diff", tmp_path / "expected", tmp_path / "found")


def test_workers_share_a_move_from_a_url(proxy, tmp_path):
    for part in ("0/2", "1/2"):
        succeed(proxy, "ckpt-reshard", url_of("dcp"), tmp_path / "moved", "--part", part, "--quiet")
    succeed(proxy, "ckpt-inspect", "diff", tmp_path / "moved", CHECKPOINTS["dcp"])


@pytest.fixture(scope="module")
def large(bucket, tmp_path_factory):
    """Uploads a model of four tensors of 16 MiB in each format. Returns the folder."""
    folder = tmp_path_factory.mktemp("large")
    nbytes = 16 << 20
    header = {f"layers.{i}.weight": {"dtype": "BF16", "shape": [2048, 4096], "data_offsets": [i * nbytes, (i + 1) * nbytes]} for i in range(4)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + os.urandom(4 * nbytes))
    for name in ("dcp", "native"):
        reshard(folder / "model.safetensors", folder / name, "--to", name, "--world-size", "8")
    for path in folder.iterdir():
        upload(bucket, path, f"large/{path.name}")
    return folder


DCP_4 = ("--to", "dcp", "--world-size", "4")
NATIVE_8 = ("--to", "native", "--world-size", "8")


@pytest.mark.parametrize(
    "name, verb, options, parts",
    [
        ("model.safetensors", "verify", (), 1),
        ("model.safetensors", "hash", (), 1),
        ("model.safetensors", "hash", ("--threads", "2"), 1),
        ("model.safetensors", "stats", (), 1),
        ("model.safetensors", "move", DCP_4, 1),
        ("model.safetensors", "move", (*DCP_4, "--part", "0/4"), 4),
        ("model.safetensors", "move", (*DCP_4, "--part", "3/4"), 4),
        ("model.safetensors", "move", NATIVE_8, 1),
        ("model.safetensors", "move", (*NATIVE_8, "--threads", "2"), 1),
        ("model.safetensors", "move", (*NATIVE_8, "--part", "1/4"), 4),
        ("model.safetensors", "move", ("--rename", "layers=blocks", *NATIVE_8), 1),
        ("dcp", "hash", (), 1),
        ("dcp", "move", ("--to", "dcp", "--world-size", "3"), 1),
        ("native", "move", ("--to", "dcp", "--world-size", "3"), 1),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_no_more_bytes_are_fetched_than_are_needed(proxy, large, tmp_path, name, verb, options, parts):
    served = []

    def change(request, answer):
        if not request.is_list:
            served.append(len(answer.body))
        return answer

    proxy.change, proxy.latency_s = change, 0.02
    url = f"s3://checkpoints/large/{name}"
    if verb == "move":
        succeed(proxy, "ckpt-reshard", url, tmp_path / "moved", "--quiet", *options)
        if parts == 1 and "--rename" not in options:
            proxy.change = None
            succeed(proxy, "ckpt-inspect", "diff", tmp_path / "moved", large / name)
    else:
        succeed(proxy, "ckpt-inspect", verb, url, *options)
    # Each DCP item has an envelope, and a worker reads the index and headers whole.
    assert sum(served) <= 1.05 * (64 << 20) / parts + (256 << 10), (sum(served), len(served))


@pytest.mark.parametrize("options", [DCP_4, ("--to", "native", "--world-size", "4"), ("--to", "native", "--threads", "2")], ids=" ".join)
def test_small_tensors_in_another_order_than_their_file_are_fetched_once(proxy, bucket, tmp_path, options):
    """Their names' order, in which they are written, is far from that of the file."""
    served = []

    def change(request, answer):
        if not request.is_list:
            served.append(len(answer.body))
        return answer

    number, nbytes = 4096, 16 << 10
    header = {
        f"layers.{i * 1237 % 65536:05}.weight": {"dtype": "BF16", "shape": [64, 128], "data_offsets": [i * nbytes, (i + 1) * nbytes]}
        for i in range(number)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    source = tmp_path / "small.safetensors"
    source.write_bytes(struct.pack("<Q", len(text)) + text + os.urandom(number * nbytes))
    upload(bucket, source, "small/model.safetensors")
    proxy.change, proxy.latency_s = change, 0.02
    succeed(proxy, "ckpt-reshard", "s3://checkpoints/small/model.safetensors", tmp_path / "moved", "--quiet", *options)
    assert sum(served) <= 1.05 * number * nbytes, (sum(served), len(served))
    assert len(served) <= 50
    succeed(proxy, "ckpt-inspect", "diff", tmp_path / "moved", source)


@pytest.mark.parametrize("name", ["dcp", "native"])
def test_to_list_takes_two_data_requests(proxy, name):
    succeed(proxy, "ckpt-inspect", "ls", url_of(name))
    assert len(proxy.data_requests) <= 2, [r.path for r in proxy.requests]
    assert len(proxy.requests) <= 4, [r.path for r in proxy.requests]


def test_requests_that_follow_each_other_share_a_connection(proxy, bucket):
    for i in range(50):
        bucket.put_object(Bucket="checkpoints", Key=f"shared/note-{i}.txt", Body=b"x")
    upload(bucket, CHECKPOINTS["dcp"], "shared")
    succeed(proxy, "ckpt-inspect", "ls", "s3://checkpoints/shared")
    assert len(proxy.requests) >= 4
    assert proxy.num_connections == 1


def test_folders_of_more_than_one_page(proxy, bucket):
    for i in range(50):
        bucket.put_object(Bucket="checkpoints", Key=f"many/note-{i}.txt", Body=b"x")
    upload(bucket, CHECKPOINTS["dcp"], "many")
    succeed(proxy, "ckpt-inspect", "verify", "s3://checkpoints/many")
    assert sum(request.is_list for request in proxy.requests) >= 3


@pytest.mark.parametrize("is_endless", [False, True])
def test_a_page_of_a_list_that_comes_again(is_endless, proxy):
    """The server knows no token, and so sends the first page again."""
    pages = []

    def refuse(request):
        request.path = request.path.replace("continuation-token=again&", "")

    def change(request, answer):
        if request.is_list and b"<Contents>" in answer.body and (is_endless or not pages):
            pages.append(request)
            more = b"<IsTruncated>true</IsTruncated><NextContinuationToken>again</NextContinuationToken>"
            answer.body = answer.body.replace(b"<IsTruncated>false</IsTruncated>", more)

    proxy.refuse, proxy.change = refuse, change
    if is_endless:
        assert "list of the bucket: expected another token for each page" in fail(proxy, "ckpt-inspect", "ls", url_of("dcp"))
        assert len(pages) == 2
    else:
        assert "sound" in succeed(proxy, "ckpt-inspect", "verify", url_of("dcp"))
        assert len(pages) == 1


def test_keys_with_special_characters(proxy, bucket):
    upload(bucket, CHECKPOINTS["dcp"], "run a+b/ä?&=%20'/step")
    expected = succeed(proxy, "ckpt-inspect", "ls", CHECKPOINTS["dcp"])
    assert succeed(proxy, "ckpt-inspect", "ls", "s3://checkpoints/run a+b/ä?&=%20'/step/") == expected


def test_a_list_with_names_outside_of_the_folder_writes_nothing_there(proxy, tmp_path):
    content = b'{"model_type": "x"}'

    def change(request, answer):
        if request.is_list and answer.body.count(b"<Contents>"):
            entry = f"<Contents><Key>runs/safetensors/../../escaped.json</Key><Size>{len(content)}</Size></Contents>"
            return Answer(200, {}, answer.body.replace(b"</ListBucketResult>", entry.encode() + b"</ListBucketResult>"))
        return Answer(200, {}, content) if request.path.split("?")[0].endswith("escaped.json") else None

    proxy.change = change
    (tmp_path / "a").mkdir()
    message = fail(proxy, "ckpt-reshard", url_of("safetensors"), tmp_path / "a" / "b", "--to", "native")
    assert "list of the bucket: expected names without /" in message
    assert list(tmp_path.rglob("*")) == [tmp_path / "a"]


def signature_of(request, secret):
    """Signs a request with botocore, an independent implementation."""
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    class At(botocore_auth.S3SigV4Auth):
        def _modify_request_before_signing(self, _):
            pass

    headers = {name.lower(): value for name, value in request.headers.items()}
    names = headers["authorization"].split("SignedHeaders=")[1].split(",")[0].split(";")
    path, _, query = request.path.partition("?")
    signed = AWSRequest(request.method, f"http://{headers['host']}{path}", headers={n: headers[n] for n in names})
    signed.params = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
    signed.context["timestamp"] = headers["x-amz-date"]
    signed.data = request.body
    signer = At(Credentials(KEY, secret, TOKEN), "s3", "us-east-1")
    canonical = signer.canonical_request(signed)
    return signer.signature(signer.string_to_sign(signed, canonical), signed)


def test_signatures_are_those_of_botocore(proxy, bucket):
    upload(bucket, CHECKPOINTS["dcp"], "sig n/ä+b~c")
    succeed(proxy, "ckpt-inspect", "verify", "s3://checkpoints/sig n/ä+b~c")
    assert proxy.requests
    for request in proxy.requests:
        headers = {name.lower(): value for name, value in request.headers.items()}
        assert headers["x-amz-security-token"] == TOKEN
        found = headers["authorization"].rsplit("Signature=", 1)[1]
        assert found == signature_of(request, SECRET), request.path


def test_the_default_port_of_an_endpoint_is_not_signed(proxy):
    """HTTP clients leave this port out of the header Host. A proxy stands in for the server."""
    proxy.refuse = lambda request: s3_error(404, "NoSuchKey")
    run(proxy, "ckpt-inspect", "ls", "s3://checkpoints/a.pt", AWS_ENDPOINT_URL="http://s3.example:80", http_proxy=proxy.url)
    assert proxy.requests
    for request in proxy.requests:
        assert request.headers["Host"] == "s3.example"
        request.path = request.path.removeprefix("http://s3.example:80").removeprefix("http://s3.example")
        assert request.headers["Authorization"].endswith("Signature=" + signature_of(request, SECRET))


def test_requests_are_not_signed_if_the_user_says_so(proxy, bucket):
    upload(bucket, CHECKPOINTS["dcp"], "public", ACL="public-read")
    succeed(proxy, "ckpt-inspect", "ls", "s3://checkpoints/public", AWS_NO_SIGN_REQUEST="1")
    assert not any("Authorization" in request.headers for request in proxy.requests)


def test_the_option_names_the_endpoint(proxy):
    arguments = ("ls", url_of("dcp"), "--endpoint", proxy.url)
    succeed(proxy, "ckpt-inspect", *arguments, AWS_ENDPOINT_URL="http://127.0.0.1:9")
    assert proxy.requests


# Each fault hits every third request.
def overloaded(request, answer):
    return s3_error(503, "SlowDown") if request.number % 3 == 0 else answer


def too_many(request, answer):
    return Answer(429, {"Retry-After": "0"}, b"later") if request.number % 3 == 0 else answer


def cut(request, answer):
    if request.number % 3 == 0:
        answer.cut_after = len(answer.body) // 2
    return answer


def shorter(request, answer):
    if request.number % 3 == 0 and answer.status == 206 and len(answer.body) > 1:
        answer.body = answer.body[: len(answer.body) // 2]
    return answer


def longer(request, answer):
    if request.number % 3 == 0:
        answer.declared_nbytes = len(answer.body) + 1000
    return answer


def late(request, answer):
    """The proxy has delayed the answer, and sends the answers of parallel requests in another order."""
    time.sleep(0.03 * (request.number % 3))
    return answer


@pytest.mark.parametrize("fault", [overloaded, too_many, cut, shorter, longer, late])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_faults_that_pass_do_not_show(proxy, fault, name, tmp_path):
    expected = reshard(CHECKPOINTS[name], tmp_path / "expected", "--to", "native")
    proxy.change = fault
    proxy.latency_s = 0.02 if fault is late else 0
    succeed(proxy, "ckpt-reshard", url_of(name), tmp_path / "found", "--to", "native", "--quiet", AWS_MAX_ATTEMPTS="8")
    for file in local_files(expected):
        assert file.read_bytes() == (tmp_path / "found" / file.name).read_bytes(), file.name


def test_a_server_that_stays_overloaded_is_an_error(proxy, tmp_path):
    proxy.change = lambda request, answer: answer if request.is_list else s3_error(503, "SlowDown")
    message = fail(proxy, "ckpt-reshard", url_of("dcp"), tmp_path / "moved")
    assert url_of("dcp") in message and "status 503" in message
    assert not (tmp_path / "moved").exists()


@pytest.mark.parametrize("honours_if_match", [True, False])
def test_an_object_that_changes_is_named(proxy, bucket, honours_if_match, tmp_path):
    upload(bucket, CHECKPOINTS["dcp"], "changing")
    files = [file for file in local_files(CHECKPOINTS["dcp"]) if file.name.endswith(".distcp")]

    def rewrite(request):
        if ".metadata" in request.path and not request.is_list:
            for file in files:
                bucket.put_object(Bucket="checkpoints", Key=f"changing/{file.name}", Body=bytes(file.stat().st_size))
        if not honours_if_match:
            request.headers.pop("If-Match", None)

    proxy.refuse = rewrite
    message = fail(proxy, "ckpt-reshard", "s3://checkpoints/changing", tmp_path / "moved")
    assert "s3://checkpoints/changing/" in message
    assert "expected the version that was opened: " in message and "ETag" in message, message
    assert not (tmp_path / "moved").exists()


def test_an_answer_without_the_etag_of_the_list_is_not_taken(proxy):
    def change(request, answer):
        if request.number > 3:
            answer.headers = {name: value for name, value in answer.headers.items() if name.lower() != "etag"}

    proxy.change = change
    error = fail(proxy, "ckpt-inspect", "hash", url_of("dcp"))
    assert "expected the version that was opened: " in error


def test_etags_in_lists_may_have_no_quotes(proxy):
    def change(request, answer):
        if request.is_list:
            answer.body = answer.body.replace(b"<ETag>&quot;", b"<ETag>").replace(b"<ETag>\"", b"<ETag>")
            answer.body = answer.body.replace(b"&quot;</ETag>", b"</ETag>").replace(b"\"</ETag>", b"</ETag>")
            assert b"<ETag>&" not in answer.body and b'<ETag>"' not in answer.body

    proxy.change = change
    succeed(proxy, "ckpt-inspect", "hash", url_of("dcp"))


@pytest.mark.parametrize("header", ["", "bytes 8-100/999", "bytes 0-100/*"])
def test_an_answer_that_does_not_state_the_size_of_the_file_is_refused(header, proxy):
    def change(request, answer):
        if answer.status == 206:
            answer.headers["Content-Range"] = header

    proxy.change = change
    message = fail(proxy, "ckpt-inspect", "ls", url_of("torch"))
    assert f"{url_of('torch')}: size of the file: expected the header Content-Range" in message and f"found Content-Range '{header}'" in message


def test_every_read_asks_for_the_version_that_was_listed(proxy):
    succeed(proxy, "ckpt-inspect", "verify", url_of("dcp"))
    assert all("If-Match" in request.headers for request in proxy.data_requests)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (s3_error(403, "AccessDenied"), ["403 AccessDenied", "s3:ListBucket", "signed with AWS_ACCESS_KEY_ID"]),
        (s3_error(403, "InvalidAccessKeyId"), ["InvalidAccessKeyId", "an access key that the server knows"]),
        (s3_error(403, "SignatureDoesNotMatch"), ["SignatureDoesNotMatch", "check the secret access key"]),
        (s3_error(400, "ExpiredToken"), ["ExpiredToken", "sign in again"]),
        (
            s3_error(403, "RequestTimeTooSkewed", headers={"Date": "Thu, 01 Jan 2026 00:00:00 GMT"}),
            ["clock of this machine", "Thu, 01 Jan 2026 00:00:00 GMT", "set the clock"],
        ),
        (s3_error(301, "PermanentRedirect"), ["region", "'us-east-1'", "AWS_REGION"]),
        (
            s3_error(301, "PermanentRedirect", headers={"x-amz-bucket-region": "eu-west-3"}, more="<Endpoint>s3.eu-west-3.example</Endpoint>"),
            ["status 301 PermanentRedirect", "AWS_ENDPOINT_URL", "eu-west-3, s3.eu-west-3.example"],
        ),
        *((Answer(status, {"Location": "https://other.example/checkpoints?X-Signature=1"}, b"moved"),
           [f"endpoint: expected the server itself, found status {status}, a redirect to https://other.example (", "AWS_ENDPOINT_URL"])
          for status in (301, 302, 307, 308)),
        (s3_error(418, "Teapot", "short and stout"), ["418 Teapot: short and stout"]),
        (Answer(200, {}, b"<html>sign in</html>"), ["list of the bucket", "another element"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_refusals_say_what_to_do(proxy, answer, expected):
    proxy.refuse = lambda request: answer
    message = fail(proxy, "ckpt-inspect", "ls", url_of("dcp"))
    assert url_of("dcp") in message
    for text in expected:
        assert text in message
    assert "X-Signature" not in message


def test_without_credentials_the_message_says_so(proxy):
    proxy.refuse = lambda request: s3_error(403, "AccessDenied")
    message = fail(proxy, "ckpt-inspect", "ls", url_of("dcp"), AWS_NO_SIGN_REQUEST="1")
    assert "the request was not signed" in message and "AWS_PROFILE" in message


def test_missing_things_are_named(proxy):
    message = fail(proxy, "ckpt-inspect", "ls", "s3://no-such-bucket/a")
    assert "s3://no-such-bucket/a" in message and "a bucket 'no-such-bucket'" in message
    message = fail(proxy, "ckpt-inspect", "ls", "s3://checkpoints/runs/absent")
    assert "s3://checkpoints/runs/absent: expected a checkpoint, found nothing" in message
    message = fail(proxy, "ckpt-inspect", "ls", url_of("dcp"), AWS_ENDPOINT_URL="http://127.0.0.1:9")
    assert url_of("dcp") in message and "127.0.0.1 port 9" in message
    message = fail(proxy, "ckpt-inspect", "ls", url_of("dcp"), AWS_ENDPOINT_URL="localhost")
    assert "endpoint of S3: expected a URL" in message


@pytest.mark.parametrize("status", [301, 400])
def test_the_region_that_a_server_names_is_used(proxy, status):
    def wrong_region(request):
        if "/eu-central-1/s3/" in request.headers["Authorization"]:
            return None
        if status == 301:
            return s3_error(301, "PermanentRedirect", headers={"x-amz-bucket-region": "eu-central-1"})
        return s3_error(400, "AuthorizationHeaderMalformed", more="<Region>eu-central-1</Region>")

    proxy.refuse = wrong_region
    succeed(proxy, "ckpt-inspect", "verify", url_of("dcp"))
    wrong = [request for request in proxy.requests if "/us-east-1/s3/" in request.headers["Authorization"]]
    assert len(wrong) == 1


def test_an_interrupted_move_resumes_only_from_the_same_objects(proxy, bucket, tmp_path):
    upload(bucket, CHECKPOINTS["safetensors"], "resumed")
    arguments = ("s3://checkpoints/resumed", tmp_path / "moved", "--to", "native", "--resume", "--quiet")
    succeed(proxy, "ckpt-reshard", *arguments)
    assert json.loads(succeed(proxy, "ckpt-inspect", "ls", tmp_path / "moved", "--json"))["tensors"]


def keys_file(path, key):
    path.write_text(f"[default]\naws_access_key_id={key}\naws_secret_access_key={SECRET}\naws_session_token={TOKEN}\n")


@pytest.mark.parametrize("writes", [False, True], ids=["read", "write"])
def test_keys_that_change_during_a_move_are_read_again(writes, proxy, tmp_path):
    """A sidecar renews the keys in the credentials file, and the server no longer takes the old ones."""
    keys_file(tmp_path / "keys", "AKIDOLD")

    def refuse(request):
        if "AKIDOLD" in request.headers["Authorization"] and len(proxy.requests) > 3:
            keys_file(tmp_path / "keys", "AKIDNEW")
            return s3_error(400, "ExpiredToken")

    proxy.refuse = refuse
    variables = {"AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "keys"), "AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "",
                 "AWS_SESSION_TOKEN": ""}
    arguments = (CHECKPOINTS["dcp"], "s3://checkpoints/renewed") if writes else (url_of("dcp"), tmp_path / "moved")
    succeed(proxy, "ckpt-reshard", *arguments, **variables)
    assert "AKIDNEW" in proxy.requests[-1].headers["Authorization"]


def test_expired_keys_that_do_not_change_are_an_error(proxy, tmp_path):
    keys_file(tmp_path / "keys", "AKIDOLD")
    proxy.refuse = lambda request: s3_error(400, "ExpiredToken")
    error = fail(proxy, "ckpt-inspect", "ls", url_of("dcp"), AWS_SHARED_CREDENTIALS_FILE=str(tmp_path / "keys"), AWS_ACCESS_KEY_ID="",
                 AWS_SECRET_ACCESS_KEY="", AWS_SESSION_TOKEN="")
    assert "ExpiredToken" in error and "signed with profile 'default'" in error and len(proxy.requests) == 1


# Ctrl-C while the server fails.
@pytest.mark.parametrize("is_python", [False, True], ids=["tool", "python"])
@pytest.mark.parametrize("is_silent", [False, True], ids=["503", "silent"])
@pytest.mark.parametrize("writes", [False, True], ids=["read", "write"])
def test_an_interrupt_ends_a_move_while_the_server_fails(writes, is_silent, is_python, proxy, tmp_path):
    asked, ended = threading.Event(), threading.Event()

    def refuse(request):
        if request.method == "PUT" if writes else ".distcp" in request.path:
            asked.set()
            if is_silent:
                ended.wait(60)
            return s3_error(503, "SlowDown")

    proxy.refuse = refuse
    source, destination = (str(CHECKPOINTS["torch"]), "s3://checkpoints/stopped.pt") if writes else (url_of("dcp"), str(tmp_path / "moved"))
    command = [BIN / "ckpt-reshard", source, destination]
    if is_python:
        command = [sys.executable, "-c", f"import tessera; tessera.reshard({source!r}, {destination!r})"]
    interrupt(proxy, command, asked, ended, is_python)


@pytest.mark.parametrize(("call", "silent"), [
    (f"tessera.open({url_of('dcp')!r})", "?"),
    (f"tessera.load({{'x': 1}}, {url_of('dcp')!r})", ".metadata"),
    (f"tessera.open({url_of('dcp')!r})['model.emb.weight'].numpy()", ".distcp"),
    (f"tessera.open({url_of('dcp')!r})['optim.param_groups.0.lr']", ".distcp"),
    ("tessera.latest_valid('s3://checkpoints/runs')", "runs/torch"),
    (f"tessera.scan({url_of('torch')!r})", "runs"),
    (f"tessera.reshard({str(CHECKPOINTS['torch'])!r}, 'moved', like={url_of('dcp')!r}, dry_run=True)", "?")])
def test_an_interrupt_ends_python_while_the_server_does_not_answer(call, silent, proxy):
    asked, ended = threading.Event(), threading.Event()

    def refuse(request):
        if silent in request.path:
            asked.set()
            ended.wait(60)
            return s3_error(503, "SlowDown")

    proxy.refuse = refuse
    interrupt(proxy, [sys.executable, "-c", "import tessera; " + call], asked, ended, True)


def interrupt(proxy, command, asked, ended, is_python):
    """Presses Ctrl-C soon after the request to which the server does not answer; expects the end of the program."""
    variables = {"AWS_MAX_ATTEMPTS": "100", "PYTHONPATH": str(package_folder())}
    with subprocess.Popen(command, env=environment(proxy, **variables), stderr=subprocess.PIPE, text=True) as process:
        assert asked.wait(60)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        try:
            _, error = process.communicate(timeout=20)
        finally:
            ended.set()
            process.kill()
    assert "KeyboardInterrupt" in error if is_python else process.returncode == 130, (process.returncode, error)
    assert "rror" not in error


# Web servers and the hub.
class RangeServer:
    """Serves a folder with ranges and ETags; also the hub's API for `/models`, if `folder` has files for it."""

    def __init__(self, folder, commit="0123abc", cdn="", has_endless_list=False, second_page=None):
        server = self
        self.added = b""  # to each file, which then comes whole, whatever range is asked for
        self.second_page = second_page  # the header Link to it; if it ends with "missing", there is none
        self.cdn = cdn  # the server that the hub redirects to
        self.folder, self.commit, self.requests, self.tokens = folder, commit, [], []

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # otherwise each answer waits 40 ms

            def do_GET(self):
                server.requests.append(self.path)
                server.tokens.append(self.headers.get("Authorization"))
                path = urllib.parse.unquote(self.path.split("?")[0])
                if path.startswith("/api/models/o/n/revision/"):
                    return self.answer(200, json.dumps({"sha": server.commit}).encode())
                if path.startswith(f"/api/models/o/n/tree/{server.commit}"):
                    next_page = {"Link": f'<{server.url}{self.path}>; rel="next"'} if has_endless_list else {}
                    tree = server.tree()
                    if server.second_page:
                        is_second = "cursor" in self.path
                        if is_second and server.second_page.endswith("missing"):
                            return self.answer(404, b"")
                        tree = tree[1:] if is_second else tree[:1]
                        next_page = {} if is_second else {"Link": f"<{server.url}{self.path}?cursor=2>{server.second_page}"}
                    return self.answer(200, json.dumps(tree).encode(), next_page)
                if path.startswith(f"/o/n/resolve/{server.commit}/"):
                    path = f"{server.cdn}/cdn/{path.split('/', 5)[5]}"
                    return self.answer(302, b"", {"Location": path, "ETag": '"of-the-hub"'})
                return self.send_file(server.folder / path.removeprefix("/cdn/").lstrip("/"))

            def send_file(self, file):
                if not file.is_file():
                    return self.answer(404, b"not here")
                content = file.read_bytes()
                headers = {"ETag": '"%d"' % file.stat().st_mtime_ns}
                if self.headers.get("If-Match", headers["ETag"]) != headers["ETag"]:
                    return self.answer(412, b"")
                if "Range" not in self.headers or server.added:
                    return self.answer(200, content + server.added, headers)
                begin, last = self.headers["Range"].removeprefix("bytes=").split("-")
                begin, end = int(begin), min(int(last) + 1, len(content))
                if begin >= len(content):
                    return self.answer(416, b"", {"Content-Range": f"bytes */{len(content)}"})
                headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
                return self.answer(206, content[begin:end], headers)

            def answer(self, status, body, headers=None):
                self.send_response(status)
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True

    def tree(self):
        return [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": "x"} for f in local_files(self.folder)]

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


def test_a_file_of_a_web_server(proxy, tmp_path):
    shutil.copy(CHECKPOINTS["torch"], tmp_path / "a b.pt")
    with RangeServer(tmp_path) as server:
        url = server.url + "/a%20b.pt"
        expected = succeed(proxy, "ckpt-inspect", "ls", CHECKPOINTS["torch"], "--json", "--sha256")
        found = succeed(proxy, "ckpt-inspect", "ls", url, "--json", "--sha256")
        assert without_path(found, url) == without_path(expected, CHECKPOINTS["torch"])
        assert "found nothing" in fail(proxy, "ckpt-inspect", "ls", server.url + "/absent.pt")
        assert "cannot list a folder" in fail(proxy, "ckpt-inspect", "ls", server.url + "/")


def certificate_of_localhost(folder):
    """Writes a key and a certificate that no authority has signed. Returns their files."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.timezone.utc)
    signed = (x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(private.public_key()).serial_number(1)
              .not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=1))
              .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
              .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
              .sign(private, hashes.SHA256()))
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    key.write_bytes(private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    return key, certificate


def test_https_needs_a_certificate_that_is_trusted(proxy, tmp_path):
    pytest.importorskip("cryptography")
    shutil.copy(CHECKPOINTS["torch"], tmp_path / "a.pt")
    key, certificate = certificate_of_localhost(tmp_path)
    server = RangeServer(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.server.socket = context.wrap_socket(server.server.socket, server_side=True)
    with server:
        url = server.url.replace("http://", "https://") + "/a.pt"
        assert "certificate" in fail(proxy, "ckpt-inspect", "verify", url)
        assert server.requests == []
        succeed(proxy, "ckpt-inspect", "verify", url, AWS_CA_BUNDLE=str(certificate))
        assert "/a.pt" in server.requests


def test_a_signature_in_a_query_is_sent_and_never_shown(proxy, tmp_path):
    shutil.copy(CHECKPOINTS["torch"], tmp_path / "a.pt")
    with RangeServer(tmp_path) as server:
        for path in ("/a.pt", "/absent.pt"):
            process = run(proxy, "ckpt-inspect", "tree", f"{server.url}{path}?Signature=hidden")
            assert "hidden" not in process.stdout + process.stderr
        assert "/a.pt?Signature=hidden" in server.requests


def test_a_password_in_a_url_is_never_shown(proxy, tmp_path):
    for url in ("http://user:hidden@127.0.0.1:9/a.pt", "https://user:hidden@127.0.0.1:9/a.pt", "http://user:hidden@127.0.0.1:9/a/"):
        for tool, arguments in (("ckpt-inspect", ("ls", url)), ("ckpt-inspect", ("scan", url)), ("ckpt-inspect", ("diff", url, url)),
                                ("ckpt-reshard", (url, tmp_path / "moved")), ("ckpt-reshard", ("merge", url, url, tmp_path / "moved"))):
            process = run(proxy, tool, *arguments)
            assert process.returncode == 2 and "a host without a user name and a password" in process.stderr, process.stderr
            assert "hidden" not in process.stdout + process.stderr


@pytest.mark.parametrize("by_scheme", [True, False])
def test_a_model_of_the_hub(proxy, by_scheme):
    with RangeServer(CHECKPOINTS["safetensors"]) as server:
        url = "hf://o/n@main" if by_scheme else f"{server.url}/o/n/resolve/main"
        variables = {"HF_ENDPOINT": server.url, "HF_TOKEN": SECRET}
        expected = succeed(proxy, "ckpt-inspect", "ls", CHECKPOINTS["safetensors"], "--json", "--sha256")
        found = succeed(proxy, "ckpt-inspect", "ls", url, "--json", "--sha256", **variables)
        assert without_path(found, url) == without_path(expected, CHECKPOINTS["safetensors"])
        assert f"Bearer {SECRET}" in server.tokens


def test_a_move_from_the_hub_does_not_mix_two_commits(proxy, tmp_path):
    """The branch names another commit before the second worker begins. All files have equal sizes."""
    shutil.copytree(CHECKPOINTS["safetensors"], tmp_path / "old")
    with RangeServer(tmp_path / "old", commit="old") as server:
        arguments = ("hf://o/n", tmp_path / "moved", "--to", "native", "--world-size", 2)
        succeed(proxy, "ckpt-reshard", *arguments, "--part", "0/2", HF_ENDPOINT=server.url)
        shutil.copytree(server.folder, tmp_path / "new")
        server.folder, server.commit = tmp_path / "new", "new"
        error = fail(proxy, "ckpt-reshard", *arguments, "--part", "1/2", HF_ENDPOINT=server.url)
        assert 'ETag "old"' in error and 'ETag "new"' in error
        pinned = ("hf://o/n@old", *arguments[1:])
        server.folder, server.commit = tmp_path / "old", "old"
        succeed(proxy, "ckpt-reshard", *pinned, "--part", "1/2", HF_ENDPOINT=server.url)


@pytest.mark.parametrize("link", ['; rel="next"', "; rel=next", ';rel="next"', ';title=a;rel="next", <http://127.0.0.1:9>; rel="last"'])
def test_the_second_page_of_a_list_of_the_hub(link, proxy):
    with RangeServer(CHECKPOINTS["safetensors"], second_page=link) as server:
        succeed(proxy, "ckpt-inspect", "verify", "hf://o/n", HF_ENDPOINT=server.url)
        assert any("cursor=2" in path for path in server.requests)


def test_a_missing_page_of_a_list_of_the_hub_is_an_error(proxy):
    with RangeServer(CHECKPOINTS["safetensors"], second_page='; rel="next"; x=missing') as server:
        assert "status 404" in fail(proxy, "ckpt-inspect", "ls", "hf://o/n", HF_ENDPOINT=server.url)


def test_an_endless_list_of_the_hub_is_refused(proxy):
    with RangeServer(CHECKPOINTS["safetensors"], has_endless_list=True) as server:
        error = fail(proxy, "ckpt-inspect", "ls", "hf://o/n", HF_ENDPOINT=server.url)
        assert "hf://o/n: list of the hub: expected at most 1000 pages, found more" in error


def test_a_file_of_the_hub_that_is_longer_than_listed_is_refused(proxy):
    with RangeServer(CHECKPOINTS["safetensors"]) as server:
        server.added = b" " * 50
        error = fail(proxy, "ckpt-inspect", "ls", "hf://o/n", HF_ENDPOINT=server.url)
        nbytes = (CHECKPOINTS["safetensors"] / "model.safetensors.index.json").stat().st_size
        assert f"the version that was opened: {nbytes} bytes" in error and f"found {nbytes + 50} bytes" in error


def test_a_token_is_for_the_hub_alone(proxy):
    folder = CHECKPOINTS["safetensors"]
    with RangeServer(folder) as cdn, RangeServer(folder, cdn=cdn.url) as hub:
        succeed(proxy, "ckpt-inspect", "verify", "hf://o/n", HF_ENDPOINT=hub.url, HF_TOKEN=SECRET)
        assert cdn.requests and set(cdn.tokens) == {None}
        assert set(hub.tokens) == {f"Bearer {SECRET}"}


def package_folder():
    package = BIN.parent / "python"
    if not list(package.glob("tessera/_core*.so")):
        pytest.skip("the Python package is not built")
    return package


@pytest.fixture
def steps(proxy):
    """Returns a function that starts a Python program and yields the lines that it prints. Before it prints the next one, the
    program waits (`input()`) until the test asks for it."""
    started = []

    def start(program):
        variables = environment(proxy, PYTHONPATH=str(package_folder()))
        process = subprocess.Popen([sys.executable, "-u", "-c", program], env=variables, stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, text=True)
        started.append(process)
        while line := process.stdout.readline():
            yield line.strip()
            process.stdin.write("\n")
            process.stdin.flush()

    yield start
    for process in started:
        process.stdin.close()
        assert process.wait(60) == 0
        process.stdout.close()


def test_python_scans_files_again(bucket, steps):
    names, bad = ("s3://checkpoints/scanned/a.pkl", "s3://checkpoints/others"), b"cos\nsystem\n(S'true'\ntR."
    for key in ("scanned/a.pkl", "others/a.pkl"):
        bucket.put_object(Bucket="checkpoints", Key=key, Body=b"N.")
    lines = steps(f"import tessera\nfor _ in 'ab':\n  print(*(tessera.scan(name).clean for name in {names})); input()")
    assert next(lines) == "True True"
    for key in ("scanned/a.pkl", "others/b.pkl"):
        bucket.put_object(Bucket="checkpoints", Key=key, Body=bad)
    assert next(lines) == "False False"
    assert next(lines, None) is None


def test_python_lists_extra_files_and_layouts_again(proxy, bucket, steps, tmp_path):
    source, url = CHECKPOINTS["native"], "s3://checkpoints/like"
    moved = reshard(source, tmp_path / "like", "--world-size", 2)
    upload(bucket, moved, "like")
    bucket.put_object(Bucket="checkpoints", Key="extra/tokenizer.json", Body=b"{}")
    lines = steps(f"""
import tessera
for name in "ab":
    result = tessera.reshard({str(source)!r}, {str(tmp_path)!r} + "/" + name, like={url!r}, extra_files_from="s3://checkpoints/extra")
    print(result.world_size, *sorted(file.name for file in result.extra_files))
    input()
""")
    assert next(lines) == "2 tokenizer.json"
    bucket.put_object(Bucket="checkpoints", Key="extra/generation_config.json", Body=b"{}")
    shutil.rmtree(moved)
    for file in local_files(reshard(source, moved, "--world-size", 3)):
        bucket.put_object(Bucket="checkpoints", Key=f"like/{file.name}", Body=file.read_bytes())
    assert next(lines) == "3 generation_config.json tokenizer.json"
    assert next(lines, None) is None


def test_python_shows_no_signature(proxy, tmp_path):
    shutil.copy(CHECKPOINTS["torch"], tmp_path / "a.pt")
    program = """
import sys, tessera
for name in ("a.pt", "absent.pt"):
    url = sys.argv[1] + name + "?Signature=hidden"
    for call in (lambda: tessera.open(url).path, lambda: tessera.open(url)["no name"], lambda: tessera.verify(url),
                 lambda: tessera.load({"no name": 1}, url), lambda: tessera.scan(url), lambda: tessera.latest_valid(url),
                 lambda: tessera.reshard(url, sys.argv[2] + "/moved", dry_run=True),
                 lambda: tessera.reshard(url, sys.argv[2] + "/moved", to="safetensors", cast="int4", dry_run=True),
                 lambda: tessera.merge({"a": url, "b": url}, sys.argv[2] + "/moved", dry_run=True),
                 lambda: tessera.reshard(sys.argv[2] + "/a.pt", sys.argv[2] + "/moved", like=url, dry_run=True)):
        try:
            print(call())
        except Exception as error:
            print(repr(error), error, getattr(error, "path", ""))
"""
    with RangeServer(tmp_path) as server:
        process = subprocess.run([sys.executable, "-c", program, server.url + "/", str(tmp_path)],
                                 env=environment(proxy, PYTHONPATH=str(package_folder())), capture_output=True, text=True, timeout=120)
        assert process.returncode == 0, process.stderr
        assert "hidden" not in process.stdout + process.stderr
        assert {"/a.pt?Signature=hidden", "/absent.pt?Signature=hidden"} <= set(server.requests)


def test_python_opens_urls_and_sees_what_is_new(proxy, bucket):
    package = package_folder()
    program = "import tessera; print(*(len(tessera.open('s3://checkpoints/python/a.pt')) for _ in 'ab'))"
    upload(bucket, CHECKPOINTS["torch"], "python/a.pt")
    process = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(proxy, PYTHONPATH=str(package)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    assert len(set(process.stdout.split())) == 1
    asked = [request.path for request in proxy.data_requests]
    assert len(asked) > len(set(asked))  # the second opening asked again


def test_local_files_need_no_libcurl(proxy, tmp_path):
    """Without libcurl, only URLs fail, with an error that names the package."""
    (tmp_path / "libcurl.so.4").write_text("no library")
    (tmp_path / "libcurl-gnutls.so.4").write_text("no library")
    variables = {"LD_LIBRARY_PATH": str(tmp_path)}
    succeed(proxy, "ckpt-inspect", "ls", CHECKPOINTS["dcp"], **variables)
    if Path("/etc/ld.so.cache").exists():
        process = run(proxy, "ckpt-inspect", "ls", url_of("dcp"), **variables)
        assert process.returncode == 0 or "apt-get install libcurl4" in process.stderr
