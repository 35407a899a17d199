"""Calls to the Hugging Face Hub: the HTTP client, the retry policy and the error messages.

By default, huggingface_hub waits for a response without a time limit, sleeps as long as a busy
server asks, retries some calls silently and never retries others. So this module replaces its HTTP
client: each request has a timeout, each response a maximum size, and inside `monitor_requests` a
failed request raises a `TransientHubError` immediately, which `retry` handles. huggingface_hub
itself retries only uploads to the file store, chunk by chunk.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

from huggingface_hub import constants, get_token, hf_raise_for_status, set_client_factory
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import _http

from finetune.errors import FinetuneError, HubError
from finetune.log import logger, warn_once
from finetune.ranks import is_main_process

__all__ = [
    "RequestMonitor",
    "TransientHubError",
    "describe_error",
    "expect_json",
    "http_status",
    "is_connection_error",
    "monitor_requests",
    "parse_json_object",
    "permanent_hub_error",
    "redact",
    "retry",
    "token_source",
]

MAX_TRIES = 5
MAX_TRIES_UNREACHABLE = 2  # if no server responds at all
FIRST_WAIT_SECONDS = 0.5  # doubled each time
MAX_WAIT_SECONDS = 30.0  # even if the Hub asks for more
NOTICE_INTERVAL_SECONDS = 20.0  # between two log lines about retries
MAX_RESUMES = 2  # times that a download resumes at the same byte
READ_TIMEOUT_SECONDS = 25.0  # between two chunks of a response
WRITE_TIMEOUT_SECONDS = 120.0  # the Hub checks large files or assembles a commit
MAX_RESPONSE_BYTES = 16 << 20  # one page of a file listing has a few hundred KiB
MAX_RESPONSE_DEPTH = 50

_MAX_REASON_CHARS = 300  # limit for third-party text in a message
# a library that rejects pickled objects also explains how to load them anyway
_UNSAFE_LOADING_ADVICE = re.compile(r"weights.only|allow_pickle|trust_remote_code", re.IGNORECASE)
_NON_BRACKET_BYTES = bytes(set(range(256)) - set(b"[]{}"))
# optional requests of huggingface_hub, whose failures do not matter
_OPTIONAL_REQUESTS = ("-harnesses", "/api/telemetry")

# httpx or httpx2, whichever huggingface_hub is built on
httpx: Any = importlib.import_module(HfHubHTTPError.__mro__[1].__module__.partition(".")[0])
_UNREACHABLE_ERRORS = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.ProxyError,
    httpx.PoolTimeout,
)
_PERMANENT_ERRORS = (httpx.UnsupportedProtocol, httpx.LocalProtocolError)

T = TypeVar("T")


class TransientHubError(Exception):
    """A temporary failure: no connection, a dropped connection or a server error.

    Attributes:
        request: method and path of the failed request; `retry` counts the tries per request.
        retry_after_seconds: time that the server asks to wait; None if it does not say.
        is_unreachable: True if no server responded.
        code: error code to report if the failure persists.
        num_tries: number of tries of this request when `retry` gave up.
    """

    def __init__(
        self,
        reason: str,
        *,
        retry_after_seconds: float | None = None,
        is_unreachable: bool = False,
        code: str = "hub.out_of_order",
    ) -> None:
        super().__init__(reason)
        self.code = code
        self.request = ""
        self.retry_after_seconds = retry_after_seconds
        self.is_unreachable = is_unreachable
        self.num_tries = 1


# --- huggingface_hub's client --------------------------------------------------------------------


class _BoundedClient(httpx.Client):
    """HTTP client for huggingface_hub with timeouts, size limits and request monitors."""

    def __init__(self) -> None:
        super().__init__(
            event_hooks={"request": [_http.hf_request_event_hook]},
            follow_redirects=True,
            timeout=None,  # `_send_bounded` sets one per request
        )

    def send(self, request: Any, **options: Any) -> Any:
        """Send a request through the active monitor of this thread, or of all threads, if any."""
        monitor = next(
            (w for w in reversed(_active_monitors) if w.covers_thread(threading.get_ident())), None
        )
        if monitor is None:
            return self._send_bounded(request, **options)
        return monitor.send(self._send_bounded, request, **options)

    def _send_bounded(self, request: Any, *, stream: bool = False, **options: Any) -> Any:
        path = urlsplit(str(request.url)).path
        max_seconds = (
            WRITE_TIMEOUT_SECONDS if request.method in ("POST", "PUT") else READ_TIMEOUT_SECONDS
        )
        # without a timeout from its caller, huggingface_hub passes None, which waits forever
        timeouts = request.extensions.get("timeout", {})
        request.extensions["timeout"] = {
            name: min(timeouts.get(name) or max_seconds, max_seconds)
            for name in ("connect", "read", "write", "pool")
        }
        is_api = str(request.url).startswith(constants.ENDPOINT) and "/resolve/" not in path
        response = super().send(request, stream=stream or is_api, **options)
        if (_retry_after_seconds(response) or 0.0) > MAX_WAIT_SECONDS:
            response.headers["retry-after"] = f"{MAX_WAIT_SECONDS:.0f}"
            response.headers.pop("ratelimit", None)
        return response if stream or not is_api else _read_bounded_response(response)


def _read_bounded_response(response: Any) -> Any:
    """Read an API response. Raises: HubError if it is too large or nested too deeply."""
    url = str(response.request.url).partition("?")[0]
    pieces, size, depth = [], 0, 0
    try:
        for piece in response.iter_bytes():
            pieces.append(piece)
            size += len(piece)
            if size > MAX_RESPONSE_BYTES:
                _raise_wrong_response(url, f"more than {MAX_RESPONSE_BYTES >> 20} MiB")
    finally:
        response.close()
    body = b"".join(pieces)
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    between_strings = b"".join(unescaped.split(b'"')[::2])
    for bracket in between_strings.translate(None, _NON_BRACKET_BYTES):
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_RESPONSE_DEPTH:
            _raise_wrong_response(url, f"nested more than {MAX_RESPONSE_DEPTH} levels")
    if response.status_code >= 400:
        body = _sanitize_error_body(body)
    encoded = ("content-encoding", "content-length", "transfer-encoding")
    headers = [(k, v) for k, v in response.headers.multi_items() if k.lower() not in encoded]
    return httpx.Response(
        response.status_code,
        headers=headers,
        content=body,
        request=response.request,
        extensions=response.extensions,
        history=response.history,
    )


def _sanitize_error_body(body: bytes) -> bytes:
    """Replace an error body by `{}` if it lacks the structure that huggingface_hub relies on."""
    try:
        data = json.loads(body)
    except ValueError:
        return body  # plain text
    errors = (data.get("errors") or []) if isinstance(data, dict) else None
    is_usual = isinstance(errors, list) and all(isinstance(error, dict) for error in errors)
    return body if is_usual else b"{}"


def _raise_wrong_response(display_name: str, problem: str) -> NoReturn:
    raise HubError(
        f"{display_name}: unexpected response from the hub ({problem}); check HF_ENDPOINT and the "
        "proxy, or try again later",
        code="hub.wrong_answer",
    )


def parse_json_object(response: Any, display_name: str) -> dict[str, Any]:
    """Parse a response that must be a JSON object. Its size is already limited.

    Raises: HubError(code="hub.wrong_answer") for anything else.
    """
    try:
        data = response.json()
    except ValueError:
        data = None
    if not isinstance(data, dict):
        _raise_wrong_response(display_name, "not a JSON object")
    return data


@contextlib.contextmanager
def expect_json(display_name: str) -> Iterator[None]:
    """Context manager: raise a HubError if the structure of a response is not as expected.

    Raises: HubError(code="hub.wrong_answer").
    """
    try:
        yield
        return
    except (AttributeError, IndexError, KeyError, TypeError, RecursionError) as error:
        problem = type(error).__name__
    _raise_wrong_response(
        display_name, problem
    )  # outside `except`, so that the traceback does not contain the response


# --- request monitors -----------------------------------------------------------------------------


class RequestMonitor:
    """Monitors huggingface_hub's requests during one call.

    Args:
        storage_hosts: hosts that are known to serve the Hub's large files.
        thread_id: thread whose requests are monitored; None for all threads.
        server_name: name of the server in error messages.
    Attributes:
        last_error: the last TransientHubError, even if a library caught it and continued.
        etag: ETag of the last requested file.
    """

    def __init__(
        self,
        storage_hosts: Iterable[str] = (),
        *,
        thread_id: int | None = None,
        server_name: str = "the hub",
    ) -> None:
        self._server_name = server_name
        self.last_error: TransientHubError | None = None
        self.etag: str | None = None
        self._refused_response: Any = None
        self._storage_hosts = set(storage_hosts)
        self._thread_id = thread_id
        self._download_starts: Counter[tuple[str, str]] = Counter()

    def covers_thread(self, thread_id: int) -> bool:
        """True if the monitor covers requests of this thread."""
        return self._thread_id in (None, thread_id)

    def send(self, send: Callable[..., Any], request: Any, **options: Any) -> Any:
        """Send a request. Raises: TransientHubError immediately for a temporary failure."""
        if not self._is_monitored(request):
            return send(request, **options)
        self._count_resumes(request)
        try:
            response = send(request, **options)
        except httpx.TransportError as error:
            if isinstance(error, _PERMANENT_ERRORS):
                raise
            is_unreachable = isinstance(error, _UNREACHABLE_ERRORS)
            transient_error = TransientHubError(
                _unreachable_message(error, self._server_name),
                is_unreachable=is_unreachable,
                code="hub.unreachable",
            )
        else:
            classified = self._classify_response(request, response)
            if classified is None:
                return response
            response.close()
            transient_error = classified
        transient_error.request = f"{request.method} {request.url.path}"
        raise self._record_error(
            transient_error
        )  # outside `except`, so that the traceback does not contain the request

    def permanent_error(self) -> Exception | None:
        """Return huggingface_hub's error for the last denied request; None if none was denied.

        huggingface_hub itself may hide this error and silently use a cached copy.
        """
        if self._refused_response is None:
            return None
        try:
            hf_raise_for_status(self._refused_response)
        except HfHubHTTPError as error:
            return error
        return None

    def _record_error(self, error: TransientHubError) -> TransientHubError:
        self.last_error = error
        return error

    def _count_resumes(self, request: Any) -> None:
        """Limit how often a download resumes at the same byte; each resume costs one second."""
        if request.method != "GET" or "/api/" in request.url.path:
            return
        key = (str(request.url), request.headers.get("range", ""))
        self._download_starts[key] += 1
        if self._download_starts[key] > 1 + MAX_RESUMES:
            raise self._record_error(TransientHubError("the connection is dropped repeatedly"))

    def _is_monitored(self, request: Any) -> bool:
        # storage hosts may include a second host of the Hub, which serves its small files
        known = request.url.host in self._storage_hosts or str(request.url).startswith(
            constants.ENDPOINT
        )
        return known and not any(part in request.url.path for part in _OPTIONAL_REQUESTS)

    def _classify_response(self, request: Any, response: Any) -> TransientHubError | None:
        status, code = response.status_code, response.headers.get("x-error-code")
        is_file = "/resolve/" in request.url.path
        if is_file and response.headers.get("location"):
            self._storage_hosts.add(
                urlsplit(response.headers["location"]).hostname or request.url.host
            )
        if is_file and status < 400:
            etag = response.headers.get("x-linked-etag") or response.headers.get("etag") or ""
            self.etag = etag.removeprefix("W/").strip('"') or self.etag
        if status in (408, 425, 429) or status >= 500:  # temporary
            return TransientHubError(
                _status_message(response, server_name=self._server_name),
                retry_after_seconds=_retry_after_seconds(response),
            )
        is_store = not is_file and not str(request.url).startswith(constants.ENDPOINT)
        if is_store and request.method == "GET":  # its signed URLs expire
            return (
                TransientHubError(f"the file store returned {status}")
                if 400 <= status != 416
                else None
            )
        if status in (401, 403) or code in ("RepoNotFound", "GatedRepo"):
            self._refused_response = response
        return None


_active_monitors: list[RequestMonitor] = []
_monitor_lock = threading.RLock()


@contextlib.contextmanager
def monitor_requests(*, all_threads: bool = False) -> Iterator[RequestMonitor]:
    """Context manager: monitor huggingface_hub's requests, so that it raises instead of waiting.

    Args:
        all_threads: monitor all threads, not only this one, because `datasets` uses helper threads.
    """
    if _http._GLOBAL_CLIENT_FACTORY is _http.default_client_factory:  # else: set by the program
        set_client_factory(_BoundedClient)
    monitor = RequestMonitor(thread_id=None if all_threads else threading.get_ident())
    # huggingface_hub's warnings contain signed URLs; `retry` logs retries instead
    logger = logging.getLogger("huggingface_hub.file_download")
    with _monitor_lock:
        _active_monitors.append(monitor)
        logger.addFilter(_is_not_retry_warning)
        try:
            yield monitor
        finally:
            _active_monitors.remove(monitor)
            logger.removeFilter(_is_not_retry_warning)


def _is_not_retry_warning(record: logging.LogRecord) -> bool:
    return "Error while downloading" not in str(record.msg)


def _retry_after_seconds(response: Any) -> float | None:
    """Return the wait in seconds that a retry-after or ratelimit header requests; None if none."""
    headers = response.headers
    if str(headers.get("retry-after", "")).strip().isdigit():
        return float(headers["retry-after"])
    window = re.search(r"\br\s*=\s*0\b.*?\bt\s*=\s*(\d+)", str(headers.get("ratelimit", "")))
    return float(window[1]) if window else None


# --- retries --------------------------------------------------------------------------------------


def retry(display_name: str, call: Callable[[], T], *, has_copy: bool = False) -> T:
    """Call a function until it succeeds, up to a limited number of tries.

    A call may send many requests; the limit applies to each of them. Logs each distinct
    failure once, and during a long outage about every 20 seconds.

    Args:
        display_name: name of what is read or written, for log lines.
        call: function that raises TransientHubError for temporary failures.
        has_copy: True if a cached copy exists; then give up after one try if no server responds.
    Raises: the last TransientHubError, and any other error of `call`.
    """
    last_notice = time.monotonic()
    failures: Counter[str] = Counter()
    while True:
        try:
            return call()
        except TransientHubError as error:
            failures[error.request] += 1
            error.num_tries = failures[error.request]
            few = 1 if has_copy else MAX_TRIES_UNREACHABLE
            if error.num_tries >= (few if error.is_unreachable else MAX_TRIES):
                raise
            seconds = FIRST_WAIT_SECONDS * 2 ** (error.num_tries - 1)
            seconds = seconds if error.retry_after_seconds is None else error.retry_after_seconds
            seconds = min(seconds, MAX_WAIT_SECONDS)
            notice = f"{display_name}: {error}; trying again"
            if seconds + time.monotonic() - last_notice < NOTICE_INTERVAL_SECONDS:
                warn_once(notice)
            elif is_main_process():
                last_notice = time.monotonic()
                logger.info(f"{notice} in {seconds:.0f} s")
            time.sleep(seconds)


# --- error messages -------------------------------------------------------------------------------


def redact(text: str, token: str | None) -> str:
    """Prepare third-party text for a message: one line, limited length, no tokens.

    A response may repeat the request's headers, with the token. A text with advice on loading
    objects that could run code is replaced.
    """
    if _UNSAFE_LOADING_ADVICE.search(text):
        return "it holds Python objects or code, which are never loaded because they could run code"
    text = text.replace(token, "***") if token else text
    text = re.sub(r"(?i)\bbearer\s+[^\s'\",}]+", "Bearer ***", text)
    text = " ".join(re.sub(r"\bhf_[A-Za-z0-9]{8,}", "***", text).split())
    return text if len(text) <= _MAX_REASON_CHARS else text[: _MAX_REASON_CHARS - 3] + "..."


def http_status(error: BaseException) -> int | None:
    """Return the HTTP status of a huggingface_hub error; None if it has none."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _unreachable_message(error: BaseException, server_name: str = "the hub") -> str:
    text = f"{type(error).__name__}: {error}"
    return f"{server_name} cannot be reached ({redact(text, get_token()).rstrip(': ')})"


