"""Stream the images of shards, one row group at a time.

A row group of a tar shard is a range of neighboring images. Opening a source reads only the footer
and the label column of each parquet shard, or the index of each tar shard. The fingerprint covers
the image column, the shards' names, sizes and content ids, and the labels.
"""

# N rows, G row groups

from __future__ import annotations

import hashlib
import itertools
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from finetune.data.encoded_images import TableChunk, TableImages
from finetune.data.stat_signatures import stat_signatures
from finetune.data.streaming.parquet_shards import make_chunk
from finetune.data.streaming.shard_file import LocalFile, ShardFile
from finetune.errors import DataError

__all__ = ["ReadableShard", "RowGroup", "StreamedImages"]

_NUM_RECENT_GROUPS = 2  # kept in memory for reads of single images


class ReadableShard(Protocol):
    """Protocol for shards, whose images are read by row group.

    Attributes:
        file: the file to read.
        content_id: identifier of the content; differs between versions of a shard, even if name and
            size are the same, and between the images that a tar shard has for each sample.
    """

    @property
    def file(self) -> ShardFile: ...
    @property
    def content_id(self) -> str: ...
    def group_lengths(self) -> list[int]: ...
    def group_num_bytes(self, group: int, column: str) -> int: ...
    def read_group(self, group: int, column: str) -> pa.ChunkedArray: ...


class RowGroup:
    """The images of one row group, or some of them, in memory.

    Args:
        chunk: all encoded images of the row group.
        rows: (n,) ascending indices, within the row group, of the images to keep; None for all.
    """

    def __init__(self, chunk: TableChunk, rows: NDArray[Any] | None = None) -> None:
        self._rows = rows
        if rows is not None:
            indices = pa.array(rows)
            paths = None if chunk.paths is None else chunk.paths.take(indices)
            chunk = replace(
                chunk, encoded_images=chunk.encoded_images.take(indices), paths=paths, rows=rows
            )
        self._images = TableImages(lambda: [chunk])

    def __len__(self) -> int:
        return len(self._images)

    def _index(self, row: int) -> int:
        return row if self._rows is None else int(np.searchsorted(self._rows, row))

    def read_bytes(self, row: int) -> bytes:
        """Return the encoded image of a row. Raises: DataError if the row has no image."""
        return self._images.read_bytes(self._index(row))

    def decode(
        self, row: int, decode_size: int | None = None, buffer: NDArray[np.uint8] | None = None
    ) -> NDArray[np.uint8]:
        """Decode a row. Returns: (H, W, 3) uint8. Raises: DataError naming the row."""
        return self._images.decode(self._index(row), decode_size, buffer)


