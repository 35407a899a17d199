"""Read byte ranges of a file: on this machine, on the Hugging Face Hub or on any HTTP server."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urljoin, urlsplit

from huggingface_hub import constants, get_session, hf_hub_url, hf_raise_for_status
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from huggingface_hub.utils import build_hf_headers

from finetune.errors import DataError, HubError
from finetune.hub.client import (
    TransientHubError,
    check_server_status,
    hub_errors,
    redact,
    retry,
    user_error,
)

__all__ = ["HubDatasetFile", "LocalFile", "ShardFile", "WebFile"]

MAX_OUTAGE_SECONDS = (
    60.0  # repeat failed calls of `retry` for this long, so that a long run survives an outage
)
_RETRY_PAUSE_SECONDS = 5.0
_TIMEOUT_SECONDS = 30.0  # between two chunks of a response; without it, the client waits forever
_MIN_BYTES_PER_SECOND = 1000  # on average; else a slow but steady response never times out
_MAX_REDIRECTS = 3  # a renamed repository redirects to its new name
_REDIRECT_STATUS_CODES = (301, 302, 303, 307, 308)
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class LocalFile:
    """A file on this machine.

    Attributes:
        path: path of the file.
        size: size in bytes when the source was opened.
        modified_ns: modification time in nanoseconds when the source was opened.
    """

    path: Path
    size: int
    modified_ns: int

    @classmethod
    def from_path(cls, path: Path) -> LocalFile:
        """Record the current size and modification time. Raises: OSError for a missing file."""
        stat = path.stat()
        return cls(path, stat.st_size, stat.st_mtime_ns)

    @property
    def display_name(self) -> str:
        """The file's name in messages."""
        return str(self.path)

    @property
    def etag(self) -> str:
        """Empty: a local file has no ETag."""
        return ""

    def read(self, offset: int, length: int) -> bytes:
        """Read `length` bytes from `offset`. Raises: DataError if the file has changed."""
        try:
            with self.path.open("rb") as stream:
                stream.seek(offset)
                part = stream.read(length)
                stat = os.fstat(stream.fileno())  # after the read, to detect a change during it
        except OSError as error:
            raise DataError(
                f"{self.path}: can no longer be read ({error.strerror or error}); check its disk",
                code="data.unreadable",
            ) from None
        current = stat.st_size, stat.st_mtime_ns
        if current != (self.size, self.modified_ns) or len(part) != length:
            raise DataError(
                f"{self.path}: has changed since it was opened; restore it and start again (files "
                "must not change during a run)",
                code="data.changed",
            )
        return part


