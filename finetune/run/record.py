"""The record of a run, run.json: read it, write it, and update its status."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from finetune.errors import CheckpointError, FinetuneError, Interrupted, SetupError
from finetune.formatting import format_percent, format_short_count, pluralize
from finetune.log import logger, warn_once
from finetune.recipe.load import DistillSection, load_recipe
from finetune.recipe.schema import Recipe
from finetune.recipe.training_keys import (
    LOCATION_KEYS,
    TRAINING_ONLY_ARGS,
    changed_training_keys,
    training_keys,
    training_keys_without_seed,
)
from finetune.run.directory import RunDir, resume_command
from finetune.run.schema import RunRecord

if TYPE_CHECKING:
    from finetune.data.source import Source, Split

__all__ = [
    "describe_changed_metrics",
    "describe_decisions",
    "describe_split_decisions",
    "describe_teacher",
    "differing_inputs",
    "find_copied_shards",
    "has_changed",
    "have_other_shards",
    "have_other_test_images",
    "load_run_recipe",
    "network_without_dropout",
    "read_finished_results",
    "read_recipe",
    "read_record",
    "read_trained_recipe",
    "record_status",
    "shard_times",
    "training_identity",
    "update_record",
    "warn_of_copied_shards",
    "write_record",
]

_MAX_LISTED_MERGES = 5


def describe_split_decisions(metrics: Mapping[str, Any]) -> str:
    """Return the note that belongs to the metrics of a changed split; "" if it is unchanged.

    Args:
        metrics: metrics of the split, with the result of `split_decisions`.
    """
    changes = metrics.get("decisions")
    return f"after decisions ({_format_counts(changes)})" if changes else ""


def _format_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)


def describe_decisions(summary: Mapping[str, Any]) -> str:
    """Describe the `DecisionSummary` of run.json."""
    parts = [f"{name}: {_format_counts(counts)}" for name, counts in summary["splits"].items()]
    merged = [f"'{old}' into '{new}'" for old, new in summary["merged"].items()]
    if merged:
        num_more = len(merged) - _MAX_LISTED_MERGES
        more = f" and {num_more} more" if num_more > 0 else ""
        parts.append(f"merged in all splits: {', '.join(merged[:_MAX_LISTED_MERGES])}{more}")
    if count := summary["not_applied"]:
        parts.append(f"test: {pluralize(count, 'change')} not applied")
    return "; ".join(parts) or "none changes the data"


def describe_teacher(section: DistillSection, record: Mapping[str, Any]) -> str:
    """Describe the teacher of a run without its name, for example "kind logits, weight 0.5"."""
    teacher, text = record.get("teacher", {}), f"kind {section.kind}"
    if section.kind == "logits":
        text += f" at temperature {section.effective_temperature:g}"
    text += f", weight {section.weight:g}"
    if teacher.get("parameters"):
        text += (
            f"; {teacher['architecture']}, {format_short_count(teacher['parameters'])} parameters"
        )
    if "top1" in teacher:
        text += (
            f", {format_percent(teacher['top1'])} accuracy on its own {teacher['examples']:,} "
            f"{teacher['split']} images"
        )
    return text


def describe_changed_metrics(record: Mapping[str, Any]) -> str:
    """Return a warning if metrics.jsonl was changed by anything but the run; else ""."""
    if not record.get("metrics_changed"):
        return ""
    return "metrics.jsonl was changed after the run had written it; curves and claims may be wrong"


def shard_times(source: Source) -> dict[str, str]:
    """Return `Split.shard_times` of each streamed split, as run.json has it."""
    times = {name: split.shard_times() for name, split in source.splits.items()}
    return {name: time for name, time in times.items() if time is not None}


def has_changed(record: Mapping[str, Any], split: Split) -> bool:
    """Return whether the images or labels of a split of a run's own data differ from run.json."""
    fingerprint = record.get("split_fingerprints", {}).get(split.name)
    times = record.get("shard_times", {}).get(split.name)
    return fingerprint not in (None, split.fingerprint) or times not in (None, split.shard_times())


def find_copied_shards(record: Mapping[str, Any], source: Source) -> list[str]:
    """Return the splits whose local shards were written or copied since run.json was written."""
    recorded = record.get("shard_times", {})
    return [name for name, time in shard_times(source).items() if recorded.get(name, time) != time]


