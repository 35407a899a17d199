"""The part of a data set that a recipe takes: some classes, fewer images, a validation split."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from finetune.data.columns import in_order
from finetune.data.fingerprint import content_of
from finetune.data.items import Items
from finetune.data.notices import notice
from finetune.data.sampling import shares_of
from finetune.data.source import Source, Split
from finetune.data.streaming.row_groups import ShardItems
from finetune.errors import DataError, RecipeError, nearest
from finetune.text import counted

__all__ = [
    "check_classes",
    "keep_classes",
    "long_tail",
    "merge_val",
    "shared_images",
    "split_train",
    "take",
]

_KINDS = {"train": "training", "val": "validation", "test": "test"}
_COMPARED_BYTES = 2**28  # of files of equal size; of a larger set many have one by chance


def shared_images(source: Source) -> list[str]:
    """Return a line for each split that measures on copies of training images, byte for byte.

    Only files of one image each are compared; most of them have a size of their own.
    """
    train, lines = source.splits["train"], []
    for name in ("val", "test"):
        pairs = _equal_files(train, source.splits[name]) if name in source.splits else []
        if pairs:
            first, copy = train.name_of(pairs[0][0]), source.splits[name].name_of(pairs[0][1])
            lines.append(
                f"split '{name}': {len(pairs)} of {counted(len(source.splits[name]), 'image')} "
                f"are copies of training images ('{copy}' of '{first}'), so that its figures are "
                "too good; remove the copies"
            )
    return lines


def _equal_files(train: Split, other: Split) -> list[tuple[int, int]]:
    """The places of equal files; none where too much would have to be read."""
    if not (train.items.has_file_each and other.items.has_file_each):
        return []
    rows = [train.item_rows, other.item_rows]
    sizes = [train.items.states(rows[0])[:, 2], other.items.states(rows[1])[:, 2]]
    alike = np.setdiff1d(np.intersect1d(sizes[0], sizes[1]), [0])
    places = [np.flatnonzero(np.isin(each, alike)) for each in sizes]
    if sum(each[some].sum() for each, some in zip(sizes, places, strict=True)) > _COMPARED_BYTES:
        return []
    known = {_digest(train.items, rows[0][place]): place for place in places[0].tolist()}
    found = ((known.get(_digest(other.items, rows[1][at])), at) for at in places[1].tolist())
    return [(first, place) for first, place in found if first is not None]


def _digest(items: Items, row: int) -> bytes:
    """The sha256 of an encoded image; of one that cannot be opened, another one each time."""
    body, size = content_of(items, int(row))
    return hashlib.sha256(body).digest() if size >= 0 else os.urandom(32)


def merge_val(source: Source) -> Source:
    """Append the source's own validation images to its training images.

    Returns: the source without "val".
    Raises: DataError unless it has both splits.
    """
    splits = dict(source.splits)
    if not {"train", "val"} <= set(splits):
        raise DataError(
            f"data.merge_val: {source.name} brings no validation split to add to train, only "
            f"{', '.join(splits)}; remove the key",
            code="data.no_split",
        )
    train, val = splits["train"], splits.pop("val")
    splits["train"] = dataclasses.replace(
        train,
        labels=np.concatenate([train.labels, val.labels]),
        items=_joined(train.items, val.items),
        rows=np.concatenate([train.item_rows, val.item_rows + len(train.items)]),
    )
    return dataclasses.replace(source, splits=splits)


def keep_classes(source: Source, names: Sequence[str] | None) -> Source:
    """Keep only the images of some classes; their labels count these, in the source's order.

    Where an image has several labels, all images stay, and the labels of the other classes go.

    Args:
        names: of the classes; None for all of them.
    Raises: RecipeError for an unknown name; DataError if a split is left empty.
    """
    if names is None:
        return source
    known = source.class_names
    check_classes(names, known, key="data.classes", source=source.name)
    kept = [label for label, name in enumerate(known) if name in names]
    label_of = np.full(len(known), -1, dtype=np.int64)
    label_of[kept] = np.arange(len(kept))
    splits = {}
    for name, split in source.splits.items():
        if split.is_multilabel:
            splits[name] = dataclasses.replace(split, labels=split.labels[:, kept])
            continue
        chosen = split.subset(np.flatnonzero(np.isin(split.labels, kept)))
        if len(chosen) == 0:
            raise DataError(
                f"data.classes: no image of {', '.join(names)} in '{name}' of {source.name}; name "
                "other classes",
                code="data.empty",
            )
        splits[name] = dataclasses.replace(chosen, labels=label_of[chosen.labels])
    notice(f"data.classes: {len(kept)} of the {len(known)} classes of {source.name} are used")
    return dataclasses.replace(source, splits=splits, class_names=[known[label] for label in kept])


def check_classes(names: Iterable[str], known: Sequence[str], *, key: str, source: str) -> None:
    """Raise RecipeError for the first name that is no class.

    Args:
        key, source: of the recipe and the data, for the message.
    """
    for name in names:
        if name not in known:
            some = f"; known: {', '.join(known[:5])}{', …' * bool(known[5:])}"
            message = f"{key}: {source} has no class '{name}'{nearest(name, known) or some}"
            raise RecipeError(message, code="recipe.unknown_name")


def take(source: Source, split: str, number: int | None, seed: int) -> Source:
    """Keep some images of a split: of every class its share, drawn by the seed.

    Where an image has several labels it is any image, so the shares are kept roughly.

    Args:
        split: train, val or test.
        number: images to keep; None for all of them. The shares are rounded by their largest
            remainders, and every class keeps at least one image.
        seed: the same seed keeps the same images on every machine.
    Returns: the source with a smaller split. Of a smaller val or test a notice is logged.
    Raises: DataError if there is no such split, or if it has fewer images than are to be kept, or
        more classes.
    """
    if number is None:
        return source
    images, key, kind = source.splits.get(split), f"data.num_{split}", _KINDS[split]
    if images is None:
        raise DataError(
            f"{key}: {source.name} has no {split} split to take {number} images from; remove it",
            code="data.no_split",
        )
    classes = np.zeros(len(images), dtype=np.int64) if images.is_multilabel else images.labels
    present, counts = np.unique(classes, return_counts=True)
    if not len(present) <= number <= len(images):
        raise DataError(
            f"{key}: {number} of the {len(images)} {kind} images of {len(present)} classes; give a "
            f"number from {len(present)} to {len(images)}",
            code="data.too_few_images",
        )
    shares, wanted = counts * number / len(images), shares_of(number, counts)
    for place in np.flatnonzero(wanted == 0):  # no class without an image
        wanted[np.where(wanted > 1, wanted - shares, -np.inf).argmax()] -= 1
        wanted[place] = 1
    if split != "train":
        notice(f"{key}: every {kind} figure rests on {number} of {len(images)} images")
    # streams of their own: the validation split draws from the seed itself
    entropy = [seed, 1 + list(_KINDS).index(split)]
    smaller = _drawn(images, classes, present, wanted, entropy)
    return dataclasses.replace(source, splits={**source.splits, split: smaller})


def long_tail(source: Source, ratio: float | None, seed: int) -> Source:
    """Keep fewer training images from class to class: n ratio**(-i / (K - 1)) of class i of K.

    Args:
        ratio: of the first class's images to the last one's; None keeps all. n is the number of the
            largest class; a class that has fewer keeps what it has, and every one an image.
        seed: the same seed keeps the same images on every machine.
    Source: Cao et al. 2019, "Learning imbalanced datasets with label-distribution-aware margin
        loss", section 4 (CIFAR-10-LT).
    """
    train = source.splits.get("train")
    if ratio is None or train is None:
        return source
    counts = np.bincount(train.labels, minlength=len(source.class_names))
    exponents = np.arange(len(counts)) / max(len(counts) - 1, 1)
    wanted = np.maximum((counts.max() * (1 / ratio) ** exponents).astype(np.int64), 1)
    entropy = [seed, 1 + len(_KINDS)]
    smaller = _drawn(train, train.labels, range(len(counts)), wanted, entropy)
    notice(f"data.long_tail: {len(smaller)} of the {len(train)} training images are used")
    return dataclasses.replace(source, splits={**source.splits, "train": smaller})


def _drawn(
    split: Split, labels: np.ndarray, classes: Iterable[int], wanted: np.ndarray, entropy: list[int]
) -> Split:
    """At most so many images of each class as are wanted, drawn from a stream of numbers."""
    draws = np.random.PCG64(entropy).random_raw(len(split))
    kept = [
        members[np.argsort(draws[members], kind="stable")][:count]
        for label, count in zip(classes, wanted, strict=True)
        for members in [np.flatnonzero(labels == label)]
    ]
    return split.subset(np.sort(np.concatenate(kept)))


def split_train(source: Source, val_fraction: float, seed: int) -> Source:
    """Take a validation split from train, unless the source has one.

    Each training image gets one raw 64-bit number of PCG64(seed), which unlike NumPy's shuffles is
    the same in every version. Of each class those with the smallest numbers are taken:
    round-half-up(fraction * images), at least 1, and never the last training image.

    Where an image has several labels, the classes take turns, the rarest first, and each takes the
    images that it still lacks among those that no rarer class has; so every class has its share of
    validation, or, where it comes with rarer ones, more. Images without a label count as a class.

    Args:
        val_fraction: 0 <= fraction < 1; 0 takes nothing.
        seed: the same seed gives the same split on every machine.
    Returns: the source with "val"; unchanged if it has one or val_fraction is 0. For a streamed
        source a notice tells how much more is read.
    Raises: DataError without a train split, or if no class has two images.
    """
    if "val" in source.splits or val_fraction == 0:
        return source
    train = source.splits.get("train")
    if train is None:
        message = f"{source.name}: no train split to take a validation split from"
        raise DataError(message, code="data.no_split")
    draws = np.random.PCG64(seed).random_raw(len(train))
    in_val = np.zeros(len(train), dtype=bool)
    for members, left in _turns(train.labels):
        wanted = max(1, int(val_fraction * len(members) + 0.5))
        ranked = left[np.argsort(draws[left], kind="stable")]
        lacking = min(wanted, len(members) - 1) - int(in_val[members].sum())
        in_val[ranked[: max(lacking, 0)]] = True
        if in_val[members].all():  # the rarer classes took them all
            in_val[members[0]] = False
    if not in_val.any():
        raise DataError(
            f"{source.name}: every class has a single image in 'train'; none can be validation: "
            "add images, or train without validation (data.val_fraction=0)",
            code="data.too_few_images",
        )
    val = dataclasses.replace(train.subset(np.flatnonzero(in_val)), name="val")
    if isinstance(val.items, ShardItems):
        _notice_row_groups(source.name, val, val.items)
    splits = {**source.splits, "train": train.subset(np.flatnonzero(~in_val)), "val": val}
    return dataclasses.replace(source, splits=in_order(splits))


def _turns(labels: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the images of each class, and those of them that came with no class before.

    Source: Sechidis et al. 2011, "On the stratification of multi-label data", section 3.2.
    """
    if labels.ndim == 1:
        for label in np.unique(labels):
            members = np.flatnonzero(labels == label)
            yield members, members
        return
    taken = np.zeros(len(labels), dtype=bool)
    columns = [*np.ascontiguousarray(labels.T), labels.sum(axis=1) == 0]
    for column in sorted(columns, key=lambda column: int(column.sum(dtype=np.int64))):
        members = np.flatnonzero(column)
        if len(members):
            yield members, members[~taken[members]]
            taken[members] = True


