"""The recipe keys that determine the trained weights; used to compare and resume runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from finetune.recipe.schema import Recipe

__all__ = [
    "LOCATION_KEYS",
    "TRAINING_ONLY_ARGS",
    "changed_training_keys",
    "names_other_inputs",
    "training_keys",
    "training_keys_without_seed",
]

LOCATION_KEYS = ("data.source", "data.decisions")  # the same data may be in another place
# Keys that draw images from a source, which do not change `Source.whole_fingerprints`.
_DRAW_KEYS = (
    *("data.val_fraction", "data.split_seed", "data.long_tail"),
    *("data.num_train", "data.num_val", "data.num_test"),
)
# Keys that say which images, weights and teacher are used; with another value, others are expected.
_INPUT_KEYS = (
    *_DRAW_KEYS,
    *("data.source", "data.task", "data.merge_val", "data.classes"),
    *("data.decisions", "data.decisions_on_test", "data.image_column", "data.label_column"),
    *("data.group", "data.streaming"),
    *("model.name", "model.args", "model.rename", "model.pretrained", "model.image_size"),
    *("model.posemb", "distill.teacher"),
)
# Dropout rates used in training; config.json omits them, since inference does not need them.
TRAINING_ONLY_ARGS = {
    "drop_rate",
    "pos_drop_rate",
    "patch_drop_rate",
    "proj_drop_rate",
    "attn_drop_rate",
    "drop_path_rate",
}
# Keys that a resumed run may change: they affect hardware use and logging, not the trained weights.
_NON_TRAINING_KEYS: dict[str, Any] = {
    "claims": True,
    "tune": True,
    "data": {"micro_batch", "eval_batch_size", "keep", "workers", "unreadable"},
    "run": {
        "log_every",
        "save_every",
        "keep_checkpoints",
        "num_processes",
        "threads",
        "timeout_seconds",
        "trackers",
        "note",
        "push_to",
        "push_private",
    },
}


def training_keys(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Return {section: {key: value}}, as in JSON, of the keys that determine the trained weights.

    `data.source` is redacted, so a URL with another signature is the same source.
    """
    sections: dict[str, dict[str, Any]] = recipe.redacted().model_dump(
        mode="json", exclude=_NON_TRAINING_KEYS
    )
    # Training replaces null with "keep" or "zeros" in a run's recipe; elsewhere, null counts as
    # "zeros".
    sections["model"]["head_init"] = recipe.model.head_init or "zeros"
    sections["distill"] = sections["distill"] or {}
    return sections


def names_other_inputs(keys: Iterable[str], section: str, *, include_draws: bool = True) -> bool:
    """Return True if one of some keys says that other images, weights or teachers are used.

    Args:
        keys: the keys that differ between recipes, such as "data.num_train".
        section: "data" for images, "model" for weights, "distill" for teachers.
        include_draws: False to ignore keys that only draw images from those of the source.
    """
    return any(
        key in _INPUT_KEYS
        and key.startswith(f"{section}.")
        and (include_draws or key not in _DRAW_KEYS)
        for key in keys
    )


def changed_training_keys(recorded: Mapping[str, Any], recipe: Recipe) -> dict[str, str]:
    """Compare a recipe with the recipe of a run.

    Args:
        recorded: `training_keys` of the run's recipe, from run.json. A key that it lacks is newer
            than the run, and is ignored.
    Returns: a dict from each key that differs, such as "optim.lr", to a text with both values.
    """
    changes = {}
    for section, new in training_keys(recipe).items():
        old = recorded.get(section, {})
        for key in old or new:  # an empty section: the run had no `distill`
            if old.get(key) != new.get(key):
                changes[f"{section}.{key}"] = f"the run has {old.get(key)!r}, now {new.get(key)!r}"
    return changes


def training_keys_without_seed(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Return `training_keys` without run.seed; equal for runs that differ only in the seed."""
    sections = training_keys(recipe)
    del sections["run"]["seed"]
    return sections
