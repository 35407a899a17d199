"""prefetch.py: the images of each batch, row groups read once, within a limit of memory."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refused
from streamed import GROUP, split_of

from finetune.data import worker_pool
from finetune.data.image_store import Store, open_store
from finetune.data.loader import Sampler
from finetune.data.source import Split
from finetune.data.streaming import prefetch
from finetune.data.streaming.prefetch import Prefetch, prefetch_of
from finetune.data.streaming.row_groups import Group, ShardItems
from finetune.data.streaming.shuffle import lanes_of
from finetune.errors import DataError


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often each row group was read."""
    counts: Counter[int] = Counter()
    load = ShardItems.load

    def noted(self: ShardItems, group: int, rows: Any = None) -> Group:
        counts[group] += 1
        return load(self, group, rows)

    monkeypatch.setattr(ShardItems, "load", noted)
    return counts


def reader(split: Split, workers: int = 2, timeout_seconds: float = 60.0) -> Prefetch:
    made = prefetch_of(split, workers=workers, timeout_seconds=timeout_seconds)
    assert made is not None
    return made


def batches(length: int, size: int) -> list[np.ndarray]:
    return [np.arange(first, min(first + size, length)) for first in range(0, length, size)]


def check(split: Split, made: Prefetch, wanted: Iterable[np.ndarray]) -> int:
    """Compare each image of each batch with the split's own. Returns: how many batches."""
    wanted = list(wanted)
    found = list(made.read_all(wanted))
    assert [len(images) for images in found] == [len(indices) for indices in wanted]
    for indices, images in zip(wanted, found, strict=True):
        for index, image in zip(indices.tolist(), images, strict=True):
            assert image.dtype == torch.uint8
            assert (image.permute(1, 2, 0).numpy() == split.read(index)).all()
    return len(found)


def no_threads_are_left() -> None:
    end = time.monotonic() + 20
    while any(t.name.startswith(("fetch", "decode")) for t in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.02)


class TestImages:
    @pytest.mark.parametrize("workers", [0, 1, 3])
    def test_in_any_order(self, tmp_path: Path, workers: int) -> None:
        split = split_of(tmp_path, chosen=np.random.default_rng(0).permutation(60)[:45])
        order = np.random.default_rng(1).permutation(45)
        wanted = [order[batch] for batch in batches(45, 7)]
        assert check(split, reader(split, workers), wanted) == 7
        assert list(reader(split, workers).read_all([])) == []
        no_threads_are_left()

    def test_an_image_twice_in_a_batch(self, tmp_path: Path) -> None:
        split = split_of(tmp_path)
        assert check(split, reader(split), [np.array([3, 3, 59, 3]), np.array([3])]) == 2


