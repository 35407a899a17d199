"""Read footers and single columns of row groups from parquet shards."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from finetune.data.columns import declared_class_names
from finetune.data.encoded_images import TableChunk
from finetune.data.streaming.shard_file import ShardFile, open_stream
from finetune.data.thread_pool import NUM_REQUEST_THREADS, thread_map
from finetune.errors import DataError

__all__ = ["ParquetShard", "make_chunk", "open_shards", "read_label_column"]

_TAIL_BYTES = 2**16  # Arrow first reads this much of the end; most footers are shorter
_FOOTER_END_BYTES = 8  # the length of the metadata, and the magic number


def make_chunk(
    title: str, folders: tuple[Path, ...], first_row: int, array: pa.Array
) -> TableChunk:
    """Build a `TableChunk` from an image column: bytes, or structs of bytes and path.

    Raises: DataError for any other column type.
    """
    encoded, paths = array, None
    if pa.types.is_struct(array.type) and array.type.get_field_index("bytes") >= 0:
        encoded = array.field("bytes")
        if pa.types.is_null(encoded.type):  # all images are files
            encoded = encoded.cast(pa.binary())
        paths = array.field("path") if array.type.get_field_index("path") >= 0 else None
    if pa.types.is_binary(encoded.type) or pa.types.is_large_binary(encoded.type):
        return TableChunk(title, first_row, encoded, paths, folders)
    raise DataError(
        f"{title}: the image column holds {array.type}; expected encoded images as bytes; name "
        "another column with data.image_column, or use a folder: source for image files",
        code="data.wrong_format",
    )


@dataclass(frozen=True, eq=False)
class ParquetShard:
    """A parquet file and its metadata.

    Attributes:
        file: the file to read.
        metadata: the schema, and the offset of each column of each row group.
        content_id: the file's ETag; without one, a hash of its footer, which holds the offset and
            the statistics of each row group.
    """

    file: ShardFile
    metadata: pq.FileMetaData
    content_id: str

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
        """Read one column of one row group with one range read.

        Raises: DataError for damaged bytes; otherwise same as `ShardFile.read`.
        """
        # the chunks of a nested column are adjacent, so the first read fetches all of them
        chunks = self._column_chunks(group, column)
        num_bytes = sum(chunk.total_compressed_size for chunk in chunks)
        buffer_bytes = min(max(num_bytes, 1), max(self.file.size, 1))  # the file may be damaged
        try:
            parquet = pq.ParquetFile(
                open_stream(self.file, buffer_bytes=buffer_bytes),
                metadata=self.metadata,
                pre_buffer=False,  # else Arrow's threads read, and delay the end of the process
                page_checksum_verification=True,
            )
            return parquet.read_row_group(group, columns=[column], use_threads=False).column(column)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DataError(
                f"{self.file.display_name}: row group {group} is damaged ({error}); write the file "
                "again",
                code="data.damaged",
            ) from None

    def _column_chunks(self, group: int, column: str) -> list[Any]:
        rows = self.metadata.row_group(group)
        chunks = [rows.column(number) for number in range(rows.num_columns)]
        nested = [c for c in chunks if c.path_in_schema.split(".")[0] == column]
        return nested or [c for c in chunks if c.path_in_schema == column]


def open_shards(files: Sequence[ShardFile]) -> list[ParquetShard]:
    """Read the metadata of each file.

    Raises: DataError for a file that is not parquet; HubError if the Hub fails.
    """
    return list(thread_map(_open_shard, files, NUM_REQUEST_THREADS))


def _open_shard(file: ShardFile) -> ParquetShard:
    try:
        metadata = pq.read_metadata(open_stream(file, buffer_bytes=_TAIL_BYTES))
        content_id = file.etag
        if not content_id:
            footer_bytes = metadata.serialized_size + _FOOTER_END_BYTES
            footer = file.read(file.size - footer_bytes, footer_bytes)
            content_id = hashlib.sha256(footer).hexdigest()
        shard = ParquetShard(file, metadata, content_id)
        assert shard.schema is not None
    except (pa.ArrowException, OSError, ValueError) as error:
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
    Raises: DataError if a column is missing or of another type, or its class names differ; HubError
        if the Hub fails.
    """
    for shard in shards:
        for name in (column, image_column):
            if name not in shard.schema.names:
                raise DataError(
                    f"{shard.file.display_name}: has no column {name!r}, but other files have; "
                    "write all files with the same columns",
                    code="data.no_column",
                )
        if declared_class_names(shard.schema, column) != declared_class_names(
            shards[0].schema, column
        ):
            raise DataError(
                f"{shard.file.display_name}: its class names differ from those of "
                f"{shards[0].file.display_name}; write all files with the same names in the same "
                "order",
                code="data.split_mismatch",
            )
        make_chunk(
            shard.file.display_name, (), 0, pa.nulls(0, shard.schema.field(image_column).type)
        )
    groups = [(shard, group) for shard in shards for group in range(len(shard.group_lengths()))]
    labels = list(
        thread_map(lambda pair: pair[0].read_group(pair[1], column), groups, NUM_REQUEST_THREADS)
    )
    try:
        column_type = shards[0].schema.field(column).type
        return pa.chunked_array([chunk for part in labels for chunk in part.chunks], column_type)
    except (pa.ArrowException, TypeError, ValueError) as error:
        message = f"column {column!r}: cannot be read ({error}); create its files again"
        raise DataError(message, code="data.damaged") from None
