"""Answers to the claims of the recipes: by a run, by a smaller run, or open.

A smaller run, of another network or fewer images, answers no figure; a plan may ask it which way
the figures go.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune.commands.reproduce_measured import (
    EXPECTED,
    MISSING,
    Measured,
    answer_of,
    in_words,
    is_expectation,
    percent,
    spread,
    table_if_any,
    verdicts,
)
from finetune.commands.reproduce_plan import PLAN, Direction, Entry, load_plan
from finetune.evaluation.claims import answer, wording
from finetune.recipe.identity import without_seed
from finetune.recipe.load import Claim, Recipe, load_recipe
from finetune.report.run_data import Run

__all__ = ["claims_table", "directions_table", "recipe_files"]


def directions_table(directions: Sequence[Direction], measured: Sequence[Measured]) -> list[str]:
    """Answer which way figures go, for each seed.

    Args:
        directions: of a plan.
        measured: its entries that are done.
    Returns: the lines of a Markdown table.
    """
    known = {one.entry.name: one for one in measured}
    rows = []
    for direction in directions:
        runs = known[direction.run].runs if direction.run in known else []
        others = known[direction.below].runs if direction.below in known else []
        figures = [_figure(direction, run) for run in runs]
        if direction.trend:
            sign = 1 if direction.trend == "rising" else -1
            answers = [None if one is None else sign * one > 0 for one in figures]
            shown = f"{direction.metric}, slope an epoch: {spread(figures, '{:+.4f}')}"
        else:
            larger = {run.recipe.run.seed: _figure(direction, run) for run in others}
            pairs = [
                (one, larger.get(run.recipe.run.seed))
                for one, run in zip(figures, runs, strict=True)
            ]
            answers = [None if a is None or b is None else a < b for a, b in pairs]
            shown = f"{direction.metric}: {_as_is(direction.metric, figures)} and "
            shown += _as_is(direction.metric, larger.values())
        names = f"`{direction.run}`" + (f", `{direction.below}`" if direction.below else "")
        counted = [one for one in answers if one is not None]
        verdict = f"yes for {sum(counted)} of {len(counted)} seeds" if counted else "open"
        expected = direction.expected or MISSING
        shown = shown if counted else MISSING
        rows.append([direction.question, direction.source, expected, verdict, shown, names])
    heads = ["question", "yes is claimed by", EXPECTED, "answer", "measured", "runs"]
    return table_if_any(heads, rows)


def _figure(direction: Direction, run: Run) -> float | None:
    """The figure of a direction's metric in one run; for a trend its slope per epoch."""
    keys = ("metric", "when", "trend")
    claim: dict[str, Any] = {key: getattr(direction, key) for key in keys}
    measured = answer([claim], run.history, run.results, run.steps_per_epoch or 1.0)[0]["measured"]
    return None if measured is None else float(measured)


def _as_is(metric: str, values: Iterable[float | None]) -> str:
    """Mean and spread of a metric, accuracies in per cent."""
    if metric.endswith(("top1", "top5")):
        return percent(values) + " %"
    return spread(values, "{:.4f}")


def claims_table(root: Path, path: Path, measured: Sequence[Measured], earlier: str) -> list[str]:
    """Every claim of every recipe, and who has answered it."""
    rows = []
    for file in recipe_files(root):
        recipe = load_recipe(file)
        used = [one for one in measured if one.runs and _is_recipe_of(one, path, file)]
        name, needs = file.relative_to(root).as_posix(), in_words(recipe)
        for claim in recipe.claims:
            if is_expectation(claim):
                continue
            what, reported, _ = wording(claim.model_dump(mode="json"))
            head = [f"`{name}`", what, claim.source, reported]
            rows += [[*head, *cells] for cells in _answers(claim, recipe, used, needs)]
            if not used:
                verdict = "open"
                if f"{root.name}/{name}" in earlier:
                    verdict += "; for an earlier run see below"
                rows.append([*head, verdict, MISSING, needs])
    for file, entry in _reported(root):
        recipe = load_recipe(file.parent / entry.recipe, list(entry.overrides))
        name = f"{file.relative_to(root).parent.as_posix()}: {entry.name}"
        row = [f"`{name}`", "reported", "its plan", entry.reported or "", "open", MISSING]
        rows.append([*row, in_words(recipe)])
    heads = ["recipe", "claim", "source", "reported", "answered", "measured"]
    return table_if_any([*heads, "a full answer needs"], rows)


def _answers(
    claim: Claim, recipe: Recipe, used: Sequence[Measured], needs: str
) -> Iterator[list[str]]:
    """For each entry that ran the recipe: who answers, with what, and what is missing."""
    for one in used:
        rows = [answer_of(claim, run) for run in one.runs]
        measured = _shown(claim, rows)
        if _same_training(recipe, one.runs[0].recipe):
            yield [f"by a run, `{one.entry.name}`: {verdicts(rows)}", measured, MISSING]
        else:
            yield [f"by a smaller run, `{one.entry.name}`", measured, needs]


def _shown(claim: Claim, rows: Sequence[Mapping[str, Any]]) -> str:
    """The runs' figure for a claim, with its spread and their number."""
    values = [row["measured"] for row in rows if row["measured"] is not None]
    if not values:
        return MISSING
    shown = f"{spread(values, '{:+.4f}')} an epoch" if claim.trend else _as_is(claim.metric, values)
    if claim.below and all("measured_other" in row for row in rows):
        shown += f" and {_as_is(claim.below, [row['measured_other'] for row in rows])}"
    return f"{shown} ({len(values)} runs)"


def _same_training(recipe: Recipe, run: Recipe) -> bool:
    """True if a run is of the recipe as it stands, on any copy of its images."""
    keys = [without_seed(one) for one in (recipe, run)]
    for one in keys:
        one["data"] = {**one["data"], "source": None}
        one["run"] = {**one["run"], "note": None}
    return keys[0] == keys[1]


def _is_recipe_of(one: Measured, path: Path, file: Path) -> bool:
    return (path.parent / one.entry.recipe).resolve() == file.resolve()


def _reported(root: Path) -> Iterator[tuple[Path, Entry]]:
    """The entries of plans with a figure that is no claim."""
    for file in sorted(root.rglob(PLAN)):
        yield from ((file, entry) for entry in load_plan(file).runs if entry.reported)


def recipe_files(root: Path) -> list[Path]:
    """Every recipe below a folder, without plans and the launcher's files."""
    return [
        file
        for file in sorted(root.rglob("*.yaml"))
        if file.name != PLAN and file.parent.name != "accelerate"
    ]
