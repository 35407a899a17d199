"""Parts of a file, read in place: on this machine, or by ranges from the hub or any server."""

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
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import build_hf_headers

from finetune.errors import DataError, HubError
from finetune.hub.client import Fault, Watch, httpx, refusal, retried, was_cut

__all__ = ["HubFile", "LocalFile", "ShardFile", "WebFile"]

PATIENCE_SECONDS = 60.0  # beyond the tries of one call: a run of days outlives a short outage
_PAUSE_SECONDS = 5.0
_ANSWER_SECONDS = 30.0  # between two pieces of an answer; the client itself would wait for ever
_LEAST_RATE = 1000  # bytes a second, on the whole; without it a drip would last for ever
_MOST_HOPS = 3  # a renamed repository redirects to its new name
_REDIRECTS = (301, 302, 303, 307, 308)
_SPAN = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class LocalFile:
    """A file on this machine.

    Attributes:
        path: of the file.
        size: in bytes, when the source was opened.
        modified_ns: the time of its last change then.
    """

    path: Path
    size: int
    modified_ns: int

    @classmethod
    def at(cls, path: Path) -> LocalFile:
        """Describe a file as it is now. Raises: OSError if there is none."""
        state = path.stat()
        return cls(path, state.st_size, state.st_mtime_ns)

    @property
    def title(self) -> str:
        """The file's name in messages."""
        return str(self.path)

    @property
    def content_name(self) -> str:
        """Empty: the content has no name without reading it."""
        return ""

    def read(self, first: int, length: int) -> bytes:
        """Read `length` bytes from byte `first` on. Raises: DataError if the file has changed."""
        try:
            with self.path.open("rb") as stream:
                stream.seek(first)
                part = stream.read(length)
                state = os.fstat(stream.fileno())  # it may have changed meanwhile
        except OSError as error:
            raise DataError(
                f"{self.path}: cannot be read any more ({error.strerror or error}); look at its "
                "disk",
                code="data.unreadable",
            ) from None
        now = state.st_size, state.st_mtime_ns
        if now != (self.size, self.modified_ns) or len(part) != length:
            raise DataError(
                f"{self.path}: has changed since it was opened, and must not while it is read: "
                "restore it and start again",
                code="data.changed",
            )
        return part


@dataclass(frozen=True)
class HubFile:
    """A file of a data set at one commit of the hub.

    Attributes:
        where: the data set as the user wrote it, for messages.
        repository: owner/name.
        commit: the full sha.
        path: in the repository.
        size: in bytes.
        content_name: the hub's name for its content: a sha256, or git's sha1 of a small file.
    """

    where: str
    repository: str
    commit: str
    path: str
    size: int
    content_name: str

    @property
    def title(self) -> str:
        """The file's name in messages."""
        return f"{self.where} {self.path}"

    def read(self, first: int, length: int) -> bytes:
        """Read `length` bytes from byte `first` on, again while the hub fails.

        Raises: HubError if the hub keeps failing, or refuses; DataError if the file is gone or has
            changed.
        """
        return _patiently(self.title, lambda: self._once(first, length))

    def _once(self, first: int, length: int) -> bytes:
        place = _places.get(self)
        try:
            for _ in range(_MOST_HOPS):
                answer = self._request(place, first, length)
                if not isinstance(answer, str):
                    return answer
                place = answer
        except Fault:
            _places.pop(self, None)  # an address of the file store is signed, and expires
            raise
        message = f"{self.title}: the hub leads from one address to another; try again later"
        raise HubError(message, code="hub.wrong_answer")

    def _request(self, place: str | None, first: int, length: int) -> bytes | str:
        """Send one request. Returns: the bytes, or the address of a redirect."""
        own = hf_hub_url(self.repository, self.path, repo_type="dataset", revision=self.commit)
        url = place or own
        is_hub = _host(url) == _host(constants.ENDPOINT)
        headers = dict(build_hf_headers()) if is_hub else {}  # the token is for the hub alone
        headers |= {"Range": f"bytes={first}-{first + length - 1}", "Accept-Encoding": "identity"}
        session = get_session()
        request = session.build_request("GET", url, headers=headers, timeout=_ANSWER_SECONDS)
        watch = Watch(stores=() if is_hub else (urlsplit(url).hostname or "",))
        answer = watch.send(session.send, request, stream=True, follow_redirects=False)
        try:
            if is_hub:
                self._refuse_other(answer.headers, follows=answer.status_code in _REDIRECTS)
            if answer.status_code in _REDIRECTS:
                target = urljoin(url, answer.headers.get("location", ""))
                if _host(target) != _host(constants.ENDPOINT):
                    _places[self] = target
                return target
            self._refuse_no_range(answer, first, length)
            body = _body(answer, length)
        except Exception as error:
            if not was_cut(error):
                raise
        else:
            if len(body) == length:
                return body
        finally:
            answer.close()
        raise Fault("the connection was cut")

    def _refuse_other(self, headers: Any, *, follows: bool) -> None:
        """Refuse a file that has changed since it was opened."""
        etag = headers.get("x-linked-etag") or (None if follows else headers.get("etag"))
        size = headers.get("x-linked-size")
        name = etag.removeprefix("W/").strip('"') if etag else self.content_name
        if name != self.content_name or (size or str(self.size)) != str(self.size):
            raise self._changed()

    def _refuse_no_range(self, answer: Any, first: int, length: int) -> None:
        """Refuse an answer that is not the requested part of the file."""
        status = answer.status_code
        span = _SPAN.fullmatch(answer.headers.get("content-range", ""))
        if status == 206 and span:
            if span[3] not in ("*", str(self.size)):
                raise self._changed()
            if (int(span[1]), int(span[2])) == (first, first + length - 1):
                return
            raise Fault("the hub sent another part of the file")
        if status == 416:
            raise self._changed()
        if status == 404 and answer.headers.get("x-error-code") in (None, "EntryNotFound"):
            raise DataError(
                f"{self.title}: is gone from revision {self.commit}; restore it, or train anew on "
                "another revision",
                code="data.not_found",
            )
        answer.read()
        try:
            hf_raise_for_status(answer)
        except HfHubHTTPError as error:
            known = refusal(error, self.where, self.commit, missing=DataError, noun="data set")
            if known is not None:
                raise known from None
        raise HubError(
            f"{self.title}: the server does not send parts of files (answer {status}); set "
            "data.streaming=false",
            code="hub.wrong_answer",
        )

    def _changed(self) -> DataError:
        return DataError(
            f"{self.title}: is another file than when it was opened, at the same revision "
            f"{self.commit}; restore it, or train anew",
            code="data.changed",
        )


