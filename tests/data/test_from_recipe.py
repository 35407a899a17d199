"""Opening a recipe's data: which seed draws the splits, and what is merged into train."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from small_datasets import write_file, write_image_folder, write_parquet

from finetune.data.from_recipe import open_data, open_full_data, resolve_data_section
from finetune.data.source import Split
from finetune.data.streaming.prefetch import build_prefetcher
from finetune.recipe.load import DataSection, parse_recipe


def names(split: Split) -> list[str]:
    return [split.name_of(index) for index in range(len(split))]


def test_split_seed_overrides_the_seed_of_the_run() -> None:
    keys = {"source": "embedded:digits", "num_train": 100, "val_fraction": 0.2}
    by_run_seed = [open_data(DataSection(**keys), seed).splits for seed in (0, 1)]
    by_split_seed = [open_data(DataSection(**keys, split_seed=0), seed).splits for seed in (0, 1)]
    for name in ("train", "val"):
        assert names(by_run_seed[0][name]) != names(by_run_seed[1][name])
        assert (
            names(by_split_seed[0][name])
            == names(by_split_seed[1][name])
            == names(by_run_seed[0][name])
        )
    assert [len(by_split_seed[0][name]) for name in ("train", "val", "test")] == [80, 20, 355]
    assert len(open_full_data(DataSection(**keys), 0).splits["train"]) == 1442


def test_selects_some_classes_and_images() -> None:
    keys = {"source": "embedded:digits", "classes": ("7", "2"), "num_val": 10, "num_test": 20}
    by_run_seed = [open_data(DataSection(**keys), seed) for seed in (0, 1)]
    by_split_seed = [open_data(DataSection(**keys, split_seed=0), seed) for seed in (0, 1)]
    assert [source.class_names for source in (*by_run_seed, *by_split_seed)] == [["2", "7"]] * 4
    for name, number in (("val", 10), ("test", 20)):
        assert names(by_run_seed[0].splits[name]) != names(by_run_seed[1].splits[name])
        for source in by_split_seed:
            assert names(source.splits[name]) == names(by_run_seed[0].splits[name])
            assert np.bincount(source.splits[name].labels).tolist() == [number // 2] * 2
    # the images of the test split do not depend on what else is opened
    full = open_full_data(DataSection(**keys), 1)
    assert names(full.splits["test"]) == names(by_run_seed[1].splits["test"])
    assert set(full.splits) == {"train", "test"}
    without_num_val = open_data(DataSection(**{**keys, "num_val": None}), 0).splits
    assert names(without_num_val["train"]) == names(by_run_seed[0].splits["train"])
    assert set(names(by_run_seed[0].splits["val"])) < set(names(without_num_val["val"]))


def test_merge_val_trains_on_the_validation_split(tmp_path: Path) -> None:
    write_image_folder(tmp_path / "train", {"a": 6, "b": 6})
    write_image_folder(tmp_path / "val", {"a": 4, "b": 4})
    keys = {"source": f"folder:{tmp_path}", "merge_val": True}
    assert {
        name: len(split)
        for name, split in open_data(DataSection(**keys, val_fraction=0), 0).splits.items()
    } == {"train": 20}
    splits = open_data(DataSection(**keys, val_fraction=0.2), 0).splits
    assert {name: len(split) for name, split in splits.items()} == {"train": 16, "val": 4}


@pytest.mark.parametrize("kind", ["folder", "parquet", "streaming"])
def test_decode_size_applies_to_every_kind_of_source(tmp_path: Path, kind: str) -> None:
    stream = io.BytesIO()
    Image.fromarray(np.full((80, 60, 3), 99, dtype=np.uint8)).save(stream, "JPEG")
    photo = stream.getvalue()
    for split in ("train", "val"):
        if kind == "folder":
            for number in range(4):
                write_file(tmp_path / split / "ab"[number % 2] / f"{number}.jpg", photo)
        else:
            images = [{"bytes": photo, "path": None}] * 4
            write_parquet(tmp_path / f"{split}.parquet", [0, 1, 0, 1], images=images)
    source = f"{kind.replace('streaming', 'parquet')}:{tmp_path}"
    keys = {"source": source, "streaming": kind == "streaming", "merge_val": True}
    for size, shape in ((None, (80, 60, 3)), (15, (20, 15, 3))):
        section = DataSection(**keys, decode_size=size, val_fraction=0.5)
        splits = open_data(section, 0).splits
        assert set(splits) == {"train", "val"}
        for split in splits.values():
            assert split.decode(len(split) - 1).shape == shape
            prefetcher = build_prefetcher(split, num_workers=1, timeout_seconds=60.0)
            if prefetcher is not None:
                ((image, *_),) = prefetcher.read_batches([np.arange(len(split))])
                assert tuple(image.permute(1, 2, 0).shape) == shape


def test_other_data_uses_the_preprocessing_of_the_run() -> None:
    recipe = parse_recipe(
        "model: {name: test_vit}\n"
        "data: {source: 'embedded:digits', eval: resize, decode_size: 300, num_train: 9}\n"
        "optim: {lr: 0.1, steps: 1}\n"
    )
    section, seed = resolve_data_section("run", recipe, "folder:other")
    assert (section.source, section.eval, section.decode_size) == ("folder:other", "resize", 300)
    assert (section.num_train, seed) == (None, 0)
    assert resolve_data_section("run", recipe, None)[0] is recipe.data
    recipe_of_folder = recipe.model_copy(update={"data": section})
    for same_source in ("folder:./other/", f"folder:{os.path.abspath('other')}"):
        assert resolve_data_section("run", recipe_of_folder, same_source)[0] is section, (
            "the run's own splits"
        )
    tar = recipe.model_copy(update={"data": section.model_copy(update={"source": "tar:other"})})
    assert resolve_data_section("run", tar, "tar:./other")[0] is tar.data
    names = {"image_column": "left", "label_column": "breed"}
    table = recipe.data.model_copy(update={"source": "parquet:a", **names})
    for source, column in (("parquet:b", "left"), ("hub:me/b", None)):
        section, _ = resolve_data_section("run", recipe.model_copy(update={"data": table}), source)
        assert section.image_column == column
    model_section, _ = resolve_data_section("model", None, "folder:other")
    assert (model_section.eval, model_section.decode_size) == (None, None)
