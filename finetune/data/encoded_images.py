"""Encoded images in a fixed order: rows of a table, files of a folder, or an array."""

# N images, F files, H W pixels

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from finetune.data.columns import int64_to_numpy
from finetune.data.decode import decode_image, open_dataset_file
from finetune.data.recorded_digests import RecordedDigests
from finetune.data.stat_signatures import stat_signatures
from finetune.errors import DataError, redact_urls
from finetune.formatting import printable_path

__all__ = [
    "ArrayImages",
    "ConcatImages",
    "EncodedImages",
    "FileImages",
    "TableChunk",
    "TableImages",
    "binary_array",
]


class EncodedImages(Protocol):
    """Protocol for encoded images in a fixed order; several threads may read them.

    `decode` takes the arguments `decode_size` and `buffer` of `decode_image`. After
    `record_digests`, it raises a DataError for a file whose content is not the recorded one.

    Attributes:
        origin: addresses of the files that hold the images, and which images of these files they
            are, for the key of the cached digests; "" if there are none.
        has_file_per_image: True if each image has its own file.
        is_streamed: True if images are read from shards by row group, see `StreamedImages`.
    """

    @property
    def origin(self) -> str: ...
    @property
    def has_file_per_image(self) -> bool: ...
    @property
    def is_streamed(self) -> bool: ...

    def __len__(self) -> int: ...
    def read_bytes(self, row: int) -> bytes: ...
    def decode(
        self, row: int, decode_size: int | None = None, buffer: np.ndarray | None = None
    ) -> np.ndarray: ...
    def name_of(self, row: int) -> str: ...
    def encoded_sizes(self) -> np.ndarray: ...
    def stat_signatures(self, rows: np.ndarray) -> np.ndarray: ...
    def record_digests(self, rows: np.ndarray, digests: np.ndarray) -> None: ...
    def recorded_digests(self, rows: np.ndarray) -> np.ndarray | None: ...


@dataclass(frozen=True)
class TableChunk:
    """Consecutive or selected rows of a table: their encoded images, and paths if it stores any."""

    title: str  # name of the table, for messages
    first_row: int  # number of the first row in the table
    encoded_images: pa.Array
    paths: pa.Array | None
    # folders from which image files may be read; `paths` are relative to the first one
    allowed_folders: tuple[Path, ...]
    rows: np.ndarray | None = None  # row numbers relative to first_row; None if consecutive

    def path_at(self, offset: int) -> str | None:
        """Return the file name or path that the table stores for an image; None if it has none."""
        return None if self.paths is None else self.paths[offset].as_py()

    def resolve_path(self, path: str) -> Path:
        """Resolve a path of the table, including symlinks.

        Raises: DataError for a path outside the allowed folders, because a downloaded table must
            not read other local files.
        """
        if "\0" not in path and self.allowed_folders:
            file = Path(os.path.realpath(self.allowed_folders[0] / path))
            if any(
                file.is_relative_to(os.path.realpath(folder)) for folder in self.allowed_folders
            ):
                return file
        allowed = " or ".join(str(folder) for folder in self.allowed_folders) or "the table"
        raise DataError(
            f"this path leads outside {allowed} and is not read; move the image there, or store "
            "its bytes in the table",
            code="data.unsafe",
        )


