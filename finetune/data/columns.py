"""Find the image and label columns of a table."""

# N rows

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from finetune.errors import DataError, did_you_mean
from finetune.log import warn_once

__all__ = [
    "OTHER_SPLIT_NAMES",
    "ColumnNames",
    "declared_class_names",
    "find_columns",
    "find_columns_by_name",
    "int64_array",
    "int64_to_numpy",
]

_IMAGE_COLUMN_NAMES = ("image", "img")
_LABEL_COLUMN_NAMES = ("label", "labels", "fine_label")
# of columns that are not read, but perhaps say which split an image is in
OTHER_SPLIT_NAMES = {"fold", "partition", "phase", "set", "splits", "subset", "usage"}
_MAX_SHOWN_CHARS = 120  # of the list of columns in a message


class ColumnNames(NamedTuple):
    """Columns that the user has named; None to find them, or to read no groups.

    Attributes:
        image: column with the images, or their paths.
        label: column with the labels, or several columns of 0 and 1.
        group: column with the group of each image, see `Split.groups`.
    """

    image: str | None = None
    label: str | tuple[str, ...] | None = None
    group: str | None = None


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
    schema: pa.Schema, requested: ColumnNames, *, multilabel: bool = False
) -> tuple[str, list[str]]:
    """Find the image and label columns of a table: by name, else by the type in the metadata.

    Args:
        schema: schema of the table.
        requested, multilabel: see `find_columns_by_name`.
    Returns: the name of the image column, and the names of the label columns.
    Raises: DataError if a column is missing.
    """
    types = {name: entry.get("_type") for name, entry in _huggingface_features(schema).items()}
    return find_columns_by_name(
        schema.names,
        requested,
        usual_image_names=_IMAGE_COLUMN_NAMES,
        usual_label_names=_LABEL_COLUMN_NAMES,
        typed_image_columns=[name for name in schema.names if types.get(name) == "Image"],
        typed_label_columns=[name for name in schema.names if types.get(name) == "ClassLabel"],
        multilabel=multilabel,
    )


def find_columns_by_name(
    columns: Sequence[str],
    requested: ColumnNames,
    *,
    usual_image_names: Sequence[str],
    usual_label_names: Sequence[str],
    typed_image_columns: Sequence[str] = (),
    typed_label_columns: Sequence[str] = (),
    multilabel: bool = False,
) -> tuple[str, list[str]]:
    """Find the image and label columns: the requested ones, else by usual names, else by type.

    Args:
        columns: names of all columns of the table.
        requested: the columns that the user has named.
        usual_image_names, usual_label_names: names to look for, in lower case.
        typed_image_columns, typed_label_columns: columns whose recorded type is an image or a
            class label.
        multilabel: allow several label columns of 0 and 1. If none is requested and no column has a
            usual label name, all columns except the image and group columns and "split" are.
    Returns: the name of the image column, and the names of the label columns.
    Raises: DataError if a column is missing, if two have the same name, or if the names of two
        candidates differ only in case.
    """
    image_column = _find_column(
        "image_column", requested.image, usual_image_names, typed_image_columns, columns
    )
    if requested.group is not None:
        _find_column("group", requested.group, (), (), columns)
    label = requested.label
    if multilabel and label is None and not {*map(str.lower, columns)} & {*usual_label_names}:
        others = (image_column.lower(), "split", (requested.group or "").lower())
        label = tuple(name for name in columns if name.lower() not in others)
    label_names: list[str | None] = [label] if isinstance(label, str) else [*(label or (None,))]
    label_columns = [
        _find_column("label_column", name, usual_label_names, typed_label_columns, columns)
        for name in label_names
    ]
    for name in (image_column, *label_columns, requested.group):
        if name is not None and columns.count(name) > 1:
            raise DataError(f"two columns are named {name!r}; rename one", code="data.ambiguous")
    return image_column, label_columns


def _find_column(
    recipe_key: str,
    requested: str | None,
    usual_names: Sequence[str],
    typed_columns: Sequence[str],
    columns: Sequence[str],
) -> str:
    known = ", ".join(columns)[:_MAX_SHOWN_CHARS]
    if requested is not None:
        if requested not in columns:
            raise DataError(
                f"data.{recipe_key}: no column {requested!r}"
                f"{did_you_mean(requested, columns) or '.'} The columns are: {known}",
                code="data.no_column",
            )
        return requested
    candidates = [
        name for usual_name in usual_names for name in columns if name.lower() == usual_name
    ] or typed_columns
    if not candidates:
        indicators = ", set data.task=multilabel for columns of 0 and 1"
        raise DataError(
            f"data.{recipe_key}: not set, and no column is named {usual_names[0]!r}; rename a "
            f"column{indicators if recipe_key == 'label_column' else ''}, or set the key to one "
            f"of: {known}",
            code="data.no_column",
        )
    first = candidates[0]
    for other in candidates[1:]:
        if other != first and other.lower() == first.lower():
            raise DataError(
                f"data.{recipe_key}: not set, and the columns {first!r} and {other!r} differ only "
                "in case; set the key to one of them",
                code="data.ambiguous",
            )
    if others := sorted({*candidates[1:]} - {first}):
        content = "labels" if recipe_key == "label_column" else "images"
        warn_once(
            f"the column {first!r} gives the {content}, not {' or '.join(map(repr, others))}; "
            f"set data.{recipe_key}={first} if this is right"
        )
    return first


def declared_class_names(schema: pa.Schema, label: str) -> list[str] | None:
    """Return the class names declared for a label column, in order; None if none are declared."""
    feature = _huggingface_features(schema).get(label, {})
    if isinstance(inner := feature.get("feature"), dict):  # a list: take the type of its elements
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
    """Convert an integer array without nulls to int64; `pa.Array.to_numpy` would import pandas."""
    return np.from_dlpack(array).astype(np.int64)


def int64_array(numbers: Sequence[int | str]) -> pa.Array:
    """Return an int64 Arrow array; `pa.array` of a NumPy array would import pandas."""
    buffer = pa.py_buffer(np.array(numbers, dtype=np.int64))
    return pa.Array.from_buffers(pa.int64(), len(numbers), [None, buffer])
