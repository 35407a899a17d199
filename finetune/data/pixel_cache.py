"""Cache of decoded images: read the pixels of a split from disk, or decode and store them first.

Each file in `pixels/` of the cache (see `cache_path`) holds one split, in the format of
`pixel_file`. Its name is a hash of everything the pixels depend on: the content of the split's
images, the decoder, the decode size, and how unreadable images are handled. One process decodes,
and others that need the same images wait for it; then all read one file, which the OS page cache
holds once. If the decoding process is stopped or killed, the next one continues with the missing
images.

Everything is verified before it is used: folder and file belong to this user, the table matches its
sha256 and the length of the file, and each image matches its checksum when it is first read. An
image that does not match is decoded again, and the next run writes a new file.
"""

# N images, M of them readable, H W pixels

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import PIL
import simplejpeg
from numpy.typing import NDArray
from PIL import features

from finetune import __version__
from finetune.cache import CacheFolder, UntrustedCacheError, cache_path
from finetune.data.decode import MAX_PIXELS
from finetune.data.decode_split import decode_split, drop_unreadable, estimate_common_size
from finetune.data.pixel_file import (
    DecodedImages,
    PixelFileWriter,
    PixelTable,
    Storage,
    read_pixel_table,
    write_pixel_table,
)
from finetune.data.shared_memory import allocate_shared_memory
from finetune.data.source import Split
from finetune.errors import DataError
from finetune.formatting import format_bytes
from finetune.log import logger, warn_once
from finetune.ranks import is_local_main_process

__all__ = ["DecodeOptions", "DecodedSplit", "decode_to_memory", "decode_with_cache"]

MAX_CACHE_BYTES = 64 * 2**30
_MAX_DISK_FRACTION = 0.5  # maximum share of the free space; the rest is for the run and other users
_HEAD_START_SECONDS = 3.0  # for the rank that shows the progress bar
_POLL_SECONDS = 0.25
_FILE_NAME = re.compile(r"[0-9a-f]{64}\.pixels")
_DISK_SPACE_HINT = "free space, or set FINETUNE_CACHE to another folder"


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


class DecodedSplit(NamedTuple):
    """The readable images of a split, and their indices in the split, (M,) ascending."""

    images: DecodedImages
    indices: NDArray[np.int64]


def decode_with_cache(
    split: Split, options: DecodeOptions, *, num_bytes: int
) -> DecodedSplit | str:
    """Read a split's decoded images from the cache; decode them into it first if needed.

    Args:
        num_bytes: expected size of the decoded images.
    Returns: the images; or, as a string, why they cannot be cached: the disk is too full, the
        folder is read-only or belongs to another user, or another process holds the lock.
    Raises: same as `decode_to_memory`.
    """
    path, key = cache_path("pixels"), _cache_key(split, options.unreadable)
    name = f"{key}.pixels"
    try:
        with CacheFolder(path) as folder:
            images = _open_cached(folder, key, split, options)
            if images is not None:
                return images
            _wait_for_first_rank(folder, key)
            with folder.lock(key, stall_timeout_seconds=options.timeout_seconds) as is_mine:
                images = _open_cached(folder, key, split, options)
                if images is not None:
                    return images
                if not is_mine:
                    return f"{path}: another process that writes this file has stalled"
                is_started = folder.list_files(key, ".tmp")  # its disk space is already reserved
                if not is_started and not folder.fits_on_disk(
                    num_bytes, max_fraction=_MAX_DISK_FRACTION
                ):
                    return (
                        f"{path}: too little space for {format_bytes(num_bytes)}; "
                        f"{_DISK_SPACE_HINT}"
                    )
                with folder.write(key, resume=True) as new_file:
                    table = _decode_to_storage(split, new_file.fd, options, num_bytes=num_bytes)
                    write_pixel_table(new_file.fd, table, key)
                    images = _build_decoded_split(new_file.fd, table, split, path / name)
                    if split.is_unchanged():
                        new_file.final_name = name
                    else:
                        logger.info(
                            f"split '{split.name}': not cached, because its images changed during "
                            "decoding"
                        )
                folder.evict(MAX_CACHE_BYTES, keep_name=name, pattern=_FILE_NAME)
                return images
    except UntrustedCacheError as error:
        return str(error)
    except OSError as error:
        cause = error.strerror or error
        return f"{path}: {cause} ({format_bytes(num_bytes)} needed); {_DISK_SPACE_HINT}"


def decode_to_memory(split: Split, options: DecodeOptions, *, num_bytes: int) -> DecodedSplit:
    """Decode a whole split once, into memory.

    Args:
        num_bytes: expected size of the decoded images.
    Raises: DataError for unreadable images, a class with no image left, too little memory, or an
        image that crashes the decoder; SetupError if a process was killed or hangs.
    """
    try:
        memory = _reserve_shared_memory(num_bytes)
        return _build_decoded_split(
            memory, _decode_to_storage(split, memory, options, num_bytes=num_bytes), split
        )
    except (OSError, MemoryError) as error:
        raise DataError(
            f"split '{split.name}': {format_bytes(num_bytes)} of decoded images do not fit in "
            "memory; set data.keep=none",
            code="data.memory",
        ) from error


