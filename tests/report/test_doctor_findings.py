"""The doctor's findings about the worst mistakes on a run's page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from refusals import refused
from report_runs import write_and_read_run

from finetune.cli.main import main
from finetune.data.open_source import open_source
from finetune.report.doctor_findings import DoctorFindings
from finetune.report.thumbnails import mistake_rows, open_reported_split


def write_findings(folder: Path, splits: tuple[str, ...] = ("train", "test")) -> Path:
    """Write findings about the first three test images; the digest of the second has changed."""
    split = open_source("embedded:digits").splits["test"]
    images: list[dict[str, Any]] = [
        {
            "split": "test",
            "index": index,
            "path": split.name_of(index),
            "digest": split.digests[index].tobytes().hex(),
        }
        for index in range(3)
    ]
    images[1]["digest"] = "0f" * 16
    train = {"split": "train", "index": 9, "path": "digits row 9", "digest": None}
    label = str(split.labels[0])
    content = {
        "source": "embedded:digits",
        "multilabel": False,
        "splits": {name: {"images": 1, "fingerprint": ""} for name in splits},
        "label_errors": [
            {**images[0], "given": label, "suggested": "<b>7", "score": 0.98},
            {**images[1], "given": str(split.labels[1]), "suggested": "7", "score": 0.9},
            {**images[2], "given": "another", "suggested": "7", "score": 0.9},
        ],
        "duplicates": [],
        "leaks": [[images[2], train]],
        "outliers": [{**images[2], "given": label, "reason": "over_exposed", "score": 1.0}],
        "class_problems": [],
        "groups": [],
        "expected": {},
    }
    folder.mkdir()
    (folder / "doctor.json").write_text(json.dumps(content))
    return folder


def test_mistakes_show_the_findings_about_the_same_image_and_label(tmp_path: Path) -> None:
    run = write_and_read_run(tmp_path / "run")
    findings = DoctorFindings(write_findings(tmp_path / "doctor"))
    rows, _ = mistake_rows(run, *open_reported_split(run), findings)
    assert [row["doctor"] for row in rows] == [
        "label probably <b>7 (98 % sure)",
        "not known",
        "leak of digits row 9 in train; outlier: over exposed",
    ]
    rows, _ = mistake_rows(run, None, "", findings)  # the data cannot be opened
    assert rows[1]["doctor"].startswith("label probably 7")
    other = DoctorFindings(write_findings(tmp_path / "other", splits=()))
    rows, _ = mistake_rows(run, *open_reported_split(run), other)
    assert [row["doctor"] for row in rows] == ["", "", ""]
    assert [row["doctor"] for row in mistake_rows(run, None)[0]] == ["", "", ""]


def test_the_page_shows_the_findings_and_links_to_the_page_of_the_doctor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, doctor = tmp_path / "run", write_findings(tmp_path / "doctor")
    write_and_read_run(run)
    (doctor / "doctor.html").write_text("page")
    assert main(["report", str(run), "--doctor", str(doctor)]) == 0
    page = (run / "report.html").read_text()
    assert "label probably &lt;b&gt;7" in page
    assert 'href="../doctor/doctor.html"' in page


def test_findings_of_other_data_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = write_and_read_run(tmp_path / "run")
    doctor = write_findings(tmp_path / "doctor")
    content = json.loads((doctor / "doctor.json").read_text())
    splits = {"test": {"images": 1, "fingerprint": "ab"}}
    for source, fingerprint, other in (
        ("folder:photos", "cd", "was trained on embedded:digits"),
        ("folder:moved", "ab", ""),
        ("embedded:digits", "cd", "was trained on other images or labels in test"),
        ("embedded:digits", "ab", ""),
    ):
        caplog.clear()
        text = json.dumps({**content, "source": source, "splits": splits})
        (doctor / "doctor.json").write_text(text)
        run.record["whole_fingerprints"] = {"test": fingerprint}
        findings = DoctorFindings(doctor)
        findings.warn_if_other_data(run)
        assert (f"these findings are of {source}" in caplog.text) == bool(other)
        assert other in caplog.text
        opinion = findings.describe(run, {"name": "an image", "label": "3"}, None)
        assert opinion == ("nothing found" if fingerprint == "ab" else "not known")


def test_refuses_other_files(tmp_path: Path) -> None:
    with refused("recipe.wrong_value", "--doctor", "doctor.json"):
        DoctorFindings(tmp_path)
    for text in ("{", "[]", '{"splits": {}}'):
        (tmp_path / "doctor.json").write_text(text)
        with refused("recipe.wrong_value", "--doctor", "doctor.json"):
            DoctorFindings(tmp_path)
