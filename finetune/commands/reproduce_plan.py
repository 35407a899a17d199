"""Plans: files that say which runs belong together, with grids, seeds and what sources report.

A plan is a YAML file `plan.yaml` beside the recipes that it runs.
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

from finetune.errors import RecipeError, nearest
from finetune.recipe import yaml as recipe_yaml
from finetune.recipe.load import Claim, Recipe, Section, load_recipe
from finetune.recipe.types import Arguments, Metric, Range, Real, Score, Text, When, Whole
from finetune.recipe.validate import validate

__all__ = [
    "PLAN",
    "Beside",
    "Direction",
    "Entry",
    "Plan",
    "Probe",
    "check_runs",
    "find_plan",
    "load_plan",
    "made_small",
    "recipe_for",
    "with_source_of",
]

PLAN = "plan.yaml"
_SMALL = 2  # values of a grid's key and seeds that a smoke test takes


def _folder_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value):
        problem = "expected a folder's name: letters, digits, '.', '_' and '-'"
        raise PydanticCustomError("name", "{cause}", {"cause": problem})
    return value


FolderName = Annotated[Text, AfterValidator(_folder_name)]


class Probe(Section):
    """Few-shot accuracy of the frozen features, in the place of training; see `finetune probe`."""

    shots: tuple[Whole, ...] = Field((1, 5, 10, 25), description="training images of each class")
    draws: Whole = Field(3, ge=1, description="of the shots: seeds 0, 1, …")
    expected: tuple[Range, ...] = Field(
        (), description="[lowest, highest] accuracy for each of the shots"
    )
    source: Text | None = Field(None, description="where the expectation comes from")


class Beside(Section):
    """A measurement of another program, beside an entry's own."""

    program: Text = Field(description="its name and version")
    command: Text = Field(description="as it was called")
    machine: Text = Field(description="hardware and versions")
    seeds: tuple[Whole, ...] = Field(min_length=1, description="one figure for each")
    top1: tuple[Real, ...] = Field(description="fractions")
    seconds: tuple[Real, ...] = Field((), description="wall-clock of each command")
    our_seconds: tuple[Real, ...] = Field((), description="wall-clock of ours, on that machine")
    note: Text | None = Field(None, description="what differs")


class Direction(Section):
    """A claim about which way a figure goes, asked of runs that are smaller than its source's."""

    question: Text = Field(description="answered by yes or no for each seed")
    source: Text = Field(description="where yes is claimed")
    expected: Text | None = Field(None, description="of this run, written before it")
    run: FolderName = Field(description="the entry that is asked")
    metric: Metric = Field(description="as in a claim: val.loss, test.top1, …")
    when: When = Field("end", description="as in a claim; 'after epoch N' for a trend")
    trend: Literal["rising", "falling"] | None = Field(None, description="over evaluations")
    below: FolderName | None = Field(
        None, description="another entry, whose figure with the same seed is the larger one"
    )


