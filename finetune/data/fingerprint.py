"""Fingerprint of a split: a SHA-256 over its labels and the digests of its images, cached on disk.

The digests are stored under the stat signatures of the files: device, inode, size, mtime and
ctime (in nanoseconds). While these signatures stay the same, the files are not read again. File
times are only as fine as the file system's clock. So if a file changed less than two seconds before
it was read, or has a time in the future, the digests are not stored: another change in the same
clock tick would leave its times the same.

The digests of a split are stored as one file in the folder `hashes/` of the cache; the file begins
with a checksum. If it is damaged, the images are hashed again; this is never an error.
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
from finetune.data.recorded_digests import DIGEST_BYTES, UNREADABLE_DIGEST, image_digest
from finetune.data.stat_signatures import are_settled
from finetune.data.thread_pool import thread_map
from finetune.errors import DataError
from finetune.log import warn_once
from finetune.progress import item_bar
from finetune.ranks import is_local_main_process

if TYPE_CHECKING:
    from finetune.data.encoded_images import EncodedImages

__all__ = ["MIN_STORED_BYTES", "compute_digests", "compute_fingerprint"]

MAX_CACHE_BYTES = 2**30
MIN_STORED_BYTES = 2**24  # below, threads and stored digests cost more than they save
_PROGRESS_BAR_BYTES = 2**28  # above, hashing has a progress bar
_MAX_CHUNK_IMAGES = 16  # per thread task; one image per task would waste time on starting tasks
_CHUNK_BYTES = 2**20
_NUM_THREADS = 8  # more than cores: they also wait for disks
_FILE_NAME = re.compile(r"[0-9a-f]{64}\.digests")


def compute_fingerprint(digests_N16: NDArray[np.uint8], labels_N: NDArray[np.int64]) -> str:
    """Return a sha256 over the digests and labels of a split's images, in order."""
    content = digests_N16.tobytes() + labels_N.astype("<i8").tobytes()
    return hashlib.sha256(b"images" + content).hexdigest()


def compute_digests(images: EncodedImages, rows_N: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return the digest of each encoded image, in order.

    Always reads a small split. For a larger split, returns the digests that an earlier run stored;
    if any file has changed since then, reads all files.

    Args:
        images: images that are not streamed.
        rows_N: rows of `images`.
    Returns: (N, 16), each an `image_digest`, or `UNREADABLE_DIGEST` if the file cannot be read.
    """
    signatures_F5 = images.stat_signatures(rows_N)
    sizes = signatures_F5[:, 2] if images.has_file_per_image else images.encoded_sizes()[rows_N]
    total = int(sizes.sum())
    key = None
    if total >= MIN_STORED_BYTES and are_settled(signatures_F5):
        key = _cache_key(images.origin, signatures_F5, rows_N)
        if known := _read_cached(key, len(rows_N)):
            return _as_rows(known)

    def digest_some(rows: NDArray[np.int64]) -> tuple[list[bytes], int]:
        """Return the digests of some rows, and how many bytes were read."""
        digests, num_bytes = [], 0
        for row in rows.tolist():
            try:
                body = images.read_bytes(row)
            except (DataError, OSError):
                digests.append(UNREADABLE_DIGEST)
            else:
                digests.append(image_digest(body))
                num_bytes += len(body)
        return digests, num_bytes

    chunk_size = min(max(_CHUNK_BYTES * len(rows_N) // max(total, 1), 1), _MAX_CHUNK_IMAGES)
    chunks = (rows_N[first : first + chunk_size] for first in range(0, len(rows_N), chunk_size))
    is_small = total < MIN_STORED_BYTES
    parts = map(digest_some, chunks) if is_small else thread_map(digest_some, chunks, _NUM_THREADS)
    all_digests = list[bytes]()
    shown = total >= _PROGRESS_BAR_BYTES and is_local_main_process()
    with item_bar(total, label="hashing images", unit="B", shown=shown) as bar:
        for digests, num_bytes in parts:
            all_digests += digests
            bar.update(num_bytes)
    body = b"".join(all_digests)
    if key and UNREADABLE_DIGEST not in all_digests:  # a disk error may be temporary
        _write_cached(key, body)
    return _as_rows(body)


def _as_rows(digests: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(digests, dtype=np.uint8).reshape(-1, DIGEST_BYTES)


def _cache_key(origin: str, *arrays: NDArray[np.int64]) -> str:
    """Return the cache key: a hash of everything that the digests depend on."""
    key = hashlib.sha256()
    for body in (os.fsencode(origin), *(array.astype("<i8").tobytes() for array in arrays)):
        key.update(struct.pack("<q", len(body)) + body)
    return key.hexdigest()


def _read_cached(key: str, num_images: int) -> bytes | None:
    """Return the stored digests; None if there are none, or they are damaged."""
    name, num_bytes = f"{key}.digests", num_images * DIGEST_BYTES
    try:
        with CacheFolder(cache_path("hashes")) as folder:
            body = folder.read(name, max_bytes=32 + num_bytes)
            folder.mark_used(name)
        digests = body[32:]
        if len(digests) != num_bytes or body != _with_checksum(key, digests):
            raise ValueError("it is damaged")
        return digests
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        warn_once(f"cache of image hashes: not used ({error}); hashing the images again")
        return None


def _write_cached(key: str, digests: bytes) -> None:
    name = f"{key}.digests"
    try:
        with CacheFolder(cache_path("hashes")) as folder:
            with folder.write(name) as file:
                file.write(_with_checksum(key, digests))
            folder.evict(MAX_CACHE_BYTES, keep_name=name, pattern=_FILE_NAME)
    except OSError as error:
        warn_once(
            f"cache of image hashes: not saved ({error}); the next run hashes the images again"
        )


def _with_checksum(key: str, digests: bytes) -> bytes:
    """Prepend a sha256 of key and digests."""
    return hashlib.sha256(key.encode() + digests).digest() + digests
