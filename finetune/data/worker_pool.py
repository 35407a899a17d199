"""The processes that decode images, watched for crashes and hangs; and threads that only wait."""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import os
import queue
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from finetune.errors import DataError, FinetuneError, SetupError
from finetune.processes import end_with_parent, stop_signals

__all__ = ["POLL_SECONDS", "Threads", "WorkerStatus", "in_threads", "spread"]

POLL_SECONDS = 1.0
_JOIN_SECONDS = 5.0  # for threads that wait for a server

_Item = TypeVar("_Item")
_Task = TypeVar("_Task")
_Processes = list[multiprocessing.process.BaseProcess]
_CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}


class WorkerStatus:
    """The image that each worker is decoding, in shared memory: readable after the worker crashed.

    Args:
        workers: number of processes; 0 for none.
    """

    def __init__(self, workers: int) -> None:
        # a row for each worker: its process, and the index of its image or -1
        self._rows = torch.full((max(workers, 1), 2), -1, dtype=torch.int64).share_memory_()
        self._own_row: Any = None  # in a worker; as NumPy's, which is quick to write to
        # The kernel ends a worker with the thread that forked it; only the main one surely stays.
        self._from_main = threading.current_thread() is threading.main_thread()

    def start_worker(self, worker: int) -> None:
        """Prepare a worker's process; called in it before anything else."""
        # A signal to the process group is for the trainer, which ends its workers itself.
        for number in stop_signals():
            signal.signal(number, signal.SIG_IGN)
        if self._from_main:
            end_with_parent()
        self._own_row = self._rows[worker].numpy()
        self._own_row[0] = os.getpid()

    @property
    def is_worker(self) -> bool:
        """True in the process of a worker."""
        return self._own_row is not None

    @contextlib.contextmanager
    def decoding(self, index: int) -> Iterator[None]:
        """Record the image that is decoded inside the context."""
        if self._own_row is not None:
            self._own_row[1] = index
        yield
        if self._own_row is not None:
            self._own_row[1] = -1

    def watched(
        self, loader: Iterable[_Item], *, name_of: Callable[[int], str], timeout_seconds: float
    ) -> Generator[_Item, None, None]:
        """Yield a loader's items, and end its workers afterwards.

        Args:
            loader: times out every `POLL_SECONDS` if it has workers.
            name_of: from an image's index to its name.
            timeout_seconds: longest wait for one batch.
        Raises: DataError if an image crashes the decoder; SetupError if a worker was killed for
            another reason or hangs.
        """
        before = set(multiprocessing.active_children())
        with _keep_child_signal(), _no_advice_on_workers():
            items = iter(loader)
        workers = [child for child in multiprocessing.active_children() if child not in before]

        def end() -> None:
            for worker in workers:  # joining one that hangs would take for ever; none has a state
                worker.kill()

        # Before multiprocessing joins them at exit, if an error keeps this frame alive.
        atexit.register(end)
        guard = _Guard(lambda: self._hanging(workers, name_of, timeout_seconds), end)
        try:
            while True:
                with guard.waiting(timeout_seconds if workers else None):
                    item = self._next(items, workers, name_of, timeout_seconds)
                if item is None:
                    return
                yield item
        finally:
            guard.dismiss()
            end()
            atexit.unregister(end)

    def _next(
        self,
        items: Iterator[_Item],
        workers: _Processes,
        name_of: Callable[[int], str],
        timeout_seconds: float,
    ) -> _Item | None:
        """Return the next item, or None after the last one."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                return next(items, None)
            except (RuntimeError, ConnectionError, EOFError) as error:
                if not isinstance(error, RuntimeError):  # cut off in the middle of a tensor
                    _wait_for_one(workers)
                if ended := [worker for worker in workers if worker.exitcode is not None]:
                    raise self._ended(ended[0], name_of) from error
                if "timed out" not in str(error):
                    raise
                if time.monotonic() > deadline:
                    raise self._hanging(workers, name_of, timeout_seconds) from error

    def _ended(
        self, worker: multiprocessing.process.BaseProcess, name_of: Callable[[int], str]
    ) -> FinetuneError:
        number, image = self._current_image(worker, name_of)
        code = worker.exitcode or 0
        reason = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        event = f"data worker {number} (process {worker.pid}) was ended {reason}"
        if image is not None and -code in _CRASHES:
            return DataError(
                f"{image}: crashes the decoder: {event} while it read the image; replace or remove "
                "it",
                code="data.crashes_decoder",
            )
        moment = "between two images" if image is None else f"while it read {image}"
        return SetupError(
            f"{event} {moment}; if memory ran out, lower data.workers; continue with --resume",
            code="setup.worker_ended",
        )

    def _hanging(
        self, workers: _Processes, name_of: Callable[[int], str], seconds: float
    ) -> SetupError:
        states = [(*self._current_image(worker, name_of), worker.pid) for worker in workers]
        busy = [
            f"worker {number} (process {pid}) reads {image}"
            for number, image, pid in sorted(states)
            if image is not None
        ]
        return SetupError(
            f"data workers: no batch came within {seconds:g} seconds; "
            f"{'; '.join(busy) or 'none of them reads an image'}; look at these images and their "
            "disk, or raise run.timeout_seconds (a worker has half of it); continue with --resume",
            code="setup.timeout",
        )

    def _current_image(
        self, worker: multiprocessing.process.BaseProcess, name_of: Callable[[int], str]
    ) -> tuple[int, str | None]:
        """Return a worker's number and the name of the image that it decodes, if any."""
        for number, (process, index) in enumerate(self._rows.tolist()):
            if process == worker.pid:
                return number, None if index < 0 else name_of(index)
        return 0, None  # ended before `start_worker`


