"""The clock leaves the warm-up out and waits for the device at both ends."""

from __future__ import annotations

import time

import pytest
import torch
from doubles import Recorder

from finetune.bench.timer import Clock, Loop, host_bytes, seconds_alive


def test_a_clock_leaves_the_warm_up_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 12.0, 20.0])
    recorder = Recorder()
    monkeypatch.setattr("finetune.bench.timer.time.perf_counter", lambda: next(now))
    clock = Clock(torch.device("cpu"), warmup=3, steps=4, tick=recorder.tick)
    for _ in range(7):
        clock.step()
    assert (clock.seconds, recorder.steps) == (8.0, 7)
    assert clock.alive > 0


def test_what_this_process_has_had() -> None:
    loop = Loop()
    loop.device = torch.device("cpu")
    assert loop.memory() == {"host": host_bytes(), "device": None}
    assert host_bytes() > 50 * 2**20
    before = seconds_alive()
    time.sleep(0.05)
    assert before < seconds_alive() < before + 600
