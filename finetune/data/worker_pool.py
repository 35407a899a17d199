"""The processes that decode images: which image each is at, and which of them crashed or hangs."""

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
from finetune.processes import end_with_parent

__all__ = ["POLL_SECONDS", "WorkerStatus", "spread"]

POLL_SECONDS = 1.0

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
        self._mine: Any = None  # a worker's own row; as numpy's, which is quick to write to
        # The kernel looks at the thread that forked a worker, and only the main one surely stays.
        self._from_main = threading.current_thread() is threading.main_thread()

    def sit_down(self, worker: int) -> None:
        """Begin as a worker: the first thing that its process does."""
        # A signal to the process group is for the trainer, which ends its workers itself.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self._from_main:
            end_with_parent()
        self._mine = self._rows[worker].numpy()
        self._mine[0] = os.getpid()

    @property
    def taken(self) -> bool:
        """Whether this process is one of the workers."""
        return self._mine is not None

    @contextlib.contextmanager
    def at_work(self, index: int) -> Iterator[None]:
        """Note the image that is decoded meanwhile."""
        if self._mine is not None:
            self._mine[1] = index
        yield
        if self._mine is not None:
            self._mine[1] = -1

    def watched(
        self, loader: Iterable[_Item], *, name_of: Callable[[int], str], timeout_seconds: float
    ) -> Generator[_Item, None, None]:
        """Yield what a loader reads, and end its workers when that is over.

        Args:
            loader: times out every `POLL_SECONDS` if it has workers.
            name_of: an image's index → its name.
            timeout_seconds: for which one batch is waited for.
        Raises: DataError if an image crashes the decoder; SetupError if a worker was killed for
            another reason or hangs.
        """
        before = set(multiprocessing.active_children())
        with _child_signal_kept(), _as_many_as_asked():
            items = iter(loader)
        workers = [child for child in multiprocessing.active_children() if child not in before]

        def end() -> None:
            for worker in workers:  # one that hangs would be waited for; none has a state
                worker.kill()

        # Before the module multiprocessing waits for them, where an error keeps this frame alive.
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
        """The next item, or None after the last one."""
        until = time.monotonic() + timeout_seconds
        while True:
            try:
                return next(items, None)
            except (RuntimeError, ConnectionError, EOFError) as error:
                if not isinstance(error, RuntimeError):  # cut off in the middle of a tensor
                    _wait_for_one(workers)
                if gone := [worker for worker in workers if worker.exitcode is not None]:
                    raise self._gone(gone[0], name_of) from error
                if "timed out" not in str(error):
                    raise
                if time.monotonic() > until:
                    raise self._hanging(workers, name_of, timeout_seconds) from error

    def _gone(
        self, worker: multiprocessing.process.BaseProcess, name_of: Callable[[int], str]
    ) -> FinetuneError:
        number, image = self._found(worker, name_of)
        code = worker.exitcode or 0
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        who = f"data worker {number} (process {worker.pid}) was ended {how}"
        if image is not None and -code in _CRASHES:
            return DataError(
                f"{image}: crashes the decoder: {who} while it read the image; replace or remove it"
            )
        during = "between two images" if image is None else f"while it read {image}"
        return SetupError(
            f"{who} {during}; if memory ran out, lower data.workers; continue with --resume"
        )

    def _hanging(
        self, workers: _Processes, name_of: Callable[[int], str], seconds: float
    ) -> SetupError:
        found = [(*self._found(worker, name_of), worker.pid) for worker in workers]
        busy = [
            f"worker {number} (process {pid}) reads {image}"
            for number, image, pid in sorted(found)
            if image is not None
        ]
        return SetupError(
            f"data workers: no batch came within {seconds:g} seconds; "
            f"{'; '.join(busy) or 'none of them reads an image'}; look at these images and their "
            "disk, or raise run.timeout_seconds (a worker has half of it); continue with --resume"
        )

    def _found(
        self, worker: multiprocessing.process.BaseProcess, name_of: Callable[[int], str]
    ) -> tuple[int, str | None]:
        """A worker's number, and the name of the image it is at, if any."""
        for number, (process, index) in enumerate(self._rows.tolist()):
            if process == worker.pid:
                return number, None if index < 0 else name_of(index)
        return 0, None  # ended before it sat down


