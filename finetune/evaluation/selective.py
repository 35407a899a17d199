"""Selective classification: answer only if the model is sure enough to keep a promised error rate.

Source: Geifman and El-Yaniv 2017, Selective classification for deep neural networks; Angelopoulos
et al. 2021, Learn then test, section 3 (fixed sequence testing).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from finetune.errors import DataError, RecipeError
from finetune.evaluation.validation_scores import ValidationScores
from finetune.formatting import format_percent, pluralize

__all__ = ["DELTA", "SelectiveThreshold", "images_needed", "require_threshold", "select_threshold"]

DELTA = 0.05  # probability, over draws of the validation images, that the promise is broken
_MIN_COVERAGE = 0.25  # the first threshold accepts at least this share of the validation images
_NUM_THRESHOLDS = 40


@dataclass(frozen=True)
class SelectiveThreshold:
    """A threshold that keeps the error rate of the answered images below a maximum.

    Attributes:
        max_error: the promised maximum.
        threshold: an image is answered if its log-odds are above this.
        num_answered: number of validation images above the threshold.
        num_errors: number of those that are misclassified.
        num_images: number of validation images.
    """

    max_error: float
    threshold: float
    num_answered: int
    num_errors: int
    num_images: int

    def __str__(self) -> str:
        answered = format_percent(self.num_answered / self.num_images, 1)
        images = pluralize(self.num_images, "validation image")
        return (
            f"at most {100 * self.max_error:g} % of the answers are wrong, with "
            f"{100 - 100 * DELTA:g} % confidence: of {images}, {answered} are answered, "
            f"{self.num_errors} of them wrongly"
        )


def images_needed(max_error: float) -> int:
    """Return how many answered images, all of them correct, are needed for an error rate."""
    return math.ceil(math.log(DELTA) / math.log1p(-max_error))


def select_threshold(scores: ValidationScores, max_error: float) -> SelectiveThreshold | None:
    """Find the threshold that answers the most images with at most `max_error` wrong answers.

    For a fixed number of images m, the errors among the m most certain images are binomial, given
    the log-odds of the next one. So an exact binomial test (Clopper-Pearson) decides whether the
    error rate above it is at most `max_error`. 40 values of m, from 25 % of the images to all, are
    tested from the smallest to the largest, and the last one before the first failure is used. Then
    no correction for several tests is needed, if the error rate does not fall as more images are
    answered: the first threshold that breaks the promise is accepted with probability `DELTA`.

    Args:
        scores: scores of images that are drawn like the images to predict.
        max_error: highest share of wrong answers among the answers, above 0 and below 1.
    Returns: the threshold; None if the images allow no answer.
    Raises: RecipeError if `max_error` is out of range.
    """
    from scipy.stats import binom  # takes half a second to import

    if not 0 < max_error < 1:
        raise RecipeError(
            f"--max-error: got {max_error:g}; give a share of wrong answers above 0 and below 1, "
            "such as 0.02",
            code="recipe.wrong_value",
        )
    total = len(scores)
    first = max(images_needed(max_error), math.ceil(_MIN_COVERAGE * total))
    if first > total:
        return None
    sorted_N = np.sort(scores.log_odds)[::-1]
    best = None
    for count in np.unique(np.linspace(first, total, _NUM_THRESHOLDS).round().astype(int)):
        threshold = float(sorted_N[count]) if count < total else -math.inf
        is_answered_N = scores.log_odds > threshold  # fewer than `count` if values are equal
        num_answered = int(is_answered_N.sum())
        num_errors = int((scores.nonconformity[is_answered_N] > 0).sum())
        if num_answered < images_needed(max_error):
            continue  # too many images are as certain as the next one
        if binom.cdf(num_errors, num_answered, max_error) > DELTA:
            break
        best = SelectiveThreshold(max_error, threshold, num_answered, num_errors, total)
    return best


def require_threshold(scores: ValidationScores, max_error: float) -> SelectiveThreshold:
    """Return the result of `select_threshold`. Raises: DataError if there is none."""
    if threshold := select_threshold(scores, max_error):
        return threshold
    needed = images_needed(max_error)
    found = pluralize(len(scores), f"image of '{scores.split}'", f"images of '{scores.split}'")
    if len(scores) < needed:
        problem = (
            f"needs at least {needed} validation images, all answered correctly, and this model "
            f"has scores of {found}"
        )
    else:
        problem = (
            f"the model makes too many errors even on the images it is most certain of ({found}, "
            f"{format_percent(float((scores.nonconformity > 0).mean()), 1)} of them misclassified)"
        )
    promised = [
        error
        for error in np.arange(1, 51) / 100
        if error > max_error and select_threshold(scores, error)
    ]
    fix = (
        f"the smallest --max-error that these images allow is {promised[0]:.2f}"
        if promised
        else "use more validation images (data.val_fraction), or fit the scores on more images: "
        "finetune eval MODEL --fit-temperature --split NAME"
    )
    raise DataError(f"--max-error {max_error:g}: {problem}; {fix}", code="data.too_few_images")
