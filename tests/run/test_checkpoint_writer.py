"""Checkpoints are written in the background, one at a time; no write error is lost."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from refusals import refused

from finetune.errors import DivergedError, SetupError
from finetune.run.checkpoint import CheckpointWriter, Snapshot
from finetune.run.directory import RunDir

pytestmark = pytest.mark.usefixtures("no_plots")


class SlowSnapshot(Snapshot):
    """A snapshot whose write waits for the `allow_write` event."""

    def __init__(self, value: float = 0.0, *, full: bool = False) -> None:
        counters = {"best_step": None}
        super().__init__({"weight": torch.tensor(value)}, {}, {}, None, counters)
        self.allow_write = threading.Event()
        self.full = full

    def write(self, folder: Path) -> None:
        assert self.allow_write.wait(60)
        if self.full:
            raise OSError(28, "No space left on device")
        super().write(folder)


def test_write_returns_before_the_checkpoint_is_written(run: RunDir) -> None:
    writer, first, second = CheckpointWriter(run, num_newest=2), SlowSnapshot(), SlowSnapshot()
    with writer.finish_on_exit():
        writer.write(1, first)
        writer.raise_if_failed()
        assert run.checkpoint_steps() == []
        threading.Timer(0.3, first.allow_write.set).start()
        writer.write(2, second)  # waits for the first
        assert run.checkpoint_steps() == [1]
        second.allow_write.set()
        writer.wait()
        assert run.checkpoint_steps() == [1, 2]
    assert run.verify_checkpoint(2) is None


def test_exit_waits_for_the_last_write(run: RunDir) -> None:
    writer, snapshot = CheckpointWriter(run, num_newest=2), SlowSnapshot()

    def train() -> None:
        with writer.finish_on_exit():
            writer.write(1, snapshot)
            threading.Timer(0.3, snapshot.allow_write.set).start()
            raise DivergedError("the run ended during the write")

    with pytest.raises(DivergedError):
        train()
    assert run.verify_checkpoint(1) is None


def test_full_disk_raises_at_the_next_call(run: RunDir) -> None:
    writer, good, full = (
        CheckpointWriter(run, num_newest=2),
        SlowSnapshot(),
        SlowSnapshot(full=True),
    )
    good.allow_write.set()
    writer.write(1, good)
    writer.write(2, full)
    writer.raise_if_failed()  # still writing
    full.allow_write.set()
    with refused("setup.disk_full", run.checkpoint_folder(2)):
        writer.wait()
    assert run.checkpoint_steps() == [1]
    assert not list(run.checkpoints_folder.glob(".*"))


@pytest.mark.parametrize("error", [None, DivergedError("first")])
def test_full_disk_during_the_last_write_is_raised(
    error: DivergedError | None, run: RunDir
) -> None:
    """An error that already ended the run takes precedence."""
    writer, full = CheckpointWriter(run, num_newest=2), SlowSnapshot(full=True)
    full.allow_write.set()

    def train() -> None:
        with writer.finish_on_exit():
            writer.write(1, full)
            if error is not None:
                raise error

    with pytest.raises(SetupError if error is None else DivergedError):
        train()


@pytest.mark.parametrize("text", ['{"best_step": [1]}', "[" * 100_000, "[]", "no JSON"])
def test_invalid_state_json_has_no_best_step(run: RunDir, text: str) -> None:
    folder = run.checkpoint_folder(3)
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(text)
    assert run.best_step_at(3) is None


@pytest.mark.timeout(20)
def test_named_pipe_instead_of_state_json_does_not_block(run: RunDir) -> None:
    folder = run.checkpoint_folder(3)
    folder.mkdir(parents=True)
    os.mkfifo(folder / "state.json")
    assert run.best_step_at(3) is None
