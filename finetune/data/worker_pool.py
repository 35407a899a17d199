"""Worker processes that decode images, watched for crashes and hangs."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from finetune.errors import DataError, FinetuneError, SetupError
from finetune.process_lifecycle import die_with_parent, stop_signals

__all__ = ["POLL_SECONDS", "WorkerStatus", "parallel_map"]

POLL_SECONDS = 1.0
_EXIT_SECONDS = 10.0  # for a killed worker to end, on a busy machine

_Item = TypeVar("_Item")
_Task = TypeVar("_Task")
_Processes = list[multiprocessing.process.BaseProcess]
_CRASH_SIGNALS = {signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}


class WorkerStatus:
    """Records in shared memory which image each worker is decoding, to name it after a crash.

    Args:
        num_workers: number of processes; 0 for none.
    """

    def __init__(self, num_workers: int) -> None:
        # one row per worker: its process id, and the index of its image or -1
        self._rows = torch.full((max(num_workers, 1), 2), -1, dtype=torch.int64).share_memory_()
        self._own_row: Any = None  # set in a worker; a NumPy array, which is fast to write to
        # The kernel kills a worker when the thread that forked it ends (PR_SET_PDEATHSIG), so use
        # this only if that is the main thread.
        self._is_forked_from_main = threading.current_thread() is threading.main_thread()

    def init_worker(self, worker: int) -> None:
        """Prepare a worker process; called in the worker before anything else."""
        # A stop signal reaches the whole process group; the trainer handles it and ends workers.
        for number in stop_signals():
            signal.signal(number, signal.SIG_IGN)
        if self._is_forked_from_main:
            die_with_parent()
        self._own_row = self._rows[worker].numpy()
        self._own_row[0] = os.getpid()

    @contextlib.contextmanager
    def decoding(self, index: int) -> Iterator[None]:
        """Context manager: record that this worker is decoding the image."""
        if self._own_row is not None:
            self._own_row[1] = index
        yield
        if self._own_row is not None:
            self._own_row[1] = -1

    def watch(
        self, loader: Iterable[_Item], *, name_of: Callable[[int], str], timeout_seconds: float
    ) -> Generator[_Item, None, None]:
        """Yield the items of a loader, and kill its workers at the end.

        Args:
            loader: iterable; if it has workers, its `next` must time out after `POLL_SECONDS`.
            name_of: function that returns the name of an image, given its index.
            timeout_seconds: longest wait for one item.
        Raises: DataError if an image crashes the decoder; SetupError if a worker was killed for
            another reason or hangs.
        """
        before = set(multiprocessing.active_children())
        workers: _Processes = []

        def kill_workers() -> None:
            for worker in workers:  # joining a hanging worker would block; killing loses nothing
                worker.kill()

        # If an error keeps this generator alive, kill workers before multiprocessing joins them.
        atexit.register(kill_workers)
        watchdog = _Watchdog(
            lambda: self._timeout_error(workers, name_of, timeout_seconds), kill_workers
        )
        try:
            try:
                with _preserve_sigchld_handler(), _ignore_worker_count_warning():
                    items = iter(loader)
            finally:  # a stop signal may come after the workers have started
                workers += (c for c in multiprocessing.active_children() if c not in before)
            while True:
                with watchdog.waiting(timeout_seconds if workers else None):
                    item = self._next_item(items, workers, name_of, timeout_seconds)
                if item is None:
                    return
                yield item
        finally:
            watchdog.stop()
            kill_workers()
            atexit.unregister(kill_workers)

    def _next_item(
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
                if not isinstance(error, RuntimeError):  # the worker died while sending a tensor
                    _wait_for_ended_worker(workers)
                if ended := [worker for worker in workers if worker.exitcode is not None]:
                    raise self._worker_ended_error(ended[0], name_of) from error
                if "timed out" not in str(error):
                    raise
                if time.monotonic() > deadline:
                    raise self._timeout_error(workers, name_of, timeout_seconds) from error

    def _worker_ended_error(
        self, worker: multiprocessing.process.BaseProcess, name_of: Callable[[int], str]
    ) -> FinetuneError:
        number, image = self._current_image(worker, name_of)
        code = worker.exitcode or 0
        reason = f"ended with exit code {code}"
        if code < 0:
            reason = f"was killed by {signal.Signals(-code).name}"
        event = f"data worker {number} (process {worker.pid}) {reason}"
        if image is not None and -code in _CRASH_SIGNALS:
            return DataError(
                f"{image}: crashes the decoder ({event} while it decoded this image); replace or "
                "remove it",
                code="data.crashes_decoder",
            )
        moment = "between two images" if image is None else f"while it decoded {image}"
        return SetupError(
            f"{event} {moment}; if memory ran out, lower data.workers; continue with --resume",
            code="setup.worker_ended",
        )

    def _timeout_error(
        self, workers: _Processes, name_of: Callable[[int], str], seconds: float
    ) -> SetupError:
        status = [(*self._current_image(worker, name_of), worker.pid) for worker in workers]
        busy = [
            f"worker {number} (process {pid}) is decoding {image}"
            for number, image, pid in sorted(status)
            if image is not None
        ]
        return SetupError(
            f"data workers: no batch came within {seconds:g} seconds; "
            f"{'; '.join(busy) or 'no worker is decoding an image'}; check these images and their "
            "disk, or raise run.timeout_seconds (the limit for one batch is half of it); continue "
            "with --resume",
            code="setup.timeout",
        )

    def _current_image(
        self, worker: multiprocessing.process.BaseProcess, name_of: Callable[[int], str]
    ) -> tuple[int, str | None]:
        """Return the number of a worker, and the name of the image it is decoding, if any."""
        for number, (process, index) in enumerate(self._rows.tolist()):
            if process == worker.pid:
                return number, None if index < 0 else name_of(index)
        return 0, None  # ended before `init_worker`


class _TaskDataset(Dataset[_Item]):
    """A torch dataset whose indices are tasks, and whose items are the results of the tasks."""

    def __init__(self, fn: Callable[[Any], _Item]) -> None:
        self.fn = fn

    def __getitem__(self, task: Any) -> _Item:
        return self.fn(task)


def parallel_map(
    fn: Callable[[_Task], _Item],
    tasks: Iterable[_Task],
    *,
    status: WorkerStatus,
    num_workers: int,
    name_of: Callable[[int], str],
    timeout_seconds: float,
    prefetch_factor: int = 2,
) -> Generator[_Item, None, None]:
    """Apply a function to tasks in processes forked from this one, and yield the results.

    Args:
        fn: function that returns the result of a task, and records in `status` which image it is
            decoding.
        tasks: small objects, because they are pickled; consumed lazily.
        status: a `WorkerStatus` for `num_workers` processes.
        num_workers: number of processes, at least 1.
        name_of, timeout_seconds: see `WorkerStatus.watch`.
        prefetch_factor: number of tasks that are sent ahead to each worker.
    Raises: same as `WorkerStatus.watch`.
    """
    with _ignore_worker_count_warning():
        loader: DataLoader[_Item] = DataLoader(
            _TaskDataset(fn),
            batch_size=None,
            sampler=tasks,
            collate_fn=lambda item: item,  # default_convert would turn arrays into tensors
            num_workers=num_workers,
            worker_init_fn=status.init_worker,
            prefetch_factor=prefetch_factor,
            timeout=POLL_SECONDS,
            multiprocessing_context="fork",  # workers inherit open files and shared memory
            # A new iterator draws a seed, which must not advance the global generator.
            generator=torch.Generator(),
        )
    return status.watch(loader, name_of=name_of, timeout_seconds=timeout_seconds)


def _wait_for_ended_worker(workers: _Processes) -> None:
    """Wait until a worker has ended and its exit code is known."""
    sentinels = {worker.sentinel: worker for worker in workers}
    for sentinel in multiprocessing.connection.wait(list(sentinels), timeout=_EXIT_SECONDS):
        sentinels[sentinel].join(_EXIT_SECONDS)  # type: ignore[index]


class _Watchdog:
    """Kills hanging workers where the loader's own timeout has no effect.

    If a worker stops in the middle of sending a tensor, its reader blocks in a system call until
    the worker ends.

    Args:
        make_error: function that builds the error, called before the workers are killed.
        kill_workers: function that kills the workers.
    """

    def __init__(
        self, make_error: Callable[[], SetupError], kill_workers: Callable[[], None]
    ) -> None:
        self._make_error, self._kill_workers = make_error, kill_workers
        self._deadline: float | None = None
        self._error: SetupError | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def waiting(self, seconds: float | None) -> Iterator[None]:
        """Context manager: kill the workers if the block takes too long.

        Args:
            seconds: time limit of the caller, to which the watchdog adds a margin; None for no
                limit.
        Raises: the error of `make_error`, instead of the error that killing the workers caused.
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

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            deadline = self._deadline
            if deadline is not None and time.monotonic() > deadline:
                self._error = self._make_error()
                self._kill_workers()
                return


@contextlib.contextmanager
def _ignore_worker_count_warning() -> Iterator[None]:
    """Suppress torch's warning about more workers than cores: workers also wait for disks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        yield


@contextlib.contextmanager
def _preserve_sigchld_handler() -> Iterator[None]:
    """Keep the SIGCHLD handler: torch's would raise anywhere in the program if a worker dies."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: Any = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)
