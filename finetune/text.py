"""Counts, names and tables as people read them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = ["cell", "counted", "markdown_table", "printable"]


def printable(path: str | Path) -> str:
    """A path as text that can be printed and written, also when its bytes are not UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`1 file`, `2 files`; the plural is given where it is not the noun and an s."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def cell(text: str) -> str:
    """Text that cannot break out of its table cell."""
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|")


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table, its head first; no text breaks out of its cell."""
    lines = [" | ".join(map(cell, row)) for row in (heads, *rows)]
    lines.insert(1, " | ".join(["---"] * len(heads)))
    return [f"| {line} |" for line in lines]
