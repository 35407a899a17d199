"""Random draws that are a pure function of (sample, operation, draw number).

A sequential generator would tie a sample's augmentation to its place in a batch. Here each number
is a hash of a counter, so that a sample is augmented alike whatever the batch, the rank, the worker
or a resume, and a whole batch is drawn at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = [
    "Draws",
    "Keys",
    "crop_offsets",
    "crop_windows",
    "erase_rectangles",
    "mixed_rectangles",
    "on_device",
    "sample_keys",
    "uniform",
]

# B batch, N draws
Keys = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Sides = tuple[int | Integers, int | Integers]  # height and width, of all images or (B,) of each

_STEP = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: neighbouring counters end far apart
_DRAWS_PER_OPERATION = 1 << 20
_ATTEMPTS = 10  # torchvision's number of tries for a rectangle


def on_device(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Return an array's tensor on a device; the copy to a GPU is asynchronous."""
    tensor = torch.from_numpy(values)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _scramble(values: Keys) -> Keys:
    """Mix 64 bits so that each output bit depends on each input bit.

    Source: Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    scrambled: Keys = values ^ (values >> np.uint64(31))
    return scrambled


def sample_keys(seed: int, epoch: int, indices: Sequence[int] | npt.NDArray[Any]) -> Keys:
    """Return one key per sample of an epoch.

    Args:
        seed: the run's seed, any whole number.
        epoch: which pass over the data, from 0.
        indices: (B,) places of the samples in the data set.
    Returns: (B,) uint64.
    """
    with np.errstate(over="ignore"):
        state = np.zeros(1, np.uint64)
        for word in (seed, epoch):
            state = _scramble((state ^ np.uint64(word % (1 << 64))) + _STEP)
        samples = np.asarray(indices, dtype=np.int64).view(np.uint64)
        return _scramble(_scramble(samples + _STEP) ^ state)


def uniform(keys: Keys, operation: int, draws: npt.NDArray[np.uint64]) -> Floats:
    """Draw from [0, 1).

    Args:
        operation: place of the operation in the sentence, from 0.
        draws: (N,) which of the operation's draws.
    Returns: (B, N) with 53 random bits each.
    """
    with np.errstate(over="ignore"):
        counters = np.uint64(operation * _DRAWS_PER_OPERATION + 1) + draws
        bits = _scramble(keys[:, None] + counters[None, :] * _STEP)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Draws:
    """The draws of one operation for a batch, numbered in the order of the calls."""

    def __init__(self, keys: Keys, operation: int) -> None:
        self.keys = keys
        self.operation = operation
        self.used = 0

    def __len__(self) -> int:
        return len(self.keys)

    def uniform(self, count: int, low: float = 0.0, high: float = 1.0) -> Floats:
        """Return (B, count) numbers from [low, high)."""
        numbers = np.arange(self.used, self.used + count, dtype=np.uint64)
        self.used += count
        return low + (high - low) * uniform(self.keys, self.operation, numbers)

    def integers(self, below: npt.ArrayLike) -> Integers:
        """Return (B,) whole numbers from 0 to below - 1, each with its own bound."""
        # 53 bits over a bound of a few thousand: the bias is below 1e-12
        return np.floor(self.uniform(1)[:, 0] * np.asarray(below)).astype(np.int64)

    def chance(self, p: float) -> npt.NDArray[np.bool_]:
        """Return (B,) booleans, each true with probability p."""
        return self.uniform(1)[:, 0] < p

    def beta(self, alpha: float) -> Floats:
        """Return (B,) numbers from Beta(alpha, alpha), by the inverse of its distribution."""
        from scipy.special import betaincinv  # comes with scikit-learn; slow to import

        result: Floats = betaincinv(alpha, alpha, self.uniform(1)[:, 0])
        return result


def crop_offsets(draws: Draws, spare: Sides) -> tuple[Integers, Integers]:
    """Draw the corner (top, left), (B,) each, of a window that images exceed by `spare` pixels."""
    return draws.integers(spare[0] + 1), draws.integers(spare[1] + 1)


def crop_windows(
    draws: Draws, size: Sides, scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[Integers, Integers, Integers, Integers]:
    """Draw windows of random area and aspect ratio: ten attempts, then the largest central window.

    Args:
        size: (height, width) in pixels, of all images or (B,) of each.
        scale: range of the window's area as a share of the image's.
        ratio: range of width / height, uniform in its logarithm.
    Returns: top, left, height, width, each (B,).
    Source: torchvision, transforms.v2.RandomResizedCrop.make_params.
    """
    image_height, image_width = np.atleast_1d(size[0]), np.atleast_1d(size[1])
    area = (image_height * image_width)[:, None] * draws.uniform(_ATTEMPTS, *scale)
    aspect = np.exp(draws.uniform(_ATTEMPTS, np.log(ratio[0]), np.log(ratio[1])))
    heights, widths = _integer_sides(area, aspect)
    fits = (heights > 0) & (heights <= image_height[:, None])
    fits &= (widths > 0) & (widths <= image_width[:, None])

    shape = image_width / image_height
    is_narrow, is_wide = shape < min(ratio), shape > max(ratio)
    height = np.where(is_narrow, np.rint(image_width / min(ratio)), image_height).astype(np.int64)
    width = np.where(is_wide, np.rint(image_height * max(ratio)), image_width).astype(np.int64)
    fitted, height_B, width_B = _first_fit(fits, heights, widths, height, width)
    tops = draws.integers(image_height - height_B + 1)
    lefts = draws.integers(image_width - width_B + 1)
    top = np.where(fitted, tops, (image_height - height) // 2)
    left = np.where(fitted, lefts, (image_width - width) // 2)
    return top, left, height_B, width_B


def erase_rectangles(
    draws: Draws, size: tuple[int, int], scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[Integers, Integers, Integers, Integers]:
    """Draw rectangles to erase; after ten attempts that do not fit, an empty one.

    Args:
        size: (height, width) of the image in pixels.
        scale: range of the rectangle's area as a share of the image's.
        ratio: range of height / width, uniform in its logarithm.
    Returns: top, left, height, width, each (B,).
    Source: torchvision, transforms.v2.RandomErasing.make_params.
    """
    image_height, image_width = size
    area = image_height * image_width * draws.uniform(_ATTEMPTS, *scale)
    aspect = np.exp(draws.uniform(_ATTEMPTS, np.log(ratio[0]), np.log(ratio[1])))
    widths, heights = _integer_sides(area, aspect)
    fits = (heights < image_height) & (widths < image_width)
    _, height_B, width_B = _first_fit(fits, heights, widths, 0, 0)
    top = draws.integers(image_height - height_B + 1)
    left = draws.integers(image_width - width_B + 1)
    return top, left, height_B, width_B


def mixed_rectangles(
    draws: Draws, size: tuple[int, int], kept: Floats
) -> tuple[Integers, Integers, Integers, Integers]:
    """Draw CutMix's rectangles: a random centre, the image's shape, cut off at the borders.

    Args:
        size: (height, width) of the image in pixels.
        kept: (B,) share of the area that stays, before the borders cut the rectangle.
    Returns: top, left, height, width, each (B,).
    Source: torchvision, transforms.v2.CutMix.make_params.
    """
    side = 0.5 * np.sqrt(1 - kept)
    corners = []
    for length in size:
        centre = draws.integers(np.full(len(draws), length))
        half = (side * length).astype(np.int64)
        start, end = np.maximum(centre - half, 0), np.minimum(centre + half, length)
        corners.append((start, end - start))
    (top, height), (left, width) = corners
    return top, left, height, width


def _integer_sides(area: Floats, aspect: Floats) -> tuple[Integers, Integers]:
    """Return the short-by-aspect and long-by-aspect sides, rounded to pixels."""
    short = np.rint(np.sqrt(area / aspect)).astype(np.int64)
    long = np.rint(np.sqrt(area * aspect)).astype(np.int64)
    return short, long


def _first_fit(
    fits: npt.NDArray[np.bool_],
    heights: Integers,
    widths: Integers,
    height: int | Integers,
    width: int | Integers,
) -> tuple[npt.NDArray[np.bool_], Integers, Integers]:
    """Return each row's first attempt that fits, or (height, width), and if there is one."""
    rows, first = np.arange(len(fits)), fits.argmax(1)
    fitted = fits[rows, first]
    height_B = np.where(fitted, heights[rows, first], height)
    return fitted, height_B, np.where(fitted, widths[rows, first], width)
