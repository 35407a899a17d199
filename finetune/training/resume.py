"""Start or resume a run: check that it is the recorded run, and write run.json.

Only rank 0 calls these functions; they neither run the model nor communicate with other ranks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import shlex
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import nn

from finetune.data.leakage import find_leakage
from finetune.errors import (
    CheckpointError,
    DataError,
    RecipeError,
    SetupError,
    WeightsError,
    redact_secrets,
)
from finetune.log import logger
from finetune.models.batch_norm import unfrozen_batch_norm_layers
from finetune.precision import float32_settings
from finetune.recipe.training_keys import LOCATION_KEYS, changed_training_keys, training_keys
from finetune.run.directory import SEARCH_FILE, RunDir, resume_command, whole_run
from finetune.run.environment import collect_environment
from finetune.run.record import (
    find_copied_shards,
    read_recipe,
    read_record,
    shard_times,
    update_record,
    warn_of_copied_shards,
    write_record,
)
from finetune.run.schema import PlanRecord, RunRecord, TeacherRecord
from finetune.training.setup import TrainingSetup
from finetune.training.stages import first_stage_started, has_stage

__all__ = [
    "check_no_existing_run",
    "check_same_weights",
    "record_plan",
    "start_or_resume",
    "warn_of_changes",
]

_DATA_FAILED = f"failed ({DataError.exit_code})"  # status in run.json

# Environment variables of oneDNN, MKL, ATen and timm; some change instructions, precision or
# kernels.
_NUMERIC_VARIABLES = ("ONEDNN_", "DNNL_", "MKL_", "ATEN_", "TIMM_")
# These keys may change if the learning rate of all steps so far stays the same.
_LENGTH_KEYS = {"optim.epochs", "optim.steps"}
# Entries of run.json that are written at the end of a run, and removed when it continues.
_END_OF_RUN_KEYS = {"error_code", "model_sha256", "pushed"}
_END_OF_RUN_KEYS |= {"metrics_sha256", "results_sha256", "training_images_sha256"}


def start_or_resume(
    run: RunDir,
    setup: TrainingSetup,
    *,
    precision: str,
    num_processes: int,
    resume: bool,
    branch_from: RunDir | None = None,
    teacher: Mapping[str, Any] | None = None,
) -> int | None:
    """Prepare a new run, or check that the recorded run can continue with this recipe and data.

    Unless the run is already done, write recipe.yaml and run.json.

    Args:
        run: the run directory, opened by this process.
        setup: the training setup.
        precision: "fp32", "bf16" or "fp16", resolved for this machine.
        num_processes: number of processes of the launch.
        resume: True if the user gave --resume.
        branch_from: another run, of the same recipe or of another length; `run`, unless it has
            checkpoints of its own, starts from the newest checkpoint of it that is also one of the
            new length. None to train `run` alone.
        teacher: dict that describes the teacher, from `Distillation.teacher_info`; None without a
            teacher.
    Returns: the step to continue from; None if the run is already done.
    Raises: SetupError if a run exists already and `resume` is False; RecipeError, WeightsError or
        DataError if recipe, pretrained weights or data differ from the recorded run;
        CheckpointError if no checkpoint is intact.
    """
    if not resume:
        # with stages, they are trained by now
        check_no_existing_run(run, has_stage=not setup.recipe.optim.stages and has_stage(run.path))
    record = read_record(run)
    fingerprints = setup.fingerprints()
    is_done = _is_done(run, record)
    source = run  # the run that is continued
    if branch_from is not None and not run.checkpoint_steps() and not is_done:
        if record and (changes := _list_changes(run, setup, record, teacher)):
            logger.warning(
                f"{run.path}: starts again from {branch_from.path}; changed since it started: "
                f"{'; '.join(changes)}"
            )
        source, record = branch_from, read_record(branch_from)
    is_branch = source is not run
    if not source.checkpoint_steps() and not is_done:
        start_step = 0  # no checkpoint yet, so starting from scratch loses nothing
        if first_stage_started(setup.recipe, run.path):
            warn_of_changes(run, setup, teacher)
        elif resume and "training_keys" in record:
            changes = _list_changes(run, setup, record, teacher)
            listed = f"; changed since it started: {'; '.join(changes)}" if changes else ""
            logger.warning(f"{run.path}: has no checkpoint, so it starts again{listed}")
        record = _new_id()
        record["leakage"] = _find_leakage(setup, known=())
    elif not record:
        raise CheckpointError(
            f"{source.path / 'run.json'}: the file is missing or empty, so the data cannot be "
            "checked; restore it from a copy, or train in another --out",
            code="checkpoint.damaged",
        )
    else:
        # Use the number of images that the recorded run could read.
        setup = setup.with_num_samples(record.get("plan", {}).get("images_read", setup.num_samples))
        steps = _common_checkpoints(source, setup, record, is_branch=is_branch)
        _check_same_run(
            source,
            setup,
            record,
            precision=precision,
            fingerprints=fingerprints,
            has_checkpoint=bool(steps) if is_branch else steps == source.checkpoint_steps(),
            branch=run if is_branch else None,
        )
        # a test image may have been repaired, and the groups are not fingerprinted
        record["leakage"] = _find_leakage(setup, known=record.get("leakage", []))
        if teacher is not None and _differs_from_teacher(record, teacher):
            raise RecipeError(
                f"{source.path}: started with different weights, class names or preprocessing of "
                f"the teacher {teacher['name']}; restore them, or choose another --out",
                code="recipe.not_this_run",
            )
        if is_done and run.has_model() and setup.num_steps == _recorded_num_steps(record, setup):
            return None
        start_step = source.newest_intact_step(steps if is_branch else None) or 0
        if (recorded_num_steps := _recorded_num_steps(record, setup)) != setup.num_steps:
            origin = f"from step {start_step}, up to which the learning rates are the same"
            logger.info(
                f"{source.path}: training {setup.num_steps} steps instead of {recorded_num_steps}, "
                f"{origin if start_step else 'from scratch, because it has no checkpoint'}"
            )
    # Remove the skipped checkpoints after `start_step`, which would count as the newest.
    run.prune_checkpoints({step for step in run.checkpoint_steps() if step <= start_step})
    # In a folder that continues, they are dropped once run.json has no checksum of them.
    if is_branch or not start_step:
        run.drop_metrics_after(0)
    metrics_changed = bool(start_step) and source.has_changed_metrics()
    run.write_recipe(setup.recipe.to_yaml())
    whole_fingerprints = setup.source.whole_fingerprints()
    recorded_whole = record.get("whole_fingerprints", whole_fingerprints)
    is_same_data = bool(start_step) and record.get("split_fingerprints") == fingerprints
    if is_same_data and recorded_whole != whole_fingerprints:
        logger.warning(
            f"{setup.recipe.data.source}: images that this run does not use have changed since it "
            "started; it keeps the record of those that it was drawn from"
        )
        whole_fingerprints = recorded_whole
    # A run that is finished again at the same length has the weights that were pushed.
    is_same_length = not is_branch and _recorded_num_steps(record, setup) == setup.num_steps
    removed = _END_OF_RUN_KEYS - ({"pushed"} if is_same_length else set())
    if not start_step:
        removed |= {"branched_from", "numerics_changed"}
    record = {
        **cast(RunRecord, {k: v for k, v in record.items() if k not in removed}),
        "status": "running",
        "training_keys": training_keys(setup.recipe),
        "precision": precision,
        **collect_environment(setup.device, num_processes),
        "data_fingerprint": hashlib.sha256("".join(fingerprints.values()).encode()).hexdigest(),
        "split_fingerprints": fingerprints,
        "whole_fingerprints": whole_fingerprints,
        "weights_sha256": setup.built.provenance.get("sha256"),
        "kept_rows_sha256": setup.built.provenance.get("kept_rows_sha256"),
        **cast(RunRecord, _config_entries(setup)),
        "metrics_changed": metrics_changed,
    }
    copied_shards = find_copied_shards(record, setup.source) if start_step else []
    if copied_shards:
        warn_of_copied_shards(record, setup.source)
        record["copied_shards"] = sorted({*record.get("copied_shards", []), *copied_shards})
    record["shard_times"] = shard_times(setup.source)
    numerics = _numerics(setup, record)
    if start_step:
        record["numerics_changed"] = [
            *record.get("numerics_changed", []),
            *_warn_of_changed_numerics(setup, record.get("numerics", {}), numerics),
            *(f"shards of '{name}' were written or copied" for name in copied_shards),
        ]
        if note := _describe_extra_evaluation(setup, start_step, recorded_num_steps):
            logger.warning(f"{source.path}: {note}")
            record["numerics_changed"].append(note)
    record["numerics"] = numerics
    if teacher is not None:
        record["teacher"] = cast(TeacherRecord, dict(teacher))
    continued_id = record.get("id")
    if is_branch and start_step:
        branched_from = {"run": continued_id, "step": start_step}
        record = {**record, **_new_id(), "branched_from": branched_from}
    write_record(run, record)
    if is_branch and start_step:
        _copy_history(source, run, step=start_step, run_id=continued_id)
    elif start_step:
        run.drop_metrics_after(start_step)
    return start_step


def _find_leakage(setup: TrainingSetup, *, known: Sequence[str]) -> list[str]:
    """Find images and groups of several splits. Logs, and adds to `known`, what is new."""
    new = [line for line in find_leakage(setup.source) if line not in known]
    for line in new:
        logger.warning(line)
    return [*known, *new]


def warn_of_changes(run: RunDir, setup: TrainingSetup, teacher: Mapping[str, Any] | None) -> None:
    """Warn of what has changed since the first stage of a run started.

    The training after the stages, which has not started, uses it.
    """
    record = read_record(run)
    if record and (changes := _list_changes(run, setup, record, teacher)):
        logger.warning(
            f"{run.path}: changed since the first stage started: {'; '.join(changes)}; the "
            "training after the stages uses what there is now"
        )


def _list_changes(
    run: RunDir, setup: TrainingSetup, record: RunRecord, teacher: Mapping[str, Any] | None
) -> list[str]:
    """List what differs from run.json; the arguments are those of `start_or_resume`."""
    keys = changed_training_keys(record.get("training_keys", {}), setup.recipe)
    changes = [f"{key} ({values})" for key, values in keys.items()]
    fingerprints = setup.fingerprints()
    if record.get("split_fingerprints", fingerprints) != fingerprints:
        changes.append("images or labels")
    try:
        check_same_weights(run, setup, record)
    except WeightsError:
        changes.append("pretrained weights or their config.json")
    if teacher is not None and _differs_from_teacher(record, teacher):
        changes.append("teacher")
    return changes


# besides torch: networks, transforms, decoders
_TRAINING_PACKAGES = ("finetune", "timm", "torchvision", "numpy", "pillow", "simplejpeg")


def _numerics(setup: TrainingSetup, record: RunRecord) -> dict[str, Any]:
    """Return what changes the weights, mostly in the last bits, although the recipe is the same.

    Args:
        record: run.json with the environment of this start.
    """
    device = record["device"]
    cpu = {
        "run.threads": device["threads"],
        "instructions": device["instructions"],
        "variables": {
            name: redact_secrets(value)
            for name, value in os.environ.items()
            if name.startswith(_NUMERIC_VARIABLES)
        },
    }
    return {
        "data.micro_batch": setup.recipe.data.micro_batch,
        "processes": record["num_processes"],
        "device": device["name"],
        **{name: record["versions"].get(name) for name in ("torch", *_TRAINING_PACKAGES)},
        **float32_settings(device["type"]),
        **(cpu if device["type"] == "cpu" else {}),
    }


def _warn_of_changed_numerics(
    setup: TrainingSetup, old: Mapping[str, Any], new: Mapping[str, Any]
) -> list[str]:
    """Log a warning about each result of `_numerics` that has changed. Returns: the changes."""
    changes = {
        key: f"{key} {old[key]} -> {value}"
        for key, value in new.items()
        if key in old and old[key] != value
    }
    if changes:
        effect = "in the last bits"
        if changes.keys() & {*_TRAINING_PACKAGES}:
            effect = "perhaps by more than the last bits"
        is_split_otherwise = {"data.micro_batch", "processes"} & changes.keys()
        has_own_statistics = unfrozen_batch_norm_layers(setup.built.model)
        if is_split_otherwise and _has_dropout(setup.built.model):
            effect = "because dropout masks change"
        if is_split_otherwise and has_own_statistics and not setup.recipe.model.sync_bn:
            effect = "because batch norm gets its statistics from other numbers of images"
        logger.warning(f"results will differ {effect}: {', '.join(changes.values())}")
    return [*changes.values()]


def _has_dropout(network: nn.Module) -> bool:
    return any(
        module.p if isinstance(module, nn.Dropout) else getattr(module, name, 0)
        for module in network.modules()
        for name in ("drop_prob", "drop_rate")  # of stochastic depth, and before timm's classifiers
    )


def _describe_extra_evaluation(
    setup: TrainingSetup, start_step: int, recorded_num_steps: int
) -> str:
    """Describe an evaluation that a run of the new length would not have made; else ""."""
    chooses_weights = "val" in setup.source.splits and setup.recipe.run.best != "last"
    is_longer = start_step == recorded_num_steps < setup.num_steps
    if not (chooses_weights and is_longer) or setup.is_eval_step(start_step):
        return ""
    return (
        f"step {start_step:,} was evaluated because the run ended there, so the kept weights may "
        f"differ from those of {setup.num_steps:,} steps from scratch"
    )


def _new_id() -> RunRecord:
    return {"id": uuid.uuid4().hex, "started": time.strftime("%Y-%m-%dT%H:%M:%S%z")}


def _copy_history(source: RunDir, run: RunDir, *, step: int, run_id: str | None) -> None:
    """Copy the metrics up to a step, the best checkpoint by then, and last the step's checkpoint.

    A kill leaves no checkpoint, or those of an earlier step, from which the run can continue.
    """
    for line in source.read_metrics():
        if line["step"] <= step:
            run.append_metrics(line)
    best = source.best_step_at(step)
    if best not in (None, step) and source.verify_checkpoint(best) is None:
        run.copy_checkpoint(source, best, run_id=run_id)
    run.copy_checkpoint(source, step, run_id=run_id)


def check_no_existing_run(run: RunDir, *, has_stage: bool) -> None:
    """Raise SetupError if the folder holds a finished run or one with checkpoints.

    Args:
        run: the run directory.
        has_stage: True if a stage of the run has checkpoints.
    """
    record = read_record(run)
    if _is_done(run, record):
        raise SetupError(
            f"{run.path}: already contains a finished run; start a new one with {_new_out(run)}",
            code="setup.run_exists",
        )
    has_search = any((run.path / name).exists() for name in (SEARCH_FILE, "trials"))
    if has_stage or run.checkpoint_steps() or has_search:
        raise SetupError(
            f"{run.path}: already contains a run ({record.get('status', 'unknown')}); continue it: "
            f"{resume_command(run.path)}, or start a new one with {_new_out(run)}",
            code="setup.run_exists",
        )


def _new_out(run: RunDir) -> str:
    """Return the option that names a new folder next to the run."""
    path = whole_run(run.path)
    paths = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return shlex.join(["--out", str(next(path for path in paths if not path.exists()))])


def _is_done(run: RunDir, record: RunRecord) -> bool:
    return record.get("status") == "done" and run.read_json("results.json") is not None


def _check_same_run(
    run: RunDir,
    setup: TrainingSetup,
    record: RunRecord,
    *,
    precision: str,
    fingerprints: dict[str, str],
    has_checkpoint: bool,
    branch: RunDir | None,
) -> None:
    """Check that recipe, precision, weights and data are those of the recorded run.

    Args:
        has_checkpoint: True if a run of the new length can continue from its checkpoints.
        branch: the run that starts from a checkpoint; None if the recorded run itself continues.

    The other arguments are those of `start_or_resume`.
    Raises: RecipeError, WeightsError or DataError that names the difference.
    """
    differences = changed_training_keys(record.get("training_keys", {}), setup.recipe)
    recorded = record.get("split_fingerprints", {})
    changed_splits = {
        name
        for name in recorded.keys() | fingerprints.keys()
        if recorded.get(name) != fingerprints.get(name)
    }
    # A run that failed after writing model/ failed at a test image. The user may have repaired it
    # if it was unreadable, but was told to restore it if it had changed.
    may_be_repaired = record.get("status") == _DATA_FAILED and (
        record.get("error_code") != "data.changed"
    )
    if changed_splits == {"test"} and may_be_repaired and run.has_model():
        logger.warning(
            f"{setup.recipe.data.source}: the test split has changed since the run started; it is "
            "evaluated as it is now"
        )
        changed_splits = set()
    # Fingerprints of streamed shards do not cover the content of the images.
    moved = {}
    if not setup.source.splits["train"].is_streamed:
        moved = {key: differences.pop(key) for key in LOCATION_KEYS if key in differences}
    listed_moved = "".join(f"{key}: {values}; " for key, values in moved.items())
    if moved and not changed_splits:
        logger.warning(f"{run.path}: {listed_moved}images and labels are the same")
    is_same_recipe = set(differences) <= _LENGTH_KEYS
    if differences and not (is_same_recipe and has_checkpoint):
        read_recipe(run)  # its error if the run's own recipe.yaml was changed
        listed = "; ".join(f"{key}: {values}" for key, values in differences.items())
        if is_same_recipe:
            raise _cannot_lengthen(run, setup, record, listed=listed)
        if branch is not None:
            new_run = [
                "finetune",
                "train",
                str(run.path / "recipe.yaml"),
                "--out",
                str(branch.path),
            ]
            raise RecipeError(
                f"{run.path}: a run that starts from one of its checkpoints can change only its "
                f"number of steps ({listed}); train from scratch: {shlex.join(new_run)}, with "
                "these values",
                code="recipe.not_this_run",
            )
        raise RecipeError(
            f"{run.path}: cannot continue with a different recipe ({listed}); continue with the "
            f"run's own recipe: {resume_command(run.path)}, or start a new run with "
            f"{_new_out(run)}",
            code="recipe.not_this_run",
        )
    if (recorded_precision := record.get("precision")) != precision:
        raise RecipeError(
            f"{run.path}: started in {recorded_precision}, but run.precision=auto is {precision} "
            "on this machine; continue on the first machine, or choose another --out",
            code="recipe.not_this_run",
        )
    check_same_weights(run, setup, record)
    if changed_splits:
        raise DataError(
            f"{setup.recipe.data.source}: the data has changed since the run in {run.path} started "
            f"({listed_moved}an image, label or class in {', '.join(sorted(changed_splits))} "
            "differs); restore it, then "
            f"{resume_command(run.path)}, or start a new run with {_new_out(run)}",
            code="data.changed",
        )


def _differs_from_teacher(record: RunRecord, teacher: Mapping[str, Any]) -> bool:
    """Return whether the run had other weights, classes or preprocessing of the teacher."""
    recorded = record.get("teacher", {})
    keys = ("sha256", "config_sha256")
    return any(recorded.get(key, teacher[key]) != teacher[key] for key in keys)


def check_same_weights(run: RunDir, setup: TrainingSetup, record: RunRecord) -> None:
    """Raise WeightsError if pretrained weights, class names, preprocessing or network changed."""
    name = setup.recipe.model.name
    sha256 = setup.built.provenance.get("sha256")
    if (recorded_sha256 := record.get("weights_sha256")) != sha256:
        raise WeightsError(
            f"{name}: these weights have sha256 {sha256}, but the run {run.path} started from "
            f"{recorded_sha256}; restore them, or train again in another --out",
            code="weights.wrong_version",
        )
    # Class names, preprocessing and network are in config.json, which `sha256` does not cover.
    kept_rows = setup.built.provenance.get("kept_rows_sha256")
    if record.get("kept_rows_sha256") != kept_rows:
        raise WeightsError(
            f"{name}: its class names have changed since the run {run.path} started with the head "
            "rows of these classes (model.head_init=keep); restore its config.json, or train again "
            "in another --out",
            code="weights.wrong_version",
        )
    for part, values in _config_entries(setup).items():
        old = cast(dict[str, Any], record.get(part, {}))
        if changed := [key for key in {**old, **values} if old.get(key) != values.get(key)]:
            listed = ", ".join(
                f"{key}: the run has {old.get(key)}, now {values.get(key)}" for key in changed
            )
            raise WeightsError(
                f"{name}: the {part} has changed since the run {run.path} started ({listed}); "
                "restore its config.json, or train again in another --out",
                code="weights.wrong_version",
            )


def _config_entries(setup: TrainingSetup) -> dict[str, dict[str, Any]]:
    """Return the entries of run.json that come from config.json: lists instead of tuples."""
    entry = dataclasses.asdict(setup.built.preprocessing)
    preprocessing = {key: list(v) if isinstance(v, tuple) else v for key, v in entry.items()}
    return {"preprocessing": preprocessing, "network": setup.built.network_args}


def _num_common_steps(run: RunDir, setup: TrainingSetup, recorded_num_steps: int) -> int:
    """Return the number of first steps that have the same learning rates in both run lengths.

    These are all steps of the shorter run with a constant learning rate, and otherwise those before
    the decay, or in the warm-up. Only the steps up to the newest checkpoint are compared; if these
    are the same, all steps of the shorter run count.
    """
    num_steps = min(setup.num_steps, recorded_num_steps)
    for step in range(min(num_steps, max(run.checkpoint_steps(), default=0))):
        if setup.lr_at(step) != setup.lr_at(step, total_steps=recorded_num_steps):
            return step
    return num_steps


def _common_checkpoints(
    run: RunDir, setup: TrainingSetup, record: RunRecord, *, is_branch: bool
) -> list[int]:
    """Return the steps of the checkpoints that a run of the new length could have written too.

    Args:
        is_branch: True to exclude a checkpoint after the evaluation at the end of the recorded run,
            which a run of the new length would not have made.
    """
    recorded_num_steps = _recorded_num_steps(record, setup)
    num_common = _num_common_steps(run, setup, recorded_num_steps)
    steps = [step for step in run.checkpoint_steps() if step <= num_common]
    if not is_branch or setup.num_steps == recorded_num_steps:
        return steps
    return [
        step
        for step in steps
        if step < setup.num_steps and (step < recorded_num_steps or setup.is_eval_step(step))
    ]


def _cannot_lengthen(
    run: RunDir, setup: TrainingSetup, record: RunRecord, *, listed: str
) -> RecipeError:
    """Return the error for another number of steps, with the way to train it."""
    optim, steps = setup.recipe.optim, run.checkpoint_steps()
    num_common = _num_common_steps(run, setup, _recorded_num_steps(record, setup))
    if optim.schedule in ("linear", "cosine"):
        cause = f"the learning rates of optim.schedule={optim.schedule} depend on it"
        fix = (
            f"train it from scratch with {_new_out(run)}; with optim.schedule=wsd, a run can be "
            "lengthened"
        )
    elif _common_checkpoints(run, setup, record, is_branch=True):
        cause = (
            f"the learning rates are the same only up to step {num_common}, and the last "
            f"checkpoint is step {steps[-1]}"
        )
        length = f"steps={optim.steps}" if optim.steps else f"epochs={optim.epochs:g}"
        fix = (
            f"start a new run from an earlier one: {resume_command(run.path)} {_new_out(run)} "
            f"optim.{length}"
        )
    else:
        cause = (
            f"the learning rates are the same only up to step {num_common}, and the first "
            f"checkpoint is step {steps[0]}"
        )
        fix = f"train it from scratch with {_new_out(run)}"
    return RecipeError(
        f"{run.path}: cannot continue with another number of steps ({listed}): {cause}; {fix}",
        code="recipe.not_this_run",
    )


def _recorded_num_steps(record: RunRecord, setup: TrainingSetup) -> int:
    """Return the length of the recorded run, in optimizer steps."""
    steps = record.get("training_keys", {}).get("optim", {}).get("steps")  # as in recipe.yaml
    if not isinstance(steps, int):  # epochs, or a damaged record
        steps = record.get("plan", {}).get("steps", setup.num_steps)
    return steps


def record_plan(
    run: RunDir, setup: TrainingSetup, *, start_step: int, num_val: int | None = None
) -> None:
    """Write the plan to run.json, once the numbers of readable images are known.

    Args:
        start_step: step of the checkpoint; 0 to start from scratch.
        num_val: number of readable validation images; None without a validation split.
    Raises: DataError if a resumed run can read more or fewer images than before.
    """
    record = read_record(run)
    plan = setup.plan() | ({} if num_val is None else {"val_images_read": num_val})
    recorded = record.get("plan", plan)
    for key, what in (("images_read", "training"), ("val_images_read", "validation")):
        before, now = recorded.get(key, plan.get(key)), plan.get(key)
        if start_step and before != now:
            raise DataError(
                f"{setup.recipe.data.source}: {before} {what} images were readable when the run "
                f"started, {now} are now; use the same images as then (finetune data scan SOURCE "
                "lists those that cannot be read)",
                code="data.changed",
            )
    update_record(run, {"plan": cast(PlanRecord, plan)})
