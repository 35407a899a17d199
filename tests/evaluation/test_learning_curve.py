"""The learning curve: accuracy on growing training sets, and the gain of twice as many images."""

from __future__ import annotations

import numpy as np
import pytest

from finetune.evaluation.learning_curve import measure_learning_curve


def gaussian_classes(num_images: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images of three classes whose features overlap: more images bring a better boundary."""
    generator = np.random.default_rng(seed)
    labels_N = np.arange(num_images) % 3
    means_KD = np.random.default_rng(0).normal(size=(3, 64)) * 0.3
    return means_KD[labels_N] + generator.normal(size=(num_images, 64)), labels_N


def test_it_predicts_the_gain_of_the_next_doubling() -> None:
    test = gaussian_classes(4000, seed=1)
    values_ND, labels_N = gaussian_classes(1920, seed=2)
    curve = measure_learning_curve((values_ND[:960], labels_N[:960]), test, num_classes=3)
    assert curve is not None
    assert curve["sizes"] == [60, 120, 240, 480, 960]
    assert curve["gain"]["images"] == 1920
    larger = measure_learning_curve((values_ND, labels_N), test, num_classes=3)
    assert larger is not None
    means = [float(np.mean(one["accuracies"][-1])) for one in (curve, larger)]
    assert curve["gain"]["low"] <= means[1] - means[0] <= curve["gain"]["high"]
    assert curve["gain"]["low"] < curve["gain"]["value"] < curve["gain"]["high"]


def test_features_that_are_solved_gain_nothing() -> None:
    labels_N = np.arange(200) % 2
    values_ND = np.eye(2)[labels_N]
    curve = measure_learning_curve((values_ND, labels_N), (values_ND, labels_N), num_classes=2)
    assert curve is not None
    assert np.array(curve["accuracies"]).min() == 1
    assert curve["gain"]["value"] == pytest.approx(0)


def test_five_images_per_class_are_too_few() -> None:
    train = gaussian_classes(15, seed=0)
    assert measure_learning_curve(train, train, num_classes=3) is None
