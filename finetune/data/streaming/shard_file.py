"""Read byte ranges of a shard, local or remote, and check that it has not changed.

fsspec's file systems, including huggingface_hub's, do not check the status, length and ETag of a
range, so they could mix the bytes of two versions of a file.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, BinaryIO, cast
from urllib.parse import parse_qsl, unquote, urlsplit

from huggingface_hub import constants, hf_hub_url, hf_raise_for_status
from huggingface_hub.errors import HTTPError
from huggingface_hub.utils import build_hf_headers

from finetune.data.decode import open_dataset_file
from finetune.errors import DataError, FinetuneError, HubError
from finetune.hub import client
from finetune.hub.client import (
    TransientHubError,
    check_server_status,
    hub_errors,
    redact,
    retry,
)

__all__ = [
    "MAX_READ_SECONDS",
    "MAX_READ_TRIES",
    "LocalFile",
    "RemoteFile",
    "ShardFile",
    "open_stream",
    "store_urls",
]

# limits for the tries of a read: a long run survives an outage of a minute
MAX_READ_TRIES = 8
MAX_READ_SECONDS = 90.0
_MIN_BYTES_PER_SECOND = 1000  # on average; else a slow but steady response never times out
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
# Hub URL of a file -> its URL in the Hub's file store. The Hub limits the rate of its redirects;
# one redirect per range would exceed the limit. The store names files by their content, so the
# bytes of a URL do not change. This dict has no lock: a lock that another thread holds during a
# fork is never released.
store_urls: dict[str, str] = {}
# Parameters of a signed URL that change with each signature (S3, Google, Azure, CloudFront, nginx)
# if one of them is the signature; the others may select another file.
_SIGNATURE = re.compile(r"(?i)(?:x-(?:amz|goog|oss)-)?signature|sig|md5")
_SIGNATURE_PARAMETER = re.compile(
    r"(?i)x-(?:amz|goog|oss)-.*|(?:aws|oss)?accesskeyid|googleaccessid|key-pair-id|policy"
    r"|expires|signature|sig|md5|s[eprstv]|srt|spr|sk(?:oid|tid|[tesv])"
)
_TOKEN_PARAMETER = re.compile(r"(?i).*(?:token|auth|key|pass|secret).*")
_RESTORE_HINT = "restore it and start again (files must not change during a run)"


@dataclass(frozen=True)
class LocalFile:
    """A file on this machine.

    Attributes:
        path: path of the file.
        size: size in bytes when the source was opened.
        modified_ns: modification time in nanoseconds when the source was opened.
        changed_ns: ctime in nanoseconds when the source was opened; unlike the modification time, a
            program cannot set it back.
        file_id: device and inode, which differ if a link leads to another file.
    """

    path: Path
    size: int
    modified_ns: int
    changed_ns: int
    file_id: tuple[int, int]

    @classmethod
    def from_path(cls, path: Path) -> LocalFile:
        """Record size, times and inode. Raises: DataError if the file cannot be read."""
        with _open_local(path) as stream:
            return cls._from_stream(path, stream)

    @classmethod
    def _from_stream(cls, path: Path, stream: IO[bytes]) -> LocalFile:
        stat = os.fstat(stream.fileno())
        file_id = (stat.st_dev, stat.st_ino)
        return cls(path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, file_id)

    @property
    def display_name(self) -> str:
        """The file's name in messages."""
        return str(self.path)

    @property
    def cache_id(self) -> str:
        """What tells the file from others in the keys of caches."""
        return str(self.path)

    @property
    def content_name(self) -> str:
        """Its name: the same in another folder."""
        return self.path.name

    @property
    def etag(self) -> str:
        """Empty: a local file has no ETag."""
        return ""

    def read(self, offset: int, length: int) -> bytes:
        """Read `length` bytes from `offset`.

        Raises: DataError if the file is unreadable, or has changed or gone since it was opened.
        """
        try:
            with _open_local(self.path) as stream:
                stream.seek(offset)
                part = stream.read(length)
                # after the read, to detect a change during it
                current = LocalFile._from_stream(self.path, stream)
        except DataError as error:
            if error.code == "data.not_found":  # also if only for a moment: it existed before
                raise DataError(f"{error}; {_RESTORE_HINT}", code="data.changed") from None
            raise
        if current != self or len(part) != length:
            raise DataError(
                f"{self.path}: has changed since it was opened; {_RESTORE_HINT}",
                code="data.changed",
            )
        return part


