"""Batches of images of different sizes, resampled with a fixed number of kernel launches.

One buffer holds the pixels of all images, one image after another. Each output pixel is a weighted
sum of a few source pixels. One `embedding_bag` call computes these sums down the columns of all
images, a second one along the rows. The result of a sample is bit-identical in every batch, because
its sums contain only its own terms and the sum of its weights is exact.

Matrix products cannot replace these sums: one product for the batch, padded to its largest image,
would add in an order that depends on the batch; one product per image would launch more kernels
for a larger batch. Images of one size still use matrix products: at 32 pixels, the sums would take
two to four times as long.
"""

# B images, Q column strips of all images, T filter taps (terms of a sum), C channels,
# H W source pixels, h w target pixels (maximum over the batch)

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from finetune.transforms.resample import (
    FILTER_RADIUS,
    AxisTransform,
    Resize,
    Selection,
    count_taps,
    nearest_pixels,
    unscaled_taps,
)
from finetune.transforms.sample_rng import to_device

__all__ = ["TAIL_PADDING", "RaggedBatch", "resample_ragged", "unpack"]

STRIP_WIDTH = 32  # pixels; all columns of a strip are processed as one vector
_WEIGHT_STEPS = 2.0**40  # weights are rounded to multiples of 1 / this, so their sum is exact
TAIL_PADDING = 3 * STRIP_WIDTH  # values after the last image, as a strip may extend beyond its row

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RaggedBatch:
    """A batch of images of different sizes in one buffer.

    Attributes:
        pixels: flat uint8 or float32 buffer: (H, W, 3) of each image, then `TAIL_PADDING` values.
        sizes_B2: height and width of each image, in host memory.
        offsets_B: index of the first pixel of each image.
        row_strides_B: number of pixels from one row to the next.
        common_size: (H, W); images of this size are resampled by matrix products, as in batches of
            one size. None if all images are resampled by weighted sums.
    """

    pixels: Tensor
    sizes_B2: IntArray
    offsets_B: IntArray
    row_strides_B: IntArray
    common_size: tuple[int, int] | None = None

    @classmethod
    def from_packed(cls, pixels: Tensor, sizes_B2: IntArray) -> RaggedBatch:
        """Create a batch from a buffer that holds the images without gaps."""
        areas = sizes_B2.prod(axis=1)
        return cls(pixels, sizes_B2, areas.cumsum() - areas, sizes_B2[:, 1])

    @classmethod
    def from_images(cls, images: Iterable[Tensor]) -> RaggedBatch:
        """Pack images (3, H, W) from one device into a batch."""
        rows = [image.permute(1, 2, 0) for image in images]
        tail_padding = rows[0].new_zeros(TAIL_PADDING)
        sizes = np.array([image.shape[:2] for image in rows], np.int64)
        return cls.from_packed(
            torch.cat([*(image.reshape(-1) for image in rows), tail_padding]), sizes
        )

    @classmethod
    def from_canvas(cls, images_BCHW: Tensor, sizes_B2: IntArray) -> RaggedBatch:
        """Create a batch from images (B, C, H, W), each cropped to its size from the upper left."""
        count, _, height, width = images_BCHW.shape
        pixels = images_BCHW.permute(0, 2, 3, 1).reshape(-1)
        offsets = np.arange(count) * (height * width)
        pixels = torch.nn.functional.pad(pixels, (0, TAIL_PADDING))
        return cls(pixels, sizes_B2, offsets, np.full(count, width))

    def __len__(self) -> int:
        return len(self.sizes_B2)

    def __getitem__(self, index: int) -> Tensor:
        """Return one image (3, H, W), a view of the buffer."""
        height, width = self.sizes_B2[index].tolist()
        stride, start = 3 * int(self.row_strides_B[index]), 3 * int(self.offsets_B[index])
        return self.pixels.as_strided((3, height, width), (1, stride, 3), start)

    def select_rows(self, rows: IntArray) -> RaggedBatch:
        """Return a batch of the images with these indices, without copying pixels."""
        return replace(
            self,
            sizes_B2=self.sizes_B2[rows],
            offsets_B=self.offsets_B[rows],
            row_strides_B=self.row_strides_B[rows],
        )

    @property
    def device(self) -> torch.device:
        return self.pixels.device

    @property
    def has_common_size(self) -> npt.NDArray[np.bool_]:
        """Return a (B,) mask: True for images of size `common_size`."""
        size = self.common_size or (-1, -1)
        return np.asarray((self.sizes_B2 == size).all(axis=1))

    def to(self, device: torch.device) -> RaggedBatch:
        """Move the pixels to a device in a single copy."""
        return replace(self, pixels=self.pixels.to(device, non_blocking=True))


