"""Samples of each step: exact for every batch size, number of processes, and after resuming."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch
from refusals import refused
from small_datasets import make_pixel_store

from finetune.data.loader import ImageLoader
from finetune.data.open_source import open_source
from finetune.data.sampler import DistributedBatchSampler, completes_epoch
from finetune.transforms.pipeline import Pipeline

DIGITS = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bilinear"}


def indices_of(sampler: DistributedBatchSampler, steps: range, **shard: int) -> list[int]:
    return [
        index
        for step in steps
        for _, indices in sampler.micro_batches(step, **shard)
        for index in indices.tolist()
    ]


@pytest.mark.parametrize("num_samples", [1, 7, 24])
@pytest.mark.parametrize("batch_size", [3, 8, 30])
@pytest.mark.parametrize("group_size", [1, 2])
def test_every_epoch_has_each_sample_once_for_any_number_of_processes(
    num_samples: int, batch_size: int, group_size: int
) -> None:
    epochs = 3 * batch_size // np.gcd(batch_size, num_samples)
    steps = range(epochs * num_samples // batch_size)
    for world_size in (1, 2):
        if batch_size // group_size < world_size:
            continue
        sampler = DistributedBatchSampler(
            num_samples, batch_size=batch_size, seed=3, group_size=group_size
        )
        samples = [
            index
            for step in steps
            for rank in range(world_size)
            for index in indices_of(
                sampler, range(step, step + 1), rank=rank, world_size=world_size
            )
        ]
        for first in range(0, len(samples), num_samples):
            assert Counter(samples[first : first + num_samples]) == Counter(range(num_samples))


@pytest.mark.parametrize("batch_size", [6, 13, 64])
@pytest.mark.parametrize("micro_batch_size", [1, 5, None])
@pytest.mark.parametrize("group_size", [1, 2])
def test_ranks_and_micro_batches_partition_the_same_global_batch(
    batch_size: int, micro_batch_size: int | None, group_size: int
) -> None:
    sampler = DistributedBatchSampler(50, batch_size=batch_size, seed=0, group_size=group_size)
    global_batch = sampler.micro_batches(5)
    assert len(global_batch) == 1
    for world_size in (1, 2):
        micro_batches_by_rank = [
            sampler.micro_batches(
                5, rank=rank, world_size=world_size, micro_batch_size=micro_batch_size
            )
            for rank in range(world_size)
        ]
        assert len({len(micro_batches) for micro_batches in micro_batches_by_rank}) == 1, (
            "every rank needs the same number of micro-batches"
        )
        for column in (0, 1):
            joined = np.concatenate(
                [
                    micro_batch[column]
                    for micro_batches in micro_batches_by_rank
                    for micro_batch in micro_batches
                ]
            )
            assert np.array_equal(joined, global_batch[0][column])
        sizes = [
            len(indices) for micro_batches in micro_batches_by_rank for _, indices in micro_batches
        ]
        assert min(sizes) > 0
        # One group more if the shares are uneven, plus the image without a partner.
        assert max(sizes) <= max(micro_batch_size or batch_size, group_size) + 2 * group_size - 1


def test_mixing_pairs_stay_in_one_micro_batch() -> None:
    sampler = DistributedBatchSampler(50, batch_size=10, seed=0, group_size=2)
    for rank in range(2):
        for keys, _ in sampler.micro_batches(0, rank=rank, world_size=2, micro_batch_size=2):
            assert len(keys) % 2 == 0


def test_epoch_order_depends_on_seed_and_epoch_only() -> None:
    sampler = DistributedBatchSampler(100, batch_size=10, seed=0)
    first = sampler.epoch_order(0).copy()
    assert not np.array_equal(first, sampler.epoch_order(1))
    assert not np.array_equal(
        first, DistributedBatchSampler(100, batch_size=10, seed=1).epoch_order(0)
    )
    sampler.epoch_order(9)
    assert np.array_equal(first, sampler.epoch_order(0)), "also after the sampler has dropped it"


def test_resumes_on_two_processes_without_a_gap() -> None:
    sampler = DistributedBatchSampler(30, batch_size=6, seed=0)
    before = indices_of(sampler, range(2))
    after = [
        index
        for rank in range(2)
        for index in indices_of(sampler, range(2, 5), rank=rank, world_size=2, micro_batch_size=2)
    ]
    assert Counter(before + after) == Counter(range(30))


def test_rejects_more_processes_than_samples_per_batch() -> None:
    with refused("recipe.wrong_value", "4", "8"):
        DistributedBatchSampler(50, batch_size=6, seed=0, group_size=2).micro_batches(
            0, world_size=4
        )


def test_completes_epoch_also_if_the_batch_does_not_divide_it() -> None:
    ends = [step for step in range(1, 31) if completes_epoch(step, batch_size=4, num_samples=10)]
    assert ends == [3, 5, 8, 10, 13, 15, 18, 20, 23, 25, 28, 30]


@pytest.fixture(scope="module")
def digits():
    return open_source("embedded:digits").splits["test"]


def test_corruption_depends_on_the_sample_not_on_the_rank(digits) -> None:
    loader = ImageLoader(
        make_pixel_store(digits.subset(np.arange(3))),
        Pipeline("resize | corrupt('noise', 5)", image_size=(8, 8), train=False, **DIGITS),
        num_classes=10,
        device=torch.device("cpu"),
    )
    (expected,) = loader.eval_batches()
    for world_size in (2, 4):  # one of the four ranks has no image
        ranks = [
            list(loader.eval_batches(rank=rank, world_size=world_size, batch_size=1))
            for rank in range(world_size)
        ]
        batches = [batch for rank in ranks for batch in rank if len(batch.indices)]
        images = torch.cat([batch.images_BCHW for batch in batches])
        assert torch.equal(images, expected.images_BCHW)


@pytest.mark.parametrize("num_images", [1, 2, 3, 4, 5, 11, 12, 13])
def test_evaluation_has_each_image_once_and_equally_many_batches_per_rank(
    digits, num_images: int
) -> None:
    pipeline = Pipeline("resize", image_size=(8, 8), train=False, **DIGITS)
    loader = ImageLoader(
        make_pixel_store(digits.subset(np.arange(num_images))),
        pipeline,
        num_classes=10,
        device=torch.device("cpu"),
    )
    for batch_size in range(1, 5):
        for world_size in (1, 2, 3):
            per_rank = [
                list(loader.eval_batches(rank=rank, world_size=world_size, batch_size=batch_size))
                for rank in range(world_size)
            ]
            assert len({len(batches) for batches in per_rank}) == 1
            labels = torch.cat([b.labels_B for batches in per_rank for b in batches])
            assert torch.equal(labels, loader.labels)
            assert all(len(b.images_BCHW) >= 1 for batches in per_rank for b in batches)


def test_workers_and_memory_give_the_same_batches(digits) -> None:
    subset = digits.subset(np.arange(20))
    pipeline = Pipeline("resize | random_crop(padding=2) | flip", image_size=(16, 16), **DIGITS)
    sampler = DistributedBatchSampler(20, batch_size=8, seed=0)
    batches = {}
    for keep, num_workers in (("memory", 1), ("none", 0), ("none", 2)):
        store = make_pixel_store(subset, keep, num_workers=num_workers)
        loader = ImageLoader(store, pipeline, num_classes=10, device=torch.device("cpu"))
        rng_state = torch.get_rng_state()
        steps = [
            list(step) for _, step in loader.train_steps(sampler, range(1, 4), micro_batch_size=4)
        ]
        assert torch.equal(rng_state, torch.get_rng_state()), "the global random state has changed"
        assert [len(step) for step in steps] == [2, 2, 2]
        batches[keep, num_workers] = steps
    expected = batches.pop(("memory", 1))
    assert batches
    for steps in batches.values():
        for batch, expected_batch in zip(chain(*expected), chain(*steps), strict=True):
            assert torch.equal(batch.images_BCHW, expected_batch.images_BCHW)
            assert torch.equal(batch.labels_B, expected_batch.labels_B)


def test_images_of_mixed_sizes_do_not_depend_on_the_store(image_folder) -> None:
    split = open_source(f"folder:{image_folder}").splits["train"]
    transforms = "random_resized_crop | flip | color_jitter(0.4, 0.4, 0.4) | random_erasing"
    pipeline = Pipeline(transforms, image_size=(16, 16), **DIGITS)
    sampler, images_by_store = DistributedBatchSampler(len(split), batch_size=8, seed=0), []
    for keep, num_workers, micro_batch_size in (("memory", 1, 8), ("none", 0, 3), ("none", 2, 1)):
        store = make_pixel_store(split, keep, num_workers=num_workers)
        loader = ImageLoader(store, pipeline, num_classes=10, device=torch.device("cpu"))
        steps = [
            list(step)
            for _, step in loader.train_steps(sampler, range(3), micro_batch_size=micro_batch_size)
        ]
        images_by_store.append(torch.cat([batch.images_BCHW for batch in chain(*steps)]))
    assert torch.equal(images_by_store[0], images_by_store[1])
    assert torch.equal(images_by_store[0], images_by_store[2])


def test_mixed_batches_have_soft_targets(digits) -> None:
    pipeline = Pipeline("resize | mixup(0.8)", image_size=(8, 8), **DIGITS)
    loader = ImageLoader(
        make_pixel_store(digits), pipeline, num_classes=10, device=torch.device("cpu")
    )
    sampler = DistributedBatchSampler(len(digits), batch_size=7, seed=0, group_size=2)
    _, (batch,) = next(loader.train_steps(sampler, range(1)))
    assert batch.targets_BK is not None
    assert batch.targets_BK.shape == (7, 10)
    assert torch.allclose(batch.targets_BK.sum(1), torch.ones(7))
    assert (batch.targets_BK.max(1).values < 1).any()
    # The last image has no partner and is not mixed.
    assert torch.equal(batch.targets_BK[6], torch.eye(10)[batch.labels_B[6]])
