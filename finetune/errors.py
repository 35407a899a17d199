"""The errors a user can meet: each one short message and one exit code, never a traceback."""

from __future__ import annotations

import difflib
import errno
import os
import re
from collections.abc import Iterable
from pathlib import Path

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
    "is_of_memory",
    "masked",
    "nearest",
    "visible",
]

_SECRET_NAME = re.compile(r"(?i)(TOKEN|SECRET|PASSW|API_?KEY|ACCESS_?KEY)(?!.*(PATH|FILE|DIR)$)")
_SECRET = re.compile(r"\bhf_[A-Za-z0-9]{20,}|(?<=://)[^/\s@'\"]+(?=@)")
_NO_ROOM = ("failed to map segment", "Cannot allocate memory")  # the loader of shared libraries
# torch's own on a GPU, those of NVIDIA's libraries, and torch's on a CPU
_NO_MEMORY = ("out of memory", "ALLOC_FAILED", "ALLOCATION_FAILED", "can't allocate memory")
_LEAST_CHARACTERS = 8  # what is shorter is a switch, such as TOKENIZERS_PARALLELISM=false


class FinetuneError(Exception):
    """Something the user can mend; the message names the thing, the cause and the next step.

    Args:
        message: for people, and free to be reworded.
        code: for programs and tests: "family.cause", such as "weights.truncated". It stays the
            same from release to release. Without one, the family alone.
    """

    exit_code = 1
    code = "internal"
    printed_elsewhere = False  # another process of the launch prints it

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code


class RecipeError(FinetuneError):
    """A recipe, an override or a command-line argument is wrong."""

    exit_code = 2
    code = "recipe"


class DataError(FinetuneError):
    """A data set or an image cannot be used as it is."""

    exit_code = 3
    code = "data"


class WeightsError(FinetuneError):
    """Pretrained weights cannot be found, read or fitted."""

    exit_code = 4
    code = "weights"


class CheckpointError(FinetuneError):
    """A run's checkpoints cannot be used."""

    exit_code = 4
    code = "checkpoint"


class SetupError(FinetuneError):
    """The machine, the launcher or the output directory does not allow what was asked."""

    exit_code = 5
    code = "setup"


class DivergedError(FinetuneError):
    """Training has diverged: numbers that are not finite, or a loss that has exploded."""

    exit_code = 6
    code = "diverged"


class HubError(FinetuneError):
    """The hub refused or did not answer."""

    exit_code = 7
    code = "hub"


class Interrupted(FinetuneError):
    """A signal asked the run to stop; it has saved its state and can be resumed."""

    code = "interrupted"

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number
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


def is_of_memory(error: BaseException) -> bool:
    """True if memory ran out, on the host or a device."""
    if isinstance(error, ImportError):  # memory was refused while a library was loaded
        return any(words in str(error) for words in _NO_ROOM)
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError):
        return isinstance(error, MemoryError)
    # torch's own by its name: it is not imported here
    named = type(error).__name__ == "OutOfMemoryError"
    return named or any(words in str(error) for words in _NO_MEMORY)


def masked(text: str) -> str:
    """Text as it may be shown and kept: tokens and passwords become ***.

    Known are the values of environment variables that are called a token, key or password, the
    token of the login to the hub, what looks like one, and whatever stands before the @ of an
    address.

    Args:
        text: such as a message, a traceback or a word of the command line.
    """
    for secret in sorted(_secrets(), key=len, reverse=True):
        text = text.replace(secret, "***")
    return _SECRET.sub("***", text)


def visible(text: str, *, keep: str = "\n\t") -> str:
    """Text without what a terminal would obey: names may hold escapes, or turn the line around.

    Args:
        keep: characters that stay though they are none to be seen.
    """
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode()
        for char in text
    )


def _secrets() -> set[str]:
    found = {value.strip() for name, value in os.environ.items() if _SECRET_NAME.search(name)}
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    login = Path(os.environ.get("HF_TOKEN_PATH") or Path(home) / "token").expanduser()
    try:
        with login.open(encoding="utf-8") as file:
            found.add(file.read(1000).strip())
    except (OSError, ValueError):  # nobody is logged in
        pass
    return {secret for secret in found if len(secret) >= _LEAST_CHARACTERS}
