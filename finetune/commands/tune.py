"""`finetune train SOURCE --minutes N`, `finetune tune RECIPE`: the best recipe in N minutes.

The configurations of `portfolio.py` or `search_space.py` are ordinary runs in `trials/`, which
`successive_halving.py` pauses and continues from their exact checkpoints (freeze-thaw). The chosen
one becomes the run of the folder: it is continued, not retrained, and it alone evaluates the test
split.

`tune.json` records every decision before it is carried out, with all measurements that it rests on.
A search that was killed reads it, and continues in the middle of a run.

Optuna's pruners would not be shorter: a trial that they have pruned cannot continue.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from finetune.commands.estimate import TRIAL_SECONDS, measure_recipe
from finetune.commands.portfolio import build_trials
from finetune.commands.search_space import draw_trials
from finetune.commands.start import StartResult, open_new_run, start, write_start_files
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
from finetune.data.from_recipe import open_full_data
from finetune.errors import (
    CheckpointError,
    DataError,
    DivergedError,
    Interrupted,
    Paused,
    RecipeError,
    SetupError,
    WeightsError,
    is_out_of_memory,
    redact_urls,
)
from finetune.files import remove_path
from finetune.formatting import format_duration, pluralize
from finetune.log import logger, only_warnings, warn_once
from finetune.model_checksums import json_sha256
from finetune.recipe.load import parse_overrides, parse_recipe
from finetune.recipe.paths import resolve_data_source
from finetune.recipe.schema import Recipe
from finetune.recipe.training_keys import LOCATION_KEYS, changed_training_keys
from finetune.report.search_page import write_search_page
from finetune.run.directory import SEARCH_FILE, RunDir, resume_command
from finetune.run.integrity import load_json
from finetune.run.record import read_record
from finetune.run.schema import RunRecord
from finetune.training.train import train

__all__ = [
    "Progress",
    "read_search",
    "run_search",
    "train_until",
    "tune",
    "tune_recipe",
    "tune_source",
]

_SAVE_SECONDS = 1.0  # between two records of the time used
_TYPICAL_START_SECONDS = 20.0  # of a run, before its first step
_MEASURED_SHARE = 0.1  # of the time, to measure the steps of a recipe
# Keys of the run itself, not of its trials.
_TRIAL_OVERRIDES = (
    *("run.push_to=null", "run.push_private=false", "run.trackers=[]"),
    "run.keep_checkpoints=1",
)
_DATA, _SHARD_TIMES = "images or labels", "times of the shards"  # names of inputs
_READABLE = "the readable images with data.split_seed="
_SEARCH = TypeAdapter(Search)


# The commands -------------------------------------------------------------------------------------


def tune_source(
    source: str | None,
    out: Path,
    *,
    minutes: float | None,
    overrides: Sequence[str] = (),
    resume: bool = False,
    download: bool = False,
    seconds_before: float = 0.0,
) -> dict[str, Any]:
    """Find the best recipe for a source of images in some minutes, and train it.

    Args:
        source: a folder, or a source string as in `data.source`; None to continue the search in
            `out`.
        out: path of the run directory.
        minutes: time that the whole command may take; None for that of the search in `out`.
        overrides: overrides by the user; they are the same in all trials.
        resume: True to continue the search in `out`, if there is one.
        download: True to download better weights and to compare them too.
        seconds_before: seconds that the command has taken before this call.
    Returns: the content of results.json.
    Raises: RecipeError if the time is too short, or the search in `out` is another one.
    """
    started = time.perf_counter() - seconds_before
    if source is None:  # the address with its password or signature, to continue a search
        source = parse_overrides(overrides).get("data.source")
        overrides = [each for each in overrides if not each.startswith("data.source=")]
    source = source and resolve_data_source(source)
    search = _open_search(out, resume=resume, minutes=minutes, overrides=overrides, source=source)
    if search is None:
        assert source is not None, "there is a search to continue"
        assert minutes is not None, "there is a search to continue"
        created = start(source, overrides=overrides, download=download)
        used = time.perf_counter() - started
        search = _make_search(created, minutes=minutes, overrides=overrides, used_seconds=used)
        write_start_files(created, out)
    return tune(search, out, source_overrides=_secret_override(source))


def tune_recipe(
    recipe: Recipe,
    out: Path,
    *,
    minutes: float,
    overrides: Sequence[str] = (),
    resume: bool = False,
    seconds_before: float = 0.0,
) -> dict[str, Any]:
    """Find the best values of the keys in a recipe's section `tune`, and train them.

    Args:
        recipe: the recipe, with the overrides.

    The other arguments, the result and the errors are those of `tune_source`.
    """
    started = time.perf_counter() - seconds_before
    search = _open_search(out, resume=resume, minutes=minutes, overrides=overrides, recipe=recipe)
    if search is None:
        source = open_full_data(recipe.data, recipe.run.seed)
        has_val = "val" in source.splits and not recipe.data.merge_val
        _require_validation(has_val or recipe.data.val_fraction > 0)
        logger.info("measuring some steps of the recipe")
        seconds = min(TRIAL_SECONDS, _MEASURED_SHARE * 60 * minutes)
        with only_warnings():
            measured, _ = measure_recipe(recipe, lambda: None, seconds=seconds)
        gc.collect()  # the memory of the network
        search = Search(
            redact_urls(recipe.data.source),
            list(map(redact_urls, overrides)),
            minutes,
            "map" if recipe.data.task == "multilabel" else "top1",
            measured["num_images"],
            can_resplit=not has_val,
            trials=draw_trials(recipe, measured),
            space=recipe.tune,
            inputs={_DATA: _data_sha256(source.whole_fingerprints(), source.classes_fingerprint)},
        )
        search.used_seconds = time.perf_counter() - started
        _check_time(search)
    return tune(search, out, source_overrides=_secret_override(recipe.data.source))


def tune(search: Search, out: Path, *, source_overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Carry out a search, and make the chosen trial the run of a folder.

    Args:
        search: a new search, or one that was stopped.
        out: path of the run directory.
        source_overrides: see `run_search`.
    Returns: the content of results.json.
    """
    chosen = run_search(search, out, source_overrides=source_overrides)
    folder = out / "trials" / chosen.name
    value = search.format_value(chosen.curve[-1].value)
    logger.info(
        f"chosen after {format_duration(search.used_seconds)}: {chosen.name} "
        f"({chosen.description}), {value} on {pluralize(chosen.num_images, 'validation image')}"
    )
    write_search_page(out, asdict(search))
    recipe = parse_recipe(chosen.recipe, name=chosen.name, overrides=source_overrides)
    # the run adds the seconds of its steps, which are a part of the search
    trained_seconds = sum(line["seconds"] for line in RunDir(folder).read_metrics()[-1:])
    results = train(
        recipe,
        out,
        resume=True,
        branch_from=folder,
        seconds_before=search.used_seconds - trained_seconds,
    )
    _remove_weights(folder)
    return results


