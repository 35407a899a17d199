"""Index WebDataset tar shards: offset, size and label of each image, cached and verified.

A sample consists of the members with the same key: the image `dog/7.jpg`, and `dog/7.cls` with the
label, or `dog/7.json` with a field for the label. Nothing is unpacked: `tarfile` reads only the
headers and labels of a shard, and images are read by offset and size.

The index of a shard is a file in `tars/` of the cache: a sha256 of cache key and JSON, then the
JSON. The key depends on the stat signature of a local shard or the ETag of a remote one, so a
changed shard is indexed again. If a run stops while indexing, the next run continues with the next
shard.
"""

# N images

from __future__ import annotations

import collections
import contextlib
import errno
import functools
import hashlib
import json
import os
import re
import tarfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeAlias, TypeVar, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from finetune.cache import CacheFolder, cache_path
from finetune.data.encoded_images import binary_array
from finetune.data.image_folder import IMAGE_SUFFIXES
from finetune.data.stat_signatures import are_settled, stat_signatures
from finetune.data.streaming.shard_file import LocalFile, RemoteFile, ShardFile, open_stream
from finetune.data.thread_pool import NUM_REQUEST_THREADS, thread_map
from finetune.errors import DataError, FinetuneError
from finetune.formatting import pluralize, printable_path
from finetune.log import warn_once
from finetune.progress import item_bar
from finetune.ranks import is_local_main_process

__all__ = ["RawLabel", "TarShard", "index_shards"]

GROUP_BYTES = 2**22  # bytes of a shard per row group; a row group is read with one request
MAX_CACHE_BYTES = 2**32
_FORMAT_VERSION = 4
_INDEX_FILE_NAME = re.compile(r"[0-9a-f]{64}\.tarindex")
_MAX_HEADER_BYTES = 2**16  # limit for an extended header; real ones are shorter
_MAX_LABEL_BYTES = 2**20
_MAX_PADDING_BYTES = 2**20  # zeros after the last member: writers pad to a block
_DISK_BUFFER_BYTES, _HTTP_BUFFER_BYTES = 2**12, 2**18  # read size for headers
_LABEL_FIELDS = ("label", "class", "cls")
_COMPRESSION_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}

RawLabel: TypeAlias = int | str | list[int | str]
_Shard = TypeVar("_Shard")


@dataclass(frozen=True, eq=False)
class TarShard:
    """A shard and the index of its images, in member order.

    For `StreamedImages`, neighboring images form a row group.

    Attributes:
        file: the shard.
        offsets, sizes: offset and size of each image in the shard, (N,) int64, in bytes.
        names: member name of each image, (N,).
        labels: label of each image, (N,): an integer, a class name, or a list of these.
        ignored: number of members of other types, by suffix.
    """

    file: ShardFile
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    names: pa.LargeBinaryArray
    labels: list[RawLabel]
    ignored: dict[str, int]

    @property
    def content_id(self) -> str:
        """The shard's ETag, and a hash of the offsets and sizes of its images."""
        layout = self.offsets.tobytes() + self.sizes.tobytes()
        return self.file.etag + hashlib.sha256(layout).hexdigest()

    @functools.cached_property
    def _group_edges(self) -> NDArray[np.int64]:
        parts = self.offsets // GROUP_BYTES
        inner = np.flatnonzero(np.diff(parts)) + 1
        return np.unique(np.concatenate([[0], inner, [len(parts)]]))

    def group_lengths(self) -> list[int]:
        """Return the number of images of each row group."""
        return np.diff(self._group_edges).tolist()

    def group_num_bytes(self, group: int, column: str) -> int:
        """Return the total size of the images of a row group, in bytes."""
        first, last = self._group_edges[group : group + 2]
        return int(self.sizes[first:last].sum())

    def read_group(self, group: int, column: str) -> pa.ChunkedArray:
        """Read the images of a row group and their names, with one range read."""
        first, last = self._group_edges[group : group + 2].tolist()
        offsets = self.offsets[first:last] - self.offsets[first]
        ends = offsets + self.sizes[first:last]
        length = int(ends.max())
        start = int(self.offsets[first])
        body = memoryview(self.file.read(start, length) if length else b"")
        pairs = zip(offsets.tolist(), ends.tolist(), strict=True)
        images = binary_array([body[offset:end] for offset, end in pairs])
        names = [printable_path(os.fsdecode(name)) for name in self.names[first:last].to_pylist()]
        texts = binary_array([name.encode() for name in names]).cast(pa.large_string())
        return pa.chunked_array([pa.StructArray.from_arrays([images, texts], ["bytes", "path"])])


