"""Counter-based random numbers: a pure function of (sample, operation, draw index).

With a sequential generator, the augmentation of a sample would depend on its position in the batch.
Here each random number is a hash of a counter, so a sample gets the same augmentation in any batch,
on any rank or worker and after a resume, and one vectorized call draws numbers for a whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = [
    "SampleKeys",
    "SampleRNG",
    "draw_crop_offsets",
    "draw_crop_windows",
    "draw_erase_boxes",
    "keyed_uniform",
    "sample_keys",
    "to_device",
]

# B batch, N draws
SampleKeys = npt.NDArray[np.uint64]
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
# (height, width); each is an int for all images, or (B,) with one value per image
HeightWidthPerImage = tuple[int | IntArray, int | IntArray]

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: spreads adjacent counters
_DRAWS_PER_OPERATION = 1 << 20
_NUM_ATTEMPTS = 10  # attempts to draw a rectangle that fits, as in torchvision


def to_device(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Convert an array to a tensor on a device; the copy to a GPU is asynchronous."""
    tensor = torch.from_numpy(values)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _mix_bits(values: SampleKeys) -> SampleKeys:
    """Hash 64-bit values so that each output bit depends on each input bit.

    Source: Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: SampleKeys = values ^ (values >> np.uint64(31))
    return mixed


def sample_keys(seed: int, epoch: int, indices: Sequence[int] | npt.NDArray[Any]) -> SampleKeys:
    """Return the keys that determine all random numbers of samples in one epoch.

    Args:
        seed: seed of the run, any integer.
        epoch: epoch number, from 0.
        indices: (B,) indices of the samples in the dataset.
    Returns: (B,) uint64 keys.
    """
    with np.errstate(over="ignore"):
        state = np.zeros(1, np.uint64)
        for word in (seed, epoch):
            state = _mix_bits((state ^ np.uint64(word % (1 << 64))) + _GOLDEN_GAMMA)
        samples = np.asarray(indices, dtype=np.int64).view(np.uint64)
        return _mix_bits(_mix_bits(samples + _GOLDEN_GAMMA) ^ state)


def keyed_uniform(
    keys: SampleKeys, operation: int, draw_indices: npt.NDArray[np.uint64]
) -> FloatArray:
    """Draw uniform numbers from [0, 1).

    Args:
        keys: (B,) sample keys.
        operation: position of the operation in the transform spec, from 0.
        draw_indices: (N,) indices of the draws within the operation.
    Returns: (B, N) float64 numbers with 53 random bits.
    """
    with np.errstate(over="ignore"):
        counters = np.uint64(operation * _DRAWS_PER_OPERATION + 1) + draw_indices
        bits = _mix_bits(keys[:, None] + counters[None, :] * _GOLDEN_GAMMA)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


class SampleRNG:
    """Random number generator of one operation, with one stream per sample of a batch."""

    def __init__(self, keys: SampleKeys, operation: int) -> None:
        self.keys = keys
        self.operation = operation
        self.num_used = 0

    def __len__(self) -> int:
        return len(self.keys)

    def uniform(self, num_draws: int, low: float = 0.0, high: float = 1.0) -> FloatArray:
        """Return (B, num_draws) numbers from [low, high)."""
        numbers = np.arange(self.num_used, self.num_used + num_draws, dtype=np.uint64)
        self.num_used += num_draws
        return low + (high - low) * keyed_uniform(self.keys, self.operation, numbers)

    def integers(self, high: npt.ArrayLike) -> IntArray:
        """Return (B,) integers from [0, high); `high` is an int or (B,)."""
        # with 53 random bits and `high` of a few thousand, the bias is below 1e-12
        return np.floor(self.uniform(1)[:, 0] * np.asarray(high)).astype(np.int64)

    def bernoulli(self, p: float) -> npt.NDArray[np.bool_]:
        """Return (B,) booleans, each True with probability p."""
        return self.uniform(1)[:, 0] < p

    def beta(self, alpha: float) -> FloatArray:
        """Return (B,) numbers from Beta(alpha, alpha), by inverse transform sampling."""
        from scipy.special import betaincinv  # comes with scikit-learn; slow to import

        result: FloatArray = betaincinv(alpha, alpha, self.uniform(1)[:, 0])
        return result

    def dirichlet(self, alpha: float, size: int) -> FloatArray:
        """Return (B, size) weights from Dirichlet(alpha, …, alpha); each row sums to 1."""
        from scipy.special import gammaincinv  # comes with scikit-learn; slow to import

        # u = 0 would give weights of 0 / 0
        gammas = gammaincinv(alpha, np.maximum(self.uniform(size), 2.0**-53))
        result: FloatArray = gammas / gammas.sum(axis=1, keepdims=True)
        return result


def draw_crop_offsets(rng: SampleRNG, margin: HeightWidthPerImage) -> tuple[IntArray, IntArray]:
    """Draw the offsets (top, left), each (B,), of crops `margin` pixels smaller than the image."""
    return rng.integers(margin[0] + 1), rng.integers(margin[1] + 1)


def draw_crop_windows(
    rng: SampleRNG,
    size: HeightWidthPerImage,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Draw crops of random area and aspect ratio; a center crop if none of ten attempts fits.

    The center crop is the largest one whose aspect ratio is within `ratio`.

    Args:
        rng: random numbers, one stream per sample.
        size: (height, width) of the images in pixels; each is an int or (B,).
        scale: range of the crop area as a fraction of the image area.
        ratio: range of width / height, drawn uniformly in log space.
    Returns: top, left, height, width, each (B,).
    Source: torchvision, transforms.v2.RandomResizedCrop.make_params.
    """
    image_height, image_width = np.atleast_1d(size[0]), np.atleast_1d(size[1])
    area = (image_height * image_width)[:, None] * rng.uniform(_NUM_ATTEMPTS, *scale)
    aspect = np.exp(rng.uniform(_NUM_ATTEMPTS, np.log(ratio[0]), np.log(ratio[1])))
    heights, widths = _integer_sides(area, aspect)
    fits = (heights > 0) & (heights <= image_height[:, None])
    fits &= (widths > 0) & (widths <= image_width[:, None])

    image_aspect = image_width / image_height
    is_narrow, is_wide = image_aspect < min(ratio), image_aspect > max(ratio)
    height = np.where(is_narrow, np.rint(image_width / min(ratio)), image_height).astype(np.int64)
    width = np.where(is_wide, np.rint(image_height * max(ratio)), image_width).astype(np.int64)
    has_fit, height_B, width_B = _first_fit(fits, heights, widths, height, width)
    random_top = rng.integers(image_height - height_B + 1)
    random_left = rng.integers(image_width - width_B + 1)
    top = np.where(has_fit, random_top, (image_height - height) // 2)
    left = np.where(has_fit, random_left, (image_width - width) // 2)
    return top, left, height_B, width_B


def draw_erase_boxes(
    rng: SampleRNG, size: tuple[int, int], scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Draw rectangles to erase; a rectangle is empty if none of ten attempts fits.

    Args:
        rng: random numbers, one stream per sample.
        size: (height, width) of the images in pixels.
        scale: range of the rectangle area as a fraction of the image area.
        ratio: range of height / width, drawn uniformly in log space.
    Returns: top, left, height, width, each (B,).
    Source: torchvision, transforms.v2.RandomErasing.make_params.
    """
    image_height, image_width = size
    area = image_height * image_width * rng.uniform(_NUM_ATTEMPTS, *scale)
    aspect = np.exp(rng.uniform(_NUM_ATTEMPTS, np.log(ratio[0]), np.log(ratio[1])))
    widths, heights = _integer_sides(area, aspect)
    fits = (heights < image_height) & (widths < image_width)
    _, height_B, width_B = _first_fit(fits, heights, widths, 0, 0)
    top = rng.integers(image_height - height_B + 1)
    left = rng.integers(image_width - width_B + 1)
    return top, left, height_B, width_B


def _integer_sides(area: FloatArray, aspect: FloatArray) -> tuple[IntArray, IntArray]:
    """Return sqrt(area / aspect) and sqrt(area * aspect), rounded to whole pixels."""
    short = np.rint(np.sqrt(area / aspect)).astype(np.int64)
    long = np.rint(np.sqrt(area * aspect)).astype(np.int64)
    return short, long


def _first_fit(
    fits: npt.NDArray[np.bool_],
    heights: IntArray,
    widths: IntArray,
    fallback_height: int | IntArray,
    fallback_width: int | IntArray,
) -> tuple[npt.NDArray[np.bool_], IntArray, IntArray]:
    """Select the first attempt that fits.

    Args:
        fits, heights, widths: (B, attempts).
        fallback_height, fallback_width: sides if no attempt fits.
    Returns: True where an attempt fits; the selected heights and widths; each (B,).
    """
    rows, first = np.arange(len(fits)), fits.argmax(1)
    has_fit = fits[rows, first]
    height_B = np.where(has_fit, heights[rows, first], fallback_height)
    return has_fit, height_B, np.where(has_fit, widths[rows, first], fallback_width)
