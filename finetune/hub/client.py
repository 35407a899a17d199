"""Reading from the hub: tried again within bounds while it fails, each refusal in its own words.

The client waits for up to half a minute where nobody answers, and for as long as a busy server
asks; some faults it does not try again at all. Here it is watched for the length of one call: a
fault leaves it at once, and all reads have the same bounds.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from huggingface_hub import constants, get_session, get_token, hf_raise_for_status
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from finetune.console import say
from finetune.errors import FinetuneError, HubError
from finetune.hub.calls import clean, status_of

__all__ = ["Fault", "Watch", "checked", "refusal", "retried", "say_once", "was_cut", "watching"]

TRIES = 4
FIRST_WAIT_SECONDS = 0.5  # doubled each time
LONGEST_WAIT_SECONDS = 10.0  # whatever the hub asks for
RESUMES = 2  # of one download from the same byte

_PASSING_STATUS = (408, 425, 429, 500, 502, 503, 504)
# httpx's, by name: the client's own httpx changes its name with its version
_UNREACHABLE = {"ConnectError", "ConnectTimeout", "ProxyError", "PoolTimeout"}
_NEVER = {"UnsupportedProtocol", "LocalProtocolError", "InvalidURL"}

T = TypeVar("T")
# What the client asks besides, and can do without.
_ASIDES = ("-harnesses", "/api/telemetry")


class Fault(Exception):
    """Something that may pass: no connection, a cut one, or a server out of order."""

    def __init__(
        self, reason: str, *, seconds: float | None = None, unreachable: bool = False
    ) -> None:
        super().__init__(reason)
        self.seconds = seconds
        self.unreachable = unreachable


class Watch:
    """What was seen of the client's requests during one call.

    Attributes:
        fault: the last one, also where a library caught it and went on with something else.
        etag: of the last file that was asked for.

    Args:
        stores: hosts that are known to send the hub's large files.
    """

    def __init__(self, stores: Iterable[str] = ()) -> None:
        self.fault: Fault | None = None
        self._refused: Any = None
        self._stores = set(stores)  # where the hub sends its large files from
        self.etag: str | None = None
        self._begun: Counter[tuple[str, str]] = Counter()

    def failed(self, fault: Fault) -> Fault:
        """Remember a fault."""
        self.fault = fault
        return fault

    def send(self, send: Callable[..., Any], request: Any, **options: Any) -> Any:
        """Send a request as the client would, and let a fault out at once."""
        if not self._is_read(request):  # statistics, and what else the clients do without
            return send(request, **options)
        self._count_resumes(request)
        try:
            response = send(request, **options)
        except Exception as error:
            names = {kind.__name__ for kind in type(error).__mro__}
            if "TransportError" not in names or names & _NEVER:
                raise
            found = Fault(_words(error), unreachable=bool(names & _UNREACHABLE))
        else:
            fault = self._judge(request, response)
            if fault is None:
                return response
            response.close()
            found = fault
        raise self.failed(found)  # outside, so that no traceback quotes the request

    def _count_resumes(self, request: Any) -> None:
        """Bound how often a cut download begins again at the same byte: one second each time."""
        if request.method != "GET" or "/api/" in request.url.path:
            return
        key = (str(request.url), request.headers.get("range", ""))
        self._begun[key] += 1
        if self._begun[key] > 1 + RESUMES:
            raise self.failed(Fault("the connection is cut again and again"))

    def _is_read(self, request: Any) -> bool:
        # a hub that sends its small files from another address of its own is among the stores
        known = request.url.host in self._stores or str(request.url).startswith(constants.ENDPOINT)
        return known and not any(part in request.url.path for part in _ASIDES)

    def refusal(self) -> Exception | None:
        """The client's error for the last definite refusal; it may have gone on with a copy."""
        if self._refused is None:
            return None
        try:
            hf_raise_for_status(self._refused)
        except HfHubHTTPError as error:
            return error
        return None

    def _judge(self, request: Any, response: Any) -> Fault | None:
        status, code = response.status_code, response.headers.get("x-error-code")
        is_file = "/resolve/" in request.url.path
        if is_file and response.headers.get("location"):
            self._stores.add(urlsplit(response.headers["location"]).hostname or request.url.host)
        if is_file and status < 400:
            etag = response.headers.get("x-linked-etag") or response.headers.get("etag") or ""
            self.etag = etag.removeprefix("W/").strip('"') or self.etag
        if status in _PASSING_STATUS or (status >= 500 and is_file):
            return Fault(f"the hub answered {status}", seconds=_asked(response))
        if not is_file and "/api/" not in request.url.path:
            # the file store behind the hub: its signed addresses expire
            return Fault(f"the file store answered {status}") if 400 <= status != 416 else None
        if status in (401, 403) or code in ("RepoNotFound", "GatedRepo"):
            self._refused = response
        return None


