"""Groups of images that belong in one split, such as the photos of one patient, camera or burst."""

# N images

from __future__ import annotations

import dataclasses
import re

import numpy as np
from numpy.typing import NDArray

from finetune.data.source import Source
from finetune.errors import DataError
from finetune.formatting import pluralize
from finetune.log import warn_once

__all__ = ["group_indices", "groups_from_names"]

_TAR_SHARD = re.compile(r"\A\S+\.tar ")  # in `Split.name_of`, before the name of the member


def groups_from_names(source: Source, pattern: str) -> Source:
    """Find the group of each image in its name.

    Args:
        pattern: regular expression with one group, searched anywhere in the name; in a tar shard,
            in the name of the member.
    Returns: the source whose splits have `groups`. Logs a warning if some names do not match; these
        images stay single.
    Raises: DataError if no name matches.
    """
    regex, splits = re.compile(pattern), {}
    for name, split in source.splits.items():
        names = (split.name_of(index) for index in range(len(split)))
        matches = (regex.search(_TAR_SHARD.sub("", each)) for each in names)
        groups = [(match[1] if match else None) or "" for match in matches]
        splits[name] = dataclasses.replace(split, groups=np.array(groups, dtype=object))
    unmatched = [
        split.name_of(int(index))
        for split in splits.values()
        if split.groups is not None
        for index in np.flatnonzero(split.groups == "")
    ]
    num_images = sum(map(len, splits.values()))
    if len(unmatched) == num_images:
        raise DataError(
            f"data.group: '{pattern}' matches no name of {source.name}, such as '{unmatched[0]}'; "
            "fix the expression",
            code="data.wrong_format",
        )
    if unmatched:
        warn_once(
            f"data.group: {len(unmatched):,} of {pluralize(num_images, 'image')} have no group, "
            f"such as '{unmatched[0]}', and stay single"
        )
    return dataclasses.replace(source, splits=splits)


def group_indices(groups_N: NDArray[np.object_]) -> NDArray[np.int64]:
    """Number the groups from 0: (N,) int64. An image without a group gets a number of its own.

    Args:
        groups_N: see `Split.groups`.
    """
    names, index_N = np.unique(groups_N.astype(str), return_inverse=True)
    is_single = groups_N == ""
    index_N[is_single] = len(names) + np.arange(is_single.sum())
    return np.unique(index_N, return_inverse=True)[1].astype(np.int64)  # "" leaves a gap
