"""The configurations that `finetune train SOURCE --minutes N` compares, in the order of a prior.

The first one is the recipe that `finetune train SOURCE` trains. The others vary what matters most
in fine-tuning: weights, what is trained, learning rate, layer decay, length and augmentation.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from finetune.commands.start import Choice, StartResult
from finetune.commands.successive_halving import Trial
from finetune.commands.weight_selection import Score
from finetune.errors import RecipeError
from finetune.recipe.schema import Recipe
from finetune.recipe.training_keys import training_keys

__all__ = [
    "FINAL_SECONDS",
    "PORTFOLIO",
    "START_SECONDS",
    "Config",
    "build_trials",
    "eval_every_overrides",
    "trial_kind",
]


class Config(NamedTuple):
    """A row of the portfolio: how its recipe differs from that of `start`."""

    name: str  # of its run directory
    description: str  # what is trained, for users
    # "best", "second" or "third" by the accuracy of frozen features; "other size" for the best
    # weights at the second-best image size
    weights: str = "best"
    frozen: bool = False  # True to train only the classifier
    lr_factor: float = 1.0  # of `Candidate.lr`; `start` uses 1/3 after training the classifier
    epochs_factor: float = 1.0
    overrides: tuple[str, ...] = ()  # of the recipe
    augment: str = ""  # transforms that are added to those of the training images


_LORA = "model.adapter={kind: lora, rank: 16, targets: [all]}"
_SMOOTHING = "optim.label_smoothing=0.1"

# The order of the first nine is learned from the recorded runs of eight tasks, in
# benchmarks/tune_regret.jsonl; that of the others is a judgment.
PORTFOLIO = (
    Config(
        "short-augmented",
        "half as long, layer decay 0.85, TrivialAugment",
        lr_factor=3 / 4,
        epochs_factor=0.5,
        overrides=("optim.layer_decay=0.85",),
        augment="trivial_augment",
    ),
    Config("lora", "LoRA of all layers", overrides=(_LORA, "model.freeze_bn=false")),
    Config(
        "short-decay",
        "half as long, layer decay 0.65, TrivialAugment",
        lr_factor=5 / 4,
        epochs_factor=0.5,
        overrides=("optim.layer_decay=0.65",),
        augment="trivial_augment",
    ),
    Config(
        "decay-high",
        "1.7 times the learning rate, layer decay 0.85",
        lr_factor=1.7,
        overrides=("optim.layer_decay=0.85",),
    ),
    Config(
        "second-augmented",
        "second weights, a quarter of the learning rate, layer decay 0.75, TrivialAugment",
        weights="second",
        lr_factor=1 / 4,
        overrides=("optim.layer_decay=0.75",),
        augment="trivial_augment",
    ),
    Config(
        "augmented",
        "all weights, TrivialAugment, 1.5 times as long",
        lr_factor=1 / 3,
        epochs_factor=1.5,
        overrides=(_SMOOTHING,),
        augment="trivial_augment",
    ),
    Config("layer-decay", "all weights, layer decay 0.75", overrides=("optim.layer_decay=0.75",)),
    Config("full-low", "all weights, a third of the learning rate", lr_factor=1 / 3),
    Config(
        "high",
        "three times the learning rate, layer decay 0.65",
        lr_factor=3,
        overrides=("optim.layer_decay=0.65",),
    ),
    Config("head", "only the classifier", frozen=True),
    Config("second-head", "only the classifier, second weights", weights="second", frozen=True),
    Config("full", "all weights"),
    Config("second-low", "second weights, a third of the learning rate", "second", lr_factor=1 / 3),
    Config("other-size", "another image size", weights="other size", lr_factor=1 / 3),
    Config(
        "mixup",
        "all weights, TrivialAugment and mixup, twice as long",
        lr_factor=1 / 3,
        epochs_factor=2,
        augment="trivial_augment | mixup(0.2)",
    ),
    Config("third-head", "only the classifier, third weights", weights="third", frozen=True),
)

_MIN_EVALUATIONS = 4  # of a run, so that it can pause
# Cost of a run before anything is measured: in seconds, or in forward passes per image.
START_SECONDS = 5.0  # besides computing features
FINAL_SECONDS = 8.0  # of results, card and report
_TRAIN_FORWARDS = 3.5  # a training step with its transforms, unless `start` has measured it
_HEAD_STEP_SECONDS = 0.006  # a step of the classifier on cached features
_FINAL_FORWARDS = 0.5  # the final evaluation has larger batches than the measurement


def build_trials(
    created: StartResult, configs: Sequence[Config] | None = None, *, max_seconds: float = math.inf
) -> list[Trial]:
    """Build the trials of a search, each recipe once; what the user has set is the same in all.

    Args:
        created: the recipe that `finetune train SOURCE` trains, which is the first one.
        configs: the others; None for `PORTFOLIO`.
        max_seconds: estimated seconds of one run, to which the epochs of the others are limited.
    """
    builder, choice = created.builder, created.choice
    first = builder.build(choice).recipe
    trials = [_estimate_trial(created, choice, first, "start", str(choice.score.candidate))]
    seen, scores = [training_keys(first)], _scores_by_rank(choice)
    for config in PORTFOLIO if configs is None else configs:
        score = scores.get(config.weights)
        if score is None or builder.frozen_by_overrides() not in (None, config.frozen):
            continue
        affordable = max_seconds / _epoch_seconds(created, score)
        epochs = max(1, round(min(builder.default_epochs() * config.epochs_factor, affordable)))
        changed = replace(
            choice, score=score, frozen=config.frozen, epochs=epochs, reason="", seconds=None
        )
        try:
            recipe = _build_recipe(created, config, changed)
        except RecipeError:  # it conflicts with what the user has set
            continue
        if training_keys(recipe) not in seen:
            seen.append(training_keys(recipe))
            description = f"{score.candidate}: {config.description}"
            trials.append(_estimate_trial(created, changed, recipe, config.name, description))
    return trials


def _scores_by_rank(choice: Choice) -> dict[str, Score]:
    """Return the weights that `Config.weights` can name, as far as this machine has them."""
    best = choice.score
    by_name = {best.candidate.name: [best]}
    for score in choice.scores:
        if score.has_features and score != best:
            by_name.setdefault(score.candidate.name, []).append(score)
    same_name, *others = by_name.values()
    ranked = dict(zip(("best", "other size"), same_name, strict=False))
    return ranked | {
        rank: scores[0] for rank, scores in zip(("second", "third"), others, strict=False)
    }


def _build_recipe(created: StartResult, config: Config, choice: Choice) -> Recipe:
    """Build the recipe of a row. Raises: RecipeError if it conflicts with the user's keys."""
    builder, changes = created.builder, list(config.overrides)
    if not config.frozen:
        changes.append(f"optim.lr={choice.score.candidate.lr * config.lr_factor:.2g}")
    if config.augment:
        spec = builder.build(choice).recipe.data.train
        changes.append(f"data.train={json.dumps(f'{spec} | {config.augment}')}")
    overrides = [each for each in changes if each.partition("=")[0] not in builder.override_values]
    if changes and not overrides and config.epochs_factor == 1:
        raise RecipeError(f"{config.name}: the user has set all of it", code="recipe.conflict")
    recipe = builder.build(choice, overrides).recipe
    overrides += eval_every_overrides(recipe, builder.stats.num_train)
    return builder.build(choice, overrides).recipe


