"""Look at every image of a data set: what is in it, and what cannot be read."""

# N images, H W pixels

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

from finetune.console import terminal_bar
from finetune.data.notices import notice, relay_notices
from finetune.data.sampling import class_counts, imbalance
from finetune.data.source import Source, Split
from finetune.data.worker_pool import WorkerStatus, spread
from finetune.errors import DataError
from finetune.text import counted

__all__ = [
    "SMALL_BYTES",
    "TIMEOUT_SECONDS",
    "decoded_bytes",
    "expected_size",
    "info",
    "readable",
    "sample_sizes",
    "scan",
    "visit",
    "without_unreadable",
]

TIMEOUT_SECONDS = 900.0
_CHUNK = 128  # images per task: handing one over costs about as much as decoding a small image
_CHUNK_BYTES = 2**21  # of pixels per task: large images come one at a time, with their progress
# Below, processes and files cost more than they save: it is less than a second of decoding.
SMALL_BYTES = 2**24
_AHEAD = 4  # tasks that wait for each process: none of them is idle while another hands over
_LISTED = 20


class _Done(NamedTuple):
    """A task's (index, message) of unreadable images, its notices, and the disk's refusal or 0."""

    failed: list[tuple[int, str]]
    notices: list[tuple[str, str | None]]
    error: int = 0


def sample_sizes(split: Split, number: int) -> tuple[list[tuple[int, int]], int]:
    """Sizes (H, W) of some images spread over a split, and how many of them could not be read."""
    indices = np.unique(np.linspace(0, len(split) - 1, min(number, len(split))).astype(int))
    sizes, unreadable = [], 0
    for index in indices.tolist():
        try:
            height, width = split.read(index).shape[:2]
            sizes.append((height, width))
        except DataError:
            unreadable += 1
    return sizes, unreadable


def info(source: Source) -> dict[str, Any]:
    """Counts and classes, and the image sizes of a sample.

    Returns: {"name", "description", "class_names", "splits": {split: {"images", "per_class": (K,),
        "without_label" (images, where they may have several), "sampled", "unreadable_in_sample",
        "min_size", "max_size": [H, W] or None}}}, and "imbalance", a line, if a class is rare in
        training. Smallest and largest are taken for height and width each. Ready for JSON.
    """
    splits = {}
    for name, split in source.splits.items():
        sizes, unreadable = sample_sizes(split, 64)
        counts = class_counts(split.labels, len(source.class_names))
        splits[name] = {
            "images": len(split),
            "per_class": counts.tolist(),
            **(
                {"without_label": int((split.labels.sum(axis=1) == 0).sum())}
                if split.is_multilabel
                else {}
            ),
            "sampled": len(sizes) + unreadable,
            "unreadable_in_sample": unreadable,
            "min_size": np.min(sizes, axis=0).tolist() if sizes else None,
            "max_size": np.max(sizes, axis=0).tolist() if sizes else None,
        }
    train = np.array(splits.get("train", {}).get("per_class", [0]))
    rare = imbalance(train, source.class_names)
    return {
        "name": source.name,
        "description": source.description,
        "class_names": source.class_names,
        "splits": splits,
        **({"imbalance": rare} if rare else {}),
    }


def expected_size(split: Split) -> tuple[int, int] | None:
    """The size (H, W) that all images of a sample have; None where they differ."""
    sizes = set(sample_sizes(split, 16)[0])
    return sizes.pop() if len(sizes) == 1 else None


def decoded_bytes(split: Split) -> int:
    """Memory in bytes that the decoded images need, estimated from a sample."""
    pixels = [height * width for height, width in sample_sizes(split, 16)[0]]
    return int(np.mean([3 * each for each in pixels]) * len(split)) if pixels else 0


