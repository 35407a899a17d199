"""The types in run.json and results.json: edited files are refused, old ones are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from finetune.run.directory import RunDir


@pytest.mark.parametrize(
    "name, content, key",
    [
        ("run.json", {"status": 7}, "status"),
        ("run.json", {"plan": []}, "plan"),
        ("run.json", {"plan": None}, "plan"),
        ("run.json", {"plan": {"steps": "many"}}, "plan.steps"),
        ("run.json", {"plan": {"steps": "4"}}, "plan.steps"),
        ("run.json", {"plan": {"steps": True}}, "plan.steps"),
        ("run.json", {"plan": {"steps": 4.0}}, "plan.steps"),
        ("run.json", {"plan": {"steps": 0}}, "plan.steps"),
        ("run.json", {"plan": {"steps": 10**400}}, "plan.steps"),
        ("run.json", {"plan": {"steps_per_epoch": -1.0}}, "plan.steps_per_epoch"),
        ("run.json", {"plan": {"steps_per_epoch": 10**400}}, "plan.steps_per_epoch"),
        ("run.json", {"plan": {"weights": 3}}, "plan.weights"),
        ("run.json", {"plan": {"trainable_parameters": "all"}}, "plan.trainable_parameters"),
        ("run.json", {"split_fingerprints": 7}, "split_fingerprints"),
        ("run.json", {"device": "cpu"}, "device"),
        ("run.json", {"argv": "finetune"}, "argv"),
        ("run.json", {"teacher": {"top1": "high"}}, "teacher.top1"),
        ("results.json", {"test": 3}, "test"),
        ("results.json", {"test": {"top1": "high"}}, "test.top1"),
        ("results.json", {"test": {"top1": True}}, "test.top1"),
        ("results.json", {"val": {"loss": 10**400}}, "val.loss"),
        ("results.json", {"claims": [3]}, "claims.0"),
        ("results.json", {"warnings": "none"}, "warnings"),
        ("results.json", {"steps": 1.5}, "steps"),
        ("results.json", {"steps": -1}, "steps"),
    ],
)
def test_value_of_the_wrong_type_is_named(
    name: str, content: dict[str, Any], key: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(json.dumps(content))
    with refused("checkpoint.damaged", name, f"'{key}'"):
        RunDir(tmp_path).read_json(name)
    (tmp_path / "other.json").write_text(json.dumps(content))
    assert RunDir(tmp_path).read_json("other.json") == content


@pytest.mark.parametrize("name", ["run.json", "results.json", "other.json"])
@pytest.mark.parametrize("text", ["[]", "3", "null", '"x"', "", '{"a": NaN}', "{" * 200])
def test_what_is_no_json_object_is_refused(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with refused("checkpoint.damaged", name):
        RunDir(tmp_path).read_json(name)


def test_missing_and_unknown_keys_and_null_splits_are_accepted(tmp_path: Path) -> None:
    plan = {"steps": 4, "images_read": 3, "steps_per_epoch": 0.5, "weights": {}, "images": {}}
    split = {"top1": 0.5, "ece": 0, "examples": 3, "confusion": [[1, 2]], "newer": "x"}
    for name, content in (
        ("run.json", {}),
        ("run.json", {"plan": {}, "micro_batch": None}),
        ("run.json", {"plan": {**plan, "newer": [1]}, "status": "done", "newer": {"of": 1}}),
        ("results.json", {"val": None, "test": split, "claims": [], "newer": None}),
    ):
        (tmp_path / name).write_text(json.dumps(content))
        assert RunDir(tmp_path).read_json(name) == content
