"""The configurations that `finetune tune RECIPE` compares: draws from the recipe's section `tune`.

The first one is the recipe as it is. The others are points of a scrambled Sobol sequence, which
covers the ranges more evenly than independent draws; the seed of the recipe determines them.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from finetune.commands.portfolio import (
    FINAL_SECONDS,
    START_SECONDS,
    eval_every_overrides,
    trial_kind,
)
from finetune.commands.successive_halving import Trial
from finetune.errors import RecipeError
from finetune.recipe.load import override_recipe, parse_overrides
from finetune.recipe.schema import Recipe
from finetune.recipe.training_keys import training_keys

__all__ = ["draw_trials"]

_LOG2_DRAWS = 6  # 64 draws; the balance of a Sobol sequence needs a power of two


def draw_trials(recipe: Recipe, measured: Mapping[str, Any]) -> list[Trial]:
    """Build the trials of a search, each recipe once; combinations that are invalid are left out.

    Args:
        recipe: the recipe with its section `tune`.
        measured: measured steps of the recipe, from `estimate.measure_recipe`. The time of other
            lengths is scaled; what else changes the time is unknown before it is measured.
    """
    num_train, sizes, seconds = measured["num_images"], measured["split_sizes"], measured["time"]
    rate = seconds["evaluated_per_second"]
    eval_seconds = 1 / rate if rate else seconds["features_seconds"] / sum(sizes.values())
    num_final = sizes["val"] + sizes.get("test", 0)
    trials: list[Trial] = []
    seen = []
    for drawn, description in ((recipe, "the recipe as it is"), *_draw(recipe, num_train)):
        if (keys := training_keys(drawn)) in seen:
            continue
        seen.append(keys)
        length = _num_samples(drawn, num_train) / _num_samples(recipe, num_train)
        steps_seconds = (seconds["run_seconds"] - seconds["features_seconds"]) * length
        trials.append(
            Trial(
                f"draw-{len(trials):02}" if trials else "recipe",
                description,
                trial_kind(drawn),
                drawn.to_yaml(),
                START_SECONDS + seconds["features_seconds"] + steps_seconds,
                FINAL_SECONDS + eval_seconds * num_final,
            )
        )
    return trials


def _draw(recipe: Recipe, num_train: int) -> Iterator[tuple[Recipe, str]]:
    """Yield drawn recipes, with the values that differ from those of the recipe."""
    from scipy.stats import qmc  # takes half a second to import

    whole_numbers = {key for key, values in recipe.tune.items() if _takes_whole(key, values)}
    own = recipe.model_dump(mode="json")
    for point in qmc.Sobol(len(recipe.tune), seed=recipe.run.seed).random_base2(_LOG2_DRAWS):
        changes = []
        for u, (key, values) in zip(point.tolist(), recipe.tune.items(), strict=True):
            value = _value_at(u, values)
            value = round(value) if key in whole_numbers else value
            if value != _value_of(own, key):
                changes.append(f"{key}={json.dumps(value, ensure_ascii=False)}")
        with contextlib.suppress(RecipeError):  # the values conflict
            drawn = override_recipe(recipe, changes)
            yield override_recipe(drawn, eval_every_overrides(drawn, num_train)), ", ".join(changes)


def _takes_whole(key: str, values: Any) -> bool:
    """True for a range of a key that takes only whole numbers."""
    if not isinstance(values, dict):
        return False
    try:
        parse_overrides([f"{key}={values['low'] + (values['high'] - values['low']) / math.pi}"])
    except RecipeError:
        return True
    return False


def _value_at(u: float, values: Any) -> Any:
    """Return the value at a coordinate of a point, 0 <= u < 1."""
    if not isinstance(values, dict):
        return values[int(u * len(values))]
    low, high = values["low"], values["high"]
    value = low * (high / low) ** u if values["log"] else low + u * (high - low)
    return min(max(float(f"{value:.3g}"), low), high)


def _value_of(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = (tree or {}).get(part)
    return tree


def _num_samples(recipe: Recipe, num_train: int) -> float:
    """Return the number of images, with repetitions, that a run trains on."""
    optim = recipe.optim
    return optim.steps * recipe.data.batch_size if optim.steps else (optim.epochs or 0) * num_train
