"""Decoded images kept on disk between two runs, and shared by all processes of a host.

A file of `pixels/` in the cache (see `cache_folder`) holds one split: the pixels, then a table of
where each image is, then a footer. It is named after what the pixels depend on: the split's
fingerprint, the decoder, its size, and what is done about unreadable images. (The fingerprint of
more than 1 GiB of images is over names and sizes: clear the cache if such images change without
changing size.) One process decodes, those that want the same images meanwhile wait for it; all map
the file, so that the system keeps one copy in memory for all, or a part where it is larger than
that.

What is checked when a file is opened: its footer, the sha256 of its table, that the pixels end
where the table begins, and the checksums of 256 MiB of images spread over it. So a file that is
cut off, half written or overwritten is found, and up to 256 MiB every bit. In a larger one a single
wrong bit can be missed: reading all of 100 GB would take longer than the check is worth, and disks
have checksums of their own. A damaged file is removed and made again.
"""

# N images, M of them readable, H W pixels

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import PIL
import simplejpeg
from numpy.typing import NDArray
from PIL import features

from finetune import __version__
from finetune.data.decode import LIMIT_PIXELS
from finetune.data.decode_all import paint, without_unreadable
from finetune.data.pixel_file import ROW, Ragged, Rows, arranged, mapped
from finetune.data.source import Split
from finetune.errors import SetupError
from finetune.files import cache_folder, leftovers, make_room, published

__all__ = ["Kept", "kept_pixels", "room_for"]

MAX_BYTES = 64 * 2**30
_DISK_SHARE = 0.5  # of what is free: the rest is for the run itself, and for others
_CHECKED_BYTES = 2**28
_POLL_SECONDS = 0.5
_HEAD_START_SECONDS = 3.0  # for the rank that shows the progress
_NAME = re.compile(r"[0-9a-f]{64}\.pixels")
_FOOTER = struct.Struct("<8s32sqqq")  # magic, sha256 of the table, its bytes, M, bytes of pixels
_MAGIC = b"pixels-1"
_alone = threading.Lock()  # the lock of a file is between processes only


@dataclass(frozen=True)
class Kept:
    """Images of a split in a file.

    Attributes:
        images: (M, H, W, 3) uint8 if all are of one size, else M arrays (H, W, 3); read-only.
        indices: (M,) int64, of the split, ascending.
        path: where they are mapped from.
    """

    images: NDArray[np.uint8] | Ragged
    indices: NDArray[np.int64]
    path: Path


