"""Copy batches to a GPU: from pinned memory, parallel to the computation, one batch ahead."""

# C channels, H W pixels

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["copy_ahead"]


def copy_ahead(
    batches: Iterable[Sequence[NDArray[np.uint8]]], device: torch.device
) -> Generator[list[Tensor], None, None]:
    """Copy batches of images to a device; each copy starts before the batch in front is yielded.

    Args:
        batches: images (H, W, 3) each, which may change when the next batch is read.
        device: a GPU; on a CPU the images are copied.
    Yields: for each batch (C, H, W) uint8 on the device.
    """
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    previous: Tensor | None = None
    shapes: list[tuple[int, ...]] = []
    for images in batches:
        flat = _start_copy(images, device, stream)
        if previous is not None:
            yield _split(previous, shapes, stream)
        previous, shapes = flat, [image.shape for image in images]
    if previous is not None:
        yield _split(previous, shapes, stream)


def _start_copy(
    images: Sequence[NDArray[np.uint8]], device: torch.device, stream: torch.cuda.Stream | None
) -> Tensor:
    """Start to copy images, all in one transfer. Returns: their pixels, flat, on the device."""
    # torch reuses pinned memory only after the copies from it are done
    sizes = [image.size for image in images]
    flat = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=stream is not None)
    for part, image in zip(flat.split(sizes), images, strict=True):
        part.numpy().reshape(image.shape)[...] = image
    with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
        return flat.to(device, non_blocking=True)


def _split(
    flat: Tensor, shapes: list[tuple[int, ...]], stream: torch.cuda.Stream | None
) -> list[Tensor]:
    """Cut copied pixels into images; the device waits for the copy, not this process."""
    if stream is not None:
        current = torch.cuda.current_stream(flat.device)
        current.wait_stream(stream)
        flat.record_stream(current)
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [
        part.view(shape).permute(2, 0, 1).contiguous()
        for part, shape in zip(parts, shapes, strict=True)
    ]