@dataclass(frozen=True)
class HubDatasetFile:
    """A file of a dataset repository on the Hub, at one commit.

    Attributes:
        source: the user's source string, for messages.
        repo_id: owner/name.
        commit: full sha of the commit.
        path: path in the repository.
        size: size in bytes.
        etag: the Hub's hash of the content: sha256 of an LFS file, git's sha1 of any other file.
    """

    source: str
    repo_id: str
    commit: str
    path: str
    size: int
    etag: str

    @property
    def display_name(self) -> str:
        """The file's name in messages."""
        return f"{self.source} {self.path}"

    def read(self, offset: int, length: int) -> bytes:
        """Read `length` bytes from `offset`; retry while the Hub fails.

        Raises: HubError if the Hub keeps failing or denies access; DataError if the file is gone or
            has changed.
        """
        return _retry_through_outage(self.display_name, lambda: self._read_once(offset, length))

    def _read_once(self, offset: int, length: int) -> bytes:
        url = _redirected_urls.get(self)
        try:
            for _ in range(_MAX_REDIRECTS):
                result = self._send_range_request(url, offset, length)
                if not isinstance(result, str):
                    return result
                url = result
        except TransientHubError:
            _redirected_urls.pop(self, None)  # the file store's signed URLs expire
            raise
        message = f"{self.display_name}: the hub redirects too often; try again later"
        raise HubError(message, code="hub.wrong_answer")

    def _send_range_request(
        self, redirect_url: str | None, offset: int, length: int
    ) -> bytes | str:
        """Send one request. Returns: the bytes, or the target URL of a redirect."""
        hub_url = hf_hub_url(self.repo_id, self.path, repo_type="dataset", revision=self.commit)
        url = redirect_url or hub_url
        is_hub = _host(url) == _host(constants.ENDPOINT)
        headers = dict(build_hf_headers()) if is_hub else {}  # send the token only to the Hub
        headers |= {"Range": f"bytes={offset}-{offset + length - 1}", "Accept-Encoding": "identity"}
        session = get_session()
        request = session.build_request("GET", url, headers=headers, timeout=_TIMEOUT_SECONDS)
        with hub_errors(self.display_name):
            response = session.send(request, stream=True, follow_redirects=False)
        try:
            check_server_status(response)
            if is_hub:
                self._check_unchanged(
                    response.headers, is_redirect=response.status_code in _REDIRECT_STATUS_CODES
                )
            if response.status_code in _REDIRECT_STATUS_CODES:
                target = urljoin(url, response.headers.get("location", ""))
                if _host(target) != _host(constants.ENDPOINT):
                    _redirected_urls[self] = target
                return target
            self._check_range_response(response, offset, length)
            body = _read_body(response, length)
        except HTTPError:
            pass
        else:
            if len(body) == length:
                return body
        finally:
            response.close()
        raise TransientHubError("the connection was dropped")

    def _check_unchanged(self, headers: Any, *, is_redirect: bool) -> None:
        """Raise a DataError if the file has changed since it was opened."""
        etag = headers.get("x-linked-etag") or (None if is_redirect else headers.get("etag"))
        size = headers.get("x-linked-size")
        name = etag.removeprefix("W/").strip('"') if etag else self.etag
        if name != self.etag or (size or str(self.size)) != str(self.size):
            raise self._changed_error()

    def _check_range_response(self, response: Any, offset: int, length: int) -> None:
        """Raise an error if the response is not the requested part of the file."""
        status = response.status_code
        span = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
        if status == 206 and span:
            if span[3] not in ("*", str(self.size)):
                raise self._changed_error()
            if (int(span[1]), int(span[2])) == (offset, offset + length - 1):
                return
            raise TransientHubError("the hub sent another part of the file")
        if status == 416:
            raise self._changed_error()
        if status == 404 and response.headers.get("x-error-code") in (None, "EntryNotFound"):
            raise DataError(
                f"{self.display_name}: no longer exists in revision {self.commit}; restore it, or "
                "train from scratch on another revision",
                code="data.not_found",
            )
        response.read()
        try:
            hf_raise_for_status(response)
        except HfHubHTTPError as error:
            known = user_error(
                error, self.source, self.commit, not_found_error=DataError, repo_noun="dataset"
            )
            if known is not None:
                raise known from None
        raise HubError(
            f"{self.display_name}: the server does not support range requests (status {status}); "
            "set data.streaming=false",
            code="hub.wrong_answer",
        )

    def _changed_error(self) -> DataError:
        return DataError(
            f"{self.display_name}: has changed since it was opened, at the same revision "
            f"{self.commit}; restore it, or train from scratch",
            code="data.changed",
        )


