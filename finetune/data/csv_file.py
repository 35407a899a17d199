"""CSV files of images: a header, and for each image a line with its path and its label.

Paths start at the folder of the file and must stay in it: a table from elsewhere is not to name any
file of this machine. Links in that folder are followed, as those of a folder of classes are.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from finetune.data.columns import SPLITS, in_order
from finetune.data.decode import open_data
from finetune.data.notices import notice
from finetune.errors import DataError, nearest
from finetune.text import byte_size, counted, printable

__all__ = ["labels_file", "read_csv"]

_IMAGE_NAMES = ("path", "image", "file_name", "filename", "file", "filepath", "image_path", "img")
_LABEL_NAMES = ("label", "labels", "class", "class_name", "target", "category")
_FILES = ("metadata.csv", "labels.csv")  # in a folder of images
_MOST_BYTES = 2**28  # of a file: millions of lines
_LISTED = 60  # characters of a text in a message


class _Row(NamedTuple):
    path: str
    label: str
    split: str
    line: int


def labels_file(folder: Path) -> Path | None:
    """The CSV file that names the images of a folder, as `datasets` has it; None without one."""
    return next((folder / name for name in _FILES if (folder / name).is_file()), None)


def read_csv(
    file: Path, columns: tuple[str | None, str | None] = (None, None), *, split: str | None = None
) -> dict[str, list[tuple[str, str]]]:
    """Read the paths and the labels of images.

    Args:
        file: UTF-8, with commas, semicolons or tabs between fields.
        columns: of paths and of labels; None to find them by their usual names.
        split: that all images belong to; None for that of the column `split`, or train.
    Returns: (path in the file's folder, label) by split, sorted.
    Raises: DataError naming the line.
    """
    records = _records(file, _text(file))
    _, header = next(records, (0, []))
    header = [name.strip() for name in header]
    if not header:
        message = "has no rows; expected a header such as path,label and a line for each image"
        raise DataError(f"{printable(file)}: {message}", code="data.empty")
    image = _find(file, header, "image_column", columns[0], _IMAGE_NAMES)
    label = _find(file, header, "label_column", columns[1], _LABEL_NAMES)
    lowered = [name.lower() for name in header]
    chooser = lowered.index("split") if "split" in lowered else None
    folder = os.path.join(os.path.abspath(file.parent), "")
    rows: dict[str, _Row] = {}
    repeated = 0
    for line, fields in records:
        if len(fields) != len(header):
            raise _refused(
                file,
                line,
                f"{counted(len(fields), 'field')}, and the header has {len(header)}; quote fields "
                "that have a separator in them",
                "data.wrong_format",
            )
        row = _Row(
            _inside(file, line, folder, fields[image]),
            fields[label].strip(),
            split or "train" if chooser is None else _split(file, line, fields[chooser], split),
            line,
        )
        if not row.label:
            raise _refused(
                file, line, "the label is missing; fill it or remove the line", "data.no_labels"
            )
        if (other := rows.setdefault(row.path, row)) is not row:
            _refuse_contradiction(file, row, other)
            repeated += 1
    if not rows:
        message = "has no rows below its header; add a line for each image"
        raise DataError(f"{printable(file)}: {message}", code="data.empty")
    _refuse_missing(file, list(rows.values()))
    if repeated:
        lines = counted(repeated, "repeated line")
        notice(f"{printable(file)}: {lines} left out; each image counts once")
    found: dict[str, list[tuple[str, str]]] = {}
    for row in sorted(rows.values()):
        found.setdefault(row.split, []).append((row.path, row.label))
    return in_order(found)


def _refused(file: Path, line: int, message: str, code: str) -> DataError:
    return DataError(f"{printable(file)}: line {line}: {message}", code=code)


def _text(file: Path) -> str:
    """The text of a file. Raises: DataError if it is too large, or no text."""
    try:
        with open_data(file) as stream:
            body = stream.read(_MOST_BYTES + 1)
    except DataError as error:
        raise DataError(f"{printable(file)}: {error}; check the path", code=error.code) from None
    if len(body) > _MOST_BYTES:
        message = f"more than {byte_size(_MOST_BYTES)}; convert it to parquet"
        raise DataError(f"{printable(file)}: {message}", code="data.too_large")
    try:
        text, bad = body.decode("utf-8-sig"), body.find(b"\0")
    except UnicodeDecodeError as error:
        text, bad = "", error.start
    if bad >= 0:
        line = body.count(b"\n", 0, bad) + 1
        raise _refused(file, line, "not UTF-8 text; save the file as UTF-8", "data.wrong_format")
    return text


def _records(file: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield each record that is not empty, with the number of its last line."""
    head = text.lstrip().partition("\n")[0]
    delimiter = max(",;\t", key=head.count)
    stream = io.StringIO(text, newline="")
    reader = csv.reader(stream, delimiter=delimiter, strict=True, skipinitialspace=True)
    try:
        for fields in reader:
            if any(fields):
                yield reader.line_num, fields
    except csv.Error as error:
        message = f"{error}; check the quotes of this line and of those before"
        raise _refused(file, reader.line_num, message, "data.wrong_format") from None


def _find(
    file: Path, header: Sequence[str], key: str, named: str | None, usual: Sequence[str]
) -> int:
    """The place of a column: as named, else by its usual names."""
    known = ", ".join(header)[: 2 * _LISTED]
    if named is not None:
        if named not in header:
            message = f"data.{key}: no column {named!r}{nearest(named, header)}; there is: {known}"
            raise _refused(file, 1, message, "data.no_column")
        column = named
    else:
        by_name = {name.lower(): name for name in reversed(header)}
        column = next((by_name[name] for name in usual if name in by_name), "")
        if not column:
            raise _refused(
                file,
                1,
                f"data.{key}: not found; expected a header with {usual[0]!r}, or name one of the "
                f"columns: {known}",
                "data.no_column",
            )
    if header.count(column) > 1:
        message = f"two columns are called {column!r}; rename one"
        raise _refused(file, 1, message, "data.ambiguous")
    return header.index(column)


def _split(file: Path, line: int, text: str, only: str | None) -> str:
    """The split that a line names. Raises: DataError for an unknown one, or another than `only`."""
    split = SPLITS.get(text.strip().lower())
    if split is None or only not in (None, split):
        expected = only or "train, val (or validation) or test"
        message = f"split {text[:_LISTED]!r}; expected {expected}"
        raise _refused(file, line, message, "data.no_split")
    return split


def _inside(file: Path, line: int, folder: str, path: str) -> str:
    """The path of an image from the file's folder, in its shortest form.

    Args:
        folder: absolute, with a slash at its end.
    Raises: DataError if it is empty or leads elsewhere.
    """
    if not path:
        message = "the path is missing; fill it or remove the line"
        raise _refused(file, line, message, "data.no_image")
    if "://" in path:
        message = f"{path[:_LISTED]!r} is an address; download the images, and write their paths"
        raise _refused(file, line, message, "data.no_image")
    whole = os.path.normpath(os.path.join(folder, path))
    if not whole.startswith(folder):
        raise _refused(
            file,
            line,
            f"the path {path[:_LISTED]!r} leads outside {printable(folder)} and is not read; put "
            "the CSV file above the images, or a link to them beside it",
            "data.unsafe",
        )
    return whole[len(folder) :]


def _refuse_contradiction(file: Path, row: _Row, other: _Row) -> None:
    """Refuse an image that has two labels, or is in two splits."""
    name = row.path[:_LISTED]
    if row.label != other.label:
        both = f"{row.label[:_LISTED]!r}, and {other.label[:_LISTED]!r} in line {other.line}"
        message = f"{name!r} is {both}; keep one"
        raise _refused(file, row.line, message, "data.wrong_labels")
    if row.split != other.split:
        message = f"{name!r} is in {row.split}, and in {other.split} in line {other.line}; keep one"
        raise _refused(file, row.line, message, "data.ambiguous")


def _refuse_missing(file: Path, rows: Sequence[_Row]) -> None:
    """Refuse paths that no file has. A link to nothing, or a pipe, is named when it is read."""
    missing = [row for row in rows if not os.path.lexists(file.parent / row.path)]
    if not missing:
        return
    first = missing[0]
    wanted = file.parent / first.path
    hint = "; write / for \\" if "\\" in first.path else ""
    if not hint and wanted.parent.is_dir():
        hint = nearest(wanted.name, os.listdir(wanted.parent)[:1000])
    more = f" (and {len(missing) - 1:,} more)" if len(missing) > 1 else ""
    message = f"no such file {first.path[:_LISTED]!r}{more}{hint}; correct the path, or remove it"
    raise _refused(file, first.line, message, "data.not_found")
