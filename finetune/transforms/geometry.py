"""Resize, crop, pad and flip as two matrix products.

One matrix resamples the rows of an image, another one the columns. `AxisTransform` fuses
consecutive geometric operations along one axis into a single matrix, so that any number of them
costs one resampling. Downscaling is antialiased as in Pillow: the filter is widened by the scale.
"""

# B batch, C channels, H W source pixels, h w target pixels; b is B, or 1 if all samples share it

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from finetune.transforms.execution_plan import (
    HeightWidth,
)
from finetune.transforms.sample_rng import to_device

__all__ = [
    "FILTER_RADIUS",
    "AxisTransform",
    "apply_matrices",
    "apply_selection",
    "box_mask",
    "center_crop_start",
    "filter_weights",
    "nearest_source_pixels",
    "resize_matrix",
    "rotation_matrices",
    "valid_pixel_mask",
    "warp_affine",
]

_MIN_BANDED_SIDE = 256  # pixels; up to this length, an axis is not split into bands
_BAND_HEIGHT = 32  # output pixels per band
FILTER_RADIUS = {"nearest": 0.5, "bilinear": 1.0, "bicubic": 2.0, "lanczos": 3.0}

IntArray = npt.NDArray[np.int64]


def filter_weights(x: Tensor, interpolation: str) -> Tensor:
    """Evaluate a resampling filter at distances `x`, in pixels of the coarser grid.

    Source: Pillow, src/libImaging/Resample.c (bicubic with a = -0.5, Lanczos of radius 3).
    """
    x = x.abs()
    if interpolation == "bilinear":
        return (1 - x).clamp_(min=0)
    if interpolation == "bicubic":
        near = (1.5 * x - 2.5) * x * x + 1
        far = ((-0.5 * x + 2.5) * x - 4) * x + 2
        return torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))
    return torch.where(x < 3, torch.sinc(x) * torch.sinc(x / 3), torch.zeros_like(x))


def resize_matrix(
    starts: IntArray,
    lengths: IntArray,
    *,
    source: int,
    target: int,
    interpolation: str,
    device: torch.device,
) -> Tensor:
    """Return matrices that resize one window per sample along one axis.

    Args:
        starts: (b,) first pixel of each window.
        lengths: (b,) length of each window in pixels; no pixel outside a window is read.
        source: length of the axis in pixels.
        target: length of the result in pixels.
    Returns: (b, target, source) float32, each row summing to 1.
    """
    matrix = torch.zeros(len(starts), target, source, device=device)
    start = to_device(starts, device)[:, None, None]
    if interpolation == "nearest":
        nearest = to_device(nearest_source_pixels(lengths, target), device)[:, :, None]
        return matrix.scatter_(2, start + nearest, 1.0)
    length = to_device(lengths, device)[:, None, None]
    steps = torch.arange(target, device=device)[None, :, None]
    scale = length.float() / target
    stretch = scale.clamp(min=1.0)
    support = FILTER_RADIUS[interpolation] * stretch
    # use the tap count of the full axis for every window: the number of terms affects the rounding
    # of a sum, and the weights of a sample must not depend on the rest of the batch
    widest_support = FILTER_RADIUS[interpolation] * max(1.0, source / target)
    center = (steps + 0.5) * scale
    first = torch.floor(center - support + 0.5)
    taps = first + torch.arange(math.ceil(2 * widest_support) + 1, device=device)
    weights = filter_weights((taps + 0.5 - center) / stretch, interpolation)
    weights = weights * ((taps >= 0) & (taps < length))
    weights = weights / weights.sum(2, keepdim=True)
    pixels = (start + taps.long()).clamp_(0, source - 1)  # taps outside have weight 0
    return matrix.scatter_add_(2, pixels, weights)


