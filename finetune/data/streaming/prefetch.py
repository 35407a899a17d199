"""Prefetch streamed images: threads fetch row groups and decode images before they are needed.

Threads are used, because worker processes would fetch the same row groups several times. The
decoders release the GIL.
"""

# B batch, C channels, H W pixels

from __future__ import annotations

import functools
import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from finetune.data.decode import hwc_to_chw
from finetune.data.source import Split
from finetune.data.streaming.streamed_images import RowGroup, StreamedImages
from finetune.data.thread_pool import DaemonThreadPool
from finetune.errors import SetupError

__all__ = [
    "MAX_BATCHES_AHEAD",
    "MAX_CACHED_BYTES",
    "NUM_FETCH_THREADS",
    "Prefetcher",
    "build_prefetcher",
]

MAX_CACHED_BYTES = 2 * 2**30  # limit for the encoded images that a process caches per split
NUM_FETCH_THREADS = 8  # they wait for the Hugging Face Hub or a disk
MAX_BATCHES_AHEAD = 64  # batches whose row groups are fetched ahead, within MAX_CACHED_BYTES
_NUM_DECODED_AHEAD = 2
_IMAGES_PER_TASK = 16


@dataclass
class _PendingBatch:
    """A batch that is being fetched and decoded."""

    indices: NDArray[np.int64]
    group_indices: list[int]
    group_futures: dict[int, Future[RowGroup]]
    image_futures: list[Future[list[Tensor]]] = field(default_factory=list)


