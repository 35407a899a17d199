"""Measure the peak memory of a block of code: tensors on a GPU, the whole process on a CPU."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch

__all__ = ["PeakMemory", "measure_peak_memory"]

_SAMPLING_SECONDS = 0.002


@dataclass
class PeakMemory:
    """The memory of a block of code.

    Attributes:
        start_bytes: bytes in use at the start of the block.
        peak_bytes: maximum of the bytes in use until the end of the block.
    """

    start_bytes: int
    peak_bytes: int


@contextlib.contextmanager
def measure_peak_memory(device: torch.device) -> Iterator[PeakMemory]:
    """Measure the memory of the block; `peak_bytes` is set at its end.

    On a GPU, torch counts the bytes of tensors. Elsewhere, a thread reads the memory of the process
    every few milliseconds; before the block starts, freed memory is returned to the system.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        memory = PeakMemory(torch.cuda.memory_allocated(device), 0)
        yield memory
        memory.peak_bytes = torch.cuda.max_memory_allocated(device)
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(0)
    start_bytes = _resident_bytes()
    memory, has_ended = PeakMemory(start_bytes, start_bytes), threading.Event()

    def sample() -> None:
        while not has_ended.wait(_SAMPLING_SECONDS):
            memory.peak_bytes = max(memory.peak_bytes, _resident_bytes())

    sampler = threading.Thread(target=sample, name="peak memory", daemon=True)
    sampler.start()
    try:
        yield memory
    finally:
        has_ended.set()
        sampler.join()
        memory.peak_bytes = max(memory.peak_bytes, _resident_bytes())


def _resident_bytes() -> int:
    import psutil  # type: ignore[import-untyped]  # a dependency of Accelerate

    return int(psutil.Process().memory_info().rss)
