"""Conformal prediction: sets of classes that contain the true class with a promised probability.

Split conformal prediction on the validation images, with the score of Sadinle, Lei and Wasserman
2019, Least ambiguous set-valued classifiers, except that the predicted class is always in the set.
A class with enough validation images has a threshold of its own, so that the promise holds for its
images too (Vovk 2012, Conditional validity of inductive conformal predictors).
"""

# N images, K classes

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from finetune.errors import DataError, RecipeError
from finetune.evaluation.validation_scores import ValidationScores
from finetune.formatting import format_percent, pluralize

__all__ = ["conformal_quantile", "set_thresholds"]

MIN_IMAGES_PER_CLASS = 30  # for a threshold of its own


def conformal_quantile(scores_N: NDArray[np.floating], coverage: float) -> float:
    """Return the value that the score of a new image does not exceed with probability `coverage`.

    The probability is over draws of the N images and the new image; it is at most 1 / (N + 1) above
    `coverage` if no scores are equal.

    Returns: a score, or infinity if N is too small.
    """
    rank = math.ceil((len(scores_N) + 1) * coverage - 1e-9)  # 1e-9: rounding of 0.9 * 10
    return float(np.sort(scores_N)[rank - 1]) if rank <= len(scores_N) else math.inf


def set_thresholds(
    scores: ValidationScores, coverage: float, *, num_classes: int
) -> tuple[NDArray[np.float64], str]:
    """Compute one threshold per class: a class is in the set if its nonconformity is at most this.

    Classes with fewer than `MIN_IMAGES_PER_CLASS` images share the threshold of all their images
    or, if those are too few as well, of all images.

    Args:
        scores: scores of images that are drawn like the images to predict.
        coverage: share of images whose set contains the true class, above 0 and below 1.
        num_classes: K.
    Returns: (K,), infinite for a class that is always in the set; and what they promise, for users.
    Raises: RecipeError if `coverage` is out of range; DataError if the images are too few.
    """
    if not 0 < coverage < 1:
        raise RecipeError(
            f"--coverage: got {coverage:g}; give a share of images above 0 and below 1, such as "
            "0.9",
            code="recipe.wrong_value",
        )
    needed = math.ceil(coverage / (1 - coverage) - 1e-9)
    if len(scores) < needed:
        raise DataError(
            f"--coverage {coverage:g}: needs at least {needed} validation images, and this model "
            f"has scores of {pluralize(len(scores), 'image')}; use more validation images "
            "(data.val_fraction), or a lower --coverage",
            code="data.too_few_images",
        )
    counts_K = np.bincount(scores.label, minlength=num_classes)
    min_own_images = max(MIN_IMAGES_PER_CLASS, needed)
    has_own_K = counts_K >= min_own_images
    shared_N = ~has_own_K[scores.label]
    shared_scores = scores.nonconformity[shared_N if shared_N.sum() >= needed else slice(None)]
    thresholds_K = np.full(num_classes, conformal_quantile(shared_scores, coverage))
    for index in np.flatnonzero(has_own_K):
        own = scores.nonconformity[scores.label == index]
        thresholds_K[index] = conformal_quantile(own, coverage)
    accuracy = float((scores.nonconformity == 0).mean())
    note = (
        f"sets contain the true class of {100 * coverage:g} % of the images, by "
        f"{pluralize(len(scores), 'validation image')}; {has_own_K.sum()} of {num_classes} classes "
        f"have the {min_own_images} images for this promise class by class"
    )
    if accuracy >= coverage:
        note += f"; the predicted class alone is right for {format_percent(accuracy, 1)} of them"
    return thresholds_K, note
