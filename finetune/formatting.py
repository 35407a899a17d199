"""Format numbers, names and tables for the terminal, reports and model cards."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from finetune.errors import escape_control_chars

__all__ = [
    "MISSING",
    "TOO_FEW_IMAGES_NOTE",
    "aligned_table",
    "escape_csv_formula",
    "escape_table_cell",
    "escape_to_one_line",
    "format_bytes",
    "format_duration",
    "format_mean_std",
    "format_percent",
    "format_percent_range",
    "format_probability",
    "format_short_count",
    "markdown_table",
    "pluralize",
    "printable_path",
    "unescape_csv_formula",
]

MISSING = "–"
TOO_FEW_IMAGES_NOTE = "too few images"  # printed next to a metric on too few images


def printable_path(path: str | Path) -> str:
    """Return a path as printable text, even if its bytes are not UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def pluralize(count: int, singular: str, plural: str | None = None) -> str:
    """Format as `1 file` or `2 files`; pass `plural` if it is not the singular plus an s."""
    return f"{count} {singular if count == 1 else plural or singular + 's'}"


def format_short_count(number: float | None) -> str:
    """Format a count with about three digits: `950`, `1.02 M` or `303.3 M`; `–` for None."""
    if number is None:
        return "–"
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            digits = ".3g" if number < 100 * scale else ".1f"
            return f"{number / scale:{digits}} {unit}"
    return f"{number:,.0f}"


def format_bytes(num_bytes: float) -> str:
    """Format as `5 B`, `1.5 KiB`, `12.0 MiB` or `1,024.0 GiB`."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:,.1f} {unit}"
    return f"{num_bytes:.0f} B"


def format_duration(seconds: float) -> str:
    """Format as `12.3 s`, `3 min 20 s` or `2 h 5 min`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def format_percent(fraction: float, digits: int = 2) -> str:
    """Format the fraction 0.6656 as `66.56 %`."""
    return f"{100 * fraction:.{digits}f} %"


def format_percent_range(low: float, high: float, digits: int = 1) -> str:
    """Format the fractions 0.758 and 0.836 as `75.8–83.6 %`."""
    return f"{100 * low:.{digits}f}–{format_percent(high, digits)}"


def format_probability(probability: float) -> str:
    """Format a probability in percent with one decimal; never round it to 0 % or 100 %."""
    if probability < 0.0005:
        return "< 0.1 %"
    return "> 99.9 %" if 0.9995 <= probability < 1 else format_percent(probability, 1)


def format_mean_std(mean: float, std: float | None, digits: int = 2) -> str:
    """Format as `0.52 ± 0.01`, or the mean alone if `std` is None."""
    return f"{mean:.{digits}f}" + ("" if std is None else f" ± {std:.{digits}f}")


def escape_table_cell(text: str) -> str:
    """Escape text for a cell of a Markdown table."""
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|")


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table, header first; cells are escaped."""
    lines = [" | ".join(map(escape_table_cell, row)) for row in (header, *rows)]
    lines.insert(1, " | ".join(["---"] * len(header)))
    return [f"| {line} |" for line in lines]


def aligned_table(rows: Sequence[Sequence[str]], *, num_text_columns: int = 1) -> list[str]:
    """Return the lines of a table for a terminal: text left-aligned, numbers right-aligned.

    Args:
        rows: the header row, then the data rows; all have the same number of cells.
        num_text_columns: number of columns, from the left, that contain text.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column < num_text_columns else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


# First characters of spreadsheet formulas. The apostrophe is escaped too: removing one leading
# apostrophe then restores every escaped text.
_FORMULA_PREFIXES = ("=", "+", "-", "@", "\t", "\r", "\n", "'")


def escape_csv_formula(text: str) -> str:
    """Add an apostrophe in front of text that a spreadsheet would run as a formula."""
    return f"'{text}" if text.startswith(_FORMULA_PREFIXES) else text


def unescape_csv_formula(text: str) -> str:
    """Undo `escape_csv_formula`."""
    is_escaped = text.startswith("'") and text[1:].startswith(_FORMULA_PREFIXES)
    return text[1:] if is_escaped else text


def escape_to_one_line(text: str) -> str:
    """Escape line breaks and control characters, for printing in a terminal."""
    return escape_control_chars(text, keep="")
