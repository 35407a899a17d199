"""The run's record: what run.json says from the first step to the last, and what may be resumed.

Only rank 0 calls these; they know neither the network nor the other processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from finetune.errors import CheckpointError, DataError, Interrupted, RecipeError, SetupError
from finetune.files import write_atomically
from finetune.models.saved import Preprocessing
from finetune.recipe.load import Recipe, load_recipe
from finetune.run.directory import RunDir
from finetune.run.environment import describe_machine
from finetune.training.setup import Job
from finetune.transforms.evaluation import make_pipeline
from finetune.transforms.pipeline import Pipeline

__all__ = [
    "begin",
    "but_the_seed",
    "finished",
    "learned",
    "note_plan",
    "pipeline_of",
    "recipe_of",
    "status_kept",
]

# A resumed run may differ in these: they change where and how fast, not what is learned.
_FREE_KEYS = {
    "data": {"micro_batch", "eval_batch_size", "keep", "workers", "unreadable"},
    "run": {
        "log_every",
        "save_every",
        "keep_checkpoints",
        "num_processes",
        "threads",
        "timeout_seconds",
        "trackers",
        "push_to",
        "push_private",
    },
}
# Another length is another run, unless the past would have been the same.
_LENGTH = {"optim.epochs", "optim.steps"}

# Of the data's fingerprints, those that decide what is learned.
_LEARNED = ("train", "val", "classes")


def begin(
    run: RunDir,
    job: Job,
    *,
    precision: str,
    num_processes: int,
    resume: bool,
    notice: Callable[[str], None],
) -> int | None:
    """Start the run's record, or check that the recorded run is this one.

    Args:
        run: opened.
        job: what is to be trained.
        precision: "fp32", "bf16" or "fp16", as chosen for this machine.
        num_processes: of this launch.
        resume: whether the user asked to go on.
        notice: told of each damaged checkpoint.
    Returns: the step to continue from; None if the run is already done.
    Raises: SetupError if there is a run already and `resume` is False; RecipeError or DataError if
        it is another one; CheckpointError if no checkpoint is intact.
    """
    record = run.read_json("run.json") or {}
    fingerprints = job.fingerprints()
    is_done = record.get("status") == "done" and run.read_json("results.json") is not None
    if not run.steps() and not is_done:
        start = 0  # nothing was learned yet: whatever stands here may be begun anew
        record = {"started": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    elif not resume:
        raise SetupError(
            f"{run.path}: holds a run already ({record.get('status', 'unknown')}); continue it "
            "with --resume, or choose another --out"
        )
    elif not record:
        raise CheckpointError(
            f"{run.path / 'run.json'}: is missing, so nothing tells what data the run began with; "
            "restore it from a copy, or train in another --out"
        )
    else:
        _check_same(run, job, record, precision=precision, fingerprints=fingerprints)
        if is_done and run.has_model() and job.steps == _steps_before(record, job):
            return None
        start = run.newest(notice) or 0
        if (before := _steps_before(record, job)) != job.steps:
            notice(f"{run.path}: {job.steps} steps instead of {before}, the same up to {start}")
    # What lies beyond the start is damaged: left there, it would be taken for the newest.
    run.prune({step for step in run.steps() if step <= start})
    run.forget_after(start)
    write_atomically(run.path / "recipe.yaml", job.recipe.to_yaml())
    facts = {
        **describe_machine(job.device, num_processes),
        "precision": precision,
        "data_fingerprint": _joined(fingerprints),
        "split_fingerprints": fingerprints,
        "weights_sha256": job.built.provenance.get("sha256"),
    }
    run.write_json("run.json", {**record, "status": "running", **facts})
    return start


def recipe_of(model: str | Path) -> Recipe | None:
    """The recipe of a run directory; None for a model folder or a name on the hub."""
    is_run = all(os.path.isfile(os.path.join(model, name)) for name in ("run.json", "recipe.yaml"))
    return load_recipe(Path(model) / "recipe.yaml") if is_run else None


def pipeline_of(model: str | Path, preprocessing: Preprocessing) -> Pipeline:
    """How a model is evaluated: a run directory as its recipe says, others as their weights do."""
    recipe = recipe_of(model)
    if recipe is None:
        return make_pipeline(preprocessing)
    return make_pipeline(preprocessing, recipe.data.eval, decode_size=recipe.data.decode_size)


def finished(folder: Path, recipe: Recipe) -> dict[str, Any] | None:
    """The content of results.json if a run of this recipe is done there; else None."""
    old, run = recipe_of(folder), RunDir(folder)
    if old is None or learned(old) != learned(recipe):
        return None
    done = (run.read_json("run.json") or {}).get("status") == "done"
    return run.read_json("results.json") if done else None


def learned(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """The keys of a recipe that decide what is learned, by section."""
    sections = recipe.model_dump(include={"model", "data", "optim", "run"})
    return {
        section: {key: v for key, v in keys.items() if key not in _FREE_KEYS.get(section, ())}
        for section, keys in sections.items()
    }


def but_the_seed(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """`learned` without the seed: equal for the runs that are repetitions of one another."""
    keys = learned(recipe)
    return {**keys, "run": {key: value for key, value in keys["run"].items() if key != "seed"}}


def _check_same(
    run: RunDir,
    job: Job,
    record: dict[str, Any],
    *,
    precision: str,
    fingerprints: dict[str, str],
) -> None:
    """Refuse to continue a run whose recipe or data is another one, and show the difference."""
    old, new = learned(load_recipe(run.path / "recipe.yaml")), learned(job.recipe)
    differences = {
        f"{section}.{key}": f"the run has {old[section][key]!r}, now {new[section][key]!r}"
        for section in new
        for key in new[section]
        if old[section][key] != new[section][key]
    }
    if differences and not (set(differences) <= _LENGTH and _same_past(run, job, record)):
        shown = "; ".join(f"{key}: {values}" for key, values in differences.items())
        raise RecipeError(
            f"{run.path}: cannot continue with another recipe ({shown}); "
            "restore the key, or choose another --out"
        )
    if record.get("precision", precision) != precision:
        raise RecipeError(
            f"{run.path}: began in {record['precision']}, and run.precision: auto means "
            f"{precision} on this machine; continue where it began, or choose another --out"
        )
    # What was learned came from these; a test split may be mended before it is read.
    recorded = record.get("split_fingerprints", {})
    if any(recorded.get(name) != fingerprints.get(name) for name in _LEARNED):
        raise DataError(
            f"{job.recipe.data.source}: the data is not what the run in {run.path} began with (an "
            "image, label or class was added, removed or changed); restore it, or choose another "
            "--out"
        )


def _same_past(run: RunDir, job: Job, record: dict[str, Any]) -> bool:
    """Whether a run of another length would have learned the same up to the last checkpoint.

    So it is with a constant learning rate, and during a warm-up.
    """
    before, done = _steps_before(record, job), max(run.steps(), default=0)
    return done <= job.steps and all(
        job.lr(step) == job.lr(step, steps=before) for step in range(done)
    )


def _steps_before(record: dict[str, Any], job: Job) -> int:
    """The length of the recorded run, in optimiser steps."""
    return int(record.get("plan", {}).get("steps", job.steps))


def _joined(fingerprints: dict[str, str]) -> str:
    """One sha256 for the whole data set."""
    return hashlib.sha256("".join(fingerprints.values()).encode()).hexdigest()


def note_plan(run: RunDir, job: Job, *, start: int) -> None:
    """Write what the run will do, once it is known how many images can be read.

    Raises: DataError if a resumed run reads another number of images than before.
    """
    record = run.read_json("run.json") or {}
    plan = job.plan()
    before = record.get("plan", plan).get("images_read", plan["images_read"])
    if start and before != plan["images_read"]:
        raise DataError(
            f"{job.recipe.data.source}: {before} training images could be read when the run began, "
            f"{plan['images_read']} can now; see: finetune data scan"
        )
    run.write_json("run.json", {**record, "plan": plan})


@contextlib.contextmanager
def status_kept(run: RunDir, *, main: bool) -> Iterator[None]:
    """Keep `status` in run.json true, whatever ends the run."""

    def write(status: str) -> None:
        if main and (record := run.read_json("run.json")) is not None:
            run.write_json("run.json", {**record, "status": status})

    try:
        yield
    except BaseException as error:
        code = getattr(error, "exit_code", 1)
        kind = "stopped" if isinstance(error, Interrupted) else "failed"
        # a full disk, a damaged record: what ended the run is to be told
        with contextlib.suppress(SetupError, CheckpointError):
            write(f"{kind} ({code})")
        raise
    write("done")
