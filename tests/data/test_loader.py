"""Which samples form which step: exact for every batch size, number of processes and resume."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch
from refusals import refused
from samples import store_of

from finetune.data.loader import Loader, Sampler, crosses_epoch
from finetune.data.source import open_source
from finetune.transforms.pipeline import Pipeline

DIGITS = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bilinear"}


def indices_of(stream: Sampler, steps: range, **where: int) -> list[int]:
    return [
        index
        for step in steps
        for _, indices in stream.micro_batches(step, **where)
        for index in indices.tolist()
    ]


@pytest.mark.parametrize("num_samples", [1, 2, 7, 24, 25])
@pytest.mark.parametrize("batch_size", [2, 3, 8, 30])
@pytest.mark.parametrize("unit", [1, 2])
def test_every_epoch_has_each_sample_once_at_any_number_of_processes(
    num_samples: int, batch_size: int, unit: int
) -> None:
    epochs = 3 * batch_size // np.gcd(batch_size, num_samples)
    steps = range(epochs * num_samples // batch_size)
    for world in (1, 2):
        if batch_size // unit < world:
            continue
        stream = Sampler(num_samples, batch_size=batch_size, seed=3, unit=unit)
        seen = [
            index
            for step in steps
            for rank in range(world)
            for index in indices_of(stream, range(step, step + 1), rank=rank, world=world)
        ]
        for first in range(0, len(seen), num_samples):
            assert Counter(seen[first : first + num_samples]) == Counter(range(num_samples))


@pytest.mark.parametrize("batch_size", [4, 6, 7, 13, 64])
@pytest.mark.parametrize("micro_batch", [1, 2, 3, 5, 64, None])
@pytest.mark.parametrize("unit", [1, 2])
def test_ranks_and_micro_batches_only_cut_the_same_global_batch(
    batch_size: int, micro_batch: int | None, unit: int
) -> None:
    stream = Sampler(50, batch_size=batch_size, seed=0, unit=unit)
    whole = stream.micro_batches(5)
    assert len(whole) == 1
    for world in (1, 2):
        parts = [
            stream.micro_batches(5, rank=rank, world=world, micro_batch=micro_batch)
            for rank in range(world)
        ]
        assert len({len(part) for part in parts}) == 1, "ranks must stay in step"
        for column in (0, 1):
            joined = np.concatenate([micro[column] for part in parts for micro in part])
            assert np.array_equal(joined, whole[0][column])
        sizes = [len(indices) for part in parts for _, indices in part]
        assert min(sizes) > 0
        # One unit more where the shares are uneven, and the image that has no pair.
        assert max(sizes) <= max(micro_batch or batch_size, unit) + 2 * unit - 1


def test_pairs_for_mixing_stay_together() -> None:
    stream = Sampler(50, batch_size=10, seed=0, unit=2)
    for rank in range(2):
        for keys, _ in stream.micro_batches(0, rank=rank, world=2, micro_batch=2):
            assert len(keys) % 2 == 0


def test_orders_differ_by_seed_and_epoch_and_repeat_exactly() -> None:
    stream = Sampler(100, batch_size=10, seed=0)
    first = stream.order(0).copy()
    assert not np.array_equal(first, stream.order(1))
    assert not np.array_equal(first, Sampler(100, batch_size=10, seed=1).order(0))
    stream.order(9)
    assert np.array_equal(first, stream.order(0)), "also after it was forgotten"


def test_a_stop_on_one_process_resumes_on_two_without_a_gap() -> None:
    stream = Sampler(30, batch_size=6, seed=0)
    before = indices_of(stream, range(2))
    after = [
        index
        for rank in range(2)
        for index in indices_of(stream, range(2, 5), rank=rank, world=2, micro_batch=2)
    ]
    assert Counter(before + after) == Counter(range(30))


def test_too_many_processes_for_the_batch() -> None:
    with refused("recipe.wrong_value", "4", "8"):
        Sampler(50, batch_size=6, seed=0, unit=2).micro_batches(0, world=4)


def test_epoch_ends_are_found_whether_or_not_the_batch_divides_them() -> None:
    ends = [s for s in range(1, 31) if crosses_epoch(s, batch_size=4, num_samples=10)]
    assert ends == [3, 5, 8, 10, 13, 15, 18, 20, 23, 25, 28, 30]


@pytest.fixture(scope="module")
def digits():
    return open_source("embedded:digits").splits["test"]


def test_corrupted_images_are_those_of_their_places_on_any_rank(digits) -> None:
    loader = Loader(
        store_of(digits.subset(np.arange(3))),
        Pipeline("resize | corrupt('noise', 5)", image_size=(8, 8), train=False, **DIGITS),
        num_classes=10,
        device=torch.device("cpu"),
    )
    (whole,) = loader.once()
    for world in (2, 4):  # one of four ranks has no image
        ranks = [list(loader.once(rank=rank, world=world, batch_size=1)) for rank in range(world)]
        batches = [batch for rank in ranks for batch in rank if len(batch.indices)]
        found = torch.cat([batch.images_BCHW for batch in batches])
        assert torch.equal(found, whole.images_BCHW)


@pytest.mark.parametrize("total", range(1, 26))
def test_evaluation_has_each_image_once_and_equal_numbers_of_batches(digits, total: int) -> None:
    pipeline = Pipeline("resize", image_size=(8, 8), train=False, **DIGITS)
    loader = Loader(
        store_of(digits.subset(np.arange(total))),
        pipeline,
        num_classes=10,
        device=torch.device("cpu"),
    )
    for batch_size in range(1, 5):
        for world in (1, 2, 3):
            per_rank = [
                list(loader.once(rank=rank, world=world, batch_size=batch_size))
                for rank in range(world)
            ]
            assert len({len(batches) for batches in per_rank}) == 1
            labels = torch.cat([b.labels_B for batches in per_rank for b in batches])
            assert torch.equal(labels, loader.labels)
            assert all(len(b.images_BCHW) >= 1 for batches in per_rank for b in batches)


def test_workers_bring_the_same_pixels_as_memory(digits) -> None:
    subset = digits.subset(np.arange(20))
    pipeline = Pipeline("resize | random_crop(padding=2) | flip", image_size=(16, 16), **DIGITS)
    stream = Sampler(20, batch_size=8, seed=0)
    batches = {}
    for keep, workers in (("memory", 1), ("none", 0), ("none", 2)):
        store = store_of(subset, keep, workers=workers)
        loader = Loader(store, pipeline, num_classes=10, device=torch.device("cpu"))
        before = torch.get_rng_state()
        found = [list(step) for _, step in loader.train(stream, range(1, 4), micro_batch=4)]
        assert torch.equal(before, torch.get_rng_state()), "the global random state was touched"
        assert [len(step) for step in found] == [2, 2, 2]
        batches[keep, workers] = found
    first = batches.pop(("memory", 1))
    assert batches
    for other in batches.values():
        for mine, theirs in zip(chain(*first), chain(*other), strict=True):
            assert torch.equal(mine.images_BCHW, theirs.images_BCHW)
            assert torch.equal(mine.labels_B, theirs.labels_B)


def test_images_of_any_sizes_are_the_same_wherever_they_come_from(image_folder) -> None:
    split = open_source(f"folder:{image_folder}").splits["train"]
    sentence = "random_resized_crop | flip | color_jitter(0.4, 0.4, 0.4) | random_erasing"
    pipeline = Pipeline(sentence, image_size=(16, 16), **DIGITS)
    stream, found = Sampler(len(split), batch_size=8, seed=0), []
    for keep, workers, parts in (("memory", 1, 8), ("none", 0, 3), ("none", 2, 1)):
        store = store_of(split, keep, workers=workers)
        loader = Loader(store, pipeline, num_classes=10, device=torch.device("cpu"))
        steps = [list(step) for _, step in loader.train(stream, range(3), micro_batch=parts)]
        found.append(torch.cat([batch.images_BCHW for batch in chain(*steps)]))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_mixed_batches_carry_soft_targets(digits) -> None:
    pipeline = Pipeline("resize | mixup(0.8)", image_size=(8, 8), **DIGITS)
    loader = Loader(store_of(digits), pipeline, num_classes=10, device=torch.device("cpu"))
    stream = Sampler(len(digits), batch_size=7, seed=0, unit=2)
    _, (batch,) = next(loader.train(stream, range(1)))
    assert batch.targets_BK is not None
    assert batch.targets_BK.shape == (7, 10)
    assert torch.allclose(batch.targets_BK.sum(1), torch.ones(7))
    assert (batch.targets_BK.max(1).values < 1).any()
    # The odd one out has no partner and stays as it is.
    assert torch.equal(batch.targets_BK[6], torch.eye(10)[batch.labels_B[6]])
