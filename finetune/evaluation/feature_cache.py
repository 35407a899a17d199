"""Arrays kept on disk under the hash of what they depend on: features, between two probes.

They are in `features/` of the cache that `disk_cache` describes; above 20 GiB the files that were
not used for longest go by themselves. Each file is a plain .npy whose name carries the key of what
was computed and the sha256 of the file itself, so a damaged one is seen and computed again.
"""

# N images, D width

from __future__ import annotations

import hashlib
import math
import os
import re
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from finetune import disk_cache
from finetune.console import say
from finetune.disk_cache import make_room, published
from finetune.files import sha256_of

__all__ = ["cache_folder", "read_cached", "write_cached"]

MAX_BYTES = 20 * 2**30
_NAME = re.compile(r"[0-9a-f]{64}-[0-9a-f]{64}\.npy")


def cache_folder() -> Path:
    """Where features are kept: see the head of `disk_cache`."""
    return disk_cache.cache_folder("features")


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
    try:
        with published(folder, key) as (temporary, name):
            with temporary.open("wb") as file:
                hashed = _Hashed(file)
                npy.write_array(hashed, np.ascontiguousarray(values_ND), allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())  # else a power cut could leave the name without the bytes
            name.append(f"{key}-{hashed.digest.hexdigest()}.npy")
        make_room(folder, max_bytes, keep=name[0], names=_NAME)
        mapped: NDArray[np.float32] = npy.open_memmap(folder / name[0], mode="r")
        return mapped
    except OSError as error:
        needed = math.ceil(values_ND.nbytes / 2**20)
        say(
            f"{folder}: the features ({needed} MiB) are not kept ({error.strerror or error}); the "
            "next call computes them again. Free space, or set FINETUNE_CACHE to another folder"
        )
        return values_ND
