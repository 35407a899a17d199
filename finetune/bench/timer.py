"""Read time and memory of a loop, alike in our own training and in that of others."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["BATCHES_AHEAD", "Clock", "Loop", "host_bytes", "seconds_alive", "spread", "synchronise"]

# That torch's loader keeps for each worker. What was loaded during the first steps would make the
# timed ones look faster.
BATCHES_AHEAD = 2


class Clock:
    """Times the steps after a warm-up; the device is waited for at both ends.

    Args:
        device: that computes.
        warmup: steps that are left out, at least 1.
        steps: that are timed; 0 for the first one of the warm-up alone.
        tick: told of each step.
    Attributes:
        seconds: of the timed steps.
        alive: seconds from the start of the process to the end of the first step.
    """

    def __init__(
        self, device: torch.device, *, warmup: int, steps: int, tick: Callable[[], None]
    ) -> None:
        self.device = device
        self.warmup = warmup
        self.steps = steps
        self.seconds = 0.0
        self.alive = 0.0
        self._tick = tick
        self._done = 0
        self._started = 0.0

    def step(self) -> None:
        """Note that a step was taken."""
        self._done += 1
        if self._done in (1, self.warmup, self.warmup + self.steps):
            synchronise(self.device)
            now = time.perf_counter()
            if self._done == 1:
                self.alive = seconds_alive()
            if self._done == self.warmup:
                self._started = now
            self.seconds = now - self._started
        self._tick()


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished its queue."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Summarise repeated measurements: {"median", "min", "max", "values"}."""
    middle = statistics.median(values)
    return {"median": middle, "min": min(values), "max": max(values), "values": list(values)}


def seconds_alive() -> float:
    """Seconds since this process was started, its imports among them."""
    import psutil  # type: ignore[import-untyped]  # Accelerate brings it

    return time.time() - psutil.Process().create_time()


def host_bytes() -> int:
    """The most memory that this process has had, without its workers."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024)


class Loop:
    """A training loop that is measured, on a device that others use in turn."""

    device: torch.device

    def memory(self) -> dict[str, int | None]:
        """The peaks of this process so far, in bytes: "host", and "device" where it is another."""
        is_gpu = self.device.type == "cuda"
        on_device = torch.cuda.max_memory_allocated(self.device) if is_gpu else None
        return {"host": host_bytes(), "device": on_device}

    def rest(self) -> None:
        """Give back the memory that the device keeps for later, while another process works."""
        torch.cuda.empty_cache()
