"""Two runs in one directory: the second ends and names the first; the dead hold no lock."""

from __future__ import annotations

import fcntl
import json
import os
import re
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
from refusals import refused

from finetune.run.directory import RunDir
from finetune.training.train import train
from finetune.training.trainer_state import TrainerState

pytestmark = pytest.mark.usefixtures("no_pictures")

RECIPE = tiny_recipe(*SMALL_OVERRIDES)
SECOND = "exit code 5 and the first one's process; the first one is not disturbed"
STALE = "it is taken over, and the run goes on to the same weights"
READERS = "works, or says that there is nothing yet; the run is not disturbed"


class Paused:
    """A run that stands still between two steps until it is told to go on."""

    def __init__(self, out: Path, before: int) -> None:
        self.said = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `end`)
        waits, go = os.pipe()
        reached, tells = os.pipe()

        def work() -> None:
            os.close(go)
            step = TrainerState.train_step

            def waiting_step(trainer: TrainerState, *args: object) -> None:
                if trainer.counters.step == before:
                    os.write(tells, b"!")
                    os.read(waits, 1)
                step(trainer, *args)

            TrainerState.train_step = waiting_step  # type: ignore[method-assign]
            train(RECIPE, out, resume=True)

        self.process = fork_process(work, self.said.fileno())
        os.close(tells)
        os.close(waits)
        self._go = go
        assert os.read(reached, 1) == b"!", "the run ended before it got there"
        os.close(reached)

    def end(self) -> ChildResult:
        """Let it finish."""
        os.close(self._go)
        code = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        self.process = 0
        self.said.seek(0)
        return ChildResult(code, self.said.read().decode())

    def kill(self) -> None:
        if self.process:
            os.kill(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)
        self.said.close()


@pytest.fixture
def paused(tmp_path: Path) -> Iterator[Callable[..., Paused]]:
    runs: list[Paused] = []

    def begin(out: Path, before: int = 5) -> Paused:
        runs.append(Paused(out, before))
        return runs[-1]

    yield begin
    for run in runs:
        run.kill()


def check_undisturbed(run: Paused, out: Path, whole: Path) -> None:
    check_child_success(run.end())
    assert read_weights(out) == read_weights(whole)
    assert read_train_losses(out) == read_train_losses(whole)


@pytest.mark.parametrize("resume", [False, True], ids=["new", "resume"])
def test_a_second_run(resume: bool, whole: Path, tmp_path: Path, paused, fault) -> None:
    out = tmp_path / "run"
    first = paused(out)
    for _ in range(2):  # whoever was refused takes no lock away
        ended = run_in_child(lambda: train(RECIPE, out, resume=resume))
        check_child_error(ended, "setup.in_use", out, f"{first.process} on {socket.gethostname()}")
    link = tmp_path / "another-name"
    link.symlink_to(out)
    assert child_exit_code(lambda: train(RECIPE, link, resume=resume)) == 5
    check_undisturbed(first, out, whole)
    fault("a second run in the same directory", SECOND)


def test_two_runs_of_one_process(tmp_path: Path, fault) -> None:
    """The kernel's lock is the process's, so that its threads must be told apart otherwise."""
    first = RunDir(tmp_path / "run")
    first.open()
    (tmp_path / "other").mkdir()
    for name in ("run", "other/../run"):
        with refused("setup.in_use", tmp_path / name, os.getpid()):
            RunDir(tmp_path / name).open()
    held = child_exit_code(lambda: RunDir(tmp_path / "run").open())
    assert held == 5, "whoever was refused has not dropped the lock"
    first.close()
    first.open()
    first.close()
    fault("a second run in the same directory", SECOND)


def test_a_process_that_is_just_ending(tmp_path: Path, fault) -> None:
    """What a launcher starts anew may find the rank 0 before, on another machine perhaps."""
    run, (reader, writer) = RunDir(tmp_path / "run"), os.pipe()

    def ends_soon() -> None:
        held = RunDir(run.path)
        held.open()
        os.write(writer, b"!")
        time.sleep(2)

    with tempfile.TemporaryFile() as said:
        first = fork_process(ends_soon, said.fileno())
    assert os.read(reader, 1) == b"!"
    with refused("setup.in_use", run.path, first):
        run.open(timeout_seconds=0.3)
    run.open(timeout_seconds=60)
    run.close()
    os.waitpid(first, 0)
    fault(
        "a restart by torchrun while the rank 0 before still ends",
        "it waits up to 30 seconds for the run directory",
    )


