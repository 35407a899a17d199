from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as tv

from finetune.transforms.geometry import rotation_matrices, warp_affine


def synthetic_photo(height: int, width: int, seed: int = 0) -> Tensor:
    """Return a uint8 (3, H, W) image with smooth areas, edges and noise."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(1, 3, 5, 5, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear")[0]
    smooth[:, : height // 3, : width // 3] = torch.rand(3, 1, 1, generator=generator)
    noise = 0.1 * torch.randn(3, height, width, generator=generator)
    return ((smooth + noise).clamp(0, 1) * 255).round().to(torch.uint8)


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
