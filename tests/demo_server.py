"""A demo in a process of its own, and a browser to look at it."""

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
from networks import built, save, shuffle

CHROMIUM = "/usr/bin/chromium"
# The suite's own guard ends at the process; this one names whoever asks another host.
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


def small_model(folder: Path, key: str = "vit", names: list[str] | None = None) -> str:
    """A folder with a small network of five classes whose names are traps for a page."""
    made = built(key)
    shuffle(made.model)
    return save(folder, made, ODD_NAMES if names is None else names)


@dataclass
class Running:
    """A server's address, its process, and what it has written so far."""

    url: str
    process: BaseProcess
    lines: list[str] = field(default_factory=list)

    def interrupt(self, number: int = signal.SIGINT) -> int | None:
        """Send a signal. Returns: the exit code, or minus the signal; None if it goes on."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        self.process.join(timeout=30)
        return self.process.exitcode


@contextmanager
def running(serve: Callable[[], object], **environment: str) -> Iterator[Running]:
    """Fork a server that says its address on standard error, and end it.

    Args:
        serve: what the process does, which has imported what this one has.
        environment: its variables beside this process's own.
    """
    pytest.importorskip("gradio", reason="Gradio is not installed: pip install 'finetune[demo]'")
    reading, writing = os.pipe()

    def work() -> None:
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        sys.stdout = sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
        os.environ.update(environment)
        tempfile.tempdir = None  # it may be another there
        serve()

    process = multiprocessing.get_context("fork").Process(target=work, daemon=True)
    process.start()
    os.close(writing)
    server = Running("", process)

    def read() -> None:
        with os.fdopen(reading) as stream:
            for line in stream:
                server.lines.append(line)
                if found := re.search(r"http://[^\s;]+", line):
                    server.url = server.url or found[0]

    reader = threading.Thread(target=read, daemon=True)
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
def demo(model: str, *, before: str = "", **environment: str) -> Iterator[Running]:
    """`serve(model)` on a free port, with the network guarded.

    Args:
        before: code that runs first, such as one that takes a protection away.
    """

    def serve() -> None:
        exec(f"{GUARD}\n{before}", {})
        from finetune.demo.server import serve

        serve(model, port=0)

    with running(serve, **environment) as server:
        yield server


def ask(url: str, data: Any = None, **headers: str) -> tuple[int, str]:
    """One request; `data` is sent as it is if it is bytes, else as JSON. Returns: status, text."""
    body = None if data is None else data if isinstance(data, bytes) else json.dumps(data).encode()
    kinds = {} if isinstance(data, bytes) else {"Content-Type": "application/json"}
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, data=body, headers={**kinds, **names})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode("utf-8", "replace")


def upload(server: Running, name: str, content: bytes, **headers: str) -> tuple[int, str]:
    """Send one file as a browser does."""
    head = f'Content-Disposition: form-data; name="files"; filename="{name}"'
    body = b"--x\r\n" + head.encode() + b"\r\n\r\n" + content + b"\r\n--x--\r\n"
    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    return ask(f"{server.url}/gradio_api/upload", body, **kind, **headers)


def classify(server: Running, picture: Any, **headers: str) -> tuple[int, str]:
    """The open function, as its clients call it. Returns: the status, and what it answers."""
    call = f"{server.url}/gradio_api/call/predict"
    status, text = ask(call, {"data": [picture]}, **headers)
    if status != 200:
        return status, text
    return ask(f"{call}/{json.loads(text)['event_id']}")


@contextmanager
def browser() -> Iterator[Any]:
    """Headless Chromium, driven by Playwright."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="Playwright for Python is not installed"
    )
    if not Path(CHROMIUM).is_file():
        pytest.skip(f"no browser: {CHROMIUM} does not exist")
    quiet = ("background-networking", "component-update", "sync", "gpu")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in quiet)],
        )
        try:
            yield chromium
        finally:
            chromium.close()
