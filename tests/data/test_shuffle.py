"""data/streaming/shuffle.py: the sample order of an epoch, computed from row groups."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from small_datasets import write_parquet
from streaming_dataset import ROW_GROUP_SIZE, make_streamed_split

from finetune.data.open_source import open_source
from finetune.data.sampler import DistributedBatchSampler
from finetune.data.streaming import shuffle as shuffle_module
from finetune.data.streaming.shuffle import ShuffleStreams, build_shuffle_streams

ROWS_PER_GROUP, NUM_GROUPS = 30, 60
GROUPS_N = np.repeat(np.arange(NUM_GROUPS), ROWS_PER_GROUP)


def make_sampler(
    batch_size: int = 64, *, num_streams: int = 16, num_open_groups: int = 3, group_size: int = 1
) -> DistributedBatchSampler:
    shuffle_streams = ShuffleStreams(GROUPS_N, num_streams, num_open_groups)
    return DistributedBatchSampler(
        len(GROUPS_N),
        batch_size=batch_size,
        seed=5,
        group_size=group_size,
        shuffle_streams=shuffle_streams,
    )


def samples_of_step(
    sampler: DistributedBatchSampler,
    step: int,
    rank: int = 0,
    world_size: int = 1,
    micro_batch_size: int | None = None,
):
    micro_batches = sampler.micro_batches(
        step, rank=rank, world_size=world_size, micro_batch_size=micro_batch_size
    )
    keys, indices = (np.concatenate(column) for column in zip(*micro_batches, strict=True))
    return keys.tolist(), indices.tolist()


class TestOrder:
    @pytest.mark.parametrize("batch_size", [7, 64, 5000])
    @pytest.mark.parametrize("num_streams, num_open_groups", [(1, 1), (16, 3), (64, 8)])
    def test_each_sample_once_an_epoch(
        self, batch_size: int, num_streams: int, num_open_groups: int
    ) -> None:
        sampler = make_sampler(batch_size, num_streams=num_streams, num_open_groups=num_open_groups)
        orders = [sampler.epoch_order(epoch) for epoch in range(3)]
        for order in orders:
            assert sorted(order.tolist()) == list(range(len(GROUPS_N)))
        assert (orders[0] != orders[1]).mean() > 0.9

    def test_row_groups_of_any_size(self) -> None:
        generator = np.random.default_rng(0)
        groups_N = np.sort(
            generator.choice([0, 2, 3, 9, 11], size=500, p=[0.6, 0.1, 0.1, 0.1, 0.1])
        )
        for num_streams in (1, 8, 64):
            order = ShuffleStreams(groups_N, num_streams, 2).epoch_order(
                1, 2, batch_size=48, group_size=2
            )
            assert sorted(order.tolist()) == list(range(500))

    def test_order_depends_on_the_seed_only(self) -> None:
        shuffle_streams = ShuffleStreams(GROUPS_N, 16, 3)
        sizes = {"batch_size": 64, "group_size": 1}
        assert (
            shuffle_streams.epoch_order(5, 1, **sizes) == shuffle_streams.epoch_order(5, 1, **sizes)
        ).all()
        assert (
            shuffle_streams.epoch_order(5, 1, **sizes) != shuffle_streams.epoch_order(6, 1, **sizes)
        ).any()

    def test_a_batch_contains_many_row_groups(self) -> None:
        sampler = make_sampler()
        groups = [len(set(GROUPS_N[samples_of_step(sampler, step)[1]])) for step in range(3, 24)]
        assert min(groups) >= 16  # at least one per shuffle stream


class TestRanks:
    @pytest.mark.parametrize("batch_size, group_size, world_size", [(50, 1, 3), (51, 2, 8)])
    def test_a_step_has_the_same_samples_on_any_number_of_ranks(
        self, batch_size: int, group_size: int, world_size: int
    ) -> None:
        sampler = make_sampler(batch_size, group_size=group_size)
        for step in (0, 1, 17, 28, 29, 100):  # across epoch boundaries
            expected = samples_of_step(sampler, step)
            for micro_batch_size in (None, 5):
                samples_by_rank = [
                    samples_of_step(sampler, step, rank, world_size, micro_batch_size)
                    for rank in range(world_size)
                ]
                assert list(itertools.chain(*(keys for keys, _ in samples_by_rank))) == expected[0]
                assert (
                    list(itertools.chain(*(indices for _, indices in samples_by_rank)))
                    == expected[1]
                )

    @pytest.mark.parametrize("batch_size, world_size, epoch", [(64, 2, 0), (50, 4, 5)])
    def test_each_rank_reads_its_own_row_groups(
        self, batch_size: int, world_size: int, epoch: int
    ) -> None:
        sampler = make_sampler(batch_size)
        # the steps fully inside the epoch, which begins in the middle of a step
        first, last = epoch * len(GROUPS_N), (epoch + 1) * len(GROUPS_N)
        steps = range(-(-first // batch_size), last // batch_size)
        groups_by_rank = [
            {
                group
                for step in steps
                for group in GROUPS_N[samples_of_step(sampler, step, rank, world_size)[1]]
            }
            for rank in range(world_size)
        ]
        assert set.union(*groups_by_rank) == set(range(NUM_GROUPS))
        # its share, plus the groups at its two ends
        assert max(map(len, groups_by_rank)) <= NUM_GROUPS / world_size + 2
        assert sum(map(len, groups_by_rank)) <= NUM_GROUPS + world_size - 1

    def test_few_row_groups_are_open_at_a_time(self) -> None:
        sampler = make_sampler(num_streams=4, num_open_groups=2)
        steps = range(len(GROUPS_N) // 64)
        groups_by_step = [set(GROUPS_N[samples_of_step(sampler, step)[1]]) for step in steps]
        first_step = {
            group: min(step for step in steps if group in groups_by_step[step])
            for group in range(NUM_GROUPS)
        }
        last_step = {
            group: max(step for step in steps if group in groups_by_step[step])
            for group in range(NUM_GROUPS)
        }
        for step in steps:
            # per stream its open groups, plus those that end or begin within the step
            assert sum(
                first_step[group] <= step <= last_step[group] for group in range(NUM_GROUPS)
            ) <= 4 * (2 + 2)
        assert len(groups_by_step[0]) <= 4 * 2  # an epoch begins with few row groups


class TestBuildShuffleStreams:
    def test_follows_the_size_of_the_data(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        split = make_streamed_split(tmp_path)
        shuffle_streams = build_shuffle_streams(split)
        assert shuffle_streams is not None
        assert (shuffle_streams.num_streams, shuffle_streams.num_open_groups) == (64, 8)
        assert shuffle_streams.groups_N.tolist() == [row // ROW_GROUP_SIZE for row in range(60)]
        group_bytes = int(split.images.group_num_bytes().mean())  # type: ignore[attr-defined]
        for num_groups, expected in ((1, (1, 1)), (3, (2, 1)), (100, (64, 1)), (200, (64, 3))):
            monkeypatch.setattr(shuffle_module, "MAX_OPEN_BYTES", num_groups * group_bytes)
            shuffle_streams = build_shuffle_streams(split)
            assert shuffle_streams is not None
            assert (shuffle_streams.num_streams, shuffle_streams.num_open_groups) == expected

    def test_subset(self, tmp_path: Path) -> None:
        shuffle_streams = build_shuffle_streams(
            make_streamed_split(tmp_path, indices=np.array([0, 5, 6, 59]))
        )
        assert shuffle_streams is not None
        assert shuffle_streams.groups_N.tolist() == [0, 0, 1, 9]

    def test_none_for_data_that_is_not_streamed(self, tmp_path: Path) -> None:
        write_parquet(tmp_path / "train.parquet", [0, 1], names=["a", "b"])
        assert build_shuffle_streams(open_source(f"parquet:{tmp_path}").splits["train"]) is None
