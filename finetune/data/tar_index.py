"""The places of the images in tar shards of WebDataset's layout: read once, kept, and checked.

A sample is the members of one key: `dog/7.jpg` beside `dog/7.cls`, which holds the label, or
`dog/7.json`, in which a field does. Nothing is unpacked: of a shard only the headers and labels are
read, by Python's `tarfile`, and an image is then so many bytes from a place on.

The index of a shard is a file of `tars/` in the cache: a sha256, then JSON. It is named after the
shard's state (on this machine) or the name of its content (elsewhere), so a shard that changed is
read anew, and where a run is stopped while it reads, the next one goes on with the next shard.
"""

# N images

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import io
import json
import os
import re
import tarfile
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeAlias, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from finetune.console import terminal_bar
from finetune.data.decode import open_data
from finetune.data.fingerprint import are_known, states_of
from finetune.data.items import IMAGE_SUFFIXES, binaries
from finetune.data.notices import notice
from finetune.data.streaming.remote_file import LocalFile, ShardFile, WebFile
from finetune.data.worker_pool import WorkerStatus, in_threads, spread
from finetune.errors import DataError, FinetuneError
from finetune.files import CacheFolder, cache_folder
from finetune.processes import is_first_here, num_cores
from finetune.text import counted, printable

__all__ = ["Label", "TarIndex", "index_shards"]

MAX_BYTES = 2**32
_VERSION = 1
_NAME = re.compile(r"[0-9a-f]{64}\.tarindex")
_HEADER_BYTES = 2**16  # of an extended header; the paths and attributes of real files are shorter
_LABEL_BYTES = 2**20
_END_BYTES = 2**20  # of zeros behind the last member: writers fill up a block
_DISK_BYTES, _SERVER_BYTES = 2**12, 2**18  # read at once for a header
_SMALL_BYTES = 2**24  # below, processes cost more than they save
_THREADS = 16  # waiting for a server, not computing
_SECONDS = 900.0  # for a shard, and for another rank that reads them
_LABEL_FIELDS = ("label", "class", "cls")
_PACKED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}

Label: TypeAlias = int | str | list[int | str]


@dataclass(frozen=True, eq=False)
class TarIndex:
    """The images of one shard, in the order of their members.

    Attributes:
        file: the shard.
        offsets, sizes: (N,) int64, in bytes.
        names: (N,) of their members.
        labels: (N,) integers or names of classes, or lists of them.
        ignored: how many members of other kinds there are, by their suffix.
    """

    file: ShardFile
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    names: pa.LargeBinaryArray
    labels: list[Label]
    ignored: dict[str, int]


def index_shards(
    files: Sequence[ShardFile], image: str | None, label: str | None
) -> list[TarIndex]:
    """Find the images of shards, from the cache where an earlier run has read their headers.

    Args:
        image: the suffix of the images' members, such as `jpg`; None for the only one of a sample.
        label: the suffix of the labels' members, or a field of the JSON; None for `cls`, else
            one of the usual fields.
    Raises: DataError for anything that is not a tar of samples, naming shard and member; HubError
        for a server's faults.
    """
    keys = [_key(file, image, label) for file in files]
    try:
        with CacheFolder(cache_folder("tars")) as cache:
            found = [_cached(cache, *pair) for pair in zip(files, keys, strict=True)]
            if all(found):
                return cast("list[TarIndex]", found)
            whole = hashlib.sha256("".join(map(str, keys)).encode()).hexdigest()
            with cache.lock(
                whole, notice=notice, stalled_seconds=_SECONDS
            ):  # one rank reads for all
                for place, pair in enumerate(zip(files, keys, strict=True)):
                    found[place] = found[place] or _cached(cache, *pair)
                _fill(found, files, keys, (image, label), cache)
            cache.make_room(MAX_BYTES, keep="", names=_NAME)
    except OSError as error:
        _not_kept(error)
        found = [None] * len(files)
        _fill(found, files, keys, (image, label), None)
    return cast("list[TarIndex]", found)


