"""Decode every image of a split in parallel, find unreadable images, and estimate image sizes."""

# N images, H W pixels

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

from finetune.data.class_balance import count_images_per_class
from finetune.data.source import Source, Split
from finetune.data.worker_pool import WorkerStatus, parallel_map
from finetune.errors import DataError
from finetune.formatting import pluralize
from finetune.log import collect_warnings, warn_once
from finetune.progress import item_bar

__all__ = [
    "SMALL_SPLIT_BYTES",
    "TIMEOUT_SECONDS",
    "decode_split",
    "drop_unreadable",
    "estimate_common_size",
    "estimate_decoded_bytes",
    "find_unreadable_images",
    "readable_indices",
    "sample_image_sizes",
]

TIMEOUT_SECONDS = 900.0
# Maximum images per task: sending a task costs about as much as decoding a small image.
_MAX_CHUNK_IMAGES = 128
# Maximum decoded bytes per task: a large image is its own task, so that the progress bar moves.
_MAX_CHUNK_BYTES = 2**21
# Smaller splits decode in less than a second, without worker processes and cache files.
SMALL_SPLIT_BYTES = 2**24
# Queued tasks per worker, so that no worker waits for its next task.
_PREFETCH_FACTOR = 4
_MAX_LISTED = 20


class _TaskResult(NamedTuple):
    """Result of a task.

    Attributes:
        failed: (index, message) of unreadable images.
        warnings: (message, key) of the warnings that decoding logged.
        error: errno of a failed write; 0 if none failed.
    """

    failed: list[tuple[int, str]]
    warnings: list[tuple[str, str | None]]
    error: int = 0


def sample_image_sizes(split: Split, num_images: int) -> tuple[list[tuple[int, int]], int]:
    """Decode evenly spaced images; return their sizes (H, W), and the number of unreadable ones."""
    indices = np.unique(np.linspace(0, len(split) - 1, min(num_images, len(split))).astype(int))
    sizes, unreadable = [], 0
    for index in indices.tolist():
        try:
            height, width = split.decode(index).shape[:2]
            sizes.append((height, width))
        except DataError:
            unreadable += 1
    return sizes, unreadable


def estimate_common_size(split: Split) -> tuple[int, int] | None:
    """Return the size (H, W) that all images of a sample have; None if their sizes differ."""
    sizes = set(sample_image_sizes(split, 16)[0])
    return sizes.pop() if len(sizes) == 1 else None


def estimate_decoded_bytes(split: Split) -> int:
    """Estimate the memory of the decoded images in bytes, from a sample."""
    pixels = [height * width for height, width in sample_image_sizes(split, 16)[0]]
    return int(np.mean([3 * each for each in pixels]) * len(split)) if pixels else 0


