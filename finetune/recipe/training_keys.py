"""The recipe keys that determine the trained weights; used to compare and resume runs."""

from __future__ import annotations

from typing import Any

from finetune.recipe.schema import Recipe

__all__ = ["training_keys", "training_keys_without_seed"]

# Keys that a resumed run may change: they affect hardware use and logging, not the trained weights.
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
    """Return {section: {key: value}} of the keys that determine the trained weights.

    `data.source` is redacted, so a URL with another signature is the same source.
    """
    sections: dict[str, dict[str, Any]] = recipe.redacted().model_dump(exclude=_NON_TRAINING_KEYS)
    # Training replaces null with "keep" or "zeros" in a run's recipe; elsewhere, null counts as
    # "zeros".
    sections["model"]["head_init"] = recipe.model.head_init or "zeros"
    sections["distill"] = sections["distill"] or {}
    return sections


def training_keys_without_seed(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Return `training_keys` without run.seed; equal for runs that differ only in the seed."""
    sections = training_keys(recipe)
    del sections["run"]["seed"]
    return sections
