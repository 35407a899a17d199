"""`finetune train SOURCE --minutes N`: the best recipe that can be found in N minutes.

The configurations of `portfolio.py` are ordinary runs in `trials/`, which `successive_halving.py`
pauses and continues from their exact checkpoints (freeze-thaw). The chosen one becomes the run of
the folder: it is continued, not retrained, and it alone evaluates the test split.

`tune.json` records every decision before it is carried out, with all measurements that it rests on.
A search that was killed reads it, and continues in the middle of a run.

Optuna's pruners would not be shorter: a trial that they have pruned cannot continue.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from finetune.commands.portfolio import Configuration, build_configurations
from finetune.commands.start import StartResult, open_new_run, start, write_start_files
from finetune.commands.successive_halving import (
    Decision,
    Point,
    Search,
    Trial,
    choose,
    decide,
    estimate_final,
    estimate_rest,
    format_fraction,
)
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
from finetune.formatting import format_duration, format_percent, pluralize
from finetune.log import logger
from finetune.model_checksums import json_sha256
from finetune.recipe.load import parse_recipe
from finetune.recipe.paths import resolve_data_source
from finetune.recipe.schema import Recipe
from finetune.report.search_page import write_search_page
from finetune.run.directory import SEARCH_FILE, RunDir, resume_command
from finetune.run.integrity import load_json, remove_path
from finetune.run.record import read_record
from finetune.training.train import train

__all__ = [
    "Progress",
    "make_search",
    "read_search",
    "run_search",
    "train_until",
    "tune",
]

_FINAL_SECONDS = 8.0  # of results, card and report
_EVAL_FACTOR = 2.0  # an evaluated image costs as many forward passes, because it is decoded too
_SAVE_SECONDS = 1.0  # between two records of the time used
_SEARCH = TypeAdapter(Search)


# The command --------------------------------------------------------------------------------------


def tune(
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
    if resume and (out / SEARCH_FILE).is_file():
        search = read_search(out)
        _check_same_search(search, out, minutes=minutes, overrides=overrides)
    else:
        assert source is not None, "there is a search to continue"
        assert minutes is not None, "there is a search to continue"
        if out.exists():
            with open_new_run(out):  # fail now, not after minutes of trials
                pass
        created = start(source, overrides=overrides, download=download)
        used = time.perf_counter() - started
        search = make_search(created, minutes=minutes, overrides=overrides, used_seconds=used)
        write_start_files(created, out)
    secret = []
    if source is not None and redact_urls(source) != source:  # not stored
        secret = [f"data.source={json.dumps(resolve_data_source(source))}"]
    chosen = run_search(search, out, source_overrides=secret)
    folder = out / "trials" / chosen.name
    value = format_percent(chosen.curve[-1].value, 1)
    logger.info(
        f"chosen after {format_duration(search.used_seconds)}: {chosen.name} "
        f"({chosen.description}), {value} on {pluralize(chosen.num_images, 'validation image')}"
    )
    own = [*secret, *(each for each in search.overrides if each.startswith("run."))]
    recipe = parse_recipe(
        chosen.recipe, name=chosen.name, overrides=["run.keep_checkpoints=2", *own]
    )
    trained = sum(line["seconds"] for line in RunDir(folder).read_metrics()[-1:])
    write_search_page(out, _SEARCH.dump_python(search, mode="json"))
    results = train(
        recipe,
        out,
        resume=True,
        branch_from=folder,
        seconds_before=search.used_seconds - trained,
    )
    _remove_checkpoints(folder)
    return results


def _check_same_search(
    search: Search, out: Path, *, minutes: float | None, overrides: Sequence[str]
) -> None:
    """Raise RecipeError if the user asks for another search than the one in the folder."""
    advice = f"continue it: {resume_command(out)}, or search in another --out"
    if minutes not in (None, search.minutes):
        raise RecipeError(
            f"--minutes {minutes:g}: the search in {out} has {search.minutes:g} minutes; {advice}",
            code="recipe.not_this_run",
        )
    if overrides and list(map(redact_urls, overrides)) != search.overrides:
        raise RecipeError(
            f"{' '.join(map(redact_urls, overrides))}: the search in {out} was started with "
            f"{' '.join(search.overrides) or 'no overrides'}; {advice}",
            code="recipe.not_this_run",
        )


# The loop -----------------------------------------------------------------------------------------


@dataclass
class Progress:
    """What a run has reached: all its steps, its validation images, and its evaluations.

    `data_fingerprint` is that of run.json.
    """

    num_steps: int
    num_images: int
    curve: list[Point]
    data_fingerprint: str


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
    curve = [
        Point(line["step"], line.get(metric) or 0.0, line["loss"])
        for line in run.read_metrics()
        if line["split"] == "val"
    ]
    return Progress(plan["steps"], plan["images"]["val"], curve, record["data_fingerprint"])


def make_search(
    created: StartResult, *, minutes: float, overrides: Sequence[str], used_seconds: float
) -> Search:
    """Make a search from the recipe that `finetune train SOURCE` trains.

    Raises: RecipeError if there are no validation images, or the time is too short for a recipe.
    """
    builder = created.builder
    source = redact_urls(builder.source.name)
    if not builder.has_validation():
        raise RecipeError(
            "--minutes: data.val_fraction=0 leaves no validation images to choose by; remove it",
            code="recipe.conflict",
        )
    splits = builder.stats.split_sizes
    num_val = splits.get("val", splits["train"] - builder.stats.num_train)

    def trial(each: Configuration) -> Trial:
        final = each.forward_seconds * (num_val + splits.get("test", 0)) * _EVAL_FACTOR
        return Trial(
            each.name,
            each.description,
            each.kind,
            each.recipe.to_yaml(),
            each.seconds,
            _FINAL_SECONDS + final,
        )

    configurations = build_configurations(created, max_seconds=60 * minutes / 2)
    search = Search(
        source,
        list(map(redact_urls, overrides)),
        minutes,
        "map" if created.recipe.data.task == "multilabel" else "top1",
        builder.stats.num_train,
        can_resplit="val" not in splits,
        trials=[trial(each) for each in configurations],
        used_seconds=used_seconds,
    )
    fastest = min(search.trials, key=lambda each: each.estimate)
    if fastest.estimate + fastest.final_seconds > search.left_seconds:
        raise _too_short(search, fastest)
    return search


def _too_short(search: Search, fastest: Trial) -> RecipeError:
    seconds = search.used_seconds + estimate_rest(search, fastest) + fastest.final_seconds
    return RecipeError(
        f"--minutes {search.minutes:g}: too short for these images here: "
        f"{format_duration(search.used_seconds)} are used, and the fastest recipe takes about "
        f"{format_duration(seconds - search.used_seconds)}; give at least --minutes "
        f"{math.ceil(1.1 * seconds / 60)}, or train without --minutes",
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
        for name in (*(each.trial for each in search.decisions), search.chosen):
            _ = name and search[name]
        return search
    except (OSError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path}: cannot be read, or is not the record of a search "
            f"({str(error).splitlines()[0]}); restore it from a copy, or search in another --out",
            code="checkpoint.damaged",
        ) from error


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
        full or images have changed.
    """
    with _locked(folder), _saved_on_interrupt(search, folder):
        _save(search, folder)
        session = _Session(search, folder, list(source_overrides), clock, train_until)
        while not search.chosen and (decision := session.next_decision()) is not None:
            session.carry_out(decision)
        chosen = search[search.chosen] if search.chosen else choose(search)
        if chosen is None:
            failed = SetupError(
                f"{folder}: all trials have failed; see {SEARCH_FILE}, and search in another --out",
                code="setup.search_failed",
            )
            raise session.errors[0] if session.errors else failed
        search.chosen = chosen.name
        for trial in search.trials:
            if trial.is_finished and not trial.ended:
                trial.ended = "trained to its end"
            if trial is not chosen:
                _remove_checkpoints(folder / "trials" / trial.name)
        _save(search, folder)
    return chosen


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder of a search. Raises: SetupError if another process uses it."""
    with contextlib.closing(RunDir(folder)) as run:
        run.open()
        yield


@contextlib.contextmanager
def _saved_on_interrupt(search: Search, folder: Path) -> Iterator[None]:
    """Say after a signal how to continue. Raises: Interrupted."""
    try:
        yield
    except (Interrupted, KeyboardInterrupt) as error:
        used = format_duration(search.used_seconds)
        raise Interrupted(
            f"{folder}: the search was stopped after {used} of {search.minutes:g} min; continue: "
            f"{resume_command(folder)}",
            getattr(error, "signal_number", signal.SIGINT),
        ) from None


def _save(search: Search, folder: Path) -> None:
    content = _SEARCH.dump_python(search, mode="json")
    RunDir(folder).write_json(SEARCH_FILE, {**content, "checksum": json_sha256(content)})


def _remove_checkpoints(folder: Path) -> None:
    """Remove everything large of a run that will not continue."""
    if folder.is_dir():
        RunDir(folder).prune_checkpoints(set())
        for name in ("stages", "model"):
            if (folder / name).exists():
                remove_path(folder / name)


def _split_seed(trial: Trial) -> int | None:
    return parse_recipe(trial.recipe, name=trial.name).data.split_seed


class _Session:
    """The part of a search in one process.

    Attributes:
        errors: the errors of trials that failed.
    """

    def __init__(
        self,
        search: Search,
        folder: Path,
        source_overrides: list[str],
        clock: Callable[[], float],
        train_until: TrainUntil,
    ) -> None:
        self.errors: list[Exception] = []
        self._search, self._folder = search, folder
        self._source_overrides, self._train_until = source_overrides, train_until
        self._clock = clock
        self._offset = search.used_seconds - clock()
        self._saved_at = search.used_seconds
        self._is_resumed = False  # True if the next decision was begun by another process
        self._warned: set[str] = set()

    def next_decision(self) -> Decision | None:
        """Return the decision that was not carried out, or the next one, and record it."""
        search = self._search
        if search.decisions and not search.decisions[-1].done:
            self._is_resumed = True
            return search.decisions[-1]
        search.used_seconds = self._offset + self._clock()
        decision = decide(search)
        for trial in search.trials:
            if trial.ended or (trial.of and trial.is_finished):
                _remove_checkpoints(self._folder / "trials" / trial.name)
        if decision is not None:
            search.decisions.append(decision)
        _save(search, self._folder)
        return decision

    def carry_out(self, decision: Decision) -> None:
        """Train a trial as decided, and record what was measured."""
        search, trial = self._search, self._search[decision.trial]
        first_step = trial.step
        times: list[tuple[int, float]] = []
        is_resumed, self._is_resumed = self._is_resumed, False
        logger.info(self._format_progress(decision))

        def pause(step: int, num_steps: int) -> bool:
            if is_resumed and not times:
                # the time of the start was used before; the steps are those that were lost
                lost_steps = max(0, step - trial.last_step)
                used = search.used_seconds + lost_steps * trial.step_seconds
                self._offset = used - self._clock()
            search.used_seconds = self._offset + self._clock()
            times.append((step, search.used_seconds))
            if search.used_seconds >= self._saved_at + _SAVE_SECONDS:
                trial.last_step, self._saved_at = step, search.used_seconds
                _save(search, self._folder)
            if step >= decision.until * num_steps:
                return True
            (from_step, since), (to_step, until) = times[0], times[-1]
            seconds = (until - since) / max(to_step - from_step, 1)
            rest = seconds * (num_steps - step) + estimate_final(search, trial)
            return rest > search.left_seconds and not decision.must_finish

        overrides = self._source_overrides
        recipe = parse_recipe(trial.recipe, name=trial.name, overrides=overrides)
        try:
            with _new_warnings(self._warned):
                reached = self._train_until(recipe, self._folder / "trials" / trial.name, pause)
        except (DivergedError, RecipeError, WeightsError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not is_out_of_memory(error):
                raise
            self.errors.append(error)
            trial.ended = f"failed: {str(error).splitlines()[0]}"
        except Interrupted:
            search.used_seconds = self._offset + self._clock()
            _save(search, self._folder)
            raise
        else:
            self._check_same_data(trial, reached.data_fingerprint)
            trial.curve, trial.num_steps = reached.curve, reached.num_steps
            trial.num_images, trial.last_step = reached.num_images, trial.step
            trial.data_fingerprint = reached.data_fingerprint
        search.used_seconds = self._offset + self._clock()
        seconds = search.used_seconds - decision.used_seconds
        self._measure(trial, times, first_step=first_step, seconds=seconds)
        decision.done = True
        _save(search, self._folder)

    def _check_same_data(self, trial: Trial, fingerprint: str) -> None:
        """Raise DataError unless a trial has the images of all other trials of its split."""
        split_seed = _split_seed(trial)
        for other in self._search.trials:
            if other.data_fingerprint not in ("", fingerprint) and _split_seed(other) == split_seed:
                folder = self._folder / "trials" / trial.name
                raise DataError(
                    f"{self._search.source}: images or labels have changed since trial "
                    f"{other.name}, so {trial.name} cannot be compared with it; restore them, "
                    f"remove {folder}, then {resume_command(self._folder)}, or search in another "
                    "--out",
                    code="data.changed",
                )

    def _measure(
        self, trial: Trial, times: list[tuple[int, float]], *, first_step: int, seconds: float
    ) -> None:
        """Update the measured cost of a trial after `seconds` of training from `first_step`."""
        trial.seconds += seconds
        if not trial.curve or trial.step <= first_step:
            return
        num_steps = trial.step - first_step
        if len(times) > 1:
            (from_step, since), (to_step, until) = times[0], times[-1]
            trial.step_seconds = (until - since) / (to_step - from_step)
        elif not trial.step_seconds:
            trial.step_seconds = seconds / num_steps
        if not first_step:
            trial.start_seconds = max(0.0, seconds - num_steps * trial.step_seconds)

    def _format_progress(self, decision: Decision) -> str:
        """Format the time left, the best trial so far, and the one that starts."""
        search, trial = self._search, self._search[decision.trial]
        started = sum(bool(each.curve) for each in search.candidates if each is not trial)
        text = f"{format_duration(max(search.left_seconds, 0))} left, "
        text += f"{started} of {len(search.candidates)} configurations tried"
        if (best := choose(search)) is not None:
            text += f", best so far {best.name} ({format_percent(best.curve[-1].value, 1)})"
        until = format_fraction(decision.until)
        return f"{text}: {trial.name} to {until}, {decision.reason} ({trial.description})"


@contextlib.contextmanager
def _new_warnings(seen: set[str]) -> Iterator[None]:
    """Inside the block, log only warnings, and each one once in the whole search."""

    def is_new(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if record.levelno < logging.WARNING or text in seen:
            return False
        seen.add(text)
        return True

    logger.addFilter(is_new)
    try:
        yield
    finally:
        logger.removeFilter(is_new)
