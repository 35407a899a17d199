"""Logging: the `finetune` logger, the handler that prints its messages, and warnings logged once.

A program that imports finetune controls the messages with the standard module:

    logging.getLogger("finetune").setLevel(logging.ERROR)  # silence; this also hides progress bars
    logging.getLogger("finetune").addHandler(handler)  # capture or redirect
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

from tqdm import tqdm

from finetune.errors import escape_control_chars, redact_secrets
from finetune.ranks import is_main_process

__all__ = [
    "collect_warnings",
    "logger",
    "only_warnings",
    "print_messages",
    "quiet",
    "redact_record",
    "redirect_closed_terminal",
    "warn_once",
]

logger = logging.getLogger("finetune")

_warned: set[str] = set()
# Warnings of a worker process, for the main process to log; None in the main process.
_collected: list[tuple[str, str | None]] | None = None


class _ConsoleHandler(logging.Handler):
    """Print each message on standard error, above the progress bar, on rank 0 only.

    Like `logging.lastResort`, it prints nothing once the program that imports finetune has a
    handler of its own. The command line always prints: it sets `always`.
    """

    always = False

    def emit(self, record: logging.LogRecord) -> None:
        others = [handler for handler in logger.handlers if handler is not self]
        if logger.propagate:
            others += logging.getLogger().handlers
        if (others and not self.always) or not is_main_process():
            return
        try:
            tqdm.write(f"finetune: {escape_control_chars(self.format(record))}", file=sys.stderr)
        except OSError:
            if not redirect_closed_terminal():
                raise


def redact_record(record: logging.LogRecord) -> bool:
    """Redact secrets in a log record, for `addFilter`. Returns: True, to keep the record."""
    record.msg, record.args = redact_secrets(record.getMessage()), ()
    return True


_console = _ConsoleHandler()
logger.addHandler(_console)
logger.addFilter(redact_record)
if logger.level == logging.NOTSET:  # the importing program may have set a level before
    logger.setLevel(logging.INFO)


def print_messages() -> None:
    """Print messages on standard error even if other handlers exist; the command line calls it."""
    _console.always = True


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Log errors only, and show no progress bars, inside the block."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def only_warnings(seen: set[str] | None = None) -> Iterator[None]:
    """Inside the block, log only warnings and errors; progress bars are still shown.

    Args:
        seen: warnings that are not logged again; those of the block are added. None to log all.
    """

    def is_wanted(record: logging.LogRecord) -> bool:
        if seen is None or record.levelno < logging.WARNING:
            return record.levelno >= logging.WARNING
        is_new = record.getMessage() not in seen
        seen.add(record.getMessage())
        return is_new

    logger.addFilter(is_wanted)
    try:
        yield
    finally:
        logger.removeFilter(is_wanted)


def warn_once(message: str, *, key: str | None = None) -> None:
    """Log a warning once per process.

    Args:
        message: text of the warning.
        key: identifier of the warning: of several warnings with one key, only the first is logged.
            None for the message itself.
    """
    if (key or message) in _warned or not logger.isEnabledFor(logging.WARNING):
        return
    _warned.add(key or message)
    if _collected is None:
        logger.warning(message)
    else:
        _collected.append((message, key))


def collect_warnings() -> list[tuple[str, str | None]]:
    """Collect the warnings of this worker process from now on instead of logging them.

    Returns: the warnings since the last call, as (message, key); the main process passes them to
        its own `warn_once`.
    """
    global _collected
    collected, _collected = _collected or [], []
    return collected


def redirect_closed_terminal() -> bool:
    """Send further output to /dev/null if the terminal was closed, because writing would fail.

    Returns: True if the terminal was closed.
    """
    was_closed = False
    for number in (1, 2):
        try:
            os.write(number, b"")
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            was_closed = True
    return was_closed
