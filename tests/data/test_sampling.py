"""Epochs with more images of rare classes: shares, coverage, and any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest

from finetune.data.loader import Sampler
from finetune.data.sampling import ClassSampling, Kind, class_draws, draws_in_words, imbalance

COUNTS = np.array([60, 21, 0, 8, 1])
LABELS = np.random.Generator(np.random.PCG64(0)).permutation(np.repeat(np.arange(5), COUNTS))
KINDS: tuple[Kind, ...] = ("class_balanced", "square_root")


def stream(kind: Kind, seed: int = 3, *, unit: int = 1) -> Sampler:
    sampling = ClassSampling(LABELS, kind, seed)
    return Sampler(len(LABELS), batch_size=20, seed=seed, unit=unit, sampling=sampling)


def test_shares_of_the_classes() -> None:
    """Those of the sampling probabilities p_j = n_j^q / sum n^q (Kang et al.), rounded."""
    assert class_draws(COUNTS, "class_balanced").tolist() == [23, 23, 0, 22, 22]
    roots = np.sqrt(COUNTS) / np.sqrt(COUNTS).sum() * COUNTS.sum()
    draws = class_draws(COUNTS, "square_root")
    assert draws.sum() == COUNTS.sum()
    assert np.abs(draws - roots).max() < 1
    even = np.full(7, 12)
    assert all((class_draws(even, kind) == even).all() for kind in KINDS)
    many = np.r_[np.ones(9, dtype=np.int64), 100_000]
    assert all(class_draws(many, kind).min() >= 1 for kind in KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_has_these_shares_and_uses_up_its_images(kind: Kind) -> None:
    seen = np.zeros(len(LABELS), dtype=np.int64)
    sampler = stream(kind)
    for epoch in range(30):
        order = sampler.order(epoch)
        drawn = np.bincount(LABELS[order], minlength=5)
        assert (drawn == class_draws(COUNTS, kind)).all()
        seen += np.bincount(order, minlength=len(LABELS))
        for label in np.flatnonzero(COUNTS):
            assert np.ptp(seen[label == LABELS]) <= 1, "of a class, each image as often"
    assert (sampler.order(0) != sampler.order(1)).any()
    assert (sampler.order(0) != stream(kind, seed=4).order(0)).any()
    assert (sampler.order(7) == stream(kind).order(7)).all(), "no state"


def test_classes_alike_come_each_image_once() -> None:
    labels = np.arange(40) % 4
    for kind in KINDS:
        order = Sampler(40, batch_size=8, seed=0, sampling=ClassSampling(labels, kind, 0)).order(5)
        assert sorted(order.tolist()) == list(range(40))


@pytest.mark.parametrize("kind", KINDS)
def test_the_stream_is_the_same_for_any_number_of_processes(kind: Kind) -> None:
    for unit in (1, 2):
        sampler = stream(kind, unit=unit)
        for step in (0, 3, 4, 17):  # 4 crosses an epoch
            (keys, indices), *rest = sampler.micro_batches(step)
            assert not rest
            for world, micro_batch in ((2, None), (3, None), (2, 4)):
                parts = [
                    part
                    for rank in range(world)
                    for part in sampler.micro_batches(
                        step, rank=rank, world=world, micro_batch=micro_batch
                    )
                ]
                assert (np.concatenate([part[0] for part in parts]) == keys).all()
                assert (np.concatenate([part[1] for part in parts]) == indices).all()


def test_an_image_that_comes_again_is_augmented_anew() -> None:
    sampler = stream("class_balanced")
    batches = [sampler.micro_batches(step)[0] for step in range(9)]  # two epochs
    keys = np.concatenate([keys for keys, _ in batches])
    indices = np.concatenate([indices for _, indices in batches])
    assert (np.bincount(indices) > 10).any()
    assert len(np.unique(keys)) == len(keys)


def test_words() -> None:
    names = ["cat", "dog", "none", "emu", "o\x1bx"]
    assert imbalance(np.array([30, 3]), names) == ""
    assert imbalance(np.array([31, 3]), names) == "'dog' has 3 training images and 'cat' 31"
    words = draws_in_words(COUNTS, class_draws(COUNTS, "class_balanced"), names)
    assert words == "an image of 'o\\x1bx' comes 22 times an epoch, of 'cat' 0.383 times an epoch"
