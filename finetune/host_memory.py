"""The host's memory: this machine's, or what the container around this process may use of it."""

from __future__ import annotations

import contextlib
from pathlib import Path

__all__ = ["free_bytes", "total_bytes"]

_CGROUP = Path("/sys/fs/cgroup")
# the limit, and what is used of it: version 2, version 1
_FILES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


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


def _number(name: str) -> int:
    return int((_CGROUP / name).read_text())
