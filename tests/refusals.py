"""Check errors by their code and by the things they name, never by their wording."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import pytest

from finetune import errors

__all__ = ["EXIT_CODES", "check_message", "refused"]

# Exit code of each error family; "usage" is for errors of the command line itself.
EXIT_CODES = {
    error_class.code: error_class.exit_code for error_class in errors.FinetuneError.__subclasses__()
}
EXIT_CODES["usage"] = 2
MAX_LINES = 12  # a recipe may have many problems, one a line
MAX_CHARACTERS = 2000
# `<what>: <cause>; <fix>`: at least two parts. A message without a fix names what is expected.
SEPARATOR = re.compile(r"\S[:;?] \S")


def check_message(text: str) -> None:
    """Check the form of a message: short, in separate parts, with no traceback or Python object."""
    assert text.strip()
    assert not re.search(r"Traceback|internal error|0x[0-9a-f]{8,}|<class |object at ", text), text
    assert len(text.splitlines()) <= MAX_LINES, text
    assert len(text) <= MAX_CHARACTERS, text
    assert SEPARATOR.search(text), text


@contextlib.contextmanager
def refused(code: str, *named: object) -> Iterator[pytest.ExceptionInfo[errors.FinetuneError]]:
    """Expect one FinetuneError with this code, and check its message.

    Args:
        code: the error code, such as "weights.truncated".
        named: texts the message must contain: a file, a key, a number, a command.
    """
    with pytest.raises(errors.FinetuneError) as caught:
        yield caught
    error = caught.value
    assert error.code == code, f"{error.code}: {error}"
    for value in named:
        assert str(value) in str(error), f"{value} is not named in: {error}"
    check_message(str(error))
