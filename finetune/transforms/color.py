"""Color operations on float32 pixels from 0 to 255, with one parameter per sample.

Images of several sizes can share a canvas: each image occupies its upper left corner, and `sizes`
(B, 2) gives the heights and widths. Operations read no pixel outside an image, and leave undefined
values there. Sums over images on a canvas add values rounded to multiples of a fixed step, so the
sums are exact and do not depend on the size of the canvas.

No operation rounds its result, so each agrees with torchvision on float images. torchvision's uint8
path truncates after every operation: its values (0 to 255) are lower, by 0.5 on average and at most
about 2; after the four operations of color_jitter, by 1.4 on average and at most about 5.
Differences are larger where an operation is steep or discontinuous: posterize and solarize, if
earlier operations left values between two integers; equalize, whose lookup table can jump between
neighboring values; and the hue of nearly gray pixels, after another operation.
"""

# B batch, H W pixels

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from finetune.transforms.geometry import valid_pixel_mask
from finetune.transforms.sample_rng import SampleRNG, to_device

__all__ = [
    "adjust_brightness_contrast_saturation",
    "adjust_hue",
    "adjust_sharpness",
    "apply_color_jitter",
    "autocontrast",
    "color_jitter",
    "equalize",
    "grayscale",
    "invert",
    "posterize",
    "solarize",
]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
JitterRange = float | tuple[float, float]

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)


# 3x3 weighted mean; weights of Pillow's SMOOTH filter
_SMOOTHING_KERNEL = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], dtype=np.float32) / np.float32(13)
_SUM_STEPS_PER_LEVEL = 2.0**18  # rounding to 1 / this keeps sums up to 2**27 exact in any order


def _per_sample(values: npt.NDArray[np.generic], like: Tensor) -> Tensor:
    """Return (B,) numbers as a (B, 1, 1, 1) tensor on the device of `like`."""
    return to_device(values.astype(np.float32), like.device).view(-1, 1, 1, 1)


def _to_grayscale(images_B3HW: Tensor) -> Tensor:
    """Convert to grayscale (B, 1, H, W), with torchvision's channel weights."""
    red, green, blue = images_B3HW[:, :1], images_B3HW[:, 1:2], images_B3HW[:, 2:]
    return (red * 0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114)


def _mean_grayscale(gray_B1HW: Tensor, sizes: IntArray | None) -> Tensor:
    """Return the mean gray value of each image, (B, 1, 1, 1)."""
    if sizes is None:
        # reduce rows first: torch splits a single large reduction by the number of threads, which
        # would change the rounding
        return gray_B1HW.mean(3, keepdim=True).mean(2, keepdim=True)
    dtype = torch.float32 if gray_B1HW.device.type == "mps" else torch.float64  # MPS has no float64
    rounded = (
        (gray_B1HW.to(dtype) * _SUM_STEPS_PER_LEVEL)
        .round_()
        .masked_fill_(~valid_pixel_mask(sizes, gray_B1HW), 0)
    )
    sums = rounded.sum((2, 3), keepdim=True) / _SUM_STEPS_PER_LEVEL
    return (sums / to_device(sizes.prod(axis=1), sums.device).view(-1, 1, 1, 1)).float()


def adjust_brightness_contrast_saturation(
    images_B3HW: Tensor, factors: FloatArray, kinds: IntArray, sizes: IntArray | None = None
) -> Tensor:
    """Adjust brightness, contrast or saturation in place, one of them per sample.

    Each scales the distance of a pixel from a reference: black for brightness, the mean gray value
    of the image for contrast, the pixel's own gray value for saturation.

    Args:
        images_B3HW: float32 images.
        factors: (B,) scale factors; 1 leaves a sample unchanged.
        kinds: (B,) BRIGHTNESS, CONTRAST or SATURATION; samples of kind HUE must have factor 1.
        sizes: (B, 2) image sizes; see the module docstring.
    """
    factor = _per_sample(factors, images_B3HW)
    complement = 1 - factor
    if (kinds != BRIGHTNESS).any():
        gray = _to_grayscale(images_B3HW)
        mean = _mean_grayscale(gray, sizes)
        contrast_offset = mean * _per_sample(kinds == CONTRAST, gray) * complement
        gray = torch.addcmul(
            contrast_offset, gray, _per_sample(kinds == SATURATION, gray) * complement
        )
        images_B3HW.mul_(factor).add_(gray)
    else:
        images_B3HW.mul_(factor)
    return images_B3HW.clamp_(0, 255)


