"""Select the part of a dataset that a recipe uses: classes, subsets, and a validation split."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from finetune.data.class_balance import apportion
from finetune.data.encoded_images import ConcatImages, EncodedImages
from finetune.data.groups import group_indices
from finetune.data.source import Source, Split
from finetune.data.split_names import sort_splits
from finetune.data.streaming.streamed_images import StreamedImages
from finetune.errors import DataError, RecipeError, did_you_mean
from finetune.log import warn_once

__all__ = [
    "check_class_names",
    "hold_out_validation",
    "make_long_tailed",
    "merge_val",
    "select_classes",
    "subsample",
]

_SPLIT_TITLES = {"train": "training", "val": "validation", "test": "test"}


def merge_val(source: Source) -> Source:
    """Append the validation images of the source to its training images.

    Returns: the source without "val".
    Raises: DataError unless the source has both splits.
    """
    splits = dict(source.splits)
    if not {"train", "val"} <= set(splits):
        raise DataError(
            f"data.merge_val: {source.name} has no train and val splits to merge, only "
            f"{', '.join(splits)}; remove the key",
            code="data.no_split",
        )
    train, val = splits["train"], splits.pop("val")
    images: EncodedImages
    if isinstance(train.images, StreamedImages) and isinstance(val.images, StreamedImages):
        images = train.images.concat(val.images)
    else:
        images = ConcatImages(train.images, val.images)
    splits["train"] = dataclasses.replace(
        train,
        labels=np.concatenate([train.labels, val.labels]),
        images=images,
        rows=np.concatenate([train.image_rows, val.image_rows + len(train.images)]),
        groups=None if train.groups is None else np.concatenate([train.groups, val.groups]),
        draw_indices=None,
    )
    return dataclasses.replace(source, splits=splits)


def select_classes(source: Source, class_names: Sequence[str] | None) -> Source:
    """Keep only the images of some classes, and renumber the labels in the source's order.

    Multi-label: keeps all images, and drops the labels of the other classes.

    Args:
        class_names: names of the classes; None for all.
    Raises: RecipeError for an unknown name; DataError if a split becomes empty.
    """
    if class_names is None:
        return source
    known = source.class_names
    check_class_names(class_names, known, key="data.classes", source=source.name)
    kept_labels = [label for label, name in enumerate(known) if name in class_names]
    label_of = np.full(len(known), -1, dtype=np.int64)
    label_of[kept_labels] = np.arange(len(kept_labels))
    splits = {}
    for name, split in source.splits.items():
        if split.is_multilabel:
            splits[name] = dataclasses.replace(split, labels=split.labels[:, kept_labels])
            continue
        subset = split.subset(np.flatnonzero(np.isin(split.labels, kept_labels)))
        if len(subset) == 0:
            raise DataError(
                f"data.classes: no image of {', '.join(class_names)} in '{name}' of {source.name}; "
                "choose other classes",
                code="data.empty",
            )
        splits[name] = dataclasses.replace(subset, labels=label_of[subset.labels])
    warn_once(
        f"data.classes: {len(kept_labels)} of the {len(known)} classes of {source.name} are used"
    )
    return dataclasses.replace(
        source, splits=splits, class_names=[known[label] for label in kept_labels]
    )


def check_class_names(
    class_names: Iterable[str], known: Sequence[str], *, key: str, source: str
) -> None:
    """Raise RecipeError for the first name that is not a class.

    Args:
        class_names: names to check.
        known: class names of the dataset.
        key: recipe key that names the classes, for the message.
        source: name of the dataset, for the message.
    """
    for name in class_names:
        if name not in known:
            some = f"; known: {', '.join(known[:5])}{', …' * bool(known[5:])}"
            message = f"{key}: {source} has no class '{name}'{did_you_mean(name, known) or some}"
            raise RecipeError(message, code="recipe.unknown_name")


def subsample(source: Source, split_name: str, num_images: int | None, seed: int) -> Source:
    """Keep a random, stratified subset of a split.

    Multi-label: draws from all images, so the class shares are only approximate.

    Args:
        split_name: train, val or test.
        num_images: images to keep; None for all. Class shares are rounded by the largest
            remainder method, and every class keeps at least one image.
        seed: the same seed keeps the same images on every machine.
    Returns: the source with a smaller split. Logs a warning for val and test.
    Raises: DataError if the split does not exist, has fewer images than `num_images`, or has more
        classes than `num_images`.
    """
    if num_images is None:
        return source
    full_split = source.splits.get(split_name)
    key, title = f"data.num_{split_name}", _SPLIT_TITLES[split_name]
    if full_split is None:
        raise DataError(
            f"{key}: {source.name} has no {split_name} split to take {num_images} images from; "
            "remove the key",
            code="data.no_split",
        )
    classes = (
        np.zeros(len(full_split), dtype=np.int64) if full_split.is_multilabel else full_split.labels
    )
    present, counts = np.unique(classes, return_counts=True)
    if not len(present) <= num_images <= len(full_split):
        raise DataError(
            f"{key}: cannot take {num_images} of {len(full_split)} {title} images of "
            f"{len(present)} classes; set a number from {len(present)} to {len(full_split)}",
            code="data.too_few_images",
        )
    shares, wanted = counts * num_images / len(full_split), apportion(num_images, counts)
    for position in np.flatnonzero(wanted == 0):  # every class keeps an image
        wanted[np.where(wanted > 1, wanted - shares, -np.inf).argmax()] -= 1
        wanted[position] = 1
    if split_name != "train":
        warn_once(f"{key}: {title} metrics use only {num_images} of {len(full_split)} images")
    # a random stream per split, independent of `hold_out_validation`, which uses the seed alone
    entropy = [seed, 1 + list(_SPLIT_TITLES).index(split_name)]
    return source.shrink(split_name, _draw_per_class(full_split, classes, present, wanted, entropy))


def make_long_tailed(source: Source, ratio: float | None, seed: int) -> Source:
    """Make the training split long-tailed: class i of K keeps n * ratio**(-i / (K - 1)) images.

    Here n is the size of the largest class. A class with fewer images keeps all of them, and every
    class keeps at least one.

    Args:
        ratio: images of the first class divided by images of the last class; None keeps all images.
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
    entropy = [seed, 1 + len(_SPLIT_TITLES)]
    chosen = _draw_per_class(train, train.labels, range(len(counts)), wanted, entropy)
    warn_once(f"data.long_tail: {len(chosen)} of the {len(train)} training images are used")
    return source.shrink("train", chosen)


