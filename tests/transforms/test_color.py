from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tv

from finetune.transforms import color
from finetune.transforms.sample_rng import SampleRNG, sample_keys

# Largest allowed mean difference to torchvision's uint8 path, in levels of 255.
MAX_MEAN_DIFFERENCE = 1.0


def assert_close(actual: Tensor, expected: list[Tensor], max_difference: float) -> None:
    """Check the mean and the largest difference, in levels of 255."""
    assert len(actual) == len(expected) > 0
    difference = (actual - torch.stack(expected).float()).abs()
    assert difference.mean() <= MAX_MEAN_DIFFERENCE
    assert difference.max() <= max_difference + 1e-3  # float32 versus whole levels


FACTORS = np.array([0.0, 0.3, 0.8, 0.95, 1.0, 1.2, 1.7, 3.0])
BLENDS = {
    "brightness": (color.BRIGHTNESS, tv.adjust_brightness, 1.0),
    # torchvision averages truncated gray values: half a level less, times |1 - factor|
    "contrast": (color.CONTRAST, tv.adjust_contrast, 2.5),
    # here the pixel's gray is truncated: up to one level, times |1 - factor|, then truncated
    "saturation": (color.SATURATION, tv.adjust_saturation, 3.0),
}


@pytest.mark.parametrize("name", BLENDS)
def test_blends_equal_torchvision(images: Tensor, name: str) -> None:
    kind, function, max_difference = BLENDS[name]
    actual = color.adjust_brightness_contrast_saturation(images.float(), FACTORS, np.full(8, kind))
    expected = [
        function(image, float(factor)) for image, factor in zip(images, FACTORS, strict=True)
    ]
    assert_close(actual, expected, max_difference)
    assert torch.equal(actual[4], images[4].float())  # a factor of 1 is exact


def test_blends_of_different_kinds_in_one_batch(images: Tensor) -> None:
    kinds = np.array([0, 1, 2, 0, 1, 2, 0, 1])
    actual = color.adjust_brightness_contrast_saturation(images.float(), FACTORS, kinds)
    for index, kind in enumerate(kinds):
        alone = color.adjust_brightness_contrast_saturation(
            images[index : index + 1].float(), FACTORS[[index]], np.array([kind])
        )
        assert torch.equal(actual[index], alone[0])


def test_hue_equals_torchvision(images: Tensor) -> None:
    shifts = np.array([-0.5, -0.31, -0.05, 0.0, 0.01, 0.2, 0.37, 0.5])
    actual = color.adjust_hue(images.float(), shifts)
    expected = [
        tv.adjust_hue(image, float(shift)) for image, shift in zip(images, shifts, strict=True)
    ]
    assert_close(actual, expected, 1.0)  # torchvision truncates the result to whole levels
    floats = [
        255 * tv.adjust_hue(image.float() / 255, float(shift))
        for image, shift in zip(images, shifts, strict=True)
    ]
    assert (actual - torch.stack(floats)).abs().max() < 1e-2


def test_jitter_equals_torchvision_in_every_order(images: Tensor) -> None:
    functions = [
        tv.adjust_brightness,
        tv.adjust_contrast,
        tv.adjust_saturation,
        tv.adjust_hue,
    ]
    orders = np.array(list(itertools.permutations(range(4))))
    batch = torch.stack([images[index % 8] for index in range(24)])
    generator = np.random.default_rng(0)
    factors = np.concatenate(
        [generator.uniform(0.6, 1.4, (24, 3)), generator.uniform(-0.1, 0.1, (24, 1))], axis=1
    )
    actual = color.apply_color_jitter(batch.float(), factors, orders)

    def apply_in_order(image: Tensor, order: np.ndarray, factor: np.ndarray) -> Tensor:
        for kind in order:
            image = functions[kind](image, float(factor[kind]))
        return image

    rows = list(zip(batch, orders, factors, strict=True))
    float_results = torch.stack(
        [255 * apply_in_order(image.float() / 255, *arguments) for image, *arguments in rows]
    )
    assert (actual - float_results).abs().max() < 0.02
    # torchvision's uint8 path truncates four times, half a level each: two levels in the mean, and
    # more where a later factor above 1 or a hue shift amplifies an earlier truncation
    uint8_results = torch.stack([apply_in_order(*row) for row in rows]).float()
    assert (actual - uint8_results).abs().mean() < 2
    assert (actual - uint8_results).abs().max() < 6


def test_jitter_draws_have_the_distribution_of_torchvision() -> None:
    num_samples = 3000
    recorded: dict[str, np.ndarray] = {}

    def record(images: Tensor, factors: np.ndarray, order: np.ndarray, _: None) -> Tensor:
        recorded.update(factors=factors, order=order)
        return images

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(color, "apply_color_jitter", record)
        color.color_jitter(
            torch.zeros(num_samples, 3, 1, 1),
            SampleRNG(sample_keys(0, 0, np.arange(num_samples)), 0),
            brightness=0.4,
            contrast=1.5,
            saturation=(0.2, 0.9),
            hue=0.1,
        )
    transform = v2.ColorJitter(0.4, 1.5, (0.2, 0.9), 0.1)
    torch.manual_seed(0)
    params = [transform.make_params([]) for _ in range(num_samples)]
    names = ["brightness_factor", "contrast_factor", "saturation_factor", "hue_factor"]
    for column, name in enumerate(names):
        expected = np.array([float(draw[name]) for draw in params])
        assert stats.ks_2samp(recorded["factors"][:, column], expected).pvalue > 1e-3
    codes = recorded["order"] @ np.array([64, 16, 4, 1])
    counts = np.unique(codes, return_counts=True)[1]
    assert len(counts) == 24
    assert stats.chisquare(counts).pvalue > 1e-3


def test_jitter_of_zero_changes_nothing(images: Tensor) -> None:
    rng = SampleRNG(sample_keys(0, 0, np.arange(8)), 0)
    no_jitter = {"brightness": 0.0, "contrast": 0.0, "saturation": 0.0, "hue": 0.0}
    assert torch.equal(color.color_jitter(images.float(), rng, **no_jitter), images.float())


def test_equalize_and_posterize_accept_values_between_levels(images: Tensor) -> None:
    between, bits = images.float() + 0.3, np.full(8, 4.0)
    assert torch.equal(color.equalize(between), color.equalize(images.float()))
    assert torch.equal(color.posterize(between, bits), color.posterize(images.float(), bits))


def test_grayscale_equals_torchvision(images: Tensor) -> None:
    is_gray = np.arange(8) % 2 == 0
    actual = color.grayscale(images.float(), is_gray)
    expected = [
        tv.rgb_to_grayscale(image, 3) if gray else image
        for image, gray in zip(images, is_gray, strict=True)
    ]
    assert_close(actual, expected, 1.0)
    assert torch.equal(actual[1::2], images[1::2].float())
