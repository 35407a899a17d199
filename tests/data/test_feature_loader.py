"""Rows of a table in the place of images: the same samples at the same steps, nothing decoded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from refusals import refused
from samples import store_of

from finetune.data.feature_loader import FeatureLoader
from finetune.data.loader import Loader, Sampler
from finetune.data.source import Split, open_source
from finetune.transforms.pipeline import Pipeline

CPU = torch.device("cpu")
DIGITS: dict[str, Any] = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bilinear"}


def digits(count: int) -> Split:
    return open_source("embedded:digits").splits["test"].subset(np.arange(count))


def table(split: Split) -> tuple[FeatureLoader, np.ndarray]:
    values = np.random.default_rng(0).normal(size=(len(split), 6)).astype(np.float32)
    return FeatureLoader(split, values, num_classes=10, device=CPU), values


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("micro_batch", [None, 2])
def test_steps_have_the_samples_of_a_loader_of_images(world: int, micro_batch: int | None) -> None:
    split = digits(23)
    rows, values = table(split)
    pipeline = Pipeline("resize", image_size=(8, 8), **DIGITS)
    images = Loader(store_of(split), pipeline, num_classes=10, device=CPU)
    stream = Sampler(len(split), batch_size=8, seed=5)
    seen = 0
    for rank in range(world):
        where: dict[str, Any] = {"rank": rank, "world": world, "micro_batch": micro_batch}
        one, other = (loader.train(stream, range(2, 9), **where) for loader in (rows, images))
        for step, (mine, theirs) in enumerate(zip(one, other, strict=True), 2):
            assert mine[0] == theirs[0]
            plan = stream.micro_batches(step, **where)
            for batch, like, (_, indices) in zip(mine[1], theirs[1], plan, strict=True):
                assert torch.equal(batch.labels_B, like.labels_B)
                np.testing.assert_array_equal(batch.images_BCHW, values[indices])
                assert batch.images_BCHW.dtype == torch.float32
                seen += len(indices)
    assert seen == 7 * 8


@pytest.mark.parametrize("count", [1, 7, 20])
def test_evaluation_has_each_row_once_over_all_processes(count: int) -> None:
    split = digits(count)
    rows, values = table(split)
    for world in (1, 2, 3):
        batches = [
            batch
            for rank in range(world)
            for batch in rows.once(rank=rank, world=world, batch_size=4)
        ]
        places = np.concatenate([batch.indices for batch in batches])
        assert places.tolist() == list(range(count))
        assert torch.cat([batch.labels_B for batch in batches]).tolist() == split.labels.tolist()
        np.testing.assert_array_equal(torch.cat([b.images_BCHW for b in batches]), values)
        assert max(len(batch.labels_B) for batch in batches) <= 4


def test_a_table_that_is_mapped_stays_in_its_file(tmp_path) -> None:
    split = digits(9)
    _, values = table(split)
    np.save(tmp_path / "table.npy", values)
    mapped = np.load(tmp_path / "table.npy", mmap_mode="r")
    rows = FeatureLoader(split, mapped, num_classes=10, device=CPU)
    (batch,) = rows.once(batch_size=9)
    batch.images_BCHW.zero_()
    np.testing.assert_array_equal(np.load(tmp_path / "table.npy"), values)


def test_too_many_processes_are_refused() -> None:
    rows, _ = table(digits(5))
    steps = rows.train(Sampler(5, batch_size=2, seed=0), range(1), world=3)
    with refused("recipe.wrong_value", "data.batch_size"):
        next(steps)