def _secret_override(source: str | None) -> list[str]:
    """Return an override of `data.source` if the recorded one lacks its password or signature."""
    if source is None or redact_urls(source) == source:
        return []
    return [f"data.source={json.dumps(source)}"]


def _open_search(
    out: Path,
    *,
    resume: bool,
    minutes: float | None,
    overrides: Sequence[str],
    source: str | None = None,
    recipe: Recipe | None = None,
) -> Search | None:
    """Return the search to continue; None to start one.

    Raises: RecipeError if the user asks for another search than the one in the folder; SetupError
        if there is a run, and it shall not be continued.
    """
    if not resume or not (out / SEARCH_FILE).is_file():
        if out.exists():
            with open_new_run(out):  # fail now, not after minutes of trials
                pass
        return None
    search = read_search(out)
    redacted = list(map(redact_urls, overrides))
    own_source = parse_recipe(search.trials[0].recipe, name=SEARCH_FILE).data.source
    if source is not None and not _is_same_source(redact_urls(source), own_source):
        difference = f"{redact_urls(source)}: the search in {out} has {own_source}"
    elif minutes not in (None, search.minutes):
        difference = f"--minutes {minutes:g}: the search in {out} has {search.minutes:g} minutes"
    elif overrides and redacted != search.overrides:
        difference = (
            f"{' '.join(redacted)}: the search in {out} was started with "
            f"{' '.join(search.overrides) or 'no overrides'}"
        )
    elif recipe and (recipe.tune, recipe.to_yaml()) != (search.space, search.trials[0].recipe):
        difference = (
            f"the search in {out} has another recipe, or other values in its section `tune`"
        )
    else:
        _check_trial_folders(search, out)
        return search
    raise RecipeError(
        f"{difference}; continue it: {resume_command(out)}, or search in another --out",
        code="recipe.not_this_run",
    )


