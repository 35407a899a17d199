"""Read CSV files of images: a header, then one line per image with its path and label.

A multi-label file has either one label column with entries such as `cat|dog`, or `[]` for no label
(labels of lines with the same path are merged), or one column of 0 and 1 per class.

Paths are relative to the CSV file's folder and must stay inside it: a downloaded table must not
name arbitrary local files. Symlinks in this folder are followed, as in class folders.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from finetune.data.columns import OTHER_SPLIT_NAMES, ColumnNames, find_columns_by_name
from finetune.data.decode import open_dataset_file
from finetune.data.split_names import SPLIT_ALIASES, sort_splits
from finetune.errors import DataError, did_you_mean
from finetune.formatting import (
    escape_to_one_line,
    format_bytes,
    pluralize,
    printable_path,
)
from finetune.log import warn_once

__all__ = [
    "LABEL_FILE_NAMES",
    "MAX_FILE_BYTES",
    "ClassNames",
    "find_labels_file",
    "find_training_table",
    "line_error",
    "read_csv",
    "read_records",
    "train_command",
]

_IMAGE_COLUMN_NAMES = (
    "path",
    "image",
    "file_name",
    "filename",
    "file",
    "filepath",
    "image_path",
    "img",
    "image_id",
    "image_name",
    "id",
)
_LABEL_COLUMN_NAMES = ("label", "labels", "class", "class_name", "target", "category")
_ADDED_SUFFIXES = ("", ".jpg", ".jpeg", ".png", ".tif", ".webp")  # tried for names without a suffix
LABEL_FILE_NAMES = ("metadata.csv", "labels.csv")  # in a folder of images
MAX_FILE_BYTES = 2**28  # enough for millions of lines
# pandas writes 0.0 and False
_INDICATOR_VALUES = {"0": False, "1": True, "0.0": False, "1.0": True, "False": False, "True": True}
_SEPARATOR_FRACTION = 0.05  # if | is in a larger share of the labels, it probably is a separator
_MAX_SHOWN_CHARS = 60  # characters of a value in a message


ClassNames: TypeAlias = (
    str | tuple[str, ...]
)  # a class name, or all class names of an image, sorted


class _ImageRow(NamedTuple):
    path: str
    label: ClassNames
    split: str
    group: str
    line: int


def find_labels_file(folder: Path) -> Path | None:
    """Return the CSV file with the labels of a folder's images; None without one.

    The name `metadata.csv` comes from the ImageFolder loader of `datasets`.
    """
    return next((folder / name for name in LABEL_FILE_NAMES if (folder / name).is_file()), None)


def find_training_table(folder: Path) -> Path | None:
    """Return a CSV file that probably lists labels, such as Kaggle's train.csv; None without one.

    A message suggests this file to the user. It is not read without being named, because it is not
    part of the layout of an image folder.
    """
    tables = sorted(folder.glob("*.csv"))
    return next((each for each in tables if re.search("train|label", each.name.lower())), None)


def train_command(file: Path) -> str:
    """Return the command that trains on a CSV file, with its columns if their names are unusual."""
    command = ["finetune", "train", f"csv:{file}"]
    with contextlib.suppress(DataError):
        _, header = next(read_records(file), (0, []))
        others = [name.strip() for name in header]
        for key, usual_names in (
            ("image_column", _IMAGE_COLUMN_NAMES),
            ("label_column", _LABEL_COLUMN_NAMES),
        ):
            usual = next((name for name in others if name.lower() in usual_names), None)
            column = usual or next(iter(others), None)
            if column is not None:
                others.remove(column)
                command += [] if usual else [f"data.{key}={column}"]
    return escape_to_one_line(shlex.join(command))


def read_csv(
    file: Path,
    columns: ColumnNames,
    *,
    split: str | None = None,
    multilabel: bool = False,
) -> tuple[dict[str, list[tuple[str, ClassNames]]], tuple[str, ...], dict[str, str]]:
    """Read the paths and labels of images.

    Args:
        file: path of a UTF-8 file, with fields separated by commas, semicolons or tabs.
        columns: path column, label column or columns, and group column.
        split: split of all images; None to read it from the column "split" (all images are train if
            this column does not exist).
        multilabel: allow any number of labels per image.
    Returns: a dict from split to its sorted images, each as (path relative to the file's folder,
        class name or names); the names of the label columns of 0 and 1, empty if there is one label
        column; and a dict from path to group, empty without a group column.
    Raises: DataError naming the line.
    """
    records = read_records(file)
    _, header = next(records, (0, []))
    header = [name.strip() for name in header]
    if not header:
        message = "has no rows; expected a header such as path,label and one line per image"
        raise DataError(f"{printable_path(file)}: {message}", code="data.empty")
    image_column, split_column, label_columns = _find_columns(
        file, header, columns, multilabel=multilabel
    )
    folder = os.path.join(os.path.abspath(file.parent), "")
    rows: dict[str, _ImageRow] = {}
    repeated = 0
    for line, fields in records:
        try:
            if len(fields) != len(header):
                raise DataError(
                    f"{pluralize(len(fields), 'field')}, but the header has {len(header)}; quote "
                    "fields that contain a separator",
                    code="data.wrong_format",
                )
            values = dict(zip(header, fields, strict=True))
            path = _normalize_image_path(values[image_column], folder)
            label: ClassNames
            if len(label_columns) > 1:
                label = _parse_indicators({name: values[name].strip() for name in label_columns})
            else:
                label = _parse_label(values[label_columns[0]].strip(), multilabel=multilabel)
            row_split = split or "train"
            if split_column is not None:
                row_split = _parse_split(values[split_column], split)
            group = "" if columns.group is None else values[columns.group].strip()
            row = _ImageRow(path, label, row_split, group, line)
            first_row = rows.setdefault(path, row)
            if first_row is row:
                continue
            if multilabel and len(label_columns) == 1 and label and first_row.label:
                # the file may have one line per label
                all_labels = tuple(sorted({*first_row.label, *label}))
                row = row._replace(label=all_labels)
                first_row = rows[path] = first_row._replace(label=all_labels)
            _check_duplicate_row(row, first_row)
            repeated += not multilabel
        except DataError as error:
            raise line_error(file, line, str(error), error.code) from None
    if not rows:
        message = "has no rows below its header; add one line per image"
        raise DataError(f"{printable_path(file)}: {message}", code="data.empty")
    located = _locate_images(file, list(rows.values()))
    _check_files_exist(file, located)
    _check_label_usage(file, label_columns, [row.label for row in located])
    if repeated:
        lines = pluralize(repeated, "repeated line")
        warn_once(f"{printable_path(file)}: {lines} ignored; each image counts once")
    found: dict[str, list[tuple[str, ClassNames]]] = {}
    for row in sorted(located):
        found.setdefault(row.split, []).append((row.path, row.label))
    groups = {} if columns.group is None else {row.path: row.group for row in located}
    indicator_columns = tuple(label_columns) if len(label_columns) > 1 else ()
    return sort_splits(found), indicator_columns, groups


def _check_label_usage(file: Path, columns: Sequence[str], labels: Sequence[ClassNames]) -> None:
    """Warn about class names that look like several joined by |, and about unused columns.

    Args:
        columns: names of the label columns.
        labels: class name or names of each image.
    Raises: DataError for a single column of 0 and 1 in a multi-label dataset.
    """
    with_separator = [label for label in labels if isinstance(label, str) and "|" in label]
    if len(with_separator) > len(labels) * _SEPARATOR_FRACTION:
        warn_once(
            f"{printable_path(file)}: {with_separator[0][:_MAX_SHOWN_CHARS]!r} is read as one "
            f"class, and {len(with_separator):,} of {pluralize(len(labels), 'image')} have such a "
            "label; set data.task=multilabel if | separates several labels"
        )
    label_sets = {label for label in labels if not isinstance(label, str)}
    if len(columns) > 1:
        if unused := sorted({*columns}.difference(*label_sets)):
            names = ", ".join(unused[:5])
            warn_once(f"{printable_path(file)}: columns without a 1 are ignored: {names}")
        return
    is_indicator = label_sets and label_sets <= {(value,) for value in _INDICATOR_VALUES}
    if is_indicator and columns[0].lower() not in _LABEL_COLUMN_NAMES:
        raise DataError(
            f"{printable_path(file)}: only one class, the column {columns[0]!r} of 0 and 1; add a "
            "column for another class, or set data.task=multiclass and "
            f"data.label_column={columns[0]} for the classes 0 and 1",
            code="data.one_class",
        )


def _parse_indicators(texts: Mapping[str, str]) -> tuple[str, ...]:
    """Parse a line of a file that has one column of 0 and 1 per class.

    Args:
        texts: dict from class name to the text of its column.
    Returns: the names of the classes with a 1, sorted.
    Raises: DataError for a value other than 0 and 1.
    """
    for name, text in texts.items():
        if text not in _INDICATOR_VALUES:
            raise DataError(
                f"column {name!r} holds {text[:_MAX_SHOWN_CHARS]!r}; expected 0 or 1 in each class "
                "column; if one column holds the labels, name it with data.label_column",
                code="data.wrong_labels",
            )
    return tuple(sorted(name for name, text in texts.items() if _INDICATOR_VALUES[text]))


def _parse_label(text: str, *, multilabel: bool) -> ClassNames:
    """Parse the class name of an image, or its class names. Raises: DataError if one is missing."""
    if not text:
        none = ", write [] for an image without labels" if multilabel else ""
        raise DataError(
            f"the label is missing; fill it{none} or remove the line", code="data.no_labels"
        )
    if not multilabel:
        return text
    names = () if text == "[]" else tuple(name.strip() for name in text.split("|"))
    if not all(names):
        raise DataError(
            f"the labels {text[:_MAX_SHOWN_CHARS]!r} contain an empty name; write them as cat|dog",
            code="data.wrong_labels",
        )
    return tuple(sorted({*names}))


def line_error(file: Path, line: int, message: str, code: str) -> DataError:
    """Return a DataError that names file and line."""
    return DataError(f"{printable_path(file)}: line {line}: {message}", code=code)


def _read_text(file: Path) -> str:
    """Read a text file. Raises: DataError if it is too large, or not text."""
    try:
        with open_dataset_file(file) as stream:
            body = stream.read(MAX_FILE_BYTES + 1)
    except DataError as error:
        raise DataError(
            f"{printable_path(file)}: {error}; check the path", code=error.code
        ) from None
    if len(body) > MAX_FILE_BYTES:
        message = f"more than {format_bytes(MAX_FILE_BYTES)}; convert it to parquet"
        raise DataError(f"{printable_path(file)}: {message}", code="data.too_large")
    try:
        text, bad = body.decode("utf-8-sig"), body.find(b"\0")
    except UnicodeDecodeError as error:
        text, bad = "", error.start
    if bad >= 0:
        line = body.count(b"\n", 0, bad) + 1
        raise line_error(file, line, "not UTF-8 text; save the file as UTF-8", "data.wrong_format")
    return text


def read_records(file: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield (number of its last line, fields) for each non-empty record of a CSV file.

    Fields are separated by commas, semicolons or tabs, whichever is most frequent in the header.

    Raises: DataError naming the line.
    """
    text = _read_text(file)
    head = text.lstrip().partition("\n")[0]
    delimiter = max(",;\t", key=head.count)
    stream = io.StringIO(text, newline="")
    reader = csv.reader(stream, delimiter=delimiter, strict=True, skipinitialspace=True)
    try:
        for fields in reader:
            if any(fields):
                yield reader.line_num, fields
    except csv.Error as error:
        message = f"{error}; check the quotes of this and of earlier lines"
        raise line_error(file, reader.line_num, message, "data.wrong_format") from None


