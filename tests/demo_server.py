"""Run the demo in a process of its own, and send requests to it."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from networks import build_network, randomize_head, save_network

from finetune.errors import Interrupted

# The suite blocks the network only in its own process; this does it in the demo's process.
GUARD = """
import ipaddress, socket, sys
connect, resolve = socket.socket.connect, socket.getaddrinfo
def local(host):
    if host in (None, "", "localhost"):
        return True
    try:
        return ipaddress.ip_address(str(host).split("%")[0]).is_loopback
    except ValueError:
        return False
def check(host):
    if not local(host):
        print("OUTSIDE", host, file=sys.stderr, flush=True)
        raise ConnectionError(host)
def guarded(self, address):
    if self.family in (socket.AF_INET, socket.AF_INET6):
        check(address[0])
    return connect(self, address)
def names(host, *args, **kwargs):
    check(host)
    return resolve(host, *args, **kwargs)
socket.socket.connect, socket.getaddrinfo = guarded, names
"""
ODD_NAMES = ["<img src=x onerror=document.title='broken'>", "${1+1}", "{{7*7}}", "a & b", "élan"]


def save_small_model(folder: Path, key: str = "vit", names: list[str] | None = None) -> str:
    """Save a small network of five classes whose names would break a careless page."""
    built_model = build_network(key)
    randomize_head(built_model.model)
    return save_network(folder, built_model, ODD_NAMES if names is None else names)


@dataclass
class DemoServer:
    """The address of a server, its process, and its output so far."""

    url: str
    process: BaseProcess
    lines: list[str] = field(default_factory=list)

    def interrupt(self, number: int = signal.SIGINT) -> int | None:
        """Send a signal. Returns: the exit code or minus the signal; None if still running."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        self.process.join(timeout=30)
        return self.process.exitcode


@contextmanager
def run_server(serve: Callable[[], object], **environment: str) -> Iterator[DemoServer]:
    """Fork a server that prints its address to standard error; end it on exit.

    Args:
        serve: runs in the child, which has the imports of this process.
        environment: added to the environment of this process.
    """
    read_fd, write_fd = os.pipe()

    def run_child() -> None:
        os.dup2(write_fd, 1)
        os.dup2(write_fd, 2)
        sys.stdout = sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
        os.environ.update(environment)
        tempfile.tempdir = None  # read TMPDIR again
        serve()

    process = multiprocessing.get_context("fork").Process(target=run_child, daemon=True)
    process.start()
    os.close(write_fd)
    server = DemoServer("", process)

    def read_output() -> None:
        with os.fdopen(read_fd) as stream:
            for line in stream:
                server.lines.append(line)
                if found := re.search(r"http://[^\s;]+", line):
                    server.url = server.url or found[0]

    reader = threading.Thread(target=read_output, daemon=True)
    reader.start()
    deadline = time.monotonic() + 120
    try:
        while not server.url:
            assert process.is_alive(), "".join(server.lines)
            assert time.monotonic() < deadline, "".join(server.lines)
            time.sleep(0.05)
        yield server
    finally:
        process.terminate()
        process.join(timeout=30)
        process.kill()
        reader.join(timeout=10)


@contextmanager
def run_demo(model: str, *, setup_code: str = "", **environment: str) -> Iterator[DemoServer]:
    """`serve(model)` on a free port, with the network guarded.

    Args:
        model: the folder of the model.
        setup_code: run first, for example to remove a protection.
        environment: added to the environment of this process.
    """
    pytest.importorskip("gradio", reason="Gradio is not installed: pip install '.[demo]'")

    def serve() -> None:
        exec(f"{GUARD}\n{setup_code}", {})
        from finetune.demo.server import serve

        try:
            serve(model, port=0)
        except Interrupted as stop:
            print(stop)  # as the command line does
            raise SystemExit(stop.exit_code) from None

    with run_server(serve, **environment) as server:
        yield server


def http_request(url: str, data: Any = None, **headers: str) -> tuple[int, str]:
    """Send one request; bytes are sent unchanged, other data as JSON. Returns: status, text."""
    body = None if data is None else data if isinstance(data, bytes) else json.dumps(data).encode()
    content_type = {} if isinstance(data, bytes) else {"Content-Type": "application/json"}
    request_headers = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, data=body, headers={**content_type, **request_headers})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read().decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode("utf-8", "replace")


def upload(server: DemoServer, name: str, content: bytes, **headers: str) -> tuple[int, str]:
    """Upload one file as a browser does."""
    head = f'Content-Disposition: form-data; name="files"; filename="{name}"'
    body = b"--x\r\n" + head.encode() + b"\r\n\r\n" + content + b"\r\n--x--\r\n"
    content_type = {"Content-Type": "multipart/form-data; boundary=x"}
    return http_request(f"{server.url}/gradio_api/upload", body, **content_type, **headers)


def call_predict(server: DemoServer, image: Any, **headers: str) -> tuple[int, str]:
    """Call the public API function as its clients do. Returns: status, text."""
    call = f"{server.url}/gradio_api/call/predict"
    status, text = http_request(call, {"data": [image]}, **headers)
    if status != 200:
        return status, text
    return http_request(f"{call}/{json.loads(text)['event_id']}")
