"""Leakage: training images, or images of their groups, that are also in val or test."""

# N images

from __future__ import annotations

import numpy as np

from finetune.data.recorded_digests import DIGEST_BYTES
from finetune.data.source import Source
from finetune.formatting import pluralize

__all__ = ["find_train_leakage"]


def find_train_leakage(source: Source) -> list[str]:
    """Return a warning for each evaluation split that shares images or groups with train.

    Finds exact copies by the digests of the encoded images; streamed images have none.
    """
    train, warnings = source.splits["train"], []
    for name in ("val", "test"):
        split = source.splits.get(name)
        if split is None or split.is_streamed or train.is_streamed:
            continue
        # NumPy compares values of 16 bytes, but not rows; unreadable images have 16 zeros
        train_digests_N, digests_N = (
            images.digests.view(f"V{DIGEST_BYTES}")[:, 0] for images in (train, split)
        )
        copies = np.flatnonzero(split.digests.any(axis=1) & np.isin(digests_N, train_digests_N))
        if len(copies):
            original = np.flatnonzero(train_digests_N == digests_N[copies[0]])[0]
            warnings.append(
                f"split '{name}': {len(copies)} of {pluralize(len(split), 'image')} are copies of "
                f"training images (for example '{split.name_of(copies[0])}' of "
                f"'{train.name_of(original)}'), so its metrics are too high; remove the copies"
            )
    return warnings + _find_shared_groups(source)


def _find_shared_groups(source: Source) -> list[str]:
    """Return a warning for each evaluation split with images of a group that is also in train."""
    train, warnings = source.splits["train"], []
    train_groups = set() if train.groups is None else {*train.groups} - {""}
    for name in ("val", "test"):
        split = source.splits.get(name)
        if split is None or split.groups is None:
            continue
        shared = [group for group in split.groups if group in train_groups]
        if shared:
            warnings.append(
                f"split '{name}': {len(shared)} of {pluralize(len(split), 'image')} are of "
                f"{pluralize(len({*shared}), 'group')} (data.group) that train also has, for "
                f"example '{shared[0]}', so its metrics may be too high; move each group to one "
                "split"
            )
    return warnings
