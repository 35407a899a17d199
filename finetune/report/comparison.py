"""The sections of a page that compares runs, as plain rows: recipes, runs, claims."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from finetune.errors import RecipeError
from finetune.evaluation.claims import ACCURACIES
from finetune.evaluation.metrics import mean_std
from finetune.recipe.identity import without_seed
from finetune.recipe.load import Recipe
from finetune.report.run_data import (
    Run,
    accuracy_range,
    duration,
    is_too_few,
    narrow,
    number,
    percent,
    plain,
)
from finetune.report.sections import claim_rows, training_rate
from finetune.text import MISSING, mean_and_std

__all__ = [
    "Group",
    "check_comparable",
    "claims_beside",
    "columns",
    "differing_keys",
    "differing_settings",
    "group_rows",
    "groups",
    "run_names",
    "run_rows",
]

Row = dict[str, Any]

Column = tuple[str, str, str]  # split, key of its figures, head

_FIGURES = {
    **{"top1": "top-1", "top5": "top-5", "balanced_accuracy": "balanced accuracy"},
    **{"loss": "loss", "ece": "ECE"},
}
_OF_SEVERAL = {"map": "mAP", "macro_f1": "macro F1", "micro_f1": "micro F1", "loss": "loss"}
_LONGEST_NAME = 60  # characters of a recipe's name with the settings that tell it apart


def check_comparable(runs: Sequence[Run]) -> None:
    """Refuse runs of which some give an image one label and some several: no figure is of both."""
    if len({run.is_multilabel for run in runs}) > 1:
        several, one = (
            next(run.path for run in runs if run.is_multilabel is wanted)
            for wanted in (True, False)
        )
        raise RecipeError(
            f"report: {several} gives an image several labels and {one} one, so no figure is of "
            "both; give runs of one kind",
            code="recipe.conflict",
        )


@dataclass(frozen=True)
class Group:
    """Runs of one recipe that differ in nothing but the seed."""

    name: str
    runs: list[Run]


def groups(runs: Sequence[Run]) -> list[Group]:
    """Put the seeds of a recipe together, in the order of the runs."""
    by_recipe: dict[str, list[Run]] = {}
    for run in runs:
        recipe = json.dumps(without_seed(run.recipe), sort_keys=True, default=str)
        by_recipe.setdefault(recipe, []).append(run)
    named = [Group(_common([run.name for run in same]), same) for same in by_recipe.values()]
    labels: dict[int, str] = {}
    for name in {group.name for group in named}:
        alike = [group for group in named if group.name == name]
        labels |= zip(map(id, alike), _told_apart(alike), strict=True)
    return [Group(labels[id(group)], group.runs) for group in named]


def _told_apart(alike: list[Group]) -> list[str]:
    """Names for recipes of one name: with as few settings as tell them apart, else numbered."""
    name = alike[0].name
    if len(alike) == 1:
        return [name]
    settings = differing_keys([group.runs[0] for group in alike])
    for count in range(1, len(settings) + 1):
        labels = [
            f"{name} ({', '.join(f'{key}={values[place]}' for key, values in settings[:count])})"
            for place in range(len(alike))
        ]
        if len(set(labels)) == len(labels) and max(map(len, labels)) <= _LONGEST_NAME:
            return labels
    return [f"{name} ({place})" for place in range(1, len(alike) + 1)]


def run_names(runs: Sequence[Run]) -> list[str]:
    """The names of the runs' folders, with as many of those above as tell them apart."""
    paths = [run.path.resolve().parts for run in runs]
    names = []
    for parts in paths:
        depths = range(1, len(parts) + 1)
        unique = (d for d in depths if sum(other[-d:] == parts[-d:] for other in paths) == 1)
        names.append("/".join(parts[-next(unique, 1) :]))
    return names


def _common(names: list[str]) -> str:
    """The part that the names of a group's runs share: nano-s0, nano-s1 → nano."""
    alike = itertools.takewhile(lambda chars: len(set(chars)) == 1, zip(*names, strict=False))
    shared = "".join(chars[0] for chars in alike)
    return re.sub(r"[-_.]((s|seed)[-_.]?\d*)?$", "", shared) or names[0]


