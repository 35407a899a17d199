"""Many runs that belong together, and one table of what they say.

A run of a plan may first choose among the values of a grid, by its validation split and without
reading the test split; the choice is then trained anew, once for each seed.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from finetune.commands.probe import describe as describe_probe
from finetune.commands.probe import probe_model
from finetune.commands.reproduce_page import Outcome, page_of
from finetune.commands.reproduce_plan import (
    PLAN,
    Entry,
    check_runs,
    find_plan,
    load_plan,
    made_small,
    recipe_for,
    with_source_of,
)
from finetune.console import say
from finetune.errors import Interrupted, RecipeError, nearest
from finetune.evaluation.claims import VERDICTS, main_figure, table
from finetune.evaluation.metrics import mean_std
from finetune.files import write_atomically
from finetune.processes import is_first_rank
from finetune.recipe.identity import recipe_of
from finetune.recipe.load import Recipe
from finetune.run.record import finished
from finetune.run.validation import load_json
from finetune.text import MISSING, markdown_table, mean_and_std
from finetune.training.launch import leave
from finetune.training.train import train

__all__ = ["SMOKE", "describe", "reproduce"]

SMOKE = (
    "A smoke test of the whole path in minutes. It is not the experiment, and its figures say "
    "nothing about it."
)
_FIGURES = {
    **{"top1": "top-1, %", "top5": "top-5, %", "map": "mAP, %"},
    **{"loss": "loss", "ece": "calibration error"},
}

_Results = dict[str, Any]  # the content of results.json


def reproduce(
    name: str,
    *,
    only: Sequence[str] = (),
    scale: str = "full",
    overrides: Sequence[str] = (),
    sources: Mapping[str, str] | None = None,
    out: str | Path | None = None,
    done: bool = False,
    page: str | Path | None = None,
) -> dict[str, Any]:
    """Carry out a plan, or go on with it: what is done is not done again.

    Args:
        name: of a plan, see `find_plan`.
        only: names of the runs to carry out; all of them if empty. The table also holds the
            others as far as they are done.
        scale: "full", or "smoke" for runs of minutes that are not the experiment.
        overrides: `key=value` for every run, such as data.source.
        sources: data sources of the recipes, and what is read in the place of each.
        out: where the runs go; by default runs/NAME, or runs/NAME-smoke.
        done: train nothing; take the seeds that are done, wherever that was and whatever copy of
            the images they read. They need neither checkpoints nor model/.
        page: a file for the page of all recipes.
    Returns: "title", "scale", "runs" (name, paths, seeds, test figures), "choices" of the grids,
        "claims" with the run that answers each, "probes" by run, "table" (a file), "comparison"
        and "page" (pages).
    Raises: RecipeError for a wrong plan, and whatever ends a run.
    """
    path = find_plan(name)
    plan = load_plan(path)
    known = [entry.name for entry in plan.runs]
    _check_request(path, known, only, scale)
    plan_name, small = path.parent.name if path.name == PLAN else path.stem, scale == "smoke"
    folder = Path(out or Path("runs") / (plan_name + ("-smoke" if small else "")))
    plan = made_small(plan) if small else plan
    added = [f"run.note={SMOKE}", *overrides] if small else list(overrides)
    check_runs(plan, path, added, sources)
    outcomes: list[Outcome] = []
    wanted = [] if done else [name for name in known if not only or name in only]
    for entry in plan.runs:
        results_of = _copied if done else finished
        if entry.name in wanted:
            results_of = _trained
            say(f"{plan_name}: {entry.name}, {wanted.index(entry.name) + 1} of {len(wanted)}")
        recipe_with = functools.partial(recipe_for, entry, path, added=added, sources=sources)
        outcome = _outcome(entry, recipe_with, folder, results_of)
        if outcome is not None:
            outcomes.append(outcome)
        elif done:
            say(f"{entry.name}: left out: nothing of it is done, or the plan is another by now")
    leave()
    answer = _answer(plan.title, scale, folder, outcomes)
    if page is not None and is_first_rank():
        text = page_of(plan, path, outcomes, notice=SMOKE if small else None)
        write_atomically(Path(page), text)
    return {**answer, "page": page and str(page)}


def _check_request(path: Path, known: Sequence[str], only: Sequence[str], scale: str) -> None:
    if scale not in ("full", "smoke"):
        raise RecipeError(
            f"--scale: unknown '{scale}'{nearest(scale, ['full', 'smoke'])}",
            code="recipe.unknown_name",
        )
    for wanted in only:
        if wanted not in known:
            raise RecipeError(
                f"--only: {path} has no run '{wanted}'{nearest(wanted, known)}",
                code="recipe.unknown_name",
            )


def _outcome(
    entry: Entry,
    recipe_with: Callable[[Sequence[str]], Recipe],
    folder: Path,
    results_of: Callable[[Path, Recipe], _Results | None],
) -> Outcome | None:
    """Choose if there is a grid, then train once for each seed; or measure features.

    Args:
        recipe_with: of one run, from further overrides.
        results_of: trains a run in a folder, or only looks for it there.
    Returns: None if one of the runs is not done; of copied ones, if none is.
    """
    if entry.probe is not None:
        return _probed(entry, recipe_with(()), folder / entry.name, anew=results_of is _trained)
    chosen: Sequence[str] = ()
    choices: list[dict[str, Any]] = []
    for changes in entry.combinations() if entry.grid else ():
        path = folder / f"{entry.name}-choose" / entry.folder_of(changes)
        recipe = recipe_with([*changes, "run.test=false", f"run.seed={entry.seeds[0]}"])
        results = results_of(path, recipe)
        if results is None:
            return None
        by = entry.by or f"val.{main_figure(results.get('val', {}))}"
        split, _, key = by.partition(".")
        figure = results.get(split, {}).get(key)
        if figure is None:
            raise RecipeError(
                f"{entry.name}: nothing to choose by: {path.relative_to(folder)} has no {by}; "
                "set data.val_fraction",
                code="recipe.conflict",
            )
        choices.append({"overrides": list(changes), by: figure, "run": str(path)})
    if choices:
        best = (min if key == "loss" else max)(choices, key=lambda row: row[by])
        choices = [{**row, "chosen": row is best} for row in choices]
        chosen = best["overrides"]
    done: dict[Path, _Results] = {}
    for seed in entry.seeds:
        path = folder / f"{entry.name}-s{seed}"
        recipe = recipe_with([*chosen, *entry.final, f"run.seed={seed}"])
        try:
            results = results_of(path, recipe)
        except RecipeError as error:
            if not chosen or not path.exists():
                raise
            raise RecipeError(
                f"{error}; the grid chooses {' '.join(chosen)}: remove {path} to train that",
                code="recipe.not_this_run",
            ) from None
        if results is not None:
            done[path] = results
        elif results_of is not _copied:
            return None
    return Outcome(entry, list(done), list(done.values()), choices) if done else None


def _trained(folder: Path, recipe: Recipe) -> _Results:
    """Train one run of a plan, go on with it, or take it as it is.

    A run that is done and has no model/ was copied without it, and is not trained again for it.
    """
    results = finished(folder, recipe)
    if results is None:
        gc.collect()  # the network of the run before, which Accelerate's wrappers hold
        torch.cuda.empty_cache()  # for those who ask the device what is free
    elif not (folder / "model").is_dir():
        return results
    try:
        return train(recipe, folder, resume=True, stay=True)
    except Interrupted as error:
        message = str(error).replace("continue with --resume", "repeat the command to go on")
        raise Interrupted(message, error.signal_number) from None


def _copied(folder: Path, recipe: Recipe) -> _Results | None:
    """A run that is done, there or on another machine, where the images may lie elsewhere."""
    before = recipe_of(folder)
    return None if before is None else finished(folder, with_source_of(recipe, before))


def _probed(entry: Entry, recipe: Recipe, folder: Path, *, anew: bool) -> Outcome | None:
    """Measure the features of a recipe's weights, unless that is done."""
    wanted, model = entry.probe, recipe.model.name
    assert wanted is not None
    file = folder / "probe.json"
    probe = load_json(file) if file.is_file() else {}
    shots = {int(count): row for count, row in probe.get("shots", {}).items()}
    same = probe.get("model") == model and tuple(shots) == wanted.shots
    if same and all(len(row["seeds"]) == wanted.draws for row in shots.values()):
        probe["shots"] = shots
    elif anew:
        data, draws = recipe.data.source, wanted.draws
        probe = probe_model(model, data=data, shots=wanted.shots, seeds=draws, out=folder)
    else:
        return None
    return Outcome(entry, [folder], probe=probe)


