"""Shared memory buffers through which workers return images.

Each tensor that a torch worker sends allocates new shared memory, whose pages the kernel must zero:
half as much work as decoding. Reusing the same buffers avoids this.
"""

# B batch, C channels, H W pixels

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from finetune.transforms.ragged import TAIL_PADDING, RaggedBatch

__all__ = ["SharedBatchBuffers", "WrittenImages", "allocate_shared_memory"]

ImageArray = NDArray[np.uint8]
WrittenImages = list[tuple[int, ...] | ImageArray]

_MAP_NORESERVE = 0x4000  # Linux, mmap(2); Python 3.13 has a name for it


def allocate_shared_memory(num_bytes: int) -> NDArray[np.uint8]:
    """Return zeros that forked processes share; pages take memory only when written.

    Raises: OSError on a system without overcommit that has too little memory.
    """
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=flags)
    return np.frombuffer(memory, dtype=np.uint8, count=num_bytes)


class SharedBatchBuffers:
    """Buffers for batches of images, shared with processes that are forked later.

    Args:
        num_slots: number of batches in progress at the same time.
        num_bytes: size of the largest expected batch in bytes; images that do not fit are pickled.
    """

    def __init__(self, num_slots: int, num_bytes: int) -> None:
        self.num_slots = num_slots
        slot_bytes = num_bytes + TAIL_PADDING
        self._num_bytes = num_bytes
        self._slots = allocate_shared_memory(num_slots * slot_bytes).reshape(num_slots, slot_bytes)

    def write(
        self, slot: int, decode_fns: Iterable[Callable[[NDArray[np.uint8]], ImageArray]]
    ) -> WrittenImages:
        """Write images into a slot, one after the other.

        Args:
            decode_fns: one function per image. It gets the free part of the slot, (n,), and returns
                the image, (H, W, 3), at the start of this part or in other memory.
        Returns: the argument `written` of `read`: the shape of each image, or the image itself if
            it did not fit.
        """
        buffer, start = self._slots[slot, : self._num_bytes], 0
        written: WrittenImages = []
        for decode in decode_fns:
            image = decode(buffer[start:])
            end = start + image.size
            if end > len(buffer):
                written.append(image)
                continue
            if not np.may_share_memory(image, buffer):
                buffer[start:end].reshape(image.shape)[...] = image
            written.append(image.shape)
            start = end
        return written

    def read(self, slot: int, written: WrittenImages) -> RaggedBatch:
        """Return the images of a slot, valid until the slot is written again.

        Args:
            written: the result of `write` in the worker.
        """
        buffer, start = self._slots[slot], 0
        shapes = [item.shape if isinstance(item, np.ndarray) else item for item in written]
        flat_images = []
        for item, shape in zip(written, shapes, strict=True):
            if isinstance(item, np.ndarray):
                flat_images.append(item.reshape(-1))
            else:
                flat_images.append(buffer[start : start + math.prod(shape)])
                start += math.prod(shape)
        if start == sum(map(math.prod, shapes)):  # all images are in the slot, without gaps
            pixels = buffer[: start + TAIL_PADDING]
        else:
            pixels = np.concatenate([*flat_images, np.zeros(TAIL_PADDING, np.uint8)])
        sizes = np.array([shape[:2] for shape in shapes], np.int64)
        return RaggedBatch.from_packed(torch.from_numpy(pixels), sizes)