def _find_columns(
    file: Path, header: Sequence[str], columns: ColumnNames, *, multilabel: bool
) -> tuple[str, str | None, list[str]]:
    """Return the names of the path column, the split column (or None) and the label columns."""
    try:
        image_column, label_columns = find_columns_by_name(
            header,
            columns,
            usual_image_names=_IMAGE_COLUMN_NAMES,
            usual_label_names=_LABEL_COLUMN_NAMES,
            multilabel=multilabel,
        )
    except DataError as error:
        raise line_error(file, 1, str(error), error.code) from None
    split_columns = sorted({name for name in header if name.lower() == "split"})
    if len(split_columns) > 1:
        message = f"the columns {' and '.join(map(repr, split_columns))} differ only in case"
        raise line_error(file, 1, f"{message}; rename one", "data.ambiguous")
    split_column = next(iter(split_columns), None)
    unused = {*header} - {image_column, *label_columns, split_column, columns.group}
    similar = sorted(name for name in unused if name.lower() in OTHER_SPLIT_NAMES)
    if split_column is None and similar:
        warn_once(
            f"{printable_path(file)}: the column {similar[0]!r} is not used; if it says which "
            "split an image is in, name it 'split'"
        )
    if split_column is not None and header.count(split_column) > 1:
        message = f"two columns are named {split_column!r}; rename one"
        raise line_error(file, 1, message, "data.ambiguous")
    return image_column, split_column, label_columns