def warn_of_copied_shards(
    record: Mapping[str, Any], source: Source, *, names: Collection[str] | None = None
) -> None:
    """Warn if local shards of a run were replaced, which fingerprints do not show.

    Args:
        record: the content of run.json.
        source: the run's own data.
        names: splits to check; None for all.
    """
    if any(names is None or name in names for name in find_copied_shards(record, source)):
        logger.warning(
            f"{source.name}: shards were written or copied after the run started; their names, "
            "sizes and labels are the same, but their images were not compared"
        )


def read_record(run: RunDir) -> RunRecord:
    """Read run.json; empty if it does not exist.

    Raises: CheckpointError if it has no entries, or as `RunDir.read_json`.
    """
    record = run.read_json("run.json")
    if record == {}:
        raise CheckpointError(
            f"{run.path / 'run.json'}: has no entries, so the run cannot be checked; restore it "
            "from a copy",
            code="checkpoint.damaged",
        )
    return cast(RunRecord, record or {})


def read_recipe(run: RunDir) -> Recipe:
    """Read recipe.yaml. Raises: CheckpointError if it is not the recipe that the run trains."""
    path = run.path / "recipe.yaml"
    recipe = load_recipe(path)
    if recorded := read_record(run).get("training_keys"):
        changes = changed_training_keys(recorded, recipe)
        for key in LOCATION_KEYS:
            if change := changes.pop(key, None):
                warn_once(f"{path}: {key} was changed after the run started: {change}")
        if changes:
            listed = "; ".join(f"{key}: {values}" for key, values in changes.items())
            raise CheckpointError(
                f"{path}: was changed after the run started ({listed}); restore the values of the "
                "run",
                code="checkpoint.damaged",
            )
    return recipe


def read_trained_recipe(run: RunDir) -> Recipe:
    """Read recipe.yaml with the data that the run was trained on, without secrets in its URL.

    Raises: same as `read_recipe`.
    """
    recipe = read_recipe(run)
    trained = read_record(run).get("training_keys", {}).get("data", {})
    names = (key.partition(".")[2] for key in LOCATION_KEYS)
    data = recipe.data.model_copy(update={name: trained[name] for name in names if name in trained})
    return recipe.model_copy(update={"data": data})


def load_run_recipe(run: str | Path, *, data: str | None = None) -> Recipe | None:
    """Read the recipe of a run directory; None if `run` is a model folder or a model name.

    Warns if the model of the run may be older than its recipe.

    Args:
        data: source string of the run's data where it is now; None keeps the recorded one.
    Raises: CheckpointError if there is no recipe, or as `read_recipe`.
    """
    folder = Path(run)
    if not (folder / "run.json").is_file():
        return None
    if not (folder / "recipe.yaml").is_file():
        raise CheckpointError(
            f"{folder}: has a run.json, but no recipe.yaml, which says how images are prepared; "
            "restore it, for example from model/recipe.yaml",
            code="checkpoint.damaged",
        )
    directory = RunDir(folder)
    recipe = read_recipe(directory)
    status = read_record(directory).get("status", "done")
    if directory.model_folder.is_dir() and not status.startswith("done"):
        warn_once(
            f"{folder}: the run is not finished ({status}), so model/ may have the weights of an "
            f"earlier, shorter training; continue: {resume_command(folder)}"
        )
    return recipe if data is None else recipe.with_source(data)


def write_record(run: RunDir, record: RunRecord) -> None:
    """Write run.json atomically."""
    run.write_json("run.json", dict(record))


def update_record(run: RunDir, changes: RunRecord) -> None:
    """Replace some entries of run.json. Raises: CheckpointError if it was removed."""
    record = read_record(run)
    if not record:
        raise CheckpointError(
            f"{run.path / 'run.json'}: was removed during the run, so nothing of it can be checked "
            "later; restore it from a copy, or train in another --out",
            code="checkpoint.damaged",
        )
    write_record(run, cast(RunRecord, {**record, **changes}))