@contextlib.contextmanager
def _open_local(path: Path) -> Iterator[IO[bytes]]:
    """Open a local file. Raises: DataError if it cannot be opened or read, naming it."""
    try:
        with open_dataset_file(path) as stream:
            yield stream
    except DataError as error:
        raise DataError(f"{path}: {error}", code=error.code) from None
    except OSError as error:
        message = f"{path}: cannot be read ({error.strerror or error}); check its disk"
        raise DataError(message, code="data.unreadable") from None


@dataclass(frozen=True)
class RemoteFile:
    """A file on the Hugging Face Hub, or on another HTTP server that supports range requests.

    Attributes:
        url: URL of the file; it may hold a password and is never shown.
        path: path in the Hub's repository, or on the server.
        display_name: the file's name in messages.
        size: size in bytes when the source was opened.
        etag: the strong ETag when the source was opened, else the Last-Modified header; empty if
            the server sends neither.
    """

    url: str = field(repr=False)
    path: str
    display_name: str
    size: int = -1
    etag: str = ""

    @classmethod
    def open_url(cls, url: str) -> RemoteFile:
        """Request size and ETag of a file on any server. Raises: same as `read`."""
        parts = urlsplit(url)
        path = parts.path.partition(";")[0]  # parameters may hold a token
        display_name = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{path}"
        return cls(url, unquote(path), display_name)._opened()

    @classmethod
    def open_on_hub(cls, source: str, repo_id: str, commit: str, path: str) -> RemoteFile:
        """Request size and ETag of a file in a dataset repository.

        Args:
            source: the user's source string, for messages.
            repo_id: owner/name.
            commit: full sha of the commit.
            path: path in the repository.
        Raises: same as `read`.
        """
        url = hf_hub_url(repo_id, path, repo_type="dataset", revision=commit)
        return cls(url, path, f"{source} {path}")._opened()

    @property
    def cache_id(self) -> str:
        """What tells the file from others in the keys of caches: not its signature."""
        return f"{self.display_name}{_hash_query(self._selecting_query())}"

    @property
    def content_name(self) -> str:
        """Its path, and what in the query selects it: the same on another server."""
        query = [pair for pair in self._selecting_query() if not _TOKEN_PARAMETER.match(pair[0])]
        return f"{self.path}{_hash_query(query)}"

    def _selecting_query(self) -> list[tuple[str, str]]:
        query = parse_qsl(urlsplit(self.url).query, keep_blank_values=True)
        if not any(_SIGNATURE.fullmatch(name) for name, _ in query):
            return query
        return [pair for pair in query if not _SIGNATURE_PARAMETER.fullmatch(pair[0])]

    def _opened(self) -> RemoteFile:
        store_urls.pop(self.url, None)  # only the Hub itself sends the ETag
        found, _ = self._request_with_retries(0, 1)
        return found

    def read(self, offset: int, length: int) -> bytes:
        """Read `length` bytes from `offset`; retry while the server fails.

        Raises: HubError if the server keeps failing or denies access; DataError if the file is gone
            or has changed.
        """
        found, body = self._request_with_retries(
            offset, length, max_tries=MAX_READ_TRIES, max_seconds=MAX_READ_SECONDS
        )
        if found != self:
            raise DataError(
                f"{self.display_name}: has changed since it was opened; restore it, or train from "
                "scratch",
                code="data.changed",
            )
        return body

    def _request_with_retries(
        self, offset: int, length: int, **limits: Any
    ) -> tuple[RemoteFile, bytes]:
        """Request a range; `limits` are those of `retry`.

        Returns: this file with its current size and ETag, and the bytes.
        """

        def call() -> tuple[RemoteFile, bytes]:
            try:
                return self._request_range(offset, length)
            except TransientHubError:
                store_urls.pop(self.url, None)
                raise

        try:
            return retry(self.display_name, call, url=self.url, **limits)
        except TransientHubError as error:
            raise HubError(
                f"{self.display_name}: {error}, repeatedly; try again later (continue a run with "
                "--resume)",
                code="hub.unreachable",
            ) from None

    def _request_range(self, offset: int, length: int) -> tuple[RemoteFile, bytes]:
        url = store_urls.get(self.url, self.url)
        is_in_store = url != self.url
        # httpx drops the token if the Hub redirects to another host
        headers = dict(build_hf_headers()) if self._is_on_hub and not is_in_store else {}
        headers |= {"Range": f"bytes={offset}-{offset + length - 1}", "Accept-Encoding": "identity"}
        session = client.open_session()
        with _connection_errors(self.display_name):
            request = session.build_request(
                "GET", url, headers=headers, timeout=client.READ_TIMEOUT_SECONDS
            )
            response = session.send(request, stream=True, follow_redirects=True)
            with contextlib.closing(response):
                if is_in_store and response.status_code not in (206, 416):  # the URL has expired
                    raise TransientHubError(f"the file store returned {response.status_code}")
                self._check_status(response)
                span = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
                if response.status_code != 206 or not span:
                    raise HubError(
                        f"{self.display_name}: the server does not support range requests (status "
                        f"{response.status_code}); download the file, and give its path",
                        code="hub.wrong_answer",
                    )
                body = _read_body(response, length)
        if (int(span[1]), int(span[2]), len(body)) != (offset, offset + length - 1, length):
            raise TransientHubError("the server sent another part of the file")
        if self._is_on_hub and not str(response.url).startswith(f"{constants.ENDPOINT}/"):
            store_urls[self.url] = str(response.url)
        etag = self.etag if is_in_store else _etag(response)
        return replace(self, size=int(span[3]), etag=etag), body

    @property
    def _is_on_hub(self) -> bool:
        return self.url.startswith(f"{constants.ENDPOINT}/")

    def _check_status(self, response: Any) -> None:
        """Raise an error for an HTTP error status."""
        status = response.status_code
        if status == 416:
            raise DataError(
                f"{self.display_name}: it is empty, or shorter than when it was opened; restore it "
                "and start again",
                code="data.changed",
            )
        if status in (404, 410):
            cause = redact(response.headers.get("x-error-message") or response.reason_phrase)
            message = f"{self.display_name}: no such file ({status} {cause}); check its name"
            raise DataError(message, code="data.not_found")
        if status in (401, 403):
            if self._is_on_hub:
                with hub_errors(self.display_name, not_found_error=DataError, repo_noun="dataset"):
                    hf_raise_for_status(response)
            raise HubError(
                f"{self.display_name}: the server denies access ({status}); check URL and "
                "permissions",
                code="hub.forbidden",
            )
        check_server_status(response, server_name="the server")


