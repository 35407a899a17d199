"""Asynchronous successive halving: what `finetune train SOURCE --minutes N` trains next.

Every decision is a function of a record, which is also the content of tune.json: what was measured
of each trial, and the time used. So a search that was killed decides as if it had not been.

A trial is trained to a quarter of its steps and pauses there. It continues to half, and then to its
end, if it is in the better half of those that came as far. The first trial is the recipe that
`finetune train SOURCE` trains, and is trained to its end at once.

Sources: Li et al. 2020, "A system for massively parallel hyperparameter tuning" (ASHA); Swersky et
al. 2014, "Freeze-thaw Bayesian optimization".
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from finetune.formatting import format_duration, format_percent, pluralize
from finetune.recipe.load import parse_recipe

__all__ = [
    "MIN_VALIDATION_IMAGES",
    "RUNGS",
    "Decision",
    "Point",
    "Search",
    "Trial",
    "choose",
    "decide",
    "estimate_final",
    "estimate_rest",
    "format_fraction",
    "is_better",
]

RUNGS = (0.25, 0.5, 1.0)  # fractions of a run's steps after which it may pause
# A trial replaces the first one if it is better by this many standard errors, or by more if the
# validation images are few; it is ended early if it is worse by as many.
_Z_BETTER, _Z_FEW, _Z_WORSE = 1.0, 1.96, 1.64
MIN_VALIDATION_IMAGES = 200  # below, further splits of the training images confirm a choice
_SMALL_TRAIN_IMAGES, _MAX_SPLITS = 500, 5
_MIN_LENGTH = 0.25  # a configuration may be shortened to this fraction to fit into the time
_SHORT_SECONDS = 20.0  # a pause would save less than the start after it costs
_MAX_RESUME_SECONDS = 10.0  # the first start of a run may also compute features or train a stage


@dataclass
class Point:
    """An evaluation on the validation split: steps done, top-1 accuracy or mAP, and loss."""

    step: int
    value: float
    loss: float | None


@dataclass
class Trial:
    """A configuration and what was measured of it.

    Attributes:
        name: name of the run directory, in `trials`.
        description: what it is, for users.
        kind: runs of one kind have the same error in `estimate`.
        recipe: the recipe as YAML.
        estimate: estimated seconds of the whole run before anything was measured.
        final_seconds: estimated seconds of the final evaluation, results and report.
        of: name of the trial that it repeats on another validation split; empty otherwise.
        curve: the evaluations so far.
        num_steps: steps of the whole run; 0 before it has started.
        num_images: number of validation images.
        data_fingerprint: fingerprint of its images and labels; empty before it has started.
        seconds: time spent on it.
        start_seconds: time before the first step, including features and stages.
        step_seconds: time of a step, including evaluations.
        last_step: the last evaluated step that is recorded, also within a segment.
        ended: why it will not continue; empty if it may.
    """

    name: Annotated[str, Field(pattern=r"\A[a-z0-9-]+\z")]
    description: str
    kind: str
    recipe: str
    estimate: float
    final_seconds: float
    of: str = ""
    curve: list[Point] = field(default_factory=list)
    num_steps: int = 0
    num_images: int = 0
    data_fingerprint: str = ""
    seconds: float = 0.0
    start_seconds: float = 0.0
    step_seconds: float = 0.0
    last_step: int = 0
    ended: str = ""

    @property
    def step(self) -> int:
        """Steps done."""
        return self.curve[-1].step if self.curve else 0

    @property
    def is_finished(self) -> bool:
        """True if all steps are done."""
        return self.num_steps > 0 and self.step >= self.num_steps

    def at(self, fraction: float) -> Point | None:
        """Return the first evaluation at or after a fraction of the steps."""
        return next((p for p in self.curve if p.step >= fraction * self.num_steps), None)

    def next_rung(self) -> float:
        """Return the fraction of the steps up to which it is trained next."""
        return next(rung for rung in RUNGS if self.at(rung) is None)


@dataclass
class Decision:
    """Train a trial up to a fraction of its steps.

    Attributes:
        trial: its name.
        until: fraction of its steps.
        reason: why.
        used_seconds: time used before.
        must_finish: True to finish it even if the time is over.
        done: True once it is carried out.
    """

    trial: str
    until: float
    reason: str
    used_seconds: float
    must_finish: bool = False
    done: bool = False


@dataclass
class Search:
    """Everything that decisions depend on; the content of tune.json.

    Attributes:
        source: the images, without secrets in URLs.
        overrides: the user's overrides.
        minutes: the time that the whole command may take.
        metric: the metric that chooses: "top1", or "map" for multi-label data.
        num_train: number of training images.
        can_resplit: True if other validation images can be held out.
        trials: in the order of the portfolio; repetitions on other splits last.
        decisions: in order.
        used_seconds: time used so far, from the start of the command.
        chosen: name of the chosen trial; empty while the search proceeds.
    """

    source: str
    overrides: list[str]
    minutes: float
    metric: str
    num_train: int
    can_resplit: bool
    trials: list[Trial]
    decisions: list[Decision] = field(default_factory=list)
    used_seconds: float = 0.0
    chosen: str = ""

    def __getitem__(self, name: str) -> Trial:
        return {trial.name: trial for trial in self.trials}[name]

    @property
    def candidates(self) -> list[Trial]:
        """The trials that may be chosen."""
        return [trial for trial in self.trials if not trial.of]

    @property
    def left_seconds(self) -> float:
        """The time left."""
        return 60 * self.minutes - self.used_seconds


# Decisions: functions of the recorded measurements ------------------------------------------------


def decide(search: Search) -> Decision | None:
    """Return what to train next; None if nothing that may still win fits into the time left.

    Trials that are clearly worse than the best one are ended on the way. In this order:

    1. the first configuration, to its end;
    2. a paused run in the better half of those that came as far;
    3. with few images: the best run and the first one on another validation split;
    4. the next configuration of the portfolio, if the best paused run can be finished after it;
    5. the best paused run;
    6. the next configuration of the portfolio, with as many epochs as fit;
    7. if nothing has finished, the trial that takes least time, although the time will be over.
    """
    for each in search.candidates:
        _end_if_worse(search, each)
    active = [each for each in search.candidates if not each.ended and not each.is_finished]
    in_time = [each for each in active if _fits(search, each)]
    first = search.trials[0]
    if first in in_time:
        return Decision(first.name, 1.0, "the recipe of finetune train", search.used_seconds)
    reason = "in the better half at its last pause"
    trial = _promotable(search, in_time)
    if trial is None:
        reason = "few validation images, so another split decides with them"
        trial = _repetition(search)
    paused = [each for each in in_time if each.curve]
    best = max(paused, key=lambda each: (_rung(each), each.curve[-1].value), default=None)
    if trial is None:
        reason = "the next of the portfolio"
        trial = next((each for each in in_time if not each.curve), None)
    if best is not None and (trial is None or not _fits(search, best, after=trial)):
        reason, trial = "the best of those that have paused, before the time is over", best
    if trial is None:
        reason = "the next of the portfolio, shortened"
        trial = next((e for e in active if not e.curve and _shorten(search, e)), None)
    if trial is not None:
        is_short = estimate_rest(search, trial) <= _SHORT_SECONDS
        until = 1.0 if trial.of or is_short else trial.next_rung()
        return Decision(trial.name, until, reason, search.used_seconds)
    if active and choose(search) is None:
        trial = min(active, key=lambda each: estimate_rest(search, each))
        reason = "the fastest, because nothing fits into the time left"
        return Decision(trial.name, 1.0, reason, search.used_seconds, must_finish=True)
    for each in active:
        cost = format_duration(estimate_rest(search, each) + estimate_final(search, each))
        left = format_duration(max(search.left_seconds, 0.0))
        each.ended = f"not enough time: it needs about {cost}, {left} are left"
    return None


def choose(search: Search) -> Trial | None:
    """Return the best finished trial; None if none has finished.

    The first configuration that has finished wins unless another one is better by a standard error,
    because the best of many accuracies on few images is partly luck.
    """
    finished = [trial for trial in search.candidates if trial.is_finished]
    better = [trial for trial in finished[1:] if is_better(search, trial, finished[0])]
    return max(better, key=_final_value) if better else next(iter(finished), None)


def is_better(search: Search, trial: Trial, other: Trial) -> bool:
    """Return True if a finished trial is better than another one, by their validation images.

    Their mistakes on all validation splits that both have seen are counted. With fewer than
    `MIN_VALIDATION_IMAGES` in all, the difference has to be twice as large.
    """
    mistakes, other_mistakes, num_images = _count_mistakes(search, trial, other)
    z = _Z_BETTER if num_images >= MIN_VALIDATION_IMAGES else _Z_FEW
    return _z_score(other_mistakes, mistakes) >= z


def _count_mistakes(search: Search, trial: Trial, other: Trial) -> tuple[float, float, int]:
    """Return the mistakes of both, and the number of images, over the splits that both have."""
    mistakes = other_mistakes = 0.0
    num_images = 0
    for mine, its in zip(_splits(search, trial), _splits(search, other), strict=False):
        if mine.is_finished and its.is_finished:
            mistakes += (1 - mine.curve[-1].value) * mine.num_images
            other_mistakes += (1 - its.curve[-1].value) * its.num_images
            num_images += mine.num_images
    return mistakes, other_mistakes, num_images


def _splits(search: Search, trial: Trial) -> list[Trial]:
    return [trial, *(each for each in search.trials if each.of == trial.name)]


def _z_score(mistakes: float, fewer_mistakes: float) -> float:
    """Return a difference of mistakes in standard errors, as if no image were a mistake of both.

    That is McNemar's statistic at its smallest; one image more, so that a single one never decides.
    """
    return (mistakes - fewer_mistakes) / math.sqrt(mistakes + fewer_mistakes + 1)


def _final_value(trial: Trial) -> tuple[float, float]:
    point = trial.curve[-1]
    return point.value, -(math.inf if point.loss is None else point.loss)


def _rung(trial: Trial) -> float:
    """Return the last rung that a trial has passed; 0 for none."""
    return max((rung for rung in RUNGS if trial.curve and trial.at(rung)), default=0.0)


def _promotable(search: Search, in_time: Sequence[Trial]) -> Trial | None:
    """Return a paused trial in the better half at its rung, at the highest rung first.

    Runs that train only the classifier are nearer to their end at a rung, so they are ranked apart.
    """
    for rung, is_head in itertools.product(reversed(RUNGS[:-1]), (False, True)):
        same = [each for each in search.candidates if (each.kind == "head") == is_head]
        reached = [(_value_at(each, rung), each) for each in same if each.curve and each.at(rung)]
        reached.sort(key=lambda pair: pair[0], reverse=True)
        for _, trial in reached[: len(reached) // 2]:
            if trial in in_time and _rung(trial) == rung:
                return trial
    return None


def _value_at(trial: Trial, rung: float) -> float:
    point = trial.at(rung)
    assert point is not None, "it has not come as far"
    return point.value


def _repetition(search: Search) -> Trial | None:
    """Return a trial that repeats the best run, or the first one, on another validation split.

    A new one is added to the search. None if there are enough images, or there is no time.
    """
    finished = [trial for trial in search.candidates if trial.is_finished]
    if not search.can_resplit or search.num_train >= _SMALL_TRAIN_IMAGES or len(finished) < 2:
        return None
    first, best = finished[0], max(finished, key=_final_value)
    mistakes, first_mistakes, num_images = _count_mistakes(search, best, first)
    if best is first or num_images >= MIN_VALIDATION_IMAGES or mistakes >= first_mistakes:
        return None
    splits = {id(trial): _splits(search, trial) for trial in (best, first)}
    number = min(map(len, splits.values()))
    unfinished = [each for same in splits.values() for each in same if not each.is_finished]
    missing = [trial for trial in (best, first) if len(splits[id(trial)]) == number]
    cost = sum(_estimate_whole(search, trial) for trial in unfinished or missing)
    if number >= _MAX_SPLITS or cost + estimate_final(search, best) > search.left_seconds:
        return None
    if unfinished:
        return None if unfinished[0].ended else unfinished[0]
    base = missing[0]
    recipe = parse_recipe(base.recipe, name=base.name)
    seed = recipe.run.seed if recipe.data.split_seed is None else recipe.data.split_seed
    data = recipe.data.model_copy(update={"split_seed": seed + number})
    repeated = Trial(
        f"{base.name}-split{number + 1}",
        f"{base.description}, validation split {number + 1}",
        base.kind,
        recipe.model_copy(update={"data": data}).to_yaml(),
        base.estimate,
        base.final_seconds,
        of=base.name,
    )
    search.trials.append(repeated)
    return repeated


def _end_if_worse(search: Search, trial: Trial) -> None:
    """End a paused trial that is clearly worse than the best one was at the same point."""
    best, rung = choose(search), _rung(trial)
    if best is None or not rung or trial.ended or trial.is_finished:
        return
    value, best_value = _value_at(trial, rung), _value_at(best, rung)
    n = trial.num_images
    is_comparable = (trial.kind == "head") == (best.kind == "head")
    z = _Z_WORSE if is_comparable else 2 * _Z_WORSE
    if _z_score((1 - value) * n, (1 - best_value) * n) >= z:
        trial.ended = (
            f"clearly worse than {best.name} after {format_fraction(rung)}: "
            f"{format_percent(value, 1)} against {format_percent(best_value, 1)}"
        )


def _fits(search: Search, trial: Trial, *, after: Trial | None = None) -> bool:
    """True if a trial can be finished in the time left, and evaluated as the final model.

    Args:
        after: a trial that is trained to its next pause before.
    """
    seconds = estimate_rest(search, trial) + estimate_final(search, trial)
    if after is not None:
        seconds += estimate_rest(search, after) * (1 if after.of else RUNGS[0])
    return seconds <= search.left_seconds


def _shorten(search: Search, trial: Trial) -> bool:
    """Reduce the epochs of a waiting trial so that it fits. Returns: True if it fits now.

    The first configuration is left as it is, and none loses more than `_MIN_LENGTH` allows.
    """
    available = search.left_seconds - estimate_final(search, trial) - _MAX_RESUME_SECONDS
    length = available / max(estimate_rest(search, trial) - _MAX_RESUME_SECONDS, 1e-9)
    optim = parse_recipe(trial.recipe, name=trial.name).optim
    epochs = math.floor((optim.epochs or 0) * length)
    is_fixed = trial.kind == "head" or trial is search.trials[0]
    if is_fixed or not optim.epochs or epochs < max(1, _MIN_LENGTH * optim.epochs):
        return False
    length = epochs / optim.epochs
    changes = [f"optim.epochs={epochs}", f"optim.warmup_steps={round(optim.warmup_steps * length)}"]
    trial.recipe = parse_recipe(trial.recipe, name=trial.name, overrides=changes).to_yaml()
    trial.description += f", shortened to {pluralize(epochs, 'epoch')}"
    trial.estimate *= length
    return True


def format_fraction(fraction: float) -> str:
    """Format a rung, for users."""
    return {0.25: "a quarter of its steps", 0.5: "half of its steps", 1.0: "its end"}[fraction]


# Cost ---------------------------------------------------------------------------------------------


def estimate_rest(search: Search, trial: Trial) -> float:
    """Return the seconds that a trial needs to its last step."""
    if not trial.step_seconds:
        return _estimate_whole(search, trial)
    steps = trial.num_steps - trial.step
    return min(trial.start_seconds, _MAX_RESUME_SECONDS) + steps * trial.step_seconds


def estimate_final(search: Search, trial: Trial) -> float:
    """Return the seconds of the final evaluation, results and report, if a trial is chosen."""
    return trial.final_seconds * max(1.0, _pace(search.trials))


def _estimate_whole(search: Search, trial: Trial) -> float:
    """Return the seconds of a whole run: measured, or its estimate corrected by other runs."""
    if trial.step_seconds:
        return _measured_whole(trial)
    same = [each for each in search.trials if each.kind == trial.kind and each.step_seconds]
    return trial.estimate * _pace(same or search.trials)


def _pace(trials: Sequence[Trial]) -> float:
    """Return the measured time of trials as a fraction of their estimates; 1 before any has run."""
    ratios = [_measured_whole(each) / each.estimate for each in trials if each.step_seconds]
    return statistics.median(ratios) if ratios else 1.0


def _measured_whole(trial: Trial) -> float:
    return trial.start_seconds + trial.num_steps * trial.step_seconds
