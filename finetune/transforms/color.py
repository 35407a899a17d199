"""Colour operations on float pixels from 0 to 255, with a parameter per sample.

Images of several sizes lie in the upper left corners of one canvas, and `sizes` (B, 2) has their
heights and widths: an operation reads no pixel beside an image, and what it leaves there means
nothing. Sums over such an image are of whole numbers, so that no canvas changes how they round.

Values are never rounded between operations, so each agrees with torchvision on float images.
torchvision's uint8 path truncates after each: half a level down in the mean and at most about two
per operation (1.4 and 5 over the four of color_jitter), save where an operation is steep or jumps:
posterize and solarize on values that earlier operations left between two whole numbers, equalize,
whose table can jump between neighbours, and hue after another operation near grey.
"""

# B batch, H W pixels

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from finetune.transforms.geometry import inside, rotation, warp
from finetune.transforms.random import Draws, on_device

__all__ = [
    "RAND_AUGMENT",
    "apply_rand_augment",
    "autocontrast",
    "blend",
    "color_jitter",
    "equalize",
    "jitter",
    "posterize",
    "rand_augment",
    "sharpen",
    "shift_hue",
]

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Spread = float | tuple[float, float]

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
RAND_AUGMENT = (
    "Identity",
    "ShearX",
    "ShearY",
    "TranslateX",
    "TranslateY",
    "Rotate",
    "Brightness",
    "Color",
    "Contrast",
    "Sharpness",
    "Posterize",
    "Solarize",
    "AutoContrast",
    "Equalize",
)


# A weighted mean of a pixel and its neighbours.
_SMOOTHING = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], dtype=np.float32) / np.float32(13)
_WHOLE = 2.0**18  # greys are rounded to a part of this: sums of up to 2**27 are exact in any order


def _per_sample(values: npt.NDArray[np.generic], like: Tensor) -> Tensor:
    """Turn (B,) numbers into a (B, 1, 1, 1) tensor beside the images."""
    return on_device(values.astype(np.float32), like.device).view(-1, 1, 1, 1)


def _grey(images_B3HW: Tensor) -> Tensor:
    """Return the luma (B, 1, H, W), with torchvision's weights."""
    red, green, blue = images_B3HW[:, :1], images_B3HW[:, 1:2], images_B3HW[:, 2:]
    return (red * 0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114)


def _mean_grey(grey_B1HW: Tensor, sizes: Integers | None) -> Tensor:
    """Return the mean (B, 1, 1, 1) over each image."""
    if sizes is None:
        # first over rows: one reduction over a large image would be split by the number of threads
        return grey_B1HW.mean(3, keepdim=True).mean(2, keepdim=True)
    exact = torch.float32 if grey_B1HW.device.type == "mps" else torch.float64  # it has no float64
    whole = (grey_B1HW.to(exact) * _WHOLE).round_().masked_fill_(~inside(sizes, grey_B1HW), 0)
    sums = whole.sum((2, 3), keepdim=True) / _WHOLE
    return (sums / on_device(sizes.prod(axis=1), sums.device).view(-1, 1, 1, 1)).float()


def blend(
    images_B3HW: Tensor, factors: Floats, kinds: Integers, sizes: Integers | None = None
) -> Tensor:
    """Scale the distance from black, from the mean grey or from the pixel's grey; in place.

    Args:
        images_B3HW: float32.
        factors: (B,) 1 leaves a sample as it is.
        kinds: (B,) of BRIGHTNESS, CONTRAST, SATURATION; a sample of another kind has factor 1.
        sizes: see the head of this file.
    """
    factor = _per_sample(factors, images_B3HW)
    rest = 1 - factor
    if (kinds != BRIGHTNESS).any():
        grey = _grey(images_B3HW)
        mean = _mean_grey(grey, sizes)
        contrast = mean * _per_sample(kinds == CONTRAST, grey) * rest
        grey = torch.addcmul(contrast, grey, _per_sample(kinds == SATURATION, grey) * rest)
        images_B3HW.mul_(factor).add_(grey)
    else:
        images_B3HW.mul_(factor)
    return images_B3HW.clamp_(0, 255)


