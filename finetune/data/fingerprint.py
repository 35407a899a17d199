"""SHA-256 fingerprint of a split's images and labels, with an index of file hashes on disk.

The index stores the hash of a file under its stat signature: device, inode, size, mtime and ctime
(in nanoseconds). While the signature stays the same, the file is not read again. File times are
only as fine as the file system's clock. So a file that changed less than two seconds before it was
read, or has a time in the future, is not stored: another change in the same clock tick would leave
its times the same.

Each dataset has one index file in `hashes/` of the cache: a sha256, then records of a key and a
hash. If the index is corrupt, the images are hashed again; this is never an error.
"""

# N images, F files

from __future__ import annotations

import collections
import hashlib
import itertools
import os
import re
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from tqdm import tqdm

from finetune.cache import CacheFolder, cache_path
from finetune.data.stat_signatures import UNSETTLED, IntArray, are_settled
from finetune.errors import DataError
from finetune.log import warn_once
from finetune.progress import item_bar
from finetune.ranks import is_local_main_process

if TYPE_CHECKING:
    from finetune.data.encoded_images import EncodedImages

__all__ = ["compute_fingerprint", "try_read_bytes"]

MAX_CACHE_BYTES = 2**30
_HASH_TOGETHER_BYTES = 2**30  # up to this size, one hash over all images
_SMALL_SPLIT_BYTES = 2**24  # below, threads and an index cost more than they save
_PROGRESS_BAR_BYTES = 2**28  # above, hashing has a progress bar
_CHUNK_SIZE = 16  # images that a thread hashes at a time
_NUM_THREADS = 8  # more than cores: they also wait for disks
_MAGIC = b"hashes-1"
# The key is the stat signature of a file, or identifies a split and ends in _SPLIT_KEY_SUFFIX.
_RECORD = np.dtype([("key", "V40"), ("hash", "V32")])
_SPLIT_KEY_SUFFIX = b"\xff" * 8
_MAX_RECORDS = 2**24
_FILE_NAME = re.compile(r"[0-9a-f]{64}\.hashes")
_Result = TypeVar("_Result")


def compute_fingerprint(
    images: EncodedImages, rows_N: IntArray, labels_N: IntArray
) -> tuple[str, IntArray]:
    """Hash the encoded bytes and label of every image, in order.

    Up to 1 GiB, this is one sha256 over all images; above, a sha256 over the sha256 of each image.
    An image that cannot be opened is hashed as empty with size -1. Unchanged files are not read
    again, except up to 1 GiB, where one changed file makes all of them be read.

    Args:
        images: images that are not streamed.
        rows_N: rows of `images`.
        labels_N: labels of these rows.
    Returns: the fingerprint, and the (F, 5) `stat_signatures` of the files, taken before reading.
    """
    signatures_F5 = images.stat_signatures(rows_N)
    sizes = signatures_F5[:, 2] if images.has_file_per_image else images.encoded_sizes()[rows_N]
    total = int(sizes.sum())
    index = (
        _HashIndex(images.origin) if total >= _SMALL_SPLIT_BYTES and len(signatures_F5) else None
    )
    is_small = total <= _HASH_TOGETHER_BYTES
    split_hash = hashlib.sha256(b"one" if is_small else b"each")
    for part in (os.fsencode(images.origin), signatures_F5, rows_N, labels_N):
        body = part if isinstance(part, bytes) else part.astype("<i8").tobytes()
        split_hash.update(struct.pack("<q", len(body)) + body)
    split_key = split_hash.digest() + _SPLIT_KEY_SUFFIX
    if index and are_settled(signatures_F5) and (known := index.get(split_key)):
        return known.hex(), signatures_F5
    shown = total >= _PROGRESS_BAR_BYTES and is_local_main_process()
    with item_bar(total, label="hashing images", unit="B", shown=shown) as bar:
        if is_small:
            digest, all_opened = _hash_together(images, rows_N, labels_N, bar)
        else:
            signatures_N5 = (
                signatures_F5 if images.has_file_per_image else np.full((len(rows_N), 5), UNSETTLED)
            )
            digest, all_opened = _hash_per_image(
                images, rows_N, labels_N, signatures_N5, index, bar
            )
    if index:
        if all_opened and are_settled(signatures_F5):
            index.put(split_key, digest)
        index.save(len(rows_N))
    return digest.hex(), signatures_F5


def _hash_together(
    images: EncodedImages, rows_N: IntArray, labels_N: IntArray, bar: tqdm[None]
) -> tuple[bytes, bool]:
    """Hash over all images. Returns: the hash, and True if every image could be opened."""
    digest, all_opened = hashlib.sha256(b"content"), True
    contents = _map_in_chunks(lambda row: try_read_bytes(images, row), rows_N.tolist(), bar.total)
    for (body, size), label in zip(contents, labels_N.tolist(), strict=True):
        digest.update(struct.pack("<qqq", size, len(body), label))
        digest.update(body)
        bar.update(len(body))
        all_opened &= size >= 0  # a disk error may be temporary
    return digest.digest(), all_opened


