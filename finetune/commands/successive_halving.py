"""Asynchronous successive halving: what a search for a recipe trains next.

Every decision is a function of a record, which is also the content of tune.json: what was measured
of each trial, and the time used. So a search that was killed decides as if it had not been.

A trial is trained to a quarter of its steps and pauses there. It continues to half, and then to its
end, if it is in the better half of those that came as far. The first trial is the recipe that
`finetune train` trains, and is trained to its end at once. The next one is the one from which
recorded runs on similar image sets lead to expect the most per second, see expected_gain.py.

Sources: Li et al. 2020, "A system for massively parallel hyperparameter tuning" (ASHA); Swersky et
al. 2014, "Freeze-thaw Bayesian optimization".
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from finetune.commands.expected_gain import expected_gains, log_odds_ratio
from finetune.formatting import format_duration, format_percent, pluralize
from finetune.recipe.load import parse_recipe

__all__ = [
    "RUNG_NAMES",
    "Decision",
    "Point",
    "Search",
    "Trial",
    "best_trial",
    "decide",
    "estimate_final_seconds",
    "estimate_remaining_seconds",
    "fits_in_time",
]

# Fractions of a run's steps after which it may pause, with their names for users.
RUNG_NAMES = {0.25: "a quarter of its steps", 0.5: "half of its steps", 1.0: "its end"}
# A trial replaces the first one if it is better by this many standard errors, or by more if the
# validation images are few. The error is that of two independent samples; both trials see the same
# images, so the true one is smaller. A trial that is clearly worse is ended early.
_Z_BETTER, _Z_FEW, _Z_WORSE = 0.5, 1.96, 1.64
_MIN_VALIDATION_IMAGES = 200  # below, further splits of the training images confirm a choice
_SMALL_TRAIN_IMAGES, _MAX_SPLITS = 500, 5
_MIN_LENGTH = 0.25  # a configuration may be shortened to this fraction to fit into the time
_MAX_PAUSE_SHARE = 0.5  # of a run's time to its next pause: its start, and steps to an evaluation
# Of the time of the search, for the first recipe: before it starts, and once it is running.
_MAX_OVERTIME, _MAX_OVERTIME_RUNNING = 0.1, 0.2
_SHORT_SECONDS = 30.0  # a pause would save less than the start after it costs
_SHORTENED = "the next configuration, shortened"  # to the time left, so a pause would not help
_MAX_RESUME_SECONDS = 10.0  # the first start of a run may also compute features or train a stage


@dataclass
class Point:
    """An evaluation on the validation split: steps done, top-1 accuracy or mAP, and loss."""

    step: int
    value: float
    loss: float | None


@dataclass
class Trial:
    """A configuration and what was measured of it."""

    name: Annotated[str, Field(pattern=r"\A[a-z0-9-]+\z")]  # of its run directory, in `trials`
    description: str  # for users
    kind: str  # "head", "full" or "lora"; in one kind, `estimated_seconds` is wrong by one factor
    recipe: str  # as YAML
    estimated_seconds: float  # of the whole run, before anything was measured
    final_seconds: float  # estimated, of the final evaluation, results and report
    # test accuracies of the configuration on other image sets, by their name
    recorded: dict[str, float] = field(default_factory=dict)
    repeat_of: str = ""  # name of the trial that it repeats on another validation split
    curve: list[Point] = field(default_factory=list)  # the evaluations so far
    num_steps: int = 0  # of the whole run; 0 before it has started
    num_images: int = 0  # of the validation split
    inputs: dict[str, str] = field(default_factory=dict)  # hashes of images, weights and so on
    seconds: float = 0.0  # spent on it
    start_seconds: float = 0.0  # before the first step, including features and stages
    step_seconds: float = 0.0  # of a step, including evaluations
    last_step: int = 0  # the last evaluated step that is recorded, also before the next pause
    end_reason: str = ""  # why it will not continue; empty if it may

    @property
    def step(self) -> int:
        """Steps done."""
        return self.curve[-1].step if self.curve else 0

    @property
    def rung(self) -> float:
        """The last rung that it has reached; 0 for none."""
        reached = (rung for rung in RUNG_NAMES if 0 < rung * self.num_steps <= self.step)
        return max(reached, default=0.0)

    @property
    def is_finished(self) -> bool:
        """True if all steps are done."""
        return self.rung == 1.0

    def value_at(self, rung: float) -> float:
        """Return the accuracy of the first evaluation at or after a rung that it has reached."""
        return next(point.value for point in self.curve if point.step >= rung * self.num_steps)


@dataclass
class Decision:
    """Train a trial up to a fraction of its steps."""

    trial: str  # its name
    until: float  # fraction of its steps
    reason: str
    used_seconds: float  # before it
    must_finish: bool = False  # True to finish the trial even if the time is over
    on_ray: bool = False  # True if a Ray cluster carries it out, see `ray_trials.py`
    done: bool = False  # True once it is carried out


@dataclass
class Search:
    """Everything that decisions depend on; the content of tune.json."""

    source: str  # the images, without secrets in URLs
    overrides: list[str]  # by the user
    minutes: float  # that the whole command may take
    metric: str  # that chooses: "top1", or "map" for multi-label data
    num_train: int  # number of training images
    can_resplit: bool  # True if other validation images can be held out
    trials: list[Trial]  # the first recipe first; repetitions on other splits last
    decisions: list[Decision] = field(default_factory=list)
    used_seconds: float = 0.0  # since the start of the command
    chosen: str = ""  # name of the chosen trial; empty while the search proceeds
    space: dict[str, Any] = field(default_factory=dict)  # the recipe's section `tune`
    inputs: dict[str, str] = field(default_factory=dict)  # hashes of what the trials were made for

    def __getitem__(self, name: str) -> Trial:
        return {trial.name: trial for trial in self.trials}[name]

    @property
    def candidates(self) -> list[Trial]:
        """The trials that may be chosen."""
        return [trial for trial in self.trials if not trial.repeat_of]

    @property
    def finished(self) -> list[Trial]:
        """The candidates that are finished."""
        return [trial for trial in self.candidates if trial.is_finished]

    @property
    def running_names(self) -> list[str]:
        """Names of the trials that are being trained: several at the same time with `--on ray`."""
        return [decision.trial for decision in self.decisions if not decision.done]

    @property
    def remaining_seconds(self) -> float:
        """The time left."""
        return 60 * self.minutes - self.used_seconds

    def format_value(self, value: float) -> str:
        """Format a value of `metric`: "57.3 %", or "57.3 % mAP"."""
        return format_percent(value, 1) + (" mAP" if self.metric == "map" else "")


# Decisions: functions of the recorded measurements ------------------------------------------------


def decide(search: Search) -> Decision | None:
    """Return what to train next.

    None if nothing fits into the time left, or if the results of running trials decide. First, it
    ends the trials that are clearly worse than the best one, except running ones. Then, it takes
    the first case that applies:

    1. the first configuration, to its end; of `finetune train SOURCE`, with as many epochs as fit;
    2. a paused run in the better half of those that came as far;
    3. with few images: the best run and the first one on another validation split;
    4. the most promising configuration, if the best paused run can be finished after it;
    5. the best paused run;
    6. the most promising configuration to its end, with as many epochs as fit;
    7. if nothing has finished, the trial that takes least time, although the time will be over.
    """
    running_names, first = search.running_names, search.trials[0]
    not_running = [trial for trial in search.candidates if trial.name not in running_names]
    for trial in not_running:
        _prune_if_worse(search, trial)
    whole_seconds = estimate_remaining_seconds(search, first) + estimate_final_seconds(
        search, first
    )
    if first in not_running and not first.curve and whole_seconds > search.remaining_seconds:
        _shorten(search, first)
    active = [trial for trial in not_running if not trial.end_reason and not trial.is_finished]
    in_time = [trial for trial in active if _can_finish(search, trial)]
    if first in in_time:
        return Decision(first.name, 1.0, "the recipe of finetune train", search.used_seconds)
    following, reason = _next_trial(search, active, in_time)
    if following is not None:
        is_short = estimate_remaining_seconds(search, following) <= _SHORT_SECONDS
        next_rung = next(rung for rung in RUNG_NAMES if rung > following.rung)
        is_whole = following.repeat_of or is_short or reason == _SHORTENED
        until = 1.0 if is_whole else next_rung
        return Decision(following.name, until, reason, search.used_seconds)
    if running_names:  # wait for their results
        return None
    if active and not search.finished:
        fastest = min(active, key=lambda trial: estimate_remaining_seconds(search, trial))
        reason = "the fastest, because nothing fits into the time left"
        return Decision(fastest.name, 1.0, reason, search.used_seconds, must_finish=True)
    for trial in active:
        cost = format_duration(
            estimate_remaining_seconds(search, trial) + estimate_final_seconds(search, trial)
        )
        left = format_duration(max(search.remaining_seconds, 0.0))
        trial.end_reason = f"not enough time: it needs about {cost}, {left} are left"
    return None


def _next_trial(
    search: Search, active: Sequence[Trial], in_time: Sequence[Trial]
) -> tuple[Trial | None, str]:
    """Return the trial after the first one, and the reason: cases 2 to 6 of `decide`.

    Args:
        active: the trials that may continue.
        in_time: those of them that fit into the time left.
    """
    trial, reason = _promotable(search, in_time), "in the better half at its last pause"
    if trial is None:
        reason = "few validation images, so another split decides with them"
        trial = _repetition(search)
    if trial is None:
        reason = "the next configuration"
        trial = next(iter(_by_expected_gain(search, in_time)), None)
    # Runs that train more than the classifier still gain most of their accuracy.
    best = max(
        (trial for trial in in_time if trial.curve),
        key=lambda trial: (trial.kind != "head", trial.rung, trial.curve[-1].value),
        default=None,
    )
    if best is not None and (trial is None or not _can_finish(search, best, after=trial)):
        return best, "the best of those that have paused, before the time is over"
    if trial is None:
        reason = _SHORTENED
        trial = next((t for t in _by_expected_gain(search, active) if _shorten(search, t)), None)
    return trial, reason


def _by_expected_gain(search: Search, trials: Sequence[Trial]) -> list[Trial]:
    """Return those of some trials that have not started, the largest gain per second first."""
    first, measured = search.trials[0], {}
    for trial in search.candidates:
        if 0 < trial.rung <= first.rung:
            measured[trial.name] = log_odds_ratio(
                trial.value_at(trial.rung), first.value_at(trial.rung)
            )
    gains = expected_gains({t.name: t.recorded for t in search.candidates}, first.name, measured)
    return sorted(
        (trial for trial in trials if not trial.curve),
        key=lambda trial: -gains[trial.name] / estimate_remaining_seconds(search, trial),
    )


def best_trial(search: Search) -> Trial | None:
    """Return the best finished trial; None if none has finished.

    The first configuration that has finished wins unless another one is better by `_Z_BETTER`
    standard errors, because the best of many accuracies on few images is partly luck; with fewer
    than `_MIN_VALIDATION_IMAGES`, by `_Z_FEW`.
    """
    if not search.finished:
        return None
    first, better = search.finished[0], []
    for trial in search.finished[1:]:
        mistakes, first_mistakes, num_images = _count_mistakes(search, trial, first)
        z = _Z_BETTER if num_images >= _MIN_VALIDATION_IMAGES else _Z_FEW
        if _z_score(first_mistakes, mistakes, num_images) >= z:
            better.append(trial)
    return max(better, key=_final_value, default=first)


def _count_mistakes(search: Search, trial: Trial, other: Trial) -> tuple[float, float, int]:
    """Return the mistakes of both, and the number of images, over the splits that both have."""
    mistakes = other_mistakes = 0.0
    num_images = 0
    for a, b in zip(_all_splits(search, trial), _all_splits(search, other), strict=False):
        if a.is_finished and b.is_finished:
            mistakes += (1 - a.curve[-1].value) * a.num_images
            other_mistakes += (1 - b.curve[-1].value) * b.num_images
            num_images += a.num_images
    return mistakes, other_mistakes, num_images


def _all_splits(search: Search, trial: Trial) -> list[Trial]:
    """Return a trial and its repetitions on other validation splits."""
    return [trial, *(each for each in search.trials if each.repeat_of == trial.name)]


def _z_score(mistakes: float, fewer_mistakes: float, num_images: int) -> float:
    """Return a difference of mistakes in standard errors, as if the two had other images.

    With the same images, the error is smaller. One image more, so that a single one never decides.
    """
    variance = sum(count * (1 - count / num_images) for count in (mistakes, fewer_mistakes))
    return (mistakes - fewer_mistakes) / math.sqrt(variance + 1)


def _final_value(trial: Trial) -> tuple[float, float]:
    point = trial.curve[-1]
    return point.value, -(math.inf if point.loss is None else point.loss)


def _promotable(search: Search, in_time: Sequence[Trial]) -> Trial | None:
    """Return a paused trial in the better half at its rung, at the highest rung first.

    Runs that train only the classifier are nearer to their end at a rung, so they are ranked apart.
    """
    for rung, is_head in itertools.product((0.5, 0.25), (False, True)):
        reached = [
            trial
            for trial in search.candidates
            if trial.rung >= rung and (trial.kind == "head") == is_head
        ]
        reached.sort(key=lambda trial: trial.value_at(rung), reverse=True)
        for trial in reached[: len(reached) // 2]:
            if trial in in_time and trial.rung == rung:
                return trial
    return None


def _repetition(search: Search) -> Trial | None:
    """Return a trial that repeats the best run, or the first one, on another validation split.

    A new one is added to the search. None if there are enough images, or there is no time.
    """
    finished = search.finished
    if not search.can_resplit or search.num_train >= _SMALL_TRAIN_IMAGES or not finished:
        return None
    first, best = finished[0], max(finished, key=_final_value)
    mistakes, first_mistakes, num_images = _count_mistakes(search, best, first)
    if num_images >= _MIN_VALIDATION_IMAGES or mistakes >= first_mistakes:
        return None
    splits = {trial.name: _all_splits(search, trial) for trial in (best, first)}
    number = min(map(len, splits.values()))
    unfinished = [each for same in splits.values() for each in same if not each.is_finished]
    missing = [trial for trial in (best, first) if len(splits[trial.name]) == number]
    cost = sum(_estimate_total_seconds(search, trial) for trial in unfinished or missing)
    cost += estimate_final_seconds(search, best)
    if number >= _MAX_SPLITS or cost > search.remaining_seconds:
        return None
    if unfinished:
        waits = unfinished[0].end_reason or unfinished[0].name in search.running_names
        return None if waits else unfinished[0]
    search.trials.append(_resplit(missing[0], number))
    return search.trials[-1]


def _resplit(trial: Trial, number: int) -> Trial:
    """Return a new trial with the recipe of another one, on the validation split of a number."""
    recipe = parse_recipe(trial.recipe, name=trial.name)
    seed = recipe.run.seed if recipe.data.split_seed is None else recipe.data.split_seed
    data = recipe.data.model_copy(update={"split_seed": seed + number})
    return Trial(
        f"{trial.name}-split{number + 1}",
        f"{trial.description}, validation split {number + 1}",
        trial.kind,
        recipe.model_copy(update={"data": data}).to_yaml(),
        trial.estimated_seconds,
        trial.final_seconds,
        repeat_of=trial.name,
    )


def _prune_if_worse(search: Search, trial: Trial) -> None:
    """End a paused trial that is clearly worse than the best one was at the same point."""
    best, rung, n = best_trial(search), trial.rung, trial.num_images
    if best is None or not rung or trial.end_reason or trial.is_finished:
        return
    value, best_value = trial.value_at(rung), best.value_at(rung)
    is_comparable = (trial.kind == "head") == (best.kind == "head")
    z = _Z_WORSE if is_comparable else 2 * _Z_WORSE
    if _z_score((1 - value) * n, (1 - best_value) * n, n) >= z:
        trial.end_reason = (
            f"clearly worse than {best.name} after {RUNG_NAMES[rung]}: "
            f"{search.format_value(value)} against {search.format_value(best_value)}"
        )


def _can_finish(search: Search, trial: Trial, *, after: Trial | None = None) -> bool:
    """True if a trial can be finished in the time left, and evaluated as the final model.

    Args:
        after: a trial that is trained to its next pause before.
    """
    seconds = estimate_remaining_seconds(search, trial)
    if after is not None:
        seconds += estimate_remaining_seconds(search, after) * (
            1 if after.repeat_of else _MAX_PAUSE_SHARE
        )
    return fits_in_time(search, trial, seconds)


def fits_in_time(search: Search, trial: Trial, seconds: float, *, is_running: bool = False) -> bool:
    """True if the final evaluation of a trial fits into the time left after some seconds.

    The first recipe may take 10 % more, because another one is rarely as good, and 20 % if it is
    running already.
    """
    share = _MAX_OVERTIME_RUNNING if is_running else _MAX_OVERTIME
    extra = share * 60 * search.minutes if trial is search.trials[0] else 0.0
    return seconds + estimate_final_seconds(search, trial) <= search.remaining_seconds + extra


def _shorten(search: Search, trial: Trial) -> bool:
    """Reduce the epochs of a waiting trial so that it fits. Returns: True if it fits now.

    A recipe that the user wrote is left as it is, and none loses more than `_MIN_LENGTH` allows.
    """
    available = search.remaining_seconds - estimate_final_seconds(search, trial)
    available -= _MAX_RESUME_SECONDS
    length = available / max(estimate_remaining_seconds(search, trial) - _MAX_RESUME_SECONDS, 1e-9)
    optim = parse_recipe(trial.recipe, name=trial.name).optim
    whole, unit = (optim.epochs, "epoch") if optim.epochs else (optim.steps or 0, "step")
    number = math.floor(whole * length)
    is_own_recipe = bool(search.space) and trial is search.trials[0]
    is_fixed = trial.kind == "head" or is_own_recipe or optim.schedule == "step"
    if is_fixed or number < max(1, _MIN_LENGTH * whole):
        return False
    length = number / whole
    changes = [f"optim.{unit}s={number}"]
    if optim.warmup_epochs:
        changes.append(f"optim.warmup_epochs={optim.warmup_epochs * length:g}")
    else:
        changes.append(f"optim.warmup_steps={round(optim.warmup_steps * length)}")
    trial.recipe = parse_recipe(trial.recipe, name=trial.name, overrides=changes).to_yaml()
    trial.description += f", shortened to {pluralize(number, unit)}"
    trial.estimated_seconds *= length
    return True


# Cost ---------------------------------------------------------------------------------------------


def estimate_remaining_seconds(search: Search, trial: Trial) -> float:
    """Return the seconds that a trial needs to its last step."""
    if not trial.step_seconds:
        return _estimate_total_seconds(search, trial)
    steps = trial.num_steps - trial.step
    return min(trial.start_seconds, _MAX_RESUME_SECONDS) + steps * trial.step_seconds


def estimate_final_seconds(search: Search, trial: Trial) -> float:
    """Return the seconds of the final evaluation, results and report, if a trial is chosen."""
    return trial.final_seconds * max(1.0, _slowdown(search.trials))


def _estimate_total_seconds(search: Search, trial: Trial) -> float:
    """Return the seconds of a whole run: measured, or its estimate corrected by other runs."""
    if trial.step_seconds:
        return _measured_total_seconds(trial)
    same = [each for each in search.trials if each.kind == trial.kind and each.step_seconds]
    return trial.estimated_seconds * _slowdown(same or search.trials)


def _slowdown(trials: Sequence[Trial]) -> float:
    """Return the measured time of trials as a multiple of their estimates; 1 before any has run."""
    ratios = [
        _measured_total_seconds(each) / each.estimated_seconds
        for each in trials
        if each.step_seconds
    ]
    return statistics.median(ratios) if ratios else 1.0


def _measured_total_seconds(trial: Trial) -> float:
    return trial.start_seconds + trial.num_steps * trial.step_seconds
