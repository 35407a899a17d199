"""The pages that tests write: of faults and what came out, of a GPU and what was measured on it.

A test says what it tries by the fixture `fault` or `figure`; `--page FILE` or `--gpu-page FILE`
writes the page of all that were run, from one process or from many.
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

Tell = Callable[..., None]


@dataclass(frozen=True)
class _Kind:
    """A page: the fixture that fills it, the option that asks for it, and its words."""

    fixture: str
    option: str
    rows: str
    command: str
    title: str
    columns: tuple[str, str, str, str]
    machine: Callable[[float], str]


@dataclass
class _Row:
    """A fault or a question: every trial of it counts, whichever test made it."""

    promise: str
    place: tuple[str, int]
    passed: int = 0
    tried: int = 0
    texts: list[str] = field(default_factory=list)


@pytest.fixture
def fault(record_property: Callable[[str, object], None]) -> Tell:
    """Tell the page what this test does and what came out.

    Call it at the test's end, once for each fault: `fault("SIGKILL at any moment", "resumes to the
    same weights", "100 of 100")`. Tests with the same fault share a line that counts them.
    """
    return _teller(FAULTS, record_property)


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Tell:
    """Tell the page of a GPU the question, what is promised, and what was measured.

    Call it before what is promised is asserted: a test that fails then leaves its figure.
    """
    return _teller(GPU, record_property)


def _teller(kind: _Kind, record: Callable[[str, object], None]) -> Tell:
    def tell(name: str, promise: str, measured: str = "") -> None:
        record(kind.fixture, [name, promise, measured])

    return tell


def pytest_addoption(parser: pytest.Parser) -> None:
    for kind in (FAULTS, GPU):
        parser.addoption(kind.option, metavar="FILE", help=f"write the page of {kind.rows} there")


def pytest_configure(config: pytest.Config) -> None:
    # xdist gathers the reports in the process that has no workerinput
    for kind in (FAULTS, GPU):
        if config.getoption(kind.option) and not hasattr(config, "workerinput"):
            config.pluginmanager.register(_Page(kind, Path(config.getoption(kind.option))))


class _Page:
    """Gathers what the tests told, and writes it."""

    def __init__(self, kind: _Kind, path: Path) -> None:
        self._kind = kind
        self._path = path.resolve()
        self._started = time.monotonic()
        self._rows: dict[str, _Row] = {}
        self._told: dict[str, set[str]] = {}  # test, without its parameters: faults
        self._silent: list[str] = []  # failed before they told what they try
        self._failed: dict[str, str] = {}
        self._skipped: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.setdefault(report.nodeid, _last_words(report))
        if report.skipped and isinstance(report.longrepr, tuple):
            self._skipped[report.nodeid] = report.longrepr[2].removeprefix("Skipped: ")
        told = [value for key, value in report.user_properties if key == self._kind.fixture]
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
        terminalreporter.write_line(f"{len(self._rows)} {self._kind.rows}: {self._path}")

    def _text(self) -> str:
        kind = self._kind
        beside = f"{self._path.parent.name}/{self._path.name}"
        lines = [
            f"# {kind.title}",
            "",
            f"Written by `{kind.command}` on commit {_commit(beside)}:",
            kind.machine(time.monotonic() - self._started),
            "",
            f"| {' | '.join(kind.columns)} |",
            "|---|---|---|---|",
        ]
        for name, row in sorted(self._rows.items(), key=lambda item: item[1].place):
            cells = [name, row.promise, f"{row.passed} of {row.tried}", "; ".join(row.texts)]
            lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
        if self._failed:
            lines += ["", "Failed:", ""]
            lines += [f"- `{name}`{why}" for name, why in sorted(self._failed.items())]
        if self._skipped:
            lines += ["", "Not run:", ""]
            lines += [f"- `{name}`: {why}" for name, why in sorted(self._skipped.items())]
        return "\n".join([*lines, ""])


def _test(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def _last_words(report: pytest.TestReport) -> str:
    """The error of a failed test in one short line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    first = next(iter(str(getattr(crash, "message", "")).splitlines()), "")
    return f": {first[:200]}" if first else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _processor(_seconds: float) -> str:
    import torch

    return (
        f"Python {platform.python_version()}, torch {torch.__version__.partition('+')[0]}, "
        f"{platform.system()}, CPU."
    )


def _gpu(seconds: float) -> str:
    """The hardware and the libraries that compute on it."""
    import torch

    words = [f"Python {platform.python_version()}", f"torch {torch.__version__.partition('+')[0]}"]
    if torch.cuda.is_available():
        facts = torch.cuda.get_device_properties(0)
        words = [
            f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB",
            *_driver(),
            *words,
            f"CUDA {torch.version.cuda}",
            f"cuDNN {torch.backends.cudnn.version()}",
        ]
    else:
        words.append("no GPU")
    words.append(f"{len(os.sched_getaffinity(0))} cores")
    return f"{', '.join(words)}; {seconds:.0f} seconds."


def _driver() -> list[str]:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return []
    return [f"driver {done.stdout.splitlines()[0].strip()}"] if done.stdout.strip() else []


def _commit(page: str) -> str:
    """The commit, and whether the tree differs from it in more than the page itself.

    Args:
        page: its folder and name. A copy of the tree without git is told by FINETUNE_COMMIT.
    """

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    lines = git("status", "--porcelain").splitlines()
    changed = [line for line in lines if page not in line]
    known = git("rev-parse", "--short", "HEAD") or os.environ.get("FINETUNE_COMMIT", "unknown")
    return known + (" with changes" if changed else "")


FAULTS = _Kind(
    fixture="fault",
    option="--page",
    rows="faults",
    command='python -m pytest tests/faults -m "" --page tests/faults/README.md',
    title="Faults, what is promised, and what was measured",
    columns=("fault", "promised", "trials as promised", "measured"),
    machine=_processor,
)
GPU = _Kind(
    fixture="figure",
    option="--gpu-page",
    rows="questions",
    command="python -m pytest -m gpu --gpu-page tests/gpu/README.md",
    title="Questions that only a GPU can answer, and what was measured",
    columns=("question", "promised", "tests as promised", "measured"),
    machine=_gpu,
)
