"""Many runs that belong together, and one table of what they say.

A run of a plan may first choose among the values of a grid, by its validation split and without
reading the test split; the choice is then trained anew, once for each seed.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from finetune.claims import VERDICTS, table
from finetune.engine import leave, train
from finetune.errors import Interrupted, RecipeError, nearest
from finetune.files import write_atomically
from finetune.metrics import mean_std
from finetune.plans import (
    PLAN,
    Entry,
    Plan,
    check_runs,
    find_plan,
    load_plan,
    made_small,
    recipe_for,
)
from finetune.progress import say
from finetune.recipe import Recipe
from finetune.record import finished
from finetune.terminal import is_first_rank

__all__ = ["describe", "reproduce"]

_SMOKE = (
    "A smoke test of the whole path in minutes. It is not the experiment, and its figures say "
    "nothing about it."
)
_FIGURES = {"top1": "top-1, %", "top5": "top-5, %", "loss": "loss", "ece": "calibration error"}


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


@dataclass(frozen=True)
class _Outcome:
    """What came of one entry: a run for each seed, and the grid's rows if it has one."""

    entry: Entry
    finals: list[_Done]
    choices: list[dict[str, Any]] = field(default_factory=list)


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
        only: names of the runs to carry out; all of them if empty. The table also holds the
            others as far as they are done.
        scale: "full", or "smoke" for runs of minutes that are not the experiment.
        overrides: `key=value` for every run, such as data.source.
        out: where the runs go; by default runs/NAME, or runs/NAME-smoke.
    Returns: "title", "scale", "runs" (name, paths, seeds, test figures), "choices" of the grids,
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
    if out is not None and not str(out).strip():
        raise RecipeError("--out: is empty; give a folder")
    plan_name = path.parent.name if path.name == PLAN else path.stem
    folder = Path(out or Path("runs") / (plan_name + ("-smoke" if scale == "smoke" else "")))
    added = list(overrides)
    if scale == "smoke":
        plan = made_small(plan)
        added = [*plan.smoke, f"run.note={_SMOKE}", *overrides]
    check_runs(plan, path, added)
    outcomes = []
    wanted_runs = [entry.name for entry in plan.runs if not only or entry.name in only]
    for entry in plan.runs:
        asked = entry.name in wanted_runs
        if asked:
            number = wanted_runs.index(entry.name) + 1
            say(f"{plan_name}: {entry.name}, {number} of {len(wanted_runs)}")
        outcome = _outcome(entry, path, folder, added, carry_out=asked)
        outcomes += [outcome] if outcome else []
    leave()
    return _told(plan, scale, folder, outcomes)


def _outcome(
    entry: Entry, path: Path, folder: Path, added: Sequence[str], *, carry_out: bool
) -> _Outcome | None:
    """Choose if there is a grid, then train once for each seed.

    Args:
        carry_out: train what is not done; else None is returned for an entry that is not.
    """
    run_of = _trained if carry_out else _found
    chosen: Sequence[str] = ()
    choices: list[dict[str, Any]] = []
    split, _, key = entry.by.partition(".")
    for changes in entry.combinations() if entry.grid else ():
        name = f"{entry.name}-choose/{entry.folder_of(changes)}"
        settings = [*added, *changes, "run.test=false", f"run.seed={entry.seeds[0]}"]
        done = run_of(recipe_for(entry, path, settings), folder / name, name)
        if done is None:
            return None
        figure = done.results.get(split, {}).get(key)
        if figure is None:
            raise RecipeError(
                f"{entry.name}: nothing to choose by: {name} has no {entry.by}; set "
                "data.val_fraction"
            )
        choices.append({"overrides": list(changes), entry.by: figure, "run": str(done.path)})
    if choices:
        best = (min if key == "loss" else max)(choices, key=lambda row: row[entry.by])
        for row in choices:
            row["chosen"] = row is best
        chosen = best["overrides"]
    finals = []
    for seed in entry.seeds:
        name = f"{entry.name}-s{seed}"
        recipe = recipe_for(entry, path, [*added, *chosen, *entry.final, f"run.seed={seed}"])
        try:
            final = run_of(recipe, folder / name, name)
        except RecipeError as error:
            if not chosen or not (folder / name).exists():
                raise
            raise RecipeError(
                f"{error}; the grid chooses {' '.join(chosen)}: remove {folder / name} to train "
                "that"
            ) from None
        if final is None:
            return None
        finals.append(final)
    return _Outcome(entry, finals, choices)


def _trained(recipe: Recipe, folder: Path, name: str) -> _Done:
    """Train one run of a plan, go on with it, or take it as it is."""
    gc.collect()  # the network of the run before, which Accelerate's wrappers hold
    torch.cuda.empty_cache()  # for those who ask the device what is free
    try:
        return _Done(name, folder, train(recipe, folder, resume=True, stay=True))
    except Interrupted as error:
        message = str(error).replace("continue with --resume", "repeat the command to go on")
        raise Interrupted(message, error.signal_number) from None


def _found(recipe: Recipe, folder: Path, name: str) -> _Done | None:
    """A run of a plan if it is done, with this recipe."""
    results = finished(folder, recipe)
    return None if results is None else _Done(name, folder, results)


def _told(plan: Plan, scale: str, folder: Path, outcomes: Sequence[_Outcome]) -> dict[str, Any]:
    """Write the table and the page that compares the runs."""
    from finetune.report.page import compare  # brings matplotlib

    every = [done for outcome in outcomes for done in outcome.finals]
    told: dict[str, Any] = {
        "title": plan.title,
        "scale": scale,
        "runs": [_summary(outcome) for outcome in outcomes],
        "choices": {one.entry.name: one.choices for one in outcomes if one.choices},
        "claims": [
            {**claim, "run": done.name}
            for done in every
            for claim in done.results.get("claims") or []
        ],
    }
    page = folder / "comparison.html" if len(every) > 1 else None
    if is_first_rank():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "table.md", describe(told))
        if page:
            compare([done.path for done in every], page)
    return {**told, "table": str(folder / "table.md"), "comparison": page and str(page)}


def _summary(outcome: _Outcome) -> dict[str, Any]:
    """Mean and spread over the seeds of one entry."""
    done = outcome.finals
    tests = [one.results["test"] for one in done if one.results.get("test")]
    row: dict[str, Any] = {"name": outcome.entry.name, "paths": [str(one.path) for one in done]}
    row |= {"seeds": len(done), "reported": outcome.entry.reported}
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
    smoke = told["scale"] == "smoke"
    if smoke:
        lines += [f"**{_SMOKE}**", ""]
    reported = any(row.get("reported") for row in told["runs"])
    heads = ["run", "seeds", "images", *_FIGURES.values(), *(["reported"] if reported else [])]
    lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in told["runs"]:
        images = f"{row['examples']:,}" if "examples" in row else "–"
        cells = [row["name"], str(row["seeds"]), images]
        cells += [_spread(key, row[key]) if key in row else "–" for key in _FIGURES]
        cells += [row["reported"] or "–"] if reported else []
        lines.append(f"| {' | '.join(cells)} |")
    for name, rows in told["choices"].items():
        lines += ["", f"Chosen for {name}, without reading the test split:", ""]
        lines += _choice_table(rows)
    if claims := told["claims"]:
        met = sum(claim["verdict"] == VERDICTS[0] for claim in claims)
        of_what = f"{met} of {len(claims)} met"
        if smoke:
            of_what = "of another experiment than this"
            claims = [{**claim, "verdict": "–"} for claim in claims]
        lines += ["", f"## Claims: {of_what}", "", table(claims)]
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
