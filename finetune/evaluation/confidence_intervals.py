"""Confidence intervals of accuracies. This module does not import torch, for fast reports."""

from __future__ import annotations

import functools
import math

__all__ = ["FEW_IMAGES", "TOO_FEW_IMAGES", "accuracy_interval", "wilson_interval"]

FEW_IMAGES = 1000  # below this we print the interval: it is at least 3 points wide
TOO_FEW_IMAGES = 30  # below this the interval is too wide to judge a model by
_Z = 1.959963984540054  # 95 % of a normal distribution is within this many standard deviations


@functools.lru_cache(maxsize=4096)  # many classes share the same counts
def wilson_interval(correct: int, total: int) -> tuple[float, float]:
    """Compute the 95 % Wilson score interval of an accuracy.

    Args:
        correct: number of correctly classified images.
        total: number of images, at least 1.
    Returns: the lower and upper bound of the interval, between 0 and 1.
    Source: Wilson 1927, Probable inference, the law of succession, and statistical inference.
    """
    # scipy.stats has this too, but takes half a second to import
    share = correct / total
    scale = 2 * (total + _Z**2)
    middle = (2 * total * share + _Z**2) / scale
    reach = _Z / scale * math.sqrt(4 * total * share * (1 - share) + _Z**2)
    return middle - reach if correct else 0.0, middle + reach if correct < total else 1.0


def accuracy_interval(accuracy: float, num_images: int) -> tuple[float, float] | None:
    """Return the Wilson interval of an accuracy; None without images, or for 1,000 or more."""
    return (
        wilson_interval(round(accuracy * num_images), num_images)
        if 0 < num_images < FEW_IMAGES
        else None
    )
