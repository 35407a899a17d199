"""The page of faults: what is done to the toolkit on purpose, what it promises, what came out.

A test says what it tries by the fixture `fault`; `--page FILE` writes the page of all that were
run, from one process or from many.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

COMMAND = 'python -m pytest tests/faults -m "" --page tests/faults/README.md'
_KEY = "fault"


@dataclass
class _Row:
    """A fault: every trial of it counts, whichever test made it."""

    promise: str
    place: tuple[str, int]
    passed: int = 0
    tried: int = 0
    texts: list[str] = field(default_factory=list)


@pytest.fixture
def fault(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Tell the page what this test does and what came out.

    Call it at the test's end, once for each fault: `fault("SIGKILL at any moment", "resumes to the
    same weights", "100 of 100")`. Tests with the same fault share a line that counts them.
    """

    def tell(name: str, promise: str, measured: str = "") -> None:
        record_property(_KEY, [name, promise, measured])

    return tell


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--page", metavar="FILE", help="write the page of faults there")


def pytest_configure(config: pytest.Config) -> None:
    # xdist gathers the reports in the process that has no workerinput
    if config.getoption("--page") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Page(Path(config.getoption("--page"))))


class _Page:
    """Gathers what the tests told, and writes it."""

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()
        self._rows: dict[str, _Row] = {}
        self._told: dict[str, set[str]] = {}  # test, without its parameters: faults
        self._silent: list[str] = []  # failed before they told what they try
        self._failed: list[str] = []
        self._skipped: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.append(report.nodeid)
        if report.skipped and isinstance(report.longrepr, tuple):
            self._skipped[report.nodeid] = report.longrepr[2].removeprefix("Skipped: ")
        told = [value for key, value in report.user_properties if key == _KEY]
        if report.failed and not told:
            self._silent.append(_test(report.nodeid))
        if report.when != "call":
            return
        for value in told:
            name, promise, measured = (str(part) for part in value)  # type: ignore[attr-defined]
            place = (report.location[0], report.location[1] or 0)
            self._told.setdefault(_test(report.nodeid), set()).add(name)
            row = self._rows.setdefault(name, _Row(promise, place))
            row.place = min(row.place, place)
            row.tried += 1
            row.passed += report.passed
            if measured and measured not in row.texts:
                row.texts.append(measured)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for test in self._silent:  # a trial of what the others of the same test have tried
            for name in self._told.get(test, ()):
                self._rows[name].tried += 1
        self._path.write_text(self._text(), encoding="utf-8")
        terminalreporter.write_line(f"{len(self._rows)} faults: {self._path}")

    def _text(self) -> str:
        import torch

        lines = [
            "# Faults, what is promised, and what was measured",
            "",
            f"Written by `{COMMAND}` on commit {_commit()}:",
            f"Python {platform.python_version()}, torch {torch.__version__.partition('+')[0]}, "
            f"{platform.system()}, CPU.",
            "",
            "| fault | promised | trials as promised | measured |",
            "|---|---|---|---|",
        ]
        for name, row in sorted(self._rows.items(), key=lambda item: item[1].place):
            cells = [name, row.promise, f"{row.passed} of {row.tried}", "; ".join(row.texts)]
            lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
        if self._failed:
            lines += ["", "Failed:", "", *(f"- `{name}`" for name in sorted(set(self._failed)))]
        if self._skipped:
            lines += ["", "Not run:", ""]
            lines += [f"- `{name}`: {why}" for name, why in sorted(self._skipped.items())]
        return "\n".join([*lines, ""])


def _test(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _commit() -> str:
    """The commit, and whether the tree differs from it in more than the page itself."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    lines = git("status", "--porcelain").splitlines()
    changed = [line for line in lines if "faults/README" not in line]
    return (git("rev-parse", "--short", "HEAD") or "unknown") + (" with changes" if changed else "")
