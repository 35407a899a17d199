"""The configurations that `finetune train SOURCE --minutes N` compares, in the order of a prior.

The first one is the recipe that `finetune train SOURCE` trains. The others vary what matters most
in fine-tuning: weights, what is trained, learning rate, layer decay, length and augmentation.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from finetune.commands.start import Choice, StartResult
from finetune.commands.weight_selection import Score
from finetune.errors import RecipeError
from finetune.recipe.schema import Recipe
from finetune.recipe.training_keys import training_keys

__all__ = ["PORTFOLIO", "Configuration", "Member", "build_configurations"]


class Member(NamedTuple):
    """A row of the portfolio.

    Attributes:
        name: name of its run directory.
        description: what is trained, for users.
        weights: "best", "second" or "third" by the accuracy of frozen features; "other size" for
            the best weights at the second-best image size.
        frozen: True to train only the classifier.
        lr: factor of the learning rate.
        length: factor of the number of epochs.
        changes: overrides of the recipe.
        augment: transforms that are added to those of the training images.
    """

    name: str
    description: str
    weights: str = "best"
    frozen: bool = False
    lr: float = 1.0
    length: float = 1.0
    changes: tuple[str, ...] = ()
    augment: str = ""


_LORA = "model.adapter={kind: lora, rank: 16, targets: [all]}"
_SMOOTHING = "optim.label_smoothing=0.1"

PORTFOLIO = (
    Member("full-low", "all weights, a third of the learning rate", lr=1 / 3),
    Member("head", "only the classifier", frozen=True),
    Member("full", "all weights"),
    Member("short-low", "half as long, a third of the learning rate", lr=1 / 3, length=0.5),
    Member("layer-decay", "all weights, layer decay 0.75", changes=("optim.layer_decay=0.75",)),
    Member(
        "augmented",
        "all weights, TrivialAugment, half as long again",
        length=1.5,
        changes=(_SMOOTHING,),
        augment="trivial_augment",
    ),
    Member("lora", "LoRA of all layers", changes=(_LORA, "model.freeze_bn=false")),
    Member("second-head", "only the classifier, second weights", weights="second", frozen=True),
    Member("second-low", "second weights, a third of the learning rate", "second", lr=1 / 3),
    Member("other-size", "another image size", weights="other size", lr=1 / 3),
    Member(
        "mixup",
        "all weights, TrivialAugment and mixup, twice as long",
        length=2,
        augment="trivial_augment | mixup(0.2)",
    ),
    Member(
        "high",
        "three times the learning rate, layer decay 0.65",
        lr=3,
        changes=("optim.layer_decay=0.65",),
    ),
    Member("third-head", "only the classifier, third weights", weights="third", frozen=True),
)

# Keys of the run itself, not of its trials: the final run has the user's values.
_TRIAL_CHANGES = (
    *("run.push_to=null", "run.push_private=false", "run.trackers=[]"),
    "run.keep_checkpoints=1",
)
# Cost of a run before anything is measured, in seconds of a forward pass of its weights.
_TRAIN_FORWARDS = 3.5  # a training step with its transforms
_START_SECONDS = 5.0  # besides computing features
_MIN_EVALUATIONS = 4  # of a run, so that it can pause


@dataclass(frozen=True)
class Configuration:
    """A recipe to try, and its cost before anything is measured.

    Attributes:
        name: name of its run directory.
        description: what is trained, for users.
        kind: "head", "full" or "lora": runs of one kind have errors of the same size in `seconds`.
        recipe: the recipe.
        seconds: estimated seconds of the whole run, without the final evaluation.
        forward_seconds: seconds per image of a forward pass.
    """

    name: str
    description: str
    kind: str
    recipe: Recipe
    seconds: float
    forward_seconds: float


def build_configurations(
    start: StartResult,
    members: Sequence[Member] | None = None,
    *,
    max_seconds: float = math.inf,
) -> list[Configuration]:
    """Build the recipes to try, each once; what the user has set is the same in all of them.

    Args:
        start: the recipe that `finetune train SOURCE` trains, which is the first one.
        members: the others; None for `PORTFOLIO`.
        max_seconds: estimated seconds of one run, to which the epochs of the others are limited.
    """
    first = start.builder.build(start.choice, _TRIAL_CHANGES).recipe
    made = [_configuration(start, "start", str(start.choice.score.candidate), start.choice, first)]
    for member in PORTFOLIO if members is None else members:
        score = _select_score(start.choice, member.weights)
        asked = start.builder.frozen_as_asked()
        if score is None or asked not in (None, member.frozen):
            continue
        affordable = max_seconds / _epoch_seconds(start, score)
        epochs = max(1, round(min(start.builder.usual_epochs() * member.length, affordable)))
        choice = replace(
            start.choice, score=score, frozen=member.frozen, epochs=epochs, reason="", seconds=None
        )
        try:
            recipe = _build_member(start, member, choice)
        except RecipeError:  # it conflicts with what the user has set
            continue
        if all(training_keys(recipe) != training_keys(each.recipe) for each in made):
            description = f"{score.candidate}: {member.description}"
            made.append(_configuration(start, member.name, description, choice, recipe))
    return made


def _build_member(start: StartResult, member: Member, choice: Choice) -> Recipe:
    changes = list(member.changes)
    if member.lr != 1 and not member.frozen:
        changes.append(f"optim.lr={choice.score.candidate.lr * member.lr:.2g}")
    if member.augment:
        spec = start.builder.build(choice).recipe.data.train
        changes.append(f"data.train={json.dumps(f'{spec} | {member.augment}')}")
    kept = [each for each in changes if each.partition("=")[0] not in start.builder.asked]
    if changes and not kept and member.length == 1:
        raise RecipeError(f"{member.name}: the user has set all of it", code="recipe.conflict")
    recipe = start.builder.build(choice, [*kept, *_TRIAL_CHANGES]).recipe
    epochs = recipe.optim.epochs
    if epochs is None or epochs >= _MIN_EVALUATIONS or recipe.run.eval_every is not None:
        return recipe
    # A run can pause only where it evaluates.
    num_steps = epochs * start.builder.stats.num_train / recipe.data.batch_size
    every = f"run.eval_every={max(1, math.ceil(num_steps / _MIN_EVALUATIONS))}"
    return start.builder.build(choice, [*kept, *_TRIAL_CHANGES, every]).recipe


def _select_score(choice: Choice, weights: str) -> Score | None:
    """Return the weights of a member; None if there are no such weights on this machine."""
    best = choice.score
    scores = [score for score in choice.scores if score.has_features and score != best]
    if weights == "best":
        return best
    if weights == "other size":
        same = (score for score in scores if score.candidate.name == best.candidate.name)
        return next(same, None)
    names = dict.fromkeys(score.candidate.name for score in scores)
    names.pop(best.candidate.name, None)
    rank = ("second", "third").index(weights)
    if rank >= len(names):
        return None
    name = list(names)[rank]
    return next(score for score in scores if score.candidate.name == name)


def _configuration(
    start: StartResult, name: str, description: str, choice: Choice, recipe: Recipe
) -> Configuration:
    forward = choice.score.forward_seconds
    seconds = _START_SECONDS + forward * (start.builder.stats.num_train + _num_val(start))
    if not choice.frozen:
        seconds += max(choice.epochs * _epoch_seconds(start, choice.score), choice.seconds or 0.0)
    kind = "head" if choice.frozen else "lora" if recipe.model.adapter else "full"
    return Configuration(name, description, kind, recipe, seconds, forward)


def _epoch_seconds(start: StartResult, score: Score) -> float:
    """Estimate the seconds of an epoch in which all weights are trained, with its evaluation."""
    forwards = _TRAIN_FORWARDS * start.builder.stats.num_train + _num_val(start)
    return score.forward_seconds * forwards


def _num_val(start: StartResult) -> int:
    stats = start.builder.stats
    return stats.split_sizes.get("val", stats.split_sizes["train"] - stats.num_train)