def adjust_hue(images_B3HW: Tensor, shifts: FloatArray) -> Tensor:
    """Shift the hue in HSV space by a fraction of the color circle.

    Args:
        images_B3HW: float32 images.
        shifts: (B,) shifts from -0.5 to 0.5.
    """
    red, green, blue = images_B3HW[:, :1], images_B3HW[:, 1:2], images_B3HW[:, 2:]
    value = images_B3HW.amax(1, keepdim=True)
    chroma = value - images_B3HW.amin(1, keepdim=True)
    sextant = torch.where(
        red == value,
        green - blue,
        torch.where(green == value, (blue - red) + 2 * chroma, (red - green) + 4 * chroma),
    )
    # for gray pixels the hue is undefined, but has no effect because their chroma is 0
    hue = sextant / chroma.clamp(min=1e-6) + _per_sample(6 * shifts, chroma)
    hue = hue - 6 * torch.floor(hue / 6)
    # a channel has full weight within 1/6 of the circle from its own hue, and none beyond 2/6
    channel_hues = torch.arange(0.0, 6.0, 2.0, device=hue.device).view(3, 1, 1)
    weight = (hue - channel_hues).abs_().sub_(3).abs_().neg_().add_(2).clamp_(0, 1)
    return torch.addcmul(value, chroma, weight, value=-1)


def apply_color_jitter(
    images_B3HW: Tensor, factors: FloatArray, order: IntArray, sizes: IntArray | None = None
) -> Tensor:
    """Adjust brightness, contrast, saturation and hue in place, in a separate order per sample.

    Args:
        images_B3HW: float32 images.
        factors: (B, 4) scale factors for BRIGHTNESS, CONTRAST and SATURATION, and the HUE shift.
        order: (B, N) the adjustment (BRIGHTNESS to HUE) that each sample gets in each of N steps.
        sizes: (B, 2) image sizes; see the module docstring.
    """
    rows = np.arange(len(order))
    for kinds in order.T:
        step_factors = factors[rows, kinds]
        hue_rows = np.flatnonzero(kinds == HUE)
        if len(hue_rows) < len(rows):
            images_B3HW = adjust_brightness_contrast_saturation(
                images_B3HW, np.where(kinds == HUE, 1.0, step_factors), kinds, sizes
            )
        if len(hue_rows):
            index = to_device(hue_rows, images_B3HW.device)
            images_B3HW[index] = adjust_hue(images_B3HW[index], step_factors[hue_rows])
    return images_B3HW


def color_jitter(
    images_B3HW: Tensor,
    rng: SampleRNG,
    *,
    brightness: JitterRange,
    contrast: JitterRange,
    saturation: JitterRange,
    hue: JitterRange,
    sizes: IntArray | None = None,
) -> Tensor:
    """Apply color jitter in place, with random parameters and a random order per sample.

    Args:
        brightness, contrast, saturation: range of the random factor; a number x means
            [1 - x, 1 + x].
        hue: range of the random shift; a number x means [-x, x].
        sizes: (B, 2) image sizes; see the module docstring.
    Source: torchvision, transforms.v2.ColorJitter.
    """
    ranges = [_jitter_range(one, 1.0) for one in (brightness, contrast, saturation)] + [
        _jitter_range(hue, 0.0)
    ]
    identity_ranges = [(1.0, 1.0)] * 3 + [(0.0, 0.0)]
    active = np.array(
        [kind for kind in range(4) if ranges[kind] != identity_ranges[kind]], np.int64
    )
    factors = np.concatenate([rng.uniform(1, low, high) for low, high in ranges], axis=1)
    order = active[rng.uniform(4)[:, : len(active)].argsort(axis=1)]
    return apply_color_jitter(images_B3HW, factors, order, sizes)


def _jitter_range(jitter: JitterRange, center: float) -> tuple[float, float]:
    """Return the range to draw from: the given tuple, or center ± jitter (factors at least 0)."""
    if isinstance(jitter, tuple):
        return jitter
    low = center - jitter
    return (max(low, 0.0) if center else low), center + jitter


