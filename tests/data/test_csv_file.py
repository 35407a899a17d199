"""CSV sources: each row names an image and its label; the result equals a class folder.

What a CSV source refuses is tested in test_bad_data.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from refusals import refused
from small_datasets import (
    class_counts,
    make_pixel_store,
    random_png,
    write_file,
    write_image_folder,
)

from finetune.cli.main import main
from finetune.data import csv_file
from finetune.data.decode import decode_image
from finetune.data.open_source import open_source
from finetune.recipe.load import load_recipe
from finetune.recipe.paths import is_data_source, resolve_data_source

HEADER = "path,label"


@pytest.fixture(autouse=True)
def write_images(tmp_path: Path) -> None:
    for number in range(6):
        write_file(tmp_path / "img" / f"{number}.png", random_png(number))


def write_csv(folder: Path, *lines: str, name: str = "labels.csv") -> str:
    """Write a CSV file. Returns: its source string."""
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return f"csv:{folder / name}"


def test_reads_images_and_labels(tmp_path: Path) -> None:
    source = open_source(write_csv(tmp_path, HEADER, "img/2.png,b", "./img/0.png,a", "img/1.png,b"))
    train = source.splits["train"]
    assert source.class_names == ["a", "b"]
    assert [train.name_of(index) for index in range(3)] == [f"img/{n}.png" for n in range(3)]
    assert train.labels.tolist() == [0, 1, 1]
    assert np.array_equal(train.decode(2), decode_image(tmp_path / "img/2.png"))
    assert source.description == "images of labels.csv"


@pytest.mark.parametrize(
    "column", ["path", "image", "file_name", "filename", "file", "filepath", "image_path", "img"]
)
def test_detects_common_image_column_names(tmp_path: Path, column: str) -> None:
    header = f"id, {column.upper()} ,label"
    assert class_counts(
        open_source(write_csv(tmp_path, header, "7,img/0.png,a", "8,img/1.png,b"))
    ) == {"train": [1, 1]}


@pytest.mark.parametrize("column", ["label", "labels", "class", "class_name", "target", "category"])
def test_detects_common_label_column_names(tmp_path: Path, column: str) -> None:
    header = f"{column},file_name,id"
    assert class_counts(
        open_source(write_csv(tmp_path, header, "a,img/0.png,7", "b,img/1.png,8"))
    ) == {"train": [1, 1]}


def test_configured_columns(tmp_path: Path) -> None:
    source = write_csv(tmp_path, "path,label,Crop,kind", "x,y,img/0.png,a", "x,y,img/1.png,b")
    configured = open_source(source, image_column="Crop", label_column="kind")
    assert configured.class_names == ["a", "b"]
    with refused("data.no_column", "line 1", "data.label_column", "'kind'"):
        open_source(source, label_column="kin")


@pytest.mark.parametrize(
    "text",
    [
        "path,label\nimg/0.png,a b\nimg/1.png,c\n",
        "path,label\r\nimg/0.png,a b\r\n\r\nimg/1.png,c",
        'path, label\n"img/0.png", "a b"\nimg/1.png, c \n,\n',
        "path;label\nimg/0.png;a b\nimg/1.png;c\n",
        "path\tlabel\nimg/0.png\ta b\nimg/1.png\tc\n",
        "\ufeffpath,label\nimg/0.png,a b\nimg/1.png,c\n",
    ],
    ids=["plain", "Windows", "quotes and spaces", "semicolons", "tabs", "byte order mark"],
)
def test_reads_every_csv_dialect(tmp_path: Path, text: str) -> None:
    write_file(tmp_path / "t.csv", text.encode())
    opened = open_source(f"csv:{tmp_path / 't.csv'}")
    assert opened.class_names == ["a b", "c"]
    assert opened.splits["train"].name_of(0) == "img/0.png"


def test_reads_a_quoted_separator_and_non_latin_text(tmp_path: Path) -> None:
    write_file(tmp_path / "img" / "a,\u732b.png", random_png(9))
    source = write_csv(tmp_path, HEADER, '"img/a,\u732b.png","cats, \u732b"', "img/1.png,b")
    opened = open_source(source)
    assert opened.class_names == ["b", "cats, \u732b"]
    assert opened.splits["train"].name_of(1) == "img/a,\u732b.png"


@pytest.mark.parametrize("lines", [("0.png,a", "1.png,b"), ("0,a", "1,b")])
def test_finds_the_images_in_a_subfolder(
    tmp_path: Path, lines: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    source = write_csv(tmp_path, "id,label", *lines)
    train = open_source(source).splits["train"]
    assert [train.name_of(index) for index in range(2)] == ["img/0.png", "img/1.png"]
    assert "img/0.png" in caplog.text
    (tmp_path / "img").rename(tmp_path / "old")
    for name in ("0.png", "1.png"):
        write_file(tmp_path / "new" / name, random_png(1))
    with refused("data.not_found", lines[0][:-2]):  # in both folders
        open_source(source)


def test_reads_a_split_column(tmp_path: Path) -> None:
    lines = (f"img/{n}.png,{'ab'[n % 2]},{split}" for n, split in enumerate(["Train"] * 2))
    other_lines = [
        "img/2.png,a,validation",
        "img/3.png,b,valid",
        "img/4.png,a,test",
        "img/5.png,b,val",
    ]
    opened = open_source(write_csv(tmp_path, "path,label,Split", *lines, *other_lines))
    assert class_counts(opened) == {"train": [1, 1], "val": [1, 2], "test": [1, 0]}


def test_equals_a_class_folder_with_the_same_images(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    from_folder = open_source(write_image_folder(folder, {"a": 3, "b": 2})).splits["train"]
    names = [from_folder.name_of(index) for index in range(5)]
    lines = [f"{name},{name[0]}" for name in names[::-1]]
    from_csv = open_source(write_csv(folder, HEADER, *lines)).splits["train"]
    assert from_csv.fingerprint == from_folder.fingerprint
    assert from_csv.cache_key() == from_folder.cache_key()
    assert np.array_equal(make_pixel_store(from_csv).images, make_pixel_store(from_folder).images)
    lines[0] = lines[0][:-1] + "a"
    changed = open_source(write_csv(folder, HEADER, *lines)).splits["train"]
    assert changed.fingerprint != from_folder.fingerprint
    write_file(folder / "a/0.png", random_png(77))
    with refused("data.changed", "a/0.png"):
        from_csv.decode(0)


def test_drops_repeated_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = ["img/0.png,a", "img/1.png,b", "./img/0.png,a", "img/../img/1.png,b"]
    assert class_counts(open_source(write_csv(tmp_path, HEADER, *lines))) == {"train": [1, 1]}
    (record,) = caplog.records
    assert "2 repeated lines ignored" in record.message


@pytest.mark.parametrize(
    "labels, is_suggested",
    [
        (["cat|dog", "cat", "dog", "cat"], True),
        (["a|b", *["a"] * 20, "b"], False),  # a class name that contains a separator
    ],
)
def test_suggests_multilabel_if_labels_contain_a_separator(
    tmp_path: Path, labels: list[str], is_suggested: bool, caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"{number}.png" for number in range(len(labels))]
    for name in names:
        write_file(tmp_path / name, random_png(1))
    source = write_csv(tmp_path, HEADER, *map(",".join, zip(names, labels, strict=True)))
    assert open_source(source).class_names == sorted({*labels})
    suggestions = [
        record.message for record in caplog.records if "data.task=multilabel" in record.message
    ]
    assert [repr(labels[0]) in message for message in suggestions] == [True] * is_suggested
    caplog.clear()
    open_source(source, multilabel=True)
    assert not caplog.records


def test_reads_indicator_columns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = ["path,cat,dog,cow", "img/0.png,1,1,0", "img/1.png,0,1,0"]
    source = open_source(write_csv(tmp_path, *rows), multilabel=True)
    assert (source.class_names, source.indicator_columns) == (["cat", "dog"], ("cat", "dog", "cow"))
    assert "cow" in caplog.text
    # as pandas writes them
    boolean_rows = [row.replace(",1", ",True").replace(",0", ",False") for row in rows]
    from_booleans = open_source(write_csv(tmp_path, *boolean_rows), multilabel=True)
    assert np.array_equal(from_booleans.splits["train"].labels, source.splits["train"].labels)
    with refused("data.no_column", "data.task=multilabel"):
        open_source(write_csv(tmp_path, *rows))
    label_rows = ["path,tags", "img/0.png,cat|dog", "img/1.png,[]"]
    source = open_source(write_csv(tmp_path, *label_rows), multilabel=True)
    assert (source.class_names, source.indicator_columns) == (["cat", "dog"], ())
    numeric_rows = ["path,tags", "img/0.png,0|1", "img/1.png,1"]
    assert open_source(write_csv(tmp_path, *numeric_rows), multilabel=True).class_names == [
        "0",
        "1",
    ]


def test_indicator_column_can_hold_two_classes(tmp_path: Path) -> None:
    source = write_csv(tmp_path, "path,cat", "img/0.png,0", "img/1.png,1")
    assert open_source(source, label_column="cat").class_names == ["0", "1"]


def test_rejects_a_large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_file, "MAX_FILE_BYTES", 20)
    with refused("data.too_large", "20 B"):
        open_source(write_csv(tmp_path, HEADER, "img/0.png,a"))


def test_follows_symlinks_inside_the_folder(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "all").symlink_to(tmp_path / "img")
    opened = open_source(write_csv(tmp_path / "set", HEADER, "all/0.png,a", "all/1.png,b"))
    assert opened.splits["train"].decode(0).shape == (5, 4, 3)
    absolute = str(tmp_path / "set" / "all" / "0.png")
    assert class_counts(
        open_source(write_csv(tmp_path / "set", HEADER, f"{absolute},a", "all/1.png,b"))
    )


class TestCsvInAFolder:
    @pytest.mark.parametrize("name", ["metadata.csv", "labels.csv"])
    def test_next_to_the_images(self, tmp_path: Path, name: str) -> None:
        write_csv(tmp_path, "file_name,label", "img/0.png,a", "img/1.png,b", name=name)
        opened = open_source(f"folder:{tmp_path}")
        assert class_counts(opened) == {"train": [1, 1]}
        assert opened.description == f"images of {name}"

    def test_two_files_are_refused(self, tmp_path: Path) -> None:
        for name in ("metadata.csv", "labels.csv"):
            write_csv(tmp_path, "file_name,label", "img/0.png,a", "img/1.png,b", name=name)
        with refused("data.ambiguous", "metadata.csv and labels.csv"):
            open_source(f"folder:{tmp_path}")

    def test_images_that_it_does_not_list_are_said(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        write_csv(
            tmp_path, HEADER, *(f"img/{number}.png,{'ab'[number % 2]}" for number in range(6))
        )
        open_source(f"folder:{tmp_path}")
        assert not caplog.messages
        write_file(tmp_path / "img/new.png", random_png(1))
        open_source(f"folder:{tmp_path}")
        assert "1 image is not listed there and left out: img/new.png" in caplog.messages[0]

    def test_with_a_split_column(self, tmp_path: Path) -> None:
        lines = [f"img/{n}.png,{'ab'[n % 2]},{'train' if n < 4 else 'test'}" for n in range(6)]
        write_csv(tmp_path, "path,label,split", *lines)
        assert class_counts(open_source(f"folder:{tmp_path}")) == {"train": [2, 2], "test": [1, 1]}

    def test_with_one_file_per_split(self, tmp_path: Path) -> None:
        for number, name in enumerate(["train/x.png", "train/y.png", "test/x.png"]):
            write_file(tmp_path / "s" / name, random_png(number))
        write_csv(
            tmp_path / "s/train", "file_name,label", "x.png,b", "y.png,a", name="metadata.csv"
        )
        with refused("data.no_labels", "s/test"):
            open_source(f"folder:{tmp_path}/s")
        write_csv(tmp_path / "s/test", "file_name,label,split", "x.png,b,test", name="metadata.csv")
        opened = open_source(f"folder:{tmp_path}/s")
        assert class_counts(opened) == {"train": [1, 1], "test": [0, 1]}
        assert opened.splits["test"].name_of(0) == "test/x.png"
        assert opened.splits["test"].decode(0).shape == (5, 4, 3)
        write_csv(
            tmp_path / "s/test", "file_name,label,split", "x.png,b,train", name="metadata.csv"
        )
        with refused("data.no_split", "line 2", "'train'"):
            open_source(f"folder:{tmp_path}/s")

    def test_indicator_columns_must_match_across_splits(self, tmp_path: Path) -> None:
        for split, columns, row in (("train", "a,b", "1,1"), ("test", "a,c", "1,0")):
            write_file(tmp_path / "s" / split / "x.png", random_png(1))
            write_csv(tmp_path / "s" / split, f"path,{columns}", f"x.png,{row}")
        with refused("data.split_mismatch", "'train'", "'test'", "'b'"):
            open_source(f"folder:{tmp_path}/s", multilabel=True)
        write_csv(tmp_path / "s" / "test", "path,b,a", "x.png,1,0")
        opened = open_source(f"folder:{tmp_path}/s", multilabel=True)
        assert opened.splits["test"].labels.tolist() == [[0, 1]]

    @pytest.mark.parametrize("other,warns", [("Fold", True), ("split", False), ("size", False)])
    def test_a_column_that_could_name_the_splits(
        self, other: str, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        for name in ("x.png", "y.png"):
            write_file(tmp_path / name, random_png(1))
        write_csv(tmp_path, f"path,label,{other}", "x.png,a,train", "y.png,b,train")
        open_source(f"csv:{tmp_path / 'labels.csv'}")
        assert len(caplog.messages) == warns
        assert all("the column 'Fold' is not used" in line for line in caplog.messages)

    def test_class_folders_take_precedence_with_a_warning(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        source = write_image_folder(tmp_path / "d", {"a": 2, "b": 1})
        write_csv(tmp_path / "d", HEADER, "a/0.png,x", "b/0.png,y")
        assert open_source(source).class_names == ["a", "b"]
        csv_path = caplog.text.rpartition("csv:")[2].split()[0]
        assert open_source(f"csv:{csv_path}").class_names == ["x", "y"]


def test_resolves_a_path_without_a_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path, HEADER, "img/0.png,a", "img/1.png,b")
    assert is_data_source("labels.csv")
    assert is_data_source("csv:x")
    assert resolve_data_source("labels.csv") == "csv:labels.csv"
    (tmp_path / "a.tar").write_bytes(b"")
    assert is_data_source("a.TAR")
    assert is_data_source("a-{0..9}.tar")
    assert resolve_data_source("a.tar") == "tar:a.tar"
    for file, source in (
        ("t/0.tar", "tar:t"),
        ("p/0.parquet", "parquet:p"),
        ("hub/data/0.parquet", "parquet:hub"),
        ("photos/cat/0.jpg", "folder:photos"),
        ("photos/all.tar", "folder:photos"),
    ):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).touch()
        assert resolve_data_source(source.partition(":")[2]) == source


@pytest.mark.usefixtures("no_plots")
def test_trains_from_a_csv_file(image_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = sorted(image_folder.glob("*/*/*.png"))
    lines = (f"{file.relative_to(image_folder)},{file.parent.name}" for file in files)
    splits = (file.parts[-3] for file in files)
    rows = [f"{line},{split}" for line, split in zip(lines, splits, strict=True)]
    write_csv(image_folder, "path,label,split", *rows)
    monkeypatch.chdir(image_folder)
    fast = ["optim.steps=2", "model.freeze=none", "model.name=embedded:vit_nano"]
    fast += ["model.image_size=16"]
    assert main(["train", "labels.csv", *fast, "--out", "run"]) == 0
    assert Path("run/report.html").is_file()
    assert load_recipe("run/recipe.yaml").data.source == "csv:labels.csv"
    write_csv(image_folder, "path,label,split", *rows[:-1], rows[-1].replace(",red,", ",blue,"))
    assert main(["train", "run", "--resume"]) == 3
