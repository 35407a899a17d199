"""Decode the images of a split in worker processes, and report the unreadable ones.

Workers return images through shared memory that is reused. A torch worker would allocate new shared
memory for each tensor that it sends; zeroing these pages would take the kernel half as long as the
decoding.
"""

# N images, M of them readable, H W pixels

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import zlib
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
    "DecodeOptions",
    "DecodedImage",
    "decode_batches",
    "decode_split",
    "drop_unreadable",
    "estimate_common_size",
    "estimate_decoded_bytes",
    "find_unreadable_images",
    "readable_indices",
    "sample_image_sizes",
]

TIMEOUT_SECONDS = 900.0
# Maximum images per batch of `decode_split`: sending one batch costs as much as decoding one image.
_MAX_CHUNK_IMAGES = 128
# Maximum decoded bytes per batch: a large image is its own batch, so that the progress bar moves.
_MAX_CHUNK_BYTES = 2**21
# Smaller splits decode in less than a second, without worker processes and cache files.
SMALL_SPLIT_BYTES = 2**24
_PREFETCH_BYTES = 2**24  # decoded bytes that a worker may be ahead, but at most 8 batches
_BATCH_BYTES_HEADROOM = 4  # reserve 4 times the mean: memory costs nothing until it is written
_MAX_LISTED = 20
_MAP_NORESERVE = 0x4000  # Linux, mmap(2); Python 3.13 has a name for it


@dataclass(frozen=True)
class DecodeOptions:
    """How to decode a split.

    Attributes:
        num_workers: decoding processes; a small split is decoded without any.
        unreadable: "stop" raises an error that lists all unreadable images; "quarantine" excludes
            them with a warning.
        progress: show a progress bar on standard error if it is a terminal.
        timeout_seconds: longest wait for a chunk of images before a worker counts as hanging.
    """

    num_workers: int
    unreadable: Literal["stop", "quarantine"]
    progress: bool
    timeout_seconds: float


class DecodedImage(NamedTuple):
    """A decoded image.

    Attributes:
        pixels: (H, W, 3) uint8, read-only.
        crc32: checksum of the pixels; 0 if none was requested.
    """

    pixels: NDArray[np.uint8]
    crc32: int


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
    """Return the size (H, W) of 16 sampled images if it is the same for all, else None."""
    sizes = set(sample_image_sizes(split, 16)[0])
    return sizes.pop() if len(sizes) == 1 else None


def estimate_decoded_bytes(split: Split) -> int:
    """Estimate the memory of the decoded images in bytes, from a sample."""
    pixels = [height * width for height, width in sample_image_sizes(split, 16)[0]]
    return int(np.mean([3 * each for each in pixels]) * len(split)) if pixels else 0


def decode_batches(
    split: Split,
    batches: Iterable[NDArray[np.int64]],
    *,
    num_workers: int,
    timeout_seconds: float,
    bytes_per_image: int,
    prefetch_factor: int = 3,
    with_checksums: bool = False,
) -> Generator[list[DecodedImage | DataError], None, None]:
    """Decode batches of images, in worker processes that work ahead.

    Args:
        batches: indices of the images in the split, consumed lazily.
        num_workers: worker processes; 0 to decode in this process.
        timeout_seconds: longest wait for a batch before a worker counts as hanging.
        bytes_per_image: estimated size of a decoded image in bytes.
        prefetch_factor: batches sent ahead to each worker, so that none waits for a slower one.
        with_checksums: compute the crc32 of each image.
    Yields: for each batch, in order, a list of its images, with a DataError in place of an
        unreadable one. The images are valid until the next batch is requested.
    Raises: DataError for an image that crashes the decoder; SetupError if a worker was killed or
        hangs.
    """
    remaining = iter(batches)
    first = next(remaining, None)
    if first is None:
        return
    batches = itertools.chain([first], remaining)

    def decode(index: int, buffer: NDArray[np.uint8] | None) -> DecodedImage | DataError:
        try:
            pixels = np.ascontiguousarray(split.decode(index, buffer))
        except DataError as error:
            return error
        return DecodedImage(pixels, zlib.crc32(pixels.data) if with_checksums else 0)

    if not num_workers:
        for indices in batches:
            yield [decode(index, None) for index in indices.tolist()]
        return

    status = WorkerStatus(num_workers)
    # One slot more than batches in progress, for the batch that the caller reads. A later batch may
    # have one image more than the first.
    num_slots = num_workers * prefetch_factor + 1
    slot_bytes = (len(first) + 1) * bytes_per_image * _BATCH_BYTES_HEADROOM
    slots = _allocate_shared_memory(num_slots * slot_bytes).reshape(num_slots, slot_bytes)

    def decode_batch(task: tuple[int, NDArray[np.int64]]) -> tuple[int, list[Any], list[Any]]:
        """Decode a batch into a slot of the shared memory.

        Returns: the slot; for each image its shape and checksum, or the image itself if it does not
            fit into the slot, or an error; and warnings.
        """
        slot, indices = task
        collect_warnings()
        free, sent = slots[slot], list[Any]()
        for index in indices.tolist():
            with status.decoding(index):
                image = decode(index, free)
            if isinstance(image, DecodedImage) and image.pixels.size <= free.size:
                pixels = image.pixels
                if not np.may_share_memory(pixels, free):
                    free[: pixels.size].reshape(pixels.shape)[...] = pixels
                free = free[pixels.size :]
                sent.append((pixels.shape, image.crc32))
            else:
                sent.append(image)  # pickled: an error, or an image that does not fit
        return slot, sent, collect_warnings()

    results = parallel_map(
        decode_batch,
        zip(itertools.cycle(range(num_slots)), batches),
        status=status,
        num_workers=num_workers,
        name_of=split.name_of,
        timeout_seconds=timeout_seconds,
        prefetch_factor=prefetch_factor,
    )
    with contextlib.closing(results):
        for slot, sent, warnings in results:
            for message, key in warnings:
                warn_once(message, key=key)
            images, start = list[DecodedImage | DataError](), 0
            for item in sent:
                if isinstance(item, DataError) or isinstance(item[0], np.ndarray):
                    images.append(item)
                else:
                    shape, checksum = item
                    end = start + math.prod(shape)
                    images.append(DecodedImage(slots[slot, start:end].reshape(shape), checksum))
                    start = end
            yield images


