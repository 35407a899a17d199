"""Bring batches to a device: from pinned memory, each in one copy, two batches ahead."""

# B batch, H W pixels

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Generator, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finetune.transforms.ragged import SLACK_BYTES, Ragged

__all__ = ["Pixels", "copy_ahead", "host_memory", "of_one_size", "pack"]

# (B, H, W, 3) on the host and (B, 3, H, W) on the device, if all images of the split have one size
Pixels = Tensor | Ragged
_AHEAD = 2  # batches on a GPU beside the one that is in use


def host_memory(num_bytes: int, device: torch.device) -> Tensor:
    """Return memory (num_bytes,) uint8 of the host, pinned for copies to a GPU."""
    # torch uses pinned memory again only after the copies from it are done
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def pack(images: Sequence[NDArray[np.uint8]], device: torch.device) -> Ragged:
    """Copy images (H, W, 3) into one buffer of the host.

    Args:
        device: to which they will go.
    """
    sizes = np.array([image.shape[:2] for image in images], np.int64)
    pixels = host_memory(3 * int(sizes.prod(axis=1).sum()) + SLACK_BYTES, device)
    room, start = pixels.numpy(), 0
    for image in images:
        room[start : start + image.size].reshape(image.shape)[...] = image
        start += image.size
    room[start:] = 0
    return Ragged.packed(pixels, sizes)


def of_one_size(images: Ragged, size: tuple[int, int] | None) -> Pixels:
    """Return packed images as (B, H, W, 3) if they have their split's size.

    Args:
        size: (H, W); None if the split has several. Where a batch has both, its images of this size
            are still processed as those of other batches.
    """
    if size is None:
        return images
    if not np.array_equal(images.sizes_B2, [size] * len(images)):
        return dataclasses.replace(images, usual=size)
    num_bytes = 3 * len(images) * size[0] * size[1]
    return images.pixels[:num_bytes].view(len(images), *size, 3)


def copy_ahead(
    batches: Iterable[Pixels], device: torch.device, *, ahead: int | None = None
) -> Generator[Pixels, None, None]:
    """Copy batches to a device; on a GPU, each copy starts two batches before it is needed.

    Args:
        batches: on the host; they may change when the next one is read.
        ahead: batches that are read beforehand; None: two for a GPU, which are copied, else none.
    Yields: the batches on the device.
    """
    stream = _copy_stream(device) if device.type == "cuda" else None
    most = (0 if stream is None else _AHEAD) if ahead is None else ahead
    waiting: deque[tuple[Pixels, torch.cuda.Event | None]] = deque()
    for batch in batches:
        waiting.append(_start_copy(batch, device, stream, is_kept=most > 0))
        if len(waiting) > most:
            yield _finished(*waiting.popleft())
    while waiting:
        yield _finished(*waiting.popleft())


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for all copies to a device: each stream keeps memory of its own."""
    return torch.cuda.Stream(device)


def _start_copy(
    batch: Pixels, device: torch.device, stream: torch.cuda.Stream | None, *, is_kept: bool
) -> tuple[Pixels, torch.cuda.Event | None]:
    """Start to copy a batch, all in one transfer."""
    pixels = batch if isinstance(batch, Tensor) else batch.pixels
    if is_kept and not (stream is not None and pixels.is_pinned()):
        pixels = host_memory(pixels.numel(), device).copy_(pixels.reshape(-1)).view(pixels.shape)
    event = None
    if stream is not None:
        with torch.cuda.stream(stream):
            pixels = pixels.to(device, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
    return _with(batch, pixels), event


def _finished(batch: Pixels, event: torch.cuda.Event | None) -> Pixels:
    """Let the device, not this process, wait for the copy."""
    pixels = batch if isinstance(batch, Tensor) else batch.pixels
    if event is not None:
        current = torch.cuda.current_stream(pixels.device)
        current.wait_event(event)  # not for the copies behind it
        pixels.record_stream(current)
    if isinstance(batch, Tensor):
        pixels = pixels.permute(0, 3, 1, 2).contiguous()
    return _with(batch, pixels)


def _with(batch: Pixels, pixels: Tensor) -> Pixels:
    """Return the batch with its pixels in another place."""
    if isinstance(batch, Tensor):
        return pixels
    return dataclasses.replace(batch, pixels=pixels)