def eval_every_overrides(recipe: Recipe, num_train: int) -> list[str]:
    """Return overrides with which a short run evaluates often, because it can pause only there."""
    epoch_steps = num_train / recipe.data.batch_size
    num_steps = recipe.optim.steps or (recipe.optim.epochs or 0) * epoch_steps
    if num_steps >= _MIN_EVALUATIONS * epoch_steps or recipe.run.eval_every is not None:
        return []
    return [f"run.eval_every={max(1, math.ceil(num_steps / _MIN_EVALUATIONS))}"]


def trial_kind(recipe: Recipe) -> str:
    """Return "head", "lora" or "full", see `Trial.kind`."""
    is_head = recipe.model.freeze == "backbone"
    return "head" if is_head else "lora" if recipe.model.adapter else "full"


def _estimate_trial(
    created: StartResult, choice: Choice, recipe: Recipe, name: str, description: str
) -> Trial:
    """Return a trial with its estimated cost."""
    forward_seconds, num_val = choice.score.forward_seconds, _num_val(created)
    num_train, optim = created.builder.stats.num_train, recipe.optim
    seconds = START_SECONDS + forward_seconds * (num_train + num_val)
    head_epochs = sum(stage.epochs or 0 for stage in optim.stages if stage.freeze == "backbone")
    if choice.frozen:
        head_epochs += optim.epochs or 0
    else:
        seconds += choice.epochs * _epoch_seconds(created, choice.score)
    seconds += head_epochs * num_train / recipe.data.batch_size * _HEAD_STEP_SECONDS
    num_final = num_val + created.builder.stats.split_sizes.get("test", 0)
    final_seconds = FINAL_SECONDS + _FINAL_FORWARDS * forward_seconds * num_final
    return Trial(name, description, trial_kind(recipe), recipe.to_yaml(), seconds, final_seconds)


def _epoch_seconds(created: StartResult, score: Score) -> float:
    """Estimate the seconds of an epoch in which all weights are trained, with its evaluation."""
    num_train, choice = created.builder.stats.num_train, created.choice
    train_forwards = _TRAIN_FORWARDS
    if choice.seconds is not None and not choice.frozen:
        forward_seconds = choice.score.forward_seconds
        train_forwards = choice.seconds / choice.epochs / num_train / forward_seconds
    return score.forward_seconds * (train_forwards * num_train + _num_val(created))


def _num_val(created: StartResult) -> int:
    stats = created.builder.stats
    return stats.split_sizes.get("val", stats.split_sizes["train"] - stats.num_train)
