"""The loop of a search: trains trials as `successive_halving.py` decides, and records each step.

`tune.json` records every decision before it is carried out, with all measurements that it rests on.
A killed search reads it and resumes the interrupted run.

Optuna does not fit: a trial that it has pruned cannot continue.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from finetune.commands.successive_halving import (
    RUNG_NAMES,
    Decision,
    Point,
    Search,
    Trial,
    best_trial,
    decide,
    fits_in_time,
)
from finetune.errors import (
    DataError,
    DivergedError,
    Interrupted,
    Paused,
    RecipeError,
    SetupError,
    WeightsError,
    is_out_of_memory,
)
from finetune.files import remove_path
from finetune.formatting import format_duration
from finetune.log import logger, only_warnings, warn_once
from finetune.model_checksums import json_sha256
from finetune.recipe.load import parse_recipe
from finetune.recipe.schema import Recipe
from finetune.run.directory import SEARCH_FILE, RunDir, resume_command
from finetune.run.record import read_record
from finetune.run.schema import RunRecord
from finetune.training.train import train

__all__ = [
    "DATA_INPUT",
    "SAVE_INTERVAL_SECONDS",
    "SHARD_TIMES_INPUT",
    "TRIAL_OVERRIDES",
    "Progress",
    "SearchSession",
    "data_sha256",
    "read_inputs",
    "remove_weights",
    "run_search",
    "train_until",
]

# Keys of the run itself, not of its trials.
TRIAL_OVERRIDES = (
    *("run.push_to=null", "run.push_private=false", "run.trackers=[]"),
    "run.keep_checkpoints=1",
)
DATA_INPUT, SHARD_TIMES_INPUT = "images or labels", "times of the shards"  # names of inputs
_SPLIT = "the images of the splits with data.split_seed="
SAVE_INTERVAL_SECONDS = 1.0  # between two records of the time used
_TYPICAL_START_SECONDS = 20.0  # of a run, before its first step


@dataclass
class Progress:
    """What a run has reached: all its steps, its validation images, and its evaluations."""

    num_steps: int
    num_images: int
    curve: list[Point]
    train_seconds: float  # of all steps so far, without evaluations
    inputs: dict[str, str]  # see `read_inputs`


TrainUntil = Callable[[Recipe, Path, Callable[[int, int], bool]], Progress]


def train_until(recipe: Recipe, folder: Path, pause: Callable[[int, int], bool]) -> Progress:
    """Start or continue a run until `pause` returns True, see `training.train`."""
    with contextlib.suppress(Paused):
        train(recipe, folder, resume=True, keep_process_group=True, pause=pause)
    gc.collect()  # the memory of the network, before the next one is built
    run = RunDir(folder)
    record = read_record(run)
    plan = record["plan"]
    metric = "map" if recipe.data.task == "multilabel" else "top1"
    lines = [line for line in run.read_metrics() if line["split"] == "val"]
    curve = [Point(line["step"], line.get(metric) or 0.0, line["loss"]) for line in lines]
    train_seconds = lines[-1]["seconds"] if lines else 0.0
    inputs = read_inputs(recipe, record)
    return Progress(plan["steps"], plan["images"]["val"], curve, train_seconds, inputs)


def data_sha256(whole_fingerprints: Mapping[str, str], classes: str | None) -> str:
    """Return a hash of the images and labels of all splits, and of the classes."""
    return json_sha256({**whole_fingerprints, "classes": classes})


def read_inputs(recipe: Recipe, record: RunRecord) -> dict[str, str]:
    """Return a hash of everything that a run was trained on, by its name for users."""
    classes = record["split_fingerprints"].get("classes")
    inputs = {DATA_INPUT: data_sha256(record["whole_fingerprints"], classes)}
    weights = {key: record["plan"]["weights"].get(key) for key in ("sha256", "config_sha256")}
    inputs[f"the pretrained weights {recipe.model.name}"] = json_sha256(weights)
    if recipe.distill and (teacher := record.get("teacher")):
        weights = {key: teacher.get(key) for key in ("sha256", "config_sha256")}
        inputs[f"the weights of the teacher {recipe.distill.teacher}"] = json_sha256(weights)
    # With data.unreadable=quarantine, another machine may read other images of the same split; and
    # without images that data.decisions has dropped, another split is drawn.
    split = [record["plan"].get(key) for key in ("images_read", "val_images_read")]
    split.append(record["split_fingerprints"].get("val"))
    inputs[f"{_SPLIT}{recipe.data.split_seed}"] = str(split)
    if times := record.get("shard_times"):
        inputs[SHARD_TIMES_INPUT] = json_sha256(times)
    return inputs


def run_search(
    search: Search,
    folder: Path,
    *,
    source_overrides: Sequence[str] = (),
    on_ray: bool = False,
    clock: Callable[[], float] = time.perf_counter,
    train_until: TrainUntil = train_until,
) -> Trial:
    """Carry out the decisions of a search until its time is used, and choose a trial.

    Args:
        search: a new search, or one that was stopped.
        folder: the run directory; the trials are in `trials`.
        source_overrides: overrides of `data.source` if the recorded one lacks a secret.
        on_ray: True to train trials at the same time, see `ray_trials.py`.
        clock: seconds, from any start.
        train_until: trains a run.
    Returns: the chosen trial.
    Raises: the error of the first trial if all of them fail; SetupError or DataError if the disk is
        full or images have changed, or another process uses the folder; Interrupted after a signal.
    """
    with contextlib.closing(RunDir(folder)) as run:
        run.open()
        session = SearchSession(
            search, run, source_overrides, time.time if on_ray else clock, train_until
        )
        try:
            session.save()
            if not search.chosen:
                session.train_all(on_ray=on_ray)
        except (Interrupted, KeyboardInterrupt) as error:
            session.save()
            used = format_duration(search.used_seconds)
            raise Interrupted(
                f"{folder}: the search was stopped after {used} of {search.minutes:g} min; "
                f"continue: {resume_command(folder)}{' --on ray' * on_ray}",
                getattr(error, "signal_number", signal.SIGINT),
            ) from None
        chosen = search[search.chosen] if search.chosen else best_trial(search)
        if chosen is None and session.errors:
            raise session.errors[0]
        if chosen is None:
            raise SetupError(
                f"{folder}: all trials have failed; see {SEARCH_FILE}, and search in another --out",
                code="setup.search_failed",
            )
        search.chosen = chosen.name
        for trial in search.finished:
            trial.end_reason = trial.end_reason or "trained to its end"
        session.save()
        for trial in search.trials:
            if trial is not chosen:
                remove_weights(folder / "trials" / trial.name)
    return chosen


def remove_weights(folder: Path) -> None:
    """Remove everything large of a run that will not continue."""
    if folder.is_dir():
        RunDir(folder).prune_checkpoints(set())
        for name in ("stages", "model"):
            if (folder / name).exists():
                remove_path(folder / name)


@dataclass
class SearchSession:
    """State of a search in this process: its clock, tune.json, and the errors of failed trials.

    See `run_search` for the fields.
    """

    search: Search
    run: RunDir
    source_overrides: Sequence[str]
    clock: Callable[[], float]
    train_until: TrainUntil
    writes_record: bool = True  # False for a worker, which trains one trial for another process
    errors: list[Exception] = field(default_factory=list)  # of trials that failed
    warnings: set[str] = field(default_factory=set)  # that were logged

    def __post_init__(self) -> None:
        self.clock_at_start = self.clock() - self.search.used_seconds

    def save(self) -> None:
        """Write tune.json, with the time used so far."""
        self.update_time()
        if not self.writes_record:
            return
        content = asdict(self.search)
        self.run.write_json(SEARCH_FILE, {**content, "checksum": json_sha256(content)})

    def update_time(self) -> None:
        """Update the time used."""
        self.search.used_seconds = self.clock() - self.clock_at_start

    def _trial_folder(self, trial: Trial) -> Path:
        return self.run.path / "trials" / trial.name

    def next_decision(self) -> Decision | None:
        """Decide what to train next, and record it."""
        self.update_time()
        decision = decide(self.search)
        for trial in self.search.trials:
            if trial.end_reason or (trial.repeat_of and trial.is_finished):
                remove_weights(self._trial_folder(trial))
        if decision is not None:
            self.search.decisions.append(decision)
        self.save()
        return decision

    def train_all(self, *, on_ray: bool) -> None:
        """Carry out what another process has left, then what is decided until the time is used."""
        if on_ray:
            from finetune.commands.ray_trials import train_on_ray

            train_on_ray(self)
            return
        for left in [decision for decision in self.search.decisions if not decision.done]:
            self.execute(left, is_resumed=not left.on_ray)
        while (decision := self.next_decision()) is not None:
            self.execute(decision)

    def execute(self, decision: Decision, *, is_resumed: bool = False) -> None:
        """Train a trial as decided, and record what was measured; see `train_trial`."""
        self.log_progress(decision)
        self.train_trial(decision, is_resumed=is_resumed)
        self._end(decision)

    def record_result(self, decision: Decision, trial: Trial, errors: Sequence[Exception]) -> None:
        """Record a trial that another process has trained as decided."""
        self._check_same_inputs(trial, trial.inputs)
        names = [each.name for each in self.search.trials]
        self.search.trials[names.index(trial.name)] = trial
        self.errors += errors
        self._end(decision)

    def _end(self, decision: Decision) -> None:
        trial = self.search[decision.trial]
        if trial.end_reason.startswith("failed"):
            logger.warning(f"{trial.name} {trial.end_reason}")
        decision.done = True
        self.save()

    def train_trial(self, decision: Decision, *, is_resumed: bool = False) -> None:
        """Train a trial as decided.

        Args:
            decision: the decision.
            is_resumed: True if another process was killed while it carried it out. Its time counts,
                the start of this process does not.
        """
        self.update_time()
        search, trial = self.search, self.search[decision.trial]
        first_step, saved_seconds = trial.step, search.used_seconds
        started = decision.used_seconds if is_resumed else search.used_seconds
        times: list[tuple[int, float]] = []  # step and time used, at each evaluation

        def pause(step: int, num_steps: int) -> bool:
            nonlocal saved_seconds
            if is_resumed and not times:
                # Count the steps that are not in the record, but not the start of this process.
                lost_steps = max(0, step - trial.last_step)
                used_seconds = search.used_seconds + lost_steps * trial.step_seconds
                self.clock_at_start = self.clock() - used_seconds
            self.update_time()
            times.append((step, search.used_seconds))
            if search.used_seconds >= saved_seconds + SAVE_INTERVAL_SECONDS:
                trial.last_step, saved_seconds = step, search.used_seconds
                self.save()
            if step >= decision.until * num_steps:
                return True
            step_seconds = _step_seconds(times) or trial.step_seconds
            if not step_seconds:  # the first evaluation, after the start of the run
                seconds = search.used_seconds - started - _TYPICAL_START_SECONDS
                step_seconds = max(0.0, seconds / step)
            rest = (num_steps - step) * step_seconds
            return not (decision.must_finish or fits_in_time(search, trial, rest, is_running=True))

        overrides = (*self.source_overrides, *TRIAL_OVERRIDES)
        recipe = parse_recipe(trial.recipe, name=trial.name, overrides=overrides)
        was_started = (self._trial_folder(trial) / "run.json").is_file()
        try:
            with only_warnings(self.warnings):
                reached = self.train_until(recipe, self._trial_folder(trial), pause)
        except (DivergedError, RecipeError, WeightsError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not is_out_of_memory(error):
                raise
            if (first_step or was_started) and isinstance(error, (RecipeError, WeightsError)):
                raise  # it could start, so something else has changed since
            self.errors.append(error)
            trial.end_reason = f"failed: {str(error).splitlines()[0]}"
        else:
            self._check_same_inputs(trial, reached.inputs)
            trial.inputs = reached.inputs
            trial.curve += [point for point in reached.curve if point.step > first_step]
            trial.num_steps = reached.num_steps
            trial.num_images, trial.last_step = reached.num_images, trial.step
            if trial.step > first_step:
                measured = _step_seconds(times) or trial.step_seconds
                trial.step_seconds = measured or reached.train_seconds / trial.step
        self.update_time()
        seconds = search.used_seconds - started
        trial.seconds += seconds
        if not first_step:
            trial.start_seconds = max(0.0, seconds - trial.step * trial.step_seconds)

    def _check_same_inputs(self, trial: Trial, inputs: Mapping[str, str]) -> None:
        """Raise DataError or WeightsError unless all trials have the same images and weights."""
        earlier = [(f"trial {other.name}", other.inputs) for other in self.search.trials]
        for what, recorded in [("the start of the search", self.search.inputs), *earlier]:
            changed = [name for name in inputs if recorded.get(name, inputs[name]) != inputs[name]]
            if changed == [SHARD_TIMES_INPUT]:
                warn_once(
                    f"{self.search.source}: shards were written or copied after {what}; their "
                    "images were not compared"
                )
            elif changed:
                is_data = changed[0].startswith((DATA_INPUT, _SPLIT))
                raise (DataError if is_data else WeightsError)(
                    f"{self.search.source}: {changed[0]} have changed since {what}, so "
                    f"{trial.name} cannot be compared with it; restore them, remove "
                    f"{self._trial_folder(trial)}, then {resume_command(self.run.path)}, or "
                    "search in another --out",
                    code="data.changed" if is_data else "weights.wrong_version",
                )

    def log_progress(self, decision: Decision) -> None:
        """Log the time left, the best trial so far, and the one that starts."""
        search, trial = self.search, self.search[decision.trial]
        started = sum(bool(each.curve) for each in search.candidates if each is not trial)
        text = f"{format_duration(max(search.remaining_seconds, 0))} left, "
        text += f"{started} of {len(search.candidates)} configurations tried"
        if (best := best_trial(search)) is not None:
            text += f", best so far {best.name} ({search.format_value(best.curve[-1].value)})"
        until = RUNG_NAMES[decision.until]
        logger.info(f"{text}: {trial.name} to {until}, {decision.reason} ({trial.description})")


def _step_seconds(times: Sequence[tuple[int, float]]) -> float | None:
    """Return the seconds of a step between the first and the last evaluation; None without two."""
    if len(times) < 2:
        return None
    (first_step, since), (last_step, until) = times[0], times[-1]
    return (until - since) / (last_step - first_step)
