"""Encoded images in a fixed order: rows of a table, files, or an array."""

# N images, H W pixels

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from finetune.data.columns import integers
from finetune.data.decode import decode, open_data
from finetune.data.fingerprint import states_of
from finetune.data.notices import notice
from finetune.errors import DataError
from finetune.text import counted, printable

__all__ = [
    "IMAGE_SUFFIXES",
    "ArrayItems",
    "Chunk",
    "FileItems",
    "Items",
    "Links",
    "RowItems",
    "binaries",
    "tell_ignored",
    "walk_images",
]

IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp", ".dib", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".avif", ".jp2"),
)


class Items(Protocol):
    """Encoded images in a fixed order. Cheap to pickle, and safe to read from several threads.

    The size and the room that are given to `read` are those of `decode`.

    Attributes:
        origin: the name of the files that the images are in, on this machine.
        has_file_each: True if each image is a file of its own.
    """

    @property
    def origin(self) -> str: ...
    @property
    def has_file_each(self) -> bool: ...

    def __len__(self) -> int: ...
    def content(self, row: int) -> bytes: ...
    def read(
        self, row: int, size: int | None = None, room: np.ndarray | None = None
    ) -> np.ndarray: ...
    def name_of(self, row: int) -> str: ...
    def sizes(self) -> np.ndarray: ...
    def states(self, rows: np.ndarray) -> np.ndarray: ...


@dataclass(frozen=True)
class Chunk:
    """Some rows of one table: their encoded images, and the names of these."""

    title: str
    first_row: int
    content: pa.Array
    paths: pa.Array | None
    folders: tuple[Path, ...]  # only files below these are read; relative paths start at the first
    rows: np.ndarray | None = None  # counted from first_row; None: one after the other

    def path(self, offset: int) -> str | None:
        """Return the image's own file name or path; None if the table has none."""
        return None if self.paths is None else self.paths[offset].as_py()

    def file(self, path: str) -> Path:
        """Resolve a path of the table, links included.

        Raises: DataError outside the folders: a table from elsewhere must not name any local file.
        """
        if "\0" not in path and self.folders:
            file = Path(os.path.realpath(self.folders[0] / path))
            if any(file.is_relative_to(os.path.realpath(folder)) for folder in self.folders):
                return file
        allowed = " or ".join(str(folder) for folder in self.folders) or "the table"
        raise DataError(
            f"this path leads outside {allowed} and is not read; put the image there, or its bytes "
            "into the table",
            code="data.unsafe",
        )


class RowItems:
    """Encoded images in Arrow memory. Only the way to load them is pickled, never the images.

    Args:
        files: that it reads; none if they are not known.
    """

    has_file_each = False

    def __init__(
        self, load: Callable[[], list[Chunk]], files: Iterable[Path] = (), column: str = ""
    ) -> None:
        self._load = load
        self._files = [os.fspath(file) for file in files]
        self._states = states_of(self._files)  # from before they are read
        self.origin = "\n".join([column, *self._files])
        self._chunks: list[Chunk] | None = None
        self._starts: list[int] = []
        self._open()

    def _open(self) -> list[Chunk]:
        if self._chunks is None:
            chunks = self._load()
            lengths = (len(chunk.content) for chunk in chunks)
            self._starts = list(itertools.accumulate(lengths, initial=0))
            self._chunks = chunks  # last: other threads do not wait once it is set
        return self._chunks

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_chunks": None, "_starts": []}

    def __len__(self) -> int:
        self._open()
        return self._starts[-1]

    def _locate(self, row: int) -> tuple[Chunk, int]:
        chunks = self._open()
        number = bisect.bisect_right(self._starts, row) - 1
        return chunks[number], row - self._starts[number]

    def content(self, row: int) -> bytes:
        """Return the encoded image of a row. Raises: DataError if it has none."""
        chunk, offset = self._locate(row)
        body: bytes | None = chunk.content[offset].as_py()
        if body is not None:
            return body
        path = chunk.path(offset)
        if not path:
            raise DataError("no image in this row", code="data.no_image")
        with open_data(chunk.file(path)) as stream:  # the hub's image folders: paths only
            return stream.read()

    def read(self, row: int, size: int | None = None, room: np.ndarray | None = None) -> np.ndarray:
        """Decode a row. Returns: (H, W, 3) uint8. Raises: DataError naming the row."""
        try:
            body = self.content(row)
        except DataError as error:
            raise DataError(f"{self.name_of(row)}: {error}", code=error.code) from None
        return decode(body, size=size, name=lambda: self.name_of(row), room=room)

    def name_of(self, row: int) -> str:
        """Return file and row, and the image's own file name if the table has it."""
        chunk, offset = self._locate(row)
        path = chunk.path(offset)
        number = chunk.first_row + (offset if chunk.rows is None else int(chunk.rows[offset]))
        return f"{chunk.title} row {number}" + (f" ({path})" if path else "")

    def sizes(self) -> np.ndarray:
        """Return (N,) int64, the encoded images' sizes in bytes."""
        return np.concatenate([_chunk_sizes(chunk) for chunk in self._open()])

    def states(self, rows: np.ndarray) -> np.ndarray:
        """Return (F, 5) as `states_of`: of the tables, and of files that these rows name."""
        tables = self._states.copy()
        # tables in memory stay as they were read, whatever becomes of their files
        tables[np.any(states_of(self._files) != tables, axis=1), 0] = -1
        files = []
        if any(chunk.content.null_count for chunk in self._open()):
            for row in rows.tolist():
                chunk, offset = self._locate(row)
                if not chunk.content[offset].is_valid and (path := chunk.path(offset)):
                    with contextlib.suppress(DataError):
                        files.append(chunk.file(path))
        return np.concatenate([tables, states_of(files)])


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

    has_file_each = True

    def __init__(self, root: Path, paths: list[str]) -> None:
        self._root = root
        self.origin = os.fspath(root)
        self._paths = binaries([os.fsencode(path) for path in paths])

    def __len__(self) -> int:
        return len(self._paths)

    def _path(self, row: int) -> Path:
        return self._root / os.fsdecode(self._paths[row].as_py())

    def content(self, row: int) -> bytes:
        """Return the file's bytes. Raises: DataError for anything but a readable file."""
        with open_data(self._path(row)) as stream:
            return stream.read()

    def read(self, row: int, size: int | None = None, room: np.ndarray | None = None) -> np.ndarray:
        """Decode a file. Returns: (H, W, 3) uint8. Raises: DataError naming the file."""
        return decode(self._path(row), size=size, name=lambda: self.name_of(row), room=room)

    def name_of(self, row: int) -> str:
        """Return the path in the folder; what is not UTF-8 is escaped."""
        return printable(os.fsdecode(self._paths[row].as_py()))

    def sizes(self) -> np.ndarray:
        """Return (N,) int64 in bytes; 0 for a file whose size cannot be read."""
        return np.array([_size(self._path(row)) for row in range(len(self))], dtype=np.int64)

    def states(self, rows: np.ndarray) -> np.ndarray:
        """Return (rows, 5) as `states_of`."""
        root = os.fsencode(self._root)
        buffers = [None, pa.py_buffer(np.ascontiguousarray(rows, dtype=np.int64))]
        places = pa.Array.from_buffers(pa.int64(), len(rows), buffers)  # as `binaries`
        paths = self._paths.take(places).to_pylist()
        return states_of(os.path.join(root, path) for path in paths)


