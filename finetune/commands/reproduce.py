"""Many runs that belong together, and one table of what they say.

A run of a plan may first choose among the values of a grid, by its validation split and without
reading the test split; the choice is then trained anew, once for each seed.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from finetune.commands.probe import probe_model
from finetune.commands.reproduce_measured import Measured
from finetune.commands.reproduce_page import page_of
from finetune.commands.reproduce_plan import (
    PLAN,
    Entry,
    Plan,
    Probe,
    check_runs,
    find_plan,
    load_plan,
    made_small,
    recipe_for,
)
from finetune.commands.reproduce_table import FIGURES, SMOKE, describe
from finetune.console import say
from finetune.errors import Interrupted, RecipeError, nearest
from finetune.evaluation.metrics import mean_std
from finetune.files import write_atomically
from finetune.processes import is_first_rank
from finetune.recipe.identity import recipe_of
from finetune.recipe.load import Recipe
from finetune.run.record import finished
from finetune.run.validation import load_json
from finetune.training.launch import leave
from finetune.training.train import train

__all__ = ["reproduce"]


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
    """The outcome of an entry: a run for each seed and the grid's rows if any, or a probe."""

    entry: Entry
    finals: list[_Done]
    choices: list[dict[str, Any]] = field(default_factory=list)
    probe: dict[str, Any] | None = None

    def measured(self, folder: Path) -> Measured:
        """The directories that the page reads: of runs, or of a probe."""
        paths = [done.path for done in self.finals] or [folder / self.entry.name]
        return Measured(self.entry, paths)


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
        page: a file for the page of `recipe_page`.
    Returns: "title", "scale", "runs" (name, paths, seeds, test figures), "choices" of the grids,
        "claims" with the run that answers each, "probes" by run, "table" (a file), "comparison"
        and "page" (pages).
    Raises: RecipeError for a wrong plan, and whatever ends a run.
    """
    path = find_plan(name)
    plan = load_plan(path)
    known = [entry.name for entry in plan.runs]
    _check_request(path, known, only, scale, out)
    plan_name, small = path.parent.name if path.name == PLAN else path.stem, scale == "smoke"
    folder = Path(out or Path("runs") / (plan_name + ("-smoke" if small else "")))
    plan = made_small(plan) if small else plan
    added = [*plan.smoke, f"run.note={SMOKE}", *overrides] if small else list(overrides)
    check_runs(plan, path, added, sources)
    outcomes: list[_Outcome] = []
    wanted_runs = [] if done else [name for name in known if not only or name in only]
    for entry in plan.runs:
        if entry.name in wanted_runs:
            number = wanted_runs.index(entry.name) + 1
            say(f"{plan_name}: {entry.name}, {number} of {len(wanted_runs)}")
        run_of = _trained if entry.name in wanted_runs else _copied if done else _done_run
        recipe_of_run = functools.partial(_recipe, entry, path, added, sources or {})
        outcome = _outcome(entry, recipe_of_run, folder, run_of)
        if outcome is not None:
            outcomes.append(outcome)
        elif done:
            say(f"{entry.name}: left out: nothing of it is done, or the plan is another by now")
    leave()
    answer = _answer(plan, scale, folder, outcomes)
    if page is not None and is_first_rank():
        measured = [one.measured(folder) for one in outcomes]
        notice = SMOKE if small else None
        write_atomically(Path(page), page_of(plan, path, measured, notice=notice))
    return {**answer, "page": page and str(page)}


def _check_request(
    path: Path, known: Sequence[str], only: Sequence[str], scale: str, out: str | Path | None
) -> None:
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
    if out is not None and not str(out).strip():
        raise RecipeError("--out: is empty; give a folder", code="recipe.wrong_value")


def _recipe(
    entry: Entry,
    path: Path,
    added: Sequence[str],
    sources: Mapping[str, str],
    changes: Sequence[str],
) -> Recipe:
    """The recipe of one run of an entry: `added` is every run's, `changes` are its own."""
    return recipe_for(entry, path, [*added, *changes], sources)


