"""Decoded images side by side, in a file or in memory, filled by any number of processes at once.

Images of one size stand in the split's order; any others behind one another as they come. A file
is written to, not mapped, until it is whole: in a mapped one a full disk would be a signal.
"""

# N images, M of them readable, H W pixels

from __future__ import annotations

import errno
import mmap
import multiprocessing
import os
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from finetune.data.shared_memory import shared_memory

__all__ = ["ROW", "Canvas", "Ragged", "Rows", "arranged", "mapped"]

# Where an image is and what it looks like; height 0 where there is none. The checksum finds what a
# disk did to it, no more is asked of it.
ROW = np.dtype([("offset", "<i8"), ("height", "<i4"), ("width", "<i4"), ("crc", "<u4")])
Rows = NDArray[Any]
_BLOCK_BYTES = 2**24


def _shared(number: int, kind: np.dtype[Any]) -> NDArray[Any]:
    """Zeros that processes forked from here share."""
    return shared_memory(number * kind.itemsize).view(kind)


def _sized(rows: Rows, size: tuple[int, int]) -> NDArray[np.bool_]:
    return (rows["height"] == size[0]) & (rows["width"] == size[1])


class Canvas:
    """Decoded images in one place; processes forked from here write into the same one.

    Args:
        number: N, the most images that will come.
        size: (H, W) that all are expected to have; None if they are known to differ.
        num_bytes: that they are expected to take.
        file: a descriptor, open for reading and writing; None for memory. A file takes the bytes
            at once, so that a full disk shows before the work.
    Raises: OSError where there is no room.
    Attributes:
        rows: (N,) of ROW.
    """

    def __init__(
        self, number: int, *, size: tuple[int, int] | None, num_bytes: int, file: int | None = None
    ) -> None:
        self.file = file
        self._size = size
        self._cell = size[0] * size[1] * 3 if size else 0
        expected = max(num_bytes, self._cell * number)
        self.rows = _shared(number, ROW)
        self._end = _shared(1, np.dtype("<i8"))
        self._end[0] = self._cell * number
        self._lock = multiprocessing.get_context("fork").Lock()
        if file is None:
            self._memory = _reserved(expected)
        elif expected:
            os.posix_fallocate(file, 0, expected)

    def keep(self, index: int, image: NDArray[np.uint8]) -> None:
        """Keep one image, never twice for one index. Raises: OSError where there is no room."""
        height, width = image.shape[:2]
        body = np.ascontiguousarray(image).reshape(-1)
        if (height, width) == self._size:
            offset = index * self._cell
        else:
            with self._lock:
                offset = int(self._end[0])
                self._end[0] += len(body)
        if self.file is not None:
            _write(self.file, body.data, offset)
        elif offset + len(body) > len(self._memory):
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        else:
            self._memory[offset : offset + len(body)] = body
        self.rows[index] = (offset, height, width, zlib.crc32(body.data))

    def close_up(self, kept_M: NDArray[np.int64]) -> Rows:
        """Leave some of the images; those of one size then stand without a gap.

        Args:
            kept_M: indices of images that are there, ascending.
        Returns: (M,) of ROW. A file ends behind the last image.
        """
        rows = self.rows[kept_M]
        end = int(self._end[0])
        if self._size and np.all(_sized(rows, self._size)):
            if not np.array_equal(kept_M, np.arange(len(kept_M))):
                cells = self.images(writable=True)[: len(self.rows) * self._cell]
                _move_together(cells.reshape(len(self.rows), self._cell), kept_M)
            rows["offset"] = np.arange(len(rows)) * self._cell
            end = len(rows) * self._cell
        if self.file is not None:
            os.ftruncate(self.file, end)
        return rows

    def images(self, *, writable: bool = False) -> NDArray[np.uint8]:
        """All that was kept. Returns: uint8, in one dimension, not copied."""
        if self.file is None:
            return self._memory
        return mapped(self.file, writable=writable)


def _reserved(num_bytes: int) -> NDArray[np.uint8]:
    """Memory for processes to share: more than is expected, as a sample may mislead."""
    try:
        return shared_memory(16 * num_bytes + 2**30)
    except OSError:  # where the system promises no more than it has
        return shared_memory(2 * num_bytes + 2**20)


def _write(file: int, body: memoryview, offset: int) -> None:
    done = 0
    while done < len(body):  # the system may take a part only
        done += os.pwrite(file, body[done:], offset + done)


def _move_together(cells: NDArray[np.uint8], kept_M: NDArray[np.int64]) -> None:
    """Move the kept images of one size to the front."""
    step = max(1, _BLOCK_BYTES // cells.shape[1])
    for start in range(0, len(kept_M), step):
        # an image goes forward or stays: never onto one that is still to be moved
        block = kept_M[start : start + step]
        cells[start : start + len(block)] = cells[block]


class Ragged(Sequence[NDArray[np.uint8]]):
    """Images of several sizes in one piece of memory.

    Args:
        flat: uint8, mapped or not.
        rows: (M,) of ROW.
    """

    def __init__(self, flat: NDArray[np.uint8], rows: Rows) -> None:
        self.flat = flat
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> NDArray[np.uint8]: ...
    @overload
    def __getitem__(self, index: slice) -> Ragged: ...
    def __getitem__(self, index: int | slice) -> NDArray[np.uint8] | Ragged:
        """One image, (H, W, 3), which is not copied; or some of them."""
        if isinstance(index, slice):
            return Ragged(self.flat, self.rows[index])
        offset, height, width, _ = self.rows[index].tolist()
        return self.flat[offset : offset + height * width * 3].reshape(height, width, 3)

    def __iter__(self) -> Iterator[NDArray[np.uint8]]:
        return (self[index] for index in range(len(self)))


def arranged(flat: NDArray[np.uint8], rows: Rows) -> NDArray[np.uint8] | Ragged:
    """Images as they stand in a file.

    Args:
        flat: all of the file's images, uint8.
        rows: (M,) of ROW.
    Returns: (M, H, W, 3), not copied, if all have one size and follow one another, else Ragged.
    """
    if len(rows):
        height, width = int(rows["height"][0]), int(rows["width"][0])
        cell = height * width * 3
        if np.all(_sized(rows, (height, width)) & (rows["offset"] == np.arange(len(rows)) * cell)):
            return flat[: len(rows) * cell].reshape(len(rows), height, width, 3)
    return Ragged(flat, rows)


def mapped(file: int, *, writable: bool = False) -> NDArray[np.uint8]:
    """Map all of an open file, which may be closed then. Returns: (bytes,) uint8."""
    size = os.fstat(file).st_size
    if not size:
        return np.zeros(0, dtype=np.uint8)
    # a private mapping that could be written would have to fit in memory
    access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
    return np.frombuffer(mmap.mmap(file, size, access=access), dtype=np.uint8)
