"""Outliers in features and pixels."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_digits

from finetune.doctor.image_scan import find_feature_neighbors, measure_pixels
from finetune.doctor.outliers import Outlier, find_feature_outliers, find_pixel_problems
from finetune.errors import DataError


def find_outliers(features: list[np.ndarray], labels: np.ndarray) -> list[Outlier]:
    return find_feature_outliers([find_feature_neighbors(each) for each in features], labels)


def test_images_far_from_others() -> None:
    rng = np.random.default_rng(0)
    centers = 4 * rng.standard_normal((3, 16))
    labels = np.arange(300) % 3
    features = (centers[labels] + rng.standard_normal((300, 16))).astype(np.float32)
    features[[7, 100]] = 9 * rng.standard_normal((2, 16))
    found = find_outliers([features, features[:, ::-1]], labels)
    assert {outlier.row for outlier in found[:2]} == {7, 100}
    assert all(each.reason == "far_from_others" and 0.5 <= each.score <= 1 for each in found)
    # multi-label: all images are one class
    indicators = np.eye(3, dtype=np.uint8)[labels]
    assert {each.row for each in find_outliers([features], indicators)} >= {7, 100}


def test_false_alarms_on_clean_digits() -> None:
    digits = load_digits()
    found = find_outliers([digits.data.astype(np.float32)], digits.target)
    assert len(found) <= 0.01 * len(digits.target)


@pytest.mark.parametrize("num_images", [1, 40])
def test_equal_features_have_no_outlier(num_images: int) -> None:
    features = np.ones((num_images, 4), np.float32)
    assert find_outliers([features], np.zeros(num_images, np.int64)) == []


def test_pixel_problems() -> None:
    rng = np.random.default_rng(0)

    def noise(height: int, width: int, low: int = 0, high: int = 256) -> np.ndarray:
        return rng.integers(low, high, (height, width, 3), dtype=np.uint8)

    images = {
        1: ("blank", noise(40, 40, 99, 102)),
        3: ("tiny", noise(6, 6)),
        4: ("over_exposed", noise(40, 40, 225, 256)),
        6: ("under_exposed", noise(40, 40, 0, 30)),
        7: ("odd_shape", noise(40, 300)),
        9: ("unreadable", None),
    }

    def decode(index: int) -> np.ndarray:
        _, pixels = images.get(index, ("", noise(40, 50)))
        if pixels is None:
            raise DataError("9.png: cannot be decoded; replace it")
        return pixels

    found = find_pixel_problems(measure_pixels(decode, 12), 12)
    assert {each.row: each.reason for each in found} == {
        row: reason for row, (reason, _) in images.items()
    }
    assert found[0].reason == "unreadable"
    assert all(0 <= each.score <= 1 for each in found)


def test_small_images_are_not_tiny_if_all_are() -> None:
    digits = (load_digits().images[:100, :, :, None] * 15).astype(np.uint8).repeat(3, axis=3)
    facts = measure_pixels(lambda index: digits[index], 100)
    assert find_pixel_problems(facts, 100) == []
