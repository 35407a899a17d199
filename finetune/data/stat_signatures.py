"""Stat signatures of files: size, times and inode, to notice changes without reading a file."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

__all__ = ["SETTLED_NS", "are_settled", "stat_signatures"]

SETTLED_NS = 2 * 10**9
_UNSETTLED = -1  # as device number: the file's next change might not change its times


def stat_signatures(paths: Iterable[bytes | str | os.PathLike[str]]) -> NDArray[np.int64]:
    """Return signatures that change with the content of files; call this before reading them.

    Args:
        paths: paths of the files; symlinks are followed.
    Returns: (F, 5) device, inode, size, mtime and ctime; zeros if stat fails. The device is -1 for
        a file that changed within the last two seconds: another change might leave its times the
        same.
    """
    settled_before_ns = time.time_ns() - SETTLED_NS
    return np.array(
        [_stat_signature(path, settled_before_ns) for path in paths], dtype=np.int64
    ).reshape(-1, 5)


def _stat_signature(
    path: bytes | str | os.PathLike[str], settled_before_ns: int
) -> tuple[int, int, int, int, int]:
    try:
        stat = os.stat(path)
    except (OSError, ValueError):
        return (0, 0, 0, 0, 0)
    is_recent = max(stat.st_mtime_ns, stat.st_ctime_ns) > settled_before_ns
    device = _UNSETTLED if is_recent else stat.st_dev % 2**63
    return device, stat.st_ino % 2**63, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def are_settled(signatures_F5: NDArray[np.int64]) -> bool:
    """True if files that keep these signatures are surely unchanged; False for no files."""
    return len(signatures_F5) > 0 and not np.any(signatures_F5[:, 0] == _UNSETTLED)
