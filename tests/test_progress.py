"""Log lines are sums over images; the first signal asks, the second one ends."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from finetune.errors import Interrupted
from finetune.progress import Meter, StopSignals


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


def test_the_first_signal_is_a_request_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as stop:
        assert stop.received == 0
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


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
