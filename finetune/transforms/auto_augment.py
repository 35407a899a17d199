"""RandAugment, TrivialAugment, AutoAugment, AugMix and 3-Augment for a batch, keyed by sample."""

# B batch, b samples with the same operation

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from finetune.transforms.blur import gaussian_blur
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
    grayscale,
    invert,
    posterize,
    solarize,
)
from finetune.transforms.geometry import rotation_matrices, warp_affine
from finetune.transforms.sample_rng import SampleRNG, to_device

__all__ = [
    "AUGMENT_OPS",
    "apply_augment_op",
    "augmix",
    "auto_augment",
    "rand_augment",
    "three_augment",
    "trivial_augment",
]

_GEOMETRIC_OPS = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")
_COLOR_OPS = ("Brightness", "Color", "Contrast", "Sharpness")
_OTHER_OPS = ("Posterize", "Solarize", "AutoContrast", "Equalize")
_RAND_AUGMENT_OPS = ("Identity", *_GEOMETRIC_OPS, *_COLOR_OPS, *_OTHER_OPS)
AUGMENT_OPS = (*_RAND_AUGMENT_OPS, "Invert")
_NO_OP = -1  # in place of an operation's index: apply none
_AUTO_AUGMENT_LEVELS = 10  # levels of a magnitude, from 0
_THREE_AUGMENT_SIGMA = (0.1, 2.0)


@dataclass(frozen=True)
class _Magnitudes:
    """The largest magnitude of each operation of an augmentation.

    Attributes:
        shear: slope.
        translate: fraction of the side, or pixels if above 1.
        rotate: degrees.
        factor: distance of the factor from 1, for brightness, color, contrast and sharpness.
        bits: bits that Posterize keeps at the smallest and at the largest magnitude.
    """

    shear: float
    translate: float
    rotate: float
    factor: float
    bits: tuple[int, int]

    def at(
        self, name: str, strengths: FloatArray, signs: FloatArray, sizes: IntArray
    ) -> FloatArray:
        """Compute the magnitudes of an operation, in the unit of `apply_augment_op`.

        Args:
            name: one of AUGMENT_OPS.
            strengths: (b,) fractions of the largest magnitude, 0 to 1.
            signs: (b,) 1 or -1, for operations with a direction.
            sizes: (b, 2) or (1, 2) heights and widths in pixels.
        """
        if name == "Posterize":
            first, last = self.bits
            return np.rint(first - (first - last) * strengths)
        if name == "Solarize":
            return 1 - strengths
        if name.startswith("Translate"):
            largest: float | FloatArray = self.translate
            if self.translate <= 1:
                side = sizes[:, 1 if name == "TranslateX" else 0].astype(np.float64)
                largest = self.translate * side
        elif name.startswith("Shear"):
            largest = self.shear
        else:
            largest = self.rotate if name == "Rotate" else self.factor
        return largest * strengths * signs


_RAND_AUGMENT = _Magnitudes(0.3, 150 / 331, 30, 0.9, (8, 4))
_TRIVIAL_AUGMENT_WIDE = _Magnitudes(0.99, 32, 135, 0.99, (8, 2))
_AUGMIX = _Magnitudes(0.3, 1 / 3, 30, 0.9, (4, 0))


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
    strengths = np.full(len(rng), magnitude / (num_magnitude_bins - 1))
    for _ in range(num_ops):
        operation_B = rng.integers(len(_RAND_AUGMENT_OPS))
        images_B3HW = _apply_ops(
            images_B3HW, operation_B, strengths, rng, _RAND_AUGMENT, interpolation, sizes
        )
    return images_B3HW


def trivial_augment(
    images_B3HW: Tensor,
    rng: SampleRNG,
    *,
    num_magnitude_bins: int,
    interpolation: str,
    sizes: IntArray | None = None,
) -> Tensor:
    """Apply one random operation with a random magnitude to each sample.

    Source: torchvision, transforms.v2.TrivialAugmentWide.
    """
    operation_B = rng.integers(len(_RAND_AUGMENT_OPS))
    strengths = rng.integers(num_magnitude_bins) / (num_magnitude_bins - 1)
    return _apply_ops(
        images_B3HW, operation_B, strengths, rng, _TRIVIAL_AUGMENT_WIDE, interpolation, sizes
    )


