"""What a report reads of a run directory, checked once, and how its numbers are written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.errors import CheckpointError, RecipeError
from finetune.recipe.load import Recipe, load_recipe
from finetune.run.validation import MAX_LARGE_BYTES, read_regular

__all__ = [
    "Run",
    "bins",
    "duration",
    "listed",
    "number",
    "percent",
    "plain",
    "read_run",
    "section",
    "whole",
]

MISSING = "–"


@dataclass(frozen=True)
class Run:
    """A run as its files tell it, finished or not.

    Attributes:
        path: the run directory.
        record: run.json.
        recipe: every key resolved.
        history: the lines of metrics.jsonl; none if the file is not there.
        results: results.json; empty while the run is not finished.
        class_names: in the order of the logits; numbers where no names are known.
    """

    path: Path
    record: dict[str, Any]
    recipe: Recipe
    history: list[dict[str, Any]]
    results: dict[str, Any]
    class_names: list[str]

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.path.resolve().name

    @property
    def plan(self) -> dict[str, Any]:
        """What run.json says the run would do."""
        return section(self.record, "plan")

    @property
    def steps_per_epoch(self) -> float | None:
        """Optimiser steps of an epoch, if the plan was written."""
        return number(self.plan.get("steps_per_epoch"))

    def figures(self, split: str) -> dict[str, Any]:
        """The final figures of a split; empty where it was not measured."""
        return section(self.results, split)

    def class_name(self, index: Any) -> str:
        """The name of a class, or its number when it has none."""
        known = isinstance(index, int) and 0 <= index < len(self.class_names)
        return self.class_names[index] if known else str(index)


def read_run(path: Path) -> Run:
    """Read a run directory.

    Raises: RecipeError if it is none; CheckpointError if one of its files is damaged, or nothing
        was measured yet.
    """
    if not (path / "run.json").is_file() or not (path / "recipe.yaml").is_file():
        what = "is not a run directory" if path.exists() else "does not exist"
        raise RecipeError(f"{path}: {what}; give the folder that 'finetune train' wrote to")
    record = _json(path / "run.json")
    results = _json(path / "results.json")
    for split in ("val", "test", "train"):
        if not isinstance(results.get(split), (dict, type(None))):
            raise CheckpointError(
                f"{path / 'results.json'}: '{split}' has no figures in it; {_HELP}"
            )
    history = _history(path / "metrics.jsonl")
    if not history and not results:
        status = record.get("status", "unknown")
        raise CheckpointError(
            f"{path}: has no metrics yet (status: {status}); continue the run with --resume"
        )
    names = _json(path / "model" / "config.json").get("label_names")
    names = [str(name) for name in names] if isinstance(names, list) else []
    sizes = [len(listed(section(results, split), "confusion")) for split in ("val", "test")]
    # a model may come without names
    names += [str(index) for index in range(len(names), max(sizes))]
    return Run(path, record, load_recipe(path / "recipe.yaml"), history, results, names)


_HELP = "restore it from a copy, or continue the run with --resume"


def _json(path: Path) -> dict[str, Any]:
    """A JSON object, empty where there is no file."""
    try:
        found = json.loads(read_regular(path, limit_bytes=MAX_LARGE_BYTES).decode())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error}); {_HELP}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: holds no JSON object; {_HELP}")
    return found


def _history(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a kill may have cut the last one short."""
    try:
        texts = read_regular(path, limit_bytes=MAX_LARGE_BYTES).decode().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); {_HELP}") from error
    lines: list[dict[str, Any]] = []
    for place, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            line = None
        if isinstance(line, dict) and number(line.get("step")) is not None:
            lines.append(line)
        elif place < len(texts):
            raise CheckpointError(f"{path}: line {place} is not a log line; {_HELP}")
    return lines


def section(mapping: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A part that is a mapping; empty where it is missing or something else."""
    found = mapping.get(key)
    return found if isinstance(found, dict) else {}


def listed(mapping: Mapping[str, Any], key: str) -> list[Any]:
    """A part that is a list; empty where it is missing or something else."""
    found = mapping.get(key)
    return found if isinstance(found, list) else []


def bins(mapping: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The calibration bins of a split's figures that are whole."""
    return [
        one
        for one in listed(mapping, "calibration")
        if isinstance(one, dict)
        and all(number(one.get(key)) is not None for key in ("low", "high", "count"))
    ]


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    # JSON knows NaN to Python, and whole numbers that no float can hold
    return value if abs(value) < 1e300 else None


def percent(value: Any, digits: int = 2) -> str:
    """A share as per cent, or a dash."""
    found = number(value)
    return MISSING if found is None else f"{100 * found:.{digits}f}\u202f%"


def plain(value: Any, digits: int = 4) -> str:
    """A number with fixed digits, or a dash."""
    found = number(value)
    return MISSING if found is None else f"{found:.{digits}f}"


def whole(value: Any) -> str:
    """A count with its thousands apart, or a dash."""
    found = number(value)
    return MISSING if found is None else f"{found:,.0f}"


def duration(seconds: Any) -> str:
    """Seconds as people say them, or a dash."""
    found = number(seconds)
    if found is None:
        return MISSING
    minutes, rest = divmod(round(found), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}\u202fh {minutes}\u202fmin"
    return f"{minutes}\u202fmin {rest}\u202fs" if minutes else f"{found:.1f}\u202fs"