def training_identity(recipe: Recipe, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what two runs have in common if only their seeds differ: recipe, weights and data.

    Args:
        recipe: the recipe of the run.
        record: the content of run.json.
    """
    splits: dict[str, Any] = record.get("split_fingerprints", {})
    # Without data.split_seed, run.seed draws the subsets and the validation split.
    # With data.unreadable=quarantine, another machine may read other images.
    plan = record.get("plan", {})
    images_read = [plan.get(key) for key in ("images_read", "val_images_read")]
    if recipe.data.split_seed is None and (whole := record.get("whole_fingerprints")):
        splits = {**whole, "classes": splits.get("classes")}
        if recipe.data.num_train is None and recipe.data.num_val is None:
            # all images are in train or in val
            splits["images_read"] = sum(each or 0 for each in images_read)
    elif splits:
        splits = {**splits, "images_read": images_read}
    weights = [record.get(key) for key in ("weights_sha256", "preprocessing", "kept_rows_sha256")]
    return {
        "recipe": training_keys_without_seed(recipe),
        "data": splits,
        "weights": [*weights, network_without_dropout(record)],
        "teacher": [record.get("teacher", {}).get(key) for key in ("sha256", "config_sha256")],
        "precision": record.get("precision"),  # of run.precision=auto, it depends on the machine
    }


def network_without_dropout(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a run's network in run.json, without the rates of dropout."""
    network: dict[str, Any] = record.get("network", {})
    return {key: value for key, value in network.items() if key not in TRAINING_ONLY_ARGS}


def differing_inputs(identities: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return what runs do not have in common besides their recipes.

    Args:
        identities: the result of `training_identity` for each run.
    Returns: such as {"data": "images or labels"}, by the section of a recipe that names it.
    """
    parts = {
        "data": ("data", "images or labels"),
        "model": ("weights", "pretrained weights"),
        "distill": ("teacher", "teachers"),
    }
    return {
        section: name
        for section, (key, name) in parts.items()
        if any(each[key] != identities[0][key] for each in identities)
    }


def have_other_test_images(results: Iterable[Mapping[str, Any] | None]) -> bool:
    """Return True if runs were evaluated on different numbers of test images.

    The fingerprints of a split also cover the images that only some machines can read.

    Args:
        results: the content of results.json of each run; None if it is not finished.
    """
    numbers = {test["examples"] for each in results if each and (test := each.get("test"))}
    return len(numbers) > 1


def have_other_shards(records: Iterable[Mapping[str, Any]]) -> bool:
    """Return True if local shards that runs streamed were written or copied between these runs.

    Also True if one of several runs read two versions of its shards. The images may differ,
    although the fingerprints of streamed splits are equal.

    Args:
        records: the content of run.json of each run.
    """
    streamed = [record for record in records if record.get("shard_times")]
    if len(streamed) > 1 and any(record.get("copied_shards") for record in streamed):
        return True
    return any(record["shard_times"] != streamed[0]["shard_times"] for record in streamed)


def read_finished_results(folder: Path, recipe: Recipe) -> dict[str, Any] | None:
    """Read results.json; None unless the folder has a finished run of this recipe."""
    run = RunDir(folder)
    if read_record(run).get("status") != "done":
        return None
    old = load_run_recipe(folder)
    if old is None or training_keys(old) != training_keys(recipe):
        return None
    return run.read_json("results.json")


@contextlib.contextmanager
def record_status(run: RunDir, *, is_main_process: bool) -> Iterator[None]:
    """Write status, error code and checksums to run.json when the block ends.

    The status is "done", "stopped (exit code)" or "failed (exit code)".

    Raises: CheckpointError if run.json was removed in a block that succeeds.
    """

    def write(status: str, error_code: str | None = None) -> None:
        if is_main_process:
            ended = {"status": status, "error_code": error_code, **run.checksums()}
            update_record(run, cast(RunRecord, ended))

    try:
        yield
    except BaseException as error:
        code = getattr(error, "exit_code", 1)
        kind = "stopped" if isinstance(error, Interrupted) else "failed"
        # A full disk or a damaged record must not hide the error that ended the run.
        with contextlib.suppress(SetupError, CheckpointError):
            write(f"{kind} ({code})", error.code if isinstance(error, FinetuneError) else None)
        raise
    write("done")
