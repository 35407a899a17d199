"""What the demo's server answers: the page, uploads and predictions; nothing else that Gradio has.

Gradio brings routes that this page does not need (a proxy to any address, monitoring, histories,
editing); a list of what may pass stays right whatever the next version brings.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

__all__ = ["Gate"]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

_GET = re.compile(
    r"/(config|theme\.css|favicon\.ico|robots\.txt|manifest\.json|assets/.+|static/.+|svelte/.+)?"
    r"|(/gradio_api)?/(info|user|login_check|token|app_id|startup-events|config|theme\.css"
    r"|upload_progress|queue/data|heartbeat/\w+|call/predict/\w+)/?"
)
_POST = re.compile(
    r"/gradio_api/(upload|queue/join|cancel|reset|call/predict|run/predict|api/predict)/?"
)
_FILE = re.compile(r"(?:/gradio_api)?/file=(.*)", re.DOTALL)
_BODY_BYTES = 2**16
_FORM_BYTES = 2**16  # what a form adds to a file
_DRAINED_BYTES = 2**26
_LOOPBACK = {"localhost", "127.0.0.1", "[::1]"}

_EVERYWHERE = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]
# The browser itself then keeps the page from asking any other host.
_PAGE_POLICY = (
    b"default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    b"style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    b"worker-src 'self' blob:; object-src 'none'; base-uri 'self'; form-action 'self'"
)
_UPLOAD_POLICY = b"default-src 'none'; style-src 'unsafe-inline'; sandbox"


class _Refused(Exception):
    """Carries a status and a sentence for the one who asked."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Gate:
    """An ASGI layer around Gradio that lets through what the page needs and refuses the rest.

    Args:
        app: what stands behind it.
        uploads: the only folder from which files are read or sent.
        limit_bytes: of one upload.
        loopback: the server is reached under this machine's own name only; another name in a
            request means that a page elsewhere has pointed its name here.
        policy: forbid the page to ask other hosts; a Space needs its surroundings.
    """

    def __init__(
        self, app: Application, *, uploads: Path, limit_bytes: int, loopback: bool, policy: bool
    ) -> None:
        self._app = app
        self._uploads = Path(os.path.realpath(uploads))
        self._limit_bytes = limit_bytes
        self._loopback = loopback
        self._policy = policy

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        ended = False

        async def listen() -> Message:
            nonlocal ended
            message = await receive()
            ended = not message.get("more_body", False)
            return message

        try:
            checked = await self._check(scope, listen)
        except _Refused as refused:
            # a client that is still sending would not read the answer; what it sends is dropped
            left = _DRAINED_BYTES
            while not ended and left > 0:
                left -= len((await listen()).get("body", b""))
            await _refuse(send, refused)
            return
        await self._app(scope, checked, self._with_headers(scope["path"], send))

    async def _check(self, scope: Message, receive: Receive) -> Receive:
        headers = {name.lower(): value for name, value in scope["headers"]}
        path, method = scope["path"], scope["method"]
        host = headers.get(b"host", b"").decode("latin-1")
        if self._loopback and re.sub(r":\d+$", "", host) not in _LOOPBACK:
            raise _Refused(421, f"this demo is not called '{host}'")
        if method in ("GET", "HEAD"):
            if file := _FILE.fullmatch(path):
                self._check_file(file[1])
            elif not _GET.fullmatch(path):
                raise _Refused(404, "there is no such page")
            return receive
        if method != "POST" or not _POST.fullmatch(path):
            raise _Refused(404 if method == "POST" else 405, "there is no such page")
        is_upload = path.rstrip("/").endswith("/upload")
        limit = self._limit_bytes + _FORM_BYTES if is_upload else _BODY_BYTES
        length = headers.get(b"content-length", b"")
        if not length.isdigit():
            raise _Refused(411, "a request must say how long it is")
        if int(length) > limit:
            raise _Refused(
                413, f"more than {self._limit_bytes / 2**20:g} MB; send a smaller picture"
            )
        return receive if is_upload else await self._checked_body(receive)

    def _check_file(self, path: str) -> None:
        # decoded once more: what stands behind the gate may do so too
        for name in (path, unquote(path)):
            real = Path(os.path.realpath(name)) if "\0" not in name else Path("/")
            if not name.startswith("/") or not real.is_relative_to(self._uploads):
                raise _Refused(403, "only uploaded pictures can be read")

    async def _checked_body(self, receive: Receive) -> Receive:
        """Read a JSON body, check the files that it names, and give it once more."""
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            if len(body) > _BODY_BYTES:  # one sent in chunks is as long as it likes
                raise _Refused(413, "more than a request may hold")
            more = message["type"] == "http.request" and message.get("more_body", False)
        try:
            content = json.loads(body or b"{}")
        except (ValueError, RecursionError):
            raise _Refused(400, "this is not JSON") from None
        for path in _paths(content):
            if not isinstance(path, str):
                raise _Refused(400, "a path must be text")
            self._check_file(path)
        replayed = False

        async def again() -> Message:
            nonlocal replayed
            if replayed:
                return await receive()
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        return again

    def _with_headers(self, path: str, send: Send) -> Send:
        headers = list(_EVERYWHERE)
        if _FILE.fullmatch(path):
            headers.append((b"content-security-policy", _UPLOAD_POLICY))
        elif self._policy:
            headers.append((b"content-security-policy", _PAGE_POLICY))

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *headers]
            await send(message)

        return with_headers


def _paths(content: Any) -> Iterator[Any]:
    """Every value under a key `path` that is not null, however deep."""
    waiting = [content]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            if item.get("path") is not None:
                yield item["path"]
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item


async def _refuse(send: Send, refused: _Refused) -> None:
    body = f"{refused}\n".encode()
    headers = [
        *_EVERYWHERE,
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
