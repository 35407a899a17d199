"""SHA-256 fingerprint of a split's images and labels, cached on disk.

The fingerprint is stored under the stat signatures of the files: device, inode, size, mtime and
ctime (in nanoseconds). While they stay the same, the files are not read again. File times are only
as fine as the file system's clock. So if a file changed less than two seconds before it was read,
or has a time in the future, the fingerprint is not stored: another change in the same clock tick
would leave its times the same.

Each fingerprint is a file in `hashes/` of the cache, which also holds a checksum. If the file is
damaged, the images are hashed again; this is never an error.
"""

# N images, F files

from __future__ import annotations

import hashlib
import os
import re
import struct
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from finetune.cache import CacheFolder, cache_path
from finetune.data.stat_signatures import are_settled
from finetune.data.thread_pool import thread_map
from finetune.errors import DataError
from finetune.log import warn_once
from finetune.progress import item_bar
from finetune.ranks import is_local_main_process

if TYPE_CHECKING:
    from finetune.data.encoded_images import EncodedImages

__all__ = ["MIN_STORED_BYTES", "compute_fingerprint", "try_read_bytes"]

MAX_CACHE_BYTES = 2**20
MIN_STORED_BYTES = 2**24  # below, threads and a stored fingerprint cost more than they save
_PROGRESS_BAR_BYTES = 2**28  # above, hashing has a progress bar
_MAX_CHUNK_IMAGES = 16  # per thread task, because starting a task costs time
_CHUNK_BYTES = 2**20
_NUM_THREADS = 8  # more than cores: they also wait for disks
_FILE_NAME = re.compile(r"[0-9a-f]{64}\.fingerprint")


def compute_fingerprint(
    images: EncodedImages, rows_N: NDArray[np.int64], labels_N: NDArray[np.int64]
) -> tuple[str, NDArray[np.int64]]:
    """Hash the encoded bytes and label of every image, in order.

    An image that cannot be opened contributes no bytes and the size -1. A small split is always
    read. A larger one is not read if no file has changed since an earlier run; if one has, all are
    read.

    Args:
        images: images that are not streamed.
        rows_N: rows of `images`.
        labels_N: labels of these rows.
    Returns: the fingerprint, and the (F, 5) `stat_signatures` of the files, taken before reading.
    """
    signatures_F5 = images.stat_signatures(rows_N)
    sizes = signatures_F5[:, 2] if images.has_file_per_image else images.encoded_sizes()[rows_N]
    total = int(sizes.sum())
    key = None
    if total >= MIN_STORED_BYTES and are_settled(signatures_F5):
        key = _cache_key(images.origin, signatures_F5, rows_N, labels_N)
        if known := _read_cached(key):
            return known, signatures_F5

    def read_some(rows: NDArray[np.int64]) -> list[tuple[bytes, int]]:
        return [try_read_bytes(images, row) for row in rows.tolist()]

    chunk_size = min(max(_CHUNK_BYTES * len(rows_N) // max(total, 1), 1), _MAX_CHUNK_IMAGES)
    chunks = (rows_N[first : first + chunk_size] for first in range(0, len(rows_N), chunk_size))
    is_small = total < MIN_STORED_BYTES
    contents = map(read_some, chunks) if is_small else thread_map(read_some, chunks, _NUM_THREADS)
    labels = iter(labels_N.tolist())
    digest, all_opened = hashlib.sha256(b"content"), True
    shown = total >= _PROGRESS_BAR_BYTES and is_local_main_process()
    with item_bar(total, label="hashing images", unit="B", shown=shown) as bar:
        for chunk in contents:
            for body, size in chunk:
                digest.update(struct.pack("<qqq", size, len(body), next(labels)))
                digest.update(body)
                bar.update(len(body))
                all_opened &= size >= 0  # a disk error may be temporary
    if key and all_opened:
        _write_cached(key, digest.hexdigest())
    return digest.hexdigest(), signatures_F5


def try_read_bytes(images: EncodedImages, row: int) -> tuple[bytes, int]:
    """Return an encoded image and its size in bytes, or b"" and -1 if it cannot be opened."""
    try:
        body = images.read_bytes(row)
    except DataError:
        return b"", -1
    return body, len(body)


def _cache_key(origin: str, *arrays: NDArray[np.int64]) -> str:
    """Return the cache key: a hash of everything that the fingerprint depends on."""
    key = hashlib.sha256()
    for body in (os.fsencode(origin), *(array.astype("<i8").tobytes() for array in arrays)):
        key.update(struct.pack("<q", len(body)) + body)
    return key.hexdigest()


def _read_cached(key: str) -> str | None:
    """Return the stored fingerprint; None if there is none, or it is damaged."""
    try:
        with CacheFolder(cache_path("hashes")) as folder:
            body = folder.read(f"{key}.fingerprint", max_bytes=128).decode("ascii")
            folder.mark_used(f"{key}.fingerprint")
        if body != _with_checksum(key, body[:64]):
            raise ValueError("it is damaged")
        return body[:64]
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        warn_once(f"cache of image hashes: not used ({error}); hashing the images again")
        return None


def _write_cached(key: str, fingerprint: str) -> None:
    name = f"{key}.fingerprint"
    try:
        with CacheFolder(cache_path("hashes")) as folder:
            with folder.write(name) as file:
                file.write(_with_checksum(key, fingerprint).encode())
            folder.evict(MAX_CACHE_BYTES, keep_name=name, pattern=_FILE_NAME)
    except OSError as error:
        warn_once(
            f"cache of image hashes: not saved ({error}); the next run hashes the images again"
        )


def _with_checksum(key: str, fingerprint: str) -> str:
    """Append a sha256 of key and fingerprint."""
    return fingerprint + hashlib.sha256((key + fingerprint).encode()).hexdigest()
