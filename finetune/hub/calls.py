"""Calls to the hub: tried again when it is out of order, and never with a token in their errors.

The client retries its downloads and uploads by itself, but neither `whoami`, nor creating a
repository, nor the check of a card, nor a commit. Here every call has the same bounds.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from huggingface_hub import HfApi, get_session, get_token, is_offline_mode
from huggingface_hub.errors import HfHubHTTPError

from finetune.console import say
from finetune.errors import FinetuneError, HubError

__all__ = ["Fault", "Hub", "clean", "status_of"]

TRIES = 5
FIRST_WAIT_SECONDS = 1.0  # doubled each time
LONGEST_WAIT_SECONDS = 60.0  # whatever the hub asks for
ANSWER_SECONDS = 120.0  # the client itself would wait for ever

_CLIENT_LOGGERS = tuple(
    f"huggingface_hub.{name}" for name in ("utils._http", "_commit_api", "hf_api")
)
_LONGEST_REASON = 300  # characters
# where a library refuses pickled objects, it goes on to say how to read them all the same
_ADVICE = re.compile(r"weights.only|allow_pickle|trust_remote_code", re.IGNORECASE)
# httpx's and the json module's, by name: the client's own httpx changes its name with its version
_PASSING = {"TransportError", "JSONDecodeError"}
_LASTING = {"UnsupportedProtocol", "LocalProtocolError"}
_UNSENDABLE = {"HTTPError", "InvalidURL", "UnicodeError"}  # such as for HF_ENDPOINT=nonsense

T = TypeVar("T")


class Fault(Exception):
    """A call failed in a way that may pass; `seconds` is how long the hub asks to be left alone."""

    def __init__(self, reason: str, seconds: float | None = None) -> None:
        super().__init__(reason)
        self.seconds = seconds


def clean(text: str, token: str | None) -> str:
    """Make somebody else's text fit for a message: one line, bounded, without tokens.

    Args:
        text: such as the answer of a server, which may echo the request's headers.
        token: the user's.
    Returns: at most a few hundred characters; never advice to read objects that could run code.
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


