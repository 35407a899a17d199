"""Encode label columns as class indices, and collect the class names."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping

import numpy as np
import pyarrow as pa

from finetune.data.columns import int64_to_numpy
from finetune.errors import DataError
from finetune.log import warn_once

__all__ = ["check_distinct_class_names", "encode_labels"]


def encode_labels(
    columns: dict[str, pa.ChunkedArray],
    declared: dict[str, list[str] | None],
    row_numbers: Mapping[str, np.ndarray] | None = None,
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Encode label columns as class indices.

    Args:
        columns: dict from split to its labels, (N,).
        declared: dict from split to the class names that the source declares; None for a split
            without declared names.
        row_numbers: dict from split to the source row of each label, (N,), for error messages; None
            if rows and labels correspond one to one.
    Returns: a dict from split to its class indices, (N,) int64; and the class names: the declared
        ones in their order, else the sorted unique labels. The dict omits splits whose labels are
        withheld (all -1).
    Raises: DataError for labels that are missing, of another type, or not declared.
    """
    names = next(iter(declared.values()))
    for split, other in declared.items():
        if other != names:
            raise DataError(
                f"split '{split}': its class names differ from those of other splits; write all "
                "splits with the same names in the same order",
                code="data.split_mismatch",
            )
    row_numbers = row_numbers or {
        split: np.arange(len(column)) for split, column in columns.items()
    }
    arrays = {
        split: _to_label_array(column, split, row_numbers[split])
        for split, column in columns.items()
    }
    if names is None:
        return _encode_by_sorted_value(arrays, row_numbers)
    for split, array in list(arrays.items()):
        if array.dtype.kind != "i":
            raise DataError(
                f"split '{split}': the labels are text, but the metadata declares class names, "
                "which need whole numbers; write the table again",
                code="data.wrong_labels",
            )
        if split != "train" and array.dtype.kind == "i" and (array == -1).all():
            warn_once(f"split '{split}' is ignored: its labels are withheld (all are -1)")
            del arrays[split]
            continue
        invalid = np.flatnonzero((array < 0) | (array >= len(names)))
        if len(invalid):
            raise DataError(
                f"split '{split}': {len(invalid)} of {len(array)} labels are outside 0 to "
                f"{len(names) - 1}; the first is {array[invalid[0]]} in row "
                f"{row_numbers[split][invalid[0]]}; fix the labels or remove these rows",
                code="data.wrong_labels",
            )
    return {split: array.astype(np.int64) for split, array in arrays.items()}, list(names)


def _to_label_array(column: pa.ChunkedArray, split: str, rows: np.ndarray) -> np.ndarray:
    """Convert a label column to an array, (N,): int64, or strings as objects."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if len(column) == 0:
        raise DataError(f"split '{split}': no rows; add some or remove its file", code="data.empty")
    if column.null_count:
        row = np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0]
        raise DataError(
            f"split '{split}': {column.null_count} of {len(column)} labels are missing; "
            f"the first in row {rows[row]}; add the labels or remove these rows",
            code="data.no_labels",
        )
    if pa.types.is_integer(column.type):
        return np.concatenate([int64_to_numpy(chunk) for chunk in column.chunks])
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.string())
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return np.asarray(column.to_pylist(), dtype=object)
    raise DataError(
        f"split '{split}': labels of type {column.type}; expected one integer or string per image "
        "(for lists set data.task=multilabel); convert the column, or name another with "
        "data.label_column",
        code="data.wrong_labels",
    )


def _encode_by_sorted_value(
    arrays: dict[str, np.ndarray], rows: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Encode labels without declared class names: as indices of the sorted unique labels."""
    if len({array.dtype.kind for array in arrays.values()}) > 1:
        raise DataError(
            "the label column holds integers in one split and strings in another; write all splits "
            "with the same type",
            code="data.split_mismatch",
        )
    labels = sorted(set().union(*(array.tolist() for array in arrays.values())))
    for split, array in arrays.items():
        wrong = np.flatnonzero(array < 0) if array.dtype.kind == "i" else np.arange(0)
        if len(wrong):
            raise DataError(
                f"split '{split}': {len(wrong)} of {len(array)} labels are below 0; the first is "
                f"{array[wrong[0]]} in row {rows[split][wrong[0]]}; fix the labels or remove "
                "these rows",
                code="data.wrong_labels",
            )
    names = [str(label) for label in labels]
    check_distinct_class_names(names, "the label column")
    index_of = {label: index for index, label in enumerate(labels)}
    indices = {
        split: np.array([index_of[label] for label in array.tolist()], dtype=np.int64)
        for split, array in arrays.items()
    }
    return indices, names


def check_distinct_class_names(names: Iterable[str], location: str) -> None:
    """Reject class names that differ only in case, Unicode form, spaces, zeros and so on.

    Such names usually mean the same class, and some file systems merge them.

    Args:
        names: class names; the same name may occur twice.
        location: source or column that holds the names, for the error message.
    Raises: DataError for two such names.
    """
    seen: dict[str, str] = {}
    for name in names:
        visible = "".join(char for char in name if unicodedata.category(char) != "Cf")
        key = " ".join(unicodedata.normalize("NFKC", visible).casefold().split())
        if number := re.fullmatch(r"(\d+)(\.0+)?", key):
            key = str(int(number[1]))
        if seen.setdefault(key, name) != name:
            raise DataError(
                f"{location}: the classes {seen[key]!r} and {name!r} differ only in case, Unicode "
                "form, spaces, zeros (01, 1, 1.0) or invisible characters; rename or merge them",
                code="data.duplicate_class",
            )
