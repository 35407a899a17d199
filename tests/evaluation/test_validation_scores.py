"""Scores of the validation images in config.json: exact when read back, and checked."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from refusals import refused

from finetune.evaluation import validation_scores
from finetune.evaluation.metrics import ImageResults
from finetune.evaluation.validation_scores import ValidationScores, log_odds, nonconformity


def compute_results(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, np.ndarray]:
    results = ImageResults()
    results.update(logits, labels, np.arange(len(labels)))

    class OneProcess:
        num_processes = 1

    return results.compute(OneProcess())  # type: ignore[arg-type]


@pytest.fixture
def logits_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 5, (60,), generator=generator)
    return 3 * torch.randn(60, 5, generator=generator), labels


def test_scores_are_the_same_as_those_of_a_prediction(logits_and_labels) -> None:
    logits, labels = logits_and_labels
    results = compute_results(logits, labels)
    scores = ValidationScores.from_results(results, labels.numpy(), split="val")
    probabilities = logits.double().softmax(1)
    assert scores.log_odds == pytest.approx(log_odds(probabilities.amax(1)).numpy(), rel=1e-6)
    own = nonconformity(probabilities)[torch.arange(60), labels].numpy()
    assert scores.nonconformity == pytest.approx(own, rel=1e-6)
    assert ((scores.nonconformity == 0) == (logits.argmax(1) == labels).numpy()).all()
    entry = scores.to_config()
    read = ValidationScores.from_config(entry, num_classes=5, source="m")
    assert read.split == "val"
    for name in ("log_odds", "nonconformity", "label"):
        assert np.array_equal(getattr(read, name), getattr(scores, name))


def test_log_odds_separate_confidences_that_round_to_one() -> None:
    logits = torch.tensor([[20.0, 0.0], [25.0, 0.0]])
    assert torch.equal(*logits.softmax(1).amax(1))  # float32
    first, second = log_odds(logits.double().softmax(1).amax(1)).tolist()
    assert (first, second) == (pytest.approx(20), pytest.approx(25))


def test_a_large_split_is_thinned_evenly(logits_and_labels, monkeypatch) -> None:
    monkeypatch.setattr(validation_scores, "MAX_KEPT_IMAGES", 25)
    logits, labels = logits_and_labels
    scores = ValidationScores.from_results(
        compute_results(logits, labels), labels.numpy(), split="val"
    )
    assert np.array_equal(scores.label, labels.numpy()[::3])


@pytest.mark.parametrize(
    "changes",
    [
        {"label": "AAAA"},
        {"label": 3},
        {"log_odds": "not base64!"},
        {"split": None},
        {"nonconformity": None},
    ],
)
def test_a_damaged_entry_is_refused(logits_and_labels, changes) -> None:
    logits, labels = logits_and_labels
    entry = ValidationScores.from_results(
        compute_results(logits, labels), labels.numpy(), split="val"
    ).to_config()
    with refused("weights.wrong_config", "m: config.json", "--fit-temperature"):
        ValidationScores.from_config(entry | changes, num_classes=5, source="m")
    with refused("weights.wrong_config"):
        ValidationScores.from_config(entry, num_classes=4, source="m")
