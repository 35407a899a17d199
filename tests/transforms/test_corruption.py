"""Corruptions: parity with the libraries and formulas, strengths, keys, and what is refused."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refused
from scipy.ndimage import gaussian_filter

from finetune.transforms.corruption import strength_of
from finetune.transforms.evaluation import corrupted
from finetune.transforms.grammar import parse
from finetune.transforms.operations import CORRUPTIONS, SEVERITIES
from finetune.transforms.pipeline import Pipeline, sample_keys

SMALL, LARGE = (32, 24), (96, 70)


def photos(count: int, size: tuple[int, int]) -> torch.Tensor:
    """Something between a photograph and a gradient, uint8 (B, 3, H, W)."""
    generator = np.random.default_rng(0)
    small = generator.integers(0, 256, (count, 6, 6, 3), dtype=np.uint8)
    large = [Image.fromarray(one).resize(size[::-1], Image.Resampling.BICUBIC) for one in small]
    return torch.from_numpy(np.stack(large)).permute(0, 3, 1, 2).contiguous()


def levels(images, kind: str, severity: int, *, first: int = 0, size=None) -> torch.Tensor:
    """The pipeline's pixels, from 0 to 255; `first` is the first image's place in the split."""
    pipeline = Pipeline(
        f"resize | corrupt('{kind}', {severity})",
        image_size=size or tuple(images[0].shape[1:]),
        mean=(0, 0, 0),
        std=(1, 1, 1),
        train=False,
    )
    return pipeline(images, keys=sample_keys(0, 0, range(first, first + len(images)))) * 255


@pytest.mark.parametrize("size", [SMALL, LARGE, (3, 40)])
@pytest.mark.parametrize("severity", SEVERITIES)
def test_blur_is_scipys(severity: int, size: tuple[int, int]) -> None:
    images = photos(2, size)
    std = strength_of("blur", severity, size)
    # of a side that the Gaussian does not fit into, it is cut off
    reach = [min(int(4 * std + 0.5), side - 1) for side in size]
    expected = gaussian_filter(
        images.numpy().astype(np.float64), std, mode="mirror", axes=(2, 3), radius=reach
    )
    assert np.abs(expected - images.numpy()).max() > 1
    # float32 sums of levels up to 255
    np.testing.assert_allclose(levels(images, "blur", severity).numpy(), expected, atol=1e-3)


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("severity", SEVERITIES)
def test_jpeg_is_pillows_to_the_level(severity: int, size: tuple[int, int]) -> None:
    (image,) = photos(1, size)
    file = io.BytesIO()
    pixels = image.permute(1, 2, 0).numpy()
    Image.fromarray(pixels).save(file, "JPEG", quality=strength_of("jpeg", severity, size))
    expected = np.asarray(Image.open(file))
    assert (expected != pixels).any()
    (found,) = levels(image[None], "jpeg", severity).permute(0, 2, 3, 1).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-3)  # of the division by 255


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("severity", SEVERITIES)
def test_contrast_is_the_formula_of_each_channel(severity: int, size: tuple[int, int]) -> None:
    images = photos(2, size)
    exact = images.double()
    mean, share = exact.mean((2, 3), keepdim=True), strength_of("contrast", severity, size)
    expected = share * exact + (1 - share) * mean
    found = levels(images, "contrast", severity).double()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_noise_has_its_moments_and_is_cut_off_at_black_and_white(severity: int) -> None:
    grey = torch.full((2, 3, 200, 200), 128, dtype=torch.uint8)
    std = 255 * strength_of("noise", severity, (200, 200))
    first, second = (levels(grey, "noise", severity).double() - 128).unbind()
    within = first.abs() < 100  # neither black nor white
    # as many standard deviations are not cut off; 120,000 values
    normal = torch.randn(10**6, generator=torch.Generator().manual_seed(0)) * std
    expected = normal[normal.abs() < 100].std()
    assert first[within].std() == pytest.approx(float(expected), rel=0.01)
    assert abs(float(first[within].mean())) < 4 * float(expected) / within.sum().sqrt()
    for one, other in [(first, second), (first[0], first[1]), (first[0], first[0].T)]:
        together = torch.stack([one.flatten(), other.flatten()])
        assert abs(float(torch.corrcoef(together)[0, 1])) < 0.03
    assert first.min() >= -128
    assert first.max() <= 127


def test_small_images_have_the_strengths_of_small_images() -> None:
    for kind in CORRUPTIONS:
        of_small, of_large = (
            [strength_of(kind, severity, size) for severity in SEVERITIES]
            for size in ((64, 64), (64, 65))
        )
        less = kind in ("jpeg", "contrast")  # quality and what is left become less
        for strengths in (of_small, of_large):
            assert strengths == sorted(set(strengths), reverse=less)
        weaker = [a > b if less else a < b for a, b in zip(of_small, of_large, strict=True)]
        assert all(weaker), kind


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_an_image_is_corrupted_alike_in_every_batch(kind: str) -> None:
    images = photos(7, (33, 29))
    together = levels(images, kind, 3)
    apart = [levels(images[i : i + 1], kind, 3, first=i) for i in range(len(images))]
    assert torch.equal(together, torch.cat(apart))
    # of several sizes: some are reduced before, some enlarged behind
    sizes = ((50, 21), (33, 29), (20, 21), (33, 29), (90, 95), (10, 40), (6, 9))
    several = [photos(1, size)[0] for size in sizes]
    mixed = levels(several, kind, 3, size=(33, 29))
    for place, image in enumerate(several):
        alone = levels(image[None], kind, 3, first=place, size=(33, 29))
        torch.testing.assert_close(mixed[place : place + 1], alone, rtol=0, atol=1e-3)


def test_noise_is_of_the_images_own_place() -> None:
    grey = torch.full((1, 3, 8, 8), 128, dtype=torch.uint8)
    assert not torch.equal(levels(grey, "noise", 1), levels(grey, "noise", 1, first=1))
    settings = {"image_size": (8, 8), "mean": (0, 0, 0), "std": (1, 1, 1), "train": False}
    pipeline = Pipeline("corrupt('noise', 1)", **settings)
    found = pipeline(grey, keys=sample_keys(0, 0, [5]))
    assert torch.equal(found * 255, levels(grey, "noise", 1, first=5)), "of another sentence"
    with pytest.raises(AssertionError, match="keys"):
        pipeline(grey)


def test_an_image_that_is_enlarged_is_corrupted_before() -> None:
    pipeline = Pipeline(
        corrupted("resize | normalise", "noise", 1),
        image_size=(64, 64),
        mean=(0, 0, 0),
        std=(1, 1, 1),
        train=False,
    )
    assert pipeline.sentence == "resize | corrupt('noise', 1)"
    assert pipeline.describe((32, 32)).startswith("corrupt: at 32x32")
    assert "corrupt: at 64x64" in pipeline.describe((256, 256))


@pytest.mark.parametrize(
    "text, code, named",
    [
        ("corrupt('noise', 0)", "wrong_value", "severity=0"),
        ("corrupt('noise', 6)", "wrong_value", "from 1 to 5"),
        ("corrupt('noise', 2.5)", "wrong_value", "a whole number"),
        ("corrupt('noise', True)", "wrong_value", "severity=True"),
        ("corrupt('noise', None)", "wrong_value", "severity=None"),
        ("corrupt('nose', 3)", "wrong_value", "'noise'"),
        ("corrupt(None, 3)", "wrong_value", "kind=None"),
        ("corrupt(noise, 3)", "syntax", "noise"),
        ("corrupt('noise')", "missing_key", "severity"),
        ("corrupt", "missing_key", "corrupt('noise', 3)"),
        ("flip | corrupt('noise', 3)", "conflict", "flip"),
    ],
)
def test_wrong_corruptions_are_refused(text: str, code: str, named: str) -> None:
    with refused(f"recipe.{code}", named):
        parse(text, train=False)


def test_training_images_are_not_corrupted() -> None:
    with refused("recipe.conflict", "corrupt", "finetune eval --corrupt"):
        parse("flip | corrupt('noise', 3)")
