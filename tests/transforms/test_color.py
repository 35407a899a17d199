from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats
from test_geometry import photo
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tv

from finetune.transforms import color
from finetune.transforms.random import Draws, sample_keys

# Mean difference to torchvision's uint8 path that is allowed, in levels of 255.
LEVEL = 1.0


@pytest.fixture
def images() -> Tensor:
    """(8, 3, 31, 40) uint8, one of them grey and one of a single colour."""
    stack = torch.stack([photo(31, 40, seed) for seed in range(8)])
    stack[1] = stack[1, :1]
    stack[2] = torch.tensor([10, 200, 90], dtype=torch.uint8).view(3, 1, 1)
    return stack


def compare(ours: Tensor, theirs: list[Tensor], largest: float) -> None:
    """Check the mean and the largest difference in levels."""
    assert len(ours) == len(theirs) > 0
    difference = (ours - torch.stack(theirs).float()).abs()
    assert difference.mean() <= LEVEL
    assert difference.max() <= largest + 1e-3  # float32 against whole levels


FACTORS = np.array([0.0, 0.3, 0.8, 0.95, 1.0, 1.2, 1.7, 3.0])
BLENDS = {
    "brightness": (color.BRIGHTNESS, tv.adjust_brightness, 1.0),
    # torchvision's mean grey is that of truncated greys: half a level less, times |1 - factor|
    "contrast": (color.CONTRAST, tv.adjust_contrast, 2.5),
    # and the pixel's own grey is truncated: up to one level, times |1 - factor|, then truncated
    "saturation": (color.SATURATION, tv.adjust_saturation, 3.0),
}


@pytest.mark.parametrize("name", BLENDS)
def test_blends_are_torchvisions(images: Tensor, name: str) -> None:
    kind, function, largest = BLENDS[name]
    ours = color.blend(images.float(), FACTORS, np.full(8, kind))
    theirs = [function(one, float(f)) for one, f in zip(images, FACTORS, strict=True)]
    compare(ours, theirs, largest)
    assert torch.equal(ours[4], images[4].float())  # a factor of 1 is exact


def test_blends_of_different_kinds_in_one_batch(images: Tensor) -> None:
    kinds = np.array([0, 1, 2, 0, 1, 2, 0, 1])
    ours = color.blend(images.float(), FACTORS, kinds)
    for place, kind in enumerate(kinds):
        alone = color.blend(images[place : place + 1].float(), FACTORS[[place]], np.array([kind]))
        assert torch.equal(ours[place], alone[0])


def test_hue_is_torchvisions(images: Tensor) -> None:
    shifts = np.array([-0.5, -0.31, -0.05, 0.0, 0.01, 0.2, 0.37, 0.5])
    ours = color.shift_hue(images.float(), shifts)
    theirs = [tv.adjust_hue(one, float(h)) for one, h in zip(images, shifts, strict=True)]
    compare(ours, theirs, 1.0)  # torchvision truncates the result to whole levels
    floats = [
        255 * tv.adjust_hue(one.float() / 255, float(h))
        for one, h in zip(images, shifts, strict=True)
    ]
    assert (ours - torch.stack(floats)).abs().max() < 1e-2


def test_jitter_is_torchvisions_in_every_order(images: Tensor) -> None:
    functions = [
        tv.adjust_brightness,
        tv.adjust_contrast,
        tv.adjust_saturation,
        tv.adjust_hue,
    ]
    orders = np.array(list(itertools.permutations(range(4))))
    batch = torch.stack([images[place % 8] for place in range(24)])
    generator = np.random.default_rng(0)
    factors = np.concatenate(
        [generator.uniform(0.6, 1.4, (24, 3)), generator.uniform(-0.1, 0.1, (24, 1))], axis=1
    )
    ours = color.jitter(batch.float(), factors, orders)

    def chain(image: Tensor, order: np.ndarray, factor: np.ndarray) -> Tensor:
        for kind in order:
            image = functions[kind](image, float(factor[kind]))
        return image

    rows = list(zip(batch, orders, factors, strict=True))
    floats = torch.stack([255 * chain(one.float() / 255, *rest) for one, *rest in rows])
    assert (ours - floats).abs().max() < 0.02
    # torchvision's uint8 path truncates four times, half a level down each: two levels in the mean,
    # and more where a later factor above 1 or a turn of hue enlarges what an earlier one cut
    whole = torch.stack([chain(*row) for row in rows]).float()
    assert (ours - whole).abs().mean() < 2
    assert (ours - whole).abs().max() < 6


