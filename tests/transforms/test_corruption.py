"""Corruptions: parity with libraries and formulas, strengths, random keys, and errors."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refused
from scipy.ndimage import gaussian_filter

from finetune.transforms.corruption import corruption_strength
from finetune.transforms.eval_transforms import add_corruption
from finetune.transforms.execution_plan import plan_execution
from finetune.transforms.operations import CORRUPTIONS, SEVERITIES
from finetune.transforms.pipeline import Pipeline, sample_keys
from finetune.transforms.spec_parser import parse_transform_spec

SMALL, LARGE = (32, 24), (96, 70)


def synthetic_photos(count: int, size: tuple[int, int]) -> torch.Tensor:
    """Return smooth random images, uint8 (B, 3, H, W)."""
    generator = np.random.default_rng(0)
    small = generator.integers(0, 256, (count, 6, 6, 3), dtype=np.uint8)
    large = [
        Image.fromarray(pixels).resize(size[::-1], Image.Resampling.BICUBIC) for pixels in small
    ]
    return torch.from_numpy(np.stack(large)).permute(0, 3, 1, 2).contiguous()


def corrupt(images, kind: str, severity: int, *, first: int = 0, size=None) -> torch.Tensor:
    """Return corrupted pixels from 0 to 255; `first` is the split index of the first image."""
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
def test_blur_equals_scipy(severity: int, size: tuple[int, int]) -> None:
    images = synthetic_photos(2, size)
    std = corruption_strength("blur", severity, size)
    # truncate the Gaussian to sides that are shorter than its radius
    radius = [min(int(4 * std + 0.5), side - 1) for side in size]
    expected = gaussian_filter(
        images.numpy().astype(np.float64), std, mode="mirror", axes=(2, 3), radius=radius
    )
    assert np.abs(expected - images.numpy()).max() > 1
    # float32 sums of levels up to 255
    np.testing.assert_allclose(corrupt(images, "blur", severity).numpy(), expected, atol=1e-3)


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("severity", SEVERITIES)
def test_jpeg_equals_pillow(severity: int, size: tuple[int, int]) -> None:
    (image,) = synthetic_photos(1, size)
    file = io.BytesIO()
    pixels = image.permute(1, 2, 0).numpy()
    Image.fromarray(pixels).save(file, "JPEG", quality=corruption_strength("jpeg", severity, size))
    expected = np.asarray(Image.open(file))
    assert (expected != pixels).any()
    (actual,) = corrupt(image[None], "jpeg", severity).permute(0, 2, 3, 1).numpy()
    np.testing.assert_allclose(actual, expected, atol=1e-3)  # rounding of the division by 255


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("severity", SEVERITIES)
def test_contrast_follows_the_formula_per_channel(severity: int, size: tuple[int, int]) -> None:
    images = synthetic_photos(2, size)
    pixels = images.double()
    mean, factor = (
        pixels.mean((2, 3), keepdim=True),
        corruption_strength("contrast", severity, size),
    )
    expected = factor * pixels + (1 - factor) * mean
    actual = corrupt(images, "contrast", severity).double()
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_noise_has_its_moments_and_is_clipped(severity: int) -> None:
    gray_images = torch.full((2, 3, 200, 200), 128, dtype=torch.uint8)
    std = 255 * corruption_strength("noise", severity, (200, 200))
    first, second = (corrupt(gray_images, "noise", severity).double() - 128).unbind()
    within = first.abs() < 100  # not clipped to black or white
    # the same clipping for the expected deviation; 120,000 values
    normal = torch.randn(10**6, generator=torch.Generator().manual_seed(0)) * std
    expected = normal[normal.abs() < 100].std()
    assert first[within].std() == pytest.approx(float(expected), rel=0.01)
    assert abs(float(first[within].mean())) < 4 * float(expected) / within.sum().sqrt()
    for noise, other_noise in [(first, second), (first[0], first[1]), (first[0], first[0].T)]:
        pair = torch.stack([noise.flatten(), other_noise.flatten()])
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 0.03
    assert first.min() >= -128
    assert first.max() <= 127


def test_corruptions_are_weaker_for_small_images() -> None:
    for kind in CORRUPTIONS:
        strengths_small, strengths_large = (
            [corruption_strength(kind, severity, size) for severity in SEVERITIES]
            for size in ((64, 64), (64, 65))
        )
        is_decreasing = kind in ("jpeg", "contrast")  # quality and remaining contrast decrease
        for strengths in (strengths_small, strengths_large):
            assert strengths == sorted(set(strengths), reverse=is_decreasing)
        is_weaker = [
            a > b if is_decreasing else a < b
            for a, b in zip(strengths_small, strengths_large, strict=True)
        ]
        assert all(is_weaker), kind


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_corruption_does_not_depend_on_the_batch(kind: str) -> None:
    images = synthetic_photos(7, (33, 29))
    batched = corrupt(images, kind, 3)
    single = [
        corrupt(images[index : index + 1], kind, 3, first=index) for index in range(len(images))
    ]
    assert torch.equal(batched, torch.cat(single))
    # several sizes: some images are reduced before, some enlarged after
    sizes = ((50, 21), (33, 29), (20, 21), (33, 29), (90, 95), (10, 40), (6, 9))
    images_of_several_sizes = [synthetic_photos(1, size)[0] for size in sizes]
    mixed_batch = corrupt(images_of_several_sizes, kind, 3, size=(33, 29))
    for position, image in enumerate(images_of_several_sizes):
        alone = corrupt(image[None], kind, 3, first=position, size=(33, 29))
        torch.testing.assert_close(mixed_batch[position : position + 1], alone, rtol=0, atol=1e-3)


def test_noise_depends_on_the_index_of_the_image() -> None:
    gray_image = torch.full((1, 3, 8, 8), 128, dtype=torch.uint8)
    assert not torch.equal(
        corrupt(gray_image, "noise", 1), corrupt(gray_image, "noise", 1, first=1)
    )
    settings = {"image_size": (8, 8), "mean": (0, 0, 0), "std": (1, 1, 1), "train": False}
    pipeline = Pipeline("corrupt('noise', 1)", **settings)
    noisy = pipeline(gray_image, keys=sample_keys(0, 0, [5]))
    assert torch.equal(noisy * 255, corrupt(gray_image, "noise", 1, first=5)), (
        "for another transform spec"
    )
    with pytest.raises(AssertionError, match="keys"):
        pipeline(gray_image)


def test_corruption_is_appended_and_runs_before_an_enlargement() -> None:
    spec = add_corruption("resize | normalise", "noise", 1)
    assert spec == "resize | corrupt('noise', 1)"
    for size, order in [((32, 32), [[1], [0]]), ((256, 256), [[0], [1]])]:
        calls = parse_transform_spec(spec, train=False)
        steps = plan_execution(calls, size, (64, 64), spec)
        assert [step.positions for step in steps] == order


@pytest.mark.parametrize(
    "text, code, expected_text",
    [
        ("corrupt('noise', 6)", "wrong_value", "from 1 to 5"),
        ("corrupt('nose', 3)", "wrong_value", "'noise'"),
        ("corrupt('noise')", "missing_key", "severity"),
        ("corrupt", "missing_key", "corrupt('noise', 3)"),
        ("flip | corrupt('noise', 3)", "conflict", "flip"),
    ],
)
def test_rejects_invalid_corruptions(text: str, code: str, expected_text: str) -> None:
    with refused(f"recipe.{code}", expected_text):
        parse_transform_spec(text, train=False)


def test_rejects_corruption_in_training() -> None:
    with refused("recipe.conflict", "corrupt", "finetune eval --corrupt"):
        parse_transform_spec("flip | corrupt('noise', 3)")
