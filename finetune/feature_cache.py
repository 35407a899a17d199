"""Arrays kept on disk under the hash of what they depend on: features, between two probes.

The cache is `features/` below $FINETUNE_CACHE, else below $XDG_CACHE_HOME/finetune, else below
~/.cache/finetune. It can be removed at any time; above 20 GiB the files that were not used for
longest go by themselves. Each file is a plain .npy whose name carries the key of what was computed
and the sha256 of the file itself, so a damaged one is seen and computed again. No file is ever
changed: it appears by a rename and goes as a whole, so any number of processes can share them.
"""

# N images, D width

from __future__ import annotations

import hashlib
import math
import os
import re
import secrets
import time
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from finetune.files import sha256_of
from finetune.progress import say

__all__ = ["cache_folder", "read_cached", "write_cached"]

MAX_BYTES = 20 * 2**30
_NAME = re.compile(r"[0-9a-f]{64}-[0-9a-f]{64}\.npy")
_LEFTOVER = re.compile(r"\.[0-9a-f]{64}\..+\.tmp")
_LEFTOVER_SECONDS = 24 * 3600  # what is still being written is younger


def cache_folder() -> Path:
    """Where features are kept: see the head of this file."""
    if own := os.environ.get("FINETUNE_CACHE"):
        return Path(own).expanduser() / "features"
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser() / "finetune" / "features"


def read_cached(folder: Path, key: str, *, num_images: int) -> NDArray[np.float32] | None:
    """Map the features of a key, after checking every byte of the file.

    Args:
        folder: of the cache.
        key: hexadecimal sha256.
        num_images: N, which the file must have.
    Returns: (N, D), read-only; None if there is no intact file. Damaged ones are removed.
    """
    for path in sorted(folder.glob(f"{key}-*.npy")):
        try:
            if sha256_of(path) == path.stem.partition("-")[2]:
                # unlike np.load this reads nothing but arrays, whatever the file begins with
                values: NDArray[np.float32] = npy.open_memmap(path, mode="r")
                if values.dtype == np.float32 and values.shape[0] == num_images:
                    os.utime(path)  # the least recently used go first
                    return values
            path.unlink()
            say(f"{path}: is damaged; it is removed and the features are computed again")
        except FileNotFoundError:
            continue  # another process made room, or removed it as damaged
        except (OSError, ValueError) as error:
            say(f"{path}: cannot be used ({error}); the features are computed again")
    return None


class _Hashed:
    """A file that knows the sha256 of what was written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.digest = hashlib.sha256()

    def write(self, piece: bytes) -> int:
        self.digest.update(piece)
        return self.file.write(piece)


def write_cached(
    folder: Path, key: str, values_ND: NDArray[np.float32], *, max_bytes: int = MAX_BYTES
) -> NDArray[np.float32]:
    """Keep features in one step, and make room for them.

    A disk that is full or cannot be written costs only the cache: it is said, and the features
    stay in memory.

    Args:
        folder: made if it is not there.
        key: hexadecimal sha256 of what they depend on.
        values_ND: float32.
        max_bytes: of all files together; the new one always stays.
    Returns: the same values, mapped from the file if it could be written.
    """
    temporary = folder / f".{key}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                hashed = _Hashed(file)
                npy.write_array(hashed, np.ascontiguousarray(values_ND), allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())  # else a power cut could leave the name without the bytes
            path = folder / f"{key}-{hashed.digest.hexdigest()}.npy"
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        _make_room(folder, max_bytes, keep=path.name)
        mapped: NDArray[np.float32] = npy.open_memmap(path, mode="r")
        return mapped
    except OSError as error:
        needed = math.ceil(values_ND.nbytes / 2**20)
        say(
            f"{folder}: the features ({needed} MiB) are not kept ({error.strerror or error}); the "
            "next call computes them again. Free space, or set FINETUNE_CACHE to another folder"
        )
        return values_ND


def _make_room(folder: Path, max_bytes: int, *, keep: str) -> None:
    """Remove what was not used for longest, and what killed processes left half written."""
    files: list[tuple[float, int, Path]] = []
    for path in folder.iterdir():
        try:
            state = path.stat()
            if _LEFTOVER.fullmatch(path.name) and time.time() - state.st_mtime > _LEFTOVER_SECONDS:
                path.unlink()
        except FileNotFoundError:
            continue  # another process was faster
        if _NAME.fullmatch(path.name):
            files.append((state.st_mtime, state.st_size, path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= max_bytes:
            return
        if path.name != keep:
            # a process that has mapped it keeps what it has
            path.unlink(missing_ok=True)
            total -= size