def _parse_split(text: str, expected_split: str | None) -> str:
    """Parse the split of a line. Raises: DataError if it is unknown or not `expected_split`."""
    split = SPLIT_ALIASES.get(text.strip().lower())
    if split is None or expected_split not in (None, split):
        expected = expected_split or "train, val (or validation) or test"
        raise DataError(
            f"split {text[:_MAX_SHOWN_CHARS]!r}; expected {expected}", code="data.no_split"
        )
    return split


def _normalize_image_path(path: str, folder: str) -> str:
    """Normalize an image path relative to the CSV file's folder.

    Args:
        path: path as written in the file, relative to the folder or absolute.
        folder: absolute path of the CSV file's folder, with a trailing slash.
    Raises: DataError if the path is empty, is a URL, or leads outside the folder.
    """
    if not path:
        raise DataError("the path is missing; fill it or remove the line", code="data.no_image")
    if "://" in path:
        raise DataError(
            f"{path[:_MAX_SHOWN_CHARS]!r} is a URL; download the images and write their paths",
            code="data.no_image",
        )
    full_path = os.path.normpath(os.path.join(folder, path))
    if not full_path.startswith(folder):
        raise DataError(
            f"the path {path[:_MAX_SHOWN_CHARS]!r} leads outside {printable_path(folder)}; put the "
            "CSV file in a folder that contains the images, or a symlink to the images next to it",
            code="data.unsafe",
        )
    return full_path[len(folder) :]


