"""The step timer excludes the warm-up and synchronizes the device at both ends."""

from __future__ import annotations

import time

import pytest
import torch
from doubles import StepCounter

from finetune.bench.timer import (
    StepTimer,
    peak_device_bytes,
    peak_host_bytes,
    process_age_seconds,
)


def test_timer_excludes_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 12.0, 20.0])
    recorder = StepCounter()
    monkeypatch.setattr("finetune.bench.timer.time.perf_counter", lambda: next(now))
    timer = StepTimer(torch.device("cpu"), warmup=3, steps=4, tick=recorder.tick)
    for _ in range(7):
        timer.step()
    assert (timer.seconds, recorder.steps) == (8.0, 7)
    assert timer.seconds_to_first_step > 0


def test_memory_and_process_age() -> None:
    assert peak_device_bytes(torch.device("cpu")) is None
    assert peak_host_bytes() > 50 * 2**20
    before = process_age_seconds()
    time.sleep(0.05)
    assert before < process_age_seconds() < before + 600
