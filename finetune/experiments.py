"""Plans: many runs that belong together, and one table of what they say.

A plan is a YAML file beside the recipes that it runs. A run may first choose among the values of a
grid, by its validation split and without reading the test split; the choice is then trained anew,
once for each seed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from finetune import recipe_yaml
from finetune.claims import VERDICTS, table
from finetune.engine import leave, train
from finetune.errors import RecipeError, nearest
from finetune.files import write_atomically
from finetune.metrics import mean_std
from finetune.progress import say
from finetune.recipe import Claim, Section, load_recipe
from finetune.recipe_check import validate
from finetune.recipe_types import Arguments, Text, Whole
from finetune.terminal import is_first_rank

__all__ = ["Entry", "Plan", "describe", "find_plan", "load_plan", "reproduce"]

PLAN = "plan.yaml"
_SMOKE = "A smoke test of the whole path in minutes. It is not the experiment, and its figures say "
_FIGURES = {"top1": "top-1, %", "top5": "top-5, %", "loss": "loss", "ece": "calibration error"}


class Entry(Section):
    """One run of a plan, or a grid of runs and the one that it chooses."""

    name: Text = Field(description="the run's folder in the plan's")
    recipe: Text = Field(description="a recipe, from the plan's folder")
    overrides: tuple[Text, ...] = Field((), description="key=value, as on the command line")
    grid: Arguments = Field({}, description="keys and the values to choose among")
    by: Literal["val.top1", "val.top5", "val.loss"] = Field(
        "val.top1", description="what chooses among the grid"
    )
    final: tuple[Text, ...] = Field(
        (), description="overrides once the grid has chosen; data.val_fraction=0 trains on it all"
    )
    seeds: tuple[Whole, ...] = Field((0,), description="a run for each; the first one chooses")
    claims: tuple[Claim, ...] | None = Field(
        None, description="what a source reports of this run; null: what the recipe says"
    )


class Plan(Section):
    """Runs that belong together."""

    title: Text = Field(description="what the runs are about")
    runs: tuple[Entry, ...] = Field(description="in this order")
    smoke: tuple[Text, ...] = Field(
        (), description="overrides that make each run one of minutes, for --scale smoke"
    )


@dataclass(frozen=True)
class _Done:
    """A finished run.

    Attributes:
        name: its folder, from the plan's.
        path: its run directory.
        results: the content of its results.json.
    """

    name: str
    path: Path
    results: Mapping[str, Any]


def find_plan(name: str, root: str | Path = "recipes") -> Path:
    """The file of a plan.

    Args:
        name: a path, or the name of a folder below `root` that holds a plan.yaml.
        root: the folder of the recipes.
    Raises: RecipeError with the nearest name if there is no such plan.
    """
    if Path(name).is_file():
        return Path(name)
    known = {path.parent.name: path for path in sorted(Path(root).rglob(PLAN))}
    if name not in known:
        there = f"; there is: {', '.join(known)}" if known else f"; there is none below {root}/"
        raise RecipeError(f"{name}: no such plan{nearest(name, known)}{there}")
    return known[name]


def load_plan(path: str | Path) -> Plan:
    """Read a plan, and check every recipe that it names with its overrides.

    Raises: RecipeError with one line for every problem.
    """
    document = recipe_yaml.read_document(recipe_yaml.read_text(path), name=str(path))
    plan = validate(document, Plan)
    problems = []
    names = [entry.name for entry in plan.runs]
    for entry in plan.runs:
        if names.count(entry.name) > 1:
            problems.append(f"{path}: two runs are called '{entry.name}'; rename one")
        if not entry.seeds:
            problems.append(f"{path}: {entry.name}.seeds: is empty; give at least one")
        for key, values in entry.grid.items():
            if not isinstance(values, list) or not values:
                problems.append(f"{path}: {entry.name}.grid.{key}: expected a list of values")
        try:
            load_recipe(Path(path).parent / entry.recipe, [*entry.overrides, *entry.final])
        except RecipeError as error:
            problems.append(str(error))
    if problems:
        raise RecipeError("\n".join(dict.fromkeys(problems)))
    return plan


def reproduce(
    name: str,
    *,
    only: Sequence[str] = (),
    scale: str = "full",
    overrides: Sequence[str] = (),
    out: str | Path | None = None,
) -> dict[str, Any]:
    """Carry out a plan, or go on with it: what is done is not done again.

    Args:
        name: of a plan, see `find_plan`.
        only: names of the runs to carry out; all of them if empty.
        scale: "full", or "smoke" for runs of minutes that are not the experiment.
        overrides: `key=value` for every run, such as data.source.
        out: where the runs go; by default runs/NAME, or runs/NAME-smoke.
    Returns: "title", "scale", "runs" (name, path, seeds, test figures), "choices" of the grids,
        "claims" with the run that answers each, "table" (a file) and "comparison" (a page).
    Raises: RecipeError for a wrong plan, and whatever ends a run.
    """
    path = find_plan(name)
    plan = load_plan(path)
    if scale not in ("full", "smoke"):
        raise RecipeError(f"--scale: unknown '{scale}'{nearest(scale, ['full', 'smoke'])}")
    known = [entry.name for entry in plan.runs]
    for wanted in only:
        if wanted not in known:
            raise RecipeError(f"--only: {path} has no run '{wanted}'{nearest(wanted, known)}")
    plan_name = path.parent.name if path.name == PLAN else path.stem
    folder = Path(out or Path("runs") / (plan_name + ("-smoke" if scale == "smoke" else "")))
    added = list(overrides)
    if scale == "smoke":
        added = [*plan.smoke, f"run.note={_SMOKE}nothing about it.", *overrides]
    found: dict[str, list[_Done]] = {}
    choices: dict[str, list[dict[str, Any]]] = {}
    entries = [entry for entry in plan.runs if not only or entry.name in only]
    for number, entry in enumerate(entries, 1):
        say(f"{plan_name}: {entry.name}, {number} of {len(entries)}")
        chosen: list[str] = []
        if entry.grid:
            chosen, choices[entry.name] = _choose(entry, path, folder, added)
        found[entry.name] = _finals(entry, path, folder, [*added, *chosen])
    leave()
    return _told(plan, scale, folder, found, choices)


def _choose(
    entry: Entry, path: Path, folder: Path, added: Sequence[str]
) -> tuple[list[str], list[dict[str, Any]]]:
    """Train every combination of the grid without reading the test split.

    Returns: the overrides of the best one (the first of equals), and every one with its figure.
    """
    split, _, key = entry.by.partition(".")
    rows = []
    for values in itertools.product(*entry.grid.values()):
        pairs = list(zip(entry.grid, values, strict=True))
        changes = [f"{name}={value}" for name, value in pairs]
        short = ",".join(f"{name.rpartition('.')[2]}={value}" for name, value in pairs)
        name = f"{entry.name}/choose/{short}"
        settings = [*added, *changes, "run.test=false", f"run.seed={entry.seeds[0]}"]
        done = _train(entry, path, folder / name, name, settings)
        figure = done.results.get(split, {}).get(key)
        if figure is None:
            raise RecipeError(f"{entry.name}: nothing to choose by: {name} has no {entry.by}")
        rows.append({"overrides": changes, entry.by: figure, "run": str(done.path)})
    best = (min if key == "loss" else max)(rows, key=lambda row: row[entry.by])
    for row in rows:
        row["chosen"] = row is best
    return best["overrides"], rows


def _finals(entry: Entry, path: Path, folder: Path, added: Sequence[str]) -> list[_Done]:
    """Train the chosen settings, once for each seed."""
    done = []
    for seed in entry.seeds:
        name = entry.name if len(entry.seeds) == 1 else f"{entry.name}/seed-{seed}"
        settings = [*added, *entry.final, f"run.seed={seed}"]
        done.append(_train(entry, path, folder / name, name, settings))
    return done


def _train(entry: Entry, path: Path, folder: Path, name: str, overrides: Sequence[str]) -> _Done:
    """Train one run of a plan, go on with it, or take it as it is."""
    recipe = load_recipe(path.parent / entry.recipe, [*entry.overrides, *overrides])
    if entry.claims is not None:
        recipe = recipe.model_copy(update={"claims": entry.claims})
    return _Done(name, folder, train(recipe, folder, resume=True, stay=True))


def _told(
    plan: Plan,
    scale: str,
    folder: Path,
    found: Mapping[str, Sequence[_Done]],
    choices: Mapping[str, list[dict[str, Any]]],
) -> dict[str, Any]:
    """Write the table and the page that compares the runs."""
    from finetune.report.page import compare  # brings matplotlib

    runs = [_summary(name, done) for name, done in found.items()]
    claims = [
        {**claim, "run": done.name}
        for all_done in found.values()
        for done in all_done
        for claim in done.results.get("claims") or []
    ]
    told: dict[str, Any] = {"title": plan.title, "scale": scale, "runs": runs}
    told |= {"choices": dict(choices), "claims": claims}
    text = describe(told)
    paths = [done.path for all_done in found.values() for done in all_done]
    page = folder / "comparison.html" if len(paths) > 1 else None
    if is_first_rank():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "table.md", text)
        if page:
            compare(paths, page)
    return {**told, "table": str(folder / "table.md"), "comparison": page and str(page)}


def _summary(name: str, done: Sequence[_Done]) -> dict[str, Any]:
    """Mean and spread over the seeds of one entry."""
    tests = [one.results["test"] for one in done if one.results.get("test")]
    row: dict[str, Any] = {"name": name, "paths": [str(one.path) for one in done]}
    row["seeds"] = len(done)
    if tests:
        row["examples"] = tests[0]["examples"]
        for key in _FIGURES:
            mean, std, _ = mean_std(test[key] for test in tests)
            row[key] = {"mean": mean, "std": std}
    return row


def describe(told: Mapping[str, Any]) -> str:
    """The result of a plan as Markdown: runs, choices and claims.

    Args:
        told: of `reproduce`.
    """
    lines = [f"# {told['title']}", ""]
    if told["scale"] == "smoke":
        lines += [f"**{_SMOKE}nothing about it.**", ""]
    lines += [f"| run | seeds | images | {' | '.join(_FIGURES.values())} |"]
    lines += ["|---|---|---|" + "---|" * len(_FIGURES)]
    for row in told["runs"]:
        cells = [_spread(key, row[key]) if key in row else "–" for key in _FIGURES]
        images = f"{row['examples']:,}" if "examples" in row else "–"
        lines.append(f"| {row['name']} | {row['seeds']} | {images} | {' | '.join(cells)} |")
    for name, rows in told["choices"].items():
        lines += ["", f"Chosen for {name}, without reading the test split:", ""]
        lines += _choice_table(rows)
    if told["claims"]:
        met = sum(claim["verdict"] == VERDICTS[0] for claim in told["claims"])
        lines += ["", f"## Claims: {met} of {len(told['claims'])} met", ""]
        lines += [table(told["claims"])]
    return "\n".join(lines).rstrip("\n") + "\n"


def _choice_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    by = next(key for key in rows[0] if key.startswith("val."))
    lines = [f"| settings | {by} | |", "|---|---|---|"]
    for row in rows:
        settings = ", ".join(row["overrides"])
        lines.append(f"| {settings} | {row[by]:.4f} | {'chosen' if row['chosen'] else ''} |")
    return lines


def _spread(key: str, figure: Mapping[str, float | None]) -> str:
    """A mean with its spread, accuracies in per cent."""
    factor, digits = (100.0, 2) if key.startswith("top") else (1.0, 4)
    mean, std = figure["mean"], figure["std"]
    shown = f"{factor * float(mean or 0):.{digits}f}"
    return shown if std is None else f"{shown} ± {factor * std:.{digits}f}"
