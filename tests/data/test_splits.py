"""Splits taken from train: stratified, determined by the seed, and complete."""

from __future__ import annotations

import dataclasses
import shutil
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
    write_parquet,
)

from finetune.data.leakage import find_equal_pixels, find_leakage, find_repeated_images
from finetune.data.open_source import open_source
from finetune.data.source import Source
from finetune.data.splits import (
    hold_out_validation,
    make_long_tailed,
    merge_val,
    select_classes,
    subsample,
)


def test_hold_out_validation_is_stratified_and_complete(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", [0] * 20 + [1] * 10 + [2] * 2 + [3])
    source = open_source(f"parquet:{tmp_path}")
    split = hold_out_validation(source, 0.1, 0)
    # rounds half up; at least 1 of two images; a single image stays in train
    assert class_counts(split) == {"train": [18, 9, 1, 1], "val": [2, 1, 1, 0]}
    parts = [split.splits[name] for name in ("train", "val")]
    names = [part.name_of(index) for part in parts for index in range(len(part))]
    assert len(names) == 33
    assert len(set(names)) == 33
    for part in parts:
        for index in range(len(part)):
            row = int(part.name_of(index).split()[-1])
            assert part.labels[index] == source.splits["train"].labels[row]
    assert "val" not in source.splits
    nearly_all = class_counts(hold_out_validation(source, 0.99, 0))
    assert nearly_all == {"train": [1, 1, 1, 1], "val": [19, 9, 1, 0]}


def test_hold_out_validation_is_determined_by_the_seed() -> None:
    source = open_source("embedded:digits")

    def rows(seed: int) -> list[int]:
        val = hold_out_validation(source, 0.1, seed).splits["val"]
        return [int(val.name_of(index).split()[-1]) for index in range(len(val))]

    assert rows(0) == rows(0)
    assert rows(0) != rows(1)
    # fixed values: every machine and NumPy version must select the same images
    assert rows(0)[:6] == [2, 3, 11, 13, 20, 55]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("merged", [False, True])
def test_whole_fingerprints_do_not_depend_on_the_seed(
    tmp_path: Path, streaming: bool, merged: bool
) -> None:
    for name in ("train", "test", *(["val"] if merged else [])):
        write_parquet(tmp_path / f"{name}.parquet", [0, 1] * 20)
    source = open_source(f"parquet:{tmp_path}", streaming=streaming)
    source = merge_val(source) if merged else source
    whole = source.whole_fingerprints()
    assert whole == {name: split.fingerprint for name, split in source.splits.items()}

    def draw(seed: int) -> Source:
        drawn = subsample(subsample(source, "test", 20, seed), "train", 30, seed)
        drawn = subsample(hold_out_validation(drawn, 0.4, seed), "val", 6, seed)
        return make_long_tailed(drawn, 4.0, seed)

    first, second = draw(0), draw(1)
    for name, split in first.splits.items():
        assert split.fingerprint != second.splits[name].fingerprint
    assert first.whole_fingerprints() == second.whole_fingerprints() == whole
    first.unused[0].labels[0] += 5  # an image of test that is not used
    second.splits["val"].labels[0] += 5  # held out of train
    changed = [part.whole_fingerprints() for part in (first, second)]
    assert [part["train"] == whole["train"] for part in changed] == [True, False]
    assert [part["test"] == whole["test"] for part in changed] == [False, True]


def test_whole_fingerprints_cover_the_groups() -> None:
    def whole(groups: str, seed: int) -> dict[str, str]:
        source = open_source("embedded:digits")
        train = source.splits["train"].subset(np.arange(8))
        labels, names = np.array([0, 1] * 4), np.array([*groups], dtype=object)
        train = dataclasses.replace(train, labels=labels, groups=names)
        source = dataclasses.replace(source, splits={"train": train})
        return hold_out_validation(source, 0.4, seed).whole_fingerprints()

    assert whole("aabbccdd", 0) == whole("aabbccdd", 1) != whole("aabbccde", 0)


@pytest.mark.parametrize("streaming", [False, True])
def test_warns_of_the_cost_of_validation_for_a_streamed_dataset(
    tmp_path: Path, streaming: bool, caplog: pytest.LogCaptureFixture
) -> None:
    write_parquet(tmp_path / "train.parquet", [0, 1] * 6)
    source = open_source(f"parquet:{tmp_path}", streaming=streaming)
    assert "val" not in hold_out_validation(source, 0.0, 0).splits
    assert not caplog.records
    assert len(hold_out_validation(source, 0.5, 0).splits["val"]) == 6
    warnings = caplog.messages
    assert len(warnings) == streaming
    assert not streaming or "spread over 4 of its 4 row groups" in warnings[0]


def test_hold_out_validation_needs_enough_images(tmp_path: Path) -> None:
    source = open_source(write_image_folder(tmp_path, {"a": 1, "b": 1}))
    assert hold_out_validation(source, 0, 0) is source
    with refused("data.too_few_images", "'train'", "data.val_fraction=0"):
        hold_out_validation(source, 0.5, 0)


def test_finds_training_images_in_the_evaluation_splits(tmp_path: Path) -> None:
    source = write_image_folder(tmp_path, {"train/a": 3, "train/b": 3, "test/a": 2, "test/b": 2})
    assert find_leakage(open_source(source)) == []
    shutil.copy(tmp_path / "train/a/1.png", tmp_path / "test/b/copy.png")
    (leak,) = find_leakage(open_source(source))
    assert "split 'test': 1 of 5 images" in leak
    assert "'test/b/copy.png' of 'train/a/1.png'" in leak
    shutil.copy(tmp_path / "train/a/1.png", tmp_path / "train/a/twin.png")
    shutil.copy(tmp_path / "train/b/1.png", tmp_path / "train/b/twin.png")
    leakage_by_seed = [
        find_leakage(hold_out_validation(open_source(source), 0.5, seed)) for seed in range(9)
    ]
    assert any("split 'val'" in leak for leaks in leakage_by_seed for leak in leaks)
    (tmp_path / "test/b/copy.png").write_bytes(b"")
    assert find_leakage(open_source(source)) == []


@pytest.mark.parametrize("keep,size", [("auto", (5, 4)), ("auto", (6, 4)), ("none", (5, 4))])
def test_finds_equal_pixels_in_other_files(
    tmp_path: Path, keep: str, size: tuple[int, int]
) -> None:
    """`size` is that of one more image, so a split has images of one size or of several."""
    source = write_image_folder(tmp_path, {"train/a": 3, "train/b": 3, "test/a": 2, "test/b": 2})
    original = tmp_path / "train/a/1.png"
    shutil.copy(original, tmp_path / "test/b/copy.png")  # found by its bytes already
    write_file(tmp_path / "train/b/other.png", random_png(99, size))
    stores = {
        name: make_pixel_store(each, keep) for name, each in open_source(source).splits.items()
    }
    assert find_equal_pixels(stores) == []
    for number in range(2):
        other_bytes = original.read_bytes() + bytes(number + 1)
        write_file(tmp_path / f"test/b/saved_again_{number}.png", other_bytes)
    stores = {
        name: make_pixel_store(each, keep) for name, each in open_source(source).splits.items()
    }
    leaks = find_equal_pixels(stores)
    assert len(leaks) == (keep == "auto")
    for leak in leaks:
        assert "split 'test': 2 of 7 images have the same pixels as train images" in leak
        assert "'test/b/saved_again_0.png' of 'train/a/1.png'" in leak


def test_finds_images_that_a_split_has_twice(tmp_path: Path) -> None:
    source = write_image_folder(tmp_path, {"a": 3, "b": 3})
    assert find_repeated_images(open_source(source).splits["train"]) == []
    for number in range(2):
        shutil.copy(tmp_path / "a/1.png", tmp_path / f"a/copy{number}.png")
    (same_label,) = find_repeated_images(open_source(source).splits["train"])
    assert "split 'train': 2 of 8 images are copies of others of this split (for" in same_label
    shutil.copy(tmp_path / "a/2.png", tmp_path / "b/other.png")
    (other_label,) = find_repeated_images(open_source(source).splits["train"])
    assert "3 of 9 images" in other_label
    assert "1 of them under another label (for example 'b/other.png' of 'a/2.png')" in other_label


def test_finds_a_shard_that_is_a_copy_of_another(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train-00000-of-00002.parquet", [0, 1, 1])
    shutil.copy(
        tmp_path / "train-00000-of-00002.parquet", tmp_path / "train-00001-of-00002.parquet"
    )
    (line,) = find_repeated_images(open_source(f"parquet:{tmp_path}").splits["train"])
    assert "3 of 6 images are copies" in line


def test_warns_of_a_class_without_test_images(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counts = {"train/a": 1, "train/b": 1, "train/c": 1, "test/a": 1, "test/b": 1}
    open_source(write_image_folder(tmp_path, counts))
    assert "1 class without an image in 'test': c;" in caplog.messages[0]


def test_finds_training_images_in_tables(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet", [0, 1] * 3)
    write_parquet(tmp_path / "test.parquet", [0, 1])
    (leak,) = find_leakage(open_source(f"parquet:{tmp_path}"))
    assert "2 of 2" in leak
    assert find_leakage(open_source(f"parquet:{tmp_path}", streaming=True)) == []


def test_rejects_a_source_without_train(tmp_path: Path) -> None:
    source = open_source(write_image_folder(tmp_path, {"test/a": 1, "test/b": 2}))
    with refused("data.no_split"):
        hold_out_validation(source, 0.1, 0)
    with refused("data.no_split"):
        subsample(source, "train", 2, 0)
    assert subsample(source, "train", None, 0) is source


@pytest.mark.parametrize(
    "num_images,expected",
    [
        (33, [20, 10, 2, 1]),
        (4, [1, 1, 1, 1]),
        (5, [2, 1, 1, 1]),
        (10, [6, 2, 1, 1]),
        (17, [10, 5, 1, 1]),
    ],
)
def test_subsample_is_stratified(tmp_path: Path, num_images: int, expected: list[int]) -> None:
    write_parquet(tmp_path / "a.parquet", [0] * 20 + [1] * 10 + [2] * 2 + [3])
    source = open_source(f"parquet:{tmp_path}")
    assert class_counts(subsample(source, "train", num_images, 0)) == {"train": expected}


def test_subsample_is_determined_by_the_seed_and_keeps_the_order() -> None:
    source = open_source("embedded:digits")

    def rows(seed: int) -> list[int]:
        train = subsample(source, "train", 100, seed).splits["train"]
        return [int(train.name_of(index).split()[-1]) for index in range(len(train))]

    assert rows(0) == rows(0) == sorted(rows(0))
    assert rows(0) != rows(1)
    assert len(set(rows(0))) == 100
    with_validation = hold_out_validation(subsample(source, "train", 100, 0), 0.2, 0)
    assert [len(with_validation.splits[name]) for name in ("train", "val")] == [80, 20]
    assert len(with_validation.splits["test"]) == len(source.splits["test"])
    train_and_val_rows = np.concatenate(
        [with_validation.splits[name].rows for name in ("train", "val")]
    )
    assert len(np.unique(train_and_val_rows)) == 100


def test_subsample_rejects_too_few_and_too_many_images(tmp_path: Path) -> None:
    source = open_source(write_image_folder(tmp_path, {"a": 3, "b": 2}))
    for num_images in (1, 6):
        with refused("data.too_few_images", "data.num_train", "2 to 5"):
            subsample(source, "train", num_images, 0)


@pytest.mark.parametrize("split,split_text", [("val", "validation"), ("test", "test")])
def test_warns_if_evaluation_uses_fewer_images(
    split: str, split_text: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = hold_out_validation(open_source("embedded:digits"), 0.2, 0)
    assert subsample(source, split, None, 0) is source
    subsampled = subsample(source, split, 33, 0)
    assert [len(subsampled.splits[name]) for name in source.splits if name != split] == [
        len(source.splits[name]) for name in source.splits if name != split
    ]
    assert sorted(np.bincount(subsampled.splits[split].labels)) == [3] * 7 + [4] * 3
    (warning,) = caplog.messages
    assert f"data.num_{split}" in warning
    assert f"{split_text} metrics use only 33 of {len(source.splits[split])}" in warning
    del source.splits[split]
    with refused("data.no_split", f"data.num_{split}"):
        subsample(source, split, 33, 0)


def test_select_classes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_image_folder(tmp_path / "train", {"ant": 4, "bee": 3, "cat": 2, "dog": 1})
    write_image_folder(tmp_path / "test", {"ant": 1, "bee": 2, "dog": 1})
    source = open_source(f"folder:{tmp_path}")
    assert select_classes(source, None) is source
    selected = select_classes(source, ["dog", "bee"])
    assert selected.class_names == ["bee", "dog"]  # in the order of the source
    assert class_counts(selected) == {"train": [3, 1], "test": [2, 1]}
    for split in selected.splits.values():
        for index, label in enumerate(split.labels):
            assert f"/{selected.class_names[label]}/" in f"/{split.name_of(index)}"
    assert selected.splits["train"].fingerprint != source.splits["train"].fingerprint
    assert "2 of the 4 classes" in caplog.text
    with refused("recipe.unknown_name", "data.classes", "'bea'", "'bee'"):
        select_classes(source, ["ant", "bea"])
    with refused("recipe.unknown_name", "'zebra'", "known: ant, bee, cat, dog"):
        select_classes(source, ["ant", "zebra"])
    with refused("data.empty", "data.classes", "'test'"):
        select_classes(source, ["cat"])


def test_merge_val(tmp_path: Path) -> None:
    write_image_folder(tmp_path / "train", {"a": 4, "b": 3})
    write_image_folder(tmp_path / "val", {"a": 2, "b": 1})
    source = open_source(f"folder:{tmp_path}")
    train, val = source.splits["train"], source.splits["val"].subset(np.array([2, 0]))
    reordered = dataclasses.replace(source, splits={**source.splits, "val": val})
    (merged,) = merge_val(reordered).splits.values()
    assert merged.name == "train"
    assert merged.labels.tolist() == [*train.labels.tolist(), 1, 0]
    for merged_index, split, index in [(0, train, 0), (6, train, 6), (7, val, 0), (8, val, 1)]:
        assert merged.name_of(merged_index) == split.name_of(index)
        assert np.array_equal(merged.decode(merged_index), split.decode(index))
        merged_row, row = merged.image_rows[merged_index], split.image_rows[index]
        assert merged.images.read_bytes(merged_row) == split.images.read_bytes(row)
    assert len(merged.fingerprint) == 64
    with refused("data.no_split", "data.merge_val"):
        merge_val(open_source("embedded:digits"))


def test_make_long_tailed_equals_cifar_10_lt() -> None:
    labels = np.random.Generator(np.random.PCG64(0)).permutation(np.repeat(np.arange(10), 5000))
    source = open_source("embedded:digits")
    train = source.splits["train"]
    full_train = dataclasses.replace(train.subset(np.zeros(50_000, dtype=np.int64)), labels=labels)
    source = dataclasses.replace(source, splits={**source.splits, "train": full_train})
    long_tailed = make_long_tailed(source, 100, 0)
    counts_K = np.bincount(long_tailed.splits["train"].labels)
    assert counts_K.tolist() == [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]
    assert long_tailed.splits["test"] is source.splits["test"]
    assert make_long_tailed(source, None, 0) is source
    assert len(make_long_tailed(source, 1, 0).splits["train"]) == 50_000


def test_make_long_tailed_is_determined_by_the_seed_and_keeps_every_class() -> None:
    source = open_source("embedded:digits")

    def names(seed: int) -> list[str]:
        train = make_long_tailed(source, 1000, seed).splits["train"]
        assert np.bincount(train.labels).min() == 1
        return [train.name_of(index) for index in range(len(train))]

    assert names(0) == names(0) != names(1)
    assert set(names(0)) <= {source.splits["train"].name_of(index) for index in range(1442)}
