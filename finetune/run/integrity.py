"""Check that a folder and its files belong to a run, and read and remove them safely.

The folder may come from an untrusted source. These functions never write or remove through a
symbolic link, never block on a named pipe, and check a whole file, not only its first bytes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import stat
from pathlib import Path
from typing import IO, Any

from finetune.errors import CheckpointError, SetupError
from finetune.files import describe_file_type, open_regular_file, remove_path

__all__ = [
    "MAX_JSON_BYTES",
    "MAX_LARGE_BYTES",
    "SPLIT_METRICS",
    "check_is_run_folder",
    "check_no_symlinks",
    "load_json",
    "open_lock_file",
    "read_regular_file",
    "remove_leftovers",
]

MAX_JSON_BYTES = 64 << 20  # run.json, a manifest
MAX_LARGE_BYTES = 1 << 30  # metrics.jsonl; results.json, with up to K x K numbers
# metrics of a split in results.json, by data.task
SPLIT_METRICS = {
    "multiclass": ("top1", "top5", "loss", "ece", "examples"),
    "multilabel": ("map", "macro_f1", "micro_f1", "loss", "examples"),
}
_MAX_DEPTH = 50
_MAX_DIGITS = 20  # of an integer; arithmetic with larger ones may overflow a float
_RUN_FILES = (
    *("run.json", "results.json", "metrics.jsonl", "recipe.yaml", "report.html"),
    *("training_images.json", "start.yaml", "tune.json", "trials.html"),
)
_NO_SYMLINKS = (".lock", "checkpoints", "model", "run.json", "results.json", "metrics.jsonl")
# Files that exist before run.json, while a run starts.
_FILES_BEFORE_RECORD = {
    ".lock",
    "checkpoints",
    "metrics.jsonl",
    "recipe.yaml",
    "start.yaml",
    "stages",
    "trials",
    "tune.json",
    "trials.html",
}
_LOCK_TEXT = re.compile(rb"[0-9]+ on [^\n]*\n")
# Temporary names of `RunDir.publish_model` and `write_atomically`, and of checkpoints
_TEMPORARY_NAME = re.compile(
    rf"\.(?:model(?:\.old)?\.[0-9a-f]+|(?:{'|'.join(map(re.escape, _RUN_FILES))})\.[0-9]+)\.tmp"
)
_TEMPORARY_CHECKPOINT_NAME = re.compile(r"\.(?:step-[0-9]{8,}\.[0-9a-f]+|doomed-[0-9]+)")


# Reading ------------------------------------------------------------------------------------------


def read_regular_file(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Read a whole file. Args, Raises: same as `files.open_regular_file`."""
    with open_regular_file(path, max_bytes=max_bytes) as file:
        return file.read(max_bytes)


def load_json(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Read a JSON file with finite numbers and at most 50 levels of nesting.

    Raises: OSError if it cannot be read; ValueError if it is larger than `max_bytes`, or its
        content is not of this kind.
    """
    text = read_regular_file(path, max_bytes=max_bytes).decode()
    try:
        content = json.loads(
            text, parse_constant=_parse_finite, parse_float=_parse_finite, parse_int=_parse_int
        )
    except RecursionError:
        content = None
    else:
        if _is_within_depth(content, _MAX_DEPTH):
            return content
    raise ValueError(f"nested more than {_MAX_DEPTH} levels deep")


def _parse_finite(text: str) -> float:
    """Parse a number. Raises: ValueError if it is not finite: NaN, Infinity or 1e999."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not a JSON number")
    return number


def _parse_int(text: str) -> int:
    """Parse an integer. Raises: ValueError if it has more digits than any that we write."""
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def _is_within_depth(content: Any, depth: int) -> bool:
    children = content.values() if isinstance(content, dict) else content
    return not isinstance(content, (dict, list)) or (
        depth > 0
        and all(
            _is_within_depth(each, depth - 1) for each in children if isinstance(each, (dict, list))
        )
    )


# Content of a folder ------------------------------------------------------------------------------


def check_no_symlinks(folder: Path) -> None:
    """Check that no part of a run directory is a symbolic link; the folder itself may be one.

    Raises: SetupError, before anything is written or removed through a link.
    """
    for path in (folder / name for name in _NO_SYMLINKS):
        if path.is_symlink():
            raise SetupError(
                f"{path}: this is a symbolic link, but a run writes only inside its own folder; "
                "replace the link with its target, or choose another --out",
                code="setup.not_a_run",
            )