class _Tasks(Dataset[_Item]):
    """A data set whose indices are tasks and whose items are their results."""

    def __init__(self, work: Callable[[Any], _Item]) -> None:
        self.work = work

    def __getitem__(self, task: Any) -> _Item:
        return self.work(task)


def spread(
    work: Callable[[_Task], _Item],
    tasks: Iterable[_Task],
    *,
    status: WorkerStatus,
    workers: int,
    name_of: Callable[[int], str],
    timeout_seconds: float,
    in_order: bool = True,
    ahead: int = 2,
) -> Generator[_Item, None, None]:
    """Work on tasks in processes that are forked from this one, and yield the results.

    Args:
        work: from a task to its result; it records its images in `status`.
        tasks: small, as they are pickled; read as they are needed.
        status, workers: for as many processes; at least 1.
        name_of, timeout_seconds: as for `WorkerStatus.watched`.
        in_order: yield in the tasks' order; else as they are done.
        ahead: tasks that each worker has before their results are needed.
    Raises: as `WorkerStatus.watched`.
    """
    with _no_advice_on_workers():
        loader: DataLoader[_Item] = DataLoader(
            _Tasks(work),
            batch_size=None,
            sampler=tasks,
            collate_fn=lambda item: item,  # default_convert would make tensors of arrays
            num_workers=workers,
            worker_init_fn=status.start_worker,
            prefetch_factor=ahead,
            timeout=POLL_SECONDS,
            multiprocessing_context="fork",  # open files and shared memory come along
            in_order=in_order,
            # An iterator draws a seed when it is made: never from the global generator.
            generator=torch.Generator(),
        )
    return status.watched(loader, name_of=name_of, timeout_seconds=timeout_seconds)


def _wait_for_one(workers: _Processes) -> None:
    """Wait a little until a worker has ended and its exit code is known."""
    sentinels = {worker.sentinel: worker for worker in workers}
    for sentinel in multiprocessing.connection.wait(list(sentinels), timeout=POLL_SECONDS):
        sentinels[sentinel].join(POLL_SECONDS)  # type: ignore[index]


class _Guard:
    """Ends workers that hang where the loader's own timeout has no effect.

    A worker that stops in the middle of sending a tensor leaves its reader in a system call that
    only the worker's end interrupts.

    Args:
        explain: makes the error, before the workers end.
    """

    def __init__(self, explain: Callable[[], SetupError], end: Callable[[], None]) -> None:
        self._explain, self._end = explain, end
        self._deadline: float | None = None
        self._error: SetupError | None = None
        self._dismissed = threading.Event()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def waiting(self, seconds: float | None) -> Iterator[None]:
        """Guard the reading inside the context.

        Args:
            seconds: the limit that the loader's own timeout keeps; None for no guard.
        Raises: the error of `explain`, in place of the one that ending the workers caused.
        """
        if seconds is not None and self._thread is None:
            self._thread = threading.Thread(target=self._watch, daemon=True, name="data workers")
            self._thread.start()
        if seconds is not None:
            self._deadline = time.monotonic() + seconds + 3 * POLL_SECONDS
        try:
            yield
        except Exception as error:
            if self._error is not None and error is not self._error:
                raise self._error from error
            raise
        finally:
            self._deadline = None

    def dismiss(self) -> None:
        """Stop watching."""
        self._dismissed.set()

    def _watch(self) -> None:
        while not self._dismissed.wait(POLL_SECONDS):
            deadline = self._deadline
            if deadline is not None and time.monotonic() > deadline:
                self._error = self._explain()
                self._end()
                return


@contextlib.contextmanager
def _no_advice_on_workers() -> Iterator[None]:
    """Silence torch's advice against more workers than cores: they also wait for disks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        yield


@contextlib.contextmanager
def _keep_child_signal() -> Iterator[None]:
    """Remove torch's handler, which raises wherever the program is when a worker dies."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: Any = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)


class Threads:
    """Threads that end with the process: those of an executor would keep it while the hub hangs.

    Args:
        threads: how many; with 0 the work is done by `Future.result`.
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
        """Let one of the threads do some work."""
        if not self._threads:
            return _Deferred(work)
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
            except BaseException as error:  # raised by `Future.result`
                future.set_exception(error)

    def stop(self) -> None:
        """Start no more work, and cancel what has not started."""
        with contextlib.suppress(queue.Empty):
            while (task := self._tasks.get_nowait()) is not None:
                task[0].cancel()
        for _ in self._threads:
            self._tasks.put(None)

    def join(self) -> None:
        """Wait a little for work that has started; a thread that waits for the network goes on."""
        for thread in self._threads:
            thread.join(_JOIN_SECONDS / len(self._threads))


class _Deferred(Future[Any]):
    """A future whose work is done by `result`."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__()
        self._work = work

    def result(self, timeout: float | None = None) -> Any:
        """Do the work. Returns: what it gives."""
        return self._work()


def in_threads(
    work: Callable[[_Task], _Item], tasks: Iterable[_Task], threads: int
) -> Generator[_Item, None, None]:
    """Yield the results of work that waits for servers, in the tasks' order.

    A stop signal ends it at once, whatever the servers do.
    """
    pool = Threads(threads, "read")
    try:
        coming = deque(pool.submit(functools.partial(work, task)) for task in tasks)
        while coming:
            yield coming.popleft().result()
    finally:
        pool.stop()
