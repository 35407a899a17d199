"""Which images are trained on and which choose: the splits that a recipe takes from train."""

from __future__ import annotations

import dataclasses

import numpy as np

from finetune.data.columns import in_order
from finetune.data.decode import notice
from finetune.data.items import Items
from finetune.data.source import Source, Split
from finetune.data.streaming.row_groups import ShardItems
from finetune.errors import DataError

__all__ = ["merge_val", "split_train", "take_train"]


def merge_val(source: Source) -> Source:
    """Make the source's own validation images training images, behind those that it has.

    Returns: the source without "val".
    Raises: DataError unless it has both splits.
    """
    splits = dict(source.splits)
    if not {"train", "val"} <= set(splits):
        raise DataError(
            f"data.merge_val: {source.name} brings no validation split to add to train, only "
            f"{', '.join(splits)}; remove the key"
        )
    train, val = splits["train"], splits.pop("val")
    rows = [np.arange(len(one)) if one.rows is None else one.rows for one in (train, val)]
    splits["train"] = dataclasses.replace(
        train,
        labels=np.concatenate([train.labels, val.labels]),
        items=_joined(train.items, val.items),
        rows=np.concatenate([rows[0], rows[1] + len(train.items)]),
    )
    return dataclasses.replace(source, splits=splits)


def take_train(source: Source, num_train: int | None, seed: int) -> Source:
    """Keep only some of the training images: of every class its share, drawn by the seed.

    Args:
        num_train: images to keep; None for all of them. The shares are rounded by their largest
            remainders, and every class keeps at least one image.
        seed: the same seed keeps the same images on every machine.
    Returns: the source with a smaller "train".
    Raises: DataError if there are fewer images, or fewer to keep than classes.
    """
    if num_train is None:
        return source
    train = source.splits.get("train")
    if train is None:
        raise DataError(f"{source.name}: no train split to take {num_train} images from")
    present, counts = np.unique(train.labels, return_counts=True)
    if not len(present) <= num_train <= len(train):
        raise DataError(
            f"data.num_train: {num_train} of the {len(train)} training images of {len(present)} "
            f"classes; give a number from {len(present)} to {len(train)}"
        )
    shares = counts * num_train / len(train)
    wanted = np.floor(shares).astype(np.int64)
    wanted[np.argsort(wanted - shares, kind="stable")[: num_train - int(wanted.sum())]] += 1
    for place in np.flatnonzero(wanted == 0):  # no class without an image
        wanted[np.where(wanted > 1, wanted - shares, -np.inf).argmax()] -= 1
        wanted[place] = 1
    # a stream of its own: the validation split draws from the seed itself
    draws = np.random.PCG64([seed, 1]).random_raw(len(train))
    kept = [
        members[np.argsort(draws[members], kind="stable")][:number]
        for label, number in zip(present, wanted, strict=True)
        for members in [np.flatnonzero(train.labels == label)]
    ]
    smaller = train.subset(np.sort(np.concatenate(kept)))
    return dataclasses.replace(source, splits={**source.splits, "train": smaller})


def split_train(source: Source, val_fraction: float, seed: int) -> Source:
    """Take a validation split from train, unless the source has one.

    Each training image gets one raw 64-bit number of PCG64(seed), which unlike NumPy's shuffles is
    the same in every version. Of each class those with the smallest numbers are taken:
    round-half-up(fraction * images), at least 1, and never the last training image.

    Args:
        val_fraction: 0 <= fraction < 1; 0 takes nothing.
        seed: the same seed gives the same split on every machine.
    Returns: the source with "val"; unchanged where it has one or val_fraction is 0. What this costs
        a streamed source is said.
    Raises: DataError without a train split, or when no class has two images.
    """
    if not 0 <= val_fraction < 1:
        raise DataError(f"data.val_fraction: {val_fraction} is not in 0 <= fraction < 1")
    if "val" in source.splits or val_fraction == 0:
        return source
    train = source.splits.get("train")
    if train is None:
        raise DataError(f"{source.name}: no train split to take a validation split from")
    draws = np.random.PCG64(seed).random_raw(len(train))
    in_val = np.zeros(len(train), dtype=bool)
    for label in np.unique(train.labels):
        members = np.flatnonzero(train.labels == label)
        wanted = max(1, int(val_fraction * len(members) + 0.5))
        ranked = members[np.argsort(draws[members], kind="stable")]
        in_val[ranked[: min(wanted, len(members) - 1)]] = True
    if not in_val.any():
        raise DataError(
            f"{source.name}: every class has a single image in 'train'; none can be validation: "
            "add images, or train without validation (data.val_fraction=0)"
        )
    val = dataclasses.replace(train.subset(np.flatnonzero(in_val)), name="val")
    if isinstance(val.items, ShardItems):
        _say_what_is_read(source.name, val, val.items)
    splits = {**source.splits, "train": train.subset(np.flatnonzero(~in_val)), "val": val}
    return dataclasses.replace(source, splits=in_order(splits))


def _say_what_is_read(name: str, val: Split, items: ShardItems) -> None:
    rows = np.arange(len(val)) if val.rows is None else val.rows
    groups = len(np.unique(items.group_of(rows)))
    total = len(items.starts) - 1
    if 2 * groups > total:
        notice(
            f"{name}: validation is taken from train and lies in {groups} of its {total} row "
            "groups, which the first evaluation reads; less is read with data.val_fraction=0, or "
            "from a set that brings its own"
        )


def _joined(first: Items, second: Items) -> Items:
    if isinstance(first, ShardItems) and isinstance(second, ShardItems):
        return first.joined(second)
    return _Joined(first, second)


class _Joined:
    """Two collections as one, the second behind the first."""

    def __init__(self, first: Items, second: Items) -> None:
        self._first, self._second = first, second

    def _part(self, row: int) -> tuple[Items, int]:
        behind = row - len(self._first)
        return (self._first, row) if behind < 0 else (self._second, behind)

    def __len__(self) -> int:
        return len(self._first) + len(self._second)

    def content(self, row: int) -> bytes:
        """The encoded image of a row. Raises: DataError where it has none."""
        items, own = self._part(row)
        return items.content(own)

    def read(self, row: int, size: int | None = None, room: np.ndarray | None = None) -> np.ndarray:
        """Decode a row. Returns: (H, W, 3) uint8. Raises: DataError naming the image."""
        items, own = self._part(row)
        return items.read(own, size, room)

    def name_of(self, row: int) -> str:
        """What the collection that has the image calls it."""
        items, own = self._part(row)
        return items.name_of(own)

    def sizes(self) -> np.ndarray:
        """(N,) int64, the encoded images' sizes in bytes."""
        return np.concatenate([self._first.sizes(), self._second.sizes()])
