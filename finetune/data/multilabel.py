"""Encode several labels per image as an indicator matrix, from lists or columns of 0 and 1."""

# N images, M labels of all images, K classes

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from finetune.data.labels import encode_labels
from finetune.errors import DataError

__all__ = ["encode_indicator_columns", "encode_label_lists", "indicator_matrix"]

IndicatorMatrix = NDArray[np.uint8]

_MAX_ELEMENTS = 1 << 32  # limit for the matrix of one split: 4 GiB


def indicator_matrix(
    rows_M: NDArray[np.int64], labels_M: NDArray[np.int64], num_images: int, num_classes: int
) -> IndicatorMatrix:
    """Return (N, K) uint8, 1 where an image has a class.

    Args:
        rows_M: image index of each label.
        labels_M: class index of each label.
        num_images: N.
        num_classes: K.
    Raises: DataError if the matrix would be too large.
    """
    if num_images * num_classes > _MAX_ELEMENTS:
        raise DataError(
            f"{num_images:,} images of {num_classes:,} classes: too many for "
            "data.task=multilabel; use fewer classes",
            code="data.too_large",
        )
    matrix_NK = np.zeros((num_images, num_classes), dtype=np.uint8)
    matrix_NK[rows_M, labels_M] = 1
    return matrix_NK


def encode_label_lists(
    columns: Mapping[str, pa.ChunkedArray], declared: dict[str, list[str] | None]
) -> tuple[dict[str, IndicatorMatrix], list[str]]:
    """Encode columns of label lists as indicator matrices.

    Args:
        columns: dict from split to label lists, (N,), of integers or strings; [] for no label.
        declared: declared class names of each split, see `encode_labels`.
    Returns: a dict from split to its indicator matrix, (N, K); and the class names.
    Raises: DataError for labels of another type or of an unknown class, naming split and row.
    """
    rows: dict[str, NDArray[np.int64]] = {}
    values: dict[str, pa.ChunkedArray] = {}
    for split, column in columns.items():
        column_type = column.type
        is_list = pa.types.is_list(column_type) or pa.types.is_large_list(column_type)
        if not (is_list or pa.types.is_fixed_size_list(column_type)):
            raise DataError(
                f"split '{split}': labels of type {column_type}; data.task=multilabel expects a "
                "list of classes per image, or columns of 0 and 1 named by data.label_column",
                code="data.wrong_labels",
            )
        if column.null_count:
            row = int(pc.index(column.is_null(), True).as_py())
            raise DataError(
                f"split '{split}': {column.null_count} of {len(column)} label lists are "
                f"missing; the first in row {row}; write an empty list for an image without labels",
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
    encoded, names = encode_labels(values, declared, rows)
    matrices = {
        split: indicator_matrix(rows[split], labels_M, len(columns[split]), len(names))
        for split, labels_M in encoded.items()
    }
    return matrices, names


def encode_indicator_columns(
    columns: Mapping[str, Mapping[str, pa.ChunkedArray]],
) -> dict[str, IndicatorMatrix]:
    """Encode columns of 0 and 1, one per class, as indicator matrices.

    Args:
        columns: dict from split to a dict from class name to booleans or numbers, (N,).
    Returns: a dict from split to its indicator matrix, (N, K).
    Raises: DataError for any other value, naming split, column and row.
    """
    return {
        split: np.stack(
            [_read_indicator_column(column, split, name) for name, column in by_class.items()],
            axis=1,
        )
        for split, by_class in columns.items()
    }


def _read_indicator_column(column: pa.ChunkedArray, split: str, name: str) -> IndicatorMatrix:
    column_type = column.type
    is_number = pa.types.is_integer(column_type) or pa.types.is_floating(column_type)
    if not (is_number or pa.types.is_boolean(column_type)):
        raise _indicator_error(split, name, f"holds {column_type}")
    if column.null_count:
        row = int(pc.index(column.is_null(), True).as_py())
        raise _indicator_error(split, name, f"has no value in row {row}")
    chunks = column.cast(pa.float64(), safe=False).chunks
    values_N = np.concatenate([np.zeros(0), *(np.from_dlpack(chunk) for chunk in chunks)])
    invalid = np.flatnonzero((values_N != 0) & (values_N != 1))
    if len(invalid):
        raise _indicator_error(split, name, f"has {values_N[invalid[0]]:g} in row {invalid[0]}")
    return values_N.astype(np.uint8)


def _indicator_error(split: str, name: str, problem: str) -> DataError:
    return DataError(
        f"split '{split}': column {name!r} {problem}; data.task=multilabel expects 0 or 1 for each "
        "image: fix the column, or name the class columns with data.label_column",
        code="data.wrong_labels",
    )
