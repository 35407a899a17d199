"""Shared memory through which workers return images, used again and again.

A tensor that a worker sends takes a new piece of shared memory, whose pages the system first has to
find and clear: as much work as half of decoding. Pages that are used again cost nothing.
"""

# B batch, C channels, H W pixels

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from finetune.transforms.ragged import SLACK_BYTES, Ragged

__all__ = ["Put", "Slots", "shared_memory"]

Image = NDArray[np.uint8]
Put = list[tuple[int, ...] | Image]

_MAP_NORESERVE = 0x4000  # Linux, mmap(2); Python 3.13 has a name for it


def shared_memory(num_bytes: int) -> NDArray[np.uint8]:
    """Return zeros that forked processes share; pages without a write take no memory.

    Raises: OSError on a system without overcommit that has too little memory.
    """
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=flags)
    return np.frombuffer(memory, dtype=np.uint8, count=num_bytes)


class Slots:
    """Places for batches of images, shared with the processes that are forked after this.

    Args:
        number: batches under way at once.
        num_bytes: of the largest batch expected; images beyond it are pickled.
    """

    def __init__(self, number: int, num_bytes: int) -> None:
        self.number = number
        whole = num_bytes + SLACK_BYTES
        self._num_bytes = num_bytes
        self._slots = shared_memory(number * whole).reshape(number, whole)

    def put(self, slot: int, reads: Iterable[Callable[[NDArray[np.uint8]], Image]]) -> Put:
        """Put images into a slot, one after the other.

        Args:
            reads: from the slot's free room, (n,), to an image, (H, W, 3), which may lie at its
                start.
        Returns: the argument of `take`: each image's shape, or the image if it did not fit.
        """
        place, start = self._slots[slot, : self._num_bytes], 0
        put: Put = []
        for read in reads:
            image = read(place[start:])
            end = start + image.size
            if end > len(place):
                put.append(image)
                continue
            if not np.may_share_memory(image, place):
                place[start:end].reshape(image.shape)[...] = image
            put.append(image.shape)
            start = end
        return put

    def take(self, slot: int, put: Put) -> Ragged:
        """Return the images of a slot, valid until it is used again.

        Args:
            put: what `put` returned in the worker.
        """
        place, start = self._slots[slot], 0
        shapes = [item.shape if isinstance(item, np.ndarray) else item for item in put]
        bodies = []
        for item, shape in zip(put, shapes, strict=True):
            if isinstance(item, np.ndarray):
                bodies.append(item.reshape(-1))
            else:
                bodies.append(place[start : start + math.prod(shape)])
                start += math.prod(shape)
        if start == sum(map(math.prod, shapes)):  # one after the other, as they are wanted
            pixels = place[: start + SLACK_BYTES]
        else:
            pixels = np.concatenate([*bodies, np.zeros(SLACK_BYTES, np.uint8)])
        sizes = np.array([shape[:2] for shape in shapes], np.int64)
        return Ragged.packed(torch.from_numpy(pixels), sizes)