class Hub:
    """One repository on the hub, seen with the user's own token."""

    def __init__(self, repository: str, *, again: str = "") -> None:
        """Take the token of the environment or the login.

        Args:
            repository: owner/name.
            again: the command that does the same again, for the messages.
        Raises: HubError if the hub is set offline, or if there is no token.
        """
        self.repository = repository
        self.again = again
        self.plain = False  # whether Xet is left out
        if is_offline_mode():
            raise HubError(
                f"{repository}: HF_HUB_OFFLINE is set, so that nothing can be pushed; unset it, or "
                "push later"
            )
        self.token = get_token()
        if self.token is None:
            raise HubError(
                f"{repository}: no token for the hub; log in with `hf auth login`, or set HF_TOKEN "
                "to a token with write rights"
            )
        self.api = HfApi(token=self.token, library_name="finetune")
        self._has_told = False

    @property
    def token_source(self) -> str:
        """Where the token comes from, for messages."""
        names = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
        return next((name for name in names if os.environ.get(name)), "the login")

    def call(
        self, doing: str, function: Callable[..., T], *args: Any, tries: int = 0, **options: Any
    ) -> T:
        """Call the hub, again and again within bounds while it is out of order.

        Args:
            doing: what for, for the message: "reading the repository".
            function: of the client; `args` and `options` are its own.
            tries: how often; 0 is the usual number.
        Returns: its answer.
        Raises: HubError when every try met a fault; the client's own errors for definite answers.
        """
        tries = tries or TRIES
        for attempt in range(tries):
            try:
                return self.once(function, *args, **options)
            except Fault as fault:
                last = fault
            if attempt + 1 < tries:
                self.wait(attempt, last)
        raise self.gave_up(doing, last, tries)

    def once(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """Call the hub a single time.

        Raises: Fault if it may work another time; the client's own error otherwise.
        """
        session = get_session()
        patience, session.timeout = session.timeout, ANSWER_SECONDS
        session.send = _soon(session.send)  # type: ignore[method-assign]
        failure: Exception
        try:
            with self._client_told_briefly():
                return function(*args, **options)
        except Exception as error:
            causes = list(_causes(error))
            passing = next((cause for cause in causes if _may_pass(cause)), None)
            answers = [cause for cause in causes if isinstance(cause, HfHubHTTPError)]
            if passing is None and not answers:
                raise
            failure = Fault(self.reason(passing), _asked(passing)) if passing else answers[0]
        finally:
            session.timeout = patience
            del session.send
        raise failure  # outside, so that a traceback does not quote the server

    def wait(self, attempt: int, fault: Fault) -> None:
        """Leave the hub alone for a while, and say so the first time."""
        self._tell(str(fault))
        seconds = FIRST_WAIT_SECONDS * 2**attempt if fault.seconds is None else fault.seconds
        time.sleep(min(seconds, LONGEST_WAIT_SECONDS))

    def _tell(self, reason: str) -> None:
        if not self._has_told:
            self._has_told = True
            say(f"{self.repository}: {reason}; trying again")

    @contextlib.contextmanager
    def _client_told_briefly(self) -> Iterator[None]:
        """One notice of ours for the client's own retries: its log quotes signed addresses."""

        def told(record: logging.LogRecord) -> bool:
            if record.name == _CLIENT_LOGGERS[0] and record.levelno >= logging.WARNING:
                self._tell("the hub does not take the files yet")
            return False

        loggers = [logging.getLogger(name) for name in _CLIENT_LOGGERS]
        for logger in loggers:
            logger.addFilter(told)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeFilter(told)

    def reason(self, error: BaseException) -> str:
        """What went wrong, in one line without a token."""
        status = status_of(error)
        if status is None:
            text = f"{type(error).__name__}: {error}"
            return f"the hub cannot be reached ({clean(text, self.token).rstrip(': ')})"
        detail = getattr(error, "server_message", None) or getattr(
            getattr(error, "response", None), "reason_phrase", ""
        )
        return f"the hub answered {status} ({clean(str(detail), self.token)})"

    def failure(self, text: str) -> HubError:
        """An error that ends with what to do: the same command again."""
        after = f"nothing is lost, push again with: {self.again}" if self.again else "try again"
        return HubError(f"{self.repository}: {text}; {after}".replace(str(self.token), "***"))

    def gave_up(self, doing: str, fault: Fault, tries: int) -> HubError:
        """The error after the last try."""
        return self.failure(f"{doing} failed {tries} times: {fault}")

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turn the client's definite errors into ours; theirs, which quote, are not chained."""
        try:
            yield
            return
        except FinetuneError:
            raise
        except Fault as fault:
            text = str(fault)
        except Exception as error:
            names = {kind.__name__ for kind in type(error).__mro__}
            if status_of(error) is None and not names & _UNSENDABLE:
                raise
            text = self.reason(error)
        raise self.failure(text) from None


def _soon(send: Callable[..., Any]) -> Callable[..., Any]:
    """Bound what a hub asks for: the client would wait for an hour, or a day, as it is told."""

    def bounded(request: Any, **options: Any) -> Any:
        response = send(request, **options)
        if (_asked_by(response) or 0.0) > LONGEST_WAIT_SECONDS:
            response.headers["retry-after"] = f"{LONGEST_WAIT_SECONDS:.0f}"
            response.headers.pop("ratelimit", None)
        return response

    return bounded


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _may_pass(error: BaseException) -> bool:
    status = status_of(error)
    if status is not None:
        return status in (408, 425, 429) or status >= 500
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & _PASSING) and not names & _LASTING


def _asked(error: BaseException) -> float | None:
    """Seconds that the server behind an error asks for."""
    return _asked_by(getattr(error, "response", None))


def _asked_by(response: Any) -> float | None:
    """Seconds that a server asks for, in either of its two ways."""
    headers = getattr(response, "headers", {})
    if str(headers.get("retry-after", "")).strip().isdigit():
        return float(headers["retry-after"])
    window = re.search(r"\br\s*=\s*0\b.*?\bt\s*=\s*(\d+)", str(headers.get("ratelimit", "")))
    return float(window[1]) if window else None
