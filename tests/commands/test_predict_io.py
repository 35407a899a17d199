"""Files to predict, as the user names them; predictions as rows, files and tables."""

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
)
from finetune.data.image_paths import find_images, list_cli_images
from finetune.errors import DataError
from finetune.files import check_output_file
from finetune.formatting import escape_to_one_line
from finetune.inference import PredictionRow

NAMES = ["cat", "=dog", "fish"]


def row(path: str, *confidences: float) -> PredictionRow:
    return {
        "path": path,
        "predictions": [
            {"label": NAMES[index], "index": index, "confidence": confidence}
            for index, confidence in enumerate(confidences)
        ],
    }


ROWS = [row("a.png", 0.75, 0.25), {"path": "b.png", "error": "zero bytes"}, row("c.png", 1 / 3)]


def test_rows_give_back_what_was_put_in() -> None:
    rows = PredictionTable(NAMES)
    for one in ROWS:
        rows.append(one)
    assert len(rows) == 3
    assert list(rows) == rows.tolist() == ROWS
    assert rows == ROWS
    assert [*ROWS] == rows, "from either side"
    assert rows != ROWS[:2]
    assert rows != [*ROWS[:2], ROWS[0]]
    assert rows[-1] == ROWS[2]
    assert rows[1:] == ROWS[1:]
    with pytest.raises(IndexError):
        rows[3]


