"""The messages that finetune logs, for tests."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from finetune import log
from finetune.log import logger

__all__ = ["forget_warnings", "logged", "logging_nothing"]


def forget_warnings() -> None:
    """Let every warning be logged again, as in a new process."""
    log._warned.clear()


@contextlib.contextmanager
def logged(messages: list[str] | None = None) -> Iterator[list[str]]:
    """Collect the messages that finetune logs meanwhile, in a list of the caller's if given."""
    messages = [] if messages is None else messages

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    collector = Collector()
    logger.addHandler(collector)
    try:
        yield messages
    finally:
        logger.removeHandler(collector)


@contextlib.contextmanager
def logging_nothing() -> Iterator[None]:
    """Fail if finetune logs anything meanwhile."""
    with logged() as messages:
        yield
    assert messages == []
