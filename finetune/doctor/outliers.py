"""Outliers: images far from all others, and images with unusual pixels."""

# N images, K classes

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import median_abs_deviation

from finetune.doctor.image_scan import Neighbors, PixelFacts

__all__ = ["Outlier", "find_feature_outliers", "find_pixel_problems"]

MAX_DEVIATION = 4.5  # robust standard deviations; measured: benchmarks/doctor.md
MIN_CLASS_SIZE = 20  # smaller classes are compared with all images
MIN_CONTRAST = 8  # of 255
MAX_DARK, MIN_BRIGHT = 40, 215  # of 255: brightest of a dark, darkest of a bright image
MIN_SIZE_RATIO, MAX_ASPECT_CHANGE = 0.25, 3.0  # to the median image


class Outlier(NamedTuple):
    """An unusual image: its row, the reason for the page, and how sure it is, from 0 to 1."""

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
    if len(labels) < MIN_CLASS_SIZE:
        return []
    logarithms = (each.squared_Nk[:, -1].clamp(min=1e-12).log().numpy() for each in neighbors)
    distances_N = sum((each / len(neighbors) for each in logarithms), np.zeros(len(labels)))
    deviations_N = _deviations(distances_N)
    if labels.ndim == 1:
        for label in np.unique(labels):
            members = np.flatnonzero(labels == label)
            if len(members) >= MIN_CLASS_SIZE:
                deviations_N[members] = _deviations(distances_N[members])
    rows = np.flatnonzero(deviations_N > MAX_DEVIATION).tolist()
    return _sort(
        Outlier(row, "far_from_others", 1 - MAX_DEVIATION / (2 * deviations_N[row])) for row in rows
    )


def _deviations(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return distances from the median in standard deviations, estimated by the MAD."""
    deviation = median_abs_deviation(values, scale="normal")
    return (values - np.median(values)) / max(deviation, 1e-6)


def find_pixel_problems(facts: Mapping[int, PixelFacts], num_images: int) -> list[Outlier]:
    """Find images that cannot be decoded, or that are blank, tiny, too dark, too bright or narrow.

    Size and shape are compared with the median image.

    Args:
        facts: what is known of each readable image, by its row.
        num_images: number of images, with the unreadable ones.
    Returns: at most one problem for each image, the surest first.
    """
    side = float(np.median([min(each.height, each.width) for each in facts.values()]))
    shape = float(np.median([math.log(each.width / each.height) for each in facts.values()]))
    outliers = [Outlier(row, "unreadable", 1.0) for row in range(num_images) if row not in facts]
    for row, each in facts.items():
        change = math.exp(abs(math.log(each.width / each.height) - shape))
        # unusual are values below a limit; of several reasons, the first counts
        for reason, value, limit in (
            ("blank", each.bright - each.dark, MIN_CONTRAST),
            ("under_exposed", each.bright, MAX_DARK),
            ("over_exposed", 255 - each.dark, 255 - MIN_BRIGHT),
            ("tiny", min(each.height, each.width) / side, MIN_SIZE_RATIO),
            ("odd_shape", 1 / change, 1 / MAX_ASPECT_CHANGE),
        ):
            if value < limit:
                outliers.append(Outlier(row, reason, 1 - value / (2 * limit)))
                break
    return _sort(outliers)


def _sort(outliers: Iterable[Outlier]) -> list[Outlier]:
    return sorted(outliers, key=lambda outlier: (-outlier.score, outlier.row))
