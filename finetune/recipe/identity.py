"""The keys of a recipe that decide what is learned, and the recipe of a run directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from finetune.recipe.load import Recipe, load_recipe

__all__ = ["learned", "recipe_of", "without_seed"]

# A resumed run may differ in these: they change where and how fast, not what is learned.
_FREE_KEYS: dict[str, Any] = {
    "claims": True,
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
    """Load the recipe of a run directory; None for a model folder or a name on the hub."""
    is_run = all(os.path.isfile(os.path.join(model, name)) for name in ("run.json", "recipe.yaml"))
    return load_recipe(Path(model) / "recipe.yaml") if is_run else None


def learned(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Return the keys of a recipe that decide what is learned, by section."""
    sections: dict[str, dict[str, Any]] = recipe.model_dump(exclude=_FREE_KEYS)
    # The recipe of a run directory says keep or zeros, as the setup has found it.
    sections["model"]["head_init"] = recipe.model.head_init or "zeros"
    sections["distill"] = sections["distill"] or {}
    return sections


def without_seed(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Return `learned` but for the seed: equal for runs that repeat one another."""
    sections = learned(recipe)
    del sections["run"]["seed"]
    return sections