@dataclass(frozen=True)
class WebFile:
    """A file on an HTTP server that supports range requests.

    Attributes:
        url: URL of the file; it may hold a password and is never shown.
        size: size in bytes when the source was opened.
        etag: the server's ETag, else its Last-Modified header, when the source was opened; empty if
            the server sends neither.
    """

    url: str = field(repr=False)
    size: int
    etag: str

    @classmethod
    def from_url(cls, url: str) -> WebFile:
        """Request a file's size and ETag. Raises: same as `read`."""
        return _retry_through_outage(
            _url_without_secrets(url), lambda: cls(url, -1, "")._request_range(0, 1)[0]
        )

    @property
    def display_name(self) -> str:
        """The file's URL, without password and query."""
        return _url_without_secrets(self.url)

    @property
    def path(self) -> str:
        """The path on the server."""
        return unquote(urlsplit(self.url).path)

    def read(self, offset: int, length: int) -> bytes:
        """Read `length` bytes from `offset`; retry while the server fails.

        Raises: HubError if the server keeps failing or denies access; DataError if the file is gone
            or has changed.
        """
        found, body = _retry_through_outage(
            self.display_name, lambda: self._request_range(offset, length)
        )
        if (found.size, found.etag) != (self.size, self.etag):
            raise DataError(
                f"{self.display_name}: has changed since it was opened; restore it, or train "
                "from scratch",
                code="data.changed",
            )
        return body

    def _request_range(self, offset: int, length: int) -> tuple[WebFile, bytes]:
        """Send one request. Returns: a WebFile with the current size and ETag, and the bytes."""
        session = get_session()
        headers = {"Range": f"bytes={offset}-{offset + length - 1}", "Accept-Encoding": "identity"}
        options: dict[str, Any] = {"headers": headers, "timeout": _TIMEOUT_SECONDS}

        try:
            request = session.build_request("GET", self.url, **options)
            response = session.send(request, stream=True, follow_redirects=True)
        except Exception as error:  # of httpx, also for an invalid URL
            is_valid = re.fullmatch(r"[\w.:\[\]-]+", urlsplit(self.url).hostname or "")
            if is_valid and isinstance(user_error(error, self.display_name), TransientHubError):
                cause = redact(f"{type(error).__name__}: {error}")
                text = f"the server cannot be reached ({cause})"
                raise TransientHubError(text, code="hub.unreachable") from None
            raise HubError(
                f"{self.display_name}: cannot be requested ({error}); check its URL",
                code="hub.wrong_answer",
            ) from None
        try:
            self._check_status(response.status_code)
            check_server_status(response, server_name="the server")
            span = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
            if response.status_code != 206 or not span or span[3] == "*":
                raise HubError(
                    f"{self.display_name}: the server does not support range requests (status "
                    f"{response.status_code}); download it, and give its path",
                    code="hub.wrong_answer",
                )
            tag = response.headers.get("etag") or response.headers.get("last-modified") or ""
            body = _read_body(response, length)
        except HTTPError:
            raise TransientHubError("the connection was dropped") from None
        finally:
            response.close()
        if (int(span[1]), int(span[2]), len(body)) != (offset, offset + length - 1, length):
            raise TransientHubError("the server sent another part of the file")
        return WebFile(self.url, int(span[3]), tag.removeprefix("W/").strip('"')), body

    def _check_status(self, status: int) -> None:
        """Raise an error for a permanent HTTP error status, which a retry would not change."""
        if status in (401, 403):
            raise HubError(
                f"{self.display_name}: the server denies access ({status}); check URL and "
                "permissions",
                code="hub.forbidden",
            )
        if status in (404, 410):
            message = f"{self.display_name}: no such file ({status}); check its URL"
            raise DataError(message, code="data.not_found")
        if status == 416:
            message = (
                f"{self.display_name}: shorter than when it was opened; restore it and start again"
            )
            raise DataError(message, code="data.changed")


ShardFile = LocalFile | HubDatasetFile | WebFile


def _retry_through_outage(display_name: str, call: Callable[[], _Result]) -> _Result:
    """Retry while a server fails. Raises: HubError after `MAX_OUTAGE_SECONDS`."""
    start = time.monotonic()
    while True:
        try:
            return retry(display_name, call)
        except TransientHubError as error:
            if time.monotonic() - start >= MAX_OUTAGE_SECONDS:
                raise HubError(
                    f"{display_name}: {error}, repeatedly; try again later (continue a run with "
                    "--resume)",
                    code="hub.unreachable",
                ) from None
        time.sleep(_RETRY_PAUSE_SECONDS)


def _read_body(response: Any, length: int) -> bytes:
    """Read a response body. Raises: TransientHubError if it is too long or too slow."""
    body, start = bytearray(), time.monotonic()
    for piece in response.iter_bytes():
        body += piece
        seconds = time.monotonic() - start
        if len(body) > length:
            raise TransientHubError(f"the server sent more than the requested {length:,} bytes")
        if seconds > _TIMEOUT_SECONDS and len(body) < seconds * _MIN_BYTES_PER_SECOND:
            raise TransientHubError(
                f"the server is too slow ({len(body):,} bytes in {seconds:.0f} s)"
            )
    return bytes(body)


def _url_without_secrets(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _host(url: str) -> str:
    return urlsplit(url).netloc


# Redirect target of each file in the Hub's file store. Has no lock, because a lock that another
# thread holds during a fork is never released in the child.
_redirected_urls: dict[HubDatasetFile, str] = {}
