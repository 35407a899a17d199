"""Resize, crop, pad and flip images, with consecutive operations fused into one resampling.

`AxisTransform` fuses the operations along one axis of a batch; it holds positions, not pixels.
`resample` applies it to images of one size, with one matrix product per axis.
`finetune.transforms.ragged` applies it to images of several sizes, with one resampling per resize.
Downscaling is antialiased as in Pillow: the filter is widened by the scale.
"""

# B batch, C channels, H W source pixels, h w target pixels; b is B, or 1 if all samples share it

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from finetune.transforms.sample_rng import to_device

__all__ = [
    "FILTER_RADIUS",
    "AxisTransform",
    "Resize",
    "Selection",
    "count_taps",
    "filter_weights",
    "nearest_pixels",
    "resample",
    "select_pixels",
    "unscaled_taps",
]

_MIN_BANDED_SIDE = 256  # pixels; up to this length, an axis is not split into bands
_BAND_HEIGHT = 32  # output pixels per band
FILTER_RADIUS = {"nearest": 0.5, "bilinear": 1.0, "bicubic": 2.0, "lanczos": 3.0}

IntArray = npt.NDArray[np.int64]
PerImage = int | IntArray  # one value for all images, or (B,) with one for each


class Resize(NamedTuple):
    """A resize of one window per image, or of the full axis, to `target` pixels.

    No pixel outside a window is read. Arrays are (B,), or () if all images share a value.
    """

    starts: IntArray  # first pixel of the window
    lengths: IntArray  # length of the window in pixels
    source: IntArray  # length of the axis in pixels
    target: IntArray
    interpolation: str


class Selection:
    """Fused crops, pads and flips along one axis: output i is source pixel start + direction * i.

    Attributes:
        start: source pixel of output 0.
        length: number of outputs.
        direction: 1, or -1 if flipped.
        valid_start, valid_end: outputs from valid_start to valid_end - 1 are source pixels; all
            others are zero padding.
        is_identity: True if no operation was added.
    All except is_identity are arrays (B,), or () if all images share a value.
    """

    def __init__(self, length: IntArray) -> None:
        self.length = self.valid_end = length
        self.start = self.valid_start = np.zeros_like(length)
        self.direction = np.ones_like(length)
        self.is_identity = True

    def crop(self, starts: IntArray, length: IntArray) -> None:
        if starts.ndim == 0 and starts == 0 and length == self.length:
            return
        self.is_identity = False
        self.start = self.start + self.direction * starts
        self.valid_start, self.valid_end = (
            np.clip(end - starts, 0, length) for end in (self.valid_start, self.valid_end)
        )
        self.length = length

    def flip(self, is_flipped: npt.NDArray[np.bool_]) -> None:
        self.is_identity = False
        last = self.start + self.direction * (self.length - 1)
        low, high = self.length - self.valid_end, self.length - self.valid_start
        self.start = np.where(is_flipped, last, self.start)
        self.direction = np.where(is_flipped, -self.direction, self.direction)
        self.valid_start = np.where(is_flipped, low, self.valid_start)
        self.valid_end = np.where(is_flipped, high, self.valid_end)

    def indices(self, device: torch.device) -> Tensor:
        """Return (b, length) source pixels, -1 for padding; all images have one length."""
        start, direction, valid_start, valid_end = (
            values[..., None]
            for values in (self.start, self.direction, self.valid_start, self.valid_end)
        )
        outputs = np.arange(int(self.length.max()))
        is_valid = (outputs >= valid_start) & (outputs < valid_end)
        pixels = np.where(is_valid, start + direction * outputs, -1)
        return to_device(np.atleast_2d(pixels), device)


