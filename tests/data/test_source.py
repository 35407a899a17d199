"""Sources: the right images with the right labels, or an error that says what is wrong."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import pytest
from samples import counts, make_folder, make_parquet, png, write

from finetune.data import decode as decode_module
from finetune.data import source as module
from finetune.data.decode import decode
from finetune.data.source import Split, open_source
from finetune.errors import DataError


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notices are said once per process: each test starts anew."""
    monkeypatch.setattr(decode_module, "_said", set())


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records]


@pytest.mark.parametrize(
    "text,said",
    [
        ("foldr:x", "did you mean 'folder'"),
        ("parquet", "expected hub:owner/name"),
        ("folder:", "the PATH behind 'folder:' is missing; expected hub:owner/name"),
        ("hub:", "the PATH behind 'hub:' is missing; expected hub:owner/name"),
        ("cifar10", "cannot read 'cifar10'"),
        ("embedded:digit", "did you mean 'digits'"),
        ("hub:cifar10", "expected hub:owner/name"),
        ("hub:a/b@", "expected hub:owner/name"),
    ],
)
def test_unknown_sources(text: str, said: str) -> None:
    with pytest.raises(DataError, match=said) as caught:
        open_source(text)
    assert caught.value.exit_code == 3


def test_a_path_without_a_kind_is_recognised(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"did you mean 'folder:{tmp_path}'"):
        open_source(str(tmp_path))


def test_columns_are_for_tables_only() -> None:
    with pytest.raises(DataError, match="embedded: sources have no columns"):
        open_source("embedded:digits", image_column="img")


def test_digits() -> None:
    from sklearn.datasets import load_digits

    source = open_source("embedded:digits")
    assert source.class_names == [str(digit) for digit in range(10)]
    assert {name: len(split) for name, split in source.splits.items()} == {
        "train": 1442,
        "test": 355,
    }
    grey, labels = load_digits(return_X_y=True)
    places = [source.splits["test"].name_of(i) for i in range(355)]
    rows = [int(place.removeprefix("digits row ")) for place in places]
    for index in (0, 100, 354):
        image = source.splits["test"].read(index)
        assert np.array_equal(image[..., 0], np.rint(grey[rows[index]].reshape(8, 8) * 255 / 16))
        assert np.array_equal(image[..., 0], image[..., 2])
        assert source.splits["test"].labels[index] == labels[rows[index]]
    zeros = np.flatnonzero(labels == 0)
    assert [row for row in rows if labels[row] == 0] == zeros[4::5].tolist()
    train_rows = [source.splits["train"].name_of(i) for i in range(1442)]
    assert not set(train_rows) & set(places)


@pytest.mark.parametrize("val", ["val", "valid", "validation", "Valid"])
def test_folder_of_splits(tmp_path: Path, val: str) -> None:
    folders = {"train/dog": 3, "train/cat": 2, f"{val}/cat": 1, "test/dog": 2, "test/cat": 1}
    source = open_source(make_folder(tmp_path, folders))
    assert source.class_names == ["cat", "dog"]
    assert counts(source) == {"train": [2, 3], "val": [1, 0], "test": [1, 2]}
    assert list(source.splits) == ["train", "val", "test"]
    train = source.splits["train"]
    assert [train.name_of(index) for index in range(5)] == [
        *("train/cat/0.png", "train/cat/1.png"),
        *("train/dog/0.png", "train/dog/1.png", "train/dog/2.png"),
    ]
    assert np.array_equal(train.read(2), decode(tmp_path / "train/dog/0.png"))


def test_folder_of_classes_is_all_train(tmp_path: Path) -> None:
    source = open_source(make_folder(tmp_path, {"b": 2, "a": 3, "c/deep/er": 1}))
    assert counts(source) == {"train": [3, 2, 1]}
    assert source.splits["train"].name_of(5) == "c/deep/er/0.png"
    assert source.description == "image files in 1 split"


def test_relative_folder_survives_a_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder(tmp_path / "data", {"a": 1, "b": 1})
    monkeypatch.chdir(tmp_path)
    source = open_source("folder:data")
    monkeypatch.chdir("/")
    assert source.splits["train"].read(1).shape == (5, 4, 3)
    assert source.splits["train"].name_of(1) == "b/0.png"


