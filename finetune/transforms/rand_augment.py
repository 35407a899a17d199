"""RandAugment for a batch, with random numbers keyed by sample."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from finetune.transforms.color import (
    BRIGHTNESS,
    CONTRAST,
    SATURATION,
    FloatArray,
    IntArray,
    adjust_brightness_contrast_saturation,
    adjust_sharpness,
    autocontrast,
    equalize,
    posterize,
)
from finetune.transforms.geometry import rotation_matrices, warp_affine
from finetune.transforms.sample_rng import SampleRNG, to_device

__all__ = ["RAND_AUGMENT_OPS", "apply_rand_augment_op", "rand_augment"]


RAND_AUGMENT_OPS = (
    "Identity",
    "ShearX",
    "ShearY",
    "TranslateX",
    "TranslateY",
    "Rotate",
    "Brightness",
    "Color",
    "Contrast",
    "Sharpness",
    "Posterize",
    "Solarize",
    "AutoContrast",
    "Equalize",
)


def rand_augment(
    images_B3HW: Tensor,
    rng: SampleRNG,
    *,
    num_ops: int,
    magnitude: int,
    num_magnitude_bins: int,
    interpolation: str,
    sizes: IntArray | None = None,
) -> Tensor:
    """Apply `num_ops` random operations, drawn from RandAugment's fourteen, to each sample.

    Source: torchvision, transforms.v2.RandAugment.
    """
    strength = magnitude / (num_magnitude_bins - 1)
    for _ in range(num_ops):
        operation_B = rng.integers(np.full(len(rng), len(RAND_AUGMENT_OPS)))
        signs = np.where(rng.bernoulli(0.5), -1.0, 1.0)
        for operation in np.unique(operation_B):
            rows = np.flatnonzero(operation_B == operation)
            index = to_device(rows, images_B3HW.device)
            images_B3HW[index] = apply_rand_augment_op(
                images_B3HW[index],
                RAND_AUGMENT_OPS[operation],
                strength,
                signs[rows],
                interpolation,
                None if sizes is None else sizes[rows],
            )
    return images_B3HW


def apply_rand_augment_op(
    images_B3HW: Tensor,
    name: str,
    relative_magnitude: float,
    signs: FloatArray,
    interpolation: str,
    sizes: IntArray | None = None,
) -> Tensor:
    """Apply one RandAugment operation to all images.

    Args:
        images_B3HW: float32 images; may be overwritten.
        name: one of RAND_AUGMENT_OPS.
        relative_magnitude: magnitude as a fraction of its range, 0 to 1.
        signs: (B,) 1 or -1, the direction, for operations that have one.
        interpolation: nearest or bilinear, for geometric operations.
        sizes: (B, 2) image sizes if the canvas is shared; see finetune.transforms.color.
    """
    if name in ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"):
        image_sizes = np.array([images_B3HW.shape[2:]]) if sizes is None else sizes
        return warp_affine(
            images_B3HW,
            _rand_augment_matrices(name, relative_magnitude, signs, image_sizes),
            interpolation,
            sizes,
        )
    factors = 1 + 0.9 * relative_magnitude * signs
    if name in ("Brightness", "Contrast", "Color"):
        kind = {"Brightness": BRIGHTNESS, "Contrast": CONTRAST, "Color": SATURATION}[name]
        return adjust_brightness_contrast_saturation(
            images_B3HW, factors, np.full(len(signs), kind), sizes
        )
    if name == "Sharpness":
        return adjust_sharpness(images_B3HW, factors, sizes)
    if name == "Posterize":
        return posterize(images_B3HW, round(8 - 4 * relative_magnitude))
    if name == "Solarize":
        is_solarized = images_B3HW >= 255 * (1 - relative_magnitude)
        # a bilinear warp can exceed 255 by rounding, and posterize would turn -1e-5 into -8
        return torch.where(is_solarized, (255 - images_B3HW).clamp_(min=0), images_B3HW)
    if name == "AutoContrast":
        return autocontrast(images_B3HW, sizes)
    return equalize(images_B3HW, sizes) if name == "Equalize" else images_B3HW


def _rand_augment_matrices(
    name: str, relative_magnitude: float, signs: FloatArray, sizes: IntArray
) -> FloatArray:
    """Return target-to-source affine matrices (B, 2, 3), relative to the image center.

    Args:
        sizes: (B, 2) height and width of each image, or (1, 2) if all images have the same size.
    """
    height, width = sizes.T
    if name == "Rotate":
        return rotation_matrices(30 * relative_magnitude * signs)
    maps = np.tile(np.eye(2, 3), (len(signs), 1, 1))
    if name == "ShearX":  # shear around the top left corner, as in torchvision
        maps[:, 0, 1] = 0.3 * relative_magnitude * signs
        maps[:, 0, 2] = maps[:, 0, 1] * height / 2
    elif name == "ShearY":
        maps[:, 1, 0] = 0.3 * relative_magnitude * signs
        maps[:, 1, 2] = maps[:, 1, 0] * width / 2
    else:
        row, length = (0, width) if name == "TranslateX" else (1, height)
        maps[:, row, 2] = -np.trunc(150 / 331 * length * relative_magnitude * signs)
    return maps
