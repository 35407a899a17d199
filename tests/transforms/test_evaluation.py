"""An evaluation transform spec and timm's configuration are equivalent."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from test_geometry import synthetic_photo
from timm.data import create_transform, resolve_data_config

from finetune.transforms.eval_transforms import (
    build_pipeline,
    default_eval_spec,
    spec_to_preprocessing,
)
from finetune.transforms.preprocessing import Preprocessing

CROP_MODES = ("center", "squash", "border")
SQUARE = Preprocessing(
    image_size=(32, 32),
    mean=(0.5, 0.4, 0.3),
    std=(0.2, 0.3, 0.4),
    interpolation="bilinear",
    crop_pct=0.875,
    crop_mode="center",
)


def timm_preprocessings() -> list[Preprocessing]:
    """Return all that are in timm's registry, and every crop mode for oblong images."""
    names = timm.list_models()
    names += timm.list_models(pretrained=True)
    configs = [timm.get_pretrained_cfg(name) for name in names]
    data = [resolve_data_config({}, pretrained_cfg=each.to_dict()) for each in configs if each]
    kinds = {
        Preprocessing(
            each["input_size"][1:],
            *(tuple(each["mean"]), tuple(each["std"])),
            *(each["interpolation"], each["crop_pct"], each["crop_mode"]),
        )
        for each in data
    }
    registered = sorted(kinds, key=str)
    oblong = [
        dataclasses.replace(kind, image_size=(side, 2 * side // 3), crop_mode=mode)
        for kind, mode in zip(registered[::3], itertools.cycle(CROP_MODES), strict=False)
        for side in kind.image_size[:1]
    ]
    return registered + oblong


def test_default_eval_spec_equals_timm_for_every_pretrained_configuration() -> None:
    images = [
        # little contrast: Pillow also clips between its two passes
        Image.fromarray((synthetic_photo(*size) // 2 + 60).permute(1, 2, 0).numpy())
        for size in [(9, 120), (100, 8), (64, 64), (5, 7), (75, 50)]
    ]
    pixels = [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images]
    wrong = []
    for preprocessing in timm_preprocessings():
        height, width = preprocessing.image_size
        assert spec_to_preprocessing(preprocessing, default_eval_spec(preprocessing)) == (
            preprocessing if preprocessing.crop_pct <= 1 else None
        )
        # an eighth of the size takes a fraction of the time
        small = dataclasses.replace(preprocessing, image_size=(height // 8, width // 8))
        settings = dataclasses.asdict(small)
        transform = create_transform((3, *settings.pop("image_size")), **settings)
        expected = torch.stack([transform(image) for image in images])
        difference = (build_pipeline(small)(pixels) - expected).abs() * 255
        levels = difference * torch.tensor(small.std)[:, None, None]
        # Pillow rounds to whole levels after each of its two passes.
        if levels.max() > 1.6:
            wrong.append((small, levels.amax((1, 2, 3)).tolist()))
    assert wrong == []


@pytest.mark.parametrize(
    "transforms, source",
    [
        ("resize", (48, 40)),
        ("resize(36) | center_crop", (48, 40)),
        ("resize((36, 36)) | center_crop", (48, 40)),
        ("resize(32)", (40, 40)),
        ("resize(fit='contain') | center_crop(fill='mean')", (48, 20)),
    ],
)
def test_published_preprocessing_restores_the_spec(
    transforms: str, source: tuple[int, int]
) -> None:
    published = spec_to_preprocessing(SQUARE, transforms)
    assert published is not None
    image = torch.randint(0, 256, (1, 3, *source), dtype=torch.uint8)
    assert torch.equal(build_pipeline(published)(image), build_pipeline(SQUARE, transforms)(image))


def test_timm_resizes_to_the_same_size_with_the_published_crop_pct() -> None:
    small = dataclasses.replace(SQUARE, image_size=(15, 15))
    published = spec_to_preprocessing(small, "resize(29) | center_crop")
    assert published is not None
    assert (math.floor(15 / (15 / 29)), math.floor(15 / published.crop_pct)) == (28, 29)


def test_does_not_publish_a_spec_that_timm_cannot_express() -> None:
    for transforms in (
        "center_crop(20) | resize",
        "resize((36, 40)) | center_crop",
        "resize(36, fit='cover') | center_crop",
        "resize(fit='contain') | center_crop",
    ):
        assert spec_to_preprocessing(SQUARE, transforms) is None
