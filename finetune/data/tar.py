"""Read WebDataset tar shards: encoded images and class indices, by split."""

# N images

from __future__ import annotations

import bisect
import functools
import glob
import itertools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
from huggingface_hub import constants, is_offline_mode
from numpy.typing import NDArray

from finetune.data.columns import ColumnNames, int64_array
from finetune.data.decode import decode_image
from finetune.data.encoded_images import binary_array
from finetune.data.hub_dataset import resolve_commit
from finetune.data.labels import encode_labels
from finetune.data.multilabel import encode_label_lists
from finetune.data.parquet import LabeledSplits
from finetune.data.split_names import group_by_split
from finetune.data.stat_signatures import stat_signatures
from finetune.data.streaming.shard_file import LocalFile, RemoteFile, ShardFile
from finetune.data.streaming.streamed_images import StreamedImages
from finetune.data.tar_index import TarShard, index_shards
from finetune.data.thread_pool import NUM_REQUEST_THREADS, thread_map
from finetune.errors import DataError, HubError
from finetune.formatting import pluralize, printable_path
from finetune.log import warn_once

__all__ = ["TarImages", "read_tar"]

_MAX_SHARDS = 100_000
_URL_PATTERN = re.compile(r"(?i:https?)://|(?i:hf)://datasets/[^/]+/[^/]+/")
_HUB_URL_PATTERN = re.compile(r"(?i:hf)://datasets/([^/]+/[^/@]+)(?:@([^/]+))?/(.+)")


def read_tar(
    path: str, columns: ColumnNames, *, streaming: bool = False, multilabel: bool = False
) -> LabeledSplits:
    """Read tar shards. Remote shards are always streamed.

    Args:
        path: the source string after `tar:`: a file, a folder, a glob or a URL. Braces such as
            `{000..099}` and `{a,b}` expand to several paths.
        columns: suffix of the image members; suffix or JSON field of the labels; None to detect.
        streaming: also stream local shards, in the order of `ShuffleStreams`.
        multilabel: expect labels as lists in JSON fields.
    Raises: DataError for missing or damaged shards; HubError if a server fails.
    """
    image, label, _ = columns
    if isinstance(label, tuple):
        raise DataError(
            f"tar:{path}: expected one JSON field with a list of classes, got {len(label)} "
            "columns; name one with data.label_column",
            code="data.no_column",
        )
    files = _find_shards(path)
    splits = group_by_split(files, _shard_path, f"tar:{path}")
    shards = _padded_integers_as_names(
        index_shards([file for group in splits.values() for file in group], image, label)
    )
    indexes = iter(shards)
    by_split = {
        split: list(itertools.islice(indexes, len(group))) for split, group in splits.items()
    }
    if ignored := sum((Counter(shard.ignored) for shard in shards), Counter()):
        suffixes = ", ".join(sorted(ignored)[:5])
        warn_once(
            f"tar:{path}: ignored {pluralize(ignored.total(), 'member')} of other types: {suffixes}"
        )
    for split, group in by_split.items():
        if not any(len(shard.offsets) for shard in group):
            message = f"tar:{path}: no images in the {pluralize(len(group), 'shard')} of '{split}'"
            raise DataError(f"{message}; expected KEY.jpg next to KEY.cls", code="data.empty")
    labels = {
        split: _collect_labels(split, group, multilabel=multilabel)
        for split, group in by_split.items()
    }
    encode = encode_label_lists if multilabel else encode_labels
    encoded, class_names = encode(labels, dict.fromkeys(labels))
    is_streamed = streaming or any(not isinstance(file, LocalFile) for file in files)
    build_images = _stream_shards if is_streamed else TarImages
    images = {split: build_images(by_split[split]) for split in encoded}
    description = f"{pluralize(len(files), 'tar shard')}{', streamed' * is_streamed}"
    return LabeledSplits(images, encoded, class_names, description)


def _padded_integers_as_names(shards: list[TarShard]) -> list[TarShard]:
    """If a label is an integer with leading zeros, such as 01, make all integers class names."""
    labels = (label for shard in shards for label in shard.labels)
    values = {
        value for label in labels for value in (label if isinstance(label, list) else [label])
    }
    if not any(re.fullmatch("[+-]?0[0-9]+", str(value)) for value in values):
        return shards
    return [
        replace(
            shard,
            labels=[
                [*map(str, label)] if isinstance(label, list) else str(label)
                for label in shard.labels
            ],
        )
        for shard in shards
    ]


