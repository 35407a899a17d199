"""Input files as the user names them; predictions as rows, files and text."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from refusals import refused

from finetune.commands.prediction_output import (
    PREDICTION_SUFFIXES,
    PredictionTable,
    atomic_replace,
    format_predictions,
    open_prediction_writer,
    unreadable_files_error,
    warn_of_separators,
)
from finetune.data.image_paths import find_images, list_cli_images
from finetune.errors import DataError
from finetune.files import check_output_file
from finetune.formatting import escape_to_one_line
from finetune.inference import PredictionRow

NAMES = ["cat", "=dog", "fish"]


def prediction_row(path: str, *confidences: float) -> PredictionRow:
    return {
        "path": path,
        "predictions": [
            {"label": NAMES[index], "index": index, "confidence": confidence}
            for index, confidence in enumerate(confidences)
        ],
    }


ROWS = [
    prediction_row("a.png", 0.75, 0.25),
    {"path": "b.png", "error": "zero bytes"},
    prediction_row("c.png", 1 / 3),
]


def test_prediction_table_behaves_like_a_list_of_rows() -> None:
    table = PredictionTable(NAMES)
    for row in ROWS:
        table.append(row)
    assert len(table) == 3
    assert list(table) == table.tolist() == ROWS
    assert table[-1] == ROWS[2]
    assert table[1:] == ROWS[1:]
    with pytest.raises(IndexError):
        table[3]


def test_prediction_table_takes_less_than_100_bytes_per_row() -> None:
    table, count = PredictionTable(NAMES), 20_000
    paths = [f"folder/{number}.png" for number in range(count)]
    tracemalloc.start()
    for path in paths:
        table.append(prediction_row(path, 0.5, 0.3, 0.2))
    kept_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # three predictions of 12 bytes, an 8-byte offset, an 8-byte reference, and spare capacity
    assert kept_bytes / count < 100


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_csv_and_jsonl_contain_the_rows(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows.{suffix}"
    path.write_text('{"path": "old"}')
    with open_prediction_writer(path, num_predictions=2) as write:
        for row in ROWS:
            write(row)
            assert path.read_text() == '{"path": "old"}', "readers never see a partial file"
    if suffix == "jsonl":
        assert [json.loads(line) for line in path.read_text("ascii").splitlines()] == ROWS
    else:
        with path.open(encoding="utf-8", newline="") as file:
            assert list(csv.reader(file)) == [
                ["path", "label_1", "confidence_1", "label_2", "confidence_2", "error"],
                ["a.png", "cat", "0.750000", "'=dog", "0.250000", ""],
                ["b.png", "", "", "", "", "zero bytes"],
                ["c.png", "cat", "0.333333", "", "", ""],
            ]
    assert os.listdir(tmp_path) == [path.name]


# class 1 is predicted although class 0, which is not, has a higher confidence
MULTILABEL_ROWS = [
    {
        **prediction_row("a.png", 0.75, 0.25),
        "labels": prediction_row("", 0.75, 0.25)["predictions"][1:],
    },
    {"path": "b.png", "error": "zero bytes"},
    {**prediction_row("c.png", 1 / 3), "labels": prediction_row("", 1 / 3, 0.25)["predictions"]},
    {**prediction_row("d.png", 0.5), "labels": []},
]


def test_multilabel_rows_contain_labels_and_predictions(tmp_path: Path) -> None:
    table = PredictionTable(NAMES, extra_keys=["labels"])
    path = tmp_path / "rows.csv"
    with open_prediction_writer(path, num_predictions=1, extra_keys=["labels"]) as write:
        for row in MULTILABEL_ROWS:
            table.append(row)
            write(row)
    assert table.tolist() == MULTILABEL_ROWS
    assert table[1:3] == MULTILABEL_ROWS[1:3]
    with path.open(encoding="utf-8", newline="") as file:
        assert [line[1:5] for line in csv.reader(file)] == [
            ["labels", "confidences", "label_1", "confidence_1"],
            ["'=dog", "0.250000", "cat", "0.750000"],
            [""] * 4,
            ["cat|=dog", "0.333333|0.250000", "cat", "0.333333"],
            ["[]", "", "cat", "0.500000"],
        ]
    assert format_predictions(table).splitlines() == [
        "a.png  =dog 25.0 %  (cat 75.0 %)",
        "c.png  cat 33.3 %  =dog 25.0 %",
        "d.png  no label  (cat 50.0 %)",
    ]


UNUSUAL_NAMES = [
    *("two\nlines.png", "cr\rend.png", 'quote".png', "comma,.png", " space .png", "\t.png"),
    *(
        "=cmd.png",
        "-dash.png",
        "+1.png",
        "@3.png",
        "'=cmd.png",
        "''.png",
        "кот.png",
        "猫.png",
        "caf\udce9.png",
    ),
]


@pytest.mark.parametrize("name", UNUSUAL_NAMES)
def test_unusual_names_survive_both_formats(tmp_path: Path, name: str) -> None:
    for suffix in ("csv", "jsonl"):
        with open_prediction_writer(tmp_path / f"rows.{suffix}", num_predictions=1) as write:
            write(prediction_row(name, 1.0))
            write({"path": name, "error": f"{name}: bad"})
    lines = (tmp_path / "rows.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["path"] for line in lines] == [name, name]
    with open(
        tmp_path / "rows.csv", encoding="utf-8", errors="surrogateescape", newline=""
    ) as file:
        _, *rows = csv.reader(file)
    assert [line[0].removeprefix("'") for line in rows] == [name, name]
    cells = [cell for line in rows for cell in line]
    assert not any(cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) for cell in cells)


def test_error_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("old")

    def write_and_fail() -> None:
        with open_prediction_writer(path, num_predictions=1) as write:
            write(ROWS[0])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_and_fail()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == [path.name]


def test_full_disk_is_reported_and_leaves_no_file(tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full on this system")
    path = tmp_path / "rows.jsonl"
    hidden = tmp_path / f".rows.jsonl.{os.getpid()}.tmp"
    hidden.symlink_to("/dev/full")

    def write_a_row() -> None:
        with open_prediction_writer(path, num_predictions=1) as write:
            write(ROWS[0])

    with refused("setup.disk_full", "rows.jsonl", "No space left"):
        write_a_row()
    assert not os.listdir(tmp_path)


def test_os_error_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "taken.png").mkdir()

    def replace() -> None:
        with atomic_replace(tmp_path / "taken.png", option="--sheet") as temporary:
            temporary.write_text("x")

    with refused("setup.not_writable", "--sheet", "taken.png"):
        replace()
    assert os.listdir(tmp_path) == ["taken.png"]


def test_output_file_is_checked_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        check_output_file(tmp_path / "X.CSV", option="--out", suffixes=PREDICTION_SUFFIXES)
        == tmp_path / "X.CSV"
    )
    with refused("recipe.wrong_value", "--out", "'x.txt'", ".csv or .jsonl"):
        check_output_file("x.txt", option="--out", suffixes=PREDICTION_SUFFIXES)
    with refused("setup.not_writable", "--out", "gone'"):
        check_output_file(tmp_path / "gone" / "x.csv", option="--out", suffixes=PREDICTION_SUFFIXES)
    (tmp_path / "x.csv").mkdir()
    with refused("setup.not_writable", "x.csv"):
        check_output_file(tmp_path / "x.csv", option="--out", suffixes=PREDICTION_SUFFIXES)
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) != (tmp_path, os.W_OK))
    with refused(
        "setup.not_writable", "--out", "y.csv"
    ):  # patched because a superuser can write anywhere
        check_output_file(tmp_path / "y.csv", option="--out", suffixes=PREDICTION_SUFFIXES)


def test_unreadable_files_error_lists_20_files_and_counts_the_rest() -> None:
    assert unreadable_files_error([{"path": "a.png", "predictions": []}]) is None
    rows = [{"path": f"{n}\x1b[2J.png", "error": "zero bytes"} for n in range(25)]
    error = unreadable_files_error([*rows, {"path": "good.png", "predictions": []}])
    assert isinstance(error, DataError)
    assert error.exit_code == 3
    lines = str(error).splitlines()
    assert lines[0].startswith("25 files were not classified")
    assert lines[1] == r"  0\x1b[2J.png: zero bytes"
    assert lines[-1] == "  … and 5 more; --out FILE lists them all"
    assert len(lines) == 22


def test_format_predictions() -> None:
    predictions = [{"label": "cat\x07", "index": 1, "confidence": 0.987}]
    rows: list[dict[str, Any]] = [
        {"path": "a.png", "predictions": predictions},
        {"path": "longer.png", "predictions": predictions},
        {"path": "b.png", "error": "zero bytes"},
    ]
    assert format_predictions(rows).splitlines() == [
        r"a.png       cat\x07 98.7 %",
        r"longer.png  cat\x07 98.7 %",
    ]
    assert format_predictions(rows, out="x.csv") == "x.csv: 2 of 3 files classified"
    assert format_predictions(rows, sheet="s.png").splitlines()[1:] == [
        r"longer.png  cat\x07 98.7 %",
        "s.png: contact sheet",
    ]
    assert format_predictions(rows, out="x.csv", sheet="s.png").splitlines() == [
        "x.csv: 2 of 3 files classified",
        "s.png: contact sheet",
    ]
    assert format_predictions([]) == ""


def test_escape_to_one_line_escapes_control_characters() -> None:
    assert escape_to_one_line("a\x1b[2J\n\u202e\udce9 é") == r"a\x1b[2J\n\u202e\udce9 é"


# File names: no file is opened.


def set_stdin(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))


def test_find_images_in_files_folders_and_patterns(tmp_path: Path) -> None:
    for name in ("b.png", "a.png", "star[1].png", "sub/c.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "bare").mkdir()
    root = str(tmp_path)

    def relative_names(*paths: str) -> list[str]:
        found = find_images(f"{root}/{path}" for path in paths)
        assert all(error is None for _, error in found)
        return [os.path.relpath(path, root) for path, _ in found]

    assert relative_names("b.png", "a.png", "b.png") == ["b.png", "a.png", "b.png"]
    assert relative_names("[ab].png") == ["a.png", "b.png"]
    assert relative_names("**/c.png") == ["sub/c.png"]
    assert relative_names("star[1].png") == ["star[1].png"], (
        "the name of an existing file is not a pattern"
    )
    assert relative_names("sub") == ["sub/c.png"]
    assert find_images([f"{root}/none-*.png"]) == [
        (f"{root}/none-*.png", "no file matches this pattern")
    ]
    assert find_images([tmp_path / "bare"]) == [(f"{root}/bare", "a folder without images")]
    assert find_images([f"{root}/gone.png"]) == [(f"{root}/gone.png", None)]
    assert find_images([]) == []


def test_files_of_other_kinds_in_a_folder_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a.png", "b.CR2"):
        (tmp_path / name).touch()
    assert find_images([tmp_path]) == [(f"{tmp_path}/a.png", None)]
    assert caplog.messages == [f"{tmp_path}: ignored 1 file of other kinds: b.CR2"]


def test_list_on_standard_input_keeps_its_position(monkeypatch: pytest.MonkeyPatch) -> None:
    set_stdin(monkeypatch, b"b.png\r\n\na b.png\n")
    assert [path for path, _ in list_cli_images(["a.png", "-", "c.png"])] == [
        *("a.png", "b.png", "a b.png", "c.png")
    ]


def test_nul_separated_names_may_contain_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [b"two\nlines.png", b" spaces ", b"caf\xe9.png", b"-", b"end\n", b"\r"]
    set_stdin(monkeypatch, b"\0".join(names) + b"\0")
    assert [os.fsencode(path) for path, _ in list_cli_images(["-"])] == names


def test_names_on_standard_input_are_not_patterns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a1.png").touch()
    pattern = f"{tmp_path}/a[1].png"
    assert find_images([pattern]) == [(f"{tmp_path}/a1.png", None)]
    set_stdin(monkeypatch, os.fsencode(pattern))
    assert list_cli_images(["-"]) == [(pattern, None)]


def test_folders_on_standard_input_are_searched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a.png").touch()
    set_stdin(monkeypatch, os.fsencode(tmp_path))
    assert list_cli_images(["-"]) == [(f"{tmp_path}/a.png", None)]


@pytest.mark.parametrize("content", [b"", b"\n\r\n", b"\0"])
def test_empty_list_on_standard_input_is_refused(
    content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_stdin(monkeypatch, content)
    with refused("data.empty", "-: "):
        list_cli_images(["-"])


def test_standard_input_may_be_named_once() -> None:
    with refused("recipe.conflict", "-: "):
        list_cli_images(["-", "a.png", "-"])


def test_a_file_that_another_program_writes_meanwhile_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    with refused("recipe.conflict", path), open_prediction_writer(path, num_predictions=1):
        path.write_text("name,score\n")
    assert path.read_text() == "name,score\n"


def test_class_names_with_the_separator_are_said(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_separators(["a", "b"], ["labels"])
    warn_of_separators(["a|b", "a"], ["unknown"])
    assert caplog.text == ""
    warn_of_separators(["a|b", "a"], ["prediction_set"])
    assert "'a|b'" in caplog.text
    assert ".jsonl" in caplog.text
