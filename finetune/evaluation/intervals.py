"""Confidence intervals of accuracies on few images. No torch here: reports are made without it."""

from __future__ import annotations

import functools
import math

__all__ = ["FEW_IMAGES", "TOO_FEW_IMAGES", "interval", "wilson"]

FEW_IMAGES = 1000  # behind an accuracy: below it the interval is shown, 3 points wide and more
TOO_FEW_IMAGES = 30  # below it the interval is so wide that a figure cannot be judged by
_Z = 1.959963984540054  # standard deviations of the normal distribution that hold 95 % of it


@functools.lru_cache(maxsize=4096)  # of many classes many are alike
def wilson(correct: int, total: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of an accuracy, by Wilson's score.

    Args:
        correct: images that were classified correctly.
        total: images, at least 1.
    Returns: its lower and upper end, shares between 0 and 1.
    Source: Wilson 1927, Probable inference, the law of succession, and statistical inference.
    """
    # scipy.stats has it, and takes half a second to load
    share = correct / total
    scale = 2 * (total + _Z**2)
    middle = (2 * total * share + _Z**2) / scale
    reach = _Z / scale * math.sqrt(4 * total * share * (1 - share) + _Z**2)
    return middle - reach if correct else 0.0, middle + reach if correct < total else 1.0


def interval(accuracy: float, total: int) -> tuple[float, float] | None:
    """Return the `wilson` interval of an accuracy on `total` images, None from 1,000 images on."""
    return wilson(round(accuracy * total), total) if 0 < total < FEW_IMAGES else None