def _collect_labels(split: str, shards: Sequence[TarShard], *, multilabel: bool) -> pa.ChunkedArray:
    """Collect the labels of a split in one Arrow array.

    Raises: DataError for integers mixed with names, or for lists mixed with single labels.
    """
    first_by_type: dict[type, str] = {}
    sizes: list[int] = []
    all_labels: list[int | str] = []
    for shard in shards:
        for index, label in enumerate(shard.labels):
            if isinstance(label, list) is not multilabel:
                expected = (
                    "a list of classes" if multilabel else "one class (lists: data.task=multilabel)"
                )
                raise DataError(
                    f"{_member_name(shard, index)} has the label {str(label)[:40]!r}; expected "
                    f"{expected}; name another field with data.label_column",
                    code="data.wrong_labels",
                )
            image_labels = label if isinstance(label, list) else [label]
            for value in image_labels:
                if type(value) not in first_by_type:
                    first_by_type[type(value)] = f"{value!r} ({_member_name(shard, index)})"
            sizes.append(len(image_labels))
            all_labels += image_labels
    if len(first_by_type) > 1:
        raise DataError(
            f"split '{split}': labels of two types, such as "
            f"{' and '.join(first_by_type.values())}; write all as integers or all as names",
            code="data.wrong_labels",
        )
    values = int64_array(all_labels) if int in first_by_type else _string_array(all_labels)
    if multilabel:
        values = pa.LargeListArray.from_arrays(
            int64_array([0, *itertools.accumulate(sizes)]), values
        )
    return pa.chunked_array([values])


def _string_array(labels: Sequence[int | str]) -> pa.Array:
    return binary_array([str(label).encode() for label in labels]).cast(pa.large_string())


def _member_name(shard: TarShard, index: int) -> str:
    return f"{shard.file.display_name} {printable_path(os.fsdecode(shard.names[index].as_py()))}"


# --- the shards ----------------------------------------------------------------------------------


def _shard_path(file: ShardFile) -> PurePath:
    return PurePath(file.path)


def _find_shards(path: str) -> list[ShardFile]:
    """List the shards of a pattern, in the order of the pattern."""
    if Path(path).expanduser().exists():
        names = [path]
    else:
        names = list(itertools.islice(_expand_braces(path), _MAX_SHARDS + 1))
    if len(names) > _MAX_SHARDS:
        message = f"tar:{path}: more than {_MAX_SHARDS:,} shards; check the numbers in the braces"
        raise DataError(message, code="data.too_large")
    if any(_URL_PATTERN.match(name) for name in names):
        return _open_remote_shards(path, names)
    files = [file for name in names for file in _find_local_shards(path, name)]
    if not files:
        message = f"tar:{path}: no .tar files; name a file, or a folder of tar files"
        raise DataError(message, code="data.empty")
    return [LocalFile.from_path(file) for file in dict.fromkeys(files)]


def _expand_braces(pattern: str) -> Iterator[str]:
    """Expand `{000..099}` and `{a,b}`, inner braces first; names may repeat."""
    match = re.search(r"\{(?:(\d{1,9})\.\.(\d{1,9})|([^{}]*,[^{}]*))\}", pattern)
    if match is None:
        yield pattern
        return
    first, last, names = match.groups()
    alternatives: Iterable[str] = names.split(",") if names else ()
    if first:
        alternatives = (f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1))
    for alternative in alternatives:
        yield from _expand_braces(pattern[: match.start()] + alternative + pattern[match.end() :])


def _find_local_shards(path: str, name: str) -> list[Path]:
    root = Path(name).expanduser().absolute()
    if root.is_dir():
        entries = [file for level in ("*", "*/*") for file in sorted(root.glob(level))]
        found = [file for file in entries if file.suffix.lower() == ".tar"]
        compressed = sorted(file for end in ("*.tar.*", "*.tgz") for file in root.glob(end))
        _warn_of_missing_numbers(path, found)
        return found or compressed  # the reader rejects these with an explanation
    if root.exists():
        return [root]
    found = sorted(Path(file) for file in glob.glob(str(root), recursive=True))
    if not found and not glob.has_magic(str(root)):
        raise DataError(
            f"tar:{path}: no such shard {name!r}; check the name", code="data.not_found"
        )
    _warn_of_missing_numbers(path, found)
    return found