class Entry(Section):
    """One run of a plan, or a grid of runs and the one that it chooses."""

    name: FolderName = Field(description="the run's folder in the plan's, with its seed behind it")
    recipe: Text = Field(description="a recipe, from the plan's folder")
    probe: Probe | None = Field(
        None, description="measure the features of the recipe's weights on its data; no training"
    )
    overrides: tuple[Text, ...] = Field((), description="key=value, as on the command line")
    grid: Arguments = Field({}, description="keys and the values to choose among")
    by: Score | None = Field(
        None, description="what chooses among the grid; null: val.top1, of task multilabel val.map"
    )
    final: tuple[Text, ...] = Field(
        (), description="overrides once the grid has chosen; data.val_fraction=0 trains on it all"
    )
    seeds: tuple[Whole, ...] = Field((0,), description="a run for each; the first one chooses")
    claims: tuple[Claim, ...] | None = Field(
        None, description="what a source reports of this run; null: what the recipe says"
    )
    reported: Text | None = Field(
        None, description="a figure that stands beside the run's own without being a claim"
    )
    beside: tuple[Beside, ...] = Field((), description="of other programs, for the page")
    smoke: tuple[Text, ...] | None = Field(None, description="in the place of the plan's smoke")

    def combinations(self) -> Iterator[tuple[str, ...]]:
        """The overrides of every combination of the grid's values; a single () without a grid."""
        for values in itertools.product(*self.grid.values()):
            pairs = zip(self.grid, values, strict=True)
            yield tuple(f"{key}={_written(value)}" for key, value in pairs)

    def folder_of(self, changes: Sequence[str]) -> str:
        """A folder's name for one of the combinations: the keys' last parts with their values."""
        pairs = [change.partition("=") for change in changes]
        short = [key.rpartition(".")[2] for key, _, _ in pairs]
        keys = short if len(set(short)) == len(short) else [key for key, _, _ in pairs]
        text = ",".join(f"{key}={pair[2]}" for key, pair in zip(keys, pairs, strict=True))
        return re.sub(r"[^A-Za-z0-9.,=+_-]+", "-", text)


class Plan(Section):
    """Runs that belong together."""

    title: Text = Field(description="what the runs are about")
    runs: tuple[Entry, ...] = Field(min_length=1, description="in this order")
    directions: tuple[Direction, ...] = Field((), description="for the page of all recipes")
    smoke: tuple[Text, ...] = Field(
        (), description="overrides that make each run one of minutes, for --scale smoke"
    )


def find_plan(name: str, root: str | Path = "recipes") -> Path:
    """The file of a plan.

    Args:
        name: a file, a folder that holds a plan.yaml, or the name of such a folder below `root`.
        root: the folder of the recipes.
    Raises: RecipeError with the nearest name if there is no such plan, or more than one.
    """
    for path in (Path(name), Path(name) / PLAN):
        if path.is_file():
            return path
    paths = sorted(Path(root).rglob(PLAN))
    matches = [path for path in paths if path.parent.name == name]
    if len(matches) > 1:
        raise RecipeError(
            f"{name}: {matches[0]} or {matches[1]}? Give the file", code="recipe.unknown_name"
        )
    if not matches:
        known = [path.parent.name for path in paths]
        there = f"there is: {', '.join(known)}"
        if not known:
            there = f"there is none below {root}/, so run it in a copy of the repository, or give "
            there += "a plan's file"
        raise RecipeError(
            f"{name}: no such plan{nearest(name, known)}; {there}", code="recipe.not_found"
        )
    return matches[0]


def load_plan(path: str | Path) -> Plan:
    """Read a plan. Raises: RecipeError with one line for every problem."""
    text = recipe_yaml.read_text(path)
    if not text.strip():
        raise RecipeError(
            f"{path}: empty; a plan needs a title and runs", code="recipe.missing_key"
        )
    plan = validate(recipe_yaml.read_document(text, name=str(path)), Plan)
    if problems := [f"{path}: {problem}" for problem in _problems(plan)]:
        raise RecipeError("\n".join(problems), code="recipe.wrong_value")
    return plan


def check_runs(
    plan: Plan,
    path: Path,
    added: Sequence[str] = (),
    sources: Mapping[str, str] | None = None,
) -> None:
    """Check every recipe that a plan trains, with all its overrides, before the first one runs.

    Args:
        added, sources: as for `recipe_for`; each source must stand in one of the recipes.
    Raises: RecipeError with one line for every problem.
    """
    problems, named = [], set()
    for entry in plan.runs:
        for chosen in entry.combinations():
            for last in ((), entry.final):
                try:
                    recipe = recipe_for(entry, path, [*chosen, *last], added=added)
                    named.add(recipe.data.source)
                except RecipeError as error:
                    problems.append(str(error))
    for name in sources or ():
        if not problems and name not in named:
            known = ", ".join(sorted(named))
            problems.append(
                f"--data: no run reads '{name}'{nearest(name, sorted(named))}; there is: {known}"
            )
    if problems:
        raise RecipeError("\n".join(dict.fromkeys(problems)), code="recipe.wrong_value")


