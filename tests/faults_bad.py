"""Bad input to the command line: the error's code, one short message, and nothing lost."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from refusals import EXIT_CODES, check_message

from finetune.cli import main as cli

__all__ = ["PROMISE", "Bad", "Content", "parametrised", "refuse"]

PROMISE = "one short message with a next step, the right exit code, nothing lost, no traceback"
PATIENCE_SECONDS = 120
Content = str | bytes | Callable[[Path], object]


@dataclass(frozen=True)
class Bad:
    """One bad input.

    Attributes:
        words: the command line behind `finetune`.
        code: of the error, such as "data.empty"; the exit code is its family's.
        named: what the message must name: a file, a key, a number, a suggestion.
        files: name to content, or to what makes it, in the working directory.
        leaves: a folder that may appear, such as the directory of a run that had begun.
    """

    words: str | list[str]
    code: str
    named: str
    files: Mapping[str, Content] = field(default_factory=dict)
    leaves: str | None = None

    @property
    def exit_code(self) -> int:
        """The exit code of the process."""
        return EXIT_CODES[self.code.partition(".")[0]]

    def command(self, option: str) -> list[str]:
        """The words, with an option behind the verb."""
        words = shlex.split(self.words) if isinstance(self.words, str) else self.words
        verbs = 2 if words[0] in ("data", "recipes") else 1
        return [*words[:verbs], option, *words[verbs:]]


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
    entries = {}
    for parent, folders, files in os.walk(top):
        for name in (*folders, *files):
            path = os.path.join(parent, name)
            if os.path.islink(path):
                entries[path] = f"link {os.readlink(path)}"
            elif os.path.isfile(path):
                entries[path] = sha256(Path(path).read_bytes()).hexdigest()
            else:
                entries[path] = "folder or pipe"
    return entries


def refuse(bad: Bad) -> str:
    """Carry out a case in the working directory and look at all that is promised.

    Returns: the message on standard error.
    """
    write_files(bad.files)
    folder = Path.cwd()
    before = tree(folder)
    exit_code, out, message = run(bad.command("--json"))
    check_answer(bad, exit_code, out, message)
    after = tree(folder)
    assert {path: after.get(path) for path in before} == before
    new = [os.path.relpath(path, folder) for path in after if path not in before]
    assert [path for path in new if path.split(os.sep)[0] != bad.leaves] == []
    assert not [path for path in new if path.endswith(".tmp")]
    return message


def check_answer(bad: Bad, exit_code: int, out: str, message: str) -> None:
    """Look at the exit code, the code in the answer, and the message of a case."""
    assert exit_code == bad.exit_code, f"{bad.words}: {exit_code}\n{message}"
    assert bad.named in message, message
    check_message(message)
    answer = json.loads(out)
    if isinstance(answer, dict) and "error" in answer:
        assert answer["exit_code"] == exit_code
        assert answer["code"] == bad.code, message
        assert answer["error"] in message or bad.code == "usage"
    else:  # one answer for each file, and then an error
        said = run(bad.command("--debug"))[2]
        assert re.findall(r"^error code: (\S+)$", said, re.MULTILINE) == [bad.code], message


def run(words: list[str]) -> tuple[int, str, str]:
    """Run a command line in this process. Returns: exit code, standard output and error."""
    out, err = io.StringIO(), io.StringIO()
    signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(PATIENCE_SECONDS)  # to open a pipe would take for ever
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            return cli.main(words), out.getvalue(), err.getvalue()
    finally:
        signal.alarm(0)


def _give_up(number: int, frame: object) -> None:
    raise AssertionError("it hangs")  # an internal error to the command line, and so red here
