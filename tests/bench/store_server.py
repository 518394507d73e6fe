"""An S3 server in memory, with a latency and a link of limited speed, so that a move can be compared with the speed of the link.

It answers the requests that ckpt-reshard sends: lists, ranges, objects and uploads in parts. To need little processor time, it checks
neither signatures nor checksums, and its ETags are not MD5 digests. It returns the CRC-32s that it gets, like a server that checks them.
"""

import argparse
import itertools
import re
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from xml.sax.saxutils import escape

SLICE_NBYTES = 256 * 1024
KEYS_OF_PAGE = 1000  # as S3


class Link:
    """All connections together send, or receive, at most `rate` bytes a second."""

    def __init__(self, rate: float):
        self.rate = rate
        self.lock = threading.Lock()
        self.free_at = 0.0

    def take(self, nbytes: int) -> None:
        with self.lock:
            now = time.perf_counter()
            self.free_at = max(now, self.free_at) + nbytes / self.rate
            wait = self.free_at - now
        if wait > 0.001:
            time.sleep(wait)


class Store:
    def __init__(self, log=None):
        self.log = log  # a file that gets each request's first line; None: nothing is logged
        self.objects: dict[str, tuple[bytes, str]] = {}  # by bucket and key: bytes, ETag
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.numbers = itertools.count(1)

    def put(self, path: str, body: bytes) -> str:
        etag = f'"v{next(self.numbers)}"'
        self.objects[path] = body, etag
        return etag

    def list(self, bucket: str, prefix: str, after: str) -> str:
        """Returns the answer to a list request: a page of the objects and folders directly under `prefix`, whose keys are greater than `after`."""
        found = {}  # by key
        for path, (body, etag) in sorted(self.objects.items()):
            key = path.removeprefix(bucket + "/")
            if key == path or not key.startswith(prefix):
                continue
            name, slash, _ = key.removeprefix(prefix).partition("/")
            if slash:
                folder = prefix + name + slash
                found[folder] = f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
            else:
                found[key] = f"<Contents><Key>{escape(key)}</Key><Size>{len(body)}</Size><ETag>{escape(etag)}</ETag></Contents>"
        keys = sorted(key for key in found if key > after)
        page = keys[:KEYS_OF_PAGE]
        more = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if len(keys) > len(page) else ""
        return (f"<ListBucketResult><IsTruncated>{'true' if more else 'false'}</IsTruncated>{more}"
                f"{''.join(found[key] for key in page)}</ListBucketResult>")


def handler(store: Store, link: Link, latency_s: float) -> type:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_):
            if store.log is not None:
                store.log.write(self.requestline + "\n")
                store.log.flush()

        def parts(self) -> tuple[str, dict]:
            path, _, query = self.path.partition("?")
            return urllib.parse.unquote(path.strip("/")), dict(urllib.parse.parse_qsl(query, keep_blank_values=True))

        def body(self) -> bytes:
            room = bytearray(int(self.headers.get("Content-Length", 0)))
            at = 0
            while at < len(room):
                nbytes = self.rfile.readinto(memoryview(room)[at:at + SLICE_NBYTES])
                if not nbytes:
                    break
                link.take(nbytes)
                at += nbytes
            return bytes(room)

        def answer(self, status: int, body=b"", **headers) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            for begin in range(0, len(body), SLICE_NBYTES):
                part = body[begin:begin + SLICE_NBYTES]
                link.take(len(part))
                self.wfile.write(part)

        def repeated(self) -> dict:
            """Returns the request's CRC-32 headers, which a server that checks CRC-32s sends back."""
            names = ("x-amz-checksum-algorithm", "x-amz-checksum-crc32")
            return {name: self.headers[name] for name in names if name in self.headers}

        def do_GET(self):
            time.sleep(latency_s)
            path, query = self.parts()
            if "list-type" in query:
                return self.answer(200, store.list(path, query.get("prefix", ""), query.get("continuation-token", "")).encode())
            if "uploads" in query:
                return self.answer(200, b"<ListMultipartUploadsResult></ListMultipartUploadsResult>")
            if path not in store.objects:
                return self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            content, etag = store.objects[path]
            wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if not wanted:
                return self.answer(200, memoryview(content), ETag=etag)
            begin, end = int(wanted[1]), min(int(wanted[2]) + 1, len(content))
            if begin >= end:
                return self.answer(416, Content_Range=f"bytes */{len(content)}", ETag=etag)
            return self.answer(206, memoryview(content)[begin:end], ETag=etag,
                               Content_Range=f"bytes {begin}-{end - 1}/{len(content)}")

        def do_PUT(self):
            time.sleep(latency_s)
            path, query = self.parts()
            content = self.body()
            if "uploadId" in query:
                store.uploads[query["uploadId"]][int(query["partNumber"])] = content
                return self.answer(200, ETag=f'"p{query["partNumber"]}"', **self.repeated())
            if self.headers.get("If-None-Match") == "*" and path in store.objects:
                return self.answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            return self.answer(200, ETag=store.put(path, content), **self.repeated())

        def do_POST(self):
            time.sleep(latency_s)
            path, query = self.parts()
            self.body()
            if "uploads" in query:
                upload = f"u{next(store.numbers)}"
                store.uploads[upload] = {}
                return self.answer(200, f"<R><UploadId>{upload}</UploadId></R>".encode(), **self.repeated())
            parts = store.uploads.pop(query["uploadId"])
            etag = store.put(path, b"".join(content for _, content in sorted(parts.items())))
            return self.answer(200, f"<R><ETag>{escape(etag)}</ETag></R>".encode())

        def do_DELETE(self):
            time.sleep(latency_s)
            path, query = self.parts()
            (store.uploads if "uploadId" in query else store.objects).pop(query.get("uploadId", path), None)
            return self.answer(204)

    return Handler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--latency-ms", type=float, required=True)
    parser.add_argument("--bytes-per-second", type=float, required=True)
    parser.add_argument("--log", type=argparse.FileType("w"), help="write the first line of each request to this file")
    arguments = parser.parse_args()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(Store(arguments.log), Link(arguments.bytes_per_second), arguments.latency_ms / 1000))
    server.daemon_threads = True
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
