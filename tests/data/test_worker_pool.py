"""A worker that crashes or hangs is found, with the image that it decoded; threads that wait."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import weakref
from collections.abc import Callable, Generator, Iterator

import pytest
import torch
from refusals import refused
from torch.utils.data import DataLoader, Dataset

from finetune.data import worker_pool
from finetune.data.worker_pool import WorkerStatus, in_threads

POLL_SECONDS = 0.25


@pytest.fixture(autouse=True)
def no_worker_survives(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(worker_pool, "POLL_SECONDS", POLL_SECONDS)
    yield
    for child in multiprocessing.active_children():
        child.kill()


class Items(Dataset[int]):
    """Numbers; one of them does something else before it comes."""

    def __init__(self, status: WorkerStatus, special: int, action: Callable[[], object]) -> None:
        self.status, self.special, self.action = status, special, action

    def __getitem__(self, index: int) -> int:
        with self.status.decoding(index):
            if index == self.special:
                self.action()
            return index


def read(
    action: Callable[[], object], *, workers: int = 2, special: int = 5
) -> Generator[int, None, None]:
    status = WorkerStatus(workers)
    loader = DataLoader(
        Items(status, special, action),
        batch_sampler=iter([[n] for n in range(8)]),
        num_workers=workers,
        collate_fn=lambda items: items[0],
        worker_init_fn=status.start_worker,
        timeout=POLL_SECONDS if workers else 0,
        generator=torch.Generator(),
    )
    return status.watched(loader, name_of=lambda index: f"image-{index}", timeout_seconds=1.5)


@pytest.mark.parametrize("workers", [0, 2])
def test_everything_comes_in_order_and_no_worker_survives(workers: int) -> None:
    assert list(read(lambda: None, workers=workers)) == list(range(8))
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    "action, code, named",
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "setup.worker_ended", ("SIGKILL",)),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "data.crashes_decoder", ("SIGSEGV",)),
        (lambda: os._exit(3), "setup.worker_ended", ("exit code 3",)),
        (lambda: time.sleep(600), "setup.timeout", ("1.5 seconds", "worker 1 ")),
    ],
    ids=["killed", "crash", "exit", "hang"],
)
def test_the_worker_and_its_image_are_named(
    action: Callable[[], object], code: str, named: tuple[str, ...]
) -> None:
    with refused(code, "image-5", *named):
        list(read(action))
    deadline = time.monotonic() + 30
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not multiprocessing.active_children()


class CutOff:
    """A loader whose worker is killed while a tensor of its comes over."""

    def __iter__(self) -> Iterator[int]:
        worker = multiprocessing.Process(target=time.sleep, args=(60,))
        worker.start()

        def items() -> Iterator[int]:
            os.kill(worker.pid or 0, signal.SIGKILL)
            raise ConnectionResetError(104, "Connection reset by peer")
            yield 0

        return items()


def test_a_worker_that_is_cut_off_in_the_middle_of_a_tensor_is_named() -> None:
    reading = WorkerStatus(1).watched(CutOff(), name_of=str, timeout_seconds=1.5)
    with refused("setup.worker_ended", "SIGKILL"):
        list(reading)


class Stuck:
    """A loader whose reader waits in a system call for a worker that will never answer."""

    def __iter__(self) -> Iterator[int]:
        mine, other = multiprocessing.Pipe()
        worker = multiprocessing.Process(target=time.sleep, args=(60,))
        worker.start()  # it has the other end, too
        other.close()

        def items() -> Iterator[int]:
            yield mine.recv()

        return items()


def test_a_worker_that_stops_in_the_middle_of_a_tensor_is_ended() -> None:
    reading = WorkerStatus(1).watched(Stuck(), name_of=str, timeout_seconds=0.5)
    with refused("setup.timeout", "0.5"):
        next(reading)


def test_a_slow_image_is_waited_for() -> None:
    assert list(read(lambda: time.sleep(1.2 * POLL_SECONDS))) == list(range(8))


def test_no_handler_of_torch_stays_behind() -> None:
    before = signal.getsignal(signal.SIGCHLD)
    items = read(lambda: None)
    next(items)
    assert signal.getsignal(signal.SIGCHLD) == before
    items.close()


def test_closing_ends_the_workers_even_if_one_hangs() -> None:
    items = read(lambda: time.sleep(600), special=1)
    assert next(items) == 0
    items.close()
    deadline = time.monotonic() + 30
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not multiprocessing.active_children()


def test_threads_results_are_not_kept_once_they_were_taken() -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def work(number: int) -> torch.Tensor:
        made.append(weakref.ref(result := torch.tensor(number)))
        return result

    assert [int(result) for result in in_threads(work, range(100), 2)] == list(range(100))
    results = in_threads(work, range(100), 2)
    for _ in range(99):
        next(results)
    assert sum(each() is not None for each in made) < 10
    assert [int(result) for result in results] == [99]
