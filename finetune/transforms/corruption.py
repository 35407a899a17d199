"""Corruptions of test images: noise, blur, JPEG and contrast, each with five severities.

Images up to 64 x 64 pixels use the strengths of CIFAR-10-C, larger images those of ImageNet-C. Each
image is corrupted separately, so its result does not depend on the batch.

Source: Hendrycks and Dietterich, Benchmarking Neural Network Robustness to Common Corruptions and
Perturbations, 2019. Differences from that paper's code: blur pads the image by reflection, and only
JPEG rounds pixel values to integers.
"""

# B batch, H W pixels

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from finetune.transforms.blur import blur_image
from finetune.transforms.sample_rng import SampleKeys, to_device

__all__ = ["corrupt", "corruption_strength"]

_MAX_SMALL_SIDE = 64  # pixels per side
# strengths for severities 1 to 5: small images (CIFAR-10-C), then larger images (ImageNet-C)
_STRENGTHS = {
    "noise": ((0.04, 0.06, 0.08, 0.09, 0.10), (0.08, 0.12, 0.18, 0.26, 0.38)),
    "blur": ((0.4, 0.6, 0.7, 0.8, 1.0), (1.0, 2.0, 3.0, 4.0, 6.0)),
    "jpeg": ((80, 65, 58, 50, 40), (25, 18, 15, 10, 7)),
    "contrast": ((0.75, 0.5, 0.4, 0.3, 0.15), (0.4, 0.3, 0.2, 0.1, 0.05)),
}


def corruption_strength(kind: str, severity: int, size: tuple[int, int]) -> float:
    """Return the strength of a corruption for images of a given size (height, width).

    Returns: for noise, the standard deviation for pixel values from 0 to 1; for blur, the standard
        deviation in pixels; for jpeg, the quality; for contrast, the fraction of contrast that
        remains.
    """
    return _STRENGTHS[kind][max(size) > _MAX_SMALL_SIDE][severity - 1]


def corrupt(
    images_B3HW: Tensor,
    keys: SampleKeys,
    *,
    kind: str,
    severity: int,
    sizes: npt.NDArray[np.int64] | None = None,
) -> Tensor:
    """Corrupt each image in place.

    Args:
        images_B3HW: float32 pixels from 0 to 255.
        keys: (B,) sample keys. The noise is seeded by the key alone, so it does not depend on the
            other operations of the transform spec.
        kind, severity: arguments of `corrupt` in finetune.transforms.operations.
        sizes: (B, 2) image sizes if the canvas is shared; see finetune.transforms.color.
    """
    for row, canvas_3HW in enumerate(images_B3HW):
        height, width = canvas_3HW.shape[1:] if sizes is None else sizes[row].tolist()
        image_3HW = canvas_3HW[:, :height, :width].contiguous()
        strength = corruption_strength(kind, severity, (height, width))
        if kind == "noise":
            corrupted_3HW = _add_gaussian_noise(image_3HW, strength, int(keys[row]))
        elif kind == "blur":
            corrupted_3HW = blur_image(image_3HW, strength)
        elif kind == "jpeg":
            corrupted_3HW = _jpeg_round_trip(image_3HW, int(strength))
        else:
            mean = image_3HW.mean(2, keepdim=True).mean(1, keepdim=True)  # per channel
            corrupted_3HW = mean.lerp(image_3HW, strength)
        canvas_3HW[:, :height, :width] = corrupted_3HW
    return images_B3HW


def _add_gaussian_noise(image_3HW: Tensor, std: float, seed: int) -> Tensor:
    """Add Gaussian noise, drawn on the CPU so that it is the same on every device."""
    generator = np.random.Generator(np.random.PCG64(seed))
    noise = generator.standard_normal(tuple(image_3HW.shape), dtype=np.float32)
    return torch.add(image_3HW, to_device(noise, image_3HW.device), alpha=255 * std).clamp_(0, 255)


def _jpeg_round_trip(image_3HW: Tensor, quality: int) -> Tensor:
    """Round to integers, then encode and decode as JPEG on the CPU with Pillow's defaults."""
    levels_HW3 = image_3HW.round().clamp(0, 255).byte().permute(1, 2, 0).cpu().numpy()
    encoded = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(levels_HW3)).save(encoded, "JPEG", quality=quality)
    decoded_HW3 = np.array(Image.open(encoded))
    return to_device(decoded_HW3, image_3HW.device).permute(2, 0, 1)