def decode_split(
    split: Split,
    write_image: Callable[[int, np.ndarray], None] | None = None,
    *,
    num_workers: int,
    progress: bool,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> list[tuple[int, str]]:
    """Decode every image of a split, in worker processes unless the split is small.

    Args:
        write_image: function that stores an image, given its index and the pixels, (H, W, 3)
            uint8. Runs in the workers, in any order, so it must write to shared memory or a file.
            None to discard the images.
        num_workers: worker processes; 0 to decode in this process.
        timeout_seconds: longest wait for a chunk of images before a worker counts as hanging.
    Returns: (index, message) of unreadable images, ascending.
    Raises: OSError if `write_image` does; DataError for an image that crashes the decoder;
        SetupError if a worker was killed or hangs.
    """
    mean_bytes = estimate_decoded_bytes(split) / max(len(split), 1)
    chunk_size = int(min(max(_MAX_CHUNK_BYTES // max(mean_bytes, 1), 1), _MAX_CHUNK_IMAGES))
    status = WorkerStatus(num_workers)

    def decode_some(task: int) -> _TaskResult:
        get_warnings = collect_warnings if status.is_worker else list[tuple[str, str | None]]
        get_warnings()
        failed = []
        for index in range(task * chunk_size, min((task + 1) * chunk_size, len(split))):
            try:
                with status.decoding(index):
                    image = split.decode(index)
            except DataError as error:
                failed.append((index, str(error)))
                continue
            try:
                if write_image is not None:
                    write_image(index, image)
            except OSError as error:  # torch's DataLoader would lose the errno
                return _TaskResult(failed, get_warnings(), error.errno or errno.EIO)
        return _TaskResult(failed, get_warnings())

    num_tasks = -(-len(split) // chunk_size)
    if num_workers and mean_bytes * len(split) >= SMALL_SPLIT_BYTES:
        pool_options: dict[str, Any] = {
            "in_order": False,
            "prefetch_factor": _PREFETCH_FACTOR,
            "name_of": split.name_of,
        }
        pool_options |= {
            "status": status,
            "num_workers": num_workers,
            "timeout_seconds": timeout_seconds,
        }
        results = parallel_map(decode_some, range(num_tasks), **pool_options)
    else:
        results = (decode_some(task) for task in range(num_tasks))
    bar = item_bar(len(split), label=split.name, shown=progress)
    failed: list[tuple[int, str]] = []
    with contextlib.closing(results), bar:
        for chunk, result in enumerate(results):
            for message, key in result.warnings:
                warn_once(message, key=key)
            if result.error:
                raise OSError(result.error, os.strerror(result.error))
            failed += result.failed
            bar.update(min(chunk_size, len(split) - chunk * chunk_size))
    return sorted(failed)


def find_unreadable_images(
    source: Source, num_workers: int = 2, *, progress: bool = True
) -> list[dict[str, Any]]:
    """Decode every image of every split and list the unreadable ones.

    Returns: a list of dicts with the keys "split", "index", "name", "class" and "error", the error
        message without the image name.
    """
    unreadable = []
    for split in source.splits.values():
        for index, message in decode_split(split, num_workers=num_workers, progress=progress):
            name = split.name_of(index)
            unreadable.append(
                {
                    "split": split.name,
                    "index": index,
                    "name": name,
                    "class": "|".join(source.class_names[k] for k in split.class_indices(index)),
                    "error": message.removeprefix(f"{name}: "),
                }
            )
    return unreadable


def readable_indices(
    split: Split,
    *,
    num_workers: int = 2,
    unreadable: Literal["stop", "quarantine"] = "stop",
    progress: bool = True,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> np.ndarray:
    """Find the readable images of a split: decode all images once and discard the pixels.

    Args: see `decode_split` and `drop_unreadable`.
    Returns: (M,) int64, indices of the readable images, ascending.
    Raises: same as `decode_split` and `drop_unreadable`.
    """
    failed = decode_split(
        split, num_workers=num_workers, progress=progress, timeout_seconds=timeout_seconds
    )
    return drop_unreadable(split, failed, unreadable)


def drop_unreadable(split: Split, failed: list[tuple[int, str]], unreadable: str) -> np.ndarray:
    """Exclude unreadable images with a warning, or raise an error that lists them.

    Args:
        failed: (index, message) of unreadable images, ascending.
        unreadable: "stop" to raise, "quarantine" to exclude.
    Returns: (M,) int64, indices of the readable images, ascending.
    Raises: DataError listing the unreadable images, or naming a class with no image left.
    """
    if failed and unreadable == "stop":
        raise DataError(_unreadable_message(split, failed), code="data.unreadable")
    readable = np.setdiff1d(np.arange(len(split)), [index for index, _ in failed]).astype(np.int64)
    counts = count_images_per_class(split.labels, 0)
    empty_classes = np.flatnonzero(
        (counts > 0) & (count_images_per_class(split.labels[readable], len(counts)) == 0)
    )
    if len(empty_classes):
        raise DataError(
            f"split '{split.name}': no readable image left in "
            f"{pluralize(len(empty_classes), 'class', 'classes')} (labels "
            f"{', '.join(str(label) for label in empty_classes[:5])}); the first of {len(failed)} "
            f"unreadable: {failed[0][1]}",
            code="data.unreadable",
        )
    if failed:
        warn_once(_unreadable_message(split, failed, quarantined=True))
    return readable


def _unreadable_message(
    split: Split, failed: list[tuple[int, str]], *, quarantined: bool = False
) -> str:
    lines = "\n  ".join(message for _, message in failed[:_MAX_LISTED])
    more = f"\n  and {len(failed) - _MAX_LISTED} more" if len(failed) > _MAX_LISTED else ""
    head = f"split '{split.name}': {len(failed)} of {len(split)} images cannot be read"
    if quarantined:
        return f"{head}; they are left out (data.unreadable=quarantine):\n  {lines}{more}"
    hint = "fix them (finetune data scan SOURCE lists all)"
    return f"{head}:\n  {lines}{more}\n{hint}, or leave them out with data.unreadable=quarantine"