def _fill(
    found: list[TarIndex | None],
    files: Sequence[ShardFile],
    keys: Sequence[str | None],
    columns: tuple[str | None, str | None],
    cache: CacheFolder | None,
) -> None:
    """Read the shards that are not in the cache: by all cores, or many at once from a server."""
    missing = [place for place, index in enumerate(found) if index is None]

    def read(place: int) -> tuple[int, bytes | tuple[str, str], OSError | None]:
        try:
            body = json.dumps(_read_shard(files[place], *columns)).encode()
        except DataError as error:  # must not kill a worker
            return place, (str(error), error.code), None
        try:
            if cache is not None and (key := keys[place]) is not None:
                with cache.write(key) as new, os.fdopen(os.dup(new.descriptor), "wb") as stream:
                    stream.write(hashlib.sha256(body).digest() + body)
                    stream.flush()
                    new.name = f"{key}.tarindex"
        except OSError as error:
            return place, body, error
        return place, body, None

    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(
            terminal_bar(len(missing), label="indexing", unit="shard", shown=is_first_here())
        )
        done = stack.enter_context(contextlib.closing(_spread(read, missing, files)))
        for place, body, error in done:
            if isinstance(body, tuple):
                raise DataError(body[0], code=body[1])
            if error is not None:
                _not_kept(error)
            found[place] = _checked(files[place], json.loads(body))
            bar.update()


def _not_kept(error: OSError) -> None:
    message = f"index of tar shards: is not kept ({error}); the next run reads the headers again"
    notice(message, key="index of tar shards")  # once: each error may name another file


def _spread(
    read: Any, missing: list[int], files: Sequence[ShardFile]
) -> Generator[Any, None, None]:
    """Yield the results of reading shards, as they are done."""
    workers = min(num_cores(), len(missing))
    if not all(isinstance(file, LocalFile) for file in files):
        yield from in_threads(read, missing, _THREADS)
    elif workers < 2 or sum(files[place].size for place in missing) < _SMALL_BYTES:
        yield from map(read, missing)
    else:
        status = WorkerStatus(workers)

        def watched(place: int) -> Any:
            with status.decoding(place):
                return read(place)

        yield from spread(
            watched,
            missing,
            status=status,
            workers=workers,
            name_of=lambda place: files[place].title,
            timeout_seconds=_SECONDS,
            in_order=False,
        )


# --- the cache -----------------------------------------------------------------------------------


def _key(file: ShardFile, image: str | None, label: str | None) -> str | None:
    """Return the hash of all that an index depends on; None if a change might not show."""
    if isinstance(file, LocalFile):
        states = states_of([file.path])
        if not are_known(states):
            return None
        content: Any = states.tolist()
    else:
        content = file.content_name
    if not content:
        return None
    title = file.title
    if isinstance(file, WebFile) and content.endswith("GMT"):  # a time, of any file of the second
        title = file.url
    everything = [_VERSION, title, file.size, content, image, label]
    return hashlib.sha256(json.dumps(everything).encode()).hexdigest()


def _cached(cache: CacheFolder, file: ShardFile, key: str | None) -> TarIndex | None:
    """Return an index that an earlier run has written; None if there is none that is whole."""
    if key is None:
        return None
    name = f"{key}.tarindex"
    try:
        body = cache.read(name, limit_bytes=MAX_BYTES)
        if hashlib.sha256(body[32:]).digest() != body[:32]:
            raise ValueError("not what was written")
        cache.touch(name)
        return _checked(file, json.loads(body[32:]))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        notice(f"{cache.path / name}: is damaged ({error}); the shard's headers are read again")
        cache.remove(name)
        return None


def _checked(file: ShardFile, raw: dict[str, Any]) -> TarIndex:
    """Make an index of its JSON. Raises: ValueError, TypeError or KeyError if it is no index."""
    offsets = np.array(raw["offsets"], dtype=np.int64)
    sizes = np.array(raw["sizes"], dtype=np.int64)
    names, labels, ignored = raw["names"], raw["labels"], dict(raw["ignored"])
    if not len(offsets) == len(sizes) == len(names) == len(labels) or offsets.ndim != 1:
        raise ValueError("columns of different lengths")
    if len(offsets) and not (
        offsets[0] >= tarfile.BLOCKSIZE
        and np.all(np.diff(offsets) > 0)
        and sizes.min() >= 0
        and offsets[-1] <= file.size
        and np.all(sizes <= file.size - offsets)
    ):
        raise ValueError("images beyond the shard")
    every = [one for label in labels for one in (label if isinstance(label, list) else [label])]
    if not {type(label) for label in every} <= {int, str}:
        raise ValueError("labels of another kind")
    return TarIndex(file, offsets, sizes, binaries([*map(os.fsencode, names)]), labels, ignored)


# --- the headers ---------------------------------------------------------------------------------


