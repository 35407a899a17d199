"""A split's decoded images: read from the cache if an earlier run wrote them, else decoded.

A file of `pixels/` in the cache (see `cache_folder`) holds one split, laid out by `pixel_file`. It
is named after what the pixels depend on: the contents of the split's images, the decoder, its size,
and what is done about unreadable images. One process decodes, and those that want the same images
wait for it; all read one file, of which the system keeps one copy in memory for all. Where it is
stopped or killed, the next one goes on with the images that are left.

Nothing is used unproved: the folder and the file are this user's, the table fits its sha256 and the
file's length, and each image its checksum when it is first read. An image that does not is decoded
again, and the next run makes the file anew.
"""

# N images, M of them readable, H W pixels

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import PIL
import simplejpeg
from numpy.typing import NDArray
from PIL import features

from finetune import __version__
from finetune.data.decode import LIMIT_PIXELS
from finetune.data.decode_all import expected_size, visit, without_unreadable
from finetune.data.notices import notice
from finetune.data.pixel_file import Canvas, Images, Place, Table, read_table, write_table
from finetune.data.shared_memory import shared_memory
from finetune.data.source import Split
from finetune.errors import DataError
from finetune.files import CacheFolder, UntrustedCacheError, cache_folder
from finetune.processes import is_first_here
from finetune.text import byte_size

__all__ = ["Decoded", "How", "cached_images", "decode_images"]

MAX_BYTES = 64 * 2**30
_DISK_SHARE = 0.5  # of what is free: the rest is for the run itself, and for others
_HEAD_START_SECONDS = 3.0  # for the rank that shows the progress
_POLL_SECONDS = 0.25
_NAME = re.compile(r"[0-9a-f]{64}\.pixels")
_REMEDY = "free space, or set FINETUNE_CACHE to another folder"


@dataclass(frozen=True)
class How:
    """The way that a split is decoded.

    Attributes:
        workers: processes; a small split needs none.
        unreadable: what to do about images that cannot be read: stop, naming them all, or leave
            them out, saying so.
        progress: show a bar on standard error where that is a terminal.
        timeout_seconds: for which some images are waited for before a process counts as hanging.
    """

    workers: int
    unreadable: Literal["stop", "quarantine"]
    progress: bool
    timeout_seconds: float


class Decoded(NamedTuple):
    """The images of a split that can be read, and their (M,) indices in it, ascending."""

    images: Images
    indices: NDArray[np.int64]


def cached_images(
    split: Split, how: How, *, num_bytes: int, tell: Callable[[str], None]
) -> Decoded | str:
    """Take a split's images from the cache, after decoding them into it unless they are there.

    Args:
        num_bytes: that the decoded images are expected to take.
        tell: told of a damaged file, and of another process that this one waits for.
    Returns: the images; or why they cannot be kept: the disk has no room, the folder is read-only
        or another user's, or another process holds the lock.
    Raises: as `decode_images`.
    """
    path, key = cache_folder("pixels"), _key(split, how.unreadable)
    name = f"{key}.pixels"
    try:
        with CacheFolder(path) as folder:
            images = _read(folder, key, split, how, tell)
            if images is not None:
                return images
            _let_first_rank_begin(folder, key)
            with folder.lock(key, notice=tell, stalled_seconds=how.timeout_seconds) as is_mine:
                images = _read(folder, key, split, how, tell)
                if images is not None:
                    return images
                if not is_mine:
                    return f"{path}: another process that makes this file has come to a halt"
                is_begun = folder.names(key, ".tmp")  # it has its room
                if not is_begun and not folder.has_room(num_bytes, share=_DISK_SHARE):
                    return f"{path}: too little room for {byte_size(num_bytes)}; {_REMEDY}"
                with folder.write(key, goes_on=True) as new:
                    table = _decode(split, new.descriptor, how, num_bytes=num_bytes)
                    write_table(new.descriptor, table, key)
                    images = _images(new.descriptor, table, split, path / name)
                    if split.is_unchanged():
                        new.name = name
                    else:
                        tell(f"split '{split.name}': changed while it was decoded; it is not kept")
                folder.make_room(MAX_BYTES, keep=name, names=_NAME)
                return images
    except UntrustedCacheError as error:
        return str(error)
    except OSError as error:
        cause = error.strerror or error
        return f"{path}: {cause} ({byte_size(num_bytes)} are needed); {_REMEDY}"


