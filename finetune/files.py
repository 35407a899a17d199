"""Files: opened only if they are some, written whole or not at all, and the system's refusals."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError

from finetune.errors import SetupError, visible

__all__ = [
    "CacheFolder",
    "NewFile",
    "UntrustedCacheError",
    "cache_folder",
    "disk_errors",
    "git_sha1_of",
    "kind_of",
    "make_folder",
    "open_regular",
    "replacing",
    "sha256_of",
    "sync",
    "sync_folder",
    "write_atomically",
]

_NO_SPACE = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}


def sha256_of(path: Path) -> str:
    """Hash a file. Returns: the hexadecimal sha256 of its bytes."""
    return _digest_of(path, hashlib.sha256())


def git_sha1_of(path: Path) -> str:
    """Hash a file as git does. Returns: the hexadecimal sha1 that is its name there."""
    head = b"blob %d\0" % path.stat().st_size
    return _digest_of(path, hashlib.sha1(head, usedforsecurity=False))


def _digest_of(path: Path, digest: Any) -> str:
    with path.open("rb") as file:  # Python 3.10 has no hashlib.file_digest
        while block := file.read(1 << 20):
            digest.update(block)
    return str(digest.hexdigest())


def open_regular(path: Path, *, limit_bytes: int | None = None) -> IO[bytes]:
    """Open a regular file to read: opening a named pipe would wait for ever.

    Args:
        path: links to a file are followed.
        limit_bytes: the most that it may hold.
    Raises: OSError if it cannot be opened; ValueError if it is something else, or too large.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise ValueError(f"is {kind_of(mode)}, not a file")
    file = path.open("rb")
    if limit_bytes is not None and (size := os.fstat(file.fileno()).st_size) > limit_bytes:
        file.close()
        raise ValueError(f"{size:,} bytes are more than the {limit_bytes:,} that are read")
    return file


def kind_of(mode: int) -> str:
    """Name what is no regular file, for people, from its `st_mode`."""
    return "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"


def write_atomically(path: Path, content: str | bytes, *, option: str = "--out") -> None:
    """Replace a file in one step; text is written as UTF-8. See `replacing`."""
    data = content.encode() if isinstance(content, str) else content
    writing = disk_errors(path, needed=len(data), option=option)
    with replacing(path, option=option) as temporary, writing:
        temporary.write_bytes(data)


@contextlib.contextmanager
def replacing(path: Path, *, option: str = "--out") -> Iterator[Path]:
    """Replace a file in one step: a reader sees the old content or the new, never a part.

    Args:
        path: of the file; its folder exists.
        option: what the user chose the place with.
    Returns: where to write; it becomes `path` when the block ends without an error.
    Raises: SetupError if the disk is full or the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with disk_errors(path, option=option):
            temporary.touch()
        yield temporary
        with disk_errors(path, option=option):
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
            sync_folder(path.parent)
    finally:
        # where nothing can be written there is nothing either
        with contextlib.suppress(OSError, ValueError):
            temporary.unlink(missing_ok=True)


def make_folder(folder: Path, *, option: str) -> None:
    """Make a folder and its parents, unless it exists.

    Args:
        folder: to be written into.
        option: what the user wrote it behind, such as --out.
    Raises: SetupError if it cannot be made, or not be written into.
    """
    with disk_errors(folder, needed=4096, option=option):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise SetupError(
                f"{option}: '{folder}' is not a folder; choose another place",
                code="setup.not_writable",
            ) from error
    if not os.access(folder, os.W_OK):
        raise SetupError(
            f"{option}: '{folder}' cannot be written into; choose another place",
            code="setup.not_writable",
        )


@contextlib.contextmanager
def disk_errors(path: Path, *, needed: int = 0, option: str = "--out") -> Iterator[None]:
    """Turn the operating system's refusals into one clear message.

    Args:
        path: what was being written.
        needed: bytes that the write needs, if that is known.
        option: what the user chose the place with.
    Raises: SetupError for a full disk or a quota, and for a place that cannot be written to,
        whether the system forbids it, has no such names, or fails.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = _number_of(error)
        if not number:  # a library's own words, about something else
            raise
        if number in _NO_SPACE:
            size = f"{needed:,} bytes are needed" if needed else os.strerror(number)
            raise SetupError(
                f"{path}: the disk is full ({size}); what was saved before is kept: free space, "
                "then run it again (training with --resume)",
                code="setup.disk_full",
            ) from error
        raise _refused(path, os.strerror(number), option) from error
    except ValueError as error:
        if _can_be_named(path):
            raise
        raise _refused(path, "no path has such characters", option) from error


def _refused(path: Path, why: str, option: str) -> SetupError:
    return SetupError(
        f"{visible(str(path))}: cannot be written ({why}); choose another {option}",
        code="setup.not_writable",
    )


def _can_be_named(path: Path) -> bool:
    """True if the system takes a path, even of no file: none holds a NUL."""
    try:
        os.lstat(path)
    except OSError:
        return True
    except ValueError:
        return False
    return True


