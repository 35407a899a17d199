"""Calls to the Hugging Face hub: one client, one policy of retries, one way to word a failure.

Left alone, huggingface_hub waits without a limit for an answer, for as long as a busy server asks,
retries some of its calls silently and others not at all. So its client is built here: every
request is bounded in time and every answer in size, and under `watching` a failed request leaves
at once as a `Fault`, which `retried` repeats. Only uploads to the file store are repeated by
huggingface_hub itself, piece by piece. Long because bounds, retries and wording hold for one call.
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

from finetune.console import say
from finetune.errors import FinetuneError, HubError
from finetune.processes import is_first_rank

__all__ = [
    "Fault",
    "Watch",
    "clean",
    "described",
    "parsed",
    "refusal",
    "retried",
    "say_once",
    "status_of",
    "token_source",
    "understood",
    "was_cut",
    "watching",
]

TRIES = 5
TRIES_UNREACHABLE = 2  # where nobody answers at all
FIRST_WAIT_SECONDS = 0.5  # doubled each time
LONGEST_WAIT_SECONDS = 30.0  # whatever the hub asks for
NOTICE_SECONDS = 20.0  # after which it is said again that something is tried again
RESUMES = 2  # of one download from the same byte
ANSWER_SECONDS = 25.0  # between two pieces of an answer
WRITE_SECONDS = 120.0  # for a hub to check large files, or to put a commit together
MAX_ANSWER_BYTES = 16 << 20  # a page of a listing has some hundred KiB
MAX_ANSWER_DEPTH = 50

_LONGEST_REASON = 300  # characters
# where a library refuses pickled objects, it goes on to say how to read them all the same
_ADVICE = re.compile(r"weights.only|allow_pickle|trust_remote_code", re.IGNORECASE)
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
# What the client asks besides, and can do without.
_ASIDES = ("-harnesses", "/api/telemetry")

# httpx or httpx2, whichever huggingface_hub is built on
httpx: Any = importlib.import_module(HfHubHTTPError.__mro__[1].__module__.partition(".")[0])
_UNREACHABLE = (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError, httpx.PoolTimeout)
_DEFINITE = (httpx.UnsupportedProtocol, httpx.LocalProtocolError)

T = TypeVar("T")


class Fault(Exception):
    """A call failed in a way that may pass: no connection, a cut one, or a server out of order.

    Attributes:
        request: that failed, by method and path; each has its own number of tries.
        seconds: that the server asks to be left alone.
        unreachable: nobody answered.
        code: of the error that it becomes when it lasts.
        tries: of this request, when `retried` gave up.
    """

    def __init__(
        self,
        reason: str,
        *,
        seconds: float | None = None,
        unreachable: bool = False,
        code: str = "hub.out_of_order",
    ) -> None:
        super().__init__(reason)
        self.code = code
        self.request = ""
        self.seconds = seconds
        self.unreachable = unreachable
        self.tries = 1


# --- huggingface_hub's client --------------------------------------------------------------------


class _Client(httpx.Client):
    """The client of huggingface_hub, with bounds, and under the eyes of `watching`."""

    def __init__(self) -> None:
        super().__init__(
            event_hooks={"request": [_http.hf_request_event_hook]},
            follow_redirects=True,
            timeout=None,  # `_bounded` sets them
        )

    def send(self, request: Any, **options: Any) -> Any:
        """Send a request; a `Watch` of this thread, or of all threads, may turn it into a Fault."""
        watch = next((w for w in reversed(_watches) if w.sees(threading.get_ident())), None)
        if watch is None:
            return self._bounded(request, **options)
        return watch.send(self._bounded, request, **options)

    def _bounded(self, request: Any, *, stream: bool = False, **options: Any) -> Any:
        path = urlsplit(str(request.url)).path
        longest = WRITE_SECONDS if request.method in ("POST", "PUT") else ANSWER_SECONDS
        # huggingface_hub passes None, for ever, where its caller names no time
        seconds = request.extensions.get("timeout", {})
        request.extensions["timeout"] = {
            name: min(seconds.get(name) or longest, longest)
            for name in ("connect", "read", "write", "pool")
        }
        is_api = str(request.url).startswith(constants.ENDPOINT) and "/resolve/" not in path
        response = super().send(request, stream=stream or is_api, **options)
        if (_asked(response) or 0.0) > LONGEST_WAIT_SECONDS:
            response.headers["retry-after"] = f"{LONGEST_WAIT_SECONDS:.0f}"
            response.headers.pop("ratelimit", None)
        return response if stream or not is_api else _bounded_answer(response)


def _bounded_answer(response: Any) -> Any:
    """Read an answer of the hub's interface. Raises: HubError if it is too large or too deep."""
    url = str(response.request.url).partition("?")[0]
    pieces, size, depth = [], 0, 0
    try:
        for piece in response.iter_bytes():
            pieces.append(piece)
            size += len(piece)
            if size > MAX_ANSWER_BYTES:
                _wrong_answer(url, f"more than {MAX_ANSWER_BYTES >> 20} MiB")
    finally:
        response.close()
    body = b"".join(pieces)
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    between_strings = b"".join(unescaped.split(b'"')[::2])
    for bracket in between_strings.translate(None, _NO_BRACKETS):
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_ANSWER_DEPTH:
            _wrong_answer(url, f"nested more than {MAX_ANSWER_DEPTH} deep")
    if response.status_code >= 400:
        body = _error_body(body)
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


