"""Encoded images in a fixed order, wherever they are: rows of a table, files, or an array."""

# N images, H W pixels

from __future__ import annotations

import bisect
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from finetune.data.decode import decode, open_regular, printable
from finetune.errors import DataError

__all__ = ["ArrayItems", "Chunk", "FileItems", "Items", "RowItems", "walk_images"]

_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".dib", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".avif", ".jp2", ".ico"),
)


class Items(Protocol):
    """Encoded images in a fixed order. Cheap to pickle, and safe to read from several threads."""

    def __len__(self) -> int: ...
    def content(self, row: int) -> bytes: ...
    def read(self, row: int) -> np.ndarray: ...
    def name_of(self, row: int) -> str: ...
    def sizes(self) -> np.ndarray: ...


@dataclass(frozen=True)
class Chunk:
    """Some rows of one table: their encoded images, and what to call them."""

    title: str
    first_row: int
    content: pa.Array
    paths: pa.Array | None
    folder: Path  # what relative paths start from

    def path(self, offset: int) -> str | None:
        """The picture's own file name or path, where the table has one."""
        return None if self.paths is None else self.paths[offset].as_py()


class RowItems:
    """Encoded images in Arrow memory. Only the way to load them is pickled, never the images."""

    def __init__(self, load: Callable[[], list[Chunk]]) -> None:
        self._load = load
        self._chunks: list[Chunk] | None = None
        self._starts: list[int] = []
        self._open()

    def _open(self) -> list[Chunk]:
        if self._chunks is None:
            chunks = self._load()
            lengths = (len(chunk.content) for chunk in chunks)
            self._starts = list(itertools.accumulate(lengths, initial=0))
            self._chunks = chunks  # last: another thread takes it as the sign that all is there
        return self._chunks

    def __getstate__(self) -> dict[str, Any]:
        return {"_load": self._load, "_chunks": None, "_starts": []}

    def __len__(self) -> int:
        self._open()
        return self._starts[-1]

    def _locate(self, row: int) -> tuple[Chunk, int]:
        chunks = self._open()
        number = bisect.bisect_right(self._starts, row) - 1
        return chunks[number], row - self._starts[number]

    def content(self, row: int) -> bytes:
        """The encoded image of a row. Raises: DataError where it has none."""
        chunk, offset = self._locate(row)
        body: bytes | None = chunk.content[offset].as_py()
        if body is not None:
            return body
        path = chunk.path(offset)
        if not path:
            raise DataError("no image in this row")
        with open_regular(chunk.folder / path) as stream:  # the hub's image folders: paths only
            return stream.read()

    def read(self, row: int) -> np.ndarray:
        """Decode a row. Returns: (H, W, 3) uint8. Raises: DataError naming the row."""
        try:
            body = self.content(row)
        except DataError as error:
            raise DataError(f"{self.name_of(row)}: {error}") from None
        return decode(body, name=lambda: self.name_of(row))

    def name_of(self, row: int) -> str:
        """File and row, and the picture's own file name if the table has it."""
        chunk, offset = self._locate(row)
        path = chunk.path(offset)
        return f"{chunk.title} row {chunk.first_row + offset}" + (f" ({path})" if path else "")

    def sizes(self) -> np.ndarray:
        """(N,) int64, the encoded images' sizes in bytes."""
        return np.concatenate([_chunk_sizes(chunk) for chunk in self._open()])


def _chunk_sizes(chunk: Chunk) -> np.ndarray:
    lengths = pc.fill_null(pc.binary_length(chunk.content), 0)
    sizes = np.array(lengths.to_numpy(zero_copy_only=False), dtype=np.int64)
    if chunk.content.null_count:
        for offset in np.flatnonzero(chunk.content.is_null().to_numpy(zero_copy_only=False)):
            path = chunk.path(int(offset))
            sizes[offset] = _size(chunk.folder / path) if path else 0
    return sizes


class FileItems:
    """Image files under a folder. The paths are bytes in one Arrow array: quick to pickle."""

    def __init__(self, root: Path, paths: list[str]) -> None:
        self._root = root
        self._paths = pa.array([os.fsencode(path) for path in paths], type=pa.large_binary())

    def __len__(self) -> int:
        return len(self._paths)

    def _path(self, row: int) -> Path:
        return self._root / os.fsdecode(self._paths[row].as_py())

    def content(self, row: int) -> bytes:
        """The file's bytes. Raises: DataError for anything but a readable file."""
        with open_regular(self._path(row)) as stream:
            return stream.read()

    def read(self, row: int) -> np.ndarray:
        """Decode a file. Returns: (H, W, 3) uint8. Raises: DataError naming the file."""
        return decode(self._path(row), name=lambda: self.name_of(row))

    def name_of(self, row: int) -> str:
        """The path in the folder, printable also when it is not UTF-8."""
        return printable(os.fsdecode(self._paths[row].as_py()))

    def sizes(self) -> np.ndarray:
        """(N,) int64 in bytes; 0 for what cannot be looked at."""
        return np.array([_size(self._path(row)) for row in range(len(self))], dtype=np.int64)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def walk_images(folder: Path, ignored: Counter[str]) -> Iterable[str]:
    """List the image files below a folder, following links to folders but never in circles.

    Args:
        folder: where to begin; hidden files and folders are passed over.
        ignored: counts the names of files that are no images.
    Returns: their paths, in no order. A file is an image by its suffix; nothing is opened.
    Raises: DataError for a folder that cannot be listed.
    """

    def refuse(error: OSError) -> None:
        raise DataError(f"{printable(error.filename)}: cannot be listed ({error.strerror})")

    seen = set()
    for parent, folders, files in os.walk(folder, followlinks=True, onerror=refuse):
        identity = os.path.realpath(parent)
        if identity in seen:
            folders.clear()
            continue
        seen.add(identity)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in files:
            if name.startswith(".") or os.path.splitext(name)[1].lower() not in _SUFFIXES:
                ignored[printable(name)] += 1
            else:
                yield os.path.join(parent, name)


class ArrayItems:
    """Images already decoded."""

    def __init__(self, images: np.ndarray, title: str) -> None:
        self._images = images  # (N, H, W, 3) uint8
        self._title = title

    def __len__(self) -> int:
        return len(self._images)

    def content(self, row: int) -> bytes:
        """The pixels' bytes."""
        return bytes(self._images[row].tobytes())

    def read(self, row: int) -> np.ndarray:
        """A copy of one image. Returns: (H, W, 3) uint8."""
        return np.array(self._images[row])

    def name_of(self, row: int) -> str:
        """Title and number."""
        return f"{self._title} row {row}"

    def sizes(self) -> np.ndarray:
        """(N,) int64 in bytes."""
        return np.full(len(self), self._images[0].nbytes, dtype=np.int64)
