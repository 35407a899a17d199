"""The expected gain of configurations, from their recorded accuracies on other image sets."""

from __future__ import annotations

import math

import pytest

from finetune.commands.expected_gain import expected_gains, log_odds_ratio

RECORDED = {
    "start": {"tiles": 0.5, "photos": 0.5},
    "low": {"tiles": 0.4, "photos": 0.6},
    "high": {"tiles": 0.8, "photos": 0.3},
    "lora": {"tiles": 0.5, "photos": 0.8},
    "unknown": {},
}


def test_log_odds_ratio() -> None:
    assert log_odds_ratio(0.8, 0.5) == pytest.approx(math.log(4), abs=0.02)
    assert math.isfinite(log_odds_ratio(1.0, 0.0))


def test_image_sets_that_predict_the_measured_ones_count_more() -> None:
    before = expected_gains(RECORDED, "start", {"start": 0.0})
    assert before["high"] == pytest.approx(before["lora"], rel=0.1)
    assert before["unknown"] == 0
    like_photos = expected_gains(RECORDED, "start", {"start": 0.0, "low": log_odds_ratio(0.6, 0.5)})
    assert like_photos["lora"] > 2 * like_photos["high"]
    like_tiles = expected_gains(RECORDED, "start", {"start": 0.0, "low": log_odds_ratio(0.4, 0.5)})
    assert like_tiles["high"] > 2 * like_tiles["lora"]


def test_the_gain_is_that_over_the_best_measured_one() -> None:
    gains = [
        expected_gains(RECORDED, "start", {"start": 0.0, "unknown": ratio})["lora"]
        for ratio in (0.0, 1.0, 3.0)
    ]
    # half of it on the photos, where the log-odds ratio is 1.37, and the spread on the tiles
    assert gains[0] == pytest.approx((log_odds_ratio(0.8, 0.5) + 0.2 / math.sqrt(2 * math.pi)) / 2)
    assert gains[0] > gains[1] > gains[2] > 0
    assert gains[2] < 1e-6


def test_without_the_first_one_the_others_are_ranked_by_their_records() -> None:
    gains = expected_gains(RECORDED, "start", {})
    assert gains == expected_gains(RECORDED, "start", {"start": 0.0})
