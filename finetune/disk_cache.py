"""The folder in which results are kept between two calls, and what is alike for all that is in it.

The cache is $FINETUNE_CACHE, else $XDG_CACHE_HOME/finetune, else ~/.cache/finetune, with a folder
for each kind of content. It can be removed at any time. No file is ever changed: it appears by a
rename and goes as a whole, so any number of processes can share them, and one that has mapped a
file keeps what it has when the file is removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["cache_folder", "leftovers", "make_room", "published"]

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