class _FilterTaps(NamedTuple):
    """Source pixels and weights of each output pixel along one axis.

    Attributes:
        positions_BhT: int64 indices of source pixels, relative to read_start_B.
        weights_BhT: float32 weights.
        num_taps_B: number of taps in use for each image; the remaining taps have weight 0.
        read_start_B, read_length_B: range of source pixels that are read from each image.
    """

    positions_BhT: Tensor
    weights_BhT: Tensor
    num_taps_B: IntArray
    read_start_B: IntArray
    read_length_B: IntArray


def resample_ragged(images: RaggedBatch, rows: AxisTransform, columns: AxisTransform) -> Tensor:
    """Apply all operations to a batch; a second resize costs a second resampling.

    Args:
        images: a batch with pixel values from 0 to 255.
        rows: operations along the vertical axis, with lengths (B,).
        columns: operations along the horizontal axis, with as many resizes as `rows`.
    Returns: (B, 3, h, w) float32, where h and w are the largest output sizes; smaller outputs are
        padded with zeros at the bottom and right.
    """
    device = images.device
    canvas = None
    for row_pass, column_pass in zip(_split_passes(rows), _split_passes(columns), strict=True):
        if canvas is not None:
            sizes = np.stack([row_pass[0].length, column_pass[0].length], axis=1)
            images = RaggedBatch.from_canvas(canvas, sizes)
        canvas = _weighted_sums(
            images, _filter_taps(*row_pass, device), _filter_taps(*column_pass, device)
        )
    assert canvas is not None
    return canvas


def unpack(images: RaggedBatch) -> Tensor:
    """Return the images on a shared canvas (B, 3, H, W) float32, each in its upper left corner."""
    return resample_ragged(images, *map(AxisTransform, images.sizes_B2.T))


def _split_passes(axis: AxisTransform) -> list[tuple[Selection, Resize, Selection]]:
    """Split the operations into resizes, each with the selections before and after it."""
    first = axis.selections[0]
    if not axis.resizes:
        zeros = np.zeros_like(first.length)
        copy = Resize(zeros, first.length, first.length, first.length, "nearest")
        return [(first, copy, Selection(first.length))]
    sources = [first, *(Selection(resize.source) for resize in axis.resizes[1:])]
    return list(zip(sources, axis.resizes, axis.selections[1:], strict=True))


def _filter_taps(
    source: Selection, resize: Resize, result: Selection, device: torch.device
) -> _FilterTaps:
    """Return the taps of one resize, with the selections before and after it."""
    interpolation = resize.interpolation
    num_taps = (
        np.ones_like(resize.target)
        if interpolation == "nearest"
        else count_taps(resize.lengths, resize.target, interpolation)
    )
    first, last = _read_range(source, resize, result)
    is_empty = first > last  # only padding: read the first pixel with weight 0
    first, last = np.where(is_empty, 0, first), np.where(is_empty, 0, last)
    end_pixels = source.start + source.direction * first, source.start + source.direction * last
    read_start = np.where(is_empty, 0, np.minimum(*end_pixels))
    arrays_B = [
        *(resize.starts, resize.lengths, resize.target, num_taps, first, last),
        *(np.where(is_empty, 0, source.start - read_start), source.direction),
        *(result.start, result.direction),
        *(np.where(is_empty, 0, end) for end in (result.valid_start, result.valid_end)),
    ]
    parameters = to_device(np.stack(arrays_B), device)[:, :, None, None]
    window_start, window_length, target, used_taps, first_read, last_read = parameters[:6]
    source_start, source_direction, result_start, result_direction = parameters[6:10]
    valid_start, valid_end = parameters[10:]
    outputs = torch.arange(int(result.length.max()), device=device)[:, None]
    positions = result_start + result_direction * outputs
    if interpolation == "nearest":
        pixels = to_device(nearest_pixels(resize.lengths, resize.target), device)[:, :, None]
        taps = pixels.gather(1, positions.clamp(0, pixels.shape[1] - 1))
        weights = torch.ones_like(taps, dtype=torch.float32)
    else:
        max_taps = int(num_taps.max())
        taps, weights = unscaled_taps(positions, max_taps, window_length, target, interpolation)
        # the number of terms depends on the batch, so their sum must be exact
        dtype = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
        is_used = torch.arange(max_taps, device=device) < used_taps
        rounded = ((weights * is_used).to(dtype) * _WEIGHT_STEPS).round_()
        weights = (rounded / rounded.sum(2, keepdim=True)).float()
    taps = window_start + taps
    is_valid = (outputs >= valid_start) & (outputs < valid_end)
    weights = torch.where(is_valid & (taps >= first_read) & (taps <= last_read), weights, 0)
    read_taps = torch.minimum(torch.maximum(taps, first_read), last_read)
    return _FilterTaps(
        positions_BhT=source_start + source_direction * read_taps,
        weights_BhT=weights,
        num_taps_B=num_taps,
        read_start_B=read_start,
        read_length_B=last - first + 1,
    )


