"""Plans: YAML files that list related runs, with grids, seeds and the published results.

A plan is a file `plan.yaml` next to the recipes that it runs.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from finetune.errors import RecipeError, did_you_mean, holds_secret
from finetune.recipe import strict_yaml as recipe_yaml
from finetune.recipe.field_types import (
    ClaimTime,
    FiniteFloat,
    Integer,
    KeywordArguments,
    MetricName,
    NonEmptyString,
    NumberRange,
    SelectionMetric,
)
from finetune.recipe.load import Claim, Section, load_recipe
from finetune.recipe.schema import Recipe
from finetune.recipe.validate import validate_document

__all__ = [
    "PLAN_FILENAME",
    "Direction",
    "OtherProgramResult",
    "Plan",
    "PlanEntry",
    "ProbeSettings",
    "check_plan_recipes",
    "find_plan",
    "load_entry_recipe",
    "load_plan",
    "to_smoke_plan",
    "use_source_of_run",
]

PLAN_FILENAME = "plan.yaml"
_NUM_SMOKE_VALUES = 2  # number of seeds, and of values per grid key, in a smoke test


def _check_folder_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value):
        problem = "a folder name of letters, digits, '.', '_' and '-'"
        raise PydanticCustomError("name", "{cause}", {"cause": problem})
    return value


FolderName = Annotated[NonEmptyString, AfterValidator(_check_folder_name)]


class ProbeSettings(Section):
    """Few-shot accuracy of frozen features, instead of training; see `finetune probe`."""

    shots: tuple[Integer, ...] = Field((1, 5, 10, 25), description="training images per class")
    draws: Integer = Field(3, ge=1, description="number of draws of the shots: seeds 0, 1, …")
    expected: tuple[NumberRange, ...] = Field(
        (), description="[lowest, highest] accuracy for each number of shots"
    )
    source: NonEmptyString | None = Field(None, description="source of the expected accuracy")


class OtherProgramResult(Section):
    """Results of another program, to compare with the results of an entry."""

    program: NonEmptyString = Field(description="name and version of the program")
    command: NonEmptyString = Field(description="the command that was run")
    machine: NonEmptyString = Field(description="hardware and versions")
    seeds: tuple[Integer, ...] = Field(
        min_length=1, description="seeds that the program was trained with"
    )
    top1: tuple[FiniteFloat, ...] = Field(description="top-1 accuracy of each seed, 0 to 1")
    seconds: tuple[FiniteFloat, ...] = Field((), description="wall-clock seconds of each training")
    our_seconds: tuple[FiniteFloat, ...] = Field(
        (), description="wall-clock seconds of each training with finetune on the same machine"
    )
    note: NonEmptyString | None = Field(None, description="differences from our run")


class Direction(Section):
    """A claim about the direction of a metric, checked with runs smaller than the source's."""

    question: NonEmptyString = Field(description="a yes/no question, answered for each seed")
    source: NonEmptyString = Field(description="where the claim is made")
    expected: NonEmptyString | None = Field(
        None, description="expected answer, written before the run"
    )
    run: FolderName = Field(description="the entry whose runs answer the question")
    metric: MetricName = Field(description="as in a claim: val.loss, test.top1, …")
    when: ClaimTime = Field("end", description="as in a claim; 'after epoch N' for a trend")
    trend: Literal["rising", "falling"] | None = Field(
        None, description="expected direction of the metric over the evaluations"
    )
    below: FolderName | None = Field(
        None, description="entry whose value, with the same seed, is expected to be larger"
    )


