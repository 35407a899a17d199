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

from finetune.data.columns import integers
from finetune.data.decode import decode, open_data
from finetune.errors import DataError
from finetune.text import printable

__all__ = [
    "ArrayItems",
    "Chunk",
    "FileItems",
    "Items",
    "Links",
    "RowItems",
    "walk_images",
]

_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".dib", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".avif", ".jp2"),
)


class Items(Protocol):
    """Encoded images in a fixed order. Cheap to pickle, and safe to read from several threads.

    The size and the room that are given to `read` are those of `decode`.
    """

    def __len__(self) -> int: ...
    def content(self, row: int) -> bytes: ...
    def read(
        self, row: int, size: int | None = None, room: np.ndarray | None = None
    ) -> np.ndarray: ...
    def name_of(self, row: int) -> str: ...
    def sizes(self) -> np.ndarray: ...


@dataclass(frozen=True)
class Chunk:
    """Some rows of one table: their encoded images, and what to call them."""

    title: str
    first_row: int
    content: pa.Array
    paths: pa.Array | None
    folders: tuple[Path, ...]  # only files below these are read; relative paths start at the first

    def path(self, offset: int) -> str | None:
        """The picture's own file name or path, where the table has one."""
        return None if self.paths is None else self.paths[offset].as_py()

    def file(self, path: str) -> Path:
        """The file that a path of the table means, links resolved.

        Raises: DataError outside the folders: a table from elsewhere must not name any local file.
        """
        if "\0" not in path and self.folders:
            file = Path(os.path.realpath(self.folders[0] / path))
            if any(file.is_relative_to(os.path.realpath(folder)) for folder in self.folders):
                return file
        where = " or ".join(str(folder) for folder in self.folders) or "the table"
        raise DataError(
            f"this path leads outside {where} and is not read; put the image there, or its bytes "
            "into the table"
        )


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
        with open_data(chunk.file(path)) as stream:  # the hub's image folders: paths only
            return stream.read()

    def read(self, row: int, size: int | None = None, room: np.ndarray | None = None) -> np.ndarray:
        """Decode a row. Returns: (H, W, 3) uint8. Raises: DataError naming the row."""
        try:
            body = self.content(row)
        except DataError as error:
            raise DataError(f"{self.name_of(row)}: {error}") from None
        return decode(body, size=size, name=lambda: self.name_of(row), room=room)

    def name_of(self, row: int) -> str:
        """File and row, and the picture's own file name if the table has it."""
        chunk, offset = self._locate(row)
        path = chunk.path(offset)
        return f"{chunk.title} row {chunk.first_row + offset}" + (f" ({path})" if path else "")

    def sizes(self) -> np.ndarray:
        """(N,) int64, the encoded images' sizes in bytes."""
        return np.concatenate([_chunk_sizes(chunk) for chunk in self._open()])


def _chunk_sizes(chunk: Chunk) -> np.ndarray:
    lengths = pc.binary_length(chunk.content)
    sizes = integers(pc.fill_null(lengths, 0) if lengths.null_count else lengths)
    if chunk.content.null_count:
        for offset in np.flatnonzero(chunk.content.is_null().to_numpy(zero_copy_only=False)):
            path = chunk.path(int(offset))
            try:
                sizes[offset] = _size(chunk.file(path)) if path else 0
            except DataError:
                sizes[offset] = 0
    return sizes


class FileItems:
    """Image files under a folder. The paths are bytes in one Arrow array: quick to pickle."""

    def __init__(self, root: Path, paths: list[str]) -> None:
        self._root = root
        self._paths = _binaries([os.fsencode(path) for path in paths])

    def __len__(self) -> int:
        return len(self._paths)

    def _path(self, row: int) -> Path:
        return self._root / os.fsdecode(self._paths[row].as_py())

    def content(self, row: int) -> bytes:
        """The file's bytes. Raises: DataError for anything but a readable file."""
        with open_data(self._path(row)) as stream:
            return stream.read()

    def read(self, row: int, size: int | None = None, room: np.ndarray | None = None) -> np.ndarray:
        """Decode a file. Returns: (H, W, 3) uint8. Raises: DataError naming the file."""
        return decode(self._path(row), size=size, name=lambda: self.name_of(row), room=room)

    def name_of(self, row: int) -> str:
        """The path in the folder, printable also when it is not UTF-8."""
        return printable(os.fsdecode(self._paths[row].as_py()))

    def sizes(self) -> np.ndarray:
        """(N,) int64 in bytes; 0 for what cannot be looked at."""
        return np.array([_size(self._path(row)) for row in range(len(self))], dtype=np.int64)


