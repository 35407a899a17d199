"""Errors for the user: each has one short message and one exit code, and prints no traceback."""

from __future__ import annotations

import configparser
import contextlib
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
    "Paused",
    "RecipeError",
    "RegressionError",
    "SetupError",
    "WeightsError",
    "did_you_mean",
    "escape_control_chars",
    "has_redacted_url",
    "holds_secret",
    "install_hint",
    "is_lost_connection",
    "is_out_of_memory",
    "redact_secrets",
    "redact_urls",
    "root_cause_message",
    "weights_changed_error",
]

_SECRET_VARIABLE = re.compile(
    r"(?i)(TOKEN|SECRET|PASSW|PASS(PHRASE)?$|_PAT$|(API|ACCESS|ACCOUNT|STORAGE)_?KEY)"
    r"(?!.*(PATH|FILE|DIR)$)"
)
# tokens and keys that have a known form; each begins with a letter, not \b: ten times faster
_TOKEN = re.compile(
    r"h(?<=\bh)f_[A-Za-z0-9]{20,}|A(?<=\bA)[KS]IA[0-9A-Z]{16}\b"
    r"|g(?<=\bg)(?:h[opsu]_[A-Za-z0-9]{36}|ithub_pat_\w{30,}|lpat-[\w-]{20,})"
    r"|s(?<=\bs)k-[\w-]{30,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY[A-Z ]*-----"
    r"(?:[\s\S]*?-----END [A-Z ]*PRIVATE KEY[A-Z ]*-----)?"
)
# An apostrophe may be part of a URL, or quote it. Secret keys of S3 often contain a slash; what
# follows a colon may also be a port.
_URL_USER_INFO = re.compile(
    r"(?<=://)(?!\*\*\*@)[^/?\s\"<>]+(?=@)|(?<=s3://)[^/\s\"<>@:]+:[^\s\"<>@]+(?=@)"
    r"|(?<=://)[^/\s\"<>@:]+:(?!\d+[/?])[^\s\"<>@]+(?=@)"
)
# the query, or parameters after ; or #, without punctuation of the sentence around the URL
_URL_QUERY = re.compile(r"(\w://[^?\s\"<>]*?)(?:\?|[;#](?=[\w.-]*=))[^\s\"<>]*[^\s'\"<>:;,.)\]}]")
# the password in a mistyped URL, such as http:/me:word@host, http//me:word@host, hub:me:word@name
_MISTYPED_USER_INFO = re.compile(
    r"(?:(?<=\w[:;=])|(?<=\w//))[/\\]*[^/\\\s:@\"'<>]+:(?!\*\*\*@)[^/\\\s@\"'<>]+(?=@)"
)
# the value of an option, variable or parameter that is named like a secret, such as run.token=, but
# not a placeholder or an expression that reads it
_SECRET_OPTION = re.compile(
    r"(?i)(\b[\w.-]*(?:token|secret|passw|(?:api|access|account)_?key)[\w.-]*="
    r"|(?:[?&;]|\\u0026)(?:x-(?:amz|goog)-)?sig(?:nature)?=|\bbearer +)"
    r"(?!\*\*\*|<[\w -]+>|\{+ *[\w.]+ *\}|(?-i:\$\{?[A-Z_]+\b)|os\.(?:environ|getenv)\b"
    r"|get_token\()"
    r"[^\s'\"]{7,}[^\s'\":;,.)\]}]"
)
# what is masked in messages and must not be published, with its replacement
_SECRETS = {
    _TOKEN: "***",
    _URL_USER_INFO: "***",
    _MISTYPED_USER_INFO: "***",
    _SECRET_OPTION: r"\1***",
}
# a query that must not be published; messages mask all queries
_SIGNED_URL = re.compile(
    r"(?i)\w://[^\s\"<>]*[?&;#][\w.-]*"
    r"(?:token|signature|secret|credential|pass(?:w(?:or)?d|phrase)?|pwd|key(?:[_-]?id)?"
    r"|\b(?:sig|sas|auth))=\w"
)
# Each match contains one of these texts, in lower case. To search for them first is much faster.
_ANCHORS = {
    _URL_USER_INFO: ("://",),
    _SIGNED_URL: ("://",),
    _SECRET_OPTION: (
        *("token", "secret", "passw", "apikey", "api_key", "accesskey", "access_key"),
        *("accountkey", "account_key", "sig=", "signature=", "bearer "),
    ),
}
# messages of the dynamic loader
_LOADER_OUT_OF_MEMORY = ("failed to map segment", "Cannot allocate memory")
# messages of torch on a GPU, of NVIDIA's libraries, and of torch on a CPU
_OUT_OF_MEMORY_MESSAGES = (
    "out of memory",
    "ALLOC_FAILED",
    "ALLOCATION_FAILED",
    "can't allocate memory",
)
# messages of gloo and NCCL
_LOST_CONNECTION = re.compile(
    r"gloo|nccl|closed by peer|reset by peer|timed out waiting", re.IGNORECASE
)
_MIN_SECRET_LENGTH = 8  # shorter values are switches, such as TOKENIZERS_PARALLELISM=false


