"""Prefetch batches to the GPU: from pinned memory, one copy per batch, two batches ahead."""

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

from finetune.transforms.ragged import TAIL_PADDING, RaggedBatch

__all__ = ["PixelBatch", "allocate_host_memory", "as_dense", "collate_ragged", "prefetch_to_device"]

# A tensor if all images of the split have one size: (B, H, W, 3) on the host, (B, 3, H, W) on the
# device. Otherwise a RaggedBatch.
PixelBatch = Tensor | RaggedBatch
_NUM_PREFETCH = 2  # batches on the GPU in addition to the one in use


def allocate_host_memory(num_bytes: int, device: torch.device) -> Tensor:
    """Return host memory, (num_bytes,) uint8, pinned if the device is a GPU."""
    # torch reuses pinned memory only after the copies from it are done
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def collate_ragged(images: Sequence[NDArray[np.uint8]], device: torch.device) -> RaggedBatch:
    """Pack images (H, W, 3) into one host buffer.

    Args:
        device: device to which the buffer will be copied; for a GPU, the buffer is pinned.
    """
    sizes = np.array([image.shape[:2] for image in images], np.int64)
    num_bytes = 3 * int(sizes.prod(axis=1).sum())
    pixels = allocate_host_memory(num_bytes + TAIL_PADDING, device)
    buffer = pixels.numpy()
    np.concatenate([image.reshape(-1) for image in images], out=buffer[:num_bytes])
    buffer[num_bytes:] = 0
    return RaggedBatch.from_packed(pixels, sizes)


def as_dense(images: RaggedBatch, common_size: tuple[int, int] | None) -> PixelBatch:
    """View packed images as (B, H, W, 3) if all of them have the common size.

    Args:
        common_size: (H, W) of the split's images, or of a sample of them; None if these have
            several sizes. If only some images of the batch have this size, the batch stays ragged,
            but these images are resampled together, as in a dense batch.
    """
    if common_size is None:
        return images
    if not np.array_equal(images.sizes_B2, [common_size] * len(images)):
        return dataclasses.replace(images, common_size=common_size)
    num_bytes = 3 * len(images) * common_size[0] * common_size[1]
    return images.pixels[:num_bytes].view(len(images), *common_size, 3)


def prefetch_to_device(
    batches: Iterable[PixelBatch], device: torch.device, *, num_prefetch: int | None = None
) -> Generator[PixelBatch, None, None]:
    """Copy batches to a device; on a GPU, each copy starts two batches before it is needed.

    Args:
        batches: host batches, each valid until the next one is requested.
        num_prefetch: batches to read ahead; None for 2 on a GPU and 0 on the CPU.
    Yields: the batches on the device.
    """
    stream = _copy_stream(device) if device.type == "cuda" else None
    max_pending = (0 if stream is None else _NUM_PREFETCH) if num_prefetch is None else num_prefetch
    pending: deque[tuple[PixelBatch, torch.cuda.Event | None]] = deque()
    for batch in batches:
        pending.append(_start_copy(batch, device, stream, must_outlive_next=max_pending > 0))
        if len(pending) > max_pending:
            yield _wait_for_copy(*pending.popleft())
    while pending:
        yield _wait_for_copy(*pending.popleft())


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the device's only copy stream: each stream would have its own memory pool."""
    return torch.cuda.Stream(device)


def _start_copy(
    batch: PixelBatch,
    device: torch.device,
    stream: torch.cuda.Stream | None,
    *,
    must_outlive_next: bool,
) -> tuple[PixelBatch, torch.cuda.Event | None]:
    """Start copying a batch to the device.

    Args:
        must_outlive_next: True if the next batch is requested, and may overwrite this one, before
            the copy ends. Pixels that are not pinned are then duplicated first.
    Returns: the batch on the device, and the event that marks the end of the copy; None on the CPU.
    """
    pixels = batch if isinstance(batch, Tensor) else batch.pixels
    if must_outlive_next and not (stream is not None and pixels.is_pinned()):
        pixels = (
            allocate_host_memory(pixels.numel(), device)
            .copy_(pixels.reshape(-1))
            .view(pixels.shape)
        )
    event = None
    if stream is not None:
        with torch.cuda.stream(stream):
            pixels = pixels.to(device, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
    return _replace_pixels(batch, pixels), event


def _wait_for_copy(batch: PixelBatch, event: torch.cuda.Event | None) -> PixelBatch:
    """Make the current stream wait for the copy, without blocking the CPU; permute to BCHW."""
    pixels = batch if isinstance(batch, Tensor) else batch.pixels
    if event is not None:
        current = torch.cuda.current_stream(pixels.device)
        current.wait_event(event)  # does not wait for later copies
        pixels.record_stream(current)
    if isinstance(batch, Tensor):
        pixels = pixels.permute(0, 3, 1, 2).contiguous()
    return _replace_pixels(batch, pixels)


def _replace_pixels(batch: PixelBatch, pixels: Tensor) -> PixelBatch:
    """Return the batch with its pixel tensor replaced."""
    if isinstance(batch, Tensor):
        return pixels
    return dataclasses.replace(batch, pixels=pixels)