def differing_keys(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """The recipe keys in which runs differ, the seed apart. Returns: key, value of each run."""
    return differing_settings([run.recipe for run in runs])


def differing_settings(recipes: Sequence[Recipe]) -> list[tuple[str, list[str]]]:
    """The keys in which recipes differ, the seed apart. Returns: key, value of each recipe."""
    resolved = [without_seed(recipe) for recipe in recipes]
    differing = []
    for part in resolved[0] if resolved else ():
        for key in dict.fromkeys(key for recipe in resolved for key in recipe[part]):
            values = [recipe[part].get(key) for recipe in resolved]
            if any(value != values[0] for value in values):
                differing.append((f"{part}.{key}", [_shown(value) for value in values]))
    return differing


def _shown(value: Any) -> str:
    if value is None:
        return MISSING
    return value if isinstance(value, str) else json.dumps(value, default=str)


def columns(runs: Sequence[Run]) -> list[Column]:
    """The figures of the tables that at least one run has.

    They are those of test and the first of validation. Where a finished run was not tested,
    those of validation lead: all runs have them.
    """
    heads = _OF_SEVERAL if any(run.is_multilabel for run in runs) else _FIGURES
    tested = all(run.figures("test") for run in runs if run.results)
    order = [("test", key) for key in heads] + [("val", next(iter(heads)))]
    if not tested:
        order = [(split, key) for split in ("val", "test") for key in heads]
    wanted = [(split, key, f"{split.capitalize()} {heads[key]}") for split, key in order]
    return [
        (split, key, head)
        for split, key, head in wanted
        if any(_figure(run, split, key)["value"] is not None for run in runs)
    ]


def _mean_cell(cells: list[Row], *, share: bool) -> Row:
    """The cell of several runs: mean ± standard deviation, or a single run's own."""
    if len(cells) == 1:
        return cells[0]
    if not cells:
        return {"text": MISSING, "value": None, "interval": "", "is_too_few": False}
    mean, std, _ = mean_std(cell["value"] for cell in cells)
    text = mean_and_std(mean, std, 4)
    if share:
        text = mean_and_std(100 * mean, None if std is None else 100 * std) + narrow(" %")
    few = any(cell["is_too_few"] for cell in cells)
    return {"text": text, "value": mean, "interval": "", "is_too_few": few}


def group_rows(
    recipes: Sequence[Group], shown: Sequence[Column]
) -> tuple[list[Row], tuple[str, str] | None]:
    """Mean ± standard deviation and n of each recipe, and the positions of its runs on a scale.

    Runs of one seed repeat one another: the first of them counts, and "twins" names them.

    Args:
        shown: of `columns`; the first one's accuracy is the scale.
    Returns: a row per recipe with "dots", per cent of the scale; and the ends of the scale, None
        if no accuracy was measured.
    """
    lead, key = shown[0][:2] if shown and shown[0][1] in ("top1", "map") else ("", "")
    values = {
        group.name: [value for run in group.runs if (value := number(run.figures(lead).get(key)))]
        for group in recipes
    }
    low = min((min(row) for row in values.values() if row), default=0.0)
    high = max((max(row) for row in values.values() if row), default=1.0)
    # whole steps of 5 % around all runs, so that the ends of the scale can be named
    low, high = math.floor(low * 20) / 20, math.ceil(high * 20) / 20
    width = high - low or 1.0
    rows = []
    for place, group in enumerate(recipes):
        cells = []
        for split, key, _ in shown:
            by_seed: dict[int, Row] = {}
            for run in group.runs:
                cell = _figure(run, split, key)
                if cell["value"] is not None:
                    by_seed.setdefault(run.recipe.run.seed, cell)
            cells.append(_mean_cell(list(by_seed.values()), share=key in ACCURACIES))
        seeds = Counter(run.recipe.run.seed for run in group.runs)
        twins = [f"{n} runs of seed {seed}" for seed, n in seeds.items() if n > 1]
        rows.append(
            {
                "name": group.name,
                "color": place % 8 + 1,
                "n": len(seeds),
                "twins": f"{', '.join(twins)}: counted once" if twins else "",
                "cells": cells,
                "dots": [round(100 * (value - low) / width, 2) for value in values[group.name]],
            }
        )
    return rows, (percent(low, 0), percent(high, 0)) if any(values.values()) else None


def run_rows(recipes: Sequence[Group], runs: Sequence[Run], shown: Sequence[Column]) -> list[Row]:
    """A row per run: name, seed, the recipe's keys that differ between runs, and its figures."""
    differing = differing_keys(runs)
    colors = {id(run): place % 8 + 1 for place, group in enumerate(recipes) for run in group.runs}
    rows = []
    for place, (run, name) in enumerate(zip(runs, run_names(runs), strict=True)):
        figures = [_figure(run, split, key) for split, key, _ in shown]
        seconds = [number(line.get("seconds")) or 0.0 for line in run.history]
        rows.append(
            {
                "name": name,
                "color": colors[id(run)],
                "status": str(run.record.get("status", "unknown")),
                "model": run.recipe.model.name,
                "keys": [values[place] for _, values in differing],
                "seed": str(run.recipe.run.seed),
                "figures": figures,
                "time": duration(max(seconds, default=None)),
                "seconds": max(seconds, default=None),
                "rate": training_rate(run),
            }
        )
    return rows


def _figure(run: Run, split: str, key: str) -> Row:
    """A cell: "text", "value", "interval" of an accuracy on few images, and "is_too_few"."""
    figures = run.figures(split) if key != "top5" or run.has_top5 else {}
    value, images = figures.get(key), figures.get("examples")
    if not key.startswith("top"):
        text = percent(value) if key in ACCURACIES else plain(value)
        few = key == "map" and is_too_few(images)
        return {"text": text, "value": number(value), "interval": "", "is_too_few": few}
    marks = {"interval": accuracy_range(value, images), "is_too_few": is_too_few(images)}
    return {"text": percent(value), "value": number(value), **marks}


def claims_beside(runs: Sequence[Run]) -> list[Row]:
    """Each claim once, with the answer of every run that has it (None where a run has not)."""
    claims: dict[tuple[str, ...], Row] = {}
    for place, run in enumerate(runs):
        for row in claim_rows(run):
            key = (row["what"], row["reported"], row["source"])
            claim = claims.setdefault(
                key,
                {
                    **{k: row[k] for k in ("what", "reported", "source")},
                    "answers": [None] * len(runs),
                },
            )
            claim["answers"][place] = {k: row[k] for k in ("verdict", "measured", "how")}
    return list(claims.values())