def _outcome(
    entry: Entry,
    recipe_of_run: Callable[[Sequence[str]], Recipe],
    folder: Path,
    run_of: Callable[[Recipe, Path, str], _Done | None],
) -> _Outcome | None:
    """Choose if there is a grid, then train once for each seed; or measure features.

    Args:
        recipe_of_run: of one run, from further overrides.
        run_of: trains a run, or only looks for it.
    Returns: None if one of the runs is not done; of copied ones, if none is.
    """
    if entry.probe is not None:
        return _probed(entry, entry.probe, recipe_of_run(()), folder, anew=run_of is _trained)
    chosen: Sequence[str] = ()
    choices: list[dict[str, Any]] = []
    split, _, key = entry.by.partition(".")
    for changes in entry.combinations() if entry.grid else ():
        name = f"{entry.name}-choose/{entry.folder_of(changes)}"
        settings = [*changes, "run.test=false", f"run.seed={entry.seeds[0]}"]
        done = run_of(recipe_of_run(settings), folder / name, name)
        if done is None:
            return None
        figure = done.results.get(split, {}).get(key)
        if figure is None:
            raise RecipeError(
                f"{entry.name}: nothing to choose by: {name} has no {entry.by}; set "
                "data.val_fraction",
                code="recipe.conflict",
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
        recipe = recipe_of_run([*chosen, *entry.final, f"run.seed={seed}"])
        try:
            final = run_of(recipe, folder / name, name)
        except RecipeError as error:
            if not chosen or not (folder / name).exists():
                raise
            raise RecipeError(
                f"{error}; the grid chooses {' '.join(chosen)}: remove {folder / name} to train "
                "that",
                code="recipe.not_this_run",
            ) from None
        if final is not None:
            finals.append(final)
        elif run_of is not _copied:
            return None
    return _Outcome(entry, finals, choices) if finals else None


def _trained(recipe: Recipe, folder: Path, name: str) -> _Done:
    """Train one run of a plan, go on with it, or take it as it is.

    A run that is done and has no model/ was copied without it, and is not trained again for it.
    """
    finished_run = _done_run(recipe, folder, name)
    if finished_run is not None and not (folder / "model").is_dir():
        return finished_run
    gc.collect()  # the network of the run before, which Accelerate's wrappers hold
    torch.cuda.empty_cache()  # for those who ask the device what is free
    try:
        return _Done(name, folder, train(recipe, folder, resume=True, stay=True))
    except Interrupted as error:
        message = str(error).replace("continue with --resume", "repeat the command to go on")
        raise Interrupted(message, error.signal_number) from None


def _done_run(recipe: Recipe, folder: Path, name: str) -> _Done | None:
    """A run of a plan if it is done, with this recipe."""
    results = finished(folder, recipe)
    return None if results is None else _Done(name, folder, results)


def _copied(recipe: Recipe, folder: Path, name: str) -> _Done | None:
    """A run that is done, there or on another machine, where the images may lie elsewhere."""
    before = recipe_of(folder)
    if before is None:
        return None
    data = recipe.data.model_copy(update={"source": before.data.source})
    run = recipe.run.model_copy(update={"note": before.run.note})
    return _done_run(recipe.model_copy(update={"data": data, "run": run}), folder, name)


def _probed(
    entry: Entry, wanted: Probe, recipe: Recipe, folder: Path, *, anew: bool
) -> _Outcome | None:
    """Measure the features of a recipe's weights, unless that is done."""
    file = folder / entry.name / "probe.json"
    recorded = load_json(file) if file.is_file() else {}
    shots = {int(count): row for count, row in recorded.get("shots", {}).items()}
    same = recorded.get("model") == recipe.model.name and tuple(shots) == wanted.shots
    if same and all(len(row["seeds"]) == wanted.draws for row in shots.values()):
        return _Outcome(entry, [], probe={**recorded, "shots": shots})
    if not anew:
        return None
    measured = probe_model(
        recipe.model.name,
        data=recipe.data.source,
        shots=wanted.shots,
        seeds=wanted.draws,
        out=file.parent,
    )
    return _Outcome(entry, [], probe=measured)


def _answer(plan: Plan, scale: str, folder: Path, outcomes: Sequence[_Outcome]) -> dict[str, Any]:
    """Write the table and the page that compares the runs."""
    from finetune.report.page import compare  # brings matplotlib

    every = [done for outcome in outcomes for done in outcome.finals]
    answer: dict[str, Any] = {
        "title": plan.title,
        "scale": scale,
        "runs": [_summary(outcome) for outcome in outcomes if outcome.finals],
        "choices": {one.entry.name: one.choices for one in outcomes if one.choices},
        "claims": [
            {**claim, "run": done.name}
            for done in every
            for claim in done.results.get("claims") or []
        ],
        "probes": {one.entry.name: one.probe for one in outcomes if one.probe},
    }
    page = folder / "comparison.html" if len(every) > 1 else None
    if is_first_rank():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "table.md", describe(answer))
        if page:
            compare([done.path for done in every], page)
    return {**answer, "table": str(folder / "table.md"), "comparison": page and str(page)}


def _summary(outcome: _Outcome) -> dict[str, Any]:
    """Mean and spread over the seeds of one entry."""
    done = outcome.finals
    tests = [one.results["test"] for one in done if one.results.get("test")]
    row: dict[str, Any] = {"name": outcome.entry.name, "paths": [str(one.path) for one in done]}
    row |= {"seeds": len(done), "reported": outcome.entry.reported}
    if tests:
        row["examples"] = tests[0]["examples"]
        for key in FIGURES:
            mean, std, _ = mean_std(test[key] for test in tests)
            row[key] = {"mean": mean, "std": std}
    return row