def adjust_sharpness(
    images_B3HW: Tensor, factors: FloatArray, sizes: IntArray | None = None
) -> Tensor:
    """Scale the distance of inner pixels from the 3x3 smoothed image by `factors` (B,)."""
    if min(images_B3HW.shape[2:]) <= 2:
        return images_B3HW
    kernel = to_device(_SMOOTHING_KERNEL, images_B3HW.device)
    smooth = torch.nn.functional.conv2d(images_B3HW, kernel.expand(3, 1, 3, 3), groups=3)
    result = images_B3HW.clone()
    inner = result[:, :, 1:-1, 1:-1]
    inner.sub_(smooth).mul_(_per_sample(factors, smooth)).add_(smooth)
    result.clamp_(0, 255)
    if sizes is None:
        return result
    is_inner = torch.nn.functional.pad(valid_pixel_mask(sizes - 2, smooth), (1, 1, 1, 1))
    return torch.where(is_inner, result, images_B3HW)


def grayscale(images_B3HW: Tensor, is_gray: npt.NDArray[np.bool_]) -> Tensor:
    """Remove the color of some images in place; `is_gray` is (B,)."""
    factors, kinds = np.where(is_gray, 0.0, 1.0), np.full(len(is_gray), SATURATION)
    return adjust_brightness_contrast_saturation(images_B3HW, factors, kinds)


def invert(images_B3HW: Tensor) -> Tensor:
    """Replace each value x by 255 - x."""
    # a bilinear warp can exceed 255 by rounding, and posterize would turn -1e-5 into -8
    return (255 - images_B3HW).clamp_(min=0)


def solarize(images_B3HW: Tensor, thresholds: FloatArray) -> Tensor:
    """Invert values at or above an image's threshold; `thresholds` (B,) are fractions of 255."""
    is_solarized = images_B3HW >= _per_sample(255 * thresholds, images_B3HW)
    return torch.where(is_solarized, invert(images_B3HW), images_B3HW)


def posterize(images_B3HW: Tensor, bits: FloatArray) -> Tensor:
    """Keep the highest bits of each value; `bits` (B,) is the number of bits to keep."""
    step = _per_sample(2.0 ** (8 - bits), images_B3HW)
    return torch.floor(images_B3HW / step) * step


def autocontrast(images_B3HW: Tensor, sizes: IntArray | None = None) -> Tensor:
    """Stretch each channel to the range 0 to 255; constant channels do not change."""
    for_min = for_max = images_B3HW
    if sizes is not None:
        outside = ~valid_pixel_mask(sizes, images_B3HW)
        for_min = images_B3HW.masked_fill(outside, 255)
        for_max = images_B3HW.masked_fill(outside, 0)
    low = for_min.amin((2, 3), keepdim=True)
    span = for_max.amax((2, 3), keepdim=True) - low
    is_constant = span == 0
    stretched = (images_B3HW - low) * (255 / span.masked_fill(is_constant, 1))
    return torch.where(is_constant, images_B3HW, stretched.clamp_(0, 255))


def equalize(images_B3HW: Tensor, sizes: IntArray | None = None) -> Tensor:
    """Equalize the histogram of each channel, after rounding its values to integers.

    Source: Pillow, ImageOps.equalize.
    """
    batch, channels, height, width = images_B3HW.shape
    values = images_B3HW.round().long().view(batch * channels, -1)
    counts = torch.zeros(len(values), 256, dtype=torch.long, device=values.device)
    is_valid, area = torch.ones_like(values), torch.full_like(counts[:, :1], height * width)
    if sizes is not None:
        is_valid = (
            valid_pixel_mask(sizes, images_B3HW)
            .long()
            .expand(-1, channels, -1, -1)
            .reshape_as(values)
        )
        area = to_device(sizes.prod(axis=1).repeat(channels), values.device)[:, None]
    counts.scatter_add_(1, values, is_valid)
    brightest = (values * is_valid).amax(1, keepdim=True)
    step = (area - counts.gather(1, brightest)) // 255
    num_darker = counts.cumsum(1) - counts
    table = ((num_darker + step // 2) // step.clamp(min=1)).clamp_(max=255)
    equalized = torch.where(step == 0, values, table.gather(1, values))
    return equalized.view(batch, channels, height, width).to(images_B3HW.dtype)
