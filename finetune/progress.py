"""Progress bars on a terminal; one line per minute if standard error is a file."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

from finetune.log import logger

__all__ = ["item_bar", "step_bar", "step_postfix"]

LINE_SECONDS = 60.0  # between two lines of progress in a file


def step_bar(
    *, total: int, start: int = 0, label: str | None = None, shown: bool = True
) -> tqdm[Any]:
    """Create the progress bar of a training loop.

    When stderr is redirected to a file, the final state is always written.
    """
    return _bar(_Lines, total, desc=label and f"{label}: ", initial=start, unit="step", shown=shown)


def step_postfix(line: Mapping[str, Any]) -> dict[str, str]:
    """Format a training line of metrics.jsonl as the postfix of the progress bar."""
    loss, rate = line["loss"], line["images_per_second"]
    return {
        "loss": "-" if loss is None else f"{loss:.4f}",
        "lr": f"{line['lr']:.1e}",
        "img/s": f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}",
    }


def item_bar(
    total: int, *, label: str | None = None, unit: str = "image", shown: bool = True
) -> tqdm[Any]:
    """Create a progress bar over images, shards or bytes.

    When stderr is redirected to a file, a loop shorter than `LINE_SECONDS` writes nothing.
    """
    return _bar(_LongLines, total, desc=label and f"{label}: ", unit=unit, shown=shown)


def _bar(
    lines: type[tqdm[Any]], total: int, *, unit: str, shown: bool, **options: Any
) -> tqdm[Any]:
    kind = tqdm if sys.stderr.isatty() else lines
    count = "{n_fmt} of {total_fmt}" + ("B" if unit == "B" else f" {unit}s")
    line = f"finetune: {{desc}}{count}, {{elapsed}} elapsed, {{remaining}} left{{postfix}}"
    return kind(
        total=total,
        unit=unit,
        unit_scale=unit == "B",
        file=sys.stderr,
        bar_format=None if kind is tqdm else line,
        leave=kind is tqdm,  # for lines, True would add an empty line
        dynamic_ncols=True,
        mininterval=0.5,
        disable=not (shown and logger.isEnabledFor(logging.INFO)),
        **options,
    )


class _Lines(tqdm):
    """Write progress as whole lines, one per minute and one at the end."""

    _has_last_line = True
    _shown_at: float | None = None
    _shown_steps = 0

    @classmethod
    def get_lock(cls) -> Any:
        """Return the lock of all bars, which `tqdm.write` holds while it prints a message."""
        return tqdm.get_lock()

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Write a line if one is due; tqdm calls this after steps, messages and at the end."""
        now = time.monotonic()
        if self._shown_at is None:  # called by the constructor
            self._shown_at, self._shown_steps = now, self.n
        is_last = msg == "" and self._has_last_line
        if self.n > self._shown_steps and (is_last or now - self._shown_at >= LINE_SECONDS):
            self.fp.write(f"{self}\n")
            self.fp.flush()
            self._shown_at, self._shown_steps = now, self.n
        return False

    def clear(self, nolock: bool = False) -> None:
        """Do nothing: written lines stay."""


class _LongLines(_Lines):
    """Write progress as lines, one per minute; a loop that ends sooner writes none."""

    _has_last_line = False