def _reserve_shared_memory(num_bytes: int) -> NDArray[np.uint8]:
    """Reserve more shared memory than `num_bytes`, which is an estimate from a sample."""
    try:
        return allocate_shared_memory(16 * num_bytes + 2**30)
    except OSError:  # a system without overcommit
        return allocate_shared_memory(2 * num_bytes + 2**20)


def _decode_to_storage(
    split: Split, storage: Storage, options: DecodeOptions, *, num_bytes: int
) -> PixelTable:
    """Decode a split into a file or memory.

    Raises: OSError if the disk or memory is full; otherwise same as `decode_to_memory`.
    """
    writer = PixelFileWriter(
        storage, len(split), expected_size=estimate_common_size(split), num_bytes=num_bytes
    )
    missing = np.flatnonzero(~writer.existing())
    if len(missing) < len(split):
        warn_once(
            f"split '{split.name}': a run that was stopped decoded "
            f"{len(split) - len(missing):,} of {len(split):,} images; decoding the rest"
        )
    unreadable = decode_split(
        split.subset(missing),
        lambda position, image: writer.write(int(missing[position]), image),
        num_workers=options.num_workers,
        progress=options.progress,
        timeout_seconds=options.timeout_seconds,
    )
    failures = []
    for index in (int(missing[position]) for position, _ in unreadable):
        try:  # retry: a disk error may be temporary, but the cache excludes an image permanently
            writer.write(index, split.decode(index))
        except DataError as error:
            failures.append((index, str(error)))
    readable = drop_unreadable(split, failures, options.unreadable)
    # store causes without names: the same images may have other names next time
    causes = [(index, text.removeprefix(f"{split.name_of(index)}: ")) for index, text in failures]
    return PixelTable(writer.compact(readable), readable, causes)


def _open_cached(
    folder: CacheFolder, key: str, split: Split, options: DecodeOptions
) -> DecodedSplit | None:
    """Open the cached split if it exists; None if it does not, or is corrupt and thus removed."""
    name = f"{key}.pixels"
    try:
        file = folder.open(name)
    except FileNotFoundError:
        return None
    try:
        table = read_pixel_table(file, key, len(split))
        folder.mark_used(name)
        failed = [(index, f"{split.name_of(index)}: {cause}") for index, cause in table.failed]
        drop_unreadable(split, failed, options.unreadable)
        return _build_decoded_split(file, table, split, folder.path / name)
    except ValueError as error:
        logger.info(f"{folder.path / name}: is damaged ({error}); its images are decoded again")
        folder.remove(name)
        return None
    finally:
        os.close(file)


def _build_decoded_split(
    storage: Storage, table: PixelTable, split: Split, path: Path | None = None
) -> DecodedSplit:
    """Build the `DecodedSplit` of a file or memory; decode an image again if its checksum fails.

    Args:
        path: path of the cache file; None for images in memory.
    """

    is_removed = path is None

    def decode_again(position: int) -> NDArray[np.uint8]:
        nonlocal is_removed
        index = int(table.indices[position])
        if path is not None and not is_removed:
            is_removed = True  # only once: later, another run may have written a new file here
            warn_once(
                f"{path}: is damaged ({split.name_of(index)} does not match its checksum); such "
                "images are decoded again, and the next run writes a new file"
            )
            with contextlib.suppress(OSError), CacheFolder(path.parent) as folder:
                folder.remove(path.name)
        image = split.decode(index)
        if image.shape != (table.rows["height"][position], table.rows["width"][position], 3):
            raise DataError(
                f"{split.name_of(index)}: its size changed since it was decoded; images must not "
                "change during a run; restore it and start again",
                code="data.changed",
            )
        return image

    return DecodedSplit(DecodedImages(storage, table.rows, decode_again), table.indices)


def _cache_key(split: Split, unreadable: str) -> str:
    """Return the cache key: a hash of everything that the pixels depend on."""
    jpeg = features.version("libjpeg_turbo") or features.version("jpg")
    decoder = [__version__, PIL.__version__, jpeg, simplejpeg.__version__, MAX_PIXELS]
    parts = {
        "data": split.fingerprint,
        "unreadable": unreadable,
        "decoder": decoder,
        "size": split.decode_size,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _wait_for_first_rank(folder: CacheFolder, key: str) -> None:
    """Let local rank 0, which shows the progress bar, start first; others wait up to 3 seconds."""
    if not is_local_main_process():
        deadline = time.monotonic() + _HEAD_START_SECONDS
        while time.monotonic() < deadline and not folder.has_file(key):
            time.sleep(_POLL_SECONDS)
