"""One rank dies, hangs or raises: all end, the cause is reported once, no process is left."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from launches import Launch, finetune_tracebacks, launch_training

TIMEOUT_SECONDS = 20
LAUNCHER_TIMEOUT_SECONDS = 30  # from SIGTERM to SIGKILL for a rank that does not end

# Replaces `-m finetune` in every rank, and makes one rank fail after its third step.
FAILING_PROGRAM = """
import os, sys, time
from finetune.training.trainer_state import TrainerState
from finetune.errors import DataError

step = TrainerState.train_step

def failing(self, *arguments):
    step(self, *arguments)
    if self.counters.step == 3 and os.environ["RANK"] == "{rank}":
        {action}

TrainerState.train_step = failing
from finetune.cli.main import main
sys.exit(main())
"""


def write_failing_program(folder: Path, rank: int, action: str) -> tuple[str, ...]:
    """Write a program in which one rank runs `action` after its third step."""
    path = folder / "failing.py"
    path.write_text(FAILING_PROGRAM.format(rank=rank, action=action))
    return (str(path),)


def check_ended(launch: Launch, cause: str) -> None:
    """Check that the launch failed and reported the cause once."""
    assert launch.process.returncode != 0
    assert launch.text.count(cause) == 1, launch.text
    assert "internal error" not in launch.text.replace(cause, "")
    assert not finetune_tracebacks(launch.text)


@pytest.mark.parametrize(
    "launcher, rank",
    [
        pytest.param("accelerate", 1, id="accelerate-rank1"),
        pytest.param("accelerate", 0, id="accelerate-rank0"),
        pytest.param("torchrun", 1, id="torchrun-rank1"),
        pytest.param("torchrun", 0, id="torchrun-rank0"),
    ],
)
def test_the_other_ranks_end_when_one_is_killed(
    launcher: str, rank: int, tmp_path: Path, fault: Any
) -> None:
    with launch_training(tmp_path, launcher=launcher) as launch:
        launch.wait_for_steps()
        os.kill(launch.rank_process_ids()[rank], signal.SIGKILL)
        seconds = launch.wait_for_end()
        check_ended(launch, f"rank {rank} of 2: ended without an error message")
        if rank:
            assert launch.read_record()["status"] == "failed (5)"
    fault(
        "SIGKILL to one rank of two",
        "the other ranks end, the rank is named once, no process is left",
        f"{launcher}: {seconds:.1f} s",
    )


FAILURES = {
    "FinetuneError": ('raise DataError("cats/7.png: is gone; restore it")', "cats/7.png: is gone"),
    "other error": ('raise KeyError("lost")', "internal error: KeyError"),
    "sys.exit": ("os._exit(9)", "ended without an error message"),
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("failure", list(FAILURES))
def test_the_other_ranks_end_when_one_raises(
    failure: str, rank: int, tmp_path: Path, fault: Any
) -> None:
    code, cause = FAILURES[failure]
    with launch_training(tmp_path, program=write_failing_program(tmp_path, rank, code)) as launch:
        launch.wait_for_end()
        check_ended(launch, cause)
        if rank:  # rank 0 writes the record, with the cause of rank 1
            expected = {"FinetuneError": 3, "other error": 1, "sys.exit": 5}[failure]
            assert launch.read_record()["status"] == f"failed ({expected})"
    fault(
        "one rank of two raises, or ends without a message",
        "all end, the cause is printed once, run.json has its exit code",
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_the_other_ranks_end_when_one_hangs(rank: int, tmp_path: Path, fault: Any) -> None:
    with launch_training(tmp_path, f"run.timeout_seconds={TIMEOUT_SECONDS}") as launch:
        launch.wait_for_steps()
        os.kill(launch.rank_process_ids()[rank], signal.SIGSTOP)
        seconds = launch.wait_for_end()
        check_ended(launch, f"rank {rank} of 2: no answer within {TIMEOUT_SECONDS} seconds")
    fault(
        "SIGSTOP to one rank of two",
        f"the others give up after run.timeout_seconds ({TIMEOUT_SECONDS} here) and name it; the "
        f"launcher kills it {LAUNCHER_TIMEOUT_SECONDS} s later",
        f"{seconds:.0f} s",
    )


def test_an_error_of_all_ranks_is_printed_once(
    image_folder: Path, tmp_path: Path, fault: Any
) -> None:
    (image_folder / "train" / "red" / "red-0.png").write_bytes(b"no image")
    overrides = [f"data.source=folder:{image_folder}", "data.batch_size=6"]
    with launch_training(tmp_path, *overrides) as launch:
        launch.wait_for_end()
        check_ended(launch, "red-0.png")
        assert launch.read_record()["status"] == "failed (3)"
    fault("an image that no rank can read", "the error is printed once, not once per rank")


def test_a_run_directory_in_use_is_reported_once(tmp_path: Path, fault: Any) -> None:
    with launch_training(tmp_path, launcher="python", name="first") as first:
        first.wait_for_steps()
        with launch_training(tmp_path, out=first.out, name="second") as second:
            assert second.process.wait(240) != 0
            check_ended(second, f"in use by process {first.process.pid}")
        assert first.process.poll() is None
    fault("rank 0 cannot take the run directory", "the error is printed once, not once per rank")