def _read_shard(file: ShardFile, image: str | None, label: str | None) -> dict[str, Any]:
    """Read the headers and labels of a shard. Returns: its `TarIndex` as JSON has it."""
    images: dict[str, tuple[int, int, str]] = {}
    labels: dict[str, Label] = {}  # of members of their own
    fields: dict[str, Label | None] = {}  # of the JSON
    ignored: collections.Counter[str] = collections.Counter()
    with _opened(file) as stream:
        for member in _members(file, stream):
            folder, slash, base = member.name.rpartition("/")
            stem, dot, suffix = base.partition(".")
            key, suffix = folder + slash + stem, suffix.lower()
            read = functools.partial(_content, file, stream, member)
            if not stem or not dot or "__MACOSX" in folder:
                ignored[printable(base)] += 1
            elif suffix == (label or "cls"):
                _put(file, labels, key, member, _label(file, member.name, read().strip()))
            elif suffix == "json":
                _put(file, fields, key, member, _field(file, member.name, read(), label))
            elif suffix == image or (image is None and f".{suffix}".endswith(IMAGE_SUFFIXES)):
                place = (member.offset_data, member.size, member.name)
                _put(file, images, key, member, place)
            else:
                ignored[suffix] += 1
    numbered = [labels.get(key, fields.get(key)) for key in images]
    _refuse_halves(file, images, numbered, {*labels, *fields}, label)
    columns = zip(*images.values(), strict=True) if images else ([], [], [])
    offsets, sizes, names = map(list, columns)
    everything = {"offsets": offsets, "sizes": sizes, "names": names, "labels": numbered}
    return {**everything, "ignored": ignored}


def _opened(file: ShardFile) -> BinaryIO:
    """Open a shard to read its headers. Raises: DataError if it cannot be opened, or is packed."""
    if isinstance(file, LocalFile):
        try:
            raw: Any = open_data(file.path).detach()  # type: ignore[attr-defined]
        except DataError as error:
            raise DataError(f"{file.title}: {error}", code=error.code) from None
    else:
        raw = _Ranges(file)
    at_once = _DISK_BYTES if isinstance(file, LocalFile) else _SERVER_BYTES
    stream = io.BufferedReader(raw, at_once)
    head = stream.peek(512)[:512]
    if packed := next((kind for magic, kind in _PACKED.items() if head.startswith(magic)), None):
        raise DataError(
            f"{file.title}: is packed with {packed}, in which no image can be read without all "
            "before it; unpack it to a plain .tar once: images hardly get smaller by it",
            code="data.wrong_format",
        )
    if not head:
        raise DataError(f"{file.title}: zero bytes; download it again", code="data.damaged")
    return stream


class _Ranges(io.RawIOBase):
    """A file at a server, as a stream."""

    def __init__(self, file: ShardFile) -> None:
        self._file, self._place = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._file.size}[whence]
        self._place = start + offset
        return self._place

    def readinto(self, room: Any) -> int:
        length = max(min(len(room), self._file.size - self._place), 0)
        if length:
            room[:length] = self._file.read(self._place, length)
            self._place += length
        return length


class _Bounded:
    """A stream from which `tarfile` cannot read a header of any length that a file claims."""

    def __init__(self, stream: BinaryIO) -> None:
        self.seek, self.tell, self._read = stream.seek, stream.tell, stream.read

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size:,} bytes")
        return self._read(size)


