"""The preprocessing of images that belongs to a network's weights."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Preprocessing"]


@dataclass(frozen=True)
class Preprocessing:
    """The settings by which an image becomes the network's input.

    Attributes:
        image_size: (height, width) in pixels.
        mean: per channel, of pixel values in [0, 1].
        std: per channel.
        interpolation: nearest, bilinear, bicubic or lanczos.
        crop_pct: share of the resized image's side that the centre crop keeps.
        crop_mode: timm's: center, squash or border.
    """

    image_size: tuple[int, int]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    interpolation: str
    crop_pct: float
    crop_mode: str
