"""Encoded images: read by row from files and tables, in threads and in other processes."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from refusals import refused
from small_datasets import class_counts, random_png, write_file, write_image_folder, write_parquet

from finetune.data import parquet as tables
from finetune.data.decode import decode_image
from finetune.data.open_source import open_source
from finetune.data.source import Split
from finetune.errors import DataError


def test_reads_uppercase_suffixes_and_symlinks(tmp_path: Path) -> None:
    source = write_image_folder(tmp_path / "d", {"a": 1})
    write_file(tmp_path / "d/a/B.JPG", random_png(1))
    write_file(tmp_path / "elsewhere/x.png", random_png(2))
    (tmp_path / "d/b").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/again").symlink_to(tmp_path / "elsewhere")  # a cycle
    opened = open_source(source)
    assert class_counts(opened) == {"train": [2, 1]}
    assert np.array_equal(opened.splits["train"].decode(2), decode_image(random_png(2)))


def test_unusual_file_names(tmp_path: Path) -> None:
    source = write_image_folder(tmp_path, {"a": 1, "b c\n'": 1})
    root = os.fsencode(tmp_path)
    try:
        os.mkdir(os.path.join(root, b"na\xefve"))
    except OSError:
        pytest.skip("this file system takes only UTF-8 names")
    Path(os.fsdecode(os.path.join(root, b"na\xefve", b"\xff.png"))).write_bytes(random_png(7))
    opened = open_source(source)
    assert opened.class_names == ["a", "b c\n'", "na\\xefve"]
    train = opened.splits["train"]
    assert np.array_equal(train.decode(2), decode_image(random_png(7)))
    assert train.name_of(2) == "na\\xefve/\\xff.png"
    assert len(train.fingerprint) == 64
    write_file(tmp_path / "na\\xefve" / "0.png", random_png(8))
    with refused("data.duplicate_class", source, "xefve"):
        open_source(source)


def test_a_signed_url_in_a_row_is_masked(tmp_path: Path) -> None:
    url = "https://me:word@bucket/x.png?X-Amz-Signature=abc"
    rows = [{"bytes": random_png(5), "path": each} for each in (url, None)]
    write_parquet(tmp_path / "a.parquet", [0, 1], images=rows)
    images = open_source(f"parquet:{tmp_path}").splits["train"].images
    assert images.name_of(0) == "a.parquet row 0 (https://***@bucket/x.png?***)"


def test_all_rows_of_a_table_may_name_files(tmp_path: Path) -> None:
    write_file(tmp_path / "x.png", random_png(5))
    write_parquet(tmp_path / "a.parquet", [0, 1], images=[{"bytes": None, "path": "x.png"}] * 2)
    images = open_source(f"parquet:{tmp_path}").splits["train"].images
    assert images.read_bytes(0) == random_png(5)


def test_table_rows_may_name_files_or_lack_images(tmp_path: Path) -> None:
    write_file(tmp_path / "pictures/x.png", random_png(5))
    rows = [
        {"bytes": None, "path": "pictures/x.png"},
        {"bytes": None, "path": "pictures/absent.png"},
        {"bytes": None, "path": None},
        None,
        {"bytes": b"", "path": "e.png"},
    ]
    write_parquet(tmp_path / "a.parquet", [0, 1, 1, 1, 1], images=rows)
    train = open_source(f"parquet:{tmp_path}").splits["train"]
    assert np.array_equal(train.decode(0), decode_image(random_png(5)))
    for row, path, code in (
        (1, r" \(pictures/absent.png\)", "data.not_found"),
        (2, "", "data.no_image"),
        (3, "", "data.no_image"),
        (4, r" \(e.png\)", "data.damaged"),
    ):
        with pytest.raises(DataError, match=f"a.parquet row {row}{path}: ") as caught:
            train.decode(row)
        assert caught.value.code == code
    assert train.images.encoded_sizes().tolist() == [len(random_png(5)), 0, 0, 0, 0]
    assert len(train.fingerprint) == 64


@pytest.mark.parametrize("mapped", [False, True])
def test_rejects_table_rows_that_name_files_outside_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mapped: bool
) -> None:
    write_file(tmp_path / "secret/x.png", random_png(5))
    write_file(tmp_path / "table/in/x.png", random_png(6))
    (tmp_path / "table/link.png").symlink_to(tmp_path / "secret/x.png")
    outside = [f"{tmp_path}/secret/x.png", "../secret/x.png", "in/../../secret/x.png", "link.png"]
    outside.append("in/\0x.png")
    inside = ["in/x.png", f"{tmp_path}/table/in/x.png", "in/../in/x.png"]
    rows = [{"bytes": None, "path": path} for path in outside + inside]
    write_parquet(tmp_path / "table/a.parquet", [0, 1] * 4, images=rows)
    if mapped:
        monkeypatch.setattr(tables, "MAX_IN_MEMORY_BYTES", 10)
    train = open_source(f"parquet:{tmp_path}/table").splits["train"]
    for row in range(5):
        with refused("data.unsafe", f"row {row}"):
            train.decode(row)
    for row in range(5, 8):
        assert np.array_equal(train.decode(row), decode_image(random_png(6)))
    assert train.images.encoded_sizes().tolist() == [0] * 5 + [len(random_png(6))] * 3
    assert len(train.fingerprint) == 64


def test_rejects_urls_in_tables(tmp_path: Path) -> None:
    rows = [{"bytes": None, "path": "https://a.org/x.png"}, {"bytes": random_png(1), "path": None}]
    write_parquet(tmp_path / "a.parquet", [0, 1], images=rows)
    with refused("data.not_a_file", "a.parquet row 0"):
        open_source(f"parquet:{tmp_path}").splits["train"].decode(0)


@pytest.mark.parametrize(
    "link,target",
    [
        ("train/cat/up", ".."),  # both classes
        ("train/cat/top", "../.."),
        ("train/cat/deep/dog", "../../dog"),
        ("train/cat/deep/part", "../../dog/deep"),
        ("train/cat/9.png", "../dog/0.png"),
        ("test/cat/9.png", "../../train/cat/0.png"),  # would be in both train and test
        ("train/feline", "cat"),
        ("train/all", "."),
        ("train/puppy", "dog/deep"),
    ],
)
def test_rejects_symlinks_into_other_classes(tmp_path: Path, link: str, target: str) -> None:
    folders = ("train/cat", "train/cat/deep", "train/dog", "train/dog/deep", "test/cat", "test/dog")
    source = write_image_folder(tmp_path, dict.fromkeys(folders, 1))
    assert class_counts(open_source(source)) == {"train": [2, 2], "test": [1, 1]}
    (tmp_path / link).symlink_to(target)
    with refused("data.wrong_link", tmp_path / link):
        open_source(source)


def test_follows_symlinks_within_a_class(tmp_path: Path) -> None:
    source = write_image_folder(tmp_path / "d", {"train/cat": 1, "train/dog": 1, "test/cat": 1})
    write_file(tmp_path / "d/pool/x.png", random_png(5))  # outside the splits, so of no class
    write_file(tmp_path / "d/train/.git/annex/y.png", random_png(6))
    write_file(tmp_path / "elsewhere/z.png", random_png(7))
    cat = tmp_path / "d/train/cat"
    (cat / "x.png").symlink_to("../../pool/x.png")
    (cat / "y.png").symlink_to("../.git/annex/y.png")
    (cat / "z.png").symlink_to(tmp_path / "elsewhere/z.png")
    (cat / "again.png").symlink_to("0.png")
    (cat / "more").symlink_to(tmp_path / "elsewhere")
    (cat / "circle").symlink_to(".")
    (tmp_path / "d/val").symlink_to("test")
    assert class_counts(open_source(source)) == {"train": [6, 1], "val": [1, 0], "test": [1, 0]}


def decode_in_worker(split: Split, index: int) -> np.ndarray:
    return split.decode(index)


def test_decodes_splits_in_other_processes(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", [0, 1, 1, 0])
    split = open_source(f"parquet:{tmp_path}").splits["train"]
    with multiprocessing.get_context("fork").Pool(1) as pool:
        image = pool.apply(decode_in_worker, (split, 2))
    assert np.array_equal(image, split.decode(2))


def test_decodes_splits_in_threads(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", [0, 1] * 20)
    split = open_source(f"parquet:{tmp_path}").splits["train"]
    with ThreadPoolExecutor(8) as pool:
        images = list(pool.map(split.decode, list(range(40)) * 5))
    assert len(images) == 200
    for number, image in enumerate(images):
        assert np.array_equal(image, decode_image(random_png(number % 40)))


def test_embedded_images_are_read_only() -> None:
    split = open_source("embedded:digits").splits["train"]
    with pytest.raises(ValueError, match="read-only"):
        split.decode(0)[:] = 7
    assert split.decode(0).max() > 200
