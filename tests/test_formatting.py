"""Format numbers, names and tables as text."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from finetune import formatting


@pytest.mark.parametrize(
    "function, arguments, expected",
    [
        (formatting.pluralize, (1, "file"), "1 file"),
        (formatting.pluralize, (0, "class", "classes"), "0 classes"),
        (formatting.format_short_count, (999,), "999"),
        (formatting.format_short_count, (1_021_114,), "1.02 M"),
        (formatting.format_short_count, (303_301_632,), "303.3 M"),
        (formatting.format_short_count, (1.5e12,), "1500.0 G"),
        (formatting.format_bytes, (0,), "0 B"),
        (formatting.format_bytes, (1023,), "1023 B"),
        (formatting.format_bytes, (1024,), "1.0 KiB"),
        (formatting.format_bytes, (12.5 * 2**20,), "12.5 MiB"),
        (formatting.format_bytes, (2**41,), "2,048.0 GiB"),
        (formatting.format_duration, (2.34,), "2.3 s"),
        (formatting.format_duration, (59.4,), "59.4 s"),
        (formatting.format_duration, (59.96,), "1 min 0 s"),
        (formatting.format_duration, (474.3,), "7 min 54 s"),
        (formatting.format_duration, (3599.7,), "1 h 0 min"),
        (formatting.format_duration, (3 * 3600 + 62,), "3 h 1 min"),
        (formatting.format_percent, (0.98754,), "98.75 %"),
        (formatting.format_percent, (1, 0), "100 %"),
        (formatting.format_percent_range, (0.7581, 0.8361), "75.8–83.6 %"),
        (formatting.format_probability, (1.0,), "100.0 %"),
        (formatting.format_probability, (0.99999,), "> 99.9 %"),
        (formatting.format_probability, (0.5,), "50.0 %"),
        (formatting.format_probability, (0.0,), "< 0.1 %"),
        (formatting.format_mean_std, (75, None), "75.00"),
        (formatting.format_mean_std, (0.5, 0.01234, 4), "0.5000 ± 0.0123"),
        (formatting.printable_path, (os.fsdecode(b"a\xff"),), "a\\xff"),
        (formatting.escape_table_cell, ("a | b\n\\c",), "a \\| b \\\\c"),
    ],
)
def test_format_functions(
    function: Callable[..., str], arguments: tuple[Any, ...], expected: str
) -> None:
    assert function(*arguments) == expected


def test_markdown_table_escapes_cells() -> None:
    lines = formatting.markdown_table(["name", "value"], [["a|b", "1"], ["line\nbreak", "2"]])
    assert lines == ["| name | value |", "| --- | --- |", "| a\\|b | 1 |", "| line break | 2 |"]
