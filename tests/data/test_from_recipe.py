"""The data that a recipe names: whose seed draws, and what joins train."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from refusals import refused
from samples import make_folder, make_parquet, write

from finetune.data.from_recipe import data_of, section_of, whole_data_of
from finetune.data.source import Split
from finetune.data.streaming.prefetch import prefetch_of
from finetune.recipe.load import DataSection, parse_recipe


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
    assert len(whole_data_of(DataSection(**keys), 0).splits["train"]) == 1442


def test_a_quick_look_at_some_classes_and_images() -> None:
    keys = {"source": "embedded:digits", "classes": ("7", "2"), "num_val": 10, "num_test": 20}
    drawn = [data_of(DataSection(**keys), seed) for seed in (0, 1)]
    kept = [data_of(DataSection(**keys, split_seed=0), seed) for seed in (0, 1)]
    assert [source.class_names for source in (*drawn, *kept)] == [["2", "7"]] * 4
    for name, number in (("val", 10), ("test", 20)):
        assert names(drawn[0].splits[name]) != names(drawn[1].splits[name])
        for source in kept:
            assert names(source.splits[name]) == names(drawn[0].splits[name])
            assert np.bincount(source.splits[name].labels).tolist() == [number // 2] * 2
    # the images of the test split do not depend on what else is opened
    whole = whole_data_of(DataSection(**keys), 1)
    assert names(whole.splits["test"]) == names(drawn[1].splits["test"])
    assert set(whole.splits) == {"train", "test"}
    without = data_of(DataSection(**{**keys, "num_val": None}), 0).splits
    assert names(without["train"]) == names(drawn[0].splits["train"])
    assert set(names(drawn[0].splits["val"])) < set(names(without["val"]))
    with refused("data.no_split", "data.num_val"):
        data_of(DataSection(**keys, val_fraction=0), 0)


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
    with refused("data.no_split", "data.merge_val"):
        data_of(DataSection(source="embedded:digits", merge_val=True), 0)


@pytest.mark.parametrize("kind", ["folder", "parquet", "streaming"])
def test_each_way_to_a_photo_decodes_it_to_the_same_size(tmp_path: Path, kind: str) -> None:
    stream = io.BytesIO()
    Image.fromarray(np.full((80, 60, 3), 99, dtype=np.uint8)).save(stream, "JPEG")
    photo = stream.getvalue()
    for split in ("train", "val"):
        if kind == "folder":
            for number in range(4):
                write(tmp_path / split / "ab"[number % 2] / f"{number}.jpg", photo)
        else:
            images = [{"bytes": photo, "path": None}] * 4
            make_parquet(tmp_path / f"{split}.parquet", [0, 1, 0, 1], images=images)
    source = f"{kind.replace('streaming', 'parquet')}:{tmp_path}"
    keys = {"source": source, "streaming": kind == "streaming", "merge_val": True}
    for size, shape in ((None, (80, 60, 3)), (15, (20, 15, 3))):
        section = DataSection(**keys, decode_size=size, val_fraction=0.5)
        splits = data_of(section, 0).splits
        assert set(splits) == {"train", "val"}
        for split in splits.values():
            assert split.read(len(split) - 1).shape == shape
            ahead = prefetch_of(split, workers=1, timeout_seconds=60.0)
            if ahead is not None:
                ((image, *_),) = ahead.read_all([np.arange(len(split))])
                assert tuple(image.permute(1, 2, 0).shape) == shape


def test_other_data_is_prepared_as_the_runs_own() -> None:
    recipe = parse_recipe(
        "model: {name: test_vit}\n"
        "data: {source: 'embedded:digits', eval: resize, decode_size: 300, num_train: 9}\n"
        "optim: {lr: 0.1, steps: 1}\n"
    )
    section, seed = section_of("run", recipe, "folder:other")
    assert (section.source, section.eval, section.decode_size) == ("folder:other", "resize", 300)
    assert (section.num_train, seed) == (None, 0)
    assert section_of("run", recipe, None)[0] is recipe.data
    of_folder = recipe.model_copy(update={"data": section})
    for same in ("folder:./other/", f"folder:{os.path.abspath('other')}"):
        assert section_of("run", of_folder, same)[0] is section, "the run's own splits"
    plain, _ = section_of("model", None, "folder:other")
    assert (plain.eval, plain.decode_size) == (None, None)
