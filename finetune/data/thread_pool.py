"""Thread pool for I/O-bound work: waiting for disks and servers."""

from __future__ import annotations

import contextlib
import functools
import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

__all__ = ["JOIN_SECONDS", "NUM_REQUEST_THREADS", "DaemonThreadPool", "thread_map"]

NUM_REQUEST_THREADS = 16  # more than cores: they wait for a server

_Item = TypeVar("_Item")
_Task = TypeVar("_Task")
JOIN_SECONDS = 5.0  # for threads that wait for a server
_SIGNAL_POLL_SECONDS = 1.0


class DaemonThreadPool:
    """Pool of daemon threads: unlike ThreadPoolExecutor, it does not block exit if a server hangs.

    Args:
        num_threads: number of threads, at least 1.
        name: prefix of the thread names.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._tasks = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name} {number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[[], Any]) -> Future[Any]:
        """Run a function in one of the threads."""
        future: Future[Any] = Future()
        self._tasks.put((future, fn))
        return future

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, work = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:  # raised by `Future.result`
                future.set_exception(error)

    def shutdown(self) -> None:
        """Cancel all tasks that have not started, and let the threads end."""
        with contextlib.suppress(queue.Empty):
            while (task := self._tasks.get_nowait()) is not None:
                task[0].cancel()
        for _ in self._threads:
            self._tasks.put(None)

    def join(self) -> None:
        """Wait briefly for running tasks; threads that still wait for a server are left running."""
        for thread in self._threads:
            thread.join(JOIN_SECONDS / len(self._threads))


def thread_map(
    fn: Callable[[_Task], _Item], tasks: Iterable[_Task], num_threads: int
) -> Generator[_Item, None, None]:
    """Apply an I/O-bound function to tasks in threads; yield the results in task order.

    Tasks are consumed lazily, so that few results wait in memory. A stop signal ends the iteration
    within a second, even if a server hangs.
    """
    pool = DaemonThreadPool(num_threads, "read")
    try:
        submitted = (pool.submit(functools.partial(fn, task)) for task in tasks)
        futures = deque(itertools.islice(submitted, 2 * num_threads))
        while futures:
            future = futures.popleft()
            # a signal just before a wait without timeout would be handled only after it
            while not future.done():
                wait([future], _SIGNAL_POLL_SECONDS)
            result = future.result()
            futures.extend(itertools.islice(submitted, 1))
            yield result
    finally:
        pool.shutdown()
