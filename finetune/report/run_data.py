"""Read and check the files of a run for a report, and format its numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune import formatting
from finetune.errors import CheckpointError, RecipeError
from finetune.evaluation.confidence_intervals import TOO_FEW_IMAGES, accuracy_interval
from finetune.formatting import MISSING
from finetune.recipe.load import load_recipe
from finetune.recipe.schema import Recipe
from finetune.run.integrity import MAX_LARGE_BYTES, read_regular_file

__all__ = [
    "SPLIT_NAMES",
    "TRAINING_IMAGES_FILE",
    "Run",
    "as_finite_number",
    "calibration_bins",
    "check_run_directory",
    "format_accuracy_interval",
    "format_count",
    "format_decimal",
    "format_duration",
    "format_percent",
    "get_dict",
    "get_list",
    "has_too_few_images",
    "read_run",
    "use_narrow_spaces",
]


TRAINING_IMAGES_FILE = "training_images.json"  # written at the end of a run
SPLIT_NAMES = {"train": "training", "val": "validation", "test": "test"}  # names on the page


@dataclass(frozen=True)
class Run:
    """The parsed files of a run, which may be unfinished.

    Attributes:
        path: the run directory.
        record: content of run.json.
        recipe: the recipe, with every key resolved.
        history: lines of metrics.jsonl; empty if the file does not exist.
        results: content of results.json; empty for an unfinished run.
        class_names: class names in the order of the logits; numbers for classes without a name.
        training_images: content of training_images.json; empty if it was not written.
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
        """The name of the run directory."""
        return self.path.resolve().name

    @property
    def plan(self) -> dict[str, Any]:
        """The training plan that `train` recorded in run.json."""
        return get_dict(self.record, "plan")

    @property
    def steps_per_epoch(self) -> float | None:
        """Optimizer steps per epoch; None if run.json has no training plan."""
        return as_finite_number(self.plan.get("steps_per_epoch"))

    @property
    def num_classes(self) -> int:
        """The number of classes; 0 if unknown, because the run has neither plan nor model yet."""
        return int(as_finite_number(self.plan.get("classes")) or len(self.class_names))

    @property
    def has_top5(self) -> bool:
        """False for five classes or fewer, whose top-5 accuracy is always 1."""
        return not 0 < self.num_classes <= 5

    @property
    def is_multilabel(self) -> bool:
        """True for a multi-label run."""
        return self.recipe.data.task == "multilabel"

    @property
    def reported_split(self) -> str:
        """The split that the page reports: test, or val if the run has no test metrics."""
        return "test" if self.metrics("test") else "val"

    def metrics(self, split: str) -> dict[str, Any]:
        """Return the final metrics of a split; an empty dict if it was not evaluated."""
        return get_dict(self.results, split)

    def class_name(self, index: Any) -> str:
        """Return the name of a class index (or of several), or the index if it has no name."""
        if isinstance(index, list):
            return ", ".join(map(self.class_name, index)) or "none"
        known = isinstance(index, int) and 0 <= index < len(self.class_names)
        return self.class_names[index] if known else str(index)


def check_run_directory(path: Path) -> None:
    """Raise RecipeError if a path is not a run directory."""
    if not (path / "run.json").is_file() or not (path / "recipe.yaml").is_file():
        problem, code = "does not exist", "recipe.not_found"
        if path.exists():
            problem, code = "is not a run directory", "recipe.not_a_run"
        raise RecipeError(
            f"{path}: {problem}; give the folder that 'finetune train' wrote to", code=code
        )


def read_run(path: Path) -> Run:
    """Read a run directory.

    Raises: RecipeError if `path` is not a run directory; CheckpointError if one of its files is
        damaged, or the run has no metrics yet.
    """
    check_run_directory(path)
    record = _read_json(path / "run.json")
    results = _read_json(path / "results.json")
    for split in ("val", "test", "train"):
        if not isinstance(results.get(split), (dict, type(None))):
            raise CheckpointError(
                f"{path / 'results.json'}: '{split}' contains no metrics; {_RESTORE_HINT}",
                code="checkpoint.damaged",
            )
    history = _read_metrics_log(path / "metrics.jsonl")
    if not history and not results:
        status = record.get("status", "unknown")
        raise CheckpointError(
            f"{path}: the run has no metrics yet (status: {status}); continue it with --resume",
            code="checkpoint.not_finished",
        )
    names = _read_json(path / "model" / "config.json").get("label_names")
    names = [str(name) for name in names] if isinstance(names, list) else []
    class_counts = [
        len(get_list(get_dict(results, split), key))
        for split in ("val", "test")
        for key in ("confusion", "per_class")
    ]
    # use numbers for classes without a name
    names += [str(index) for index in range(len(names), max(class_counts))]
    recipe = load_recipe(path / "recipe.yaml")
    training_images = _read_json(path / TRAINING_IMAGES_FILE)
    return Run(path, record, recipe, history, results, names, training_images)