class StreamedImages:
    """Encoded images in shards; reading an image loads its whole row group.

    Pickling includes the metadata of the shards, but no images. Each process opens its own
    connections.

    Attributes:
        group_starts: (G+1,) the first row of each row group, then the total number of rows.
    """

    has_file_per_image = False
    is_streamed = True

    def __init__(self, shards: Sequence[ReadableShard], column: str) -> None:
        self._shards, self._column = list(shards), column
        self.origin = "\n".join(shard.file.cache_id for shard in self._shards)
        lengths = [shard.group_lengths() for shard in self._shards]
        # for each row group: its shard, and its index in the shard
        self._shard_groups = [(s, g) for s, each in enumerate(lengths) for g in range(len(each))]
        self.group_starts = np.cumsum([0, *itertools.chain(*lengths)], dtype=np.int64)
        self._process_id = -1

    def _process_cache(self) -> tuple[threading.Lock, OrderedDict[int, RowGroup]]:
        """Return the lock and the recent row groups of this process.

        Each process has its own lock: one that is held during a fork is never released in the
        child.
        """
        if self._process_id != os.getpid():
            self._lock = threading.Lock()
            self._recent: OrderedDict[int, RowGroup] = OrderedDict()
            self._process_id = os.getpid()
        return self._lock, self._recent

    def __len__(self) -> int:
        return int(self.group_starts[-1])

    def concat(self, other: StreamedImages) -> StreamedImages:
        """Concatenate these images and those of `other`."""
        assert other._column == self._column, "the splits of a source share their image column"
        return StreamedImages([*self._shards, *other._shards], self._column)

    def group_indices(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the row group index of each row."""
        return np.searchsorted(self.group_starts, rows, side="right").astype(np.int32) - 1

    def group_num_bytes(self) -> NDArray[np.int64]:
        """Return the approximate size of each row group's images in bytes, (G,)."""
        sizes = [self._shards[s].group_num_bytes(g, self._column) for s, g in self._shard_groups]
        return np.array(sizes, dtype=np.int64)

    def load_group(self, group: int, rows: NDArray[Any] | None = None) -> RowGroup:
        """Read a row group.

        Args:
            rows: (n,) ascending indices, within the row group, of the rows to keep; None for all.
        Raises: same as the shard's `read_group`; also DataError for a row group over 2 GiB.
        """
        shard_index, group_in_shard = self._shard_groups[group]
        shard = self._shards[shard_index]
        column = shard.read_group(group_in_shard, self._column)
        array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
        if isinstance(array, pa.ChunkedArray):
            raise DataError(
                f"{shard.file.display_name}: row group {group_in_shard} holds more than 2 GiB "
                "of images; write the file with smaller row groups",
                code="data.too_large",
            )
        if rows is not None and len(rows) == len(array):
            rows = None
        file = shard.file
        # image paths are relative to a local table's folder; remote tables must not use local files
        folders = (file.path.parent,) if isinstance(file, LocalFile) else ()
        return RowGroup(
            make_chunk(file.display_name, folders, self._first_row_in_file(group), array), rows
        )

    def _first_row_in_file(self, group: int) -> int:
        """Return the index of a row group's first row in its file."""
        group_in_shard = self._shard_groups[group][1]
        return int(self.group_starts[group] - self.group_starts[group - group_in_shard])

    def _recent_group(self, row: int) -> tuple[RowGroup, int]:
        group = int(self.group_indices(np.array(row)))
        lock, recent = self._process_cache()
        with lock:  # held while loading: other threads usually need this group, too
            if group not in recent:
                recent[group] = self.load_group(group)
            recent.move_to_end(group)
            while len(recent) > _NUM_RECENT_GROUPS:
                recent.popitem(last=False)
            return recent[group], row - int(self.group_starts[group])

    def read_bytes(self, row: int) -> bytes:
        """Return the encoded image of a row. Raises: DataError if the row has no image."""
        group, row_in_group = self._recent_group(row)
        return group.read_bytes(row_in_group)

    def decode(
        self, row: int, decode_size: int | None = None, buffer: NDArray[np.uint8] | None = None
    ) -> NDArray[np.uint8]:
        """Decode a row. Returns: (H, W, 3) uint8. Raises: DataError naming the row."""
        group, row_in_group = self._recent_group(row)
        return group.decode(row_in_group, decode_size, buffer)

    def name_of(self, row: int) -> str:
        """Return file name and row; reading the image's own name would load its row group."""
        group = int(self.group_indices(np.array(row)))
        file = self._shards[self._shard_groups[group][0]].file
        return (
            f"{file.display_name} row "
            f"{self._first_row_in_file(group) + row - int(self.group_starts[group])}"
        )

    def encoded_sizes(self) -> NDArray[np.int64]:
        """Estimate each image's size as the mean of its row group, (N,) int64 in bytes."""
        lengths = np.diff(self.group_starts)
        return np.repeat(self.group_num_bytes() // np.maximum(lengths, 1), lengths)

    def stat_signatures(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the `stat_signatures` of all shards without an ETag, (F, 5); ignores `rows`.

        Remote shards among them count as unsettled.
        """
        untagged = [shard.file for shard in self._shards if not shard.file.etag]
        signatures = stat_signatures(file.path for file in untagged)
        signatures[[not isinstance(file, LocalFile) for file in untagged], 0] = -1
        return signatures

    def record_digests(self, rows: NDArray[np.int64], digests: NDArray[np.uint8]) -> None:
        """Do nothing, because `ShardFile.read` detects a changed shard."""

    def recorded_digests(self, rows: NDArray[np.int64]) -> None:
        """Return None, because none are recorded."""

    def fingerprint(self, rows: NDArray[np.int64], labels: NDArray[np.int64]) -> str:
        """Return a sha256 over image column, shards, rows and their labels, in order."""
        column = self._column.encode()
        digest = hashlib.sha256(b"shards" + struct.pack("<q", len(column)) + column)
        for shard in self._shards:
            file = shard.file
            for text in (file.content_name.encode(), shard.content_id.encode()):
                digest.update(struct.pack("<qq", file.size, len(text)) + text)
        digest.update(rows.astype("<i8").tobytes() + labels.astype("<i8").tobytes())
        return digest.hexdigest()
