"""The middleware in front of Gradio: what passes, and what is refused."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

pytest.importorskip("starlette", reason="Gradio is not installed: pip install '.[demo]'")

from finetune.demo.middleware import DemoMiddleware
from finetune.web.access import is_cross_origin


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
        await send({"type": "http.response.body", "body": b""})


@pytest.fixture
def uploads(tmp_path: Path) -> Path:
    folder = tmp_path / "place" / "uploads"
    folder.mkdir(parents=True)
    (folder / "cat.png").write_bytes(b"a cat")
    (tmp_path / "place" / "uploads-too").mkdir()
    (tmp_path / "secret").write_text("secret")
    (folder / "way-out").symlink_to(tmp_path / "secret")
    return folder


def request(
    uploads: Path,
    path: str,
    method: str = "GET",
    body: bytes = b"",
    *,
    more: Mapping[str, str] = MappingProxyType({}),
    length: int | None = -1,
    **options: Any,
) -> tuple[int, dict[str, str], list[tuple[str, str, bytes]]]:
    """Send one request. Returns: status, headers, and the requests that reached Gradio."""
    app = RecordingApp()
    settings = {
        "max_upload_bytes": 1000,
        "max_total_bytes": 10**6,
        "allow_framing": False,
        **options,
    }
    middleware = DemoMiddleware(app, upload_folder=uploads, **settings)
    headers = [(b"host", b"127.0.0.1:7860")]
    headers += [(name.encode(), value.encode()) for name, value in more.items()]
    if method == "POST" and length is not None:
        headers.append((b"content-length", str(len(body) if length < 0 else length).encode()))
    half = len(body) // 2
    messages = [
        {"type": "http.request", "body": body[:half], "more_body": True},
        {"type": "http.request", "body": body[half:], "more_body": False},
    ]
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "headers": headers}
    asyncio.run(middleware(scope, receive, send))
    response_headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], response_headers, app.passed


@pytest.mark.parametrize("path", ["/", "/config", "/assets/a.js", "/gradio_api/queue/data"])
def test_page_paths_pass_with_security_headers(uploads: Path, path: str) -> None:
    status, headers, passed = request(uploads, path)
    assert (status, passed) == (200, [("GET", path, b"")])
    assert headers["x-content-type-options"] == "nosniff"
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert "content-security-policy" not in request(uploads, path, allow_framing=True)[1]


@pytest.mark.parametrize(
    "path",
    [
        "/login",
        "/gradio_api/run/predict",
        "/gradio_api/call/on_upload",
        "/gradio_api/component_server",
        "/gradio_api/process_recording",
        "/gradio_api/vibe-edit",
    ],
)
def test_only_uploads_and_predictions_can_be_posted(uploads: Path, path: str) -> None:
    status, _, passed = request(uploads, path, "POST", b'{"data": [null]}')
    assert (status, passed) == (404, [])
    assert request(uploads, "/config", "PUT")[0] == 404


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "../../etc/passwd",
        "etc/passwd",
        "{uploads}/../../secret",
        "{uploads}/way-out",
        "{uploads}-too/x.png",
        "http://example.org/cat.png",
        "file:///etc/passwd",
        "{uploads}/cat.png\0.txt",
        "\ud800",
        "",
    ],
)
def test_other_files_and_urls_are_refused(uploads: Path, path: str) -> None:
    path = path.format(uploads=uploads)
    for prefix in ("/gradio_api/file=", "/file=", "/gradio_api/file/", "/gradio_api/proxy="):
        status, _, passed = request(uploads, prefix + path)
        assert (status, passed) == (403, [])
    body = json.dumps({"data": [{"path": path, "meta": {}}], "fn_index": 0}).encode()
    for endpoint in ("queue/join", "call/predict"):
        status, _, passed = request(uploads, f"/gradio_api/{endpoint}", "POST", body)
        assert (status, passed) == (403, [])


def test_uploads_can_be_read_and_classified(uploads: Path) -> None:
    path = f"{uploads}/cat.png"
    assert request(uploads, f"/gradio_api/file={path}")[0] == 200
    value = {"path": path, "url": "http://127.0.0.1:1/", "is_stream": True}
    upload = {"path": path, "meta": {"_type": "gradio.FileData"}}
    for data, forwarded in (([value], [upload]), ([None], [None]), ([], [None]), ([3], [3])):
        body = json.dumps({"data": data, "fn_index": 2, "session_hash": "a1"}).encode()
        status, _, passed = request(
            uploads, "/gradio_api/queue/join", "POST", body, index_events=[2]
        )
        assert status == 200
        expected = {"data": forwarded, "fn_index": 2, "session_hash": "a1"}
        assert json.loads(passed[0][2]) == expected


@pytest.mark.parametrize(
    "body, status",
    [
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b"[" * 50_000, 400),
        (b"5", 422),
        (b'{"data": 5}', 422),
        (b'{"data": ["/etc/passwd"]}', 422),
        (b'{"data": [true]}', 422),
        (b'{"data": [3]}', 422),
        (b'{"data": [null, null]}', 422),
        (b'{"data": [NaN]}', 422),
        (b'{"data": [{"url": "http://127.0.0.1:1/"}]}', 422),
        (b'{"data": [[{"path": "http://127.0.0.1:1/"}]]}', 422),
        (b'{"a": "' + b"x" * 70_000 + b'"}', 413),
    ],
)
def test_invalid_bodies_are_refused(uploads: Path, body: bytes, status: int) -> None:
    actual_status, _, passed = request(uploads, "/gradio_api/call/predict", "POST", body)
    assert (actual_status, passed) == (status, [])


@pytest.mark.parametrize("endpoint", ["upload", "queue/join"])
def test_body_without_content_length_is_refused(uploads: Path, endpoint: str) -> None:
    """A chunked body can have any length, whatever its header says."""
    path = f"/gradio_api/{endpoint}"
    assert request(uploads, path, "POST", b"x", length=None)[0] == 411
    assert request(uploads, path, "POST", b"x", more={"transfer-encoding": "chunked"})[0] == 411


def test_uploads_are_limited_in_size(uploads: Path) -> None:
    status, _, passed = request(uploads, "/gradio_api/upload", "POST", b"x" * 900)
    assert (status, passed[0][2]) == (200, b"x" * 900)
    assert request(uploads, "/gradio_api/upload", "POST", length=2**17)[0] == 413


def test_uploads_that_are_being_received_are_limited_together(uploads: Path) -> None:
    """Gradio keeps the file of an open upload, which takes space even after its removal."""
    statuses: list[int] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    async def upload_at_once(number: int) -> None:
        everything_arrived = asyncio.Event()

        async def gradio(scope: Any, receive: Any, send: Any) -> None:
            await everything_arrived.wait()
            await RecordingApp()(scope, receive, send)

        middleware = DemoMiddleware(
            gradio,
            upload_folder=uploads,
            max_upload_bytes=1000,
            max_total_bytes=3000,
            allow_framing=False,
        )

        async def receive() -> Any:
            return {"type": "http.request"}

        headers = [(b"content-length", b"1000")]
        scope = {"type": "http", "method": "POST", "path": "/gradio_api/upload", "headers": headers}
        for _ in range(2):  # the second time, all uploads have ended
            everything_arrived.clear()
            tasks = [asyncio.ensure_future(middleware(scope, receive, send)) for _ in range(number)]
            await asyncio.sleep(0)
            everything_arrived.set()
            await asyncio.gather(*tasks)

    asyncio.run(upload_at_once(5))
    assert statuses == 2 * [503, 503, 200, 200, 200]


def test_new_uploads_replace_the_oldest_but_not_the_examples(uploads: Path) -> None:
    app = RecordingApp()
    middleware = DemoMiddleware(
        app,
        upload_folder=uploads,
        max_upload_bytes=2**20,
        max_total_bytes=2**20,
        allow_framing=False,
    )
    headers = [(b"content-length", str(2**19).encode())]
    scope = {"type": "http", "method": "POST", "path": "/gradio_api/upload", "headers": headers}

    async def receive() -> Any:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        pass

    for number in range(4):
        asyncio.run(middleware(scope, receive, send))
        os.truncate(os.open(uploads / f"{number}", os.O_CREAT | os.O_RDWR), 2**19)
    assert sorted(os.listdir(uploads)) == ["2", "3", "cat.png", "way-out"]


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
def test_cross_origin_requests_are_refused(
    uploads: Path, site: str | None, origin: str | None, is_refused: bool
) -> None:
    headers = {"sec-fetch-site": site, "origin": origin}
    more = {name: value for name, value in headers.items() if value is not None}
    assert is_cross_origin(more | {"host": "127.0.0.1:7860"}) is is_refused
    for path, body in (("upload", b"x"), ("cancel", b"{}")):
        status, _, passed = request(uploads, f"/gradio_api/{path}", "POST", body, more=more)
        assert (status, bool(passed)) == ((403, False) if is_refused else (200, True))
    trusted = [origin] if origin else []
    status, *_ = request(
        uploads, "/gradio_api/cancel", "POST", b"{}", more=more, trusted_origins=trusted
    )
    assert status == (403 if is_refused and origin is None else 200)
