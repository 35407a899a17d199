"""A transform spec converted to torchvision gives our images if nothing is random."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refused
from torchvision.transforms import v2

from finetune.bench.torchvision_transforms import to_torchvision
from finetune.transforms.operations import OPERATIONS
from finetune.transforms.pipeline import Pipeline

LEVELS = 2.0  # PIL rounds after each pass, our pipeline never


def smooth_image(height: int, width: int) -> np.ndarray:
    """An image between a photograph and a gradient: upscaled noise."""
    generator = np.random.default_rng(0)
    small = Image.fromarray(generator.integers(0, 256, (6, 6, 3), dtype=np.uint8))
    return np.array(small.resize((width, height), Image.Resampling.BICUBIC))


def apply_both(
    spec: str, source: np.ndarray, size: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Apply our pipeline and torchvision's. Returns: two arrays (H, W, 3) from 0 to 255."""
    pipeline = Pipeline(spec, image_size=size, mean=(0, 0, 0), std=(1, 1, 1))
    chw = torch.from_numpy(source).permute(2, 0, 1)
    ours = pipeline([chw], keys=np.ones(1, np.uint64))[0].permute(1, 2, 0).numpy() * 255
    chain = to_torchvision(spec, image_size=size, interpolation="bicubic")
    theirs = v2.Compose(chain)(Image.fromarray(source))
    return ours, np.asarray(theirs, dtype=np.float32)


@pytest.mark.parametrize(
    "spec, source, size",
    [
        ("resize", (32, 32), (48, 48)),
        ("resize((24, 40), interpolation='bilinear')", (32, 48), (24, 40)),
        ("resize(24) | center_crop((24, 24)) | normalise", (32, 48), (24, 24)),
        ("resize | flip(1.0)", (32, 32), (48, 48)),
        ("resize | flip(0.0) | vertical_flip(1.0)", (32, 32), (48, 48)),
        ("center_crop(40)", (32, 32), (40, 40)),
        ("random_crop(32, padding=0)", (32, 32), (32, 32)),
        ("random_resized_crop(scale=(1.0, 1.0), ratio=(1.0, 1.0))", (32, 32), (48, 48)),
        ("color_jitter((1.2, 1.2))", (32, 32), (32, 32)),
        ("color_jitter(saturation=(0.5, 0.5))", (32, 32), (32, 32)),
    ],
)
def test_fixed_parameters_match_our_images(spec, source, size) -> None:
    ours, theirs = apply_both(spec, smooth_image(*source), size)
    assert theirs.shape == ours.shape == (*size, 3)
    assert np.abs(ours - theirs).max() <= LEVELS


def test_fixed_rotation_matches_except_at_edges() -> None:
    ours, theirs = apply_both("rotate((30, 30))", smooth_image(32, 32), (32, 32))
    differing = (np.abs(ours - theirs) > LEVELS).any(axis=-1)
    assert differing.mean() < 0.02
    assert (theirs[0, 0] == 0).all()  # the black corner proves that it was rotated


def test_probabilities_and_ranges_are_passed_on() -> None:
    spec = "random_crop(24, padding=4) | flip(0.3) | rotate((-5, 10)) | color_jitter(0.2, hue=0.1)"
    crop, flip, rotation, jitter = to_torchvision(
        spec, image_size=(24, 24), interpolation="bicubic"
    )
    assert (crop.size, crop.padding) == ((24, 24), [4, 4, 4, 4])
    assert flip.p == 0.3
    assert list(rotation.degrees) == [-5, 10]
    assert jitter.brightness == (0.8, 1.2)
    assert (jitter.contrast, jitter.hue) == (None, (-0.1, 0.1))


def test_transforms_without_a_counterpart_are_named() -> None:
    supported = ("resize", "center_crop", "random_crop", "random_resized_crop", "flip")
    supported += ("vertical_flip", "rotate", "color_jitter", "normalise")
    supported += ("corrupt",)  # not for training
    unsupported = [name for name in OPERATIONS if name not in supported]
    assert len(unsupported) >= 4
    for name in unsupported:
        with refused("recipe.unsupported", f"data.train: {name}") as caught:
            to_torchvision(f"resize | {name}", image_size=(8, 8), interpolation="bicubic")
        assert "\n" not in str(caught.value)
