from __future__ import annotations

import numpy as np
import PIL.Image
import pytest
import torch
from test_geometry import synthetic_photo
from torch import Tensor
from torchvision.transforms.v2 import functional as tv

from finetune.transforms.ragged import RaggedBatch, resample_ragged
from finetune.transforms.resample import AxisTransform, filter_weights, resample, select_pixels

# the last one is split into bands
SIZES = [
    ((32, 32), (224, 224)),
    ((100, 75), (30, 40)),
    ((37, 53), (64, 20)),
    ((32, 32), (48, 33)),
    ((300, 90), (50, 100)),
]


def apply(images: Tensor, rows: AxisTransform, columns: AxisTransform) -> Tensor:
    """Apply both axes to images (B, 3, H, W) of one size."""
    return resample(select_pixels(images, rows, columns).float(), rows, columns)


def resize(image: Tensor, size: tuple[int, int], interpolation: str) -> Tensor:
    rows, columns = AxisTransform(image.shape[1]), AxisTransform(image.shape[2])
    rows.resize(size[0], interpolation)
    columns.resize(size[1], interpolation)
    return apply(image[None], rows, columns)[0]


def resize_with_pillow(image: Tensor, size: tuple[int, int], interpolation: str) -> Tensor:
    """Return an image of shape (h, w, 3)."""
    pil_image = PIL.Image.fromarray(image.permute(1, 2, 0).numpy())
    resampling = PIL.Image.Resampling[interpolation.upper()]
    return torch.from_numpy(np.array(pil_image.resize((size[1], size[0]), resampling)))


@pytest.mark.parametrize("size,target", SIZES)
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos"])
def test_resize_equals_pillow(
    size: tuple[int, int], target: tuple[int, int], interpolation: str
) -> None:
    image = synthetic_photo(*size) // 2 + 60  # no value can overshoot 0 or 255
    actual = resize(image, target, interpolation)
    expected = resize_with_pillow(image, target, interpolation)
    difference = (actual.permute(1, 2, 0) - expected).abs()
    # Pillow rounds to whole levels after each of its two passes
    largest = 0.001 if interpolation == "nearest" else 1.25
    assert difference.mean() <= min(largest, 0.5)
    assert difference.max() <= largest


@pytest.mark.parametrize("interpolation", ["bicubic", "lanczos"])
def test_resize_next_to_black_and_white_is_close_to_pillow(interpolation: str) -> None:
    # Pillow clips overshoots also between its passes, we only at the end: the largest difference
    # is next to pixels of 0 and 255, and this image has many of them
    image = synthetic_photo(32, 32)
    assert ((image == 0) | (image == 255)).float().mean() > 0.02
    actual = resize(image, (224, 224), interpolation).clamp(0, 255)
    expected = resize_with_pillow(image, (224, 224), interpolation)
    difference = (actual.permute(1, 2, 0) - expected).abs()
    assert difference.mean() <= 0.5
    assert difference.max() <= 20


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size,target", SIZES)
def test_resize_of_floats_equals_torchvision(
    size: tuple[int, int], target: tuple[int, int], interpolation: str
) -> None:
    image = synthetic_photo(*size)
    mode = tv.InterpolationMode(interpolation)
    expected = tv.resize(image.float(), list(target), mode, antialias=True)
    difference = (resize(image, target, interpolation) - expected).abs()
    assert difference.max() < 2e-3  # of 255: rounding of float32 weights only


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos"])
def test_resize_of_a_window_equals_crop_then_resize(interpolation: str) -> None:
    images = torch.stack([synthetic_photo(40, 60, seed) for seed in range(3)])
    tops, lefts = np.array([5, 0, 39]), np.array([7, 20, 0])
    heights, widths = np.array([30, 40, 1]), np.array([11, 40, 60])
    rows, columns = AxisTransform(40), AxisTransform(60)
    rows.resize(24, interpolation, starts=tops, lengths=heights)
    columns.resize(24, interpolation, starts=lefts, lengths=widths)
    actual = apply(images, rows, columns)
    for row, (top, left, height, width) in enumerate(
        zip(tops, lefts, heights, widths, strict=True)
    ):
        window = images[row, :, top : top + height, left : left + width].clone()
        expected = resize(window, (24, 24), interpolation)
        torch.testing.assert_close(actual[row], expected, rtol=0, atol=1e-3)


def test_resize_to_the_same_size_changes_nothing() -> None:
    image = synthetic_photo(32, 20)
    assert torch.equal(resize(image, (32, 20), "lanczos"), image.float())


def pad_crop_and_flip(rows: AxisTransform, columns: AxisTransform, length: int) -> None:
    """Crop rows at -2 and columns at 3, after a flip of the second image's columns."""
    rows.crop(np.array([0, 0]), np.broadcast_to(length, np.shape(rows.length)), padding=2)
    columns.flip(np.array([False, True]))
    columns.crop(np.array([3, 3]), columns.length - 4)


@pytest.mark.parametrize("is_ragged", [False, True])
def test_pads_crops_and_flips_copy_pixels(is_ragged: bool) -> None:
    images = torch.stack([synthetic_photo(8, 10, 1), synthetic_photo(8, 10, 2)])
    lengths = [np.array([8, 8]), np.array([10, 10])] if is_ragged else [8, 10]
    rows, columns = map(AxisTransform, lengths)
    pad_crop_and_flip(rows, columns, 9)
    if is_ragged:
        actual = resample_ragged(RaggedBatch.from_images(images), rows, columns)
    else:
        actual = apply(images, rows, columns)
    padded = tv.pad(images, [0, 2, 0, 2])[:, :, :9].float()
    assert torch.equal(actual[0], padded[0, :, :, 3:9])
    assert torch.equal(actual[1], padded[1].flip(2)[:, :, 3:9])


@pytest.mark.parametrize("is_ragged", [False, True])
def test_operations_after_a_resize_act_on_its_result(is_ragged: bool) -> None:
    images = torch.stack([synthetic_photo(16, 16, 1), synthetic_photo(16, 16, 2)])
    per_image = np.array([1, 1]) if is_ragged else 1
    rows, columns = AxisTransform(16 * per_image), AxisTransform(16 * per_image)
    for axis in (rows, columns):
        axis.resize(32 * per_image, "bilinear")
    columns.flip(np.array([True, False]))
    columns.crop(np.array([4, 4]), 24 * per_image)
    rows.crop(np.array([0, 0]), 32 * per_image, padding=1)
    rows.resize(16 * per_image, "bilinear")
    columns.resize(24 * per_image, "bilinear")
    if is_ragged:
        actual = resample_ragged(RaggedBatch.from_images(images), rows, columns)
    else:
        actual = apply(images, rows, columns)
    enlarged = tv.resize(images.float(), [32, 32], tv.InterpolationMode.BILINEAR, antialias=True)
    enlarged[0] = enlarged[0].flip(2)
    enlarged = tv.pad(enlarged, [0, 1, 0, 0])[:, :, :32, 4:28]
    expected = tv.resize(enlarged, [16, 24], tv.InterpolationMode.BILINEAR, antialias=True)
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-3)


def test_filters_have_the_support_of_pillow() -> None:
    radii = {"bilinear": 1, "bicubic": 2, "lanczos": 3}
    for interpolation, radius in radii.items():
        x = torch.tensor([0.0, radius - 0.3, radius + 1e-6])
        weights = filter_weights(x, interpolation)
        assert weights[0] == pytest.approx(1, abs=1e-6)
        assert weights[1] != 0
        assert weights[2] == 0
