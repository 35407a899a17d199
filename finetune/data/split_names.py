"""Names of splits: train, val and test, found in folder and file names."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import TypeVar

from finetune.formatting import pluralize
from finetune.log import warn_once

__all__ = ["SPLIT_ALIASES", "find_split_word", "group_by_split", "sort_splits"]

_Value = TypeVar("_Value")
_File = TypeVar("_File")

# split name in a source -> split name in finetune
SPLIT_ALIASES = {
    "train": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
    "training": "train",
    "testing": "test",
}


def find_split_word(name: str) -> str | None:
    """Return the split that a name contains as a word (seg_train: train); None if it has none."""
    words = re.split(r"[\W\d_]+", name.lower())
    return next((SPLIT_ALIASES[word] for word in words if word in SPLIT_ALIASES), None)


def sort_splits(splits: dict[str, _Value]) -> dict[str, _Value]:
    """Sort splits: train, val, test."""
    return {name: splits[name] for name in ("train", "val", "test") if name in splits}


def group_by_split(
    files: Sequence[_File], get_path: Callable[[_File], PurePath], source: str
) -> dict[str, list[_File]]:
    """Group files by split, detected in the words of the file name or in the folder name.

    Args:
        get_path: function that returns the path of a file.
        source: the source string, for warnings.
    Returns: a dict from split to its files; all files are train if none matches a split.
    """
    groups: dict[str, list[_File]] = {}
    others = []
    for file in files:
        path = get_path(file)
        words = re.split(r"[-_.]", path.name.lower())
        named = dict.fromkeys(SPLIT_ALIASES[word] for word in words if word in SPLIT_ALIASES)
        split = next(iter(named), SPLIT_ALIASES.get(path.parent.name.lower()))
        if len(named) > 1:
            warn_once(
                f"{source}: {path.name} matches several splits ({', '.join(named)}), and is read "
                f"as {split}; rename it if it is another one"
            )
        if split:
            groups.setdefault(split, []).append(file)
        else:
            others.append(file)
    if not groups:
        return {"train": others}
    if others:
        names = ", ".join(get_path(file).name for file in others[:3])
        warn_once(
            f"{source}: ignored {pluralize(len(others), 'file')} that cannot be matched to a known "
            f"split: {names}"
        )
    return sort_splits(groups)
