"""The operations of evaluation, as a sentence and in timm's hub format."""

from __future__ import annotations

import dataclasses
import math

from finetune.transforms.grammar import parse
from finetune.transforms.pipeline import Pipeline
from finetune.transforms.preprocessing import Preprocessing

__all__ = ["as_published", "corrupted", "default_eval", "make_pipeline", "resized"]


def default_eval(preprocessing: Preprocessing) -> str:
    """Return the sentence of the evaluation that a configuration implies, for `Pipeline`.

    Source: timm/data/transforms_factory.py, transforms_imagenet_eval.
    """
    height, width = preprocessing.image_size
    scaled = resized(preprocessing)
    is_squash = preprocessing.crop_mode == "squash"
    keeps_ratio = height == width and not is_squash
    resize = f"resize({scaled[0]})" if keeps_ratio else f"resize({scaled})"
    if is_squash and scaled == (height, width):
        return resize
    return f"{resize} | center_crop(({height}, {width}))"


def resized(preprocessing: Preprocessing) -> tuple[int, int]:
    """Return the size to which images are resized before the crop: (height, width) in pixels."""
    height, width = preprocessing.image_size
    # timm floors; 1e-6 keeps 32 / (32 / 36) at 36
    crop_pct = preprocessing.crop_pct
    return math.floor(height / crop_pct + 1e-6), math.floor(width / crop_pct + 1e-6)


def make_pipeline(
    preprocessing: Preprocessing,
    sentence: str | None = None,
    *,
    train: bool = False,
    decode_size: int | None = None,
) -> Pipeline:
    """Make the pipeline of a sentence for given weights.

    Args:
        preprocessing: size, mean, std and interpolation.
        sentence: operations; None for the evaluation that the configuration implies.
        decode_size: see `Pipeline`.
    Raises: RecipeError if the sentence does not lead to the image size.
    """
    return Pipeline(
        sentence or default_eval(preprocessing),
        image_size=preprocessing.image_size,
        mean=preprocessing.mean,
        std=preprocessing.std,
        interpolation=preprocessing.interpolation,
        train=train,
        decode_size=decode_size,
    )


def corrupted(sentence: str, kind: str, severity: int) -> str:
    """Return evaluation's sentence with a corruption at its end, before `normalise`."""
    words = [word.strip() for word in sentence.split("|")]
    kept = [word for word in words if not word.startswith("normalise")]
    return " | ".join([*kept, f"corrupt('{kind}', {severity})"])


def as_published(preprocessing: Preprocessing, sentence: str) -> Preprocessing | None:
    """Return the configuration that implies a sentence, so that others evaluate as the run did.

    Args:
        preprocessing: with the model's image size.
        sentence: evaluation's operations.
    Returns: the configuration; None if timm's hub format cannot express the sentence.
    """
    calls = [call for call in parse(sentence, train=False) if call.name != "normalise"]
    names = [call.name for call in calls]
    if names not in (["resize"], ["resize", "center_crop"]):
        return None
    height, width = preprocessing.image_size
    size = calls[0].arguments.get("size") or (height, width)
    kernel = calls[0].arguments.get("interpolation") or preprocessing.interpolation
    if isinstance(size, int):
        side, mode, keeps_ratio = size, "center", height == width
    else:
        side, mode, keeps_ratio = size[0], "squash", size[0] * width == size[1] * height
    if not keeps_ratio:
        return None
    published = dataclasses.replace(
        preprocessing, interpolation=kernel, crop_pct=height / side, crop_mode=mode
    )
    return published if published.crop_pct <= 1 else None
