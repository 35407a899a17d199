"""Images of shards, read in place, a row group at a time.

A row group of a tar shard is what lies together in it. When a source is opened, only the footer of
each parquet shard and the label column are read, or the index of a tar shard. The
fingerprint is over the shards' names, sizes and names of contents, and the labels.
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

from finetune.data.fingerprint import states_of
from finetune.data.items import Chunk, RowItems
from finetune.data.streaming.parquet_shards import chunk_of
from finetune.data.streaming.remote_file import LocalFile, ShardFile
from finetune.errors import DataError

__all__ = ["Group", "ReadableShard", "ShardItems"]

_RECENT_GROUPS = 2  # kept in memory for images that are read one by one


class ReadableShard(Protocol):
    """A file of images in row groups.

    Attributes:
        file: where to read.
        footer: what tells it from other files of its name and size.
    """

    @property
    def file(self) -> ShardFile: ...
    @property
    def footer(self) -> bytes: ...
    def lengths(self) -> list[int]: ...
    def num_bytes(self, group: int, column: str) -> int: ...
    def read(self, group: int, column: str) -> pa.ChunkedArray: ...


class Group:
    """The images of one row group, or some of them, in memory.

    Args:
        chunk: their encoded bytes.
        rows: (n,) the rows in the row group that the chunk holds, ascending; None for all.
    """

    def __init__(self, chunk: Chunk, rows: NDArray[Any] | None = None) -> None:
        self._rows = rows
        if rows is not None:
            places = pa.array(rows)
            paths = None if chunk.paths is None else chunk.paths.take(places)
            chunk = replace(chunk, content=chunk.content.take(places), paths=paths, rows=rows)
        self._items = RowItems(lambda: [chunk])

    def __len__(self) -> int:
        return len(self._items)

    def _place(self, row: int) -> int:
        return row if self._rows is None else int(np.searchsorted(self._rows, row))

    def content(self, row: int) -> bytes:
        """Return the encoded image of a row of the row group. Raises: DataError if it has none."""
        return self._items.content(self._place(row))

    def read(
        self, row: int, size: int | None = None, room: NDArray[np.uint8] | None = None
    ) -> NDArray[np.uint8]:
        """Decode a row. Returns: (H, W, 3) uint8. Raises: DataError naming the row."""
        return self._items.read(self._place(row), size, room)


class ShardItems:
    """Encoded images in shards, each read together with its row group.

    Only the shards' footers are pickled; another process opens its own connections.

    Attributes:
        starts: (G+1,) the first row of each row group, then the number of rows.
    """

    origin = ""
    has_file_each = False

    def __init__(self, shards: Sequence[ReadableShard], column: str) -> None:
        self._shards, self._column = list(shards), column
        lengths = [shard.lengths() for shard in self._shards]
        # the shard of each row group, and its number in it
        self._groups = [(s, g) for s, each in enumerate(lengths) for g in range(len(each))]
        self.starts = np.cumsum([0, *itertools.chain(*lengths)], dtype=np.int64)
        self._process = -1

    def _own_cache(self) -> tuple[threading.Lock, OrderedDict[int, Group]]:
        """Return this process's lock and recent groups; a lock held at a fork is never released."""
        if self._process != os.getpid():
            self._lock = threading.Lock()
            self._recent: OrderedDict[int, Group] = OrderedDict()
            self._process = os.getpid()
        return self._lock, self._recent

    def __getstate__(self) -> dict[str, Any]:
        return {"shards": self._shards, "column": self._column}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def __len__(self) -> int:
        return int(self.starts[-1])

    def joined(self, other: ShardItems) -> ShardItems:
        """Return both as one, the other behind this."""
        assert other._column == self._column, "the splits of a source have one"
        return ShardItems([*self._shards, *other._shards], self._column)

    def group_of(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the number of the row group of each row."""
        return np.searchsorted(self.starts, rows, side="right").astype(np.int32) - 1

    def num_bytes(self) -> NDArray[np.int64]:
        """Return (G,) bytes of each row group's images, about."""
        sizes = [self._shards[s].num_bytes(g, self._column) for s, g in self._groups]
        return np.array(sizes, dtype=np.int64)

    def load(self, group: int, rows: NDArray[Any] | None = None) -> Group:
        """Read a row group.

        Args:
            rows: (n,) which of its rows to keep, counted in it, ascending; None for all.
        Raises: DataError or HubError as the shard's `read`.
        """
        number, own = self._groups[group]
        shard = self._shards[number]
        column = shard.read(own, self._column)
        array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
        if isinstance(array, pa.ChunkedArray):
            raise DataError(
                f"{shard.file.title}: row group {own} holds more than 2 GiB of images; write it "
                "with smaller row groups",
                code="data.too_large",
            )
        if rows is not None and len(rows) == len(array):
            rows = None
        file = shard.file
        # relative paths start at a local file's folder; a table from elsewhere names no file here
        folders = (file.path.parent,) if isinstance(file, LocalFile) else ()
        return Group(chunk_of(file.title, folders, self._first_row(group), array), rows)

    def _first_row(self, group: int) -> int:
        """Return the first row of a row group, counted in its file."""
        own = self._groups[group][1]
        return int(self.starts[group] - self.starts[group - own])

    def _held(self, row: int) -> tuple[Group, int]:
        number = int(self.group_of(np.array(row)))
        lock, recent = self._own_cache()
        with lock:  # other threads most often want the same one
            if number not in recent:
                recent[number] = self.load(number)
            recent.move_to_end(number)
            while len(recent) > _RECENT_GROUPS:
                recent.popitem(last=False)
            return recent[number], row - int(self.starts[number])

    def content(self, row: int) -> bytes:
        """Return the encoded image of a row. Raises: DataError if it has none."""
        group, own = self._held(row)
        return group.content(own)

    def read(
        self, row: int, size: int | None = None, room: NDArray[np.uint8] | None = None
    ) -> NDArray[np.uint8]:
        """Decode a row. Returns: (H, W, 3) uint8. Raises: DataError naming the row."""
        group, own = self._held(row)
        return group.read(own, size, room)

    def name_of(self, row: int) -> str:
        """Return file and row; the image's own name would have to be read first."""
        group = int(self.group_of(np.array(row)))
        file = self._shards[self._groups[group][0]].file
        return f"{file.title} row {self._first_row(group) + row - int(self.starts[group])}"

    def sizes(self) -> NDArray[np.int64]:
        """Return (N,) int64 in bytes: the mean of each row's row group, as no image is read."""
        lengths = np.diff(self.starts)
        return np.repeat(self.num_bytes() // np.maximum(lengths, 1), lengths)

    def states(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return (shards, 5) as `states_of`, of the shards whose content has no name."""
        nameless = [shard.file for shard in self._shards if not shard.file.content_name]
        states = states_of(file.path for file in nameless)
        states[[not isinstance(file, LocalFile) for file in nameless], 0] = -1
        return states

    def fingerprint(self, rows: NDArray[np.int64], labels: NDArray[np.int64]) -> str:
        """Return a sha256 over the shards, and over the rows and their labels in order."""
        digest = hashlib.sha256(b"shards")
        for shard in self._shards:
            file = shard.file
            name = file.path.name if isinstance(file, LocalFile) else file.path
            # a local file has no name of its content; its footer has the place of each row group
            content_name = file.content_name or hashlib.sha256(shard.footer).hexdigest()
            for text in (name.encode(), content_name.encode()):
                digest.update(struct.pack("<qq", file.size, len(text)) + text)
        digest.update(rows.astype("<i8").tobytes() + labels.astype("<i8").tobytes())
        return digest.hexdigest()