def _draw_per_class(
    split: Split,
    labels: np.ndarray,
    classes: Iterable[int],
    num_wanted: np.ndarray,
    entropy: list[int],
) -> np.ndarray:
    """Draw a random subset of a split with a maximum number of images per class.

    Args:
        labels: class of each image, (N,).
        classes: classes to draw from.
        num_wanted: maximum images of each of these classes.
        entropy: seeds of PCG64.
    Returns: the indices of the drawn images, in order.
    """
    draws = split.random_draws(entropy)
    chosen = [
        members[np.argsort(draws[members], kind="stable")][:count]
        for label, count in zip(classes, num_wanted, strict=True)
        for members in [np.flatnonzero(labels == label)]
    ]
    return np.sort(np.concatenate(chosen))


def hold_out_validation(source: Source, val_fraction: float, seed: int) -> Source:
    """Split a stratified validation set off the training split, unless the source has one.

    In each class, the images with the smallest `random_draws` move to validation:
    round-half-up(val_fraction * images), at least 1, but never the last training image.

    With `Split.groups`, whole groups move instead of single images, see `_hold_out_groups`.

    Multi-label: processes the classes from the rarest to the most common. For each class, moves
    those of its images that are in no rarer class, until validation has the share of this class.
    So every class gets its share, or more if it often occurs together with rarer classes. Images
    without a label count as a class.

    Args:
        val_fraction: 0 <= fraction < 1; 0 takes nothing.
        seed: the same seed gives the same split on every machine.
    Returns: the source with "val"; unchanged if it has one or val_fraction is 0. For a streamed
        source, logs a warning if the validation images are in most of the row groups.
    Raises: DataError if the source has no train split, or if no class has two images.
    """
    if "val" in source.splits or val_fraction == 0:
        return source
    train = source.splits.get("train")
    if train is None:
        message = f"{source.name}: no train split to take a validation split from; add one"
        raise DataError(message, code="data.no_split")
    draws = train.random_draws(seed)
    if train.groups is None:
        in_val = _hold_out_images(train.labels, draws, val_fraction)
    else:
        in_val = _hold_out_groups(train.labels, group_indices(train.groups), draws, val_fraction)
    if not in_val.any():
        unit = "image" if train.groups is None else "group (data.group)"
        raise DataError(
            f"{source.name}: every class has only one {unit} in 'train', so none can be used for "
            "validation; add images, or train without validation (data.val_fraction=0)",
            code="data.too_few_images",
        )
    val = dataclasses.replace(train.subset(np.flatnonzero(in_val)), name="val", origin="train")
    if isinstance(val.images, StreamedImages):
        _warn_scattered_validation(source.name, val, val.images)
    splits = {**source.splits, "train": train.subset(np.flatnonzero(~in_val)), "val": val}
    return dataclasses.replace(source, splits=sort_splits(splits))