def index_shards(
    files: Sequence[ShardFile], image_suffix: str | None, label_field: str | None
) -> list[TarShard]:
    """Index shards, or load their indexes from the cache.

    Args:
        image_suffix: suffix of the image members, such as `jpg`; None for any image suffix.
        label_field: suffix of the label members, or name of a JSON field; None for suffix `cls`,
            else JSON field `label`, `class` or `cls`.
    Raises: DataError for anything that is not a tar of samples, naming shard and member; HubError
        if a server fails.
    """
    keys = [_cache_key(file, image_suffix, label_field) for file in files]
    pairs = list(zip(files, keys, strict=True))

    def read(file: ShardFile) -> TarShard:
        return _read_shard_headers(file, image_suffix, label_field)

    def load_or_index(pair: tuple[ShardFile, str | None]) -> TarShard:
        index = _load_cached(cache, *pair)
        if index is None:
            index = read(pair[0])
            _save_cached(cache, index, pair[1])
        return index

    try:
        with CacheFolder(cache_path("tars")) as cache:
            cached = [_load_cached(cache, *pair) for pair in pairs]
            if all(cached):
                return cast("list[TarShard]", cached)
            lock_key = hashlib.sha256("".join(map(str, keys)).encode()).hexdigest()
            # one rank indexes all shards; the others wait
            with cache.lock(lock_key):
                indexes = _map_shards(load_or_index, pairs)
            cache.evict(MAX_CACHE_BYTES, keep_name="", pattern=_INDEX_FILE_NAME)
            return indexes
    except OSError as error:
        _warn_not_cached(error)
        return _map_shards(read, files)


def _map_shards(read: Callable[[_Shard], TarShard], shards: Sequence[_Shard]) -> list[TarShard]:
    """Index shards in threads, with a progress bar."""
    indexes = []
    with item_bar(
        len(shards), label="indexing", unit="shard", shown=is_local_main_process()
    ) as bar:
        for index in thread_map(read, shards, NUM_REQUEST_THREADS):
            indexes.append(index)
            bar.update()
    return indexes


def _warn_not_cached(error: OSError) -> None:
    message = f"index of tar shards: cannot be cached ({error}); the next run indexes them again"
    warn_once(message, key="index of tar shards")  # once: each error may name another file


# --- the cache -----------------------------------------------------------------------------------