def auto_augment(
    images_B3HW: Tensor, rng: SampleRNG, *, interpolation: str, sizes: IntArray | None = None
) -> Tensor:
    """Apply a random sub-policy (two operations) of AutoAugment's ImageNet policy to each sample.

    Source: torchvision, transforms.v2.AutoAugment; the policy's table comes from timm.
    """
    operations, probabilities, levels = _imagenet_policy()
    policy_B = rng.integers(len(operations))
    for step in range(2):
        is_applied = rng.uniform(1)[:, 0] < probabilities[policy_B, step]
        operation_B = np.where(is_applied, operations[policy_B, step], _NO_OP)
        strengths = levels[policy_B, step] / (_AUTO_AUGMENT_LEVELS - 1)
        images_B3HW = _apply_ops(
            images_B3HW, operation_B, strengths, rng, _RAND_AUGMENT, interpolation, sizes
        )
    return images_B3HW


@functools.cache
def _imagenet_policy() -> tuple[IntArray, FloatArray, FloatArray]:
    """Return operations (indices of AUGMENT_OPS), probabilities and levels, each (25, 2)."""
    from timm.data import auto_augment_policy  # slow to import

    policy = auto_augment_policy("original")
    names = [[op.name.replace("PosterizeOriginal", "Posterize") for op in pair] for pair in policy]
    return (
        np.array([[AUGMENT_OPS.index(name) for name in pair] for pair in names]),
        np.array([[op.prob for op in pair] for pair in policy]),
        np.array([[float(op.magnitude) for op in pair] for pair in policy]),
    )


def augmix(
    images_B3HW: Tensor,
    rng: SampleRNG,
    *,
    severity: int,
    width: int,
    depth: int,
    alpha: float,
    interpolation: str,
    sizes: IntArray | None = None,
) -> Tensor:
    """Mix each sample with the results of `width` chains of random operations.

    Args:
        severity: number of magnitude levels to draw from: the lowest of ten levels.
        width: number of chains.
        depth: operations per chain; 0 draws 1 to 3 for each chain.
        alpha: parameter of the Dirichlet and Beta distributions of the weights.
    Source: torchvision, transforms.v2.AugMix.
    """

    def weighted(images: Tensor, weights: FloatArray) -> Tensor:
        weights_B111 = to_device(weights.astype(np.float32), images.device).view(-1, 1, 1, 1)
        return images * weights_B111

    own_B2, chains_BW = rng.dirichlet(alpha, 2), rng.dirichlet(alpha, width)
    mixed = weighted(images_B3HW, own_B2[:, 0])
    for chain in range(width):
        augmented = images_B3HW.clone()
        depth_B = np.full(len(rng), depth) if depth else 1 + rng.integers(3)
        for step in range(depth or 3):
            # RandAugment's operations without Identity
            operation_B = 1 + rng.integers(len(_RAND_AUGMENT_OPS) - 1)
            operation_B = np.where(step < depth_B, operation_B, _NO_OP)
            strengths = rng.integers(severity) / (_AUTO_AUGMENT_LEVELS - 1)
            augmented = _apply_ops(
                augmented, operation_B, strengths, rng, _AUGMIX, interpolation, sizes
            )
        mixed += weighted(augmented, own_B2[:, 1] * chains_BW[:, chain])
    return mixed


def three_augment(images_B3HW: Tensor, rng: SampleRNG, *, sizes: IntArray | None = None) -> Tensor:
    """Apply grayscale, solarization or Gaussian blur to each sample, with equal probability.

    Source: Touvron et al. 2022, DeiT III: Revenge of the ViT, section 3.3.
    """
    choice_B = rng.integers(3)
    images_B3HW = grayscale(images_B3HW, choice_B == 0)
    rows = to_device(np.flatnonzero(choice_B == 1), images_B3HW.device)
    images_B3HW[rows] = solarize(images_B3HW[rows], np.full(len(rows), 128 / 255))
    return gaussian_blur(images_B3HW, choice_B == 2, rng, sigma=_THREE_AUGMENT_SIGMA, sizes=sizes)


