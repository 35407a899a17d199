"""Read a run directory for a report, checked once, and write its numbers for a page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune import text
from finetune.errors import CheckpointError, RecipeError
from finetune.evaluation.intervals import TOO_FEW_IMAGES, interval
from finetune.recipe.load import Recipe, load_recipe
from finetune.run.validation import MAX_LARGE_BYTES, read_regular
from finetune.text import MISSING

__all__ = [
    "SPLIT_NAMES",
    "TRAINING_IMAGES",
    "Run",
    "accuracy_range",
    "bins",
    "check_run",
    "duration",
    "is_too_few",
    "listed",
    "narrow",
    "number",
    "percent",
    "plain",
    "read_run",
    "section",
    "whole",
]


TRAINING_IMAGES = "training_images.json"  # written at the end of a run
SPLIT_NAMES = {"train": "training", "val": "validation", "test": "test"}  # on a page


@dataclass(frozen=True)
class Run:
    """The files of a run, read and checked; it may be unfinished.

    Attributes:
        path: the run directory.
        record: run.json.
        recipe: every key resolved.
        history: the lines of metrics.jsonl; none if the file is not there.
        results: results.json; empty while the run is not finished.
        class_names: in the order of the logits; numbers where no names are known.
        training_images: of training_images.json; empty for a run of an earlier version.
    """

    path: Path
    record: dict[str, Any]
    recipe: Recipe
    history: list[dict[str, Any]]
    results: dict[str, Any]
    class_names: list[str]
    training_images: dict[str, Any]

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.path.resolve().name

    @property
    def plan(self) -> dict[str, Any]:
        """The plan of the run, from run.json."""
        return section(self.record, "plan")

    @property
    def steps_per_epoch(self) -> float | None:
        """Optimiser steps of an epoch, if the plan was written."""
        return number(self.plan.get("steps_per_epoch"))

    @property
    def num_classes(self) -> int:
        """The number of classes; 0 where neither plan nor model is written yet."""
        return int(number(self.plan.get("classes")) or len(self.class_names))

    @property
    def has_top5(self) -> bool:
        """False where top-5 accuracy says nothing: with five classes or fewer it is 1."""
        return not 0 < self.num_classes <= 5

    @property
    def is_multilabel(self) -> bool:
        """True if an image has any number of labels."""
        return self.recipe.data.task == "multilabel"

    @property
    def shown_split(self) -> str:
        """The split that the page is about: test, or val where test was not measured."""
        return "test" if self.figures("test") else "val"

    def figures(self, split: str) -> dict[str, Any]:
        """The final figures of a split; empty where it was not measured."""
        return section(self.results, split)

    def class_name(self, index: Any) -> str:
        """The name of a class, or its number when it has none; of a list all of them."""
        if isinstance(index, list):
            return ", ".join(map(self.class_name, index)) or "none"
        known = isinstance(index, int) and 0 <= index < len(self.class_names)
        return self.class_names[index] if known else str(index)


def check_run(path: Path) -> None:
    """Refuse what is not a run directory. Raises: RecipeError."""
    if not (path / "run.json").is_file() or not (path / "recipe.yaml").is_file():
        problem, code = "does not exist", "recipe.not_found"
        if path.exists():
            problem, code = "is not a run directory", "recipe.not_a_run"
        raise RecipeError(
            f"{path}: {problem}; give the folder that 'finetune train' wrote to", code=code
        )


def read_run(path: Path) -> Run:
    """Read a run directory.

    Raises: RecipeError if it is none; CheckpointError if one of its files is damaged, or nothing
        was measured yet.
    """
    check_run(path)
    record = _json(path / "run.json")
    results = _json(path / "results.json")
    for split in ("val", "test", "train"):
        if not isinstance(results.get(split), (dict, type(None))):
            raise CheckpointError(
                f"{path / 'results.json'}: '{split}' has no figures in it; {_HELP}",
                code="checkpoint.damaged",
            )
    history = _history(path / "metrics.jsonl")
    if not history and not results:
        status = record.get("status", "unknown")
        raise CheckpointError(
            f"{path}: has no metrics yet (status: {status}); continue the run with --resume",
            code="checkpoint.not_finished",
        )
    names = _json(path / "model" / "config.json").get("label_names")
    names = [str(name) for name in names] if isinstance(names, list) else []
    sizes = [
        len(listed(section(results, split), key))
        for split in ("val", "test")
        for key in ("confusion", "per_class")
    ]
    # a model may come without names
    names += [str(index) for index in range(len(names), max(sizes))]
    recipe, images = load_recipe(path / "recipe.yaml"), _json(path / TRAINING_IMAGES)
    return Run(path, record, recipe, history, results, names, images)


_HELP = "restore it from a copy, or continue the run with --resume"


def _json(path: Path) -> dict[str, Any]:
    """A JSON object, empty where there is no file."""
    try:
        content = json.loads(read_regular(path, limit_bytes=MAX_LARGE_BYTES).decode())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: cannot be read as JSON ({error}); {_HELP}", code="checkpoint.damaged"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds no JSON object; {_HELP}", code="checkpoint.damaged")
    return content


def _history(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a kill may have cut the last one short."""
    try:
        texts = read_regular(path, limit_bytes=MAX_LARGE_BYTES).decode().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error}); {_HELP}", code="checkpoint.damaged"
        ) from error
    lines: list[dict[str, Any]] = []
    for place, row in enumerate(texts, 1):
        try:
            line = json.loads(row)
        except (ValueError, RecursionError):
            line = None
        if isinstance(line, dict) and number(line.get("step")) is not None:
            lines.append(line)
        elif place < len(texts):
            raise CheckpointError(
                f"{path}: line {place} is not a log line; {_HELP}", code="checkpoint.damaged"
            )
    return lines


def section(mapping: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A part that is a mapping; empty where it is missing or something else."""
    part = mapping.get(key)
    return part if isinstance(part, dict) else {}


def listed(mapping: Mapping[str, Any], key: str) -> list[Any]:
    """A part that is a list; empty where it is missing or something else."""
    part = mapping.get(key)
    return part if isinstance(part, list) else []


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


def narrow(words: str) -> str:
    """Text for a page, with narrow spaces at which no line breaks."""
    return words.replace(" ", "\u202f")


def percent(value: Any, digits: int = 2) -> str:
    """A share as per cent, or a dash."""
    share = number(value)
    return MISSING if share is None else narrow(text.percent(share, digits))


def accuracy_range(share: Any, images: Any) -> str:
    """The 95 % interval of an accuracy as per cent; empty where it rests on enough images."""
    accuracy, total = number(share), number(images)
    if accuracy is None or total is None or not 0 <= accuracy <= 1:
        return ""
    ends = interval(accuracy, int(total))
    return "" if ends is None else narrow(text.percent_range(*ends))


def is_too_few(images: Any) -> bool:
    """True if a figure on so many images is hardly a figure."""
    total = number(images)
    return total is not None and total < TOO_FEW_IMAGES


def plain(value: Any, digits: int = 4) -> str:
    """A number with fixed digits, or a dash."""
    known = number(value)
    return MISSING if known is None else f"{known:.{digits}f}"


def whole(value: Any) -> str:
    """A count with its thousands apart, or a dash."""
    count = number(value)
    return MISSING if count is None else f"{count:,.0f}"


def duration(value: Any) -> str:
    """Seconds as a duration, or a dash."""
    seconds = number(value)
    return MISSING if seconds is None else narrow(text.duration(seconds))