def _allocate_shared_memory(num_bytes: int) -> NDArray[np.uint8]:
    """Return zeros that forked processes share; pages take memory only when written.

    Raises: OSError on a system without overcommit that has too little memory.
    """
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=flags)
    return np.frombuffer(memory, dtype=np.uint8, count=num_bytes)


def decode_split(
    split: Split, options: DecodeOptions, *, with_checksums: bool = False
) -> Generator[DecodedImage | DataError, None, None]:
    """Decode every image of a split, in worker processes unless the split is small.

    Args:
        with_checksums: see `decode_batches`.
    Yields: each image in order, or a DataError in place of an unreadable one. An image is valid
        until the next one is requested.
    Raises: same as `decode_batches`.
    """
    num_bytes = estimate_decoded_bytes(split)
    bytes_per_image = num_bytes // max(len(split), 1) + 1
    chunk_size = min(max(_MAX_CHUNK_BYTES // bytes_per_image, 1), _MAX_CHUNK_IMAGES)
    chunks = (
        np.arange(first, min(first + chunk_size, len(split)))
        for first in range(0, len(split), chunk_size)
    )
    decoded = decode_batches(
        split,
        chunks,
        num_workers=options.num_workers if num_bytes >= SMALL_SPLIT_BYTES else 0,
        timeout_seconds=options.timeout_seconds,
        bytes_per_image=bytes_per_image,
        prefetch_factor=min(max(_PREFETCH_BYTES // (chunk_size * bytes_per_image), 2), 8),
        with_checksums=with_checksums,
    )
    bar = item_bar(len(split), label=split.name, shown=options.progress)
    with contextlib.closing(decoded), bar:
        for images in decoded:
            yield from images
            bar.update(len(images))


def _find_unreadable(split: Split, options: DecodeOptions) -> list[tuple[int, str]]:
    """Decode all images and discard the pixels.

    Returns: (index, message) of unreadable images, ascending.
    """
    failed = []
    with contextlib.closing(decode_split(split, options)) as images:
        for index, image in enumerate(images):
            if isinstance(image, DataError):
                if image.code == "data.changed":
                    raise image
                failed.append((index, str(image)))
    return failed


def find_unreadable_images(source: Source, num_workers: int) -> list[dict[str, Any]]:
    """Decode every image of every split and list the unreadable ones.

    Returns: a list of dicts with the keys "split", "index", "name", "class" and "error", the error
        message without the image name.
    """
    options = DecodeOptions(num_workers, "stop", progress=True, timeout_seconds=TIMEOUT_SECONDS)
    unreadable = []
    for split in source.splits.values():
        for index, message in _find_unreadable(split, options):
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


def readable_indices(split: Split, options: DecodeOptions) -> np.ndarray:
    """Find the readable images of a split: decode all images once and discard the pixels.

    Returns: (M,) int64, indices of the readable images, ascending.
    Raises: same as `decode_split` and `drop_unreadable`.
    """
    return drop_unreadable(split, _find_unreadable(split, options), options.unreadable)


def drop_unreadable(split: Split, failed: list[tuple[int, str]], unreadable: str) -> np.ndarray:
    """Exclude unreadable images with a warning, or raise an error that lists them.

    Args:
        failed: (index, message) of unreadable images, ascending.
        unreadable: "stop" to raise, "quarantine" to exclude.
    Returns: (M,) int64, indices of the readable images, ascending.
    Raises: DataError listing the unreadable images ("stop"), or naming a class with no image left.
    """
    if failed and unreadable == "stop":
        raise DataError(_unreadable_message(split, failed), code="data.unreadable")
    failed_indices = np.array([index for index, _ in failed], dtype=np.int64)
    readable = np.delete(np.arange(len(split)), failed_indices)
    counts = count_images_per_class(split.labels, 0)
    empty_classes = np.flatnonzero(
        (counts > 0) & (count_images_per_class(split.labels[readable], len(counts)) == 0)
    )
    if len(empty_classes):
        raise DataError(
            f"split '{split.name}': no readable image left in "
            f"{pluralize(len(empty_classes), 'class', 'classes')} (labels "
            f"{', '.join(str(label) for label in empty_classes[:5])}); the first of {len(failed)} "
            f"unreadable images: {failed[0][1]}",
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