def _hash_per_image(
    images: EncodedImages,
    rows_N: IntArray,
    labels_N: IntArray,
    signatures_N5: IntArray,
    index: _HashIndex | None,
    bar: tqdm[None],
) -> tuple[bytes, bool]:
    """Hash over the hash of each image; hashes of unchanged files come from the index.

    Returns: same as `_hash_together`.
    """

    def hash_one(position: int) -> tuple[bytes, bytes | None, int]:
        signature = signatures_N5[position]
        key = (
            signature.astype("<i8").tobytes()
            if signature[0] != UNSETTLED and signature[1]
            else None
        )
        if index and key and (known := index.get(key)):
            return known, None, int(signatures_N5[position, 2])
        body, size = try_read_bytes(images, int(rows_N[position]))
        return hashlib.sha256(struct.pack("<q", size) + body).digest(), key, size

    digest, all_opened = hashlib.sha256(b"hashes"), True
    hashes = _map_in_chunks(hash_one, list(range(len(rows_N))), bar.total)
    for (image_hash, key, size), label in zip(hashes, labels_N.tolist(), strict=True):
        digest.update(struct.pack("<q", label) + image_hash)
        if index and key and size >= 0:
            index.put(key, image_hash)
        bar.update(max(size, 0))
        all_opened &= size >= 0
    return digest.digest(), all_opened


def try_read_bytes(images: EncodedImages, row: int) -> tuple[bytes, int]:
    """Return an encoded image and its size in bytes, or b"" and -1 if it cannot be opened."""
    try:
        body = images.read_bytes(row)
    except DataError:
        return b"", -1
    return body, len(body)


def _map_in_chunks(
    fn: Callable[[int], _Result], tasks: list[int], num_bytes: int
) -> Iterator[_Result]:
    """Yield the results of all tasks in order; threads compute a few chunks ahead."""
    if num_bytes < _SMALL_SPLIT_BYTES:
        yield from map(fn, tasks)
        return

    def do(first: int) -> list[_Result]:
        return [fn(task) for task in tasks[first : first + _CHUNK_SIZE]]

    ahead: collections.deque[Future[list[_Result]]] = collections.deque()
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        for first in range(0, len(tasks), _CHUNK_SIZE):
            ahead.append(threads.submit(do, first))
            if len(ahead) > 2 * _NUM_THREADS:
                yield from ahead.popleft().result()
        for done in ahead:
            yield from done.result()


class _HashIndex:
    """Index of the image hashes of one dataset, stored on disk between runs."""

    def __init__(self, origin: str) -> None:
        self._key = hashlib.sha256(os.fsencode(origin)).hexdigest()
        self._name = f"{self._key}.hashes"
        self._hashes: dict[bytes, bytes] = {}
        self._used_hashes: dict[bytes, bytes] = {}
        self._is_modified, self._is_usable = False, True
        try:
            with CacheFolder(cache_path("hashes")) as folder:
                body = folder.read(self._name, max_bytes=40 + _MAX_RECORDS * _RECORD.itemsize)
                folder.mark_used(self._name)
            if body[:8] != _MAGIC or hashlib.sha256(body[40:]).digest() != body[8:40]:
                raise ValueError("it is damaged")
            records = np.frombuffer(body, _RECORD, offset=40)
            self._hashes = dict(zip(records["key"].tolist(), records["hash"].tolist(), strict=True))
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            self._is_usable = isinstance(error, ValueError)
            warn_once(f"cache of image hashes: not used ({error}); hashing the images again")

    def get(self, key: bytes) -> bytes | None:
        """Return the hash of a key, or None."""
        if (digest := self._hashes.get(key)) is not None:
            self._used_hashes[key] = digest
        return digest

    def put(self, key: bytes, digest: bytes) -> None:
        """Store `digest` under `key`."""
        self._hashes[key] = self._used_hashes[key] = digest
        self._is_modified = True

    def save(self, num_images: int) -> None:
        """Write the index if it has new hashes.

        Args:
            num_images: number of images in the split. If the index has many more hashes, this drops
                those that this process has not used.
        """
        if not (self._is_modified and self._is_usable):
            return
        hashes = self._used_hashes if len(self._hashes) > 4 * num_images + 1000 else self._hashes
        pairs = list(itertools.islice(hashes.items(), _MAX_RECORDS))
        body = np.array(pairs, dtype=_RECORD).tobytes()
        try:
            with CacheFolder(cache_path("hashes")) as folder:
                with (
                    folder.write(self._key) as new,
                    os.fdopen(os.dup(new.fd), "wb") as file,
                ):
                    file.write(_MAGIC + hashlib.sha256(body).digest() + body)
                    file.flush()
                    new.final_name = self._name
                folder.evict(MAX_CACHE_BYTES, keep_name=self._name, pattern=_FILE_NAME)
        except OSError as error:
            warn_once(
                f"cache of image hashes: not saved ({error}); the next run hashes the images again"
            )
