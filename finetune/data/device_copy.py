"""Batches on their way to a GPU: from pinned memory, beside the computation, one step ahead."""

# C channels, H W pixels

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["uploaded"]


def uploaded(
    batches: Iterable[Sequence[NDArray[np.uint8]]], device: torch.device
) -> Generator[list[Tensor], None, None]:
    """Bring images to a device; the next batch is on its way before one is handed out.

    Args:
        batches: images (H, W, 3) each, which may change when the next batch is asked for.
        device: a GPU; on a CPU the images are copied.
    Yields: for each batch (C, H, W) uint8 on the device.
    """
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    before: Tensor | None = None
    shapes: list[tuple[int, ...]] = []
    for images in batches:
        flat = _sent(images, device, stream)
        if before is not None:
            yield _split(before, shapes, stream)
        before, shapes = flat, [image.shape for image in images]
    if before is not None:
        yield _split(before, shapes, stream)


def _sent(
    images: Sequence[NDArray[np.uint8]], device: torch.device, stream: torch.cuda.Stream | None
) -> Tensor:
    """Begin to copy images, one behind the other, in one piece."""
    # torch gives pinned memory out again only when the copies from it are done
    flat = torch.empty(
        sum(image.size for image in images), dtype=torch.uint8, pin_memory=stream is not None
    )
    whole, start = flat.numpy(), 0
    for image in images:
        whole[start : start + image.size].reshape(image.shape)[...] = image
        start += image.size
    with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
        return flat.to(device, non_blocking=True)


def _split(
    flat: Tensor, shapes: list[tuple[int, ...]], stream: torch.cuda.Stream | None
) -> list[Tensor]:
    """Cut what has been copied into images; the device waits for the copy, not this process."""
    if stream is not None:
        now = torch.cuda.current_stream(flat.device)
        now.wait_stream(stream)
        flat.record_stream(now)
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [
        part.view(shape).permute(2, 0, 1).contiguous()
        for part, shape in zip(parts, shapes, strict=True)
    ]
