"""What of a recipe decides what is learned, and the recipe of a run directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from finetune.recipe.load import Recipe, load_recipe

__all__ = ["but_the_seed", "learned", "recipe_of"]

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


def recipe_of(model: str | Path) -> Recipe | None:
    """The recipe of a run directory; None for a model folder or a name on the hub."""
    is_run = all(os.path.isfile(os.path.join(model, name)) for name in ("run.json", "recipe.yaml"))
    return load_recipe(Path(model) / "recipe.yaml") if is_run else None


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
