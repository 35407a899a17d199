"""What a page that compares runs shows: recipes with their seeds, runs, claims; as plain rows."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from finetune.evaluation.metrics import mean_std
from finetune.recipe.identity import but_the_seed
from finetune.recipe.load import Recipe
from finetune.report.run_data import MISSING, Run, duration, number, percent, plain
from finetune.report.sections import claim_rows, training_rate

__all__ = [
    "FIGURES",
    "Group",
    "claims_beside",
    "differing_keys",
    "differing_settings",
    "group_rows",
    "groups",
    "run_rows",
]

Row = dict[str, Any]

FIGURES = (
    ("test", "top1", "Test top-1"),
    ("test", "top5", "Test top-5"),
    ("test", "loss", "Test loss"),
    ("test", "ece", "Test ECE"),
    ("val", "top1", "Val top-1"),
)


@dataclass(frozen=True)
class Group:
    """Runs of one recipe that differ in nothing but the seed."""

    name: str
    runs: list[Run]


def groups(runs: Sequence[Run]) -> list[Group]:
    """Put the seeds of a recipe together, in the order of the runs."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        recipe = json.dumps(but_the_seed(run.recipe), sort_keys=True, default=str)
        found.setdefault(recipe, []).append(run)
    named = [Group(_common([run.name for run in members]), members) for members in found.values()]
    names = [group.name for group in named]
    return [
        group if names.count(group.name) == 1 else Group(f"{group.name} ({place})", group.runs)
        for place, group in enumerate(named, 1)
    ]


def _common(names: list[str]) -> str:
    """What the names of a group's runs share: nano-s0, nano-s1 → nano."""
    alike = itertools.takewhile(lambda chars: len(set(chars)) == 1, zip(*names, strict=False))
    shared = "".join(chars[0] for chars in alike)
    return re.sub(r"[-_.]((s|seed)[-_.]?\d*)?$", "", shared) or names[0]


def differing_keys(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """The recipe keys in which runs differ, the seed apart. Returns: key, value of each run."""
    return differing_settings([run.recipe for run in runs])


def differing_settings(recipes: Sequence[Recipe]) -> list[tuple[str, list[str]]]:
    """The keys in which recipes differ, the seed apart. Returns: key, value of each recipe."""
    resolved = [but_the_seed(recipe) for recipe in recipes]
    found = []
    for part in resolved[0] if resolved else ():
        for key in resolved[0][part]:
            values = [recipe[part].get(key) for recipe in resolved]
            if any(value != values[0] for value in values):
                found.append((f"{part}.{key}", [_shown(value) for value in values]))
    return found


def _shown(value: Any) -> str:
    if value is None:
        return MISSING
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _with_spread(values: list[float], *, share: bool) -> str:
    if not values:
        return MISSING
    mean, std, _ = mean_std(values)
    if share:
        spread = "" if std is None else f" ± {100 * std:.2f}"
        return f"{100 * mean:.2f}{spread}\u202f%"
    return plain(mean) + ("" if std is None else f" ± {plain(std)}")


def group_rows(found: Sequence[Group]) -> tuple[list[Row], tuple[str, str] | None]:
    """Mean ± standard deviation and n of each recipe, and where its runs lie beside the others.

    Returns: a row per recipe with "dots", per cent of the scale; and the ends of the scale, None
        if no test top-1 was measured.
    """
    values = {
        group.name: [
            value for run in group.runs if (value := number(run.figures("test").get("top1")))
        ]
        for group in found
    }
    low = min((min(row) for row in values.values() if row), default=0.0)
    high = max((max(row) for row in values.values() if row), default=1.0)
    # whole steps of 5 % around all runs, so that the ends of the scale can be named
    low, high = math.floor(low * 20) / 20, math.ceil(high * 20) / 20
    width = high - low or 1.0
    rows = []
    for place, group in enumerate(found):
        cells = []
        for split, key, _ in FIGURES:
            known = [number(run.figures(split).get(key)) for run in group.runs]
            numbers = [value for value in known if value is not None]
            cells.append(_with_spread(numbers, share=key.startswith("top")))
        rows.append(
            {
                "name": group.name,
                "color": place % 8 + 1,
                "n": len(group.runs),
                "cells": cells,
                "dots": [round(100 * (value - low) / width, 2) for value in values[group.name]],
            }
        )
    return rows, (percent(low, 0), percent(high, 0)) if any(values.values()) else None


def run_rows(found: Sequence[Group], runs: Sequence[Run]) -> list[Row]:
    """A row per run: name, seed, what its recipe has that others have not, and its figures."""
    differing = differing_keys(runs)
    colors = {id(run): place % 8 + 1 for place, group in enumerate(found) for run in group.runs}
    rows = []
    for place, run in enumerate(runs):
        figures = [
            (percent(value) if key.startswith("top") else plain(value), number(value))
            for split, key, _ in FIGURES
            for value in [run.figures(split).get(key)]
        ]
        seconds = [number(line.get("seconds")) or 0.0 for line in run.history]
        rows.append(
            {
                "name": run.name,
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


def claims_beside(runs: Sequence[Run]) -> list[Row]:
    """Each claim once, with the answer of every run that has it (None where a run has not)."""
    found: dict[tuple[str, ...], Row] = {}
    for place, run in enumerate(runs):
        for row in claim_rows(run):
            key = (row["what"], row["reported"], row["source"])
            claim = found.setdefault(
                key,
                {
                    **{k: row[k] for k in ("what", "reported", "source")},
                    "answers": [None] * len(runs),
                },
            )
            claim["answers"][place] = {k: row[k] for k in ("verdict", "measured", "how")}
    return list(found.values())
