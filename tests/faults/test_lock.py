"""Two runs in one directory: the second fails and names the first; dead processes hold no lock."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forked_runs import (
    SMALL_OVERRIDES,
    ChildResult,
    check_all_checkpoints,
    check_child_error,
    check_child_success,
    child_exit_code,
    copy_run,
    fork_process,
    read_train_losses,
    read_weights,
    run_command_in_child,
    run_in_child,
    temporary_files,
    tiny_recipe,
    train_until_kill_point,
)

from finetune.training.train import train
from finetune.training.trainer_state import TrainerState

pytestmark = pytest.mark.usefixtures("no_plots")

RECIPE = tiny_recipe(*SMALL_OVERRIDES)
REFUSED = "exit code 5 and the process of the first run, which continues undisturbed"
TAKEN_OVER = "it is taken over, and the run continues to the same weights"
NOT_DISTURBED = "works, or reports that no model exists yet; the run is not disturbed"


class PausedRun:
    """A run that pauses between two steps until `finish` is called."""

    def __init__(self, out: Path, at_step: int) -> None:
        self.output = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `kill`)
        wait_fd, continue_fd = os.pipe()
        reached_fd, signal_fd = os.pipe()

        def work() -> None:
            os.close(continue_fd)
            step = TrainerState.train_step

            def waiting_step(trainer: TrainerState, *args: object) -> None:
                if trainer.counters.step == at_step:
                    os.write(signal_fd, b"!")
                    os.read(wait_fd, 1)
                step(trainer, *args)

            TrainerState.train_step = waiting_step  # type: ignore[method-assign]
            train(RECIPE, out, resume=True)

        self.process = fork_process(work, self.output.fileno())
        os.close(signal_fd)
        os.close(wait_fd)
        self._continue_fd = continue_fd
        assert os.read(reached_fd, 1) == b"!", "the run ended before that step"
        os.close(reached_fd)

    def finish(self) -> ChildResult:
        """Let the run continue to its end."""
        os.close(self._continue_fd)
        code = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        self.process = 0
        self.output.seek(0)
        return ChildResult(code, self.output.read().decode())

    def kill(self) -> None:
        if self.process:
            os.kill(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)
        self.output.close()


@pytest.fixture
def start_paused_run(tmp_path: Path) -> Iterator[Callable[..., PausedRun]]:
    runs: list[PausedRun] = []

    def start(out: Path, at_step: int = 5) -> PausedRun:
        runs.append(PausedRun(out, at_step))
        return runs[-1]

    yield start
    for run in runs:
        run.kill()


def check_undisturbed(run: PausedRun, out: Path, finished_run: Path) -> None:
    check_child_success(run.finish())
    assert read_weights(out) == read_weights(finished_run)
    assert read_train_losses(out) == read_train_losses(finished_run)


@pytest.mark.parametrize("resume", [False, True], ids=["new", "resume"])
def test_a_second_run_is_refused(
    resume: bool, finished_run: Path, tmp_path: Path, start_paused_run, fault
) -> None:
    out = tmp_path / "run"
    first = start_paused_run(out)
    for _ in range(2):  # a refused run does not remove the lock
        result = run_in_child(lambda: train(RECIPE, out, resume=resume))
        check_child_error(result, "setup.in_use", out, f"{first.process} on {socket.gethostname()}")
    link = tmp_path / "another-name"
    link.symlink_to(out)
    assert child_exit_code(lambda: train(RECIPE, link, resume=resume)) == 5
    check_undisturbed(first, out, finished_run)
    fault("a second run in the same directory", REFUSED)


def test_four_runs_start_together(finished_run: Path, tmp_path: Path, fault) -> None:
    out = tmp_path / "run"
    with tempfile.TemporaryFile() as output:
        children = [fork_process(lambda: train(RECIPE, out), output.fileno()) for _ in range(4)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        output.seek(0)
        text = output.read().decode()
    assert sorted(codes) == [0, 5, 5, 5], text
    assert read_weights(out) == read_weights(finished_run)
    assert read_train_losses(out) == read_train_losses(finished_run)
    fault("four runs start in one directory together", "one runs, the others end with exit code 5")


@pytest.mark.parametrize(
    "holder",
    [
        "{parent} on {host}\n",  # a process id that is in use again
        "1 on {host}\n",
        "4194000 on {host}\n",  # an unused process id
        "77 on another-host\n",
        "",
        "\0\0\0 on",
    ],
    ids=["reused", "init", "nobody", "other-host", "empty", "damaged"],
)
def test_the_lock_file_of_a_dead_process_is_taken_over(
    holder: str, finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault
) -> None:
    """The kernel releases the lock with its process; the text is only for error messages."""
    out = tmp_path / "run"
    assert child_exit_code(lambda: train_until_kill_point(60, RECIPE, out)) == -signal.SIGKILL
    assert (out / ".lock").read_text(), "it did not hold the lock"
    text = holder.format(parent=os.getpid(), host=socket.gethostname())
    (out / ".lock").write_text(text)
    check_child_success(run_in_child(lambda: train(RECIPE, out, resume=True)))
    assert read_weights(out) == read_weights(finished_run)
    assert temporary_files(out) == []
    fault("the lock of a dead process, with any process id and host", TAKEN_OVER)


def test_a_lock_held_on_another_host(finished_run: Path, tmp_path: Path, fault) -> None:
    """On a shared file system the file server has the lock; its text names the holder."""
    out = copy_run(finished_run, tmp_path / "run")
    reader, writer = os.pipe()

    def hold() -> None:
        with (out / ".lock").open("w") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            file.write("77 on another-host\n")
            file.flush()
            os.write(writer, b"!")
            time.sleep(600)

    with tempfile.TemporaryFile() as output:
        holder = fork_process(hold, output.fileno())
    try:
        os.read(reader, 1)
        result = run_in_child(lambda: train(RECIPE, out, resume=True))
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    check_child_error(result, "setup.in_use", out, "77 on another-host")
    fault("a lock that is held on another host", "exit code 5 and that process and host")


@pytest.mark.parametrize("command", ["eval", "predict", "report", "push", "info"])
def test_commands_that_read_a_run_during_training(
    command: str, finished_run: Path, tmp_path: Path, image_folder: Path, start_paused_run, fault
) -> None:
    out = tmp_path / "run"
    first = start_paused_run(out)
    lock_text = (out / ".lock").read_text()
    arguments = {
        "eval": ("eval", out),
        "predict": ("predict", out, image_folder / "test"),
        "report": ("report", out),
        "push": ("push", out, "me/repository"),
        "info": ("info", out),
    }
    result = run_command_in_child(*arguments[command])
    assert "Traceback" not in result.output
    if command == "report":
        assert result.exit_code == 0, result.output
    else:
        assert result.exit_code == 4, result.output
        assert str(out) in result.output
        assert result.error_code in ("weights.not_found", "checkpoint.not_finished")
    assert (out / ".lock").read_text() == lock_text
    assert child_exit_code(lambda: train(RECIPE, out, resume=True)) == 5, "the lock is still held"
    check_undisturbed(first, out, finished_run)
    fault("eval, predict, report, push while a run trains", NOT_DISTURBED)


def test_commands_on_a_run_that_is_just_ending(
    finished_run: Path, tmp_path: Path, start_paused_run
) -> None:
    out = copy_run(finished_run, tmp_path / "run")
    record = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps({**record, "status": "running"}))
    assert run_command_in_child("report", out).exit_code == 0
    assert run_command_in_child("eval", out, "--split", "val").exit_code == 0
    assert check_all_checkpoints(out)
