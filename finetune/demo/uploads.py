"""Temporary folder of the demo: private, limited in size, and removed at the end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

__all__ = ["list_files", "remove_oldest_files", "temporary_workspace"]

_FOLDER_PREFIX = "finetune-demo-"
_LOCK_FILE = "lock"
_MIN_CHARGED_BYTES = 2**16  # a file counts as at least this, to limit the number of tiny files


@contextlib.contextmanager
def temporary_workspace() -> Iterator[Path]:
    """Create a private temporary folder with `uploads` and `examples`; remove it at the end.

    Also removes the folders that killed demos left behind.
    """
    _remove_abandoned_folders()
    old_temp_dir = os.environ.get("GRADIO_TEMP_DIR")
    with tempfile.TemporaryDirectory(prefix=_FOLDER_PREFIX, ignore_cleanup_errors=True) as name:
        workspace = Path(name).resolve()
        for subfolder in ("uploads", "examples"):
            (workspace / subfolder).mkdir()
        # Gradio has no argument for this folder
        os.environ["GRADIO_TEMP_DIR"] = str(workspace / "uploads")
        try:
            with (workspace / f"{_LOCK_FILE}.new").open("wb") as lock:
                # the OS releases the lock when the process ends, even if it is killed
                fcntl.flock(lock, fcntl.LOCK_EX)
                os.rename(lock.name, workspace / _LOCK_FILE)  # no process sees it unlocked
                yield workspace
        finally:
            if old_temp_dir is None:
                del os.environ["GRADIO_TEMP_DIR"]
            else:
                os.environ["GRADIO_TEMP_DIR"] = old_temp_dir


def _remove_abandoned_folders() -> None:
    """Remove the workspaces of this user whose lock no process holds."""
    for lock_file in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*/{_LOCK_FILE}"):
        with contextlib.suppress(OSError):  # in use, owned by another user, or just removed
            if lock_file.parent.lstat().st_uid != os.getuid():
                continue
            lock_fd = os.open(lock_file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock_file.parent)  # refuses symlinks
            finally:
                os.close(lock_fd)


def list_files(folder: Path) -> list[Path]:
    """Return the files in a folder and its subfolders, even while other processes remove some."""
    return [Path(parent, name) for parent, _, names in os.walk(folder) for name in names]


def remove_oldest_files(folder: Path, *, max_total_bytes: int, keep: Collection[Path] = ()) -> None:
    """Remove the oldest files in a folder until the rest takes at most `max_total_bytes`.

    Args:
        folder: the folder, with its subfolders.
        max_total_bytes: limit for the files that are not in `keep`.
        keep: files that are never removed.
    """
    files = []
    for path in list_files(folder):
        with contextlib.suppress(FileNotFoundError):  # Gradio removes files too
            status = path.lstat()
            if path not in keep:
                files.append((status.st_ctime, max(status.st_size, _MIN_CHARGED_BYTES), path))
    total_bytes = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total_bytes <= max_total_bytes:
            return
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the folder is not empty
            path.parent.rmdir()
        total_bytes -= size