def _error_body(body: bytes) -> bytes:
    """Drop the words of a refusal that are not in the form which huggingface_hub relies on."""
    try:
        data = json.loads(body)
    except ValueError:
        return body  # plain text
    errors = (data.get("errors") or []) if isinstance(data, dict) else None
    is_usual = isinstance(errors, list) and all(isinstance(error, dict) for error in errors)
    return body if is_usual else b"{}"


def _wrong_answer(where: str, problem: str) -> NoReturn:
    raise HubError(
        f"{where}: the hub's answer cannot be understood ({problem}); check HF_ENDPOINT and the "
        "proxy, or try again later",
        code="hub.wrong_answer",
    )


def parsed(response: Any, where: str) -> dict[str, Any]:
    """Parse an answer of the hub that is a JSON object; `watching` or a `Hub` has bounded it.

    Raises: HubError(code="hub.wrong_answer") for anything else.
    """
    try:
        data = response.json()
    except ValueError:
        data = None
    if not isinstance(data, dict):
        _wrong_answer(where, "it is no JSON object")
    return data


@contextlib.contextmanager
def understood(where: str) -> Iterator[None]:
    """Refuse an answer on which the code that reads it fails, as it has another shape.

    Raises: HubError(code="hub.wrong_answer").
    """
    try:
        yield
        return
    except (AttributeError, IndexError, KeyError, TypeError, RecursionError) as error:
        problem = type(error).__name__
    _wrong_answer(where, problem)  # outside, so that a traceback does not quote the server


# --- one call ------------------------------------------------------------------------------------


