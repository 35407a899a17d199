"""Resize, crop, pad and flip as two matrix products.

An image is resampled by a matrix over its rows and one over its columns. `Axis` composes a run of
geometric operations into one such matrix, so that any number of them costs one resampling. A resize
is antialiased where it shrinks: the filter is stretched by the scale, as PIL does it.
"""

# B batch, C channels, H W source pixels, h w target pixels; b is B, or 1 where all samples agree

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from finetune.transforms.random import on_device

__all__ = [
    "RADIUS",
    "Axis",
    "central_start",
    "filter_weights",
    "inside",
    "multiply",
    "nearest_pixels",
    "resize_matrix",
    "rotation",
    "select",
    "warp",
]

_LONG = 256  # pixels; products over shorter sides are computed whole
_BAND = 32  # pixels of the result per product
RADIUS = {"nearest": 0.5, "bilinear": 1.0, "bicubic": 2.0, "lanczos": 3.0}

Integers = npt.NDArray[np.int64]


def filter_weights(x: Tensor, interpolation: str) -> Tensor:
    """Return the kernel's weight at distance x, in pixels of the coarser grid.

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
    starts: Integers,
    lengths: Integers,
    *,
    source: int,
    target: int,
    interpolation: str,
    device: torch.device,
) -> Tensor:
    """Return the matrices that resize windows of one axis.

    Args:
        starts: (b,) first pixel of each window.
        lengths: (b,) pixels in each window; nothing outside of it is read.
        source: length of the axis in pixels.
    Returns: (b, target, source) float32, each row summing to 1.
    """
    matrix = torch.zeros(len(starts), target, source, device=device)
    start = on_device(starts, device)[:, None, None]
    if interpolation == "nearest":
        nearest = on_device(nearest_pixels(lengths, target), device)[:, :, None]
        return matrix.scatter_(2, start + nearest, 1.0)
    length = on_device(lengths, device)[:, None, None]
    steps = torch.arange(target, device=device)[None, :, None]
    scale = length.float() / target
    stretch = scale.clamp(min=1.0)
    support = RADIUS[interpolation] * stretch
    # as many as the whole axis needs, not these windows: a sum is rounded according to its length,
    # and a sample's weights must not depend on what else is in the batch
    widest = RADIUS[interpolation] * max(1.0, source / target)
    centre = (steps + 0.5) * scale
    first = torch.floor(centre - support + 0.5)
    taps = first + torch.arange(math.ceil(2 * widest) + 1, device=device)
    weights = filter_weights((taps + 0.5 - centre) / stretch, interpolation)
    weights = weights * ((taps >= 0) & (taps < length))
    weights = weights / weights.sum(2, keepdim=True)
    places = (start + taps.long()).clamp_(0, source - 1)  # those outside carry no weight
    return matrix.scatter_add_(2, places, weights)


def nearest_pixels(lengths: Integers, target: int | Integers) -> Integers:
    """Return (b, target): the pixel under the centre of each target pixel.

    Where the targets (b,) differ, the largest counts; what is behind a smaller one means nothing.
    Adds the scale up in float64 as Pillow does, so that ties fall on the same side as there.
    Source: Pillow, src/libImaging/Geometry.c, ImagingScaleAffine.
    """
    steps = np.repeat((lengths / target)[:, None], np.max(target), axis=1)
    steps[:, 0] *= 0.5
    return np.minimum(np.cumsum(steps, axis=1).astype(np.int64), lengths[:, None] - 1)


@lru_cache(maxsize=64)
def _whole_matrix(source: int, target: int, interpolation: str, device: torch.device) -> Tensor:
    whole = np.array([source], np.int64)
    return resize_matrix(
        np.zeros(1, np.int64),
        whole,
        source=source,
        target=target,
        interpolation=interpolation,
        device=device,
    )


class Axis:
    """One side of an image under a run of geometric operations.

    Pixels are first selected (`index`, -1 for a zero: crops, pads and flips before any resize),
    then multiplied by `matrix` (the first resize and all that follows it). Either is None if it is
    not needed.
    """

    def __init__(self, length: int, device: torch.device) -> None:
        self.length = length
        self.device = device
        self.index: Tensor | None = None  # (b, selected) int64
        self.matrix: Tensor | None = None  # (b, length, selected) float32
        self.gaps = False  # some rows of the matrix are zero, so they do not sum to 1
        self.overshoots = False  # a kernel with negative weights was used

    def select(self, pixels: Integers) -> None:
        """Keep these pixels of the current axis, in this order.

        Args:
            pixels: (b, new length), -1 for a zero.
        """
        index = on_device(np.ascontiguousarray(pixels), self.device)
        outside = bool((pixels < 0).any())
        if self.matrix is not None:
            # whole rows are copied, from the sample's own matrix or from the shared one
            count, length, selected = self.matrix.shape
            first_row = torch.arange(count, device=self.device)[:, None] * length
            places = index.clamp(min=0) + first_row
            rows = self.matrix.reshape(-1, selected).index_select(0, places.flatten())
            self.matrix = rows.view(len(places), -1, selected)
            if outside:
                self.matrix = self.matrix * (index >= 0)[:, :, None]
                self.gaps = True
        elif self.index is not None:
            before, index = _same_batch(self.index, index)
            self.index = torch.where(index < 0, index, before.gather(1, index.clamp(min=0)))
        else:
            self.index = index
        self.length = index.shape[1]

    def crop(self, starts: Integers, length: int) -> None:
        """Crop to windows (b,) that may reach beyond the ends."""
        if len(starts) == 1 and starts[0] == 0 and length == self.length:
            return
        pixels = starts[:, None] + np.arange(length)[None, :]
        self.select(np.where((pixels >= 0) & (pixels < self.length), pixels, -1))

    def flip(self, flipped: npt.NDArray[np.bool_]) -> None:
        """Reverse the axis of the samples where flipped (B,) is true."""
        order = np.arange(self.length)[None, :]
        self.select(np.where(flipped[:, None], order[:, ::-1], order))

    def resize(
        self,
        target: int,
        interpolation: str,
        *,
        starts: Integers | None = None,
        lengths: Integers | None = None,
    ) -> None:
        """Resize the whole axis, or a window of it per sample, to `target` pixels."""
        if starts is None or lengths is None:
            if target == self.length:
                return
            step = _whole_matrix(self.length, target, interpolation, self.device)
        else:
            step = resize_matrix(
                starts,
                lengths,
                source=self.length,
                target=target,
                interpolation=interpolation,
                device=self.device,
            )
        self.matrix = step if self.matrix is None else step @ self.matrix
        self.length = target
        self.overshoots |= interpolation in ("bicubic", "lanczos")


def _same_batch(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat the one that all samples share for each sample of the other."""
    size = max(len(first), len(second))
    return first.expand(size, *first.shape[1:]), second.expand(size, *second.shape[1:])


