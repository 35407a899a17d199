"""The sha256 of a split's images and labels, and an index of hashes, so that a file is read once.

A file's hash is remembered with its device, inode, size and times of change (mtime and ctime, in
nanoseconds): while these stay as they are, it is not read again. Times are as coarse as the file
system's clock. So a file that was changed less than two seconds before it was read, or in the
future, is not remembered: another change in the same instant would leave its times as they are.

The index is a file of `hashes/` in the cache for each data set: a sha256, then records of a key and
a hash. What is wrong with it costs a second look at the files, and never an error.
"""

# N images, F files

from __future__ import annotations

import collections
import hashlib
import itertools
import os
import re
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from finetune.console import terminal_bar
from finetune.data.notices import notice
from finetune.errors import DataError
from finetune.files import CacheFolder, cache_folder
from finetune.processes import is_first_here

if TYPE_CHECKING:
    from finetune.data.items import Items

__all__ = ["are_known", "content_of", "fingerprint_by_names", "fingerprint_of", "states_of"]

MAX_BYTES = 2**30
_CONTENT_BYTES = 2**30  # up to here one hash of all images, as in versions before the index
_SMALL_BYTES = 2**24  # below, threads and an index cost more than they save
_SHOWN_BYTES = 2**28  # above, hashing has a progress bar
_AT_ONCE = 16  # images for a thread at a time
_THREADS = 8  # they also wait for disks
_SETTLED_NS = 2 * 10**9
_UNKNOWN = -1  # stands for a state that proves nothing
_MAGIC = b"hashes-1"
_RECORD = np.dtype([("key", "V40"), ("hash", "V32")])  # a state, or a sha256 and _WHOLE
_WHOLE = b"\xff" * 8
_MOST_RECORDS = 2**24
_NAME = re.compile(r"[0-9a-f]{64}\.hashes")
_Result = TypeVar("_Result")
Integers = NDArray[np.int64]


def states_of(paths: Iterable[bytes | str | os.PathLike[str]]) -> Integers:
    """Look at files before they are read.

    Args:
        paths: links are followed.
    Returns: (F, 5) device, inode, size, mtime and ctime; zeros for what cannot be looked at. The
        device is -1 for a file that was changed a moment ago: its next change may show no other
        time.
    """
    latest = time.time_ns() - _SETTLED_NS
    return np.array([_state_of(path, latest) for path in paths], dtype=np.int64).reshape(-1, 5)


def _state_of(path: bytes | str | os.PathLike[str], latest: int) -> tuple[int, int, int, int, int]:
    try:
        state = os.stat(path)
    except (OSError, ValueError):
        return (0, 0, 0, 0, 0)
    is_fresh = max(state.st_mtime_ns, state.st_ctime_ns) > latest
    device = _UNKNOWN if is_fresh else state.st_dev % 2**63
    return device, state.st_ino % 2**63, state.st_size, state.st_mtime_ns, state.st_ctime_ns


def are_known(states_F5: Integers) -> bool:
    """True if files in these states are not read again."""
    return len(states_F5) > 0 and not np.any(states_F5[:, 0] == _UNKNOWN)


def fingerprint_of(items: Items, rows_N: Integers, labels_N: Integers) -> tuple[str, Integers]:
    """Hash every image's encoded bytes and label, in order.

    Up to 1 GiB of images it is one sha256 of them all, above it that of each one's sha256. Images
    that cannot be opened count as such. A file that did not change is not read again, but that one
    hash needs all of its images.

    Args:
        items: not streamed.
        rows_N: of the items.
        labels_N: of the rows.
    Returns: the hash, and the (F, 5) states of the files, from before they were read.
    """
    states_F5 = items.states(rows_N)
    sizes = states_F5[:, 2] if items.has_file_each else items.sizes()[rows_N]
    total = int(sizes.sum())
    index = _Index(items.origin) if total >= _SMALL_BYTES and len(states_F5) else None
    is_one = total <= _CONTENT_BYTES
    everything = hashlib.sha256(b"one" if is_one else b"each")
    for part in (os.fsencode(items.origin), states_F5, rows_N, labels_N):
        body = part if isinstance(part, bytes) else part.astype("<i8").tobytes()
        everything.update(struct.pack("<q", len(body)) + body)
    whole = everything.digest() + _WHOLE
    if index and are_known(states_F5) and (known := index.get(whole)):
        return known.hex(), states_F5
    shown = total >= _SHOWN_BYTES and is_first_here()
    with terminal_bar(total, label="hashing images", unit="B", shown=shown) as bar:
        if is_one:
            digest, is_whole = _hash_as_one(items, rows_N, labels_N, bar)
        else:
            own = states_F5 if items.has_file_each else np.full((len(rows_N), 5), _UNKNOWN)
            digest, is_whole = _hash_each(items, rows_N, labels_N, own, index, bar)
    if index:
        if is_whole and are_known(states_F5):
            index.put(whole, digest)
        index.save(len(rows_N))
    return digest.hex(), states_F5


def _hash_as_one(
    items: Items, rows_N: Integers, labels_N: Integers, bar: tqdm[None]
) -> tuple[bytes, bool]:
    """Hash all images as one. Returns: the hash, and True if every image could be opened."""
    digest, is_whole = hashlib.sha256(b"content"), True
    contents = _in_threads(lambda row: content_of(items, row), rows_N.tolist(), bar.total)
    for (body, size), label in zip(contents, labels_N.tolist(), strict=True):
        digest.update(struct.pack("<qqq", size, len(body), label))
        digest.update(body)
        bar.update(len(body))
        is_whole &= size >= 0  # a disk may fail now and not later
    return digest.digest(), is_whole


