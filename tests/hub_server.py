"""A hub server on loopback for the real clients, with faults that a test injects.

`HubServer` serves the HTTP interface (routes in `hub_routes.py`), keeps everything in memory
(`hub_store.py`), and records each request. A second port serves large files, as the real hub serves
them from another host.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import hub_routes
from hub_routes import Reply, Request
from hub_store import MAIN, File, Store, User, is_lfs

__all__ = ["HubServer", "point_clients_at"]

FAULTS = ("status", "reset", "truncate", "corrupt", "lost", "hang", "slow")
SLOW_SECONDS = 1.5


@dataclass
class InjectedFault:
    """A fault for the requests whose "METHOD /path" matches a pattern."""

    pattern: str
    kind: str
    status: int
    times: int | None  # None: every time
    retry_after: int | None
    echo: bool  # the error repeats the Authorization header, as a careless server would
    headers: dict[str, str]
    body: bytes | None

    def matches(self, line: str) -> bool:
        if self.times == 0 or not re.search(self.pattern, line):
            return False
        if self.times is not None:
            self.times -= 1
        return True

    def reply(self, request: Request) -> Reply:
        message = "injected fault"
        if self.echo:
            message += f": got Authorization {request.headers.get('authorization')}"
        headers = {"X-Error-Message": message}
        if self.retry_after is not None:
            headers["Retry-After"] = str(self.retry_after)
        body = json.dumps({"error": message}).encode() if self.body is None else self.body
        return Reply(self.status, body, {**headers, **self.headers})


class _HubHTTPServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, hub: HubServer) -> None:
        super().__init__(("127.0.0.1", 0), _HubRequestHandler)
        self.hub = hub
        self.open_sockets: set[socket.socket] = set()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnected; record any other error of this server."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            self.hub.server_errors.append(repr(error))
            super().handle_error(request, client_address)

    def stop(self) -> None:
        self.shutdown()
        self.server_close()
        for connection in list(self.open_sockets):  # kept alive by the connection pool of a client
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # already closed


class _HubRequestHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _HubHTTPServer

    def setup(self) -> None:
        super().setup()
        self.server.open_sockets.add(self.connection)

    def finish(self) -> None:
        self.server.open_sockets.discard(self.connection)
        super().finish()

    def log_message(self, *args: Any) -> None:
        pass

    def answer(self) -> None:
        body = self._body()
        headers = {key.lower(): value for key, value in self.headers.items()}
        request = Request(self.command, self.path, headers, body)
        hub = self.server.hub
        with hub.store.lock:
            hub.requests.append((self.command, self.path))
            hub.headers.append(headers)
            line = f"{self.command} {self.path}"
            fault = next((fault for fault in hub.faults if fault.matches(line)), None)
        if fault and fault.kind == "reset":
            self.close_connection = True
            return
        if fault and fault.kind in ("hang", "slow"):
            hub.stopped.wait(SLOW_SECONDS if fault.kind == "slow" else None)
            if hub.stopped.is_set():
                self.close_connection = True
                return
        if fault and fault.kind == "status":
            self.send(fault.reply(request))
            return
        with hub.store.lock:
            reply = hub_routes.handle_request(hub, request)
        if fault and fault.kind == "lost":
            self.close_connection = True
            return
        self.send(reply, fault.kind if fault else None)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = answer

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        pieces = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def send(self, reply: Reply, fault: str | None = None) -> None:
        content = reply.body
        if fault == "corrupt":  # only the last bytes, so that weights stay plausible numbers
            tail = content[-64:]
            content = content[: len(content) - len(tail)] + bytes(byte ^ 1 for byte in tail)
        elif fault == "truncate":
            content = content[: len(content) // 2]
            self.close_connection = True
        self.send_response(reply.status)
        for key, value in {"Content-Type": "application/json", **reply.headers}.items():
            self.send_header(key, value)
        if "Content-Length" not in reply.headers:
            self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@dataclass
class HubServer:
    """The hub; use it in a `with` statement.

    Attributes:
        xet: announce Xet storage in the headers of large files, without serving it.
        xet_token: hand out tokens for Xet storage, on the port of large files.
        requests: (method, path with query) of each request, as received.
        headers: the headers of each request, by lower-case name.
        server_errors: exceptions in this server itself; tests can assert that the list is empty.
    """

    xet: bool = False
    xet_token: bool = False
    store: Store = field(default_factory=Store)
    requests: list[tuple[str, str]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    faults: list[InjectedFault] = field(default_factory=list)
    server_errors: list[str] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._servers = [_HubHTTPServer(self), _HubHTTPServer(self)]
        main, other = (server.server_port for server in self._servers)
        # The clients follow redirects on one host, and older ones ignore the port.
        self.url, self.cdn = f"http://127.0.0.1:{main}", f"http://localhost:{other}"

    def __enter__(self) -> HubServer:
        for server in self._servers:
            kwargs = {"poll_interval": 0.02}
            threading.Thread(target=server.serve_forever, kwargs=kwargs, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the server: close connections, refuse later ones."""
        self.stopped.set()
        for server in self._servers:
            server.stop()
        self._servers = []

    # --- what a test sets up and checks ---------------------------------------------------------

    def add_user(self, name: str, *, token: str, role: str = "write", orgs: Any = ()) -> None:
        assert role in ("write", "read")
        self.store.users[token] = User(name, role, tuple(orgs))

    def add_repo(
        self,
        name: str,
        files: Mapping[str, bytes] | None = None,
        *,
        kind: str = "model",
        private: bool = False,
        gated: bool = False,
    ) -> str:
        """Create a repository as its owner would. Returns: the sha of its first commit."""
        with self.store.lock:
            repository = self.store.create(name, kind, private=private, gated=gated)
        return self.commit(name, files) if files else repository.branches[MAIN]

    def commit(
        self, name: str, changes: Mapping[str, bytes | None], *, revision: str = MAIN
    ) -> str:
        """Commit without a client; None deletes a file. Returns: the new sha."""
        new = {
            path: None if content is None else File(content, is_lfs(path, len(content)))
            for path, content in changes.items()
        }
        with self.store.lock:
            return self.store.any_of(name).add(revision, new, f"Set {', '.join(changes)}").sha

    def tag(self, name: str, tag: str, revision: str = MAIN) -> None:
        repository = self.store.any_of(name)
        commit = repository.find(revision)
        assert commit is not None
        repository.tags[tag] = commit.sha

    def commits(self, name: str, revision: str = MAIN) -> list[str]:
        return [commit.sha for commit in self.store.any_of(name).history(revision)]

    def files(self, name: str, revision: str = MAIN) -> dict[str, bytes]:
        commit = self.store.any_of(name).find(revision)
        assert commit is not None, f"{name} has no {revision}"
        return {path: file.content for path, file in commit.files.items()}

    def fail(
        self,
        pattern: str,
        *,
        status: int = 503,
        times: int | None = 1,
        kind: str = "status",
        retry_after: int | None = None,
        echo: bool = False,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> None:
        """Make the next requests fail whose "METHOD /path?query" matches the pattern."""
        assert kind in FAULTS
        more = dict(headers or {})
        self.faults.append(
            InjectedFault(pattern, kind, status, times, retry_after, echo, more, body)
        )

    def count(self, pattern: str) -> int:
        """Count the requests so far whose "METHOD /path?query" matches the pattern."""
        return sum(bool(re.search(pattern, f"{m} {p}")) for m, p in list(self.requests))

    def environment(self, home: Path, token: str | None = None) -> dict[str, str]:
        """Return the environment of a subprocess that knows only this hub and caches in `home`."""
        variables = {k: v for k, v in os.environ.items() if k not in _UNSET}
        variables |= {"HF_ENDPOINT": self.url, "HF_HOME": str(home)}
        return variables | ({"HF_TOKEN": token} if token else {})


_UNSET = (
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "HF_DATASETS_OFFLINE",
    "HF_HUB_CACHE",
    "HF_DATASETS_CACHE",
    "HF_TOKEN",
    "HF_TOKEN_PATH",
    "HUGGING_FACE_HUB_TOKEN",
)


def point_clients_at(hub: Any, monkeypatch: Any, home: Path, token: str | None = None) -> None:
    """Point the hub clients of this process at a hub, with an empty cache.

    This also patches what libraries read from the environment at import.

    Args:
        hub: a HubServer, or an address.
        home: the new HF_HOME.
    """
    import datasets.config
    from huggingface_hub import HfFileSystem, constants, hf_api, utils

    url = hub if isinstance(hub, str) else hub.url
    for name in _UNSET:
        monkeypatch.delenv(name, raising=False)
    variables = {"HF_ENDPOINT": url, "HF_HOME": str(home), **({"HF_TOKEN": token} if token else {})}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    cache, data = home / "hub", home / "datasets"
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    patches: list[tuple[Any, dict[str, Any]]] = [
        (constants, {"ENDPOINT": url, "HUGGINGFACE_CO_URL_TEMPLATE": template}),
        (constants, {"HF_HUB_OFFLINE": False, "HF_HOME": str(home), "HF_HUB_CACHE": str(cache)}),
        (constants, {"HF_TOKEN_PATH": str(home / "token"), "HF_XET_CACHE": str(home / "xet")}),
        (constants, {"HF_STORED_TOKENS_PATH": str(home / "stored_tokens")}),
        (constants, {"HF_ASSETS_CACHE": str(home / "assets")}),
        (hf_api.api, {"endpoint": url}),
        (datasets.config, {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": False}),
        (datasets.config, {"HF_DATASETS_OFFLINE": False, "HF_CACHE_HOME": str(home)}),
        (
            datasets.config,
            {"HUB_DATASETS_URL": url + "/datasets/{repo_id}/resolve/{revision}/{path}"},
        ),
        (datasets.config, {"HF_DATASETS_CACHE": data, "HF_MODULES_CACHE": home / "modules"}),
        (datasets.config, {"DOWNLOADED_DATASETS_PATH": data / "downloads"}),
        (datasets.config, {"EXTRACTED_DATASETS_PATH": data / "downloads" / "extracted"}),
    ]
    for owner, changes in patches:
        for name, value in changes.items():
            monkeypatch.setattr(owner, name, value)
    HfFileSystem.clear_instance_cache()
    utils.close_session()  # connections to an earlier test's hub


def wait_until(condition: Any, *, seconds: float = 5.0) -> None:
    """Wait for a request of another thread or process to the hub."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "no request reached the hub in time"
        time.sleep(0.01)
