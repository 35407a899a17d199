"""Leakage: training images that are also in the validation or test split."""

from __future__ import annotations

import hashlib
import os

import numpy as np

from finetune.data.encoded_images import EncodedImages
from finetune.data.fingerprint import try_read_bytes
from finetune.data.source import Source, Split
from finetune.formatting import pluralize

__all__ = ["find_train_leakage"]

_SIZE_COLUMN = 2  # file size in a stat signature, see `stat_signatures`
# Limit for hashing files of equal size: large datasets have many of them by chance.
_MAX_COMPARED_BYTES = 2**28


def find_train_leakage(source: Source) -> list[str]:
    """Return a warning for each evaluation split that contains exact copies of training images.

    Checks only sources with one file per image, and hashes only files of equal size. Skips a split
    if these files exceed 256 MiB.
    """
    train, warnings = source.splits["train"], []
    for name in ("val", "test"):
        pairs = _find_equal_files(train, source.splits[name]) if name in source.splits else []
        if pairs:
            first, copy = train.name_of(pairs[0][0]), source.splits[name].name_of(pairs[0][1])
            warnings.append(
                f"split '{name}': {len(pairs)} of {pluralize(len(source.splits[name]), 'image')} "
                f"are copies of training images (for example '{copy}' of '{first}'), so its "
                "metrics are too high; remove the copies"
            )
    return warnings


def _find_equal_files(train: Split, other: Split) -> list[tuple[int, int]]:
    """Return pairs of (train index, other index) of identical files; [] above the byte limit."""
    if not (train.images.has_file_per_image and other.images.has_file_per_image):
        return []
    train_rows, other_rows = train.image_rows, other.image_rows
    train_sizes = train.images.stat_signatures(train_rows)[:, _SIZE_COLUMN]
    other_sizes = other.images.stat_signatures(other_rows)[:, _SIZE_COLUMN]
    common_sizes = np.setdiff1d(np.intersect1d(train_sizes, other_sizes), [0])
    train_indices = np.flatnonzero(np.isin(train_sizes, common_sizes))
    other_indices = np.flatnonzero(np.isin(other_sizes, common_sizes))
    if train_sizes[train_indices].sum() + other_sizes[other_indices].sum() > _MAX_COMPARED_BYTES:
        return []
    train_index_of = {
        _image_digest(train.images, train_rows[index]): index for index in train_indices.tolist()
    }
    pairs = [
        (train_index_of.get(_image_digest(other.images, other_rows[index])), index)
        for index in other_indices.tolist()
    ]
    return [(train_index, index) for train_index, index in pairs if train_index is not None]


def _image_digest(images: EncodedImages, row: int) -> bytes:
    """Return the sha256 of an encoded image; random bytes, equal to no other, if unreadable."""
    body, size = try_read_bytes(images, int(row))
    return hashlib.sha256(body).digest() if size >= 0 else os.urandom(32)
