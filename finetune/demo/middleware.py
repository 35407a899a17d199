"""The gate before Gradio: the page, uploads and predictions pass, nothing else that Gradio has.

Gradio brings routes that this page does not need (a proxy to any address, monitoring, histories,
editing); a list of what may pass stays right whatever the next version brings.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping, Sequence
from typing import Any
from urllib.parse import unquote

from finetune.console import say
from finetune.demo.uploads import Uploads
from finetune.text import counted

__all__ = ["Gate", "is_cross_origin"]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

_GET = re.compile(
    r"/(config|theme\.css|favicon\.ico|robots\.txt|manifest\.json|assets/.+|static/.+|svelte/.+)?"
    r"|(/gradio_api)?/(info|user|login_check|token|app_id|startup-events|config|theme\.css"
    r"|upload_progress|queue/data|heartbeat/\w+|call/predict/\w+)/?"
)
_POST = re.compile(r"/gradio_api/(upload|queue/join|cancel|reset|call/predict)/?")
_FILE = re.compile(r"(?:/gradio_api)?/file=(.*)", re.DOTALL)
_BODY_BYTES = 2**16
_FORM_BYTES = 2**16  # what a form adds to a file
_DRAINED_BYTES = 2**26
_UPLOAD_SECONDS = 300.0  # 10 MB at 0.3 Mbit/s; room is reserved for no longer
_LOOPBACK = re.compile(r"(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?", re.IGNORECASE)
_WORD = re.compile(r"[\w-]{0,100}", re.ASCII)
# Of a body, this and `data` is passed on, and nothing else.
_FIELDS = {"session_hash": str, "event_id": str, "fn_index": int, "trigger_id": int}

_EVERYWHERE = [(b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer")]
# The browser itself then keeps the page from asking any other host, and others from framing it.
_PAGE_POLICY = (
    b"default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    b"style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    b"worker-src 'self' blob:; object-src 'none'; base-uri 'self'; form-action 'self'; "
    b"frame-ancestors 'none'"
)
_UPLOAD_POLICY = b"default-src 'none'; style-src 'unsafe-inline'; sandbox"


class _Refused(Exception):
    """A status and a sentence for the client; with 429, the seconds after which to try again."""

    def __init__(self, status: int, reason: str, retry_seconds: int | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.retry_seconds = retry_seconds


class Gate:
    """An ASGI layer around Gradio that lets through what the page needs and refuses the rest.

    Args:
        app: the application behind it.
        uploads: the only folder from which files are read or sent, and its limits.
        limit_bytes: of one upload.
        inputs: the kinds of the inputs of each function, by its number in Gradio: "image" takes an
            upload, "dataset" the number of an example.
        loopback: the server is reached under this machine's own names only; another name in a
            request means that a page elsewhere has pointed its name here (DNS rebinding).
        policy: forbid the page to ask other hosts and to be framed; a Space needs both.
        trusted: origins, such as "https://owner-name.hf.space", whose pages may send as well.
    """

    def __init__(
        self,
        app: Application,
        *,
        uploads: Uploads,
        limit_bytes: int,
        inputs: Mapping[int, Sequence[str]],
        loopback: bool,
        policy: bool,
        trusted: Collection[str] = (),
    ) -> None:
        self._app = app
        self._uploads = uploads
        self._limit_bytes = limit_bytes
        self._inputs = inputs
        self._loopback = loopback
        self._policy = policy
        self._trusted = trusted

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        ended = gone = started = False

        async def listen() -> Message:
            nonlocal ended, gone
            message = await receive()
            ended = not message.get("more_body", False)
            gone = gone or message["type"] == "http.disconnect"
            return message

        async def answer(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", []), *self._headers(scope["path"])]
            await send(message)

        try:
            await self._pass_on(scope, listen, answer)
        except _Refused as refused:
            # a client that is still sending would not read the answer; what it sends is dropped
            remaining = 0 if refused.status == 408 else _DRAINED_BYTES
            while not ended and remaining > 0:
                remaining -= len((await listen()).get("body", b""))
            await _refuse(send, refused)
        except Exception as error:
            if gone:  # nobody waits for an answer
                return
            if started:
                raise
            say(f"a request failed: {type(error).__name__}: {error}")
            await _refuse(send, _Refused(500, "the demo could not answer this request"))

    async def _pass_on(self, scope: Message, receive: Receive, send: Send) -> None:
        """Check a request, and let the application answer it. Raises: _Refused."""
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        path, method = scope["path"], scope["method"]
        host = headers.get(b"host", "")
        if self._loopback and not _LOOPBACK.fullmatch(host):
            raise _Refused(421, f"this demo is not called '{host}'")
        if method in ("GET", "HEAD"):
            if file := _FILE.fullmatch(path):
                self._check_file(file[1])
            elif not _GET.fullmatch(path):
                raise _Refused(404, "there is no such page")
            await self._app(scope, receive, send)
            return
        if method != "POST" or not _POST.fullmatch(path):
            raise _Refused(404 if method == "POST" else 405, "there is no such page")
        if is_cross_origin(headers) and headers.get(b"origin") not in self._trusted:
            raise _Refused(403, "a page of another origin may not use this demo")
        length = headers.get(b"content-length", "")
        if not length.isdecimal() or b"transfer-encoding" in headers:
            raise _Refused(411, "a request must say how long it is")
        if path.rstrip("/").endswith("/upload"):
            await self._take_upload(int(length), scope, receive, send)
        else:
            await self._app(scope, await self._checked_body(path, receive), send)

    async def _take_upload(self, length: int, scope: Message, receive: Receive, send: Send) -> None:
        if length > self._limit_bytes + _FORM_BYTES:
            size = f"{self._limit_bytes / 2**20:g} MB"
            raise _Refused(413, f"more than {size}; send a smaller picture")
        if seconds := self._uploads.seconds_to_wait():
            raise _Refused(429, f"too many pictures; try again in {seconds} s", seconds)
        with self._uploads.room_for(length) as is_free:
            if not is_free:
                raise _Refused(429, "too many pictures at once; try again in 5 s", 5)
            try:
                await asyncio.wait_for(self._app(scope, receive, send), _UPLOAD_SECONDS)
            except asyncio.TimeoutError:
                raise _Refused(408, "the picture did not arrive in time; send it again") from None
            except TypeError:  # Gradio's answer to a form whose `files` is text
                raise _Refused(422, "the form holds no file") from None

    def _check_file(self, path: str) -> None:
        # decoded once more: the application behind the gate may do so too
        if not all(self._uploads.contains(name) for name in (path, unquote(path))):
            raise _Refused(403, "only uploaded pictures can be read")

    async def _checked_body(self, path: str, receive: Receive) -> Receive:
        """Read a JSON body, check it, and return a `receive` that gives what is known of it."""
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            if len(body) > _BODY_BYTES:
                raise _Refused(413, "more than a request may hold")
            more = message["type"] == "http.request" and message.get("more_body", False)
        try:
            content = json.loads(body)
        except (ValueError, RecursionError):
            raise _Refused(400, "this is not JSON") from None
        body, replayed = json.dumps(self._checked(path.rstrip("/"), content)).encode(), False

        async def again() -> Message:
            nonlocal replayed
            if replayed:
                return await receive()
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        return again

    def _checked(self, path: str, content: Any) -> dict[str, Any]:
        """The fields of a body that Gradio needs, each of the type that it expects."""
        if not isinstance(content, dict):
            raise _Refused(422, "a request must be a JSON object")
        fields: dict[str, Any] = {}
        for key, kind in _FIELDS.items():
            value = content.get(key)
            if value is None:
                continue
            if type(value) is not kind or not _WORD.fullmatch(str(value)):
                raise _Refused(422, f"{key}: expected {'a word' if kind is str else 'a number'}")
            fields[key] = value
        if path.endswith("/call/predict"):
            kinds: Sequence[str] | None = ("image",)
        elif path.endswith("/join"):
            kinds = self._inputs.get(fields.get("fn_index", -1))
        else:
            return fields
        data = content.get("data")
        if kinds is None:
            raise _Refused(422, "fn_index: there is no such function")
        if not isinstance(data, list) or len(data) != len(kinds):
            raise _Refused(422, f"data: expected a list of {counted(len(kinds), 'value')}")
        fields["data"] = [self._checked_input(*each) for each in zip(kinds, data, strict=True)]
        return fields

    def _checked_input(self, kind: str, value: Any) -> Any:
        if kind == "dataset":
            if type(value) is not int:
                raise _Refused(422, "data: expected the number of an example")
            return value
        if value is None:
            return None
        path = value.get("path") if isinstance(value, dict) else None
        if not isinstance(path, str):
            raise _Refused(422, 'data: expected an uploaded picture, {"path": "..."}')
        self._check_file(path)
        return {"path": path, "meta": {"_type": "gradio.FileData"}}

    def _headers(self, path: str) -> list[tuple[bytes, bytes]]:
        if _FILE.fullmatch(path):
            return [*_EVERYWHERE, (b"content-security-policy", _UPLOAD_POLICY)]
        if self._policy:
            return [*_EVERYWHERE, (b"content-security-policy", _PAGE_POLICY)]
        return _EVERYWHERE


def is_cross_origin(headers: Mapping[bytes, str]) -> bool:
    """True if a browser sends a request for a page of another origin.

    Args:
        headers: with names in lower case. Sec-Fetch-Site decides: current browsers send it to https
            and to loopback, also from within a frame. Without it, the origin's host must be the
            request's. A program that is no browser sends neither.
    Source: Go, net/http, CrossOriginProtection.
    """
    if site := headers.get(b"sec-fetch-site"):
        return site not in ("same-origin", "none")
    origin = headers.get(b"origin")
    return origin is not None and origin.partition("://")[2] != headers.get(b"host")


async def _refuse(send: Send, refused: _Refused) -> None:
    body = f"{refused}\n".encode()
    headers = [
        *_EVERYWHERE,
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    if refused.retry_seconds is not None:
        headers.append((b"retry-after", str(refused.retry_seconds).encode()))
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
