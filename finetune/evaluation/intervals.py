"""Confidence intervals of accuracies on few images. No torch here: reports are made without it."""

from __future__ import annotations

import functools

__all__ = ["FEW_IMAGES", "TOO_FEW_IMAGES", "interval", "wilson"]

FEW_IMAGES = 1000  # behind an accuracy: below it the interval is shown, 3 points wide and more
TOO_FEW_IMAGES = 30  # below it the interval is so wide that a figure cannot be judged by


@functools.lru_cache(maxsize=4096)  # of many classes many are alike
def wilson(correct: int, total: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of an accuracy, by Wilson's score.

    Args:
        correct: images that were classified correctly.
        total: images, at least 1.
    Returns: its lower and upper end, shares between 0 and 1.
    Source: Wilson 1927, Probable inference, the law of succession, and statistical inference.
    """
    from scipy.stats import binomtest  # half a second; comes with scikit-learn

    ends = binomtest(correct, total).proportion_ci(confidence_level=0.95, method="wilson")
    return float(ends.low), float(ends.high)


def interval(accuracy: float, total: int) -> tuple[float, float] | None:
    """Return the `wilson` interval of an accuracy on `total` images, None from 1,000 images on."""
    return wilson(round(accuracy * total), total) if 0 < total < FEW_IMAGES else None