class TableImages:
    """Encoded images in Arrow tables.

    Args:
        load_chunks: function that reads the tables.
        files: the files that `load_chunks` reads; empty if unknown.
        column: name of the image column.
    """

    has_file_per_image = False
    is_streamed = False

    def __init__(
        self,
        load_chunks: Callable[[], list[TableChunk]],
        files: Iterable[Path] = (),
        column: str = "",
    ) -> None:
        self._files = [os.fspath(file) for file in files]
        self._stat_signatures = stat_signatures(self._files)  # taken before the files are read
        self.origin = "\n".join([column, *self._files])
        self._chunks = load_chunks()
        lengths = (len(chunk.encoded_images) for chunk in self._chunks)
        self._starts = list(itertools.accumulate(lengths, initial=0))
        self._digests = RecordedDigests(len(self))

    def __len__(self) -> int:
        return self._starts[-1]

    def _locate_row(self, row: int) -> tuple[TableChunk, int]:
        number = bisect.bisect_right(self._starts, row) - 1
        return self._chunks[number], row - self._starts[number]

    def _body_or_path(self, row: int) -> bytes | Path:
        """Return the encoded image of a row, or the path of its file."""
        chunk, offset = self._locate_row(row)
        body: bytes | None = chunk.encoded_images[offset].as_py()
        if body is not None:
            return body
        path = chunk.path_at(offset)
        if not path:
            raise DataError("no image in this row", code="data.no_image")
        # image-folder datasets on the Hugging Face Hub store only paths
        return chunk.resolve_path(path)

    def read_bytes(self, row: int) -> bytes:
        """Return the encoded image of a row. Raises: DataError if the row has no image."""
        image = self._body_or_path(row)
        if isinstance(image, bytes):
            return image
        with open_dataset_file(image) as stream:
            return stream.read()

    def decode(
        self, row: int, decode_size: int | None = None, buffer: np.ndarray | None = None
    ) -> np.ndarray:
        """Decode a row. Returns: (H, W, 3) uint8. Raises: DataError naming the row."""
        try:
            image = self._body_or_path(row)
        except DataError as error:
            raise DataError(f"{self.name_of(row)}: {error}", code=error.code) from None
        return decode_image(
            image if isinstance(image, bytes) else self._digests.open(row, image),
            decode_size=decode_size,
            name=lambda: self.name_of(row),
            buffer=buffer,
        )

    def name_of(self, row: int) -> str:
        """Return the table's title, the row number, and the image's path if the table has one."""
        chunk, offset = self._locate_row(row)
        path = chunk.path_at(offset)
        number = chunk.first_row + (offset if chunk.rows is None else int(chunk.rows[offset]))
        # tables made from lists of URLs have signed URLs as paths
        return f"{chunk.title} row {number}" + (f" ({redact_urls(path)})" if path else "")

    def encoded_sizes(self) -> np.ndarray:
        """Return the size of each encoded image in bytes, (N,) int64."""
        return np.concatenate([_encoded_sizes(chunk) for chunk in self._chunks])

    def stat_signatures(self, rows: np.ndarray) -> np.ndarray:
        """Return the `stat_signatures` of the tables and of these rows' image files, (F, 5)."""
        tables = self._stat_signatures.copy()
        # mark a table file as unsettled if it has changed: the images in memory are the old ones
        tables[np.any(stat_signatures(self._files) != tables, axis=1), 0] = -1
        files = []
        if any(chunk.encoded_images.null_count for chunk in self._chunks):
            for row in rows.tolist():
                chunk, offset = self._locate_row(row)
                if not chunk.encoded_images[offset].is_valid and (path := chunk.path_at(offset)):
                    with contextlib.suppress(DataError):
                        files.append(chunk.resolve_path(path))
        return np.concatenate([tables, stat_signatures(files)])

    def record_digests(self, rows: np.ndarray, digests: np.ndarray) -> None:
        """Record digests (n, 16) of some rows; do nothing if all images are in the table itself."""
        if any(chunk.encoded_images.null_count for chunk in self._chunks):
            self._digests.record(rows, digests)

    def recorded_digests(self, rows: np.ndarray) -> np.ndarray | None:
        """Return the digests (n, 16) of some rows; None unless all of them are recorded."""
        return self._digests.get(rows)


def _encoded_sizes(chunk: TableChunk) -> np.ndarray:
    lengths = pc.binary_length(chunk.encoded_images)
    sizes = int64_to_numpy(pc.fill_null(lengths, 0) if lengths.null_count else lengths)
    if chunk.encoded_images.null_count:
        for offset in np.flatnonzero(chunk.encoded_images.is_null().to_numpy(zero_copy_only=False)):
            path = chunk.path_at(int(offset))
            try:
                sizes[offset] = _file_size(chunk.resolve_path(path)) if path else 0
            except DataError:
                sizes[offset] = 0
    return sizes


class FileImages:
    """Image files below a folder. The paths are bytes in one Arrow array."""

    has_file_per_image = True
    is_streamed = False

    def __init__(self, root: Path, paths: list[str]) -> None:
        self._root = root
        self.origin = os.fspath(root)
        self._paths = binary_array([os.fsencode(path) for path in paths])
        self._digests = RecordedDigests(len(paths))

    def __len__(self) -> int:
        return len(self._paths)

    def _path_of(self, row: int) -> Path:
        return self._root / os.fsdecode(self._paths[row].as_py())

    def read_bytes(self, row: int) -> bytes:
        """Return the bytes of a file. Raises: DataError unless it is a readable regular file."""
        with open_dataset_file(self._path_of(row)) as stream:
            return stream.read()

    def decode(
        self, row: int, decode_size: int | None = None, buffer: np.ndarray | None = None
    ) -> np.ndarray:
        """Decode a file. Returns: (H, W, 3) uint8. Raises: DataError naming the file."""
        return decode_image(
            self._digests.open(row, self._path_of(row)),
            decode_size=decode_size,
            name=lambda: self.name_of(row),
            buffer=buffer,
        )

    def name_of(self, row: int) -> str:
        """Return the path relative to the folder, with bytes that are not UTF-8 escaped."""
        return printable_path(os.fsdecode(self._paths[row].as_py()))

    def encoded_sizes(self) -> np.ndarray:
        """Return the size of each file in bytes, (N,) int64; 0 if it cannot be read."""
        return np.array(
            [_file_size(self._path_of(row)) for row in range(len(self))], dtype=np.int64
        )

    def stat_signatures(self, rows: np.ndarray) -> np.ndarray:
        """Return the `stat_signatures` of the files of these rows, (F, 5)."""
        root = os.fsencode(self._root)
        buffers = [None, pa.py_buffer(np.ascontiguousarray(rows, dtype=np.int64))]
        indices = pa.Array.from_buffers(pa.int64(), len(rows), buffers)  # see `binary_array`
        paths = self._paths.take(indices).to_pylist()
        return stat_signatures(os.path.join(root, path) for path in paths)

    def record_digests(self, rows: np.ndarray, digests: np.ndarray) -> None:
        """Record digests (n, 16) of some rows."""
        self._digests.record(rows, digests)

    def recorded_digests(self, rows: np.ndarray) -> np.ndarray | None:
        """Return the digests (n, 16) of some rows; None unless all of them are recorded."""
        return self._digests.get(rows)


