"""This process: its rank, the host's memory that it shares, its garbage collector."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = [
    "defer_garbage_collection",
    "end_with_parent",
    "free_bytes",
    "is_first_here",
    "is_first_rank",
    "keep_freed_memory",
    "local_processes",
    "num_cores",
    "resume_garbage_collection",
    "signals_to",
    "skip_teardown",
    "spare_imports",
    "stop_signals",
    "total_bytes",
]

_PR_SET_PDEATHSIG = 1  # Linux, prctl(2)


def local_processes(world: int) -> int:
    """Number of processes of a launch on this host: all, unless the launcher says otherwise."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world))


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends; Linux only."""
    with contextlib.suppress(OSError, AttributeError):  # elsewhere there is no such call
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def stop_signals() -> list[signal.Signals]:
    """Return the signals that ask a run to stop: of people, launchers, Slurm and terminals.

    A SIGHUP that `nohup` has switched off stays so.
    """
    asked = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return asked if ignored else [*asked, signal.SIGHUP]


@contextlib.contextmanager
def signals_to(note: Callable[[int], object]) -> Iterator[None]:
    """Hand SIGINT and SIGTERM to a function; Python gives signals to the main thread only."""
    is_main = threading.current_thread() is threading.main_thread()
    numbers = [signal.SIGINT, signal.SIGTERM] if is_main else []
    before = {number: signal.signal(number, lambda got, _: note(got)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def is_first_rank() -> bool:
    """True if this process is the one of a launch that prints and writes files."""
    return os.environ.get("RANK", "0") == "0"


def is_first_here() -> bool:
    """True if this process is the one of a launch that writes caches and shows bars on its host."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def num_cores() -> int:
    """Number of cores that this process may keep busy: its own, within its group's quota."""
    cores = len(os.sched_getaffinity(0))
    for name in ("cpu.max", "cpu/cpu.cfs_quota_us"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # no such quota, or "max"
            words = (_CGROUP / name).read_text().split()
            period = words[1] if len(words) > 1 else _number("cpu/cpu.cfs_period_us")
            quota = int(words[0]) // int(period)
            cores = min(cores, max(quota, 1)) if int(words[0]) > 0 else cores
    return cores


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


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees, for the next step, which needs it again.

    glibc gives the top of its heap back to the system as soon as more than some MiB of it are
    free; a step on a CPU then waits for tens of thousands of pages that are mapped and cleared
    anew. Settings of the user's stay, and C libraries without this setting are left alone.
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


# The garbage collector hardly runs while libraries are imported: their objects stay to the end.
# Measured on `train --dry-run`: 6.3 instead of 6.9 seconds of processor time (medians of six
# alternated runs on two busy cores).
_DEFERRED = 1_000_000  # objects that are made before it runs; no start makes so many
_usual = gc.get_threshold()


@contextlib.contextmanager
def defer_garbage_collection() -> Iterator[None]:
    """Collect garbage only when very many objects were made, or after the call that resumes it."""
    global _usual
    before = gc.get_threshold()
    if before[0] != _DEFERRED:
        _usual = before
    gc.set_threshold(_DEFERRED)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def spare_imports() -> None:
    """Look for no garbage among the imports that a command has made: 0.3 seconds each time."""
    if gc.get_threshold()[0] == _DEFERRED:
        gc.freeze()


def resume_garbage_collection() -> None:
    """Collect it as before `defer_garbage_collection`: a long computation begins."""
    if gc.get_threshold()[0] == _DEFERRED:
        gc.set_threshold(*_usual)


def skip_teardown() -> Callable[[int], None]:
    """Let this process end without looking through all that its libraries made: 1.5 seconds.

    Call it before they are imported: what they register for the end is called before it ends.

    Returns: takes the exit code, once all is done.
    """
    codes: list[int] = []

    def leave() -> None:
        if codes:
            with contextlib.suppress(OSError, ValueError):  # Python says which stream failed
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(codes[0])

    atexit.register(leave)
    return codes.append
