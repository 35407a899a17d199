"""The on-disk cache: ownership checks, atomic writes, locks, and least-recently-used eviction."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from finetune.files import describe_file_type
from finetune.log import logger

__all__ = ["CacheFolder", "PendingCacheFile", "UntrustedCacheError", "cache_path"]


_LEFTOVER_NAME = re.compile(r"\.[0-9a-f]{64}\.(?:.+\.tmp|lock)")


_LEFTOVER_AGE_SECONDS = 24 * 3600  # files still being written are younger


_POLL_SECONDS = 0.25


_SILENT_WAIT_SECONDS = 1.0  # wait this long for a lock before logging it


_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


_OPEN_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


_OPEN_FILE_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def cache_path(kind: str) -> Path:
    """Return the cache folder for one kind of content, such as `features`; it may not exist yet."""
    if own := os.environ.get("FINETUNE_CACHE"):
        return Path(own).expanduser().absolute() / kind
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser().absolute() / "finetune" / kind


class UntrustedCacheError(OSError):
    """Another user owns or can change a file or folder of the cache, so it is not used."""


@dataclass
class PendingCacheFile:
    """A file of the cache that is being written.

    Attributes:
        fd: descriptor, open for reading and writing.
        final_name: the file's name once complete; None discards the file.
    """

    fd: int
    final_name: str | None = None


class CacheFolder:
    """A folder of the cache; every access to cached files goes through this class.

    This user or root owns the folder, its parent and its files, and nobody else can write to them.
    Files are opened relative to the checked folder; links are not followed and pipes do not block.
    Names of unfinished files and locks begin with a dot.

    Args:
        path: the folder; created with mode 0700 if it does not exist.
    Raises: OSError if the folder cannot be created or read; UntrustedCacheError if another user
        owns it or can write to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.lstat(path.parent).st_uid not in (os.geteuid(), 0):  # the owner of the link itself
            raise UntrustedCacheError(_untrusted_message(path.parent, os.lstat(path.parent)))
        parent = os.open(path.parent, _OPEN_FOLDER_FLAGS)  # may be the user's link to another disk
        try:
            _check_owner(parent, path.parent)
            with contextlib.suppress(FileExistsError):
                os.mkdir(path.name, 0o700, dir_fd=parent)
            self._dir_fd = os.open(path.name, _OPEN_FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=parent)
        except OSError as error:
            raise _with_full_path(error, path) from None
        finally:
            os.close(parent)
        try:
            _check_owner(self._dir_fd, path)
        except BaseException:
            os.close(self._dir_fd)
            raise

    def __enter__(self) -> CacheFolder:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._dir_fd)

    def open(self, name: str) -> int:
        """Open a file for reading.

        Returns: a descriptor, which the caller closes.
        Raises: FileNotFoundError; UntrustedCacheError if it is not a regular file, or if another
            user owns it or can write to it; OSError if it cannot be opened.
        """
        return self._open_trusted(name, os.O_RDONLY)

    def _open_trusted(self, name: str, flags: int) -> int:
        try:
            descriptor = os.open(name, flags | _OPEN_FILE_FLAGS, 0o600, dir_fd=self._dir_fd)
        except OSError as error:
            raise _with_full_path(error, self.path / name) from None
        try:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                cause = f"this is {describe_file_type(mode)}, not a file"
                raise UntrustedCacheError(f"{self.path / name}: {cause}; remove it")
            _check_owner(descriptor, self.path / name)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def read(self, name: str, *, max_bytes: int) -> bytes:
        """Read a whole file.

        Raises: same as `open`; also ValueError if the file is larger than `max_bytes`.
        """
        with os.fdopen(self.open(name), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > max_bytes:
                raise ValueError(f"{size:,} bytes are more than the {max_bytes:,} allowed")
            return file.read(size)

    @contextlib.contextmanager
    def write(self, key: str, *, resume: bool = False) -> Iterator[PendingCacheFile]:
        """Write a file atomically: other processes see the whole file or none.

        Args:
            key: hexadecimal sha256 of everything that the content depends on.
            resume: continue the partial file of a stopped process, and keep the partial file if
                this process is stopped; the caller must hold the lock of the key.
        Yields: the open `PendingCacheFile`; set its `final_name` before the block ends, which
            renames the file.
        Raises: OSError if the file cannot be written.
        """
        temporary = f".{key}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
        dir_fds = {"src_dir_fd": self._dir_fd, "dst_dir_fd": self._dir_fd}
        flags, keep_partial = os.O_RDWR, False
        if resume and (unfinished := self.list_files(key, ".tmp")):
            os.replace(unfinished.pop(), temporary, **dir_fds)
            for name in unfinished:
                self.remove(name)
        else:
            flags |= os.O_CREAT | os.O_EXCL
        new = PendingCacheFile(self._open_trusted(temporary, flags))
        try:
            yield new
            if new.final_name:
                os.fsync(new.fd)  # a power cut must not leave a name without its bytes
                os.replace(temporary, new.final_name, **dir_fds)
        except BaseException as error:
            keep_partial = resume and not isinstance(error, Exception)  # stopped by a signal
            raise
        finally:
            os.close(new.fd)
            if not keep_partial:
                self.remove(temporary)

    def remove(self, name: str) -> None:
        """Remove a file; do nothing if it is gone or cannot be removed."""
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._dir_fd)

    def mark_used(self, name: str) -> None:
        """Mark a file as used now; eviction removes the least recently used files first."""
        with contextlib.suppress(OSError):  # a read-only folder is still usable
            os.utime(name, dir_fd=self._dir_fd, follow_symlinks=False)

    def list_files(self, key: str, suffix: str) -> list[str]:
        """Return the sorted names of a key's files; suffix ".tmp" selects partial files."""
        start = f".{key}." if suffix == ".tmp" else key
        return sorted(
            name
            for name in os.listdir(self._dir_fd)
            if name.startswith(start) and name.endswith(suffix)
        )

    def has_file(self, key: str) -> bool:
        """Return True if a process has written the file of a key, or is writing it."""
        return any(key in name for name in os.listdir(self._dir_fd))

    @contextlib.contextmanager
    def lock(self, key: str, *, stall_timeout_seconds: float) -> Iterator[bool]:
        """Lock a key, so that one process at a time writes its file.

        Args:
            key: same as for `write`.
            stall_timeout_seconds: stop waiting if the partial file of the process that holds the
                lock does not change for this long.
        Yields: True if this process holds the lock; False if it stopped waiting.
        Raises: UntrustedCacheError if another user owns the lock file.
        """
        name, progress, is_logged = f".{key}.lock", None, False
        started = last_change = time.monotonic()
        while (held := self._try_lock(name)) is None:
            now = time.monotonic()
            if not is_logged and now - started >= min(_SILENT_WAIT_SECONDS, stall_timeout_seconds):
                logger.info(
                    f"{self.path}: another process is writing the same file; waiting for it"
                )
                is_logged = True
            before, progress = progress, self._partial_files(key)
            last_change = now if progress != before else last_change
            if now - last_change > stall_timeout_seconds:
                yield False
                return
            time.sleep(_POLL_SECONDS)
        try:
            yield True
        finally:
            self.remove(name)  # while locked: a waiting process checks that it exists
            fcntl.flock(held, fcntl.LOCK_UN)  # forked processes share this lock
            os.close(held)

    def _try_lock(self, name: str) -> int | None:
        """Return the descriptor of the lock, or None while another process holds it."""
        lock = self._open_trusted(name, os.O_RDWR | os.O_CREAT)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_nlink:
                return lock
        os.close(lock)
        return None

    def _partial_files(self, key: str) -> list[tuple[str, int]]:
        """Return name and mtime of each partial file of a key; a change means progress."""
        files = []
        for name in self.list_files(key, ".tmp"):
            with contextlib.suppress(FileNotFoundError):
                state = os.stat(name, dir_fd=self._dir_fd, follow_symlinks=False)
                files.append((name, state.st_mtime_ns))
        return files

    def fits_on_disk(self, num_bytes: int, *, max_fraction: float) -> bool:
        """Return True if `num_bytes` is less than `max_fraction` of the free disk space."""
        state = os.fstatvfs(self._dir_fd)
        return num_bytes < state.f_bavail * state.f_frsize * max_fraction

    def evict(self, max_bytes: int, *, keep_name: str, pattern: re.Pattern[str]) -> None:
        """Remove the least recently used files, and old partial files of killed processes.

        Args:
            max_bytes: size limit for all files together.
            keep_name: name of a file to keep.
            pattern: only files whose names match this pattern may be removed.
        """
        files: list[tuple[float, int, str]] = []
        for name in os.listdir(self._dir_fd):
            try:
                state = os.stat(name, dir_fd=self._dir_fd, follow_symlinks=False)
            except FileNotFoundError:
                continue  # another process removed it first
            is_old = time.time() - state.st_mtime > _LEFTOVER_AGE_SECONDS
            if _LEFTOVER_NAME.fullmatch(name) and is_old:
                self.remove(name)
            if pattern.fullmatch(name):
                files.append((state.st_mtime, state.st_size, name))
        total = sum(size for _, size, _ in files)
        for _, size, name in sorted(files):
            if total <= max_bytes:
                return
            if name != keep_name:
                self.remove(name)
                total -= size


def _with_full_path(error: OSError, path: Path) -> OSError:
    """Return the error with the full path; a symbolic link becomes an UntrustedCacheError."""
    if isinstance(error, UntrustedCacheError):
        return error
    if error.errno == errno.ELOOP or (error.errno == errno.ENOTDIR and path.is_symlink()):
        return UntrustedCacheError(f"{path}: this is a link; remove it")
    return type(error)(error.errno, error.strerror, str(path))


def _check_owner(descriptor: int, path: Path) -> None:
    """Raise UntrustedCacheError if another user owns the file or can write to it."""
    state = os.fstat(descriptor)
    if state.st_uid not in (os.geteuid(), 0) or state.st_mode & _WRITABLE_BY_OTHERS:
        raise UntrustedCacheError(_untrusted_message(path, state))


def _untrusted_message(path: Path, state: os.stat_result) -> str:
    if state.st_uid not in (os.geteuid(), 0):
        cause, remedy = f"belongs to user {state.st_uid}", "take ownership with chown"
    else:
        mode = stat.S_IMODE(state.st_mode)
        cause, remedy = f"others can write to it (mode {mode:o})", f"chmod go-w {path}"
    return f"{path}: {cause}; {remedy}, or set FINETUNE_CACHE to a folder of your own"
