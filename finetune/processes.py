"""This process among others: its rank, who shares the host and its memory, its garbage."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

__all__ = [
    "as_usual",
    "end_with_parent",
    "free_bytes",
    "is_first_rank",
    "keep_freed",
    "local_processes",
    "patient",
    "total_bytes",
]

_PR_SET_PDEATHSIG = 1  # Linux, prctl(2)


def local_processes(world: int) -> int:
    """How many of the processes of a launch share this host: all, unless the launcher tells."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world))


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends; Linux only."""
    with contextlib.suppress(OSError, AttributeError):  # elsewhere there is no such call
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def is_first_rank() -> bool:
    """Tell whether this process is the one of a launch that speaks and writes files."""
    return os.environ.get("RANK", "0") == "0"


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


# When Python looks for garbage: hardly while libraries are imported, whose objects stay to the end.
# Measured on `train --dry-run`: 6.3 instead of 6.9 seconds of processor time (medians of six
# alternated runs on two busy cores).
_PATIENT = 1_000_000  # objects that are made before it looks; no start makes so many
_usual = gc.get_threshold()


@contextlib.contextmanager
def patient() -> Iterator[None]:
    """Look for garbage only when very many objects were made, or after `as_usual`."""
    global _usual
    before = gc.get_threshold()
    if before[0] != _PATIENT:
        _usual = before
    gc.set_threshold(_PATIENT)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def as_usual() -> None:
    """Look for it as ever: what begins now takes long, and its garbage may be large."""
    if gc.get_threshold()[0] == _PATIENT:
        gc.set_threshold(*_usual)
