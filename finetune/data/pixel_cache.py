"""Cache of decoded images: read the pixels of a split from disk, or decode and store them first.

Each file in `pixels/` of the cache (see `cache_path`) holds one split, in the format of
`pixel_file`. Its name is a hash of everything the pixels depend on: the content of the split's
images, the decoder, the decode size, and how unreadable images are handled. One process decodes and
writes the file, and others that need the same images wait for it; then all read one file, which the
OS page cache holds once. If the writing process is stopped or killed, the next process starts
again with the first image.

Everything is verified before it is used: folder and file belong to this user, the table matches its
sha256, and each image matches its checksum when it is first read. An image that does not match is
decoded again, and the next run writes a new file.
"""

# N images, M of them readable, H W pixels

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
import zlib
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from finetune import __version__
from finetune.cache import WRITE_BUFFER_BYTES, CacheFolder, UntrustedCacheError, cache_path
from finetune.data.decode import decoder_versions
from finetune.data.decode_split import (
    DecodedImage,
    DecodeOptions,
    decode_split,
    drop_unreadable,
)
from finetune.data.pixel_file import (
    DecodedImages,
    PixelTable,
    read_pixel_table,
    write_pixel_table,
)
from finetune.data.source import Split
from finetune.errors import DataError, SetupError
from finetune.formatting import format_bytes
from finetune.log import logger, warn_once
from finetune.model_checksums import json_sha256
from finetune.ranks import is_local_main_process

__all__ = ["DecodedSplit", "decode_to_memory", "decode_with_cache"]

