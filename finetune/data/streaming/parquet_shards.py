"""Read footers and single columns of row groups from parquet shards."""

from __future__ import annotations

import functools
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from finetune.data.encoded_images import TableChunk
from finetune.data.streaming.remote_file import HubDatasetFile, LocalFile
from finetune.data.thread_pool import thread_map
from finetune.errors import DataError

__all__ = ["ParquetShard", "make_chunk", "open_shards", "read_label_column"]

_TAIL_BYTES = 64 * 2**10  # most footers fit, so one request suffices
_NUM_THREADS = 16  # more than cores: they wait for the Hugging Face Hub
_MAX_TRIES = 2  # a second transfer distinguishes a transfer error from a damaged file


def make_chunk(
    title: str, folders: tuple[Path, ...], first_row: int, array: pa.Array
) -> TableChunk:
    """Build a `TableChunk` from an image column: bytes, or structs of bytes and path.

    Raises: DataError for any other column type.
    """
    column_type = array.type
    if pa.types.is_struct(column_type) and column_type.get_field_index("bytes") >= 0:
        paths = array.field("path") if column_type.get_field_index("path") >= 0 else None
        return TableChunk(title, first_row, array.field("bytes"), paths, folders)
    if pa.types.is_binary(column_type) or pa.types.is_large_binary(column_type):
        return TableChunk(title, first_row, array, None, folders)
    raise DataError(
        f"{title}: the image column holds {column_type}; expected encoded images as bytes; name "
        "another column with data.image_column, or use a folder: source for image files",
        code="data.wrong_format",
    )


@dataclass(frozen=True)
class ParquetShard:
    """A parquet file and its footer.

    Attributes:
        file: the file to read.
        footer: the last bytes of the file, with its metadata.
    """

    file: LocalFile | HubDatasetFile
    footer: bytes

    @functools.cached_property
    def metadata(self) -> pq.FileMetaData:
        """The schema, and the offset of each column of each row group."""
        return pq.read_metadata(io.BytesIO(self.footer))

    @property
    def schema(self) -> pa.Schema:
        """The column types, with the metadata that `datasets` recorded."""
        return self.metadata.schema.to_arrow_schema()

    def group_lengths(self) -> list[int]:
        """Return the number of rows of each row group."""
        return [self.metadata.row_group(g).num_rows for g in range(self.metadata.num_row_groups)]

    def group_num_bytes(self, group: int, column: str) -> int:
        """Return the approximate size in memory of one column of one row group, in bytes."""
        return sum(chunk.total_uncompressed_size for chunk in self._column_chunks(group, column))

    def read_group(self, group: int, column: str) -> pa.ChunkedArray:
        """Read one column of one row group, without the other columns.

        Raises: DataError for damaged bytes; otherwise same as `HubDatasetFile.read`.
        """
        for attempt in range(_MAX_TRIES):
            blocks = self._read_column_blocks(group, column)
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
                if attempt + 1 == _MAX_TRIES:
                    raise DataError(
                        f"{self.file.display_name}: row group {group} is damaged ({error}); "
                        "write the file again",
                        code="data.damaged",
                    ) from None
        raise AssertionError("the last try returns or raises")

    def _column_chunks(self, group: int, column: str) -> list[Any]:
        rows = self.metadata.row_group(group)
        chunks = [rows.column(number) for number in range(rows.num_columns)]
        nested = [c for c in chunks if c.path_in_schema.split(".")[0] == column]
        return nested or [c for c in chunks if c.path_in_schema == column]

    def _read_column_blocks(self, group: int, column: str) -> dict[int, bytes]:
        spans: list[list[int]] = []
        for chunk in self._column_chunks(group, column):
            first = chunk.data_page_offset
            if chunk.dictionary_page_offset is not None:
                first = min(first, chunk.dictionary_page_offset)
            if spans and spans[-1][1] == first:  # the columns of bytes and paths are adjacent
                spans[-1][1] += chunk.total_compressed_size
            else:
                spans.append([first, first + chunk.total_compressed_size])
        return {first: self.file.read(first, end - first) for first, end in spans}


class _PartialFile(io.RawIOBase):
    """A read-only file object that holds only some blocks of a file, by their offset."""

    def __init__(self, size: int, blocks: dict[int, bytes]) -> None:
        self._size, self._blocks, self._position = size, blocks, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = start + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        for first, block in self._blocks.items():
            if first <= self._position < first + len(block):
                start = self._position - first
                part = block[start : start + size] if size >= 0 else block[start:]
                self._position += len(part)
                return part
        raise OSError(f"byte {self._position} is not part of the column")


def open_shards(files: Sequence[LocalFile | HubDatasetFile]) -> list[ParquetShard]:
    """Read the footer of each file.

    Raises: DataError for a file that is not parquet; HubError if the Hub fails.
    """
    return list(thread_map(_open_shard, files, _NUM_THREADS))


def _open_shard(file: LocalFile | HubDatasetFile) -> ParquetShard:
    tail = file.read(max(file.size - _TAIL_BYTES, 0), min(_TAIL_BYTES, file.size)) or b""
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if tail[-4:] != b"PAR1" or length > file.size:
        message = f"{file.display_name}: not a parquet file, or a damaged one; write it again"
        raise DataError(message, code="data.damaged")
    if length > len(tail):
        tail = file.read(file.size - length, length)
    shard = ParquetShard(file, tail[-length:])
    try:
        assert shard.schema is not None
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{file.display_name}: not a parquet file, or a damaged one ({error}); write it again",
            code="data.damaged",
        ) from None
    return shard


def read_label_column(
    shards: Sequence[ParquetShard], column: str, image_column: str
) -> pa.ChunkedArray:
    """Read the label column of all shards.

    Args:
        image_column: image column, which every shard must also have.
    Raises: DataError if a column is missing or of another type; HubError if the Hub fails.
    """
    for shard in shards:
        for name in (column, image_column):
            if name not in shard.schema.names:
                raise DataError(
                    f"{shard.file.display_name}: has no column {name!r}, but other files have; "
                    "write all files with the same columns",
                    code="data.no_column",
                )
        make_chunk(
            shard.file.display_name, (), 0, pa.array([], shard.schema.field(image_column).type)
        )
    groups = [(shard, group) for shard in shards for group in range(len(shard.group_lengths()))]
    labels = list(
        thread_map(lambda pair: pair[0].read_group(pair[1], column), groups, _NUM_THREADS)
    )
    try:
        column_type = shards[0].schema.field(column).type
        return pa.chunked_array([chunk for part in labels for chunk in part.chunks], column_type)
    except (pa.ArrowException, TypeError, ValueError) as error:
        message = f"column {column!r}: cannot be read ({error}); write the files again"
        raise DataError(message, code="data.damaged") from None
