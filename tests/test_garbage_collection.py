"""Garbage collection is deferred while a command starts, and normal while it runs."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_runs import TINY_RECIPE

from finetune import process_lifecycle
from finetune.cli.main import main
from finetune.training.trainer_state import TrainerState

THRESHOLDS = (650, 9, 11)  # values that no other code sets


@pytest.fixture(autouse=True)
def known_thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*THRESHOLDS)
    yield
    gc.set_threshold(*before)


def test_collection_is_deferred_and_restored() -> None:
    with process_lifecycle.defer_garbage_collection():
        assert gc.get_threshold()[0] > 500_000
        assert gc.isenabled()
        process_lifecycle.resume_garbage_collection()
        assert gc.get_threshold() == THRESHOLDS
        with process_lifecycle.defer_garbage_collection():  # a command in a command
            pass
        assert gc.get_threshold() == THRESHOLDS
    assert gc.get_threshold() == THRESHOLDS


def test_a_nested_command_keeps_collection_deferred() -> None:
    with process_lifecycle.defer_garbage_collection():
        with process_lifecycle.defer_garbage_collection():
            pass
        assert gc.get_threshold()[0] > 500_000
        process_lifecycle.resume_garbage_collection()
        assert gc.get_threshold() == THRESHOLDS


def test_thresholds_of_the_caller_are_kept() -> None:
    gc.set_threshold(5, 5, 5)
    process_lifecycle.resume_garbage_collection()
    assert gc.get_threshold() == (5, 5, 5)


@pytest.mark.usefixtures("no_plots")
def test_training_steps_use_the_normal_thresholds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    thresholds = []
    train_step = TrainerState.train_step

    def recorded_step(self: TrainerState, *args: object) -> None:
        thresholds.append(gc.get_threshold())
        train_step(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(TrainerState, "train_step", recorded_step)
    (tmp_path / "tiny.yaml").write_text(TINY_RECIPE)
    command = ["train", str(tmp_path / "tiny.yaml"), "optim.steps=2", "run.eval_every=2"]
    frozen = gc.get_freeze_count()
    assert main([*command, "--out", str(tmp_path / "run")]) == 0
    assert thresholds == [THRESHOLDS] * 2
    assert gc.get_threshold() == THRESHOLDS
    assert gc.get_freeze_count() > frozen  # objects of the imports


def test_a_process_exits_without_a_collection() -> None:
    """atexit functions run; remaining objects are not collected."""
    lines = [
        "import atexit, sys",
        "from finetune.cli.main import main",
        "class Cycle:",
        "    def __del__(self):",
        "        print('collected')",
        "cycle = Cycle()",
        "cycle.itself = cycle",
        "sys.argv = ['finetune', {word!r}]",
        "code = main()",
        "atexit.register(print, 'registered')",
        "sys.exit(code)",
    ]
    program = "\n".join(lines)
    for argument, code in (("--version", 0), ("--no-such", 2)):
        result = subprocess.run(
            [sys.executable, "-c", program.format(word=argument)], capture_output=True, text=True
        )
        assert result.returncode == code
        assert result.stdout.endswith("registered\n")
