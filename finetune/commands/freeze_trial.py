"""Train only the classifier, or all weights? A short trial of both, with the same weights.

The first trial trains a classifier on frozen features, which takes seconds. The second one trains
all weights, starting from this classifier. Both are evaluated on the same validation images, so
they are compared image by image.

Source: Kumar et al. 2022, "Fine-tuning can distort pretrained features" (LP-FT).
"""

# N validation images

from __future__ import annotations

import contextlib
import math

from finetune.formatting import format_percent, pluralize
from finetune.log import logger
from finetune.recipe.schema import Recipe
from finetune.training.trial import TrialEvaluation, run_trial

__all__ = ["compare_frozen_and_full"]

_Z = 1.96  # a 95 % interval extends this many standard errors to each side of the mean


def compare_frozen_and_full(frozen: Recipe, full: Recipe, *, size: str) -> tuple[bool, str]:
    """Train the classifier alone, then all weights, and compare them on the validation split.

    The second trial is skipped if the classifier alone leaves nothing to gain, and ends at the
    first evaluation that is clearly worse. After Ctrl-C, the classifier alone wins.

    Args:
        frozen: recipe that trains only the classifier.
        full: recipe that trains all weights for a short time.
        size: image size of both, for messages.
    Returns: True to train all weights, and the reason.
    """
    try:
        *_, head = run_trial(frozen, label="trial 1 of 2: only the classifier")
        accuracy, num_images = float(head.correct_N.mean()), len(head.correct_N)
        images = pluralize(num_images, "validation image")
        reason = f"{format_percent(accuracy, 1)} of {images} at {size} right with the classifier"
        logger.info(f"trial 1 of 2: {reason} trained")
        if accuracy + _Z * math.sqrt(accuracy * (1 - accuracy) / num_images) >= 1:
            return False, f"a trial: {reason} alone, which leaves nothing to gain"
        label = "trial 2 of 2: all weights"
        with contextlib.closing(run_trial(full, label=label, init_from=head.state)) as trial:
            for evaluation in trial:
                is_worse, is_better = _compare(evaluation, head)
                if is_worse:
                    break
        verdict = "clearly worse" if is_worse else "not better"
        if is_better:
            verdict = "with a lower loss, so longer training will help"
        accuracy_text = format_percent(evaluation.correct_N.mean(), 1)
        logger.info(f"trial 2 of 2: {accuracy_text} right with all weights trained, {verdict}")
        return is_better, f"a trial: {reason} alone, {accuracy_text} with all weights, {verdict}"
    except KeyboardInterrupt:
        logger.info("the trial was stopped: only the classifier will be trained")
        return False, "the trial of training all weights was stopped"


def _compare(full: TrialEvaluation, head: TrialEvaluation) -> tuple[bool, bool]:
    """Return whether training all weights is clearly worse, and whether it is better.

    It is clearly worse if the 95 % interval of its gain in accuracy is below 0. It is better if its
    loss is lower by more than a standard error, and its accuracy not lower by one: the run will
    train longer, and gain more.
    """
    gain_N = full.correct_N - head.correct_N
    # one image more, so that a single one never decides
    accuracy_gain, accuracy_error = gain_N.sum(), math.sqrt((gain_N**2).sum() + 1)
    loss_gain_N = head.loss_N - full.loss_N
    loss_error = loss_gain_N.std() / math.sqrt(len(loss_gain_N))
    is_worse = accuracy_gain + _Z * accuracy_error < 0
    return is_worse, accuracy_gain > -accuracy_error and loss_gain_N.mean() > loss_error
