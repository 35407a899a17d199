"""Preprocessing configuration of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from timm.data import resolve_data_config

__all__ = ["Preprocessing", "resolve_preprocessing"]


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


def resolve_preprocessing(config: Mapping[str, Any], image_size: tuple[int, int]) -> Preprocessing:
    """Return the preprocessing of timm's pretrained_cfg at an image size (height, width)."""
    data = resolve_data_config({}, pretrained_cfg=dict(config) or {"input_size": (3, *image_size)})
    return Preprocessing(
        image_size=image_size,
        mean=tuple(data["mean"]),
        std=tuple(data["std"]),
        interpolation=data["interpolation"],
        crop_pct=float(data["crop_pct"]),
        crop_mode=data["crop_mode"],
    )
