"""prefetch.py: the right images, each row group read once, within a memory limit."""

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
from logs import logging_nothing
from refusals import refused
from streaming_dataset import ROW_GROUP_SIZE, make_streamed_split

from finetune.data import thread_pool
from finetune.data.pixel_store import PixelStore, build_pixel_store
from finetune.data.sampler import DistributedBatchSampler
from finetune.data.source import Split
from finetune.data.streaming import prefetch
from finetune.data.streaming.prefetch import Prefetcher, build_prefetcher
from finetune.data.streaming.shuffle import build_shuffle_streams
from finetune.data.streaming.streamed_images import RowGroup, StreamedImages
from finetune.errors import DataError


@pytest.fixture
def load_counts(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often each row group is loaded."""
    counts: Counter[int] = Counter()
    load_group = StreamedImages.load_group

    def counting_load_group(self: StreamedImages, group: int, rows: Any = None) -> RowGroup:
        counts[group] += 1
        return load_group(self, group, rows)

    monkeypatch.setattr(StreamedImages, "load_group", counting_load_group)
    return counts


def open_prefetcher(
    split: Split, num_workers: int = 2, timeout_seconds: float = 60.0
) -> Prefetcher:
    prefetcher = build_prefetcher(split, num_workers=num_workers, timeout_seconds=timeout_seconds)
    assert prefetcher is not None
    return prefetcher


def sequential_batches(length: int, size: int) -> list[np.ndarray]:
    return [np.arange(first, min(first + size, length)) for first in range(0, length, size)]


def assert_batches_match(
    split: Split, prefetcher: Prefetcher, batches: Iterable[np.ndarray]
) -> int:
    """Compare every image with the split. Returns: the number of batches."""
    batches = list(batches)
    images_by_batch = list(prefetcher.read_batches(batches))
    assert [len(images) for images in images_by_batch] == [len(indices) for indices in batches]
    for indices, images in zip(batches, images_by_batch, strict=True):
        for index, image in zip(indices.tolist(), images, strict=True):
            assert image.dtype == torch.uint8
            assert (image.permute(1, 2, 0).numpy() == split.decode(index)).all()
    return len(images_by_batch)


def assert_no_threads_are_left() -> None:
    deadline = time.monotonic() + 20
    while any(thread.name.startswith(("fetch", "decode")) for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.02)


class TestImagesOfBatches:
    @pytest.mark.parametrize("num_workers", [0, 1, 3])
    def test_reads_images_in_any_order(self, tmp_path: Path, num_workers: int) -> None:
        split = make_streamed_split(tmp_path, indices=np.random.default_rng(0).permutation(60)[:45])
        order = np.random.default_rng(1).permutation(45)
        batches = [order[positions] for positions in sequential_batches(45, 7)]
        assert assert_batches_match(split, open_prefetcher(split, num_workers), batches) == 7
        assert list(open_prefetcher(split, num_workers).read_batches([])) == []
        assert_no_threads_are_left()

    def test_an_image_twice_in_a_batch(self, tmp_path: Path) -> None:
        split = make_streamed_split(tmp_path)
        assert (
            assert_batches_match(
                split, open_prefetcher(split), [np.array([3, 3, 59, 3]), np.array([3])]
            )
            == 2
        )


class TestLoadingRowGroups:
    def test_reads_each_row_group_once_in_file_order(
        self, tmp_path: Path, load_counts: Counter[int]
    ) -> None:
        split = make_streamed_split(tmp_path)
        assert len(list(open_prefetcher(split).read_batches(sequential_batches(60, 8)))) == 8
        assert load_counts == dict.fromkeys(range(10), 1)

    def test_a_shuffled_epoch_stays_within_the_memory_limit(
        self, tmp_path: Path, load_counts: Counter[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        split = make_streamed_split(tmp_path, rows=60 * ROW_GROUP_SIZE)
        group_bytes = int(split.images.group_num_bytes().mean())  # type: ignore[attr-defined]
        monkeypatch.setattr("finetune.data.streaming.shuffle.MAX_OPEN_BYTES", 8 * group_bytes)
        monkeypatch.setattr(prefetch, "MAX_CACHED_BYTES", 24 * group_bytes)
        shuffle_streams = build_shuffle_streams(split)
        assert shuffle_streams is not None
        assert shuffle_streams.num_streams == 8
        sampler = DistributedBatchSampler(
            len(split), batch_size=24, seed=0, shuffle_streams=shuffle_streams
        )
        for world_size in (1, 2):
            load_counts.clear()
            for rank in range(world_size):
                prefetcher = open_prefetcher(split, 0)
                micro_batches = [
                    sampler.micro_batches(step, rank=rank, world_size=world_size)
                    for step in range(15)
                ]
                peak_bytes = 0
                for _ in prefetcher.read_batches(
                    indices for step_batches in micro_batches for _, indices in step_batches
                ):
                    peak_bytes = max(
                        peak_bytes,
                        sum(
                            int(prefetcher._group_num_bytes[group])
                            for group in prefetcher._cached_groups
                        ),
                    )
                assert 0 < peak_bytes <= 24 * group_bytes
            assert set(load_counts) == set(range(60))
            assert load_counts.total() <= 60 + 2 * (world_size - 1)

    def test_starting_in_mid_epoch_reads_only_the_needed_groups(
        self, tmp_path: Path, load_counts: Counter[int]
    ) -> None:
        split = make_streamed_split(tmp_path, rows=60 * ROW_GROUP_SIZE)
        groups = split.images.group_indices(np.arange(len(split)))  # type: ignore[attr-defined]
        sampler = DistributedBatchSampler(
            len(split), batch_size=24, seed=0, shuffle_streams=build_shuffle_streams(split)
        )
        batches = [sampler.micro_batches(step)[0][1] for step in (13, 14)]
        assert assert_batches_match(split, open_prefetcher(split), batches) == 2
        needed_groups = set(groups[np.concatenate(batches)].tolist())
        assert set(load_counts) >= needed_groups
        load_counts.clear()
        list(open_prefetcher(split).read_batches(batches))
        assert load_counts == dict.fromkeys(needed_groups, 1)
        assert len(needed_groups) < 60

    def test_a_small_split_is_read_once_for_all_evaluations(
        self, tmp_path: Path, load_counts: Counter[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        full_split = make_streamed_split(tmp_path)
        num_bytes = int(full_split.images.group_num_bytes().sum())  # type: ignore[attr-defined]
        monkeypatch.setattr(prefetch, "MAX_CACHED_BYTES", num_bytes // 4)
        split = full_split.subset(np.arange(0, 60, 6))  # one image of each row group
        prefetcher = open_prefetcher(split)
        for _ in range(3):
            assert len(list(prefetcher.read_batches(sequential_batches(10, 4)))) == 3
        assert [
            len(cached_group.result()) for cached_group in prefetcher._cached_groups.values()
        ] == [1] * 10
        assert load_counts == dict.fromkeys(range(10), 1)

    def test_reads_more_than_the_memory_limit(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(prefetch, "MAX_CACHED_BYTES", 1)
        split = make_streamed_split(tmp_path)
        assert (
            assert_batches_match(split, open_prefetcher(split), [np.arange(60), np.arange(60)]) == 2
        )

    def test_reads_ahead(self, tmp_path: Path, load_counts: Counter[int]) -> None:
        image_batches = open_prefetcher(make_streamed_split(tmp_path)).read_batches(
            sequential_batches(60, 3)
        )
        next(image_batches)
        deadline = time.monotonic() + 20
        while len(load_counts) < 10:  # although no further batch was requested
            assert time.monotonic() < deadline
            time.sleep(0.02)
        image_batches.close()
        assert_no_threads_are_left()


class TestClosing:
    def test_raises_an_error_with_its_batch_and_ends_the_threads(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        load_group = StreamedImages.load_group

        def fail_for_group_5(self: StreamedImages, group: int, rows: Any = None) -> RowGroup:
            if group == 5:
                raise DataError("row group 5 is damaged")
            return load_group(self, group, rows)

        split = make_streamed_split(tmp_path)
        for num_workers in (0, 2):
            prefetcher = open_prefetcher(split, num_workers)
            monkeypatch.setattr(StreamedImages, "load_group", fail_for_group_5)
            image_batches = prefetcher.read_batches(sequential_batches(60, ROW_GROUP_SIZE))
            assert len(list(itertools.islice(image_batches, 5))) == 5
            with pytest.raises(DataError, match="row group 5 is damaged"):
                next(image_batches)
            assert_no_threads_are_left()
            monkeypatch.setattr(StreamedImages, "load_group", load_group)
            # the error is not cached
            assert len(list(prefetcher.read_batches(sequential_batches(60, ROW_GROUP_SIZE)))) == 10

    def test_closing_does_not_wait_for_a_hanging_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(thread_pool, "JOIN_SECONDS", 0.1)
        monkeypatch.setattr(prefetch, "NUM_FETCH_THREADS", 1)
        release = threading.Event()
        load_group = StreamedImages.load_group

        def hanging_load_group(self: StreamedImages, group: int, rows: Any = None) -> RowGroup:
            if group:
                release.wait(60)
            return load_group(self, group, rows)

        monkeypatch.setattr(StreamedImages, "load_group", hanging_load_group)
        image_batches = open_prefetcher(make_streamed_split(tmp_path)).read_batches(
            sequential_batches(60, ROW_GROUP_SIZE)
        )
        next(image_batches)
        started = time.monotonic()
        image_batches.close()
        assert time.monotonic() - started < 20
        with refused("setup.timeout", "0.1", "--resume"):
            list(
                open_prefetcher(make_streamed_split(tmp_path), timeout_seconds=0.1).read_batches(
                    sequential_batches(60, ROW_GROUP_SIZE)
                )
            )
        release.set()
        assert_no_threads_are_left()


def test_the_store_of_a_streamed_split_prefetches(
    tmp_path: Path, load_counts: Counter[int]
) -> None:
    split = make_streamed_split(tmp_path)
    with logging_nothing():
        store = build_pixel_store(
            split,
            keep="auto",
            device=torch.device("cpu"),
            num_workers=2,
            unreadable="stop",
            local_world_size=1,
            progress=False,
        )
    assert load_counts == {}  # no image is decoded before it is needed
    assert isinstance(store, PixelStore)
    assert store.images is None
    [images] = store.read_batches([np.array([7, 50])])
    assert (images[1].permute(1, 2, 0).numpy() == split.decode(50)).all()
    assert set(load_counts) == {1, 8}