@contextlib.contextmanager
def watching(*, everywhere: bool = False) -> Iterator[Watch]:
    """Watch the client's requests, and keep it from waiting by itself.

    Args:
        everywhere: those of every thread, not of this one only: `datasets` has helpers.
    """
    watch = Watch()
    # its warnings quote signed addresses; one notice of ours says that it is tried again
    logger = logging.getLogger("huggingface_hub.file_download")
    with _one_at_a_time:
        session = get_session()
        send, thread = session.send, threading.get_ident()

        def guarded(request: Any, **options: Any) -> Any:
            if not everywhere and threading.get_ident() != thread:
                return send(request, **options)
            return watch.send(send, request, **options)

        session.send = guarded  # type: ignore[method-assign]
        logger.addFilter(_is_no_retry)
        try:
            yield watch
        finally:
            del session.send
            logger.removeFilter(_is_no_retry)


_one_at_a_time = threading.RLock()


def _is_no_retry(record: logging.LogRecord) -> bool:
    return "Error while downloading" not in str(record.msg)


def retried(where: str, call: Callable[[], T], *, has_copy: bool = False) -> T:
    """Call until it works, within bounds; the first fault is told.

    Args:
        where: the thing that is read, for the notice.
        call: raises Fault for what may pass.
        has_copy: there is something to go on with: where nobody answers, do not insist.
    Raises: the last Fault; whatever else `call` raises.
    """
    for attempt in range(TRIES):
        try:
            return call()
        except Fault as fault:
            allowed = (1 if has_copy else 2) if fault.unreachable else TRIES
            if attempt + 1 >= allowed:
                raise
            seconds = FIRST_WAIT_SECONDS * 2**attempt if fault.seconds is None else fault.seconds
            say_once(f"{where}: {fault}; trying again")
            time.sleep(min(seconds, LONGEST_WAIT_SECONDS))
    raise AssertionError("the last try returns or raises")


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
        error: the client's.
        where: the thing that was asked for.
        revision: as the user gave it.
        missing: the kind of error for what is not there.
        noun: what the user calls a repository.
    """
    token = get_token()
    login = "check the rights of your token" if token else "log in with `hf auth login`"
    status = status_of(error) if error is not None else None
    if isinstance(error, GatedRepoError):
        return HubError(
            f"{where}: access must be granted first; accept the terms on its page, then "
            f"`hf auth login`"
        )
    if isinstance(error, RevisionNotFoundError):
        return missing(f"{where}: no such revision; leave '@{revision}' away for the newest")
    if isinstance(error, RepositoryNotFoundError):
        return missing(f"{where}: no such {noun}, or it is private; check the name, or {login}")
    if status == 401 and token:
        return HubError(
            f"{where}: the hub refuses the token {_token_place()} (401); make a new one and "
            f"`hf auth login`, or unset it for what is public"
        )
    if status is not None and error is not None:
        detail = clean(str(getattr(error, "server_message", None) or ""), token)
        return HubError(
            f"{where}: the hub answered {status}{f' ({detail})' if detail else ''}; "
            + (login if status in (401, 403) else "check HF_ENDPOINT, or try again later")
        )
    return None


def _token_place() -> str:
    names = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
    found = next((name for name in names if os.environ.get(name)), None)
    return f"in {found}" if found else "of the login"


def say_once(text: str) -> None:
    """Tell something once per process, and on the first rank only."""
    if text not in _said and os.environ.get("RANK", "0") == "0":
        say(text)
    _said.add(text)


_said: set[str] = set()


def was_cut(error: BaseException | None) -> bool:
    """Whether a connection that broke lies behind an error, below what libraries made of it."""
    while error is not None:
        names = {kind.__name__ for kind in type(error).__mro__}
        if "TransportError" in names and not names & _NEVER:
            return True
        if "Consistency check failed" in str(error):  # fewer bytes, in the client's words
            return True
        error = error.__cause__ or error.__context__
    return False


def checked(path: Path, etag: str | None = None) -> str | None:
    """Compare a file's bytes with the hub's name for them, which its copy in the cache bears.

    Args:
        path: the link in a snapshot, or the file itself where the system has no links.
        etag: the hub's name for it, for the latter.
    Returns: its sha256; "" when the name is not a sha256; None when the bytes are others.
    """
    name = Path(os.readlink(path)).name if path.is_symlink() else etag or ""
    if re.fullmatch(r"[0-9a-f]{64}", name):
        digest, sha256 = hashlib.sha256(), True
    elif re.fullmatch(r"[0-9a-f]{40}", name):  # git's name for it
        digest, sha256 = hashlib.sha1(b"blob %d\0" % path.stat().st_size), False
    else:
        return ""
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    if digest.hexdigest() != name:
        return None
    return name if sha256 else ""


def _words(error: Exception) -> str:
    detail = clean(str(error), get_token())
    kind = type(error).__name__
    return f"the hub cannot be reached ({detail or kind})"


def _asked(response: Any) -> float | None:
    """Seconds that a server asks to be left alone."""
    asked = str(response.headers.get("retry-after", "")).strip()
    return float(asked) if asked.isdigit() else None
