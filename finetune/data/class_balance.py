"""Class imbalance: describe it, and oversample rare classes.

An epoch with class sampling draws as many images as the training split has. The draws depend only
on the seed and the epoch.
"""

# N images, K classes

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from finetune.errors import escape_control_chars
from finetune.formatting import pluralize

__all__ = [
    "ClassSampler",
    "apportion",
    "compute_class_draws",
    "count_images_per_class",
    "describe_class_draws",
    "describe_imbalance",
]

_COUNT_EXPONENTS = {
    "class_balanced": 0.0,
    "square_root": 0.5,
}  # draws are proportional to count**exponent; 1 would draw each image once

_RARE_CLASS_RATIO = 0.1  # a class is rare below this share of the most common class's images

ClassSamplingKind = Literal["class_balanced", "square_root"]


def describe_imbalance(counts_K: NDArray[np.int64], class_names: Sequence[str]) -> str:
    """Name the rarest and the most common class if their image counts differ by more than 10x.

    Args:
        counts_K: number of training images of each class.
        class_names: K class names.
    Returns: a sentence, or "" if no class is rare.
    """
    rare, common = int(counts_K.argmin()), int(counts_K.argmax())
    if counts_K[rare] >= _RARE_CLASS_RATIO * counts_K[common]:
        return ""
    images = pluralize(int(counts_K[rare]), "training image")
    return (
        f"{_quoted(class_names[rare])} has {images} and "
        f"{_quoted(class_names[common])} {counts_K[common]:,}"
    )


def describe_class_draws(
    counts_K: NDArray[np.int64], draws_K: NDArray[np.int64], class_names: Sequence[str]
) -> str:
    """Describe how often an epoch draws each image of the rarest and of the most common class.

    Args:
        counts_K: number of training images of each class.
        draws_K: number of draws from each class in an epoch, see `compute_class_draws`.
        class_names: K class names.
    """
    present = np.flatnonzero(counts_K)
    rare, common = present[counts_K[present].argmin()], present[counts_K[present].argmax()]
    rare_rate, common_rate = (
        f"{draws_K[k] / counts_K[k]:.3g} times an epoch" for k in (rare, common)
    )
    return (
        f"an image of {_quoted(class_names[rare])} is drawn {rare_rate}, "
        f"one of {_quoted(class_names[common])} {common_rate}"
    )


def _quoted(name: str) -> str:
    return f"'{escape_control_chars(name, keep='')}'"


def count_images_per_class(labels_N: NDArray[Any], num_classes: int) -> NDArray[np.int64]:
    """Return the number of images of each class, (K,).

    Args:
        labels_N: class index of each image; multi-label: (N, K), 1 for each class of an image.
        num_classes: K.
    """
    if labels_N.ndim == 2:
        return labels_N.sum(axis=0, dtype=np.int64)
    return np.bincount(labels_N, minlength=num_classes)


def apportion(total: int, weights: NDArray[np.generic]) -> NDArray[np.int64]:
    """Divide an integer in proportion to weights, by the largest remainder method.

    Args:
        total: number to divide.
        weights: non-negative weights, (P,).
    Returns: P integers that sum to `total`.
    """
    shares = weights * total / weights.sum()
    floors = np.floor(shares).astype(np.int64)
    floors[np.argsort(floors - shares, kind="stable")[: total - int(floors.sum())]] += 1
    return floors


def compute_class_draws(counts_K: NDArray[np.int64], kind: ClassSamplingKind) -> NDArray[np.int64]:
    """Return how many images of each class an epoch draws, (K,); they sum to the number of images.

    Args:
        counts_K: number of images of each class; an empty class gets no draws.
        kind: "class_balanced" draws the same number from every class; "square_root" draws in
            proportion to the square root of the class's image count.
    Source: Kang et al. 2020, "Decoupling representation and classifier", equation 1.
    """
    weights_K = np.where(counts_K > 0, counts_K.astype(np.float64) ** _COUNT_EXPONENTS[kind], 0.0)
    return apportion(int(counts_K.sum()), weights_K)


class ClassSampler:
    """Draws images by class: a fixed number per epoch, and all images of a class equally often.

    The images of a class are drawn in cycles, in an order given by the seed. An epoch continues
    each cycle where the previous epoch stopped, so the total draws of two images of a class never
    differ by more than one.

    Args:
        labels_N: class index of each image.
        kind: rule for the number of draws per class, see `compute_class_draws`.
        seed: seed of the orders in which images are drawn.
    """

    def __init__(self, labels_N: NDArray[np.int64], kind: ClassSamplingKind, seed: int) -> None:
        self._seed = seed
        self._counts_K = np.bincount(labels_N)
        self._draws_K = compute_class_draws(self._counts_K, kind)
        order_N = np.random.PCG64([seed, 0, 1]).random_raw(len(labels_N))
        self._images_by_class_N = np.lexsort((order_N, labels_N))  # sorted by class

    def epoch_draws(self, epoch: int) -> NDArray[np.int64]:
        """Return the draws of an epoch, (N,), in random order.

        A draw is an image index, plus N for each time that the class has started over in this
        epoch. So the draws of an epoch are distinct, and draw % N is the image index.
        """
        counts_K, draws_K = self._counts_K, self._draws_K
        classes_N = np.repeat(np.arange(len(draws_K)), draws_K)
        start_K = epoch * draws_K % np.maximum(counts_K, 1) - (np.cumsum(draws_K) - draws_K)
        position_N = np.arange(len(classes_N)) + start_K[classes_N]
        turn_N, offset_N = np.divmod(position_N, counts_K[classes_N])
        first_K = np.cumsum(counts_K) - counts_K
        draws_N = self._images_by_class_N[first_K[classes_N] + offset_N] + turn_N * len(
            self._images_by_class_N
        )
        generator = np.random.Generator(np.random.PCG64([self._seed, epoch]))
        return generator.permutation(draws_N)
