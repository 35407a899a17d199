"""Images of any sizes as one batch: resampled in a number of kernels that no size changes.

The pixels of all images lie in one buffer, one image after the other. Each pixel of a result is a
weighted sum of a few source pixels, and `embedding_bag` computes all of them at once, first down
the columns and then along the rows. A sample's result is the same to the bit in every batch: its
sums have its own terms alone, and the weights' own sum is exact.
"""

# B images, Q pieces of their columns, T source pixels of a sum, C channels, H W source pixels,
# h w target pixels: the largest of the batch where they differ

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from finetune.transforms.geometry import RADIUS, filter_weights, nearest_pixels
from finetune.transforms.random import on_device

__all__ = ["PIECE", "SLACK_BYTES", "Ragged", "Span", "resample"]

PIECE = 32  # pixels of a row that are summed together
SLACK_BYTES = 3 * PIECE  # behind the last image: a piece may reach beyond its row
_WHOLE = 2.0**40  # weights are rounded to a part of this: then their sum is exact in any order

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Ragged(Sequence[Tensor]):
    """A batch of images of any sizes in one buffer.

    Attributes:
        pixels: uint8 or float32, flat; (H, W, 3) each and `SLACK_BYTES` values more.
        sizes_B2: height and width of each image, on the host.
        starts_B: pixels in front of each image.
        strides_B: pixels from one row to the next.
        usual: (H, W) of the images that are resampled as a batch of one size; None: none are.
    """

    pixels: Tensor
    sizes_B2: Integers
    starts_B: Integers
    strides_B: Integers
    usual: tuple[int, int] | None = None

    @classmethod
    def packed(cls, pixels: Tensor, sizes_B2: Integers) -> Ragged:
        """Return the images that lie in a buffer without a gap."""
        areas = sizes_B2.prod(axis=1)
        return cls(pixels, sizes_B2, areas.cumsum() - areas, sizes_B2[:, 1])

    @classmethod
    def of(cls, images: Iterable[Tensor]) -> Ragged:
        """Return images (3, H, W) of one device as a batch."""
        rows = [image.permute(1, 2, 0) for image in images]
        slack = rows[0].new_zeros(SLACK_BYTES)
        sizes = np.array([image.shape[:2] for image in rows], np.int64)
        return cls.packed(torch.cat([*(image.reshape(-1) for image in rows), slack]), sizes)

    @classmethod
    def of_canvas(cls, images_BCHW: Tensor, sizes_B2: Integers) -> Ragged:
        """Return the upper left parts of images of one size."""
        count, _, height, width = images_BCHW.shape
        pixels = images_BCHW.permute(0, 2, 3, 1).reshape(-1)
        starts = np.arange(count) * (height * width)
        pixels = torch.nn.functional.pad(pixels, (0, SLACK_BYTES))
        return cls(pixels, sizes_B2, starts, np.full(count, width))

    def __len__(self) -> int:
        return len(self.sizes_B2)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Ragged: ...
    def __getitem__(self, index: int | slice) -> Tensor | Ragged:
        """Return one image, (3, H, W); or some of them."""
        if isinstance(index, slice):
            return self.part(np.arange(len(self))[index])
        height, width = self.sizes_B2[index].tolist()
        stride, start = 3 * int(self.strides_B[index]), 3 * int(self.starts_B[index])
        return self.pixels.as_strided((3, height, width), (1, stride, 3), start)

    def part(self, rows: Integers) -> Ragged:
        """Return some of the images; their pixels stay where they are."""
        if len(rows) == len(self) and np.array_equal(rows, np.arange(len(self))):
            return self
        sizes, starts, strides = (e[rows] for e in (self.sizes_B2, self.starts_B, self.strides_B))
        return Ragged(self.pixels, sizes, starts, strides, self.usual)

    @property
    def are_usual(self) -> npt.NDArray[np.bool_]:
        """Return (B,) bool: the images of the usual size."""
        size = self.usual or (-1, -1)
        return np.asarray((self.sizes_B2 == size).all(axis=1))

    def to(self, device: torch.device) -> Ragged:
        """Return the same images on a device, copied at once."""
        return replace(self, pixels=self.pixels.to(device, non_blocking=True))


class _Selection:
    """Crops, pads and flips of a line of pixels: place i shows pixel start + sign * i of it.

    Attributes:
        start, sign, length: (B,).
        low, high: (B,) the places from low to high - 1 show a pixel, the others a zero.
    """

    def __init__(self, length: Integers) -> None:
        self.length = self.high = length
        self.start = self.low = np.zeros_like(length)
        self.sign = np.ones_like(length)

    def crop(self, starts: Integers, length: Integers) -> None:
        self.start = self.start + self.sign * starts
        self.low, self.high = (np.clip(end - starts, 0, length) for end in (self.low, self.high))
        self.length = length

    def flip(self, flipped: npt.NDArray[np.bool_]) -> None:
        last = self.start + self.sign * (self.length - 1)
        low, high = self.length - self.high, self.length - self.low
        self.start = np.where(flipped, last, self.start)
        self.sign = np.where(flipped, -self.sign, self.sign)
        self.low = np.where(flipped, low, self.low)
        self.high = np.where(flipped, high, self.high)


