"""File format of a split's decoded images: many processes write it, each image has a checksum.

The pixels come first: images of the common size in the split's order, others in the order of
writing. Then the table: for each image a row with its offset, size and checksum, and its index in
the split; for each unreadable image its index and the cause. Last comes the footer: the cache key,
and the sha256 of footer and table. Images in memory have the same layout.
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

from finetune.data.decode import MAX_PIXELS
from finetune.data.device_prefetch import allocate_host_memory, as_dense
from finetune.data.shared_memory import allocate_shared_memory
from finetune.transforms.ragged import TAIL_PADDING, RaggedBatch

__all__ = [
    "DecodedImages",
    "PixelFileWriter",
    "PixelTable",
    "read_pixel_table",
    "write_pixel_table",
]

# a row of the table; height 0 if the image has not been written
ROW_DTYPE = np.dtype([("offset", "<i8"), ("height", "<i4"), ("width", "<i4"), ("crc", "<u4")])
RowArray = NDArray[Any]
Storage = int | NDArray[np.uint8]  # a file descriptor, or shared memory
_FOOTER = struct.Struct("<8s64sqqq32s")  # magic, key, M, pixel bytes, cause bytes, sha256
_MAGIC = b"pixels-2"
_MAX_CAUSE_BYTES = 4096  # per unreadable image
_MIN_THREADED_BYTES = 2**23  # per batch; below, starting threads costs more time than it saves


@dataclass(frozen=True)
class PixelTable:
    """The table of a pixel file, which follows the pixels.

    Attributes:
        rows: offset, size and checksum of each readable image, (M,) of ROW_DTYPE.
        indices: (M,) int64, indices of the readable images in the split, ascending.
        failed: (index, cause) of the unreadable images, ascending.
    """

    rows: RowArray
    indices: NDArray[np.int64]
    failed: list[tuple[int, str]]


class PixelFileWriter:
    """Writes decoded images to a file or memory; processes forked later can write to it, too.

    Args:
        storage: file descriptor, open for reading and writing, or shared memory.
        num_images: N, the maximum number of images.
        expected_size: (H, W) of all images of a sample; None if the sample has several sizes.
        num_bytes: expected size of all images. Allocated on the disk immediately, so that a full
            disk raises an error before any image is decoded.
    Raises: OSError if the disk is full.

    Until `compact`, a file stores its rows after the space for images of the common size. So if the
    process is killed, the next process finds the images that it wrote.
    """

    def __init__(
        self,
        storage: Storage,
        num_images: int,
        *,
        expected_size: tuple[int, int] | None,
        num_bytes: int,
    ) -> None:
        self._storage = storage
        self._expected_size = expected_size
        self._slot_bytes = expected_size[0] * expected_size[1] * 3 if expected_size else 0
        self._append_offset = allocate_shared_memory(8).view("<i8")
        self._append_offset[0] = uniform_bytes = self._slot_bytes * num_images
        self._lock = multiprocessing.get_context("fork").Lock()
        self._row_bytes = num_images * ROW_DTYPE.itemsize
        self._row_storage: Storage = storage
        self._rows_offset = uniform_bytes
        if not isinstance(storage, int):
            self._row_storage, self._rows_offset = allocate_shared_memory(self._row_bytes), 0
        elif num_images:
            self._append_offset[0] += self._row_bytes
            os.posix_fallocate(storage, 0, max(num_bytes, uniform_bytes) + self._row_bytes)

    @property
    def rows(self) -> RowArray:
        """The current rows, (N,) of ROW_DTYPE."""
        body = _read_exactly(self._row_storage, self._row_bytes, self._rows_offset)
        return np.frombuffer(body, ROW_DTYPE)

    def existing(self) -> NDArray[np.bool_]:
        """Find the images that an earlier process wrote; later writes do not overwrite them.

        Returns: (N,) bool, True if the image was written. Checksums are verified when it is read.
        """
        rows, storage = self.rows, self._storage
        pixels = rows["height"].astype(np.int64) * rows["width"]
        ends = rows["offset"] + pixels * 3
        size = os.fstat(storage).st_size if isinstance(storage, int) else len(storage)
        is_uniform = rows["offset"] == np.arange(len(rows)) * self._slot_bytes
        is_uniform &= pixels * 3 == self._slot_bytes
        exists = (rows["height"] > 0) & (rows["width"] > 0) & (pixels <= MAX_PIXELS)
        exists &= is_uniform | ((rows["offset"] >= self._append_offset[0]) & (ends <= size))
        self._append_offset[0] = max(self._append_offset[0], ends.max(initial=0, where=exists))
        return exists

    def write(self, index: int, image: NDArray[np.uint8]) -> None:
        """Write one image, at most once per index. Raises: OSError if disk or memory is full."""
        height, width = image.shape[:2]
        body = np.ascontiguousarray(image).reshape(-1).data
        if (height, width) == self._expected_size:
            offset = index * self._slot_bytes
        else:
            with self._lock:
                offset = int(self._append_offset[0])
                self._append_offset[0] += len(body)
        _write_all(self._storage, body, offset)
        row = np.array((offset, height, width, zlib.crc32(body)), dtype=ROW_DTYPE)
        start = self._rows_offset + index * ROW_DTYPE.itemsize
        _write_all(self._row_storage, memoryview(row.tobytes()), start)

    def compact(self, indices_M: NDArray[np.int64]) -> RowArray:
        """Drop all other images; if the remaining ones have one size, close the gaps between them.

        Args:
            indices_M: indices of existing images, ascending.
        Returns: (M,) of ROW_DTYPE. The file then ends after the last image.
        """
        rows = self.rows[indices_M]
        end = int(self._append_offset[0])
        if self._expected_size and self._expected_size == _common_size(rows):
            for position, index in enumerate(indices_M.tolist()):
                if position != index:  # to the front and in order: overwrites only moved images
                    body = _read_exactly(self._storage, self._slot_bytes, index * self._slot_bytes)
                    _write_all(self._storage, memoryview(body), position * self._slot_bytes)
            rows["offset"] = np.arange(len(rows)) * self._slot_bytes
            end = len(rows) * self._slot_bytes
        if isinstance(self._storage, int):
            os.ftruncate(self._storage, end)
        return rows


def _write_all(storage: Storage, body: memoryview, offset: int) -> None:
    """Write all bytes. Raises: OSError if disk or memory is full."""
    if isinstance(storage, int):
        num_written = 0
        while num_written < len(body):  # the system may write only a part
            num_written += os.pwrite(storage, body[num_written:], offset + num_written)
    elif offset + len(body) > len(storage):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    else:
        storage[offset : offset + len(body)] = body


def _common_size(rows: RowArray) -> tuple[int, int] | None:
    """Return (H, W) if all images have one size, else None."""
    if not len(rows):
        return None
    size = int(rows["height"][0]), int(rows["width"][0])
    return size if np.all((rows["height"] == size[0]) & (rows["width"] == size[1])) else None


def write_pixel_table(file: int, table: PixelTable, key: str) -> None:
    """Append table and footer to the pixels."""
    num_bytes = os.fstat(file).st_size
    causes = [(index, cause[: _MAX_CAUSE_BYTES // 8]) for index, cause in table.failed]
    body = table.rows.tobytes() + table.indices.astype("<i8").tobytes()
    causes_json = json.dumps(causes).encode()
    header = _FOOTER.pack(_MAGIC, key.encode(), len(table.rows), num_bytes, len(causes_json), b"")[
        :-32
    ]
    footer = header + hashlib.sha256(header + body + causes_json).digest()
    _write_all(file, memoryview(body + causes_json + footer), num_bytes)


def read_pixel_table(file: int, key: str, num_images: int) -> PixelTable:
    """Read and verify the table of a file.

    Args:
        key: expected cache key.
        num_images: N, size of the split.
    Raises: ValueError for a file that is incomplete, has another key, or has impossible values.
    """
    size = os.fstat(file).st_size
    footer = _read_exactly(file, _FOOTER.size, size - _FOOTER.size)
    magic, file_key, num_rows, pixel_bytes, cause_bytes, digest = _FOOTER.unpack(footer)
    if (magic, file_key) != (_MAGIC, key.encode()):
        raise ValueError("written by another version or for other images")
    if not (0 <= num_rows <= num_images and pixel_bytes >= 0):
        raise ValueError(f"it claims {num_rows} of {num_images} images, {pixel_bytes} pixel bytes")
    if not 0 <= cause_bytes <= 2 + _MAX_CAUSE_BYTES * (num_images - num_rows):
        raise ValueError(f"it claims {cause_bytes} bytes for the list of unreadable images")
    row_bytes, index_bytes = num_rows * ROW_DTYPE.itemsize, num_rows * 8
    if size != pixel_bytes + row_bytes + index_bytes + cause_bytes + _FOOTER.size:
        raise ValueError("its size differs from the size in its footer")
    body = _read_exactly(file, row_bytes + index_bytes + cause_bytes, pixel_bytes)
    if hashlib.sha256(footer[:-32] + body).digest() != digest:
        raise ValueError("the table is corrupt")
    rows = np.frombuffer(body, ROW_DTYPE, num_rows)
    indices = np.frombuffer(body, "<i8", num_rows, row_bytes).astype(np.int64)
    failed = _parse_failures(body[row_bytes + index_bytes :])
    all_indices = np.concatenate(
        [indices, np.array([index for index, _ in failed], dtype=np.int64)]
    )
    if not (
        np.all(np.diff(indices) > 0) and np.array_equal(np.sort(all_indices), range(num_images))
    ):
        raise ValueError("its image indices are not those of the split")
    heights, widths = rows["height"].astype(np.int64), rows["width"].astype(np.int64)
    sides = np.concatenate([heights, widths])
    if num_rows and not (sides.min() >= 1 and sides.max() <= MAX_PIXELS):
        raise ValueError("an image has a height or width outside the allowed range")
    ends = rows["offset"] + heights * widths * 3
    if num_rows and not (rows["offset"].min() >= 0 and ends.max() <= pixel_bytes):
        raise ValueError("an image lies outside the pixel data")
    return PixelTable(rows, indices, failed)


def _parse_failures(texts: bytes) -> list[tuple[int, str]]:
    """Parse indices and causes of unreadable images. Raises: ValueError for anything else."""
    try:
        entries = json.loads(texts)
    except RecursionError:
        raise ValueError("the list of unreadable images is nested too deeply") from None
    if type(entries) is not list:
        raise ValueError("the list of unreadable images is not a list")
    for entry in entries:
        if type(entry) is not list or [type(part) for part in entry] != [int, str]:
            raise ValueError("an entry of the list of unreadable images is not [index, cause]")
        if not 0 <= entry[0] < 2**62:
            raise ValueError(f"the index {entry[0]} of an unreadable image is not in [0, 2**62)")
    return [(index, cause) for index, cause in entries]


def _read_exactly(storage: Storage, num_bytes: int, offset: int) -> bytes:
    """Read exactly `num_bytes`. Raises: ValueError if the file is shorter or cannot be read."""
    buffer = bytearray(num_bytes)
    if offset < 0 or not _read_into(storage, memoryview(buffer), offset):
        raise ValueError("the file is truncated or cannot be read")
    return bytes(buffer)


def _read_into(storage: Storage, buffer: memoryview, offset: int) -> bool:
    """Fill the buffer. Returns: False if the file is shorter or cannot be read."""
    if not isinstance(storage, int):
        buffer[:] = storage[offset : offset + len(buffer)].data
        return True
    num_read = 0
    while num_read < len(buffer):
        try:
            num_bytes = os.preadv(storage, [buffer[num_read:]], offset + num_read)
        except OSError:
            return False
        if not num_bytes:
            return False
        num_read += num_bytes
    return True


class _OpenStorage:
    """Duplicate of a file descriptor, closed when garbage-collected; or shared memory."""

    def __init__(self, storage: Storage) -> None:
        self.storage = os.dup(storage) if isinstance(storage, int) else storage

    def __del__(self) -> None:
        if isinstance(self.storage, int):
            os.close(self.storage)


class DecodedImages(Sequence[Tensor]):
    """Decoded images in a file or in memory; verifies each checksum when an image is first read.

    Reads the file instead of memory-mapping it: if the file is truncated while in use, the missing
    images are decoded again, whereas access to a truncated mapping would crash the process.

    Args:
        storage: file descriptor, which the caller may close afterwards, or shared memory.
        rows: offset, size and checksum of each image, (M,) of ROW_DTYPE.
        decode_again: function that decodes an image that fails its checksum, given its position in
            `rows`. Returns (H, W, 3) uint8 of the same size.
    Attributes:
        common_size: (H, W) if all images have one size, else None.
        is_in_memory: True if only this process and its workers can change the images.
        device: always the CPU.
    """

    device = torch.device("cpu")

    def __init__(
        self, storage: Storage, rows: RowArray, decode_again: Callable[[int], NDArray[np.uint8]]
    ) -> None:
        self.common_size = _common_size(rows)
        self._open_storage = _OpenStorage(storage)
        self.is_in_memory = not isinstance(storage, int)
        self._rows = rows
        self._positions = np.arange(len(rows))
        self._is_verified = np.zeros(len(rows), dtype=np.bool_)
        self._decode_again = decode_again

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> DecodedImages: ...
    def __getitem__(self, index: int | slice) -> Tensor | DecodedImages:
        """Return one image, (C, H, W); or a slice of the images."""
        if isinstance(index, slice):
            part = object.__new__(DecodedImages)
            part.__dict__.update(self.__dict__)
            part._rows, part._positions = self._rows[index], self._positions[index]
            part._is_verified = self._is_verified[index]
            part.common_size = _common_size(part._rows)
            return part
        row = self._rows[index]
        image = np.empty((int(row["height"]), int(row["width"]), 3), dtype=np.uint8)
        self._read_image(int(index), image)
        return torch.from_numpy(image).permute(2, 0, 1)

    @property
    def pixel_bytes(self) -> int:
        """Bytes of the pixels of all images."""
        rows = self._rows
        return int((rows["height"].astype(np.int64) * rows["width"] * 3).sum())

    @property
    def nbytes(self) -> int:
        """Host memory held by the pixels, in bytes; 0 if they are read from the cache file."""
        return self.pixel_bytes if self.is_in_memory else 0

    def read_batch(
        self, indices: NDArray[np.int64], device: torch.device = device
    ) -> Tensor | RaggedBatch:
        """Read a batch into host memory, pinned if the device is a GPU.

        Returns: (B, H, W, C) if all images of the split have one size, else a RaggedBatch.
        """
        sizes = np.stack([self._rows["height"][indices], self._rows["width"][indices]], axis=1)
        ends = (3 * sizes.astype(np.int64).prod(axis=1)).cumsum().tolist()
        pixels = allocate_host_memory(ends[-1] + TAIL_PADDING, device)
        buffer = pixels.numpy()
        buffer[ends[-1] :] = 0
        images = [
            buffer[end - 3 * height * width : end].reshape(height, width, 3)
            for end, (height, width) in zip(ends, sizes.tolist(), strict=True)
        ]
        pairs = list(zip(indices.tolist(), images, strict=True))
        if ends[-1] < _MIN_THREADED_BYTES or torch.get_num_threads() == 1:
            for index, image in pairs:
                self._read_image(index, image)
        else:
            with ThreadPoolExecutor(torch.get_num_threads()) as threads:
                list(threads.map(lambda pair: self._read_image(*pair), pairs))
        return as_dense(RaggedBatch.from_packed(pixels, sizes.astype(np.int64)), self.common_size)

    def to(self, device: torch.device) -> Tensor:
        """Copy all images, which must have one size. Returns: (M, H, W, C) on the device."""
        assert self.common_size is not None
        images = torch.empty((len(self), *self.common_size, 3), dtype=torch.uint8, device=device)
        chunk = max(1, 2**26 // (self.common_size[0] * self.common_size[1] * 3))
        for first in range(0, len(self), chunk):
            indices = np.arange(first, min(first + chunk, len(self)))
            images[first : first + chunk] = self.read_batch(indices)  # type: ignore[assignment]
        return images

    def as_tensor(self) -> Tensor:
        """View all images in memory, which must have one size. Returns: (M, H, W, C)."""
        assert self.common_size is not None
        assert not isinstance(self._open_storage.storage, int)
        shape = (len(self), *self.common_size, 3)
        pixels = self._open_storage.storage[: int(np.prod(shape))].reshape(shape)
        pixels.flags.writeable = False
        return torch.from_numpy(pixels)

    def _read_image(self, index: int, image: NDArray[np.uint8]) -> None:
        """Read one image into an array, (H, W, 3)."""
        body = image.reshape(-1).data
        is_read = _read_into(self._open_storage.storage, body, int(self._rows["offset"][index]))
        if not is_read or not self._is_intact(index, body):
            image[...] = self._decode_again(int(self._positions[index]))

    def _is_intact(self, index: int, body: memoryview) -> bool:
        if not self._is_verified[index]:
            self._is_verified[index] = zlib.crc32(body) == self._rows["crc"][index]
        return bool(self._is_verified[index])
