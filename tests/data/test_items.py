"""Encoded images: read by row, from files and tables, in threads and other processes."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from refusals import refused
from samples import counts, make_folder, make_parquet, png, write

from finetune.data import parquet as tables
from finetune.data.decode import decode
from finetune.data.source import Split, open_source
from finetune.errors import DataError


def test_suffixes_in_capitals_and_links(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "d", {"a": 1})
    write(tmp_path / "d/a/B.JPG", png(1))
    write(tmp_path / "elsewhere/x.png", png(2))
    (tmp_path / "d/b").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/again").symlink_to(tmp_path / "elsewhere")  # a circle
    opened = open_source(source)
    assert counts(opened) == {"train": [2, 1]}
    assert np.array_equal(opened.splits["train"].read(2), decode(png(2)))


def test_odd_file_names(tmp_path: Path) -> None:
    source = make_folder(tmp_path, {"a": 1, "b c\n'": 1})
    top = os.fsencode(tmp_path)
    try:
        os.mkdir(os.path.join(top, b"na\xefve"))
    except OSError:
        pytest.skip("this file system takes only UTF-8 names")
    Path(os.fsdecode(os.path.join(top, b"na\xefve", b"\xff.png"))).write_bytes(png(7))
    opened = open_source(source)
    assert opened.class_names == ["a", "b c\n'", "na\\xefve"]
    train = opened.splits["train"]
    assert np.array_equal(train.read(2), decode(png(7)))
    assert train.name_of(2) == "na\\xefve/\\xff.png"
    assert len(train.fingerprint) == 64
    assert np.array_equal(pickle.loads(pickle.dumps(train)).read(2), decode(png(7)))


def test_rows_may_point_to_files_or_have_nothing(tmp_path: Path) -> None:
    write(tmp_path / "pictures/x.png", png(5))
    rows = [
        {"bytes": None, "path": "pictures/x.png"},
        {"bytes": None, "path": "pictures/absent.png"},
        {"bytes": None, "path": None},
        None,
        {"bytes": b"", "path": "e.png"},
    ]
    make_parquet(tmp_path / "a.parquet", [0, 1, 1, 1, 1], images=rows)
    train = open_source(f"parquet:{tmp_path}").splits["train"]
    assert np.array_equal(train.read(0), decode(png(5)))
    for row, path, code in (
        (1, r" \(pictures/absent.png\)", "data.not_found"),
        (2, "", "data.no_image"),
        (3, "", "data.no_image"),
        (4, r" \(e.png\)", "data.damaged"),
    ):
        with pytest.raises(DataError, match=f"a.parquet row {row}{path}: ") as caught:
            train.read(row)
        assert caught.value.code == code
    assert train.items.sizes().tolist() == [len(png(5)), 0, 0, 0, 0]
    assert len(train.fingerprint) == 64


@pytest.mark.parametrize("mapped", [False, True])
def test_rows_never_name_files_outside_their_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mapped: bool
) -> None:
    write(tmp_path / "secret/x.png", png(5))
    write(tmp_path / "table/in/x.png", png(6))
    (tmp_path / "table/link.png").symlink_to(tmp_path / "secret/x.png")
    outside = [f"{tmp_path}/secret/x.png", "../secret/x.png", "in/../../secret/x.png", "link.png"]
    outside.append("in/\0x.png")
    inside = ["in/x.png", f"{tmp_path}/table/in/x.png", "in/../in/x.png"]
    rows = [{"bytes": None, "path": path} for path in outside + inside]
    make_parquet(tmp_path / "table/a.parquet", [0, 1] * 4, images=rows)
    if mapped:
        monkeypatch.setattr(tables, "_MEMORY_BYTES", 10)
    train = open_source(f"parquet:{tmp_path}/table").splits["train"]
    for row in range(5):
        with refused("data.unsafe", f"row {row}"):
            train.read(row)
    for row in range(5, 8):
        assert np.array_equal(train.read(row), decode(png(6)))
    assert train.items.sizes().tolist() == [0] * 5 + [len(png(6))] * 3
    assert len(train.fingerprint) == 64


def test_an_address_in_a_table_is_not_read(tmp_path: Path) -> None:
    rows = [{"bytes": None, "path": "https://a.org/x.png"}, {"bytes": png(1), "path": None}]
    make_parquet(tmp_path / "a.parquet", [0, 1], images=rows)
    with refused("data.not_a_file", "a.parquet row 0"):
        open_source(f"parquet:{tmp_path}").splits["train"].read(0)


@pytest.mark.parametrize(
    "link,target",
    [
        ("train/cat/up", ".."),  # both classes
        ("train/cat/top", "../.."),
        ("train/cat/deep/dog", "../../dog"),
        ("train/cat/deep/part", "../../dog/deep"),
        ("train/cat/9.png", "../dog/0.png"),
        ("test/cat/9.png", "../../train/cat/0.png"),  # would be trained on and tested on
        ("train/feline", "cat"),
        ("train/all", "."),
        ("train/puppy", "dog/deep"),
    ],
)
def test_links_into_other_classes_are_refused(tmp_path: Path, link: str, target: str) -> None:
    folders = ("train/cat", "train/cat/deep", "train/dog", "train/dog/deep", "test/cat", "test/dog")
    source = make_folder(tmp_path, dict.fromkeys(folders, 1))
    assert counts(open_source(source)) == {"train": [2, 2], "test": [1, 1]}
    (tmp_path / link).symlink_to(target)
    with refused("data.wrong_link", tmp_path / link):
        open_source(source)


def test_links_that_keep_their_class_are_followed(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "d", {"train/cat": 1, "train/dog": 1, "test/cat": 1})
    write(tmp_path / "d/pool/x.png", png(5))  # beside the splits: of no class
    write(tmp_path / "d/train/.git/annex/y.png", png(6))
    write(tmp_path / "elsewhere/z.png", png(7))
    cat = tmp_path / "d/train/cat"
    (cat / "x.png").symlink_to("../../pool/x.png")
    (cat / "y.png").symlink_to("../.git/annex/y.png")
    (cat / "z.png").symlink_to(tmp_path / "elsewhere/z.png")
    (cat / "again.png").symlink_to("0.png")
    (cat / "more").symlink_to(tmp_path / "elsewhere")
    (cat / "circle").symlink_to(".")
    (tmp_path / "d/val").symlink_to("test")
    assert counts(open_source(source)) == {"train": [6, 1], "val": [1, 0], "test": [1, 0]}


def read_in_worker(split: Split, index: int) -> np.ndarray:
    return split.read(index)


@pytest.mark.parametrize("kind", ["parquet", "folder", "digits"])
def test_splits_are_cheap_to_pickle(tmp_path: Path, kind: str) -> None:
    if kind == "digits":
        split = open_source("embedded:digits").splits["train"]
    elif kind == "folder":
        split = open_source(make_folder(tmp_path, {"a": 2, "b": 2})).splits["train"]
    else:
        images = [{"bytes": os.urandom(100_000), "path": None} for _ in range(3)]
        images.append({"bytes": png(1), "path": None})
        make_parquet(tmp_path / "a.parquet", [0, 1, 1, 0], images=images)
        split = open_source(f"parquet:{tmp_path}").splits["train"]
    data = pickle.dumps(split)
    assert len(data) < (500_000 if kind == "digits" else 3_000)
    assert np.array_equal(pickle.loads(data).read(3), split.read(3))


def test_splits_are_read_in_other_processes(tmp_path: Path) -> None:
    make_parquet(tmp_path / "a.parquet", [0, 1, 1, 0])
    split = open_source(f"parquet:{tmp_path}").splits["train"]
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            image = pool.apply(read_in_worker, (split, 2))
        assert np.array_equal(image, split.read(2)), method


def test_splits_are_read_in_threads(tmp_path: Path) -> None:
    make_parquet(tmp_path / "a.parquet", [0, 1] * 20)
    split = open_source(f"parquet:{tmp_path}").splits["train"]
    fresh = pickle.loads(pickle.dumps(split))  # not opened yet: the threads race for it
    with ThreadPoolExecutor(8) as pool:
        images = list(pool.map(fresh.read, list(range(40)) * 5))
    assert len(images) == 200
    for number, image in enumerate(images):
        assert np.array_equal(image, decode(png(number % 40)))


def test_what_is_read_cannot_be_written_to() -> None:
    split = open_source("embedded:digits").splits["train"]
    with pytest.raises(ValueError, match="read-only"):
        split.read(0)[:] = 7
    assert split.read(0).max() > 200
