"""Store predictions compactly, and write them as CSV, JSONL or text."""

from __future__ import annotations

import array
import contextlib
import csv
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from finetune.errors import DataError, RecipeError
from finetune.files import atomic_replace, explain_disk_errors
from finetune.formatting import escape_csv_formula, escape_to_one_line, format_probability
from finetune.inference import PredictionRow
from finetune.log import logger

__all__ = [
    "PredictionTable",
    "check_holds_predictions",
    "format_predictions",
    "open_features_writer",
    "open_prediction_writer",
    "unreadable_files_error",
    "warn_of_separators",
]

PREDICTION_SUFFIXES = (".csv", ".jsonl")
# Optional keys of a row, with their CSV columns: lists of predictions, and flags.
_LIST_KEYS = {
    "labels": ("labels", "confidences"),
    "prediction_set": ("prediction_set", "set_confidences"),
}
EXTRA_KEYS = {**_LIST_KEYS, "abstained": ("abstained",), "unknown": ("unknown",)}
_ROWS_PER_GROUP = 4096  # of a parquet file
_MAX_LISTED_FILES = 20  # unreadable files in the error message; CSV and JSONL list all


class PredictionTable(Sequence[PredictionRow]):
    """A sequence of prediction rows, stored compactly as paths and arrays.

    A dict per row would take about a kilobyte: for 100,000 images, more memory than the network.

    Args:
        class_names: class names in the order of the logits.
        extra_keys: the keys of `EXTRA_KEYS` that the rows also have.
    """

    def __init__(self, class_names: Sequence[str], *, extra_keys: Sequence[str] = ()) -> None:
        self._class_names = list(class_names)
        self._keys = ("predictions", *(key for key in extra_keys if key in _LIST_KEYS))
        self._flags = {key: array.array("b") for key in extra_keys if key not in _LIST_KEYS}
        self._paths: list[str] = []
        self._errors: dict[int, str] = {}
        # concatenated over all rows and keys; _starts holds the offset of each list of predictions
        self._indices = array.array("i")
        self._confidences = array.array("d")
        self._starts = array.array("q", [0])

    def append(self, row: PredictionRow) -> None:
        """Append a row from `Classifier.iter_predictions`."""
        if "error" in row:
            self._errors[len(self)] = row["error"]
        for key in self._keys:
            for prediction in row.get(key, ()):
                self._indices.append(prediction["index"])
                self._confidences.append(prediction["confidence"])
            self._starts.append(len(self._indices))
        for key, flags in self._flags.items():
            flags.append(row.get(key, False))
        self._paths.append(row["path"])

    def __len__(self) -> int:
        return len(self._paths)

    @overload
    def __getitem__(self, index: int) -> PredictionRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[PredictionRow]: ...
    def __getitem__(self, index: int | slice) -> PredictionRow | list[PredictionRow]:
        selected = range(len(self))[index]
        if isinstance(selected, range):
            return [self[row] for row in selected]
        path = self._paths[selected]
        if selected in self._errors:
            return {"path": path, "error": self._errors[selected]}
        lists = enumerate(self._keys, selected * len(self._keys))
        flags = {key: bool(flags[selected]) for key, flags in self._flags.items()}
        rest = {key: self._read_predictions(number) for number, key in lists}
        return {"path": path, **rest, **flags}

    def _read_predictions(self, number: int) -> list[PredictionRow]:
        span = slice(self._starts[number], self._starts[number + 1])
        return [
            {"label": self._class_names[index], "index": index, "confidence": confidence}
            for index, confidence in zip(self._indices[span], self._confidences[span], strict=True)
        ]

    def tolist(self) -> list[PredictionRow]:
        """Return all rows as dicts, for JSON."""
        return list(self)


def check_holds_predictions(path: Path) -> None:
    """Raise RecipeError if a file exists that is not empty and has no predictions."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        head = file.readline(1 << 20)  # the columns of a thousand predictions have 25 kB
    # as `open_prediction_writer` begins a file
    is_csv = head.startswith(b"path,") and head.rstrip().endswith(b",error")
    if head and not (is_csv or head.startswith(b'{"path": ')):
        raise RecipeError(
            f"--out: {escape_to_one_line(str(path))} exists, and has no predictions; choose "
            "another file, or remove it",
            code="recipe.conflict",
        )


def warn_of_separators(class_names: Sequence[str], extra_keys: Sequence[str]) -> None:
    """Warn if cells with several labels, separated by |, cannot be split again."""
    name = next((name for name in class_names if "|" in name), None)
    if name is not None and not {*_LIST_KEYS}.isdisjoint(extra_keys):
        logger.warning(
            f"--out: in a .csv file, | separates the labels of a cell, but the class '{name}' "
            "contains it; write a .jsonl file"
        )


@contextlib.contextmanager
def open_prediction_writer(
    path: Path, *, num_predictions: int, extra_keys: Sequence[str] = ()
) -> Iterator[Callable[[PredictionRow], None]]:
    """Write rows to a .csv or .jsonl file one by one; the file appears when the block ends.

    Args:
        path: the file, replaced atomically.
        num_predictions: number of predictions per row.
        extra_keys: the keys of `EXTRA_KEYS` that the rows also have.
    Yields: a function that writes one row.
    Raises: SetupError if the file cannot be written.
    """
    with atomic_replace(path) as temporary:
        with explain_disk_errors(path):
            # surrogateescape keeps the bytes of file names that are not UTF-8
            file = temporary.open("w", encoding="utf-8", errors="surrogateescape", newline="")
        csv_writer = csv.writer(file) if path.suffix.lower() == ".csv" else None

        def write(row: PredictionRow) -> None:
            with explain_disk_errors(path):
                if csv_writer is not None:
                    csv_writer.writerow(_csv_cells(row, num_predictions, extra_keys))
                else:
                    # ASCII only, so that \udc.. escapes preserve file names that are not UTF-8
                    file.write(json.dumps(row, allow_nan=False) + "\n")

        try:
            if csv_writer is not None:
                csv_writer.writerow(_csv_header(num_predictions, extra_keys))
            yield write
        finally:
            with explain_disk_errors(path):
                file.close()  # flushing the buffer may fail on a full disk
        check_holds_predictions(path)  # another program may have written the file meanwhile


@contextlib.contextmanager
def open_features_writer(path: Path) -> Iterator[Callable[[PredictionRow], None]]:
    """Write the features of rows to a .parquet file; the file appears when the block ends.

    The columns are "path" and "features", a list of float32, null for an unreadable image.

    Yields: a function that writes one row, and removes "features" from it.
    Raises: SetupError if the file cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([("path", pa.string()), ("features", pa.list_(pa.float32()))])
    paths: list[str] = []
    values: list[NDArray[np.float32] | None] = []
    with atomic_replace(path, option="--features") as temporary:
        writer = pq.ParquetWriter(temporary, schema)

        def flush() -> None:
            with explain_disk_errors(path, option="--features"):
                writer.write_table(pa.table([paths, pa.array(values, schema.types[1])], schema))
            paths.clear()
            values.clear()

        def write(row: PredictionRow) -> None:
            # parquet needs valid UTF-8, which a file name need not be
            paths.append(row["path"].encode("utf-8", "backslashreplace").decode())
            values.append(row.pop("features", None))
            if len(paths) == _ROWS_PER_GROUP:
                flush()

        yield write
        flush()
        with explain_disk_errors(path, option="--features"):
            writer.close()


