"""Numbers, names and tables in words."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from finetune import text


@pytest.mark.parametrize(
    "words, arguments, expected",
    [
        (text.counted, (1, "file"), "1 file"),
        (text.counted, (0, "class", "classes"), "0 classes"),
        (text.short_count, (999,), "999"),
        (text.short_count, (1_021_114,), "1.02 M"),
        (text.short_count, (303_301_632,), "303.3 M"),
        (text.short_count, (1.5e12,), "1500.0 G"),
        (text.byte_size, (0,), "0 B"),
        (text.byte_size, (1023,), "1023 B"),
        (text.byte_size, (1024,), "1.0 KiB"),
        (text.byte_size, (12.5 * 2**20,), "12.5 MiB"),
        (text.byte_size, (2**41,), "2,048.0 GiB"),
        (text.duration, (2.34,), "2.3 s"),
        (text.duration, (59.4,), "59.4 s"),
        (text.duration, (59.96,), "1 min 0 s"),
        (text.duration, (474.3,), "7 min 54 s"),
        (text.duration, (3599.7,), "1 h 0 min"),
        (text.duration, (3 * 3600 + 62,), "3 h 1 min"),
        (text.percent, (0.98754,), "98.75 %"),
        (text.percent, (1, 0), "100 %"),
        (text.percent_range, (0.7581, 0.8361), "75.8–83.6 %"),
        (text.confidence, (1.0,), "100.0 %"),
        (text.confidence, (0.99999,), "> 99.9 %"),
        (text.confidence, (0.5,), "50.0 %"),
        (text.confidence, (0.0,), "< 0.1 %"),
        (text.mean_and_std, (75, None), "75.00"),
        (text.mean_and_std, (0.5, 0.01234, 4), "0.5000 ± 0.0123"),
        (text.printable, (os.fsdecode(b"a\xff"),), "a\\xff"),
        (text.cell, ("a | b\n\\c",), "a \\| b \\\\c"),
    ],
)
def test_words(words: Callable[..., str], arguments: tuple[Any, ...], expected: str) -> None:
    assert words(*arguments) == expected


def test_a_table_keeps_its_columns() -> None:
    lines = text.markdown_table(["name", "value"], [["a|b", "1"], ["line\nbreak", "2"]])
    assert lines == ["| name | value |", "| --- | --- |", "| a\\|b | 1 |", "| line break | 2 |"]
