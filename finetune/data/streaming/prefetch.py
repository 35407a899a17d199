"""Read ahead: row groups are fetched and their images decoded in threads, before they are needed.

Threads of this process, not worker processes: each of these would fetch the row groups of all its
batches by itself. The decoders release Python's lock while they work.
"""

# B batch, C channels, H W pixels

from __future__ import annotations

import functools
import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from finetune.data.decode import planes
from finetune.data.source import Split
from finetune.data.streaming.row_groups import Group, ShardItems
from finetune.data.worker_pool import Threads
from finetune.errors import SetupError

__all__ = ["LIMIT_BYTES", "Prefetch", "is_streamed", "prefetch_of"]

LIMIT_BYTES = 2 * 2**30  # of encoded images that one process holds for one split
_FETCHERS = 8  # waiting for the hub or a disk, not computing
_BATCHES_AHEAD = 64  # whose row groups are fetched; fewer if the limit is reached
_DECODED_AHEAD = 2
_IMAGES_PER_TASK = 16


@dataclass
class _Ahead:
    """A batch that is read ahead."""

    indices: NDArray[np.int64]
    groups: list[int]
    loading: dict[int, Future[Group]]
    images: list[Future[list[Tensor]]] = field(default_factory=list)


class Prefetch:
    """Reads the images of a streamed split, in batches whose order is known beforehand.

    Used row groups stay in memory up to `LIMIT_BYTES`, of each only the images that belong to the
    split: a small validation split is fetched once for all evaluations.

    Args:
        split: its items are `ShardItems`.
        workers: threads that decode; 0 to decode when a batch is taken.
        timeout_seconds: longest wait for one batch.
    """

    def __init__(
        self, split: Split, items: ShardItems, *, workers: int, timeout_seconds: float
    ) -> None:
        self._items, self._workers, self._timeout_seconds = items, workers, timeout_seconds
        self._size = split.decode_size
        rows_N = split.item_rows
        self._groups_N = items.group_of(rows_N)
        # of a million images, too, each of these takes some megabytes only
        self._own_rows_N = (rows_N - items.starts[self._groups_N]).astype(np.int32)
        self._by_group_N = np.argsort(self._groups_N, kind="stable").astype(np.int32)
        self._edges = np.searchsorted(
            self._groups_N[self._by_group_N], np.arange(len(items.starts))
        )
        lengths = np.maximum(np.diff(items.starts), 1)
        self._num_bytes = items.num_bytes() * np.diff(self._edges) // lengths
        self._held: OrderedDict[int, Future[Group]] = OrderedDict()
        self._pins: Counter[int] = Counter()

    def read_all(self, batches: Iterable[NDArray[np.int64]]) -> Generator[list[Tensor], None, None]:
        """Yield the pixels of each batch of sample indices, in order, each (C, H, W) uint8.

        Closing the generator ends its threads.

        Raises: DataError for an image or a row group that cannot be read; HubError for the hub's
            faults; SetupError if a batch does not come in time.
        """
        waiting: deque[_Ahead] = deque()
        remaining = iter(batches)
        upcoming: NDArray[np.int64] | None = None
        fetchers, decoders = Threads(_FETCHERS, "fetch"), Threads(self._workers, "decode")
        try:
            while True:
                while len(waiting) < _BATCHES_AHEAD:
                    upcoming = next(remaining, None) if upcoming is None else upcoming
                    if upcoming is None or (
                        len(waiting) >= _DECODED_AHEAD and not self._fits(upcoming)
                    ):
                        break
                    waiting.append(self._fetch(upcoming, fetchers))
                    upcoming = None
                if not waiting:
                    return
                for ahead in itertools.islice(waiting, 1 + _DECODED_AHEAD):
                    if not ahead.images:
                        ahead.images = self._decode(ahead, decoders)
                first = waiting.popleft()
                images = self._images(first)
                self._unpin(first)
                yield images
        finally:
            for pool in (fetchers, decoders):
                pool.stop()
            for ahead in waiting:
                self._unpin(ahead)
            self._drop_unfinished()
            for pool in (fetchers, decoders):
                pool.join()

    def _load(self, group: int) -> Group:
        """Read the rows of a row group that belong to the split."""
        first, last = self._edges[group], self._edges[group + 1]
        rows = np.sort(self._own_rows_N[self._by_group_N[first:last]])
        return self._items.load(group, rows)

    def _fits(self, indices: NDArray[np.int64]) -> bool:
        """True if the row groups of a batch and of the batches ahead fit within the limit."""
        groups = set(self._groups_N[indices].tolist()) | set(self._pins)
        return sum(int(self._num_bytes[group]) for group in groups) <= LIMIT_BYTES

    def _fetch(self, indices: NDArray[np.int64], fetchers: Threads) -> _Ahead:
        groups = self._groups_N[indices].tolist()
        loading = {}
        for group in dict.fromkeys(groups):
            if group not in self._held:
                self._held[group] = fetchers.submit(functools.partial(self._load, group))
            self._held.move_to_end(group)
            self._pins[group] += 1
            loading[group] = self._held[group]
        self._make_room()
        return _Ahead(indices, groups, loading)

    def _make_room(self) -> None:
        """Drop row groups that no batch ahead needs, the least recently used first."""
        total = sum(int(self._num_bytes[group]) for group in self._held)
        for group in list(self._held):
            if total <= LIMIT_BYTES:
                return
            if group not in self._pins:
                del self._held[group]
                total -= int(self._num_bytes[group])

    def _decode(self, ahead: _Ahead, decoders: Threads) -> list[Future[list[Tensor]]]:
        rows = self._own_rows_N[ahead.indices].tolist()
        places = list(zip(ahead.groups, rows, strict=True))

        def decode(start: int) -> list[Tensor]:
            part = places[start : start + _IMAGES_PER_TASK]
            images = [ahead.loading[group].result().read(row, self._size) for group, row in part]
            return [planes(image) for image in images]

        starts = range(0, len(places), _IMAGES_PER_TASK)
        return [decoders.submit(functools.partial(decode, start)) for start in starts]

    def _images(self, ahead: _Ahead) -> list[Tensor]:
        seconds = self._timeout_seconds
        try:
            return [image for part in ahead.images for image in part.result(seconds)]
        except NotInTime:
            raise SetupError(
                f"data: no batch came within {seconds:g} seconds; look at the connection or the "
                "disk, or raise run.timeout_seconds (a batch has half of it); continue with "
                "--resume",
                code="setup.timeout",
            ) from None

    def _unpin(self, ahead: _Ahead) -> None:
        for group in ahead.loading:
            self._pins[group] -= 1
            if not self._pins[group]:
                del self._pins[group]

    def _drop_unfinished(self) -> None:
        """Drop row groups that were not fetched or failed; the next `read_all` fetches them."""
        for group, loading in list(self._held.items()):
            if not loading.done() or loading.cancelled() or loading.exception() is not None:
                del self._held[group]


def is_streamed(split: Split) -> bool:
    """True if a split's images are read in place, and never all of them at once."""
    return isinstance(split.items, ShardItems)


def prefetch_of(split: Split, *, workers: int, timeout_seconds: float) -> Prefetch | None:
    """Return the reader of a streamed split; None for any other. Args: as for `Prefetch`."""
    items = split.items
    if not isinstance(items, ShardItems):
        return None
    return Prefetch(split, items, workers=workers, timeout_seconds=timeout_seconds)
