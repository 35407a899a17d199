"""Images of no known class: found better than by confidence, with the promised false alarms."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import timm
import torch
from refusals import refused
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from finetune.evaluation import unknown_classes
from finetune.evaluation.unknown_classes import (
    FALSE_UNKNOWN_RATE,
    PreLogitsRecorder,
    UnknownClassScore,
    UnknownClassScoreFitter,
    fit_unknown_class_score,
)

WIDTH, NUM_CLASSES = 64, 5


class OneProcess:
    num_processes = 1


def draw(seed: int, num_images: int, *, is_known: bool = True) -> tuple[Tensor, Tensor]:
    """Draw features around class means, and logits: unknown classes share one mean with a class."""
    fixed = torch.Generator().manual_seed(0)
    means = 3 * torch.randn(NUM_CLASSES + 5, WIDTH, generator=fixed)
    spread = torch.randn(WIDTH, WIDTH, generator=fixed) * torch.logspace(0, -1.5, WIDTH)
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(0, NUM_CLASSES, (num_images,), generator=generator)
    features = torch.randn(num_images, WIDTH, generator=generator) @ spread.T
    features += means[classes] if is_known else 0.7 * means[classes] + 0.7 * means[classes + 5]
    return features, features @ means[:NUM_CLASSES].T / 60


def fit(features: Tensor, logits: Tensor) -> UnknownClassScore:
    return fit_unknown_class_score(features, logits.logsumexp(1), logits.amax(1))


def test_five_percent_of_known_images_are_marked() -> None:
    features, logits = draw(10_000, 20_000)
    energies, marked = logits.logsumexp(1), []
    for seed in range(20):
        score = fit(*draw(seed, 1000))
        is_marked = score.compute(features, energies) > score.threshold
        marked.append(float(is_marked.double().mean()))
    assert np.mean(marked) == pytest.approx(FALSE_UNKNOWN_RATE, abs=0.01)


def test_unknown_classes_are_found_better_than_by_confidence() -> None:
    score = fit(*draw(0, 1000))
    pairs = zip(draw(1, 500), draw(2, 500, is_known=False), strict=True)
    features, logits = (torch.cat(pair) for pair in pairs)
    is_unknown = np.arange(1000) >= 500
    found = roc_auc_score(is_unknown, score.compute(features, logits.logsumexp(1)))
    confidence = roc_auc_score(is_unknown, -logits.softmax(1).amax(1))
    assert found > confidence + 0.03
    # without its distance from the subspace, it is the energy
    energy = UnknownClassScore(score.mean_D, score.subspace_DR, 0.0, 0.0)
    assert torch.equal(energy.compute(features, logits.logsumexp(1)), -logits.logsumexp(1))


def test_the_score_is_the_distance_from_the_subspace_minus_the_energy() -> None:
    features, logits = draw(0, 400)
    score = fit(features, logits)
    fitted = features[::2].double()
    axes = torch.linalg.eigh((fitted - fitted.mean(0)).T @ (fitted - fitted.mean(0))).eigenvectors
    rest = axes[:, : WIDTH - score.subspace_DR.shape[1]]
    assert score.subspace_DR.shape == (WIDTH, WIDTH // 4)
    expected = ((features.double() - fitted.mean(0)) @ rest).norm(dim=1)
    distance = (score.compute(features, logits.logsumexp(1)) + logits.logsumexp(1)) / score.scale
    torch.testing.assert_close(distance.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("resnet10t", num_classes=NUM_CLASSES).eval()


def test_batches_and_padding_do_not_change_the_fit(network: nn.Module) -> None:
    images = torch.randn(120, 3, 32, 32)
    with torch.no_grad():
        features = network.forward_head(network.forward_features(images), pre_logits=True)
        expected = fit(features, network(images))
        with UnknownClassScoreFitter(network, 120) as fitter:
            for indices in np.split(np.arange(120), [50, 64])[::-1]:
                padded = torch.cat([images[indices], torch.zeros(3, 3, 32, 32)])
                logits = network(padded)[: len(indices)]
                fitter.update(logits, torch.zeros(len(indices)), indices)
    score = fitter.compute(OneProcess())  # type: ignore[arg-type]
    assert score is not None
    torch.testing.assert_close(score.mean_D, expected.mean_D, rtol=1e-4, atol=1e-5)
    assert score.threshold == pytest.approx(expected.threshold, rel=1e-3)
    classifier = network.get_classifier()
    assert not classifier._forward_pre_hooks


def test_few_images_and_other_classifiers_have_no_score(network: nn.Module, monkeypatch) -> None:
    fitter = UnknownClassScoreFitter(network, 99)
    with fitter, torch.no_grad():
        fitter.update(network(torch.randn(99, 3, 32, 32)), torch.zeros(99), np.arange(99))
    assert fitter.compute(OneProcess()) is None  # type: ignore[arg-type]
    monkeypatch.setattr(unknown_classes, "_MAX_IMAGES", 20)
    with UnknownClassScoreFitter(network, 200) as thinned, torch.no_grad():
        thinned.update(network(torch.randn(200, 3, 32, 32)), torch.zeros(200), np.arange(200))
    assert thinned.compute(OneProcess()) is None  # type: ignore[arg-type]
    convolution = timm.create_model("mobilenetv3_small_050", num_classes=5)
    convolution.classifier = nn.Sequential(nn.Linear(1024, 8), nn.Linear(8, 5))
    assert PreLogitsRecorder(convolution).width == 0


def test_each_thread_has_its_own_features(network: nn.Module) -> None:
    recorder, seen = PreLogitsRecorder(network), {}

    def run(value: float) -> None:
        with torch.no_grad():
            network(torch.full((1, 3, 32, 32), value))
        barrier.wait()
        seen[value] = recorder.last()

    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=run, args=(value,)) for value in (0.0, 1.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not torch.equal(seen[0.0], seen[1.0])


def test_the_entry_of_config_json_is_exact_and_checked() -> None:
    features, logits = draw(0, 400)
    score = fit(features, logits)
    entry = score.to_config()
    read = UnknownClassScore.from_config(entry, width=WIDTH, source="m")
    energies = logits.logsumexp(1)
    assert torch.equal(read.compute(features, energies), score.compute(features, energies))
    assert read.threshold == score.threshold
    for changes in (
        {"mean": "AAAA"},
        {"subspace": "AAA="},
        {"scale": "x"},
        {"scale": float("inf")},
        {"threshold": None},
    ):
        with refused("weights.wrong_config", "m: config.json", "--fit-temperature"):
            UnknownClassScore.from_config(entry | changes, width=WIDTH, source="m")
    with refused("weights.wrong_config"):
        UnknownClassScore.from_config(entry, width=WIDTH // 2, source="m")
    with refused("weights.wrong_config"):
        UnknownClassScore.from_config(7, width=WIDTH, source="m")