def binary_array(values: Sequence[bytes | memoryview]) -> pa.LargeBinaryArray:
    """Return an Arrow array of bytes; `pa.array` would import pandas."""
    ends = np.cumsum([0, *map(len, values)], dtype=np.int64)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(values))]
    return pa.Array.from_buffers(pa.large_binary(), len(values), buffers)


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


class ArrayImages:
    """Images that are already decoded, in one array."""

    origin = ""
    has_file_per_image = False
    is_streamed = False

    def __init__(self, images: np.ndarray, title: str) -> None:
        self._images = images.view()  # (N, H, W, 3) uint8
        self._images.flags.writeable = False
        self._title = title

    def __len__(self) -> int:
        return len(self._images)

    def read_bytes(self, row: int) -> bytes:
        """Return the bytes of the pixels."""
        return bytes(self._images[row].tobytes())

    def decode(
        self, row: int, decode_size: int | None = None, buffer: np.ndarray | None = None
    ) -> np.ndarray:
        """Return one image, (H, W, 3) uint8, read-only."""
        return self._images[row]

    def name_of(self, row: int) -> str:
        """Return the title of the array, and the row."""
        return f"{self._title} row {row}"

    def encoded_sizes(self) -> np.ndarray:
        """Return the size of each image in bytes, (N,) int64."""
        return np.full(len(self), self._images[0].nbytes, dtype=np.int64)

    def stat_signatures(self, rows: np.ndarray) -> np.ndarray:
        """Return an empty array, (0, 5), because the images are not in files."""
        return stat_signatures([])

    def record_digests(self, rows: np.ndarray, digests: np.ndarray) -> None:
        """Do nothing, because the images cannot change."""

    def recorded_digests(self, rows: np.ndarray) -> None:
        """Return None, because none are recorded."""


class ConcatImages:
    """Concatenation of two collections of images."""

    def __init__(self, first: EncodedImages, second: EncodedImages) -> None:
        self._first, self._second = first, second
        self.origin = f"{first.origin}\n{second.origin}"
        self.is_streamed = False
        self.has_file_per_image = first.has_file_per_image and second.has_file_per_image

    def _locate(self, row: int) -> tuple[EncodedImages, int]:
        second_row = row - len(self._first)
        return (self._first, row) if second_row < 0 else (self._second, second_row)

    def __len__(self) -> int:
        return len(self._first) + len(self._second)

    def read_bytes(self, row: int) -> bytes:
        """Return the encoded image of a row. Raises: DataError if the row has no image."""
        images, own = self._locate(row)
        return images.read_bytes(own)

    def decode(
        self, row: int, decode_size: int | None = None, buffer: np.ndarray | None = None
    ) -> np.ndarray:
        """Decode a row. Returns: (H, W, 3) uint8. Raises: DataError naming the image."""
        images, own = self._locate(row)
        return images.decode(own, decode_size, buffer)

    def name_of(self, row: int) -> str:
        """Return the name of the image in its collection."""
        images, own = self._locate(row)
        return images.name_of(own)

    def encoded_sizes(self) -> np.ndarray:
        """Return the size of each encoded image in bytes, (N,) int64."""
        return np.concatenate([self._first.encoded_sizes(), self._second.encoded_sizes()])

    def stat_signatures(self, rows: np.ndarray) -> np.ndarray:
        """Return the `stat_signatures`, (F, 5); in row order if each image has its own file."""
        in_second = rows >= len(self._first)
        first = self._first.stat_signatures(rows[~in_second])
        second = self._second.stat_signatures(rows[in_second] - len(self._first))
        if not self.has_file_per_image:
            return np.concatenate([first, second])
        signatures = np.empty((len(rows), 5), dtype=np.int64)
        signatures[~in_second], signatures[in_second] = first, second
        return signatures

    def record_digests(self, rows: np.ndarray, digests: np.ndarray) -> None:
        """Record digests (n, 16) of some rows."""
        in_second = rows >= len(self._first)
        self._first.record_digests(rows[~in_second], digests[~in_second])
        self._second.record_digests(rows[in_second] - len(self._first), digests[in_second])

    def recorded_digests(self, rows: np.ndarray) -> np.ndarray | None:
        """Return the digests (n, 16) of some rows; None unless all of them are recorded."""
        in_second = rows >= len(self._first)
        first = self._first.recorded_digests(rows[~in_second])
        second = self._second.recorded_digests(rows[in_second] - len(self._first))
        if first is None or second is None:
            return None
        digests = np.empty((len(rows), first.shape[1]), dtype=np.uint8)
        digests[~in_second], digests[in_second] = first, second
        return digests
