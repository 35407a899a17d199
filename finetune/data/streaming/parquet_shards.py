"""Parquet shards read in place: their footers, and single columns of row groups."""

from __future__ import annotations

import functools
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from finetune.data.items import Chunk
from finetune.data.streaming.remote_file import HubFile, LocalFile
from finetune.data.worker_pool import in_threads
from finetune.errors import DataError

__all__ = ["Shard", "chunk_of", "label_column", "open_shards"]

_TAIL_BYTES = 64 * 2**10  # most shards' footers fit, so that one request is enough
_THREADS = 16  # waiting for the hub, not computing
_TRIES = 2  # a second transfer distinguishes damage on the way from a damaged file


def chunk_of(title: str, folders: tuple[Path, ...], first_row: int, array: pa.Array) -> Chunk:
    """Make a chunk of an image column, which holds bytes or a struct of bytes and path.

    Raises: DataError for a column of anything else.
    """
    kind = array.type
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        paths = array.field("path") if kind.get_field_index("path") >= 0 else None
        return Chunk(title, first_row, array.field("bytes"), paths, folders)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return Chunk(title, first_row, array, None, folders)
    raise DataError(
        f"{title}: the image column holds {kind}; expected encoded images as bytes; name another "
        "with data.image_column, or use a folder: source for image files",
        code="data.wrong_format",
    )


@dataclass(frozen=True)
class Shard:
    """A parquet file and its footer.

    Attributes:
        file: where to read.
        footer: the last bytes of the file, with its metadata.
    """

    file: LocalFile | HubFile
    footer: bytes

    @functools.cached_property
    def metadata(self) -> pq.FileMetaData:
        """The schema, and the place of each column of each row group."""
        return pq.read_metadata(io.BytesIO(self.footer))

    @property
    def schema(self) -> pa.Schema:
        """The columns, with what `datasets` recorded about them."""
        return self.metadata.schema.to_arrow_schema()

    def lengths(self) -> list[int]:
        """Return the number of rows of each row group."""
        return [self.metadata.row_group(g).num_rows for g in range(self.metadata.num_row_groups)]

    def num_bytes(self, group: int, column: str) -> int:
        """Return the bytes of a column of a row group in memory, about."""
        return sum(chunk.total_uncompressed_size for chunk in self._chunks(group, column))

    def read(self, group: int, column: str) -> pa.ChunkedArray:
        """Read one column of one row group, and nothing else.

        Raises: DataError for damaged bytes; HubError as `HubFile.read`.
        """
        for attempt in range(_TRIES):
            blocks = self._blocks(group, column)
            try:
                parquet = pq.ParquetFile(
                    _PartialFile(self.file.size, blocks),
                    metadata=self.metadata,
                    pre_buffer=False,
                    page_checksum_verification=True,
                )
                table = parquet.read_row_group(group, columns=[column], use_threads=False)
                return table.column(column)
            except (pa.ArrowException, OSError, ValueError) as error:
                if attempt + 1 == _TRIES:
                    raise DataError(
                        f"{self.file.title}: row group {group} is damaged ({error}); "
                        "write the file again",
                        code="data.damaged",
                    ) from None
        raise AssertionError("the last try returns or raises")

    def _chunks(self, group: int, column: str) -> list[Any]:
        rows = self.metadata.row_group(group)
        chunks = [rows.column(number) for number in range(rows.num_columns)]
        nested = [c for c in chunks if c.path_in_schema.split(".")[0] == column]
        return nested or [c for c in chunks if c.path_in_schema == column]

    def _blocks(self, group: int, column: str) -> dict[int, bytes]:
        spans: list[list[int]] = []
        for chunk in self._chunks(group, column):
            first = chunk.data_page_offset
            if chunk.dictionary_page_offset is not None:
                first = min(first, chunk.dictionary_page_offset)
            if spans and spans[-1][1] == first:  # bytes and paths are neighbours
                spans[-1][1] += chunk.total_compressed_size
            else:
                spans.append([first, first + chunk.total_compressed_size])
        return {first: self.file.read(first, end - first) for first, end in spans}


class _PartialFile(io.RawIOBase):
    """A file of which only some blocks are known, by the place of their first byte."""

    def __init__(self, size: int, blocks: dict[int, bytes]) -> None:
        self._size, self._blocks, self._place = size, blocks, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        self._place = start + offset
        return self._place

    def read(self, size: int = -1) -> bytes:
        for first, block in self._blocks.items():
            if first <= self._place < first + len(block):
                start = self._place - first
                part = block[start : start + size] if size >= 0 else block[start:]
                self._place += len(part)
                return part
        raise OSError(f"byte {self._place} is not part of the column")


def open_shards(files: Sequence[LocalFile | HubFile]) -> list[Shard]:
    """Read the footer of each file.

    Raises: DataError for a file that is not parquet; HubError for the hub's faults.
    """
    return list(in_threads(_open_shard, files, _THREADS))


def _open_shard(file: LocalFile | HubFile) -> Shard:
    tail = file.read(max(file.size - _TAIL_BYTES, 0), min(_TAIL_BYTES, file.size)) or b""
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if tail[-4:] != b"PAR1" or length > file.size:
        message = f"{file.title}: not a parquet file, or a damaged one; write it again"
        raise DataError(message, code="data.damaged")
    if length > len(tail):
        tail = file.read(file.size - length, length)
    shard = Shard(file, tail[-length:])
    try:
        assert shard.schema is not None
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{file.title}: not a parquet file, or a damaged one ({error}); write it again",
            code="data.damaged",
        ) from None
    return shard


def label_column(shards: Sequence[Shard], column: str, image: str) -> pa.ChunkedArray:
    """Read the labels of all shards.

    Args:
        image: the column of the images, which every shard must have, too.
    Raises: DataError if a column is missing or of another type; HubError for the hub's faults.
    """
    for shard in shards:
        for name in (column, image):
            if name not in shard.schema.names:
                raise DataError(
                    f"{shard.file.title}: has no column {name!r}, which others have; write all "
                    "alike",
                    code="data.no_column",
                )
        chunk_of(shard.file.title, (), 0, pa.array([], shard.schema.field(image).type))
    groups = [(shard, group) for shard in shards for group in range(len(shard.lengths()))]
    labels = list(in_threads(lambda place: place[0].read(place[1], column), groups, _THREADS))
    try:
        kind = shards[0].schema.field(column).type
        return pa.chunked_array([chunk for part in labels for chunk in part.chunks], kind)
    except (pa.ArrowException, TypeError, ValueError) as error:
        message = f"{column}: this column cannot be read ({error})"
        raise DataError(message, code="data.damaged") from None
