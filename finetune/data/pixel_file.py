"""File of a split's decoded images: pixels, then a table with the size and checksum of each image.

The pixels of all readable images come first, in the order of the split and without gaps. Then comes
the table in the format of safetensors, and a footer with the length of the table and a sha256 of
cache key and table. Images in memory are in an anonymous file (memfd) without table and footer.
"""

# M readable images, B batch, C channels, H W pixels

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import BinaryIO, overload

import numpy as np
import safetensors.numpy
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor

from finetune.data.device_prefetch import allocate_host_memory, as_dense
from finetune.data.thread_pool import thread_map
from finetune.transforms.ragged import TAIL_PADDING, RaggedBatch

__all__ = [
    "MIN_THREADED_BYTES",
    "DecodedImages",
    "PixelTable",
    "read_pixel_table",
    "write_pixel_table",
]

_FOOTER = struct.Struct("<q32s")  # length of the table in bytes, sha256 of key and table
_MAX_CAUSE_LENGTH = 500  # characters that are stored per unreadable image
MIN_THREADED_BYTES = 2**23  # per batch; below, starting threads costs more time than it saves


@dataclass(frozen=True)
class PixelTable:
    """The table of a pixel file.

    Attributes:
        sizes: (M, 2) int64, height and width of each readable image.
        checksums: (M,) uint32, crc32 of each readable image.
        failed: (index, cause) of the unreadable images, ascending.
    """

    sizes: NDArray[np.int64]
    checksums: NDArray[np.uint32]
    failed: list[tuple[int, str]]

    @property
    def indices(self) -> NDArray[np.int64]:
        """Indices of the readable images in the split, (M,), ascending."""
        failed = np.array([index for index, _ in self.failed], dtype=np.int64)
        return np.delete(np.arange(len(self.sizes) + len(failed)), failed)


def write_pixel_table(file: BinaryIO, table: PixelTable, key: str) -> None:
    """Write table and footer after the pixels."""
    failed = [(index, cause[:_MAX_CAUSE_LENGTH]) for index, cause in table.failed]
    body = safetensors.numpy.save(
        {
            "sizes": table.sizes.astype(np.int32),
            "checksums": table.checksums,
            "failed": np.frombuffer(json.dumps(failed).encode(), dtype=np.uint8),
        }
    )
    file.write(body + _FOOTER.pack(len(body), hashlib.sha256(key.encode() + body).digest()))


def read_pixel_table(file: BinaryIO, key: str, num_images: int) -> PixelTable:
    """Read and verify the table of a file.

    Args:
        key: expected cache key.
        num_images: number of images in the split, readable or not.
    Raises: ValueError for a file that is damaged or has another key; OSError if it cannot be read.
    """
    start = file.seek(0, os.SEEK_END) - _FOOTER.size
    if start < 0:
        raise ValueError("it is too short")
    file.seek(start)
    num_bytes, digest = _FOOTER.unpack(file.read(_FOOTER.size))
    if not 0 <= num_bytes <= min(start, 8 * _MAX_CAUSE_LENGTH * (num_images + 1)):
        raise ValueError("its footer is damaged")
    file.seek(start - num_bytes)
    body = file.read(num_bytes)
    if hashlib.sha256(key.encode() + body).digest() != digest:
        raise ValueError("its table does not match the sha256")
    try:
        arrays = safetensors.numpy.load(body)
    except SafetensorError as error:
        raise ValueError(f"its table cannot be read: {error}") from error
    failed = [(index, cause) for index, cause in json.loads(arrays["failed"].tobytes())]
    return PixelTable(arrays["sizes"].astype(np.int64), arrays["checksums"], failed)


