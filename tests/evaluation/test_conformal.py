"""Conformal prediction: sets contain the true class as often as promised, for every class."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from refusals import refused

from finetune.evaluation.conformal import conformal_quantile, set_thresholds
from finetune.evaluation.validation_scores import ValidationScores, nonconformity

NUM_CLASSES = 10


def draw_probabilities(seed: int, num_images: int) -> tuple[torch.Tensor, np.ndarray]:
    """Draw softmax outputs and labels; class 0 is the easiest and class 9 the hardest."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, NUM_CLASSES, num_images)
    logits = generator.normal(size=(num_images, NUM_CLASSES))
    logits[np.arange(num_images), labels] += 2.3 - 0.12 * labels
    return torch.from_numpy(logits).softmax(1), labels


def scores_of(probabilities: torch.Tensor, labels: np.ndarray) -> ValidationScores:
    own = nonconformity(probabilities)[np.arange(len(labels)), labels].numpy()
    return ValidationScores(np.zeros_like(own), own, labels, "val")


def in_set(probabilities: torch.Tensor, thresholds: np.ndarray) -> np.ndarray:
    return (nonconformity(probabilities) <= torch.from_numpy(thresholds)).numpy()


def test_coverage_is_90_percent_and_at_least_85_for_the_worst_class() -> None:
    new, labels = draw_probabilities(10_000, 20_000)
    covered = []
    for seed in range(20):
        scores = scores_of(*draw_probabilities(seed, 2000))
        thresholds, _ = set_thresholds(scores, 0.9, num_classes=NUM_CLASSES)
        hits = in_set(new, thresholds)[np.arange(len(labels)), labels]
        covered.append([hits[labels == index].mean() for index in range(NUM_CLASSES)])
    assert np.mean(covered) == pytest.approx(0.9, abs=0.01)
    assert np.mean(covered, axis=0).min() >= 0.85


def test_without_thresholds_per_class_the_hardest_class_is_covered_less() -> None:
    """Few images per class: one threshold for all classes, which the message says."""
    new, labels = draw_probabilities(10_000, 20_000)
    covered = []
    for seed in range(20):
        scores = scores_of(*draw_probabilities(seed, 150))
        thresholds, note = set_thresholds(scores, 0.9, num_classes=NUM_CLASSES)
        assert len(set(thresholds)) == 1
        assert "0 of 10 classes" in note
        hits = in_set(new, thresholds)[np.arange(len(labels)), labels]
        covered.append([hits[labels == index].mean() for index in range(NUM_CLASSES)])
    assert np.mean(covered) == pytest.approx(0.9, abs=0.01)
    assert np.mean(covered, axis=0).min() < 0.85


def test_classes_with_few_images_share_a_threshold() -> None:
    probabilities, labels = draw_probabilities(0, 2000)
    rare = labels >= 8
    rows = np.flatnonzero(~rare | (np.cumsum(rare) <= 25))
    scores = scores_of(probabilities[rows], labels[rows])
    thresholds, note = set_thresholds(scores, 0.9, num_classes=NUM_CLASSES)
    assert "8 of 10 classes" in note
    shared = conformal_quantile(scores.nonconformity[scores.label > 7], 0.9)
    assert thresholds[8] == thresholds[9] == shared
    assert thresholds[3] == conformal_quantile(scores.nonconformity[scores.label == 3], 0.9)


def test_the_predicted_class_is_always_in_the_set() -> None:
    probabilities, _ = draw_probabilities(0, 2000)
    easy = probabilities.argmax(1).numpy()  # a model that is always right
    thresholds, note = set_thresholds(scores_of(probabilities, easy), 0.9, num_classes=NUM_CLASSES)
    assert "100.0 %" in note
    sets = in_set(probabilities, thresholds)
    assert (sets.sum(1) == 1).all()
    assert sets[np.arange(2000), easy].all()


def test_the_quantile_counts_the_new_image() -> None:
    values = np.arange(1, 10, dtype=float)
    assert conformal_quantile(values, 0.9) == 9  # of 10 images, the new one included
    assert conformal_quantile(values, 0.5) == 5
    assert conformal_quantile(values[:8], 0.9) == np.inf


@pytest.mark.parametrize("value", [0.0, 1.0, float("nan"), 1.5])
def test_a_coverage_out_of_range_is_refused(value: float) -> None:
    with refused("recipe.wrong_value", "--coverage"):
        set_thresholds(scores_of(*draw_probabilities(0, 100)), value, num_classes=NUM_CLASSES)


def test_too_few_images_are_refused_with_the_number_needed() -> None:
    scores = scores_of(*draw_probabilities(0, 8))
    with refused("data.too_few_images", "--coverage 0.9", "at least 9", "8 images"):
        set_thresholds(scores, 0.9, num_classes=NUM_CLASSES)
    set_thresholds(scores_of(*draw_probabilities(0, 9)), 0.9, num_classes=NUM_CLASSES)
