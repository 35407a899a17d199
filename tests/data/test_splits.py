"""Splits taken from train: stratified, keyed by the seed, and complete."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from samples import counts, make_folder, make_parquet

from finetune.data import decode
from finetune.data.source import open_source
from finetune.data.splits import merge_val, split_train, take_train
from finetune.errors import DataError


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
def test_what_validation_costs_a_streamed_set_is_said(
    tmp_path: Path,
    streaming: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode, "_said", set())
    make_parquet(tmp_path / "train.parquet", [0, 1] * 6)
    source = open_source(f"parquet:{tmp_path}", streaming=streaming)
    assert "val" not in split_train(source, 0.0, 0).splits
    assert not caplog.records
    assert len(split_train(source, 0.5, 0).splits["val"]) == 6
    said = [record.message for record in caplog.records]
    assert len(said) == streaming
    assert not streaming or "lies in 4 of its 4 row groups" in said[0]


def test_split_train_refusals(tmp_path: Path) -> None:
    source = open_source(make_folder(tmp_path, {"a": 1, "b": 1}))
    assert split_train(source, 0, 0) is source
    for wrong in (-0.1, 1.0, 3.0):
        with pytest.raises(DataError, match=r"data.val_fraction: .* is not in"):
            split_train(source, wrong, 0)
    with pytest.raises(
        DataError, match=r"every class has a single image in 'train'.*data.val_fraction=0"
    ):
        split_train(source, 0.5, 0)


def test_without_train_there_is_nothing_to_take(tmp_path: Path) -> None:
    source = open_source(make_folder(tmp_path, {"test/a": 1, "test/b": 2}))
    with pytest.raises(DataError, match="no train split"):
        split_train(source, 0.1, 0)
    with pytest.raises(DataError, match="no train split"):
        take_train(source, 2, 0)
    assert take_train(source, None, 0) is source


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
    assert counts(take_train(source, number, 0)) == {"train": expected}


def test_what_is_kept_is_keyed_by_the_seed_and_in_order() -> None:
    source = open_source("embedded:digits")

    def rows(seed: int) -> list[int]:
        train = take_train(source, 100, seed).splits["train"]
        return [int(train.name_of(index).split()[-1]) for index in range(len(train))]

    assert rows(0) == rows(0) == sorted(rows(0))
    assert rows(0) != rows(1)
    assert len(set(rows(0))) == 100
    both = split_train(take_train(source, 100, 0), 0.2, 0)
    assert [len(both.splits[name]) for name in ("train", "val")] == [80, 20]
    assert len(both.splits["test"]) == len(source.splits["test"])
    kept = np.concatenate([both.splits[name].rows for name in ("train", "val")])
    assert len(np.unique(kept)) == 100


def test_too_few_and_too_many_are_refused(tmp_path: Path) -> None:
    source = open_source(make_folder(tmp_path, {"a": 3, "b": 2}))
    for wrong in (1, 6):
        with pytest.raises(DataError, match="give a number from 2 to 5"):
            take_train(source, wrong, 0)


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
    with pytest.raises(DataError, match=r"data\.merge_val: .* brings no validation split"):
        merge_val(open_source("embedded:digits"))
