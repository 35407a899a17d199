"""Warnings about data: logged once per process, and passed on by worker processes."""

from __future__ import annotations

import logging

from finetune.errors import visible

__all__ = ["notice", "relay_notices"]

_log = logging.getLogger("finetune")
_logged: set[str] = set()
_relayed: list[tuple[str, str | None]] | None = None  # a list in worker processes


def notice(message: str, *, key: str | None = None) -> None:
    """Log a warning once per process.

    Args:
        message: the whole warning.
        key: warnings with the same key count as one; the message itself by default.
    """
    if (key or message) in _logged:
        return
    _logged.add(key or message)
    if _relayed is None:
        _log.warning(visible(message))
    else:
        _relayed.append((message, key))


def relay_notices() -> list[tuple[str, str | None]]:
    """Collect the notices of this process from now on, for another process to log.

    Returns: the notices since the last call, as arguments for `notice` in the other process.
    """
    global _relayed
    collected, _relayed = _relayed or [], []
    return collected