def shift_hue(images_B3HW: Tensor, shifts: Floats) -> Tensor:
    """Turn the hue by a share of the full circle, through HSV.

    Args:
        images_B3HW: float32.
        shifts: (B,) from -0.5 to 0.5.
    """
    red, green, blue = images_B3HW[:, :1], images_B3HW[:, 1:2], images_B3HW[:, 2:]
    top = images_B3HW.amax(1, keepdim=True)
    chroma = top - images_B3HW.amin(1, keepdim=True)
    sextant = torch.where(
        red == top,
        green - blue,
        torch.where(green == top, (blue - red) + 2 * chroma, (red - green) + 4 * chroma),
    )
    # grey pixels have no hue, and keep none: their chroma is 0
    hue = sextant / chroma.clamp(min=1e-6) + _per_sample(6 * shifts, chroma)
    hue = hue - 6 * torch.floor(hue / 6)
    # a channel is full within one sixth of its own hue and empty beyond two, around the circle
    own = torch.arange(0.0, 6.0, 2.0, device=hue.device).view(3, 1, 1)
    lack = (hue - own).abs_().sub_(3).abs_().neg_().add_(2).clamp_(0, 1)
    return torch.addcmul(top, chroma, lack, value=-1)


def jitter(
    images_B3HW: Tensor, factors: Floats, order: Integers, sizes: Integers | None = None
) -> Tensor:
    """Apply brightness, contrast, saturation and hue in each sample's own order; in place.

    Args:
        images_B3HW: float32.
        factors: (B, 4) the parameter of each of the four.
        order: (B, N) which of them comes at each place.
        sizes: see the head of this file.
    """
    rows = np.arange(len(order))
    for kinds in order.T:
        chosen = factors[rows, kinds]
        turned = np.flatnonzero(kinds == HUE)
        if len(turned) < len(rows):
            images_B3HW = blend(images_B3HW, np.where(kinds == HUE, 1.0, chosen), kinds, sizes)
        if len(turned):
            index = on_device(turned, images_B3HW.device)
            images_B3HW[index] = shift_hue(images_B3HW[index], chosen[turned])
    return images_B3HW


def color_jitter(
    images_B3HW: Tensor,
    draws: Draws,
    *,
    brightness: Spread,
    contrast: Spread,
    saturation: Spread,
    hue: Spread,
    sizes: Integers | None = None,
) -> Tensor:
    """Draw the four parameters and their order for each sample and apply them; in place.

    Source: torchvision, transforms.v2.ColorJitter.
    """
    ranges = [_around(one, 1.0) for one in (brightness, contrast, saturation)] + [_around(hue, 0.0)]
    idle = [(1.0, 1.0)] * 3 + [(0.0, 0.0)]
    active = np.array([kind for kind in range(4) if ranges[kind] != idle[kind]], np.int64)
    factors = np.concatenate([draws.uniform(1, low, high) for low, high in ranges], axis=1)
    order = active[draws.uniform(4)[:, : len(active)].argsort(axis=1)]
    return jitter(images_B3HW, factors, order, sizes)


def _around(spread: Spread, centre: float) -> tuple[float, float]:
    """Return the range to draw from: as written, or centre -+ spread (not below 0 for factors)."""
    if isinstance(spread, tuple):
        return spread
    low = centre - spread
    return (max(low, 0.0) if centre else low), centre + spread


def sharpen(images_B3HW: Tensor, factors: Floats, sizes: Integers | None = None) -> Tensor:
    """Scale the distance from a 3x3 smoothing; the border pixels stay. Factors (B,)."""
    if min(images_B3HW.shape[2:]) <= 2:
        return images_B3HW
    kernel = on_device(_SMOOTHING, images_B3HW.device)
    smooth = torch.nn.functional.conv2d(images_B3HW, kernel.expand(3, 1, 3, 3), groups=3)
    result = images_B3HW.clone()
    inner = result[:, :, 1:-1, 1:-1]
    inner.sub_(smooth).mul_(_per_sample(factors, smooth)).add_(smooth)
    result.clamp_(0, 255)
    if sizes is None:
        return result
    has_border = torch.nn.functional.pad(inside(sizes - 2, smooth), (1, 1, 1, 1))
    return torch.where(has_border, result, images_B3HW)


def posterize(images_B3HW: Tensor, bits: int) -> Tensor:
    """Keep the given number of high bits of each value."""
    step = 2 ** (8 - bits)
    return torch.floor(images_B3HW / step) * step


def autocontrast(images_B3HW: Tensor, sizes: Integers | None = None) -> Tensor:
    """Stretch each channel to the full range; a channel of one value stays."""
    lowest = highest = images_B3HW
    if sizes is not None:
        outside = ~inside(sizes, images_B3HW)
        lowest = images_B3HW.masked_fill(outside, 255)
        highest = images_B3HW.masked_fill(outside, 0)
    low = lowest.amin((2, 3), keepdim=True)
    span = highest.amax((2, 3), keepdim=True) - low
    flat = span == 0
    stretched = (images_B3HW - low) * (255 / span.masked_fill(flat, 1))
    return torch.where(flat, images_B3HW, stretched.clamp_(0, 255))


