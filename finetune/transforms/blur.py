"""Gaussian blur of single images, and of random samples of a batch."""

# B batch, H W pixels

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from finetune.transforms.sample_rng import SampleRNG

__all__ = ["blur_image", "gaussian_blur"]

_TRUNCATE = 4  # radius of the kernel in standard deviations


def gaussian_blur(
    images_B3HW: Tensor,
    is_blurred: npt.NDArray[np.bool_],
    rng: SampleRNG,
    *,
    sigma: tuple[float, float],
    sizes: npt.NDArray[np.int64] | None = None,
) -> Tensor:
    """Blur some images in place, each with a standard deviation drawn from the range `sigma`.

    Args:
        images_B3HW: float32 images.
        is_blurred: (B,) mask, True for the images to blur.
        sigma: range of the standard deviation in pixels.
        sizes: (B, 2) image sizes if the canvas is shared; see finetune.transforms.color.
    Source: torchvision, transforms.v2.GaussianBlur, with a kernel of four standard deviations.
    """
    stds = rng.uniform(1, *sigma)[:, 0]
    for row in np.flatnonzero(is_blurred).tolist():
        height, width = images_B3HW.shape[2:] if sizes is None else sizes[row].tolist()
        image_3HW = images_B3HW[row, :, :height, :width]
        image_3HW.copy_(blur_image(image_3HW.contiguous(), float(stds[row])))
    return images_B3HW


def blur_image(image_3HW: Tensor, std: float) -> Tensor:
    """Blur an image with a Gaussian kernel, with padding by reflection.

    Args:
        image_3HW: float32 image.
        std: standard deviation in pixels.
    """
    from torchvision.transforms.v2.functional import gaussian_blur  # slow to import

    radius = int(_TRUNCATE * std + 0.5)
    height, width = (2 * min(radius, side - 1) + 1 for side in image_3HW.shape[1:])
    for kernel_size in ([width, 1], [1, height]):  # separable: two 1D convolutions
        image_3HW = gaussian_blur(image_3HW, kernel_size=kernel_size, sigma=[std, std])
    return image_3HW