def _number_of(error: Exception) -> int:
    """The system's number of a refusal; safetensors has it in its text only. Returns: 0 if none."""
    if isinstance(error, OSError):
        return error.errno or 0
    match = re.search(r"\(os error (\d+)\)", str(error))
    return int(match.group(1)) if match else 0


def sync(file: IO[Any]) -> None:
    """Bring a file's content to the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Bring a folder's entries to the disk: only then is a rename durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- the cache ------------------------------------------------------------------------------------

_LEFTOVER = re.compile(r"\.[0-9a-f]{64}\.(?:.+\.tmp|lock)")
_LEFTOVER_SECONDS = 24 * 3600  # what is still being written is younger
_POLL_SECONDS = 0.25
_SILENT_SECONDS = 1.0  # for which a lock is waited for without a word
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def cache_folder(kind: str) -> Path:
    """The folder of one kind of content, such as `features`; it need not exist."""
    if own := os.environ.get("FINETUNE_CACHE"):
        return Path(own).expanduser().absolute() / kind
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser().absolute() / "finetune" / kind


class UntrustedCacheError(OSError):
    """A file or folder of the cache that another user made or can change; it is not used."""


@dataclass
class NewFile:
    """A file of the cache that is being written.

    Attributes:
        descriptor: open for reading and writing.
        name: that it gets at the end; it is removed where there is none.
    """

    descriptor: int
    name: str | None = None


class CacheFolder:
    """A folder of the cache: the only way to a file that another run may have written.

    The folder, the one that it lies in, and its files belong to this user or to root, and nobody
    else can write to them. Files are opened in the folder that was checked, without following a
    link or waiting at a pipe. All names but those of files that are finished begin with a dot.

    Args:
        path: made, for this user alone, if it is not there.
    Raises: OSError if it cannot be made or read; UntrustedCacheError if it is not this user's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.lstat(path.parent).st_uid not in (os.geteuid(), 0):  # of a link
            raise UntrustedCacheError(_why_untrusted(path.parent, os.lstat(path.parent)))
        parent = os.open(path.parent, _FOLDER)  # may be a link of the user's to another disk
        try:
            _check_owner(parent, path.parent)
            with contextlib.suppress(FileExistsError):
                os.mkdir(path.name, 0o700, dir_fd=parent)
            self._folder = os.open(path.name, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)
        except OSError as error:
            raise _named(error, path) from None
        finally:
            os.close(parent)
        try:
            _check_owner(self._folder, path)
        except BaseException:
            os.close(self._folder)
            raise

    def __enter__(self) -> CacheFolder:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._folder)

    def open(self, name: str) -> int:
        """Open a file to read.

        Returns: a descriptor, which the caller closes.
        Raises: FileNotFoundError; UntrustedCacheError for anything but a regular file of this
            user's; OSError if it cannot be opened.
        """
        return self._open(name, os.O_RDONLY)

    def _open(self, name: str, flags: int) -> int:
        try:
            descriptor = os.open(name, flags | _FILE, 0o600, dir_fd=self._folder)
        except OSError as error:
            raise _named(error, self.path / name) from None
        try:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                cause = f"is {kind_of(mode)}, not a file"
                raise UntrustedCacheError(f"{self.path / name}: {cause}; remove it")
            _check_owner(descriptor, self.path / name)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        """Read a whole file.

        Raises: as `open`; ValueError if it is larger than the limit.
        """
        with os.fdopen(self.open(name), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit_bytes:
                raise ValueError(f"{size:,} bytes are more than the {limit_bytes:,} that are read")
            return file.read(size)

    @contextlib.contextmanager
    def write(self, key: str, *, goes_on: bool = False) -> Iterator[NewFile]:
        """Write a file that others see whole or not at all.

        Args:
            key: hexadecimal sha256 of what the content depends on.
            goes_on: go on with what a stopped process has left of it, and leave it when this one is
                stopped; whoever calls holds the lock.
        Raises: OSError where it cannot be written.
        """
        temporary = f".{key}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
        both = {"src_dir_fd": self._folder, "dst_dir_fd": self._folder}
        flags, is_left = os.O_RDWR, False
        if goes_on and (unfinished := self.names(key, ".tmp")):
            os.replace(unfinished.pop(), temporary, **both)
            for name in unfinished:
                self.remove(name)
        else:
            flags |= os.O_CREAT | os.O_EXCL
        new = NewFile(self._open(temporary, flags))
        try:
            yield new
            if new.name:
                os.fsync(new.descriptor)  # else a power cut could leave the name without the bytes
                os.replace(temporary, new.name, **both)
        except BaseException as error:
            is_left = goes_on and not isinstance(error, Exception)  # a signal
            raise
        finally:
            os.close(new.descriptor)
            if not is_left:
                self.remove(temporary)

    def remove(self, name: str) -> None:
        """Remove a file, unless it is gone or cannot be removed."""
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._folder)

    def touch(self, name: str) -> None:
        """Note that a file was used: those that were not used for longest go first."""
        with contextlib.suppress(OSError):  # a folder that can be read only serves as well
            os.utime(name, dir_fd=self._folder, follow_symlinks=False)

    def names(self, key: str, suffix: str) -> list[str]:
        """The files of a key, sorted: `suffix` is ".tmp" for those that are being written."""
        start = f".{key}." if suffix == ".tmp" else key
        return sorted(
            name
            for name in os.listdir(self._folder)
            if name.startswith(start) and name.endswith(suffix)
        )

    def is_begun(self, key: str) -> bool:
        """True if some process has written the file of a key, or is at it."""
        return any(key in name for name in os.listdir(self._folder))

    @contextlib.contextmanager
    def lock(
        self, key: str, *, notice: Callable[[str], None], stalled_seconds: float
    ) -> Iterator[bool]:
        """Let one process at a time make the file of a key.

        Args:
            key: as for `write`.
            notice: told when another process is waited for.
            stalled_seconds: for which what that process writes may stay as it is.
        Yields: False if the lock was given up on.
        Raises: UntrustedCacheError if the lock is another user's.
        """
        name, sign, is_said = f".{key}.lock", None, False
        started = changed = time.monotonic()
        while (held := self._locked(name)) is None:
            now = time.monotonic()
            if not is_said and now - started >= min(_SILENT_SECONDS, stalled_seconds):
                notice(f"{self.path}: another process makes the same file; waiting for it")
                is_said = True
            before, sign = sign, self._progress(key)
            changed = now if sign != before else changed
            if now - changed > stalled_seconds:
                yield False
                return
            time.sleep(_POLL_SECONDS)
        try:
            yield True
        finally:
            self.remove(name)  # while it is held: whoever waits for it looks for a link to it
            fcntl.flock(held, fcntl.LOCK_UN)  # also that of the processes forked meanwhile
            os.close(held)

    def _locked(self, name: str) -> int | None:
        """The descriptor of a lock, or None while another process holds it."""
        lock = self._open(name, os.O_RDWR | os.O_CREAT)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_nlink:
                return lock
        os.close(lock)
        return None

    def _progress(self, key: str) -> list[tuple[str, int]]:
        """Name and time of each file that is being written under a key: they show progress."""
        signs = []
        for name in self.names(key, ".tmp"):
            with contextlib.suppress(FileNotFoundError):
                state = os.stat(name, dir_fd=self._folder, follow_symlinks=False)
                signs.append((name, state.st_mtime_ns))
        return signs

    def has_room(self, num_bytes: int, *, share: float) -> bool:
        """True if a file takes no more than a share of what is free on the disk."""
        state = os.fstatvfs(self._folder)
        return num_bytes < state.f_bavail * state.f_frsize * share

    def make_room(self, max_bytes: int, *, keep: str, names: re.Pattern[str]) -> None:
        """Remove what was not used for longest, and what killed processes left half written.

        Args:
            max_bytes: that all files may have together.
            keep: the name of a file that stays.
            names: of the files that belong to the cache.
        """
        files: list[tuple[float, int, str]] = []
        for name in os.listdir(self._folder):
            try:
                state = os.stat(name, dir_fd=self._folder, follow_symlinks=False)
            except FileNotFoundError:
                continue  # another process was faster
            is_old = time.time() - state.st_mtime > _LEFTOVER_SECONDS
            if _LEFTOVER.fullmatch(name) and is_old:
                self.remove(name)
            if names.fullmatch(name):
                files.append((state.st_mtime, state.st_size, name))
        total = sum(size for _, size, _ in files)
        for _, size, name in sorted(files):
            if total <= max_bytes:
                return
            if name != keep:
                self.remove(name)
                total -= size


def _named(error: OSError, path: Path) -> OSError:
    """The same refusal with the whole path; a link in a file's place is one that is not trusted."""
    if isinstance(error, UntrustedCacheError):
        return error
    if error.errno == errno.ELOOP or (error.errno == errno.ENOTDIR and path.is_symlink()):
        return UntrustedCacheError(f"{path}: is a link; remove it")
    return type(error)(error.errno, error.strerror, str(path))


def _check_owner(descriptor: int, path: Path) -> None:
    """Raises: UntrustedCacheError for what another user owns or can write to."""
    state = os.fstat(descriptor)
    if state.st_uid not in (os.geteuid(), 0) or state.st_mode & _OTHERS_WRITE:
        raise UntrustedCacheError(_why_untrusted(path, state))


def _why_untrusted(path: Path, state: os.stat_result) -> str:
    if state.st_uid not in (os.geteuid(), 0):
        cause, remedy = f"belongs to user {state.st_uid}", "take it over with chown"
    else:
        mode = stat.S_IMODE(state.st_mode)
        cause, remedy = f"others can write to it (mode {mode:o})", f"chmod go-w {path}"
    return f"{path}: {cause}; {remedy}, or set FINETUNE_CACHE to a folder of your own"
