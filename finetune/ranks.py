"""Rank and world size of this process, from the launcher's environment."""

from __future__ import annotations

import os

__all__ = ["is_local_main_process", "is_main_process", "local_world_size"]


def local_world_size(world_size: int) -> int:
    """Return the number of ranks on this host: LOCAL_WORLD_SIZE, or `world_size` if it is unset."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))


def is_main_process() -> bool:
    """Return True on rank 0 of the launch, which prints and writes files."""
    return os.environ.get("RANK", "0") == "0"


def is_local_main_process() -> bool:
    """Return True on local rank 0 of each host, which writes caches and shows progress bars."""
    return os.environ.get("LOCAL_RANK", "0") == "0"
