"""Read ahead: row groups are fetched and their images decoded in threads, before they are needed.

Threads of this process, not workers: each worker would fetch the row groups of all its batches by
itself, while the decoders let go of Python's lock as they work.
"""

# B batch, C channels, H W pixels

from __future__ import annotations

import contextlib
import functools
import itertools
import queue
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from finetune.data.decode import planes
from finetune.data.source import Split
from finetune.data.streaming.row_groups import Group, ShardItems
from finetune.errors import SetupError

__all__ = ["LIMIT_BYTES", "Prefetch", "is_streamed", "prefetch_of"]

LIMIT_BYTES = 2 * 2**30  # of encoded images that one process holds for one split
_FETCHERS = 8  # waiting for the hub or a disk, not computing
_BATCHES_AHEAD = 64  # whose row groups are asked for; fewer where the limit is reached
_DECODED_AHEAD = 2
_IMAGES_PER_TASK = 16
_GOODBYE_SECONDS = 5.0


@dataclass
class _Ahead:
    """A batch that will be asked for."""

    indices: NDArray[np.int64]
    groups: list[int]
    loading: dict[int, Future[Group]]
    images: list[Future[list[Tensor]]] = field(default_factory=list)


class Prefetch:
    """The images of a streamed split, by batches whose order is known beforehand.

    Row groups that were used stay in memory up to `LIMIT_BYTES`, of each only the images that
    belong to the split: a small validation split is fetched once for all evaluations.

    Args:
        split: its items are `ShardItems`.
        items: of the split.
        workers: threads that decode; 0 to decode when a batch is taken.
        timeout_seconds: for which one batch is waited for.
    """

    def __init__(
        self, split: Split, items: ShardItems, *, workers: int, timeout_seconds: float
    ) -> None:
        self._items, self._workers, self._timeout_seconds = items, workers, timeout_seconds
        self._size = split.decode_size
        rows_N = np.arange(len(items)) if split.rows is None else np.asarray(split.rows)
        self._groups_N = items.group_of(rows_N)
        self._own_rows_N = rows_N - items.starts[self._groups_N]
        self._by_group_N = np.argsort(self._groups_N, kind="stable")
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
        coming = iter(batches)
        upcoming: NDArray[np.int64] | None = None
        fetchers, decoders = _Pool(_FETCHERS, "fetch"), _Pool(self._workers, "decode")
        try:
            while True:
                while len(waiting) < _BATCHES_AHEAD:
                    upcoming = next(coming, None) if upcoming is None else upcoming
                    if upcoming is None or (
                        len(waiting) >= _DECODED_AHEAD and not self._fits(upcoming)
                    ):
                        break
                    waiting.append(self._ask_for(upcoming, fetchers))
                    upcoming = None
                if not waiting:
                    return
                for ahead in itertools.islice(waiting, 1 + _DECODED_AHEAD):
                    if not ahead.images:
                        ahead.images = self._decode(ahead, decoders)
                first = waiting.popleft()
                images = self._images(first)
                self._let_go(first)
                yield images
        finally:
            for pool in (fetchers, decoders):
                pool.stop()
            for ahead in waiting:
                self._let_go(ahead)
            self._drop_unfinished()
            for pool in (fetchers, decoders):
                pool.join()

    def _rows_of(self, group: int) -> NDArray[np.int64]:
        """The rows of a row group that belong to the split, ascending."""
        first, last = self._edges[group], self._edges[group + 1]
        return np.sort(self._own_rows_N[self._by_group_N[first:last]])

    def _load(self, group: int) -> Group:
        return self._items.load(group, self._rows_of(group))

    def _fits(self, indices: NDArray[np.int64]) -> bool:
        """Whether a batch's row groups find room beside those that are waited for."""
        new = set(self._groups_N[indices].tolist()) - set(self._pins)
        wanted = [*new, *self._pins]
        return int(self._num_bytes[np.array(wanted, dtype=np.int64)].sum()) <= LIMIT_BYTES

    def _ask_for(self, indices: NDArray[np.int64], fetchers: _Pool) -> _Ahead:
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
        """Drop row groups that nobody waits for, those first that were used longest ago."""
        total = sum(int(self._num_bytes[group]) for group in self._held)
        for group in list(self._held):
            if total <= LIMIT_BYTES:
                return
            if group not in self._pins:
                del self._held[group]
                total -= int(self._num_bytes[group])

    def _decode(self, ahead: _Ahead, decoders: _Pool) -> list[Future[list[Tensor]]]:
        rows = self._own_rows_N[ahead.indices].tolist()
        places = list(zip(ahead.groups, rows, strict=True))

        def some(start: int) -> list[Tensor]:
            part = places[start : start + _IMAGES_PER_TASK]
            read = [ahead.loading[group].result().read(row, self._size) for group, row in part]
            return [planes(image) for image in read]

        starts = range(0, len(places), _IMAGES_PER_TASK)
        return [decoders.submit(functools.partial(some, start)) for start in starts]

    def _images(self, ahead: _Ahead) -> list[Tensor]:
        seconds = self._timeout_seconds
        try:
            return [image for part in ahead.images for image in part.result(seconds)]
        except NotInTime:
            raise SetupError(
                f"data: no batch came within {seconds:g} seconds; look at the connection or the "
                "disk, or raise run.timeout_seconds (a batch has half of it); continue with "
                "--resume"
            ) from None

    def _let_go(self, ahead: _Ahead) -> None:
        for group in ahead.loading:
            self._pins[group] -= 1
            if not self._pins[group]:
                del self._pins[group]

    def _drop_unfinished(self) -> None:
        """Forget what was not fetched, or failed: another reading begins it anew."""
        for group, loading in list(self._held.items()):
            if not loading.done() or loading.cancelled() or loading.exception() is not None:
                del self._held[group]


def is_streamed(split: Split) -> bool:
    """Whether a split's images are read where they are, and never all of them at once."""
    return isinstance(split.items, ShardItems)


def prefetch_of(split: Split, *, workers: int, timeout_seconds: float) -> Prefetch | None:
    """What reads a streamed split; None for any other. Args: as for `Prefetch`."""
    items = split.items
    if not isinstance(items, ShardItems):
        return None
    return Prefetch(split, items, workers=workers, timeout_seconds=timeout_seconds)


class _Pool:
    """Threads that end with the process: an executor's would keep it while the hub hangs.

    Args:
        threads: how many; with 0 the work is done when its result is asked for.
        name: of the threads.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._tasks = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name} {number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Have something done by one of the threads."""
        if not self._threads:
            return _Later(work)
        future: Future[Any] = Future()
        self._tasks.put((future, work))
        return future

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, work = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:  # whoever waits for the result gets it
                future.set_exception(error)

    def stop(self) -> None:
        """Begin nothing more; whoever waits for what has not begun is told so."""
        with contextlib.suppress(queue.Empty):
            while (task := self._tasks.get_nowait()) is not None:
                task[0].cancel()
        for _ in self._threads:
            self._tasks.put(None)

    def join(self) -> None:
        """Wait a little for what is being done; what waits for the network is left to itself."""
        for thread in self._threads:
            thread.join(_GOODBYE_SECONDS / len(self._threads))


class _Later(Future[Any]):
    """Work that is done when its result is asked for."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__()
        self._work = work

    def result(self, timeout: float | None = None) -> Any:
        """Do the work. Returns: what it gives."""
        return self._work()
