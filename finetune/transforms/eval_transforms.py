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
    size, resize_size = preprocessing.image_size, eval_resize_size(preprocessing)
    if preprocessing.crop_mode == "border":
        return f"resize({resize_size}, fit='contain') | center_crop({size}, fill='mean')"
    if preprocessing.crop_mode == "squash":
        resize = f"resize({resize_size})"
        return resize if resize_size == size else f"{resize} | center_crop({size})"
    is_square = resize_size[0] == resize_size[1]
    resize = f"resize({resize_size[0]})" if is_square else f"resize({resize_size}, fit='cover')"
    return f"{resize} | center_crop({size})"


def eval_resize_size(preprocessing: Preprocessing) -> tuple[int, int]:
    """Return the size (height, width) in pixels to which images are resized before the crop."""
    height, width = preprocessing.image_size
    crop_pct = preprocessing.crop_pct
    return math.floor(height / crop_pct), math.floor(width / crop_pct)


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
        decode_size: the recipe's data.decode_size; see `Pipeline`.
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
    """Append a corruption to an evaluation spec; drop `normalise`, which is implied at the end."""
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
    resize, fill = calls[0].arguments, calls[-1].arguments.get("fill")
    size = resize["size"] or preprocessing.image_size
    height, width = (size, size) if isinstance(size, int) else size
    if (resize["fit"], fill) == ("contain", "mean"):
        crop_mode = "border"
    elif (resize["fit"], fill) == ("cover", None) and height != width:
        crop_mode = "center"
    elif (resize["fit"], fill) == (None, None):
        crop_mode = "center" if isinstance(size, int) else "squash"
    else:
        return None
    exact = preprocessing.image_size[0] / height
    # timm rounds the resized side down: it gets 28 from 15 / (15 / 29), but 29 with the next lower
    # float in place of 15 / 29
    for crop_pct in (preprocessing.crop_pct, exact, math.nextafter(exact, 0)):
        published = dataclasses.replace(
            preprocessing,
            interpolation=resize["interpolation"] or preprocessing.interpolation,
            crop_pct=crop_pct,
            crop_mode=crop_mode,
        )
        if crop_pct <= 1 and eval_resize_size(published) == (height, width):
            return published
    return None