def _apply_ops(
    images_B3HW: Tensor,
    operation_B: IntArray,
    strengths: FloatArray,
    rng: SampleRNG,
    magnitudes: _Magnitudes,
    interpolation: str,
    sizes: IntArray | None,
) -> Tensor:
    """Apply one operation to each sample, in place, in a random direction.

    Args:
        operation_B: indices of AUGMENT_OPS; _NO_OP leaves a sample unchanged.
        strengths: (B,) fractions of the largest magnitude, 0 to 1.
    """
    signs = np.where(rng.bernoulli(0.5), -1.0, 1.0)
    image_sizes = np.array([images_B3HW.shape[2:]]) if sizes is None else sizes
    for operation in np.unique(operation_B[operation_B != _NO_OP]):
        rows = np.flatnonzero(operation_B == operation)
        index, name = to_device(rows, images_B3HW.device), AUGMENT_OPS[operation]
        images_B3HW[index] = apply_augment_op(
            images_B3HW[index],
            name,
            magnitudes.at(
                name,
                strengths[rows],
                signs[rows],
                image_sizes if sizes is None else image_sizes[rows],
            ),
            interpolation,
            None if sizes is None else sizes[rows],
        )
    return images_B3HW


def apply_augment_op(
    images_b3HW: Tensor,
    name: str,
    magnitudes: FloatArray,
    interpolation: str,
    sizes: IntArray | None = None,
) -> Tensor:
    """Apply one operation to all images.

    Args:
        images_b3HW: float32 images; may be overwritten.
        name: one of AUGMENT_OPS.
        magnitudes: (b,) slope (Shear), pixels (Translate), degrees (Rotate), factor minus 1
            (Brightness, Color, Contrast, Sharpness), bits to keep (Posterize) or threshold from 0
            to 1 (Solarize); ignored by the other operations.
        interpolation: nearest or bilinear, for geometric operations.
        sizes: (b, 2) image sizes if the canvas is shared; see finetune.transforms.color.
    """
    if name in _GEOMETRIC_OPS:
        image_sizes = np.array([images_b3HW.shape[2:]]) if sizes is None else sizes
        matrices = _affine_matrices(name, magnitudes, image_sizes)
        return warp_affine(images_b3HW, matrices, interpolation, sizes)
    if name == "Sharpness":
        return adjust_sharpness(images_b3HW, 1 + magnitudes, sizes)
    if name in _COLOR_OPS:
        kind = {"Brightness": BRIGHTNESS, "Contrast": CONTRAST, "Color": SATURATION}[name]
        kinds = np.full(len(magnitudes), kind)
        return adjust_brightness_contrast_saturation(images_b3HW, 1 + magnitudes, kinds, sizes)
    if name == "Posterize":
        return posterize(images_b3HW, magnitudes)
    if name == "Solarize":
        return solarize(images_b3HW, magnitudes)
    if name == "AutoContrast":
        return autocontrast(images_b3HW, sizes)
    if name == "Equalize":
        return equalize(images_b3HW, sizes)
    return invert(images_b3HW) if name == "Invert" else images_b3HW


def _affine_matrices(name: str, magnitudes: FloatArray, sizes: IntArray) -> FloatArray:
    """Return target-to-source affine matrices (b, 2, 3), relative to the image center.

    Args:
        sizes: (b, 2) height and width of each image, or (1, 2) if all images have the same size.
    """
    height, width = sizes.T
    if name == "Rotate":
        return rotation_matrices(magnitudes)
    maps = np.tile(np.eye(2, 3), (len(magnitudes), 1, 1))
    if name == "ShearX":  # shear around the top left corner, as in torchvision
        maps[:, 0, 1] = magnitudes
        maps[:, 0, 2] = maps[:, 0, 1] * height / 2
    elif name == "ShearY":
        maps[:, 1, 0] = magnitudes
        maps[:, 1, 2] = maps[:, 1, 0] * width / 2
    else:
        maps[:, 0 if name == "TranslateX" else 1, 2] = -np.trunc(magnitudes)
    return maps