class _Taps(NamedTuple):
    """The sums of one side of all images.

    Attributes:
        places_BhT: int64, source pixels, counted from the first that is read.
        weights_BhT: float32.
        count_B: of an image's sums; what is behind in the two others carries no weight.
        first_B, number_B: the source pixels that are read.
    """

    places_BhT: Tensor
    weights_BhT: Tensor
    count_B: Integers
    first_B: Integers
    number_B: Integers


class Span:
    """One side of images of several lengths under a run of geometric operations, with one resize.

    The counterpart of `Axis`, whose methods it has.

    Attributes:
        overshoots: True if a kernel with negative weights was used.
    """

    def __init__(self, length: Integers) -> None:
        self._before = self._shown = _Selection(length)
        self._window: tuple[Integers, Integers, Integers, str] | None = None
        self.overshoots = False

    @property
    def length(self) -> Integers:
        """Return (B,) the lengths in pixels."""
        return self._shown.length

    @property
    def resized(self) -> bool:
        """Return True once there was a resize."""
        return self._window is not None

    def crop(self, starts: Integers, length: Integers) -> None:
        """Crop to windows that may reach beyond the ends."""
        self._shown.crop(starts, length)

    def flip(self, flipped: npt.NDArray[np.bool_]) -> None:
        """Reverse the lines where flipped (B,) is true."""
        self._shown.flip(flipped)

    def resize(
        self,
        target: Integers,
        interpolation: str,
        *,
        starts: Integers | None = None,
        lengths: Integers | None = None,
    ) -> None:
        """Resize the whole lines, or a window of each, to `target` (B,) pixels."""
        assert self._window is None
        if starts is None or lengths is None:
            starts, lengths = np.zeros_like(self.length), self.length
        self._window = starts, lengths, target, interpolation
        self._shown = _Selection(target)
        self.overshoots |= interpolation in ("bicubic", "lanczos")

    def taps(self, device: torch.device) -> _Taps:
        """Return the weighted sums of source pixels that make the line."""
        before, shown = self._before, self._shown
        if self._window is None:  # its one selection is the one before
            shown = _Selection(before.length)
            whole = np.zeros_like(before.length), before.length, before.length, "nearest"
        starts, lengths, target, interpolation = self._window or whole
        first, last = self._needed(starts, lengths, target, interpolation, shown)
        is_empty = first >= last  # where all is padding, the first pixel is read, with no weight
        first, last = np.where(is_empty, 0, first), np.where(is_empty, 1, last)
        ends = before.start + before.sign * first, before.start + before.sign * (last - 1)
        read = np.where(is_empty, 0, np.minimum(*ends))
        start = np.where(is_empty, 0, before.start - read)
        count = np.ones_like(target)
        if interpolation != "nearest":
            widest = RADIUS[interpolation] * np.maximum(1, lengths / target)
            count = np.ceil(2 * widest).astype(np.int64) + 1
        facts = [shown.start, shown.sign, np.where(is_empty, 0, shown.low)]
        facts += [np.where(is_empty, 0, shown.high), starts, lengths, target, count]
        facts += [first, last - 1, start, before.sign]
        there = on_device(np.stack(facts), device)[:, :, None, None]
        out = torch.arange(int(shown.length.max()), device=device)[:, None]
        places, is_shown = there[0] + there[1] * out, (out >= there[2]) & (out < there[3])
        if interpolation == "nearest":
            if self._window is not None:
                pixels = on_device(nearest_pixels(lengths, target), device)[:, :, None]
                places = pixels.gather(1, places.clamp(0, pixels.shape[1] - 1))
            taps, weights = places, torch.ones_like(places, dtype=torch.float32)
        else:
            number = torch.arange(int(count.max()), device=device)
            taps, weights = _weights(places, number, there[5], there[6], there[7], interpolation)
        taps = there[4] + taps
        weights = torch.where(is_shown & (taps >= there[8]) & (taps <= there[9]), weights, 0)
        source = there[10] + there[11] * torch.minimum(torch.maximum(taps, there[8]), there[9])
        return _Taps(source, weights, count, read, last - first)

    def _needed(
        self,
        starts: Integers,
        lengths: Integers,
        target: Integers,
        interpolation: str,
        shown: _Selection,
    ) -> tuple[Integers, Integers]:
        """Return the first place before the resize that is read, and the one after the last.

        They lie in the window, show a pixel, and are near what is shown of the result.
        """
        edges = np.sort([shown.start + shown.sign * end for end in (shown.low, shown.high - 1)], 0)
        scale = lengths / target
        reach = RADIUS[interpolation] * np.maximum(1, scale) + 1  # one for float32's rounding
        near = starts + np.floor((edges + 0.5) * scale + [[-1], [1]] * reach).astype(np.int64)
        first = np.maximum.reduce([self._before.low, starts, near[0]])
        return first, np.minimum.reduce([self._before.high, starts + lengths, near[1] + 1])


