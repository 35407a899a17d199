"""The allowlist in front of Gradio: what passes, what is rejected, and with which message."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from finetune.demo import middleware
from finetune.demo.middleware import AllowlistMiddleware, is_cross_origin
from finetune.demo.uploads import UploadFolder

INPUTS = {0: ["image"], 1: [], 2: ["dataset"]}


class RecordingApp:
    """Replaces Gradio: reads each body and records the request."""

    def __init__(self) -> None:
        self.passed: list[tuple[str, str, bytes]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", scope["method"] == "POST"
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.passed.append((scope["method"], scope["path"], body))
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


def send_request(
    app: Any,
    receive: Any,
    uploads: UploadFolder,
    path: str = "/gradio_api/upload",
    method: str = "POST",
    *,
    headers: Iterable[tuple[bytes, bytes]] = (),
    **options: Any,
) -> list[Any]:
    """Send one request through the allowlist to an app. Returns: the response messages."""
    settings = {"max_upload_bytes": 1000, "loopback_only": True, "send_csp": True, **options}
    allowlist = AllowlistMiddleware(app, uploads=uploads, input_types=INPUTS, **settings)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": headers}
    asyncio.run(allowlist(scope, receive, send))
    return sent


def request(
    uploads: Path | UploadFolder,
    path: str,
    method: str = "GET",
    body: bytes = b"",
    *,
    more: Mapping[str, str] = MappingProxyType({}),
    host: str = "127.0.0.1:7860",
    length: int | None = -1,
    **options: Any,
) -> tuple[int, str, dict[str, str], list[tuple[str, str, bytes]]]:
    """Send one request. Returns: status, text, headers, and the requests that passed."""
    recording_app = RecordingApp()
    if not isinstance(uploads, UploadFolder):
        uploads = UploadFolder(uploads, max_total_bytes=2**30, max_per_minute=99)
    headers = [(b"host", host.encode())]
    headers += [(name.encode(), value.encode()) for name, value in more.items()]
    if method == "POST" and length is not None:
        headers.append((b"content-length", str(len(body) if length < 0 else length).encode()))
    half = len(body) // 2
    messages = [
        {"type": "http.request", "body": body[:half], "more_body": True},
        {"type": "http.request", "body": body[half:], "more_body": False},
    ]

    async def receive() -> Any:
        return messages.pop(0)

    sent = send_request(recording_app, receive, uploads, path, method, headers=headers, **options)
    response_headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], sent[1]["body"].decode(), response_headers, recording_app.passed


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
def test_paths_of_the_page_pass(uploads: Path, path: str) -> None:
    status, text, _, passed = request(uploads, path)
    assert (status, text) == (200, "behind")
    assert passed == [("GET", path, b"")]


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
def test_other_paths_are_not_found(uploads: Path, path: str) -> None:
    for method in ("GET", "HEAD", "POST"):
        status, text, _, passed = request(uploads, path, method)
        assert (status, passed) == (404, [])
        assert text == "there is no such page\n"


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "PATCH"])
def test_other_methods_are_rejected(uploads: Path, method: str) -> None:
    status, _, _, passed = request(uploads, "/config", method)
    assert (status, passed) == (405, [])


def paths_outside_uploads(uploads: Path) -> list[str]:
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
def test_only_uploads_can_be_downloaded(uploads: Path, number: int) -> None:
    path = paths_outside_uploads(uploads)[number]
    for prefix in ("/gradio_api/file=", "/file="):
        status, text, _, passed = request(uploads, prefix + path)
        assert (status, passed) == (403, [])
        assert text == "only uploaded pictures can be read\n"
    status, _, headers, passed = request(uploads, f"/gradio_api/file={uploads}/cat.png")
    assert (status, len(passed)) == (200, 1)
    assert "sandbox" in headers["content-security-policy"]  # an upload is never a page


@pytest.mark.parametrize("number", range(12))
def test_only_uploads_can_be_classified(uploads: Path, number: int) -> None:
    file_data = {"path": paths_outside_uploads(uploads)[number], "meta": {}}
    body = json.dumps({"data": [file_data], "fn_index": 0}).encode()
    for endpoint in ("queue/join", "call/predict"):
        status, _, _, passed = request(uploads, f"/gradio_api/{endpoint}", "POST", body)
        assert (status, passed) == (403, [])


def test_unknown_body_fields_are_removed(uploads: Path) -> None:
    known_fields = {"session_hash": "a1", "fn_index": 0, "trigger_id": 4}
    file_data = {"path": f"{uploads}/cat.png", "meta": {"_type": "gradio.FileData"}}
    more = {"url": "http://127.0.0.1:1/", "size": "large", "orig_name": ["a"]}
    content = {**known_fields, "data": [file_data | more], "event_data": 5, "batched": True}
    body = json.dumps(content).encode()
    status, _, _, passed = request(uploads, "/gradio_api/queue/join", "POST", body)
    assert status == 200
    assert json.loads(passed[0][2]) == {**known_fields, "data": [file_data]}


@pytest.mark.parametrize(
    "endpoint, body, status",
    [
        ("queue/join", b"{", 400),
        ("queue/join", b"", 400),
        ("queue/join", b"\xff\xfe", 400),
        ("queue/join", b"[" * 50_000, 400),
        ("queue/join", b'{"a": "' + b"x" * 70_000 + b'"}', 413),
        ("queue/join", b"5", 422),
        ("queue/join", b'{"data": [null]}', 422),
        ("queue/join", b'{"data": [null], "fn_index": 9}', 422),
        ("queue/join", b'{"data": [null], "fn_index": "0"}', 422),
        ("queue/join", b'{"data": [null], "fn_index": false}', 422),
        ("queue/join", b'{"data": [], "fn_index": 0}', 422),
        ("queue/join", b'{"data": [null], "fn_index": 1}', 422),
        ("queue/join", b'{"data": ["0"], "fn_index": 2}', 422),
        ("queue/join", b'{"data": [true], "fn_index": 2}', 422),
        ("queue/join", b'{"data": [], "fn_index": 1, "session_hash": "\\ud800"}', 422),
        ("call/predict", b'{"data": ["/etc/passwd"]}', 422),
        ("call/predict", b'{"data": 5}', 422),
        ("call/predict", b'{"data": [5]}', 422),
        ("call/predict", b'{"data": [NaN]}', 422),
        ("call/predict", b'{"data": [{"path": 7}]}', 422),
        ("call/predict", b'{"data": [{"url": "http://127.0.0.1:1/"}]}', 422),
        ("call/predict", b'{"data": [{"path": "\\ud800"}]}', 403),
        ("cancel", b'{"event_id": 1e999}', 422),
    ],
)
def test_invalid_body_is_rejected(uploads: Path, endpoint: str, body: bytes, status: int) -> None:
    actual_status, text, _, passed = request(uploads, f"/gradio_api/{endpoint}", "POST", body)
    assert (actual_status, passed) == (status, [])
    assert len(text.splitlines()) == 1


def test_body_without_content_length_is_rejected(uploads: Path) -> None:
    """A chunked body can have any length, whatever its header says."""
    for endpoint in ("upload", "queue/join"):
        path = f"/gradio_api/{endpoint}"
        assert request(uploads, path, "POST", b"x", length=None)[0] == 411
        assert request(uploads, path, "POST", b"x", more={"transfer-encoding": "chunked"})[0] == 411


def test_upload_size_limit(uploads: Path) -> None:
    small = request(uploads, "/gradio_api/upload", "POST", b"x" * 900)
    assert small[0] == 200
    assert small[3][0][2] == b"x" * 900
    status, text, _, passed = request(
        uploads, "/gradio_api/upload", "POST", length=11 * 2**20, max_upload_bytes=10 * 2**20
    )
    assert (status, passed) == (413, [])
    assert text == "more than 10 MB; send a smaller picture\n"


def test_total_size_and_rate_limits(uploads: Path) -> None:
    limited = UploadFolder(uploads, max_total_bytes=2**20, max_per_minute=2)
    results = [request(limited, "/gradio_api/upload", "POST", b"x" * 900) for _ in range(3)]
    assert [status for status, *_ in results] == [200, 200, 429]
    assert 59 <= int(results[2][2]["retry-after"]) <= 60
    small = UploadFolder(uploads, max_total_bytes=899, max_per_minute=9)
    status, _, headers, passed = request(small, "/gradio_api/upload", "POST", b"x" * 900)
    assert (status, passed) == (429, [])
    assert headers["retry-after"] == "5"


def test_stalled_upload_releases_its_space(uploads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "_UPLOAD_TIMEOUT_SECONDS", 0.05)
    limits = UploadFolder(uploads, max_total_bytes=1000, max_per_minute=9)

    async def receive() -> Any:
        await asyncio.sleep(30)

    headers = [(b"content-length", b"900")]
    sent = send_request(RecordingApp(), receive, limits, loopback_only=False, headers=headers)
    assert sent[0]["status"] == 408
    assert request(limits, "/gradio_api/upload", "POST", b"x" * 900)[0] == 200


def test_disconnected_client_logs_nothing(
    uploads: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def failing_app(scope: Any, receive: Any, send: Any) -> None:
        if (await receive())["type"] == "http.disconnect":
            raise ConnectionError("the client has disconnected")

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    limits = UploadFolder(uploads, max_total_bytes=1000, max_per_minute=9)
    headers = [(b"content-length", b"900")]
    assert send_request(failing_app, receive, limits, loopback_only=False, headers=headers) == []
    assert capsys.readouterr().err == ""


def test_app_error_is_logged_in_one_line(
    uploads: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def failing_call(*_: Any) -> None:
        raise TypeError("files is no file")

    monkeypatch.setattr(RecordingApp, "__call__", failing_call)
    assert request(uploads, "/gradio_api/upload", "POST", b"x")[0] == 422
    assert not capsys.readouterr().err
    assert request(uploads, "/config")[0] == 500
    assert capsys.readouterr().err == "finetune: a request failed: TypeError: files is no file\n"


@pytest.mark.parametrize("num_chunks, expected_reads", [(5, 5), (1000, 64)])
def test_rejected_upload_is_drained_up_to_a_limit(
    uploads: Path, num_chunks: int, expected_reads: int
) -> None:
    """The body is read and dropped up to a limit, so that the client can read the response."""
    received: list[int] = []

    async def receive() -> Any:
        received.append(len(received))
        return {
            "type": "http.request",
            "body": b"x" * 2**20,
            "more_body": len(received) < num_chunks,
        }

    limits = UploadFolder(uploads, max_total_bytes=2**30, max_per_minute=9)
    headers = [(b"content-length", str(num_chunks * 2**20).encode())]
    sent = send_request(RecordingApp(), receive, limits, loopback_only=False, headers=headers)
    assert len(received) == expected_reads
    assert sent[0]["status"] == 413


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:7860", "192.168.0.7", "127.0.0.1.evil.example", ""]
)
def test_foreign_host_header_is_rejected(uploads: Path, host: str) -> None:
    assert request(uploads, "/", host=host)[0] == 421
    assert request(uploads, "/", host=host, loopback_only=False)[0] == 200


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "127.1.2.3:7860", "[::1]:7860"])
def test_loopback_host_header_passes(uploads: Path, host: str) -> None:
    assert request(uploads, "/", host=host)[0] == 200


HERE, EVIL = "http://127.0.0.1:7860", "http://evil.example"


@pytest.mark.parametrize(
    "site, origin, is_refused",
    [
        (None, None, False),  # not a browser
        (None, HERE, False),
        (None, EVIL, True),
        (None, "null", True),
        (None, "http://127.0.0.1:8888", True),  # another server on this machine
        ("same-origin", HERE, False),
        ("same-origin", "https://proxied.example", False),
        ("none", None, False),
        ("same-site", HERE, True),
        ("cross-site", EVIL, True),
        ("cross-site", None, True),
        ("cross-site", HERE, True),
    ],
)
def test_cross_origin_requests_are_rejected(
    uploads: Path, site: str | None, origin: str | None, is_refused: bool
) -> None:
    headers = {"sec-fetch-site": site, "origin": origin}
    more = {name: value for name, value in headers.items() if value is not None}
    header_values = {name.encode(): value for name, value in more.items()}
    assert is_cross_origin(header_values | {b"host": "127.0.0.1:7860"}) is is_refused
    for path, body in (("upload", b"x"), ("cancel", b"{}")):
        status, _, _, passed = request(uploads, f"/gradio_api/{path}", "POST", body, more=more)
        assert (status, bool(passed)) == ((403, False) if is_refused else (200, True))
    # the browser itself blocks cross-origin reads
    assert request(uploads, "/", more=more)[0] == 200
    trusted = [origin] if origin else []
    status, *_ = request(
        uploads, "/gradio_api/cancel", "POST", b"{}", more=more, trusted_origins=trusted
    )
    assert status == (403 if is_refused and origin is None else 200)


def test_security_headers(uploads: Path) -> None:
    headers = request(uploads, "/")[2]
    assert headers["content-security-policy"].startswith("default-src 'self';")
    assert "http" not in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert "content-security-policy" not in request(uploads, "/", send_csp=False)[2]


def test_websocket_is_closed_and_lifespan_passes(uploads: Path) -> None:
    sent: list[Any] = []
    passed: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["type"])

    async def send(message: Any) -> None:
        sent.append(message)

    limits = UploadFolder(uploads, max_total_bytes=1, max_per_minute=1)
    allowlist = AllowlistMiddleware(
        app, uploads=limits, max_upload_bytes=1, input_types={}, loopback_only=True, send_csp=True
    )
    for kind in ("websocket", "lifespan"):
        asyncio.run(allowlist({"type": kind}, send, send))  # type: ignore[arg-type]
    assert passed == ["lifespan"]
    assert [message["type"] for message in sent] == ["websocket.close"]
