"""Tar shards of WebDataset's layout: patterns of shards -> encoded images and numbered labels."""

# N images

from __future__ import annotations

import bisect
import functools
import glob
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
from huggingface_hub import constants, is_offline_mode
from numpy.typing import NDArray

from finetune.data.columns import number_labels
from finetune.data.decode import decode
from finetune.data.fingerprint import states_of
from finetune.data.items import binaries
from finetune.data.label_sets import number_sets
from finetune.data.notices import notice
from finetune.data.parquet import Columns, Tables, group_by_split
from finetune.data.streaming.hub_index import find_hub_files
from finetune.data.streaming.remote_file import LocalFile, ShardFile, WebFile
from finetune.data.streaming.row_groups import ShardItems
from finetune.data.tar_index import TarIndex, index_shards
from finetune.data.worker_pool import in_threads
from finetune.errors import DataError, HubError
from finetune.text import counted, printable

__all__ = ["TarItems", "TarShard", "read_tar"]

_MOST_SHARDS = 100_000
_GROUP_BYTES = 2**22  # of a shard that are fetched at once
_THREADS = 16  # waiting for a server
_ADDRESS = re.compile(r"https?://|hf://datasets/[^/]+/[^/]+/")
_HUB_ADDRESS = re.compile(r"hf://datasets/([^/]+/[^/@]+)(?:@([^/]+))?/(.+)")


def read_tar(
    path: str, columns: Columns, *, streaming: bool = False, multilabel: bool = False
) -> Tables:
    """Read tar shards: where they are, if they are streamed or not on this machine.

    Args:
        path: what follows `tar:`: a file, a folder, a glob, or addresses; with `{000..099}` and
            `{a,b}` for several.
        columns: the suffix of the images' members, and the suffix or JSON field of the labels.
        streaming: read the images of local shards in the order of `Lanes`, too.
        multilabel: the labels are lists, in fields of JSON.
    Raises: DataError for anything missing or damaged; HubError for a server's faults.
    """
    image, label = columns
    if isinstance(label, tuple):
        raise DataError(
            f"tar:{path}: labels are in one field of json, a list of classes; got {len(label)}",
            code="data.no_column",
        )
    files = _find_shards(path)
    splits = group_by_split(files, _path_of, f"tar:{path}", whole_name=True)
    shards = index_shards([file for group in splits.values() for file in group], image, label)
    remaining = iter(shards)
    by_split = {
        split: list(itertools.islice(remaining, len(group))) for split, group in splits.items()
    }
    if ignored := sum((Counter(shard.ignored) for shard in shards), Counter()):
        kinds = ", ".join(sorted(ignored)[:5])
        notice(f"tar:{path}: ignored {counted(ignored.total(), 'member')} of other kinds: {kinds}")
    for split, group in by_split.items():
        if not any(len(shard.offsets) for shard in group):
            message = f"tar:{path}: no image in the {counted(len(group), 'shard')} of '{split}'"
            raise DataError(f"{message}; expected KEY.jpg beside KEY.cls", code="data.empty")
    labels = {
        split: _label_column(split, group, multilabel=multilabel)
        for split, group in by_split.items()
    }
    number = number_sets if multilabel else number_labels
    numbered, class_names = number(labels, dict.fromkeys(labels))
    is_streamed = streaming or any(not isinstance(file, LocalFile) for file in files)
    make = _streamed if is_streamed else TarItems
    items = {split: make(by_split[split]) for split in numbered}
    description = f"{counted(len(files), 'tar shard')}{', streamed' * is_streamed}"
    return Tables(items, numbered, class_names, description)


def _label_column(split: str, shards: Sequence[TarIndex], *, multilabel: bool) -> pa.ChunkedArray:
    """Return the labels of a split.

    Raises: DataError if some are integers and some are names, or if lists are not lists.
    """
    first_of: dict[type, str] = {}
    sizes: list[int] = []
    flat: list[int | str] = []
    for shard in shards:
        for place, label in enumerate(shard.labels):
            if isinstance(label, list) is not multilabel:
                expected = "a list of classes" if multilabel else "one class (data.task=multilabel)"
                raise DataError(
                    f"{_named(shard, place)} has the label {str(label)[:40]!r}; expected "
                    f"{expected}; name another field with data.label_column",
                    code="data.wrong_labels",
                )
            each = label if isinstance(label, list) else [label]
            for one in each:
                if type(one) not in first_of:
                    first_of[type(one)] = f"{one!r} ({_named(shard, place)})"
            sizes.append(len(each))
            flat += each
    if len(first_of) > 1:
        raise DataError(
            f"split '{split}': labels of two kinds, such as {' and '.join(first_of.values())}; "
            "write all as integers or all as names",
            code="data.wrong_labels",
        )
    values = _array(flat) if int in first_of else _texts(flat)
    if multilabel:
        values = pa.LargeListArray.from_arrays(_array([0, *itertools.accumulate(sizes)]), values)
    return pa.chunked_array([values])


