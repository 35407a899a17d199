"""The file of a split's decoded images: filled by many processes, read with a checksum each.

The pixels come first, images of one size in the split's order, any others as they come. Then the
table: a row for each image with its place, size and checksum, its index in the split, and the
causes of unreadable ones. Last the footer: the key of the file, and the sha256 of it and the table.
Images that are kept in memory lie there in the same way.
"""

# N images, M of them readable, B batch, C channels, H W pixels

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finetune.data.decode import LIMIT_PIXELS
from finetune.data.device_copy import host_memory, of_one_size
from finetune.data.shared_memory import shared_memory
from finetune.transforms.ragged import SLACK_BYTES, Ragged

__all__ = ["Canvas", "Images", "Table", "read_table", "write_table"]

# height 0 where there is no image
ROW = np.dtype([("offset", "<i8"), ("height", "<i4"), ("width", "<i4"), ("crc", "<u4")])
Rows = NDArray[Any]
Place = int | NDArray[np.uint8]  # a descriptor, or memory that processes share
_FOOTER = struct.Struct("<8s64sqqq32s")  # magic, key, M, bytes of pixels and causes, sha256
_MAGIC = b"pixels-2"
_MOST_CAUSE_BYTES = 4096  # of an unreadable image
_THREADS_BYTES = 2**23  # of a batch: below, starting threads costs more than they save


@dataclass(frozen=True)
class Table:
    """The end of a file: all but the pixels.

    Attributes:
        rows: (M,) of ROW.
        indices: (M,) int64, of the readable images in the split, ascending.
        failed: (index, cause) of the others, ascending.
    """

    rows: Rows
    indices: NDArray[np.int64]
    failed: list[tuple[int, str]]


class Canvas:
    """A file that is filled with decoded images; processes forked from here write to it, too.

    Args:
        place: a descriptor, open for reading and writing, or memory.
        number: N, the most images that will come.
        size: (H, W) that all are expected to have; None if they are known to differ.
        num_bytes: that they are expected to take. A disk gives them at once, so that one that is
            full shows before the work.
    Raises: OSError where there is no room.

    The rows of a file stand in it, behind the room for images of one size, until it is closed up:
    what a process that was killed has kept is there for the next one.
    """

    def __init__(
        self, place: Place, number: int, *, size: tuple[int, int] | None, num_bytes: int
    ) -> None:
        self._place = place
        self._size = size
        self._cell = size[0] * size[1] * 3 if size else 0
        self._end = shared_memory(8).view("<i8")
        self._end[0] = uniform = self._cell * number
        self._lock = multiprocessing.get_context("fork").Lock()
        self._row_bytes = number * ROW.itemsize
        self._row_place: Place = place
        self._rows_start = uniform
        if not isinstance(place, int):
            self._row_place, self._rows_start = shared_memory(self._row_bytes), 0
        elif number:
            self._end[0] += self._row_bytes
            os.posix_fallocate(place, 0, max(num_bytes, uniform) + self._row_bytes)

    @property
    def rows(self) -> Rows:
        """(N,) of ROW, as they are now."""
        body = _read(self._row_place, self._row_bytes, self._rows_start)
        return np.frombuffer(body, ROW)

    def kept(self) -> NDArray[np.bool_]:
        """Find the images that are there already; what comes is kept behind them.

        Returns: (N,). Each is compared with its checksum when it is read, as every image is.
        """
        rows, place = self.rows, self._place
        pixels = rows["height"].astype(np.int64) * rows["width"]
        ends = rows["offset"] + pixels * 3
        size = os.fstat(place).st_size if isinstance(place, int) else len(place)
        is_uniform = rows["offset"] == np.arange(len(rows)) * self._cell
        is_uniform &= pixels * 3 == self._cell
        is_kept = (rows["height"] > 0) & (rows["width"] > 0) & (pixels <= LIMIT_PIXELS)
        is_kept &= is_uniform | ((rows["offset"] >= self._end[0]) & (ends <= size))
        self._end[0] = max(self._end[0], ends.max(initial=0, where=is_kept))
        return is_kept

    def keep(self, index: int, image: NDArray[np.uint8]) -> None:
        """Keep one image, never twice for one index. Raises: OSError where there is no room."""
        height, width = image.shape[:2]
        body = np.ascontiguousarray(image).reshape(-1).data
        if (height, width) == self._size:
            offset = index * self._cell
        else:
            with self._lock:
                offset = int(self._end[0])
                self._end[0] += len(body)
        _write(self._place, body, offset)
        row = np.array((offset, height, width, zlib.crc32(body)), dtype=ROW)
        start = self._rows_start + index * ROW.itemsize
        _write(self._row_place, memoryview(row.tobytes()), start)

    def close_up(self, kept_M: NDArray[np.int64]) -> Rows:
        """Leave some of the images; those of one size then stand without a gap.

        Args:
            kept_M: indices of images that are there, ascending.
        Returns: (M,) of ROW. The file ends behind the last image.
        """
        rows = self.rows[kept_M]
        end = int(self._end[0])
        if self._size and self._size == _size_of_all(rows):
            for place, index in enumerate(kept_M.tolist()):
                if place != index:  # an image goes forward: never onto one that is still to go
                    body = _read(self._place, self._cell, index * self._cell)
                    _write(self._place, memoryview(body), place * self._cell)
            rows["offset"] = np.arange(len(rows)) * self._cell
            end = len(rows) * self._cell
        if isinstance(self._place, int):
            os.ftruncate(self._place, end)
        return rows