_RESTORE_HINT = "restore it from a copy, or continue the run with --resume"


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; an empty dict if the file does not exist."""
    try:
        content = json.loads(read_regular_file(path, max_bytes=MAX_LARGE_BYTES).decode())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: cannot be read as JSON ({error}); {_RESTORE_HINT}", code="checkpoint.damaged"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path}: contains no JSON object; {_RESTORE_HINT}", code="checkpoint.damaged"
        )
    return content


def _read_metrics_log(path: Path) -> list[dict[str, Any]]:
    """Read the lines of metrics.jsonl; skip a last line that a kill truncated."""
    try:
        rows = read_regular_file(path, max_bytes=MAX_LARGE_BYTES).decode().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error}); {_RESTORE_HINT}", code="checkpoint.damaged"
        ) from error
    lines: list[dict[str, Any]] = []
    for line_number, row in enumerate(rows, 1):
        try:
            line = json.loads(row)
        except (ValueError, RecursionError):
            line = None
        if isinstance(line, dict) and as_finite_number(line.get("step")) is not None:
            lines.append(line)
        elif line_number < len(rows):
            raise CheckpointError(
                f"{path}: line {line_number} does not contain metrics; {_RESTORE_HINT}",
                code="checkpoint.damaged",
            )
    return lines


def get_dict(mapping: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return `mapping[key]` if it is a dict, else an empty dict."""
    part = mapping.get(key)
    return part if isinstance(part, dict) else {}


def get_list(mapping: Mapping[str, Any], key: str) -> list[Any]:
    """Return `mapping[key]` if it is a list, else an empty list."""
    part = mapping.get(key)
    return part if isinstance(part, list) else []


def calibration_bins(mapping: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the complete calibration bins in the metrics of a split."""
    return [
        bin_
        for bin_ in get_list(mapping, "calibration")
        if isinstance(bin_, dict)
        and all(as_finite_number(bin_.get(key)) is not None for key in ("low", "high", "count"))
    ]


def as_finite_number(value: Any) -> float | None:
    """Return the value if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    # Python's JSON accepts NaN, and integers that are too large for a float
    return value if abs(value) < 1e300 else None


def use_narrow_spaces(words: str) -> str:
    """Replace spaces by narrow no-break spaces."""
    return words.replace(" ", "\u202f")


def format_percent(value: Any, digits: int = 2) -> str:
    """Format a fraction as a percentage, or a dash."""
    share = as_finite_number(value)
    return MISSING if share is None else use_narrow_spaces(formatting.format_percent(share, digits))


def format_accuracy_interval(accuracy: Any, num_images: Any) -> str:
    """Format the 95 % interval of an accuracy.

    Returns: the interval; an empty string if an argument is missing or invalid, or if the split is
        large enough that the interval is negligible (1,000 images or more).
    """
    accuracy, total = as_finite_number(accuracy), as_finite_number(num_images)
    if accuracy is None or total is None or not 0 <= accuracy <= 1:
        return ""
    interval = accuracy_interval(accuracy, int(total))
    return "" if interval is None else use_narrow_spaces(formatting.format_percent_range(*interval))


def has_too_few_images(num_images: Any) -> bool:
    """Return True if this number of images is too small for a reliable metric."""
    total = as_finite_number(num_images)
    return total is not None and total < TOO_FEW_IMAGES


def format_decimal(value: Any, digits: int = 4) -> str:
    """Format a number with fixed decimals, or a dash."""
    number = as_finite_number(value)
    return MISSING if number is None else f"{number:.{digits}f}"


def format_count(value: Any) -> str:
    """Format a count with thousands separators, or a dash."""
    count = as_finite_number(value)
    return MISSING if count is None else f"{count:,.0f}"


def format_duration(value: Any) -> str:
    """Format seconds as a duration, or a dash."""
    seconds = as_finite_number(value)
    return MISSING if seconds is None else use_narrow_spaces(formatting.format_duration(seconds))