@dataclass(frozen=True)
class WebFile:
    """A file at a server that sends parts of files.

    Attributes:
        url: of the file; it may hold a password, and is not shown.
        size: in bytes, when the source was opened.
        content_name: the server's tag of the content then; empty if it has none.
    """

    url: str = field(repr=False)
    size: int
    content_name: str

    @classmethod
    def at(cls, url: str) -> WebFile:
        """Ask for a file's size and tag. Raises: as `read`."""
        return _patiently(_shown(url), lambda: cls(url, -1, "")._answer(0, 1)[0])

    @property
    def title(self) -> str:
        """The file's address, without password and query."""
        return _shown(self.url)

    @property
    def path(self) -> str:
        """The path on the server."""
        return unquote(urlsplit(self.url).path)

    def read(self, first: int, length: int) -> bytes:
        """Read `length` bytes from byte `first` on, again while the server fails.

        Raises: HubError if the server keeps failing, or refuses; DataError if the file is gone or
            has changed.
        """
        found, body = _patiently(self.title, lambda: self._answer(first, length))
        if (found.size, found.content_name) != (self.size, self.content_name):
            raise DataError(
                f"{self.title}: is another file than when it was opened; restore it, or train anew",
                code="data.changed",
            )
        return body

    def _answer(self, first: int, length: int) -> tuple[WebFile, bytes]:
        """Send one request. Returns: the file as it is now, and the bytes."""
        session = get_session()
        headers = {"Range": f"bytes={first}-{first + length - 1}", "Accept-Encoding": "identity"}
        options: dict[str, Any] = {"headers": headers, "timeout": _ANSWER_SECONDS}

        def send(request: Any, **options: Any) -> Any:
            answer = session.send(request, **options)
            self._refuse(answer.status_code)
            return answer

        watch = Watch(stores=(urlsplit(self.url).hostname or "",), noun="the server")
        try:
            request = session.build_request("GET", self.url, **options)
            answer = watch.send(send, request, stream=True, follow_redirects=True)
        except (httpx.RequestError, httpx.InvalidURL) as error:
            raise HubError(
                f"{self.title}: cannot be asked for ({error}); check its address",
                code="hub.wrong_answer",
            ) from None
        try:
            span = _SPAN.fullmatch(answer.headers.get("content-range", ""))
            if answer.status_code != 206 or not span or span[3] == "*":
                raise HubError(
                    f"{self.title}: the server does not send parts of files (answer "
                    f"{answer.status_code}); download it, and give its path",
                    code="hub.wrong_answer",
                )
            tag = answer.headers.get("etag") or answer.headers.get("last-modified", "")
            body = _body(answer, length)
        except Exception as error:
            if not was_cut(error):
                raise
            raise Fault("the connection was cut") from None
        finally:
            answer.close()
        if (int(span[1]), int(span[2]), len(body)) != (first, first + length - 1, length):
            raise Fault("the server sent another part of the file")
        return WebFile(self.url, int(span[3]), tag.removeprefix("W/").strip('"')), body

    def _refuse(self, status: int) -> None:
        """Refuse for good what another request would not change."""
        if status in (401, 403):
            raise HubError(
                f"{self.title}: the server refuses it ({status}); check address and rights",
                code="hub.forbidden",
            )
        if status in (404, 410):
            message = f"{self.title}: no such file ({status}); check its address"
            raise DataError(message, code="data.not_found")
        if status == 416:
            message = f"{self.title}: ends before what is read of it; restore it"
            raise DataError(message, code="data.changed")


ShardFile = LocalFile | HubFile | WebFile


def _patiently(title: str, call: Callable[[], _Result]) -> _Result:
    """Call again and again while a server fails. Raises: HubError when it goes on too long."""
    began = time.monotonic()
    while True:
        try:
            return retried(title, call)
        except Fault as fault:
            if time.monotonic() - began >= PATIENCE_SECONDS:
                raise HubError(
                    f"{title}: {fault}, again and again; try again later: a run goes on with "
                    "--resume",
                    code="hub.unreachable",
                ) from None
        time.sleep(_PAUSE_SECONDS)


def _body(answer: Any, length: int) -> bytes:
    """Read an answer of some bytes. Raises: Fault if more come, or if they hardly come."""
    body, began = bytearray(), time.monotonic()
    for piece in answer.iter_bytes():
        body += piece
        seconds = time.monotonic() - began
        if len(body) > length:
            raise Fault(f"the server sent more than the {length:,} bytes asked for")
        if seconds > _ANSWER_SECONDS and len(body) < seconds * _LEAST_RATE:
            raise Fault(f"the server is too slow ({len(body):,} bytes in {seconds:.0f} s)")
    return bytes(body)


def _shown(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _host(url: str) -> str:
    return urlsplit(url).netloc


# Of files in the file store. No lock: one that a thread holds at a fork is never free in the child.
_places: dict[HubFile, str] = {}
