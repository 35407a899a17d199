"""Counts and names as people read them."""

# H W pixels

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["counted", "printable"]


def printable(path: str | Path) -> str:
    """A path as text that can be printed and written, also when its bytes are not UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`1 file`, `2 files`; the plural is given where it is not the noun and an s."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