def nearest_source_pixels(lengths: IntArray, target: int | IntArray) -> IntArray:
    """Return (b, target): the index of the source pixel at the center of each target pixel.

    If target lengths (b,) differ, rows are padded to the largest with undefined values. Positions
    are accumulated in float64 as in Pillow, so that ties round the same way.
    Source: Pillow, src/libImaging/Geometry.c, ImagingScaleAffine.
    """
    steps = np.repeat((lengths / target)[:, None], np.max(target), axis=1)
    steps[:, 0] *= 0.5
    return np.minimum(np.cumsum(steps, axis=1).astype(np.int64), lengths[:, None] - 1)


@lru_cache(maxsize=64)
def _full_resize_matrix(
    source: int, target: int, interpolation: str, device: torch.device
) -> Tensor:
    length = np.array([source], np.int64)
    return resize_matrix(
        np.zeros(1, np.int64),
        length,
        source=source,
        target=target,
        interpolation=interpolation,
        device=device,
    )


class AxisTransform:
    """Fused geometric operations along one axis of a batch of images.

    Crops, pads and flips before the first resize are stored in `index`, the selected source pixels
    (-1 for a zero). The first resize and all later operations are stored in `matrix`, which
    multiplies the selected pixels. Each is None if there is no such operation.
    """

    def __init__(self, length: int, device: torch.device) -> None:
        self.length = length
        self.device = device
        self.index: Tensor | None = None  # (b, selected) int64
        self.matrix: Tensor | None = None  # (b, length, selected) float32
        self.has_zero_rows = False  # some rows of `matrix` are padding and sum to 0, not 1
        self.overshoots = False  # a filter with negative weights was used

    def select_pixels(self, pixels: IntArray) -> None:
        """Replace the axis by a selection of its pixels.

        Args:
            pixels: (b, new length) indices along the current axis, -1 for a zero.
        """
        index = to_device(np.ascontiguousarray(pixels), self.device)
        has_zeros = bool((pixels < 0).any())
        if self.matrix is not None:
            # gather rows of the sample's own matrix, or of the one that all samples share
            count, length, selected = self.matrix.shape
            first_row = torch.arange(count, device=self.device)[:, None] * length
            row_indices = index.clamp(min=0) + first_row
            rows = self.matrix.reshape(-1, selected).index_select(0, row_indices.flatten())
            self.matrix = rows.view(len(row_indices), -1, selected)
            if has_zeros:
                self.matrix = self.matrix * (index >= 0)[:, :, None]
                self.has_zero_rows = True
        elif self.index is not None:
            before, index = _expand_to_same_batch(self.index, index)
            self.index = torch.where(index < 0, index, before.gather(1, index.clamp(min=0)))
        else:
            self.index = index
        self.length = index.shape[1]

    def crop(self, starts: IntArray, length: int) -> None:
        """Crop to windows with the given starts (b,); parts beyond the axis become zeros."""
        if len(starts) == 1 and starts[0] == 0 and length == self.length:
            return
        pixels = starts[:, None] + np.arange(length)[None, :]
        self.select_pixels(np.where((pixels >= 0) & (pixels < self.length), pixels, -1))

    def flip(self, is_flipped: npt.NDArray[np.bool_]) -> None:
        """Reverse the axis of the samples where is_flipped (B,) is True."""
        pixels = np.arange(self.length)[None, :]
        self.select_pixels(np.where(is_flipped[:, None], pixels[:, ::-1], pixels))

    def resize(
        self,
        target: int,
        interpolation: str,
        *,
        starts: IntArray | None = None,
        lengths: IntArray | None = None,
    ) -> None:
        """Resize the full axis, or one window per sample, to `target` pixels."""
        if starts is None or lengths is None:
            if target == self.length:
                return
            resize = _full_resize_matrix(self.length, target, interpolation, self.device)
        else:
            resize = resize_matrix(
                starts,
                lengths,
                source=self.length,
                target=target,
                interpolation=interpolation,
                device=self.device,
            )
        self.matrix = resize if self.matrix is None else resize @ self.matrix
        self.length = target
        self.overshoots |= interpolation in ("bicubic", "lanczos")