def _notice_row_groups(name: str, val: Split, items: ShardItems) -> None:
    groups = len(np.unique(items.group_of(val.item_rows)))
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
        self.origin = f"{first.origin}\n{second.origin}"
        self.has_file_each = first.has_file_each and second.has_file_each

    def _part(self, row: int) -> tuple[Items, int]:
        behind = row - len(self._first)
        return (self._first, row) if behind < 0 else (self._second, behind)

    def __len__(self) -> int:
        return len(self._first) + len(self._second)

    def content(self, row: int) -> bytes:
        """Return the encoded image of a row. Raises: DataError if it has none."""
        items, own = self._part(row)
        return items.content(own)

    def read(self, row: int, size: int | None = None, room: np.ndarray | None = None) -> np.ndarray:
        """Decode a row. Returns: (H, W, 3) uint8. Raises: DataError naming the image."""
        items, own = self._part(row)
        return items.read(own, size, room)

    def name_of(self, row: int) -> str:
        """Return the image's name in its collection."""
        items, own = self._part(row)
        return items.name_of(own)

    def sizes(self) -> np.ndarray:
        """Return (N,) int64, the encoded images' sizes in bytes."""
        return np.concatenate([self._first.sizes(), self._second.sizes()])

    def states(self, rows: np.ndarray) -> np.ndarray:
        """Return (files, 5) as `states_of`, in the order of the rows if each has a file."""
        behind = rows >= len(self._first)
        first = self._first.states(rows[~behind])
        second = self._second.states(rows[behind] - len(self._first))
        if not self.has_file_each:
            return np.concatenate([first, second])
        states = np.empty((len(rows), 5), dtype=np.int64)
        states[~behind], states[behind] = first, second
        return states