def test_many_runs_at_once(whole: Path, tmp_path: Path, fault) -> None:
    out = tmp_path / "run"
    with tempfile.TemporaryFile() as said:
        children = [fork_process(lambda: train(RECIPE, out), said.fileno()) for _ in range(4)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        said.seek(0)
        text = said.read().decode()
    assert sorted(codes) == [0, 5, 5, 5], text
    assert read_weights(out) == read_weights(whole)
    assert read_train_losses(out) == read_train_losses(whole)
    fault("four runs begin in one directory at once", "one runs, the others end with exit code 5")


@pytest.mark.parametrize(
    "holder",
    [
        "{parent} on {host}\n",  # a number that another process has now
        "1 on {host}\n",
        "4194000 on {host}\n",  # nobody's
        "77 on another-host\n",
        "",
        "\0\0\0 on",
    ],
    ids=["reused", "init", "nobody", "other-host", "empty", "damaged"],
)
def test_a_lock_that_nobody_holds(
    holder: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault
) -> None:
    """The kernel keeps the lock and drops it with its process; the text is only for people."""
    out = tmp_path / "run"
    assert child_exit_code(lambda: train_until_kill_point(60, RECIPE, out)) == -signal.SIGKILL
    assert (out / ".lock").read_text(), "it was killed with the lock"
    text = holder.format(parent=os.getpid(), host=socket.gethostname())
    (out / ".lock").write_text(text)
    check_child_success(run_in_child(lambda: train(RECIPE, out, resume=True)))
    assert read_weights(out) == read_weights(whole)
    assert temporary_files(out) == []
    fault("the lock of a dead process, whatever number and host it names", STALE)


def test_a_lock_held_on_another_host(whole: Path, tmp_path: Path, fault) -> None:
    """On a shared file system the lock is the file server's: its text tells where it is held."""
    out = copy_run(whole, tmp_path / "run")
    reader, writer = os.pipe()

    def hold() -> None:
        with (out / ".lock").open("w") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            file.write("77 on another-host\n")
            file.flush()
            os.write(writer, b"!")
            time.sleep(600)

    with tempfile.TemporaryFile() as said:
        holder = fork_process(hold, said.fileno())
    try:
        os.read(reader, 1)
        ended = run_in_child(lambda: train(RECIPE, out, resume=True))
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    check_child_error(ended, "setup.in_use", out, "77 on another-host")
    fault("a lock that is held on another host", "exit code 5 and that process and host")


@pytest.mark.parametrize("verb", ["eval", "predict", "report", "push", "info"])
def test_verbs_that_read_while_it_trains(
    verb: str, whole: Path, tmp_path: Path, image_folder: Path, paused, fault
) -> None:
    out = tmp_path / "run"
    first = paused(out)
    before = (out / ".lock").read_text()
    words = {
        "eval": ("eval", out),
        "predict": ("predict", out, image_folder / "test"),
        "report": ("report", out),
        "push": ("push", out, "me/repository"),
        "info": ("info", out),
    }
    ended = run_command_in_child(*words[verb])
    assert "Traceback" not in ended.output
    if verb == "report":
        assert ended.exit_code == 0, ended.output
    else:
        assert ended.exit_code == 4, ended.output
        assert str(out) in ended.output
        assert re.search("has no model/ yet|is not finished|has no finished model", ended.output)
    assert (out / ".lock").read_text() == before
    assert child_exit_code(lambda: train(RECIPE, out, resume=True)) == 5, "the lock is still held"
    check_undisturbed(first, out, whole)
    fault("eval, predict, report, push while a run trains", READERS)


def test_the_report_of_a_run_that_ends_just_now(whole: Path, tmp_path: Path, paused) -> None:
    out = copy_run(whole, tmp_path / "run")
    record = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps({**record, "status": "running"}))
    assert run_command_in_child("report", out).exit_code == 0
    assert run_command_in_child("eval", out, "--split", "val").exit_code == 0
    assert check_all_checkpoints(out)