class PlanEntry(Section):
    """An entry of a plan: one run per seed, after an optional grid search."""

    name: FolderName = Field(description="prefix of the run folders, followed by the seed")
    recipe: NonEmptyString = Field(description="path of the recipe, relative to the plan's folder")
    probe: ProbeSettings | None = Field(
        None,
        description="evaluate features of the recipe's model.name on data.source; no training, and "
        "no other key of the recipe",
    )
    overrides: tuple[NonEmptyString, ...] = Field(
        (), description="key=value, as on the command line"
    )
    grid: KeywordArguments = Field({}, description="recipe keys with the values to try")
    by: SelectionMetric | None = Field(
        None,
        description="metric that selects the best setting; null: val.top1, for multilabel val.map",
    )
    final: tuple[NonEmptyString, ...] = Field(
        (), description="overrides for the final runs; data.val_fraction=0 trains on all images"
    )
    seeds: tuple[Integer, ...] = Field(
        (0,), description="one run for each; the grid search uses the first"
    )
    claims: tuple[Claim, ...] | None = Field(
        None,
        description="published results to check this run against; null: the recipe's claims, which "
        "are about its own data.source",
    )
    reported: NonEmptyString | None = Field(
        None, description="a published result to show next to ours, without checking it"
    )
    beside: tuple[OtherProgramResult, ...] = Field(
        (), description="results of other programs, shown on the page"
    )
    smoke: tuple[NonEmptyString, ...] | None = Field(
        None, description="overrides that replace the plan's smoke"
    )

    def grid_combinations(self) -> Iterator[tuple[str, ...]]:
        """Yield the overrides of every combination of grid values; a single () without a grid."""
        for values in itertools.product(*self.grid.values()):
            pairs = zip(self.grid, values, strict=True)
            yield tuple(f"{key}={_format_override_value(value)}" for key, value in pairs)

    def combination_folder(self, combination: Sequence[str]) -> str:
        """Return a folder name for a combination of grid values, such as `lr=0.001,epochs=5`."""
        pairs = [change.partition("=") for change in combination]
        short = [key.rpartition(".")[2] for key, _, _ in pairs]
        keys = short if len(set(short)) == len(short) else [key for key, _, _ in pairs]
        text = ",".join(f"{key}={pair[2]}" for key, pair in zip(keys, pairs, strict=True))
        return re.sub(r"[^A-Za-z0-9.,=+_-]+", "-", text)


class Plan(Section):
    """A set of related runs."""

    title: NonEmptyString = Field(description="title of the results")
    runs: tuple[PlanEntry, ...] = Field(min_length=1, description="entries, run in this order")
    directions: tuple[Direction, ...] = Field(
        (), description="questions that the page of all recipes answers"
    )
    smoke: tuple[NonEmptyString, ...] = Field(
        (), description="overrides that shorten each run to minutes, for --scale smoke"
    )


def find_plan(name: str, root: str | Path = "recipes") -> Path:
    """Find the plan.yaml of a plan.

    Args:
        name: path of the file or of its folder, or the name of a folder with a plan.yaml in `root`.
        root: the folder of the recipes.
    Raises: RecipeError if no plan or several plans match; the message suggests the nearest name.
    """
    for path in (Path(name), Path(name) / PLAN_FILENAME):
        if path.is_file():
            return path
    paths = sorted(Path(root).rglob(PLAN_FILENAME))
    matches = [path for path in paths if path.parent.name == name]
    if len(matches) > 1:
        raise RecipeError(
            f"{name}: matches both {matches[0]} and {matches[1]}; give the path of the file",
            code="recipe.unknown_name",
        )
    if not matches:
        known = [path.parent.name for path in paths]
        hint = f"Known: {', '.join(known)}"
        if not known:
            hint = f"No plan exists below {root}/; run this in a clone of the repository, or "
            hint += "give the path of a plan"
        raise RecipeError(
            f"{name}: no such plan{did_you_mean(name, known) or '.'} {hint}",
            code="recipe.not_found",
        )
    return matches[0]


def load_plan(path: str | Path) -> Plan:
    """Load a plan. Raises: RecipeError with one line per problem."""
    text = recipe_yaml.read_recipe_text(path)
    if not text.strip():
        raise RecipeError(
            f"{path}: the file is empty; add a title and runs", code="recipe.missing_key"
        )
    plan = validate_document(recipe_yaml.parse_document(text, name=str(path)), Plan)
    if holds_secret(text):
        raise RecipeError(
            f"{path}: contains a token or password, which the results would show; remove it, "
            "revoke it and create a new one",
            code="recipe.holds_secret",
        )
    if problems := [f"{path}: {problem}" for problem in _find_plan_problems(plan)]:
        raise RecipeError("\n".join(problems), code="recipe.wrong_value")
    return plan


def check_plan_recipes(
    plan: Plan,
    path: Path,
    extra_overrides: Sequence[str] = (),
    sources: Mapping[str, str] | None = None,
) -> None:
    """Check every recipe that a plan trains, with all overrides, before the first run starts.

    Args:
        extra_overrides, sources: see `load_entry_recipe`; every key of `sources` must be the data
            source of a recipe.
    Raises: RecipeError with one line per problem.
    """
    problems, used_sources = [], set()
    for entry in plan.runs:
        for combination in entry.grid_combinations():
            for final in ((), entry.final):
                try:
                    recipe = load_entry_recipe(
                        entry, path, [*combination, *final], extra_overrides=extra_overrides
                    )
                    used_sources.add(recipe.data.source)
                except RecipeError as error:
                    problems.append(str(error))
    for name in sources or ():
        if not problems and name not in used_sources:
            known = ", ".join(sorted(used_sources))
            problems.append(
                f"--data: no run reads '{name}'{did_you_mean(name, sorted(used_sources)) or '.'} "
                f"Known: {known}"
            )
    if problems:
        raise RecipeError("\n".join(dict.fromkeys(problems)), code="recipe.wrong_value")