def _check_duplicate_row(row: _ImageRow, other: _ImageRow) -> None:
    """Raise a DataError if an image has two labels, or is in two splits or groups."""
    path = row.path[:_MAX_SHOWN_CHARS]
    if row.label != other.label:
        this, that = (
            (one.label if isinstance(one.label, str) else "|".join(one.label) or "[]")
            for one in (row, other)
        )
        raise DataError(
            f"{path!r} has the label {this[:_MAX_SHOWN_CHARS]!r} here, but "
            f"{that[:_MAX_SHOWN_CHARS]!r} in line {other.line}; keep one",
            code="data.wrong_labels",
        )
    for kind, this, that in (("", row.split, other.split), ("group ", row.group, other.group)):
        if this != that:
            raise DataError(
                f"{path!r} is in {kind}{this[:_MAX_SHOWN_CHARS]} here, but in {kind}"
                f"{that[:_MAX_SHOWN_CHARS]} in line {other.line}; keep one",
                code="data.ambiguous",
            )


def _locate_images(file: Path, rows: list[_ImageRow]) -> list[_ImageRow]:
    """Find images that are in a subfolder, or are listed without their suffix, as on Kaggle.

    Returns: the rows with the paths of all their images, if there is only one such subfolder and
        suffix; otherwise the same rows.
    """
    first = rows[0].path
    if os.path.lexists(file.parent / first):
        return rows
    folders = ["", *sorted(entry.name for entry in os.scandir(file.parent) if entry.is_dir())]
    places = [
        (folder, suffix)
        for folder in folders
        for suffix in _ADDED_SUFFIXES
        if all(os.path.lexists(file.parent / folder / (row.path + suffix)) for row in rows)
    ]
    if len(places) != 1:
        return rows
    ((folder, suffix),) = places
    located = [row._replace(path=os.path.join(folder, row.path + suffix)) for row in rows]
    warn_once(
        f"{printable_path(file)}: the image {first!r} was found as {located[0].path!r}; the other "
        "paths are completed in the same way"
    )
    return located


def _check_files_exist(file: Path, rows: Sequence[_ImageRow]) -> None:
    """Raise a DataError for missing files; broken links and pipes raise when they are read."""
    missing = [row for row in rows if not os.path.lexists(file.parent / row.path)]
    if not missing:
        return
    first = missing[0]
    expected = file.parent / first.path
    hint = "; write / for \\" if "\\" in first.path else ""
    if not hint and expected.parent.is_dir():
        hint = did_you_mean(expected.name, os.listdir(expected.parent)[:1000])
    more = f" (and {len(missing) - 1:,} more)" if len(missing) > 1 else ""
    message = (
        f"no such file {first.path[:_MAX_SHOWN_CHARS]!r}{more}{hint}; fix the path or remove the "
        "line"
    )
    raise line_error(file, first.line, message, "data.not_found")
