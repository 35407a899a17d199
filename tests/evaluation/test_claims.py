"""Claims answered from a run's lines: moments, verdicts, and missing data."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest

from finetune.evaluation.claims import VERDICTS, answer, main_figure, table


def line(split: str, step: int, **values: Any) -> dict[str, Any]:
    return {"step": step, "samples_seen": 64 * step, "split": split, "lr": 1e-4, **values}


# Four epochs of 10 steps, a log line every 5, an evaluation per epoch.
HISTORY = [
    line("train", 5, loss=2.0, top1=0.30),
    line("train", 10, loss=1.0, top1=0.50),
    line("val", 10, loss=0.80, top1=0.60, top5=0.95),
    line("train", 15, loss=0.9, top1=0.60),
    line("train", 20, loss=0.7, top1=0.70),
    line("val", 20, loss=0.50, top1=0.80, top5=0.97),
    line("train", 25, loss=0.5, top1=0.80),
    line("train", 30, loss=0.4, top1=0.85),
    line("val", 30, loss=0.55, top1=0.90, top5=0.98),
    line("train", 35, loss=0.3, top1=0.90),
    line("train", 40, loss=0.2, top1=0.96),
    line("val", 40, loss=0.65, top1=0.85, top5=0.99),
]
RESULTS = {
    "val": {"loss": 0.55, "top1": 0.90, "top5": 0.98, "ece": 0.03},
    "test": {"loss": 0.60, "top1": 0.88, "top5": 0.97, "ece": 0.04},
    "train": HISTORY[-2],
    "best_step": 30,
}


def one(
    metric: str,
    when: str | None = None,
    *,
    history: Any = HISTORY,
    results: Any = RESULTS,
    **kind: Any,
) -> dict[str, Any]:
    claim = {"metric": metric, "source": "a paper, table 1", **kind}
    if when is not None:
        claim["when"] = when
    (found,) = answer([claim], history, results, 10.0)
    assert found.items() >= claim.items(), "the claim is repeated"
    assert found["verdict"] in VERDICTS
    assert found["how"]
    return found


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
def test_moments(metric: str, when: str | None, expected: float) -> None:
    found = one(metric, when, value=expected, tolerance=0.0)
    assert found["measured"] == pytest.approx(expected, rel=1e-12)
    assert found["verdict"] == "met"
    # and it is the figure that decides
    assert one(metric, when, value=expected + 0.011, tolerance=0.01)["verdict"] == "not met"


def test_the_figure_of_training_says_which_lines_it_averages() -> None:
    assert one("train.top1", "first", value=0.4)["how"] == "mean of 2 train lines, steps 1–10"
    assert one("val.top1", "first", value=0.6)["how"] == "evaluation at step 10"


def test_log_lines_count_by_the_steps_they_cover() -> None:
    history = [line("train", 8, loss=1.0), line("train", 10, loss=2.0), line("val", 10, loss=1.0)]
    assert one("train.loss", "first", value=1.2, tolerance=0, history=history)["verdict"] == "met"


def test_value_is_two_sided_and_its_edge_is_inside() -> None:
    history = [line("val", 10, top1=0.8)]
    kind: dict[str, Any] = {"value": 0.7, "tolerance": 0.1, "history": history}
    assert abs(0.8 - 0.7) > 0.1, "the edge that floating point would miss"
    assert one("val.top1", **kind)["verdict"] == "met"
    assert one("val.top1", **{**kind, "tolerance": 0.0999})["verdict"] == "not met"
    assert one("val.top1", **{**kind, "value": 0.9001})["verdict"] == "not met"
    assert one("val.top1", **{**kind, "value": 0.9})["verdict"] == "met"


def test_between_includes_its_ends() -> None:
    assert one("val.top1", between=[0.85, 0.9])["verdict"] == "met"
    assert one("val.top1", between=(0.8, 0.85))["verdict"] == "met"
    assert one("val.top1", between=[0.86, 0.9])["verdict"] == "not met"


def test_trend_after_an_epoch() -> None:
    # after epoch 2: 0.55, 0.65; the evaluation at the end of epoch 2 is not after it
    rising = one("val.loss", "after epoch 2", trend="rising")
    assert rising["measured"] == pytest.approx(0.10, rel=1e-9)
    assert rising["verdict"] == "met"
    assert rising["how"] == "slope per epoch over 2 evaluations after epoch 2"
    assert one("val.loss", "after epoch 2", trend="falling")["verdict"] == "not met"
    # least squares over 0.50, 0.55, 0.65
    assert one("val.loss", "after epoch 1", trend="rising")["measured"] == pytest.approx(0.075)
    # whole run, 0.8 0.5 0.55 0.65: (-1.5*0.8 - 0.5*0.5 + 0.5*0.55 + 1.5*0.65) / 5
    whole = one("val.loss", "end", trend="falling")
    assert whole["measured"] == pytest.approx(-0.04)
    assert whole["verdict"] == "met"
    assert one("train.loss", "after epoch 1", trend="falling")["verdict"] == "met"


def test_a_flat_line_has_no_trend_and_one_point_neither() -> None:
    flat = [line("val", step, loss=0.5) for step in (10, 20, 30)]
    for trend in ("rising", "falling"):
        found = one("val.loss", "after epoch 1", trend=trend, history=flat)
        assert (found["measured"], found["verdict"]) == (0.0, "not met")
        found = one("val.loss", "after epoch 2", trend=trend, history=flat)
        assert (found["measured"], found["verdict"]) == (None, "not measured")
        assert found["how"] == "1 evaluation after epoch 2; a trend needs 2"


def test_below_compares_at_the_same_moment() -> None:
    end = one("val.loss", below="train.loss")
    assert (end["measured"], end["measured_other"]) == (0.65, pytest.approx(0.25))
    assert end["verdict"] == "not met"
    first = one("val.loss", "first", below="train.loss")
    assert (first["measured"], first["measured_other"]) == (0.80, pytest.approx(1.5))
    assert first["verdict"] == "met"
    assert "train.loss: mean of 2 train lines" in first["how"]
    # the best val.loss is at step 20, where training's was 0.8
    assert one("val.loss", "best", below="train.loss")["measured_other"] == pytest.approx(0.8)
    assert one("val.top1", below="val.top1")["verdict"] == "not met", "equal is not below"
    assert one("test.loss", below="val.loss")["verdict"] == "met"


def test_epochs_that_are_no_whole_number_of_steps() -> None:
    claims = [{"metric": "val.top1", "when": f"epoch {n}", "value": 0.0} for n in (1, 2, 3, 4)]
    # 10.5 steps an epoch: evaluated after steps 11, 21 and, the run's last, 31 instead of 32
    history = [line("val", 11, top1=0.1), line("val", 21, top1=0.2), line("val", 31, top1=0.3)]
    found = [row["measured"] for row in answer(claims, history, {}, 10.5)]
    assert found == [0.1, 0.2, 0.3, None]


def test_an_epoch_that_was_not_evaluated_is_not_borrowed_from_a_later_one() -> None:
    history = [line("val", step, top1=step / 100) for step in (40, 80)]
    claims = [{"metric": "val.top1", "when": f"epoch {n}", "value": 0.4} for n in (1, 4, 5, 8)]
    found = [row["measured"] for row in answer(claims, history, {}, 10.0)]
    assert found == [None, 0.4, None, 0.8]


def test_the_later_line_of_a_step_counts_and_order_does_not() -> None:
    history = [line("val", 20, top1=0.7), line("val", 10, top1=0.1), line("val", 10, top1=0.6)]
    assert one("val.top1", "first", value=0.6, history=history)["measured"] == 0.6
    assert one("val.top1", "end", value=0.7, history=history)["measured"] == 0.7


def test_without_validation_the_end_is_the_last_epoch_and_the_results() -> None:
    history = [row for row in HISTORY if row["split"] == "train"]
    assert one("train.loss", value=0.25, history=history)["measured"] == pytest.approx(0.25)
    assert one("test.top1", value=0.88, history=history)["measured"] == 0.88
    assert one("test.top1", value=0.88, history=[])["measured"] == 0.88
    assert one("val.top1", value=0.9, history=[])["measured"] == 0.90


@pytest.mark.parametrize(
    "metric, when, kind, reason",
    [
        ("val.top1", "epoch 5", {"value": 0.9}, "no evaluation at the end of epoch 5"),
        ("val.top1", "after epoch 2", {"value": 0.9}, "'after epoch 2' is not a moment"),
        ("val.loss", "epoch 2", {"trend": "rising"}, "'after epoch N', not at 'epoch 2'"),
        ("test.top1", "first", {"value": 0.9}, "test.top1 is read once, at the end"),
        ("test.loss", "after epoch 1", {"trend": "rising"}, "the test split is read once"),
        ("val.ece", "first", {"value": 0.9}, "read once, at the end"),
        ("val.loss", "first", {"below": "test.loss"}, "test.loss is read once"),
        ("train.top5", "first", {"value": 0.9}, "no train line in steps 1–10"),
        ("other.top1", "end", {"value": 0.9}, "no other.top1"),
        ("val", "end", {"value": 0.9}, "no val"),
        ("val.top1", "someday", {"value": 0.9}, "'someday' is not a moment"),
        ("val.top1", "end", {}, "no figure"),
    ],
)
def test_what_is_missing_is_not_measured(
    metric: str, when: str, kind: dict[str, Any], reason: str
) -> None:
    found = one(metric, when, **kind)
    assert found["verdict"] == "not measured"
    assert reason in found["how"]


@pytest.mark.parametrize("results", [{}, {"test": None}, {"test": {"top1": None}}, {"test": 3}])
@pytest.mark.parametrize(
    "history",
    [
        [],
        [{}],
        [{"split": "val"}],
        [line("val", 10)],
        [line("val", 10, loss=None, top1=math.nan), line("train", 10, top1=None)],
    ],
)
def test_nothing_raises_on_empty_or_broken_records(history: Any, results: Any) -> None:
    kinds: list[dict[str, Any]] = [
        {"value": 0.5},
        {"between": [0, 1]},
        {"trend": "rising"},
        {"below": "train.top1"},
        {},
    ]
    moments = ["end", "first", "best", "epoch 1", "after epoch 1", None]
    claims = [
        {"metric": f"{split}.top1", "when": when, **kind}
        for split in ("train", "val", "test")
        for when in moments
        for kind in kinds
    ]
    for steps_per_epoch in (10.0, 0.3, 0.0):
        found = answer([*claims, {}], history, results, steps_per_epoch)
        assert len(found) == len(claims) + 1 > 80
        assert {row["verdict"] for row in found} == {"not measured"}
        assert {row["measured"] for row in found} == {None}
        assert table(found).count("\n") == len(found) + 2


def test_a_resolved_claim_with_all_its_keys_is_read_alike() -> None:
    """A claim as the recipe's model dumps it: every key, None where it was not given."""
    empty: dict[str, Any] = dict.fromkeys(("value", "between", "trend", "below", "note"))
    claim: dict[str, Any] = {
        **empty,
        "metric": "val.top1",
        "when": "best",
        "tolerance": 0.005,
        "source": "s",
    }
    (found,) = answer([claim | {"between": (0.85, 0.95)}], HISTORY, RESULTS, 10)
    assert (found["measured"], found["verdict"]) == (0.90, "met")


