"""Index WebDataset tar shards: offset, size and label of each image, cached and verified.

A sample consists of the members with the same key: `dog/7.jpg` with `dog/7.cls`, which holds the
label, or with `dog/7.json`, where a field holds it. Nothing is unpacked: `tarfile` reads only the
headers and labels of a shard, and images are read by offset and size.

The index of a shard is a file in `tars/` of the cache: a sha256, then JSON. Its name depends on the
stat signature of a local shard or the ETag of a remote one, so a changed shard is indexed again. If
a run stops while indexing, the next run continues with the next shard.
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

from finetune.cache import CacheFolder, cache_path
from finetune.data.decode import open_dataset_file
from finetune.data.encoded_images import binary_array
from finetune.data.image_folder import IMAGE_SUFFIXES
from finetune.data.stat_signatures import are_settled, stat_signatures
from finetune.data.streaming.remote_file import LocalFile, ShardFile, WebFile
from finetune.data.thread_pool import thread_map
from finetune.data.worker_pool import WorkerStatus, parallel_map
from finetune.errors import DataError, FinetuneError
from finetune.formatting import pluralize, printable_path
from finetune.host_resources import num_cores
from finetune.log import warn_once
from finetune.progress import item_bar
from finetune.ranks import is_local_main_process

__all__ = ["RawLabel", "TarIndex", "index_shards"]

MAX_CACHE_BYTES = 2**32
_FORMAT_VERSION = 1
_INDEX_FILE_NAME = re.compile(r"[0-9a-f]{64}\.tarindex")
_MAX_HEADER_BYTES = 2**16  # limit for an extended header; real ones are shorter
_MAX_LABEL_BYTES = 2**20
_MAX_PADDING_BYTES = 2**20  # zeros after the last member: writers pad to a block
_DISK_BUFFER_BYTES, _HTTP_BUFFER_BYTES = 2**12, 2**18  # read size for headers
_MIN_PARALLEL_BYTES = 2**24  # below, starting processes costs more time than it saves
_NUM_THREADS = 16  # more than cores: they wait for a server
_TIMEOUT_SECONDS = 900.0  # for one shard; also for ranks that wait for the indexing rank
_LABEL_FIELDS = ("label", "class", "cls")
_COMPRESSION_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}

RawLabel: TypeAlias = int | str | list[int | str]


@dataclass(frozen=True, eq=False)
class TarIndex:
    """The images of one shard, in member order.

    Attributes:
        file: the shard.
        offsets, sizes: (N,) int64, in bytes.
        names: (N,) member names.
        labels: label of each image, (N,): an integer, a class name, or a list of these.
        ignored: number of members of other types, by suffix.
    """

    file: ShardFile
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    names: pa.LargeBinaryArray
    labels: list[RawLabel]
    ignored: dict[str, int]


def index_shards(
    files: Sequence[ShardFile], image_suffix: str | None, label_field: str | None
) -> list[TarIndex]:
    """Index shards, or load their indexes from the cache.

    Args:
        image_suffix: suffix of the image members, such as `jpg`; None for any image suffix.
        label_field: suffix of the label members, or name of a JSON field; None for suffix `cls`,
            else JSON field `label`, `class` or `cls`.
    Raises: DataError for anything that is not a tar of samples, naming shard and member; HubError
        if a server fails.
    """
    keys = [_cache_key(file, image_suffix, label_field) for file in files]
    try:
        with CacheFolder(cache_path("tars")) as cache:
            indexes = [_load_cached(cache, *pair) for pair in zip(files, keys, strict=True)]
            if all(indexes):
                return cast("list[TarIndex]", indexes)
            lock_key = hashlib.sha256("".join(map(str, keys)).encode()).hexdigest()
            # one rank indexes all shards; the others wait
            with cache.lock(lock_key, stall_timeout_seconds=_TIMEOUT_SECONDS):
                for i, pair in enumerate(zip(files, keys, strict=True)):
                    indexes[i] = indexes[i] or _load_cached(cache, *pair)
                _read_missing(indexes, files, keys, (image_suffix, label_field), cache)
            cache.evict(MAX_CACHE_BYTES, keep_name="", pattern=_INDEX_FILE_NAME)
    except OSError as error:
        _warn_not_cached(error)
        indexes = [None] * len(files)
        _read_missing(indexes, files, keys, (image_suffix, label_field), None)
    return cast("list[TarIndex]", indexes)


def _read_missing(
    indexes: list[TarIndex | None],
    files: Sequence[ShardFile],
    keys: Sequence[str | None],
    suffixes: tuple[str | None, str | None],
    cache: CacheFolder | None,
) -> None:
    """Index the shards that are not cached: on all cores, or with concurrent requests."""
    missing = [i for i, index in enumerate(indexes) if index is None]

    def read(i: int) -> tuple[int, bytes | tuple[str, str], OSError | None]:
        try:
            body = json.dumps(_read_shard_headers(files[i], *suffixes)).encode()
        except DataError as error:  # must not end a worker process
            return i, (str(error), error.code), None
        try:
            if cache is not None and (key := keys[i]) is not None:
                with cache.write(key) as new_file, os.fdopen(os.dup(new_file.fd), "wb") as stream:
                    stream.write(hashlib.sha256(body).digest() + body)
                    stream.flush()
                    new_file.final_name = f"{key}.tarindex"
        except OSError as error:
            return i, body, error
        return i, body, None

    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(
            item_bar(len(missing), label="indexing", unit="shard", shown=is_local_main_process())
        )
        done = stack.enter_context(contextlib.closing(_map_shards(read, missing, files)))
        for i, body, error in done:
            if isinstance(body, tuple):
                raise DataError(body[0], code=body[1])
            if error is not None:
                _warn_not_cached(error)
            indexes[i] = _parse_index(files[i], json.loads(body))
            bar.update()


def _warn_not_cached(error: OSError) -> None:
    message = f"index of tar shards: cannot be cached ({error}); the next run indexes them again"
    warn_once(message, key="index of tar shards")  # once: each error may name another file


def _map_shards(
    read: Any, missing: list[int], files: Sequence[ShardFile]
) -> Generator[Any, None, None]:
    """Yield the results for all shards, in order of completion."""
    num_workers = min(num_cores(), len(missing))
    if not all(isinstance(file, LocalFile) for file in files):
        yield from thread_map(read, missing, _NUM_THREADS)
    elif num_workers < 2 or sum(files[i].size for i in missing) < _MIN_PARALLEL_BYTES:
        yield from map(read, missing)
    else:
        status = WorkerStatus(num_workers)

        def read_in_worker(i: int) -> Any:
            with status.decoding(i):
                return read(i)

        yield from parallel_map(
            read_in_worker,
            missing,
            status=status,
            num_workers=num_workers,
            name_of=lambda i: files[i].display_name,
            timeout_seconds=_TIMEOUT_SECONDS,
            in_order=False,
        )


# --- the cache -----------------------------------------------------------------------------------


def _cache_key(file: ShardFile, image_suffix: str | None, label_field: str | None) -> str | None:
    """Return the cache key: a hash of everything that an index depends on.

    Returns: None if a later change of the shard could go unnoticed.
    """
    if isinstance(file, LocalFile):
        signatures = stat_signatures([file.path])
        if not are_settled(signatures):
            return None
        content: Any = signatures.tolist()
    else:
        content = file.etag
    if not content:
        return None
    file_name = file.display_name
    # a Last-Modified time may be the same for other files, so the key needs the full URL
    if isinstance(file, WebFile) and content.endswith("GMT"):
        file_name = file.url
    key_parts = [_FORMAT_VERSION, file_name, file.size, content, image_suffix, label_field]
    return hashlib.sha256(json.dumps(key_parts).encode()).hexdigest()


def _load_cached(cache: CacheFolder, file: ShardFile, key: str | None) -> TarIndex | None:
    """Load the cached index, or return None if it is missing or damaged, or `key` is None."""
    if key is None:
        return None
    name = f"{key}.tarindex"
    try:
        body = cache.read(name, max_bytes=MAX_CACHE_BYTES)
        if hashlib.sha256(body[32:]).digest() != body[:32]:
            raise ValueError("its checksum does not match")
        cache.mark_used(name)
        return _parse_index(file, json.loads(body[32:]))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        warn_once(f"{cache.path / name}: is damaged ({error}); the shard is indexed again")
        cache.remove(name)
        return None


def _parse_index(file: ShardFile, raw: dict[str, Any]) -> TarIndex:
    """Parse an index. Raises: ValueError, TypeError or KeyError if it is invalid."""
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
        raise ValueError("images outside the shard")
    every = [one for label in labels for one in (label if isinstance(label, list) else [label])]
    if not {type(label) for label in every} <= {int, str}:
        raise ValueError("labels of another type")
    return TarIndex(file, offsets, sizes, binary_array([*map(os.fsencode, names)]), labels, ignored)


# --- the headers ---------------------------------------------------------------------------------


def _read_shard_headers(
    file: ShardFile, image_suffix: str | None, label_field: str | None
) -> dict[str, Any]:
    """Read the headers and labels of a shard. Returns: a JSON-serializable `TarIndex`."""
    images: dict[str, tuple[int, int, str]] = {}
    labels: dict[str, RawLabel] = {}  # from their own members
    fields: dict[str, RawLabel | None] = {}  # from JSON
    ignored: collections.Counter[str] = collections.Counter()
    with _open_shard(file) as stream:
        for member in _iter_members(file, stream):
            folder, slash, base = member.name.rpartition("/")
            stem, dot, suffix = base.partition(".")
            key, suffix = folder + slash + stem, suffix.lower()
            read = functools.partial(_read_label_member, file, stream, member)
            if not stem or not dot or "__MACOSX" in folder:
                ignored[printable_path(base)] += 1
            elif suffix == (label_field or "cls"):
                _add_to_sample(
                    file, labels, key, member, _parse_label(file, member.name, read().strip())
                )
            elif suffix == "json":
                _add_to_sample(
                    file,
                    fields,
                    key,
                    member,
                    _parse_json_label(file, member.name, read(), label_field),
                )
            elif suffix == image_suffix or (
                image_suffix is None and f".{suffix}".endswith(IMAGE_SUFFIXES)
            ):
                location = (member.offset_data, member.size, member.name)
                _add_to_sample(file, images, key, member, location)
            else:
                ignored[suffix] += 1
    image_labels = [labels.get(key, fields.get(key)) for key in images]
    _check_samples(file, images, image_labels, {*labels, *fields}, label_field)
    columns = zip(*images.values(), strict=True) if images else ([], [], [])
    offsets, sizes, names = map(list, columns)
    index = {"offsets": offsets, "sizes": sizes, "names": names, "labels": image_labels}
    return {**index, "ignored": ignored}


def _open_shard(file: ShardFile) -> BinaryIO:
    """Open a shard to read its headers. Raises: DataError if unreadable or compressed."""
    if isinstance(file, LocalFile):
        try:
            raw: Any = open_dataset_file(file.path).detach()  # type: ignore[attr-defined]
        except DataError as error:
            raise DataError(f"{file.display_name}: {error}", code=error.code) from None
    else:
        raw = _RemoteStream(file)
    buffer_bytes = _DISK_BUFFER_BYTES if isinstance(file, LocalFile) else _HTTP_BUFFER_BYTES
    stream = io.BufferedReader(raw, buffer_bytes)
    head = stream.peek(512)[:512]
    if compression := next(
        (kind for magic, kind in _COMPRESSION_MAGIC.items() if head.startswith(magic)), None
    ):
        raise DataError(
            f"{file.display_name}: compressed with {compression}, which prevents reading single "
            "images; convert it to a plain .tar: compression hardly shrinks images",
            code="data.wrong_format",
        )
    if not head:
        raise DataError(f"{file.display_name}: zero bytes; download it again", code="data.damaged")
    return stream


class _RemoteStream(io.RawIOBase):
    """A raw, seekable stream that reads byte ranges of a remote file."""

    def __init__(self, file: ShardFile) -> None:
        self._file, self._position = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        self._position = start + offset
        return self._position

    def readinto(self, room: Any) -> int:
        length = max(min(len(room), self._file.size - self._position), 0)
        if length:
            room[:length] = self._file.read(self._position, length)
            self._position += length
        return length


class _BoundedHeaderReader:
    """Limits how much `tarfile` reads for one header, whatever size the archive declares."""

    def __init__(self, stream: BinaryIO) -> None:
        self.seek, self.tell, self._read = stream.seek, stream.tell, stream.read

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size:,} bytes")
        return self._read(size)


def _iter_members(file: ShardFile, stream: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """Yield the members of an archive that are files.

    Raises: DataError for a damaged or truncated archive, and for members that are not plain files.
    """
    bounded = cast(Any, _BoundedHeaderReader(stream))
    try:
        archive = tarfile.TarFile(fileobj=bounded, encoding="utf-8", errors="surrogateescape")
        last = -1
        while (member := archive.next()) is not None:
            cast(Any, archive).members.clear()  # `tarfile` would keep all of them
            if not member.isdir():
                _check_member(file, member)
            end = member.offset_data + (member.size if member.isreg() else 0)
            if member.size < 0 or member.offset_data <= last or end > file.size:
                raise tarfile.ReadError(f"{printable_path(member.name)} exceeds the archive")
            last = end if member.size else member.offset_data
            if member.isreg():
                yield member
    except FinetuneError:
        raise
    except Exception as error:  # on damaged headers `tarfile` raises almost any type of error
        raise _damaged_error(file, f"{type(error).__name__}: {error}") from None
    rest = file.size - archive.offset
    stream.seek(archive.offset)
    # `tarfile` treats a damaged header like the end of the archive
    if stream.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise _damaged_error(file, f"neither header nor end marker at byte {archive.offset}")
    if rest > _MAX_PADDING_BYTES or any(stream.read(rest)):
        raise _damaged_error(file, f"data after the end marker at byte {archive.offset}")


def _damaged_error(file: ShardFile, cause: str) -> DataError:
    message = (
        f"{file.display_name}: not a tar file, or a damaged or truncated one ({cause}); download "
        "it again"
    )
    return DataError(message, code="data.damaged")


def _check_member(file: ShardFile, member: tarfile.TarInfo) -> None:
    """Raise a DataError if a member is not a plain file inside the archive."""
    where = f"{file.display_name}: {printable_path(member.name)}"
    if member.name.startswith("/") or ".." in member.name.split("/"):
        message = f"{where} leads outside the archive; write the archive with relative paths"
        raise DataError(message, code="data.unsafe")
    if member.issparse():
        message = f"{where} is a sparse file; write the archive without --sparse"
        raise DataError(message, code="data.wrong_format")
    if not member.isreg():
        raise DataError(
            f"{where} is a link, a device or a pipe; write the archive with plain files only "
            "(--dereference --hard-dereference)",
            code="data.unsafe",
        )


def _read_label_member(file: ShardFile, stream: BinaryIO, member: tarfile.TarInfo) -> bytes:
    """Read a label member. Raises: DataError if it is too large."""
    if member.size > _MAX_LABEL_BYTES:
        raise DataError(
            f"{file.display_name}: {printable_path(member.name)} has {member.size:,} bytes, too "
            "many for a label; name another member with data.label_column",
            code="data.too_large",
        )
    stream.seek(member.offset_data)
    return stream.read(member.size)


def _add_to_sample(
    file: ShardFile, samples: dict[str, Any], key: str, member: tarfile.TarInfo, value: Any
) -> None:
    """Add a member to its sample. Raises: DataError if the sample has a member of this kind."""
    if key in samples:
        raise DataError(
            f"{file.display_name}: the sample {printable_path(key)} has a second "
            f"{printable_path(member.name)!r}; rename one of them, or name the suffix of the "
            "image with data.image_column",
            code="data.ambiguous",
        )
    samples[key] = value


def _parse_label(file: ShardFile, name: str, body: bytes) -> int | str:
    """Parse a text label: an integer or a class name."""
    if re.fullmatch(rb"[+-]?\d{1,18}", body):
        return int(body)
    try:
        text = body.decode()
    except UnicodeDecodeError:
        text = ""
    if not text or not text.isprintable():
        raise DataError(
            f"{file.display_name}: {printable_path(name)} holds {body[:20]!r}; expected an "
            "integer or a class name",
            code="data.wrong_labels",
        )
    return text


def _parse_json_label(
    file: ShardFile, name: str, body: bytes, field: str | None
) -> RawLabel | None:
    """Parse the label of a JSON member. Returns: None if it has no label field."""
    try:
        entries = json.loads(body)
    except (ValueError, RecursionError) as error:
        message = (
            f"{file.display_name}: {printable_path(name)} is not valid JSON ({error}); write it "
            "again"
        )
        raise DataError(message, code="data.damaged") from None
    if not isinstance(entries, dict):
        entries = {}
    fields = (field,) if field else _LABEL_FIELDS
    label: Any = next((entries[one] for one in fields if one in entries), None)
    if label is None:
        return None
    if all(map(_is_valid_label, label if isinstance(label, list) else [label])):
        return cast("RawLabel", label)
    raise DataError(
        f"{file.display_name}: {printable_path(name)} has the label {str(label)[:40]!r}; expected "
        "an integer or a class name; name another field with data.label_column",
        code="data.wrong_labels",
    )


def _is_valid_label(label: Any) -> bool:
    if type(label) is int:
        return abs(label) < 2**62
    return type(label) is str and label.isprintable() and bool(label)


def _check_samples(
    file: ShardFile,
    images: dict[str, Any],
    labels: Sequence[RawLabel | None],
    labelled: set[str],
    label_field: str | None,
) -> None:
    """Raise a DataError for images without a label and for labels without an image."""
    unlabeled = [key for key, found in zip(images, labels, strict=True) if found is None]
    if unlabeled:
        expected = label_field or "cls, or a JSON field named " + ", ".join(_LABEL_FIELDS)
        raise DataError(
            f"{file.display_name}: {pluralize(len(unlabeled), 'image')} without a label, the "
            f"first is {printable_path(unlabeled[0])}; expected {expected}; name another suffix "
            "or field with data.label_column",
            code="data.no_labels",
        )
    orphaned = sorted(labelled - images.keys())
    if orphaned:
        raise DataError(
            f"{file.display_name}: {pluralize(len(orphaned), 'label')} without an image, the "
            f"first is {printable_path(orphaned[0])}; add the images, remove the labels, or name "
            "the suffix of the images with data.image_column",
            code="data.no_image",
        )
