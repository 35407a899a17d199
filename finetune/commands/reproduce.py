"""`finetune reproduce`: train the runs of a plan, and write one table of their results.

A plan (plan.yaml) lists related runs as entries. An entry may first search a grid, on the
validation split only. The best setting is then trained from scratch, once per seed.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from finetune.commands.probe import format_probe, probe_model, read_probe
from finetune.commands.reproduce_page import EntryResult, find_other_inputs, render_page
from finetune.commands.reproduce_plan import (
    PLAN_FILENAME,
    PlanEntry,
    check_plan_recipes,
    find_plan,
    load_entry_recipe,
    load_plan,
    to_smoke_plan,
    use_source_of_run,
)
from finetune.errors import DataError, Interrupted, RecipeError, did_you_mean, redact_urls
from finetune.evaluation.claims import VERDICTS, claims_table, primary_metric
from finetune.evaluation.metrics import mean_std
from finetune.files import write_atomically
from finetune.formatting import MISSING, format_mean_std, markdown_table
from finetune.log import logger
from finetune.ranks import is_main_process
from finetune.recipe.schema import Recipe
from finetune.recipe.training_keys import names_other_inputs
from finetune.run.directory import RunDir, resume_command
from finetune.run.record import (
    differing_inputs,
    have_other_shards,
    have_other_test_images,
    load_run_recipe,
    read_finished_results,
    read_record,
    training_identity,
)
from finetune.training.accelerator import destroy_process_group
from finetune.training.train import train

__all__ = ["SMOKE_NOTICE", "format_plan_results", "run_plan", "write_summary"]

SMOKE_NOTICE = (
    "A smoke test of the whole path in minutes. It is not the experiment, and its figures say "
    "nothing about it."
)
_METRIC_TITLES = {
    "top1": "top-1, %",
    "top5": "top-5, %",
    "map": "mAP, %",
    "loss": "loss",
    "ece": "calibration error",
}

_Results = dict[str, Any]  # content of results.json


def run_plan(
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
    """Run a plan, or continue it; finished runs are not repeated.

    Args:
        name: name or path of a plan, see `find_plan`.
        only: names of the entries to run; empty runs all. The table also includes the finished
            runs of the other entries.
        scale: "full", or "smoke" for a shortened version of each run, which takes minutes and does
            not reproduce the experiment.
        overrides: overrides for every run, each `section.key=value`.
        sources: dict from a data source of the recipes to the source to read instead, a copy of
            the same data.
        out: the folder for the runs; by default runs/NAME, or runs/NAME-smoke.
        done: True to train nothing and summarize only the finished seeds. Their run directories may
            come from a machine with the images at another path, and need neither checkpoints nor
            model/.
        page: Markdown file for the results page of all recipes, see `render_page`.
    Returns: a dict with keys "title", "scale", "runs" (name, paths, seeds, test metrics),
        "choices" (grid search results by entry), "other_inputs" (see `find_other_inputs`),
        "claims" (each with its run), "probes" (by entry), and the paths "table", "comparison" and
        "page".
    Raises: RecipeError for an invalid plan, and any error of a run.
    """
    path = find_plan(name)
    plan = load_plan(path)
    entry_names = [entry.name for entry in plan.runs]
    _check_arguments(path, entry_names, only, scale)
    plan_name = path.parent.name if path.name == PLAN_FILENAME else path.stem
    is_smoke = scale == "smoke"
    folder = Path(out or Path("runs") / (plan_name + ("-smoke" if is_smoke else "")))
    plan = to_smoke_plan(plan) if is_smoke else plan
    extra_overrides = [f"run.note={SMOKE_NOTICE}", *overrides] if is_smoke else list(overrides)
    check_plan_recipes(plan, path, extra_overrides, sources)
    entry_results: list[EntryResult] = []
    wanted = [] if done else [name for name in entry_names if not only or name in only]
    for entry in plan.runs:
        if entry.name in wanted:
            logger.info(
                f"{plan_name}: {entry.name}, {wanted.index(entry.name) + 1} of {len(wanted)}"
            )
        load_recipe_with = functools.partial(
            load_entry_recipe, entry, path, extra_overrides=extra_overrides, sources=sources
        )
        entry_result = _run_entry(
            entry,
            load_entry_recipe(entry, path),
            load_recipe_with,
            folder,
            run_missing=entry.name in wanted,
            done=done,
        )
        if entry_result is not None:
            entry_results.append(entry_result)
        elif done:
            logger.info(
                f"{entry.name}: skipped, because it has no finished run or the plan has changed"
            )
    destroy_process_group()
    if is_main_process():  # the other ranks have no results of probes
        _check_same_weights([entry_result for entry_result in entry_results if entry_result.probe])
    result = write_summary(plan.title, scale, folder, entry_results)
    if page is not None and is_main_process():
        page_text = render_page(
            plan, path, entry_results, disclaimer=SMOKE_NOTICE if is_smoke else None
        )
        write_atomically(Path(page), page_text)
    return {**result, "page": page and str(page)}


def _check_arguments(
    path: Path, entry_names: Sequence[str], only: Sequence[str], scale: str
) -> None:
    if scale not in ("full", "smoke"):
        raise RecipeError(
            f"--scale: unknown '{scale}'{did_you_mean(scale, ['full', 'smoke']) or '.'} Choose "
            "from full, smoke",
            code="recipe.unknown_name",
        )
    for wanted in only:
        if wanted not in entry_names:
            raise RecipeError(
                f"--only: {path} has no run '{wanted}'"
                f"{did_you_mean(wanted, entry_names) or '; give a name from this file'}",
                code="recipe.unknown_name",
            )


def _run_entry(
    entry: PlanEntry,
    planned: Recipe,
    load_recipe_with: Callable[[Sequence[str]], Recipe],
    folder: Path,
    *,
    run_missing: bool,
    done: bool,
) -> EntryResult | None:
    """Search the grid if the entry has one, then train once per seed; or probe features.

    Args:
        planned: the entry's recipe, without the overrides of the command line.
        load_recipe_with: function from additional overrides to the entry's recipe.
        folder: parent folder of the run directories.
        run_missing: True to train or probe what is not finished; False to only read results.
        done: True to accept an entry if only some of its seeds are finished, see `run_plan`.
    Returns: the results; None if a run is not finished (with `done`: if no seed is finished).
    """
    if entry.probe is not None:
        probe = _probe_or_load(
            entry, load_recipe_with(()), folder / entry.name, run_missing=run_missing, done=done
        )
        if probe is None:
            return None
        return EntryResult(entry, planned, [folder / entry.name], probe=probe)

    def get_results(path: Path, recipe: Recipe) -> _Results | None:
        if run_missing:
            return _train_or_resume(path, recipe)
        return _load_finished_copy(path, recipe) if done else read_finished_results(path, recipe)

    chosen: Sequence[str] = ()
    choices: list[dict[str, Any]] = []
    for combination in entry.grid_combinations() if entry.grid else ():
        path = folder / f"{entry.name}-choose" / entry.combination_folder(combination)
        recipe = load_recipe_with([*combination, "run.test=false", f"run.seed={entry.seeds[0]}"])
        results = get_results(path, recipe)
        if results is None:
            return None
        metric = entry.by or f"val.{primary_metric(results.get('val', {}))}"
        split, _, key = metric.partition(".")
        value = results.get(split, {}).get(key)
        if value is None:
            raise RecipeError(
                f"{entry.name}: cannot choose the best setting of the grid, because the run "
                f"{path.relative_to(folder)} has no {metric}; set data.val_fraction",
                code="recipe.conflict",
            )
        choices.append({"overrides": list(combination), metric: value, "run": str(path)})
    varied = {override.partition("=")[0] for row in choices for override in row["overrides"]}
    _check_same_inputs(entry.name, [Path(row["run"]) for row in choices], varied=varied)
    if choices:
        best = (min if key == "loss" else max)(choices, key=lambda row: row[metric])
        choices = [{**row, "chosen": row is best} for row in choices]
        chosen = best["overrides"]
    finished_runs: dict[Path, _Results] = {}
    left_out: list[Path] = []
    for seed in entry.seeds:
        path = folder / f"{entry.name}-s{seed}"
        recipe = load_recipe_with([*chosen, *entry.final, f"run.seed={seed}"])
        try:
            results = get_results(path, recipe)
        except RecipeError as error:
            if not chosen or not path.exists():
                raise
            raise RecipeError(
                f"{error}; the grid search chose {' '.join(chosen)}; to train with it, remove "
                f"{path}",
                code="recipe.not_this_run",
            ) from None
        if results is not None:
            finished_runs[path] = results
        elif done:
            left_out.append(path)
        else:
            return None
    if finished_runs:
        for path in left_out:
            logger.info(f"{path}: left out, because it is not a finished run of this recipe")
    _check_same_inputs(entry.name, list(finished_runs))
    return (
        EntryResult(entry, planned, list(finished_runs), list(finished_runs.values()), choices)
        if finished_runs
        else None
    )


def _check_same_inputs(name: str, folders: Sequence[Path], *, varied: Collection[str] = ()) -> None:
    """Raise DataError if runs that are averaged or compared had other images or weights.

    Args:
        name: name of the entry.
        varied: keys of the recipe in which the runs differ.
    """
    recipes = [(folder, load_run_recipe(folder)) for folder in folders]
    records = [(recipe, read_record(RunDir(folder))) for folder, recipe in recipes]
    identities = [training_identity(recipe, record) for recipe, record in records if recipe]
    inputs = differing_inputs(identities)
    if names := [
        each for section, each in inputs.items() if not names_other_inputs(varied, section)
    ]:
        raise DataError(
            f"{name}: its runs ({', '.join(map(str, folders))}) used different "
            f"{' and '.join(names)}, so they cannot be averaged or compared; remove the wrong ones "
            "and run the command again",
            code="data.changed",
        )
    results = [RunDir(folder).read_json("results.json") for folder in folders]
    if not names_other_inputs(varied, "data") and have_other_test_images(results):
        logger.warning(f"{name}: its runs could not read the same number of test images")
    if have_other_shards(record for _, record in records):
        logger.warning(
            f"{name}: shards were written or copied between its runs, so their images may differ"
        )


def _train_or_resume(folder: Path, recipe: Recipe) -> _Results:
    """Train a run of a plan, resume it, or read its results if it is finished.

    A finished run without model/ was copied without that folder; it is not trained again.
    """
    results = read_finished_results(folder, recipe)
    if results is None:
        gc.collect()  # free the previous run's network, which Accelerate's wrappers hold
        torch.cuda.empty_cache()  # so that the device reports this memory as free
    elif not (folder / "model").is_dir():
        return results
    try:
        return train(recipe, folder, resume=True, keep_process_group=True)
    except Interrupted as error:
        message = str(error).replace(
            f"continue: {resume_command(folder)}", "repeat the command to continue"
        )
        raise Interrupted(message, error.signal_number) from None


def _load_finished_copy(folder: Path, recipe: Recipe) -> _Results | None:
    """Read the results of a finished run, even if its images were at another path."""
    run_recipe = load_run_recipe(folder)
    return (
        None
        if run_recipe is None
        else read_finished_results(folder, use_source_of_run(recipe, run_recipe))
    )


def _probe_or_load(
    entry: PlanEntry, recipe: Recipe, folder: Path, *, run_missing: bool, done: bool
) -> dict[str, Any] | None:
    """Probe the features of a recipe's weights, or read a probe with the same settings.

    With `done`, its data may have been at another path.

    Returns: the content of probe.json; None if no such probe exists.
    """
    settings, model, data = entry.probe, recipe.model.name, recipe.data.source
    assert settings is not None
    if run_missing:  # cached features of the same images and weights make it short
        return probe_model(model, data=data, shots=settings.shots, seeds=settings.draws, out=folder)
    probe = read_probe(folder)
    if probe is None or probe["model"] != model or tuple(probe["shots"]) != settings.shots:
        return None
    has_same_settings = done or probe["data"] == redact_urls(data)
    has_same_settings &= all(len(row["seeds"]) == settings.draws for row in probe["shots"].values())
    return probe if has_same_settings else None


def _check_same_weights(probed: Sequence[EntryResult]) -> None:
    """Raise DataError if probes of one model name used different weights."""
    first_of_model: dict[str, tuple[str, Any]] = {}
    for entry_result in probed:
        assert entry_result.probe is not None
        model, name = entry_result.probe["model"], entry_result.entry.name
        weights = entry_result.probe["protocol"]["weights"]
        first_name, first_weights = first_of_model.setdefault(model, (name, weights))
        if weights != first_weights:
            raise DataError(
                f"{first_name} and {name}: their probes used different weights of {model}, so they "
                "cannot be compared; run both again",
                code="data.changed",
            )


def write_summary(
    title: str, scale: str, folder: Path, entry_results: Sequence[EntryResult]
) -> dict[str, Any]:
    """Write table.md and comparison.html. Returns: the result of `run_plan` without "page"."""
    from finetune.report.page import write_comparison  # imports matplotlib

    trained = [entry_result for entry_result in entry_results if not entry_result.probe]
    finished_runs = [
        pair
        for entry_result in trained
        for pair in zip(entry_result.paths, entry_result.results, strict=True)
    ]
    summary: dict[str, Any] = {
        "title": title,
        "scale": scale,
        "runs": [_summarize_entry(entry_result) for entry_result in trained],
        "choices": {
            entry_result.entry.name: entry_result.choices
            for entry_result in trained
            if entry_result.choices
        },
        "other_inputs": find_other_inputs(entry_results),
        "claims": [claim for entry_result in trained for claim in entry_result.evaluate_claims()],
        "probes": {
            entry_result.entry.name: entry_result.probe
            for entry_result in entry_results
            if entry_result.probe
        },
    }
    is_multilabel_values = {
        "map" in (results.get("test") or results.get("val") or {}) for _, results in finished_runs
    }
    page = (
        folder / "comparison.html"
        if len(finished_runs) > 1 and len(is_multilabel_values) == 1
        else None
    )
    if is_main_process():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "table.md", format_plan_results(summary))
        if page:
            write_comparison([path for path, _ in finished_runs], page)
    return {**summary, "table": str(folder / "table.md"), "comparison": page and str(page)}


def _summarize_entry(entry_result: EntryResult) -> dict[str, Any]:
    """Return the mean and standard deviation of an entry's metrics over its seeds."""
    tests = [results["test"] for results in entry_result.results if results.get("test")]
    paths = [str(path) for path in entry_result.paths]
    row: dict[str, Any] = {"name": entry_result.entry.name, "paths": paths, "seeds": len(paths)}
    row["reported"] = entry_result.entry.reported
    if tests:
        row["examples"] = tests[0]["examples"]
        for key in [key for key in _METRIC_TITLES if key in tests[0]]:
            mean, std, _ = mean_std(test[key] for test in tests)
            row[key] = {"mean": mean, "std": std}
    return row