def _members(file: ShardFile, stream: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """Yield the files of an archive.

    Raises: DataError for a damaged or cut archive, and for members that are no plain files.
    """
    bounded = cast(Any, _Bounded(stream))
    try:
        archive = tarfile.TarFile(fileobj=bounded, encoding="utf-8", errors="surrogateescape")
        last = -1
        while (member := archive.next()) is not None:
            cast(Any, archive).members.clear()  # it would keep them all
            if not member.isdir():
                _refuse_other(file, member)
            end = member.offset_data + (member.size if member.isreg() else 0)
            if member.size < 0 or member.offset_data <= last or end > file.size:
                raise tarfile.ReadError(f"{printable(member.name)} does not fit into it")
            last = end if member.size else member.offset_data
            if member.isreg():
                yield member
    except FinetuneError:
        raise
    except Exception as error:  # on damaged headers `tarfile` raises nearly everything
        raise _damaged(file, f"{type(error).__name__}: {error}") from None
    rest = file.size - archive.offset
    stream.seek(archive.offset)
    # at a damaged header `tarfile` ends as at the last one
    if stream.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise _damaged(file, f"no header and no end at byte {archive.offset}")
    if rest > _END_BYTES or any(stream.read(rest)):
        raise _damaged(file, f"there is more behind its end at byte {archive.offset}")


def _damaged(file: ShardFile, cause: str) -> DataError:
    message = f"{file.title}: not a tar file, or a damaged or cut one ({cause}); download it again"
    return DataError(message, code="data.damaged")


def _refuse_other(file: ShardFile, member: tarfile.TarInfo) -> None:
    """Refuse a member that is no plain file inside of the archive."""
    where = f"{file.title}: {printable(member.name)}"
    if member.name.startswith("/") or ".." in member.name.split("/"):
        message = f"{where} leads outside of the archive; write it with paths from its top"
        raise DataError(message, code="data.unsafe")
    if member.issparse():
        message = f"{where} has holes; write the archive without --sparse"
        raise DataError(message, code="data.wrong_format")
    if not member.isreg():
        raise DataError(
            f"{where} is a link, a device or a pipe; write the archive with files alone "
            "(--dereference --hard-dereference)",
            code="data.unsafe",
        )


def _content(file: ShardFile, stream: BinaryIO, member: tarfile.TarInfo) -> bytes:
    """Read a label's member."""
    if member.size > _LABEL_BYTES:
        raise DataError(
            f"{file.title}: {printable(member.name)} has {member.size:,} bytes, too many for a "
            "label; name another member with data.label_column",
            code="data.too_large",
        )
    stream.seek(member.offset_data)
    return stream.read(member.size)


def _put(
    file: ShardFile, places: dict[str, Any], key: str, member: tarfile.TarInfo, value: Any
) -> None:
    """Note a part of a sample. Raises: DataError if the sample has one."""
    if key in places:
        raise DataError(
            f"{file.title}: the sample {printable(key)} has a second {printable(member.name)!r}; "
            "rename one of them, or name the suffix of the image with data.image_column",
            code="data.ambiguous",
        )
    places[key] = value


def _label(file: ShardFile, name: str, body: bytes) -> int | str:
    """Read a label as text: an integer, or the name of a class."""
    if re.fullmatch(rb"[+-]?\d{1,18}", body):
        return int(body)
    try:
        text = body.decode()
    except UnicodeDecodeError:
        text = ""
    if not text or not text.isprintable():
        raise DataError(
            f"{file.title}: {printable(name)} holds {body[:20]!r}; expected an integer or the name "
            "of a class",
            code="data.wrong_labels",
        )
    return text


def _field(file: ShardFile, name: str, body: bytes, field: str | None) -> Label | None:
    """Read a label out of JSON. Returns: None where there is no such field."""
    try:
        entries = json.loads(body)
    except (ValueError, RecursionError) as error:
        message = f"{file.title}: {printable(name)} is no JSON ({error}); write it again"
        raise DataError(message, code="data.damaged") from None
    if not isinstance(entries, dict):
        entries = {}
    wanted = (field,) if field else _LABEL_FIELDS
    label: Any = next((entries[one] for one in wanted if one in entries), None)
    if label is None:
        return None
    if all(map(_is_label, label if isinstance(label, list) else [label])):
        return cast("Label", label)
    raise DataError(
        f"{file.title}: {printable(name)} has the label {str(label)[:40]!r}; expected an integer "
        "or the name of a class; name another field with data.label_column",
        code="data.wrong_labels",
    )


def _is_label(label: Any) -> bool:
    if type(label) is int:
        return abs(label) < 2**62
    return type(label) is str and label.isprintable() and bool(label)


def _refuse_halves(
    file: ShardFile,
    images: dict[str, Any],
    labels: Sequence[Label | None],
    labelled: set[str],
    label: str | None,
) -> None:
    """Refuse images without a label, and labels without an image."""
    bare = [key for key, found in zip(images, labels, strict=True) if found is None]
    if bare:
        wanted = label or "cls, or a field of their json called " + ", ".join(_LABEL_FIELDS)
        raise DataError(
            f"{file.title}: {counted(len(bare), 'image')} without a label, the first is "
            f"{printable(bare[0])}; expected {wanted}; name another with data.label_column",
            code="data.no_labels",
        )
    lonely = sorted(labelled - images.keys())
    if lonely:
        raise DataError(
            f"{file.title}: {counted(len(lonely), 'label')} without an image, the first is "
            f"{printable(lonely[0])}; add the images, remove the labels, or name the suffix of the "
            "images with data.image_column",
            code="data.no_image",
        )