def _read_range(source: Selection, resize: Resize, result: Selection) -> tuple[IntArray, IntArray]:
    """Return the first and last input position (B,) that a resize must read.

    The positions between them are source pixels (not padding), inside the resize window and within
    the filter radius of the output. If there are none, last < first.
    """
    ends = [result.valid_start, result.valid_end - 1]
    edges = np.sort([result.start + result.direction * end for end in ends], 0)
    scale = resize.lengths / resize.target
    # 1 pixel of tolerance for float32 rounding
    reach = FILTER_RADIUS[resize.interpolation] * np.maximum(1, scale) + 1
    nearby = resize.starts + np.floor((edges + 0.5) * scale + [[-1], [1]] * reach).astype(np.int64)
    last_of_window = resize.starts + resize.lengths - 1
    first = np.maximum.reduce([source.valid_start, resize.starts, nearby[0]])
    last = np.minimum.reduce([source.valid_end - 1, last_of_window, nearby[1]])
    return first, last


def _weighted_sums(images: RaggedBatch, row_taps: _FilterTaps, column_taps: _FilterTaps) -> Tensor:
    """Compute the weighted sums along both axes, down the columns first.

    The columns of an image are split into strips of `STRIP_WIDTH` pixels; all columns of a strip
    are processed as one vector.

    Returns: (B, 3, h, w) float32.
    """
    device = images.device
    strips_B = -(-column_taps.read_length_B // STRIP_WIDTH)
    strip_offsets_B = strips_B.cumsum() - strips_B
    image_Q = np.repeat(np.arange(len(images)), strips_B)
    height_Q = row_taps.read_length_B[image_Q]
    start_B = (
        images.offsets_B + row_taps.read_start_B * images.row_strides_B + column_taps.read_start_B
    )
    start_Q = (start_B - strip_offsets_B * STRIP_WIDTH)[image_Q] + np.arange(
        len(image_Q)
    ) * STRIP_WIDTH
    strip_table = to_device(np.stack([start_Q, images.row_strides_B[image_Q]]), device)
    strip, row = _enumerate_groups(height_Q, device)
    # overlapping view: a strip can start at any pixel
    all_strips = images.pixels.as_strided(
        (len(images.pixels) // 3 - STRIP_WIDTH + 1, 3 * STRIP_WIDTH), (3, 1)
    )
    table = all_strips.index_select(0, strip_table[0, strip] + row * strip_table[1, strip]).float()
    row_sums = _sum_along_axis(table, row_taps, image_Q, height_Q.cumsum() - height_Q)
    table = (
        row_sums.view(len(image_Q), -1, STRIP_WIDTH, 3)
        .transpose(1, 2)
        .reshape(len(image_Q) * STRIP_WIDTH, -1)
    )
    result = _sum_along_axis(
        table, column_taps, np.arange(len(images)), strip_offsets_B * STRIP_WIDTH
    )
    width = column_taps.weights_BhT.shape[1]
    return result.view(len(images), width, -1, 3).permute(0, 3, 2, 1).contiguous()


def _sum_along_axis(
    table: Tensor, taps: _FilterTaps, image_Q: IntArray, start_Q: IntArray
) -> Tensor:
    """Compute the weighted sums of all strips along one axis.

    Args:
        table: (N, D) float32; each row is one source position of a strip.
        taps: source positions and weights per image.
        image_Q: image index of each strip.
        start_Q: table row of the first source position of each strip.
    Returns: (Q * h, D).
    """
    device, (_, height, max_taps) = table.device, taps.weights_BhT.shape
    num_taps_Q = taps.num_taps_B[image_Q]
    num_terms_Q = num_taps_Q * height
    per_strip = to_device(
        np.stack([image_Q, start_Q, num_taps_Q, num_terms_Q.cumsum() - num_terms_Q]), device
    )
    strip, term = _enumerate_groups(num_terms_Q, device)
    image, start, num_taps = per_strip[:3, strip]
    target = term // num_taps
    tap = (image * height + target) * max_taps + term - target * num_taps
    first_term = per_strip[3, :, None] + torch.arange(height, device=device) * per_strip[2, :, None]
    return torch.nn.functional.embedding_bag(
        start + taps.positions_BhT.flatten()[tap],
        table,
        first_term.flatten(),
        mode="sum",
        per_sample_weights=taps.weights_BhT.flatten()[tap],
    )


def _enumerate_groups(num_entries_Q: IntArray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Enumerate entries 0 to num_entries_Q[q] - 1 of every strip q.

    Returns: the strip of each entry, and its index within the strip; strips in order.
    """
    total = int(num_entries_Q.sum())
    counts_and_offsets = to_device(
        np.stack([num_entries_Q, num_entries_Q.cumsum() - num_entries_Q]), device
    )
    group = torch.arange(len(num_entries_Q), device=device)
    # output_size avoids a GPU synchronization
    group = torch.repeat_interleave(group, counts_and_offsets[0], output_size=total)
    return group, torch.arange(total, device=device) - counts_and_offsets[1, group]
