"""Notices on standard error, and the progress bar."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from tqdm import tqdm

from finetune.errors import visible

__all__ = ["bar", "leave_closed_terminal", "say", "say_nothing", "terminal_bar"]

LINE_SECONDS = 60.0  # between two lines of progress in a file


def say(message: str) -> None:
    """Tell the user one line on standard error, without breaking a progress bar."""
    try:
        tqdm.write(f"finetune: {visible(message)}", file=sys.stderr)
    except OSError:
        if not leave_closed_terminal():
            raise


def say_nothing(message: str) -> None:
    """Stand in for `say` on ranks other than 0."""


def leave_closed_terminal() -> bool:
    """Send what is printed from now on nowhere if the terminal was closed: it would be an error.

    Returns: True if it was.
    """
    was_closed = False
    for number in (1, 2):
        try:
            os.write(number, b"")
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            was_closed = True
    return was_closed


def bar(*, total: int, start: int, shown: bool) -> tqdm[Any]:
    """The bar of a loop over steps; where standard error is no terminal, a line a minute."""
    return _bar(_Lines, total, initial=start, unit="step", shown=shown)


def terminal_bar(
    total: int, *, label: str | None = None, unit: str = "image", shown: bool = True
) -> tqdm[Any]:
    """A bar over images or bytes; where standard error is no terminal, a line a minute."""
    return _bar(_LongLines, total, desc=label and f"{label}: ", unit=unit, shown=shown)


def _bar(
    lines: type[tqdm[Any]], total: int, *, unit: str, shown: bool, **options: Any
) -> tqdm[Any]:
    kind = tqdm if sys.stderr.isatty() else lines
    count = "{n_fmt} of {total_fmt}" + ("B" if unit == "B" else f" {unit}s")
    line = f"finetune: {{desc}}{count}, {{elapsed}} passed, {{remaining}} to go{{postfix}}"
    return kind(
        total=total,
        unit=unit,
        unit_scale=unit == "B",
        file=sys.stderr,
        bar_format=None if kind is tqdm else line,
        leave=kind is tqdm,  # it would add an empty line to the lines
        dynamic_ncols=True,
        mininterval=0.5,
        disable=not shown,
        **options,
    )


class _Lines(tqdm):
    """Progress as whole lines, one a minute and one at the end."""

    _has_end = True
    _shown_at: float | None = None
    _shown_steps = 0

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Write a line if one is due; tqdm calls this after steps, notices and at the end."""
        now = time.monotonic()
        if self._shown_at is None:  # from the constructor
            self._shown_at, self._shown_steps = now, self.n
        is_last = msg == "" and self._has_end
        if self.n > self._shown_steps and (is_last or now - self._shown_at >= LINE_SECONDS):
            self.fp.write(f"{self}\n")
            self.fp.flush()
            self._shown_at, self._shown_steps = now, self.n
        return False

    def clear(self, nolock: bool = False) -> None:
        """Do nothing: what is written stays."""


class _LongLines(_Lines):
    """Progress as lines, one a minute: what ends sooner leaves none."""

    _has_end = False
