"""Results as JSON and as text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from finetune.cli.output import format_nested, format_next_steps, format_results, to_json


def test_json_of_values_that_json_lacks() -> None:
    data = {1: np.array([1.5, np.nan]), "path": Path("a"), "t": (np.int64(3), float("inf"))}
    assert json.loads(to_json(data)) == {"1": [1.5, None], "path": "a", "t": [3, None]}
    assert to_json("\udcff")  # a file name that is not valid text


def test_nested_data_becomes_lines_with_dotted_names() -> None:
    data = {"a": {"b": 1, "c": [1, 2]}, "d": None}
    assert format_nested(data) == "a.b: 1\na.c: 1, 2\nd: None"


def test_empty_results_have_no_lines() -> None:
    assert format_results({}) == ""
    assert format_results({"val": None, "claims": None}) == ""


@pytest.mark.parametrize("num_classes", [5, 6])
def test_top5_is_shown_for_more_than_five_classes(num_classes: int) -> None:
    metrics = {"top1": 0.5, "top5": 1.0, "loss": 1.0, "per_class": [{}] * num_classes}
    assert ("top-5" in format_results({"test": metrics})) == (num_classes == 6)


def test_an_interval_is_shown_for_few_images_only() -> None:
    few, many = ({"top1": 0.9, "loss": 1.0, "examples": n} for n in (999, 1000))
    lines = format_results({"test": few, "val": many, "train": {"top1": 1.0}}).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["test", "val"]
    assert ["interval 88.0–91.7 %" in line for line in lines] == [True, False]
    assert "on 1000 images" in lines[1]


def test_claims_and_warnings() -> None:
    claim = {"metric": "test.top1", "value": 0.9, "tolerance": 0.01}
    missing = {**claim, "measured": None, "verdict": "not measured", "how": "no test split"}
    met = {**claim, "measured": 0.905, "verdict": "met"}
    results = {"claims": [missing, met], "warnings": ["far off"]}
    assert format_results(results).splitlines() == [
        "claim test.top1: not measured: no test split",
        "claim test.top1: met: measured 90.50 %, reported 90.00 % ± 1.00 %",
        "warning: far off",
    ]


def test_the_next_commands_can_be_copied(tmp_path: Path) -> None:
    run = tmp_path / "my run"
    run.mkdir()
    assert "report:" not in format_next_steps(run)
    (run / "report.html").write_text("page")
    lines = format_next_steps(run).splitlines()
    assert lines[0] == f"report: {run / 'report.html'}"
    assert f"next: finetune predict '{run}' IMAGE" in lines
