"""Temporary folder of the demo: private and limited in size; the next demo removes it if needed."""

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

__all__ = ["UploadFolder", "temporary_workspace"]

_FOLDER_PREFIX = "finetune-demo-"
_LOCK_FILE = "lock"
_MIN_CHARGED_BYTES = 2**16  # counted per file at least, to limit the number of empty files too


@contextlib.contextmanager
def temporary_workspace() -> Iterator[Path]:
    """Create a private temporary folder with `uploads` and `examples`; remove it at the end.

    Also removes the folders that killed demos left behind.
    """
    _remove_abandoned(Path(tempfile.gettempdir()))
    old_temp_dir = os.environ.get("GRADIO_TEMP_DIR")
    with tempfile.TemporaryDirectory(prefix=_FOLDER_PREFIX, ignore_cleanup_errors=True) as name:
        workspace = Path(name).resolve()
        for subfolder in ("uploads", "examples"):
            (workspace / subfolder).mkdir()
        # Gradio has no argument for this folder
        os.environ["GRADIO_TEMP_DIR"] = str(workspace / "uploads")
        try:
            with _hold_lock(workspace):
                yield workspace
        finally:
            if old_temp_dir is None:
                del os.environ["GRADIO_TEMP_DIR"]
            else:
                os.environ["GRADIO_TEMP_DIR"] = old_temp_dir


@contextlib.contextmanager
def _hold_lock(workspace: Path) -> Iterator[None]:
    """Hold the lock of the folder; the OS releases it even if the process is killed."""
    with (workspace / f"{_LOCK_FILE}.new").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(lock.name, workspace / _LOCK_FILE)  # so that no process sees it unlocked
        yield


def _remove_abandoned(parent: Path) -> None:
    for workspace in parent.glob(f"{_FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):  # in use, owned by another user, or just removed
            if _is_abandoned(workspace):
                shutil.rmtree(workspace)


def _is_abandoned(workspace: Path) -> bool:
    """Return True for a private folder of this user whose lock is free; does not follow symlinks.

    Raises: OSError if the folder has no lock file, or another process holds the lock.
    """
    status = workspace.lstat()
    is_private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    if not is_private or status.st_uid != os.getuid():
        return False
    lock_fd = os.open(workspace / _LOCK_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return stat.S_ISREG(os.fstat(lock_fd).st_mode)
    finally:
        os.close(lock_fd)


class UploadFolder:
    """Folder of uploads with a limit in bytes and in files per minute.

    Args:
        folder: the folder; files that it already contains, such as examples, are never removed.
        max_total_bytes: limit for all uploads together; a new upload evicts the oldest ones.
        max_per_minute: number of uploads accepted in any minute.
    """

    def __init__(self, folder: Path, *, max_total_bytes: int, max_per_minute: int) -> None:
        self.folder = Path(os.path.realpath(folder))
        self._max_total_bytes = max_total_bytes
        self._incoming_bytes = 0
        self._upload_times: collections.deque[float] = collections.deque(maxlen=max_per_minute)
        self._protected_files = set(self._list_files())

    def contains(self, name: str) -> bool:
        """Return True if an absolute path, with symlinks resolved, is inside the folder."""
        try:
            return name.startswith("/") and Path(os.path.realpath(name)).is_relative_to(self.folder)
        except ValueError:  # a NUL or a lone surrogate is invalid in a path
            return False

    def register_upload(self) -> int:
        """Register an upload. Returns: 0 if accepted, else the seconds to wait."""
        now = time.monotonic()
        if (
            len(self._upload_times) == self._upload_times.maxlen
            and now - self._upload_times[0] < 60
        ):
            return math.ceil(60 - (now - self._upload_times[0]))
        self._upload_times.append(now)
        return 0

    @contextlib.contextmanager
    def reserve_space(self, num_bytes: int) -> Iterator[bool]:
        """Reserve space for an upload that is being received, and evict the oldest files for it.

        Yields: True if reserved; False if other uploads in progress need all the space.
        """
        if self._incoming_bytes + num_bytes > self._max_total_bytes:
            yield False
            return
        self._incoming_bytes += num_bytes
        try:
            self._remove_oldest(self._max_total_bytes - self._incoming_bytes)
            yield True
        finally:
            self._incoming_bytes -= num_bytes

    def _remove_oldest(self, limit_bytes: int) -> None:
        """Remove the oldest uploads until the rest takes at most `limit_bytes`."""
        files = []
        for path in self._list_files():
            with contextlib.suppress(FileNotFoundError):  # Gradio removes files too
                status = path.lstat()
                if path not in self._protected_files:
                    files.append((status.st_mtime, max(status.st_size, _MIN_CHARGED_BYTES), path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= limit_bytes:
                return
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # the folder is not empty
                path.parent.rmdir()
            total -= size

    def _list_files(self) -> list[Path]:
        walk = os.walk(self.folder)  # unlike rglob, tolerates files that disappear meanwhile
        return [Path(top, name) for top, _, names in walk for name in names]