ShardFile = LocalFile | RemoteFile


@contextlib.contextmanager
def _connection_errors(display_name: str) -> Iterator[None]:
    """Convert errors of httpx to TransientHubError if they are temporary, else to HubError."""
    try:
        yield
    except (FinetuneError, TransientHubError):
        raise
    except Exception as error:  # an invalid URL raises almost any type of error
        cause = redact(f"{type(error).__name__}: {error}")
        if isinstance(error, HTTPError) and type(error).__name__ not in client.PERMANENT_ERRORS:
            text = f"the connection failed ({cause})"
            raise TransientHubError(text, code="hub.unreachable") from None
        raise HubError(
            f"{display_name}: cannot be requested ({cause}); check its URL",
            code="hub.wrong_answer",
        ) from None


def _hash_query(query: Sequence[tuple[str, str]]) -> str:
    """Return a hash of parameters, which may be secret; "" without any."""
    return f" {hashlib.sha256(repr(query).encode()).hexdigest()}" if query else ""


def _read_body(response: Any, length: int) -> bytes:
    """Read a response body. Raises: TransientHubError if it is too long or too slow."""
    body, start = bytearray(), time.monotonic()
    for piece in response.iter_raw():
        body += piece
        seconds = time.monotonic() - start
        if len(body) > length:
            raise TransientHubError(f"the server sent more than the requested {length:,} bytes")
        if seconds > client.READ_TIMEOUT_SECONDS and len(body) < seconds * _MIN_BYTES_PER_SECOND:
            raise TransientHubError(
                f"the server is too slow ({len(body):,} bytes in {seconds:.0f} s)"
            )
    return bytes(body)


def _etag(response: Any) -> str:
    """Return the ETag of the content, which the Hub sends with its redirect to the file store.

    A weak ETag may stay the same if the content changes; the Last-Modified header replaces it.
    """
    for answer in (*response.history, response):
        if tag := answer.headers.get("x-linked-etag"):
            return str(tag).removeprefix("W/").strip('"')
    tag = response.headers.get("etag")
    if not tag or tag.startswith("W/"):
        tag = response.headers.get("last-modified", "")
    return str(tag).strip('"')


def open_stream(file: ShardFile, *, buffer_bytes: int = io.DEFAULT_BUFFER_SIZE) -> BinaryIO:
    """Open a shard as a file object, for libraries that read files.

    Args:
        buffer_bytes: minimum length of the ranges that are read, except at the end.
    Returns: a seekable stream; its `read` raises the errors of `ShardFile.read`.
    """
    return cast(BinaryIO, io.BufferedReader(_RawShardStream(file), buffer_bytes))


class _RawShardStream(io.RawIOBase):
    def __init__(self, file: ShardFile) -> None:
        self._file, self._position = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        self._position = start + offset
        return self._position

    def readinto(self, room: Any) -> int:
        length = max(min(len(room), self._file.size - self._position), 0)
        if length:
            room[:length] = self._file.read(self._position, length)
            self._position += length
        return length