def _hold_out_images(labels: np.ndarray, draws: np.ndarray, val_fraction: float) -> np.ndarray:
    """Choose the validation images, see `hold_out_validation`. Returns: (N,) bool."""
    in_val = np.zeros(len(labels), dtype=bool)
    for members, unclaimed in _stratification_order(labels):
        num_wanted = max(1, int(val_fraction * len(members) + 0.5))
        candidates = unclaimed[np.argsort(draws[unclaimed], kind="stable")]
        num_missing = min(num_wanted, len(members) - 1) - int(in_val[members].sum())
        in_val[candidates[: max(num_missing, 0)]] = True
        if in_val[members].all():  # rarer classes took all of them
            in_val[members[0]] = False
    return in_val


def _hold_out_groups(
    labels: np.ndarray, groups: np.ndarray, draws: np.ndarray, val_fraction: float
) -> np.ndarray:
    """Choose the validation images, whole groups at a time. Returns: (N,) bool.

    Processes the classes from the rarest to the most common. For each class, moves groups that have
    no rarer class, in the order of their first image's draw, as long as that brings validation
    closer to the share of this class. If no group does, it moves the smallest one, so every class
    with two groups has a validation image. No class loses its last training image.

    Args:
        groups: (N,) group of each image, from 0.
        draws: (N,) a random number for each image.
    """
    group_draws = draws[np.unique(groups, return_index=True)[1]]
    in_val, is_claimed = np.zeros((2, len(group_draws)), dtype=bool)  # by group
    for members in sorted((members for members, _ in _stratification_order(labels)), key=len):
        own, sizes = np.unique(groups[members], return_counts=True)
        num_wanted = min(max(1, int(val_fraction * len(members) + 0.5)), len(members) - 1)
        num_missing = num_wanted - int(sizes[in_val[own]].sum())
        free = np.flatnonzero(~is_claimed[own])
        free = free[np.argsort(group_draws[own[free]], kind="stable")]
        for position in free.tolist():
            if sizes[position] < 2 * num_missing:
                in_val[own[position]] = True
                num_missing -= int(sizes[position])
        if len(free) and not in_val[own].any():
            in_val[own[free[sizes[free].argmin()]]] = True
        if in_val[own].all():  # also if rarer classes took all of them
            in_val[own[sizes.argmax()]] = False
        is_claimed[own] = True
    chosen: np.ndarray = in_val[groups]
    return chosen


def _stratification_order(labels: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield for each class its image indices, and those of them that are in no earlier class.

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


def _warn_scattered_validation(name: str, val: Split, images: StreamedImages) -> None:
    groups = len(np.unique(images.group_indices(val.image_rows)))
    total = len(images.group_starts) - 1
    if 2 * groups > total:
        warn_once(
            f"{name}: validation images are taken from train and are spread over {groups} of its "
            f"{total} row groups; the first evaluation reads all of these; to read less, set "
            "data.val_fraction=0, or use a dataset that has a validation split"
        )