def test_claims_are_not_changed() -> None:
    claim: dict[str, Any] = {"metric": "val.top1", "value": 0.9, "source": "s"}
    answer([claim], HISTORY, RESULTS, 10)
    assert claim == {"metric": "val.top1", "value": 0.9, "source": "s"}


def test_table() -> None:
    claims: list[dict[str, Any]] = [
        {"metric": "test.top1", "value": 0.9895, "tolerance": 0.0015, "source": "ViT, table 5"},
        {"metric": "val.loss", "when": "after epoch 2", "trend": "rising", "source": "a | b\nc"},
        {"metric": "val.loss", "when": "first", "below": "train.loss", "source": "review"},
        {"metric": "val.top1", "when": "epoch 9", "between": [0.9, 0.95], "source": "review"},
    ]
    assert table(answer(claims, HISTORY, RESULTS, 10)).splitlines() == [
        "| claim | source | reported | measured | verdict |",
        "| --- | --- | --- | --- | --- |",
        "| test.top1 | ViT, table 5 | 98.95 % ± 0.15 % | 88.00 % | not met |",
        r"| val.loss, after epoch 2 | a \| b c | rising | +0.1 per epoch | met |",
        "| val.loss, first | review | below train.loss | 0.8000 and 1.5000 | met |",
        "| val.top1, epoch 9 | review | 90.00 % to 95.00 % "
        "| – (no evaluation at the end of epoch 9) | not measured |",
    ]
    assert table([]).count("\n") == 2


def test_importing_claims_does_not_import_torch() -> None:
    code = (
        "import sys, finetune.evaluation.claims; assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_chooses_is_the_figure_of_the_task() -> None:
    assert main_figure({"loss": 1.0, "top1": 0.5, "top5": 0.9}) == "top1"
    assert main_figure({"loss": 1.0, "map": 0.5, "macro_f1": 0.9}) == "map"
