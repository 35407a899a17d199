"""The configurations that `finetune train SOURCE --minutes N` compares, with recorded accuracies.

The first one is the recipe that `finetune train SOURCE` trains. The others vary what matters most
in fine-tuning: weights, what is trained, learning rate, layer decay, length and augmentation.
portfolio.csv has a row for each, with its test accuracy on the image sets that were recorded in
benchmarks/tune_regret.jsonl.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
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
    # "best", "second" or "third" by the accuracy of frozen features; "other size" for the best
    # weights at the second-best image size
    weights: str = "best"
    kind: str = "full"  # see `Trial.kind`
    lr_factor: float = 1.0  # of `Candidate.lr`; `start` uses 1/3 after training the classifier
    epochs_factor: float = 1.0
    layer_decay: float | None = None
    label_smoothing: float = 0.0
    augment: str = ""  # transforms that are added to those of the training images
    # recorded test accuracies, by the name of the image set
    accuracies: Mapping[str, float] = MappingProxyType({})

    @property
    def overrides(self) -> list[str]:
        """Overrides of the recipe, without learning rate, epochs and transforms."""
        lora = ["model.adapter={kind: lora, rank: 16, targets: [all]}", "model.freeze_bn=false"]
        overrides = lora if self.kind == "lora" else []
        if self.layer_decay is not None:
            overrides.append(f"optim.layer_decay={self.layer_decay:g}")
        if self.label_smoothing:
            overrides.append(f"optim.label_smoothing={self.label_smoothing:g}")
        return overrides

    def describe(self) -> str:
        """Describe what is trained, for users."""
        trained = {"head": "only the classifier", "lora": "LoRA of all layers"}
        parts = [trained.get(self.kind, "all weights")]
        if self.lr_factor != 1:
            parts.append(f"{self.lr_factor:.2g} times the learning rate")
        if self.epochs_factor != 1:
            parts.append(f"{self.epochs_factor:g} times the epochs")
        if self.layer_decay is not None:
            parts.append(f"layer decay {self.layer_decay:g}")
        if self.label_smoothing:
            parts.append(f"label smoothing {self.label_smoothing:g}")
        if self.augment:
            parts.append(self.augment)
        return ", ".join(parts)


def _read_portfolio() -> Iterator[Config]:
    """Yield the rows of portfolio.csv."""
    with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            yield Config(
                name=row.pop("name"),
                weights=row.pop("weights"),
                kind=row.pop("kind"),
                lr_factor=float(row.pop("lr_factor")),
                epochs_factor=float(row.pop("epochs_factor")),
                layer_decay=float(decay) if (decay := row.pop("layer_decay")) else None,
                label_smoothing=float(row.pop("label_smoothing") or 0),
                augment=row.pop("augment"),
                # the other columns are image sets
                accuracies={name: float(accuracy) for name, accuracy in row.items() if accuracy},
            )


_START, *_OTHERS = _read_portfolio()
PORTFOLIO = tuple(_OTHERS)

_MIN_EVALUATIONS = 4  # of a run, so that it can pause
# Cost of a run before anything is measured: in seconds, or in forward passes per image.
START_SECONDS = 5.0  # besides computing features
FINAL_SECONDS = 8.0  # of results, card and report
_TRAIN_FORWARDS = 3.5  # a training step with its transforms, unless `start` has measured it
_HEAD_STEP_SECONDS = 0.006  # a step of the classifier on cached features
_FINAL_FORWARDS = 0.5  # the final evaluation has larger batches than the measurement


def build_trials(created: StartResult, *, max_seconds: float = math.inf) -> list[Trial]:
    """Build the trials of a search, each recipe once; what the user has set is the same in all.

    Args:
        created: the recipe that `finetune train SOURCE` trains, which is the first one.
        max_seconds: estimated seconds of one run, to which the epochs of the others are limited.
    """
    builder, choice = created.builder, created.choice
    first = builder.build(choice).recipe
    trials = [_build_trial(created, choice, first, _START, str(choice.score.candidate))]
    seen, scores = [training_keys(first)], _scores_by_rank(choice)
    for config in PORTFOLIO:
        score = scores.get(config.weights)
        frozen = config.kind == "head"
        if score is None or builder.frozen_by_overrides() not in (None, frozen):
            continue
        affordable = max_seconds / _epoch_seconds(created, score)
        epochs = max(1, round(min(builder.default_epochs() * config.epochs_factor, affordable)))
        changed = replace(
            choice, score=score, frozen=frozen, epochs=epochs, reason="", seconds=None
        )
        try:
            recipe = _build_recipe(created, config, changed)
        except RecipeError:  # it conflicts with what the user has set
            continue
        if training_keys(recipe) not in seen:
            seen.append(training_keys(recipe))
            description = f"{score.candidate}: {config.describe()}"
            trials.append(_build_trial(created, changed, recipe, config, description))
    return trials


def _scores_by_rank(choice: Choice) -> dict[str, Score]:
    """Return the weights that `Config.weights` can name, without those that are clearly worse."""
    best = choice.score
    by_name = {best.candidate.name: [best]}
    for score in choice.scores:
        if score.has_features and score != best and score.may_beat(best):
            by_name.setdefault(score.candidate.name, []).append(score)
    same_name, *others = by_name.values()
    ranked = dict(zip(("best", "other size"), same_name, strict=False))
    return ranked | {
        rank: scores[0] for rank, scores in zip(("second", "third"), others, strict=False)
    }


def _build_recipe(created: StartResult, config: Config, choice: Choice) -> Recipe:
    """Build the recipe of a row. Raises: RecipeError if it conflicts with the user's keys."""
    builder, changes = created.builder, config.overrides
    if config.kind != "head":
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


def _build_trial(
    created: StartResult, choice: Choice, recipe: Recipe, config: Config, description: str
) -> Trial:
    """Return the trial of a row, with its estimated cost."""
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
    kind, text = trial_kind(recipe), recipe.to_yaml()
    return Trial(
        config.name, description, kind, text, seconds, final_seconds, dict(config.accuracies)
    )


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
