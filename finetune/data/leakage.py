"""Leakage: images, or images of their groups, that are in more than one split, or in one twice."""

# N images, C copies

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from finetune.data.pixel_store import PixelStore
from finetune.data.recorded_digests import DIGEST_BYTES
from finetune.data.source import Source, Split
from finetune.formatting import pluralize

__all__ = ["find_equal_pixels", "find_leakage", "find_repeated_images", "is_in_splits"]

# (split that is learned from or chosen by, split that is evaluated, effect on its metrics)
_PAIRS = (
    ("train", "val", "so its metrics are too high"),
    ("train", "test", "so its metrics are too high"),
    ("val", "test", "and val chooses the weights, so its metrics may be too high"),
)


def find_leakage(source: Source) -> list[str]:
    """Return a warning for each pair of splits that share images or groups.

    Finds exact copies by the digests of the encoded images; streamed images have none.
    """
    pairs = [
        (source.splits[first], source.splits[second], effect)
        for first, second, effect in _PAIRS
        if {first, second} <= source.splits.keys()
    ]
    copies = (_find_copies(*pair) for pair in pairs)
    groups = (_find_shared_groups(*pair[:2]) for pair in pairs)
    return [warning for warning in (*copies, *groups) if warning]


def find_repeated_images(split: Split) -> list[str]:
    """Return a warning if a split has images more than once; none for a streamed split."""
    if split.is_streamed:
        return []
    values_N = split.digests.view(f"V{DIGEST_BYTES}")[:, 0]
    rows_N = np.flatnonzero(split.digests.any(axis=1))  # unreadable images have 16 zeros
    rows_N = rows_N[np.argsort(values_N[rows_N], kind="stable")]
    is_copy_C = values_N[rows_N[1:]] == values_N[rows_N[:-1]]
    copies_C, originals_C = rows_N[1:][is_copy_C], rows_N[:-1][is_copy_C]
    if not len(copies_C):
        return []
    differs = split.labels[copies_C] != split.labels[originals_C]
    others = np.flatnonzero(differs.reshape(len(copies_C), -1).any(axis=1))
    example = others[0] if len(others) else 0
    labels = f", {len(others)} of them under another label" if len(others) else ""
    return [
        f"split '{split.name}': {len(copies_C)} of {pluralize(len(split), 'image')} are copies of "
        f"others of this split{labels} (for example '{split.name_of(copies_C[example])}' of "
        f"'{split.name_of(originals_C[example])}'); remove the copies"
    ]


def is_in_splits(split: Split, others: Sequence[Split]) -> NDArray[np.bool_]:
    """Return which images of a split other splits have too, by their content; none is streamed."""
    digests = [each.digests for each in (split, *others)]
    # NumPy compares values of 16 bytes, but not rows; unreadable images have 16 zeros
    values_N, *known = (each.view(f"V{DIGEST_BYTES}")[:, 0] for each in digests)
    return split.digests.any(axis=1) & np.isin(values_N, np.concatenate([values_N[:0], *known]))


def find_equal_pixels(stores: Mapping[str, PixelStore]) -> list[str]:
    """Return a warning for each pair of splits that share pixels in files of other bytes.

    Args:
        stores: the stores of splits, by name. One that decodes on demand, or whose split has
            features instead of pixels, is left out.
    """
    found = []
    for first, second, effect in _PAIRS:
        known, store = stores.get(first), stores.get(second)
        if known is None or store is None or known.checksums is None or store.checksums is None:
            continue
        copies_C = np.flatnonzero(np.isin(store.checksums, known.checksums))
        order = np.argsort(known.checksums, kind="stable")
        places_C = np.searchsorted(known.checksums, store.checksums[copies_C], sorter=order)
        originals_C = order[places_C]
        is_equal_C = [
            torch.equal(store.read_image(int(copy)), known.read_image(int(original)))
            for copy, original in zip(copies_C, originals_C, strict=True)
        ]
        copies_C, originals_C = copies_C[is_equal_C], originals_C[is_equal_C]
        has_other_bytes_C = ~is_in_splits(store.split.subset(copies_C), [known.split])
        if has_other_bytes_C.any():
            found.append(
                _describe_copies(
                    known.split,
                    store.split,
                    copies_C[has_other_bytes_C],
                    originals_C[has_other_bytes_C][0],
                    kind="have the same pixels as",
                    effect=effect,
                )
            )
    return found


def _find_copies(known: Split, split: Split, effect: str) -> str | None:
    """Return a warning if images of `split` are also in `known`."""
    if split.is_streamed or known.is_streamed:
        return None
    copies = np.flatnonzero(is_in_splits(split, [known]))
    if not len(copies):
        return None
    original = np.flatnonzero((known.digests == split.digests[copies[0]]).all(axis=1))[0]
    return _describe_copies(known, split, copies, original, kind="are copies of", effect=effect)


def _describe_copies(
    known: Split,
    split: Split,
    copies_C: NDArray[np.int64],
    original: int,
    *,
    kind: str,
    effect: str,
) -> str:
    """Return a warning about copies in `split`; the first one copies `original` in `known`."""
    return (
        f"split '{split.name}': {len(copies_C)} of {pluralize(len(split), 'image')} {kind} "
        f"{known.name} images (for example '{split.name_of(copies_C[0])}' of "
        f"'{known.name_of(original)}'), {effect}; remove the copies"
    )


def _find_shared_groups(known: Split, split: Split) -> str | None:
    """Return a warning if images of `split` are of a group that is also in `known`."""
    if known.groups is None or split.groups is None:
        return None
    known_groups = {*known.groups} - {""}
    shared = [group for group in split.groups if group in known_groups]
    if not shared:
        return None
    return (
        f"split '{split.name}': {len(shared)} of {pluralize(len(split), 'image')} are of "
        f"{pluralize(len({*shared}), 'group')} (data.group) that {known.name} also has, for "
        f"example '{shared[0]}', so its metrics may be too high; move each group to one split"
    )
