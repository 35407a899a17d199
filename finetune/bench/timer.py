"""Measure the time of training steps, and the memory of the process and the device."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = [
    "PREFETCH_FACTOR",
    "StepTimer",
    "peak_device_bytes",
    "peak_host_bytes",
    "process_age_seconds",
    "synchronize",
    "value_range",
]

# Batches that each worker loads ahead. The warm-up is extended by this many steps per worker,
# because steps on batches that were loaded ahead look faster.
PREFETCH_FACTOR = 2


class StepTimer:
    """Times training steps after a warm-up; synchronizes the device at the start and the end.

    Args:
        device: the device that runs the steps.
        warmup: number of untimed steps, at least 1.
        steps: number of timed steps; 0 measures only `seconds_to_first_step`.
        tick: function to call after each step.

    Attributes:
        seconds: duration of the timed steps.
        seconds_to_first_step: time from the start of the process to the end of the first step.
    """

    def __init__(
        self, device: torch.device, *, warmup: int, steps: int, tick: Callable[[], object]
    ) -> None:
        self.device = device
        self.warmup = warmup
        self.steps = steps
        self.seconds = 0.0
        self.seconds_to_first_step = 0.0
        self._tick = tick
        self._done = 0
        self._started = 0.0

    def step(self) -> None:
        """Count a finished step; call it after each step."""
        self._done += 1
        if self._done in (1, self.warmup, self.warmup + self.steps):
            synchronize(self.device)
            now = time.perf_counter()
            if self._done == 1:
                self.seconds_to_first_step = process_age_seconds()
            if self._done == self.warmup:
                self._started = now
            self.seconds = now - self._started
        self._tick()


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def value_range(values: Sequence[float]) -> dict[str, Any]:
    """Summarize repeated measurements: {"median", "min", "max", "values"}."""
    middle = statistics.median(values)
    return {"median": middle, "min": min(values), "max": max(values), "values": list(values)}


def process_age_seconds() -> float:
    """Return the seconds since this process started, including imports."""
    import psutil  # type: ignore[import-untyped]  # Accelerate brings it

    return time.time() - psutil.Process().create_time()


def peak_host_bytes() -> int:
    """Return the peak memory of this process in bytes, without its workers."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024)


def peak_device_bytes(device: torch.device) -> int | None:
    """Return the peak memory that tensors took on a GPU, in bytes; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