def select(images_BCHW: Tensor, rows: Axis, columns: Axis) -> Tensor:
    """Crop, pad with zeros and flip by copying pixels: the part of a run before any resize."""
    for axis, dim in ((rows, 2), (columns, 3)):
        if axis.index is None:
            continue
        shape = [1, 1, 1, 1]
        shape[0], shape[dim] = axis.index.shape
        wanted = [*images_BCHW.shape]
        wanted[dim] = axis.index.shape[1]
        index = axis.index.view(shape)
        images_BCHW = images_BCHW.gather(dim, index.clamp(min=0).expand(wanted)) * (index >= 0)
    return images_BCHW


def multiply(images_BCHW: Tensor, rows: Axis, columns: Axis) -> Tensor:
    """Apply the matrices of a run, in the images' dtype: (B, C, selected) to (B, C, h, w)."""
    # a row of a resize reads a few neighbouring pixels only: a CPU gains by skipping the rest of a
    # long one, sample by sample; small products, and any on a GPU, are faster whole
    if images_BCHW.device.type == "cpu" and max(images_BCHW.shape[2:]) > _LONG:
        each = [
            _multiply(one[None], _of(rows, place), _of(columns, place))
            for place, one in enumerate(images_BCHW)
        ]
        return torch.cat(each)
    return _multiply(images_BCHW, rows.matrix, columns.matrix)


def _of(axis: Axis, place: int) -> Tensor | None:
    """Return one sample's matrix (1, length, selected)."""
    matrix = axis.matrix
    return matrix if matrix is None or len(matrix) == 1 else matrix[place : place + 1]