def room_for(num_bytes: int, folder: Path) -> bool:
    """Whether a disk has room for a file and leaves as much to others."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    state = os.statvfs(there)
    return num_bytes < state.f_bavail * state.f_frsize * _DISK_SHARE


def kept_pixels(
    split: Split,
    *,
    num_bytes: int,
    workers: int,
    unreadable: Literal["stop", "quarantine"],
    progress: bool,
    notice: Callable[[str], None],
    timeout_seconds: float,
) -> Kept | str:
    """Map a split's decoded images, after decoding them unless that was done before.

    Args:
        split: labelled items.
        num_bytes: about as many as its images take.
        workers: processes that decode.
        unreadable: as for `load_images`.
        progress: show a progress bar.
        notice: told of a damaged file, and of another process that this one waits for.
        timeout_seconds: for which a process that decodes may give no sign.
    Returns: where they are; or why nothing can be kept: no room, or a folder that is read-only.
    Raises: DataError as `load_images`; SetupError if a process was killed or hangs.
    """
    folder = cache_folder("pixels")
    key = _key(split, unreadable)
    path = folder / f"{key}.pixels"
    try:
        found = _opened(path, split, unreadable, notice)
        if found is not None:
            return found
        with _turn(path, key, notice, timeout_seconds) as mine:
            found = _opened(path, split, unreadable, notice)
            if found is not None:
                return found
            if not mine:  # someone removed it at once
                return f"{folder}: what another process decoded could not be used"
            for left in leftovers(folder, key):  # nobody writes it: it is our turn
                left.unlink(missing_ok=True)
            if not room_for(num_bytes, folder):
                return f"{folder}: too little room for {_mebibytes(num_bytes)}"
            return _made(
                split,
                path,
                key,
                unreadable=unreadable,
                workers=workers,
                progress=progress,
                timeout_seconds=timeout_seconds,
            )
    except OSError as error:
        return f"{folder}: {error.strerror or error} ({_mebibytes(num_bytes)} are needed)"


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


def _mebibytes(num_bytes: int) -> str:
    return f"about {-(-num_bytes // 2**20)} MiB"


@contextlib.contextmanager
def _turn(
    path: Path, key: str, notice: Callable[[str], None], timeout_seconds: float
) -> Iterator[bool]:
    """Wait until no other process makes the file. Yields: False if it has appeared meanwhile."""
    folder = path.parent
    folder.mkdir(parents=True, exist_ok=True)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        until = time.monotonic() + _HEAD_START_SECONDS
        while time.monotonic() < until and not (path.exists() or leftovers(folder, key)):
            time.sleep(_POLL_SECONDS)
    with _alone, (folder / "lock").open("a+b") as lock:
        # One byte of the file for each key. It is the process's own, not its children's, and the
        # system gives it back however the process ends.
        sign, since = None, time.monotonic()
        while not _locked(lock.fileno(), int(key[:15], 16)):
            if path.exists():
                yield False
                return
            before, sign = sign, _sign(folder, key)
            if before is None:
                notice(f"{path}: another process decodes the same images; waiting for it")
            if sign != before:
                since = time.monotonic()
            if time.monotonic() - since > timeout_seconds:
                raise SetupError(
                    f"{path}: the process that decodes these images has given no sign for "
                    f"{timeout_seconds:g} seconds; end it, or raise run.timeout_seconds (half of "
                    "it is waited for); continue with --resume"
                )
            time.sleep(_POLL_SECONDS)
        yield True


def _locked(lock: int, place: int) -> bool:
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _sign(folder: Path, key: str) -> list[tuple[str, int]]:
    """What changes as long as some process writes the images of a key."""
    found = []
    for path in leftovers(folder, key):
        with contextlib.suppress(FileNotFoundError):
            found.append((path.name, path.stat().st_mtime_ns))
    return found


def _made(
    split: Split,
    path: Path,
    key: str,
    *,
    unreadable: str,
    workers: int,
    progress: bool,
    timeout_seconds: float,
) -> Kept:
    """Decode the split into its file."""
    with published(path.parent, key) as (temporary, name):
        file = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            canvas, failed = paint(
                split,
                file,
                workers=workers,
                progress=progress,
                timeout_seconds=timeout_seconds,
            )
            kept = without_unreadable(split, failed, unreadable)
            rows = canvas.close_up(kept)
            _finish(file, rows, kept, _without_names(split, failed))
            os.fsync(file)  # else a power cut could leave the name without the bytes
            images = arranged(mapped(file), rows)
        finally:
            os.close(file)
        name.append(path.name)
    make_room(path.parent, MAX_BYTES, keep=path.name, names=_NAME)
    return Kept(images, kept, path)


def _without_names(split: Split, failed: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """The causes alone: the same images may have other names next time."""
    return [(index, text.removeprefix(f"{split.name_of(index)}: ")) for index, text in failed]


def _finish(
    file: int, rows: Rows, kept_M: NDArray[np.int64], failed: list[tuple[int, str]]
) -> None:
    """Write the table and the footer behind the pixels."""
    num_bytes = os.fstat(file).st_size
    table = rows.tobytes() + kept_M.astype("<i8").tobytes() + json.dumps(failed).encode()
    digest = hashlib.sha256(table).digest()
    footer = _FOOTER.pack(_MAGIC, digest, len(table), len(rows), num_bytes)
    with open(os.dup(file), "wb") as stream:
        stream.seek(num_bytes)
        stream.write(table + footer)


def _opened(
    path: Path, split: Split, unreadable: str, notice: Callable[[str], None]
) -> Kept | None:
    """Map a file, if it is there and intact; a damaged one is removed."""
    try:
        with path.open("rb") as stream:
            flat = mapped(stream.fileno())
    except FileNotFoundError:
        return None
    try:
        rows, kept, failed = _table(flat)
        if len(split) != len(rows) + len(failed) or not _is_intact(flat, rows):
            raise ValueError
    except (ValueError, struct.error):
        notice(f"{path}: is damaged; it is removed and the images are decoded again")
        path.unlink(missing_ok=True)
        return None
    with contextlib.suppress(OSError):  # a folder that can be read only serves as well
        os.utime(path)  # the least recently used go first
    named = [(index, f"{split.name_of(index)}: {cause}") for index, cause in failed]
    without_unreadable(split, named, unreadable)
    return Kept(arranged(flat, rows), kept, path)


def _table(flat: NDArray[np.uint8]) -> tuple[Rows, NDArray[np.int64], list[tuple[int, str]]]:
    """Read the end of a file. Raises: ValueError or struct.error for one that is not whole."""
    footer = flat[-_FOOTER.size :].tobytes()
    magic, digest, length, number, num_bytes = _FOOTER.unpack(footer)
    if magic != _MAGIC or num_bytes + length + _FOOTER.size != len(flat):
        raise ValueError("not a whole file")
    table = flat[num_bytes : num_bytes + length].tobytes()
    if hashlib.sha256(table).digest() != digest:
        raise ValueError("the table is damaged")
    ends = number * ROW.itemsize, number * (ROW.itemsize + 8)
    rows = np.frombuffer(table[: ends[0]], dtype=ROW)
    kept = np.frombuffer(table[ends[0] : ends[1]], dtype="<i8").astype(np.int64)
    return rows, kept, [(index, cause) for index, cause in json.loads(table[ends[1] :])]


def _is_intact(flat: NDArray[np.uint8], rows: Rows) -> bool:
    """Compare the checksums of as many images as are looked at, spread over the file."""
    sizes = rows["height"].astype(np.int64) * rows["width"] * 3
    total = int(sizes.sum())
    number = len(rows) if total <= _CHECKED_BYTES else -(-len(rows) * _CHECKED_BYTES // total)
    chosen = np.unique(np.linspace(0, len(rows) - 1, number).astype(np.int64))
    for index in chosen.tolist() if len(rows) else ():
        start = int(rows["offset"][index])
        if zlib.crc32(flat[start : start + int(sizes[index])].data) != rows["crc"][index]:
            return False
    return True