def _is_same_source(first: str, second: str) -> bool:
    """Return whether two sources are equal; local paths may be written in different ways."""
    (kind, _, path), (other_kind, _, other_path) = first.partition(":"), second.partition(":")
    is_same_path = Path(path).resolve() == Path(other_path).resolve()
    return first == second or (kind == other_kind and is_same_path)


def _check_trial_folders(search: Search, out: Path) -> None:
    """Raise CheckpointError unless the trials that may continue are those of tune.json."""
    for trial in search.trials:
        if not trial.curve or (trial.end_reason and trial.name != search.chosen):
            continue
        folder = out / "trials" / trial.name
        record = read_record(RunDir(folder))
        if not record:
            problem = "is missing, so the search cannot continue"
        else:
            recipe = parse_recipe(trial.recipe, name=trial.name, overrides=_TRIAL_OVERRIDES)
            changed = set(changed_training_keys(record.get("training_keys", {}), recipe))
            changed -= set(LOCATION_KEYS)
            inputs = _read_inputs(recipe, record)
            changed |= {name for name in inputs if inputs[name] != trial.inputs.get(name)}
            changed -= {_SHARD_TIMES}  # they are newer in the folder after a kill
            problem = f"differs from {SEARCH_FILE} ({', '.join(sorted(changed))})" * bool(changed)
        if problem:
            raise CheckpointError(
                f"{folder}: {problem}; restore it and {SEARCH_FILE} from a copy, or search in "
                "another --out",
                code="checkpoint.damaged",
            )


def _make_search(
    created: StartResult, *, minutes: float, overrides: Sequence[str], used_seconds: float
) -> Search:
    """Make a search from the recipe that `finetune train SOURCE` trains.

    Raises: RecipeError if there are no validation images, or the time is too short for a recipe.
    """
    builder = created.builder
    _require_validation(builder.has_validation())
    search = Search(
        redact_urls(builder.source.name),
        list(map(redact_urls, overrides)),
        minutes,
        "map" if created.recipe.data.task == "multilabel" else "top1",
        builder.stats.num_train,
        can_resplit="val" not in builder.stats.split_sizes,
        trials=build_trials(created, max_seconds=60 * minutes / 2),
        used_seconds=used_seconds,
        inputs={
            _DATA: _data_sha256(
                builder.source.whole_fingerprints(), builder.source.classes_fingerprint
            )
        },
    )
    _check_time(search)
    return search


def _require_validation(has_validation: bool) -> None:
    if not has_validation:
        raise RecipeError(
            "--minutes: data.val_fraction=0 leaves no validation images to choose by; remove it",
            code="recipe.conflict",
        )


def _check_time(search: Search) -> None:
    """Raise RecipeError if the time is too short for the fastest recipe."""
    fastest = min(search.trials, key=lambda trial: trial.estimated_seconds)
    seconds = fastest.estimated_seconds + fastest.final_seconds
    if seconds > search.remaining_seconds:
        raise RecipeError(
            f"--minutes {search.minutes:g}: too short for these images here: "
            f"{format_duration(search.used_seconds)} are used, and the fastest recipe takes about "
            f"{format_duration(seconds)}; give at least --minutes "
            f"{math.ceil(1.1 * (search.used_seconds + seconds) / 60)}, or train without a search",
            code="recipe.wrong_value",
        )


def read_search(folder: Path) -> Search:
    """Read the search of a folder. Raises: CheckpointError if its record is damaged."""
    path = folder / SEARCH_FILE
    try:
        content = load_json(path)
        search = _SEARCH.validate_python(content)
        if content.pop("checksum", None) != json_sha256(content):
            raise ValueError("it was changed after it was written")
        names = {*(decision.trial for decision in search.decisions), search.chosen} - {""}
        if unknown := names - {trial.name for trial in search.trials}:
            raise ValueError(f"no trial {min(unknown)!r}")
        return search
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: cannot be read, or is not the record of a search "
            f"({str(error).splitlines()[0]}); restore it from a copy, or search in another --out",
            code="checkpoint.damaged",
        ) from error


# The loop -----------------------------------------------------------------------------------------


@dataclass
class Progress:
    """What a run has reached: all its steps, its validation images, and its evaluations."""

    num_steps: int
    num_images: int
    curve: list[Point]
    train_seconds: float  # of all steps so far, without evaluations
    inputs: dict[str, str]  # see `_read_inputs`


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
    inputs = _read_inputs(recipe, record)
    return Progress(plan["steps"], plan["images"]["val"], curve, train_seconds, inputs)


