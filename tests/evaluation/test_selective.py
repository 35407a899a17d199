"""Selective classification: the promised error rate holds for new images."""

from __future__ import annotations

import numpy as np
import pytest
from refusals import refused
from scipy.stats import binom

from finetune.evaluation.selective import (
    DELTA,
    images_needed,
    require_threshold,
    select_threshold,
)
from finetune.evaluation.validation_scores import ValidationScores


def draw_scores(seed: int, num_images: int, *, label_noise: float = 0.0) -> ValidationScores:
    """Draw images that a calibrated model classifies, about 6 % of them wrongly."""
    generator = np.random.default_rng(seed)
    confidences = 1 - np.maximum(0.9 * generator.beta(0.3, 4, num_images), 1e-12)
    is_wrong = generator.random(num_images) > confidences
    is_wrong |= generator.random(num_images) < label_noise
    log_odds = np.log(confidences / (1 - confidences)).astype(np.float32)
    nonconformity = np.where(is_wrong, 1.0, 0.0).astype(np.float32)
    return ValidationScores(log_odds, nonconformity, np.zeros(num_images, np.int64), "val")


@pytest.mark.parametrize(
    "num_images, max_error, label_noise",
    [
        pytest.param(200, 0.05, 0.0, marks=pytest.mark.faults),
        pytest.param(1000, 0.02, 0.0, marks=pytest.mark.faults),
        (1000, 0.03, 0.01),
        pytest.param(3000, 0.01, 0.0, marks=pytest.mark.faults),
    ],
)
def test_the_error_rate_holds_in_95_percent_of_splits(num_images, max_error, label_noise) -> None:
    population = draw_scores(10_000, 100_000, label_noise=label_noise)
    broken, coverages = 0, []
    for seed in range(200):
        found = select_threshold(draw_scores(seed, num_images, label_noise=label_noise), max_error)
        coverages.append(0.0)
        if found is not None:
            answered = population.log_odds > found.threshold
            coverages[-1] = answered.mean()
            broken += (population.nonconformity[answered] > 0).mean() > max_error
    assert broken <= 200 * DELTA
    assert np.mean(coverages) > 0.25  # it is not kept by abstaining always


def test_the_threshold_passes_the_binomial_test_and_the_next_one_does_not() -> None:
    scores = draw_scores(0, 1000)
    found = select_threshold(scores, 0.02)
    assert found is not None
    answered = scores.log_odds > found.threshold
    assert answered.sum() == found.num_answered < 1000
    assert (scores.nonconformity[answered] > 0).sum() == found.num_errors
    assert binom.cdf(found.num_errors, found.num_answered, 0.02) <= DELTA
    # a model without errors answers everything
    perfect = ValidationScores(
        scores.log_odds, np.zeros_like(scores.nonconformity), scores.label, "val"
    )
    everything = select_threshold(perfect, 0.02)
    assert everything is not None
    assert everything.threshold == -np.inf
    assert everything.num_answered == 1000


def test_equal_certainties_are_answered_together_or_not_at_all() -> None:
    """A saturated softmax gives many images the same log_odds, also the wrong ones."""
    log_odds = np.where(np.arange(1000) < 600, np.inf, 1.0).astype(np.float32)
    nonconformity = np.where(np.arange(1000) >= 600, 1.0, 0.0).astype(np.float32)
    scores = ValidationScores(log_odds, nonconformity, np.zeros(1000, np.int64), "val")
    found = select_threshold(scores, 0.05)
    assert found is None or found.num_errors == 0


def test_too_few_images_are_refused_with_the_number_needed() -> None:
    assert images_needed(0.02) == 149
    assert 0.98**149 <= DELTA < 0.98**148
    perfect = ValidationScores(
        np.ones(100, np.float32), np.zeros(100, np.float32), np.zeros(100, np.int64), "val"
    )
    assert select_threshold(perfect, 0.02) is None
    with refused("data.too_few_images", "--max-error 0.02", "149", "100 images", "is 0.03"):
        require_threshold(perfect, 0.02)


def test_a_model_with_too_many_errors_is_refused() -> None:
    generator = np.random.default_rng(0)
    scores = ValidationScores(
        generator.random(1000).astype(np.float32),
        (generator.random(1000) < 0.6).astype(np.float32),
        np.zeros(1000, np.int64),
        "val",
    )
    with refused("data.too_few_images", "too many errors", "62.8", "--fit-temperature"):
        require_threshold(scores, 0.02)


@pytest.mark.parametrize("value", [0.0, 1.0, -0.1, float("nan"), float("inf")])
def test_an_error_rate_out_of_range_is_refused(value: float) -> None:
    with refused("recipe.wrong_value", "--max-error"):
        select_threshold(draw_scores(0, 100), value)