def binaries(values: Sequence[bytes | memoryview]) -> pa.LargeBinaryArray:
    """Return an Arrow array; `pa.array` would import pandas."""
    ends = np.cumsum([0, *map(len, values)], dtype=np.int64)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(values))]
    return pa.Array.from_buffers(pa.large_binary(), len(values), buffers)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


class Links:
    """Refuses links that lead from one class into another: images would get a wrong label."""

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
        # some places and maybe thousands of classes: the order counts where each file is a link
        others = places & (self._no_links if class_folder is None else self._classes)
        if others and class_folder is not None:
            others -= {os.path.realpath(class_folder)}
        if target in self._above or others:
            raise DataError(
                f"{self._source}: the link {printable(link)} leads to {printable(target)}, which "
                "is another class or holds one; its images would count twice: remove the link",
                code="data.wrong_link",
            )


def walk_images(folder: Path, ignored: Counter[str], links: Links | None = None) -> Iterable[str]:
    """List the image files below a folder, following links to folders but never in circles.

    Args:
        folder: the top; hidden files and folders are skipped.
        ignored: counts the names of files that are no images.
        links: checks each link; None to follow them all.
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
        for entry in _list_folder(parent):
            hidden = entry.name.startswith(".")
            is_folder = _is_folder(entry)
            if hidden and is_folder:
                continue
            suffix = os.path.splitext(entry.name)[1].lower()
            if not is_folder and (hidden or suffix not in IMAGE_SUFFIXES):
                ignored[printable(entry.name)] += 1
                continue
            if links and entry.is_symlink():
                links.check(entry.path, os.fspath(folder))
            if is_folder:
                folders.append(entry.path)
            else:
                yield entry.path
        waiting += reversed(folders)


def tell_ignored(name: str, ignored: Counter[str]) -> None:
    """Log the files that `walk_images` has ignored below a folder of this name, if any."""
    if ignored:
        examples = ", ".join(sorted(ignored)[:5])
        notice(f"{name}: ignored {counted(ignored.total(), 'file')} of other kinds: {examples}")


def _list_folder(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:  # knows links and folders without a stat of each
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        message = f"{printable(folder)}: cannot be listed ({error.strerror})"
        raise DataError(message, code="data.unreadable") from None


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


class ArrayItems:
    """Images that are decoded already."""

    origin = ""
    has_file_each = False

    def __init__(self, images: np.ndarray, title: str) -> None:
        self._images = images.view()  # (N, H, W, 3) uint8
        self._images.flags.writeable = False
        self._title = title

    def __len__(self) -> int:
        return len(self._images)

    def content(self, row: int) -> bytes:
        """Return the pixels' bytes."""
        return bytes(self._images[row].tobytes())

    def read(self, row: int, size: int | None = None, room: np.ndarray | None = None) -> np.ndarray:
        """Return one image, (H, W, 3) uint8, read-only."""
        return self._images[row]

    def name_of(self, row: int) -> str:
        """Return title and number."""
        return f"{self._title} row {row}"

    def sizes(self) -> np.ndarray:
        """Return (N,) int64 in bytes."""
        return np.full(len(self), self._images[0].nbytes, dtype=np.int64)

    def states(self, rows: np.ndarray) -> np.ndarray:
        """Return (0, 5): there are no files."""
        return states_of([])
