"""The data that a recipe names: whose seed draws, and what joins train."""

from __future__ import annotations

from pathlib import Path

import pytest
from samples import make_folder

from finetune.data.sources import Split
from finetune.data_of import data_of, whole_data_of
from finetune.errors import DataError
from finetune.recipe import DataSection


def names(split: Split) -> list[str]:
    return [split.name_of(index) for index in range(len(split))]


def test_the_runs_seed_draws_unless_the_splits_have_their_own() -> None:
    keys = {"source": "embedded:digits", "num_train": 100, "val_fraction": 0.2}
    drawn = [data_of(DataSection(**keys), seed).splits for seed in (0, 1)]
    kept = [data_of(DataSection(**keys, split_seed=0), seed).splits for seed in (0, 1)]
    for name in ("train", "val"):
        assert names(drawn[0][name]) != names(drawn[1][name])
        assert names(kept[0][name]) == names(kept[1][name]) == names(drawn[0][name])
    assert [len(kept[0][name]) for name in ("train", "val", "test")] == [80, 20, 355]
    assert len(whole_data_of(DataSection(**keys)).splits["train"]) == 1442


def test_own_validation_images_are_trained_on_if_asked(tmp_path: Path) -> None:
    make_folder(tmp_path / "train", {"a": 6, "b": 6})
    make_folder(tmp_path / "val", {"a": 4, "b": 4})
    keys = {"source": f"folder:{tmp_path}", "merge_val": True}
    assert {
        name: len(split)
        for name, split in data_of(DataSection(**keys, val_fraction=0), 0).splits.items()
    } == {"train": 20}
    chosen = data_of(DataSection(**keys, val_fraction=0.2), 0).splits
    assert {name: len(split) for name, split in chosen.items()} == {"train": 16, "val": 4}
    with pytest.raises(DataError, match=r"data\.merge_val"):
        data_of(DataSection(source="embedded:digits", merge_val=True), 0)
