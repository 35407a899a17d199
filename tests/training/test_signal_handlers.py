"""StopSignals: the first signal asks for a stop or interrupts, the second ends the process."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from finetune.errors import DataError, FinetuneError, Interrupted
from finetune.training.launcher import Launcher
from finetune.training.signals import StopSignals


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
def test_first_signal_requests_a_stop_and_handlers_are_restored(name: str) -> None:
    number = signal.Signals[name]
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGCONT)  # Slurm sends SIGCONT first
            assert stop.received == 0
            os.kill(os.getpid(), number)
            assert stop.received == number
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_another_thread_trains_without_handlers() -> None:
    """Python sets handlers only in the main thread; a server may train in another one."""
    before, entered = signal.getsignal(signal.SIGTERM), list[bool]()

    def enter() -> None:
        with StopSignals():
            entered.append(signal.getsignal(signal.SIGTERM) is before)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert entered == [True]


def test_sighup_ignored_by_nohup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.received == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_raise_immediately_interrupts_on_the_first_signal() -> None:
    def receive_signal(stop: StopSignals) -> None:
        with stop.raise_immediately("run: continue"):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)

    with StopSignals() as stop:
        with pytest.raises(Interrupted, match="continue") as caught:
            receive_signal(stop)
        assert caught.value.exit_code == 143
        with pytest.raises(Interrupted):
            receive_signal(stop)  # raises because of the first signal, before sending another


def test_second_signal_ends_the_process() -> None:
    child = os.fork()
    if child == 0:
        with StopSignals():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(30)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 130


def test_signal_forwarded_by_the_launcher_is_not_a_second_signal() -> None:
    def exit_code_after(*numbers: signal.Signals) -> int:
        child = os.fork()
        if child == 0:
            with StopSignals(Launcher(os.getppid())):
                for number in numbers:
                    os.kill(os.getpid(), number)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert exit_code_after(signal.SIGTERM, signal.SIGTERM) == 0
    assert exit_code_after(signal.SIGTERM, signal.SIGTERM, signal.SIGTERM) == 143
    assert exit_code_after(signal.SIGUSR1, signal.SIGTERM) == 143


class SignalOnDelete:
    """Sends a signal from `__del__`, where Python drops exceptions."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def interruption_from(work: Callable[[], None]) -> Interrupted:
    """Return the error that a block raises when a signal arrives during `work`."""
    with (
        StopSignals() as stop,
        pytest.raises(Interrupted, match="run: continue") as caught,
        stop.raise_immediately("run: continue"),
    ):
        work()
    assert stop.received == signal.SIGTERM
    assert caught.value.exit_code == 143
    return caught.value


@pytest.mark.parametrize("caught", [Exception, FinetuneError, Interrupted, RuntimeError])
def test_except_clauses_do_not_catch_an_interruption(caught: type[Exception]) -> None:
    continued = []

    def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except caught:
            continued.append("after the error")
        continued.append("to the next")

    assert interruption_from(work).__suppress_context__
    assert not continued


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interruption_dropped_in_del_still_ends_the_block() -> None:
    interruption_from(lambda: [SignalOnDelete()].clear())


def test_error_raised_from_an_interruption_becomes_its_cause() -> None:
    def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except BaseException as error:
            raise RuntimeError("odd") from error

    assert str(interruption_from(work).__cause__) == "odd"


def test_errors_without_a_signal_are_unchanged() -> None:
    with StopSignals() as stop:
        for error in (DataError("a.png: odd"), Interrupted("another's", 2), KeyError("odd")):
            with pytest.raises(type(error)) as caught, stop.raise_immediately("run: continue"):
                raise error
            assert caught.value is error
        os.kill(os.getpid(), signal.SIGTERM)  # after the block, a signal is a stop request again
        assert stop.received == signal.SIGTERM


def test_signal_between_body_and_exit_is_raised() -> None:
    def send_signal_at_exit(stop: StopSignals) -> None:
        block = stop.raise_immediately("run: continue")
        block.__enter__()  # the signal arrives after the body, before `__exit__`
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="run: continue") as caught, StopSignals() as stop:
        send_signal_at_exit(stop)
    assert caught.value.exit_code == 130


def test_forked_worker_ends_silently_on_sigterm(capfd: pytest.CaptureFixture[str]) -> None:
    with StopSignals() as stop, stop.raise_immediately("run: continue"):
        child = os.fork()
        if child == 0:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(30)
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 143
    assert capfd.readouterr() == ("", "")
