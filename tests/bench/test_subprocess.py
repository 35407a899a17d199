"""A process that answers: its steps, its notices, its errors, and its end."""

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
    """What runs in the other process."""

    def __init__(self, line: ProgressReporter, *, start: int, folder: str) -> None:
        self.line = line
        self.value = start
        self.folder = folder

    def add(self, *, number: int) -> int:
        self.value += number
        return self.value

    def walk(self, *, steps: int) -> None:
        for _ in range(steps):
            self.line.tick()
        logger.info("walked")

    def surroundings(self) -> dict[str, Any]:
        out, error = os.fstat(1), os.fstat(2)
        return {
            "prints_beside_answers": (out.st_dev, out.st_ino) == (error.st_dev, error.st_ino),
            "pid": os.getpid(),
            "folder": self.folder,
            "interrupt": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
            "workers": multiprocessing.get_start_method(),
            "devices": os.environ["CUDA_VISIBLE_DEVICES"],
        }

    def refuse(self) -> None:
        raise DataError(
            "colours: the training split is empty; see: finetune data info", code="data.empty"
        )

    def fail(self) -> None:
        raise ValueError("no such thing")

    def run_out(self) -> None:
        raise MemoryError

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


STEPS: list[int] = []
NOTICES: list[str] = []
FOLDERS: list[Path] = []


@pytest.fixture(scope="module")
def host() -> Iterator[LoopProcess]:
    patch = pytest.MonkeyPatch()
    patch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    made = LoopProcess("walker", Subject, {"start": 5}, on_steps=STEPS.append)
    patch.undo()
    with made, logged(NOTICES):
        yield made
        assert all(folder.is_dir() for folder in FOLDERS)
    assert not any(folder.exists() for folder in FOLDERS)


def test_it_keeps_what_it_made(host: LoopProcess) -> None:
    assert host.call("add", number=2) == 7
    assert host.call("add", number=3) == 10


def test_steps_and_notices_come_before_the_answer(host: LoopProcess) -> None:
    host.call("walk", steps=1000)
    assert sum(STEPS) == 1000
    assert len(STEPS) < 100  # not one message each
    assert NOTICES == ["walked"]


def test_its_surroundings(host: LoopProcess) -> None:
    before = signal.getsignal(signal.SIGINT)
    found = host.call("surroundings")
    assert found["pid"] != os.getpid()
    assert found["interrupt"]  # the terminal's is for the one that asks
    assert signal.getsignal(signal.SIGINT) == before
    assert found["workers"] == multiprocessing.get_start_method()
    assert found["devices"] == "3"
    FOLDERS.append(Path(found["folder"]))
    assert found["prints_beside_answers"]  # standard output is for the answer of the verb


def test_errors_come_back_as_they_are(host: LoopProcess) -> None:
    kept = host.call("add", number=1)
    with refused("data.empty", "colours: ") as caught:
        host.call("refuse")
    assert caught.value.exit_code == DataError.exit_code
    with pytest.raises(RuntimeError, match=r"^walker: ValueError: no such thing$") as unknown:
        host.call("fail")
    assert "in fail" in str(unknown.value.__cause__)
    with refused("setup.memory", "walker: ", "data.batch_size"):
        host.call("run_out")
    assert host.call("add", number=0) == kept  # it is still there


def test_a_process_that_was_killed(host: LoopProcess) -> None:
    """The last: nobody answers after it."""
    with refused("setup.worker_ended", "walker: ", -9) as caught:
        host.call("die")
    assert caught.value.exit_code == 5
