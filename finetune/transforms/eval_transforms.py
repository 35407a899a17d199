"""Evaluation transforms: convert between transform specs and timm's preprocessing configuration."""

from __future__ import annotations

import dataclasses
import math

from finetune.transforms.pipeline import Pipeline
from finetune.transforms.preprocessing import Preprocessing
from finetune.transforms.spec_parser import parse_transform_spec

__all__ = [
    "add_corruption",
    "build_pipeline",
    "default_eval_spec",
    "eval_resize_size",
    "spec_to_preprocessing",
]


def default_eval_spec(preprocessing: Preprocessing) -> str:
    """Return the evaluation transform spec that is equivalent to a preprocessing configuration.

    Source: timm/data/transforms_factory.py, transforms_imagenet_eval.
    """
    height, width = preprocessing.image_size
    resize_size = eval_resize_size(preprocessing)
    is_squash = preprocessing.crop_mode == "squash"
    resizes_shorter_side = height == width and not is_squash
    resize = f"resize({resize_size[0]})" if resizes_shorter_side else f"resize({resize_size})"
    if is_squash and resize_size == (height, width):
        return resize
    return f"{resize} | center_crop(({height}, {width}))"


def eval_resize_size(preprocessing: Preprocessing) -> tuple[int, int]:
    """Return the size (height, width) in pixels to which images are resized before the crop."""
    height, width = preprocessing.image_size
    # timm rounds down; 1e-6 keeps 32 / (32 / 36) at 36
    crop_pct = preprocessing.crop_pct
    return math.floor(height / crop_pct + 1e-6), math.floor(width / crop_pct + 1e-6)


def build_pipeline(
    preprocessing: Preprocessing,
    transform_spec: str | None = None,
    *,
    train: bool = False,
    decode_size: int | None = None,
) -> Pipeline:
    """Build the transform pipeline for a model.

    Args:
        preprocessing: the model's image size, mean, std and interpolation.
        transform_spec: the operations; None for `default_eval_spec(preprocessing)`.
        train: True for training transforms, False for evaluation; see `Pipeline`.
        decode_size: smallest side for reduced JPEG decoding; see `Pipeline`.
    Raises: RecipeError if the spec does not end at the image size.
    """
    return Pipeline(
        transform_spec or default_eval_spec(preprocessing),
        image_size=preprocessing.image_size,
        mean=preprocessing.mean,
        std=preprocessing.std,
        interpolation=preprocessing.interpolation,
        train=train,
        decode_size=decode_size,
    )


def add_corruption(transform_spec: str, kind: str, severity: int) -> str:
    """Append a corruption to an evaluation spec, without its `normalise`, which must come last."""
    operations = [word.strip() for word in transform_spec.split("|")]
    without_normalise = [word for word in operations if not word.startswith("normalise")]
    return " | ".join([*without_normalise, f"corrupt('{kind}', {severity})"])


def spec_to_preprocessing(
    preprocessing: Preprocessing, transform_spec: str
) -> Preprocessing | None:
    """Convert an evaluation spec to a preprocessing configuration, to publish with the model.

    Args:
        preprocessing: the model's preprocessing, for the image size and the defaults.
        transform_spec: evaluation transforms.
    Returns: the configuration whose evaluation transforms are this spec; None if timm's hub format
        cannot express the spec.
    """
    calls = [
        call
        for call in parse_transform_spec(transform_spec, train=False)
        if call.name != "normalise"
    ]
    names = [call.name for call in calls]
    if names not in (["resize"], ["resize", "center_crop"]):
        return None
    height, width = preprocessing.image_size
    size = calls[0].arguments.get("size") or (height, width)
    interpolation = calls[0].arguments.get("interpolation") or preprocessing.interpolation
    if isinstance(size, int):
        side, mode, keeps_ratio = size, "center", height == width
    else:
        side, mode, keeps_ratio = size[0], "squash", size[0] * width == size[1] * height
    if not keeps_ratio:
        return None
    published = dataclasses.replace(
        preprocessing, interpolation=interpolation, crop_pct=height / side, crop_mode=mode
    )
    return published if published.crop_pct <= 1 else None