MAX_CACHE_BYTES = 64 * 2**30
_MAX_DISK_FRACTION = 0.5  # maximum share of the free space; the rest is for the run and other users
_HEAD_START_SECONDS = 1.0  # for the rank that shows the progress bar
_FORMAT_VERSION = 4  # of the pixel file
_FILE_NAME = re.compile(r"[0-9a-f]{64}\.pixels")
_DISK_SPACE_HINT = "free space, or set FINETUNE_CACHE to another folder"


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
    Returns: the images; or, as a string, why they cannot be cached: the disk is too full, or the
        folder is read-only or belongs to another user.
    Raises: DataError for unreadable images (if `options.unreadable` is "stop"), a class with no
        image left, images that change while they are decoded, or an image that crashes the decoder;
        SetupError if a worker was killed or hangs.
    """
    path, key = cache_path("pixels"), _cache_key(split, options.unreadable)
    name = f"{key}.pixels"
    try:
        with CacheFolder(path) as folder:
            if (cached := _open_cached(folder, name, split, options)) is not None:
                return cached
            if not is_local_main_process():
                time.sleep(_HEAD_START_SECONDS)
            with folder.lock(key):
                if (cached := _open_cached(folder, name, split, options)) is not None:
                    return cached  # another process has written it
                folder.remove_partial_files(key)  # of killed processes
                if not folder.fits_on_disk(num_bytes, max_fraction=_MAX_DISK_FRACTION):
                    return (
                        f"{path}: too little space for {format_bytes(num_bytes)}; "
                        f"{_DISK_SPACE_HINT}"
                    )
                with folder.write(name) as file:
                    table = _write_images(file, split, options)
                    write_pixel_table(file, table, key)
                    file.flush()
                    decoded = _build_decoded_split(file, table, split, path / name)
                folder.evict(MAX_CACHE_BYTES, keep_name=name, pattern=_FILE_NAME)
                return decoded
    except UntrustedCacheError as error:
        return str(error)
    except OSError as error:
        cause = error.strerror or error
        return f"{path}: {cause} ({format_bytes(num_bytes)} needed); {_DISK_SPACE_HINT}"


def decode_to_memory(split: Split, options: DecodeOptions, *, num_bytes: int) -> DecodedSplit:
    """Decode a whole split once, into memory.

    Args:
        num_bytes: expected size of the decoded images.
    Raises: same as `decode_with_cache`; also DataError if the memory is full, and SetupError if
        the file size limit is too low.
    """
    try:
        descriptor = os.memfd_create("decoded images")
        with os.fdopen(descriptor, "w+b", buffering=WRITE_BUFFER_BYTES) as file:
            table = _write_images(file, split, options)
            file.flush()
            return _build_decoded_split(file, table, split)
    except (OSError, MemoryError) as error:
        if isinstance(error, OSError) and error.errno == errno.EFBIG:
            raise SetupError(
                f"split '{split.name}': the file size limit of this shell (ulimit -f) also limits "
                f"decoded images in memory ({num_bytes:,} bytes are needed); raise the limit, then "
                "run the command again (training with --resume)",
                code="setup.disk_full",
            ) from error
        raise DataError(
            f"split '{split.name}': {format_bytes(num_bytes)} of decoded images do not fit in "
            "memory; set data.keep=none",
            code="data.memory",
        ) from error


def _write_images(file: BinaryIO, split: Split, options: DecodeOptions) -> PixelTable:
    """Decode a split, and write the pixels of its readable images without gaps.

    Raises: OSError if the disk or memory is full; otherwise same as `decode_with_cache`.
    """
    sizes, checksums, failed = list[tuple[int, ...]](), list[int](), list[tuple[int, str]]()
    decoded = decode_split(split, options, with_checksums=True)
    with contextlib.closing(decoded):
        for index, image in enumerate(decoded):
            if isinstance(image, DataError):
                # A disk error may be temporary, but the cache would omit the image permanently.
                try:
                    pixels = split.decode(index)
                except DataError as error:
                    if error.code == "data.changed":
                        raise
                    failed.append((index, str(error)))
                    continue
                image = DecodedImage(pixels, zlib.crc32(pixels.data))
            file.write(image.pixels.data)
            sizes.append(image.pixels.shape[:2])
            checksums.append(image.crc32)
    drop_unreadable(split, failed, options.unreadable)
    # store causes without names: the same images may have other names next time
    causes = [(index, text.removeprefix(f"{split.name_of(index)}: ")) for index, text in failed]
    return PixelTable(
        np.array(sizes, dtype=np.int64).reshape(-1, 2), np.array(checksums, np.uint32), causes
    )


def _open_cached(
    folder: CacheFolder, name: str, split: Split, options: DecodeOptions
) -> DecodedSplit | None:
    """Open the cached split; return None if its file does not exist or was removed as damaged."""
    try:
        with folder.open(name) as file:
            table = read_pixel_table(file, name.removesuffix(".pixels"), len(split))
            folder.mark_used(name)
            failed = [(index, f"{split.name_of(index)}: {cause}") for index, cause in table.failed]
            drop_unreadable(split, failed, options.unreadable)
            return _build_decoded_split(file, table, split, folder.path / name)
    except FileNotFoundError:
        return None
    except ValueError as error:
        logger.info(f"{folder.path / name}: is damaged ({error}); its images are decoded again")
        folder.remove(name)
        return None


def _build_decoded_split(
    file: BinaryIO, table: PixelTable, split: Split, path: Path | None = None
) -> DecodedSplit:
    """Build a `DecodedSplit` that reads from a file, and decodes an image again if reading fails.

    Args:
        path: path of the cache file; None for images in memory.
    """
    indices, is_removed = table.indices, path is None

    def decode_again(position: int) -> NDArray[np.uint8]:
        nonlocal is_removed
        index = int(indices[position])
        if path is not None and not is_removed:
            is_removed = True  # only once: later, another run may have written a new file here
            warn_once(
                f"{path}: is damaged ({split.name_of(index)} does not match its checksum); "
                "damaged images are decoded again, and the next run writes a new file"
            )
            with contextlib.suppress(OSError), CacheFolder(path.parent) as folder:
                folder.remove(path.name)
        return split.decode(index)

    images = DecodedImages(file, table, decode_again, is_in_memory=path is None)
    return DecodedSplit(images, indices)


def _cache_key(split: Split, unreadable: str) -> str:
    """Return the cache key: a hash of everything that the pixels depend on."""
    parts = {
        "format": _FORMAT_VERSION,
        "data": split.fingerprint,
        "unreadable": unreadable,
        "decoder": [__version__, *decoder_versions()],
        "size": split.decode_size,
    }
    return json_sha256(parts)
