"""The gate before Gradio: what passes, what is refused, and with which words."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from finetune.demo.middleware import Gate


class Behind:
    """Stands for Gradio: remembers what came through and reads the whole body."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, bytes]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", scope["method"] == "POST"
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.seen.append((scope["method"], scope["path"], body))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"behind"})


@pytest.fixture
def uploads(tmp_path: Path) -> Path:
    folder = tmp_path / "place" / "uploads"
    folder.mkdir(parents=True)
    (folder / "cat.png").write_bytes(b"a cat")
    (tmp_path / "place" / "uploads-too").mkdir()
    (tmp_path / "secret").write_text("secret")
    (folder / "way-out").symlink_to(tmp_path / "secret")
    return folder


def ask(
    uploads: Path,
    path: str,
    method: str = "GET",
    body: bytes = b"",
    *,
    host: str = "127.0.0.1:7860",
    length: int | None = -1,
    **options: Any,
) -> tuple[int, str, dict[str, str], list[tuple[str, str, bytes]]]:
    """One request. Returns: status, text, headers, what came through."""
    behind = Behind()
    settings = {"limit_bytes": 1000, "loopback": True, "policy": True, **options}
    gate = Gate(behind, uploads=uploads, **settings)
    headers = [(b"host", host.encode())]
    if method == "POST" and length is not None:
        headers.append((b"content-length", str(len(body) if length < 0 else length).encode()))
    scope = {"type": "http", "method": method, "path": path, "headers": headers}
    half = len(body) // 2
    waiting = [
        {"type": "http.request", "body": body[:half], "more_body": True},
        {"type": "http.request", "body": body[half:], "more_body": False},
    ]
    sent: list[Any] = []

    async def receive() -> Any:
        return waiting.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(gate(scope, receive, send))
    answered = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], sent[1]["body"].decode(), answered, behind.seen


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/config",
        "/assets/index-1.js",
        "/static/img/logo.svg",
        "/gradio_api/info",
        "/gradio_api/queue/data",
        "/gradio_api/heartbeat/abc123",
        "/gradio_api/call/predict/0f0f",
    ],
)
def test_what_the_page_asks_for_passes(uploads: Path, path: str) -> None:
    status, text, _, seen = ask(uploads, path)
    assert (status, text) == (200, "behind")
    assert seen == [("GET", path, b"")]


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/proxy=http://example.org/",
        "/proxy=http://example.org/",
        "/monitoring",
        "/gradio_api/monitoring/summary",
        "/gradio_api/runs",
        "/gradio_api/vibe-code",
        "/gradio_api/stream/a/b",
        "/custom_component/1/2/3/4",
        "/openapi.json",
        "/docs",
        "/gradio_api/call/classify/0f0f",
        "/etc/passwd",
        "/config/../monitoring",
    ],
)
def test_nothing_else_is_reached(uploads: Path, path: str) -> None:
    for method in ("GET", "HEAD", "POST"):
        status, text, _, seen = ask(uploads, path, method)
        assert (status, seen) == (404, [])
        assert text == "there is no such page\n"


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "PATCH"])
def test_other_methods_are_refused(uploads: Path, method: str) -> None:
    status, _, _, seen = ask(uploads, "/config", method)
    assert (status, seen) == (405, [])


def outside(uploads: Path) -> list[str]:
    return [
        "/etc/passwd",
        "../../etc/passwd",
        "etc/passwd",
        f"{uploads}/../../secret",
        f"{uploads}/way-out",
        f"{uploads}-too/x.png",
        f"{uploads}/%2e%2e/%2e%2e/secret",
        "http://example.org/cat.png",
        "https://example.org/cat.png",
        "file:///etc/passwd",
        f"{uploads}/cat.png\0.txt",
        "",
    ]


@pytest.mark.parametrize("number", range(12))
def test_only_uploads_are_sent(uploads: Path, number: int) -> None:
    path = outside(uploads)[number]
    for prefix in ("/gradio_api/file=", "/file="):
        status, text, _, seen = ask(uploads, prefix + path)
        assert (status, seen) == (403, [])
        assert text == "only uploaded pictures can be read\n"
    status, _, headers, seen = ask(uploads, f"/gradio_api/file={uploads}/cat.png")
    assert (status, len(seen)) == (200, 1)
    assert "sandbox" in headers["content-security-policy"]  # an upload is never a page