class _OpenFile:
    """Duplicate of a file descriptor, closed when garbage-collected."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self.descriptor)


class DecodedImages(Sequence[Tensor]):
    """Decoded images in a file or in memory; verifies each checksum when an image is first read.

    Reads the file instead of memory-mapping it: if the file is truncated, or its disk or server
    fails, the image is decoded again, whereas access to a mapping would crash the process.

    Args:
        file: an open pixel file, which the caller may close afterwards.
        table: the table of the file.
        decode_again: function to call if an image cannot be read or fails its checksum. Takes the
            image's position among the readable images; returns (H, W, 3) uint8 of the same size.
        is_in_memory: True if the file is in memory, and only this process can change it.
    Attributes:
        common_size: (H, W) if all images have one size, else None.
        device: always the CPU.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        file: BinaryIO,
        table: PixelTable,
        decode_again: Callable[[int], NDArray[np.uint8]],
        *,
        is_in_memory: bool,
    ) -> None:
        self._file = _OpenFile(file.fileno())
        self._sizes = table.sizes
        self._checksums = table.checksums
        self._ends = np.cumsum(3 * table.sizes.prod(axis=1))
        self._is_verified = np.zeros(len(table.sizes), dtype=np.bool_)
        self._positions = np.arange(len(table.sizes))
        self._decode_again = decode_again
        self.is_in_memory = is_in_memory
        self.common_size = _common_size(table.sizes)

    def __len__(self) -> int:
        return len(self._positions)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> DecodedImages: ...
    def __getitem__(self, index: int | slice) -> Tensor | DecodedImages:
        """Return one image, (C, H, W); or a slice of the images."""
        if isinstance(index, slice):
            part = object.__new__(DecodedImages)
            part.__dict__.update(self.__dict__)
            part._positions = self._positions[index]
            part.common_size = _common_size(self._sizes[part._positions])
            return part
        position = int(self._positions[index])
        image = np.empty((*self._sizes[position], 3), dtype=np.uint8)
        self._read_image(position, image)
        return torch.from_numpy(image).permute(2, 0, 1)

    @property
    def checksums(self) -> NDArray[np.uint32]:
        """crc32 of the pixels of each image, (M,)."""
        return self._checksums[self._positions]

    @property
    def pixel_bytes(self) -> int:
        """Size of the pixels of all images, in bytes."""
        return int(3 * self._sizes[self._positions].prod(axis=1).sum())

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
        positions = self._positions[indices]
        sizes = self._sizes[positions]
        ends = (3 * sizes.prod(axis=1)).cumsum().tolist()
        pixels = allocate_host_memory(ends[-1] + TAIL_PADDING, device)
        buffer = pixels.numpy()
        buffer[ends[-1] :] = 0
        tasks = [
            (position, buffer[end - 3 * height * width : end].reshape(height, width, 3))
            for position, end, (height, width) in zip(
                positions.tolist(), ends, sizes.tolist(), strict=True
            )
        ]
        num_threads = torch.get_num_threads()
        if ends[-1] < MIN_THREADED_BYTES or num_threads == 1:
            for task in tasks:
                self._read_image(*task)
        else:
            for _ in thread_map(lambda task: self._read_image(*task), tasks, num_threads):
                pass
        return as_dense(RaggedBatch.from_packed(pixels, sizes), self.common_size)

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
        assert self.is_in_memory
        memory = mmap.mmap(self._file.descriptor, self.pixel_bytes, access=mmap.ACCESS_READ)
        return torch.from_numpy(
            np.frombuffer(memory, dtype=np.uint8).reshape(len(self), *self.common_size, 3)
        )

    def _read_image(self, position: int, image: NDArray[np.uint8]) -> None:
        """Read one image into an array, (H, W, 3)."""
        body = image.reshape(-1).data
        is_read = _read_into(self._file.descriptor, body, int(self._ends[position]) - len(body))
        if is_read and not self._is_verified[position]:
            self._is_verified[position] = is_read = zlib.crc32(body) == self._checksums[position]
        if not is_read:
            image[...] = self._decode_again(position)


def _common_size(sizes: NDArray[np.int64]) -> tuple[int, int] | None:
    """Return (H, W) if all images have one size, else None."""
    if not len(sizes) or np.any(sizes != sizes[0]):
        return None
    return int(sizes[0, 0]), int(sizes[0, 1])


def _read_into(descriptor: int, buffer: memoryview, offset: int) -> bool:
    """Fill the buffer. Returns: False if the file is shorter or cannot be read."""
    while buffer:
        try:
            num_read = os.preadv(descriptor, [buffer], offset)
        except OSError:
            return False
        if not num_read:
            return False
        buffer, offset = buffer[num_read:], offset + num_read
    return True
