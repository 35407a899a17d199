"""Checking claims against a run's metrics: when a value is measured, verdicts, missing data."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest

from finetune.evaluation.claims import VERDICTS, check_claims, claims_table, primary_metric


def metrics_line(split: str, step: int, **values: Any) -> dict[str, Any]:
    return {"step": step, "samples_seen": 64 * step, "split": split, "lr": 1e-4, **values}


# Four epochs of 10 steps, a log line every 5, an evaluation per epoch.
HISTORY = [
    metrics_line("train", 5, loss=2.0, top1=0.30),
    metrics_line("train", 10, loss=1.0, top1=0.50),
    metrics_line("val", 10, loss=0.80, top1=0.60, top5=0.95),
    metrics_line("train", 15, loss=0.9, top1=0.60),
    metrics_line("train", 20, loss=0.7, top1=0.70),
    metrics_line("val", 20, loss=0.50, top1=0.80, top5=0.97),
    metrics_line("train", 25, loss=0.5, top1=0.80),
    metrics_line("train", 30, loss=0.4, top1=0.85),
    metrics_line("val", 30, loss=0.55, top1=0.90, top5=0.98),
    metrics_line("train", 35, loss=0.3, top1=0.90),
    metrics_line("train", 40, loss=0.2, top1=0.96),
    metrics_line("val", 40, loss=0.65, top1=0.85, top5=0.99),
]
RESULTS = {
    "val": {"loss": 0.55, "top1": 0.90, "top5": 0.98, "ece": 0.03},
    "test": {"loss": 0.60, "top1": 0.88, "top5": 0.97, "ece": 0.04},
    "train": HISTORY[-2],
    "best_step": 30,
}


def check_claim(
    metric: str,
    when: str | None = None,
    *,
    history: Any = HISTORY,
    results: Any = RESULTS,
    **comparison: Any,
) -> dict[str, Any]:
    claim = {"metric": metric, "source": "a paper, table 1", **comparison}
    if when is not None:
        claim["when"] = when
    (row,) = check_claims([claim], history, results, 10.0)
    assert row.items() >= claim.items(), "the row repeats the claim"
    assert row["verdict"] in VERDICTS
    assert row["how"]
    return row


@pytest.mark.parametrize(
    "metric, when, expected",
    [
        ("val.top1", None, 0.85),
        ("val.top1", "end", 0.85),
        ("val.top1", "first", 0.60),
        ("val.top1", "best", 0.90),
        ("val.loss", "best", 0.50),
        ("val.top1", "epoch 1", 0.60),
        ("val.top1", "epoch 2", 0.80),
        ("val.top5", "epoch 4", 0.99),
        ("val.ece", "end", 0.03),
        ("val.ece", "best", 0.03),
        ("test.top1", "end", 0.88),
        ("test.top1", "best", 0.88),
        ("test.ece", "end", 0.04),
        ("train.top1", "first", 0.40),
        ("train.loss", "epoch 2", 0.80),
        ("train.top1", "end", 0.93),
        ("train.loss", "best", 0.25),
        ("run.epochs", "end", 4),
    ],
)
def test_when_selects_the_measured_value(metric: str, when: str | None, expected: float) -> None:
    row = check_claim(metric, when, value=expected, tolerance=0.0)
    assert row["measured"] == pytest.approx(expected, rel=1e-12)
    assert row["verdict"] == "met"
    # the value decides the verdict
    assert check_claim(metric, when, value=expected + 0.011, tolerance=0.01)["verdict"] == "not met"


def test_how_names_the_averaged_lines_or_the_evaluation() -> None:
    assert (
        check_claim("train.top1", "first", value=0.4)["how"] == "mean of 2 train lines, steps 1–10"
    )
    assert check_claim("val.top1", "first", value=0.6)["how"] == "evaluation at step 10"


def test_log_lines_are_weighted_by_the_steps_they_cover() -> None:
    history = [
        metrics_line("train", 8, loss=1.0),
        metrics_line("train", 10, loss=2.0),
        metrics_line("val", 10, loss=1.0),
    ]
    assert (
        check_claim("train.loss", "first", value=1.2, tolerance=0, history=history)["verdict"]
        == "met"
    )


def test_value_tolerance_is_two_sided_and_inclusive() -> None:
    history = [metrics_line("val", 10, top1=0.8)]
    comparison: dict[str, Any] = {"value": 0.7, "tolerance": 0.1, "history": history}
    assert abs(0.8 - 0.7) > 0.1, "floating point exceeds the tolerance at its edge"
    assert check_claim("val.top1", **comparison)["verdict"] == "met"
    assert check_claim("val.top1", **{**comparison, "tolerance": 0.0999})["verdict"] == "not met"
    assert check_claim("val.top1", **{**comparison, "value": 0.9001})["verdict"] == "not met"
    assert check_claim("val.top1", **{**comparison, "value": 0.9})["verdict"] == "met"


def test_between_is_inclusive() -> None:
    assert check_claim("val.top1", between=[0.85, 0.9])["verdict"] == "met"
    assert check_claim("val.top1", between=(0.8, 0.85))["verdict"] == "met"
    assert check_claim("val.top1", between=[0.86, 0.9])["verdict"] == "not met"


def test_trend_is_the_slope_after_an_epoch() -> None:
    # after epoch 2: 0.55, 0.65, without the evaluation at the end of epoch 2
    rising = check_claim("val.loss", "after epoch 2", trend="rising")
    assert rising["measured"] == pytest.approx(0.10, rel=1e-9)
    assert rising["verdict"] == "met"
    assert rising["how"] == "slope per epoch over 2 evaluations after epoch 2"
    assert check_claim("val.loss", "after epoch 2", trend="falling")["verdict"] == "not met"
    # least squares over 0.50, 0.55, 0.65
    assert check_claim("val.loss", "after epoch 1", trend="rising")["measured"] == pytest.approx(
        0.075
    )
    # whole run, 0.8 0.5 0.55 0.65: (-1.5*0.8 - 0.5*0.5 + 0.5*0.55 + 1.5*0.65) / 5
    whole_run = check_claim("val.loss", "end", trend="falling")
    assert whole_run["measured"] == pytest.approx(-0.04)
    assert whole_run["verdict"] == "met"
    assert check_claim("train.loss", "after epoch 1", trend="falling")["verdict"] == "met"


def test_flat_values_and_single_points_have_no_trend() -> None:
    flat = [metrics_line("val", step, loss=0.5) for step in (10, 20, 30)]
    for trend in ("rising", "falling"):
        row = check_claim("val.loss", "after epoch 1", trend=trend, history=flat)
        assert (row["measured"], row["verdict"]) == (0.0, "not met")
        row = check_claim("val.loss", "after epoch 2", trend=trend, history=flat)
        assert (row["measured"], row["verdict"]) == (None, "not measured")
        assert row["how"] == "1 evaluation after epoch 2; a trend needs 2"


def test_below_compares_values_at_the_same_step() -> None:
    end = check_claim("val.loss", below="train.loss")
    assert (end["measured"], end["measured_other"]) == (0.65, pytest.approx(0.25))
    assert end["verdict"] == "not met"
    first = check_claim("val.loss", "first", below="train.loss")
    assert (first["measured"], first["measured_other"]) == (0.80, pytest.approx(1.5))
    assert first["verdict"] == "met"
    assert "train.loss: mean of 2 train lines" in first["how"]
    # the best val.loss is at step 20, where the training loss was 0.8
    assert check_claim("val.loss", "best", below="train.loss")["measured_other"] == pytest.approx(
        0.8
    )
    assert check_claim("val.top1", below="val.top1")["verdict"] == "not met", "equal is not below"
    assert check_claim("test.loss", below="val.loss")["verdict"] == "met"


def test_epochs_with_a_fractional_number_of_steps() -> None:
    claims = [{"metric": "val.top1", "when": f"epoch {n}", "value": 0.0} for n in (1, 2, 3, 4)]
    # 10.5 steps per epoch: evaluated after steps 11, 21 and 31, the run's last, instead of 32
    history = [
        metrics_line("val", 11, top1=0.1),
        metrics_line("val", 21, top1=0.2),
        metrics_line("val", 31, top1=0.3),
    ]
    measured = [row["measured"] for row in check_claims(claims, history, {}, 10.5)]
    assert measured == [0.1, 0.2, 0.3, None]


def test_epoch_without_evaluation_does_not_use_a_later_one() -> None:
    history = [metrics_line("val", step, top1=step / 100) for step in (40, 80)]
    claims = [{"metric": "val.top1", "when": f"epoch {n}", "value": 0.4} for n in (1, 4, 5, 8)]
    measured = [row["measured"] for row in check_claims(claims, history, {}, 10.0)]
    assert measured == [None, 0.4, None, 0.8]


def test_last_line_of_a_step_counts_in_any_order() -> None:
    history = [
        metrics_line("val", 20, top1=0.7),
        metrics_line("val", 10, top1=0.1),
        metrics_line("val", 10, top1=0.6),
    ]
    assert check_claim("val.top1", "first", value=0.6, history=history)["measured"] == 0.6
    assert check_claim("val.top1", "end", value=0.7, history=history)["measured"] == 0.7


def test_without_validation_end_uses_the_last_epoch_and_the_results() -> None:
    history = [row for row in HISTORY if row["split"] == "train"]
    assert check_claim("train.loss", value=0.25, history=history)["measured"] == pytest.approx(0.25)
    assert check_claim("test.top1", value=0.88, history=history)["measured"] == 0.88
    assert check_claim("test.top1", value=0.88, history=[])["measured"] == 0.88
    assert check_claim("val.top1", value=0.9, history=[])["measured"] == 0.90


@pytest.mark.parametrize(
    "metric, when, comparison, reason",
    [
        ("val.top1", "epoch 5", {"value": 0.9}, "no evaluation at the end of epoch 5"),
        ("val.top1", "after epoch 2", {"value": 0.9}, "'after epoch 2' selects no evaluation"),
        ("val.loss", "epoch 2", {"trend": "rising"}, "'after epoch N', not 'epoch 2'"),
        ("test.top1", "first", {"value": 0.9}, "test.top1 is measured only at the end"),
        (
            "test.loss",
            "after epoch 1",
            {"trend": "rising"},
            "the test split is measured only at the end",
        ),
        ("val.ece", "first", {"value": 0.9}, "measured only at the end"),
        ("val.loss", "first", {"below": "test.loss"}, "test.loss is measured only at the end"),
        ("train.top5", "first", {"value": 0.9}, "no train line in steps 1–10"),
        ("other.top1", "end", {"value": 0.9}, "no other.top1"),
        ("val", "end", {"value": 0.9}, "no val"),
        ("val.top1", "someday", {"value": 0.9}, "'someday' selects no evaluation"),
        ("val.top1", "end", {}, "the claim has no value"),
    ],
)
def test_missing_data_is_not_measured(
    metric: str, when: str, comparison: dict[str, Any], reason: str
) -> None:
    row = check_claim(metric, when, **comparison)
    assert row["verdict"] == "not measured"
    assert reason in row["how"]


@pytest.mark.parametrize("results", [{}, {"test": None}, {"test": {"top1": None}}])
@pytest.mark.parametrize(
    "history",
    [
        [],
        [{"step": 10}],
        [metrics_line("val", 10)],
        [metrics_line("val", 10, loss=None, top1=math.nan), metrics_line("train", 10, top1=None)],
    ],
)
def test_runs_without_the_metric_are_not_measured(history: Any, results: Any) -> None:
    comparisons: list[dict[str, Any]] = [
        {"value": 0.5},
        {"between": [0, 1]},
        {"trend": "rising"},
        {"below": "train.top1"},
        {},
    ]
    moments = ["end", "first", "best", "epoch 1", "after epoch 1", None]
    claims = [
        {"metric": f"{split}.top1", "when": when, **comparison}
        for split in ("train", "val", "test")
        for when in moments
        for comparison in comparisons
    ]
    for steps_per_epoch in (10.0, 0.3, 0.0):
        rows = check_claims([*claims, {}], history, results, steps_per_epoch)
        assert len(rows) == len(claims) + 1 > 80
        assert {row["verdict"] for row in rows} == {"not measured"}
        assert {row["measured"] for row in rows} == {None}
        assert claims_table(rows).count("\n") == len(rows) + 2


def test_claim_with_all_keys_is_accepted() -> None:
    """A claim as the recipe model dumps it: all keys, None where not given."""
    empty: dict[str, Any] = dict.fromkeys(("value", "between", "trend", "below", "note"))
    claim: dict[str, Any] = {
        **empty,
        "metric": "val.top1",
        "when": "best",
        "tolerance": 0.005,
        "source": "s",
    }
    (row,) = check_claims([claim | {"between": (0.85, 0.95)}], HISTORY, RESULTS, 10)
    assert (row["measured"], row["verdict"]) == (0.90, "met")


def test_check_claims_does_not_modify_its_input() -> None:
    claim: dict[str, Any] = {"metric": "val.top1", "value": 0.9, "source": "s"}
    check_claims([claim], HISTORY, RESULTS, 10)
    assert claim == {"metric": "val.top1", "value": 0.9, "source": "s"}


def test_claims_table() -> None:
    claims: list[dict[str, Any]] = [
        {"metric": "test.top1", "value": 0.9895, "tolerance": 0.0015, "source": "ViT, table 5"},
        {"metric": "val.loss", "when": "after epoch 2", "trend": "rising", "source": "a | b\nc"},
        {"metric": "val.loss", "when": "first", "below": "train.loss", "source": "review"},
        {"metric": "val.top1", "when": "epoch 9", "between": [0.9, 0.95], "source": "review"},
    ]
    assert claims_table(check_claims(claims, HISTORY, RESULTS, 10)).splitlines() == [
        "| claim | source | reported | measured | verdict |",
        "| --- | --- | --- | --- | --- |",
        "| test.top1 | ViT, table 5 | 98.95 % ± 0.15 % | 88.00 % | not met |",
        r"| val.loss, after epoch 2 | a \| b c | rising | +0.1 per epoch | met |",
        "| val.loss, first | review | below train.loss | 0.8000 and 1.5000 | met |",
        "| val.top1, epoch 9 | review | 90.00 % to 95.00 % "
        "| – (no evaluation at the end of epoch 9) | not measured |",
    ]
    assert claims_table([]).count("\n") == 2


def test_importing_claims_does_not_import_torch() -> None:
    code = (
        "import sys, finetune.evaluation.claims; assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_primary_metric_by_task() -> None:
    assert primary_metric({"loss": 1.0, "top1": 0.5, "top5": 0.9}) == "top1"
    assert primary_metric({"loss": 1.0, "map": 0.5, "macro_f1": 0.9}) == "map"