def _csv_header(num_predictions: int, extra_keys: Sequence[str]) -> list[str]:
    columns = ["path", *(column for key in extra_keys for column in EXTRA_KEYS[key])]
    for rank in range(1, num_predictions + 1):
        columns += [f"label_{rank}", f"confidence_{rank}"]
    return [*columns, "error"]


def _csv_cells(row: PredictionRow, num_predictions: int, extra_keys: Sequence[str]) -> list[str]:
    """Return the cells of a row, in the order of `_csv_header`."""
    cells: list[str] = []
    for key in extra_keys if "predictions" in row else ():
        if key in _LIST_KEYS:  # in the format that `data.csv_file` reads
            labels = row[key]
            names = "|".join(prediction["label"] for prediction in labels)
            cells.append(escape_csv_formula(names or "[]"))
            cells.append("|".join(f"{prediction['confidence']:.6f}" for prediction in labels))
        else:
            cells.append(str(row[key]).lower())
    for prediction in row.get("predictions", ()):
        cells += [escape_csv_formula(prediction["label"]), f"{prediction['confidence']:.6f}"]
    cells += [""] * (len(_csv_header(num_predictions, extra_keys)) - 2 - len(cells))
    return [escape_csv_formula(row["path"]), *cells, escape_csv_formula(row.get("error", ""))]


def unreadable_files_error(rows: Iterable[PredictionRow]) -> DataError | None:
    """Return an error that lists the unreadable files, if any, to raise after all output."""
    lines, count = [], 0
    for row in rows:
        if "error" in row:
            count += 1
            if count <= _MAX_LISTED_FILES:
                lines.append(f"  {escape_to_one_line(row['path'])}: {row['error']}")
    if not count:
        return None
    if count > _MAX_LISTED_FILES:
        lines.append(f"  … and {count - _MAX_LISTED_FILES} more; --out FILE lists them all")
    subject = "1 file was" if count == 1 else f"{count} files were"
    return DataError(
        "\n".join([f"{subject} not classified; fix or remove:", *lines]), code="data.unreadable"
    )


def format_predictions(
    rows: Sequence[PredictionRow],
    *,
    out: str | Path | None = None,
    sheet: str | Path | None = None,
    features: str | Path | None = None,
) -> str:
    """Format the rows as a table; with `out` or `features`, only one line per written file."""
    readable = [index for index, row in enumerate(rows) if "error" not in row]
    written = []
    if out is not None:
        written.append(f"{out}: {len(readable)} of {len(rows)} files classified")
    if sheet is not None:
        written.append(f"{sheet}: contact sheet")
    if features is not None:
        written.append(f"{features}: features of {len(readable)} of {len(rows)} files")
    if out is not None or features is not None:
        return "\n".join(written)
    width = max((len(escape_to_one_line(rows[index]["path"])) for index in readable), default=0)
    table = (_format_table_row(rows[index], width) for index in readable)
    return "\n".join([*table, *written])


def _format_table_row(row: PredictionRow, width: int) -> str:
    texts = [_format_prediction(prediction) for prediction in row["predictions"]]
    if "labels" in row:  # put predictions below their thresholds in parentheses
        others = [
            _format_prediction(prediction)
            for prediction in row["predictions"]
            if prediction not in row["labels"]
        ]
        texts = [_format_prediction(prediction) for prediction in row["labels"]] or ["no label"]
        texts += [f"({'  '.join(others)})"] if others else []
    if "prediction_set" in row:
        names = ", ".join(escape_to_one_line(one["label"]) for one in row["prediction_set"])
        texts.insert(0, f"{{{names}}}")
    if row.get("abstained"):
        texts = [f"abstained ({'  '.join(texts)})"]
    if row.get("unknown"):
        texts = [f"unknown class ({'  '.join(texts)})"]
    return f"{escape_to_one_line(row['path']):{width}}  " + "  ".join(texts)


def _format_prediction(prediction: PredictionRow) -> str:
    return (
        f"{escape_to_one_line(prediction['label'])} {format_probability(prediction['confidence'])}"
    )
