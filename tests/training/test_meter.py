"""Log lines are sums over images; the first signal asks, the second one ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch

from finetune.errors import DataError, FinetuneError, Interrupted
from finetune.training.distributed import Launcher
from finetune.training.meter import Meter, StopSignals

Captured = pytest.CaptureFixture[str]


def test_a_line_is_a_mean_over_images_not_over_batches() -> None:
    meter = Meter(torch.device("cpu"), 100.0)
    logits = torch.tensor([[3.0, 2, 1, 0, -1, -2, -3]])
    yes, no = torch.tensor(True), torch.tensor(False)
    meter.add(torch.tensor(6.0), logits.expand(3, -1), torch.tensor([0, 0, 4]), counts=yes)
    meter.add(torch.tensor(float("nan")), logits, torch.tensor([6]), counts=no)
    meter.add(torch.tensor(1.0), logits, torch.tensor([6]), counts=yes)
    line = meter.line(meter.sums(), step=7, samples_seen=28, lr=0.5)
    assert line["loss"] == pytest.approx(7 / 4)
    assert line["top1"] == 2 / 4
    assert line["top5"] == 3 / 4
    assert line["seconds"] >= 100
    assert (line["step"], line["samples_seen"], line["split"]) == (7, 28, "train")
    empty = meter.line(meter.sums(), step=8, samples_seen=32, lr=0.5)
    assert empty["loss"] is None, "a line without images has no mean"


def test_what_is_not_training_does_not_count_as_its_time() -> None:
    meter = Meter(torch.device("cpu"), 0.0)
    labels = torch.zeros(100, dtype=torch.long)
    meter.add(torch.tensor(1.0), torch.zeros(100, 2), labels, counts=torch.tensor(True))
    paused = meter.pause()
    time.sleep(0.5)
    meter.resume(paused)
    assert meter.line(meter.sums(), step=1, samples_seen=100, lr=0)["images_per_second"] > 400


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"])
def test_the_first_signal_is_a_request_and_handlers_come_back(name: str) -> None:
    number = signal.Signals[name]
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGCONT)  # Slurm sends it first
            assert stop.received == 0
            os.kill(os.getpid(), number)
            assert stop.received == number
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_hang_up_that_nohup_has_switched_off_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.received == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_where_nothing_is_to_be_saved_a_signal_ends_at_once() -> None:
    def hear(stop: StopSignals) -> None:
        with stop.at_once("run: continue"):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)

    with StopSignals() as stop:
        with pytest.raises(Interrupted, match="continue") as caught:
            hear(stop)
        assert caught.value.exit_code == 143
        with pytest.raises(Interrupted):
            hear(stop)  # it came before; a second one would have ended the process


def test_the_second_signal_ends_the_process_at_once() -> None:
    child = os.fork()
    if child == 0:
        with StopSignals():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(30)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 130


def test_what_a_launcher_passes_on_is_not_the_second_signal() -> None:
    def end(*numbers: signal.Signals) -> int:
        child = os.fork()
        if child == 0:
            with StopSignals(Launcher(os.getppid())):
                for number in numbers:
                    os.kill(os.getpid(), number)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert end(signal.SIGTERM, signal.SIGTERM) == 0
    assert end(signal.SIGTERM, signal.SIGTERM, signal.SIGTERM) == 143
    assert end(signal.SIGUSR1, signal.SIGTERM) == 143


class Swallows:
    """Hears a signal where Python drops whatever is raised: while it is cleared away."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def end_of(work: Callable[[], None]) -> Interrupted:
    """The error of a block in which a signal comes."""
    with (
        StopSignals() as stop,
        pytest.raises(Interrupted, match="run: continue") as caught,
        stop.at_once("run: continue"),
    ):
        work()
    assert stop.received == signal.SIGTERM
    assert caught.value.exit_code == 143
    return caught.value


@pytest.mark.parametrize("taken", [Exception, FinetuneError, Interrupted, RuntimeError])
def test_no_clause_around_the_work_takes_a_signal_for_an_error(taken: type[Exception]) -> None:
    went_on = []

    def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except taken:
            went_on.append("after the error")
        went_on.append("to the next")

    assert end_of(work).__suppress_context__
    assert not went_on


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_that_was_dropped_ends_the_block_all_the_same() -> None:
    end_of(lambda: [Swallows()].clear())


def test_what_a_library_makes_of_a_signal_is_its_cause() -> None:
    def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except BaseException as error:
            raise RuntimeError("odd") from error

    assert str(end_of(work).__cause__) == "odd"


def test_without_a_signal_errors_stay_what_they_are() -> None:
    with StopSignals() as stop:
        for error in (DataError("a.png: odd"), Interrupted("another's", 2), KeyError("odd")):
            with pytest.raises(type(error)) as caught, stop.at_once("run: continue"):
                raise error
            assert caught.value is error
        os.kill(os.getpid(), signal.SIGTERM)  # after a block it is a request again
        assert stop.received == signal.SIGTERM


def test_a_signal_between_the_end_of_the_work_and_that_of_its_block() -> None:
    def leave(stop: StopSignals) -> None:
        block = stop.at_once("run: continue")
        block.__enter__()  # what comes now is past the body, and not yet in the block's own end
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="run: continue") as caught, StopSignals() as stop:
        leave(stop)
    assert caught.value.exit_code == 130


def test_a_worker_that_was_just_forked_ends_without_a_word(capfd: Captured) -> None:
    with StopSignals() as stop, stop.at_once("run: continue"):
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
