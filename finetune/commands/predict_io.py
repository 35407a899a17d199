"""Files to predict, as the user names them, and predictions as CSV, JSONL or text."""

from __future__ import annotations

import array
import contextlib
import csv
import glob
import io
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from PIL import Image

from finetune.data.items import tell_ignored, walk_images
from finetune.errors import DataError, RecipeError, SetupError, visible
from finetune.files import disk_errors, replacing
from finetune.text import confidence

__all__ = [
    "Found",
    "Row",
    "Rows",
    "check_target",
    "describe",
    "find_files",
    "list_files",
    "marked",
    "one_line",
    "refuse_inputs",
    "unreadable",
    "writing",
]

Row = dict[str, Any]

SUFFIXES = (".csv", ".jsonl")
# what a spreadsheet would run; and the mark itself, so that taking one off gives every name back
_MARKED = ("=", "+", "-", "@", "\t", "\r", "\n", "'")
_LISTED = 20  # unreadable files named in a message; the rows have them all


class Rows(Sequence[Row]):
    """Rows of predictions, kept as paths and arrays of numbers.

    A row as a dictionary takes a kilobyte, so 100,000 of them would take more than the network.

    Args:
        class_names: in the order of the logits.
        several: the rows have "labels", too.
    """

    def __init__(self, class_names: Sequence[str], *, several: bool = False) -> None:
        self._names = list(class_names)
        self._keys = ("predictions", "labels") if several else ("predictions",)
        self._paths: list[str] = []
        self._errors: dict[int, str] = {}
        # of all rows and keys, one behind the other; each list begins where _starts says
        self._indices = array.array("i")
        self._confidences = array.array("d")
        self._starts = array.array("q", [0])

    def append(self, row: Row) -> None:
        """Keep a row, as `Classifier.rows` gives it."""
        if "error" in row:
            self._errors[len(self)] = row["error"]
        for key in self._keys:
            for one in row.get(key, ()):
                self._indices.append(one["index"])
                self._confidences.append(one["confidence"])
            self._starts.append(len(self._indices))
        self._paths.append(row["path"])

    def __len__(self) -> int:
        return len(self._paths)

    @overload
    def __getitem__(self, place: int) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> list[Row]: ...
    def __getitem__(self, place: int | slice) -> Row | list[Row]:
        numbers = range(len(self))[place]
        if isinstance(numbers, range):
            return [self[number] for number in numbers]
        path = self._paths[numbers]
        if numbers in self._errors:
            return {"path": path, "error": self._errors[numbers]}
        lists = enumerate(self._keys, numbers * len(self._keys))
        return {"path": path, **{key: self._named(number) for number, key in lists}}

    def _named(self, number: int) -> list[Row]:
        own = slice(self._starts[number], self._starts[number + 1])
        return [
            {"label": self._names[index], "index": index, "confidence": confidence}
            for index, confidence in zip(self._indices[own], self._confidences[own], strict=True)
        ]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (Rows, list, tuple)):
            return NotImplemented
        pairs = zip(self, other, strict=False)
        return len(self) == len(other) and all(mine == its for mine, its in pairs)

    __hash__ = None  # type: ignore[assignment]

    def tolist(self) -> list[Row]:
        """All rows as plain dictionaries, as JSON writes them."""
        return list(self)


def check_target(path: str | Path, *, option: str, suffixes: Sequence[str] = SUFFIXES) -> Path:
    """Refuse a file that could not be written at the end, before any work is done.

    Args:
        path: of the file to be written.
        option: what the user wrote it behind, such as --out.
        suffixes: those that are known.
    Returns: the path.
    Raises: RecipeError for another suffix, SetupError where the file cannot be.
    """
    path = Path(path)
    if path.suffix.lower() not in suffixes:
        raise RecipeError(
            f"{option}: '{path}' has an unknown suffix; use {' or '.join(suffixes)}",
            code="recipe.wrong_value",
        )
    if not path.parent.is_dir():
        raise SetupError(
            f"{option}: the folder '{path.parent}' does not exist; make it first",
            code="setup.not_writable",
        )
    if path.is_dir():
        raise SetupError(
            f"{option}: '{path}' cannot be written (a folder); choose another name",
            code="setup.not_writable",
        )
    if not os.access(path.parent, os.W_OK):
        raise SetupError(
            f"{option}: '{path}' cannot be written (read-only folder); choose another place",
            code="setup.not_writable",
        )
    return path