def visit(
    split: Split,
    keep: Callable[[int, np.ndarray], None] | None = None,
    *,
    workers: int,
    progress: bool,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> list[tuple[int, str]]:
    """Decode every image of a split, in processes where that pays.

    Args:
        keep: receives index and (H, W, 3) uint8 of each image that could be read, in any order and
            in other processes; what it keeps must be shared with them. None to drop them.
        workers: processes; 0 for none.
        timeout_seconds: for which some images are waited for before a process counts as hanging.
    Returns: (index, message) of those that could not be read, in order.
    Raises: OSError where `keep` does; DataError for an image that crashes the decoder; SetupError
        if a process was killed or hangs.
    """
    mean = decoded_bytes(split) / max(len(split), 1)
    chunk = int(min(max(_CHUNK_BYTES // max(mean, 1), 1), _CHUNK))
    status = WorkerStatus(workers)

    def decode_some(task: int) -> _Done:
        relay = relay_notices if status.is_worker else list[tuple[str, str | None]]
        relay()
        failed = []
        for index in range(task * chunk, min((task + 1) * chunk, len(split))):
            try:
                with status.decoding(index):
                    image = split.read(index)
            except DataError as error:
                failed.append((index, str(error)))
                continue
            try:
                if keep is not None:
                    keep(index, image)
            except OSError as error:  # torch would hand over its text alone
                return _Done(failed, relay(), error.errno or errno.EIO)
        return _Done(failed, relay())

    num_tasks = -(-len(split) // chunk)
    if workers and mean * len(split) >= SMALL_BYTES:
        order: dict[str, Any] = {"in_order": False, "ahead": _AHEAD, "name_of": split.name_of}
        order |= {"status": status, "workers": workers, "timeout_seconds": timeout_seconds}
        done = spread(decode_some, range(num_tasks), **order)
    else:
        done = (decode_some(task) for task in range(num_tasks))
    bar = terminal_bar(len(split), label=split.name, shown=progress)
    failed: list[tuple[int, str]] = []
    with contextlib.closing(done), bar:
        for number, some in enumerate(done):
            for message, key in some.notices:
                notice(message, key=key)
            if some.error:
                raise OSError(some.error, os.strerror(some.error))
            failed += some.failed
            bar.update(min(chunk, len(split) - number * chunk))
    return sorted(failed)


def scan(source: Source, workers: int = 2, *, progress: bool = True) -> list[dict[str, Any]]:
    """Decode every image of every split and list those that cannot be read.

    Returns: [{"split", "index", "name", "class", "error"}], empty when all is well; the error does
        not repeat the name.
    """
    unreadable = []
    for split in source.splits.values():
        for index, message in visit(split, workers=workers, progress=progress):
            name = split.name_of(index)
            unreadable.append(
                {
                    "split": split.name,
                    "index": index,
                    "name": name,
                    "class": "|".join(source.class_names[k] for k in split.classes_of(index)),
                    "error": message.removeprefix(f"{name}: "),
                }
            )
    return unreadable


def readable(
    split: Split,
    *,
    workers: int = 2,
    unreadable: Literal["stop", "quarantine"] = "stop",
    progress: bool = True,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> np.ndarray:
    """Decode a whole split once, and keep nothing.

    Args: as for `visit` and `without_unreadable`.
    Returns: (M,) int64, the indices of the images that can be read, ascending.
    Raises: as `visit` and `without_unreadable`.
    """
    failed = visit(split, workers=workers, progress=progress, timeout_seconds=timeout_seconds)
    return without_unreadable(split, failed, unreadable)


def without_unreadable(split: Split, failed: list[tuple[int, str]], unreadable: str) -> np.ndarray:
    """Leave out the images that could not be read, or stop.

    Args:
        failed: (index, message) in order.
        unreadable: "stop" or "quarantine".
    Returns: (M,) int64, the indices of the others, ascending. A notice lists what is left out.
    Raises: DataError naming them all, or a class with no image left.
    """
    if failed and unreadable == "stop":
        raise DataError(_unreadable_message(split, failed), code="data.unreadable")
    kept = np.setdiff1d(np.arange(len(split)), [index for index, _ in failed]).astype(np.int64)
    before = class_counts(split.labels, 0)
    emptied = np.flatnonzero((before > 0) & (class_counts(split.labels[kept], len(before)) == 0))
    if len(emptied):
        raise DataError(
            f"split '{split.name}': no readable image is left of "
            f"{counted(len(emptied), 'class', 'classes')} (labels "
            f"{', '.join(str(label) for label in emptied[:5])}); the first of {len(failed)} "
            f"unreadable: {failed[0][1]}",
            code="data.unreadable",
        )
    if failed:
        notice(_unreadable_message(split, failed, quarantined=True))
    return kept


def _unreadable_message(
    split: Split, failed: list[tuple[int, str]], *, quarantined: bool = False
) -> str:
    listed = "\n  ".join(message for _, message in failed[:_LISTED])
    rest = f"\n  and {len(failed) - _LISTED} more" if len(failed) > _LISTED else ""
    head = f"split '{split.name}': {len(failed)} of {len(split)} images cannot be read"
    if quarantined:
        return f"{head}; they are left out (data.unreadable: quarantine):\n  {listed}{rest}"
    hint = "mend them (all are listed by: finetune data scan SOURCE)"
    return f"{head}:\n  {listed}{rest}\n{hint}, or leave them out with data.unreadable: quarantine"