def _data_sha256(whole_fingerprints: Mapping[str, str], classes: str | None) -> str:
    return json_sha256({**whole_fingerprints, "classes": classes})


def _read_inputs(recipe: Recipe, record: RunRecord) -> dict[str, str]:
    """Return a hash of everything that a run was trained on, by its name for users."""
    classes = record["split_fingerprints"].get("classes")
    inputs = {_DATA: _data_sha256(record["whole_fingerprints"], classes)}
    weights = {key: record["plan"]["weights"].get(key) for key in ("sha256", "config_sha256")}
    inputs[f"the pretrained weights {recipe.model.name}"] = json_sha256(weights)
    if recipe.distill and (teacher := record.get("teacher")):
        weights = {key: teacher.get(key) for key in ("sha256", "config_sha256")}
        inputs[f"the weights of the teacher {recipe.distill.teacher}"] = json_sha256(weights)
    # with data.unreadable=quarantine, another machine may read other images of the same split
    readable = [record["plan"].get(key) for key in ("images_read", "val_images_read")]
    inputs[f"{_READABLE}{recipe.data.split_seed}"] = str(readable)
    if times := record.get("shard_times"):
        inputs[_SHARD_TIMES] = json_sha256(times)
    return inputs


def run_search(
    search: Search,
    folder: Path,
    *,
    source_overrides: Sequence[str] = (),
    clock: Callable[[], float] = time.perf_counter,
    train_until: TrainUntil = train_until,
) -> Trial:
    """Carry out the decisions of a search until its time is used, and choose a trial.

    Args:
        search: a new search, or one that was stopped.
        folder: the run directory; the trials are in `trials`.
        source_overrides: overrides of `data.source` if the recorded one lacks a secret.
        clock: seconds, from any start.
        train_until: trains a run.
    Returns: the chosen trial.
    Raises: the error of the first trial if all of them fail; SetupError or DataError if the disk is
        full or images have changed, or another process uses the folder; Interrupted after a signal.
    """
    with contextlib.closing(RunDir(folder)) as run:
        run.open()
        session = _Session(search, run, source_overrides, clock, train_until)
        try:
            session.save()
            if search.decisions and not search.decisions[-1].done:
                session.execute(search.decisions[-1], is_resumed=True)
            while not search.chosen and (decision := session.next_decision()) is not None:
                session.execute(decision)
        except (Interrupted, KeyboardInterrupt) as error:
            session.save()
            used = format_duration(search.used_seconds)
            raise Interrupted(
                f"{folder}: the search was stopped after {used} of {search.minutes:g} min; "
                f"continue: {resume_command(folder)}",
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
                _remove_weights(folder / "trials" / trial.name)
    return chosen


def _remove_weights(folder: Path) -> None:
    """Remove everything large of a run that will not continue."""
    if folder.is_dir():
        RunDir(folder).prune_checkpoints(set())
        for name in ("stages", "model"):
            if (folder / name).exists():
                remove_path(folder / name)


@dataclass
class _Session:
    """The part of a search in one process; see `run_search` for its fields."""

    search: Search
    run: RunDir
    source_overrides: Sequence[str]
    clock: Callable[[], float]
    train_until: TrainUntil
    errors: list[Exception] = field(default_factory=list)  # of trials that failed
    warnings: set[str] = field(default_factory=set)  # that were logged

    def __post_init__(self) -> None:
        self.clock_at_start = self.clock() - self.search.used_seconds

    def save(self) -> None:
        """Write tune.json, with the time used so far."""
        self._update_time()
        content = asdict(self.search)
        self.run.write_json(SEARCH_FILE, {**content, "checksum": json_sha256(content)})

    def _update_time(self) -> None:
        self.search.used_seconds = self.clock() - self.clock_at_start

    def _trial_folder(self, trial: Trial) -> Path:
        return self.run.path / "trials" / trial.name

    def next_decision(self) -> Decision | None:
        """Decide what to train next, and record it."""
        self._update_time()
        decision = decide(self.search)
        for trial in self.search.trials:
            if trial.end_reason or (trial.repeat_of and trial.is_finished):
                _remove_weights(self._trial_folder(trial))
        if decision is not None:
            self.search.decisions.append(decision)
        self.save()
        return decision

    def execute(self, decision: Decision, *, is_resumed: bool = False) -> None:
        """Train a trial as decided, and record what was measured.

        Args:
            decision: the decision.
            is_resumed: True if another process was killed while it carried it out.
        """
        search, trial = self.search, self.search[decision.trial]
        first_step, saved_seconds = trial.step, search.used_seconds
        times: list[tuple[int, float]] = []  # step and time used, at each evaluation
        logger.info(self._format_progress(decision))

        def pause(step: int, num_steps: int) -> bool:
            nonlocal saved_seconds
            if is_resumed and not times:
                # Count the steps that are not in the record, but not the start of this process.
                lost_steps = max(0, step - trial.last_step)
                used_seconds = search.used_seconds + lost_steps * trial.step_seconds
                self.clock_at_start = self.clock() - used_seconds
            self._update_time()
            times.append((step, search.used_seconds))
            if search.used_seconds >= saved_seconds + _SAVE_SECONDS:
                trial.last_step, saved_seconds = step, search.used_seconds
                self.save()
            if step >= decision.until * num_steps:
                return True
            step_seconds = _step_seconds(times) or trial.step_seconds
            if not step_seconds:  # the first evaluation, after the start of the run
                seconds = search.used_seconds - decision.used_seconds - _TYPICAL_START_SECONDS
                step_seconds = max(0.0, seconds / step)
            rest = (num_steps - step) * step_seconds
            return not (decision.must_finish or fits_in_time(search, trial, rest, is_running=True))

        overrides = (*self.source_overrides, *_TRIAL_OVERRIDES)
        recipe = parse_recipe(trial.recipe, name=trial.name, overrides=overrides)
        try:
            with only_warnings(self.warnings):
                reached = self.train_until(recipe, self._trial_folder(trial), pause)
        except (DivergedError, RecipeError, WeightsError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not is_out_of_memory(error):
                raise
            self.errors.append(error)
            trial.end_reason = f"failed: {str(error).splitlines()[0]}"
            logger.warning(f"{trial.name} {trial.end_reason}")
        else:
            self._check_same_inputs(trial, reached.inputs)
            trial.inputs = reached.inputs
            trial.curve, trial.num_steps = reached.curve, reached.num_steps
            trial.num_images, trial.last_step = reached.num_images, trial.step
            if trial.step > first_step:
                measured = _step_seconds(times) or trial.step_seconds
                trial.step_seconds = measured or reached.train_seconds / trial.step
        self._update_time()
        seconds = search.used_seconds - decision.used_seconds
        trial.seconds += seconds
        if not first_step:
            trial.start_seconds = max(0.0, seconds - trial.step * trial.step_seconds)
        decision.done = True
        self.save()

    def _check_same_inputs(self, trial: Trial, inputs: Mapping[str, str]) -> None:
        """Raise DataError or WeightsError unless all trials have the same images and weights."""
        earlier = [(f"trial {other.name}", other.inputs) for other in self.search.trials]
        for what, recorded in [("the start of the search", self.search.inputs), *earlier]:
            changed = [name for name in inputs if recorded.get(name, inputs[name]) != inputs[name]]
            if changed == [_SHARD_TIMES]:
                warn_once(
                    f"{self.search.source}: shards were written or copied after {what}; their "
                    "images were not compared"
                )
            elif changed:
                is_data = changed[0].startswith((_DATA, _READABLE))
                raise (DataError if is_data else WeightsError)(
                    f"{self.search.source}: {changed[0]} have changed since {what}, so "
                    f"{trial.name} cannot be compared with it; restore them, remove "
                    f"{self._trial_folder(trial)}, then {resume_command(self.run.path)}, or "
                    "search in another --out",
                    code="data.changed" if is_data else "weights.wrong_version",
                )

    def _format_progress(self, decision: Decision) -> str:
        """Format the time left, the best trial so far, and the one that starts."""
        search, trial = self.search, self.search[decision.trial]
        started = sum(bool(each.curve) for each in search.candidates if each is not trial)
        text = f"{format_duration(max(search.remaining_seconds, 0))} left, "
        text += f"{started} of {len(search.candidates)} configurations tried"
        if (best := best_trial(search)) is not None:
            text += f", best so far {best.name} ({search.format_value(best.curve[-1].value)})"
        until = RUNG_NAMES[decision.until]
        return f"{text}: {trial.name} to {until}, {decision.reason} ({trial.description})"


def _step_seconds(times: Sequence[tuple[int, float]]) -> float | None:
    """Return the seconds of a step between the first and the last evaluation; None without two."""
    if len(times) < 2:
        return None
    (first_step, since), (last_step, until) = times[0], times[-1]
    return (until - since) / (last_step - first_step)
