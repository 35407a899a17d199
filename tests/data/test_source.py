"""Sources return the right images with the right labels, or an error that names the cause."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from recipe_texts import BASE_RECIPE
from refusals import refused
from small_datasets import class_counts, random_png, write_file, write_image_folder, write_parquet

from finetune.data.decode import decode_image, heif_decoder_version
from finetune.data.image_paths import find_images
from finetune.data.open_source import open_source
from finetune.data.source import Split
from finetune.errors import DataError
from finetune.recipe.load import parse_recipe


def test_rejects_columns_for_sources_without_tables() -> None:
    with refused("data.no_column", "data.image_column", "embedded:"):
        open_source("embedded:digits", image_column="img")


@pytest.mark.parametrize(
    "url",
    [
        "https://host/my data/{train,test}.tar?sig=hunter2hunter2",
        "https://host/{train,test}.tar#token=hunter2hunter2",
        "https://host/{train,test}.tar?sig=<hunter2hunter2>",
        'https://me:"hunter2hunter2@host/{train,test}.tar',
        "https://me:a/hunter2hunter2@host/{train,test}.tar",
    ],
)
def test_a_source_whose_secret_would_not_be_recognized_is_refused(url: str) -> None:
    for read in (
        lambda: parse_recipe(BASE_RECIPE, overrides=[f"data.source={json.dumps(f'tar:{url}')}"]),
        lambda: open_source(f"tar:{url}"),
    ):
        with pytest.raises(DataError) as caught:
            read()
        assert caught.value.code == "data.wrong_source"
        assert "hunter2" not in str(caught.value)


def test_digits_equal_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    source = open_source("embedded:digits")
    assert source.class_names == [str(digit) for digit in range(10)]
    assert {name: len(split) for name, split in source.splits.items()} == {
        "train": 1442,
        "test": 355,
    }
    pixels, labels = load_digits(return_X_y=True)
    test_names = [source.splits["test"].name_of(index) for index in range(355)]
    rows = [int(name.removeprefix("digits row ")) for name in test_names]
    for index in (0, 100, 354):
        image = source.splits["test"].decode(index)
        assert np.array_equal(image[..., 0], np.rint(pixels[rows[index]].reshape(8, 8) * 255 / 16))
        assert np.array_equal(image[..., 0], image[..., 2])
        assert source.splits["test"].labels[index] == labels[rows[index]]
    zeros = np.flatnonzero(labels == 0)
    assert [row for row in rows if labels[row] == 0] == zeros[4::5].tolist()
    train_names = [source.splits["train"].name_of(index) for index in range(1442)]
    assert not set(train_names) & set(test_names)


@pytest.mark.parametrize("val", ["val", "valid", "validation", "Valid"])
def test_folder_with_splits(tmp_path: Path, val: str) -> None:
    folders = {"train/dog": 3, "train/cat": 2, f"{val}/cat": 1, "test/dog": 2, "test/cat": 1}
    source = open_source(write_image_folder(tmp_path, folders))
    assert source.class_names == ["cat", "dog"]
    assert class_counts(source) == {"train": [2, 3], "val": [1, 0], "test": [1, 2]}
    assert list(source.splits) == ["train", "val", "test"]
    train = source.splits["train"]
    assert [train.name_of(index) for index in range(5)] == [
        *("train/cat/0.png", "train/cat/1.png"),
        *("train/dog/0.png", "train/dog/1.png", "train/dog/2.png"),
    ]
    assert np.array_equal(train.decode(2), decode_image(tmp_path / "train/dog/0.png"))


@pytest.mark.parametrize("train, test", [("Training", "Testing"), ("seg_train", "seg_test")])
def test_folder_with_other_split_names(tmp_path: Path, train: str, test: str) -> None:
    folders = {f"{train}/a": 2, f"{train}/b": 1, f"{test}/a": 1, f"{test}/b": 3}
    source = open_source(write_image_folder(tmp_path, folders))
    assert class_counts(source) == {"train": [2, 1], "test": [1, 3]}


def test_class_names_may_contain_split_names(tmp_path: Path) -> None:
    source = open_source(
        write_image_folder(tmp_path, {"steam train": 2, "test tube": 1, "tram": 1})
    )
    assert source.class_names == ["steam train", "test tube", "tram"]
    for name in ("goods train", "test tube"):
        other_source = open_source(write_image_folder(tmp_path / name, {"steam train": 2, name: 1}))
        assert other_source.class_names == sorted([name, "steam train"])


def test_names_the_files_of_a_class_without_images(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_image_folder(tmp_path, {"cat": 2, "dog": 0})
    (tmp_path / "dog" / "IMG_1.CR2").touch()
    with refused("data.empty", "dog"):
        open_source(source)
    assert "IMG_1.CR2" in caplog.text


@pytest.fixture
def without_pillow_heif(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hide the package that decodes HEIC photos, if it is installed."""

    def raise_not_found(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", raise_not_found)
        heif_decoder_version.cache_clear()
        yield
    heif_decoder_version.cache_clear()


@pytest.mark.usefixtures("without_pillow_heif")
def test_says_how_to_read_the_heic_photos_that_it_leaves_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_image_folder(tmp_path, {"cat": 2, "dog": 1})
    for name in ("cat/1.HEIC", "dog/2.heif", "dog/._1.HEIC"):
        (tmp_path / name).write_bytes(b"\0\0\0\x18ftypheic")
    assert class_counts(open_source(source)) == {"train": [2, 1]}
    assert "2 HEIC photos" in caplog.text
    assert "[heic]" in caplog.text
    with refused("data.wrong_format", "[heic]"):
        decode_image(tmp_path / "cat/1.HEIC")
    (tmp_path / "dog/0.png").unlink()
    with refused("data.empty", "[heic]"):
        open_source(source)
    assert "[heic]" in str(find_images([tmp_path / "dog"])[0][1])


def test_reads_heic_photos_if_pillow_heif_is_installed(tmp_path: Path) -> None:
    pytest.importorskip("pillow_heif")
    source = write_image_folder(tmp_path, {"cat": 2, "dog": 1})
    (tmp_path / "dog" / "1.HEIC").touch()
    assert class_counts(open_source(source)) == {"train": [2, 2]}


def test_class_folders_without_splits_are_train(tmp_path: Path) -> None:
    source = open_source(write_image_folder(tmp_path, {"b": 2, "a": 3, "c/deep/er": 1}))
    assert class_counts(source) == {"train": [3, 2, 1]}
    assert source.splits["train"].name_of(5) == "c/deep/er/0.png"
    assert source.description == "image files in 1 split"


def test_relative_folder_survives_a_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_image_folder(tmp_path / "data", {"a": 1, "b": 1})
    monkeypatch.chdir(tmp_path)
    source = open_source("folder:data")
    monkeypatch.chdir("/")
    assert source.splits["train"].decode(1).shape == (5, 4, 3)
    assert source.splits["train"].name_of(1) == "b/0.png"


def test_opens_a_test_split_alone(tmp_path: Path) -> None:
    source = open_source(write_image_folder(tmp_path, {"test/a": 1, "test/b": 2}))
    assert class_counts(source) == {"test": [1, 2]}


def test_ignores_other_files_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_image_folder(
        tmp_path, {"train/a": 1, "train/b": 1, "__MACOSX/a": 1, ".cache/a": 1}
    )
    for name in ("train/a/Thumbs.db", "train/a/.DS_Store", "train/b/._0.png", "train/notes.txt"):
        write_file(tmp_path / name, b"x")
    write_file(tmp_path / "train/a/.ipynb_checkpoints/0.png", random_png(9))
    opened = open_source(source)
    open_source(source)
    assert class_counts(opened) == {"train": [1, 1]}
    assert len(caplog.records) == 1
    assert "ignored 4 files of other kinds: .DS_Store, ._0.png" in caplog.messages[0]


def test_subset_and_names(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", [0, 1, 0, 1, 0])
    train = open_source(f"parquet:{tmp_path}").splits["train"]
    subset = train.subset(np.array([4, 1, 0])).subset(np.array([2, 0]))
    assert len(subset) == 2
    assert subset.labels.tolist() == [0, 0]
    assert [subset.name_of(index) for index in range(2)] == ["a.parquet row 0", "a.parquet row 4"]
    assert np.array_equal(subset.decode(1), decode_image(random_png(4)))


def test_fingerprint_depends_on_every_image_label_and_order(tmp_path: Path) -> None:
    source = write_image_folder(tmp_path, {"a": 3, "b": 3})

    def fingerprint() -> str:
        return open_source(source).splits["train"].fingerprint

    first = fingerprint()
    fingerprints = {first}
    assert fingerprint() == first
    os.utime(tmp_path / "a/0.png", (0, 0))
    assert fingerprint() == first  # content, not dates
    write_file(tmp_path / "a/3.png", random_png(50))
    fingerprints.add(fingerprint())
    (tmp_path / "a/3.png").unlink()
    assert fingerprint() == first
    (tmp_path / "b/0.png").unlink()
    fingerprints.add(fingerprint())
    write_file(tmp_path / "b/0.png", random_png(51))
    fingerprints.add(fingerprint())
    split = open_source(source).splits["train"]
    fingerprints.add(split.subset(np.arange(6)[::-1]).fingerprint)
    swapped = Split("train", split.labels[::-1].copy(), split.images)
    fingerprints.add(swapped.fingerprint)
    assert len(fingerprints) == 6


def test_fingerprint_with_unreadable_files_does_not_hang(tmp_path: Path) -> None:
    source = write_image_folder(tmp_path, {"a": 1, "b": 1})
    os.mkfifo(tmp_path / "a/pipe.png")
    (tmp_path / "a/link.png").symlink_to("nowhere")
    assert len(open_source(source).splits["train"].fingerprint) == 64