def format_plan_results(result: Mapping[str, Any]) -> str:
    """Format the results of a plan as Markdown: runs, grid searches, probes and claims.

    Args:
        result: the result of `run_plan`.
    """
    lines = [f"# {result['title']}", ""]
    is_smoke = result["scale"] == "smoke"
    if is_smoke:
        lines += [f"**{SMOKE_NOTICE}**", ""]
    reported = ["reported"] if any(row.get("reported") for row in result["runs"]) else []
    metrics = [key for key in _METRIC_TITLES if any(key in row for row in result["runs"])]
    rows = [
        [
            row["name"],
            str(row["seeds"]),
            f"{row['examples']:,}" if "examples" in row else MISSING,
            *(_format_metric(key, row[key]) if key in row else MISSING for key in metrics),
            *(row[key] or MISSING for key in reported),
        ]
        for row in result["runs"]
    ]
    notes = result["other_inputs"].items()
    header = ["run", "seeds", "images", *(_METRIC_TITLES[key] for key in metrics), *reported]
    lines += markdown_table(header, rows)
    lines += [line for name, note in notes for line in ("", f"{name}{note}.")]
    for name, choices in result["choices"].items():
        metric = next(key for key in choices[0] if key.startswith("val."))
        rows = [
            [", ".join(row["overrides"]), f"{row[metric]:.4f}", "chosen" if row["chosen"] else ""]
            for row in choices
        ]
        lines += ["", f"Grid search for {name}, without reading the test split:", ""]
        lines += markdown_table(["settings", metric, ""], rows)
    for name, probe in result["probes"].items():
        lines += ["", f"Features of {name}:", "", "```", format_probe(probe), "```"]
    if claims := result["claims"]:
        num_met = sum(claim["verdict"] == VERDICTS[0] for claim in claims)
        status = f"{num_met} of {len(claims)} met"
        if is_smoke:
            status = "not judged in a smoke test"
            claims = [{**claim, "verdict": MISSING} for claim in claims]
        lines += ["", f"## Claims: {status}", "", claims_table(claims)]
    return "\n".join(lines).rstrip("\n") + "\n"


def _format_metric(key: str, mean_std_row: Mapping[str, Any]) -> str:
    """Format a mean with its standard deviation, accuracies in percent."""
    factor, digits = (100, 2) if key.startswith(("top", "map")) else (1, 4)
    mean, std = mean_std_row["mean"], mean_std_row["std"]
    return format_mean_std(factor * mean, None if std is None else factor * std, digits)
