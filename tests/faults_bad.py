"""What every bad input must come to: the right exit code, one short message, and nothing lost."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from refusals import check_message

from finetune.cli import main as cli

__all__ = ["PROMISE", "Bad", "Content", "check_message", "parametrised", "refuse"]

PROMISE = "one short message with a next step, the right exit code, nothing lost, no traceback"
PATIENCE_SECONDS = 120
Content = str | bytes | Callable[[Path], object]


@dataclass(frozen=True)
class Bad:
    """One bad input.

    Attributes:
        words: the command line behind `finetune`.
        code: the exit code.
        said: a part of the message.
        files: name to content, or to what makes it, in the working directory.
        leaves: a folder that may appear, such as the directory of a run that had begun.
    """

    words: str | list[str]
    code: int
    said: str
    files: Mapping[str, Content] = field(default_factory=dict)
    leaves: str | None = None


def parametrised(cases: Mapping[str, Bad]) -> Any:
    """Make a test of each case, called after it."""
    assert cases
    return pytest.mark.parametrize("bad", cases.values(), ids=list(cases))


def write_files(files: Mapping[str, Content]) -> None:
    """Write the files of a case into the working directory."""
    for name, content in files.items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.write_text(content, encoding="utf-8")
        elif isinstance(content, bytes):
            path.write_bytes(content)
        else:
            content(path)


def tree(top: Path) -> dict[str, str]:
    """Every file below a folder with a checksum, every folder and link with its kind."""
    found = {}
    for parent, folders, files in os.walk(top):
        for name in (*folders, *files):
            path = os.path.join(parent, name)
            if os.path.islink(path):
                found[path] = f"link {os.readlink(path)}"
            elif os.path.isfile(path):
                found[path] = sha256(Path(path).read_bytes()).hexdigest()
            else:
                found[path] = "folder or pipe"
    return found


def refuse(bad: Bad) -> str:
    """Carry out a case in the working directory and look at all that is promised.

    Returns: what was said on standard error.
    """
    write_files(bad.files)
    here = Path.cwd()
    signal.signal(signal.SIGALRM, _give_up)
    before = tree(here)
    words = shlex.split(bad.words) if isinstance(bad.words, str) else bad.words
    out, err = io.StringIO(), io.StringIO()
    signal.alarm(PATIENCE_SECONDS)  # whoever opens a pipe waits for ever
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main(words)
    finally:
        signal.alarm(0)
    said = err.getvalue()
    assert code == bad.code, f"{words}: {code}\n{said}"
    assert bad.said in said, said
    check_message(said + out.getvalue())
    after = tree(here)
    assert {path: after.get(path) for path in before} == before
    new = [os.path.relpath(path, here) for path in after if path not in before]
    assert [path for path in new if path.split(os.sep)[0] != bad.leaves] == []
    assert not [path for path in new if path.endswith(".tmp")]
    return said


def _give_up(number: int, frame: object) -> None:
    raise AssertionError("it hangs")  # an internal error to the command line, and so red here
