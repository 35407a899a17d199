"""Handle closed or unbuffered standard streams, and errors when writing standard output."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator

from finetune.errors import SetupError

__all__ = ["buffer_stdout", "discard_stdout", "open_closed_streams", "stdout_errors"]


def open_closed_streams() -> None:
    """Connect closed standard streams to /dev/null.

    Otherwise the next opened file gets the descriptor of the stream, and library output ends up in
    that file.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free file descriptor
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


def buffer_stdout() -> None:
    """Buffer standard output even if PYTHONUNBUFFERED is set, so that results are complete.

    Without a buffer, Python drops the rest of a text after a partial write: on a pipe whose reader
    exits, or on an almost full disk.
    """
    if isinstance(getattr(sys.stdout, "buffer", None), io.RawIOBase):
        number, encoding = sys.stdout.fileno(), sys.stdout.encoding
        sys.stdout = open(number, "w", encoding=encoding, closefd=False)  # noqa: SIM115


@contextlib.contextmanager
def stdout_errors() -> Iterator[None]:
    """Raise SetupError if standard output cannot be written; BrokenPipeError passes through."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        discard_stdout()
        raise SetupError(
            f"cannot write to standard output ({error.strerror}); redirect it elsewhere",
            code="setup.not_writable",
        ) from error


def discard_stdout() -> None:
    """Send the rest of standard output to /dev/null, so that closing it does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
