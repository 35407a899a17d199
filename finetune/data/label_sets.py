"""Several labels for an image: lists of classes, or columns of 0 and 1, as a matrix of 0 and 1."""

# N images, M labels of them together, K classes

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from finetune.data.columns import number_labels
from finetune.errors import DataError

__all__ = ["label_matrix", "number_columns", "number_sets"]

Matrix = NDArray[np.uint8]

_MOST_NUMBERS = 1 << 32  # of a split's matrix: 4 GiB


def label_matrix(
    rows_M: NDArray[np.int64], labels_M: NDArray[np.int64], images: int, classes: int
) -> Matrix:
    """Return (N, K), 1 where an image has a class. Raises: DataError if that is too large."""
    if images * classes > _MOST_NUMBERS:
        raise DataError(
            f"{images:,} images of {classes:,} classes: more than can be held for "
            "data.task=multilabel; name fewer classes",
            code="data.too_large",
        )
    matrix_NK = np.zeros((images, classes), dtype=np.uint8)
    matrix_NK[rows_M, labels_M] = 1
    return matrix_NK


def number_sets(
    columns: Mapping[str, pa.ChunkedArray], declared: dict[str, list[str] | None]
) -> tuple[dict[str, Matrix], list[str]]:
    """Turn columns of lists of classes into matrices.

    Args:
        columns: (N,) lists of integers or strings by split; an empty list is an image without any.
    Returns: (N, K) by split, and the class names.
    Raises: DataError for what is no such list, or an unknown class, naming split and row.
    """
    rows: dict[str, NDArray[np.int64]] = {}
    values: dict[str, pa.ChunkedArray] = {}
    for split, column in columns.items():
        kind = column.type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        if not (is_list or pa.types.is_fixed_size_list(kind)):
            raise DataError(
                f"split '{split}': labels of type {kind}; data.task=multilabel expects a list of "
                "classes for each image, or columns of 0 and 1 named by data.label_column",
                code="data.wrong_labels",
            )
        if column.null_count:
            row = int(pc.index(column.is_null(), True).as_py())
            raise DataError(
                f"split '{split}': {column.null_count} of {len(column)} lists of labels are "
                f"missing; the first in row {row}; write an empty list for an image without any",
                code="data.no_labels",
            )
        lengths = pc.list_value_length(column).cast(pa.int64())
        sizes = [np.zeros(0, dtype=np.int64), *(np.from_dlpack(one) for one in lengths.chunks)]
        rows[split] = np.repeat(np.arange(len(column)), np.concatenate(sizes))
        values[split] = pc.list_flatten(column)
        if len(column) and not len(values[split]):
            raise DataError(
                f"split '{split}': no image has a label; name another column with "
                "data.label_column",
                code="data.no_labels",
            )
    numbered, names = number_labels(values, declared, rows)
    matrices = {
        split: label_matrix(rows[split], labels_M, len(columns[split]), len(names))
        for split, labels_M in numbered.items()
    }
    return matrices, names


def number_columns(columns: Mapping[str, Mapping[str, pa.ChunkedArray]]) -> dict[str, Matrix]:
    """Turn columns of 0 and 1, one for each class, into matrices.

    Args:
        columns: (N,) booleans or numbers by split and class.
    Returns: (N, K) by split.
    Raises: DataError for any other value, naming split, column and row.
    """
    return {
        split: np.stack([_zeros_and_ones(of[name], split, name) for name in of], axis=1)
        for split, of in columns.items()
    }


def _zeros_and_ones(column: pa.ChunkedArray, split: str, name: str) -> Matrix:
    kind = column.type
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    if not (is_number or pa.types.is_boolean(kind)):
        raise _not_one(split, name, f"holds {kind}")
    if column.null_count:
        row = int(pc.index(column.is_null(), True).as_py())
        raise _not_one(split, name, f"has no value in row {row}")
    chunks = column.cast(pa.float64(), safe=False).chunks
    values_N = np.concatenate([np.zeros(0), *(np.from_dlpack(chunk) for chunk in chunks)])
    wrong = np.flatnonzero((values_N != 0) & (values_N != 1))
    if len(wrong):
        raise _not_one(split, name, f"has {values_N[wrong[0]]:g} in row {wrong[0]}")
    return values_N.astype(np.uint8)


def _not_one(split: str, name: str, problem: str) -> DataError:
    return DataError(
        f"split '{split}': column {name!r} {problem}; with data.task=multilabel it must hold 0 or "
        "1 for each image: correct it, or name the columns of the classes with data.label_column",
        code="data.wrong_labels",
    )