class AxisTransform:
    """Fused geometric operations along one axis of a batch of images.

    Args:
        length: length of the axis in pixels: an int if all images have one size, else (B,).

    Attributes:
        selections: the crops, pads and flips before, between and after the resizes; one more than
            there are resizes.
        resizes: the resizes.
        overshoots: True if a filter has negative weights, so results can leave [0, 255].
        pads_result: True if a crop after a resize can add zeros.
    """

    def __init__(self, length: PerImage) -> None:
        self.selections = [Selection(np.asarray(length))]
        self.resizes: list[Resize] = []
        self.overshoots = False
        self.pads_result = False

    @property
    def length(self) -> IntArray:
        """Return the length after all operations, in pixels."""
        return self.selections[-1].length

    def crop(self, starts: PerImage, length: PerImage, *, padding: int = 0) -> None:
        """Pad both ends with zeros, then crop a window; its pixels beyond the padding are also 0.

        Args:
            starts: first pixel of each window, counted from the start of the padding.
            length: length of the windows.
        """
        # decided without the starts, which are random: a sample must not depend on its batch
        can_pad = padding > 0 or bool(np.any(length > self.length))
        self.pads_result |= can_pad and len(self.resizes) > 0
        self.selections[-1].crop(np.asarray(starts - padding), np.asarray(length))

    def flip(self, is_flipped: npt.NDArray[np.bool_]) -> None:
        """Reverse the axis of the images where is_flipped (B,) is True."""
        self.selections[-1].flip(is_flipped)

    def resize(
        self,
        target: PerImage,
        interpolation: str,
        *,
        starts: IntArray | None = None,
        lengths: IntArray | None = None,
    ) -> None:
        """Resize the full axis, or one window per image, to `target` pixels."""
        source, target = self.length, np.asarray(target)
        if starts is None or lengths is None:
            if source.ndim == 0 and target == source:
                return
            starts, lengths = np.zeros_like(source), source
        self.resizes.append(Resize(starts, lengths, source, target, interpolation))
        self.selections.append(Selection(target))
        self.overshoots |= interpolation in ("bicubic", "lanczos")


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


def nearest_pixels(lengths: IntArray, targets: IntArray) -> IntArray:
    """Return (b, largest target): the source pixel at the center of each target pixel.

    Rows are padded with undefined values. Positions are accumulated in float64 as in Pillow, so
    that ties round the same way.
    Source: Pillow, src/libImaging/Geometry.c, ImagingScaleAffine.
    """
    steps = np.repeat((lengths / targets)[:, None], np.max(targets), axis=1)
    steps[:, 0] *= 0.5
    return np.minimum(np.cumsum(steps, axis=1).astype(np.int64), lengths[:, None] - 1)


def unscaled_taps(
    positions: Tensor,
    num_taps: int,
    lengths: Tensor,
    targets: Tensor | int,
    interpolation: str,
) -> tuple[Tensor, Tensor]:
    """Return the filter taps of target pixels, with weights that do not yet sum to 1.

    Args:
        positions: (b, h, 1) target pixels.
        lengths: (b, 1, 1) window lengths in pixels.
        targets: (b, 1, 1) target lengths in pixels, or an int for all samples.
    Returns: int64 pixels of the window and their float32 weights, (b, h, num_taps). Pixels outside
        the window have weight 0.
    """
    scale = lengths.float() / targets
    stretch = scale.clamp(min=1.0)
    center = (positions + 0.5) * scale
    first = torch.floor(center - FILTER_RADIUS[interpolation] * stretch + 0.5)
    taps = first + torch.arange(num_taps, device=positions.device)
    weights = filter_weights((taps + 0.5 - center) / stretch, interpolation)
    return taps.long(), weights * ((taps >= 0) & (taps < lengths))


def count_taps(lengths: PerImage, targets: PerImage, interpolation: str) -> IntArray:
    """Return the maximum number of source pixels that contribute to one target pixel."""
    support = FILTER_RADIUS[interpolation] * np.maximum(1, np.divide(lengths, targets))
    return np.asarray(np.ceil(2 * support).astype(np.int64) + 1)


def select_pixels(images_BCHW: Tensor, rows: AxisTransform, columns: AxisTransform) -> Tensor:
    """Apply the crops, pads and flips before the first resize of each axis."""
    for axis, dim in ((rows, 2), (columns, 3)):
        selection = axis.selections[0]
        if selection.is_identity:
            continue
        index = selection.indices(images_BCHW.device)
        shape = [1, 1, 1, 1]
        shape[0], shape[dim] = index.shape
        result_shape = [*images_BCHW.shape]
        result_shape[dim] = index.shape[1]
        index = index.view(shape)
        images_BCHW = images_BCHW.gather(dim, index.clamp(min=0).expand(result_shape)) * (
            index >= 0
        )
    return images_BCHW


