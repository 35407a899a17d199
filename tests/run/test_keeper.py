"""Checkpoints are written while training goes on, one at a time, and no error of theirs is lost."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from finetune.errors import DivergedError, SetupError
from finetune.run import checkpoint as checkpoint_writer
from finetune.run.checkpoint import CheckpointWriter, Snapshot
from finetune.run.directory import RunDir

pytestmark = pytest.mark.usefixtures("no_pictures")


class Slow(Snapshot):
    """Writes when it may."""

    def __init__(self, value: float = 0.0, *, full: bool = False) -> None:
        counters = {"best_step": None}
        super().__init__({"weight": torch.tensor(value)}, {}, {}, None, counters)
        self.may = threading.Event()
        self.full = full

    def write(self, folder: Path) -> None:
        assert self.may.wait(60)
        if self.full:
            raise OSError(28, "No space left on device")
        super().write(folder)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.open()
    return made


def test_the_trainer_goes_on_while_it_is_written(run: RunDir) -> None:
    checkpoint_writer, first, second = CheckpointWriter(run, newest=2), Slow(), Slow()
    with checkpoint_writer.at_work():
        checkpoint_writer.write(1, first)
        checkpoint_writer.look()
        assert run.steps() == []
        threading.Timer(0.3, first.may.set).start()
        checkpoint_writer.write(2, second)  # waits for the first
        assert run.steps() == [1]
        second.may.set()
        checkpoint_writer.wait()
        assert run.steps() == [1, 2]
    assert run.verify(2) is None


def test_leaving_waits_for_the_last_one(run: RunDir) -> None:
    checkpoint_writer, snapshot = CheckpointWriter(run, newest=2), Slow()

    def train() -> None:
        with checkpoint_writer.at_work():
            checkpoint_writer.write(1, snapshot)
            threading.Timer(0.3, snapshot.may.set).start()
            raise DivergedError("the run has ended meanwhile")

    with pytest.raises(DivergedError):
        train()
    assert run.verify(1) is None


def test_a_full_disk_ends_the_run_at_the_next_step(run: RunDir) -> None:
    checkpoint_writer, good, full = CheckpointWriter(run, newest=2), Slow(), Slow(full=True)
    good.may.set()
    checkpoint_writer.write(1, good)
    checkpoint_writer.write(2, full)
    checkpoint_writer.look()  # still under way
    full.may.set()
    with pytest.raises(SetupError, match="disk is full"):
        checkpoint_writer.wait()
    assert run.steps() == [1]
    assert not list(run.checkpoints.glob(".*"))


@pytest.mark.parametrize("error", [None, DivergedError("first")])
def test_a_full_disk_at_the_end_is_told(error: DivergedError | None, run: RunDir) -> None:
    """Unless something else has ended the run."""
    checkpoint_writer, full = CheckpointWriter(run, newest=2), Slow(full=True)
    full.may.set()

    def train() -> None:
        with checkpoint_writer.at_work():
            checkpoint_writer.write(1, full)
            if error is not None:
                raise error

    with pytest.raises(SetupError if error is None else DivergedError):
        train()


@pytest.mark.parametrize("text", ['{"best_step": [1]}', "[" * 100_000, "[]", "no JSON"])
def test_a_strange_state_names_no_best(run: RunDir, text: str) -> None:
    folder = run.folder(3)
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(text)
    assert checkpoint_writer._best_step(run, 3) is None


@pytest.mark.timeout(20)
def test_a_pipe_names_no_best_and_is_not_waited_for(run: RunDir) -> None:
    folder = run.folder(3)
    folder.mkdir(parents=True)
    os.mkfifo(folder / "state.json")
    assert checkpoint_writer._best_step(run, 3) is None