def check_is_run_folder(folder: Path) -> None:
    """Check that a folder is a run directory, so that a run never writes into another folder.

    A run directory has finetune's run.json or a published checkpoint, or it has only files that a
    run writes before run.json, because that run was killed.

    Raises: SetupError naming an unknown file; CheckpointError if one of the run's files is not a
        regular file.
    """
    # List the names before reading run.json, because a run that starts now may add files meanwhile.
    names, checkpoint_names = os.listdir(folder), _list_checkpoints(folder)
    record_state = _record_state(folder / "run.json")
    has_checkpoint = any(
        os.path.lexists(folder / "checkpoints" / n / "manifest.json") for n in checkpoint_names
    )
    if record_state != "ours" and not has_checkpoint:
        expected = {"checkpoints"}
        if _is_our_lock(folder / ".lock", has_checkpoints_folder="checkpoints" in names):
            expected |= _FILES_BEFORE_RECORD
            expected |= (
                {"run.json"} if record_state == "damaged" else set()
            )  # a damaged run.json is never overwritten
        unknown = [n for n in names if n not in expected and not _TEMPORARY_NAME.fullmatch(n)]
        unknown += [
            f"checkpoints/{n}"
            for n in checkpoint_names
            if not _TEMPORARY_CHECKPOINT_NAME.fullmatch(n)
        ]
        if unknown:
            raise SetupError(
                f"{folder}: this folder is not a run directory and contains other files "
                f"('{min(unknown)}'); choose another --out",
                code="setup.not_a_run",
            )
    for path in (folder / name for name in _RUN_FILES):
        if os.path.lexists(path) and not path.is_file() and not path.is_symlink():
            raise CheckpointError(
                f"{path}: this is {describe_file_type(path.stat().st_mode)}, not a file; restore "
                "the file from a copy, or train in another --out",
                code="checkpoint.damaged",
            )


def _list_checkpoints(folder: Path) -> list[str]:
    """List the names in `checkpoints`; empty if it is missing or a file."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return os.listdir(folder / "checkpoints")
    return []


def _record_state(run_json: Path) -> str:
    """Return the state of run.json: "missing", "damaged", "ours", or "foreign" (not finetune's)."""
    try:
        record = load_json(run_json)
    except FileNotFoundError:
        return "missing"
    except (OSError, ValueError):
        return "damaged"
    if not isinstance(record, dict):
        return "damaged"
    return "ours" if {"status", "data_fingerprint"} <= record.keys() else "foreign"


def _is_our_lock(path: Path, *, has_checkpoints_folder: bool) -> bool:
    """True if `RunDir.open` wrote this lock file; it is empty if `open` was killed.

    Args:
        path: the lock file. This process must not hold the lock, because this function closes the
            file, and that would release it.
        has_checkpoints_folder: True if `checkpoints` exists, which `open` creates before the lock.
    """
    if path.is_symlink():
        return False
    try:
        text = read_regular_file(path, max_bytes=1000)
    except (OSError, ValueError):
        return False
    return bool(_LOCK_TEXT.fullmatch(text)) or (has_checkpoints_folder and not text)


# Writing and removing -----------------------------------------------------------------------------


def open_lock_file(path: Path) -> IO[bytes]:
    """Open or create a lock file, without following a link or blocking on a pipe.

    Raises: SetupError if it is not a regular file.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = None
    try:
        descriptor = os.open(path, flags, 0o666)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return os.fdopen(descriptor, "a+b", buffering=0)
        os.close(descriptor)
    except OSError as error:
        if descriptor is not None or error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
    raise SetupError(
        f"{path}: not a regular file; remove it, or choose another --out", code="setup.not_a_run"
    )


def remove_leftovers(folder: Path) -> None:
    """Remove leftovers of an interrupted write, and restore `model/` if it was being replaced."""
    names, model = os.listdir(folder), folder / "model"
    for name in names:
        # `publish_model` was killed between its two renames: the old model is still there.
        if name.startswith(".model.old.") and _TEMPORARY_NAME.fullmatch(name):
            old = folder / name
            if not os.path.lexists(model) and old.is_dir() and not old.is_symlink():
                os.replace(old, model)
    checkpoints = folder / "checkpoints"
    leftovers = [
        checkpoints / n for n in os.listdir(checkpoints) if _TEMPORARY_CHECKPOINT_NAME.fullmatch(n)
    ]
    leftovers += [folder / n for n in names if _TEMPORARY_NAME.fullmatch(n)]
    for path in leftovers:
        if os.path.lexists(path):
            remove_path(path)
