"""Corruptions of test images: noise, blur, JPEG and contrast, each of five severities.

The strengths are those of the benchmarks: of CIFAR-10-C for images of at most 64 pixels a side, of
ImageNet-C for larger ones. Each image is corrupted alone, so it is corrupted alike in every batch.

Source: Hendrycks and Dietterich, Benchmarking Neural Network Robustness to Common Corruptions and
Perturbations, 2019. Unlike there, blur mirrors the image at its borders, and only JPEG rounds to
whole levels.
"""

# B batch, H W pixels

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from finetune.transforms.random import Keys, on_device

__all__ = ["corrupt", "strength_of"]

_SMALL = 64  # pixels a side
# of each kind, by severity: the benchmark for small images, and the one for larger ones
_STRENGTHS = {
    "noise": ((0.04, 0.06, 0.08, 0.09, 0.10), (0.08, 0.12, 0.18, 0.26, 0.38)),
    "blur": ((0.4, 0.6, 0.7, 0.8, 1.0), (1.0, 2.0, 3.0, 4.0, 6.0)),
    "jpeg": ((80, 65, 58, 50, 40), (25, 18, 15, 10, 7)),
    "contrast": ((0.75, 0.5, 0.4, 0.3, 0.15), (0.4, 0.3, 0.2, 0.1, 0.05)),
}
_REACH = 4  # standard deviations of a Gaussian to each side


def strength_of(kind: str, severity: int, size: tuple[int, int]) -> float:
    """Return the strength of a corruption for images of a size (height, width).

    Returns: of noise the standard deviation, for values from 0 to 1; of blur the standard deviation
        in pixels; of jpeg the quality; of contrast the share that is left.
    """
    return _STRENGTHS[kind][max(size) > _SMALL][severity - 1]


def corrupt(
    images_B3HW: Tensor,
    keys: Keys,
    *,
    kind: str,
    severity: int,
    sizes: npt.NDArray[np.int64] | None = None,
) -> Tensor:
    """Corrupt each image; in place.

    Args:
        images_B3HW: float32, from 0 to 255.
        keys: (B,) of the images, from which noise is drawn, alike in every sentence.
        kind, severity: see `finetune.transforms.operations`.
        sizes: see the head of `finetune.transforms.color`.
    """
    for row, canvas_3HW in enumerate(images_B3HW):
        height, width = canvas_3HW.shape[1:] if sizes is None else sizes[row].tolist()
        image_3HW = canvas_3HW[:, :height, :width].contiguous()
        strength = strength_of(kind, severity, (height, width))
        if kind == "noise":
            corrupted_3HW = _noisy(image_3HW, strength, int(keys[row]))
        elif kind == "blur":
            corrupted_3HW = _blurred(image_3HW, strength)
        elif kind == "jpeg":
            corrupted_3HW = _compressed(image_3HW, int(strength))
        else:
            mean = image_3HW.mean(2, keepdim=True).mean(1, keepdim=True)  # of each channel
            corrupted_3HW = mean.lerp(image_3HW, strength)
        canvas_3HW[:, :height, :width] = corrupted_3HW
    return images_B3HW


def _noisy(image_3HW: Tensor, std: float, seed: int) -> Tensor:
    """Add Gaussian noise, drawn on the host: it is the same on every device."""
    generator = np.random.Generator(np.random.PCG64(seed))
    noise = generator.standard_normal(tuple(image_3HW.shape), dtype=np.float32)
    return torch.add(image_3HW, on_device(noise, image_3HW.device), alpha=255 * std).clamp_(0, 255)


def _blurred(image_3HW: Tensor, std: float) -> Tensor:
    from torchvision.transforms.v2.functional import gaussian_blur  # slow to import

    reach = int(_REACH * std + 0.5)
    height, width = (2 * min(reach, side - 1) + 1 for side in image_3HW.shape[1:])
    for kernel_size in ([width, 1], [1, height]):  # one after the other costs less than both
        image_3HW = gaussian_blur(image_3HW, kernel_size=kernel_size, sigma=[std, std])
    return image_3HW


def _compressed(image_3HW: Tensor, quality: int) -> Tensor:
    """Round to whole levels, and encode and decode on the host, with Pillow's settings."""
    levels_HW3 = image_3HW.round().clamp(0, 255).byte().permute(1, 2, 0).cpu().numpy()
    encoded = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(levels_HW3)).save(encoded, "JPEG", quality=quality)
    decoded_HW3 = np.array(Image.open(encoded))
    return on_device(decoded_HW3, image_3HW.device).permute(2, 0, 1)