def _warn_of_missing_numbers(path: str, files: Iterable[Path]) -> None:
    """Warn if numbered files such as train-000.tar and train-002.tar leave out a number."""
    numbers: dict[tuple[str, int], set[int]] = {}
    for file in files:
        if match := re.fullmatch(r"(.*?)(\d+)", str(file.with_suffix(""))):
            numbers.setdefault((match[1], len(match[2])), set()).add(int(match[2]))
    for (start, width), found in numbers.items():
        num_missing = max(found) - min(found) + 1 - len(found)
        if 0 < num_missing < len(found):  # otherwise dates, for example
            first = next(number for number in range(min(found), max(found)) if number not in found)
            warn_once(
                f"tar:{path}: {pluralize(num_missing, 'number is', 'numbers are')} missing, for "
                f"example {printable_path(start)}{first:0{width}}.tar"
            )


def _open_remote_shards(path: str, names: list[str]) -> list[ShardFile]:
    """Open remote shards; those on the Hub at one commit."""
    invalid = next((n for n in names if not _URL_PATTERN.match(n) or "*" in n), None)
    if invalid is not None:
        raise DataError(
            f"tar:{path}: servers do not list their files, so {invalid!r} cannot be read; write "
            "the full URL of each shard; braces such as {000..099} expand to numbers",
            code="data.wrong_source",
        )
    if is_offline_mode():
        message = f"tar:{path}: HF_HUB_OFFLINE is set; unset it, or name a local copy"
        raise HubError(message, code="hub.unreachable")
    source = f"tar:{path}"
    commit_of = functools.cache(functools.partial(resolve_commit, source))
    page_pattern = rf"^{re.escape(constants.ENDPOINT)}/datasets/([^/]+/[^/]+)/resolve/([^/]+)/"
    openers: list[Callable[[], RemoteFile]] = []
    for name in dict.fromkeys(names):
        match = _HUB_URL_PATTERN.fullmatch(re.sub(page_pattern, r"hf://datasets/\1@\2/", name))
        if match:
            commit = commit_of(match[1], match[2] and unquote(match[2]))
            args = source, match[1], commit, unquote(match[3])
            openers.append(functools.partial(RemoteFile.open_on_hub, *args))
        else:
            openers.append(functools.partial(RemoteFile.open_url, name))
    return list(thread_map(lambda opener: opener(), openers, NUM_REQUEST_THREADS))


# --- the images ----------------------------------------------------------------------------------


class TarImages:
    """Encoded images in local tar shards, each at an offset in its file."""

    has_file_per_image = False
    is_streamed = False

    def __init__(self, shards: Sequence[TarShard]) -> None:
        self._files = [shard.file for shard in shards]
        self._first_rows = [0, *itertools.accumulate(len(shard.offsets) for shard in shards)]
        self._offsets = np.concatenate([shard.offsets for shard in shards])
        self._sizes = np.concatenate([shard.sizes for shard in shards])
        self._names = [shard.names for shard in shards]
        # samples may have several images, so paths alone do not tell which of them these are
        self.origin = "\n".join(f"{shard.file.path} {shard.content_id}" for shard in shards)

    def __len__(self) -> int:
        return len(self._offsets)

    def _shard_index(self, row: int) -> int:
        return bisect.bisect_right(self._first_rows, row) - 1

    def read_bytes(self, row: int) -> bytes:
        """Return the encoded image of a row. Raises: DataError if the shard has changed."""
        size = int(self._sizes[row])
        return self._files[self._shard_index(row)].read(int(self._offsets[row]), size)

    def decode(
        self, row: int, decode_size: int | None = None, buffer: NDArray[np.uint8] | None = None
    ) -> NDArray[np.uint8]:
        """Decode a row. Returns: (H, W, 3) uint8. Raises: DataError naming shard and member."""
        return decode_image(
            self.read_bytes(row),
            decode_size=decode_size,
            name=lambda: self.name_of(row),
            buffer=buffer,
        )

    def name_of(self, row: int) -> str:
        """Return shard and member name."""
        shard = self._shard_index(row)
        name = self._names[shard][row - self._first_rows[shard]].as_py()
        return f"{_shard_path(self._files[shard]).name} {printable_path(os.fsdecode(name))}"

    def encoded_sizes(self) -> NDArray[np.int64]:
        """Return the size of each encoded image in bytes, (N,) int64."""
        return self._sizes

    def stat_signatures(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the `stat_signatures` of all shards, (F, 5); ignores `rows`."""
        return stat_signatures(str(file.path) for file in self._files)

    def record_digests(self, rows: NDArray[np.int64], digests: NDArray[np.uint8]) -> None:
        """Do nothing, because `LocalFile.read` detects a changed shard."""

    def recorded_digests(self, rows: NDArray[np.int64]) -> None:
        """Return None, because none are recorded."""


def _stream_shards(shards: Sequence[TarShard]) -> StreamedImages:
    # drop the labels: the split holds them
    return StreamedImages([replace(shard, labels=[]) for shard in shards], "")
