"""The image and label columns of a table, and labels of any type as indices of class names."""

# N rows

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from finetune.data.notices import notice
from finetune.errors import DataError, nearest

__all__ = [
    "SPLITS",
    "declared_names",
    "find_columns",
    "in_order",
    "integers",
    "number_labels",
    "refuse_alike",
    "split_in",
]

# what sources call their splits -> what we call them
SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
SPLITS |= {"training": "train", "testing": "test"}
_IMAGE_NAMES = ("image", "img")
_LABEL_NAMES = ("label", "labels", "fine_label")
_Value = TypeVar("_Value")


def split_in(name: str) -> str | None:
    """Return the split that a word of a name means, as of seg_train; None without one."""
    words = re.split(r"[\W\d_]+", name.lower())
    return next((SPLITS[word] for word in words if word in SPLITS), None)


def in_order(splits: dict[str, _Value]) -> dict[str, _Value]:
    """Order splits: train, val, test."""
    return {name: splits[name] for name in ("train", "val", "test") if name in splits}


def _features(schema: pa.Schema) -> dict[str, dict[str, Any]]:
    """Return the column types as `datasets` recorded them; {} if something else wrote the file."""
    recorded = (schema.metadata or {}).get(b"huggingface")
    try:
        info = (json.loads(recorded) if recorded else {}).get("info") or {}
        features = dict(info.get("features") or {})
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"the metadata that `datasets` left in this table is damaged ({error}); write it again",
            code="data.damaged",
        ) from error
    listed = {  # an older way to write a list
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
    """Find the image and the label column: as named, else by usual names, else by type.

    Args:
        multilabel: the labels may be several columns, of 0 and 1: as named, else all that are left.
    """
    typed = {name: feature.get("_type") for name, feature in _features(schema).items()}
    images = [name for name in schema.names if typed.get(name) == "Image"]
    classes = [name for name in schema.names if typed.get(name) == "ClassLabel"]
    place = _column("image_column", image, _IMAGE_NAMES, images, schema.names)
    if multilabel and label is None and not {*map(str.lower, schema.names)} & {*_LABEL_NAMES}:
        label = [name for name in schema.names if name.lower() not in (place.lower(), "split")]
    named: list[str | None] = [label] if isinstance(label, str) else [*(label or (None,))]
    return place, [
        _column("label_column", one, _LABEL_NAMES, classes, schema.names) for one in named
    ]


def _column(
    key: str, named: str | None, usual: Sequence[str], typed: list[str], columns: list[str]
) -> str:
    known = ", ".join(columns)
    if named is not None:
        if named not in columns:
            message = f"no column {named!r}{nearest(named, columns)}; the columns are: {known}"
            raise DataError(f"data.{key}: {message}", code="data.no_column")
        return named
    by_name = {name.lower(): name for name in columns}
    candidates = [by_name[name] for name in usual if name in by_name] or typed
    if not candidates:
        message = f"data.{key}: not found; name one of the columns: {known}"
        raise DataError(message, code="data.no_column")
    return candidates[0]


def declared_names(schema: pa.Schema, label: str) -> list[str] | None:
    """Return the class names that the data set declares, in its order; None if it has none."""
    feature = _features(schema).get(label, {})
    if isinstance(inner := feature.get("feature"), dict):  # of a list
        feature = inner
    if feature.get("_type") != "ClassLabel":
        return None
    number = feature.get("num_classes")
    names = feature.get("names") or list(map(str, range(number if isinstance(number, int) else 0)))
    if not names or not all(isinstance(name, str) for name in names):
        raise DataError(
            f"the metadata of column {label!r} names no classes ({str(names)[:60]}); write it "
            "again",
            code="data.damaged",
        )
    return list(names)


def number_labels(
    columns: dict[str, pa.ChunkedArray],
    declared: dict[str, list[str] | None],
    rows: Mapping[str, np.ndarray] | None = None,
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Turn label columns into indices of class names.

    Args:
        columns: (N,) labels by split.
        declared: class names by split as the source declares them; all alike, or None.
        rows: (N,) by split, for messages, where a row has any number of labels.
    Returns: labels by split, (N,) int64; class names: the declared ones in their order, else
        the sorted unique labels. A split whose labels are all -1 (withheld) is left out.
    """
    names = next(iter(declared.values()))
    for split, other in declared.items():
        if other != names:
            raise DataError(
                f"split '{split}': its class names differ from the other splits'; write all splits "
                "with the same names in the same order",
                code="data.split_mismatch",
            )
    rows = rows or {split: np.arange(len(column)) for split, column in columns.items()}
    arrays = {split: _label_array(column, split, rows[split]) for split, column in columns.items()}
    if names is None:
        return _number_unnamed(arrays, rows)
    for split, array in list(arrays.items()):
        if split != "train" and array.dtype.kind == "i" and (array == -1).all():
            notice(f"split '{split}' is left out: its labels are withheld (all are -1)")
            del arrays[split]
            continue
        wrong = np.flatnonzero((array < 0) | (array >= len(names)))
        if len(wrong):
            raise DataError(
                f"split '{split}': {len(wrong)} of {len(array)} labels are outside 0 to "
                f"{len(names) - 1}; the first is {array[wrong[0]]} in row {rows[split][wrong[0]]}; "
                "correct the labels or leave these rows out",
                code="data.wrong_labels",
            )
    return {split: array.astype(np.int64) for split, array in arrays.items()}, list(names)


def integers(array: pa.Array) -> np.ndarray:
    """Return integers without nulls as int64; `pa.Array.to_numpy` would import pandas."""
    return np.from_dlpack(array).astype(np.int64)


def _label_array(column: pa.ChunkedArray, split: str, rows: np.ndarray) -> np.ndarray:
    """Return a label column as (N,) int64 or as (N,) objects of str."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if len(column) == 0:
        message = f"split '{split}' is empty: it has no rows; add some or remove its file"
        raise DataError(message, code="data.empty")
    if column.null_count:
        row = np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0]
        raise DataError(
            f"split '{split}': {column.null_count} of {len(column)} labels are missing; "
            f"the first in row {rows[row]}; add the labels or leave these rows out",
            code="data.no_labels",
        )
    if pa.types.is_integer(column.type):
        return np.concatenate([integers(chunk) for chunk in column.chunks])
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.string())
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return np.asarray(column.to_pylist(), dtype=object)
    raise DataError(
        f"split '{split}': labels of type {column.type}; expected integers or strings, one for "
        "each image (lists: data.task=multilabel); convert the column, or name another with "
        "data.label_column",
        code="data.wrong_labels",
    )


