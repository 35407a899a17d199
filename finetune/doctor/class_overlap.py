"""Classes that overlap, are the same, or have too few images."""

# N images, K classes

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["find_class_problems"]

MIN_IMAGES = 10
MIN_OVERLAP, MIN_SAME = 0.25, 0.4  # error between two classes; 0.5 is chance
_Z = 1.645  # one-sided 95 %


def find_class_problems(
    probabilities_NK: NDArray[np.float64], labels: NDArray[np.int64], class_names: Sequence[str]
) -> list[dict[str, Any]]:
    """Find classes that a classifier cannot tell apart, and classes that are too small.

    Two classes overlap if the mean of their error rates, when only these two may be chosen, is at
    least `MIN_OVERLAP` with 95 % confidence; they are the same from `MIN_SAME` on.

    Args:
        probabilities_NK: out-of-fold probabilities.
        labels: class indices (N,), or indicators (N, K), for which only small classes are found.
    Returns: dictionaries with kind ("same", "overlap" or "too_small"), classes, score from 0 to 1,
        and images (those confused, or those of the small class); the surest first.
    """
    is_multilabel = labels.ndim == 2
    counts_K = labels.sum(0) if is_multilabel else np.bincount(labels, minlength=len(class_names))
    problems = [
        _problem("too_small", [class_names[k]], 1 - counts_K[k] / MIN_IMAGES, counts_K[k])
        for k in np.flatnonzero(counts_K < MIN_IMAGES).tolist()
    ]
    if not is_multilabel:
        # without the prior, images of a rare class would all go to a frequent one
        odds_NK = probabilities_NK / np.maximum(counts_K, 1)
        is_confused_NK = odds_NK > odds_NK[np.arange(len(labels)), labels][:, None]
        confused_KK = np.stack([is_confused_NK[labels == k].sum(0) for k in range(len(counts_K))])
        rates_KK = confused_KK / np.maximum(counts_K, 1)[:, None]
        variances_KK = rates_KK * (1 - rates_KK) / np.maximum(counts_K, 1)[:, None]
        errors_KK = (rates_KK + rates_KK.T) / 2
        lower_KK = errors_KK - _Z * np.sqrt(variances_KK + variances_KK.T) / 2
        is_large_K = counts_K >= MIN_IMAGES
        is_overlap_KK = (lower_KK >= MIN_OVERLAP) & is_large_K & is_large_K[:, None]
        for pair in np.argwhere(np.triu(is_overlap_KK, 1)).tolist():
            first, second = pair
            kind = "same" if lower_KK[first, second] >= MIN_SAME else "overlap"
            score = min(1.0, 2 * errors_KK[first, second])
            images = confused_KK[first, second] + confused_KK[second, first]
            problems.append(_problem(kind, [class_names[k] for k in pair], score, images))
    return sorted(problems, key=lambda problem: (-problem["score"], problem["classes"]))


def _problem(kind: str, classes: list[str], score: float, images: float) -> dict[str, Any]:
    rounded = round(float(score), 4)
    return {"kind": kind, "classes": classes, "score": rounded, "images": int(images)}