def _expand_to_same_batch(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Expand both tensors to the larger batch size; one of them may have size 1."""
    size = max(len(first), len(second))
    return first.expand(size, *first.shape[1:]), second.expand(size, *second.shape[1:])


def apply_selection(images_BCHW: Tensor, rows: AxisTransform, columns: AxisTransform) -> Tensor:
    """Apply `index` of both axes: the crops, zero pads and flips before the first resize."""
    for axis, dim in ((rows, 2), (columns, 3)):
        if axis.index is None:
            continue
        shape = [1, 1, 1, 1]
        shape[0], shape[dim] = axis.index.shape
        result_shape = [*images_BCHW.shape]
        result_shape[dim] = axis.index.shape[1]
        index = axis.index.view(shape)
        images_BCHW = images_BCHW.gather(dim, index.clamp(min=0).expand(result_shape)) * (
            index >= 0
        )
    return images_BCHW


def apply_matrices(images_BCHW: Tensor, rows: AxisTransform, columns: AxisTransform) -> Tensor:
    """Apply `matrix` of both axes, in the images' dtype. Returns: (B, C, h, w)."""
    # the matrices are banded: on a CPU and long axes it is faster to process one sample at a time
    # and skip the zeros; for short axes, and on a GPU, one batched product is faster
    if images_BCHW.device.type == "cpu" and max(images_BCHW.shape[2:]) > _MIN_BANDED_SIDE:
        results = [
            _apply_matrix_pair(
                image[None], _sample_matrix(rows, index), _sample_matrix(columns, index)
            )
            for index, image in enumerate(images_BCHW)
        ]
        return torch.cat(results)
    return _apply_matrix_pair(images_BCHW, rows.matrix, columns.matrix)


def _sample_matrix(axis: AxisTransform, index: int) -> Tensor | None:
    """Return the matrix (1, length, selected) of one sample."""
    matrix = axis.matrix
    return matrix if matrix is None or len(matrix) == 1 else matrix[index : index + 1]


def _apply_matrix_pair(images: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    batch, channels, _, width = images.shape
    if rows is not None:
        matrix = rows.to(images.dtype).expand(batch, -1, -1)[:, None].expand(-1, channels, -1, -1)
        parts = [
            matrix[:, :, out, inputs] @ images[:, :, inputs]
            for out, inputs in _split_into_bands(rows)
        ]
        images = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
    if columns is not None:
        # use bmm even for a shared matrix: matmul kernels differ in the last bit, and the result of
        # a sample must not depend on the rest of the batch
        matrix = columns.to(images.dtype).expand(batch, -1, -1).mT
        flat = images.reshape(batch, -1, width)
        parts = [
            torch.bmm(flat[:, :, inputs], matrix[:, inputs, out])
            for out, inputs in _split_into_bands(columns)
        ]
        product = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
        images = product.view(batch, channels, -1, columns.shape[1])
    return images


def _split_into_bands(matrix: Tensor) -> list[tuple[slice, slice]]:
    """Split a banded matrix (b, out, in) into (output slice, slice of the inputs it reads)."""
    if len(matrix) > 1 or matrix.device.type != "cpu" or matrix.shape[2] <= _MIN_BANDED_SIDE:
        return [(slice(None), slice(None))]
    bands = []
    for start in range(0, matrix.shape[1], _BAND_HEIGHT):
        out = slice(start, start + _BAND_HEIGHT)
        columns = matrix[0, out].any(0).nonzero()
        first, last = (int(columns[0]), int(columns[-1])) if len(columns) else (0, 0)
        bands.append((out, slice(first, last + 1)))
    return bands


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
    """Return the start (b,) of a center crop; negative if the crop is larger than the image.

    Source: torchvision, transforms.v2.functional.center_crop.
    """
    margin = np.atleast_1d(np.subtract(length, target))
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
