"""Which recipe keys determine the trained weights, to compare and resume runs."""

from __future__ import annotations

from typing import Any

from finetune.recipe.schema import Recipe

__all__ = ["training_keys", "training_keys_without_seed"]

# A resumed run may change these: they affect hardware use and records, not the trained weights.
_NON_TRAINING_KEYS: dict[str, Any] = {
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


def training_keys(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Return the recipe's values that determine the trained weights, by section."""
    sections: dict[str, dict[str, Any]] = recipe.model_dump(exclude=_NON_TRAINING_KEYS)
    # The recipe in a run directory has keep or zeros instead of null, as resolved by the setup.
    sections["model"]["head_init"] = recipe.model.head_init or "zeros"
    sections["distill"] = sections["distill"] or {}
    return sections


def training_keys_without_seed(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Return `training_keys` without the seed: equal for runs that differ only in their seed."""
    sections = training_keys(recipe)
    del sections["run"]["seed"]
    return sections
