"""Stat signatures of files: size, times and inode, to notice changes without reading a file."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from finetune.files import stat_signature

__all__ = ["SETTLED_NS", "are_settled", "is_settled", "stat_signatures"]

SETTLED_NS = 2 * 10**9
_UNSETTLED = -1  # replaces the device number if the file's next change might not change its times


def is_settled(signature: tuple[int, int, int, int, int]) -> bool:
    """True if the file last changed more than two seconds ago.

    If a file changed more recently, its next change might leave its times the same.
    """
    return max(signature[3:]) <= time.time_ns() - SETTLED_NS


def stat_signatures(paths: Iterable[bytes | str | os.PathLike[str]]) -> NDArray[np.int64]:
    """Return signatures that change with the content of files; call this before reading them.

    Args:
        paths: paths of the files.
    Returns: (F, 5), the `stat_signature` of each file, but with -1 as the device unless
        `is_settled`; zeros if stat fails.
    """
    return np.array([_stat_signature(path) for path in paths], dtype=np.int64).reshape(-1, 5)


def _stat_signature(
    path: bytes | str | os.PathLike[str],
) -> tuple[int, int, int, int, int]:
    try:
        signature = stat_signature(path)
    except (OSError, ValueError):
        return (0, 0, 0, 0, 0)
    return signature if is_settled(signature) else (_UNSETTLED, *signature[1:])


def are_settled(signatures_F5: NDArray[np.int64]) -> bool:
    """True if an unchanged signature proves each file unchanged; False if there are no files."""
    return len(signatures_F5) > 0 and not np.any(signatures_F5[:, 0] == _UNSETTLED)