class Prefetcher:
    """Reads batches of a streamed split; fetches and decodes the next ones in advance.

    Row groups stay cached after use, up to `MAX_CACHED_BYTES`, without the images that are not in
    the split. So a small validation split is fetched once for all evaluations.

    Args:
        split: the streamed split.
        images: the images of the split.
        num_workers: decoding threads; at least one is started.
        timeout_seconds: longest wait for one batch.
    """

    def __init__(
        self, split: Split, images: StreamedImages, *, num_workers: int, timeout_seconds: float
    ) -> None:
        self._streamed_images = images
        self._num_workers = num_workers
        self._timeout_seconds = timeout_seconds
        self._decode_size = split.decode_size
        rows_N = split.image_rows
        self._groups_N = images.group_indices(rows_N)
        # a few megabytes each, even for a million images
        self._rows_in_group_N = (rows_N - images.group_starts[self._groups_N]).astype(np.int32)
        self._order_by_group_N = np.argsort(self._groups_N, kind="stable").astype(np.int32)
        self._group_edges = np.searchsorted(
            self._groups_N[self._order_by_group_N], np.arange(len(images.group_starts))
        )
        lengths = np.maximum(np.diff(images.group_starts), 1)
        self._group_num_bytes = images.group_num_bytes() * np.diff(self._group_edges) // lengths
        self._cached_groups: OrderedDict[int, Future[RowGroup]] = OrderedDict()
        self._pin_counts: Counter[int] = Counter()

    def read_batches(
        self, batches: Iterable[NDArray[np.int64]]
    ) -> Generator[list[Tensor], None, None]:
        """Yield the images of each batch of sample indices, in order, each (C, H, W) uint8.

        Closing the generator stops its threads.

        Raises: DataError for an unreadable image or row group; HubError if the Hub fails;
            SetupError if a batch times out.
        """
        pending: deque[_PendingBatch] = deque()
        remaining = iter(batches)
        upcoming: NDArray[np.int64] | None = None
        fetchers = DaemonThreadPool(NUM_FETCH_THREADS, "fetch")
        decoders = DaemonThreadPool(max(self._num_workers, 1), "decode")
        try:
            while True:
                while len(pending) < MAX_BATCHES_AHEAD:
                    upcoming = next(remaining, None) if upcoming is None else upcoming
                    if upcoming is None or (
                        len(pending) >= _NUM_DECODED_AHEAD and not self._fits_in_cache(upcoming)
                    ):
                        break
                    pending.append(self._submit_fetch(upcoming, fetchers))
                    upcoming = None
                if not pending:
                    return
                for batch in itertools.islice(pending, 1 + _NUM_DECODED_AHEAD):
                    if not batch.image_futures:
                        batch.image_futures = self._submit_decode(batch, decoders)
                next_batch = pending.popleft()
                images = self._wait_for_images(next_batch)
                self._unpin_groups(next_batch)
                yield images
        finally:
            for pool in (fetchers, decoders):
                pool.shutdown()
            for batch in pending:
                self._unpin_groups(batch)
            self._drop_unfinished_groups()
            for pool in (fetchers, decoders):
                pool.join()

    def _load_group(self, group: int) -> RowGroup:
        """Read the split's rows of a row group."""
        first, last = self._group_edges[group], self._group_edges[group + 1]
        rows = np.sort(self._rows_in_group_N[self._order_by_group_N[first:last]])
        return self._streamed_images.load_group(group, rows)

    def _fits_in_cache(self, indices: NDArray[np.int64]) -> bool:
        """True if the row groups of this batch and of the pending batches fit within the limit."""
        groups = set(self._groups_N[indices].tolist()) | set(self._pin_counts)
        return sum(int(self._group_num_bytes[group]) for group in groups) <= MAX_CACHED_BYTES

    def _submit_fetch(
        self, indices: NDArray[np.int64], fetchers: DaemonThreadPool
    ) -> _PendingBatch:
        groups = self._groups_N[indices].tolist()
        loading = {}
        for group in dict.fromkeys(groups):
            if group not in self._cached_groups:
                self._cached_groups[group] = fetchers.submit(
                    functools.partial(self._load_group, group)
                )
            self._cached_groups.move_to_end(group)
            self._pin_counts[group] += 1
            loading[group] = self._cached_groups[group]
        self._evict_groups()
        return _PendingBatch(indices, groups, loading)

    def _evict_groups(self) -> None:
        """Drop row groups that no pending batch needs, least recently used first."""
        total_bytes = sum(int(self._group_num_bytes[group]) for group in self._cached_groups)
        for group in list(self._cached_groups):
            if total_bytes <= MAX_CACHED_BYTES:
                return
            if group not in self._pin_counts:
                del self._cached_groups[group]
                total_bytes -= int(self._group_num_bytes[group])

    def _submit_decode(
        self, batch: _PendingBatch, decoders: DaemonThreadPool
    ) -> list[Future[list[Tensor]]]:
        rows = self._rows_in_group_N[batch.indices].tolist()
        group_and_row = list(zip(batch.group_indices, rows, strict=True))

        def decode(start: int) -> list[Tensor]:
            part = group_and_row[start : start + _IMAGES_PER_TASK]
            images = [
                batch.group_futures[group].result().decode(row, self._decode_size)
                for group, row in part
            ]
            return [hwc_to_chw(image) for image in images]

        starts = range(0, len(group_and_row), _IMAGES_PER_TASK)
        return [decoders.submit(functools.partial(decode, start)) for start in starts]

    def _wait_for_images(self, batch: _PendingBatch) -> list[Tensor]:
        seconds = self._timeout_seconds
        try:
            return [image for part in batch.image_futures for image in part.result(seconds)]
        except FutureTimeoutError:
            raise SetupError(
                f"data: no batch arrived within {seconds:g} seconds; check the connection or the "
                "disk, or raise run.timeout_seconds (the limit for one batch is half of it); "
                "continue with --resume",
                code="setup.timeout",
            ) from None

    def _unpin_groups(self, batch: _PendingBatch) -> None:
        for group in batch.group_futures:
            self._pin_counts[group] -= 1
            if not self._pin_counts[group]:
                del self._pin_counts[group]

    def _drop_unfinished_groups(self) -> None:
        """Drop unfinished and failed row groups; the next `read_batches` fetches them again."""
        for group, loading in list(self._cached_groups.items()):
            if not loading.done() or loading.cancelled() or loading.exception() is not None:
                del self._cached_groups[group]


def build_prefetcher(
    split: Split, *, num_workers: int, timeout_seconds: float
) -> Prefetcher | None:
    """Build the prefetcher of a streamed split; None for any other split.

    Args: see `Prefetcher`.
    """
    images = split.images
    if not isinstance(images, StreamedImages):
        return None
    return Prefetcher(split, images, num_workers=num_workers, timeout_seconds=timeout_seconds)
