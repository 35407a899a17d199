"""Compare the speed of data-loading workers with that of processes that only decode."""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetune.data.pixel_store import PixelStore
from finetune.data.source import Split
from finetune.errors import DataError

__all__ = ["input_rates"]


def input_rates(
    split: Split,
    *,
    workers: int,
    batch_size: int,
    num_images: int,
    repeats: int = 3,
    seconds: float = 12.0,
) -> dict[str, Any]:
    """Measure the speed of workers that load data without a pixel cache, and of decoding alone.

    Each turn measures both with the same images in the same order: first, `workers` processes
    decode the images and drop them; then, `workers` data-loading workers decode and return them.

    Args:
        split: split to read, without unreadable images.
        workers: number of processes in both measurements, at least 1.
        batch_size: images per batch.
        num_images: minimum number of images per turn.
        repeats: number of turns.
        seconds: approximate duration of decoding per turn; it should be much longer than the time
            to start the workers.
    Returns: a dict with keys "decode" and "workers" (images per second of every turn) and "share"
        (the median of "workers" divided by that of "decode").
    Raises: DataError if an image cannot be read.
    """
    every = np.random.default_rng(0).permutation(len(split))
    started = time.perf_counter()
    _decode_only(split, np.resize(every, num_images), workers, batch_size)
    lasting = seconds / (time.perf_counter() - started) * num_images
    order = np.resize(every, max(num_images, int(lasting)))
    rates: dict[str, list[float]] = {"decode": [], "workers": []}
    for _ in range(repeats):
        for name, turn in (("decode", _decode_only), ("workers", _load_with_workers)):
            started = time.perf_counter()
            turn(split, order, workers, batch_size)
            rates[name].append(len(order) / (time.perf_counter() - started))
    share = statistics.median(rates["workers"]) / statistics.median(rates["decode"])
    return {**rates, "share": share}


def _decode_only(split: Split, order: NDArray[np.int64], workers: int, batch_size: int) -> None:
    def drop(part: NDArray[np.int64]) -> None:
        try:
            for index in part.tolist():
                split.decode(index)
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
            "data.source: an image cannot be decoded; find it with: finetune data scan SOURCE",
            code="data.unreadable",
        )


def _load_with_workers(
    split: Split, order: NDArray[np.int64], workers: int, batch_size: int
) -> None:
    batches = [order[first : first + batch_size] for first in range(0, len(order), batch_size)]
    with contextlib.closing(
        PixelStore(split, None, num_workers=workers).read_batches(batches)
    ) as read:
        for _ in read:
            pass
