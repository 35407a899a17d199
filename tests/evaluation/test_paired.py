"""Paired comparison: test and interval against references, slices, and limits for CI."""

from __future__ import annotations

import itertools
import math
from typing import ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray
from refusals import refused

from finetune.evaluation.paired import (
    MIN_SLICE_IMAGES,
    compare_correct,
    compare_loss,
    mcnemar_test,
    paired_interval,
    parse_fail_condition,
    quartile_slices,
    rank_slices,
)


@pytest.mark.parametrize("total", [1, 2, 7, 30])
def test_mcnemar_test_counts_all_outcomes(total: int) -> None:
    for fixed in range(total + 1):
        chances = [math.comb(total, k) / 2**total for k in range(total + 1)]
        distance = abs(fixed - total / 2)
        farther = sum(p for k, p in enumerate(chances) if abs(k - total / 2) > distance + 1e-9)
        as_far = sum(p for k, p in enumerate(chances) if abs(k - total / 2) >= distance - 1e-9)
        mid_p, exact = mcnemar_test(fixed, total - fixed)
        assert exact == pytest.approx(as_far)
        assert mid_p == pytest.approx((farther + as_far) / 2 if distance else 1.0)
    assert mcnemar_test(0, 0) == (1.0, 1.0)


def test_mid_p_keeps_the_promised_false_alarms() -> None:
    """Weighted by the chance of each outcome, instead of simulated."""
    rates = []
    for total in range(20, 120, 5):
        results = [(mcnemar_test(k, total - k), math.comb(total, k)) for k in range(total + 1)]
        rates.append(
            [
                sum(weight for p_values, weight in results if p_values[index] < 0.05) / 2**total
                for index in (0, 1)
            ]
        )
    mid, exact = np.mean(rates, axis=0)
    assert 0.04 <= mid <= 0.055
    assert exact < 0.04


def test_interval_covers_the_difference() -> None:
    rng, covered = np.random.default_rng(0), 0
    for _ in range(1000):  # 6 % fixed, 3 % broken
        fixed, broken, _ = rng.multinomial(400, [0.06, 0.03, 0.91])
        low, high = paired_interval(int(fixed), int(broken), 400)
        covered += low <= 0.03 <= high
    assert 930 <= covered <= 970
    assert paired_interval(3, 0, 3)[1] == pytest.approx(1.0)
    low, high = paired_interval(0, 0, 3)
    assert low == -high < 0  # no flip on three images says little


def test_correct_answers_are_compared_in_both_directions() -> None:
    a, b = (np.array(list(text)) == "1" for text in ("1110010", "1101100"))
    compared = compare_correct(a, b)
    assert (compared["fixed"], compared["broken"]) == (2, 2)
    assert (compared["a"], compared["b"], compared["difference"]) == (4 / 7, 4 / 7, 0.0)
    ones = np.ones(50, bool)
    compared = compare_correct(ones, np.arange(50) >= 9)
    assert (compared["fixed"], compared["broken"]) == (0, 9)
    assert compared["difference"] == pytest.approx(-0.18)
    assert compared["interval"][0] < -0.18 < compared["interval"][1] < 0
    assert compared["p_value"] < compared["p_value_exact"] == pytest.approx(2 / 2**9)


def test_losses_are_compared_by_a_paired_t_test() -> None:
    a_N = np.random.default_rng(0).normal(size=200)
    noise_N = np.random.default_rng(1).normal(size=200)
    compared = compare_loss(a_N, a_N + 0.1 * noise_N + 0.05)
    error = 0.1 * noise_N.std(ddof=1) / math.sqrt(200)
    middle = compared["difference"]
    assert middle == pytest.approx(0.05 + 0.1 * noise_N.mean())
    # 1.972: 97.5 % quantile of Student's t with 199 degrees of freedom
    assert compared["interval"] == pytest.approx(
        [middle - 1.972 * error, middle + 1.972 * error], 1e-3
    )
    assert compared["p_value"] < 1e-6
    assert compare_loss(a_N, a_N)["p_value"] == 1
    shifted = compare_loss(np.zeros(5), np.ones(5))
    assert (shifted["interval"], shifted["p_value"]) == ([1.0, 1.0], 0.0)
    alone = compare_loss(np.zeros(1), np.ones(1))
    assert (alone["difference"], alone["interval"], alone["p_value"]) == (1.0, None, None)


def members(total: int, *indices: range) -> NDArray[np.bool_]:
    return np.isin(np.arange(total), [*itertools.chain(*indices)])


