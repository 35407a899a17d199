"""Pytest plugin that writes the results pages: faults and outcomes, GPU questions and figures.

A test adds a row with the fixture `fault` or `figure`; `--page FILE` or `--gpu-page FILE` writes
the page of all tests of the session, with or without xdist.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

AddRow = Callable[..., None]


@dataclass(frozen=True)
class _PageKind:
    """A page: the fixture that adds rows, the option that enables it, and its texts."""

    fixture: str
    option: str
    rows: str
    command: str
    title: str
    columns: tuple[str, str, str, str]
    machine: Callable[[float], str]


@dataclass
class _TableRow:
    """A fault or a question; counts the trials of all tests with this name."""

    promise: str
    location: tuple[str, int]
    passed: int = 0
    tried: int = 0
    texts: list[str] = field(default_factory=list)


@pytest.fixture
def fault(record_property: Callable[[str, object], None]) -> AddRow:
    """Add what this test does, and its outcome, to the page.

    Call it at the end of the test, once for each fault: `fault("SIGKILL at any moment", "resumes to
    the same weights", "100 of 100")`. Tests with the same fault share a row that counts them.
    """
    return _row_recorder(FAULTS_PAGE, record_property)


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> AddRow:
    """Add a question, the promised bound and the measured figure to the GPU page.

    Call it before the assertion, so that a failed test still leaves its figure.
    """
    return _row_recorder(GPU_PAGE, record_property)


def _row_recorder(page_kind: _PageKind, record: Callable[[str, object], None]) -> AddRow:
    def add_row(name: str, promise: str, measured: str = "") -> None:
        record(page_kind.fixture, [name, promise, measured])

    return add_row


def pytest_addoption(parser: pytest.Parser) -> None:
    for kind in (FAULTS_PAGE, GPU_PAGE):
        parser.addoption(kind.option, metavar="FILE", help=f"write the page of {kind.rows} there")


def pytest_configure(config: pytest.Config) -> None:
    # xdist collects the reports in the process without workerinput
    for kind in (FAULTS_PAGE, GPU_PAGE):
        if config.getoption(kind.option) and not hasattr(config, "workerinput"):
            config.pluginmanager.register(_PageWriter(kind, Path(config.getoption(kind.option))))


class _PageWriter:
    """Collects the rows of the tests and writes the page."""

    def __init__(self, page_kind: _PageKind, path: Path) -> None:
        self._page_kind = page_kind
        self._path = path.resolve()
        self._started = time.monotonic()
        self._rows: dict[str, _TableRow] = {}
        self._names_by_test: dict[str, set[str]] = {}  # test id without parameters: fault names
        self._failed_without_row: list[str] = []  # tests that failed before they added a row
        self._failed: dict[str, str] = {}
        self._skipped: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.setdefault(report.nodeid, error_summary(report))
        if report.skipped and isinstance(report.longrepr, tuple):
            self._skipped[report.nodeid] = report.longrepr[2].removeprefix("Skipped: ")
        rows_of_test = [
            value for key, value in report.user_properties if key == self._page_kind.fixture
        ]
        if report.failed and not rows_of_test:
            self._failed_without_row.append(_test_id(report.nodeid))
        if report.when != "call":
            return
        for value in rows_of_test:
            name, promise, measured = (str(part) for part in value)  # type: ignore[attr-defined]
            location = (report.location[0], report.location[1] or 0)
            self._names_by_test.setdefault(_test_id(report.nodeid), set()).add(name)
            row = self._rows.setdefault(name, _TableRow(promise, location))
            row.location = min(row.location, location)
            row.tried += 1
            row.passed += report.passed
            if measured and measured not in row.texts:
                row.texts.append(measured)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for test in (
            self._failed_without_row
        ):  # a trial of the faults that the other parameters of this test have added
            for name in self._names_by_test.get(test, ()):
                self._rows[name].tried += 1
        self._path.write_text(self._text(), encoding="utf-8")
        terminalreporter.write_line(f"{len(self._rows)} {self._page_kind.rows}: {self._path}")

    def _text(self) -> str:
        page_kind = self._page_kind
        page_path = f"{self._path.parent.name}/{self._path.name}"
        lines = [
            f"# {page_kind.title}",
            "",
            f"Written by `{page_kind.command}` on commit {_commit_description(page_path)}:",
            page_kind.machine(time.monotonic() - self._started),
            "",
            f"| {' | '.join(page_kind.columns)} |",
            "|---|---|---|---|",
        ]
        for name, row in sorted(self._rows.items(), key=lambda item: item[1].location):
            cells = [name, row.promise, f"{row.passed} of {row.tried}", "; ".join(row.texts)]
            lines.append("| " + " | ".join(escape_cell(cell) for cell in cells) + " |")
        if self._failed:
            lines += ["", "Failed:", ""]
            lines += [f"- `{name}`{why}" for name, why in sorted(self._failed.items())]
        if self._skipped:
            lines += ["", "Not run:", ""]
            lines += [f"- `{name}`: {why}" for name, why in sorted(self._skipped.items())]
        return "\n".join([*lines, ""])


def _test_id(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def error_summary(report: pytest.TestReport) -> str:
    """Return the error of a failed test in one short line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    first = next(iter(str(getattr(crash, "message", "")).splitlines()), "")
    return f": {first[:200]}" if first else ""


def escape_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _cpu_description(_seconds: float) -> str:
    import torch

    return (
        f"Python {platform.python_version()}, torch {torch.__version__.partition('+')[0]}, "
        f"{platform.system()}, CPU."
    )


def _gpu_description(seconds: float) -> str:
    """Return the hardware and the versions of the libraries that use it."""
    import torch

    parts = [f"Python {platform.python_version()}", f"torch {torch.__version__.partition('+')[0]}"]
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        parts = [
            f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB",
            *_driver_version(),
            *parts,
            f"CUDA {torch.version.cuda}",
            f"cuDNN {torch.backends.cudnn.version()}",
        ]
    else:
        parts.append("no GPU")
    parts.append(f"{len(os.sched_getaffinity(0))} cores")
    return f"{', '.join(parts)}; {seconds:.0f} seconds."


def _driver_version() -> list[str]:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return []
    return [f"driver {result.stdout.splitlines()[0].strip()}"] if result.stdout.strip() else []


def _commit_description(page: str) -> str:
    """Return the commit, with " with changes" if the tree differs in more than the page itself.

    Args:
        page: folder and name of the page. Without git, FINETUNE_COMMIT names the commit.
    """

    def git(*arguments: str) -> str:
        result = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
        return result.stdout.strip()

    lines = git("status", "--porcelain").splitlines()
    changed = [line for line in lines if page not in line]
    commit = git("rev-parse", "--short", "HEAD") or os.environ.get("FINETUNE_COMMIT", "unknown")
    return commit + (" with changes" if changed else "")


FAULTS_PAGE = _PageKind(
    fixture="fault",
    option="--page",
    rows="faults",
    command='python -m pytest tests/faults -m "" --page tests/faults/README.md',
    title="Fault tests: expected and measured behavior",
    columns=("fault", "expected", "trials passed", "measured"),
    machine=_cpu_description,
)
GPU_PAGE = _PageKind(
    fixture="figure",
    option="--gpu-page",
    rows="questions",
    command="python -m pytest -m gpu --gpu-page tests/gpu/README.md",
    title="GPU tests: expected and measured behavior",
    columns=("question", "expected", "tests passed", "measured"),
    machine=_gpu_description,
)
