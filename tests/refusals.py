"""Refusals as tests look at them: by code and the things named, never by prose."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import pytest

from finetune import errors

__all__ = ["EXIT_CODES", "check_message", "refused"]

# of each family of errors; "usage" is the command line's own
EXIT_CODES = {kind.code: kind.exit_code for kind in errors.FinetuneError.__subclasses__()}
EXIT_CODES["usage"] = 2
MOST_LINES = 12  # a recipe may have many problems, and each has its line
MOST_CHARACTERS = 2000
# What a next step begins with, in the messages of every part of the package.
NEXT = re.compile(
    r"\b(expected|did you mean|see|give|use|name|write|choose|check|try|run|remove|keep|save|set|"
    r"put|get|download|convert|make|train|mend|fill|move|add|quote|fetch|known|there is|missing|"
    r"look at|lower|fit one|leave|again with|measure|requires an argument|"
    r"stop|mount|correct|rename|take|connect|copy|shorten|edit|replace|log|ask|install|raise|"
    r"fine-tune|needs|must|continue|indent|undo|hold|ends|point|accelerate launch)\b",
    re.IGNORECASE,
)


def check_message(text: str) -> None:
    """Look at the shape of a message: short, for people, with something that they can do."""
    assert text.strip()
    assert not re.search(r"Traceback|internal error|0x[0-9a-f]{8,}|<class |object at ", text), text
    assert len(text.splitlines()) <= MOST_LINES, text
    assert len(text) <= MOST_CHARACTERS, text
    assert NEXT.search(text), text


@contextlib.contextmanager
def refused(code: str, *named: object) -> Iterator[pytest.ExceptionInfo[errors.FinetuneError]]:
    """Expect one error of ours, with this code and the exit code of its kind.

    Args:
        code: such as "weights.truncated".
        named: what the message must name: a file, a key, a number, a command.
    """
    with pytest.raises(errors.FinetuneError) as caught:
        yield caught
    error = caught.value
    assert error.code == code, f"{error.code}: {error}"
    for name in named:
        assert str(name) in str(error), f"{name} is not named in: {error}"
    check_message(str(error))