def recipe_for(
    entry: Entry,
    path: Path,
    overrides: Sequence[str] = (),
    *,
    added: Sequence[str] = (),
    sources: Mapping[str, str] | None = None,
) -> Recipe:
    """The recipe of one run of an entry of the plan in `path`.

    Args:
        overrides: of this run.
        added: overrides of every run.
        sources: data sources and what is read in their place.
    """
    settings = [*entry.overrides, *added, *overrides]
    recipe = load_recipe(path.parent / entry.recipe, settings)
    if copy := (sources or {}).get(recipe.data.source):
        recipe = load_recipe(path.parent / entry.recipe, [*settings, f"data.source={copy}"])
    return recipe if entry.claims is None else recipe.model_copy(update={"claims": entry.claims})


def with_source_of(recipe: Recipe, run: Recipe) -> Recipe:
    """The recipe with the data source and the note of one of its runs, which may read a copy."""
    data = recipe.data.model_copy(update={"source": run.data.source})
    note = recipe.run.model_copy(update={"note": run.run.note})
    return recipe.model_copy(update={"data": data, "run": note})


def made_small(plan: Plan) -> Plan:
    """The plan of a smoke test: its overrides, and of every grid and of the seeds the first two."""
    runs = []
    for entry in plan.runs:
        small: dict[str, Any] = {"seeds": entry.seeds[:_SMALL]}
        small["grid"] = {key: values[:_SMALL] for key, values in entry.grid.items()}
        smoke = plan.smoke if entry.smoke is None else entry.smoke
        runs.append(entry.model_copy(update={**small, "overrides": (*entry.overrides, *smoke)}))
    return plan.model_copy(update={"runs": tuple(runs)})


def _problems(plan: Plan) -> Iterator[str]:
    names = [entry.name for entry in plan.runs]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield f"two runs are called '{name}'; rename one"
    for entry in plan.runs:
        yield from (f"{entry.name}.{problem}" for problem in _problems_of(entry))
    trained = [entry.name for entry in plan.runs if entry.probe is None]
    for number, direction in enumerate(plan.directions, 1):
        if (direction.trend is None) == (direction.below is None):
            yield f"directions, {number}: give trend or below"
        for run in (direction.run, direction.below):
            if run is not None and run not in trained:
                hint = nearest(run, trained)
                yield f"directions, {number}: no run '{run}' is trained here{hint}"


def _problems_of(entry: Entry) -> Iterator[str]:
    if not entry.seeds:
        yield "seeds: is empty; give at least one"
    elif len(set(entry.seeds)) < len(entry.seeds):
        yield "seeds: one stands there twice; remove it"
    if entry.probe is not None:
        if entry.probe.expected and len(entry.probe.expected) != len(entry.probe.shots):
            yield "probe.expected: give a range for each of the shots"
        if entry.grid:
            yield "probe: chooses nothing; remove the grid"
    for other in entry.beside:
        if {len(other.top1), len(other.seconds or other.seeds)} != {len(other.seeds)}:
            yield f"beside: {other.program}: give one figure for each of the seeds"
    for key, values in entry.grid.items():
        if not isinstance(values, list) or not values:
            yield f"grid.{key}: expected a list of values"
        elif len({_written(value) for value in values}) < len(values):
            yield f"grid.{key}: one value stands there twice; remove it"
    if all(isinstance(values, list) for values in entry.grid.values()):
        folders = [entry.folder_of(changes) for changes in entry.combinations()]
        for folder in {name for name in folders if folders.count(name) > 1}:
            yield f"grid: two combinations would both be called '{folder}'; make two entries"


def _written(value: Any) -> str:
    """A value as an override has it."""
    plain = isinstance(value, str) and recipe_yaml.parse_value(value) == value
    return value if plain else json.dumps(value)