def _hash_each(
    items: Items,
    rows_N: Integers,
    labels_N: Integers,
    states_N5: Integers,
    index: _Index | None,
    bar: tqdm[None],
) -> tuple[bytes, bool]:
    """Hash the images' hashes, of which the index knows those of unchanged files.

    Returns: as `_hash_as_one`.
    """

    def hash_one(place: int) -> tuple[bytes, bytes | None, int]:
        state = states_N5[place]
        key = state.astype("<i8").tobytes() if state[0] != _UNKNOWN and state[1] else None
        if index and key and (known := index.get(key)):
            return known, None, int(states_N5[place, 2])
        body, size = content_of(items, int(rows_N[place]))
        return hashlib.sha256(struct.pack("<q", size) + body).digest(), key, size

    digest, is_whole = hashlib.sha256(b"hashes"), True
    hashes = _in_threads(hash_one, list(range(len(rows_N))), bar.total)
    for (own, key, size), label in zip(hashes, labels_N.tolist(), strict=True):
        digest.update(struct.pack("<q", label) + own)
        if index and key and size >= 0:
            index.put(key, own)
        bar.update(max(size, 0))
        is_whole &= size >= 0
    return digest.digest(), is_whole


def fingerprint_by_names(items: Items, rows_N: Integers, labels_N: Integers) -> str | None:
    """Return the hash that versions before the index took of more than 1 GiB; None of less.

    It is of the images' names and sizes, so it tells those runs' data from other data, and nothing
    about its content.
    """
    sizes = items.sizes()
    if int(sizes[rows_N].sum()) <= _CONTENT_BYTES:
        return None
    digest = hashlib.sha256(b"names and sizes")
    for row, label in zip(rows_N.tolist(), labels_N.tolist(), strict=True):
        body = items.name_of(row).encode()
        digest.update(struct.pack("<qqq", int(sizes[row]), len(body), label))
        digest.update(body)
    return digest.hexdigest()


def content_of(items: Items, row: int) -> tuple[bytes, int]:
    """Return an encoded image and its size in bytes, -1 for one that cannot be opened."""
    try:
        body = items.content(row)
    except DataError:
        return b"", -1
    return body, len(body)


def _in_threads(
    work: Callable[[int], _Result], tasks: list[int], num_bytes: int
) -> Iterator[_Result]:
    """Yield the results of all tasks in order; a few are done ahead."""
    if num_bytes < _SMALL_BYTES:
        yield from map(work, tasks)
        return

    def do(first: int) -> list[_Result]:
        return [work(task) for task in tasks[first : first + _AT_ONCE]]

    ahead: collections.deque[Future[list[_Result]]] = collections.deque()
    with ThreadPoolExecutor(_THREADS) as threads:
        for first in range(0, len(tasks), _AT_ONCE):
            ahead.append(threads.submit(do, first))
            if len(ahead) > 2 * _THREADS:
                yield from ahead.popleft().result()
        for done in ahead:
            yield from done.result()


class _Index:
    """The hashes of one data set that earlier runs computed."""

    def __init__(self, origin: str) -> None:
        self._key = hashlib.sha256(os.fsencode(origin)).hexdigest()
        self._name = f"{self._key}.hashes"
        self._hashes: dict[bytes, bytes] = {}
        self._used: dict[bytes, bytes] = {}
        self._is_new, self._is_usable = False, True
        try:
            with CacheFolder(cache_folder("hashes")) as folder:
                body = folder.read(self._name, limit_bytes=40 + _MOST_RECORDS * _RECORD.itemsize)
                folder.touch(self._name)
            if body[:8] != _MAGIC or hashlib.sha256(body[40:]).digest() != body[8:40]:
                raise ValueError("it is damaged")
            records = np.frombuffer(body, _RECORD, offset=40)
            self._hashes = dict(zip(records["key"].tolist(), records["hash"].tolist(), strict=True))
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            self._is_usable = isinstance(error, ValueError)
            notice(f"index of hashes: is not used ({error}); the images are hashed again")

    def get(self, key: bytes) -> bytes | None:
        """The hash of a key, or None."""
        if (digest := self._hashes.get(key)) is not None:
            self._used[key] = digest
        return digest

    def put(self, key: bytes, digest: bytes) -> None:
        """Remember a hash."""
        self._hashes[key] = self._used[key] = digest
        self._is_new = True

    def save(self, number: int) -> None:
        """Write the index, if there is something new in it.

        Args:
            number: of images; where there are many more hashes, those not used now are left out.
        """
        if not (self._is_new and self._is_usable):
            return
        hashes = self._used if len(self._hashes) > 4 * number + 1000 else self._hashes
        pairs = list(itertools.islice(hashes.items(), _MOST_RECORDS))
        body = np.array(pairs, dtype=_RECORD).tobytes()
        try:
            with CacheFolder(cache_folder("hashes")) as folder:
                with (
                    folder.write(self._key) as new,
                    os.fdopen(os.dup(new.descriptor), "wb") as file,
                ):
                    file.write(_MAGIC + hashlib.sha256(body).digest() + body)
                    file.flush()
                    new.name = self._name
                folder.make_room(MAX_BYTES, keep=self._name, names=_NAME)
        except OSError as error:
            notice(f"index of hashes: is not kept ({error}); the next run hashes the images again")
