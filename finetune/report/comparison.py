"""Build the table rows of a comparison page: recipes, runs and claims."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.errors import RecipeError
from finetune.evaluation.claims import PERCENT_METRICS
from finetune.evaluation.metrics import mean_std
from finetune.formatting import MISSING, format_mean_std
from finetune.recipe.schema import Recipe
from finetune.recipe.training_keys import names_other_inputs, training_keys_without_seed
from finetune.report.run_data import (
    Run,
    format_accuracy_interval,
    format_decimal,
    format_duration,
    format_percent,
    has_too_few_images,
    use_narrow_spaces,
)
from finetune.report.sections import (
    claim_rows,
    training_images_per_second,
    training_seconds,
)
from finetune.run.directory import unique_run_names
from finetune.run.record import (
    describe_split_decisions,
    differing_inputs,
    have_other_shards,
    have_other_test_images,
    training_identity,
)

__all__ = [
    "RecipeGroup",
    "check_comparable",
    "claim_comparison_rows",
    "data_identity",
    "differing_settings",
    "group_by_recipe",
    "group_rows",
    "have_other_images",
    "metric_columns",
    "run_rows",
    "unstated_differences",
]

Row = dict[str, Any]

Column = tuple[str, str, str]  # split, metric, table header

_CLASSIFICATION_METRICS = {
    "top1": "top-1",
    "top5": "top-5",
    "balanced_accuracy": "balanced accuracy",
    "loss": "loss",
    "ece": "ECE",
}
_MULTILABEL_METRICS = {"map": "mAP", "macro_f1": "macro F1", "micro_f1": "micro F1", "loss": "loss"}
_MAX_NAME_LENGTH = 60  # max characters of a recipe's name with the settings that distinguish it


def check_comparable(runs: Sequence[Run]) -> None:
    """Raise RecipeError for a mix of single-label and multi-label runs, which share no metric."""
    if len({run.is_multilabel for run in runs}) > 1:
        multilabel_path, single_label_path = (
            next(run.path for run in runs if run.is_multilabel is is_multilabel)
            for is_multilabel in (True, False)
        )
        raise RecipeError(
            f"{multilabel_path} and {single_label_path}: the first run is multi-label, the second "
            "single-label, so they have no metric in common; give only runs of one kind",
            code="recipe.conflict",
        )


@dataclass(frozen=True)
class RecipeGroup:
    """Runs of one recipe, with different seeds."""

    name: str
    runs: list[Run]


def group_by_recipe(runs: Sequence[Run]) -> list[RecipeGroup]:
    """Group runs that differ only in the seed; keeps the order of the runs.

    Runs with other images or other pretrained weights are in another group.
    """
    by_recipe: dict[str, list[Run]] = {}
    for run in runs:
        identity = training_identity(run.recipe, run.record)
        by_recipe.setdefault(json.dumps(identity, sort_keys=True), []).append(run)
    recipe_groups = [
        RecipeGroup(_common_name([run.name for run in group_runs]), group_runs)
        for group_runs in by_recipe.values()
    ]
    labels: dict[int, str] = {}
    for name in {group.name for group in recipe_groups}:
        same_name = [group for group in recipe_groups if group.name == name]
        labels |= zip(map(id, same_name), _disambiguate_names(same_name), strict=True)
    return [RecipeGroup(labels[id(group)], group.runs) for group in recipe_groups]


def _disambiguate_names(groups: list[RecipeGroup]) -> list[str]:
    """Make equal recipe names unique by adding as few settings as possible, else a number."""
    name = groups[0].name
    if len(groups) == 1:
        return [name]
    settings = differing_settings([group.runs[0].recipe for group in groups])
    for num_keys in range(1, len(settings) + 1):
        labels = [
            f"{name} ({', '.join(f'{key}={values[index]}' for key, values in settings[:num_keys])})"
            for index in range(len(groups))
        ]
        if len(set(labels)) == len(labels) and max(map(len, labels)) <= _MAX_NAME_LENGTH:
            return labels
    return [f"{name} ({index})" for index in range(1, len(groups) + 1)]


def _common_name(names: list[str]) -> str:
    """Return the common prefix of run names, without the seed: nano-s0, nano-s1 → nano."""
    common_chars = itertools.takewhile(
        lambda chars: len(set(chars)) == 1, zip(*names, strict=False)
    )
    prefix = "".join(chars[0] for chars in common_chars)
    return re.sub(r"[-_.]((s|seed)[-_.]?\d*)?$", "", prefix) or names[0]


def differing_settings(recipes: Sequence[Recipe]) -> list[tuple[str, list[str]]]:
    """Find the keys that differ between recipes, except the seed.

    Returns: pairs of a key, such as "optim.lr", and its value in each recipe, as text.
    """
    resolved = [training_keys_without_seed(recipe) for recipe in recipes]
    differing = []
    for section in resolved[0] if resolved else ():
        for key in dict.fromkeys(key for recipe in resolved for key in recipe[section]):
            values = [recipe[section].get(key) for recipe in resolved]
            if any(value != values[0] for value in values):
                differing.append((f"{section}.{key}", [_format_setting(value) for value in values]))
    return differing


def unstated_differences(runs: Sequence[Run]) -> list[str]:
    """Return what differs between runs although the recipe keys that name it do not.

    Images on which metrics were measured are always returned.
    """
    keys = [key for key, _ in differing_settings([run.recipe for run in runs])]
    identities = [training_identity(run.recipe, run.record) for run in runs]
    splits = [run.record.get("split_fingerprints", {}) for run in runs]
    inputs = differing_inputs(identities)
    # The seed of one run may have drawn the images that data.split_seed of another has drawn.
    if "data.split_seed" in keys and splits[0] and all(each == splits[0] for each in splits):
        inputs.pop("data", None)
    # Runs of one seed differ in drawn images if a key such as data.val_fraction differs.
    of_seed = {run.recipe.run.seed: each for run, each in zip(runs, splits, strict=True)}
    pairs = [(each["data"], identities[0]["data"]) for each in identities if "data" in inputs]
    pairs += [(each, of_seed[run.recipe.run.seed]) for run, each in zip(runs, splits, strict=True)]
    if measured_on_others := any(
        each.get(name) != first.get(name) for each, first in pairs for name in ("val", "test")
    ):
        inputs.setdefault("data", "images or labels")
    names = [
        name
        for section, name in inputs.items()
        if not names_other_inputs(keys, section) or (section == "data" and measured_on_others)
    ]
    if "data" not in inputs and have_other_shards(run.record for run in runs):
        names.append("shards (written or copied between the runs)")
    same_test_split = all(each.get("test") == splits[0].get("test") for each in splits)
    if same_test_split and have_other_test_images(run.results for run in runs):
        names.append("test images (some could not be read)")
    return names


def data_identity(run: Run) -> tuple[Recipe, Mapping[str, str]]:
    """Return the recipe of a run, and the fingerprints of the whole splits that it has read."""
    return run.recipe, run.record.get("whole_fingerprints", {})


def have_other_images(identities: Sequence[tuple[Recipe, Mapping[str, str]]]) -> bool:
    """Return True if whole splits differ, although no key of the recipes says so.

    Images that a run only held out or left out are no difference.

    Args:
        identities: the result of `data_identity` for each run.
    """
    splits: dict[str, set[str]] = {}
    for _, fingerprints in identities:
        for name, fingerprint in fingerprints.items():
            splits.setdefault(name, set()).add(fingerprint)
    if all(len(each) == 1 for each in splits.values()):
        return False
    keys = [key for key, _ in differing_settings([recipe for recipe, _ in identities])]
    return not names_other_inputs(keys, "data", include_draws=False)


def _format_setting(value: Any) -> str:
    if value is None:
        return MISSING
    return value if isinstance(value, str) else json.dumps(value, default=str)


def metric_columns(runs: Sequence[Run]) -> list[Column]:
    """Select the metric columns of the tables; metrics that no run has are dropped.

    If every finished run has test metrics, the columns are all test metrics, then the primary
    validation metric; otherwise all validation metrics, then all test metrics.
    """
    headers = (
        _MULTILABEL_METRICS if any(run.is_multilabel for run in runs) else _CLASSIFICATION_METRICS
    )
    tested = all(run.metrics("test") for run in runs if run.results)
    order = [("test", key) for key in headers] + [("val", next(iter(headers)))]
    if not tested:
        order = [(split, key) for split in ("val", "test") for key in headers]
    candidates = [(split, key, f"{split.capitalize()} {headers[key]}") for split, key in order]
    return [
        (split, key, header)
        for split, key, header in candidates
        if any(_metric_cell(run, split, key)["value"] is not None for run in runs)
    ]


def _mean_cell(cells: list[Row], *, is_percent: bool) -> Row:
    """Merge the cells of several seeds into mean ± standard deviation; keep a single cell."""
    if len(cells) == 1:
        return cells[0]
    if not cells:
        return {"text": MISSING, "value": None, "interval": "", "is_too_few": False}
    mean, std, _ = mean_std(cell["value"] for cell in cells)
    text = format_mean_std(mean, std, 4)
    if is_percent:
        text = format_mean_std(100 * mean, None if std is None else 100 * std) + use_narrow_spaces(
            " %"
        )
    is_too_few = any(cell["is_too_few"] for cell in cells)
    return {"text": text, "value": mean, "interval": "", "is_too_few": is_too_few}


def group_rows(
    groups: Sequence[RecipeGroup], columns: Sequence[Column]
) -> tuple[list[Row], tuple[str, str] | None]:
    """Build a row per recipe: mean ± standard deviation over seeds, n, and a dot plot of the runs.

    If several runs have the same seed, only the first of them counts, and a note in the row names
    the seed.

    Args:
        columns: the result of `metric_columns`; the dot plot shows the first column.
    Returns: a row per recipe, in which "dots" are positions in percent of the plot's width; and
        the labels of the two ends of the plot, None if no run has a value.
    """
    scale_split, scale_key = (
        columns[0][:2] if columns and columns[0][1] in ("top1", "map") else ("", "")
    )
    values = {
        group.name: [
            value
            for run in group.runs
            if (value := run.metrics(scale_split).get(scale_key)) is not None
        ]
        for group in groups
    }
    low = min((min(row) for row in values.values() if row), default=0.0)
    high = max((max(row) for row in values.values() if row), default=1.0)
    # round the ends of the dot plot to multiples of 5 %, for short labels
    low, high = math.floor(low * 20) / 20, math.ceil(high * 20) / 20
    width = high - low or 1.0
    rows = []
    for index, group in enumerate(groups):
        cells = []
        for split, key, _ in columns:
            by_seed: dict[int, Row] = {}
            for run in group.runs:
                cell = _metric_cell(run, split, key)
                if cell["value"] is not None:
                    by_seed.setdefault(run.recipe.run.seed, cell)
            cells.append(_mean_cell(list(by_seed.values()), is_percent=key in PERCENT_METRICS))
        seeds = Counter(run.recipe.run.seed for run in group.runs)
        repetitions = [f"{n} runs of seed {seed}" for seed, n in seeds.items() if n > 1]
        rows.append(
            {
                "name": group.name,
                "color": index % 8 + 1,
                "n": len(seeds),
                "notes": [
                    *([f"{', '.join(repetitions)}: counted once"] if repetitions else []),
                    *_decisions_notes(group.runs[0]),
                ],
                "cells": cells,
                "dots": [round(100 * (value - low) / width, 2) for value in values[group.name]],
            }
        )
    return rows, (format_percent(low, 0), format_percent(high, 0)) if any(values.values()) else None


def run_rows(
    groups: Sequence[RecipeGroup], runs: Sequence[Run], columns: Sequence[Column]
) -> list[Row]:
    """Build a row per run: name, seed, the recipe keys that differ between runs, and metrics."""
    differing = differing_settings([run.recipe for run in runs])
    colors = {id(run): index % 8 + 1 for index, group in enumerate(groups) for run in group.runs}
    rows = []
    names = unique_run_names([run.path for run in runs])
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        cells = [_metric_cell(run, split, key) for split, key, _ in columns]
        seconds = training_seconds(run)
        rows.append(
            {
                "name": name,
                "color": colors[id(run)],
                "status": str(run.record.get("status", "unknown")),
                "notes": _decisions_notes(run),
                "model": run.recipe.model.name,
                "keys": [values[index] for _, values in differing],
                "seed": str(run.recipe.run.seed),
                "figures": cells,
                "time": format_duration(seconds),
                "seconds": seconds,
                "command_time": format_duration(run.results.get("command_seconds")),
                "command_seconds": run.results.get("command_seconds"),
                "rate": training_images_per_second(run),
            }
        )
    return rows


def _decisions_notes(run: Run) -> list[str]:
    """Return a note for each split whose metrics depend on `data.decisions`."""
    notes = {name: describe_split_decisions(run.metrics(name)) for name in ("test", "val")}
    return [f"{name} {note}" for name, note in notes.items() if note]


def _metric_cell(run: Run, split: str, key: str) -> Row:
    """Build a cell: "text", "value", "interval" (for an accuracy on few images), "is_too_few"."""
    metrics = run.metrics(split) if key != "top5" or run.has_top5 else {}
    value, num_images = metrics.get(key), metrics.get("examples")
    is_accuracy = key.startswith("top")
    return {
        "text": format_percent(value) if key in PERCENT_METRICS else format_decimal(value),
        "value": value,
        "interval": format_accuracy_interval(value, num_images) if is_accuracy else "",
        "is_too_few": (is_accuracy or key == "map") and has_too_few_images(num_images),
    }


def claim_comparison_rows(runs: Sequence[Run]) -> list[Row]:
    """Build a row per distinct claim, with the result of each run (None without that claim)."""
    claims: dict[tuple[str, ...], Row] = {}
    for index, run in enumerate(runs):
        for row in claim_rows(run):
            key = (row["what"], row["reported"], row["source"])
            claim = claims.setdefault(
                key,
                {
                    **{k: row[k] for k in ("what", "reported", "source")},
                    "answers": [None] * len(runs),
                },
            )
            claim["answers"][index] = {k: row[k] for k in ("verdict", "measured", "how")}
    return list(claims.values())
