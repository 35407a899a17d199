"""Measure the input: batches from workers, beside processes that only decode."""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetune.data.image_store import Store
from finetune.data.source import Split
from finetune.errors import DataError

__all__ = ["input_rates"]


def input_rates(
    split: Split,
    *,
    workers: int,
    batch_size: int,
    images: int,
    repeats: int = 3,
    seconds: float = 12.0,
) -> dict[str, Any]:
    """Read images as training does when none are kept, and only decode them.

    The two take turns, the same images in the same order: first as many processes as there are
    workers decode and drop them, then the workers decode and hand them over.

    Args:
        split: all of it readable.
        workers: processes, at least 1.
        batch_size: images handed over at once.
        images: how many each of them reads in a turn, at least.
        repeats: turns.
        seconds: that decoding takes in a turn, about: training starts its workers once.
    Returns: "decode" and "workers", each images a second in every turn; "share", the medians'
        ratio.
    Raises: DataError if an image cannot be read.
    """
    every = np.random.default_rng(0).permutation(len(split))
    started = time.perf_counter()
    _decode(split, np.resize(every, images), workers, batch_size)
    lasting = seconds / (time.perf_counter() - started) * images
    order = np.resize(every, max(images, int(lasting)))
    rates: dict[str, list[float]] = {"decode": [], "workers": []}
    for _ in range(repeats):
        for name, turn in (("decode", _decode), ("workers", _hand_over)):
            started = time.perf_counter()
            turn(split, order, workers, batch_size)
            rates[name].append(len(order) / (time.perf_counter() - started))
    share = statistics.median(rates["workers"]) / statistics.median(rates["decode"])
    return {**rates, "share": share}


def _decode(split: Split, order: NDArray[np.int64], workers: int, batch_size: int) -> None:
    def drop(part: NDArray[np.int64]) -> None:
        try:
            for index in part.tolist():
                split.read(index)
        except DataError:
            raise SystemExit(DataError.exit_code) from None

    fork = multiprocessing.get_context("fork")
    processes = [
        fork.Process(target=drop, args=(order[first::workers],), daemon=True)
        for first in range(workers)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise DataError(
            "an image cannot be decoded; name it with: finetune data scan SOURCE",
            code="data.unreadable",
        )


def _hand_over(split: Split, order: NDArray[np.int64], workers: int, batch_size: int) -> None:
    batches = [order[first : first + batch_size] for first in range(0, len(order), batch_size)]
    with contextlib.closing(Store(split, None, workers=workers).read_all(batches)) as read:
        for _ in read:
            pass
