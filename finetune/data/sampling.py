"""Classes of which some are rare: in words, and epochs in which their images come more often.

Such an epoch is computed from the seed, as a plain one is, and as long.
"""

# N images, K classes

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from finetune.errors import visible
from finetune.text import counted

__all__ = [
    "ClassSampling",
    "class_counts",
    "class_draws",
    "draws_in_words",
    "imbalance",
    "shares_of",
]

_POWERS = {"class_balanced": 0.0, "square_root": 0.5}  # of a class's images; 1: each image once

_RARE = 0.1  # of the images of the commonest class

Kind = Literal["class_balanced", "square_root"]


def imbalance(counts_K: NDArray[np.int64], names: Sequence[str]) -> str:
    """Name the rarest and the commonest class if the one has less than a tenth of the other's.

    Args:
        counts_K: training images of each class.
    Returns: a line for people; "" where no class is rare.
    """
    rare, common = int(counts_K.argmin()), int(counts_K.argmax())
    if counts_K[rare] >= _RARE * counts_K[common]:
        return ""
    images = counted(int(counts_K[rare]), "training image")
    return f"{_quoted(names[rare])} has {images} and {_quoted(names[common])} {counts_K[common]:,}"


def draws_in_words(
    counts_K: NDArray[np.int64], draws_K: NDArray[np.int64], names: Sequence[str]
) -> str:
    """Say how often images of the rarest and of the commonest class come in an epoch."""
    filled = np.flatnonzero(counts_K)
    rare, common = filled[counts_K[filled].argmin()], filled[counts_K[filled].argmax()]
    often, seldom = (f"{draws_K[k] / counts_K[k]:.3g} times an epoch" for k in (rare, common))
    return f"an image of {_quoted(names[rare])} comes {often}, of {_quoted(names[common])} {seldom}"


def _quoted(name: str) -> str:
    return f"'{visible(name, keep='')}'"


def class_counts(labels_N: NDArray[Any], num_classes: int) -> NDArray[np.int64]:
    """Return the images of each class, (K,).

    Args:
        labels_N: class of each image; or (N, K), 1 for each of its classes.
    """
    if labels_N.ndim == 2:
        return labels_N.sum(axis=0, dtype=np.int64)
    return np.bincount(labels_N, minlength=num_classes)


def shares_of(total: int, weights: NDArray[np.generic]) -> NDArray[np.int64]:
    """Share out a whole number by weights; the largest remainders are rounded up."""
    shares = weights * total / weights.sum()
    whole = np.floor(shares).astype(np.int64)
    whole[np.argsort(whole - shares, kind="stable")[: total - int(whole.sum())]] += 1
    return whole


def class_draws(counts_K: NDArray[np.int64], kind: Kind) -> NDArray[np.int64]:
    """Return how many images of each class an epoch has, (K,); together as many as there are.

    Args:
        counts_K: images of each class; a class without any gets none.
        kind: class_balanced: of every class alike; square_root: by the root of its images.
    Source: Kang et al. 2020, "Decoupling representation and classifier", equation 1.
    """
    weights_K = np.where(counts_K > 0, counts_K.astype(np.float64) ** _POWERS[kind], 0.0)
    return shares_of(int(counts_K.sum()), weights_K)


class ClassSampling:
    """The images of each epoch: of every class its share, of a class each image equally often.

    A class is a ring of its images, in an order drawn by the seed, and each epoch goes on where the
    one before it ended, so that at no time one has come two times more often than another.

    Args:
        labels_N: class of each image.
        kind: as for `class_draws`.
    """

    def __init__(self, labels_N: NDArray[np.int64], kind: Kind, seed: int) -> None:
        self._seed = seed
        self._counts_K = np.bincount(labels_N)
        self._draws_K = class_draws(self._counts_K, kind)
        order_N = np.random.PCG64([seed, 0, 1]).random_raw(len(labels_N))
        self._rings_N = np.lexsort((order_N, labels_N))  # class after class

    def draws(self, epoch: int) -> NDArray[np.int64]:
        """Return the images of an epoch in their order, (N,): index + N * turn of the ring."""
        counts_K, draws_K = self._counts_K, self._draws_K
        classes_N = np.repeat(np.arange(len(draws_K)), draws_K)
        start_K = epoch * draws_K % np.maximum(counts_K, 1) - (np.cumsum(draws_K) - draws_K)
        position_N = np.arange(len(classes_N)) + start_K[classes_N]
        turn_N, place_N = np.divmod(position_N, counts_K[classes_N])
        first_K = np.cumsum(counts_K) - counts_K
        draws_N = self._rings_N[first_K[classes_N] + place_N] + turn_N * len(self._rings_N)
        generator = np.random.Generator(np.random.PCG64([self._seed, epoch]))
        return generator.permutation(draws_N)
