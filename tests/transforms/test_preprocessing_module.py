"""PreprocessingModule: equal to the pipeline for every spec, filter and image size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from refusals import refused

from finetune.transforms.pipeline import Pipeline
from finetune.transforms.preprocessing_module import PreprocessingModule

MODEL: dict[str, Any] = {"image_size": (32, 32), "mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.25)}
SIZES = ((1, 1), (1, 50), (50, 1), (17, 900), (500, 333), (33, 32), (31, 64), (1000, 7), (32, 32))


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize(
    "spec",
    [
        "resize((32, 32))",
        "resize(36) | center_crop(32)",
        "resize((36, 36), fit='contain') | center_crop((32, 32), fill='mean')",
        "resize((32, 32), fit='contain') | center_crop((32, 32))",
        "resize((36, 40), fit='cover') | center_crop((32, 32))",
        "center_crop",
        "resize(32, interpolation='bicubic') | center_crop | normalise",
    ],
)
def test_pixels_equal_the_pipelines(spec: str, interpolation: str) -> None:
    module = PreprocessingModule(spec, interpolation=interpolation, **MODEL)
    pipeline = Pipeline(spec, interpolation=interpolation, train=False, **MODEL)
    generator = torch.Generator().manual_seed(0)
    for height, width in SIZES:
        image = torch.randint(0, 256, (1, height, width, 3), dtype=torch.uint8, generator=generator)
        expected = pipeline(image.permute(0, 3, 1, 2))
        # values up to 5, summed in another order
        torch.testing.assert_close(module(image), expected, atol=1e-5, rtol=0)


def test_model_that_is_not_square() -> None:
    model = MODEL | {"image_size": (24, 40)}
    spec = "resize((28, 44), fit='cover') | center_crop((24, 40))"
    image = torch.randint(0, 256, (1, 61, 77, 3), dtype=torch.uint8)
    expected = Pipeline(spec, train=False, **model)(image.permute(0, 3, 1, 2))
    actual = PreprocessingModule(spec, interpolation="bicubic", **model)(image)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


def test_other_operations_are_refused() -> None:
    spec = "center_crop(64) | resize((32, 32))"
    with refused("recipe.unsupported", spec, "--no-preprocessing"):
        PreprocessingModule(spec, interpolation="bicubic", **MODEL)
