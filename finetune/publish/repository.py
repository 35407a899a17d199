"""One repository of the hub to write to: each call within the bounds of `hub/client.py`."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from huggingface_hub import HfApi, get_token, is_offline_mode
from huggingface_hub.errors import HfHubHTTPError

from finetune.errors import FinetuneError, HubError
from finetune.hub.client import (
    Fault,
    described,
    httpx,
    retried,
    say_once,
    token_source,
    understood,
    watching,
)

__all__ = ["Hub"]

# such as for HF_ENDPOINT=nonsense
_UNSENDABLE = (httpx.HTTPError, httpx.InvalidURL, UnicodeError)

T = TypeVar("T")


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
        if is_offline_mode():
            raise HubError(
                f"{repository}: HF_HUB_OFFLINE is set, so that nothing can be pushed; unset it, or "
                "push later",
                code="hub.offline",
            )
        self.token = get_token()
        if self.token is None:
            raise HubError(
                f"{repository}: no token for the hub; log in with `hf auth login`, or set HF_TOKEN "
                "to a token with write rights",
                code="hub.no_token",
            )
        self.api = HfApi(token=self.token, library_name="finetune")
        self.token_source = token_source()

    def call(self, doing: str, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """Call the hub, again and again within bounds while it is out of order.

        Args:
            doing: what for, for the message: "reading the repository".
            function: of the client; `args` and `options` are its own.
        Returns: its answer.
        Raises: HubError when every try met a fault; the client's own errors for definite answers.
        """
        try:
            return retried(self.repository, lambda: self.once(function, *args, **options))
        except Fault as fault:
            last = fault
        raise self.gave_up(doing, last)

    def once(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """Call the hub a single time.

        Raises: Fault if it may work another time; the client's own error otherwise.
        """
        failure: Exception
        with watching(everywhere=True), _brief_retries(self.repository):
            try:
                with understood(self.repository):
                    return function(*args, **options)
            except (Fault, FinetuneError):
                raise
            except Exception as error:
                kinds = (Fault, HfHubHTTPError, json.JSONDecodeError)
                cause = next((cause for cause in _causes(error) if isinstance(cause, kinds)), None)
                if cause is None:
                    raise
                failure = (
                    Fault(described(cause)[0]) if isinstance(cause, json.JSONDecodeError) else cause
                )
        raise failure  # outside, so that a traceback does not quote the server

    def failure(self, text: str, *, code: str = "hub.out_of_order") -> HubError:
        """Return an error that ends with what to do: the same command again."""
        after = f"nothing is lost, push again with: {self.again}" if self.again else "try again"
        message = f"{self.repository}: {text}; {after}".replace(str(self.token), "***")
        return HubError(message, code=code)

    def gave_up(self, doing: str, fault: Fault) -> HubError:
        """Return the error after the last try."""
        return self.failure(f"{doing} failed {fault.tries} times: {fault}", code=fault.code)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turn the client's definite errors into ours; theirs, which quote, are not chained."""
        try:
            yield
            return
        except FinetuneError:
            raise
        except Fault as fault:
            failure = self.failure(str(fault))
        except _UNSENDABLE as error:
            text, code = described(error)
            failure = self.failure(text, code=code)
        raise failure from None


@contextlib.contextmanager
def _brief_retries(repository: str) -> Iterator[None]:
    """Say once that huggingface_hub repeats an upload; its own log quotes signed addresses."""
    names = ("utils._http", "_commit_api", "hf_api")
    loggers = [logging.getLogger(f"huggingface_hub.{name}") for name in names]

    def shown(record: logging.LogRecord) -> bool:
        if record.name == loggers[0].name and record.levelno >= logging.WARNING:
            say_once(f"{repository}: the hub does not take the files yet; trying again")
        return False

    for logger in loggers:
        logger.addFilter(shown)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(shown)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
