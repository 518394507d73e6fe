"""A proxy in front of an HTTP server that counts requests, delays answers and fails on demand."""

import base64
import hashlib
import http.client
import re
import threading
import time
import zlib
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade"}


@dataclass
class Request:
    path: str  # with the query
    headers: dict
    number: int  # counts all requests of the proxy, from 1
    method: str = "GET"
    body: bytes = b""

    @property
    def is_list(self):
        return "list-type=2" in self.path

    @property
    def range(self):
        return self.headers.get("Range", "")

    def header(self, name):
        return next((value for key, value in self.headers.items() if key.lower() == name.lower()), None)

    @property
    def upload_id(self):
        found = re.search(r"uploadId=([^&]*)", self.path)
        return found and found[1]

    @property
    def part_number(self):
        found = re.search(r"partNumber=(\d+)", self.path)
        return found and int(found[1])


@dataclass
class Answer:
    status: int
    headers: dict
    body: bytes
    declared_nbytes: int | None = None  # if set, a wrong Content-Length to send
    cut_after: int | None = None  # bytes of the body after which the connection is cut


def crc32_text(body):
    return base64.b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()


class Checksums:
    """Checks the bodies of uploads by MD5 and by CRC-32 as AWS does. (moto does not check them.)"""

    def __init__(self):
        self.crcs = {}  # upload ID -> the CRC of each part, for uploads with CRCs

    def refuse(self, request):
        """Returns AWS's answer to a wrong or missing checksum; None if all is well."""
        if request.method == "POST" and request.upload_id in self.crcs:
            told = re.findall(rb"<PartNumber>(\d+)</PartNumber>.*?<ChecksumCRC32>(.*?)</ChecksumCRC32>", request.body)
            parts = self.crcs[request.upload_id]
            if request.body.count(b"<Part>") != len(told) or any(parts.get(int(number)) != crc.decode() for number, crc in told):
                return s3_error(400, "InvalidPart", "the checksums of the parts are missing or wrong")
        if request.method != "PUT":
            return None
        md5, crc = request.header("Content-MD5"), request.header("x-amz-checksum-crc32")
        if md5 and md5 != base64.b64encode(hashlib.md5(request.body).digest()).decode():
            return s3_error(400, "BadDigest", "The Content-MD5 you specified did not match what we received.")
        if crc and crc != crc32_text(request.body):
            return s3_error(400, "BadDigest", "The CRC32 you specified did not match the calculated checksum.")
        if request.upload_id and bool(crc) != (request.upload_id in self.crcs):
            return s3_error(400, "InvalidRequest", "Checksum Type mismatch occurred")
        return None

    def note(self, request, answer):
        """Records the checksum of a part, and adds checksums to answers."""
        if answer.status >= 300:
            return
        if request.method == "POST" and request.path.endswith("?uploads=") and request.header("x-amz-checksum-algorithm") == "CRC32":
            self.crcs[re.search(rb"<UploadId>(.*?)</UploadId>", answer.body)[1].decode()] = {}
            answer.headers["x-amz-checksum-algorithm"] = "CRC32"
        elif request.method == "PUT" and (crc := request.header("x-amz-checksum-crc32")):
            answer.headers["x-amz-checksum-crc32"] = crc
            if request.upload_id:
                self.crcs[request.upload_id][request.part_number] = crc
        elif request.method == "POST" and request.upload_id in self.crcs:
            parts = self.crcs[request.upload_id]
            told = [int(number) for number in re.findall(rb"<PartNumber>(\d+)", request.body)]
            text = crc32_text(b"".join(base64.b64decode(parts[number]) for number in told)) + f"-{len(told)}"
            end = b"</CompleteMultipartUploadResult>"
            answer.body = answer.body.replace(end, f"<ChecksumCRC32>{text}</ChecksumCRC32>".encode() + end)


@dataclass
class Proxy:
    """A server between the tools and the upstream server. It checks checksums as AWS does. `change(request, answer)`
    returns the answer to send. `refuse(request)` returns an answer to send without asking the upstream server.
    `damage(request)` may change the request's body before checksums are checked."""

    upstream: tuple  # (host, port)
    latency_s: float = 0.0
    change: object = None
    refuse: object = None
    damage: object = None
    knows_crc32: bool = True  # otherwise the server ignores the headers of CRCs
    requests: list = field(default_factory=list)
    num_connections: int = 0

    def __enter__(self):
        proxy = self
        lock = threading.Lock()
        checksums = Checksums()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def setup(self):
                with lock:
                    proxy.num_connections += 1
                super().setup()

            def do_GET(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                with lock:
                    request = Request(self.path, dict(self.headers), len(proxy.requests) + 1, self.command, body)
                    proxy.requests.append(request)
                if proxy.latency_s:
                    time.sleep(proxy.latency_s)
                answer = proxy.refuse(request) if proxy.refuse else None
                if answer is None:  # the proxy lets the request pass
                    answer = self.ask(request)
                    if proxy.change:
                        answer = proxy.change(request, answer) or answer
                self.send(answer)

            def ask(self, request):
                if not proxy.knows_crc32:
                    for name in [name for name in request.headers if name.lower().startswith("x-amz-checksum-")]:
                        del request.headers[name]
                if proxy.damage:
                    proxy.damage(request)
                answer = checksums.refuse(request)
                if answer is None:  # the checksums are right
                    answer = proxy.ask(request)
                    checksums.note(request, answer)
                return answer

            do_PUT = do_POST = do_DELETE = do_GET

            def send(self, answer):
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                nbytes = len(answer.body) if answer.declared_nbytes is None else answer.declared_nbytes
                self.send_header("Content-Length", str(nbytes))
                self.end_headers()
                cut = answer.cut_after
                self.wfile.write(answer.body if cut is None else answer.body[:cut])
                if cut is not None or nbytes != len(answer.body):
                    self.close_connection = True

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    @property
    def data_requests(self):
        return [request for request in self.requests if not request.is_list]

    def ask(self, request):
        connection = http.client.HTTPConnection(*self.upstream, timeout=60)
        headers = {name: value for name, value in request.headers.items() if name.lower() != "host"}
        connection.request(request.method, request.path, body=request.body, headers=headers)
        response = connection.getresponse()
        body = response.read()
        connection.close()
        kept = {
            name: value
            for name, value in response.getheaders()
            if name.lower() not in HOP_BY_HOP | {"content-length", "date", "server"}
        }
        return Answer(response.status, kept, body)


def s3_error(status, code, message="", headers=None, more=""):
    body = f"<Error><Code>{code}</Code><Message>{message}</Message>{more}</Error>".encode()
    return Answer(status, {"Content-Type": "application/xml", **(headers or {})}, body)
