"""The demo's temporary folder: private, of limited size, and removed even after a SIGKILL."""

from __future__ import annotations

import collections
import contextlib
import fcntl
import math
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Uploads", "workplace"]

_PREFIX = "finetune-demo-"
_LOCK = "lock"
_FILE_BYTES = 2**16  # charged for every file, so that empty ones have a limit too


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """Make a private folder with `uploads` and `examples`, and remove it at the end.

    The folders of demos that were killed are removed first.
    """
    _remove_dead(Path(tempfile.gettempdir()))
    before = os.environ.get("GRADIO_TEMP_DIR")
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name:
        place = Path(name).resolve()
        for part in ("uploads", "examples"):
            (place / part).mkdir()
        os.environ["GRADIO_TEMP_DIR"] = str(place / "uploads")  # Gradio reads no other switch
        try:
            with _locked(place):
                yield place
        finally:
            if before is None:
                del os.environ["GRADIO_TEMP_DIR"]
            else:
                os.environ["GRADIO_TEMP_DIR"] = before


@contextlib.contextmanager
def _locked(place: Path) -> Iterator[None]:
    """Hold the folder's lock, which the kernel releases when the process ends, however it ends."""
    with (place / f"{_LOCK}.new").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(lock.name, place / _LOCK)  # it is never seen unlocked while its process lives
        yield


def _remove_dead(parent: Path) -> None:
    for place in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # in use, somebody else's, or just removed
            if _is_dead(place):
                shutil.rmtree(place)


def _is_dead(place: Path) -> bool:
    """True for a private folder of this user's whose lock nobody holds; links are not followed.

    Raises: OSError if it has no lock, or one that is held.
    """
    state = place.lstat()
    private = stat.S_ISDIR(state.st_mode) and not state.st_mode & 0o077
    if not private or state.st_uid != os.getuid():
        return False
    handle = os.open(place / _LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return stat.S_ISREG(os.fstat(handle).st_mode)
    finally:
        os.close(handle)


class Uploads:
    """The folder of uploads, with a limit in bytes and one in files a minute.

    Args:
        folder: what it holds now, such as examples, stays.
        total_bytes: of all uploads; the oldest are removed to make room for a new one.
        per_minute: the number of uploads accepted in any minute.
    """

    def __init__(self, folder: Path, *, total_bytes: int, per_minute: int) -> None:
        self.folder = Path(os.path.realpath(folder))
        self._total_bytes = total_bytes
        self._incoming_bytes = 0
        self._times: collections.deque[float] = collections.deque(maxlen=per_minute)
        self._kept = set(self._files())

    def contains(self, name: str) -> bool:
        """True if an absolute path leads into the folder, links followed."""
        try:
            return name.startswith("/") and Path(os.path.realpath(name)).is_relative_to(self.folder)
        except ValueError:  # no path has a NUL or half of a surrogate pair
            return False

    def seconds_to_wait(self) -> int:
        """Count one upload. Returns: 0, or the seconds until the next is accepted."""
        now = time.monotonic()
        if len(self._times) == self._times.maxlen and now - self._times[0] < 60:
            return math.ceil(60 - (now - self._times[0]))
        self._times.append(now)
        return 0

    @contextlib.contextmanager
    def room_for(self, num_bytes: int) -> Iterator[bool]:
        """Make room for an upload while it arrives.

        Yields: False if the uploads that are arriving already take it.
        """
        if self._incoming_bytes + num_bytes > self._total_bytes:
            yield False
            return
        self._incoming_bytes += num_bytes
        try:
            self._remove_oldest(self._total_bytes - self._incoming_bytes)
            yield True
        finally:
            self._incoming_bytes -= num_bytes

    def _remove_oldest(self, limit_bytes: int) -> None:
        """Remove files until the others take no more than `limit_bytes`."""
        files = []
        for path in self._files():
            with contextlib.suppress(FileNotFoundError):  # Gradio removes files too
                state = path.lstat()
                if path not in self._kept:
                    files.append((state.st_mtime, max(state.st_size, _FILE_BYTES), path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= limit_bytes:
                return
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # it holds another file
                path.parent.rmdir()
            total -= size

    def _files(self) -> list[Path]:
        walk = os.walk(self.folder)  # unlike rglob, it passes over what is removed meanwhile
        return [Path(top, name) for top, _, names in walk for name in names]
