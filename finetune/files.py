"""Files: opened only if they are some, written whole or not at all, and the system's refusals."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError

from finetune.errors import SetupError, visible

__all__ = [
    "cache_folder",
    "disk_errors",
    "kind_of",
    "leftovers",
    "make_folder",
    "make_room",
    "open_regular",
    "published",
    "sha256_of",
    "sync",
    "sync_folder",
    "write_atomically",
]

_NO_SPACE = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}


def sha256_of(path: Path) -> str:
    """Hash a file. Returns: the hexadecimal sha256 of its bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:  # Python 3.10 has no hashlib.file_digest
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


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
    """What something is that is no regular file, for people, from its `st_mode`."""
    return "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file in one step: a reader sees the old content or the new, never a part.

    Args:
        path: of the file; its folder exists.
        content: text is written as UTF-8.
    Raises: SetupError if the disk is full or the file cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with disk_errors(path, needed=len(data)):
            with temporary.open("wb") as file:
                file.write(data)
                sync(file)
            os.replace(temporary, path)
            sync_folder(path.parent)
    finally:
        # where nothing can be written there is nothing either
        with contextlib.suppress(OSError, ValueError):
            temporary.unlink(missing_ok=True)


def make_folder(folder: Path, *, option: str) -> None:
    """Make a folder with those above it, unless it is there.

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
                f"{option}: '{folder}' is not a folder; choose another place"
            ) from error
    if not os.access(folder, os.W_OK):
        raise SetupError(f"{option}: '{folder}' cannot be written into; choose another place")


@contextlib.contextmanager
def disk_errors(path: Path, *, needed: int, option: str = "--out") -> Iterator[None]:
    """Turn the operating system's refusals into one clear message.

    Args:
        path: what was being written.
        needed: bytes that the write needs.
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
            raise SetupError(
                f"{path}: the disk is full ({needed:,} bytes are needed); what was saved before is "
                "kept: free space, then run it again (training with --resume)"
            ) from error
        raise _refused(path, os.strerror(number), option) from error
    except ValueError as error:
        if _can_be_named(path):
            raise
        raise _refused(path, "no path has such characters", option) from error


def _refused(path: Path, why: str, option: str) -> SetupError:
    return SetupError(f"{visible(str(path))}: cannot be written ({why}); choose another {option}")


def _can_be_named(path: Path) -> bool:
    """Whether a path is one to the system, be it there or not: none holds a NUL."""
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
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found.group(1)) if found else 0


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


_LEFTOVER = re.compile(r"\.[0-9a-f]{64}\..+\.tmp")
_LEFTOVER_SECONDS = 24 * 3600  # what is still being written is younger


def cache_folder(kind: str) -> Path:
    """The folder of one kind of content, such as `features`; it need not be there."""
    if own := os.environ.get("FINETUNE_CACHE"):
        return Path(own).expanduser() / kind
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser() / "finetune" / kind


@contextlib.contextmanager
def published(folder: Path, key: str) -> Iterator[tuple[Path, list[str]]]:
    """Write a file that others see whole or not at all.

    Args:
        folder: made if it is not there.
        key: hexadecimal sha256 of what the content depends on.
    Yields: a path to write to, and a list; the file gets the name that the list holds at the end,
        or is removed where there is none. Whoever writes brings it to the disk.
    Raises: OSError where it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{key}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
    name: list[str] = []
    try:
        yield temporary, name
        if name:
            os.replace(temporary, folder / name[0])
    finally:
        temporary.unlink(missing_ok=True)


def leftovers(folder: Path, key: str) -> list[Path]:
    """What is being written under a key, or was left there by processes that were killed."""
    return sorted(folder.glob(f".{key}.*.tmp"))


def make_room(folder: Path, max_bytes: int, *, keep: str, names: re.Pattern[str]) -> None:
    """Remove what was not used for longest, and what killed processes left half written.

    Args:
        folder: of one kind of content.
        max_bytes: that all of its files may have together.
        keep: the name of a file that stays.
        names: of the files that belong to the cache.
    """
    files: list[tuple[float, int, Path]] = []
    for path in folder.iterdir():
        try:
            state = path.stat()
            if _LEFTOVER.fullmatch(path.name) and time.time() - state.st_mtime > _LEFTOVER_SECONDS:
                path.unlink()
        except FileNotFoundError:
            continue  # another process was faster
        if names.fullmatch(path.name):
            files.append((state.st_mtime, state.st_size, path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= max_bytes:
            return
        if path.name != keep:
            path.unlink(missing_ok=True)
            total -= size
