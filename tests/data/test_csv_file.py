"""CSV sources: the images and labels that their lines name, as of a folder of classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from refusals import refused
from samples import counts, make_folder, png, store_of, write

from finetune.cli.main import main
from finetune.data import csv_file
from finetune.data.decode import decode
from finetune.data.source import open_source
from finetune.recipe.load import load_recipe
from finetune.recipe.local import names_images, source_of

HEAD = "path,label"


@pytest.fixture(autouse=True)
def images(tmp_path: Path) -> None:
    for number in range(6):
        write(tmp_path / "img" / f"{number}.png", png(number))


def table(folder: Path, *lines: str, name: str = "labels.csv") -> str:
    """Write a CSV file. Returns: its source string."""
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return f"csv:{folder / name}"


def test_images_and_labels(tmp_path: Path) -> None:
    source = open_source(table(tmp_path, HEAD, "img/2.png,b", "./img/0.png,a", "img/1.png,b"))
    train = source.splits["train"]
    assert source.class_names == ["a", "b"]
    assert [train.name_of(index) for index in range(3)] == [f"img/{n}.png" for n in range(3)]
    assert train.labels.tolist() == [0, 1, 1]
    assert np.array_equal(train.read(2), decode(tmp_path / "img/2.png"))
    assert source.description == "images of labels.csv"


@pytest.mark.parametrize("image", csv_file._IMAGE_NAMES)
def test_usual_names_of_the_image_column(tmp_path: Path, image: str) -> None:
    text = f"id, {image.upper()} ,label"
    assert counts(open_source(table(tmp_path, text, "7,img/0.png,a", "8,img/1.png,b"))) == {
        "train": [1, 1]
    }


@pytest.mark.parametrize("label", csv_file._LABEL_NAMES)
def test_usual_names_of_the_label_column(tmp_path: Path, label: str) -> None:
    text = f"{label},file_name,id"
    assert counts(open_source(table(tmp_path, text, "a,img/0.png,7", "b,img/1.png,8"))) == {
        "train": [1, 1]
    }


def test_named_columns(tmp_path: Path) -> None:
    source = table(tmp_path, "path,label,Crop,kind", "x,y,img/0.png,a", "x,y,img/1.png,b")
    opened = open_source(source, image_column="Crop", label_column="kind")
    assert opened.class_names == ["a", "b"]
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
def test_ways_of_writing_it(tmp_path: Path, text: str) -> None:
    write(tmp_path / "t.csv", text.encode())
    opened = open_source(f"csv:{tmp_path / 't.csv'}")
    assert opened.class_names == ["a b", "c"]
    assert opened.splits["train"].name_of(0) == "img/0.png"


def test_a_quoted_separator_and_another_script(tmp_path: Path) -> None:
    write(tmp_path / "img" / "a,\u732b.png", png(9))
    source = table(tmp_path, HEAD, '"img/a,\u732b.png","cats, \u732b"', "img/1.png,b")
    opened = open_source(source)
    assert opened.class_names == ["b", "cats, \u732b"]
    assert opened.splits["train"].name_of(1) == "img/a,\u732b.png"


def test_splits(tmp_path: Path) -> None:
    lines = (f"img/{n}.png,{'ab'[n % 2]},{split}" for n, split in enumerate(["Train"] * 2))
    more = ["img/2.png,a,validation", "img/3.png,b,valid", "img/4.png,a,test", "img/5.png,b,val"]
    opened = open_source(table(tmp_path, "path,label,Split", *lines, *more))
    assert counts(opened) == {"train": [1, 1], "val": [1, 2], "test": [1, 0]}


def test_it_is_the_folder_of_the_same_images(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    by_folders = open_source(make_folder(folder, {"a": 3, "b": 2})).splits["train"]
    names = [by_folders.name_of(index) for index in range(5)]
    lines = [f"{name},{name[0]}" for name in names[::-1]]
    by_lines = open_source(table(folder, HEAD, *lines)).splits["train"]
    assert by_lines.fingerprint == by_folders.fingerprint
    assert by_lines.cache_key == by_folders.cache_key
    assert np.array_equal(store_of(by_lines).images, store_of(by_folders).images)
    lines[0] = lines[0][:-1] + "a"
    changed = open_source(table(folder, HEAD, *lines)).splits["train"]
    assert changed.fingerprint != by_folders.fingerprint
    assert by_lines.is_unchanged()
    write(folder / "a/0.png", png(77))
    assert not by_lines.is_unchanged()


def test_lines_that_repeat_another_count_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = ["img/0.png,a", "img/1.png,b", "./img/0.png,a", "img/../img/1.png,b"]
    assert counts(open_source(table(tmp_path, HEAD, *lines))) == {"train": [1, 1]}
    (record,) = caplog.records
    assert "2 repeated lines left out" in record.message


@pytest.mark.parametrize(
    "labels, is_told",
    [
        (["cat|dog", "cat", "dog", "cat"], True),
        (["a|b", *["a"] * 20, "b"], False),  # a name that holds one
    ],
)
def test_labels_that_may_be_several(
    tmp_path: Path, labels: list[str], is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"{number}.png" for number in range(len(labels))]
    for name in names:
        write(tmp_path / name, png(1))
    source = table(tmp_path, HEAD, *map(",".join, zip(names, labels, strict=True)))
    assert open_source(source).class_names == sorted({*labels})
    told = [one.message for one in caplog.records if "data.task=multilabel" in one.message]
    assert [repr(labels[0]) in one for one in told] == [True] * is_told
    caplog.clear()
    open_source(source, multilabel=True)
    assert not caplog.records


def test_columns_of_0_and_1(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = ["path,cat,dog,cow", "img/0.png,1,1,0", "img/1.png,0,1,0"]
    source = open_source(table(tmp_path, *rows), multilabel=True)
    assert (source.class_names, source.columns) == (["cat", "dog"], ("cat", "dog", "cow"))
    assert "cow" in caplog.text
    words = [row.replace(",1", ",True").replace(",0", ",False") for row in rows]  # as pandas does
    again = open_source(table(tmp_path, *words), multilabel=True)
    assert np.array_equal(again.splits["train"].labels, source.splits["train"].labels)
    with refused("data.no_column", "data.task=multilabel"):
        open_source(table(tmp_path, *rows))
    one = ["path,tags", "img/0.png,cat|dog", "img/1.png,[]"]
    source = open_source(table(tmp_path, *one), multilabel=True)
    assert (source.class_names, source.columns) == (["cat", "dog"], ())
    numbers = ["path,tags", "img/0.png,0|1", "img/1.png,1"]
    assert open_source(table(tmp_path, *numbers), multilabel=True).class_names == ["0", "1"]


def test_a_lone_column_of_0_and_1_is_one_class(tmp_path: Path) -> None:
    source = table(tmp_path, "path,cat", "img/0.png,0", "img/1.png,1")
    with refused("data.one_class", "'cat'", "data.label_column=cat"):
        open_source(source, multilabel=True)
    assert open_source(source, label_column="cat").class_names == ["0", "1"]


@pytest.mark.parametrize(
    "lines,code,named",
    [
        (["img/0.png,a", "img/1.png,"], "no_labels", "line 3"),
        (["img/0.png,a", ",b"], "no_image", "line 3"),
        (["img/0.png,a", '"img/1.png', 'x",b', "img/2.png,c,d"], "wrong_format", "line 5"),
        (["img/0.png,a", "img/1.png"], "wrong_format", "line 3"),
        (["img/0.png,a", 'img/1.png,"b'], "wrong_format", "line 3"),
        (["img/0.png,a", "img/10.png,b"], "not_found", "did you mean"),
        (["img/0.png,a", "img/7.png,b", "img/8.png,b"], "not_found", "line 3"),
        (["img/0.png,a", "img/0.png,b"], "wrong_labels", "line 3"),
        (["img/0.png,a", "../x.png,b"], "unsafe", "line 3"),
        (["img/0.png,a", "/etc/passwd,b"], "unsafe", "'/etc/passwd'"),
        (["img/0.png,a", "img/../../x.png,b"], "unsafe", "line 3"),
        (["img/0.png,a", ".,b"], "unsafe", "line 3"),
        (["img/0.png,a", "img/1.png,A"], "duplicate_class", "'A'"),
        (["img/0.png,a", "img/1.png,a"], "one_class", "'a'"),
        ([], "empty", "labels.csv"),
    ],
)
def test_lines_that_cannot_be_used(tmp_path: Path, lines: list[str], code: str, named: str) -> None:
    with refused(f"data.{code}", named):
        open_source(table(tmp_path, HEAD, *lines))


@pytest.mark.parametrize(
    "lines,code,named",
    [
        (["img/0.png,a", "img/1.png,b"], "no_column", "line 1"),
        (["name,label", "img/0.png,a"], "no_column", "data.image_column"),
        (["path,name", "img/0.png,a"], "no_column", "data.label_column"),
        (["path,label,label", "img/0.png,a,b"], "ambiguous", "'label'"),
        (["path,label,split", "img/0.png,a,dev"], "no_split", "line 2"),
        (["path,label,split", "img/0.png,a,train", "img/0.png,a,test"], "ambiguous", "line 2"),
        (["path,label", "img/0.png,\0"], "wrong_format", "line 2"),
        ([""], "empty", "path,label"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, lines: list[str], code: str, named: str) -> None:
    with refused(f"data.{code}", named):
        open_source(table(tmp_path, *lines))


def test_a_file_that_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "t.csv", "path,label\nimg/0.png,\u00e4\n".encode("latin-1"))
    with refused("data.wrong_format", "line 2", "UTF-8"):
        open_source(f"csv:{tmp_path / 't.csv'}")
    write(tmp_path / "t.csv", "path,label\n".encode("utf-16"))
    with refused("data.wrong_format", "line 1", "UTF-8"):
        open_source(f"csv:{tmp_path / 't.csv'}")
    with refused("data.not_a_file", "img"):
        open_source(f"csv:{tmp_path / 'img'}")
    monkeypatch.setattr(csv_file, "_MOST_BYTES", 20)
    with refused("data.too_large", "20 B"):
        open_source(table(tmp_path, HEAD, "img/0.png,a"))


def test_a_link_in_the_folder_is_followed(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "all").symlink_to(tmp_path / "img")
    opened = open_source(table(tmp_path / "set", HEAD, "all/0.png,a", "all/1.png,b"))
    assert opened.splits["train"].read(0).shape == (5, 4, 3)
    absolute = str(tmp_path / "set" / "all" / "0.png")
    assert counts(open_source(table(tmp_path / "set", HEAD, f"{absolute},a", "all/1.png,b")))


class TestInAFolder:
    @pytest.mark.parametrize("name", ["metadata.csv", "labels.csv"])
    def test_beside_the_images(self, tmp_path: Path, name: str) -> None:
        table(tmp_path, "file_name,label", "img/0.png,a", "img/1.png,b", name=name)
        opened = open_source(f"folder:{tmp_path}")
        assert counts(opened) == {"train": [1, 1]}
        assert opened.description == f"images of {name}"

    def test_with_a_column_of_splits(self, tmp_path: Path) -> None:
        lines = [f"img/{n}.png,{'ab'[n % 2]},{'train' if n < 4 else 'test'}" for n in range(6)]
        table(tmp_path, "path,label,split", *lines)
        assert counts(open_source(f"folder:{tmp_path}")) == {"train": [2, 2], "test": [1, 1]}

    def test_one_for_each_split(self, tmp_path: Path) -> None:
        for number, name in enumerate(["train/x.png", "train/y.png", "test/x.png"]):
            write(tmp_path / "s" / name, png(number))
        table(tmp_path / "s/train", "file_name,label", "x.png,b", "y.png,a", name="metadata.csv")
        with refused("data.no_labels", "s/test"):
            open_source(f"folder:{tmp_path}/s")
        table(tmp_path / "s/test", "file_name,label,split", "x.png,b,test", name="metadata.csv")
        opened = open_source(f"folder:{tmp_path}/s")
        assert counts(opened) == {"train": [1, 1], "test": [0, 1]}
        assert opened.splits["test"].name_of(0) == "test/x.png"
        assert opened.splits["test"].read(0).shape == (5, 4, 3)
        table(tmp_path / "s/test", "file_name,label,split", "x.png,b,train", name="metadata.csv")
        with refused("data.no_split", "line 2", "'train'"):
            open_source(f"folder:{tmp_path}/s")

    def test_columns_of_0_and_1_are_those_of_all_splits(self, tmp_path: Path) -> None:
        for split, head, row in (("train", "a,b", "1,1"), ("test", "a,c", "1,0")):
            write(tmp_path / "s" / split / "x.png", png(1))
            table(tmp_path / "s" / split, f"path,{head}", f"x.png,{row}")
        with refused("data.split_mismatch", "'train'", "'test'", "'b'"):
            open_source(f"folder:{tmp_path}/s", multilabel=True)
        table(tmp_path / "s" / "test", "path,b,a", "x.png,1,0")
        opened = open_source(f"folder:{tmp_path}/s", multilabel=True)
        assert opened.splits["test"].labels.tolist() == [[0, 1]]

    def test_class_folders_say_it_themselves_and_it_is_told(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        source = make_folder(tmp_path / "d", {"a": 2, "b": 1})
        table(tmp_path / "d", HEAD, "a/0.png,x", "b/0.png,y")
        assert open_source(source).class_names == ["a", "b"]
        told = caplog.text.rpartition("csv:")[2].split()[0]
        assert open_source(f"csv:{told}").class_names == ["x", "y"]


def test_a_lone_name_is_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table(tmp_path, HEAD, "img/0.png,a", "img/1.png,b")
    assert names_images("labels.csv")
    assert names_images("csv:x")
    assert source_of("labels.csv") == "csv:labels.csv"
    (tmp_path / "a.tar").write_bytes(b"")
    assert names_images("a.TAR")
    assert names_images("a-{0..9}.tar")
    assert source_of("a.tar") == "tar:a.tar"
    for file, source in (
        ("t/0.tar", "tar:t/*.tar"),
        ("p/0.parquet", "parquet:p"),
        ("hub/data/0.parquet", "parquet:hub"),
        ("photos/cat/0.jpg", "folder:photos"),
        ("photos/all.tar", "folder:photos"),
    ):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).touch()
        assert source_of(source.partition(":")[2].removesuffix("/*.tar")) == source
    with refused("data.not_found", "'labels.csv'"):
        source_of("label.csv")
    with refused("data.wrong_source", "'tar:a.tar'"):
        open_source("a.tar")
    with refused("data.wrong_source", "'csv:labels.csv'"):
        open_source("labels.csv")


def test_a_run_of_a_csv_file(image_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = sorted(image_folder.glob("*/*/*.png"))
    lines = (f"{file.relative_to(image_folder)},{file.parent.name}" for file in files)
    splits = (file.parts[-3] for file in files)
    rows = [f"{line},{split}" for line, split in zip(lines, splits, strict=True)]
    table(image_folder, "path,label,split", *rows)
    monkeypatch.chdir(image_folder)
    fast = ["optim.steps=2", "model.freeze=none", "model.name=embedded:vit_nano"]
    assert main(["train", "labels.csv", *fast, "--out", "run"]) == 0
    assert Path("run/report.html").is_file()
    assert load_recipe("run/recipe.yaml").data.source == "csv:labels.csv"
    table(image_folder, "path,label,split", *rows[:-1], rows[-1].replace(",red,", ",blue,"))
    assert main(["train", "run", "--resume"]) == 3