def _multiply(images: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
    batch, channels, _, width = images.shape
    if rows is not None:
        matrix = rows.to(images.dtype).expand(batch, -1, -1)[:, None].expand(-1, channels, -1, -1)
        parts = [matrix[:, :, out, used] @ images[:, :, used] for out, used in _blocks(rows)]
        images = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
    if columns is not None:
        # the same product for a shared matrix as for one per sample: a sample's result must not
        # depend on what else is in the batch, and kernels differ in the last bit
        matrix = columns.to(images.dtype).expand(batch, -1, -1).mT
        flat = images.reshape(batch, -1, width)
        parts = [
            torch.bmm(flat[:, :, used], matrix[:, used, out]) for out, used in _blocks(columns)
        ]
        product = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
        images = product.view(batch, channels, -1, columns.shape[1])
    return images


def _blocks(matrix: Tensor) -> list[tuple[slice, slice]]:
    """Split a matrix (b, out, in) into bands: rows of the result and the columns that they read."""
    if len(matrix) > 1 or matrix.device.type != "cpu" or matrix.shape[2] <= _LONG:
        return [(slice(None), slice(None))]
    bands = []
    for start in range(0, matrix.shape[1], _BAND):
        out = slice(start, start + _BAND)
        used = matrix[0, out].any(0).nonzero()
        first, last = (int(used[0]), int(used[-1])) if len(used) else (0, 0)
        bands.append((out, slice(first, last + 1)))
    return bands


def rotation(degrees: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the maps (B, 2, 3) from target to source of counter-clockwise rotations (B,)."""
    angle = np.deg2rad(degrees)
    maps = np.zeros((len(angle), 2, 3))
    maps[:, 0, 0] = maps[:, 1, 1] = np.cos(angle)
    maps[:, 0, 1] = -np.sin(angle)
    maps[:, 1, 0] = np.sin(angle)
    return maps


def inside(sizes: Integers, like: Tensor) -> Tensor:
    """Return (B, 1, H, W), true for the pixels of images of these sizes (B, 2) on one canvas."""
    heights, widths = on_device(np.ascontiguousarray(sizes.T), like.device)[:, :, None, None, None]
    y = torch.arange(like.shape[2], device=like.device)[:, None]
    x = torch.arange(like.shape[3], device=like.device)
    return (y < heights) & (x < widths)


def warp(
    images_BCHW: Tensor,
    maps: npt.NDArray[np.float64],
    interpolation: str,
    sizes: Integers | None = None,
) -> Tensor:
    """Sample images through affine maps; what lies outside becomes 0.

    Args:
        images_BCHW: float32.
        maps: (B, 2, 3) from target to source, in pixels about the image's centre.
        interpolation: nearest or bilinear.
        sizes: (B, 2) of the images, if they are smaller than their canvas.
    Returns: (B, C, H, W).
    """
    height, width = images_BCHW.shape[2:]
    device = images_BCHW.device
    own = np.array([[height, width]]) if sizes is None else sizes
    half = own[:, ::-1, None] / 2  # grid_sample counts from -1 to 1
    scaled = on_device((maps / half).astype(np.float32), device)
    middle = on_device(((own - 1) / 2).astype(np.float32), device)[:, None, :, None]
    x = torch.arange(width, device=device) - middle[:, :, 1]
    y = torch.arange(height, device=device) - middle[:, :, 0]
    # (B, 1, 1, 2) coefficients: no product over a batch, whose last bits would depend on its size
    by_x, by_y, offset = scaled[:, None, None].unbind(-1)
    y, x = y.view(len(own), -1, 1, 1), x.view(len(own), 1, -1, 1)
    grid = torch.addcmul(by_y * y + offset, by_x, x)
    if sizes is None:
        return torch.nn.functional.grid_sample(
            images_BCHW, grid, mode=interpolation, padding_mode="zeros", align_corners=False
        )
    scale = on_device(half[:, None, None, :, 0].astype(np.float32), device)
    return _sample(images_BCHW, (grid + 1) * scale - 0.5, interpolation, sizes)


def _sample(images_BCHW: Tensor, places: Tensor, interpolation: str, sizes: Integers) -> Tensor:
    """Read images of several sizes on one canvas at places (B, H, W, 2), x and y in pixels."""
    batch, channels, height, width = images_BCHW.shape
    last_y, last_x = on_device(np.ascontiguousarray(sizes.T - 1), images_BCHW.device)[
        ..., None, None
    ]
    x, y = places.unbind(3)
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


def central_start(length: int | Integers, target: int | Integers) -> Integers:
    """Return (b,) where a central window starts; negative where it is larger than the image.

    Source: torchvision, transforms.v2.functional.center_crop.
    """
    spare = np.atleast_1d(np.subtract(length, target))
    return np.where(spare < 0, -(-spare // 2), np.rint(spare / 2)).astype(np.int64)
