"""Write small tar shards, and serve them with an HTTP server that supports ranges."""

from __future__ import annotations

import io
import re
import tarfile
import threading
import time
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from small_datasets import random_png

Member = tuple[str, bytes] | tarfile.TarInfo

SUFFIXES = ("rgb.png", "mask.png")


def tar_bytes(members: Iterable[Member], **options: Any) -> bytes:
    """Return a tar file of these (name, content) pairs, or of headers without content."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", **options) as archive:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
            else:
                header = tarfile.TarInfo(member[0])
                header.size = len(member[1])
                archive.addfile(header, io.BytesIO(member[1]))
    return stream.getvalue()


def tar_members(first: int, number: int, classes: int = 2) -> list[Member]:
    """Return the members `00007.cls` and `00007.png` of samples with labels 0, 1, 0, 1, …"""
    return [
        member
        for place in range(first, first + number)
        for member in (
            (f"{place:05}.cls", str(place % classes).encode()),
            (f"{place:05}.png", random_png(place)),
        )
    ]


def two_image_members() -> list[Member]:
    """Return the members of two samples with an image of each of the `SUFFIXES`."""
    return [
        member
        for number in (0, 1)
        for member in (
            (f"{number}.cls", str(number).encode()),
            (f"{number}.{SUFFIXES[0]}", random_png(number)),
            (f"{number}.{SUFFIXES[1]}", random_png(number + 2)),
        )
    ]


def write_tar_shards(folder: Path, *, train: int = 3, each: int = 6) -> Path:
    """Write the shards `set-train-0000.tar`, …, and one test shard."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(train):
        path = folder / f"set-train-{number:04}.tar"
        path.write_bytes(tar_bytes(tar_members(number * each, each)))
    (folder / "set-test-0000.tar").write_bytes(tar_bytes(tar_members(train * each, each)))
    return folder


class RangeServer:
    """Serves a folder on loopback and supports byte ranges.

    Attributes:
        url: the address of the folder.
        requests: (path, first, last) of each request.
        error_responses: status codes, or redirect targets, for the next requests.
        validator: the ETag, or the Last-Modified date if it ends with GMT.
        supports_ranges: False to send whole files only.
        flood: (piece, pause in seconds): sent 100 times to requests beyond the first byte.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: list[tuple[str, int, int]] = []
        self.error_responses: list[int | str] = []
        self.validator = "one"
        self.supports_ranges = True
        self.flood: tuple[bytes, float] | None = None
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                path = folder / self.path.partition("?")[0].lstrip("/")
                span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
                status = (
                    404
                    if not path.is_file()
                    else server.error_responses.pop(0)
                    if server.error_responses
                    else 206
                )
                body = b""
                if status == 206 and span:
                    first, last = int(span[1]), int(span[2])
                    server.requests.append((path.name, first, last))
                    whole = path.read_bytes()
                    body = whole[first : last + 1]
                    if not server.supports_ranges:
                        status, body = 200, whole
                self.send_response(302 if isinstance(status, str) else status)
                if isinstance(status, str):
                    self.send_header("Location", status)
                if status == 206:
                    end = first + len(body) - 1
                    self.send_header("Content-Range", f"bytes {first}-{end}/{len(whole)}")
                if server.validator:
                    is_time = server.validator.endswith("GMT")
                    self.send_header("Last-Modified" if is_time else "ETag", server.validator)
                if server.flood and status == 206 and last:
                    self.send_header("Transfer-Encoding", "chunked")
                    self.end_headers()
                    for _ in range(100):
                        self.wfile.write(b"%x\r\n%b\r\n" % (len(server.flood[0]), server.flood[0]))
                        time.sleep(server.flood[1])
                    return
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> RangeServer:
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
