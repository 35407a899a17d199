"""The garbage collector: deferred at the start of a command, as usual in its work."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults_runs import TINY

from finetune import processes
from finetune.cli.main import main
from finetune.training.trainer_state import TrainerState

USUAL = (650, 9, 11)  # nobody else's


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*USUAL)
    yield
    gc.set_threshold(*before)


def test_the_start_defers_it_and_its_end_restores() -> None:
    with processes.defer_garbage_collection():
        assert gc.get_threshold()[0] > 500_000
        assert gc.isenabled()
        processes.resume_garbage_collection()
        assert gc.get_threshold() == USUAL
        with processes.defer_garbage_collection():  # a command in a command
            pass
        assert gc.get_threshold() == USUAL
    assert gc.get_threshold() == USUAL


def test_a_command_in_another_leaves_it_deferred() -> None:
    with processes.defer_garbage_collection():
        with processes.defer_garbage_collection():
            pass
        assert gc.get_threshold()[0] > 500_000
        processes.resume_garbage_collection()
        assert gc.get_threshold() == USUAL


def test_a_callers_own_thresholds_are_kept() -> None:
    gc.set_threshold(5, 5, 5)
    processes.resume_garbage_collection()
    assert gc.get_threshold() == (5, 5, 5)


@pytest.mark.usefixtures("no_pictures")
def test_steps_are_taken_with_the_usual_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    step = TrainerState.step

    def watched(self: TrainerState, *args: object) -> None:
        seen.append(gc.get_threshold())
        step(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(TrainerState, "step", watched)
    (tmp_path / "tiny.yaml").write_text(TINY)
    command = ["train", str(tmp_path / "tiny.yaml"), "optim.steps=2", "run.eval_every=2"]
    frozen = gc.get_freeze_count()
    assert main([*command, "--out", str(tmp_path / "run")]) == 0
    assert seen == [USUAL] * 2
    assert gc.get_threshold() == USUAL
    assert gc.get_freeze_count() > frozen  # its imports


def test_a_process_ends_without_it() -> None:
    """What was registered for the end is called; what lives longer is not looked through."""
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
    for word, code in (("--version", 0), ("--no-such", 2)):
        ended = subprocess.run(
            [sys.executable, "-c", program.format(word=word)], capture_output=True, text=True
        )
        assert ended.returncode == code
        assert ended.stdout.endswith("registered\n")
