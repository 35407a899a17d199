"""Splits taken from train: stratified, keyed by the seed, and complete."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
from refusals import refused
from samples import counts, make_folder, make_parquet

from finetune.data.source import open_source
from finetune.data.splits import (
    keep_classes,
    long_tail,
    merge_val,
    shared_images,
    split_train,
    take,
)


def test_split_train_is_stratified_and_loses_nothing(tmp_path: Path) -> None:
    make_parquet(tmp_path / "a.parquet", [0] * 20 + [1] * 10 + [2] * 2 + [3])
    source = open_source(f"parquet:{tmp_path}")
    split = split_train(source, 0.1, 0)
    # round-half-up; at least 1 where there are two; the only image stays in train
    assert counts(split) == {"train": [18, 9, 1, 1], "val": [2, 1, 1, 0]}
    parts = [split.splits[name] for name in ("train", "val")]
    names = [part.name_of(index) for part in parts for index in range(len(part))]
    assert len(names) == 33
    assert len(set(names)) == 33
    for part in parts:
        for index in range(len(part)):
            row = int(part.name_of(index).split()[-1])
            assert part.labels[index] == source.splits["train"].labels[row]
    assert "val" not in source.splits
    nearly_all = counts(split_train(source, 0.99, 0))
    assert nearly_all == {"train": [1, 1, 1, 1], "val": [19, 9, 1, 0]}


def test_split_train_is_keyed_by_the_seed() -> None:
    source = open_source("embedded:digits")

    def rows(seed: int) -> list[int]:
        val = split_train(source, 0.1, seed).splits["val"]
        return [int(val.name_of(index).split()[-1]) for index in range(len(val))]

    assert rows(0) == rows(0)
    assert rows(0) != rows(1)
    # recorded once: another machine or NumPy must take the same images
    assert rows(0)[:6] == [2, 3, 11, 13, 20, 55]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_notice_tells_what_validation_costs_a_streamed_set(
    tmp_path: Path, streaming: bool, caplog: pytest.LogCaptureFixture
) -> None:
    make_parquet(tmp_path / "train.parquet", [0, 1] * 6)
    source = open_source(f"parquet:{tmp_path}", streaming=streaming)
    assert "val" not in split_train(source, 0.0, 0).splits
    assert not caplog.records
    assert len(split_train(source, 0.5, 0).splits["val"]) == 6
    said = caplog.messages
    assert len(said) == streaming
    assert not streaming or "lies in 4 of its 4 row groups" in said[0]


def test_split_train_refusals(tmp_path: Path) -> None:
    source = open_source(make_folder(tmp_path, {"a": 1, "b": 1}))
    assert split_train(source, 0, 0) is source
    with refused("data.too_few_images", "'train'", "data.val_fraction=0"):
        split_train(source, 0.5, 0)


def test_copies_of_training_images_are_found_in_what_is_measured_on(tmp_path: Path) -> None:
    source = make_folder(tmp_path, {"train/a": 3, "train/b": 3, "test/a": 2, "test/b": 2})
    assert shared_images(open_source(source)) == []
    shutil.copy(tmp_path / "train/a/1.png", tmp_path / "test/b/copy.png")
    (line,) = shared_images(open_source(source))
    assert "split 'test': 1 of 5 images" in line
    assert "'test/b/copy.png' of 'train/a/1.png'" in line
    shutil.copy(tmp_path / "train/a/1.png", tmp_path / "train/a/twin.png")
    shutil.copy(tmp_path / "train/b/1.png", tmp_path / "train/b/twin.png")
    halves = [shared_images(split_train(open_source(source), 0.5, seed)) for seed in range(9)]
    assert any("split 'val'" in line for lines in halves for line in lines)
    (tmp_path / "test/b/copy.png").write_bytes(b"")
    assert shared_images(open_source(source)) == []


def test_without_train_there_is_nothing_to_take(tmp_path: Path) -> None:
    source = open_source(make_folder(tmp_path, {"test/a": 1, "test/b": 2}))
    with refused("data.no_split"):
        split_train(source, 0.1, 0)
    with refused("data.no_split"):
        take(source, "train", 2, 0)
    assert take(source, "train", None, 0) is source


@pytest.mark.parametrize(
    "number,expected",
    [
        (33, [20, 10, 2, 1]),
        (4, [1, 1, 1, 1]),
        (5, [2, 1, 1, 1]),
        (10, [6, 2, 1, 1]),
        (17, [10, 5, 1, 1]),
    ],
)
def test_of_every_class_its_share(tmp_path: Path, number: int, expected: list[int]) -> None:
    make_parquet(tmp_path / "a.parquet", [0] * 20 + [1] * 10 + [2] * 2 + [3])
    source = open_source(f"parquet:{tmp_path}")
    assert counts(take(source, "train", number, 0)) == {"train": expected}


def test_what_is_kept_is_keyed_by_the_seed_and_in_order() -> None:
    source = open_source("embedded:digits")

    def rows(seed: int) -> list[int]:
        train = take(source, "train", 100, seed).splits["train"]
        return [int(train.name_of(index).split()[-1]) for index in range(len(train))]

    assert rows(0) == rows(0) == sorted(rows(0))
    assert rows(0) != rows(1)
    assert len(set(rows(0))) == 100
    both = split_train(take(source, "train", 100, 0), 0.2, 0)
    assert [len(both.splits[name]) for name in ("train", "val")] == [80, 20]
    assert len(both.splits["test"]) == len(source.splits["test"])
    kept = np.concatenate([both.splits[name].rows for name in ("train", "val")])
    assert len(np.unique(kept)) == 100


def test_too_few_and_too_many_are_refused(tmp_path: Path) -> None:
    source = open_source(make_folder(tmp_path, {"a": 3, "b": 2}))
    for wrong in (1, 6):
        with refused("data.too_few_images", "data.num_train", "2 to 5"):
            take(source, "train", wrong, 0)


@pytest.mark.parametrize("split,word", [("val", "validation"), ("test", "test")])
def test_fewer_images_to_measure_on_are_told(
    split: str, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = split_train(open_source("embedded:digits"), 0.2, 0)
    assert take(source, split, None, 0) is source
    smaller = take(source, split, 33, 0)
    assert [len(smaller.splits[name]) for name in source.splits if name != split] == [
        len(source.splits[name]) for name in source.splits if name != split
    ]
    assert sorted(np.bincount(smaller.splits[split].labels)) == [3] * 7 + [4] * 3
    (notice,) = caplog.messages
    assert f"data.num_{split}" in notice
    assert f"{word} figure rests on 33 of {len(source.splits[split])}" in notice
    del source.splits[split]
    with refused("data.no_split", f"data.num_{split}"):
        take(source, split, 33, 0)


def test_some_of_the_classes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_folder(tmp_path / "train", {"ant": 4, "bee": 3, "cat": 2, "dog": 1})
    make_folder(tmp_path / "test", {"ant": 1, "bee": 2, "dog": 1})
    source = open_source(f"folder:{tmp_path}")
    assert keep_classes(source, None) is source
    chosen = keep_classes(source, ["dog", "bee"])
    assert chosen.class_names == ["bee", "dog"]  # in the source's order
    assert counts(chosen) == {"train": [3, 1], "test": [2, 1]}
    for split in chosen.splits.values():
        for index, label in enumerate(split.labels):
            assert f"/{chosen.class_names[label]}/" in f"/{split.name_of(index)}"
    assert chosen.splits["train"].fingerprint != source.splits["train"].fingerprint
    assert "2 of the 4 classes" in caplog.text
    with refused("recipe.unknown_name", "data.classes", "'bea'", "'bee'"):
        keep_classes(source, ["ant", "bea"])
    with refused("recipe.unknown_name", "'zebra'", "known: ant, bee, cat, dog"):
        keep_classes(source, ["ant", "zebra"])
    with refused("data.empty", "data.classes", "'test'"):
        keep_classes(source, ["cat"])


def test_the_sources_own_validation_joins_train(tmp_path: Path) -> None:
    make_folder(tmp_path / "train", {"a": 4, "b": 3})
    make_folder(tmp_path / "val", {"a": 2, "b": 1})
    source = open_source(f"folder:{tmp_path}")
    train, val = source.splits["train"], source.splits["val"].subset(np.array([2, 0]))
    smaller = dataclasses.replace(source, splits={**source.splits, "val": val})
    (merged,) = merge_val(smaller).splits.values()
    assert merged.name == "train"
    assert merged.labels.tolist() == [*train.labels.tolist(), 1, 0]
    for place, (split, index) in enumerate([(train, 0), (train, 6), (val, 0), (val, 1)]):
        number = [0, 6, 7, 8][place]
        assert merged.name_of(number) == split.name_of(index)
        assert np.array_equal(merged.read(number), split.read(index))
        assert merged.items.content(merged._row(number)) == split.items.content(split._row(index))
    assert len(merged.fingerprint) == 64
    with refused("data.no_split", "data.merge_val"):
        merge_val(open_source("embedded:digits"))


def test_a_long_tail_is_that_of_cifar_10_lt() -> None:
    labels = np.random.Generator(np.random.PCG64(0)).permutation(np.repeat(np.arange(10), 5000))
    source = open_source("embedded:digits")
    train = source.splits["train"]
    whole = dataclasses.replace(train.subset(np.zeros(50_000, dtype=np.int64)), labels=labels)
    source = dataclasses.replace(source, splits={**source.splits, "train": whole})
    tail = long_tail(source, 100, 0)
    counts_K = np.bincount(tail.splits["train"].labels)
    assert counts_K.tolist() == [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]
    assert tail.splits["test"] is source.splits["test"]
    assert long_tail(source, None, 0) is source
    assert len(long_tail(source, 1, 0).splits["train"]) == 50_000


def test_a_long_tail_is_keyed_by_the_seed_and_spares_every_class() -> None:
    source = open_source("embedded:digits")

    def names(seed: int) -> list[str]:
        train = long_tail(source, 1000, seed).splits["train"]
        assert np.bincount(train.labels).min() == 1
        return [train.name_of(place) for place in range(len(train))]

    assert names(0) == names(0) != names(1)
    assert set(names(0)) <= {source.splits["train"].name_of(place) for place in range(1442)}