class FinetuneError(Exception):
    """An error that the user can fix; the message says what is wrong, why, and how to fix it.

    Args:
        message: text for the user; its wording may change. Secrets in it are redacted.
        code: identifier for programs and tests, "family.cause", such as "weights.truncated". It
            does not change between releases. None uses the family alone, such as "weights".
    """

    exit_code = 1
    code = "internal"
    printed_by_other_rank = False  # True if another rank of the launch prints this error

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(redact_secrets(message))
        if code is not None:
            self.code = code


class RecipeError(FinetuneError):
    """A recipe, an override or a command-line argument is wrong."""

    exit_code = 2
    code = "recipe"


class DataError(FinetuneError):
    """A dataset or an image cannot be used."""

    exit_code = 3
    code = "data"


class WeightsError(FinetuneError):
    """Pretrained weights cannot be found or read, or do not fit the model."""

    exit_code = 4
    code = "weights"


class CheckpointError(FinetuneError):
    """A run's checkpoints cannot be used."""

    exit_code = 4
    code = "checkpoint"


class SetupError(FinetuneError):
    """The machine, the launcher or the output directory does not allow the request."""

    exit_code = 5
    code = "setup"


class DivergedError(FinetuneError):
    """Training has diverged: values are not finite, or the loss has exploded."""

    exit_code = 6
    code = "diverged"


class HubError(FinetuneError):
    """The Hugging Face Hub refused a request or did not answer."""

    exit_code = 7
    code = "hub"


class RegressionError(FinetuneError):
    """A model is worse than another one by more than the user accepts (`compare --fail-if`)."""

    exit_code = 8
    code = "regression"


class Interrupted(FinetuneError):
    """Raised when a signal stops a command; the message says what is saved and how to continue."""

    code = "interrupted"

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number
        self.exit_code = 128 + signal_number


