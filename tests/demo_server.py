"""A demo in a process of its own, and a browser to look at it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from networks import built, save, shuffle

REPOSITORY = Path(__file__).resolve().parents[1]
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
SERVE = "from finetune.demo.server import serve; serve(sys.argv[1], port=0)"
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
    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    def interrupt(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=30)


@contextmanager
def running(command: Sequence[str], *, cwd: Path, **environment: str) -> Iterator[Running]:
    """Start a server that says its address on standard error, and end it."""
    pytest.importorskip("gradio", reason="Gradio is not installed: pip install 'finetune[demo]'")
    process = subprocess.Popen(
        [*command],
        cwd=cwd,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    server = Running("", process)

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            server.lines.append(line)
            if found := re.search(r"http://[^\s;]+", line):
                server.url = server.url or found[0]

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    deadline = time.monotonic() + 120
    try:
        while not server.url:
            assert process.poll() is None, "".join(server.lines)
            assert time.monotonic() < deadline, "".join(server.lines)
            time.sleep(0.05)
        yield server
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=30)
        reader.join(timeout=10)


@contextmanager
def demo(model: str, *, before: str = "", **environment: str) -> Iterator[Running]:
    """`serve(model)` on a free port, with the network guarded.

    Args:
        before: code that runs first, such as one that takes a protection away.
    """
    code = f"{GUARD}\n{before}\n{SERVE}"
    command = [sys.executable, "-c", code, model]
    with running(command, cwd=REPOSITORY, **environment) as server:
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
