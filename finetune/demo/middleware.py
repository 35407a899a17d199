"""ASGI middleware in front of Gradio that allows only the page, uploads and predictions.

Gradio has routes that the demo does not need, such as a proxy to arbitrary addresses, monitoring,
histories and editing. An allowlist also blocks routes that future versions add.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping, Sequence
from typing import Any
from urllib.parse import unquote

from finetune.demo.uploads import UploadFolder
from finetune.formatting import pluralize
from finetune.log import logger

__all__ = ["AllowlistMiddleware", "is_cross_origin"]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Message, Receive, Send], Awaitable[None]]

_ALLOWED_GET = re.compile(
    r"/(config|theme\.css|favicon\.ico|robots\.txt|manifest\.json|assets/.+|static/.+|svelte/.+)?"
    r"|(/gradio_api)?/(info|user|login_check|token|app_id|startup-events|config|theme\.css"
    r"|upload_progress|queue/data|heartbeat/\w+|call/predict/\w+)/?"
)
_ALLOWED_POST = re.compile(r"/gradio_api/(upload|queue/join|cancel|reset|call/predict)/?")
_FILE_PATH = re.compile(r"(?:/gradio_api)?/file=(.*)", re.DOTALL)
_MAX_BODY_BYTES = 2**16
_FORM_OVERHEAD_BYTES = 2**16  # size of the upload form besides the file
_MAX_DRAINED_BYTES = 2**26
_UPLOAD_TIMEOUT_SECONDS = 300.0  # 10 MB at 0.3 Mbit/s; then the reserved space is released
_LOOPBACK_HOST = re.compile(r"(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?", re.IGNORECASE)
_IDENTIFIER = re.compile(r"[\w-]{0,100}", re.ASCII)
# Of a request body, only these fields and `data` are forwarded.
_BODY_FIELDS = {"session_hash": str, "event_id": str, "fn_index": int, "trigger_id": int}

_COMMON_HEADERS = [(b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer")]
# With this Content-Security-Policy, the browser blocks requests to other hosts and framing.
_PAGE_CSP = (
    b"default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    b"style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    b"worker-src 'self' blob:; object-src 'none'; base-uri 'self'; form-action 'self'; "
    b"frame-ancestors 'none'"
)
_UPLOAD_CSP = b"default-src 'none'; style-src 'unsafe-inline'; sandbox"


class _RequestRefused(Exception):
    """Refuse a request with a status and a message; with 429, also the seconds to wait."""

    def __init__(self, status: int, reason: str, retry_seconds: int | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.retry_seconds = retry_seconds


class AllowlistMiddleware:
    """ASGI middleware around Gradio that forwards what the page needs and rejects the rest.

    Args:
        app: the wrapped application.
        uploads: the folder of uploads, with its limits; requests can read no other files.
        max_upload_bytes: maximum size of an uploaded file.
        input_types: input component types of each function, by its number in Gradio: "image" takes
            an uploaded file, "dataset" the index of an example image.
        loopback_only: accept only requests whose Host is a loopback name. Another Host may mean
            that a foreign page resolves its own name to this machine (DNS rebinding).
        send_csp: send the Content-Security-Policy, which forbids requests to other hosts and
            framing by other pages; False for a Space, which needs both.
        trusted_origins: further origins whose pages may send requests, such as
            "https://owner-name.hf.space".
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        uploads: UploadFolder,
        max_upload_bytes: int,
        input_types: Mapping[int, Sequence[str]],
        loopback_only: bool,
        send_csp: bool,
        trusted_origins: Collection[str] = (),
    ) -> None:
        self._app = app
        self._uploads = uploads
        self._max_upload_bytes = max_upload_bytes
        self._input_types = input_types
        self._loopback_only = loopback_only
        self._send_csp = send_csp
        self._trusted_origins = trusted_origins

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle a request: forward it, or answer with a refusal."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body_complete = client_gone = response_started = False

        async def receive_message() -> Message:
            nonlocal body_complete, client_gone
            message = await receive()
            body_complete = not message.get("more_body", False)
            client_gone = client_gone or message["type"] == "http.disconnect"
            return message

        async def send_response(message: Message) -> None:
            nonlocal response_started
            if message["type"] == "http.response.start":
                response_started = True
                message["headers"] = [
                    *message.get("headers", []),
                    *self._security_headers(scope["path"]),
                ]
            await send(message)

        try:
            await self._forward(scope, receive_message, send_response)
        except _RequestRefused as refused:
            # drain the body first: a client that is still sending would not read the response
            remaining = 0 if refused.status == 408 else _MAX_DRAINED_BYTES
            while not body_complete and remaining > 0:
                remaining -= len((await receive_message()).get("body", b""))
            await _send_refusal(send, refused)
        except Exception as error:
            if client_gone:  # the client has disconnected
                return
            if response_started:
                raise
            logger.info(f"a request failed: {type(error).__name__}: {error}")
            await _send_refusal(
                send, _RequestRefused(500, "the demo could not answer this request")
            )

    async def _forward(self, scope: Message, receive: Receive, send: Send) -> None:
        """Check a request and forward it to the application. Raises: _RequestRefused."""
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        path, method = scope["path"], scope["method"]
        host = headers.get(b"host", "")
        if self._loopback_only and not _LOOPBACK_HOST.fullmatch(host):
            raise _RequestRefused(421, f"this demo is not served as '{host}'")
        if method in ("GET", "HEAD"):
            if file := _FILE_PATH.fullmatch(path):
                self._check_file(file[1])
            elif not _ALLOWED_GET.fullmatch(path):
                raise _RequestRefused(404, "there is no such page")
            await self._app(scope, receive, send)
            return
        if method != "POST" or not _ALLOWED_POST.fullmatch(path):
            raise _RequestRefused(404 if method == "POST" else 405, "there is no such page")
        if is_cross_origin(headers) and headers.get(b"origin") not in self._trusted_origins:
            raise _RequestRefused(403, "a page of another origin may not use this demo")
        length = headers.get(b"content-length", "")
        if not length.isdecimal() or b"transfer-encoding" in headers:
            raise _RequestRefused(411, "a request needs a Content-Length")
        if path.rstrip("/").endswith("/upload"):
            await self._forward_upload(int(length), scope, receive, send)
        else:
            await self._app(scope, await self._validate_body(path, receive), send)

    async def _forward_upload(
        self, length: int, scope: Message, receive: Receive, send: Send
    ) -> None:
        if length > self._max_upload_bytes + _FORM_OVERHEAD_BYTES:
            size = f"{self._max_upload_bytes / 2**20:g} MB"
            raise _RequestRefused(413, f"more than {size}; send a smaller picture")
        if seconds := self._uploads.register_upload():
            raise _RequestRefused(429, f"too many pictures; try again in {seconds} s", seconds)
        with self._uploads.reserve_space(length) as is_free:
            if not is_free:
                raise _RequestRefused(429, "too many pictures at once; try again in 5 s", 5)
            try:
                await asyncio.wait_for(self._app(scope, receive, send), _UPLOAD_TIMEOUT_SECONDS)
            except asyncio.TimeoutError:
                raise _RequestRefused(
                    408, "the picture did not arrive in time; send it again"
                ) from None
            except TypeError:  # Gradio raises TypeError if the form field `files` is text
                raise _RequestRefused(422, "the form holds no file") from None

    def _check_file(self, path: str) -> None:
        # check the decoded path too, because the application may decode it again
        if not all(self._uploads.contains(name) for name in (path, unquote(path))):
            raise _RequestRefused(403, "only uploaded pictures can be read")

    async def _validate_body(self, path: str, receive: Receive) -> Receive:
        """Read and validate a JSON body. Returns: a `receive` with only the valid fields."""
        body, has_more = b"", True
        while has_more:
            message = await receive()
            body += message.get("body", b"")
            if len(body) > _MAX_BODY_BYTES:
                raise _RequestRefused(413, "the request body is too large")
            has_more = message["type"] == "http.request" and message.get("more_body", False)
        try:
            content = json.loads(body)
        except (ValueError, RecursionError):
            raise _RequestRefused(400, "the request body is not JSON") from None
        body = json.dumps(self._validate_fields(path.rstrip("/"), content)).encode()
        replayed = False

        async def replay() -> Message:
            nonlocal replayed
            if replayed:
                return await receive()
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        return replay

    def _validate_fields(self, path: str, content: Any) -> dict[str, Any]:
        """Check the fields of a request body. Returns: the fields that Gradio needs."""
        if not isinstance(content, dict):
            raise _RequestRefused(422, "a request must be a JSON object")
        fields: dict[str, Any] = {}
        for key, field_type in _BODY_FIELDS.items():
            value = content.get(key)
            if value is None:
                continue
            if type(value) is not field_type or not _IDENTIFIER.fullmatch(str(value)):
                raise _RequestRefused(
                    422, f"{key}: expected {'a word' if field_type is str else 'a number'}"
                )
            fields[key] = value
        if path.endswith("/call/predict"):
            input_types: Sequence[str] | None = ("image",)
        elif path.endswith("/join"):
            input_types = self._input_types.get(fields.get("fn_index", -1))
        else:
            return fields
        data = content.get("data")
        if input_types is None:
            raise _RequestRefused(422, "fn_index: this function does not exist")
        if not isinstance(data, list) or len(data) != len(input_types):
            raise _RequestRefused(
                422, f"data: expected a list of {pluralize(len(input_types), 'value')}"
            )
        fields["data"] = [
            self._validate_input(*pair) for pair in zip(input_types, data, strict=True)
        ]
        return fields

    def _validate_input(self, input_type: str, value: Any) -> Any:
        if input_type == "dataset":
            if type(value) is not int:
                raise _RequestRefused(422, "data: expected the number of an example")
            return value
        if value is None:
            return None
        path = value.get("path") if isinstance(value, dict) else None
        if not isinstance(path, str):
            raise _RequestRefused(422, 'data: expected an uploaded picture, {"path": "..."}')
        self._check_file(path)
        return {"path": path, "meta": {"_type": "gradio.FileData"}}

    def _security_headers(self, path: str) -> list[tuple[bytes, bytes]]:
        if _FILE_PATH.fullmatch(path):
            return [*_COMMON_HEADERS, (b"content-security-policy", _UPLOAD_CSP)]
        if self._send_csp:
            return [*_COMMON_HEADERS, (b"content-security-policy", _PAGE_CSP)]
        return _COMMON_HEADERS


def is_cross_origin(headers: Mapping[bytes, str]) -> bool:
    """Return True if a browser sends this request from a page of another origin.

    The header Sec-Fetch-Site decides: current browsers send it to https and loopback servers, also
    from within a frame. Without it, the host in Origin must equal Host. Clients other than browsers
    send neither header.

    Args:
        headers: the request headers, with lower-case names.
    Source: Go, net/http, CrossOriginProtection.
    """
    if site := headers.get(b"sec-fetch-site"):
        return site not in ("same-origin", "none")
    origin = headers.get(b"origin")
    return origin is not None and origin.partition("://")[2] != headers.get(b"host")


async def _send_refusal(send: Send, refused: _RequestRefused) -> None:
    body = f"{refused}\n".encode()
    headers = [
        *_COMMON_HEADERS,
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    if refused.retry_seconds is not None:
        headers.append((b"retry-after", str(refused.retry_seconds).encode()))
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