def refuse_inputs(read: Iterable[str], targets: Mapping[str, Path | None]) -> None:
    """Refuse to write over a file that is read.

    Args:
        read: paths of the images.
        targets: option to the file that is to be written behind it.
    Raises: RecipeError naming both.
    """
    written = {os.path.realpath(path): option for option, path in targets.items() if path}
    for path in read if written else ():
        option = written.get(os.path.realpath(path))
        if option is not None:
            raise RecipeError(
                f"{option}: would replace the image {one_line(path)}; name another",
                code="recipe.conflict",
            )


@contextlib.contextmanager
def writing(path: Path, *, depth: int, several: bool = False) -> Iterator[Callable[[Row], None]]:
    """Write rows to a .csv or .jsonl file one by one; the file is there once all of them are.

    Args:
        path: replaced in one step.
        depth: predictions per row.
        several: the rows have "labels", too.
    Returns: a function that writes one row.
    Raises: SetupError if the system refuses.
    """
    as_text, head = _jsonl_line, ""
    if path.suffix.lower() == ".csv":
        sets = ["labels", "confidences"] if several else []
        as_text, head = _csv_line, _cells(["path", *sets, *_pairs(depth), "error"])
    with replacing(path) as temporary:
        with disk_errors(path):
            # names that are not UTF-8 keep their bytes
            file = temporary.open("w", encoding="utf-8", errors="surrogateescape", newline="")

        def write(row: Row) -> None:
            with disk_errors(path):
                file.write(as_text(row, depth, several))

        try:
            file.write(head)
            yield write
        finally:
            with disk_errors(path):
                file.close()  # what is still buffered may find the disk full


def _pairs(depth: int) -> list[str]:
    return [f"{name}_{rank}" for rank in range(1, depth + 1) for name in ("label", "confidence")]


def _csv_line(row: Row, depth: int, several: bool) -> str:
    """A row per file: path, all labels with their confidences, label_1, confidence_1, …, error."""
    cells: list[str] = []
    if several and (found := row.get("labels")) is not None:  # as `data.csv_file` reads them
        cells = [marked("|".join(one["label"] for one in found) or "[]")]
        cells.append("|".join(f"{one['confidence']:.6f}" for one in found))
    for one in row.get("predictions", ()):
        cells += [marked(one["label"]), f"{one['confidence']:.6f}"]
    cells += [""] * (2 * (depth + several) - len(cells))
    return _cells([marked(row["path"]), *cells, marked(row.get("error", ""))])


