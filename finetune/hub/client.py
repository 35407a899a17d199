"""Calls to the Hugging Face Hub: time limits, error messages and retries.

Each call of huggingface_hub runs inside `hub_errors`, which turns its many exceptions into ours: a
`TransientHubError` if a retry may succeed, which `retry` handles, else an error for the user.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from urllib.parse import urlsplit

from huggingface_hub import constants, get_session, get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    HTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import parse_ratelimit_headers

from finetune.errors import FinetuneError, HubError, SetupError, redact_secrets
from finetune.log import redact_record, warn_once

__all__ = [
    "HubFileNotFoundError",
    "TransientHubError",
    "call_hub",
    "check_server_status",
    "hub_errors",
    "open_session",
    "redact",
    "retry",
    "token_source",
    "user_error",
]

MAX_TRIES = 5
MAX_TRIES_UNREACHABLE = 2  # if no server responds at all
MAX_RETRY_SECONDS = 60.0  # no further try if it could end later
FIRST_WAIT_SECONDS = 0.5  # doubled each time
MAX_WAIT_SECONDS = 30.0  # even if the Hub asks for more
READ_TIMEOUT_SECONDS = 15.0  # between two chunks of a response
SILENT_SECONDS = 5.0  # a longer wait is logged
WRITE_TIMEOUT_SECONDS = 120.0  # the Hub checks large files or assembles a commit

_BUSY_STATUSES = (408, 425, 429)  # besides 5xx
# raised by huggingface_hub if a response lacks the structure that it relies on; UnboundLocalError
# if the response names another file than the one to send
_STRUCTURE_ERRORS = (
    *(AttributeError, LookupError, RecursionError, TypeError, ValueError),
    UnboundLocalError,
)
# classes of httpx or httpx2, whichever huggingface_hub is built on
_UNREACHABLE_ERRORS = ("ConnectError", "ConnectTimeout", "PoolTimeout", "ProxyError")
# these would occur again on a retry
PERMANENT_ERRORS = ("LocalProtocolError", "TooManyRedirects", "UnsupportedProtocol")
_MAX_REASON_CHARS = 300  # limit for third-party text in a message
# a library that rejects pickled objects also explains how to load them anyway
_UNSAFE_LOADING_ADVICE = re.compile(r"weights.only|allow_pickle|trust_remote_code", re.IGNORECASE)

T = TypeVar("T")


class TransientHubError(Exception):
    """A temporary failure: no connection, a dropped connection or a busy server.

    Attributes:
        code: error code to report if the failure persists.
        is_unreachable: True if no server responded.
        retry_after_seconds: time that the server asks to wait; None if it does not say.
    """

    def __init__(
        self,
        cause: str,
        *,
        code: str = "hub.out_of_order",
        is_unreachable: bool = False,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(cause)
        self.code = code
        self.is_unreachable = is_unreachable
        self.retry_after_seconds = retry_after_seconds


class HubFileNotFoundError(HubError):
    """The repository exists, but not the file."""

    code = "hub.not_found"


# --- errors --------------------------------------------------------------------------------------


@contextlib.contextmanager
def hub_errors(
    display_name: str,
    revision: str | None = None,
    *,
    not_found_error: type[FinetuneError] = HubError,
    repo_noun: str = "repository",
) -> Iterator[None]:
    """Context manager for calls of huggingface_hub: limit their waits and translate their errors.

    Args:
        display_name: the repository as the user typed it, for messages.
        revision: branch, tag or commit that is read; None for the newest.
        not_found_error: error class for a missing repository or revision.
        repo_noun: word for the repository in messages, such as dataset.
    Raises: TransientHubError if a retry may succeed; HubError if the Hub denies access or sends an
        unusable response; `not_found_error` if the repository or revision does not exist.
    """
    _limit_waits()
    try:
        yield
    except HFValidationError:
        raise  # the caller knows which name it asked for
    except Exception as error:
        known = user_error(
            error, display_name, revision, not_found_error=not_found_error, repo_noun=repo_noun
        )
        if known is None and isinstance(error, UnicodeEncodeError):
            known = HubError(
                f"{display_name}: the token from {token_source()} contains a character that no "
                "token has; copy it again",
                code="hub.forbidden",
            )
        elif known is None and isinstance(error, _STRUCTURE_ERRORS):
            known = HubError(
                f"{display_name}: unexpected response from the hub ({type(error).__name__}); check "
                "HF_ENDPOINT and the proxy, or try again later",
                code="hub.wrong_answer",
            )
        if known is None or known is error:
            raise
        raise known from None  # the original error may show a response that repeats the token


def user_error(
    error: BaseException,
    display_name: str,
    revision: str | None = None,
    *,
    not_found_error: type[FinetuneError] = HubError,
    repo_noun: str = "repository",
) -> Exception | None:
    """Translate an error of a request to the Hub, which other libraries may have wrapped.

    Args: see `hub_errors`.
    Returns: a TransientHubError or a FinetuneError; None if no request caused the error.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (TransientHubError, FinetuneError)):
            return cause
        if "Consistency check failed" in str(cause):  # huggingface_hub's message for missing bytes
            return TransientHubError("the connection was dropped")
        if isinstance(cause, HTTPError):
            break
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return None
    response = getattr(cause, "response", None)
    if response is None:
        text = redact(f"{type(cause).__name__}: {cause}").rstrip(": ")
        if type(cause).__name__ in PERMANENT_ERRORS:
            return HubError(
                f"{display_name}: the hub cannot be used ({text}); check HF_ENDPOINT",
                code="hub.wrong_answer",
            )
        return TransientHubError(
            f"the hub cannot be reached ({text})",
            code="hub.unreachable",
            is_unreachable=type(cause).__name__ in _UNREACHABLE_ERRORS,
        )
    login_hint = (
        "check the permissions of your token" if get_token() else "log in with `hf auth login`"
    )
    status, detail = response.status_code, getattr(cause, "server_message", None)
    not_found = f"{not_found_error.code}.not_found"
    if isinstance(cause, GatedRepoError):
        return HubError(
            f"{display_name}: this is a gated repository; accept its terms on the Hub, then run "
            "`hf auth login`",
            code="hub.forbidden",
        )
    if isinstance(cause, RemoteEntryNotFoundError):
        return HubFileNotFoundError(f"{display_name}: no such file on the hub; check its name")
    if isinstance(cause, RevisionNotFoundError):
        return not_found_error(
            f"{display_name}: no such revision; remove '@{revision}' to use the newest",
            code=not_found,
        )
    if isinstance(cause, RepositoryNotFoundError):
        return not_found_error(
            f"{display_name}: no such {repo_noun}, or it is private; check the name, or "
            f"{login_hint}",
            code=not_found,
        )
    try:
        check_server_status(response, detail=detail)
    except TransientHubError as busy:
        return busy
    text = _describe_status(response, detail=detail)
    if status == 401 and get_token():
        return HubError(
            f"{display_name}: the hub rejects the token from {token_source()} (401); create a new "
            "one and run `hf auth login`, or remove it to read public data",
            code="hub.forbidden",
        )
    if status in (401, 403):
        return HubError(f"{display_name}: {text}; {login_hint}", code="hub.forbidden")
    hint = "check HF_ENDPOINT, or try again later"
    if "/xet-" in str(response.request.url):
        hint = "set HF_HUB_DISABLE_XET=1 to use plain HTTP instead of Xet storage"
    return HubError(f"{display_name}: {text}; {hint}", code="hub.out_of_order")