class Watch:
    """Record of huggingface_hub's requests during one call.

    Args:
        stores: hosts that are known to send the hub's large files.
        thread: whose requests are watched; None for all.
        noun: of who answers, for messages.
    Attributes:
        fault: the last one, also where a library caught it and went on with something else.
        etag: of the last file that was asked for.
    """

    def __init__(
        self, stores: Iterable[str] = (), *, thread: int | None = None, noun: str = "the hub"
    ) -> None:
        self._noun = noun
        self.fault: Fault | None = None
        self.etag: str | None = None
        self._refused: Any = None
        self._stores = set(stores)
        self._thread = thread
        self._starts: Counter[tuple[str, str]] = Counter()

    def sees(self, thread: int) -> bool:
        """True if requests of this thread are watched."""
        return self._thread in (None, thread)

    def send(self, send: Callable[..., Any], request: Any, **options: Any) -> Any:
        """Send a request. Raises: Fault at once for a failure that may pass."""
        if not self._is_known(request):
            return send(request, **options)
        self._count_resumes(request)
        try:
            response = send(request, **options)
        except httpx.TransportError as error:
            if isinstance(error, _DEFINITE):
                raise
            absent = isinstance(error, _UNREACHABLE)
            fault = Fault(
                _unreachable(error, self._noun), unreachable=absent, code="hub.unreachable"
            )
        else:
            judged = self._judge(request, response)
            if judged is None:
                return response
            response.close()
            fault = judged
        fault.request = f"{request.method} {request.url.path}"
        raise self._failed(fault)  # outside, so that no traceback quotes the request

    def refusal(self) -> Exception | None:
        """The client's error for the last definite refusal; it may have gone on with a copy."""
        if self._refused is None:
            return None
        try:
            hf_raise_for_status(self._refused)
        except HfHubHTTPError as error:
            return error
        return None

    def _failed(self, fault: Fault) -> Fault:
        self.fault = fault
        return fault

    def _count_resumes(self, request: Any) -> None:
        """Bound how often a cut download begins again at the same byte: one second each time."""
        if request.method != "GET" or "/api/" in request.url.path:
            return
        key = (str(request.url), request.headers.get("range", ""))
        self._starts[key] += 1
        if self._starts[key] > 1 + RESUMES:
            raise self._failed(Fault("the connection is cut again and again"))

    def _is_known(self, request: Any) -> bool:
        # a hub that sends its small files from another address of its own is among the stores
        known = request.url.host in self._stores or str(request.url).startswith(constants.ENDPOINT)
        return known and not any(part in request.url.path for part in _ASIDES)

    def _judge(self, request: Any, response: Any) -> Fault | None:
        status, code = response.status_code, response.headers.get("x-error-code")
        is_file = "/resolve/" in request.url.path
        if is_file and response.headers.get("location"):
            self._stores.add(urlsplit(response.headers["location"]).hostname or request.url.host)
        if is_file and status < 400:
            etag = response.headers.get("x-linked-etag") or response.headers.get("etag") or ""
            self.etag = etag.removeprefix("W/").strip('"') or self.etag
        if status in (408, 425, 429) or status >= 500:  # which may pass
            return Fault(_answered(response, noun=self._noun), seconds=_asked(response))
        is_store = not is_file and not str(request.url).startswith(constants.ENDPOINT)
        if is_store and request.method == "GET":  # its signed addresses expire
            return Fault(f"the file store answered {status}") if 400 <= status != 416 else None
        if status in (401, 403) or code in ("RepoNotFound", "GatedRepo"):
            self._refused = response
        return None


_watches: list[Watch] = []
_one_at_a_time = threading.RLock()


@contextlib.contextmanager
def watching(*, everywhere: bool = False) -> Iterator[Watch]:
    """Watch the client's requests, so that it neither waits nor gives up by itself.

    Args:
        everywhere: those of every thread, not of this one only: `datasets` has helpers.
    """
    if _http._GLOBAL_CLIENT_FACTORY is _http.default_client_factory:  # else the program's own
        set_client_factory(_Client)
    watch = Watch(thread=None if everywhere else threading.get_ident())
    # its warnings quote signed addresses; one notice of ours says that it is tried again
    logger = logging.getLogger("huggingface_hub.file_download")
    with _one_at_a_time:
        _watches.append(watch)
        logger.addFilter(_is_no_retry)
        try:
            yield watch
        finally:
            _watches.remove(watch)
            logger.removeFilter(_is_no_retry)


def _is_no_retry(record: logging.LogRecord) -> bool:
    return "Error while downloading" not in str(record.msg)


def _asked(response: Any) -> float | None:
    """Seconds that a server asks to be left alone, in either of its two ways."""
    headers = response.headers
    if str(headers.get("retry-after", "")).strip().isdigit():
        return float(headers["retry-after"])
    window = re.search(r"\br\s*=\s*0\b.*?\bt\s*=\s*(\d+)", str(headers.get("ratelimit", "")))
    return float(window[1]) if window else None


# --- the policy ----------------------------------------------------------------------------------


def retried(where: str, call: Callable[[], T], *, has_copy: bool = False) -> T:
    """Call until it works, within bounds; the first fault is told, and those after a long wait.

    A call may be of many requests. Each may fail a few times.

    Args:
        where: the thing that is read or written, for the notice.
        call: raises Fault for what may pass.
        has_copy: there is something to go on with: where nobody answers, do not insist.
    Raises: the last Fault; whatever else `call` raises.
    """
    told = time.monotonic()
    failures: Counter[str] = Counter()
    while True:
        try:
            return call()
        except Fault as fault:
            failures[fault.request] += 1
            fault.tries = failures[fault.request]
            few = 1 if has_copy else TRIES_UNREACHABLE
            if fault.tries >= (few if fault.unreachable else TRIES):
                raise
            seconds = FIRST_WAIT_SECONDS * 2 ** (fault.tries - 1)
            seconds = seconds if fault.seconds is None else fault.seconds
            seconds = min(seconds, LONGEST_WAIT_SECONDS)
            notice = f"{where}: {fault}; trying again"
            if seconds + time.monotonic() - told < NOTICE_SECONDS:
                say_once(notice)
            elif is_first_rank():
                told = time.monotonic()
                say(f"{notice} in {seconds:.0f} s")
            time.sleep(seconds)