def test_a_row_takes_a_hundred_bytes_and_its_path() -> None:
    rows, count = PredictionTable(NAMES), 20_000
    paths = [f"folder/{number}.png" for number in range(count)]
    tracemalloc.start()
    for path in paths:
        rows.append(row(path, 0.5, 0.3, 0.2))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # three of 12 bytes, one start of 8, one reference of 8, and room to grow
    assert kept / count < 100


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_files_hold_the_rows(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows.{suffix}"
    path.write_text("old")
    with open_prediction_writer(path, num_predictions=2) as write:
        for one in ROWS:
            write(one)
            assert path.read_text() == "old", "a reader never sees a part"
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


# the second is said at a lower confidence than the first, which is not
SEVERAL = [
    {**row("a.png", 0.75, 0.25), "labels": row("", 0.75, 0.25)["predictions"][1:]},
    {"path": "b.png", "error": "zero bytes"},
    {**row("c.png", 1 / 3), "labels": row("", 1 / 3, 0.25)["predictions"]},
    {**row("d.png", 0.5), "labels": []},
]


def test_several_labels_stand_beside_the_predictions(tmp_path: Path) -> None:
    rows = PredictionTable(NAMES, is_multilabel=True)
    path = tmp_path / "rows.csv"
    with open_prediction_writer(path, num_predictions=1, is_multilabel=True) as write:
        for one in SEVERAL:
            rows.append(one)
            write(one)
    assert rows == SEVERAL
    assert rows[1:3] == SEVERAL[1:3]
    with path.open(encoding="utf-8", newline="") as file:
        assert [line[1:5] for line in csv.reader(file)] == [
            ["labels", "confidences", "label_1", "confidence_1"],
            ["'=dog", "0.250000", "cat", "0.750000"],
            [""] * 4,
            ["cat|=dog", "0.333333|0.250000", "cat", "0.333333"],
            ["[]", "", "cat", "0.500000"],
        ]
    assert format_predictions(rows).splitlines() == [
        "a.png  =dog 25.0 %  (cat 75.0 %)",
        "c.png  cat 33.3 %  =dog 25.0 %",
        "d.png  no label  (cat 50.0 %)",
    ]


ODD = [
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


@pytest.mark.parametrize("name", ODD)
def test_odd_names_come_back_from_both_formats(tmp_path: Path, name: str) -> None:
    for suffix in ("csv", "jsonl"):
        with open_prediction_writer(tmp_path / f"rows.{suffix}", num_predictions=1) as write:
            write(row(name, 1.0))
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


def test_an_error_leaves_the_old_file(tmp_path: Path) -> None:
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


def test_a_full_disk_is_said_and_nothing_is_left(tmp_path: Path) -> None:
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


def test_the_systems_refusal_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "taken.png").mkdir()

    def replace() -> None:
        with atomic_replace(tmp_path / "taken.png", option="--sheet") as temporary:
            temporary.write_text("x")

    with refused("setup.not_writable", "--sheet", "taken.png"):
        replace()
    assert os.listdir(tmp_path) == ["taken.png"]


def test_a_target_is_checked_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with refused("setup.not_writable", "--out", "y.csv"):  # to a superuser nothing is read-only
        check_output_file(tmp_path / "y.csv", option="--out", suffixes=PREDICTION_SUFFIXES)


def test_unreadable_names_the_files_and_counts_the_rest() -> None:
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


def test_describe() -> None:
    one = [{"label": "cat\x07", "index": 1, "confidence": 0.987}]
    rows: list[dict[str, Any]] = [
        {"path": "a.png", "predictions": one},
        {"path": "longer.png", "predictions": one},
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


def test_one_line_obeys_no_name() -> None:
    assert escape_to_one_line("a\x1b[2J\n\u202e\udce9 é") == r"a\x1b[2J\n\u202e\udce9 é"


# Names of files: nothing is opened.


def give(monkeypatch: pytest.MonkeyPatch, listed: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(listed)))


def test_files_folders_patterns_and_what_is_not_there(tmp_path: Path) -> None:
    for name in ("b.png", "a.png", "star[1].png", "sub/c.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "bare").mkdir()
    here = str(tmp_path)

    def names(*paths: str) -> list[str]:
        found = find_images(f"{here}/{path}" for path in paths)
        assert all(error is None for _, error in found)
        return [os.path.relpath(path, here) for path, _ in found]

    assert names("b.png", "a.png", "b.png") == ["b.png", "a.png", "b.png"]
    assert names("[ab].png") == ["a.png", "b.png"]
    assert names("**/c.png") == ["sub/c.png"]
    assert names("star[1].png") == ["star[1].png"], "an existing name is no pattern"
    assert names("sub") == ["sub/c.png"]
    assert find_images([f"{here}/none-*.png"]) == [
        (f"{here}/none-*.png", "no file matches this pattern")
    ]
    assert find_images([tmp_path / "bare"]) == [(f"{here}/bare", "a folder without images")]
    assert find_images([f"{here}/gone.png"]) == [(f"{here}/gone.png", None)]
    assert find_images([]) == []


def test_files_of_a_folder_that_are_no_images_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a.png", "b.HEIC"):
        (tmp_path / name).touch()
    assert find_images([tmp_path]) == [(f"{tmp_path}/a.png", None)]
    assert caplog.messages == [f"{tmp_path}: ignored 1 file of other kinds: b.HEIC"]


def test_a_list_on_standard_input_stands_where_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, b"b.png\r\n\na b.png\n")
    assert [path for path, _ in list_cli_images(["a.png", "-", "c.png"])] == [
        *("a.png", "b.png", "a b.png", "c.png")
    ]


def test_between_zero_bytes_a_name_may_hold_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [b"two\nlines.png", b" spaces ", b"caf\xe9.png", b"-", b"end\n", b"\r"]
    give(monkeypatch, b"\0".join(names) + b"\0")
    assert [os.fsencode(path) for path, _ in list_cli_images(["-"])] == names


def test_a_listed_name_is_no_pattern(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a1.png").touch()
    pattern = f"{tmp_path}/a[1].png"
    assert find_images([pattern]) == [(f"{tmp_path}/a1.png", None)]
    give(monkeypatch, os.fsencode(pattern))
    assert list_cli_images(["-"]) == [(pattern, None)]


def test_listed_folders_are_searched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.png").touch()
    give(monkeypatch, os.fsencode(tmp_path))
    assert list_cli_images(["-"]) == [(f"{tmp_path}/a.png", None)]


@pytest.mark.parametrize("given", [b"", b"\n\r\n", b"\0"])
def test_an_empty_list_says_so(given: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, given)
    with refused("data.empty", "-: "):
        list_cli_images(["-"])


def test_standard_input_is_read_once() -> None:
    with refused("recipe.conflict", "-: "):
        list_cli_images(["-", "a.png", "-"])
