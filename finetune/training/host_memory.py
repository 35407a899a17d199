"""The host's memory: this machine's, or what the container around this process may use of it."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

__all__ = ["free_bytes", "keep_freed", "total_bytes"]

_CGROUP = Path("/sys/fs/cgroup")
# the limit, and what is used of it: version 2, version 1
_FILES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)

# of malloc.h; pieces from this size on are always given back, and glibc takes no larger one
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 * 2**20


def total_bytes() -> int:
    """Bytes of memory that processes here can have together."""
    import psutil  # type: ignore[import-untyped]  # Accelerate brings it

    total = int(psutil.virtual_memory().total)
    for limit, _ in _FILES:
        with contextlib.suppress(OSError, ValueError):  # no such limit, or "max"
            total = min(total, _number(limit))
    return total


def free_bytes() -> int:
    """Bytes of memory that processes here can still have together."""
    import psutil

    free = int(psutil.virtual_memory().available)
    for limit, used in _FILES:
        with contextlib.suppress(OSError, ValueError):
            free = min(free, _number(limit) - _number(used))
    return max(free, 0)


def keep_freed() -> None:
    """Let this process keep what it frees, for the next step, which takes the same again.

    glibc gives the top of its heap back to the system as soon as more than some MiB of it are
    free; a step on a CPU then waits for tens of thousands of pages that are found and cleared anew.
    Left as they are: settings of the user's, and C libraries that have no such setting.
    Source: mallopt(3).
    """
    if any(name in os.environ for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, -1)  # never
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)


def _number(name: str) -> int:
    return int((_CGROUP / name).read_text())