def _cells(cells: Sequence[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerow(cells)
    return text.getvalue()


def marked(text: str) -> str:
    """Keep a spreadsheet from running a file name or a label as a formula."""
    return f"'{text}" if text.startswith(_MARKED) else text


def _jsonl_line(row: Row, depth: int, several: bool) -> str:
    # ASCII only: names that are not UTF-8 come back from \udc.. escapes as they were
    return json.dumps(row, allow_nan=False) + "\n"


def unreadable(rows: Iterable[Row]) -> DataError | None:
    """The error to raise once everything else is written, which names the files not read."""
    lines, count = [], 0
    for row in rows:
        if "error" in row:
            count += 1
            if count <= _LISTED:
                lines.append(f"  {one_line(row['path'])}: {row['error']}")
    if not count:
        return None
    if count > _LISTED:
        lines.append(f"  … and {count - _LISTED} more, which a file of --out names")
    which = "1 file was" if count == 1 else f"{count} files were"
    return DataError(
        "\n".join([f"{which} not classified; mend or leave out:", *lines]), code="data.unreadable"
    )


def describe(
    rows: Sequence[Row], *, out: str | Path | None = None, sheet: str | Path | None = None
) -> str:
    """The rows as a table for people, or a line for each file they have been written to."""
    good = [place for place, row in enumerate(rows) if "error" not in row]
    written = []
    if out is not None:
        written.append(f"{out}: {len(good)} of {len(rows)} files classified")
    if sheet is not None:
        written.append(f"{sheet}: contact sheet")
    if out is not None:
        return "\n".join(written)
    width = max((len(one_line(rows[place]["path"])) for place in good), default=0)
    table = (_table_line(rows[place], width) for place in good)
    return "\n".join([*table, *written])


def _table_line(row: Row, width: int) -> str:
    shown = [_with_share(one) for one in row["predictions"]]
    if "labels" in row:  # those below their thresholds stand in brackets
        others = [_with_share(one) for one in row["predictions"] if one not in row["labels"]]
        shown = [_with_share(one) for one in row["labels"]] or ["no label"]
        shown += [f"({'  '.join(others)})"] if others else []
    return f"{one_line(row['path']):{width}}  " + "  ".join(shown)


def _with_share(one: Row) -> str:
    return f"{one_line(one['label'])} {confidence(one['confidence'])}"


def one_line(text: str) -> str:
    """Text without the line breaks and control characters that a terminal would obey."""
    return visible(text, keep="")


Found = tuple[Any, str | None]  # a path or a PIL image, and what is wrong with it


def list_files(paths: Sequence[str]) -> list[Found]:
    """List the images that a command line names.

    Args:
        paths: files, folders, glob patterns, or "-" for a list on standard input, one path a line
            or separated by zero bytes; what it lists are no patterns.
    Returns: see `find_files`.
    Raises: DataError if the list on standard input is empty, RecipeError if it is named twice.
    """
    if list(paths).count("-") > 1:
        raise RecipeError("-: standard input is read once; name it once", code="recipe.conflict")
    files: list[Found] = []
    for path in paths:
        if path == "-":
            files += find_files(_listed_on_stdin(), patterns=False)
        else:
            files += find_files([path])
    return files


def find_files(paths: Iterable[str | Path | Image.Image], *, patterns: bool = True) -> list[Found]:
    """List the images that files, folders and glob patterns name.

    Args:
        paths: an existing path is never taken as a pattern; an image is taken as it is.
        patterns: False takes every path as it is.
    Returns: (path, None), or (path, error) for a name behind which there is nothing.
    """
    files: list[Found] = []
    for given in paths:
        if isinstance(given, Image.Image):
            files.append((given, None))
            continue
        path = os.fspath(given)
        matches = [path]
        if patterns and not os.path.lexists(path) and glob.has_magic(path):
            matches = sorted(glob.glob(path, recursive=True))
            if not matches:
                files.append((path, "no file matches this pattern"))
        for match in matches:
            if not os.path.isdir(match):
                files.append((match, None))
                continue
            ignored: Counter[str] = Counter()
            try:
                inside = sorted(walk_images(Path(match), ignored))
            except DataError as error:
                files.append((match, str(error)))
                continue
            tell_ignored(one_line(match), ignored)
            files += [(file, None) for file in inside] or [(match, "a folder without images")]
    return files


def _listed_on_stdin() -> list[str]:
    """The paths on standard input: what stands between zero bytes, or else on the lines."""
    listed = sys.stdin.buffer.read() if sys.stdin else b""  # None where it was closed
    if b"\0" in listed:
        names = listed.split(b"\0")
    else:
        names = [line.removesuffix(b"\r") for line in listed.split(b"\n")]
    paths = [os.fsdecode(name) for name in names if name]
    if not paths:
        raise DataError(
            "-: the list on standard input is empty; write one path on each line", code="data.empty"
        )
    return paths