class _Tasks(Dataset[_Item]):
    """Something to be done for each task, where the loader asks for it."""

    def __init__(self, work: Callable[[Any], _Item]) -> None:
        self.work = work

    def __getitem__(self, task: Any) -> _Item:
        return self.work(task)


def _as_it_is(item: _Item) -> _Item:
    return item


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
    """Do tasks in processes that are forked from this one.

    Args:
        work: a task → what is yielded for it; it notes its images in `status`.
        tasks: small, as they are sent; read as they are needed.
        status, workers: for as many processes; at least 1.
        name_of, timeout_seconds: as for `WorkerStatus.watched`.
        in_order: yield in the tasks' order; else as they are done.
        ahead: tasks that are given to each worker before their results are asked for.
    Raises: as `WorkerStatus.watched`.
    """
    with _as_many_as_asked():
        loader: DataLoader[_Item] = DataLoader(
            _Tasks(work),
            batch_size=None,
            sampler=tasks,
            collate_fn=_as_it_is,
            num_workers=workers,
            worker_init_fn=status.sit_down,
            prefetch_factor=ahead,
            timeout=POLL_SECONDS,
            multiprocessing_context="fork",  # open files and shared memory come along
            in_order=in_order,
            # An iterator draws a seed when it is made: never from the global generator.
            generator=torch.Generator(),
        )
    return status.watched(loader, name_of=name_of, timeout_seconds=timeout_seconds)


def _wait_for_one(workers: _Processes) -> None:
    """Wait a little for a worker's end, until its exit code is known too."""
    sentinels = {worker.sentinel: worker for worker in workers}
    for sentinel in multiprocessing.connection.wait(list(sentinels), timeout=POLL_SECONDS):
        sentinels[sentinel].join(POLL_SECONDS)  # type: ignore[index]


class _Guard:
    """Ends workers where the loader's own timeout is not looked at.

    A worker that stops in the middle of handing over a tensor leaves its reader in a system call
    that nothing but the worker's end interrupts.

    Args:
        explain: makes the error, before the workers end.
        end: ends them.
    """

    def __init__(self, explain: Callable[[], SetupError], end: Callable[[], None]) -> None:
        self._explain, self._end = explain, end
        self._until: float | None = None
        self._error: SetupError | None = None
        self._dismissed = threading.Event()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def waiting(self, seconds: float | None) -> Iterator[None]:
        """Guard what is done meanwhile.

        Args:
            seconds: the limit that the loader's own timeout keeps to; None for no guard.
        Raises: the error that was explained, in place of what ending the workers led to.
        """
        if seconds is not None and self._thread is None:
            self._thread = threading.Thread(target=self._watch, daemon=True, name="data workers")
            self._thread.start()
        self._until = None if seconds is None else time.monotonic() + seconds + 3 * POLL_SECONDS
        try:
            yield
        except Exception as error:
            if self._error is not None and error is not self._error:
                raise self._error from error
            raise
        finally:
            self._until = None

    def dismiss(self) -> None:
        """Stop watching."""
        self._dismissed.set()

    def _watch(self) -> None:
        while not self._dismissed.wait(POLL_SECONDS):
            until = self._until
            if until is not None and time.monotonic() > until:
                self._error = self._explain()
                self._end()
                return


@contextlib.contextmanager
def _as_many_as_asked() -> Iterator[None]:
    """Without torch's advice against more workers than cores: they also wait for disks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        yield


@contextlib.contextmanager
def _child_signal_kept() -> Iterator[None]:
    """Take back torch's handler, which raises wherever the program is when a worker dies."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: Any = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)
