"""The on-disk cache: ownership checks, atomic writes, locks, and least-recently-used eviction."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from finetune.errors import SetupError, redact_urls
from finetune.files import describe_file_type
from finetune.log import logger

__all__ = ["WRITE_BUFFER_BYTES", "CacheFolder", "UntrustedCacheError", "cache_path"]

WRITE_BUFFER_BYTES = 2**20
_LEFTOVER_NAME = re.compile(r"\.[0-9a-f]{64}.*\.(?:tmp|lock)")
_LEFTOVER_AGE_SECONDS = 24 * 3600  # files still being written are younger
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_OPEN_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_OPEN_FILE_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def cache_path(kind: str) -> Path:
    """Return the cache folder for one kind of content, such as `features`; it may not exist yet."""
    if own := os.environ.get("FINETUNE_CACHE"):
        if "://" in own:
            raise SetupError(
                f"FINETUNE_CACHE: '{redact_urls(own)}' is a URL, which is not supported here; give "
                "a folder",
                code="setup.not_writable",
            )
        return Path(os.path.expanduser(own)).absolute() / kind
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(caches)).absolute() / "finetune" / kind


class UntrustedCacheError(OSError):
    """Another user owns or can change a file or folder of the cache, so it is not used."""


class CacheFolder:
    """A folder of the cache; every access to cached files goes through this class.

    Checks that this user or root owns the folder, its parent and its files, and that nobody else
    can write to them. Opens files relative to the checked folder, does not follow symlinks, and
    does not block on pipes. The name of a cached file begins with its key, a hexadecimal sha256 of
    everything that its content depends on. Names of unfinished files and locks begin with a dot.

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
        # first -1: a thread that still writes must not use a descriptor of another folder
        dir_fd, self._dir_fd = self._dir_fd, -1
        os.close(dir_fd)

    def open(self, name: str) -> io.BufferedReader:
        """Open a file for reading.

        Raises: FileNotFoundError; UntrustedCacheError if it is not a regular file, or if another
            user owns it or can write to it; OSError if it cannot be opened.
        """
        return os.fdopen(self._open_trusted(name, os.O_RDONLY), "rb")

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
        with self.open(name) as file:
            size = os.fstat(file.fileno()).st_size
            if size > max_bytes:
                raise ValueError(f"{size:,} bytes are more than the {max_bytes:,} allowed")
            return file.read(size)

    @contextlib.contextmanager
    def write(self, name: str) -> Iterator[BinaryIO]:
        """Write a file atomically: other processes see the whole file or none.

        Args:
            name: final name; begins with the file's key.
        Yields: a new file, open for writing and reading. It gets its name when the block ends; an
            error in the block removes it.
        Raises: OSError if the file cannot be written.
        """
        temporary = f".{name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
        descriptor = self._open_trusted(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        file = os.fdopen(descriptor, "w+b", buffering=WRITE_BUFFER_BYTES)
        try:
            yield file
            file.flush()
            os.fsync(descriptor)  # a power cut must not leave a name without its bytes
            os.replace(temporary, name, src_dir_fd=self._dir_fd, dst_dir_fd=self._dir_fd)
        except BaseException:
            self.remove(temporary)
            raise
        finally:
            with contextlib.suppress(OSError):  # the disk may still be full
                file.close()

    def remove(self, name: str) -> None:
        """Remove a file; do nothing if it is gone or cannot be removed."""
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._dir_fd)

    def mark_used(self, name: str) -> None:
        """Mark a file as used now; eviction removes the least recently used files first."""
        with contextlib.suppress(OSError):  # a read-only folder is still usable
            os.utime(name, dir_fd=self._dir_fd, follow_symlinks=False)

    def list_files(self, key: str, suffix: str) -> list[str]:
        """Return the file names that begin with a key and end with a suffix, sorted."""
        return sorted(
            name
            for name in os.listdir(self._dir_fd)
            if name.startswith(key) and name.endswith(suffix)
        )

    def remove_partial_files(self, key: str) -> None:
        """Remove the partial files of a key, which killed processes left.

        The caller must hold the lock of the key.
        """
        for name in self.list_files(f".{key}", ".tmp"):
            self.remove(name)

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Lock a key, so that one process at a time writes its file; the others wait.

        The system releases the lock of a process that ends, even if it was killed.

        Raises: UntrustedCacheError if another user owns the lock file.
        """
        name = f".{key}.lock"
        lock = self._wait_for_lock(name)
        try:
            yield
        finally:
            self.remove(name)  # before unlocking: the next holder checks that its file exists
            fcntl.flock(lock, fcntl.LOCK_UN)  # `close` does not unlock if forks share the lock
            os.close(lock)

    def _wait_for_lock(self, name: str) -> int:
        """Return the descriptor of the locked file."""
        lock = self._open_trusted(name, os.O_RDWR | os.O_CREAT)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.info(
                    f"{self.path}: another process is writing the same file; waiting for it"
                )
                fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock).st_nlink:
                return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)
        return self._wait_for_lock(name)  # the previous holder removed the file

    def fits_on_disk(self, num_bytes: int, *, max_fraction: float) -> bool:
        """Return True if `num_bytes` is less than `max_fraction` of the free disk space."""
        state = os.fstatvfs(self._dir_fd)
        return num_bytes < state.f_bavail * state.f_frsize * max_fraction

    def evict(self, max_bytes: int, *, keep_name: str, pattern: re.Pattern[str]) -> None:
        """Remove the least recently used files until the others fit within a size limit.

        Also removes partial files and locks older than a day, which killed processes left.

        Args:
            max_bytes: limit for the total size of the files that match `pattern`.
            keep_name: name of a file to keep in any case.
            pattern: names of the files that may be removed.
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
        return UntrustedCacheError(f"{path}: this is a link, which is not followed; remove it")
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
