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


# Limit for hashing files of equal size: large datasets have many of them by chance.
_MAX_COMPARED_BYTES = 2**28


def find_train_leakage(source: Source) -> list[str]:
    """Return a warning for each evaluation split that contains exact copies of training images.

    Checks only sources with one file per image, and hashes only files of equal size. Skips a split
    if these files exceed 256 MiB.
    """
    train, lines = source.splits["train"], []
    for name in ("val", "test"):
        pairs = _find_equal_files(train, source.splits[name]) if name in source.splits else []
        if pairs:
            first, copy = train.name_of(pairs[0][0]), source.splits[name].name_of(pairs[0][1])
            lines.append(
                f"split '{name}': {len(pairs)} of {pluralize(len(source.splits[name]), 'image')} "
                f"are copies of training images (for example '{copy}' of '{first}'), so its "
                "metrics are too high; remove the copies"
            )
    return lines


def _find_equal_files(train: Split, other: Split) -> list[tuple[int, int]]:
    """Return pairs of (train index, other index) of identical files; [] above the byte limit."""
    if not (train.images.has_file_per_image and other.images.has_file_per_image):
        return []
    rows = [train.image_rows, other.image_rows]
    sizes = [
        train.images.stat_signatures(rows[0])[:, 2],
        other.images.stat_signatures(rows[1])[:, 2],
    ]
    equal_sizes = np.setdiff1d(np.intersect1d(sizes[0], sizes[1]), [0])
    candidates = [np.flatnonzero(np.isin(values, equal_sizes)) for values in sizes]
    if (
        sum(values[indices].sum() for values, indices in zip(sizes, candidates, strict=True))
        > _MAX_COMPARED_BYTES
    ):
        return []
    index_of_digest = {
        _image_digest(train.images, rows[0][position]): position
        for position in candidates[0].tolist()
    }
    pairs = (
        (index_of_digest.get(_image_digest(other.images, rows[1][index])), index)
        for index in candidates[1].tolist()
    )
    return [(first, position) for first, position in pairs if first is not None]


def _image_digest(images: EncodedImages, row: int) -> bytes:
    """Return the sha256 of an encoded image; random bytes, equal to no other, if unreadable."""
    body, size = try_read_bytes(images, int(row))
    return hashlib.sha256(body).digest() if size >= 0 else os.urandom(32)
