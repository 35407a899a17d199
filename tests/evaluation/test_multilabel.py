"""Multi-label metrics: equal to scikit-learn, with thresholds that maximize F1."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from refusals import refused
from sklearn.metrics import average_precision_score, f1_score, precision_recall_fscore_support
from torch.nn.functional import binary_cross_entropy_with_logits

from finetune.evaluation.multilabel import (
    MultilabelMetrics,
    chance_mean_average_precision,
    sigmoid_probabilities,
)

IMAGES, CLASSES = 211, 7


@pytest.fixture(scope="module")
def sample() -> tuple[torch.Tensor, torch.Tensor]:
    """Return labels of rare to common classes, and logits with many ties."""
    generator = torch.Generator().manual_seed(0)
    share = torch.linspace(0.02, 0.7, CLASSES)
    labels = (torch.rand(IMAGES, CLASSES, generator=generator) < share).to(torch.uint8)
    logits = 2 * labels - 1 + 2 * torch.randn(IMAGES, CLASSES, generator=generator)
    return labels, (4 * logits).round() / 4


def compute_metrics(
    labels: torch.Tensor, logits: torch.Tensor, thresholds: list[float] | None = None
) -> tuple[dict[str, Any], MultilabelMetrics]:
    metrics = MultilabelMetrics(labels, thresholds)
    for batch, batch_labels in zip(logits.split(50), labels.split(50), strict=True):
        metrics.update(batch, batch_labels)
    return metrics.compute(Accelerator(cpu=True)), metrics


@pytest.mark.parametrize("thresholds", [None, [0.5] * CLASSES])
def test_metrics_match_scikit_learn(
    sample: tuple[torch.Tensor, torch.Tensor], thresholds: list[float] | None
) -> None:
    labels, logits = sample
    result, metrics = compute_metrics(labels, logits, thresholds)
    targets, p = labels.numpy(), sigmoid_probabilities(logits)
    assert metrics.thresholds is not None
    predicted = p >= np.array(metrics.thresholds)
    tolerance = {"rel": 0, "abs": 1e-9}
    assert result["map"] == pytest.approx(average_precision_score(targets, p), **tolerance)
    for key in ("macro", "micro"):
        assert result[f"{key}_f1"] == pytest.approx(
            f1_score(targets, predicted, average=key), **tolerance
        )
    rows = result["per_class"]
    expected = precision_recall_fscore_support(targets, predicted, average=None)
    for name, values in zip(("precision", "recall", "f1", "support"), expected, strict=True):
        assert [row[name] for row in rows] == pytest.approx(values.tolist(), **tolerance)
    per_class_ap = average_precision_score(targets, p, average=None).tolist()
    assert [row["ap"] for row in rows] == pytest.approx(per_class_ap, **tolerance)
    loss = binary_cross_entropy_with_logits(logits.double(), labels.double())
    assert result["loss"] == pytest.approx(loss.item(), **tolerance)
    assert result["examples"] == IMAGES


def test_fitted_thresholds_maximize_f1(sample: tuple[torch.Tensor, torch.Tensor]) -> None:
    labels, logits = sample
    result, metrics = compute_metrics(labels, logits)
    p = sigmoid_probabilities(logits)
    assert metrics.thresholds is not None
    for k, row in enumerate(result["per_class"]):
        values = np.unique(p[:, k])
        f1_scores = [f1_score(labels[:, k], p[:, k] >= value) for value in values]
        assert row["f1"] == pytest.approx(max(f1_scores), abs=1e-12)
        assert np.abs(values - metrics.thresholds[k]).min() > 1e-4, (
            "the threshold must not coincide with a score"
        )


def test_class_without_images_is_left_out_of_the_means() -> None:
    labels = torch.tensor([[1, 0, 0], [0, 0, 1], [1, 0, 1]], dtype=torch.uint8)
    logits = torch.tensor([[2.0, -9.0, -3.0], [-1.0, -9.0, 1.0], [1.0, -9.0, 2.0]])
    result, metrics = compute_metrics(labels, logits)
    empty = result["per_class"][1]
    assert (empty["ap"], empty["recall"], empty["precision"], empty["f1"]) == (None,) * 4
    assert (result["map"], result["macro_f1"], result["micro_f1"]) == (1.0, 1.0, 1.0)
    assert metrics.thresholds is not None
    assert metrics.thresholds[1] == 0.5
    assert metrics.top_losses(5) == []


def test_mistakes_are_images_with_any_wrong_label() -> None:
    labels = torch.tensor([[1, 0], [0, 1], [1, 1], [0, 0]], dtype=torch.uint8)
    logits = torch.tensor([[3.0, -3.0], [2.0, 2.0], [3.0, -8.0], [-1.0, -1.0]])
    _, metrics = compute_metrics(labels, logits, [0.5, 0.5])
    mistakes = metrics.top_losses(5)
    assert [
        (mistake["index"], mistake["labels"], mistake["predicted"]) for mistake in mistakes
    ] == [
        (2, [0, 1], [0]),
        (1, [1], [0, 1]),
    ]
    assert mistakes[0]["loss"] == pytest.approx((math.log1p(math.exp(-3)) + 8) / 2, abs=1e-3)
    assert len(metrics.top_losses(1)) == 1


def test_missing_labels_and_non_finite_logits_are_refused(
    sample: tuple[torch.Tensor, torch.Tensor],
) -> None:
    labels, logits = sample
    with refused("data.no_labels"):
        compute_metrics(torch.zeros_like(labels), logits)
    broken = logits.clone()
    broken[3, 2] = torch.nan
    with refused("diverged.outputs", "1 of 211"):
        compute_metrics(labels, broken)


@pytest.mark.parametrize("supports", [[28] * 10, [1, 3, 80]])
def test_chance_map_matches_random_scores(supports: list[int]) -> None:
    generator, images = np.random.default_rng(0), 148
    targets = np.stack([np.arange(images) < support for support in supports], axis=1)
    trials = [
        average_precision_score(targets, generator.random(targets.shape).round(9))
        for _ in range(60)
    ]
    mean, std = chance_mean_average_precision(supports, images)
    assert np.mean(trials) == pytest.approx(mean, abs=3 * np.std(trials) / math.sqrt(60))
    assert np.mean(np.array(trials) > mean + 2 * std) <= 0.1
