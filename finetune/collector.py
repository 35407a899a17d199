"""When Python looks for garbage: hardly at the start, where imports make what stays to the end.

Looking through half a million of such objects again and again is a tenth of a command's start.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["as_usual", "patient"]

_PATIENT = 1_000_000  # objects that are made before it looks; no start makes so many
_usual = gc.get_threshold()


@contextlib.contextmanager
def patient() -> Iterator[None]:
    """Look for garbage only when very many objects were made, or after `as_usual`."""
    global _usual
    before = gc.get_threshold()
    if before[0] != _PATIENT:
        _usual = before
    gc.set_threshold(_PATIENT)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def as_usual() -> None:
    """Look for it as ever: what begins now takes long, and its garbage may be large."""
    if gc.get_threshold()[0] == _PATIENT:
        gc.set_threshold(*_usual)
