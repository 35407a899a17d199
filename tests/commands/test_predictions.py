"""What is written of predictions: rows kept small, files replaced in one step, tables, errors."""

from __future__ import annotations

import csv
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from finetune.commands.predict_io import (
    Row,
    Rows,
    check_target,
    describe,
    one_line,
    replacing,
    unreadable,
    writing,
)
from finetune.errors import DataError, RecipeError, SetupError

NAMES = ["cat", "=dog", "fish"]


def row(path: str, *confidences: float) -> Row:
    return {
        "path": path,
        "predictions": [
            {"label": NAMES[index], "index": index, "confidence": confidence}
            for index, confidence in enumerate(confidences)
        ],
    }


ROWS = [row("a.png", 0.75, 0.25), {"path": "b.png", "error": "zero bytes"}, row("c.png", 1 / 3)]


def test_rows_give_back_what_was_put_in() -> None:
    rows = Rows(NAMES)
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
    rows, count = Rows(NAMES), 20_000
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
    with writing(path, depth=2) as write:
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


ODD = [
    *("two\nlines.png", "cr\rend.png", 'quote".png', "comma,.png", " space .png", "\t.png"),
    *("=cmd.png", "-dash.png", "'=cmd.png", "''.png", "кот.png", "猫.png", "caf\udce9.png"),
]


@pytest.mark.parametrize("name", ODD)
def test_odd_names_come_back_from_both_formats(tmp_path: Path, name: str) -> None:
    for suffix in ("csv", "jsonl"):
        with writing(tmp_path / f"rows.{suffix}", depth=1) as write:
            write(row(name, 1.0))
            write({"path": name, "error": f"{name}: bad"})
    lines = (tmp_path / "rows.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["path"] for line in lines] == [name, name]
    with open(
        tmp_path / "rows.csv", encoding="utf-8", errors="surrogateescape", newline=""
    ) as file:
        cells = [line[0] for line in csv.reader(file)][1:]
    assert [cell.removeprefix("'") for cell in cells] == [name, name]
    assert not any(cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) for cell in cells)


def test_an_error_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("old")

    def write_and_fail() -> None:
        with writing(path, depth=1) as write:
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
        with writing(path, depth=1) as write:
            write(ROWS[0])

    with pytest.raises(SetupError, match=r"--out: .*rows.jsonl.*No space left"):
        write_a_row()
    assert not os.listdir(tmp_path)


def test_the_systems_refusal_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "taken.png").mkdir()

    def replace() -> None:
        with replacing(tmp_path / "taken.png", option="--sheet") as temporary:
            temporary.write_text("x")

    with pytest.raises(SetupError, match=r"--sheet: .*taken.png' cannot be written"):
        replace()
    assert os.listdir(tmp_path) == ["taken.png"]


def test_a_target_is_checked_beforehand(tmp_path: Path) -> None:
    assert check_target(tmp_path / "X.CSV", option="--out") == tmp_path / "X.CSV"
    with pytest.raises(RecipeError, match=r"--out: 'x.txt'.*\.csv or \.jsonl"):
        check_target("x.txt", option="--out")
    with pytest.raises(SetupError, match=r"the folder '.*gone' does not exist"):
        check_target(tmp_path / "gone" / "x.csv", option="--out")
    (tmp_path / "x.csv").mkdir()
    with pytest.raises(SetupError, match="a folder"):
        check_target(tmp_path / "x.csv", option="--out")


def test_unreadable_names_the_files_and_counts_the_rest() -> None:
    assert unreadable([{"path": "a.png", "predictions": []}]) is None
    rows = [{"path": f"{n}\x1b[2J.png", "error": "zero bytes"} for n in range(25)]
    error = unreadable([*rows, {"path": "good.png", "predictions": []}])
    assert isinstance(error, DataError)
    assert error.exit_code == 3
    lines = str(error).splitlines()
    assert lines[0].startswith("25 files were not classified")
    assert lines[1] == r"  0\x1b[2J.png: zero bytes"
    assert lines[-1] == "  … and 5 more, which a file of --out names"
    assert len(lines) == 22


def test_describe() -> None:
    one = [{"label": "cat\x07", "index": 1, "confidence": 0.987}]
    rows: list[dict[str, Any]] = [
        {"path": "a.png", "predictions": one},
        {"path": "longer.png", "predictions": one},
        {"path": "b.png", "error": "zero bytes"},
    ]
    assert describe(rows).splitlines() == [
        r"a.png       cat\x07 98.7 %",
        r"longer.png  cat\x07 98.7 %",
    ]
    assert describe(rows, out="x.csv") == "x.csv: 2 of 3 files classified"
    assert describe(rows, sheet="s.png").splitlines()[1:] == [
        r"longer.png  cat\x07 98.7 %",
        "s.png: contact sheet",
    ]
    assert describe(rows, out="x.csv", sheet="s.png").splitlines() == [
        "x.csv: 2 of 3 files classified",
        "s.png: contact sheet",
    ]
    assert describe([]) == ""


def test_one_line_obeys_no_name() -> None:
    assert one_line("a\x1b[2J\n\u202e\udce9 é") == r"a\x1b[2J\n\u202e\udce9 é"
