"""`finetune data info` and `finetune data scan`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bad_input import BadInput, check_bad_input, parametrize_bad_inputs
from doubles import Double

from finetune.cli.main import main

Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize("prefix", ["folder:", ""])
def test_info(prefix: str, image_folder: Path, capsys: Captured) -> None:
    assert main(["data", "info", f"{prefix}{image_folder}"]) == 0
    out = capsys.readouterr().out
    assert "splits.train.images: 24" in out
    assert "class_names: blue, green, red" in out
    assert main(["data", "info", f"{prefix}{image_folder}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["splits"]["test"]["images"] == 12


def test_info_of_a_csv_file(image_folder: Path, capsys: Captured) -> None:
    table = image_folder / "train" / "labels.csv"
    table.write_text("path,label\nred/red-0.png,a\nblue/blue-0.png,b\n")
    assert main(["data", "info", str(table), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["class_names"] == ["a", "b"]


@pytest.mark.parametrize("prefix", ["folder:", ""])
def test_scan(prefix: str, image_folder: Path, capsys: Captured) -> None:
    source = f"{prefix}{image_folder}"
    assert main(["data", "scan", source]) == 0
    assert str(image_folder) in capsys.readouterr().out
    (image_folder / "train" / "red" / "red-0.png").write_bytes(b"not an image")
    assert main(["data", "scan", source]) == 3
    captured = capsys.readouterr()
    assert "red-0.png" in captured.out
    assert "1 of 36" in captured.err
    assert main(["data", "scan", source, "--json"]) == 3
    (row,) = json.loads(capsys.readouterr().out)
    assert row["split"] == "train"


def test_scan_uses_every_core(image_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_unreadable = Double([])
    monkeypatch.setattr("finetune.data.decode_split.find_unreadable_images", find_unreadable)
    monkeypatch.setattr("finetune.host_resources.num_cores", lambda: 7)
    assert main(["data", "scan", str(image_folder)]) == 0
    assert find_unreadable.calls[0][0][1] == 7


WRONG_SOURCES = {
    "an unknown kind": ("foldr:x", "data.wrong_source", "'folder'"),
    "a mistyped folder": ("photso", "data.not_found", "'photos'"),
    "a mistyped file": ("label.csv", "data.not_found", "'labels.csv'"),
    "an image": ("a.png", "data.wrong_source", "a.png"),
    "an empty name": ("", "data.wrong_source", "folder:PATH"),
    "an unknown user": ("~nobody-here/photos", "data.not_found", "~nobody-here/photos"),
}


@parametrize_bad_inputs(
    {
        f"{command}: {name}": BadInput(["data", command, source], code, named)
        for command in ("info", "scan")
        for name, (source, code, named) in WRONG_SOURCES.items()
    }
)
def test_a_wrong_source_is_refused(bad: BadInput, workspace: Path) -> None:
    Path("photos").mkdir()
    Path("labels.csv").touch()
    message = check_bad_input(bad)
    assert "data.source" not in message  # a key that the user did not type


def test_a_missing_folder_is_named_as_typed(workspace: Path, capsys: Captured) -> None:
    assert main(["data", "info", "photos"]) == 3
    assert capsys.readouterr().err.startswith("photos: ")
