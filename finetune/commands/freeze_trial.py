"""Train only the classifier, or all weights? A short trial of both, with the same weights.

The first trial trains a classifier on frozen features, which takes seconds. The second one trains
all weights, starting from this classifier. Both are evaluated on the same validation images, so
they are compared image by image.

The trials can take longer than the whole run that trains only the classifier. They are then skipped
if the network's last layers already suit the images: if a linear classifier gets worse with the
features of these layers in addition to the pre-logits. Training all weights helps if the pre-logits
lack what earlier layers know.

Sources: Kumar et al. 2022, "Fine-tuning can distort pretrained features" (LP-FT); Evci et al. 2022,
"Head2Toe: Utilizing intermediate representations for better transfer learning".
"""

# N images, D feature width

from __future__ import annotations

import contextlib
import math

import numpy as np

from finetune.commands.weight_selection import leave_one_out_accuracy
from finetune.evaluation.feature_extraction import compute_features, feature_batch_size
from finetune.formatting import format_percent, pluralize
from finetune.log import logger, quiet
from finetune.models.features import compute_layer_features, compute_pre_logits
from finetune.recipe.schema import Recipe
from finetune.training.accelerator import create_accelerator
from finetune.training.setup import build_setup
from finetune.training.trial import TrialEvaluation, run_trial

__all__ = ["compare_frozen_and_full", "find_reason_to_freeze"]

_Z = 1.96  # a 95 % interval extends this many standard errors to each side of the mean
_NUM_IMAGES = 256  # training images on which features are compared


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
        images = f"{pluralize(num_images, 'validation image')} at {size}"
        accuracy_text = f"{format_percent(accuracy, 1)} accuracy"
        logger.info(f"trial 1 of 2: {accuracy_text} on {images} with the classifier trained alone")
        reason = f"a trial on {images}: {accuracy_text} with the classifier alone"
        if accuracy + _Z * math.sqrt(accuracy * (1 - accuracy) / num_images) >= 1:
            return False, f"{reason}, which leaves nothing to gain"
        label = "trial 2 of 2: all weights"
        with contextlib.closing(run_trial(full, label=label, init_from=head.state)) as trial:
            for evaluation in trial:
                is_worse, is_better = _compare(evaluation, head)
                if is_worse:
                    break
        verdict = "clearly worse" if is_worse else "not better"
        if is_better:
            verdict = "with a lower loss, so longer training will help"
        full_accuracy = format_percent(evaluation.correct_N.mean(), 1)
        logger.info(f"trial 2 of 2: {full_accuracy} accuracy with all weights trained, {verdict}")
        return is_better, f"{reason}, {full_accuracy} with all weights, {verdict}"
    except KeyboardInterrupt:
        logger.info("the trial was stopped: only the classifier will be trained")
        return False, "the trial of training all weights was stopped"


def _compare(full: TrialEvaluation, head: TrialEvaluation) -> tuple[bool, bool]:
    """Return whether training all weights is clearly worse, and whether it is better.

    It is clearly worse if the 95 % interval of its gain in accuracy is below 0. It is better if its
    loss is lower and its accuracy not. It may lose less than a standard error of accuracy if the
    95 % interval of its loss is lower: the run will train longer, and gain more.
    """
    gain_N = full.correct_N - head.correct_N
    # one image more, so that a single one never decides
    accuracy_gain, accuracy_error = gain_N.sum(), math.sqrt((gain_N**2).sum() + 1)
    is_worse = accuracy_gain + _Z * accuracy_error < 0
    loss_gain_N = head.loss_N - full.loss_N
    loss_gain, loss_error = loss_gain_N.mean(), loss_gain_N.std() / math.sqrt(len(loss_gain_N))
    if accuracy_gain >= 0:
        return is_worse, bool(loss_gain > 0)
    return is_worse, bool(accuracy_gain > -accuracy_error and loss_gain > _Z * loss_error)


def find_reason_to_freeze(recipe: Recipe) -> str | None:
    """Return why training all weights will not help, by the features of the last layers.

    Args:
        recipe: recipe that trains only the classifier.
    Returns: the reason; None if all weights may help, or the network has no such features.
    """
    with quiet():
        accelerator = create_accelerator(recipe.run)
        setup = build_setup(recipe, device=accelerator.device, show_progress=False)
        network = setup.built.model.to(accelerator.device)
        if not callable(getattr(network, "forward_intermediates", None)):
            return None
        split = setup.source.splits["train"]
        order = np.random.default_rng(recipe.run.seed).permutation(len(split))
        loader = setup.build_loader(split.subset(np.sort(order[:_NUM_IMAGES])), train=False)
        values_ND = compute_features(
            network,
            loader,
            accelerator,
            batch_size=feature_batch_size(accelerator.device, recipe.data),
            extract=compute_layer_features,
        )
    assert values_ND is not None, "this is the only process"
    labels, groups = loader.store.split.labels, loader.store.split.groups
    first = next(loader.eval_batches(batch_size=1)).images_BCHW
    width = compute_pre_logits(network, first).shape[1]
    alone = leave_one_out_accuracy(values_ND[:, :width], labels, groups)
    together = leave_one_out_accuracy(values_ND, labels, groups)
    error = math.sqrt(alone * (1 - alone) * len(labels) + 1) / len(labels)
    if together >= alone - _Z * error:
        return None
    accuracies = f"{format_percent(alone, 1)} accuracy, {format_percent(together, 1)} with them"
    return f"features of earlier layers do not help ({accuracies})"
