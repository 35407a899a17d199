"""Figures of several labels an image: scikit-learn's, and thresholds that no other ones beat."""

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

from finetune.evaluation.multilabel import LabelScores, chance_map, probabilities

IMAGES, CLASSES = 211, 7


@pytest.fixture(scope="module")
def drawn() -> tuple[torch.Tensor, torch.Tensor]:
    """Labels of classes from rare to common, and logits of which many are equal."""
    generator = torch.Generator().manual_seed(0)
    share = torch.linspace(0.02, 0.7, CLASSES)
    labels = (torch.rand(IMAGES, CLASSES, generator=generator) < share).to(torch.uint8)
    logits = 2 * labels - 1 + 2 * torch.randn(IMAGES, CLASSES, generator=generator)
    return labels, (4 * logits).round() / 4


def figures(
    labels: torch.Tensor, logits: torch.Tensor, thresholds: list[float] | None = None
) -> tuple[dict[str, Any], LabelScores]:
    scores = LabelScores(labels, thresholds)
    for batch, own in zip(logits.split(50), labels.split(50), strict=True):
        scores.add(batch, own)
    return scores.figures(Accelerator(cpu=True)), scores


@pytest.mark.parametrize("thresholds", [None, [0.5] * CLASSES])
def test_figures_are_scikit_learns(
    drawn: tuple[torch.Tensor, torch.Tensor], thresholds: list[float] | None
) -> None:
    labels, logits = drawn
    result, scores = figures(labels, logits, thresholds)
    truth, p = labels.numpy(), probabilities(logits)
    assert scores.thresholds is not None
    said = p >= np.array(scores.thresholds)
    exactly = {"rel": 0, "abs": 1e-9}
    assert result["map"] == pytest.approx(average_precision_score(truth, p), **exactly)
    for key in ("macro", "micro"):
        assert result[f"{key}_f1"] == pytest.approx(f1_score(truth, said, average=key), **exactly)
    rows = result["per_class"]
    expected = precision_recall_fscore_support(truth, said, average=None)
    for name, values in zip(("precision", "recall", "f1", "support"), expected, strict=True):
        assert [row[name] for row in rows] == pytest.approx(values.tolist(), **exactly)
    each = average_precision_score(truth, p, average=None).tolist()
    assert [row["ap"] for row in rows] == pytest.approx(each, **exactly)
    loss = binary_cross_entropy_with_logits(logits.double(), labels.double())
    assert result["loss"] == pytest.approx(loss.item(), **exactly)
    assert result["examples"] == IMAGES


def test_no_other_threshold_has_a_larger_f1(drawn: tuple[torch.Tensor, torch.Tensor]) -> None:
    labels, logits = drawn
    result, scores = figures(labels, logits)
    p = probabilities(logits)
    assert scores.thresholds is not None
    for k, row in enumerate(result["per_class"]):
        values = np.unique(p[:, k])
        tried = [f1_score(labels[:, k], p[:, k] >= value) for value in values]
        assert row["f1"] == pytest.approx(max(tried), abs=1e-12)
        assert np.abs(values - scores.thresholds[k]).min() > 1e-4, "halfway between two scores"


def test_a_class_without_an_image_is_left_out_of_the_means() -> None:
    labels = torch.tensor([[1, 0, 0], [0, 0, 1], [1, 0, 1]], dtype=torch.uint8)
    logits = torch.tensor([[2.0, -9.0, -3.0], [-1.0, -9.0, 1.0], [1.0, -9.0, 2.0]])
    result, scores = figures(labels, logits)
    empty = result["per_class"][1]
    assert (empty["ap"], empty["recall"], empty["precision"], empty["f1"]) == (None,) * 4
    assert (result["map"], result["macro_f1"], result["micro_f1"]) == (1.0, 1.0, 1.0)
    assert scores.thresholds is not None
    assert scores.thresholds[1] == 0.5
    assert scores.mistakes(5) == []


def test_mistakes_are_images_whose_labels_are_not_exact() -> None:
    labels = torch.tensor([[1, 0], [0, 1], [1, 1], [0, 0]], dtype=torch.uint8)
    logits = torch.tensor([[3.0, -3.0], [2.0, 2.0], [3.0, -8.0], [-1.0, -1.0]])
    _, scores = figures(labels, logits, [0.5, 0.5])
    found = scores.mistakes(5)
    assert [(one["index"], one["labels"], one["predicted"]) for one in found] == [
        (2, [0, 1], [0]),
        (1, [1], [0, 1]),
    ]
    assert found[0]["loss"] == pytest.approx((math.log1p(math.exp(-3)) + 8) / 2, abs=1e-3)
    assert len(scores.mistakes(1)) == 1


def test_what_cannot_be_measured_is_refused(drawn: tuple[torch.Tensor, torch.Tensor]) -> None:
    labels, logits = drawn
    with refused("data.no_labels"):
        figures(torch.zeros_like(labels), logits)
    broken = logits.clone()
    broken[3, 2] = torch.nan
    with refused("diverged.outputs", "1 of 211"):
        figures(labels, broken)


@pytest.mark.parametrize("supports", [[28] * 10, [1, 3, 80]])
def test_chance_is_that_of_random_scores(supports: list[int]) -> None:
    generator, images = np.random.default_rng(0), 148
    truth = np.stack([np.arange(images) < support for support in supports], axis=1)
    trials = [
        average_precision_score(truth, generator.random(truth.shape).round(9)) for _ in range(60)
    ]
    mean, std = chance_map(supports, images)
    assert np.mean(trials) == pytest.approx(mean, abs=3 * np.std(trials) / math.sqrt(60))
    assert np.mean(np.array(trials) > mean + 2 * std) <= 0.1