def _status_message(response: Any, detail: str | None = None, server_name: str = "the hub") -> str:
    """Describe the status of a response, with the server's message if it sent one."""
    words = detail or response.headers.get("x-error-message") or response.reason_phrase
    words = redact(str(words), get_token())
    return f"{server_name} returned {response.status_code}{f' ({words})' if words else ''}"


def describe_error(error: BaseException) -> tuple[str, str]:
    """Describe a huggingface_hub error, without tokens. Returns: one line, and the error code."""
    response = getattr(error, "response", None)
    if isinstance(error, httpx.TooManyRedirects):
        return "the hub redirects endlessly", "hub.wrong_answer"
    if response is None:
        return _unreachable_message(error), "hub.unreachable"
    status = response.status_code
    code = "hub.forbidden" if status in (401, 403) else "hub.out_of_order"
    return _status_message(response, getattr(error, "server_message", None)), code


def permanent_hub_error(
    error: BaseException | None,
    display_name: str,
    revision: str | None,
    *,
    not_found_error: type[FinetuneError],
    repo_noun: str = "repository",
) -> FinetuneError | None:
    """Convert a permanent failure to a finetune error; None for any other failure.

    Args:
        not_found_error: error class for a missing repository or revision.
        repo_noun: word for the repository in messages, such as dataset.
    """
    token = get_token()
    login_hint = "check the permissions of your token" if token else "log in with `hf auth login`"
    status = http_status(error) if error is not None else None
    not_found = f"{not_found_error.code}.not_found"
    token_text = f"in {source}" if (source := token_source()).isupper() else f"of {source}"
    if isinstance(error, GatedRepoError):
        return HubError(
            f"{display_name}: this is a gated repository; accept its terms on the Hub, then run "
            "`hf auth login`",
            code="hub.forbidden",
        )
    if isinstance(error, RevisionNotFoundError):
        return not_found_error(
            f"{display_name}: no such revision; remove '@{revision}' for the newest", code=not_found
        )
    if isinstance(error, RepositoryNotFoundError):
        return not_found_error(
            f"{display_name}: no such {repo_noun}, or it is private; check the name, or "
            f"{login_hint}",
            code=not_found,
        )
    if status == 401 and token:
        return HubError(
            f"{display_name}: the hub rejects the token {token_text} (401); create a new one and "
            f"run `hf auth login`, or unset it to read public data",
            code="hub.forbidden",
        )
    if isinstance(error, (HfHubHTTPError, httpx.TooManyRedirects)):
        text, code = describe_error(error)
        hint = login_hint if code == "hub.forbidden" else "check HF_ENDPOINT, or try again later"
        return HubError(f"{display_name}: {text}; {hint}", code=code)
    return None


def token_source() -> str:
    """Return the environment variable that holds the user's token, else "the login"."""
    names = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
    return next((name for name in names if os.environ.get(name)), "the login")


def is_connection_error(error: BaseException | None) -> bool:
    """True if a dropped connection caused the error, even if libraries have wrapped it."""
    while error is not None:
        if isinstance(error, httpx.TransportError) and not isinstance(error, _PERMANENT_ERRORS):
            return True
        if "Consistency check failed" in str(error):  # huggingface_hub's message for missing bytes
            return True
        error = error.__cause__ or error.__context__
    return False
