"""The files of a run in its folder: proof that they are ours, reading and removing them.

A folder may have come from anywhere: nothing here follows a link to write or to remove, waits at a
named pipe, or takes a file for ours by the look of its first characters.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from finetune.errors import CheckpointError, SetupError
from finetune.files import kind_of, open_regular

__all__ = [
    "MAX_JSON_BYTES",
    "MAX_LARGE_BYTES",
    "SPLIT_FIGURES",
    "checked",
    "clear",
    "load_json",
    "log_line",
    "open_lock",
    "read_log",
    "read_regular",
    "refuse_links",
    "refuse_others",
    "remove",
]

MAX_JSON_BYTES = 64 << 20  # run.json, a manifest
MAX_LARGE_BYTES = 1 << 30  # metrics.jsonl; results.json, which may have a K x K matrix
# numbers of a split in results.json, by data.task
SPLIT_FIGURES = {
    "multiclass": ("top1", "top5", "loss", "ece", "examples"),
    "multilabel": ("map", "macro_f1", "micro_f1", "loss", "examples"),
}
_MAX_DEPTH = 50
_FILES = (
    *("run.json", "results.json", "metrics.jsonl", "recipe.yaml", "report.html"),
    *("training_images.json", "start.yaml", "lr_range.json"),
)
_LINKED = (".lock", "checkpoints", "model", "run.json", "results.json", "metrics.jsonl")
# The names between the first operation of a start and its run.json.
_EARLY = {".lock", "checkpoints", "metrics.jsonl", "recipe.yaml", "start.yaml", "lr_range.json"}
_HOLDER = re.compile(rb"[0-9]+ on [^\n]*\n")
# The temporary names of `RunDir.publish_model` and `write_atomically`, of `RunDir.save` and `prune`
_LEFT_OVER = re.compile(
    rf"\.(?:model(?:\.old)?\.[0-9a-f]+|(?:{'|'.join(map(re.escape, _FILES))})\.[0-9]+)\.tmp"
)
_LEFT_IN_CHECKPOINTS = re.compile(r"\.(?:step-[0-9]{8,}\.[0-9]+|doomed-[0-9]+)")


# Reading ------------------------------------------------------------------------------------------


def read_regular(path: Path, *, limit_bytes: int = MAX_JSON_BYTES) -> bytes:
    """The whole content of a file. Args, Raises: as for `files.open_regular`."""
    with open_regular(path, limit_bytes=limit_bytes) as file:
        return file.read(limit_bytes)


def load_json(path: Path, *, limit_bytes: int = MAX_JSON_BYTES) -> Any:
    """Read a JSON file of ours, which `json.dumps` could write again.

    Raises: OSError or ValueError for whatever is none.
    """
    text = read_regular(path, limit_bytes=limit_bytes).decode()
    try:
        content = json.loads(text, parse_constant=_finite, parse_float=_finite)
    except RecursionError:
        content = None
    else:
        if _is_flat(content, _MAX_DEPTH):
            return content
    raise ValueError(f"nested more than {_MAX_DEPTH} levels deep")


def _finite(text: str) -> float:
    """A number that JSON can hold. Raises: ValueError for NaN, Infinity and 1e999."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is no number of JSON")
    return number


def _is_flat(content: Any, depth: int) -> bool:
    children = content.values() if isinstance(content, dict) else content
    return not isinstance(content, (dict, list)) or (
        depth > 0
        and all(_is_flat(each, depth - 1) for each in children if isinstance(each, (dict, list)))
    )


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that are not damaged. Raises: as for `read_regular`."""
    with open_regular(path, limit_bytes=MAX_LARGE_BYTES) as file:
        return [line for text in file if (line := log_line(text)) is not None]


def log_line(text: bytes) -> dict[str, Any] | None:
    """A line of metrics.jsonl; None if it is damaged."""
    try:
        line = json.loads(text) if text.count(b"[") + text.count(b"{") < 100 else None
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None


# Shapes -------------------------------------------------------------------------------------------


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53  # a bool is none


def _is_figure(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300  # finite as a float, too


def _is_list(value: Any, of: type) -> bool:
    return isinstance(value, list) and all(isinstance(each, of) for each in value)


def _is_split(value: Any) -> bool:
    """True for a split's figures, or none."""
    names = ("balanced_accuracy", *itertools.chain(*SPLIT_FIGURES.values()))
    return value is None or (
        isinstance(value, dict) and all(_is_figure(value.get(name, 0)) for name in names)
    )


_Check = tuple[Callable[[Any], bool], str]
_OBJECT, _TEXT, _SPLIT = (
    (lambda value: isinstance(value, dict), "an object"),
    (lambda value: isinstance(value, str), "a text"),
    (_is_split, "the figures of a split"),
)
# The values that are computed with, or looked into; a key may be missing.
_SHAPES: dict[str, dict[str, _Check]] = {
    "run.json": {
        **dict.fromkeys(("status", "precision"), _TEXT),
        **dict.fromkeys(("split_fingerprints", "device", "versions", "pushed"), _OBJECT),
        **dict.fromkeys(("plan", "plan.weights", "plan.images"), _OBJECT),
        "teacher": _OBJECT,
        **dict.fromkeys(("teacher.architecture", "teacher.split"), _TEXT),
        **dict.fromkeys(("teacher.parameters", "teacher.examples"), (_is_count, "a count")),
        "teacher.top1": (_is_figure, "a number"),
        "plan.steps": (lambda value: _is_count(value) and value > 0, "a number of steps"),
        "plan.images_read": (_is_count, "a number of images"),
        "plan.steps_per_epoch": (lambda value: _is_figure(value) and value > 0, "a number over 0"),
    },
    "results.json": {
        **dict.fromkeys(("val", "test", "train"), _SPLIT),
        **dict.fromkeys(("steps", "best_step"), (_is_count, "a number of steps")),
        "claims": (lambda value: _is_list(value, dict), "a list of objects"),
        "warnings": (lambda value: _is_list(value, str), "a list of texts"),
    },
}


