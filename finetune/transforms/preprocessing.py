"""Preprocessing configuration of a model."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Preprocessing"]


@dataclass(frozen=True)
class Preprocessing:
    """Evaluation preprocessing of a model, as in timm's pretrained_cfg.

    Attributes:
        image_size: (height, width) in pixels.
        mean: mean of each channel, for pixel values in [0, 1].
        std: standard deviation of each channel, for pixel values in [0, 1].
        interpolation: nearest, bilinear, bicubic or lanczos.
        crop_pct: fraction of the resized image's side that the center crop keeps.
        crop_mode: center, squash or border, as in timm.
    """

    image_size: tuple[int, int]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    interpolation: str
    crop_pct: float
    crop_mode: str
