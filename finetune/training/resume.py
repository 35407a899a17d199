"""The start of a run: the checks before a resume, and the record in run.json.

Only rank 0 calls these; they know neither the network nor the other processes.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from finetune.data.splits import shared_images
from finetune.data.streaming.row_groups import ShardItems
from finetune.errors import CheckpointError, DataError, RecipeError, SetupError
from finetune.files import write_atomically
from finetune.recipe.identity import learned
from finetune.recipe.load import load_recipe
from finetune.run.directory import RunDir
from finetune.run.environment import describe_machine
from finetune.run.record import RunRecord, read_record, write_record
from finetune.training.setup import TrainingSetup

__all__ = ["begin", "note_plan", "refuse_second"]

# Another length is another run, unless the past would have been the same.
_LENGTH = {"optim.epochs", "optim.steps"}

# Of the data's fingerprints, those that decide what is learned.
_LEARNED = ("train", "val", "classes")


def begin(
    run: RunDir,
    setup: TrainingSetup,
    *,
    precision: str,
    num_processes: int,
    resume: bool,
    notice: Callable[[str], None],
    teacher: Mapping[str, Any] | None = None,
) -> int | None:
    """Start the run's record, or check that the recorded run is this one.

    Args:
        run, setup: opened.
        precision: "fp32", "bf16" or "fp16", as chosen for this machine.
        resume: whether the user asked to go on.
        notice: told of each damaged checkpoint.
        teacher: `Distillation.facts`; None without one.
    Returns: the step to continue from; None if the run is already done.
    Raises: SetupError if there is a run already and `resume` is False; RecipeError or DataError if
        it is another one; CheckpointError if no checkpoint is intact.
    """
    if not resume:
        refuse_second(run)
    record = read_record(run)
    fingerprints = setup.fingerprints()
    is_done = _is_done(run, record)
    if not run.steps() and not is_done:
        start = 0  # nothing was learned yet, so nothing is lost by beginning anew
        record = {"started": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        for line in shared_images(setup.source):
            notice(line)
    elif not record:
        raise CheckpointError(
            f"{run.path / 'run.json'}: is missing, so nothing tells what data the run began with; "
            "restore it from a copy, or train in another --out",
            code="checkpoint.damaged",
        )
    else:
        # with the number of images that the recorded run could read
        setup = setup.with_num_samples(record.get("plan", {}).get("images_read", setup.num_samples))
        _check_same(run, setup, record, notice, precision=precision, fingerprints=fingerprints)
        _check_teacher(run, record, teacher)
        if is_done and run.has_model() and setup.steps == _steps_before(record, setup):
            return None
        start = run.newest(notice) or 0
        if (before := _steps_before(record, setup)) != setup.steps:
            notice(f"{run.path}: {setup.steps} steps instead of {before}, the same up to {start}")
    # Checkpoints beyond the start are damaged: kept, one would be taken for the newest.
    run.prune({step for step in run.steps() if step <= start})
    run.forget_after(start)
    write_atomically(run.path / "recipe.yaml", setup.recipe.to_yaml())
    facts = describe_machine(setup.device, num_processes) | _origin(setup, fingerprints, teacher)
    write_record(run, {**record, "status": "running", "precision": precision, **facts})
    return start


def refuse_second(run: RunDir) -> None:
    """Raise SetupError if there is a run already in which something was learned."""
    record = read_record(run)
    if run.steps() or _is_done(run, record):
        raise SetupError(
            f"{run.path}: holds a run already ({record.get('status', 'unknown')}); continue it "
            "with --resume, or choose another --out",
            code="setup.run_exists",
        )


def _is_done(run: RunDir, record: RunRecord) -> bool:
    return record.get("status") == "done" and run.read_json("results.json") is not None


def _origin(
    setup: TrainingSetup, fingerprints: dict[str, str], teacher: Mapping[str, Any] | None
) -> RunRecord:
    """The record of what a run learns from: data, weights and, if there is one, a teacher."""
    facts: RunRecord = {
        "data_fingerprint": _joined(fingerprints),
        "split_fingerprints": fingerprints,
        "weights_sha256": setup.built.provenance.get("sha256"),
    }
    if teacher is not None:
        facts["teacher"] = dict(teacher)
    return facts


def _check_same(
    run: RunDir,
    setup: TrainingSetup,
    record: RunRecord,
    notice: Callable[[str], None],
    *,
    precision: str,
    fingerprints: dict[str, str],
) -> None:
    """Refuse to continue a run whose recipe or data is another one, and show the difference."""
    old, new = learned(load_recipe(run.path / "recipe.yaml")), learned(setup.recipe)
    differences = {
        f"{section}.{key}": f"the run has {old[section].get(key)!r}, now {new[section].get(key)!r}"
        for section in new
        for key in old[section] | new[section]
        if old[section].get(key) != new[section].get(key)
    }
    # What was learned came from these; a test split may be mended before it is read.
    recorded = record.get("split_fingerprints", {})
    others = [name for name in _LEARNED if recorded.get(name) != fingerprints.get(name)]
    is_streamed = isinstance(setup.source.splits["train"].items, ShardItems)
    if not others and not is_streamed:  # of shards it is not the images' content
        differences.pop("data.source", None)  # the same images elsewhere
    if differences and not (set(differences) <= _LENGTH and _same_past(run, setup, record)):
        shown = "; ".join(f"{key}: {values}" for key, values in differences.items())
        raise RecipeError(
            f"{run.path}: cannot continue with another recipe ({shown}); "
            "restore the key, or choose another --out",
            code="recipe.not_this_run",
        )
    if record.get("precision", precision) != precision:
        raise RecipeError(
            f"{run.path}: began in {record['precision']}, and run.precision: auto means "
            f"{precision} on this machine; continue where it began, or choose another --out",
            code="recipe.not_this_run",
        )
    sha256 = setup.built.provenance.get("sha256")
    if setup.recipe.model.adapter is not None and record.get("weights_sha256") != sha256:
        raise RecipeError(
            f"{run.path}: began with other weights under the name {setup.recipe.model.name}, to "
            "which its adapter belongs; restore them, or choose another --out",
            code="recipe.not_this_run",
        )
    splits = setup.source.splits
    if others and all(
        name in splits and splits[name].former_fingerprint == recorded.get(name, "")
        for name in others
    ):
        notice(
            f"{run.path}: began with a version that knew more than 1 GiB of images by their names "
            "and sizes, which are the same; from now on their content counts"
        )
    elif others:
        raise DataError(
            f"{setup.recipe.data.source}: the data is not what the run in {run.path} began with "
            "(an image, label or class was added, removed or changed); restore it, or choose "
            "another --out",
            code="data.changed",
        )


def _check_teacher(run: RunDir, record: RunRecord, teacher: Mapping[str, Any] | None) -> None:
    """Refuse to continue a run with a teacher whose weights have changed."""
    if teacher is not None and record.get("teacher", {}).get("sha256") != teacher["sha256"]:
        raise RecipeError(
            f"{run.path}: began with other weights of its teacher {teacher['name']}; restore "
            "them, or choose another --out",
            code="recipe.not_this_run",
        )


def _same_past(run: RunDir, setup: TrainingSetup, record: RunRecord) -> bool:
    """True if a run of another length would have learned the same up to the last checkpoint.

    That holds for a constant learning rate, and during a warm-up.
    """
    before, done = _steps_before(record, setup), max(run.steps(), default=0)
    return done <= setup.steps and all(
        setup.lr(step) == setup.lr(step, steps=before) for step in range(done)
    )


def _steps_before(record: RunRecord, setup: TrainingSetup) -> int:
    """The length of the recorded run, in optimiser steps."""
    return int(record.get("plan", {}).get("steps", setup.steps))


def _joined(fingerprints: dict[str, str]) -> str:
    """One sha256 for the whole data set."""
    return hashlib.sha256("".join(fingerprints.values()).encode()).hexdigest()


def note_plan(run: RunDir, setup: TrainingSetup, *, start: int) -> None:
    """Write the plan into run.json, once it is known how many images can be read.

    Raises: DataError if a resumed run reads another number of images than before.
    """
    record = read_record(run)
    plan = setup.plan()
    before = record.get("plan", plan).get("images_read", plan["images_read"])
    if start and before != plan["images_read"]:
        raise DataError(
            f"{setup.recipe.data.source}: {before} training images could be read when the run "
            f"began, {plan['images_read']} can now; see: finetune data scan",
            code="data.changed",
        )
    write_record(run, {**record, "plan": plan})
