"""Cases of bad input to the command line: each gives its error code and changes no file."""

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

__all__ = [
    "BadInput",
    "Content",
    "check_bad_input",
    "check_result",
    "parametrize_bad_inputs",
]

TIMEOUT_SECONDS = 120
Content = str | bytes | Callable[[Path], object]


@dataclass(frozen=True)
class BadInput:
    """One bad input.

    Attributes:
        arguments: the command line after `finetune`.
        code: the error code, such as "data.empty"; its family sets the exit code.
        named: a text the message must contain: a file, a key, a number, a suggestion.
        files: path in the working directory to content, or to a function that writes the file.
        may_create: a folder that may be created, such as the directory of a run that had started.
    """

    arguments: str | list[str]
    code: str
    named: str
    files: Mapping[str, Content] = field(default_factory=dict)
    may_create: str | None = None

    @property
    def exit_code(self) -> int:
        """The exit code of this error family."""
        return EXIT_CODES[self.code.partition(".")[0]]

    def command(self, option: str) -> list[str]:
        """The arguments, with an option after the name of the command."""
        parts = shlex.split(self.arguments) if isinstance(self.arguments, str) else self.arguments
        num_words = 2 if parts[0] in ("data", "recipes") else 1
        return [*parts[:num_words], option, *parts[num_words:]]


def parametrize_bad_inputs(cases: Mapping[str, BadInput]) -> Any:
    """Parametrize a test with these cases; the keys are the ids."""
    assert cases
    return pytest.mark.parametrize("bad", cases.values(), ids=list(cases))


def write_files(files: Mapping[str, Content]) -> None:
    """Write the files of a case to the working directory."""
    for name, content in files.items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.write_text(content, encoding="utf-8")
        elif isinstance(content, bytes):
            path.write_bytes(content)
        else:
            content(path)


def file_hashes(top: Path) -> dict[str, str]:
    """Map every path below a folder to a sha256, a link target, or a kind."""
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


def check_bad_input(bad: BadInput) -> str:
    """Run a case in the working directory; check the result and that no file changed.

    Returns: the message on standard error.
    """
    write_files(bad.files)
    cwd = Path.cwd()
    before = file_hashes(cwd)
    exit_code, out, message = run_command(bad.command("--json"))
    check_result(bad, exit_code, out, message)
    after = file_hashes(cwd)
    assert {path: after.get(path) for path in before} == before
    new = [os.path.relpath(path, cwd) for path in after if path not in before]
    assert [path for path in new if path.split(os.sep)[0] != bad.may_create] == []
    assert not [path for path in new if path.endswith(".tmp")]
    return message


def check_result(bad: BadInput, exit_code: int, out: str, message: str) -> None:
    """Check exit code, error code and message of a case."""
    assert exit_code == bad.exit_code, f"{bad.arguments}: {exit_code}\n{message}"
    assert bad.named in message, message
    check_message(message)
    result = json.loads(out)
    if isinstance(result, dict) and "error" in result:
        assert result["exit_code"] == exit_code
        assert result["code"] == bad.code, message
        assert result["error"] in message or bad.code == "usage"
    else:  # predict prints one result per file, then fails
        debug_output = run_command(bad.command("--debug"))[2]
        assert re.findall(r"^error code: (\S+)$", debug_output, re.MULTILINE) == [bad.code], message


def run_command(arguments: list[str]) -> tuple[int, str, str]:
    """Run a command in this process. Returns: exit code, standard output, standard error."""
    out, err = io.StringIO(), io.StringIO()
    signal.signal(signal.SIGALRM, _raise_timeout)
    signal.alarm(TIMEOUT_SECONDS)  # opening a named pipe would block forever
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            return cli.main(arguments), out.getvalue(), err.getvalue()
    finally:
        signal.alarm(0)


def _raise_timeout(number: int, frame: object) -> None:
    raise AssertionError("it hangs")  # reported as an internal error, so the test fails