def test_jitter_draws_are_torchvisions() -> None:
    samples = 3000
    seen: dict[str, np.ndarray] = {}

    def record(images: Tensor, factors: np.ndarray, order: np.ndarray, _: None) -> Tensor:
        seen.update(factors=factors, order=order)
        return images

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(color, "jitter", record)
        color.color_jitter(
            torch.zeros(samples, 3, 1, 1),
            Draws(sample_keys(0, 0, np.arange(samples)), 0),
            brightness=0.4,
            contrast=1.5,
            saturation=(0.2, 0.9),
            hue=0.1,
        )
    transform = v2.ColorJitter(0.4, 1.5, (0.2, 0.9), 0.1)
    torch.manual_seed(0)
    params = [transform.make_params([]) for _ in range(samples)]
    names = ["brightness_factor", "contrast_factor", "saturation_factor", "hue_factor"]
    for column, name in enumerate(names):
        theirs = np.array([float(one[name]) for one in params])
        assert stats.ks_2samp(seen["factors"][:, column], theirs).pvalue > 1e-3
    codes = seen["order"] @ np.array([64, 16, 4, 1])
    counts = np.unique(codes, return_counts=True)[1]
    assert len(counts) == 24
    assert stats.chisquare(counts).pvalue > 1e-3


def test_jitter_leaves_out_what_was_not_asked_for(images: Tensor) -> None:
    draws = Draws(sample_keys(0, 0, np.arange(8)), 0)
    nothing = {"brightness": 0.0, "contrast": 0.0, "saturation": 0.0, "hue": 0.0}
    assert torch.equal(color.color_jitter(images.float(), draws, **nothing), images.float())


def augment_reference(image: Tensor, name: str, magnitude: float) -> Tensor:
    transform = v2.RandAugment()
    return transform._apply_image_or_video_transform(
        image, name, magnitude, interpolation=tv.InterpolationMode.NEAREST, fill={}
    )


# The largest difference in levels and why it stands: blends as above; Sharpness: torchvision
# rounds the smoothed image, times |1 - factor|; AutoContrast: torchvision truncates.
LARGEST = {
    "Brightness": 1.0,
    "Color": 2.0,
    "Contrast": 2.0,
    "Sharpness": 2.0,
    "AutoContrast": 1.0,
}


@pytest.mark.parametrize("magnitude", [0, 9, 17, 30])
@pytest.mark.parametrize("name", color.RAND_AUGMENT)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_rand_augment_operations_are_torchvisions(
    images: Tensor, name: str, magnitude: int, sign: float
) -> None:
    height, width = images.shape[2:]
    values, signed = v2.RandAugment._AUGMENTATION_SPACE[name]
    table = values(31, height, width)
    value = 0.0 if table is None else float(table[magnitude])
    value *= sign if signed else 1.0
    theirs = [augment_reference(one, name, value).float() for one in images]
    ours = color.apply_rand_augment(
        images.float(), name, magnitude / 30, np.full(8, sign), "nearest"
    )
    compare(ours, theirs, LARGEST.get(name, 0.0))


def test_rand_augment_draws_each_operation_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, float]] = []

    def record(
        images: Tensor, name: str, strength: float, signs: np.ndarray, *_: str | None
    ) -> Tensor:
        assert math.isclose(strength, 9 / 30)
        seen.extend((name, sign) for sign in signs)
        return images

    monkeypatch.setattr(color, "apply_rand_augment", record)
    color.rand_augment(
        torch.zeros(3000, 3, 1, 1),
        Draws(sample_keys(0, 0, np.arange(3000)), 0),
        num_ops=2,
        magnitude=9,
        num_magnitude_bins=31,
        interpolation="nearest",
    )
    assert len(seen) == 6000
    counts = np.unique([f"{name}{sign}" for name, sign in seen], return_counts=True)[1]
    assert len(counts) == 28
    assert stats.chisquare(counts).pvalue > 1e-3


def test_equalize_and_posterize_accept_values_between_levels(images: Tensor) -> None:
    between = images.float() + 0.3
    assert torch.equal(color.equalize(between), color.equalize(images.float()))
    assert torch.equal(color.posterize(between, 4), color.posterize(images.float(), 4))


def test_a_wide_spread_gives_no_negative_factor() -> None:
    assert color._around(1.5, 1.0) == (0.0, 2.5)
    assert color._around(0.1, 0.0) == (-0.1, 0.1)