def _number_unnamed(
    arrays: dict[str, np.ndarray], rows: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Number labels that have no declared names, by their sorted order."""
    if len({array.dtype.kind for array in arrays.values()}) > 1:
        raise DataError(
            "the label column holds integers in one split and strings in another; write all splits "
            "with the same type",
            code="data.split_mismatch",
        )
    every = sorted(set().union(*(array.tolist() for array in arrays.values())))
    for split, array in arrays.items():
        wrong = np.flatnonzero(array < 0) if array.dtype.kind == "i" else np.arange(0)
        if len(wrong):
            raise DataError(
                f"split '{split}': {len(wrong)} of {len(array)} labels are below 0; the first is "
                f"{array[wrong[0]]} in row {rows[split][wrong[0]]}; correct the labels or leave "
                "these rows out",
                code="data.wrong_labels",
            )
    refuse_alike([str(label) for label in every], "the label column")
    number = {label: index for index, label in enumerate(every)}
    numbered = {
        split: np.array([number[label] for label in array.tolist()], dtype=np.int64)
        for split, array in arrays.items()
    }
    return numbered, [str(label) for label in every]


def refuse_alike(names: Iterable[str], where: str) -> None:
    """Refuse class names that differ only in case, Unicode form or spaces at the ends.

    Raises: DataError: on another file system they would be one class, and most often they are.
    """
    seen: dict[str, str] = {}
    for name in names:
        key = unicodedata.normalize("NFC", name).casefold().strip()
        if seen.setdefault(key, name) != name:
            raise DataError(
                f"{where}: the classes {seen[key]!r} and {name!r} differ only in case, Unicode "
                "form or spaces; rename or merge them",
                code="data.duplicate_class",
            )
