"""CSV files of images: a header, and for each image a line with its path and its label.

Where an image has several, the label is `cat|dog`, or `[]` for none of them, and lines of the same
path are joined; or each class has a column of 0 and 1.

Paths start at the folder of the file and must stay in it: a table from elsewhere is not to name any
file of this machine. Links in that folder are followed, as those of a folder of classes are.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from finetune.data.columns import SPLITS, in_order
from finetune.data.decode import open_data
from finetune.data.notices import notice
from finetune.errors import DataError, nearest
from finetune.text import byte_size, counted, printable

__all__ = ["Label", "labels_file", "read_csv"]

_IMAGE_NAMES = ("path", "image", "file_name", "filename", "file", "filepath", "image_path", "img")
_LABEL_NAMES = ("label", "labels", "class", "class_name", "target", "category")
_FILES = ("metadata.csv", "labels.csv")  # in a folder of images
_MOST_BYTES = 2**28  # of a file: millions of lines
# pandas writes the latter
_FLAGS = {"0": False, "1": True, "0.0": False, "1.0": True, "False": False, "True": True}
_SEVERAL = 0.05  # of the images: with | in more labels than that, it may well be a separator
_LISTED = 60  # characters of a text in a message


Columns: TypeAlias = tuple[str | None, str | tuple[str, ...] | None]
Label: TypeAlias = str | tuple[str, ...]  # a class, or all those of an image, sorted


class _Row(NamedTuple):
    path: str
    label: Label
    split: str
    line: int


def labels_file(folder: Path) -> Path | None:
    """The CSV file that names the images of a folder, as `datasets` has it; None without one."""
    return next((folder / name for name in _FILES if (folder / name).is_file()), None)


def read_csv(
    file: Path,
    columns: Columns = (None, None),
    *,
    split: str | None = None,
    multilabel: bool = False,
) -> tuple[dict[str, list[tuple[str, Label]]], tuple[str, ...]]:
    """Read the paths and the labels of images.

    Args:
        file: UTF-8, with commas, semicolons or tabs between fields.
        columns: of paths and of labels; None to find them by their usual names.
        split: that all images belong to; None for that of the column `split`, or train.
        multilabel: an image has any number of labels.
    Returns: (path in the file's folder, label) by split, sorted; and the columns of 0 and 1.
    Raises: DataError naming the line.
    """
    records = _records(file, _text(file))
    _, header = next(records, (0, []))
    header = [name.strip() for name in header]
    if not header:
        message = "has no rows; expected a header such as path,label and a line for each image"
        raise DataError(f"{printable(file)}: {message}", code="data.empty")
    image, chooser, labels = _places(file, header, columns, multilabel=multilabel)
    folder = os.path.join(os.path.abspath(file.parent), "")
    rows: dict[str, _Row] = {}
    repeated = 0
    for line, fields in records:
        if len(fields) != len(header):
            message = f"{counted(len(fields), 'field')}, and the header has {len(header)}; quote "
            message += "fields that have a separator in them"
            raise _refused(file, line, message, "data.wrong_format")
        row = _Row(
            _inside(file, line, folder, fields[image]),
            _labels(file, line, header, fields, labels, multilabel=multilabel),
            split or "train" if chooser is None else _split(file, line, fields[chooser], split),
            line,
        )
        if (other := rows.setdefault(row.path, row)) is not row:
            if multilabel and len(labels) == 1 and row.label and other.label:
                rows[row.path] = other = other._replace(label=_joined(row.label, other.label))
                row = row._replace(label=other.label)
            _refuse_contradiction(file, row, other)
            repeated += not multilabel
    if not rows:
        message = "has no rows below its header; add a line for each image"
        raise DataError(f"{printable(file)}: {message}", code="data.empty")
    _refuse_missing(file, list(rows.values()))
    names = tuple(header[place] for place in labels)
    _check_labels(file, names, [row.label for row in rows.values()])
    if repeated:
        lines = counted(repeated, "repeated line")
        notice(f"{printable(file)}: {lines} left out; each image counts once")
    found: dict[str, list[tuple[str, Label]]] = {}
    for row in sorted(rows.values()):
        found.setdefault(row.split, []).append((row.path, row.label))
    return in_order(found), names if len(names) > 1 else ()


def _check_labels(file: Path, columns: Sequence[str], labels: Sequence[Label]) -> None:
    """Give notice of labels that may be meant otherwise.

    Raises: DataError for a lone column of 0 and 1.
    """
    joined = [label for label in labels if isinstance(label, str) and "|" in label]
    if len(joined) > len(labels) * _SEVERAL:
        notice(
            f"{printable(file)}: {joined[0][:_LISTED]!r} is one class, and {len(joined):,} of "
            f"{counted(len(labels), 'image')} have such a label; set data.task=multilabel if | "
            "stands between several"
        )
    sets = [label for label in labels if not isinstance(label, str)]
    if len(columns) > 1:
        if unused := sorted({*columns}.difference(*sets)):
            names = ", ".join(unused[:5])
            notice(f"{printable(file)}: columns without a 1 are no classes: {names}")
    elif columns[0].lower() not in _LABEL_NAMES and {*sets} and {*sets} <= {(n,) for n in _FLAGS}:
        raise DataError(
            f"{printable(file)}: only one class, the column {columns[0]!r} of 0 and 1; add a "
            f"column of another, or set data.task=multiclass and data.label_column={columns[0]} "
            "for the classes 0 and 1",
            code="data.one_class",
        )


def _labels(
    file: Path,
    line: int,
    header: Sequence[str],
    fields: Sequence[str],
    places: Sequence[int],
    *,
    multilabel: bool,
) -> Label:
    """The label of a line, or with `multilabel` all of them. Raises: DataError for what is none."""
    texts = [fields[place].strip() for place in places]
    if len(places) > 1:
        wrong = [place for place, text in zip(places, texts, strict=True) if text not in _FLAGS]
        if wrong:
            column, got = header[wrong[0]], fields[wrong[0]][:_LISTED]
            message = f"column {column!r} holds {got!r}; expected 0 or 1 for each class, or a "
            message += "column of labels named by data.label_column"
            raise _refused(file, line, message, "data.wrong_labels")
        pairs = zip(places, texts, strict=True)
        return tuple(sorted(header[place] for place, text in pairs if _FLAGS[text]))
    (text,) = texts
    if not text:
        none = ", write [] for an image without any" if multilabel else ""
        message = f"the label is missing; fill it{none} or remove the line"
        raise _refused(file, line, message, "data.no_labels")
    if not multilabel:
        return text
    names = () if text == "[]" else tuple(name.strip() for name in text.split("|"))
    if not all(names):
        message = f"the labels {text[:_LISTED]!r} have an empty name; write them as cat|dog"
        raise _refused(file, line, message, "data.wrong_labels")
    return tuple(sorted({*names}))


def _joined(*labels: Label) -> Label:
    return tuple(sorted({name for each in labels for name in each}))


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
            flags = ", or data.task=multilabel for columns of 0 and 1"
            flags = flags if key == "label_column" else ""
            raise _refused(
                file,
                1,
                f"data.{key}: not found; expected a header with {usual[0]!r}{flags}, or name one "
                f"of the columns: {known}",
                "data.no_column",
            )
    if header.count(column) > 1:
        message = f"two columns are called {column!r}; rename one"
        raise _refused(file, 1, message, "data.ambiguous")
    return header.index(column)


def _places(
    file: Path, header: Sequence[str], columns: Columns, *, multilabel: bool
) -> tuple[int, int | None, list[int]]:
    """The places of the path, of the split if there is one, and of the labels."""
    image = _find(file, header, "image_column", columns[0], _IMAGE_NAMES)
    lowered, named = [name.lower() for name in header], columns[1]
    chooser = lowered.index("split") if "split" in lowered else None
    if multilabel and named is None and not {*lowered} & {*_LABEL_NAMES}:
        named = tuple(name for n, name in enumerate(header) if n not in (image, chooser))
    wanted: list[str | None] = [named] if isinstance(named, str) else [*(named or (None,))]
    labels = [_find(file, header, "label_column", one, _LABEL_NAMES) for one in wanted]
    return image, chooser, labels


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
        this, that = (
            one.label if isinstance(one.label, str) else "|".join(one.label) or "[]"
            for one in (row, other)
        )
        both = f"{this[:_LISTED]!r}, and {that[:_LISTED]!r} in line {other.line}"
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
