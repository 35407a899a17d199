"""Wrong labels: images whose label a classifier that has not seen them finds improbable.

The classifier is logistic regression on frozen features. Its out-of-fold predictions are calibrated
to probabilities of the true class, together with a noise model: how often annotators confuse one
class with another. Both give the probability that a label is wrong. Confusions that the classifier
makes itself are not attributed to the annotators, unless they are significantly more frequent.

Source: noise model: Sukhbaatar et al. 2015, Training Convolutional Networks with Noisy Labels.
"""

# N images, M images whose given class the classifier knows, D width, K classes

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import minimize_scalar
from scipy.special import softmax
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from finetune.errors import SetupError, install_hint
from finetune.progress import item_bar

__all__ = [
    "LabelErrors",
    "check_cleanlab",
    "find_label_errors",
    "fit_noise",
    "out_of_fold_probabilities",
]

FloatArray = NDArray[np.float64]
# C of logistic regression, times the number of training images, divided by the root of the number
# of classes: strong regularization, because a classifier that fits wrong labels does not find them
_REGULARIZATION_C = 5.0
_NUM_FOLDS = 5
_NUM_ROUNDS = 3  # of fitting; a label that is probably wrong counts less in the next round
_MAX_ITERATIONS = 60
_MIN_SCORE = 0.1  # labels above are listed: with a person's eyes, one of ten is worth the time
# of a set without any, the surest are listed too: at most so many, and this fraction of the images
_MIN_LISTED, _MIN_LISTED_FRACTION = 20, 0.005
_MIN_LOG_PROBABILITY = -30.0
_EM_ITERATIONS, _EM_TOLERANCE = 40, 2e-4
# the noise model may take this fraction of the classifier's own confusions for wrong labels
_CONFUSION_FRACTION = 0.35
_SIGNIFICANCE = 2.0  # standard deviations by which a confusion exceeds the common rate
_MODEL_ERROR = 0.05  # relative standard deviation of the expected number
_MAX_CALIBRATION_IMAGES = 5000
_LOG_SCALES = (-2.0, 3.0)  # logarithms of the smallest and largest scale of the logits


@dataclass(frozen=True, eq=False)
class LabelErrors:
    """How probable it is that labels are wrong."""

    scores_N: FloatArray  # probability that the label is wrong; 0 if nothing is known
    suggested: NDArray[Any]  # the most probable other labels, in the format of the given ones
    indices: NDArray[np.int64]  # images to check, surest first
    expected: tuple[float, float, float]  # number of wrong labels, with the limits of its interval


def check_cleanlab() -> None:
    """Raise SetupError if cleanlab is not installed."""
    try:
        import cleanlab  # noqa: F401
    except ImportError as error:
        raise SetupError(
            f"data doctor: cleanlab is not installed; {install_hint('doctor')}",
            code="setup.missing_package",
        ) from error


def out_of_fold_probabilities(
    features: Sequence[NDArray[np.float32]],
    labels: NDArray[Any],
    groups_N: NDArray[np.int64],
    *,
    num_classes: int,
) -> FloatArray:
    """Predict each image with logistic regression that was fitted without it and its group.

    Args:
        features: features (N, D) of each network; the probabilities are averaged over networks.
        labels: class indices (N,), or 0/1 indicators (N, K) for multi-label data.
        groups_N: images of one group, such as duplicates, are in one fold.
        num_classes: K.
    Returns: (N, K). A class that no training image of a fold has, has the probability 0 there.
    """
    fold_N = _assign_folds(labels, groups_N)
    # each class of multi-label data is a problem of its own: absent or present
    targets = [labels] if labels.ndim == 1 else list(labels.T.astype(np.int64))
    total_NK = np.zeros((len(labels), num_classes))
    num_fits = len(features) * len(targets) * _NUM_ROUNDS * _NUM_FOLDS
    with item_bar(num_fits, label="cross-validation", unit="fit") as progress:
        for values_ND in features:
            inputs_ND = StandardScaler().fit_transform(values_ND)
            for k, labels_N in enumerate(targets):
                weights_N = np.ones(len(labels))
                for _ in range(_NUM_ROUNDS):
                    log_p_NC = np.full((len(labels), num_classes), -np.inf)
                    for fold in range(_NUM_FOLDS):
                        _predict_fold(inputs_ND, labels_N, weights_N, fold_N == fold, log_p_NC)
                        progress.update()
                    true_NC, posterior_NC, _ = _fit_class_noise(log_p_NC, labels_N)
                    weights_N = posterior_NC[np.arange(len(labels)), labels_N]
                if labels.ndim == 1:
                    total_NK += true_NC
                else:
                    total_NK[:, k] += true_NC[:, 1]
    return total_NK / len(features)


