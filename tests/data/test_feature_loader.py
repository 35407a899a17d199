"""Rows of a feature table replace images: same samples at the same steps, nothing decoded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from refusals import refused
from small_datasets import make_pixel_store

from finetune.data.feature_loader import FeatureLoader
from finetune.data.loader import ImageLoader
from finetune.data.open_source import open_source
from finetune.data.sampler import DistributedBatchSampler
from finetune.data.source import Split
from finetune.transforms.pipeline import Pipeline

CPU = torch.device("cpu")
DIGITS: dict[str, Any] = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bilinear"}


def digits(num_rows: int) -> Split:
    return open_source("embedded:digits").splits["test"].subset(np.arange(num_rows))


def feature_loader(split: Split) -> tuple[FeatureLoader, np.ndarray]:
    values = np.random.default_rng(0).normal(size=(len(split), 6)).astype(np.float32)
    return FeatureLoader(split, values, num_classes=10, device=CPU), values


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_train_steps_match_the_image_loader(world_size: int, micro_batch_size: int | None) -> None:
    split = digits(23)
    feature_rows, values = feature_loader(split)
    pipeline = Pipeline("resize", image_size=(8, 8), **DIGITS)
    images = ImageLoader(make_pixel_store(split), pipeline, num_classes=10, device=CPU)
    sampler = DistributedBatchSampler(len(split), batch_size=8, seed=5)
    num_seen = 0
    for rank in range(world_size):
        shard: dict[str, Any] = {
            "rank": rank,
            "world_size": world_size,
            "micro_batch_size": micro_batch_size,
        }
        feature_steps, image_steps = (
            loader.train_steps(sampler, range(2, 9), **shard) for loader in (feature_rows, images)
        )
        for step, (feature_step, image_step) in enumerate(
            zip(feature_steps, image_steps, strict=True), 2
        ):
            assert feature_step[0] == image_step[0]
            plan = sampler.micro_batches(step, **shard)
            for batch, image_batch, (_, indices) in zip(
                feature_step[1], image_step[1], plan, strict=True
            ):
                assert torch.equal(batch.labels_B, image_batch.labels_B)
                np.testing.assert_array_equal(batch.images_BCHW, values[indices])
                assert batch.images_BCHW.dtype == torch.float32
                num_seen += len(indices)
    assert num_seen == 7 * 8


@pytest.mark.parametrize("num_rows", [1, 7, 20])
def test_evaluation_reads_each_row_once_across_processes(num_rows: int) -> None:
    split = digits(num_rows)
    loader, values = feature_loader(split)
    for world_size in (1, 2, 3):
        batches = [
            batch
            for rank in range(world_size)
            for batch in loader.eval_batches(rank=rank, world_size=world_size, batch_size=4)
        ]
        indices = np.concatenate([batch.indices for batch in batches])
        assert indices.tolist() == list(range(num_rows))
        assert torch.cat([batch.labels_B for batch in batches]).tolist() == split.labels.tolist()
        np.testing.assert_array_equal(torch.cat([batch.images_BCHW for batch in batches]), values)
        assert max(len(batch.labels_B) for batch in batches) <= 4


def test_does_not_modify_a_memory_mapped_table(tmp_path) -> None:
    split = digits(9)
    _, values = feature_loader(split)
    np.save(tmp_path / "table.npy", values)
    mapped = np.load(tmp_path / "table.npy", mmap_mode="r")
    loader = FeatureLoader(split, mapped, num_classes=10, device=CPU)
    (batch,) = loader.eval_batches(batch_size=9)
    batch.images_BCHW.zero_()
    np.testing.assert_array_equal(np.load(tmp_path / "table.npy"), values)


def test_rejects_too_many_processes() -> None:
    loader, _ = feature_loader(digits(5))
    steps = loader.train_steps(
        DistributedBatchSampler(5, batch_size=2, seed=0), range(1), world_size=3
    )
    with refused("recipe.wrong_value", "data.batch_size"):
        next(steps)
