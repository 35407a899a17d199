"""`finetune data doctor`: the files it writes, and what it refuses."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from pathlib import Path

import pytest

from finetune.cli.main import main

NANO = ("--weights", "embedded:vit_nano")


def diagnose(source: Path | str, out: Path, *options: str) -> dict:
    assert main(["data", "doctor", str(source), "--out", str(out), *NANO, *options]) == 0
    return json.loads((out / "doctor.json").read_text())


def test_a_label_error_of_a_folder_is_found(image_folder: Path, tmp_path: Path) -> None:
    train = image_folder / "train"
    shutil.move(train / "red" / "red-3.png", train / "green" / "wrong.png")
    diagnosis = diagnose(image_folder, tmp_path / "out")
    first = diagnosis["label_errors"][0]
    assert (first["split"], first["path"]) == ("train", "train/green/wrong.png")
    assert (first["given"], first["suggested"]) == ("green", "red")
    assert first["score"] > 0.5
    assert diagnosis["splits"]["train"]["images"] == 24
    with (tmp_path / "out" / "label_scores.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 36
    worst = max(rows, key=lambda row: float(row["score"]))
    assert (worst["split"], int(worst["index"])) == (first["split"], first["index"])


def test_without_cleanlab_nothing_is_computed(
    image_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "cleanlab", None)
    assert main(["data", "doctor", str(image_folder), "--out", str(tmp_path / "out")]) == 5
    assert "finetune-vision[doctor]" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