def _cache_key(file: ShardFile, image_suffix: str | None, label_field: str | None) -> str | None:
    """Return the cache key: a hash of everything that an index depends on.

    Returns: the key; None if a later change of the shard could go unnoticed.
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
    file_name = file.cache_id
    # a Last-Modified time may be the same for other files, so the key needs the full URL
    if isinstance(file, RemoteFile) and content.endswith("GMT"):
        file_name = file.url
    key_parts = [_FORMAT_VERSION, file_name, file.size, content, image_suffix, label_field]
    return hashlib.sha256(json.dumps(key_parts).encode()).hexdigest()


def _load_cached(cache: CacheFolder, file: ShardFile, key: str | None) -> TarShard | None:
    """Load the cached index, or return None if it is missing or damaged, or `key` is None."""
    if key is None:
        return None
    name = f"{key}.tarindex"
    try:
        body = cache.read(name, max_bytes=MAX_CACHE_BYTES)
    except FileNotFoundError:
        return None
    except ValueError:  # larger than any index
        body = b""
    if hashlib.sha256(key.encode() + body[32:]).digest() != body[:32]:
        warn_once(f"{cache.path / name}: is damaged; the shard is indexed again")
        cache.remove(name)
        return None
    cache.mark_used(name)
    fields = json.loads(body[32:])
    return TarShard(
        file,
        np.array(fields["offsets"], dtype=np.int64),
        np.array(fields["sizes"], dtype=np.int64),
        binary_array([*map(os.fsencode, fields["names"])]),
        fields["labels"],
        fields["ignored"],
    )


def _save_cached(cache: CacheFolder, index: TarShard, key: str | None) -> None:
    """Write an index to the cache, or log why it cannot be written."""
    if key is None:
        return
    fields = {
        "offsets": index.offsets.tolist(),
        "sizes": index.sizes.tolist(),
        "names": [os.fsdecode(name) for name in index.names.to_pylist()],
        "labels": index.labels,
        "ignored": index.ignored,
    }
    body = json.dumps(fields).encode()
    try:
        with cache.write(f"{key}.tarindex") as stream:
            stream.write(hashlib.sha256(key.encode() + body).digest() + body)
    except OSError as error:
        if error.errno != errno.EBADF:  # closed, because the work ended early
            _warn_not_cached(error)


# --- the headers ---------------------------------------------------------------------------------


def _read_shard_headers(
    file: ShardFile, image_suffix: str | None, label_field: str | None
) -> TarShard:
    """Read the headers and labels of a shard."""
    images: dict[str, tuple[int, int, str]] = {}
    labels: dict[str, RawLabel] = {}  # from their own members
    fields: dict[str, RawLabel | None] = {}  # from JSON
    used_fields: set[str] = set()
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
                field, label = _parse_json_label(file, member.name, read(), label_field)
                if field is not None:
                    used_fields.add(field)
                _add_to_sample(file, fields, key, member, label)
            elif suffix == image_suffix or (
                image_suffix is None and f".{suffix}".endswith(IMAGE_SUFFIXES)
            ):
                location = (member.offset_data, member.size, member.name)
                _add_to_sample(file, images, key, member, location)
            else:
                ignored[suffix] += 1
    _check_same_labels(file, labels, fields, used_fields)
    image_labels = [labels.get(key, fields.get(key)) for key in images]
    _check_samples(file, images, image_labels, {*labels, *fields}, label_field)
    locations = images.values()
    return TarShard(
        file,
        np.array([offset for offset, _, _ in locations], dtype=np.int64),
        np.array([size for _, size, _ in locations], dtype=np.int64),
        binary_array([os.fsencode(name) for _, _, name in locations]),
        cast("list[RawLabel]", image_labels),  # without None, as checked
        dict(ignored),
    )


@contextlib.contextmanager
def _open_shard(file: ShardFile) -> Iterator[BinaryIO]:
    """Open a shard to read its headers. Raises: DataError if unreadable or compressed."""
    buffer_bytes = _DISK_BUFFER_BYTES if isinstance(file, LocalFile) else _HTTP_BUFFER_BYTES
    with open_stream(file, buffer_bytes=buffer_bytes) as stream:
        head = stream.read(8)
        stream.seek(0)
        if compression := next(
            (kind for magic, kind in _COMPRESSION_MAGIC.items() if head.startswith(magic)), None
        ):
            raise DataError(
                f"{file.display_name}: compressed with {compression}, which prevents reading "
                "single images; convert it to a plain .tar: compression hardly shrinks images",
                code="data.wrong_format",
            )
        if not head:
            message = f"{file.display_name}: zero bytes; download it again"
            raise DataError(message, code="data.damaged")
        yield stream


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
    """Add a member to its sample. Raises: DataError if the sample already has one of this kind."""
    if key in samples:
        raise DataError(
            f"{file.display_name}: the sample {printable_path(key)} has two images or two "
            f"labels; the second is {printable_path(member.name)!r}; rename one of them, or name "
            "the suffix of the image with data.image_column",
            code="data.ambiguous",
        )
    samples[key] = value


def _parse_label(file: ShardFile, name: str, body: bytes) -> int | str:
    """Parse a text label: a class name, or an integer unless it is written with leading zeros."""
    if re.fullmatch(rb"0|-?[1-9]\d{0,17}", body):
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


def _check_same_labels(
    file: ShardFile,
    labels: Mapping[str, RawLabel],
    fields: Mapping[str, RawLabel | None],
    used_fields: Collection[str],
) -> None:
    """Raise DataError if a shard does not say which of several labels is meant.

    Args:
        labels: labels from their own members, by sample.
        fields: labels from JSON members, by sample.
        used_fields: the JSON fields that they were read from.
    """
    if len(used_fields) > 1:
        raise DataError(
            f"{file.display_name}: some samples have their label in the JSON field "
            f"{' and others in '.join(sorted(used_fields))}; write all with one field",
            code="data.ambiguous",
        )
    expected: dict[RawLabel, RawLabel] = {}  # what JSON has for a label from a member of its own
    for key, label in labels.items():
        if (other := fields.get(key)) is None:
            continue
        if (type(label) is int) == str(other).isdecimal():  # not an index and its name
            expected[label] = label
        if str(other) != str(expected.setdefault(label, other)):
            raise DataError(
                f"{file.display_name}: the sample {printable_path(key)} has the label {label!r} in "
                f"a member of its own, and {other!r} in JSON instead of {expected[label]!r}; name "
                "one of them with data.label_column",
                code="data.ambiguous",
            )


def _parse_json_label(
    file: ShardFile, name: str, body: bytes, field: str | None
) -> tuple[str | None, RawLabel | None]:
    """Parse the label of a JSON member. Returns: its field and the label; None and None without."""
    try:
        entries = json.loads(body, object_pairs_hook=_to_dict)
    except (ValueError, RecursionError) as error:
        message = (
            f"{file.display_name}: {printable_path(name)} is not valid JSON ({error}); write it "
            "again"
        )
        raise DataError(message, code="data.damaged") from None
    if not isinstance(entries, dict):
        entries = {}
    found = {one: entries[one] for one in ((field,) if field else _LABEL_FIELDS) if one in entries}
    if len({str(each) for each in found.values()}) > 1:
        raise DataError(
            f"{file.display_name}: {printable_path(name)} has different labels in the fields "
            f"{' and '.join(found)}; name one of them with data.label_column",
            code="data.ambiguous",
        )
    first, label = next(iter(found.items()), (None, None))
    if label is None:
        return None, None
    if all(map(_is_valid_label, label if isinstance(label, list) else [label])):
        return first, cast("RawLabel", label)
    raise DataError(
        f"{file.display_name}: {printable_path(name)} has the label {str(label)[:40]!r}; expected "
        "an integer or a class name; name another field with data.label_column",
        code="data.wrong_labels",
    )


def _to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the entries of a JSON object. Raises: ValueError if a key occurs twice."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("an object has two entries of one name")
    return entries


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
