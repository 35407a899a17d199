"""Epochs that oversample rare classes: class shares, coverage, any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest

from finetune.data.class_balance import (
    ClassSampler,
    ClassSamplingKind,
    compute_class_draws,
    describe_class_draws,
    describe_imbalance,
)
from finetune.data.sampler import DistributedBatchSampler

COUNTS = np.array([60, 21, 0, 8, 1])
LABELS = np.random.Generator(np.random.PCG64(0)).permutation(np.repeat(np.arange(5), COUNTS))
KINDS: tuple[ClassSamplingKind, ...] = ("class_balanced", "square_root")


def make_sampler(
    kind: ClassSamplingKind, seed: int = 3, *, group_size: int = 1
) -> DistributedBatchSampler:
    sampling = ClassSampler(LABELS, kind, seed)
    return DistributedBatchSampler(
        len(LABELS), batch_size=20, seed=seed, group_size=group_size, class_sampler=sampling
    )


def test_class_draws_follow_the_sampling_probabilities() -> None:
    """The sampling probabilities are p_j = n_j^q / sum n^q (Kang et al.), rounded to draws."""
    assert compute_class_draws(COUNTS, "class_balanced").tolist() == [23, 23, 0, 22, 22]
    expected = np.sqrt(COUNTS) / np.sqrt(COUNTS).sum() * COUNTS.sum()
    draws = compute_class_draws(COUNTS, "square_root")
    assert draws.sum() == COUNTS.sum()
    assert np.abs(draws - expected).max() < 1
    balanced = np.full(7, 12)
    assert all((compute_class_draws(balanced, kind) == balanced).all() for kind in KINDS)
    long_tailed = np.r_[np.ones(9, dtype=np.int64), 100_000]
    assert all(compute_class_draws(long_tailed, kind).min() >= 1 for kind in KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_has_these_draws_and_cycles_through_the_images(kind: ClassSamplingKind) -> None:
    draws_per_image = np.zeros(len(LABELS), dtype=np.int64)
    sampler = make_sampler(kind)
    for epoch in range(30):
        order = sampler.epoch_order(epoch)
        drawn = np.bincount(LABELS[order], minlength=5)
        assert (drawn == compute_class_draws(COUNTS, kind)).all()
        draws_per_image += np.bincount(order, minlength=len(LABELS))
        for label in np.flatnonzero(COUNTS):
            assert np.ptp(draws_per_image[label == LABELS]) <= 1, (
                "each image of a class equally often"
            )
    assert (sampler.epoch_order(0) != sampler.epoch_order(1)).any()
    assert (sampler.epoch_order(0) != make_sampler(kind, seed=4).epoch_order(0)).any()
    assert (sampler.epoch_order(7) == make_sampler(kind).epoch_order(7)).all(), (
        "no state between epochs"
    )


def test_balanced_classes_have_each_image_once() -> None:
    labels = np.arange(40) % 4
    for kind in KINDS:
        order = DistributedBatchSampler(
            40, batch_size=8, seed=0, class_sampler=ClassSampler(labels, kind, 0)
        ).epoch_order(5)
        assert sorted(order.tolist()) == list(range(40))


@pytest.mark.parametrize("kind", KINDS)
def test_samples_do_not_depend_on_the_number_of_processes(kind: ClassSamplingKind) -> None:
    for group_size in (1, 2):
        sampler = make_sampler(kind, group_size=group_size)
        for step in (0, 3, 4, 17):  # 4 crosses an epoch
            (keys, indices), *other_batches = sampler.micro_batches(step)
            assert not other_batches
            for world_size, micro_batch_size in ((2, None), (3, None), (2, 4)):
                micro_batches = [
                    micro_batch
                    for rank in range(world_size)
                    for micro_batch in sampler.micro_batches(
                        step, rank=rank, world_size=world_size, micro_batch_size=micro_batch_size
                    )
                ]
                assert (
                    np.concatenate([micro_batch[0] for micro_batch in micro_batches]) == keys
                ).all()
                assert (
                    np.concatenate([micro_batch[1] for micro_batch in micro_batches]) == indices
                ).all()


def test_a_repeated_image_is_augmented_differently() -> None:
    sampler = make_sampler("class_balanced")
    batches = [sampler.micro_batches(step)[0] for step in range(9)]  # two epochs
    keys = np.concatenate([keys for keys, _ in batches])
    indices = np.concatenate([indices for _, indices in batches])
    assert (np.bincount(indices) > 10).any()
    assert len(np.unique(keys)) == len(keys)


def test_descriptions() -> None:
    names = ["cat", "dog", "none", "emu", "o\x1bx"]
    assert describe_imbalance(np.array([30, 3]), names) == ""
    assert (
        describe_imbalance(np.array([31, 3]), names) == "'dog' has 3 training images and 'cat' 31"
    )
    description = describe_class_draws(COUNTS, compute_class_draws(COUNTS, "class_balanced"), names)
    assert (
        description
        == "an image of 'o\\x1bx' is drawn 22 times an epoch, one of 'cat' 0.383 times an epoch"
    )
