"""Notices on standard error, and the progress bar."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

from finetune.errors import visible

__all__ = ["bar", "say", "say_nothing"]


def say(message: str) -> None:
    """Tell the user one line on standard error, without breaking a progress bar."""
    tqdm.write(f"finetune: {visible(message)}", file=sys.stderr)


def say_nothing(message: str) -> None:
    """What ranks other than 0 do instead of `say`."""


def bar(*, total: int, start: int, shown: bool) -> tqdm[Any]:
    """The training bar: steps done, time left, and what `Meter.line` found last."""
    return tqdm(
        total=total,
        initial=start,
        unit="step",
        file=sys.stderr,
        dynamic_ncols=True,
        mininterval=0.5,
        disable=not shown,
    )