def say_once(text: str) -> None:
    """Tell something once per process, and on the first rank only."""
    if text not in _said and is_first_rank():
        say(text)
    _said.add(text)


_said: set[str] = set()


# --- wording -------------------------------------------------------------------------------------


def clean(text: str, token: str | None) -> str:
    """Make somebody else's text fit for a message: one line, bounded, without tokens.

    A server's answer may echo the request's headers. Advice to read objects that could run code is
    never passed on.
    """
    if _ADVICE.search(text):
        return "it holds Python objects or code, which are not read, since they could do anything"
    text = text.replace(token, "***") if token else text
    text = re.sub(r"(?i)\bbearer\s+[^\s'\",}]+", "Bearer ***", text)
    text = " ".join(re.sub(r"\bhf_[A-Za-z0-9]{8,}", "***", text).split())
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 3] + "..."


def status_of(error: BaseException) -> int | None:
    """The HTTP status that an error of the client carries, if any."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _unreachable(error: BaseException, noun: str = "the hub") -> str:
    text = f"{type(error).__name__}: {error}"
    return f"{noun} cannot be reached ({clean(text, get_token()).rstrip(': ')})"


def _answered(response: Any, detail: str | None = None, noun: str = "the hub") -> str:
    """Name the status of an answer, with the server's words where it has any."""
    words = detail or response.headers.get("x-error-message") or response.reason_phrase
    words = clean(str(words), get_token())
    return f"{noun} answered {response.status_code}{f' ({words})' if words else ''}"


def described(error: BaseException) -> tuple[str, str]:
    """Say in one line without a token what went wrong. Returns: the line and its code."""
    response = getattr(error, "response", None)
    if isinstance(error, httpx.TooManyRedirects):
        return "the hub leads from one address to another without an end", "hub.wrong_answer"
    if response is None:
        return _unreachable(error), "hub.unreachable"
    status = response.status_code
    code = "hub.forbidden" if status in (401, 403) else "hub.out_of_order"
    return _answered(response, getattr(error, "server_message", None)), code


def refusal(
    error: BaseException | None,
    where: str,
    revision: str | None,
    *,
    missing: type[FinetuneError],
    noun: str = "repository",
) -> FinetuneError | None:
    """The user's error for a definite answer of the hub; None for anything else.

    Args:
        missing: the kind of error for what is not there.
        noun: what the user calls a repository.
    """
    token = get_token()
    login = "check the rights of your token" if token else "log in with `hf auth login`"
    status = status_of(error) if error is not None else None
    not_found = f"{missing.code}.not_found"
    place = f"in {source}" if (source := token_source()).isupper() else f"of {source}"
    if isinstance(error, GatedRepoError):
        return HubError(
            f"{where}: access must be granted first; accept the terms on its page, then "
            f"`hf auth login`",
            code="hub.forbidden",
        )
    if isinstance(error, RevisionNotFoundError):
        return missing(
            f"{where}: no such revision; leave '@{revision}' away for the newest", code=not_found
        )
    if isinstance(error, RepositoryNotFoundError):
        return missing(
            f"{where}: no such {noun}, or it is private; check the name, or {login}",
            code=not_found,
        )
    if status == 401 and token:
        return HubError(
            f"{where}: the hub refuses the token {place} (401); make a new one and "
            f"`hf auth login`, or unset it for what is public",
            code="hub.forbidden",
        )
    if isinstance(error, (HfHubHTTPError, httpx.TooManyRedirects)):
        text, code = described(error)
        step = login if code == "hub.forbidden" else "check HF_ENDPOINT, or try again later"
        return HubError(f"{where}: {text}; {step}", code=code)
    return None


def token_source() -> str:
    """Name the place that the user's token comes from, for messages."""
    names = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
    return next((name for name in names if os.environ.get(name)), "the login")


def was_cut(error: BaseException | None) -> bool:
    """True if a connection broke, below what libraries made of it."""
    while error is not None:
        if isinstance(error, httpx.TransportError) and not isinstance(error, _DEFINITE):
            return True
        if "Consistency check failed" in str(error):  # fewer bytes, in the client's words
            return True
        error = error.__cause__ or error.__context__
    return False