def _array(numbers: Sequence[int | str]) -> pa.Array:
    """Make an array of integers; `pa.array` of NumPy's would import pandas."""
    buffer = pa.py_buffer(np.array(numbers, dtype=np.int64))
    return pa.Array.from_buffers(pa.int64(), len(numbers), [None, buffer])


def _texts(labels: Sequence[int | str]) -> pa.Array:
    return binaries([str(label).encode() for label in labels]).cast(pa.large_string())


def _named(shard: TarIndex, place: int) -> str:
    return f"{shard.file.title} {printable(os.fsdecode(shard.names[place].as_py()))}"


# --- the shards ----------------------------------------------------------------------------------


def _path_of(file: ShardFile) -> PurePath:
    return PurePath(file.path)


def _find_shards(path: str) -> list[ShardFile]:
    """List the shards that a pattern means, in its order."""
    if Path(path).expanduser().exists():
        names = [path]
    else:
        names = list(itertools.islice(_expanded(path), _MOST_SHARDS + 1))
    if len(names) > _MOST_SHARDS:
        message = f"tar:{path}: more than {_MOST_SHARDS:,} shards; check the numbers in its braces"
        raise DataError(message, code="data.too_large")
    if any(_ADDRESS.match(name) for name in names):
        return _remote_shards(path, names)
    files = [file for name in names for file in _local_shards(path, name)]
    if not files:
        message = f"tar:{path}: no .tar file there; name one, or a folder of some"
        raise DataError(message, code="data.empty")
    return [LocalFile.at(file) for file in dict.fromkeys(files)]


def _expanded(pattern: str) -> Iterator[str]:
    """Yield the names that a pattern with braces means, as a shell does."""
    depth, cuts = 0, [-1]
    for place, sign in enumerate(pattern):
        depth += (sign == "{") - (sign == "}" and depth > 0)
        if (sign, depth) == ("{", 1):
            cuts = [place]
        elif (sign, depth) in ((",", 1), ("}", 0)) and cuts[0] >= 0:
            cuts.append(place)
        if (sign, depth) == ("}", 0) and len(cuts) > 1:
            break
    words: Iterator[str] = (pattern[a + 1 : b] for a, b in itertools.pairwise(cuts))
    if len(cuts) == 2:
        span = re.fullmatch(r"(\d{1,9})\.\.(\d{1,9})", pattern[cuts[0] + 1 : cuts[1]])
        numbers = range(int(span[1]), int(span[2]) + 1) if span else range(0)
        words = (f"{number:0{len(span[1])}}" for number in numbers) if span else iter(())
    if depth or len(cuts) < 2 or (len(cuts) == 2 and not span):
        yield pattern
        return
    for word in words:
        yield from (pattern[: cuts[0]] + each for each in _expanded(word + pattern[cuts[-1] + 1 :]))


def _local_shards(path: str, name: str) -> list[Path]:
    root = Path(name).expanduser().absolute()
    if root.is_dir():
        found = [file for end in ("*.tar", "*/*.tar") for file in sorted(root.glob(end))]
        packed = sorted(file for end in ("*.tar.*", "*.tgz") for file in root.glob(end))
        return found or packed  # which the reader refuses, saying why
    if root.exists():
        return [root]
    found = sorted(Path(file) for file in glob.glob(str(root), recursive=True))
    if not found and not glob.has_magic(str(root)):
        raise DataError(f"tar:{path}: no such shard {name!r}; check it", code="data.not_found")
    return found


def _remote_shards(path: str, names: list[str]) -> list[ShardFile]:
    """Describe shards at addresses: of the hub at one commit, elsewhere as they are now."""
    other = next((n for n in names if not _ADDRESS.match(n) or "*" in n), None)
    if other is not None:
        raise DataError(
            f"tar:{path}: a server does not list its files, so {other!r} cannot be read; write "
            "the whole address of each shard, with numbers such as {000..099}",
            code="data.wrong_source",
        )
    if is_offline_mode():
        message = f"tar:{path}: HF_HUB_OFFLINE is set; unset it, or give a local copy"
        raise HubError(message, code="hub.unreachable")
    files: dict[str, ShardFile | None] = dict.fromkeys(names)
    repositories: dict[tuple[str, str | None], dict[str, str]] = {}
    for name in files:
        page = rf"^{re.escape(constants.ENDPOINT)}/datasets/([^/]+/[^/]+)/resolve/([^/]+)/"
        if match := _HUB_ADDRESS.fullmatch(re.sub(page, r"hf://datasets/\1@\2/", name)):
            repository = match[1], match[2] and unquote(match[2])
            repositories.setdefault(repository, {})[name] = unquote(match[3])
    for (owner, revision), paths in repositories.items():
        found = find_hub_files(f"tar:{path}", owner, revision, list(paths.values()))
        files.update(zip(paths, found, strict=True))
    return list(in_threads(lambda name: files[name] or WebFile.at(name), files, _THREADS))


