"""An evaluation transform spec and timm's configuration are equivalent."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.transforms_factory import create_transform

from finetune.transforms.eval_transforms import (
    build_pipeline,
    default_eval_spec,
    spec_to_preprocessing,
)
from finetune.transforms.pipeline import Pipeline
from finetune.transforms.preprocessing import Preprocessing

SQUARE = Preprocessing(
    image_size=(32, 32),
    mean=(0.5, 0.4, 0.3),
    std=(0.2, 0.3, 0.4),
    interpolation="bilinear",
    crop_pct=0.875,
    crop_mode="center",
)


@pytest.mark.parametrize("crop_pct", [0.875, 0.9, 0.95, 1.0])
@pytest.mark.parametrize("crop_mode", ["center", "squash"])
@pytest.mark.parametrize("source", [(48, 48), (40, 60), (20, 20)])
def test_default_eval_spec_equals_timm(
    crop_pct: float, crop_mode: str, source: tuple[int, int]
) -> None:
    preprocessing = dataclasses.replace(SQUARE, crop_pct=crop_pct, crop_mode=crop_mode)
    pixels = np.random.default_rng(0).integers(0, 256, (*source, 3), dtype=np.uint8)
    transform = create_transform(
        (3, 32, 32),
        interpolation="bilinear",
        mean=(0, 0, 0),
        std=(1, 1, 1),
        crop_pct=crop_pct,
        crop_mode=crop_mode,
    )
    expected = transform(Image.fromarray(pixels))
    pipeline = Pipeline(
        default_eval_spec(preprocessing),
        image_size=(32, 32),
        mean=(0, 0, 0),
        std=(1, 1, 1),
        interpolation="bilinear",
        train=False,
    )
    (actual,) = pipeline(torch.from_numpy(pixels).permute(2, 0, 1)[None])
    # Pillow rounds to whole levels after each of its two passes.
    assert (actual - expected).abs().max() <= 1.6 / 255


@pytest.mark.parametrize(
    "transforms, source",
    [
        ("resize", (48, 40)),
        ("resize(36) | center_crop", (48, 40)),
        ("resize((36, 36)) | center_crop", (48, 40)),
        ("resize(32)", (40, 40)),
    ],
)
def test_published_preprocessing_restores_the_spec(
    transforms: str, source: tuple[int, int]
) -> None:
    published = spec_to_preprocessing(SQUARE, transforms)
    assert published is not None
    image = torch.randint(0, 256, (1, 3, *source), dtype=torch.uint8)
    assert torch.equal(build_pipeline(published)(image), build_pipeline(SQUARE, transforms)(image))


def test_does_not_publish_a_spec_that_timm_cannot_express() -> None:
    assert spec_to_preprocessing(SQUARE, "center_crop(20) | resize") is None
    assert spec_to_preprocessing(SQUARE, "resize((20, 40)) | center_crop") is None
