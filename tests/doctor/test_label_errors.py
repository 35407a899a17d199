"""Wrong labels: planted ones are found, and clean labels are left alone."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.metrics import average_precision_score

from finetune.doctor.label_errors import find_label_errors, out_of_fold_probabilities

CLASSES = 10


@pytest.fixture(scope="module")
def digits() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    data = load_digits()
    return data.data.astype(np.float32), data.target.astype(np.int64)


def flip(labels: NDArray[np.int64], fraction: float, kind: str) -> NDArray[np.int64]:
    generator = np.random.default_rng(0)
    rows = generator.permutation(len(labels))[: int(fraction * len(labels))]
    shift = 1 if kind == "pair" else generator.integers(1, CLASSES, len(rows))
    flipped = labels.copy()
    flipped[rows] = (labels[rows] + shift) % CLASSES
    return flipped


@pytest.mark.parametrize("kind, fraction", [("pair", 0.05), ("symmetric", 0.2)])
def test_planted_errors(digits: tuple, kind: str, fraction: float) -> None:
    from cleanlab.rank import get_label_quality_scores  # takes a second in each process

    values_ND, labels = digits
    given = flip(labels, fraction, kind)
    is_wrong = given != labels
    probabilities_NK = out_of_fold_probabilities(
        [values_ND], given, np.arange(len(given)), num_classes=CLASSES
    )
    errors = find_label_errors(probabilities_NK, given)
    precision = average_precision_score(is_wrong, errors.scores_N)
    for method in ("self_confidence", "normalized_margin"):
        theirs = get_label_quality_scores(given, probabilities_NK, method=method)
        assert precision >= average_precision_score(is_wrong, -theirs) - 0.002
    assert precision > 0.95
    surest = errors.indices[: int(0.8 * is_wrong.sum())]
    assert is_wrong[surest].mean() > 0.95
    assert (errors.suggested[surest] == labels[surest])[is_wrong[surest]].mean() > 0.95
    count, low, high = errors.expected
    assert low <= is_wrong.sum() <= high
    assert abs(count - is_wrong.sum()) < 0.15 * is_wrong.sum()


def test_clean_labels_give_few_alarms(digits: tuple) -> None:
    values_ND, labels = digits
    probabilities_NK = out_of_fold_probabilities(
        [values_ND], labels, np.arange(len(labels)), num_classes=CLASSES
    )
    errors = find_label_errors(probabilities_NK, labels)
    assert len(errors.indices) <= 0.01 * len(labels)
    assert errors.expected[0] < 0.005 * len(labels)


def test_copies_are_in_one_fold(digits: tuple) -> None:
    """Else a copy with the same wrong label would vouch for it."""
    values_ND, labels = digits[0][:400], digits[1][:400].copy()
    labels[:20] = (labels[:20] + 3) % CLASSES
    rows = np.concatenate([np.arange(400), *[np.arange(20)] * 8])
    scores = {
        is_grouped: find_label_errors(
            out_of_fold_probabilities(
                [values_ND[rows]],
                labels[rows],
                rows if is_grouped else np.arange(len(rows)),
                num_classes=CLASSES,
            ),
            labels[rows],
        ).scores_N[:20]
        for is_grouped in (True, False)
    }
    assert (scores[True] > scores[False]).mean() > 0.8


def test_several_labels_per_image(digits: tuple) -> None:
    """A missing and a wrong additional label are found: is it 0 or 6, is it 4 or 6?"""
    values_ND, digit = digits
    labels = np.stack([np.isin(digit, (0, 6)), np.isin(digit, (4, 6))], axis=1).astype(np.uint8)
    given = labels.copy()
    rows = np.random.default_rng(0).permutation(len(labels))[:80]
    given[rows[:40], 0] ^= 1
    given[rows[40:], 1] ^= 1
    probabilities_NK = out_of_fold_probabilities(
        [values_ND], given, np.arange(len(given)), num_classes=2
    )
    errors = find_label_errors(probabilities_NK, given)
    is_wrong = (given != labels).any(axis=1)
    assert average_precision_score(is_wrong, errors.scores_N) > 0.6
    surest = errors.indices[:40]
    assert (errors.suggested[surest] == labels[surest]).all(axis=1).mean() > 0.8


def test_a_class_with_one_image_is_not_judged() -> None:
    generator = np.random.default_rng(0)
    labels = np.array([0] * 20 + [1] * 20 + [2])
    values_ND = generator.normal(size=(41, 4)).astype(np.float32) + 5 * labels[:, None]
    probabilities_NK = out_of_fold_probabilities(
        [values_ND.astype(np.float32)], labels, np.arange(41), num_classes=3
    )
    assert probabilities_NK[40, 2] == 0
    errors = find_label_errors(probabilities_NK, labels)
    assert errors.scores_N[40] == 0
    assert 40 not in errors.indices
