"""Reads or writes an object by plain Python, on several connections at once, as fast as the link allows.

usage: store_peer.py read|write PORT PATH NBYTES
"""

import http.client
import re
import sys
from concurrent.futures import ThreadPoolExecutor

READ_NBYTES, READ_CONNECTIONS = 8 << 20, 16
PART_NBYTES, WRITE_CONNECTIONS = 8 << 20, 8


def ask(port: int, method: str, path: str, body: bytes = b"", headers: dict | None = None) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request(method, path, body, headers or {})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    if answer.status >= 300:
        sys.exit(f"{method} {path}: status {answer.status}")
    return content


def read(port: int, path: str, nbytes: int) -> None:
    def part(begin: int) -> int:
        end = min(begin + READ_NBYTES, nbytes)
        return len(ask(port, "GET", path, headers={"Range": f"bytes={begin}-{end - 1}"}))

    with ThreadPoolExecutor(READ_CONNECTIONS) as pool:
        if sum(pool.map(part, range(0, nbytes, READ_NBYTES))) != nbytes:
            sys.exit(f"{path}: expected {nbytes} bytes")


def write(port: int, path: str, nbytes: int) -> None:
    upload = re.search(rb"<UploadId>(.*)</UploadId>", ask(port, "POST", path + "?uploads="))[1].decode()
    content = bytes(PART_NBYTES)

    def part(number: int) -> None:
        size = min(PART_NBYTES, nbytes - (number - 1) * PART_NBYTES)
        ask(port, "PUT", f"{path}?partNumber={number}&uploadId={upload}", content[:size])

    with ThreadPoolExecutor(WRITE_CONNECTIONS) as pool:
        list(pool.map(part, range(1, -(-nbytes // PART_NBYTES) + 1)))
    ask(port, "POST", f"{path}?uploadId={upload}")


if __name__ == "__main__":
    way, port, path, nbytes = sys.argv[1:]
    (read if way == "read" else write)(int(port), path, int(nbytes))
