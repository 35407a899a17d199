"""A worker that crashes or hangs is detected, with the image it was decoding; daemon threads."""

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
from finetune.data.thread_pool import thread_map
from finetune.data.worker_pool import WorkerStatus

POLL_SECONDS = 0.25


@pytest.fixture(autouse=True)
def kill_remaining_workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(worker_pool, "POLL_SECONDS", POLL_SECONDS)
    yield
    for child in multiprocessing.active_children():
        child.kill()


class NumbersDataset(Dataset[int]):
    """A dataset of numbers; one of them runs an action first."""

    def __init__(self, status: WorkerStatus, special: int, action: Callable[[], object]) -> None:
        self.status, self.special, self.action = status, special, action

    def __getitem__(self, index: int) -> int:
        with self.status.decoding(index):
            if index == self.special:
                self.action()
            return index


def load_numbers(
    action: Callable[[], object], *, num_workers: int = 2, special: int = 5
) -> Generator[int, None, None]:
    status = WorkerStatus(num_workers)
    loader = DataLoader(
        NumbersDataset(status, special, action),
        batch_sampler=iter([[number] for number in range(8)]),
        num_workers=num_workers,
        collate_fn=lambda items: items[0],
        worker_init_fn=status.init_worker,
        timeout=POLL_SECONDS if num_workers else 0,
        generator=torch.Generator(),
    )
    return status.watch(loader, name_of=lambda index: f"image-{index}", timeout_seconds=1.5)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loads_in_order_and_leaves_no_worker(num_workers: int) -> None:
    assert list(load_numbers(lambda: None, num_workers=num_workers)) == list(range(8))
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    "action, code, expected_texts",
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "setup.worker_ended", ("SIGKILL",)),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "data.crashes_decoder", ("SIGSEGV",)),
        (lambda: os._exit(3), "setup.worker_ended", ("exit code 3",)),
        (lambda: time.sleep(600), "setup.timeout", ("1.5 seconds", "worker 1 ")),
    ],
    ids=["killed", "crash", "exit", "hang"],
)
def test_names_the_worker_and_its_image(
    action: Callable[[], object], code: str, expected_texts: tuple[str, ...]
) -> None:
    with refused(code, "image-5", *expected_texts):
        list(load_numbers(action))
    deadline = time.monotonic() + 30
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not multiprocessing.active_children()


class LoaderWithKilledWorker:
    """A loader whose worker is killed while it sends a tensor."""

    def __iter__(self) -> Iterator[int]:
        worker = multiprocessing.Process(target=time.sleep, args=(60,))
        worker.start()

        def items() -> Iterator[int]:
            os.kill(worker.pid or 0, signal.SIGKILL)
            raise ConnectionResetError(104, "Connection reset by peer")
            yield 0

        return items()


def test_names_a_worker_killed_while_sending_a_tensor() -> None:
    numbers = WorkerStatus(1).watch(LoaderWithKilledWorker(), name_of=str, timeout_seconds=1.5)
    with refused("setup.worker_ended", "SIGKILL"):
        list(numbers)


class LoaderWithHangingPipe:
    """A loader that waits in a system call for a worker that never answers."""

    def __iter__(self) -> Iterator[int]:
        receiver, sender = multiprocessing.Pipe()
        worker = multiprocessing.Process(target=time.sleep, args=(60,))
        worker.start()  # the worker has the sending end, too
        sender.close()

        def items() -> Iterator[int]:
            yield receiver.recv()

        return items()


def test_times_out_if_a_worker_hangs_while_sending_a_tensor() -> None:
    numbers = WorkerStatus(1).watch(LoaderWithHangingPipe(), name_of=str, timeout_seconds=0.5)
    with refused("setup.timeout", "0.5"):
        next(numbers)


class LoaderInterruptedAtItsStart:
    """A loader that a stop signal interrupts when its worker has started."""

    def __iter__(self) -> Iterator[int]:
        multiprocessing.Process(target=time.sleep, args=(60,)).start()
        raise KeyboardInterrupt


def test_an_interrupt_while_workers_start_ends_them() -> None:
    numbers = WorkerStatus(1).watch(LoaderInterruptedAtItsStart(), name_of=str, timeout_seconds=9.0)
    with pytest.raises(KeyboardInterrupt):
        next(numbers)
    for worker in multiprocessing.active_children():  # none is left where it has ended already
        worker.join(30)
        assert worker.exitcode == -signal.SIGKILL


def test_waits_for_a_slow_image() -> None:
    assert list(load_numbers(lambda: time.sleep(1.2 * POLL_SECONDS))) == list(range(8))


def test_restores_the_sigchld_handler() -> None:
    before = signal.getsignal(signal.SIGCHLD)
    items = load_numbers(lambda: None)
    next(items)
    assert signal.getsignal(signal.SIGCHLD) == before
    items.close()


def test_closing_ends_the_workers_even_if_one_hangs() -> None:
    items = load_numbers(lambda: time.sleep(600), special=1)
    assert next(items) == 0
    items.close()
    deadline = time.monotonic() + 30
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not multiprocessing.active_children()


def test_thread_map_releases_consumed_results() -> None:
    references: list[weakref.ref[torch.Tensor]] = []

    def make_tensor(number: int) -> torch.Tensor:
        references.append(weakref.ref(result := torch.tensor(number)))
        return result

    assert [int(result) for result in thread_map(make_tensor, range(100), 2)] == list(range(100))
    results = thread_map(make_tensor, range(100), 2)
    for _ in range(99):
        next(results)
    assert sum(reference() is not None for reference in references) < 10
    assert [int(result) for result in results] == [99]
