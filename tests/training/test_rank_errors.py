"""Workers end with their launcher, and one rank reports the cause of a failed launch."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from refusals import refused

from finetune.errors import DataError, DivergedError, FinetuneError, Interrupted, SetupError
from finetune.process_lifecycle import die_with_parent
from finetune.ranks import local_world_size
from finetune.training import accelerator, launcher, rank_errors
from finetune.training.launcher import Launcher
from finetune.training.rank_errors import RankErrors
from finetune.training.signals import StopSignals

LOST = RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer [127.0.0.1]:1")
LATE = RuntimeError("[gloo/transport/tcp/buffer.cc:1] Timed out waiting 5000ms for recv")


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the polling interval and the wait for ranks that ended silently."""
    monkeypatch.setattr(rank_errors, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(rank_errors, "STORE_TIMEOUT_SECONDS", 1.0)


def in_child(work: Callable[[], int]) -> int:
    """Run `work` in a forked process. Returns: its exit code, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code = work()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_local_world_size_counts_processes_on_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert local_world_size(4) == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # two machines
    assert local_world_size(4) == 2


class TestLauncher:
    def test_no_launcher_for_a_process_started_by_hand(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
        monkeypatch.setattr(launcher, "_is_launcher", lambda pid: False)
        assert Launcher.from_parent_process() is None

    @pytest.mark.parametrize(
        "argv, is_launcher",
        [
            (("python", "/usr/bin/torchrun", "train.py"), True),
            (("python", "-m", "torch.distributed.run", "x"), True),
            (("python", "-m", "accelerate.commands.launch"), True),
            (("/usr/bin/python3", "/opt/bin/accelerate", "launch"), True),
            (("bash", "-c", "echo torchrun"), False),
            (("python", "-m", "finetune", "accelerate/torchrun.yaml"), False),
        ],
    )
    def test_launcher_is_recognized_by_its_command_line(
        self, argv: tuple[str, ...], is_launcher: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        command_line = "\0".join(argv).encode()
        monkeypatch.setattr(Path, "read_bytes", lambda self: command_line)
        assert launcher._is_launcher(7) is is_launcher

    def test_end_of_launcher_acts_as_the_first_stop_signal(self) -> None:
        def work() -> int:
            for received in (0, signal.SIGINT):
                launcher = Launcher(os.getppid())
                launcher.ranks_connected = True
                with StopSignals(launcher) as stop:
                    stop.received = received
                    launcher._parent = -1  # as if the launcher had ended
                    assert wait_until(lambda: stop.received != 0 and launcher.has_ended)  # noqa: B023
                    time.sleep(0.2)
                    assert stop.received == (received or signal.SIGTERM)
            return 0

        assert in_child(work) == 0

    def test_running_launcher_has_not_ended(self) -> None:
        def work() -> int:
            launcher = Launcher(os.getppid())
            time.sleep(3 * rank_errors.POLL_SECONDS)
            return int(launcher.has_ended)

        assert in_child(work) == 0

    def test_rank_that_waits_in_c_code_is_ended(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(launcher, "EXIT_GRACE_SECONDS", 0.2)

        def work() -> int:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # like a process that waits in C code
            Launcher(-1)
            time.sleep(60)
            return 0

        assert in_child(work) == 143


class TestConnecting:
    def test_sigterm_ends_a_rank_that_waits_for_the_others(self) -> None:
        def work() -> int:
            # no handler runs during a wait in C code
            signal.signal(signal.SIGTERM, lambda *_: None)
            with accelerator._terminable_while_connecting(Launcher(os.getppid())):
                os.kill(os.getpid(), signal.SIGTERM)
            return 0

        assert in_child(work) == -signal.SIGTERM

    def test_sigterm_handler_is_reset_only_while_connecting(self) -> None:
        before, launcher = signal.getsignal(signal.SIGTERM), Launcher(os.getppid())
        with accelerator._terminable_while_connecting(launcher):
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert launcher.ranks_connected
        with accelerator._terminable_while_connecting(launcher):
            assert signal.getsignal(signal.SIGTERM) is before

    def test_unreachable_ranks_raise_lost_process(self) -> None:
        launcher = Launcher(os.getppid())
        with (
            refused("setup.lost_process", "refused"),
            accelerator._terminable_while_connecting(launcher),
        ):
            raise RuntimeError("Gloo connectFullMesh failed: connection refused\nat line 7")
        assert not launcher.ranks_connected


def test_process_ends_with_its_parent() -> None:
    reader, writer = os.pipe()

    def parent() -> int:
        grandchild = os.fork()
        if grandchild == 0:
            die_with_parent()
            os.write(writer, b"%d\n" % os.getpid())
            time.sleep(600)
        assert os.read(reader, 20) == b"%d\n" % grandchild
        os.write(writer, b"%d\n" % grandchild)
        return 0

    assert in_child(parent) == 0
    grandchild = int(os.read(reader, 20))
    try:
        assert wait_until(lambda: not is_running(grandchild), 20), (
            "the grandchild outlived its parent"
        )
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(grandchild, signal.SIGKILL)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> torch.distributed.TCPStore:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    return torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)


def error_after(ranks: RankErrors, error: BaseException) -> BaseException:
    """Return the error that a rank ends with after it raises `error`."""
    with pytest.raises(BaseException) as caught, ranks.end_rank_0_first():  # noqa: PT011
        raise error
    return caught.value


def error_fields(error: BaseException) -> tuple[str, int, str, bool]:
    """Return the message, the exit code, the error code, and whether another rank prints it."""
    assert isinstance(error, FinetuneError)
    return str(error), error.exit_code, error.code, error.printed_by_other_rank


def two_ranks(timeout_seconds: float = 7) -> list[RankErrors]:
    return [RankErrors(rank, 2, launch_id=0, timeout_seconds=timeout_seconds) for rank in range(2)]


@pytest.mark.usefixtures("store")
class TestRankErrors:
    def test_rank_that_loses_the_others_reports_their_error(self) -> None:
        first, second = two_ranks()
        cause = DataError("cat.png: is gone; restore it", code="data.not_found")
        assert error_after(second, cause) is cause
        assert not cause.printed_by_other_rank
        assert error_fields(error_after(first, LOST)) == (str(cause), 3, "data.not_found", True)

    def test_unexpected_exception_is_reported_by_other_ranks(self) -> None:
        first, second = two_ranks()
        assert isinstance(error_after(second, KeyError("x")), KeyError)
        assert error_fields(error_after(first, LOST)) == ("KeyError", 1, "internal", True)

    @pytest.mark.parametrize("error, expected", [(LOST, ""), (LATE, "7 seconds")])
    def test_silent_rank_is_named(self, error: RuntimeError, expected: str) -> None:
        message, *rest = error_fields(error_after(two_ranks()[0], error))
        assert "rank 1 of 2" in message
        assert expected in message
        assert rest == [SetupError.exit_code, "setup.lost_process", False]

    def test_one_surviving_rank_prints_the_error(self) -> None:
        ranks = [RankErrors(rank, 4, launch_id=0, timeout_seconds=7) for rank in range(3)]
        errors: list[BaseException] = []
        threads = [
            threading.Thread(target=lambda one=one: errors.append(error_after(one, LOST)))
            for one in ranks
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        messages, exit_codes, codes, printed = zip(*map(error_fields, errors), strict=True)
        assert messages == (messages[0],) * 3
        assert "rank 3 of 4" in messages[0]
        assert (exit_codes, codes) == ((5,) * 3, ("setup.lost_process",) * 3)
        assert sorted(printed) == [False, True, True]

    def test_error_raised_on_all_ranks_is_printed_once(self) -> None:
        first, second = two_ranks()
        error = DataError("dog.png: bad")
        assert error_after(second, error) is error
        same_error = error_after(first, DataError("dog.png: bad"))
        assert (error.printed_by_other_rank, error_fields(same_error)[3]) == (False, True)
        other_error = error_after(
            RankErrors(0, 2, launch_id=1, timeout_seconds=7), DataError("cow.png: bad")
        )
        assert error_fields(other_error)[3] is False

    def test_rank_0_ends_first_and_prints_an_interruption(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first, second = two_ranks()
        order: list[int] = []

        def interrupt(ranks: RankErrors) -> None:
            error_after(ranks, Interrupted("run: stopped at step 3", signal.SIGTERM))
            order.append(ranks.rank)

        thread = threading.Thread(target=interrupt, args=(second,))
        thread.start()
        time.sleep(2 * rank_errors.POLL_SECONDS)
        assert not order
        interrupt(first)
        thread.join()
        assert order == [0, 1]
        lost = error_after(RankErrors(0, 2, launch_id=0, timeout_seconds=7), LOST)
        assert isinstance(lost, Interrupted)
        assert error_fields(lost)[1:] == (143, "interrupted", False)

    def test_nested_report_cause_keeps_the_error(self) -> None:
        first, _ = two_ranks()
        with pytest.raises(DivergedError), first.report_cause(), first.report_cause():
            raise DivergedError("run: the gradient was not finite")

    def test_errors_of_another_launch_are_ignored(self) -> None:
        error_after(RankErrors(1, 2, launch_id=0, timeout_seconds=7), DataError("of the first run"))
        error = error_after(RankErrors(0, 2, launch_id=1, timeout_seconds=7), LOST)
        assert "of the first run" not in str(error)


def test_without_a_store_each_rank_prints_its_own_error(
    store: torch.distributed.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_errors, "STORE_TIMEOUT_SECONDS", 0.2)
    first = two_ranks()[0]
    monkeypatch.setattr(first, "_store", HangingStore())
    assert error_fields(error_after(first, LOST))[1:] == (5, "setup.lost_process", False)


class HangingStore:
    """A store behind a broken network link: every call hangs."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: time.sleep(2)


@pytest.mark.parametrize(
    "error, expected",
    [
        (
            DataError("cat.png: is gone; restore it", code="data.not_found"),
            ("rank 0: cat.png: is gone; restore it", 3, "data.not_found", True),
        ),
        (KeyError("x"), ("rank 0: 'x'", 1, "internal", True)),
    ],
)
def test_run_on_main_raises_rank_0s_error_on_every_rank(
    error: Exception, expected: tuple[str, int, str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[object] = []

    def broadcast(outcome: list[object]) -> None:
        """Rank 0 calls this first; its outcome is what the other rank receives."""
        if sent:
            outcome[:] = sent
        else:
            sent.extend(outcome)

    def fail() -> None:
        raise error

    monkeypatch.setattr(accelerator, "broadcast_object_list", broadcast)
    ranks: list[Any] = [SimpleNamespace(is_main_process=main) for main in (True, False)]
    with pytest.raises(type(error)) as raised_on_rank_0:
        accelerator.run_on_main(ranks[0], fail)
    assert raised_on_rank_0.value is error
    with pytest.raises(FinetuneError) as raised_on_rank_1:
        accelerator.run_on_main(ranks[1], pytest.fail)
    assert error_fields(raised_on_rank_1.value) == expected


def test_single_process_raises_its_error_unchanged() -> None:
    error = RuntimeError("gloo")
    assert error_after(RankErrors(0, 1, launch_id=0, timeout_seconds=7), error) is error
