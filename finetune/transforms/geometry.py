"""Rotations and other affine warps, masks of valid pixels, and masks of rectangles."""

# B batch, C channels, H W pixels; b is B, or 1 if all samples share it

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from finetune.transforms.execution_plan import HeightWidth
from finetune.transforms.sample_rng import to_device

__all__ = [
    "box_mask",
    "center_crop_start",
    "rotation_matrices",
    "valid_pixel_mask",
    "warp_affine",
]

IntArray = npt.NDArray[np.int64]


def rotation_matrices(degrees: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return target-to-source affine matrices (B, 2, 3) for counter-clockwise rotations (B,)."""
    angle = np.deg2rad(degrees)
    maps = np.zeros((len(angle), 2, 3))
    maps[:, 0, 0] = maps[:, 1, 1] = np.cos(angle)
    maps[:, 0, 1] = -np.sin(angle)
    maps[:, 1, 0] = np.sin(angle)
    return maps


def valid_pixel_mask(sizes: IntArray, like: Tensor) -> Tensor:
    """Return a mask (B, 1, H, W), True for canvas pixels inside the image; `sizes` is (B, 2)."""
    heights, widths = to_device(np.ascontiguousarray(sizes.T), like.device)[:, :, None, None, None]
    y = torch.arange(like.shape[2], device=like.device)[:, None]
    x = torch.arange(like.shape[3], device=like.device)
    return (y < heights) & (x < widths)


def warp_affine(
    images_BCHW: Tensor,
    matrices: npt.NDArray[np.float64],
    interpolation: str,
    sizes: IntArray | None = None,
) -> Tensor:
    """Warp images by affine matrices; source pixels outside an image count as 0.

    Args:
        images_BCHW: float32 images.
        matrices: (B, 2, 3) target-to-source matrices, in pixels relative to the image center.
        interpolation: nearest or bilinear.
        sizes: (B, 2) heights and widths if the images are smaller than the canvas, else None.
    Returns: (B, C, H, W).
    """
    height, width = images_BCHW.shape[2:]
    device = images_BCHW.device
    image_sizes = np.array([[height, width]]) if sizes is None else sizes
    half = image_sizes[:, ::-1, None] / 2  # grid_sample coordinates are from -1 to 1
    coefficients = to_device((matrices / half).astype(np.float32), device)
    center = to_device(((image_sizes - 1) / 2).astype(np.float32), device)[:, None, :, None]
    x = torch.arange(width, device=device) - center[:, :, 1]
    y = torch.arange(height, device=device) - center[:, :, 0]
    # elementwise with coefficients (B, 1, 1, 2): the last bits of a batched matmul depend on B
    by_x, by_y, offset = coefficients[:, None, None].unbind(-1)
    y, x = y.view(len(image_sizes), -1, 1, 1), x.view(len(image_sizes), 1, -1, 1)
    grid = torch.addcmul(by_y * y + offset, by_x, x)
    if sizes is None:
        return torch.nn.functional.grid_sample(
            images_BCHW, grid, mode=interpolation, padding_mode="zeros", align_corners=False
        )
    scale = to_device(half[:, None, None, :, 0].astype(np.float32), device)
    return _sample_by_size(images_BCHW, (grid + 1) * scale - 0.5, interpolation, sizes)


def _sample_by_size(
    images_BCHW: Tensor, points_BHW2: Tensor, interpolation: str, sizes: IntArray
) -> Tensor:
    """Sample images of several sizes on a shared canvas, like grid_sample with zero padding.

    Args:
        points_BHW2: x and y of the source points in pixels.
        sizes: (B, 2) heights and widths; points outside an image give 0.
    """
    batch, channels, height, width = images_BCHW.shape
    last_y, last_x = to_device(np.ascontiguousarray(sizes.T - 1), images_BCHW.device)[
        ..., None, None
    ]
    x, y = points_BHW2.unbind(3)
    left, top = (x.round(), y.round()) if interpolation == "nearest" else (x.floor(), y.floor())
    flat, result = images_BCHW.flatten(2), torch.zeros_like(images_BCHW)
    corners = [(0, 0)] if interpolation == "nearest" else [(0, 0), (0, 1), (1, 0), (1, 1)]
    for down, right in corners:
        row, column = top + down, left + right
        weight = ((row >= 0) & (row <= last_y) & (column >= 0) & (column <= last_x)).float()
        if len(corners) > 1:
            weight = weight * (1 - (y - row).abs()) * (1 - (x - column).abs())
        pixel = row.long().clamp(min=0).minimum(last_y) * width
        pixel = pixel + column.long().clamp(min=0).minimum(last_x)
        values = flat.gather(2, pixel.view(batch, 1, -1).expand(-1, channels, -1))
        result += values.view(batch, channels, height, width) * weight[:, None]
    return result


def center_crop_start(length: int | IntArray, target: int | IntArray) -> IntArray:
    """Return the start of a center crop; negative if the crop is larger than the image.

    Source: torchvision, transforms.v2.functional.center_crop.
    """
    margin = np.subtract(length, target)
    return np.where(margin < 0, -(-margin // 2), np.rint(margin / 2)).astype(np.int64)


def box_mask(boxes: Sequence[npt.NDArray[Any]], size: HeightWidth, device: torch.device) -> Tensor:
    """Return a mask (b, 1, H, W) of rectangles (top, left, height, width), each of shape (b,)."""
    sides = np.stack([np.asarray(side) for side in boxes])
    top, left, height, width = to_device(sides, device)[:, :, None]
    y = torch.arange(size[0], device=device)
    x = torch.arange(size[1], device=device)
    in_rows = (y >= top) & (y < top + height)
    in_columns = (x >= left) & (x < left + width)
    return (in_rows[:, :, None] & in_columns[:, None, :])[:, None]