class Paused(Interrupted):
    """Raised by a run that its caller ends at a checkpoint, to continue it later."""

    code = "paused"

    def __init__(self, message: str) -> None:
        super().__init__(message, 0)
        self.exit_code = 0


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Suggest the closest valid name.

    Args:
        word: name that the user typed.
        choices: the valid names.
    Returns: "; did you mean 'x'?", or an empty string if no name is close.
    """
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""


def install_hint(extra: str) -> str:
    """Return the command that installs an optional dependency, for an error message.

    Args:
        extra: name of the pip extra, for example "export".
    """
    return f'run: pip install "finetune-vision[{extra}]" (in a checkout: pip install ".[{extra}]")'


def weights_changed_error(source: object) -> WeightsError:
    """Return the error for a model that was replaced or trained between two reads of its files.

    Args:
        source: name of the model as the user gave it, or a path.
    """
    return WeightsError(
        f"{source}: was changed while it was read; wait until no other process writes to it, then "
        "run the command again",
        code="weights.changed",
    )


def root_cause_message(error: BaseException) -> str:
    """Return the message of an error's root cause on one line, at most 200 characters."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else f"{text[:200]}…"


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if the error means that the host or a device ran out of memory."""
    if isinstance(error, ImportError):  # a library could not be loaded
        return any(words in str(error) for words in _LOADER_OUT_OF_MEMORY)
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError):
        return isinstance(error, MemoryError)
    # compare torch's class by name, because this module does not import torch
    named = type(error).__name__ == "OutOfMemoryError"
    return named or any(words in str(error) for words in _OUT_OF_MEMORY_MESSAGES)


def is_lost_connection(error: BaseException) -> bool:
    """Return True if the connection to the other ranks has failed or timed out."""
    # compare torch's class by name, because this module does not import torch
    if any(base.__name__ == "DistError" for base in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and _LOST_CONNECTION.search(str(error)) is not None


def redact_secrets(text: str) -> str:
    """Replace tokens and passwords in a text with ***, before it is printed or saved.

    Secrets are: the values of environment variables with the name of a secret, see SECURITY.md; the
    saved logins of the Hub; tokens of the Hub and other services, and private keys, by their form;
    NAME=value with such a name; a bearer token; the user and password of a mistyped URL; and what
    `redact_urls` replaces.

    Args:
        text: a message, a traceback or a command-line argument.
    """
    for secret in sorted(_known_secrets(), key=len, reverse=True):
        text = text.replace(secret, "***")
    text = redact_urls(text)
    for pattern, replacement in _SECRETS.items():
        text = pattern.sub(replacement, text)
    return text


def has_redacted_url(text: str) -> bool:
    """Return True if `redact_urls` has replaced a password or a query in the text."""
    return "://***@" in text or "?***" in text


def redact_urls(text: str) -> str:
    """Replace passwords and queries in URLs with ***: a query may hold a token or a signature.

    Args:
        text: a text or a data source.
    """
    return _URL_QUERY.sub(r"\1?***", _URL_USER_INFO.sub("***", text))


def holds_secret(text: str) -> bool:
    """Return True if a text that will be published holds a secret.

    These are the secrets of `redact_secrets`, except that a URL may have a query, unless a
    parameter is named like a secret. In binary data, mistyped URLs are not searched for.
    """
    # random bytes often look like a mistyped URL
    patterns = {_SIGNED_URL, *_SECRETS} - ({_MISTYPED_USER_INFO} if "\0" in text else set())
    folded = text.replace("İ", "i").replace("ı", "i").casefold()  # these match i, as in (?i)
    return any(secret in text for secret in _known_secrets()) or any(
        pattern.search(text)
        for pattern in patterns
        if any(anchor in folded for anchor in _ANCHORS.get(pattern, ("",)))
    )


def escape_control_chars(text: str, *, keep: str = "\n\t") -> str:
    """Escape control characters, because file names may contain terminal escapes or bidi overrides.

    Args:
        text: text to print in a terminal.
        keep: control characters to leave as they are.
    """
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode()
        for char in text
    )


def _known_secrets() -> set[str]:
    found = {value.strip() for name, value in os.environ.items() if _SECRET_VARIABLE.search(name)}
    # the places of huggingface_hub, whose constants have the variables of its first import
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    login = Path(os.path.expandvars(os.environ.get("HF_TOKEN_PATH") or f"{home}/token"))
    login = login.expanduser()
    try:
        with login.open(encoding="utf-8") as file:
            found.add(file.read(1000).strip())
    except (OSError, ValueError):  # no saved login
        pass
    logins = configparser.RawConfigParser()  # of `hf auth login` with several tokens
    with contextlib.suppress(configparser.Error, ValueError):
        logins.read(login.with_name("stored_tokens"), encoding="utf-8")
    found |= {token.strip() for login in logins.values() for token in login.values()}
    return {secret for secret in found if len(secret) >= _MIN_SECRET_LENGTH}