def checked(path: Path, content: Any) -> dict[str, Any]:
    """Refuse a run.json or results.json in which something is of another kind than we write.

    Args:
        path: where the content was read.
    Returns: the content.
    Raises: CheckpointError naming the key.
    """
    advice = "restore it from a copy, or train in another --out"
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds no JSON object; {advice}", code="checkpoint.damaged")
    for key, (fits, words) in _SHAPES.get(path.name, {}).items():
        section, _, name = key.rpartition(".")
        part = content.get(section, {}) if section else content
        if name in part and not fits(part[name]):
            raise CheckpointError(
                f"{path}: '{key}' is {part[name]!r:.40}, not {words}; {advice}",
                code="checkpoint.damaged",
            )
    return content


# What a folder may hold ---------------------------------------------------------------------------


def refuse_links(folder: Path) -> None:
    """Refuse a run directory whose parts are elsewhere; the folder itself may be a link.

    Raises: SetupError, before anything is written through a link or removed behind it.
    """
    for path in (folder / name for name in _LINKED):
        if path.is_symlink():
            raise SetupError(
                f"{path}: is a symbolic link, and a run writes in its own folder only; put in its "
                "place what it leads to, or choose another --out",
                code="setup.not_a_run",
            )


def refuse_others(folder: Path) -> None:
    """Refuse a folder that does not show that a run of ours began there.

    It shows it by its run.json, by a published checkpoint, or by holding only what a start makes
    before its run.json: a kill may have come then. No other folder is written into.

    Raises: SetupError naming what else is there; CheckpointError if one of a run's files is none.
    """
    # Listed first: a run that begins just now may add to them until run.json is read.
    names, inside = os.listdir(folder), _checkpoints(folder)
    record = _state_of(folder / "run.json")
    published = any(os.path.lexists(folder / "checkpoints" / n / "manifest.json") for n in inside)
    if record != "ours" and not published:
        early = {"checkpoints"}
        if _is_our_lock(folder / ".lock", begun="checkpoints" in names):
            early |= _EARLY
            early |= {"run.json"} if record == "damaged" else set()  # nothing overwrites it
        early |= {"stages"} if (folder / "stages" / "1" / "run.json").is_file() else set()
        others = [n for n in names if n not in early and not _LEFT_OVER.fullmatch(n)]
        others += [f"checkpoints/{n}" for n in inside if not _LEFT_IN_CHECKPOINTS.fullmatch(n)]
        if others:
            raise SetupError(
                f"{folder}: is a folder with other things in it ('{min(others)}'), and nothing "
                "shows that a run began there; choose another --out",
                code="setup.not_a_run",
            )
    for path in (folder / name for name in _FILES):
        if os.path.lexists(path) and not path.is_file() and not path.is_symlink():
            raise CheckpointError(
                f"{path}: is {kind_of(path.stat().st_mode)}, not a file; restore it from a copy, "
                "or train in another --out",
                code="checkpoint.damaged",
            )


def _checkpoints(folder: Path) -> list[str]:
    """The names in `checkpoints`; none where it is missing, or a file."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return os.listdir(folder / "checkpoints")
    return []


def _state_of(run_json: Path) -> str:
    """The state of a run.json: "missing", "ours", "damaged" or "foreign"."""
    try:
        record = load_json(run_json)
    except FileNotFoundError:
        return "missing"
    except (OSError, ValueError):
        return "damaged"
    if not isinstance(record, dict):
        return "damaged"
    return "ours" if {"status", "data_fingerprint"} <= record.keys() else "foreign"


def _is_our_lock(place: Path, *, begun: bool) -> bool:
    """True if `RunDir.open` wrote this file, empty if it was killed in between.

    Args:
        place: not held by this process, whose lock would be lost when the file is closed.
        begun: the folder that a start makes before its lock is there.
    """
    if place.is_symlink():
        return False
    try:
        text = read_regular(place, limit_bytes=1000)
    except (OSError, ValueError):
        return False
    return bool(_HOLDER.fullmatch(text)) or (begun and not text)


# Writing and removing -----------------------------------------------------------------------------


def open_lock(place: Path) -> IO[bytes]:
    """Open a lock file, or make it; a link is not followed, and a pipe not waited at.

    Raises: SetupError if it is no file.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
    handle = None
    try:
        handle = os.open(place, flags, 0o666)
        if stat.S_ISREG(os.fstat(handle).st_mode):
            return os.fdopen(handle, "a+b", buffering=0)
        os.close(handle)
    except OSError as error:
        if handle is not None or error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
    raise SetupError(
        f"{place}: is not a file; remove it, or choose another --out", code="setup.not_a_run"
    )


def remove(path: Path) -> None:
    """Remove a file, a folder with all that is in it, or a link and not what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def clear(folder: Path) -> None:
    """Remove what an interrupted write of ours left in a run directory, and restore its model."""
    names, model = os.listdir(folder), folder / "model"
    for name in names:
        # A kill between the two renames of `publish_model` left the old model there.
        if name.startswith(".model.old.") and _LEFT_OVER.fullmatch(name):
            old = folder / name
            if not os.path.lexists(model) and old.is_dir() and not old.is_symlink():
                os.replace(old, model)
    inside = folder / "checkpoints"
    leftovers = [inside / n for n in os.listdir(inside) if _LEFT_IN_CHECKPOINTS.fullmatch(n)]
    leftovers += [folder / n for n in names if _LEFT_OVER.fullmatch(n)]
    for path in leftovers:
        if os.path.lexists(path):
            remove(path)
