"""RandAugment, TrivialAugment, AutoAugment, AugMix and 3-Augment, compared with torchvision."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from test_color import assert_close
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tv

from finetune.transforms import auto_augment
from finetune.transforms.blur import gaussian_blur
from finetune.transforms.geometry import rotation_matrices, warp_affine
from finetune.transforms.sample_rng import SampleRNG, sample_keys

NUM_SAMPLES = 6000
Recorded = list[tuple[str, float]]


def make_rng(num_samples: int = NUM_SAMPLES) -> SampleRNG:
    return SampleRNG(sample_keys(0, 0, np.arange(num_samples)), 0)


# The largest difference in levels, and its reason: blends as in test_color; Sharpness: torchvision
# rounds the smoothed image, times |1 - factor|; AutoContrast: torchvision truncates.
MAX_DIFFERENCES = {
    "Brightness": 1.0,
    "Color": 2.0,
    "Contrast": 2.0,
    "Sharpness": 2.0,
    "AutoContrast": 1.0,
}


SPACE = {**v2.AutoAugment._AUGMENTATION_SPACE, **v2.RandAugment._AUGMENTATION_SPACE}


def strengths(name: str) -> list[int]:
    """Return indices into the magnitudes of an operation; a negative one negates the magnitude."""
    values, is_signed = SPACE[name]
    if values(31, 8, 8) is None:
        return [0]
    return [0, 9, 30, -9, -30] if is_signed else [0, 9, 17, 30]


@pytest.mark.parametrize(
    "name, strength",
    [(name, strength) for name in auto_augment.AUGMENT_OPS for strength in strengths(name)],
)
def test_operations_equal_torchvision(images: Tensor, name: str, strength: int) -> None:
    table = SPACE[name][0](31, *images.shape[2:])
    magnitude = 0.0 if table is None else float(np.sign(strength) * table[abs(strength)])
    expected = [
        v2.RandAugment()
        ._apply_image_or_video_transform(
            image, name, magnitude, interpolation=v2.InterpolationMode.NEAREST, fill={}
        )
        .float()
        for image in images
    ]
    actual = auto_augment.apply_augment_op(images.float(), name, np.full(8, magnitude), "nearest")
    assert_close(actual, expected, MAX_DIFFERENCES.get(name, 0.0))


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recorded]:
    """Return a function that runs an augmentation and returns (name, magnitude) of each call."""
    recorded: Recorded = []

    def record_op(images: Tensor, name: str, magnitudes: np.ndarray, *_: Any) -> Tensor:
        recorded.extend((name, float(magnitude)) for magnitude in magnitudes)
        return images

    def run(augment: Callable[..., Tensor], **arguments: Any) -> Recorded:
        images = torch.rand(NUM_SAMPLES, 3, 12, 20)
        before = images.clone()
        result = augment(images, make_rng(), interpolation="nearest", **arguments)
        # without operations nothing changes: the weights of AugMix sum to 1
        torch.testing.assert_close(result, before, rtol=1e-5, atol=0)
        return recorded

    monkeypatch.setattr(auto_augment, "apply_augment_op", record_op)
    return run


def torchvision_table(space: Any, name: str, bins: int) -> list[float]:
    """Return the magnitudes of an operation, both directions, in the order of the bins."""
    values, is_signed = space[name]
    table = values(bins, 12, 20)
    return [] if table is None else [s * float(v) for v in table for s in (1, -1)[: 1 + is_signed]]


RAND_SPACE, TRIVIAL_SPACE = (
    transform._AUGMENTATION_SPACE for transform in (v2.RandAugment, v2.TrivialAugmentWide)
)


@pytest.mark.parametrize(
    "augment, arguments, space, bins, used",
    [
        (
            "rand_augment",
            {"num_ops": 2, "magnitude": 9, "num_magnitude_bins": 31},
            RAND_SPACE,
            31,
            [9],
        ),
        ("trivial_augment", {"num_magnitude_bins": 31}, TRIVIAL_SPACE, 31, range(31)),
        (
            "augmix",
            {"severity": 3, "width": 3, "depth": 0, "alpha": 1.0},
            v2.AugMix._AUGMENTATION_SPACE,
            10,
            range(3),
        ),
    ],
)
def test_draws_operations_uniformly_with_the_magnitudes_of_torchvision(
    record: Callable[..., Recorded],
    augment: str,
    arguments: dict[str, Any],
    space: Any,
    bins: int,
    used: Iterable[int],
) -> None:
    recorded = record(getattr(auto_augment, augment), **arguments)
    names, counts = np.unique([name for name, _ in recorded], return_counts=True)
    assert {*names} == {*space}
    assert stats.chisquare(counts).pvalue > 1e-3
    num_ops = {"rand_augment": 2, "trivial_augment": 1, "augmix": 3 * 2}[augment]  # 1 to 3, mean 2
    assert counts.sum() == pytest.approx(num_ops * NUM_SAMPLES, rel=0.01)
    for name in names:
        table = torchvision_table(space, name, bins)
        directions = 2 if space[name][1] else 1
        expected = [
            value for bin in used for value in table[directions * bin : directions * (bin + 1)]
        ]
        if not expected:
            continue
        values = np.array([magnitude for other, magnitude in recorded if other == name])
        distances = np.abs(values[:, None] - np.array(expected)).min(axis=1)
        assert distances.max() < 1e-4
        low, high = min(expected), max(expected)
        assert (values.min(), values.max()) == (pytest.approx(low), pytest.approx(high))


def test_auto_augment_draws_the_policies_of_torchvision(record: Callable[..., Recorded]) -> None:
    recorded = record(auto_augment.auto_augment)
    transform = v2.AutoAugment(v2.AutoAugmentPolicy.IMAGENET)
    expected: dict[tuple[str, float], float] = {}
    for policy in transform._policies:
        for name, probability, level in policy:
            values, is_signed = transform._AUGMENTATION_SPACE[name]
            table = values(10, 12, 20)
            magnitude = 0.0 if table is None else float(table[level])
            for sign in (1, -1)[: 1 + is_signed]:
                key = name, round(sign * magnitude, 4)
                share = probability / len(transform._policies) / (1 + is_signed)
                expected[key] = expected.get(key, 0) + share * NUM_SAMPLES
    has_magnitude = {name for (name, magnitude) in expected if magnitude}
    actual = dict.fromkeys(expected, 0)
    for name, magnitude in recorded:
        actual[name, round(magnitude, 4) + 0.0 if name in has_magnitude else 0.0] += 1
    scale = sum(actual.values()) / sum(expected.values())
    assert scale == pytest.approx(1, abs=0.02)
    keys = [key for key, count in expected.items() if count]
    pvalue = stats.chisquare([actual[key] for key in keys], [scale * expected[key] for key in keys])
    assert pvalue.pvalue > 1e-3


def test_augmix_weights_have_a_dirichlet_distribution() -> None:
    weights = make_rng().dirichlet(0.5, 3)
    np.testing.assert_allclose(weights.sum(axis=1), 1)
    for column in weights.T:
        assert stats.kstest(column, stats.beta(0.5, 1.0).cdf).pvalue > 1e-3


def test_gaussian_blur_equals_torchvision(images: Tensor) -> None:
    is_blurred = np.arange(8) != 3
    actual = gaussian_blur(images.float(), is_blurred, make_rng(8), sigma=(1.5, 1.5))
    expected = [
        tv.gaussian_blur(image.float(), [13, 13], [1.5, 1.5]) if blurred else image
        for image, blurred in zip(images, is_blurred, strict=True)
    ]
    assert_close(actual, expected, 0)


def test_three_augment_draws_one_of_three_operations(images: Tensor) -> None:
    photos = images[[0] * 300]
    augmented = auto_augment.three_augment(photos.float(), make_rng(300))
    is_gray = (augmented - tv.rgb_to_grayscale(photos, 3)).abs().amax((1, 2, 3)) <= 1
    is_solarized = (augmented == tv.solarize(photos, 128)).all(dim=(1, 2, 3))
    rest = augmented[~is_gray & ~is_solarized]
    assert all(70 < count < 130 for count in (is_gray.sum(), is_solarized.sum(), len(rest)))
    sharpness = [image.diff(dim=2).abs().mean() for image in rest]
    assert max(sharpness) <= photos[0].float().diff(dim=2).abs().mean() + 1e-3
    assert min(sharpness) < 0.7 * max(sharpness)  # several standard deviations


@pytest.mark.parametrize("sizes", [None, np.tile([[20, 30]], (8, 1))])
def test_operations_after_a_bilinear_rotation_stay_within_the_range(
    sizes: np.ndarray | None,
) -> None:
    white = torch.full((8, 3, 20, 30), 255.0)
    images = warp_affine(white, rotation_matrices(np.linspace(5, 40, 8)), "bilinear", sizes)
    assert images.max() > 255  # by rounding
    for name, magnitudes in (("Solarize", np.full(8, 0.3)), ("Posterize", np.full(8, 5.0))):
        images = auto_augment.apply_augment_op(images, name, magnitudes, "nearest")
        assert images.min() >= 0