def resample(images_BCHW: Tensor, rows: AxisTransform, columns: AxisTransform) -> Tensor:
    """Apply the first resize and all operations after it, in the images' dtype.

    Args:
        images_BCHW: images after `select_pixels`.
    Returns: (B, C, h, w).
    """
    row_matrix, column_matrix = (_axis_matrix(axis, images_BCHW.device) for axis in (rows, columns))
    # the matrices are banded: for long axes on a CPU it is faster to process one sample at a time
    # and skip the zeros; for short axes, and on a GPU, one batched product is faster
    if images_BCHW.device.type == "cpu" and max(images_BCHW.shape[2:]) > _MIN_BANDED_SIDE:
        results = [
            _apply_matrices(
                image[None], _sample_matrix(row_matrix, index), _sample_matrix(column_matrix, index)
            )
            for index, image in enumerate(images_BCHW)
        ]
        return torch.cat(results)
    return _apply_matrices(images_BCHW, row_matrix, column_matrix)


def _axis_matrix(axis: AxisTransform, device: torch.device) -> Tensor | None:
    """Return one matrix (b, output length, input length) for all resizes; None without resizes."""
    product = None
    for resize, selection in zip(axis.resizes, axis.selections[1:], strict=True):
        source, target = int(resize.source), int(resize.target)
        if resize.starts.ndim == 0:
            matrix = _full_resize_matrix(source, target, resize.interpolation, device)
        else:
            windows = np.stack([resize.starts, resize.lengths])
            matrix = _resize_matrix(windows, source, target, resize.interpolation, device)
        matrix = matrix if product is None else matrix @ product
        product = matrix if selection.is_identity else _select_rows(matrix, selection)
    return product


@lru_cache(maxsize=64)
def _full_resize_matrix(
    source: int, target: int, interpolation: str, device: torch.device
) -> Tensor:
    full_axis = np.array([[0], [source]], np.int64)
    return _resize_matrix(full_axis, source, target, interpolation, device)


def _resize_matrix(
    windows_2b: IntArray, source: int, target: int, interpolation: str, device: torch.device
) -> Tensor:
    """Return matrices that resize one window per sample along one axis.

    Args:
        windows_2b: first pixel and length of each window; no pixel outside a window is read.
        source: length of the axis in pixels.
        target: length of the result in pixels.
    Returns: (b, target, source) float32, each row summing to 1.
    """
    start, length = to_device(windows_2b, device)[:, :, None, None]
    matrix = torch.zeros(windows_2b.shape[1], target, source, device=device)
    if interpolation == "nearest":
        nearest = to_device(nearest_pixels(windows_2b[1], np.array([target])), device)[:, :, None]
        return matrix.scatter_(2, start + nearest, 1.0)
    # use the tap count of the full axis for every window: the number of terms affects the rounding
    # of a sum, and the weights of a sample must not depend on the rest of the batch
    num_taps = int(count_taps(source, target, interpolation))
    positions = torch.arange(target, device=device)[None, :, None]
    taps, weights = unscaled_taps(positions, num_taps, length, target, interpolation)
    weights = weights / weights.sum(2, keepdim=True)
    pixels = (start + taps).clamp_(0, source - 1)  # taps outside have weight 0
    return matrix.scatter_add_(2, pixels, weights)


def _select_rows(matrix: Tensor, selection: Selection) -> Tensor:
    """Crop, pad and flip by selecting rows of resampling matrices (b, output, input length)."""
    index = selection.indices(matrix.device)
    # gather rows of the sample's own matrix, or of the one that all samples share
    count, length, selected = matrix.shape
    first_row = torch.arange(count, device=matrix.device)[:, None] * length
    row_indices = index.clamp(min=0) + first_row
    rows = matrix.reshape(-1, selected).index_select(0, row_indices.flatten())
    return rows.view(len(row_indices), -1, selected) * (index >= 0)[:, :, None]


def _sample_matrix(matrix: Tensor | None, index: int) -> Tensor | None:
    """Return the matrix (1, output length, input length) of one sample."""
    return matrix if matrix is None or len(matrix) == 1 else matrix[index : index + 1]


def _apply_matrices(images: Tensor, rows: Tensor | None, columns: Tensor | None) -> Tensor:
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
