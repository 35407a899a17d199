"""The errors a user can meet: each one short message and one exit code, never a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "CheckpointError",
    "DataError",
    "DivergedError",
    "FinetuneError",
    "HubError",
    "Interrupted",
    "RecipeError",
    "SetupError",
    "WeightsError",
    "nearest",
]


class FinetuneError(Exception):
    """Something the user can mend; the message names the thing, the cause and the next step."""

    exit_code = 1


class RecipeError(FinetuneError):
    """A recipe, an override or a command-line argument is wrong."""

    exit_code = 2


class DataError(FinetuneError):
    """A data set or an image cannot be used as it is."""

    exit_code = 3


class WeightsError(FinetuneError):
    """Pretrained weights cannot be found, read or fitted."""

    exit_code = 4


class CheckpointError(FinetuneError):
    """A run's checkpoints cannot be used."""

    exit_code = 4


class SetupError(FinetuneError):
    """The machine, the launcher or the output directory does not allow what was asked."""

    exit_code = 5


class DivergedError(FinetuneError):
    """Training produced numbers that are not finite too many times in a row."""

    exit_code = 6


class HubError(FinetuneError):
    """The hub refused or did not answer."""

    exit_code = 7


class Interrupted(FinetuneError):
    """A signal asked the run to stop; it has saved its state and can be resumed."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


def nearest(word: str, choices: Iterable[str]) -> str:
    """Suggest the closest valid name.

    Args:
        word: what the user wrote.
        choices: the valid names.
    Returns: "; did you mean 'x'?", or an empty string when nothing is close.
    """
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""
