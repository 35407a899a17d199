"""The types in the files of a run: edited files are refused, old ones are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from finetune.run.directory import RunDir
from finetune.run.schema import parse_metrics_line


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
        ("run.json", {"plan": {"steps": 10**19}}, "plan.steps"),
        ("run.json", {"plan": {"steps_per_epoch": -1.0}}, "plan.steps_per_epoch"),
        ("run.json", {"plan": {"steps_per_epoch": 1e300}}, "plan.steps_per_epoch"),
        ("run.json", {"plan": {"weights": 3}}, "plan.weights"),
        ("run.json", {"plan": {"trainable_parameters": "all"}}, "plan.trainable_parameters"),
        ("run.json", {"split_fingerprints": 7}, "split_fingerprints"),
        ("run.json", {"device": "cpu"}, "device"),
        ("run.json", {"argv": "finetune"}, "argv"),
        ("run.json", {"teacher": {"top1": "high"}}, "teacher.top1"),
        ("results.json", {"test": 3}, "test"),
        ("results.json", {"test": {"top1": "high"}}, "test.top1"),
        ("results.json", {"test": {"top1": True}}, "test.top1"),
        ("results.json", {"val": {"loss": 1e300}}, "val.loss"),
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


def test_training_loss_is_missing_if_each_step_was_skipped(tmp_path: Path) -> None:
    content = {"train": {"step": 20, "loss": None, "skipped": 8}}
    (tmp_path / "results.json").write_text(json.dumps(content))
    assert RunDir(tmp_path).read_json("results.json") == content


@pytest.mark.parametrize("name", ["run.json", "results.json", "other.json"])
@pytest.mark.parametrize(
    "text", ["[]", "3", "null", '"x"', "", '{"a": NaN}', f'{{"a": 1{"0" * 400}}}', "{" * 200]
)
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


INTACT_LINE = {"step": 1, "split": "train", "loss": 2.5, "top1": None, "lr": 1, "newer": [1]}


@pytest.mark.parametrize(
    "changes",
    [
        *({"step": None}, {"step": "1"}, {"step": 1.5}, {"step": -1}, {"step": 10**400}),
        *({"split": None}, {"split": "trbin"}, {"loss": "2"}, {"loss": 10**400}, {"lr": "x"}),
    ],
)
def test_damaged_metrics_line_is_none(changes: dict[str, Any]) -> None:
    assert parse_metrics_line(json.dumps(INTACT_LINE).encode()) == INTACT_LINE
    assert parse_metrics_line(json.dumps({**INTACT_LINE, **changes}).encode()) is None


@pytest.mark.parametrize("key", ["step", "split", "loss"])
def test_metrics_line_needs_step_split_and_loss(key: str) -> None:
    line = {name: value for name, value in INTACT_LINE.items() if name != key}
    assert parse_metrics_line(json.dumps(line).encode()) is None


@pytest.mark.parametrize("text", [b"", b"[1]", b'{"st', b"\xff", b"NaN", b"[" * 9999, b"{" * 100])
def test_metrics_line_that_is_no_json_object_is_none(text: bytes) -> None:
    assert parse_metrics_line(text) is None
