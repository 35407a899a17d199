"""ASGI middleware in front of Gradio: only same-origin requests, small bodies and uploaded files.

Gradio itself limits the size of an uploaded file and which files can be read. This middleware also
refuses what Gradio accepts: requests from pages of other origins; forms with many or large files;
large JSON bodies; local paths without Gradio's metadata; and URLs, which Gradio would download.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.demo.uploads import list_files, remove_oldest_files
from finetune.log import warn_once
from finetune.web.access import refuse_post

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["DemoMiddleware"]

_UPLOAD = "/gradio_api/upload"
# Other functions of Gradio, such as component servers and direct calls, are not needed.
_ALLOWED_POST = re.compile(rf"{_UPLOAD}|/gradio_api/(queue/join|cancel|reset|call/predict)")
_FILE = re.compile(r"(?:/gradio_api)?/(?:file|proxy)[=/](.*)", re.DOTALL)
_MAX_BODY_BYTES = 2**16
_FORM_OVERHEAD_BYTES = 2**16  # size of the upload form besides the file
_NO_FRAMES = b"frame-ancestors 'none'"


class _RequestRefused(Exception):
    """Raised to refuse a request with an HTTP status and a message."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class DemoMiddleware:
    """ASGI middleware that forwards a request to Gradio or refuses it.

    Args:
        app: the wrapped application.
        upload_folder: Gradio's folder of uploads; requests can name only files in it.
        max_upload_bytes: maximum size of an uploaded file.
        max_total_bytes: limit for all uploaded files together; a new upload replaces the oldest
            ones. The uploads in progress have the same limit, because replacing a file that is
            still being written frees no space.
        allow_framing: True to let other pages show this one in a frame, as the Hub shows a Space.
        index_events: ids of Gradio's events whose input is the number of an example.
        trusted_origins: further origins whose pages may send requests, such as
            "https://owner-name.hf.space".
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        upload_folder: Path,
        max_upload_bytes: int,
        max_total_bytes: int,
        allow_framing: bool,
        index_events: Collection[int] = (),
        trusted_origins: Collection[str] = (),
    ) -> None:
        self._app = app
        self._upload_folder = upload_folder.resolve()
        self._examples = set(list_files(self._upload_folder))  # Gradio's copies
        self._max_upload_bytes = max_upload_bytes
        self._max_total_bytes = max_total_bytes
        self._open_upload_bytes = 0  # declared by the uploads that are being received
        self._index_events = index_events
        self._trusted_origins = trusted_origins
        self._headers = [(b"x-content-type-options", b"nosniff")]
        if not allow_framing:
            self._headers.append((b"content-security-policy", _NO_FRAMES))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request: forward it, or answer with a refusal."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        has_started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                message["headers"] = [*message.get("headers", []), *self._headers]
            await send(message)

        try:
            receive, upload_bytes = await self._check_request(scope, receive)
        except _RequestRefused as refused:
            await _text_response(refused)(scope, receive, send_with_headers)
            return
        self._open_upload_bytes += upload_bytes
        try:
            await self._app(scope, receive, send_with_headers)
        except Exception as error:  # Gradio raises any type of error for malformed requests
            cause = type(error).__name__
            warn_once(f"{scope['path']}: a request failed ({cause})", key=f"demo request: {cause}")
            if not has_started:
                failed = _RequestRefused(400, "the request cannot be answered")
                await _text_response(failed)(scope, receive, send_with_headers)
        finally:
            self._open_upload_bytes -= upload_bytes

    async def _check_request(self, scope: Scope, receive: Receive) -> tuple[Receive, int]:
        """Return the `receive` to forward, and the size of an upload. Raises: _RequestRefused."""
        headers = {
            name.decode().lower(): value.decode("latin-1") for name, value in scope["headers"]
        }
        path = scope["path"].rstrip("/")
        if scope["method"] in ("GET", "HEAD"):
            if file := _FILE.fullmatch(scope["path"]):
                self._check_file(file[1])
            return receive, 0
        if scope["method"] != "POST" or not _ALLOWED_POST.fullmatch(path):
            raise _RequestRefused(404, "page not found")
        is_upload = path == _UPLOAD
        max_bytes = self._max_upload_bytes + _FORM_OVERHEAD_BYTES if is_upload else _MAX_BODY_BYTES
        refusal = refuse_post(headers, max_bytes=max_bytes, trusted_origins=self._trusted_origins)
        if refusal:
            raise _RequestRefused(*refusal)
        if is_upload:
            length = int(headers["content-length"])
            room = self._max_total_bytes - length
            if self._open_upload_bytes > room:
                raise _RequestRefused(503, "too many uploads at once; try again later")
            remove_oldest_files(self._upload_folder, max_total_bytes=room, keep=self._examples)
            return receive, length
        return await self._check_body(receive), 0

    async def _check_body(self, receive: Receive) -> Receive:
        """Check the files in a JSON body. Returns: a `receive` that replays the body."""
        body, has_more = b"", True
        while has_more:
            message = await receive()
            body += message.get("body", b"")
            has_more = message.get("more_body", False)
        try:
            content = json.loads(body)
        except (ValueError, RecursionError):
            raise _RequestRefused(400, "the request body is not JSON") from None
        data = content.get("data", []) if isinstance(content, dict) else None
        if not isinstance(data, list) or len(data) > 1:
            raise _RequestRefused(422, "data: expected a list of one image")
        # for an empty list, Gradio would print a traceback
        may_be_index = content.get("fn_index") in self._index_events
        values = [self._check_value(item, may_be_index=may_be_index) for item in data or [None]]
        body = json.dumps({**content, "data": values}).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        return replay

    def _check_value(self, value: Any, *, may_be_index: bool) -> Any:
        """Return an input to forward to Gradio: null, the number of an example, or an upload."""
        if value is None or (may_be_index and type(value) is int):
            return value
        path = value.get("path") if isinstance(value, dict) else None
        if not isinstance(path, str):
            raise _RequestRefused(422, 'data: expected an uploaded image, {"path": "..."}')
        self._check_file(path)
        return {"path": path, "meta": {"_type": "gradio.FileData"}}

    def _check_file(self, path: str) -> None:
        try:
            is_upload = Path(os.path.realpath(path)).is_relative_to(self._upload_folder)
        except ValueError:  # a NUL or a lone surrogate is invalid in a path
            is_upload = False
        if not is_upload:
            raise _RequestRefused(403, "only uploaded images can be read")


def _text_response(refused: _RequestRefused) -> ASGIApp:
    from starlette.responses import PlainTextResponse

    return PlainTextResponse(f"{refused}\n", refused.status)
