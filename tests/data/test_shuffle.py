"""data/streaming/shuffle.py: the order of an epoch of row groups, by arithmetic."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from samples import make_parquet
from streamed import GROUP, split_of

from finetune.data.loader import Sampler
from finetune.data.source import open_source
from finetune.data.streaming import shuffle as data_lanes
from finetune.data.streaming.shuffle import Lanes, lanes_of

ROWS, GROUPS = 30, 60
GROUPS_N = np.repeat(np.arange(GROUPS), ROWS)


def stream(batch_size: int = 64, *, lanes: int = 16, window: int = 3, unit: int = 1) -> Sampler:
    mixed = Lanes(GROUPS_N, lanes, window)
    return Sampler(len(GROUPS_N), batch_size=batch_size, seed=5, unit=unit, lanes=mixed)


def taken(made: Sampler, step: int, rank: int = 0, world: int = 1, at_once: int | None = None):
    parts = made.micro_batches(step, rank=rank, world=world, micro_batch=at_once)
    keys, indices = (np.concatenate(each) for each in zip(*parts, strict=True))
    return keys.tolist(), indices.tolist()


class TestOrder:
    @pytest.mark.parametrize("batch_size", [1, 7, 64, 96, 5000])
    @pytest.mark.parametrize("lanes, window", [(1, 1), (16, 3), (64, 8)])
    def test_each_sample_once_an_epoch(self, batch_size: int, lanes: int, window: int) -> None:
        made = stream(batch_size, lanes=lanes, window=window)
        orders = [made.order(epoch) for epoch in range(3)]
        for order in orders:
            assert sorted(order.tolist()) == list(range(len(GROUPS_N)))
        assert (orders[0] != orders[1]).mean() > 0.9

    def test_row_groups_of_any_size_and_subsets(self) -> None:
        generator = np.random.default_rng(0)
        groups_N = np.sort(
            generator.choice([0, 2, 3, 9, 11], size=500, p=[0.6, 0.1, 0.1, 0.1, 0.1])
        )
        for lanes in (1, 8, 64):
            order = Lanes(groups_N, lanes, 2).order(1, 2, batch_size=48, unit=2)
            assert sorted(order.tolist()) == list(range(500))

    def test_the_seed_decides(self) -> None:
        mixed = Lanes(GROUPS_N, 16, 3)
        sizes = {"batch_size": 64, "unit": 1}
        assert (mixed.order(5, 1, **sizes) == mixed.order(5, 1, **sizes)).all()
        assert (mixed.order(5, 1, **sizes) != mixed.order(6, 1, **sizes)).any()

    def test_a_batch_is_mixed_from_many_row_groups(self) -> None:
        made = stream()
        groups = [len(set(GROUPS_N[taken(made, step)[1]])) for step in range(3, 24)]
        assert min(groups) >= 16  # one of each lane at least


class TestRanks:
    @pytest.mark.parametrize("batch_size, unit", [(64, 1), (64, 2), (50, 1), (51, 2), (100, 1)])
    @pytest.mark.parametrize("world", [2, 4, 8, 3])
    def test_the_same_step_on_any_number(self, batch_size: int, unit: int, world: int) -> None:
        made = stream(batch_size, unit=unit)
        for step in (0, 1, 17, 28, 29, 100):  # across the ends of epochs
            whole = taken(made, step)
            for at_once in (None, 5):
                ranks = [taken(made, step, rank, world, at_once) for rank in range(world)]
                assert list(itertools.chain(*(keys for keys, _ in ranks))) == whole[0]
                assert list(itertools.chain(*(indices for _, indices in ranks))) == whole[1]

    @pytest.mark.parametrize("batch_size", [64, 50])
    @pytest.mark.parametrize("world", [2, 4])
    @pytest.mark.parametrize("epoch", [0, 1, 5])
    def test_a_rank_reads_its_own_row_groups(self, batch_size: int, world: int, epoch: int) -> None:
        made = stream(batch_size)
        # the steps that lie within the epoch, which begins in the middle of one
        first, last = epoch * len(GROUPS_N), (epoch + 1) * len(GROUPS_N)
        steps = range(-(-first // batch_size), last // batch_size)
        touched = [
            {group for step in steps for group in GROUPS_N[taken(made, step, rank, world)[1]]}
            for rank in range(world)
        ]
        assert set.union(*touched) == set(range(GROUPS))
        # a share, and what lies across its two ends
        assert max(map(len, touched)) <= GROUPS / world + 2
        assert sum(map(len, touched)) <= GROUPS + world - 1

    def test_few_row_groups_are_open_at_a_time(self) -> None:
        made = stream(lanes=4, window=2)
        steps = range(len(GROUPS_N) // 64)
        seen = [set(GROUPS_N[taken(made, step)[1]]) for step in steps]
        first = {group: min(s for s in steps if group in seen[s]) for group in range(GROUPS)}
        last = {group: max(s for s in steps if group in seen[s]) for group in range(GROUPS)}
        for step in steps:
            # in each lane the window, and one that ends or begins within the step
            assert sum(first[g] <= step <= last[g] for g in range(GROUPS)) <= 4 * (2 + 2)
        assert len(seen[0]) <= 4 * 2  # an epoch begins with few


class TestLanesOf:
    def test_the_data_decide(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        split = split_of(tmp_path)
        found = lanes_of(split)
        assert found is not None
        assert (found.lanes, found.window) == (64, 8)
        assert found.groups_N.tolist() == [row // GROUP for row in range(60)]
        size = int(split.items.num_bytes().mean())  # type: ignore[attr-defined]
        for room, expected in ((1, (1, 1)), (3, (2, 1)), (100, (64, 1)), (200, (64, 3))):
            monkeypatch.setattr(data_lanes, "OPEN_BYTES", room * size)
            found = lanes_of(split)
            assert found is not None
            assert (found.lanes, found.window) == expected

    def test_of_a_subset(self, tmp_path: Path) -> None:
        found = lanes_of(split_of(tmp_path, chosen=np.array([0, 5, 6, 59])))
        assert found is not None
        assert found.groups_N.tolist() == [0, 0, 1, 9]

    def test_only_what_is_streamed_has_some(self, tmp_path: Path) -> None:
        make_parquet(tmp_path / "train.parquet", [0, 1], names=["a", "b"])
        assert lanes_of(open_source(f"parquet:{tmp_path}").splits["train"]) is None