def check_server_status(
    response: Any, *, server_name: str = "the hub", detail: str | None = None
) -> None:
    """Raise TransientHubError if a server is busy or broken, or if a signed URL has expired.

    Args:
        response: response of httpx.
        server_name: name of the server in messages.
        detail: the server's own words, if known.
    """
    status = response.status_code
    is_file_store = response.request.method == "GET" and not str(response.request.url).startswith(
        constants.ENDPOINT
    )
    if status in _BUSY_STATUSES or status >= 500 or (is_file_store and status == 403):
        limit = parse_ratelimit_headers(response.headers)
        seconds = response.headers.get("retry-after", "")
        if limit is not None and limit.remaining == 0:
            seconds = str(limit.reset_in_seconds)
        raise TransientHubError(
            _describe_status(response, server_name=server_name, detail=detail),
            retry_after_seconds=float(seconds) if seconds.isdecimal() else None,
        )


def _describe_status(
    response: Any, *, server_name: str = "the hub", detail: str | None = None
) -> str:
    words = detail or response.headers.get("x-error-message") or response.reason_phrase
    words = redact(str(words))
    return f"{server_name} returned {response.status_code}{f' ({words})' if words else ''}"


def redact(text: str) -> str:
    """Prepare third-party text for a message: one line, limited length, no tokens.

    A response may repeat the headers of the request, including the token. Text that explains how to
    load objects that could run code is replaced as a whole.
    """
    if _UNSAFE_LOADING_ADVICE.search(text):
        return "it holds Python objects or code, which are never loaded because they could run code"
    token = get_token()
    text = redact_secrets(text.replace(token, "***") if token else text)
    text = re.sub(r"(?i)\bbearer\s+[^\s'\",}]+", "Bearer ***", text)
    text = " ".join(text.split())
    return text if len(text) <= _MAX_REASON_CHARS else text[: _MAX_REASON_CHARS - 3] + "..."


