"""A proxy in front of an HTTP server that counts requests, delays answers and fails on demand."""

import http.client
import threading
import time
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


@dataclass
class Answer:
    status: int
    headers: dict
    body: bytes
    declared_nbytes: int | None = None  # the Content-Length that is sent, if it is a lie
    cut_after: int | None = None  # bytes of the body after which the connection is cut


@dataclass
class Proxy:
    """`change(request, answer)` returns the answer to send; `refuse(request)` one without asking the server."""

    upstream: tuple  # (host, port)
    latency_s: float = 0.0
    change: object = None
    refuse: object = None
    requests: list = field(default_factory=list)

    def __enter__(self):
        proxy = self
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                with lock:
                    request = Request(self.path, dict(self.headers), len(proxy.requests) + 1, self.command, body)
                    proxy.requests.append(request)
                if proxy.latency_s:
                    time.sleep(proxy.latency_s)
                answer = proxy.refuse(request) if proxy.refuse else None
                if answer is None:
                    answer = proxy.ask(request)
                    if proxy.change:
                        answer = proxy.change(request, answer) or answer
                self.send(answer)

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
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
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
