"""CPU cores, threads and memory of this process, within cgroup limits."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from pathlib import Path

__all__ = [
    "available_memory_bytes",
    "configure_openmp",
    "disable_malloc_trim",
    "num_cores",
    "total_memory_bytes",
]

CGROUP_ROOT = Path("/sys/fs/cgroup")
# (limit, current usage) for cgroup v2, then v1
_CGROUP_MEMORY_FILES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
# Constants of malloc.h. glibc returns every block above the mmap threshold to the system when it is
# freed, and accepts a threshold of at most 32 MiB.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 * 2**20
_SPIN_COUNT = 3000  # measured: docs/performance.md


def num_cores() -> int:
    """Return the number of CPU cores of this process, limited by CPU affinity and cgroup quota."""
    cores = len(os.sched_getaffinity(0))
    for name in ("cpu.max", "cpu/cpu.cfs_quota_us"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # no quota file, or "max"
            words = (CGROUP_ROOT / name).read_text().split()
            period = words[1] if len(words) > 1 else _read_cgroup_int("cpu/cpu.cfs_period_us")
            quota = int(words[0]) // int(period)
            cores = min(cores, max(quota, 1)) if int(words[0]) > 0 else cores
    return cores


def configure_openmp() -> None:
    """Let idle OpenMP threads sleep soon, and start no more of them than this process has cores.

    By default, the threads of libgomp spin for milliseconds while they wait for work, which takes
    the cores away from other programs, and libgomp ignores the cgroup quota. It reads its
    environment variables when torch loads it, so call this function before importing torch;
    afterwards it does nothing. Variables that the user or the launcher has set are kept. Child
    processes inherit the settings.
    """
    if "torch" in sys.modules:
        return
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPIN_COUNT))
    if num_cores() < len(os.sched_getaffinity(0)):
        os.environ.setdefault("OMP_NUM_THREADS", str(num_cores()))


def total_memory_bytes() -> int:
    """Return the memory in bytes for all processes together: RAM or the cgroup limit."""
    import psutil  # type: ignore[import-untyped]  # a dependency of Accelerate

    total = int(psutil.virtual_memory().total)
    for limit, _ in _CGROUP_MEMORY_FILES:
        with contextlib.suppress(OSError, ValueError):  # no limit file, or "max"
            total = min(total, _read_cgroup_int(limit))
    return total


def available_memory_bytes() -> int:
    """Return the free memory in bytes, within the cgroup limit."""
    import psutil

    free = int(psutil.virtual_memory().available)
    for limit, used in _CGROUP_MEMORY_FILES:
        with contextlib.suppress(OSError, ValueError):
            free = min(free, _read_cgroup_int(limit) - _read_cgroup_int(used))
    return max(free, 0)


def disable_malloc_trim() -> None:
    """Stop glibc from returning freed memory to the system, since the next step needs it again.

    By default glibc trims its heap when more than a few MiB at the top are free. A step on a CPU
    then waits for tens of thousands of pages to be mapped and cleared again. Does nothing if the
    user has set MALLOC_TRIM_THRESHOLD_ or MALLOC_MMAP_THRESHOLD_, or if the C library has no
    mallopt. Source: mallopt(3).
    """
    if any(name in os.environ for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, -1)  # never
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)


def _read_cgroup_int(name: str) -> int:
    return int((CGROUP_ROOT / name).read_text())
