"""Client for the Hub repository that a push writes to, with the retries of `hub/client.py`."""

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
    TransientHubError,
    describe_error,
    expect_json,
    httpx,
    monitor_requests,
    retry,
    token_source,
)
from finetune.log import warn_once

__all__ = ["RepoClient"]

# includes requests that cannot be sent at all, for example with HF_ENDPOINT=nonsense
_REQUEST_ERRORS = (httpx.HTTPError, httpx.InvalidURL, UnicodeError)

T = TypeVar("T")


class RepoClient:
    """Client for one repository on the Hugging Face Hub, with the user's token."""

    def __init__(self, repository: str, *, retry_command: str = "") -> None:
        """Read the token from the environment or the login.

        Args:
            repository: owner/name.
            retry_command: the command that repeats the push, for error messages.
        Raises: HubError in offline mode or without a token.
        """
        self.repository = repository
        self.retry_command = retry_command
        if is_offline_mode():
            raise HubError(
                f"{repository}: HF_HUB_OFFLINE is set, so nothing can be pushed; unset it, or "
                "push later",
                code="hub.offline",
            )
        self.token = get_token()
        if self.token is None:
            raise HubError(
                f"{repository}: no token for the hub; log in with `hf auth login`, or set HF_TOKEN "
                "to a token with write permission",
                code="hub.no_token",
            )
        self.api = HfApi(token=self.token, library_name="finetune")
        self.token_source = token_source()

    def call_with_retries(
        self, action: str, function: Callable[..., T], *args: Any, **options: Any
    ) -> T:
        """Call a function of the Hub client, with a limited number of retries on temporary errors.

        Args:
            action: what the call does, for error messages, such as "reading the repository".
            function: the function, called with `args` and `options`.
        Returns: the result of the function.
        Raises: HubError if every try failed; the client's own exception for a permanent error.
        """
        try:
            return retry(self.repository, lambda: self.call_once(function, *args, **options))
        except TransientHubError as fault:
            last = fault
        raise self.retries_exhausted_error(action, last)

    def call_once(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """Call a function of the Hub client once.

        Raises: TransientHubError if a retry may succeed; else the client's own exception.
        """
        failure: Exception
        with monitor_requests(all_threads=True), _quiet_client_retries(self.repository):
            try:
                with expect_json(self.repository):
                    return function(*args, **options)
            except (TransientHubError, FinetuneError):
                raise
            except Exception as error:
                kinds = (TransientHubError, HfHubHTTPError, json.JSONDecodeError)
                cause = next(
                    (cause for cause in _cause_chain(error) if isinstance(cause, kinds)), None
                )
                if cause is None:
                    raise
                failure = (
                    TransientHubError(describe_error(cause)[0])
                    if isinstance(cause, json.JSONDecodeError)
                    else cause
                )
        raise failure  # outside `except`, so the error is not chained and shows no server response

    def error_with_retry_command(self, text: str, *, code: str = "hub.out_of_order") -> HubError:
        """Return an error whose message ends with the command that repeats the push."""
        after = (
            f"nothing is lost, push again with: {self.retry_command}"
            if self.retry_command
            else "try again"
        )
        message = f"{self.repository}: {text}; {after}".replace(str(self.token), "***")
        return HubError(message, code=code)

    def retries_exhausted_error(self, action: str, fault: TransientHubError) -> HubError:
        """Return the error to raise after the last try has failed."""
        return self.error_with_retry_command(
            f"{action} failed {fault.num_tries} times: {fault}", code=fault.code
        )

    @contextlib.contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Re-raise Hub client errors as HubError, `from None`: they contain server responses."""
        try:
            yield
            return
        except FinetuneError:
            raise
        except TransientHubError as fault:
            failure = self.error_with_retry_command(str(fault))
        except _REQUEST_ERRORS as error:
            text, code = describe_error(error)
            failure = self.error_with_retry_command(text, code=code)
        raise failure from None


@contextlib.contextmanager
def _quiet_client_retries(repository: str) -> Iterator[None]:
    """Log retries of huggingface_hub once, in our words: its messages contain signed URLs."""
    names = ("utils._http", "_commit_api", "hf_api")
    loggers = [logging.getLogger(f"huggingface_hub.{name}") for name in names]

    def shown(record: logging.LogRecord) -> bool:
        if record.name == loggers[0].name and record.levelno >= logging.WARNING:
            warn_once(f"{repository}: the hub does not accept the files yet; trying again")
        return False

    for logger in loggers:
        logger.addFilter(shown)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(shown)


def _cause_chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