def _binaries(values: list[bytes]) -> pa.LargeBinaryArray:
    """An array of them; pyarrow's own way would import pandas."""
    ends = np.cumsum([0, *map(len, values)], dtype=np.int64)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(values))]
    return pa.Array.from_buffers(pa.large_binary(), len(values), buffers)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


class Links:
    """Refuses links that lead from one class into another: an image would get a wrong label."""

    def __init__(self, class_folders: Iterable[Path], source: str) -> None:
        self._source = source
        folders = list(class_folders)
        self._classes = {os.path.realpath(folder) for folder in folders}
        self._no_links = {os.path.realpath(folder) for folder in folders if not folder.is_symlink()}
        self._above = {str(up) for folder in self._classes for up in Path(folder).parents}
        for folder in folders:
            if folder.is_symlink():
                self.check(os.fspath(folder), None)

    def check(self, link: str, class_folder: str | None) -> None:
        """Refuse a link to another class or above a class.

        Args:
            link: the path of a link; links to its own class, or out of the data set, are fine.
            class_folder: where it was found; None for the link that is a class folder itself.
        Raises: DataError naming link and target.
        """
        target = os.path.realpath(link)
        places = {target, *(str(up) for up in Path(target).parents)}
        if class_folder is None:
            others = self._no_links
        else:
            others = self._classes - {os.path.realpath(class_folder)}
        if target in self._above or places & others:
            raise DataError(
                f"{self._source}: the link {printable(link)} leads to {printable(target)}, which "
                "is another class or holds one; its images would count twice: remove the link"
            )


def walk_images(folder: Path, ignored: Counter[str], links: Links | None = None) -> Iterable[str]:
    """List the image files below a folder, following links to folders but never in circles.

    Args:
        folder: where to begin; hidden files and folders are passed over.
        ignored: counts the names of files that are no images.
        links: what checks each link; None to follow them all.
    Returns: their paths, in no order. A file is an image by its suffix; nothing is opened.
    Raises: DataError for a folder that cannot be listed, or a link that is refused.
    """
    seen = set()
    waiting = [os.fspath(folder)]
    while waiting:
        parent = waiting.pop()
        identity = os.path.realpath(parent)
        if identity in seen:
            continue
        seen.add(identity)
        folders = []
        for entry in _listed(parent):
            hidden = entry.name.startswith(".")
            is_folder = _is_folder(entry)
            if hidden and is_folder:
                continue
            if not is_folder and (hidden or _suffix(entry.name) not in _SUFFIXES):
                ignored[printable(entry.name)] += 1
                continue
            if links and entry.is_symlink():
                links.check(entry.path, os.fspath(folder))
            if is_folder:
                folders.append(entry.path)
            else:
                yield entry.path
        waiting += reversed(folders)


def _listed(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:  # tells links and folders apart without looking at each
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(f"{printable(folder)}: cannot be listed ({error.strerror})") from None


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


class ArrayItems:
    """Images already decoded."""

    def __init__(self, images: np.ndarray, title: str) -> None:
        self._images = images.view()  # (N, H, W, 3) uint8
        self._images.flags.writeable = False
        self._title = title

    def __len__(self) -> int:
        return len(self._images)

    def content(self, row: int) -> bytes:
        """The pixels' bytes."""
        return bytes(self._images[row].tobytes())

    def read(self, row: int, size: int | None = None, room: np.ndarray | None = None) -> np.ndarray:
        """One image. Returns: (H, W, 3) uint8, not to be written to."""
        return self._images[row]

    def name_of(self, row: int) -> str:
        """Title and number."""
        return f"{self._title} row {row}"

    def sizes(self) -> np.ndarray:
        """(N,) int64 in bytes."""
        return np.full(len(self), self._images[0].nbytes, dtype=np.int64)