class TestSlices:
    def test_significant_slices_come_first_then_supported_differences(self) -> None:
        first = np.ones(1000, bool)
        second = ~members(1000, range(40), range(900, 904))
        slices = {
            "class": {"large": members(1000, range(400)), "none": members(1000, range(500, 900))},
            "folder": {"small": members(1000, range(900, 912)), "tiny": members(1000, range(3))},
        }
        rows, num_small = rank_slices(slices, first, second)
        # the drop of the small slice is 33 points, but may be chance
        assert [row["name"] for row in rows] == ["large", "small", "none"]
        assert [row["difference"] for row in rows] == pytest.approx([-0.1, -1 / 3, 0])
        assert [row["images"] for row in rows] == [400, 12, 400]
        assert rows[0]["kind"] == "class"
        assert num_small == 1
        assert MIN_SLICE_IMAGES > 3

    def test_p_values_are_corrected_for_the_number_of_slices(self) -> None:
        first, second = np.ones(400, bool), ~members(400, range(6))
        parts = {str(k): members(400, range(20 * k, 20 * k + 20)) for k in range(20)}
        alone, _ = rank_slices({"class": {"0": parts["0"]}}, first, second)
        rows, _ = rank_slices({"class": parts}, first, second)
        assert rows[0]["name"] == "0"
        assert alone[0]["p_adjusted"] == alone[0]["p_value"] == rows[0]["p_value"]
        assert rows[0]["p_adjusted"] == pytest.approx(20 * rows[0]["p_value"])
        assert all(row["p_adjusted"] <= 1 for row in rows)

    def test_no_slice_is_large_enough(self) -> None:
        answers = np.ones(3, bool)
        assert rank_slices({"class": {"a": answers}}, answers, answers) == ([], 1)

    def test_quartiles(self) -> None:
        values = np.array([30.0, 10.4, 20.0, 40.0, 10.0, 21.0, 33.0, 39.0])
        slices = quartile_slices(values, "{low} to {high} px")
        assert [*slices] == ["10 to 10 px", "20 to 21 px", "30 to 33 px", "39 to 40 px"]
        assert sum(slices.values()).tolist() == [1] * 8
        assert slices["20 to 21 px"].tolist() == [0, 0, 1, 0, 0, 1, 0, 0]

    def test_quartiles_of_few_values(self) -> None:
        assert quartile_slices(np.full(9, 32.0), "{low}–{high}") == {}
        halves = quartile_slices(np.repeat([32.0, 64.0], [8, 1]), "{low}–{high}")
        assert {name: int(each.sum()) for name, each in halves.items()} == {"32–32": 8, "64–64": 1}


class TestCondition:
    drop: ClassVar = {
        "a": 0.8,
        "b": 0.792,
        "difference": -0.008,
        "interval": [-0.02, 0.004],
        "p_value": 0.19,
    }

    def test_fails_only_beyond_the_limit(self) -> None:
        for text, fails in {
            "top1 drops 0.5": True,
            " top5  drops 0.79": True,
            "top1 drops 0.8": False,  # not exceeded, although 100 * 0.008 is not exactly 0.8
            "top1 drops 1": False,
            "top1 rises 0": False,
            "loss drops 0.001": True,
            "loss drops 0.5": False,  # in nats, not in hundredths
        }.items():
            violation = parse_fail_condition(text).violation(self.drop, 500)
            assert (violation is not None) == fails, text

    def test_message_has_the_figures(self) -> None:
        message = parse_fail_condition("top1 drops 0.5").violation(self.drop, 20)
        for text in (
            "0.8 points",
            "80.00 %",
            "79.20 %",
            "-2.00 to +0.40",
            "p = 0.190",
            "20 images",
        ):
            assert text in message
        assert "too few images" in message
        rise = {**self.drop, "difference": 0.25, "a": 1.0, "b": 1.25, "p_value": 1e-9}
        message = parse_fail_condition("loss rises 0.1").violation(rise, 5000)
        for text in ("loss rises by 0.25,", "1.0000 to 1.2500", "p < 0.001"):
            assert text in message
        assert "too few" not in message

    @pytest.mark.parametrize(
        "text",
        [
            *("", "top1", "accuracy drops 1", "top1 falls 1", "top1 drops", "top1 drops -1"),
            *("top1 drops 1%", "top1 drops nan", "top1 drops 1e9 points", "map drops 1"),
        ],
    )
    def test_other_texts_are_refused(self, text: str) -> None:
        with refused("recipe.wrong_value", "--fail-if", f"'{text}'", "top1 drops 0.5"):
            parse_fail_condition(text)
