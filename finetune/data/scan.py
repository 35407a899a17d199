"""Look at a whole data set: what is in it, what cannot be read, and all of it decoded at once."""

# N images, H W pixels

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

from finetune.data.decode import counted, notice
from finetune.data.sources import Source, Split
from finetune.errors import DataError

__all__ = ["decoded_bytes", "info", "load_images", "readable", "scan"]

_CHUNK = 128  # images per task: handing over a small image costs as much as decoding it
_SMALL_PIXELS = 64 * 64  # below, threads mostly wait for Python's lock: two are slower than one
_LISTED = 20


def _sample(split: Split, number: int) -> tuple[list[tuple[int, int]], int]:
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
        "sampled", "unreadable_in_sample", "min_size", "max_size": [H, W] or None}}}. Smallest and
        largest are taken for height and width each. Ready for JSON.
    """
    splits = {}
    for name, split in source.splits.items():
        sizes, unreadable = _sample(split, 64)
        counts = np.bincount(split.labels, minlength=len(source.class_names))
        splits[name] = {
            "images": len(split),
            "per_class": counts.tolist(),
            "sampled": len(sizes) + unreadable,
            "unreadable_in_sample": unreadable,
            "min_size": np.min(sizes, axis=0).tolist() if sizes else None,
            "max_size": np.max(sizes, axis=0).tolist() if sizes else None,
        }
    return {
        "name": source.name,
        "description": source.description,
        "class_names": source.class_names,
        "splits": splits,
    }


def decoded_bytes(split: Split) -> int:
    """Memory in bytes that the decoded images need, estimated from a sample."""
    sizes, _ = _sample(split, 16)
    return (
        int(np.mean([height * width * 3 for height, width in sizes]) * len(split)) if sizes else 0
    )


def _visit(
    split: Split, keep: Callable[[int, np.ndarray], None], *, workers: int, progress: bool
) -> list[tuple[int, str]]:
    """Decode every image of a split in threads.

    Args:
        keep: receives index and (H, W, 3) uint8 of each image that could be read, in any order.
        workers: threads; PIL decodes without holding Python's lock. Small images get one thread.
    Returns: (index, message) of those that could not be read, in order.
    """

    def decode_some(start: int) -> list[tuple[int, str]]:
        failed = []
        for index in range(start, min(start + _CHUNK, len(split))):
            try:
                keep(index, split.read(index))
            except DataError as error:
                failed.append((index, str(error)))
        return failed

    # disable=None: no bar where standard error is not a terminal
    bar = tqdm(total=len(split), desc=split.name, unit="image", disable=None if progress else True)
    sizes, _ = _sample(split, 4)
    small = all(height * width <= _SMALL_PIXELS for height, width in sizes)
    pool = ThreadPoolExecutor(1 if small else max(1, workers))
    failed: list[tuple[int, str]] = []
    try:
        for number, some in enumerate(pool.map(decode_some, range(0, len(split), _CHUNK))):
            failed += some
            bar.update(min(_CHUNK, len(split) - number * _CHUNK))
    finally:
        pool.shutdown(cancel_futures=True)  # at Ctrl-C too: leave what has not begun
        bar.close()
    return failed


def scan(source: Source, workers: int = 2, *, progress: bool = True) -> list[dict[str, Any]]:
    """Decode every image of every split and list those that cannot be read.

    Returns: [{"split", "index", "name", "class", "error"}], empty when all is well; the error does
        not repeat the name.
    """
    unreadable = []
    for split in source.splits.values():
        found = _visit(split, lambda index, image: None, workers=workers, progress=progress)
        for index, message in found:
            name = split.name_of(index)
            unreadable.append(
                {
                    "split": split.name,
                    "index": index,
                    "name": name,
                    "class": source.class_names[split.labels[index]],
                    "error": message.removeprefix(f"{name}: "),
                }
            )
    return unreadable


def load_images(
    split: Split,
    *,
    workers: int = 2,
    unreadable: Literal["stop", "quarantine"] = "stop",
    progress: bool = True,
) -> tuple[np.ndarray | list[np.ndarray], np.ndarray]:
    """Decode a whole split once.

    Args:
        workers: threads.
        unreadable: what to do about images that cannot be read: stop, naming them all, or leave
            them out, saying so.
        progress: a bar on standard error where that is a terminal.
    Returns: images, (M, H, W, 3) uint8 if all are of one size, else M arrays (H, W, 3); and the
        (M,) int64 indices into the split that they belong to, ascending.
    Raises: DataError: unreadable images, a class with no image left, or not enough memory.
    """
    store = _Store(split)
    failed = _visit(split, store.keep, workers=workers, progress=progress)
    kept = _without(split, failed, unreadable)
    return store.images(kept), kept


def readable(
    split: Split,
    *,
    workers: int = 2,
    unreadable: Literal["stop", "quarantine"] = "stop",
    progress: bool = True,
) -> np.ndarray:
    """Decode a whole split once and keep nothing.

    Args: as for `load_images`.
    Returns: (M,) int64, the indices of the images that can be read, ascending.
    Raises: DataError: as `load_images`.
    """
    failed = _visit(split, lambda index, image: None, workers=workers, progress=progress)
    return _without(split, failed, unreadable)


def _without(split: Split, failed: list[tuple[int, str]], unreadable: str) -> np.ndarray:
    """Indices of the images that did not fail; stop or say so when some did."""
    if failed and unreadable == "stop":
        raise DataError(_unreadable_message(split, failed))
    kept = np.setdiff1d(np.arange(len(split)), [index for index, _ in failed]).astype(np.int64)
    emptied = np.setdiff1d(split.labels, split.labels[kept])
    if len(emptied):
        raise DataError(
            f"split '{split.name}': no readable image is left of "
            f"{counted(len(emptied), 'class', 'classes')} (labels "
            f"{', '.join(str(label) for label in emptied[:5])}); the first of {len(failed)} "
            f"unreadable: {failed[0][1]}"
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


class _Store:
    """Decoded images: one array as long as all have one size, so that nothing is held twice."""

    def __init__(self, split: Split) -> None:
        sizes = set(_sample(split, 16)[0])
        self._odd: dict[int, np.ndarray] = {}
        self._array: np.ndarray | None = None
        if len(sizes) == 1:
            shape = (len(split), *sizes.pop(), 3)
            try:
                self._array = np.empty(shape, dtype=np.uint8)
            except MemoryError:
                raise DataError(
                    f"split '{split.name}': {np.prod(shape) / 2**30:.0f} GiB of decoded images do "
                    "not fit in memory; set data.keep: none"
                ) from None

    def keep(self, index: int, image: np.ndarray) -> None:
        """Store one image; called from several threads, never twice for one index."""
        if self._array is not None and image.shape == self._array.shape[1:]:
            self._array[index] = image
        else:
            self._odd[index] = image

    def images(self, kept: np.ndarray) -> np.ndarray | list[np.ndarray]:
        """The images with these indices, in one array if they have one size."""
        if self._array is not None and not self._odd:
            return self._array if len(kept) == len(self._array) else self._array[kept]
        array = self._array
        return [
            self._odd[index] if array is None or index in self._odd else array[index]
            for index in kept.tolist()
        ]