def equalize(images_B3HW: Tensor, sizes: Integers | None = None) -> Tensor:
    """Level each channel's histogram, on values rounded to whole numbers.

    Source: Pillow, ImageOps.equalize.
    """
    batch, channels, height, width = images_B3HW.shape
    values = images_B3HW.round().long().view(batch * channels, -1)
    counts = torch.zeros(len(values), 256, dtype=torch.long, device=values.device)
    counted, area = torch.ones_like(values), torch.full_like(counts[:, :1], height * width)
    if sizes is not None:
        counted = inside(sizes, images_B3HW).long().expand(-1, channels, -1, -1).reshape_as(values)
        area = on_device(sizes.prod(axis=1).repeat(channels), values.device)[:, None]
    counts.scatter_add_(1, values, counted)
    brightest = (values * counted).amax(1, keepdim=True)
    step = (area - counts.gather(1, brightest)) // 255
    before = counts.cumsum(1) - counts
    table = ((before + step // 2) // step.clamp(min=1)).clamp_(max=255)
    levelled = torch.where(step == 0, values, table.gather(1, values))
    return levelled.view(batch, channels, height, width).to(images_B3HW.dtype)


def rand_augment(
    images_B3HW: Tensor,
    draws: Draws,
    *,
    num_ops: int,
    magnitude: int,
    num_magnitude_bins: int,
    interpolation: str,
    sizes: Integers | None = None,
) -> Tensor:
    """Apply `num_ops` of the fourteen operations of RandAugment to each sample.

    Source: torchvision, transforms.v2.RandAugment.
    """
    strength = magnitude / (num_magnitude_bins - 1)
    for _ in range(num_ops):
        chosen = draws.integers(np.full(len(draws), len(RAND_AUGMENT)))
        signs = np.where(draws.chance(0.5), -1.0, 1.0)
        for kind in np.unique(chosen):
            rows = np.flatnonzero(chosen == kind)
            index = on_device(rows, images_B3HW.device)
            images_B3HW[index] = apply_rand_augment(
                images_B3HW[index],
                RAND_AUGMENT[kind],
                strength,
                signs[rows],
                interpolation,
                None if sizes is None else sizes[rows],
            )
    return images_B3HW


def apply_rand_augment(
    images_B3HW: Tensor,
    name: str,
    strength: float,
    signs: Floats,
    interpolation: str,
    sizes: Integers | None = None,
) -> Tensor:
    """Apply one operation of RandAugment.

    Args:
        images_B3HW: float32, not kept.
        strength: the magnitude as a share of its range, 0 to 1.
        signs: (B,) 1 or -1, for the operations that have a direction.
        sizes: see the head of this file.
    """
    if name in ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"):
        own = np.array([images_B3HW.shape[2:]]) if sizes is None else sizes
        return warp(images_B3HW, _affine(name, strength, signs, own), interpolation, sizes)
    factors = 1 + 0.9 * strength * signs
    if name in ("Brightness", "Contrast", "Color"):
        kind = {"Brightness": BRIGHTNESS, "Contrast": CONTRAST, "Color": SATURATION}[name]
        return blend(images_B3HW, factors, np.full(len(signs), kind), sizes)
    if name == "Sharpness":
        return sharpen(images_B3HW, factors, sizes)
    if name == "Posterize":
        return posterize(images_B3HW, round(8 - 4 * strength))
    if name == "Solarize":
        from_here = images_B3HW >= 255 * (1 - strength)
        return torch.where(from_here, 255 - images_B3HW, images_B3HW)
    if name == "AutoContrast":
        return autocontrast(images_B3HW, sizes)
    return equalize(images_B3HW, sizes) if name == "Equalize" else images_B3HW


def _affine(name: str, strength: float, signs: Floats, sizes: Integers) -> Floats:
    """Return the maps (B, 2, 3) from target to source, about the images' centres.

    Args:
        sizes: (B, 2), or (1, 2) of all.
    """
    height, width = sizes.T
    if name == "Rotate":
        return rotation(30 * strength * signs)
    maps = np.tile(np.eye(2, 3), (len(signs), 1, 1))
    if name == "ShearX":  # about the top left corner, as torchvision
        maps[:, 0, 1] = 0.3 * strength * signs
        maps[:, 0, 2] = maps[:, 0, 1] * height / 2
    elif name == "ShearY":
        maps[:, 1, 0] = 0.3 * strength * signs
        maps[:, 1, 2] = maps[:, 1, 0] * width / 2
    else:
        row, length = (0, width) if name == "TranslateX" else (1, height)
        maps[:, row, 2] = -np.trunc(150 / 331 * length * strength * signs)
    return maps
