from __future__ import annotations

import math

import numpy as np
import PIL.Image
import pytest
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as tv

from finetune.transforms import geometry as geometry_module
from finetune.transforms.geometry import (
    AxisTransform,
    apply_matrices,
    apply_selection,
    filter_weights,
    resize_matrix,
    rotation_matrices,
    warp_affine,
)

# H W source pixels, h w target pixels
CPU = torch.device("cpu")
SIZES = [((32, 32), (224, 224)), ((100, 75), (30, 40)), ((37, 53), (64, 20)), ((32, 32), (48, 33))]


def synthetic_photo(height: int, width: int, seed: int = 0) -> Tensor:
    """Return a uint8 (3, H, W) image with smooth areas, edges and noise."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(1, 3, 5, 5, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear")[0]
    smooth[:, : height // 3, : width // 3] = torch.rand(3, 1, 1, generator=generator)
    noise = 0.1 * torch.randn(3, height, width, generator=generator)
    return ((smooth + noise).clamp(0, 1) * 255).round().to(torch.uint8)


def resize(image: Tensor, size: tuple[int, int], interpolation: str) -> Tensor:
    rows, columns = AxisTransform(image.shape[1], CPU), AxisTransform(image.shape[2], CPU)
    rows.resize(size[0], interpolation)
    columns.resize(size[1], interpolation)
    return apply_matrices(image[None].float(), rows, columns)[0]


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


def test_resize_matrix_reads_nothing_outside_its_window() -> None:
    starts, lengths = np.array([0, 3, 10]), np.array([16, 5, 1])
    for interpolation in ("nearest", "bilinear", "bicubic", "lanczos"):
        matrix = resize_matrix(
            starts, lengths, source=16, target=9, interpolation=interpolation, device=CPU
        )
        torch.testing.assert_close(matrix.sum(2), torch.ones(3, 9))
        assert matrix[1, :, :3].abs().sum() == 0
        assert matrix[1, :, 8:].abs().sum() == 0
        assert matrix[1, :, 3:8].abs().sum() > 0
        assert (matrix[2, :, 10] == 1).all()


def test_resize_of_a_window_equals_crop_then_resize() -> None:
    image = synthetic_photo(40, 60)
    rows, columns = AxisTransform(40, CPU), AxisTransform(60, CPU)
    rows.resize(24, "bicubic", starts=np.array([5]), lengths=np.array([30]))
    columns.resize(24, "bicubic", starts=np.array([7]), lengths=np.array([11]))
    actual = apply_matrices(image[None].float(), rows, columns)[0]
    expected = resize(image[:, 5:35, 7:18].clone(), (24, 24), "bicubic")
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-3)


def test_resize_to_the_same_size_does_nothing() -> None:
    axis = AxisTransform(32, CPU)
    axis.resize(32, "bicubic")
    assert axis.matrix is None
    assert axis.index is None


def test_select_pads_flips_and_crops_exactly() -> None:
    images = torch.stack([synthetic_photo(8, 10, 1), synthetic_photo(8, 10, 2)])
    rows, columns = AxisTransform(8, CPU), AxisTransform(10, CPU)
    pixels = np.arange(-2, 10)[None]
    rows.select_pixels(np.where((pixels >= 0) & (pixels < 8), pixels, -1))
    columns.flip(np.array([False, True]))
    columns.select_pixels(np.array([[0, 1, 2]]))
    actual = apply_selection(images, rows, columns)
    padded = tv.pad(images, [0, 2, 0, 2])
    assert torch.equal(actual[0], padded[0, :, :, :3])
    assert torch.equal(actual[1], padded[1].flip(2)[:, :, :3])


def test_operations_after_a_resize_act_on_its_result() -> None:
    images = torch.stack([synthetic_photo(16, 16, 1), synthetic_photo(16, 16, 2)]).float()
    rows, columns = AxisTransform(16, CPU), AxisTransform(16, CPU)
    for axis in (rows, columns):
        axis.resize(32, "bilinear")
    columns.flip(np.array([True, False]))
    columns.select_pixels(np.arange(4, 28)[None])
    rows.select_pixels(np.arange(-1, 31)[None])
    rows.resize(16, "bilinear")
    assert rows.has_zero_rows
    assert not columns.has_zero_rows
    actual = apply_matrices(images, rows, columns)
    enlarged = tv.resize(images, [32, 32], tv.InterpolationMode.BILINEAR, antialias=True)
    enlarged[0] = enlarged[0].flip(2)
    enlarged = tv.pad(enlarged, [0, 1, 0, 0])[:, :, :32, 4:28]
    expected = tv.resize(enlarged, [16, 24], tv.InterpolationMode.BILINEAR, antialias=True)
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-3)


def test_banded_product_equals_the_full_product(monkeypatch: pytest.MonkeyPatch) -> None:
    image = synthetic_photo(300, 90)
    banded = resize(image, (50, 100), "bicubic")
    monkeypatch.setattr(geometry_module, "_MIN_BANDED_SIDE", 10_000)
    full = resize(image, (50, 100), "bicubic")
    torch.testing.assert_close(banded, full, rtol=0, atol=1e-3)


@pytest.mark.parametrize("size", [(32, 32), (31, 48)])
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
def test_rotation_equals_torchvision(size: tuple[int, int], interpolation: str) -> None:
    images = torch.stack([synthetic_photo(*size, seed) for seed in range(8)])
    angles = np.array([-179.0, -45.0, -14.9, -0.01, 3.3, 10.0, 15.0, 121.0])
    actual = warp_affine(images.float(), rotation_matrices(angles), interpolation)
    mode = tv.InterpolationMode(interpolation)
    for image, angle, rotated in zip(images, angles, actual, strict=True):
        expected = tv.rotate(image, float(angle), mode).float()
        difference = (rotated - expected).abs()
        # nearest: identical pixels; bilinear: torchvision rounds to whole levels at the end
        assert difference.max() <= (0 if interpolation == "nearest" else 0.51)


@pytest.mark.parametrize("angle", [0.0, 90.0, 180.0, -90.0])
def test_rotation_by_right_angles_copies_pixels(angle: float) -> None:
    image = synthetic_photo(16, 16)
    actual = warp_affine(image[None].float(), rotation_matrices(np.array([angle])), "nearest")[0]
    assert torch.equal(actual, torch.rot90(image, round(angle / 90) % 4, (1, 2)).float())


def test_filters_have_the_support_of_pillow() -> None:
    radii = {"bilinear": 1, "bicubic": 2, "lanczos": 3}
    for interpolation, radius in radii.items():
        x = torch.tensor([0.0, radius - 0.3, radius + 1e-6])
        weights = filter_weights(x, interpolation)
        assert math.isclose(weights[0], 1.0, abs_tol=1e-6)
        assert weights[1] != 0
        assert weights[2] == 0
