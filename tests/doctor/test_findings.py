"""Reading doctor.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from doctor_findings import class_problem, image_of, write_findings
from refusals import refused
from small_datasets import write_image_folder

from finetune.data.open_source import open_source
from finetune.data.source import Source
from finetune.doctor.findings import class_key, open_findings


@pytest.fixture
def source(tmp_path: Path) -> Source:
    counts = {"train/cat": 3, "train/dog": 3, "test/cat": 1, "test/dog": 1}
    return open_source(write_image_folder(tmp_path / "photos", counts))


def test_findings_name_the_images_and_their_neighbors(tmp_path: Path, source: Source) -> None:
    write_findings(tmp_path, source)
    findings = open_findings(source.name, tmp_path)
    assert findings.keys["label_errors"] == [["train/0"], ["train/1"], ["train/2"]]
    assert findings.keys["leaks"] == [["train/5", "test/0"]]
    assert findings.keys["class_problems"] == [[class_key(["cat", "dog"])], [class_key(["dog"])]]
    (error,) = findings.describe("label_errors", 1, 2)
    assert error["images"] == [
        {"key": "train/1", "path": source.splits["train"].name_of(1), "given": "cat"}
    ]
    assert error["examples"] == [
        ["cat", ["train/0", "train/1", "train/2", "train/3"]],
        ["dog", ["train/3", "train/2", "train/1", "train/0"]],
    ]
    same, _ = findings.describe("class_problems", 0, 9)
    assert same["classes"] == ["cat", "dog"]
    assert same["examples"][1] == ("dog", ["train/0", "train/3"])


def test_several_labels_are_joined_as_in_decisions(tmp_path: Path) -> None:
    digits = open_source("embedded:digit_pairs", multilabel=True)
    write_findings(tmp_path, digits, num_errors=1)
    (error,) = open_findings(digits.name, tmp_path).describe("label_errors", 0, 1)
    names = [digits.class_names[label] for label in digits.splits["train"].class_indices(0)]
    assert error["images"][0]["given"] == "|".join(names)


def test_findings_of_other_data(tmp_path: Path, source: Source) -> None:
    write_findings(tmp_path, source)
    (tmp_path / "photos/test/dog/0.png").write_bytes(b"another image")
    with refused("data.changed", tmp_path / "doctor.json", "test"):
        open_findings(source.name, tmp_path)


def test_missing_findings_name_the_command(tmp_path: Path, source: Source) -> None:
    with refused("data.not_found", f"finetune data doctor {source.name}"):
        open_findings(source.name, tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"label_errors": [{"split": "train"}]},
        {"expected": {"leaks": {"count": "many"}}},
        {"class_problems": [class_problem("same", ["cat", "?"], score=0)]},
        {"outliers": [{"split": "train", "index": 6, "path": "a"}]},
        {"outliers": [{"split": "val", "index": 0, "path": "a"}]},
    ],
)
def test_damaged_findings(tmp_path: Path, source: Source, changes: dict[str, Any]) -> None:
    write_findings(tmp_path, source, **changes)
    with refused("data.damaged", tmp_path):
        open_findings(source.name, tmp_path)


def test_damaged_file(tmp_path: Path, source: Source) -> None:
    content = json.dumps(write_findings(tmp_path, source))
    (tmp_path / "doctor.json").write_text(content[:-10])
    with refused("data.damaged", tmp_path / "doctor.json"):
        open_findings(source.name, tmp_path)


def test_groups_are_shown_like_leaks(tmp_path: Path, source: Source) -> None:
    group = [image_of(source, "train", 0, group="a"), image_of(source, "test", 1, group="a")]
    write_findings(tmp_path, source, groups=[group])
    assert open_findings(source.name, tmp_path).keys["groups"] == [["train/0", "test/1"]]
