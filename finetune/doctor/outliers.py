"""Outliers: images far from all others, and images with unusual pixels."""

# N images, K classes

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import median_abs_deviation

from finetune.doctor.image_scan import Neighbors, PixelFacts

__all__ = ["Outlier", "find_feature_outliers", "find_pixel_problems"]

MAX_DEVIATION = 4.5  # robust standard deviations; measured: docs/doctor.md
MIN_CLASS_SIZE = 20  # smaller classes are compared with all images
MIN_CONTRAST = 8  # of 255
MAX_DARK, MIN_BRIGHT = 40, 215  # of 255: brightest of a dark, darkest of a bright image
MIN_SIZE_RATIO = 0.25  # to the median image
MAX_ASPECT_CHANGE = 3.0  # to the median image


class Outlier(NamedTuple):
    """An unusual image.

    Attributes:
        row: index of the image.
        reason: far_from_others, blank, tiny, over_exposed, under_exposed, odd_shape or unreadable.
        score: how sure it is, from 0 to 1.
    """

    row: int
    reason: str
    score: float


def find_feature_outliers(
    neighbors: Sequence[Neighbors], labels: NDArray[np.int64]
) -> list[Outlier]:
    """Find images that are far from their nearest neighbors, compared with images of their class.

    Args:
        neighbors: the nearest images by the features of each network; the logarithms of the
            distances to the last neighbor are averaged.
        labels: class indices (N,), or indicators (N, K), for which all images are one class.
    Returns: the outliers, the farthest first.
    """
    num_images = len(labels)
    if num_images < MIN_CLASS_SIZE:
        return []
    distances_N = np.zeros(num_images)
    for each in neighbors:
        distances_N += each.squared_Nk[:, -1].clamp(min=1e-12).log().numpy() / len(neighbors)
    deviations_N = _deviations(distances_N)
    if labels.ndim == 1:
        for label in np.unique(labels):
            members = np.flatnonzero(labels == label)
            if len(members) >= MIN_CLASS_SIZE:
                deviations_N[members] = _deviations(distances_N[members])
    rows = np.flatnonzero(deviations_N > MAX_DEVIATION)
    scores = 1 - MAX_DEVIATION / (2 * deviations_N[rows])
    outliers = zip(rows.tolist(), scores.tolist(), strict=True)
    return _sort(Outlier(row, "far_from_others", score) for row, score in outliers)


def _deviations(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return distances from the median in standard deviations, estimated by the MAD."""
    deviation = median_abs_deviation(values, scale="normal")
    return (values - np.median(values)) / max(deviation, 1e-6)


def find_pixel_problems(facts: Sequence[PixelFacts | None]) -> list[Outlier]:
    """Find images that cannot be decoded, or that are blank, tiny, too dark, too bright or narrow.

    Size and shape are compared with the median image.

    Args:
        facts: what is known of each image; None for an unreadable one.
    Returns: at most one problem for each image, the surest first.
    """
    readable = [each for each in facts if each is not None]
    if not readable:
        return [Outlier(row, "unreadable", 1.0) for row in range(len(facts))]
    side = float(np.median([min(each.height, each.width) for each in readable]))
    shape = float(np.median([math.log(each.width / each.height) for each in readable]))
    found = ((row, _classify(each, side, shape)) for row, each in enumerate(facts))
    return _sort(Outlier(row, *problem) for row, problem in found if problem is not None)


def _classify(
    facts: PixelFacts | None, median_side: float, median_shape: float
) -> tuple[str, float] | None:
    """Return the reason and the score of an image's worst problem."""
    if facts is None:
        return "unreadable", 1.0
    contrast = facts.bright - facts.dark
    if contrast < MIN_CONTRAST:
        return "blank", 1 - contrast / (2 * MIN_CONTRAST)
    if facts.bright < MAX_DARK:
        return "under_exposed", 1 - facts.bright / (2 * MAX_DARK)
    if facts.dark > MIN_BRIGHT:
        return "over_exposed", 1 - (255 - facts.dark) / (2 * (255 - MIN_BRIGHT))
    size = min(facts.height, facts.width) / median_side
    if size < MIN_SIZE_RATIO:
        return "tiny", 1 - size / (2 * MIN_SIZE_RATIO)
    change = math.exp(abs(math.log(facts.width / facts.height) - median_shape))
    if change > MAX_ASPECT_CHANGE:
        return "odd_shape", 1 - MAX_ASPECT_CHANGE / (2 * change)
    return None


def _sort(outliers: Iterable[Outlier]) -> list[Outlier]:
    return sorted(outliers, key=lambda outlier: (-outlier.score, outlier.row))
