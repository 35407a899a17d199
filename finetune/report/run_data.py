"""Read and check the files of a run for a report, and format its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    Field,
    FiniteFloat,
    NonNegativeInt,
    TypeAdapter,
    ValidationError,
)
from typing_extensions import (
    NotRequired,
    TypedDict,
)  # pydantic needs it before Python 3.12

from finetune import formatting
from finetune.errors import CheckpointError, RecipeError
from finetune.evaluation.confidence_intervals import TOO_FEW_IMAGES, accuracy_interval
from finetune.formatting import MISSING
from finetune.log import warn_once
from finetune.model_checksums import verify_model_folder
from finetune.recipe.schema import Recipe
from finetune.run.directory import RunDir, resume_command
from finetune.run.record import read_recipe

__all__ = [
    "SPLIT_NAMES",
    "TRAINING_IMAGES_FILE",
    "Run",
    "check_run_directory",
    "format_accuracy_interval",
    "format_count",
    "format_decimal",
    "format_duration",
    "format_percent",
    "has_changed_since_read",
    "has_too_few_images",
    "read_run",
    "use_narrow_spaces",
]


TRAINING_IMAGES_FILE = "training_images.json"  # written at the end of a run
SPLIT_NAMES = {"train": "training", "val": "validation", "test": "test"}  # names on the page
_RESTORE_HINT = "restore it from a copy, or continue the run with --resume"


# --- fields that only the page reads; run/schema.py has the others -------------------------------


class _Plan(TypedDict, total=False):
    classes: NonNegativeInt
    parameters: NonNegativeInt
    images: dict[str, NonNegativeInt]
    class_images: list[NonNegativeInt]
    class_draws: list[NonNegativeInt]


class _Device(TypedDict, total=False):
    threads: NonNegativeInt


class _Record(TypedDict, total=False):
    plan: _Plan
    device: _Device


class _CalibrationBin(TypedDict):
    low: FiniteFloat
    high: FiniteFloat
    count: NonNegativeInt
    accuracy: FiniteFloat | None
    confidence: FiniteFloat | None


class _Calibrated(TypedDict, total=False):
    temperature: FiniteFloat
    ece: FiniteFloat
    calibration: list[_CalibrationBin]


class _Mistake(TypedDict, total=False):
    index: int
    name: str
    label: int
    labels: list[int]  # instead of "label", for multi-label data
    predicted: int | list[int]
    confidence: FiniteFloat
    loss: FiniteFloat


class _ClassMetrics(TypedDict):
    support: NonNegativeInt
    recall: FiniteFloat | None
    precision: FiniteFloat | None
    f1: FiniteFloat | None
    ap: NotRequired[FiniteFloat | None]  # this and the next only for multi-label data
    threshold: NotRequired[FiniteFloat]


class _SplitMetrics(TypedDict, total=False):
    images_per_second: FiniteFloat
    per_class: list[_ClassMetrics]
    confusion: list[list[NonNegativeInt]] | dict[str, list[NonNegativeInt]]
    calibration: list[_CalibrationBin]
    calibrated: _Calibrated
    mistakes: list[_Mistake]


class _Results(TypedDict, total=False):
    val: _SplitMetrics | None
    test: _SplitMetrics | None
    skipped_steps: NonNegativeInt
    command_seconds: FiniteFloat


class _TrainingImage(TypedDict):
    name: str
    label: NotRequired[int]
    labels: NotRequired[list[int]]  # instead of "label", for multi-label data
    # as decoded, as augmented in one or more epochs, as evaluated; all are data URIs, because the
    # page must not load other files
    pictures: Annotated[list[Annotated[str, Field(pattern="^data:image/")]], Field(min_length=3)]


class _TrainingImages(TypedDict, total=False):
    note: str
    rows: list[_TrainingImage]


class _ModelConfig(TypedDict, total=False):
    label_names: list[str] | None


_FIELDS: Mapping[str, TypeAdapter[Any]] = {
    "run.json": TypeAdapter(_Record),
    "results.json": TypeAdapter(_Results),
    TRAINING_IMAGES_FILE: TypeAdapter(_TrainingImages),
    "model/config.json": TypeAdapter(_ModelConfig),
}


# --- reading -------------------------------------------------------------------------------------


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
        plan: dict[str, Any] = self.record.get("plan", {})
        return plan

    @property
    def steps_per_epoch(self) -> float | None:
        """Optimizer steps per epoch; None if run.json has no training plan."""
        return self.plan.get("steps_per_epoch")

    @property
    def num_classes(self) -> int:
        """The number of classes; 0 if unknown, because the run has neither plan nor model yet."""
        return self.plan.get("classes") or len(self.class_names)

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
        return self.results.get(split) or {}

    def class_name(self, index: Any) -> str:
        """Return the name of a class index (or of several), or the index if it has no name."""
        if isinstance(index, list):
            return ", ".join(map(self.class_name, index)) or "none"
        known = isinstance(index, int) and 0 <= index < len(self.class_names)
        return self.class_names[index] if known else str(index)


def check_run_directory(path: Path) -> None:
    """Raise RecipeError if a path is not a run directory."""
    if not (path / "run.json").is_file() or not (path / "recipe.yaml").is_file():
        problem, code = "no such folder", "recipe.not_found"
        if path.exists():
            problem, code = "not a run directory", "recipe.not_a_run"
        raise RecipeError(
            f"{path}: {problem}; give the folder that 'finetune train' wrote to", code=code
        )


def read_run(path: Path) -> Run:
    """Read a run directory, and check the type of every value that the page shows.

    Raises: RecipeError if `path` is not a run directory; CheckpointError or WeightsError if one of
        its files is damaged; CheckpointError if the run has no metrics yet.
    """
    check_run_directory(path)
    record, results = _read_json(path, "run.json"), _read_json(path, "results.json")
    if results and results.get("model_sha256") != record.get("model_sha256"):
        warn_once(
            f"{path}: results.json is of other weights than model/ or of an earlier length of the "
            f"run, so it is left out; continue the run: {resume_command(path)}"
        )
        results = {}
    history = RunDir(path).read_metrics()
    record["metrics_changed"] = RunDir(path).has_changed_metrics()
    if not history and not results:
        status = record.get("status", "unknown")
        raise CheckpointError(
            f"{path}: the run has no metrics yet (status: {status}); continue it: "
            f"{resume_command(path)}",
            code="checkpoint.not_finished",
        )
    names = _read_json(path, "model/config.json").get("label_names") or []
    if (path / "model" / "config.json").is_file():
        verify_model_folder(path / "model", source=str(path))
    num_classes = max(
        len((results.get(split) or {}).get(key, ()))
        for split in ("val", "test")
        for key in ("confusion", "per_class")
    )
    return Run(
        path,
        record,
        read_recipe(RunDir(path)),
        history,
        results,
        # numbers for classes without a name
        class_names=[*names, *map(str, range(len(names), num_classes))],
        training_images=_read_json(path, TRAINING_IMAGES_FILE),
    )


def has_changed_since_read(run: Run) -> bool:
    """True if run.json was changed, for example because the run has ended."""
    record = RunDir(run.path).read_json("run.json") or {}
    return record | {"metrics_changed": run.record["metrics_changed"]} != run.record


def _read_json(path: Path, name: str) -> dict[str, Any]:
    """Read and check a JSON file of a run; an empty dict if the file does not exist."""
    content = RunDir(path).read_json(name)
    if content is None:
        return {}
    try:
        _FIELDS[name].validate_python(content, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise CheckpointError(
            f"{path / name}: '{key}' is {first['input']!r:.40} ({first['msg']}); {_RESTORE_HINT}",
            code="checkpoint.damaged",
        ) from None
    return content


# --- formatting ----------------------------------------------------------------------------------


def use_narrow_spaces(words: str) -> str:
    """Replace spaces by narrow no-break spaces."""
    return words.replace(" ", "\u202f")


def format_percent(value: float | None, digits: int = 2) -> str:
    """Format a fraction as a percentage; None as a dash."""
    return MISSING if value is None else use_narrow_spaces(formatting.format_percent(value, digits))


def format_accuracy_interval(accuracy: float | None, num_images: float | None) -> str:
    """Format the 95 % interval of an accuracy.

    Returns: the interval; an empty string if an argument is None, or if the split is large enough
        that the interval is negligible (1,000 images or more).
    """
    if accuracy is None or num_images is None:
        return ""
    interval = accuracy_interval(accuracy, int(num_images))
    return "" if interval is None else use_narrow_spaces(formatting.format_percent_range(*interval))


def has_too_few_images(num_images: float | None) -> bool:
    """Return True if this number of images is too small for a reliable metric; False for None."""
    return num_images is not None and num_images < TOO_FEW_IMAGES


def format_decimal(value: float | None, digits: int = 4) -> str:
    """Format a number with fixed decimals; None as a dash."""
    return MISSING if value is None else f"{value:.{digits}f}"


def format_count(value: float | None) -> str:
    """Format a count with thousands separators; None as a dash."""
    return MISSING if value is None else f"{value:,.0f}"


def format_duration(seconds: float | None) -> str:
    """Format seconds as a duration; None as a dash."""
    return MISSING if seconds is None else use_narrow_spaces(formatting.format_duration(seconds))