@pytest.mark.parametrize("number", range(12))
def test_only_uploads_are_read(uploads: Path, number: int) -> None:
    path = outside(uploads)[number]
    for data in ({"path": path}, [{"deep": [{"path": path, "meta": {}}]}]):
        body = json.dumps({"data": [data], "fn_index": 0}).encode()
        for place in ("queue/join", "call/predict", "run/predict"):
            status, _, _, seen = ask(uploads, f"/gradio_api/{place}", "POST", body)
            assert (status, seen) == (403, [])


def test_a_checked_body_arrives_whole(uploads: Path) -> None:
    body = json.dumps({"data": [{"path": f"{uploads}/cat.png"}, None, {"path": None}]}).encode()
    status, _, _, seen = ask(uploads, "/gradio_api/queue/join", "POST", body)
    assert status == 200
    assert seen == [("POST", "/gradio_api/queue/join", body)]


@pytest.mark.parametrize(
    "body, status",
    [
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b"[" * 50_000, 400),
        (b'{"data": [{"path": 7}]}', 400),
        (b'{"a": "' + b"x" * 70_000 + b'"}', 413),
    ],
)
def test_a_body_that_is_none_is_refused(uploads: Path, body: bytes, status: int) -> None:
    got, _, _, seen = ask(uploads, "/gradio_api/queue/join", "POST", body)
    assert (got, seen) == (status, [])


def test_a_body_that_is_longer_than_it_says_is_refused(uploads: Path) -> None:
    """The length of one sent in chunks is not what its header says."""
    body = json.dumps({"data": ["x" * 70_000]}).encode()
    status, _, _, seen = ask(uploads, "/gradio_api/queue/join", "POST", body, length=10)
    assert (status, seen) == (413, [])


def test_an_upload_has_a_limit(uploads: Path) -> None:
    small = ask(uploads, "/gradio_api/upload", "POST", b"x" * 900)
    assert small[0] == 200
    assert small[3][0][2] == b"x" * 900
    status, text, _, seen = ask(
        uploads, "/gradio_api/upload", "POST", length=11 * 2**20, limit_bytes=10 * 2**20
    )
    assert (status, seen) == (413, [])
    assert text == "more than 10 MB; send a smaller picture\n"
    assert ask(uploads, "/gradio_api/upload", "POST", b"x", length=None)[0] == 411


@pytest.mark.parametrize("parts, taken", [(5, 5), (1000, 64)])
def test_a_refusal_is_read_by_a_client_that_is_still_sending(
    uploads: Path, parts: int, taken: int
) -> None:
    """The body is taken in and dropped, but not without end."""
    received: list[int] = []
    sent: list[Any] = []

    async def receive() -> Any:
        received.append(len(received))
        return {"type": "http.request", "body": b"x" * 2**20, "more_body": len(received) < parts}

    async def send(message: Any) -> None:
        sent.append(message)

    gate = Gate(Behind(), uploads=uploads, limit_bytes=1000, loopback=False, policy=True)
    headers = [(b"content-length", str(parts * 2**20).encode())]
    path = "/gradio_api/upload"
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
    asyncio.run(gate(scope, receive, send))
    assert len(received) == taken
    assert sent[0]["status"] == 413


@pytest.mark.parametrize("host", ["evil.example", "evil.example:7860", "192.168.0.7", ""])
def test_another_name_for_this_machine_is_refused(uploads: Path, host: str) -> None:
    assert ask(uploads, "/", host=host)[0] == 421
    assert ask(uploads, "/", host=host, loopback=False)[0] == 200


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "[::1]:7860"])
def test_this_machine_s_own_names_pass(uploads: Path, host: str) -> None:
    assert ask(uploads, "/", host=host)[0] == 200


def test_the_browser_is_told_to_ask_nobody_else(uploads: Path) -> None:
    headers = ask(uploads, "/")[2]
    assert headers["content-security-policy"].startswith("default-src 'self';")
    assert "http" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert "content-security-policy" not in ask(uploads, "/", policy=False)[2]


def test_a_socket_is_closed_and_the_server_s_own_messages_pass(uploads: Path) -> None:
    sent: list[Any] = []
    passed: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["type"])

    async def send(message: Any) -> None:
        sent.append(message)

    gate = Gate(app, uploads=uploads, limit_bytes=1, loopback=True, policy=True)
    for kind in ("websocket", "lifespan"):
        asyncio.run(gate({"type": kind}, send, send))  # type: ignore[arg-type]
    assert passed == ["lifespan"]
    assert [message["type"] for message in sent] == ["websocket.close"]