def _assign_folds(labels: NDArray[Any], groups_N: NDArray[np.int64]) -> NDArray[np.int64]:
    """Deal the groups to the folds, stratified by the class of their first image."""
    _, first_rows, group_N = np.unique(groups_N, return_index=True, return_inverse=True)
    classes_N = labels if labels.ndim == 1 else labels.argmax(axis=1)
    shuffled = np.random.default_rng(0).permutation(len(first_rows))
    order = shuffled[np.argsort(classes_N[first_rows[shuffled]], kind="stable")]
    fold_of_group = np.empty(len(first_rows), dtype=np.int64)
    fold_of_group[order] = np.arange(len(order)) % _NUM_FOLDS
    return fold_of_group[group_N]


def _predict_fold(
    inputs_ND: NDArray[np.float32],
    labels_N: NDArray[np.int64],
    weights_N: FloatArray,
    is_test_N: NDArray[np.bool_],
    log_p_NK: FloatArray,
) -> None:
    """Fit logistic regression on the other folds, and write this fold's log-probabilities."""
    train_rows, test_rows = np.flatnonzero(~is_test_N), np.flatnonzero(is_test_N)
    classes = np.unique(labels_N[train_rows])
    if len(classes) < 2 or not len(test_rows):
        log_p_NK[np.ix_(test_rows, classes)] = 0.0
        return
    c = _REGULARIZATION_C * math.sqrt(len(classes)) / len(train_rows)
    model = LogisticRegression(C=c, max_iter=_MAX_ITERATIONS, tol=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(inputs_ND[train_rows], labels_N[train_rows], weights_N[train_rows])
    log_p = model.predict_log_proba(inputs_ND[test_rows])
    log_p_NK[np.ix_(test_rows, classes)] = np.maximum(log_p, _MIN_LOG_PROBABILITY)


def fit_noise(
    probabilities_NK: FloatArray, labels: NDArray[Any]
) -> tuple[FloatArray, FloatArray, float]:
    """Fit the noise model, to each class of multi-label data alone.

    Returns: calibrated probabilities of the true class given the image (N, K); given image and
        label (N, K); and an expected number of wrong labels that is too high.
    """
    if labels.ndim == 1:
        return _fit_class_noise(_log(probabilities_NK), labels)
    true_NK, posterior_NK = np.empty_like(probabilities_NK), np.empty_like(probabilities_NK)
    high = 0.0
    for k, present_N in enumerate(probabilities_NK.T):
        log_p_N2 = _log(np.stack([1.0 - present_N, present_N], axis=1))
        true_N2, posterior_N2, class_high = _fit_class_noise(log_p_N2, labels[:, k].astype(int))
        true_NK[:, k], posterior_NK[:, k] = true_N2[:, 1], posterior_N2[:, 1]
        high += class_high
    return true_NK, posterior_NK, high


def _log(probabilities: FloatArray) -> FloatArray:
    """Return log-probabilities that are finite, except those of 0."""
    finite = np.maximum(np.log(probabilities + 1e-300), _MIN_LOG_PROBABILITY)
    return np.where(probabilities > 0, finite, -np.inf)


def _fit_class_noise(
    log_p_NK: FloatArray, labels_N: NDArray[np.int64]
) -> tuple[FloatArray, FloatArray, float]:
    """Fit the scale of the logits and the rates of confusions to the labels (EM).

    First, every confusion has a rate of its own. Then either only significant ones have one, or all
    share a common rate: the more likely of both models counts.

    Args:
        log_p_NK: log-probabilities; -inf for classes that the classifier does not know. A label of
            such a class is taken to be right.
    Returns: as `fit_noise`; the expected number is that of the first model.
    """
    num_images, num_classes = log_p_NK.shape
    is_known_N = np.isfinite(log_p_NK[np.arange(num_images), labels_N])
    true_NK, posterior_NK = np.exp(log_p_NK), np.eye(num_classes)[labels_N]
    if not is_known_N.any():
        return true_NK, posterior_NK, 0.0
    log_p_MK, labels_M = log_p_NK[is_known_N], labels_N[is_known_N]
    rates_KK = np.full((num_classes, num_classes), 0.05 / (num_classes - 1))
    np.fill_diagonal(rates_KK, 0.95)
    every_KK = np.ones_like(rates_KK, dtype=bool)
    scale, rates_KK, counts_KK = _run_em(log_p_MK, labels_M, rates_KK, every_KK)
    high = float(counts_KK.sum() - np.trace(counts_KK))
    true_MK = softmax(scale * log_p_MK, axis=1)
    models = []
    for has_own_rate_KK in (_significant_confusions(counts_KK, true_MK.T @ true_MK), ~every_KK):
        scale, new_KK, _ = _run_em(log_p_MK, labels_M, rates_KK, has_own_rate_KK)
        loss = _mean_loss(log_p_MK, labels_M, scale, new_KK) * len(labels_M)
        # the penalty is twice that of the Bayesian information criterion
        models.append((loss + has_own_rate_KK.sum() * math.log(len(labels_M)), scale, new_KK))
        if not has_own_rate_KK.any():
            break
    _, scale, rates_KK = min(models, key=lambda each: each[0])
    true_NK[is_known_N] = true_MK = softmax(scale * log_p_MK, axis=1)
    posterior_NK[is_known_N] = _posterior(true_MK, labels_M, rates_KK)
    return true_NK, posterior_NK, high


def _run_em(
    log_p_NK: FloatArray,
    labels_N: NDArray[np.int64],
    rates_KK: FloatArray,
    has_own_rate_KK: NDArray[np.bool_],
) -> tuple[float, FloatArray, FloatArray]:
    """Maximize the likelihood of the labels.

    Args:
        rates_KK: initial rates, one row for each given class, one column for each true class.
        has_own_rate_KK: confusions with a rate of their own; the others share one.
    Returns: the scale of the logits, the rates, and the expected number of images (K, K) by given
        and true class.
    """
    num_images, num_classes = log_p_NK.shape
    cells = np.ones(num_images), (labels_N, np.arange(num_images))
    is_given_KN = sparse.csr_matrix(cells, shape=(num_classes, num_images))
    is_diagonal = np.eye(num_classes, dtype=bool)
    step = -(-num_images // _MAX_CALIBRATION_IMAGES)

    def loss(log_scale: float) -> float:
        return _mean_loss(log_p_NK[::step], labels_N[::step], math.exp(log_scale), rates_KK)

    for _ in range(_EM_ITERATIONS):
        found = minimize_scalar(loss, bounds=_LOG_SCALES, method="bounded", options={"xatol": 0.01})
        scale = math.exp(found.x)
        counts_KK = is_given_KN @ _posterior(softmax(scale * log_p_NK, axis=1), labels_N, rates_KK)
        true_K = counts_KK.sum(axis=0)
        off_KK = np.where(is_diagonal, 0.0, counts_KK)
        own_KK = np.where(has_own_rate_KK, off_KK, 0.0)
        common = (off_KK - own_KK).sum() / (true_K.sum() * (num_classes - 1))
        new_KK = (own_KK + common * true_K) / np.maximum(true_K, 1e-9)
        new_KK[is_diagonal] = 0.0
        new_KK += np.diag(np.maximum(1.0 - new_KK.sum(axis=0), 0.05))
        new_KK /= new_KK.sum(axis=0)
        change, rates_KK = np.abs(new_KK - rates_KK).max(), new_KK
        if change < _EM_TOLERANCE:
            break
    return scale, rates_KK, counts_KK


def _mean_loss(
    log_p_NK: FloatArray, labels_N: NDArray[np.int64], scale: float, rates_KK: FloatArray
) -> float:
    """Return the negative log-likelihood of the labels per image."""
    likelihoods_N = np.einsum("nk,nk->n", softmax(scale * log_p_NK, axis=1), rates_KK[labels_N])
    return -float(np.log(likelihoods_N + 1e-30).mean())


def _significant_confusions(counts_KK: FloatArray, overlaps_KK: FloatArray) -> NDArray[np.bool_]:
    """Return which confusions are more frequent than a common rate and the classifier explain.

    Args:
        counts_KK: expected number of images by given and true class.
        overlaps_KK: expected number that the classifier itself confuses.
    """
    num_classes = len(counts_KK)
    off_KK = np.where(np.eye(num_classes, dtype=bool), 0.0, counts_KK)
    true_K = counts_KK.sum(axis=0)
    is_significant_KK = np.zeros_like(off_KK, dtype=bool)
    for _ in range(5):
        remaining = np.where(is_significant_KK, 0.0, off_KK).sum()
        common = remaining / (true_K.sum() * (num_classes - 1))
        usual_KK = common * true_K + _CONFUSION_FRACTION * overlaps_KK
        is_significant_KK = off_KK > usual_KK + _SIGNIFICANCE * np.sqrt(usual_KK + 1.0)
    return is_significant_KK


def _posterior(
    true_NK: FloatArray, labels_N: NDArray[np.int64], rates_KK: FloatArray
) -> FloatArray:
    """Return the probabilities of the true class, given the image and the label."""
    joint_NK = true_NK * rates_KK[labels_N]
    joint_NK /= joint_NK.sum(axis=1, keepdims=True) + 1e-30
    return joint_NK


def find_label_errors(probabilities_NK: FloatArray, labels: NDArray[Any]) -> LabelErrors:
    """Estimate how probable it is that each label is wrong; cleanlab ranks the labels.

    The expected number assumes that only significant confusions are the annotators'; the upper
    limit that all of them are. The limits are two standard deviations away: of the number of wrong
    labels with these probabilities, and of the model's own error.

    Args:
        probabilities_NK: probabilities of a classifier that was not fitted to these images; 0 for
            classes that it does not know.
        labels: class indices (N,), or 0/1 indicators (N, K) for multi-label data.
    """
    from cleanlab.multilabel_classification import get_label_quality_scores as rank_multilabel
    from cleanlab.rank import get_label_quality_scores as rank

    rows = np.arange(len(labels))
    _, posterior_NK, high = fit_noise(probabilities_NK, labels)
    if labels.ndim == 1:
        scores_N = 1.0 - rank(labels, posterior_NK)
        others_NK = posterior_NK.copy()
        others_NK[rows, labels] = -1.0
        suggested = others_NK.argmax(axis=1)
    else:
        given = [np.flatnonzero(row).tolist() for row in labels]
        scores_N = 1.0 - rank_multilabel(given, posterior_NK)
        wrong_NK = np.abs(posterior_NK - labels)
        is_flipped_NK = wrong_NK > 0.5
        is_flipped_NK[rows, wrong_NK.argmax(axis=1)] = True
        suggested = np.where(is_flipped_NK, 1 - labels, labels).astype(labels.dtype)
    num_doubtful = int((scores_N > _MIN_SCORE).sum())
    num_surest = min(_MIN_LISTED, int(_MIN_LISTED_FRACTION * len(labels)))
    indices = np.argsort(-scores_N, kind="stable")[: max(num_doubtful, num_surest)]
    count = float(scores_N.sum())
    std = math.sqrt(float((scores_N * (1.0 - scores_N)).sum()) + 1.0)
    margin = 2.0 * math.hypot(std, _MODEL_ERROR * count)
    expected = count, max(count - margin, 0.0), min(max(high, count) + margin, len(labels))
    return LabelErrors(scores_N, suggested, indices, expected)
