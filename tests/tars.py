"""Tar shards that tests make for themselves, and a server that sends parts of files."""

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

from samples import png

Member = tuple[str, bytes] | tarfile.TarInfo


def tar(members: Iterable[Member], **options: Any) -> bytes:
    """A tar file of these names and contents, or headers without a content."""
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


def samples(first: int, number: int, classes: int = 2) -> list[Member]:
    """Members `00007.cls` and `00007.png` of some samples, whose labels are 0, 1, 0, 1, …"""
    return [
        member
        for place in range(first, first + number)
        for member in (
            (f"{place:05}.cls", str(place % classes).encode()),
            (f"{place:05}.png", png(place)),
        )
    ]


def shards(folder: Path, *, train: int = 3, each: int = 6) -> Path:
    """Shards `set-train-0000.tar` and on, and one of the test."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(train):
        path = folder / f"set-train-{number:04}.tar"
        path.write_bytes(tar(samples(number * each, each)))
    (folder / "set-test-0000.tar").write_bytes(tar(samples(train * each, each)))
    return folder


class RangeServer:
    """Serves a folder on loopback, in parts.

    Attributes:
        url: of the folder.
        asked: (path, first, last) of each request.
        failing: statuses to answer the next requests with, or places to lead them to.
        sends_parts: False to send whole files only.
        flood: a piece of which answers beyond the first byte have 100, and the seconds between.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[tuple[str, int, int]] = []
        self.failing: list[int | str] = []
        self.tag = "one"
        self.sends_parts = True
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
                    404 if not path.is_file() else server.failing.pop(0) if server.failing else 206
                )
                body = b""
                if status == 206 and span:
                    first, last = int(span[1]), int(span[2])
                    server.asked.append((path.name, first, last))
                    whole = path.read_bytes()
                    body = whole[first : last + 1]
                    if not server.sends_parts:
                        status, body = 200, whole
                self.send_response(302 if isinstance(status, str) else status)
                if isinstance(status, str):
                    self.send_header("Location", status)
                if status == 206:
                    end = first + len(body) - 1
                    self.send_header("Content-Range", f"bytes {first}-{end}/{len(whole)}")
                if server.tag:
                    is_time = server.tag.endswith("GMT")
                    self.send_header("Last-Modified" if is_time else "ETag", server.tag)
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