def _answer(title: str, scale: str, folder: Path, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Write the table, and the page that compares the runs."""
    from finetune.report.page import compare  # brings matplotlib

    trained = [one for one in outcomes if not one.probe]
    every = [done for one in trained for done in zip(one.paths, one.results, strict=True)]
    answer: dict[str, Any] = {
        "title": title,
        "scale": scale,
        "runs": [_summary(one) for one in trained],
        "choices": {one.entry.name: one.choices for one in trained if one.choices},
        "claims": [
            {**claim, "run": path.name}
            for path, results in every
            for claim in results.get("claims") or []
        ],
        "probes": {one.entry.name: one.probe for one in outcomes if one.probe},
    }
    tasks = {"map" in (results.get("test") or results.get("val") or {}) for _, results in every}
    page = folder / "comparison.html" if len(every) > 1 and len(tasks) == 1 else None
    if is_first_rank():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "table.md", describe(answer))
        if page:
            compare([path for path, _ in every], page)
    return {**answer, "table": str(folder / "table.md"), "comparison": page and str(page)}


def _summary(outcome: Outcome) -> dict[str, Any]:
    """Mean and spread over the seeds of one entry."""
    tests = [results["test"] for results in outcome.results if results.get("test")]
    paths = [str(path) for path in outcome.paths]
    row: dict[str, Any] = {"name": outcome.entry.name, "paths": paths, "seeds": len(paths)}
    row["reported"] = outcome.entry.reported
    if tests:
        row["examples"] = tests[0]["examples"]
        for key in [key for key in _FIGURES if key in tests[0]]:
            mean, std, _ = mean_std(test[key] for test in tests)
            row[key] = {"mean": mean, "std": std}
    return row


def describe(answer: Mapping[str, Any]) -> str:
    """The result of a plan as Markdown: runs, choices and claims.

    Args:
        answer: of `reproduce`.
    """
    lines = [f"# {answer['title']}", ""]
    smoke = answer["scale"] == "smoke"
    if smoke:
        lines += [f"**{SMOKE}**", ""]
    reported = ["reported"] if any(row.get("reported") for row in answer["runs"]) else []
    measured = [key for key in _FIGURES if any(key in row for row in answer["runs"])]
    rows = [
        [
            row["name"],
            str(row["seeds"]),
            f"{row['examples']:,}" if "examples" in row else MISSING,
            *(_cell(key, row[key]) if key in row else MISSING for key in measured),
            *(row[key] or MISSING for key in reported),
        ]
        for row in answer["runs"]
    ]
    heads = ["run", "seeds", "images", *(_FIGURES[key] for key in measured), *reported]
    lines += markdown_table(heads, rows)
    for name, choices in answer["choices"].items():
        by = next(key for key in choices[0] if key.startswith("val."))
        rows = [
            [", ".join(row["overrides"]), f"{row[by]:.4f}", "chosen" if row["chosen"] else ""]
            for row in choices
        ]
        lines += ["", f"Chosen for {name}, without reading the test split:", ""]
        lines += markdown_table(["settings", by, ""], rows)
    for name, probe in answer["probes"].items():
        lines += ["", f"Features of {name}:", "", "```", describe_probe(probe), "```"]
    if claims := answer["claims"]:
        met = sum(claim["verdict"] == VERDICTS[0] for claim in claims)
        of_what = f"{met} of {len(claims)} met"
        if smoke:
            of_what = "of another experiment than this"
            claims = [{**claim, "verdict": MISSING} for claim in claims]
        lines += ["", f"## Claims: {of_what}", "", table(claims)]
    return "\n".join(lines).rstrip("\n") + "\n"


def _cell(key: str, figure: Mapping[str, Any]) -> str:
    """A mean with its spread, accuracies in per cent."""
    factor, digits = (100, 2) if key.startswith(("top", "map")) else (1, 4)
    mean, std = figure["mean"], figure["std"]
    return mean_and_std(factor * mean, None if std is None else factor * std, digits)
