"""Wrong labels: images whose label a classifier that has not seen them finds improbable.

Source: confident learning: Northcutt et al. 2021, Confident Learning: Estimating Uncertainty in
Dataset Labels.
"""

# N images, D width, K classes, F folds

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetune.errors import SetupError, install_hint
from finetune.progress import item_bar

__all__ = [
    "LabelErrors",
    "check_cleanlab",
    "find_label_errors",
    "out_of_fold_probabilities",
]

FloatArray = NDArray[np.floating[Any]]
_C_TIMES_IMAGES = 5.0  # C of logistic regression, times the number of training images
_MAX_ITERATIONS = 200
_MIN_PROBABILITY = 1e-6


@dataclass(frozen=True, eq=False)
class LabelErrors:
    """How probable it is that labels are wrong.

    Attributes:
        scores_N: in [0, 1] for every image; 1: surely wrong.
        suggested: best label of each image, in the format of the given labels.
        indices: images whose label is more probably wrong than right, surest first.
        expected: expected number of wrong labels, with the limits of a 95 % interval.
    """

    scores_N: NDArray[np.float64]
    suggested: NDArray[Any]
    indices: NDArray[np.int64]
    expected: tuple[float, float, float]


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
    folds: int = 5,
) -> FloatArray:
    """Predict each image with logistic regression that was fitted without it and its group.

    Args:
        features: features (N, D) of each network; the probabilities are averaged over networks.
        labels: class indices (N,), or 0/1 indicators (N, K) for multi-label data.
        groups_N: images of one group, such as duplicates, are in one fold.
        num_classes: K.
        folds: number of folds.
    Returns: (N, K). A class that no training image of a fold has, has the probability 0 there.
    """
    fold_N = _assign_folds(labels, groups_N, folds)
    total_NK = np.zeros((len(labels), num_classes))
    with item_bar(folds * len(features), label="cross-validation", unit="fit") as progress:
        for values_ND in features:
            for fold in range(folds):
                is_test = fold_N == fold
                if is_test.any() and not is_test.all():
                    total_NK[is_test] += _fit_and_predict(
                        values_ND[~is_test], labels[~is_test], values_ND[is_test], num_classes
                    )
                progress.update()
    return total_NK / len(features)


def _assign_folds(
    labels: NDArray[Any], groups_N: NDArray[np.int64], folds: int
) -> NDArray[np.int64]:
    """Deal the groups to the folds, stratified by the class of their first image."""
    _, first_rows, group_N = np.unique(groups_N, return_index=True, return_inverse=True)
    classes_N = labels if labels.ndim == 1 else labels.argmax(axis=1)
    shuffled = np.random.default_rng(0).permutation(len(first_rows))
    order = shuffled[np.argsort(classes_N[first_rows[shuffled]], kind="stable")]
    fold_of_group = np.empty(len(first_rows), dtype=np.int64)
    fold_of_group[order] = np.arange(len(order)) % folds
    return fold_of_group[group_N]


def _fit_and_predict(
    train_ND: NDArray[np.float32],
    labels: NDArray[Any],
    test_TD: NDArray[np.float32],
    num_classes: int,
) -> FloatArray:
    """Fit logistic regression on standardized features. Returns: probabilities (T, K)."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler().fit(train_ND)
    inputs, test_inputs = scaler.transform(train_ND), scaler.transform(test_TD)
    model = LogisticRegression(C=_C_TIMES_IMAGES / len(labels), max_iter=_MAX_ITERATIONS, tol=1e-3)

    def predict(targets: NDArray[Any]) -> FloatArray:
        if (targets == targets[0]).all():
            return np.ones((len(test_TD), 1))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            return np.asarray(model.fit(inputs, targets).predict_proba(test_inputs))

    probabilities_TK = np.zeros((len(test_TD), num_classes))
    if labels.ndim == 1:
        probabilities_TK[:, np.unique(labels)] = predict(labels)
        return probabilities_TK
    for k in range(num_classes):
        if labels[:, k].any():
            probabilities_TK[:, k] = predict(labels[:, k])[:, -1]
    return probabilities_TK


def find_label_errors(probabilities_NK: FloatArray, labels: NDArray[Any]) -> LabelErrors:
    """Rank labels by how improbable they are.

    Args:
        probabilities_NK: probabilities of a classifier that was not fitted to these images.
        labels: class indices (N,), or 0/1 indicators (N, K) for multi-label data.
    """
    from cleanlab.rank import get_label_quality_scores

    scores_N = 1.0 - get_label_quality_scores(labels, probabilities_NK)
    suggested = probabilities_NK.argmax(axis=1)
    indices = np.flatnonzero((suggested != labels) & (scores_N > 0.5))
    count = float(scores_N.sum())
    return LabelErrors(
        scores_N, suggested, indices[np.argsort(-scores_N[indices])], (count, count, count)
    )
