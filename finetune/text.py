"""Numbers, names and tables as people read them: the one place that words them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = [
    "MISSING",
    "TOO_FEW",
    "aligned_table",
    "byte_size",
    "cell",
    "confidence",
    "counted",
    "duration",
    "markdown_table",
    "mean_and_std",
    "percent",
    "percent_range",
    "printable",
    "short_count",
]

MISSING = "–"
TOO_FEW = "too few images"  # beside a figure that rests on fewer than TOO_FEW_IMAGES


def printable(path: str | Path) -> str:
    """A path as text that can be printed and written, also when its bytes are not UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`1 file`, `2 files`; the plural is given where it is not the noun and an s."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def short_count(number: float) -> str:
    """`950`, `1.02 M` or `303.3 M`: parameters or operations, where three digits do."""
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            digits = ".3g" if number < 100 * scale else ".1f"
            return f"{number / scale:{digits}} {unit}"
    return f"{number:,.0f}"


def byte_size(num_bytes: float) -> str:
    """`5 B`, `1.5 KiB`, `12.0 MiB` or `1,024.0 GiB`."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:,.1f} {unit}"
    return f"{num_bytes:.0f} B"


def duration(seconds: float) -> str:
    """`12.3 s`, `3 min 20 s` or `2 h 5 min`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def percent(share: float, digits: int = 2) -> str:
    """`66.56 %` for a share of 0.6656."""
    return f"{100 * share:.{digits}f} %"


def percent_range(low: float, high: float, digits: int = 1) -> str:
    """`75.8–83.6 %` for the shares 0.758 and 0.836."""
    return f"{100 * low:.{digits}f}–{percent(high, digits)}"


def confidence(share: float) -> str:
    """A probability in per cent with one decimal, and no certainty that the number has not."""
    if share < 0.0005:
        return "< 0.1 %"
    return "> 99.9 %" if 0.9995 <= share < 1 else percent(share, 1)


def mean_and_std(mean: float, std: float | None, digits: int = 2) -> str:
    """`0.52 ± 0.01`, or the mean alone where no deviation is known."""
    return f"{mean:.{digits}f}" + ("" if std is None else f" ± {std:.{digits}f}")


def cell(text: str) -> str:
    """Text that cannot break out of its table cell."""
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|")


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table, its head first; no text breaks out of its cell."""
    lines = [" | ".join(map(cell, row)) for row in (heads, *rows)]
    lines.insert(1, " | ".join(["---"] * len(heads)))
    return [f"| {line} |" for line in lines]


def aligned_table(rows: Sequence[Sequence[str]], *, texts: int = 1) -> list[str]:
    """The lines of a table for a terminal: `texts` columns from the left, figures from the right.

    Args:
        rows: of equally many cells; the head is the first.
        texts: number of columns, from the first on, that hold words.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place < texts else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
