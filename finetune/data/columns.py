"""Find the image and label columns of a table."""

# N rows

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from finetune.errors import DataError, did_you_mean

__all__ = ["declared_class_names", "find_columns", "int64_array", "int64_to_numpy"]

_IMAGE_COLUMN_NAMES = ("image", "img")
_LABEL_COLUMN_NAMES = ("label", "labels", "fine_label")


def _huggingface_features(schema: pa.Schema) -> dict[str, dict[str, Any]]:
    """Return the column types that `datasets` recorded; {} if it did not write the file."""
    recorded = (schema.metadata or {}).get(b"huggingface")
    try:
        info = (json.loads(recorded) if recorded else {}).get("info") or {}
        features = dict(info.get("features") or {})
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"the `datasets` metadata of this table is damaged ({error}); write the table again",
            code="data.damaged",
        ) from error
    listed = {  # older notation of a list
        name: {"_type": "List", "feature": entry[0]} if isinstance(entry, list) and entry else entry
        for name, entry in features.items()
    }
    return {name: entry for name, entry in listed.items() if isinstance(entry, dict)}


def find_columns(
    schema: pa.Schema,
    image: str | None,
    label: str | Sequence[str] | None,
    *,
    multilabel: bool = False,
) -> tuple[str, list[str]]:
    """Find the image and label columns: as requested, else by usual names, else by type.

    Args:
        multilabel: allow several label columns of 0 and 1: the requested ones; else, if no column
            has a usual label name, all other columns.
    Returns: the image column, and the label columns.
    Raises: DataError if a column is missing.
    """
    type_names = {
        name: feature.get("_type") for name, feature in _huggingface_features(schema).items()
    }
    images = [name for name in schema.names if type_names.get(name) == "Image"]
    classes = [name for name in schema.names if type_names.get(name) == "ClassLabel"]
    image_column = _find_column("image_column", image, _IMAGE_COLUMN_NAMES, images, schema.names)
    if (
        multilabel
        and label is None
        and not {*map(str.lower, schema.names)} & {*_LABEL_COLUMN_NAMES}
    ):
        label = [
            name for name in schema.names if name.lower() not in (image_column.lower(), "split")
        ]
    requested: list[str | None] = [label] if isinstance(label, str) else [*(label or (None,))]
    return image_column, [
        _find_column("label_column", column, _LABEL_COLUMN_NAMES, classes, schema.names)
        for column in requested
    ]


def _find_column(
    recipe_key: str,
    requested: str | None,
    usual_names: Sequence[str],
    columns_of_type: list[str],
    columns: list[str],
) -> str:
    known = ", ".join(columns)
    if requested is not None:
        if requested not in columns:
            message = (
                f"no column {requested!r}{did_you_mean(requested, columns) or '.'} "
                f"The columns are: {known}"
            )
            raise DataError(f"data.{recipe_key}: {message}", code="data.no_column")
        return requested
    by_name = {name.lower(): name for name in columns}
    candidates = [by_name[name] for name in usual_names if name in by_name] or columns_of_type
    if not candidates:
        message = (
            f"data.{recipe_key}: not set, and no column matches by name or type; set it to one of "
            f"{known}"
        )
        raise DataError(message, code="data.no_column")
    return candidates[0]


def declared_class_names(schema: pa.Schema, label: str) -> list[str] | None:
    """Return the class names that the dataset declares, in its order; None if there are none."""
    feature = _huggingface_features(schema).get(label, {})
    if isinstance(inner := feature.get("feature"), dict):  # the type of the elements of a list
        feature = inner
    if feature.get("_type") != "ClassLabel":
        return None
    number = feature.get("num_classes")
    names = feature.get("names") or list(map(str, range(number if isinstance(number, int) else 0)))
    if not names or not all(isinstance(name, str) for name in names):
        raise DataError(
            f"the metadata of column {label!r} has no class names ({str(names)[:60]}); write "
            "the table again",
            code="data.damaged",
        )
    return list(names)


def int64_to_numpy(array: pa.Array) -> np.ndarray:
    """Convert integers without nulls to int64; `pa.Array.to_numpy` would import pandas."""
    return np.from_dlpack(array).astype(np.int64)


def int64_array(numbers: Sequence[int | str]) -> pa.Array:
    """Return an int64 Arrow array; `pa.array` of a NumPy array would import pandas."""
    buffer = pa.py_buffer(np.array(numbers, dtype=np.int64))
    return pa.Array.from_buffers(pa.int64(), len(numbers), [None, buffer])