def _weights(
    places: Tensor,
    number: Tensor,
    lengths: Tensor,
    target: Tensor,
    count: Tensor,
    interpolation: str,
) -> tuple[Tensor, Tensor]:
    """Return source pixels (B, h, T) in each window and their weights, as `resize_matrix` does.

    Args:
        places: (B, h, 1) target pixels.
        number: (T,) of the terms, from 0.
        lengths, target, count: (B, 1, 1) pixels of the windows and of the results, and terms.
    """
    scale = lengths.float() / target
    stretch = scale.clamp(min=1.0)
    centre = (places + 0.5) * scale
    taps = torch.floor(centre - RADIUS[interpolation] * stretch + 0.5) + number
    weights = filter_weights((taps + 0.5 - centre) / stretch, interpolation)
    weights = weights * ((taps >= 0) & (taps < lengths) & (number < count))
    exact = torch.float32 if places.device.type == "mps" else torch.float64  # it has no float64
    whole = (weights.to(exact) * _WHOLE).round_()
    return taps.long(), (whole / whole.sum(2, keepdim=True)).float()


def resample(images: Ragged, rows: Span, columns: Span) -> Tensor:
    """Make what a run of geometric operations shows.

    Args:
        images: levels from 0 to 255.
        rows, columns: both sides of the images under the run.
    Returns: (B, 3, h, w) float32; zeros below and beside a result that is smaller than the largest.
    """
    device = images.pixels.device
    down, across = rows.taps(device), columns.taps(device)
    pieces_B = -(-across.number_B // PIECE)
    before_B = pieces_B.cumsum() - pieces_B
    image_Q = np.repeat(np.arange(len(images)), pieces_B)
    height_Q = down.number_B[image_Q]
    start_B = images.starts_B + down.first_B * images.strides_B + across.first_B
    start_Q = (start_B - before_B * PIECE)[image_Q] + np.arange(len(image_Q)) * PIECE
    facts = on_device(np.stack([start_Q, images.strides_B[image_Q]]), device)
    piece, row = _each(height_Q, device)
    # overlapping: any pixel may be the first of a piece
    every = images.pixels.as_strided((len(images.pixels) // 3 - PIECE + 1, 3 * PIECE), (3, 1))
    table = every.index_select(0, facts[0, piece] + row * facts[1, piece]).float()
    lines = _sums(table, down, image_Q, height_Q.cumsum() - height_Q)
    table = lines.view(len(image_Q), -1, PIECE, 3).transpose(1, 2).reshape(len(image_Q) * PIECE, -1)
    result = _sums(table, across, np.arange(len(images)), before_B * PIECE)
    width = across.weights_BhT.shape[1]
    return result.view(len(images), width, -1, 3).permute(0, 3, 2, 1).contiguous()


def _sums(table: Tensor, taps: _Taps, image_Q: Integers, start_Q: Integers) -> Tensor:
    """Sum weighted rows of a table.

    Args:
        table: (N, D) float32.
        image_Q: the image of each piece.
        start_Q: the row of the table for a piece's first pixel.
    Returns: (Q * h, D).
    """
    device, (_, number, most) = table.device, taps.weights_BhT.shape
    count_Q = taps.count_B[image_Q]
    terms_Q = count_Q * number
    facts = on_device(np.stack([image_Q, start_Q, count_Q, terms_Q.cumsum() - terms_Q]), device)
    piece, term = _each(terms_Q, device)
    image, start, count = facts[:3, piece]
    target = term // count
    chosen = (image * number + target) * most + term - target * count
    first = facts[3, :, None] + torch.arange(number, device=device) * facts[2, :, None]
    return torch.nn.functional.embedding_bag(
        start + taps.places_BhT.flatten()[chosen],
        table,
        first.flatten(),
        mode="sum",
        per_sample_weights=taps.weights_BhT.flatten()[chosen],
    )


def _each(count_Q: Integers, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return, for `count_Q[q]` entries of each q, their q and their number in it, from 0."""
    total = int(count_Q.sum())
    facts = on_device(np.stack([count_Q, count_Q.cumsum() - count_Q]), device)
    group = torch.arange(len(count_Q), device=device)
    # its length is told: else a GPU would have to be waited for
    group = torch.repeat_interleave(group, facts[0], output_size=total)
    return group, torch.arange(total, device=device) - facts[1, group]