@pytest.mark.parametrize(
    "folders,said",
    [
        ({"train/a": 1, "train/b": 1, "test/a": 1, "test/c": 1}, "in 'test' but not in 'train': c"),
        ({"train/a": 1, "train/b": 0}, r"1 class folder without images in .*train: b"),
        ({"train/a": 1, "train/b": 1, "test/a": 0}, r"1 class folder without images in .*test: a"),
        ({"cat": 1, "Cat": 1}, "'Cat' and 'cat' differ only in case"),
        ({"train/cat": 1, "train/dog": 1, "test/Cat": 1}, "'Cat' and 'cat' differ only"),
        ({"caf\u00e9": 1, "cafe\u0301": 1}, "differ only in case, Unicode"),
        ({"train/a": 2}, r"only one class, \['a'\]; two are needed: add images"),
        ({"train": 3, "test": 1}, r"no class folders in .*train"),
        ({"": 3}, "no class folders"),
        ({"a": 1, "b": 1, "test/a": 1}, "'test' stands beside class folders .a, b."),
        ({"train/a": 1, "train/b": 1, "val/a": 1, "valid/a": 1}, "'val' and 'valid' are both val"),
    ],
)
def test_folders_that_cannot_be_trained_on(
    tmp_path: Path, folders: dict[str, int], said: str
) -> None:
    with pytest.raises(DataError, match=said):
        open_source(make_folder(tmp_path, folders))


def test_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "flowers").mkdir()
    with pytest.raises(DataError, match=r"no such folder; did you mean 'flowers'\?"):
        open_source(f"folder:{tmp_path}/flower")
    with pytest.raises(
        DataError, match="no such folder; expected a folder with a folder per class"
    ):
        open_source("folder:/nonexistent")
    write(tmp_path / "file.png", png(0))
    with pytest.raises(DataError, match="a file, not a folder"):
        open_source(f"folder:{tmp_path}/file.png")
    with pytest.raises(DataError, match="no class folders"):
        open_source(f"folder:{tmp_path}/flowers")


def test_only_a_test_split_opens(tmp_path: Path) -> None:
    source = open_source(make_folder(tmp_path, {"test/a": 1, "test/b": 2}))
    assert counts(source) == {"test": [1, 2]}


def test_clutter_is_ignored_with_one_notice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = make_folder(tmp_path, {"train/a": 1, "train/b": 1, "__MACOSX/a": 1, ".cache/a": 1})
    for name in ("train/a/Thumbs.db", "train/a/.DS_Store", "train/b/._0.png", "train/notes.txt"):
        write(tmp_path / name, b"x")
    write(tmp_path / "train/a/.ipynb_checkpoints/0.png", png(9))
    with caplog.at_level(logging.WARNING):
        opened = open_source(source)
        open_source(source)
    assert counts(opened) == {"train": [1, 1]}
    assert len(caplog.records) == 1
    assert "ignored 4 files of other kinds: .DS_Store, ._0.png" in messages(caplog)[0]


def test_subset_and_names(tmp_path: Path) -> None:
    make_parquet(tmp_path / "a.parquet", [0, 1, 0, 1, 0])
    train = open_source(f"parquet:{tmp_path}").splits["train"]
    part = train.subset(np.array([4, 1, 0])).subset(np.array([2, 0]))
    assert len(part) == 2
    assert part.labels.tolist() == [0, 0]
    assert [part.name_of(index) for index in range(2)] == ["a.parquet row 0", "a.parquet row 4"]
    assert np.array_equal(part.read(1), decode(png(4)))


def test_fingerprint_knows_every_image_label_and_order(tmp_path: Path) -> None:
    source = make_folder(tmp_path, {"a": 3, "b": 3})

    def fingerprint() -> str:
        return open_source(source).splits["train"].fingerprint

    first = fingerprint()
    seen = {first}
    assert fingerprint() == first
    os.utime(tmp_path / "a/0.png", (0, 0))
    assert fingerprint() == first  # content, not dates
    write(tmp_path / "a/3.png", png(50))
    seen.add(fingerprint())
    (tmp_path / "a/3.png").unlink()
    assert fingerprint() == first
    (tmp_path / "b/0.png").unlink()
    seen.add(fingerprint())
    write(tmp_path / "b/0.png", png(51))
    seen.add(fingerprint())
    split = open_source(source).splits["train"]
    seen.add(split.subset(np.arange(6)[::-1]).fingerprint)
    swapped = Split("train", split.labels[::-1].copy(), split.items)
    seen.add(swapped.fingerprint)
    assert len(seen) == 6


def test_fingerprint_of_large_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_folder(tmp_path, {"a": 2, "b": 2})
    monkeypatch.setattr(module, "_FINGERPRINT_BYTES", 10)
    first = open_source(source).splits["train"].fingerprint
    write(tmp_path / "a/0.png", png(60) + b"longer")
    second = open_source(source).splits["train"].fingerprint
    (tmp_path / "a/0.png").rename(tmp_path / "a/00.png")
    third = open_source(source).splits["train"].fingerprint
    assert len({first, second, third}) == 3


def test_fingerprint_with_unreadable_files_does_not_hang(tmp_path: Path) -> None:
    source = make_folder(tmp_path, {"a": 1, "b": 1})
    os.mkfifo(tmp_path / "a/pipe.png")
    (tmp_path / "a/link.png").symlink_to("nowhere")
    assert len(open_source(source).splits["train"].fingerprint) == 64