def _write(place: Place, body: memoryview, offset: int) -> None:
    """Raises: OSError where there is no room."""
    if isinstance(place, int):
        done = 0
        while done < len(body):  # the system may take a part only
            done += os.pwrite(place, body[done:], offset + done)
    elif offset + len(body) > len(place):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    else:
        place[offset : offset + len(body)] = body


def _size_of_all(rows: Rows) -> tuple[int, int] | None:
    """(H, W) if all images have one size, else None."""
    if not len(rows):
        return None
    size = int(rows["height"][0]), int(rows["width"][0])
    return size if np.all((rows["height"] == size[0]) & (rows["width"] == size[1])) else None


def write_table(file: int, table: Table, key: str) -> None:
    """Write table and footer behind the pixels."""
    num_bytes = os.fstat(file).st_size
    causes = [(index, cause[: _MOST_CAUSE_BYTES // 8]) for index, cause in table.failed]
    body = table.rows.tobytes() + table.indices.astype("<i8").tobytes()
    texts = json.dumps(causes).encode()
    head = _FOOTER.pack(_MAGIC, key.encode(), len(table.rows), num_bytes, len(texts), b"")[:-32]
    footer = head + hashlib.sha256(head + body + texts).digest()
    _write(file, memoryview(body + texts + footer), num_bytes)


def read_table(file: int, key: str, num_images: int) -> Table:
    """Read and prove the end of a file.

    Args:
        key: that the file must have been made for.
        num_images: N, of the split.
    Raises: ValueError for a file that is not whole, was made for another key, or claims what
        cannot be.
    """
    size = os.fstat(file).st_size
    footer = _read(file, _FOOTER.size, size - _FOOTER.size)
    magic, made_for, number, num_bytes, text_bytes, digest = _FOOTER.unpack(footer)
    if (magic, made_for) != (_MAGIC, key.encode()):
        raise ValueError("made by another version or for other images")
    if not (0 <= number <= num_images and num_bytes >= 0):
        raise ValueError("impossible numbers")
    if not 0 <= text_bytes <= 2 + _MOST_CAUSE_BYTES * (num_images - number):
        raise ValueError("impossible numbers")
    row_bytes, index_bytes = number * ROW.itemsize, number * 8
    if size != num_bytes + row_bytes + index_bytes + text_bytes + _FOOTER.size:
        raise ValueError("not a whole file")
    body = _read(file, row_bytes + index_bytes + text_bytes, num_bytes)
    if hashlib.sha256(footer[:-32] + body).digest() != digest:
        raise ValueError("a damaged table")
    rows = np.frombuffer(body, ROW, number)
    indices = np.frombuffer(body, "<i8", number, row_bytes).astype(np.int64)
    failed = _causes(body[row_bytes + index_bytes :])
    every = np.concatenate([indices, np.array([index for index, _ in failed], dtype=np.int64)])
    if not (np.all(np.diff(indices) > 0) and np.array_equal(np.sort(every), range(num_images))):
        raise ValueError("not the images of the split")
    heights, widths = rows["height"].astype(np.int64), rows["width"].astype(np.int64)
    sides = np.concatenate([heights, widths])
    if number and not (sides.min() >= 1 and sides.max() <= LIMIT_PIXELS):
        raise ValueError("impossible sizes")
    ends = rows["offset"] + heights * widths * 3
    if number and not (rows["offset"].min() >= 0 and ends.max() <= num_bytes):
        raise ValueError("images beyond the end")
    return Table(rows, indices, failed)


def _causes(texts: bytes) -> list[tuple[int, str]]:
    """The indices and causes of unreadable images. Raises: ValueError for anything else."""
    try:
        entries = json.loads(texts)
    except RecursionError:
        raise ValueError("nested causes") from None
    if type(entries) is not list:
        raise ValueError("causes that are no list")
    for entry in entries:
        if type(entry) is not list or [type(part) for part in entry] != [int, str]:
            raise ValueError("a cause of another kind")
        if not 0 <= entry[0] < 2**62:
            raise ValueError("an impossible index")
    return [(index, cause) for index, cause in entries]


def _read(place: Place, num_bytes: int, offset: int) -> bytes:
    """Raises: ValueError where the file is shorter or cannot be read."""
    buffer = bytearray(num_bytes)
    if offset < 0 or not _fill(place, memoryview(buffer), offset):
        raise ValueError("not a whole file")
    return bytes(buffer)


def _fill(place: Place, room: memoryview, offset: int) -> bool:
    """Fill a room. Returns: False if the file is shorter or cannot be read."""
    if not isinstance(place, int):
        room[:] = place[offset : offset + len(room)].data
        return True
    done = 0
    while done < len(room):
        try:
            number = os.preadv(place, [room[done:]], offset + done)
        except OSError:
            return False
        if not number:
            return False
        done += number
    return True


class _Held:
    """A place of images; its descriptor is closed with the last of those that read from it."""

    def __init__(self, place: Place) -> None:
        self.place = os.dup(place) if isinstance(place, int) else place

    def __del__(self) -> None:
        if isinstance(self.place, int):
            os.close(self.place)


class Images(Sequence[Tensor]):
    """Decoded images in a file or in memory, each compared with its checksum when it is first read.

    A file is read, never mapped: where it is cut off meanwhile, images are decoded again.

    Args:
        place: a descriptor, which may be closed then, or memory.
        rows: (M,) of ROW.
        decode_again: the place of an image that is not what was written → (H, W, 3) uint8 of the
            same size, decoded anew.
    Attributes:
        size: (H, W) if all images have one, else None.
        is_in_memory: True if nothing but this process and its workers can change them.
        device: the CPU.
    """

    device = torch.device("cpu")

    def __init__(
        self, place: Place, rows: Rows, decode_again: Callable[[int], NDArray[np.uint8]]
    ) -> None:
        self.size = _size_of_all(rows)
        self._held = _Held(place)
        self.is_in_memory = not isinstance(place, int)
        self._rows = rows
        self._places = np.arange(len(rows))
        self._checked = np.zeros(len(rows), dtype=np.bool_)
        self._decode_again = decode_again

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Images: ...
    def __getitem__(self, index: int | slice) -> Tensor | Images:
        """One image, (C, H, W); or some of them."""
        if isinstance(index, slice):
            part = object.__new__(Images)
            part.__dict__.update(self.__dict__)
            part._rows, part._places = self._rows[index], self._places[index]
            part._checked = self._checked[index]
            part.size = _size_of_all(part._rows)
            return part
        row = self._rows[index]
        image = np.empty((int(row["height"]), int(row["width"]), 3), dtype=np.uint8)
        self._fill(int(index), image)
        return torch.from_numpy(image).permute(2, 0, 1)

    @property
    def num_bytes(self) -> int:
        """Bytes of all pixels."""
        rows = self._rows
        return int((rows["height"].astype(np.int64) * rows["width"] * 3).sum())

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the pixels take: none where they are read from the cache."""
        return self.num_bytes if self.is_in_memory else 0

    def batch(self, indices: NDArray[np.int64], device: torch.device = device) -> Tensor | Ragged:
        """Some images, in memory for copies to a device.

        Returns: (B, H, W, C) if all of the split have one size.
        """
        sizes = np.stack([self._rows["height"][indices], self._rows["width"][indices]], axis=1)
        ends = (3 * sizes.astype(np.int64).prod(axis=1)).cumsum().tolist()
        pixels = host_memory(ends[-1] + SLACK_BYTES, device)
        room = pixels.numpy()
        room[ends[-1] :] = 0
        images = [
            room[end - 3 * height * width : end].reshape(height, width, 3)
            for end, (height, width) in zip(ends, sizes.tolist(), strict=True)
        ]
        pairs = list(zip(indices.tolist(), images, strict=True))
        if ends[-1] < _THREADS_BYTES or torch.get_num_threads() == 1:
            for index, image in pairs:
                self._fill(index, image)
        else:
            with ThreadPoolExecutor(torch.get_num_threads()) as threads:
                list(threads.map(lambda pair: self._fill(*pair), pairs))
        return of_one_size(Ragged.packed(pixels, sizes.astype(np.int64)), self.size)

    def to(self, device: torch.device) -> Tensor:
        """All images, which have one size. Returns: (M, H, W, C) on the device."""
        assert self.size is not None
        whole = torch.empty((len(self), *self.size, 3), dtype=torch.uint8, device=device)
        step = max(1, 2**26 // (self.size[0] * self.size[1] * 3))
        for first in range(0, len(self), step):
            indices = np.arange(first, min(first + step, len(self)))
            whole[first : first + step] = self.batch(indices)  # type: ignore[assignment]
        return whole

    def whole(self) -> Tensor:
        """All images of one size in memory, not copied. Returns: (M, H, W, C)."""
        assert self.size is not None
        assert not isinstance(self._held.place, int)
        shape = (len(self), *self.size, 3)
        pixels = self._held.place[: int(np.prod(shape))].reshape(shape)
        pixels.flags.writeable = False
        return torch.from_numpy(pixels)

    def _fill(self, index: int, image: NDArray[np.uint8]) -> None:
        """Read one image into its room, (H, W, 3)."""
        body = image.reshape(-1).data
        is_read = _fill(self._held.place, body, int(self._rows["offset"][index]))
        if not is_read or not self._is_intact(index, body):
            image[...] = self._decode_again(int(self._places[index]))

    def _is_intact(self, index: int, body: memoryview) -> bool:
        if not self._checked[index]:
            self._checked[index] = zlib.crc32(body) == self._rows["crc"][index]
        return bool(self._checked[index])
