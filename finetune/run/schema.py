"""The fields of run.json, results.json and metrics.jsonl, and the check of their types.

Most fields may be missing, because files are written step by step. Unknown fields are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import ConfigDict, Field, FiniteFloat, SkipValidation, TypeAdapter, ValidationError
from typing_extensions import Required, TypedDict  # pydantic needs it before Python 3.12

from finetune.errors import CheckpointError

__all__ = [
    "DecisionsRecord",
    "PlanRecord",
    "Results",
    "RunRecord",
    "SplitMetrics",
    "TeacherRecord",
    "TrainMetrics",
    "check_json_types",
    "parse_metrics_line",
]

# strict: text is not parsed as a number, and True is not 1
_CONFIG = ConfigDict(strict=True, extra="allow")
_Count = Annotated[int, Field(ge=0, lt=2**53)]
_Number = Annotated[float, Field(gt=-1e300, lt=1e300)]


class DecisionsRecord(TypedDict):
    """`DecisionSummary`: what `data.decisions` has changed."""

    __pydantic_config__ = _CONFIG  # type: ignore[misc]

    splits: dict[str, dict[str, _Count]]
    merged: dict[str, str]
    not_applied: _Count


class PlanRecord(TypedDict, total=False):
    """The checked part of `TrainingSetup.plan`."""

    __pydantic_config__ = _CONFIG  # type: ignore[misc]

    steps: Annotated[int, Field(gt=0, lt=2**53)]
    steps_per_epoch: Annotated[float, Field(gt=0, lt=1e300)]
    images_read: _Count  # readable training images
    val_images_read: _Count  # only with a validation split
    trainable_parameters: _Count
    eval_pipeline: str
    images: dict[str, Any]
    weights: dict[str, Any]
    decisions: DecisionsRecord  # only with `data.decisions`


class TeacherRecord(TypedDict, total=False):
    """`Distillation.teacher_info`."""

    __pydantic_config__ = _CONFIG  # type: ignore[misc]

    architecture: str
    parameters: _Count
    sha256: str | None  # sha256 of the weights file
    config_sha256: str  # sha256 of network, preprocessing and order of the classes
    top1: _Number
    split: str
    examples: _Count


class RunRecord(TypedDict, total=False):
    """The content of run.json; fields are added while the run proceeds."""

    __pydantic_config__ = _CONFIG  # type: ignore[misc]

    id: str  # random id of the run, also in the manifests of its checkpoints
    started: str  # first start, ISO 8601
    branched_from: dict[str, Any]  # id and step of the run whose checkpoint this run started from
    status: str  # "running", "done", "stopped (exit code)" or "failed (exit code)"
    error_code: str | None  # code of the error that ended the run; None without one
    versions: dict[str, Any]  # versions of Python and the packages
    device: dict[str, Any]  # type, name, threads
    num_processes: int
    commit: str | None  # finetune's commit; None if built without a checkout
    argv: list[str]  # the command line, without secrets
    training_keys: dict[str, dict[str, Any]]  # `training_keys` of the recipe
    precision: str  # "fp32", "bf16" or "fp16"
    data_fingerprint: str  # sha256 over all of `split_fingerprints`
    split_fingerprints: dict[str, Any]  # sha256 of each split, and of the class names
    whole_fingerprints: dict[str, Any]  # `Source.whole_fingerprints`
    leakage: list[str]  # result of `find_leakage`
    weights_sha256: str | None  # sha256 of the weights file that training started from
    kept_rows_sha256: str | None  # sha256 of the rows of the pretrained head that were kept
    preprocessing: dict[str, Any]  # `Preprocessing` of the network, for images at evaluation
    network: dict[str, Any]  # `BuiltModel.network_args`
    model_sha256: str  # sha256 of the weights in model/
    results_sha256: str  # sha256 of results.json when the run ended
    metrics_sha256: str  # sha256 of metrics.jsonl when the run ended
    metrics_changed: bool  # True if metrics.jsonl was changed before the run continued
    shard_times: dict[str, Any]  # hash of the mtimes and ctimes of the shards of each split
    copied_shards: list[str]  # splits whose shards were written or copied before it continued
    numerics: dict[str, Any]  # what changes the last bits of the weights, such as run.threads
    # what of `numerics` changed when the run continued, and whether its best checkpoint was lost
    numerics_changed: list[str]
    training_images_sha256: str  # the same of training_images.json
    teacher: TeacherRecord  # only with `distill`
    plan: PlanRecord  # written after the images are decoded
    # size and machine, only with `data.micro_batch: auto`; a malformed entry is ignored when read
    micro_batch: Annotated[dict[str, Any], SkipValidation]
    pushed: dict[str, Any]  # result of `push`


class SplitMetrics(TypedDict, total=False):
    """The checked metrics of a split; which of them it has depends on `data.task`."""

    __pydantic_config__ = _CONFIG  # type: ignore[misc]

    examples: _Number
    loss: _Number
    top1: _Number
    top5: _Number
    ece: _Number
    balanced_accuracy: _Number
    map: _Number
    macro_f1: _Number
    micro_f1: _Number
    decisions: dict[str, _Count]  # images of the split that `data.decisions` dropped and relabeled


class TrainMetrics(TypedDict, total=False):
    """The last line of the training metrics."""

    __pydantic_config__ = _CONFIG  # type: ignore[misc]

    loss: _Number | None  # None if each step of the line was skipped, as FP16 overflowed


class Results(TypedDict, total=False):
    """The content of results.json."""

    __pydantic_config__ = _CONFIG  # type: ignore[misc]

    val: SplitMetrics | None
    test: SplitMetrics | None
    train: TrainMetrics | None
    steps: _Count
    best_step: _Count
    model_sha256: str  # sha256 of the weights in model/ that were evaluated
    learning_curve: dict[str, Any]  # see `measure_learning_curve`; only of a run on features
    claims: list[dict[str, Any]]
    warnings: list[str]
    command_seconds: _Number  # from the start of the command until the report is written


class _MetricsLine(TypedDict, total=False):
    """A line of metrics.jsonl; a metric is None if it was not finite."""

    __pydantic_config__ = _CONFIG  # type: ignore[misc]

    step: Required[_Count]
    split: Required[Literal["train", "val"]]
    loss: Required[FiniteFloat | None]
    top1: FiniteFloat | None
    map: FiniteFloat | None
    lr: FiniteFloat | None
    images_per_second: FiniteFloat | None
    seconds: FiniteFloat | None
    run: str | None  # the id in run.json


_METRICS_LINE = TypeAdapter(_MetricsLine)
_ADAPTERS: Mapping[str, TypeAdapter[Any]] = {
    "run.json": TypeAdapter(RunRecord),
    "results.json": TypeAdapter(Results),
}


def check_json_types(path: Path, content: Any) -> dict[str, Any]:
    """Check the types of the values in run.json or results.json.

    Args:
        path: the file, whose name selects the expected types; any other file must only contain a
            JSON object.
        content: the parsed JSON.
    Returns: the content.
    Raises: CheckpointError naming the first key whose value has the wrong type.
    """
    advice = "restore it from a copy, or train in another --out"
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path}: contains no JSON object; {advice}", code="checkpoint.damaged"
        )
    if path.name in _ADAPTERS:
        try:
            _ADAPTERS[path.name].validate_python(content)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = ".".join(map(str, first["loc"]))
            expected = first["msg"].removeprefix("Input should be ")
            raise CheckpointError(
                f"{path}: '{key}' is {first['input']!r:.40}, not {expected}; {advice}",
                code="checkpoint.damaged",
            ) from None
    return content


def parse_metrics_line(text: bytes) -> dict[str, Any] | None:
    """Parse a line of metrics.jsonl. Returns: its content, or None if the line is damaged."""
    try:
        return cast(dict[str, Any], _METRICS_LINE.validate_json(text))
    except ValidationError:
        return None
