"""Checkpoints are written while training goes on, one at a time; no error of a write is lost."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from refusals import refused

from finetune.errors import DivergedError, SetupError
from finetune.run import checkpoint
from finetune.run.checkpoint import CheckpointWriter, Snapshot
from finetune.run.directory import RunDir

pytestmark = pytest.mark.usefixtures("no_pictures")


class Slow(Snapshot):
    """A snapshot that is written once `may` is set."""

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


def test_the_trainer_goes_on_while_it_is_written(run: RunDir) -> None:
    writer, first, second = CheckpointWriter(run, num_newest=2), Slow(), Slow()
    with writer.finish_on_exit():
        writer.write(1, first)
        writer.raise_if_failed()
        assert run.checkpoint_steps() == []
        threading.Timer(0.3, first.may.set).start()
        writer.write(2, second)  # waits for the first
        assert run.checkpoint_steps() == [1]
        second.may.set()
        writer.wait()
        assert run.checkpoint_steps() == [1, 2]
    assert run.verify_checkpoint(2) is None


def test_leaving_waits_for_the_last_one(run: RunDir) -> None:
    writer, snapshot = CheckpointWriter(run, num_newest=2), Slow()

    def train() -> None:
        with writer.finish_on_exit():
            writer.write(1, snapshot)
            threading.Timer(0.3, snapshot.may.set).start()
            raise DivergedError("the run has ended meanwhile")

    with pytest.raises(DivergedError):
        train()
    assert run.verify_checkpoint(1) is None


def test_a_full_disk_ends_the_run_at_the_next_step(run: RunDir) -> None:
    writer, good, full = CheckpointWriter(run, num_newest=2), Slow(), Slow(full=True)
    good.may.set()
    writer.write(1, good)
    writer.write(2, full)
    writer.raise_if_failed()  # still under way
    full.may.set()
    with refused("setup.disk_full", run.checkpoint_folder(2)):
        writer.wait()
    assert run.checkpoint_steps() == [1]
    assert not list(run.checkpoints_folder.glob(".*"))


@pytest.mark.parametrize("error", [None, DivergedError("first")])
def test_a_full_disk_at_the_end_is_told(error: DivergedError | None, run: RunDir) -> None:
    """Unless something else has ended the run."""
    writer, full = CheckpointWriter(run, num_newest=2), Slow(full=True)
    full.may.set()

    def train() -> None:
        with writer.finish_on_exit():
            writer.write(1, full)
            if error is not None:
                raise error

    with pytest.raises(SetupError if error is None else DivergedError):
        train()


@pytest.mark.parametrize("text", ['{"best_step": [1]}', "[" * 100_000, "[]", "no JSON"])
def test_a_strange_state_names_no_best(run: RunDir, text: str) -> None:
    folder = run.checkpoint_folder(3)
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(text)
    assert checkpoint._best_step_at(run, 3) is None


@pytest.mark.timeout(20)
def test_a_pipe_names_no_best_and_is_not_waited_for(run: RunDir) -> None:
    folder = run.checkpoint_folder(3)
    folder.mkdir(parents=True)
    os.mkfifo(folder / "state.json")
    assert checkpoint._best_step_at(run, 3) is None