class TestReading:
    def test_in_file_order_each_row_group_once(self, tmp_path: Path, loaded: Counter[int]) -> None:
        split = split_of(tmp_path)
        assert len(list(reader(split).read_all(batches(60, 8)))) == 8
        assert loaded == dict.fromkeys(range(10), 1)

    def test_an_epoch_in_lanes_within_the_limit(
        self, tmp_path: Path, loaded: Counter[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        split = split_of(tmp_path, rows=60 * GROUP)
        size = int(split.items.num_bytes().mean())  # type: ignore[attr-defined]
        monkeypatch.setattr("finetune.data.streaming.shuffle.OPEN_BYTES", 8 * size)
        monkeypatch.setattr(prefetch, "LIMIT_BYTES", 24 * size)
        mixed = lanes_of(split)
        assert mixed is not None
        assert mixed.lanes == 8
        stream = Sampler(len(split), batch_size=24, seed=0, lanes=mixed)
        for world in (1, 2):
            loaded.clear()
            for rank in range(world):
                made = reader(split, 0)
                parts = [stream.micro_batches(s, rank=rank, world=world) for s in range(15)]
                most = 0
                for _ in made.read_all(indices for part in parts for _, indices in part):
                    most = max(most, sum(int(made._num_bytes[group]) for group in made._held))
                assert 0 < most <= 24 * size
            assert set(loaded) == set(range(60))
            assert loaded.total() <= 60 + 2 * (world - 1)

    def test_a_step_in_the_middle_reads_what_follows(
        self, tmp_path: Path, loaded: Counter[int]
    ) -> None:
        split = split_of(tmp_path, rows=60 * GROUP)
        groups = split.items.group_of(np.arange(len(split)))  # type: ignore[attr-defined]
        stream = Sampler(len(split), batch_size=24, seed=0, lanes=lanes_of(split))
        wanted = [stream.micro_batches(step)[0][1] for step in (13, 14)]
        assert check(split, reader(split), wanted) == 2
        needed = set(groups[np.concatenate(wanted)].tolist())
        assert set(loaded) >= needed
        loaded.clear()
        list(reader(split).read_all(wanted))
        assert loaded == dict.fromkeys(needed, 1)
        assert len(needed) < 60

    def test_a_small_split_is_read_once_for_all_evaluations(
        self, tmp_path: Path, loaded: Counter[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = split_of(tmp_path)
        size = int(whole.items.num_bytes().sum())  # type: ignore[attr-defined]
        monkeypatch.setattr(prefetch, "LIMIT_BYTES", size // 4)
        split = whole.subset(np.arange(0, 60, 6))  # of each row group one image
        made = reader(split)
        for _ in range(3):
            assert len(list(made.read_all(batches(10, 4)))) == 3
        assert [len(one.result()) for one in made._held.values()] == [1] * 10
        assert loaded == dict.fromkeys(range(10), 1)

    def test_more_than_fits_is_read_all_the_same(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(prefetch, "LIMIT_BYTES", 1)
        split = split_of(tmp_path)
        assert check(split, reader(split), [np.arange(60), np.arange(60)]) == 2

    def test_it_reads_ahead(self, tmp_path: Path, loaded: Counter[int]) -> None:
        read = reader(split_of(tmp_path)).read_all(batches(60, 3))
        next(read)
        end = time.monotonic() + 20
        while len(loaded) < 10:  # though nothing more was asked for
            assert time.monotonic() < end
            time.sleep(0.02)
        read.close()
        no_threads_are_left()


class TestEnds:
    def test_an_error_comes_with_its_batch_and_ends_the_threads(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        load = ShardItems.load

        def broken(self: ShardItems, group: int, rows: Any = None) -> Group:
            if group == 5:
                raise DataError("row group 5 is damaged")
            return load(self, group, rows)

        split = split_of(tmp_path)
        for workers in (0, 2):
            made = reader(split, workers)
            monkeypatch.setattr(ShardItems, "load", broken)
            read = made.read_all(batches(60, GROUP))
            assert len(list(itertools.islice(read, 5))) == 5
            with pytest.raises(DataError, match="row group 5 is damaged"):
                next(read)
            no_threads_are_left()
            monkeypatch.setattr(ShardItems, "load", load)
            assert len(list(made.read_all(batches(60, GROUP)))) == 10  # it is not remembered

    def test_closing_does_not_wait_for_what_hangs(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(worker_pool, "_JOIN_SECONDS", 0.1)
        monkeypatch.setattr(prefetch, "_FETCHERS", 1)
        freed = threading.Event()
        load = ShardItems.load

        def slow(self: ShardItems, group: int, rows: Any = None) -> Group:
            if group:
                freed.wait(60)
            return load(self, group, rows)

        monkeypatch.setattr(ShardItems, "load", slow)
        read = reader(split_of(tmp_path)).read_all(batches(60, GROUP))
        next(read)
        started = time.monotonic()
        read.close()
        assert time.monotonic() - started < 20
        with refused("setup.timeout", "0.1", "--resume"):
            list(reader(split_of(tmp_path), timeout_seconds=0.1).read_all(batches(60, GROUP)))
        freed.set()
        no_threads_are_left()


def test_a_store_of_a_streamed_split_reads_ahead(tmp_path: Path, loaded: Counter[int]) -> None:
    split = split_of(tmp_path)
    store = open_store(
        split,
        keep="auto",
        device=torch.device("cpu"),
        workers=2,
        unreadable="stop",
        local_processes=1,
        progress=False,
        notice=pytest.fail,
    )
    assert loaded == {}  # nothing is decoded before it is needed
    assert isinstance(store, Store)
    assert store.images is None
    [images] = store.read_all([np.array([7, 50])])
    assert (images[1].permute(1, 2, 0).numpy() == split.read(50)).all()
    assert set(loaded) == {1, 8}