def decode_images(split: Split, how: How, *, num_bytes: int) -> Decoded:
    """Decode a whole split once, into memory.

    Args:
        num_bytes: that the decoded images are expected to take.
    Raises: DataError: unreadable images, a class with no image left, not enough memory, or an
        image that crashes the decoder; SetupError if a process was killed or hangs.
    """
    try:
        memory = _reserved(num_bytes)
        return _images(memory, _decode(split, memory, how, num_bytes=num_bytes), split)
    except (OSError, MemoryError) as error:
        raise DataError(
            f"split '{split.name}': {byte_size(num_bytes)} of decoded images do not fit in "
            "memory; set data.keep: none",
            code="data.memory",
        ) from error


def _reserved(num_bytes: int) -> NDArray[np.uint8]:
    """Memory for processes to share: more than is expected, as a sample may mislead."""
    try:
        return shared_memory(16 * num_bytes + 2**30)
    except OSError:  # where the system promises no more than it has
        return shared_memory(2 * num_bytes + 2**20)


def _decode(split: Split, place: Place, how: How, *, num_bytes: int) -> Table:
    """Decode a split into its place. Raises: OSError where there is no room; others as above."""
    canvas = Canvas(place, len(split), size=expected_size(split), num_bytes=num_bytes)
    left = np.flatnonzero(~canvas.kept())
    if len(left) < len(split):
        notice(
            f"split '{split.name}': {len(split) - len(left):,} of {len(split):,} images were "
            "decoded by a run that was stopped; the others follow"
        )
    unreadable = visit(
        split.subset(left),
        lambda place, image: canvas.keep(int(left[place]), image),
        workers=how.workers,
        progress=how.progress,
        timeout_seconds=how.timeout_seconds,
    )
    failed = []
    for index in (int(left[place]) for place, _ in unreadable):
        try:  # once more: a disk may have failed for a moment, and what is left out stays so
            canvas.keep(index, split.read(index))
        except DataError as error:
            failed.append((index, str(error)))
    kept = without_unreadable(split, failed, how.unreadable)
    # the causes alone: the same images may have other names next time
    causes = [(index, text.removeprefix(f"{split.name_of(index)}: ")) for index, text in failed]
    return Table(canvas.close_up(kept), kept, causes)


def _read(
    folder: CacheFolder, key: str, split: Split, how: How, tell: Callable[[str], None]
) -> Decoded | None:
    """Open a file of the cache, if it is there and whole; a damaged one is removed."""
    name = f"{key}.pixels"
    try:
        file = folder.open(name)
    except FileNotFoundError:
        return None
    try:
        table = read_table(file, key, len(split))
        folder.touch(name)
        failed = [(index, f"{split.name_of(index)}: {cause}") for index, cause in table.failed]
        without_unreadable(split, failed, how.unreadable)
        return _images(file, table, split, folder.path / name)
    except ValueError as error:
        tell(f"{folder.path / name}: is damaged ({error}); its images are decoded again")
        folder.remove(name)
        return None
    finally:
        os.close(file)


def _images(place: Place, table: Table, split: Split, path: Path | None = None) -> Decoded:
    """The images of a file or in memory; those that are not what was written are decoded again.

    Args:
        path: of the file in the cache; None for memory.
    """

    is_removed = path is None

    def decode_again(place: int) -> NDArray[np.uint8]:
        nonlocal is_removed
        index = int(table.indices[place])
        if path is not None and not is_removed:
            is_removed = True  # once: the next file of this name is another run's
            notice(
                f"{path}: is damaged ({split.name_of(index)} is not what was written); such images "
                "are decoded again, and the next run makes the file anew"
            )
            with contextlib.suppress(OSError), CacheFolder(path.parent) as folder:
                folder.remove(path.name)
        image = split.read(index)
        if image.shape != (table.rows["height"][place], table.rows["width"][place], 3):
            raise DataError(
                f"{split.name_of(index)}: has another size than when it was decoded; images must "
                "not change while a run reads them: restore it and start again",
                code="data.changed",
            )
        return image

    return Decoded(Images(place, table.rows, decode_again), table.indices)


def _key(split: Split, unreadable: str) -> str:
    """The hash of all that the pixels depend on."""
    jpeg = features.version("libjpeg_turbo") or features.version("jpg")
    decoder = [__version__, PIL.__version__, jpeg, simplejpeg.__version__, LIMIT_PIXELS]
    everything = {
        "data": split.fingerprint,
        "unreadable": unreadable,
        "decoder": decoder,
        "size": split.decode_size,
    }
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()


def _let_first_rank_begin(folder: CacheFolder, key: str) -> None:
    """Wait a little on the other ranks of a host, so that the one with the bar decodes."""
    if not is_first_here():
        until = time.monotonic() + _HEAD_START_SECONDS
        while time.monotonic() < until and not folder.is_begun(key):
            time.sleep(_POLL_SECONDS)