def load_entry_recipe(
    entry: PlanEntry,
    path: Path,
    overrides: Sequence[str] = (),
    *,
    extra_overrides: Sequence[str] = (),
    sources: Mapping[str, str] | None = None,
) -> Recipe:
    """Load the recipe of one run of an entry.

    Args:
        entry: an entry of the plan in `path`.
        path: path of the plan.yaml.
        overrides: overrides for this run.
        extra_overrides: overrides for every run of the plan.
        sources: dict from a data source to the source to read instead, a copy of the same data.
    """
    settings = [*entry.overrides, *extra_overrides, *overrides]
    recipe = load_recipe(path.parent / entry.recipe, settings)
    if copied_source := (sources or {}).get(recipe.data.source):
        recipe = load_recipe(
            path.parent / entry.recipe, [*settings, f"data.source={copied_source}"]
        )
    return recipe if entry.claims is None else recipe.model_copy(update={"claims": entry.claims})


def use_source_of_run(recipe: Recipe, run: Recipe) -> Recipe:
    """Return the plan's recipe with the data source and the note of a run, to compare the two.

    Args:
        recipe: recipe of the plan.
        run: recipe of the run, which may have read a copy of the data.
    """
    note = recipe.run.model_copy(update={"note": run.run.note})
    return recipe.with_source(run.data.source).model_copy(update={"run": note})


def to_smoke_plan(plan: Plan) -> Plan:
    """Return the plan with its `smoke` overrides, and at most two seeds and values per grid key."""
    runs = []
    for entry in plan.runs:
        changes: dict[str, Any] = {"seeds": entry.seeds[:_NUM_SMOKE_VALUES]}
        changes["grid"] = {key: values[:_NUM_SMOKE_VALUES] for key, values in entry.grid.items()}
        smoke = plan.smoke if entry.smoke is None else entry.smoke
        runs.append(entry.model_copy(update={**changes, "overrides": (*entry.overrides, *smoke)}))
    return plan.model_copy(update={"runs": tuple(runs)})


def _find_plan_problems(plan: Plan) -> Iterator[str]:
    names = [entry.name for entry in plan.runs]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield f"two runs are called '{name}'; rename one"
    for entry in plan.runs:
        yield from (f"{entry.name}.{problem}" for problem in _find_entry_problems(entry))
    trained = [entry.name for entry in plan.runs if entry.probe is None]
    for number, direction in enumerate(plan.directions, 1):
        if (direction.trend is None) == (direction.below is None):
            yield f"directions, {number}: give trend or below"
        for run in (direction.run, direction.below):
            if run is not None and run not in trained:
                hint = did_you_mean(run, trained)
                yield f"directions, {number}: no run '{run}' is trained here{hint}"


def _find_entry_problems(entry: PlanEntry) -> Iterator[str]:
    if not entry.seeds:
        yield "seeds: the list is empty; give at least one seed"
    elif len(set(entry.seeds)) < len(entry.seeds):
        yield "seeds: the list contains a duplicate; remove it"
    keys = [override.partition("=")[0].strip() for override in (*entry.overrides, *entry.final)]
    if "data.source" in [*keys, *entry.grid] and entry.claims is None and entry.probe is None:
        yield (
            "claims: the recipe's claims are about its own data, but this run has another "
            "data.source; give claims about this data, or claims: []"
        )
    if entry.probe is not None:
        if entry.probe.expected and len(entry.probe.expected) != len(entry.probe.shots):
            yield "probe.expected: give a range for each of the shots"
        for key in keys:
            if key not in ("model.name", "data.source"):
                yield f"probe: reads only model.name and data.source, not {key}; remove it"
        if entry.grid:
            yield "probe: cannot have a grid; remove the grid"
    for other in entry.beside:
        if {len(other.top1), len(other.seconds or other.seeds)} != {len(other.seeds)}:
            yield f"beside: {other.program}: give one result for each seed"
    for key, values in entry.grid.items():
        if not isinstance(values, list) or not values:
            yield f"grid.{key}: expected a list of values"
        elif len({_format_override_value(value) for value in values}) < len(values):
            yield f"grid.{key}: the list contains a duplicate value; remove it"
    if all(isinstance(values, list) for values in entry.grid.values()):
        folders = [entry.combination_folder(changes) for changes in entry.grid_combinations()]
        for folder in {name for name in folders if folders.count(name) > 1}:
            yield f"grid: two combinations would have the same folder, '{folder}'; make two entries"


def _format_override_value(value: Any) -> str:
    """Format a value as the text after `=` in an override."""
    plain = isinstance(value, str) and recipe_yaml.parse_value(value) == value
    return value if plain else json.dumps(value)