def token_source() -> str:
    """Return the environment variable that holds the user's token, else "the login"."""
    names = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
    return next((name for name in names if os.environ.get(name)), "the login")


# --- time limits and retries ---------------------------------------------------------------------


def open_session() -> Any:
    """Return huggingface_hub's session. Raises: SetupError if its proxy cannot be used."""
    try:
        return get_session()
    except Exception as error:  # ImportError without socksio; ValueError or InvalidURL for a URL
        cause, advice = redact(str(error)), "correct or unset the variable"
        if isinstance(error, ImportError):
            cause = "SOCKS needs the package socksio"
            advice = "run: pip install socksio, or unset the variable"
        raise SetupError(
            f"HTTPS_PROXY, HTTP_PROXY or ALL_PROXY: this proxy cannot be used ({cause}); {advice}",
            code="setup.proxy",
        ) from None


def _limit_waits() -> None:
    """Limit the waits of huggingface_hub's current session; some of its calls would wait forever.

    The session gets a hook, because a new client would lose proxies and certificates that a program
    has set.
    """
    session = open_session()
    hooks = session.event_hooks
    if _set_timeouts not in hooks["request"]:
        session.event_hooks = {**hooks, "request": [*hooks["request"], _set_timeouts]}


def _set_timeouts(request: Any) -> None:
    is_write = request.method in ("POST", "PUT")
    seconds = WRITE_TIMEOUT_SECONDS if is_write else READ_TIMEOUT_SECONDS
    timeouts = request.extensions.get("timeout", {})
    request.extensions["timeout"] = {
        name: timeouts.get(name) or seconds for name in ("connect", "read", "write", "pool")
    }


def retry(
    display_name: str,
    call: Callable[[], T],
    *,
    url: str | None = None,
    max_tries: int = MAX_TRIES,
    max_seconds: float = MAX_RETRY_SECONDS,
) -> T:
    """Call a function until it succeeds, up to a limited number of tries and time.

    Args:
        display_name: name of what is read or written, for log lines.
        call: function that raises TransientHubError for temporary failures.
        url: URL on the server; None for the Hub.
        max_tries: limit for the number of calls.
        max_seconds: time limit for all calls together; if one more call, as long as the last one,
            could exceed it, the function is not called again.
    Raises: the last TransientHubError, and any other error of `call`.
    """
    host = urlsplit(url or constants.ENDPOINT).netloc.rpartition("@")[2]
    start = time.monotonic()
    for attempt in range(1, max_tries + 1):
        attempt_start = time.monotonic()
        try:
            with _log_long_wait(host, f"attempt {attempt} of {max_tries}"):
                return call()
        except TransientHubError as error:
            seconds = error.retry_after_seconds
            if seconds is None:
                seconds = FIRST_WAIT_SECONDS * 2 ** (attempt - 1)
            seconds = min(seconds, MAX_WAIT_SECONDS)
            now = time.monotonic()
            is_too_late = now - start + seconds + now - attempt_start > max_seconds
            is_unreachable = error.is_unreachable and attempt >= MAX_TRIES_UNREACHABLE
            if attempt == max_tries or is_unreachable or is_too_late:
                raise
            warn_once(f"{display_name}: {error}; trying again ({attempt + 1} of {max_tries})")
        time.sleep(seconds)
    raise AssertionError("the last try returns or raises")


@contextlib.contextmanager
def _log_long_wait(host: str, attempt: str) -> Iterator[None]:
    """Log a line if the block takes long, but only once per host and attempt."""
    text = f"waiting for {host}, {attempt}"
    timer = threading.Timer(SILENT_SECONDS, warn_once, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def call_hub(display_name: str, function: Callable[..., T], *args: Any, **options: Any) -> T:
    """Call a function of huggingface_hub with retries. Raises: HubError if it fails."""

    def call() -> T:
        with hub_errors(display_name):
            return function(*args, **options)

    try:
        return retry(display_name, call)
    except TransientHubError as error:
        raise HubError(f"{display_name}: {error}; try again later", code=error.code) from None


for _handler in logging.getLogger("huggingface_hub").handlers:
    _handler.addFilter(redact_record)  # the warnings of huggingface_hub contain signed URLs