# --- the images ----------------------------------------------------------------------------------


class TarItems:
    """Encoded images in tar shards on this machine: so many bytes from a place of a file on."""

    has_file_each = False

    def __init__(self, shards: Sequence[TarIndex]) -> None:
        self._files = [shard.file for shard in shards]
        self._starts = [0, *itertools.accumulate(len(shard.offsets) for shard in shards)]
        self._offsets = np.concatenate([shard.offsets for shard in shards])
        self._sizes = np.concatenate([shard.sizes for shard in shards])
        self._names = [shard.names for shard in shards]
        self.origin = "\n".join(str(file.path) for file in self._files)

    def __len__(self) -> int:
        return len(self._offsets)

    def _shard(self, row: int) -> int:
        return bisect.bisect_right(self._starts, row) - 1

    def content(self, row: int) -> bytes:
        """Return the encoded image of a row. Raises: DataError if the shard has changed."""
        size = int(self._sizes[row])
        return self._files[self._shard(row)].read(int(self._offsets[row]), size)

    def read(
        self, row: int, size: int | None = None, room: NDArray[np.uint8] | None = None
    ) -> NDArray[np.uint8]:
        """Decode a row. Returns: (H, W, 3) uint8. Raises: DataError naming shard and member."""
        return decode(self.content(row), size=size, name=lambda: self.name_of(row), room=room)

    def name_of(self, row: int) -> str:
        """Return shard and member."""
        shard = self._shard(row)
        name = self._names[shard][row - self._starts[shard]].as_py()
        return f"{_path_of(self._files[shard]).name} {printable(os.fsdecode(name))}"

    def sizes(self) -> NDArray[np.int64]:
        """Return (N,) int64, the encoded images' sizes in bytes."""
        return self._sizes

    def states(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return (shards, 5) as `states_of`."""
        return states_of(str(file.path) for file in self._files)


@dataclass(frozen=True, eq=False)
class TarShard:
    """A tar shard as `ShardItems` reads it: images that lie together are a row group."""

    index: TarIndex

    @property
    def file(self) -> ShardFile:
        """The shard."""
        return self.index.file

    @property
    def footer(self) -> bytes:
        """The place of each image, which stands for the content of a shard on this machine."""
        return self.index.offsets.tobytes() + self.index.sizes.tobytes()

    @functools.cached_property
    def _edges(self) -> NDArray[np.int64]:
        parts = self.index.offsets // _GROUP_BYTES
        inner = np.flatnonzero(np.diff(parts)) + 1
        return np.unique(np.concatenate([[0], inner, [len(parts)]]))

    def lengths(self) -> list[int]:
        """Return the number of images of each row group."""
        return np.diff(self._edges).tolist()

    def num_bytes(self, group: int, column: str) -> int:
        """Return the bytes of the images of a row group."""
        first, last = self._edges[group : group + 2]
        return int(self.index.sizes[first:last].sum())

    def read(self, group: int, column: str) -> pa.ChunkedArray:
        """Read the images of a row group, with their names, in one piece of the shard."""
        first, last = self._edges[group : group + 2].tolist()
        places = self.index.offsets[first:last] - self.index.offsets[first]
        ends = places + self.index.sizes[first:last]
        length = int(ends.max())
        start = int(self.index.offsets[first])
        body = memoryview(self.file.read(start, length) if length else b"")
        pairs = zip(places.tolist(), ends.tolist(), strict=True)
        images = binaries([body[place:end] for place, end in pairs])
        names = [printable(os.fsdecode(name)) for name in self.index.names[first:last].to_pylist()]
        texts = binaries([name.encode() for name in names]).cast(pa.large_string())
        return pa.chunked_array([pa.StructArray.from_arrays([images, texts], ["bytes", "path"])])


def _streamed(shards: Sequence[TarIndex]) -> ShardItems:
    # what is read is known: a split holds the labels
    return ShardItems([TarShard(replace(shard, labels=[])) for shard in shards], "")
