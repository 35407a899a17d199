"""A loop process: its results, steps, log messages, errors, and end."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from logs import logged
from refusals import refused

from finetune.bench.loop_process import LoopProcess, ProgressReporter
from finetune.errors import DataError
from finetune.log import logger


class Subject:
    """The object in the other process."""

    def __init__(self, reporter: ProgressReporter, *, start: int, folder: str) -> None:
        self.reporter = reporter
        self.value = start
        self.folder = folder

    def add(self, *, number: int) -> int:
        self.value += number
        return self.value

    def walk(self, *, steps: int) -> None:
        for _ in range(steps):
            self.reporter.tick()
        logger.info("walked")

    def environment(self) -> dict[str, Any]:
        out, error = os.fstat(1), os.fstat(2)
        return {
            "prints_to_stderr": (out.st_dev, out.st_ino) == (error.st_dev, error.st_ino),
            "pid": os.getpid(),
            "folder": self.folder,
            "interrupt": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
            "workers": multiprocessing.get_start_method(),
            "devices": os.environ["CUDA_VISIBLE_DEVICES"],
        }

    def refuse(self) -> None:
        raise DataError(
            "colors: the training split is empty; see: finetune data info", code="data.empty"
        )

    def fail(self) -> None:
        raise ValueError("no such thing")

    def run_out(self) -> None:
        raise MemoryError

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


STEPS: list[int] = []
MESSAGES: list[str] = []
FOLDERS: list[Path] = []


@pytest.fixture(scope="module")
def loop_process() -> Iterator[LoopProcess]:
    patch = pytest.MonkeyPatch()
    patch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    process = LoopProcess("walker", Subject, {"start": 5}, on_steps=STEPS.append)
    patch.undo()
    with process, logged(MESSAGES):
        yield process
        assert all(folder.is_dir() for folder in FOLDERS)
    assert not any(folder.exists() for folder in FOLDERS)


def test_state_persists_between_calls(loop_process: LoopProcess) -> None:
    assert loop_process.call("add", number=2) == 7
    assert loop_process.call("add", number=3) == 10


def test_steps_and_messages_arrive_before_the_result(loop_process: LoopProcess) -> None:
    loop_process.call("walk", steps=1000)
    assert sum(STEPS) == 1000
    assert len(STEPS) < 100  # several steps a message
    assert MESSAGES == ["walked"]


def test_process_environment(loop_process: LoopProcess) -> None:
    before = signal.getsignal(signal.SIGINT)
    found = loop_process.call("environment")
    assert found["pid"] != os.getpid()
    assert found["interrupt"]  # only the parent process handles it
    assert signal.getsignal(signal.SIGINT) == before
    assert found["workers"] == multiprocessing.get_start_method()
    assert found["devices"] == "3"
    FOLDERS.append(Path(found["folder"]))
    assert found["prints_to_stderr"]  # standard output is reserved for the result of the command


def test_errors_are_raised_in_the_parent(loop_process: LoopProcess) -> None:
    value = loop_process.call("add", number=1)
    with refused("data.empty", "colors: ") as caught:
        loop_process.call("refuse")
    assert caught.value.exit_code == DataError.exit_code
    with pytest.raises(RuntimeError, match=r"^walker: ValueError: no such thing$") as unknown:
        loop_process.call("fail")
    assert "in fail" in str(unknown.value.__cause__)
    with refused("setup.memory", "walker: ", "data.batch_size"):
        loop_process.call("run_out")
    assert loop_process.call("add", number=0) == value  # the process is still alive


def test_killed_process(loop_process: LoopProcess) -> None:
    """Runs last, because it ends the process."""
    with refused("setup.worker_ended", "walker: ", -9) as caught:
        loop_process.call("die")
    assert caught.value.exit_code == 5
