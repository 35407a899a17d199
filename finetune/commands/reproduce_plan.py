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
from finetune.recipe.types import Arguments, Metric, Range, Text, When, Whole
from finetune.recipe.validate import validate

__all__ = [
    "PLAN",
    "Direction",
    "Entry",
    "Plan",
    "Probe",
    "check_runs",
    "find_plan",
    "load_plan",
    "made_small",
    "recipe_for",
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
    reported: Text | None = Field(
        None, description="a figure that stands beside the run's own without being a claim"
    )

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
    directions: tuple[Direction, ...] = Field((), description="for the page of `recipe_page`")
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
    if Path(name).is_file():
        return Path(name)
    if (Path(name) / PLAN).is_file():
        return Path(name) / PLAN
    paths = sorted(Path(root).rglob(PLAN))
    matches = [path for path in paths if path.parent.name == name]
    if len(matches) > 1:
        raise RecipeError(
            f"{name}: {matches[0]} or {matches[1]}? Give the file", code="recipe.unknown_name"
        )
    if not matches:
        known = [path.parent.name for path in paths]
        there = f"there is: {', '.join(known)}" if known else f"there is none below {root}/"
        advice = "" if known else ", so run it in a copy of the repository, or give a plan's file"
        raise RecipeError(
            f"{name}: no such plan{nearest(name, known)}; {there}{advice}", code="recipe.not_found"
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
    names = [entry.name for entry in plan.runs]
    problems = [
        f"{path}: two runs are called '{name}'; rename one"
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    for entry in plan.runs:
        problems += [f"{path}: {entry.name}.{problem}" for problem in _problems(entry)]
    trained = [entry.name for entry in plan.runs if entry.probe is None]
    for number, direction in enumerate(plan.directions, 1):
        place = f"{path}: directions, {number}"
        if (direction.trend is None) == (direction.below is None):
            problems.append(f"{place}: give trend or below")
        problems += [
            f"{place}: no run '{name}' is trained here{nearest(name, trained)}"
            for name in (direction.run, direction.below)
            if name is not None and name not in trained
        ]
    if problems:
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
        added: overrides of every run.
        sources: as for `recipe_for`; each must stand in one of the recipes.
    Raises: RecipeError with one line for every problem.
    """
    problems, named = [], set()
    for entry in plan.runs:
        for chosen in entry.combinations():
            for last in ((), entry.final):
                try:
                    named.add(recipe_for(entry, path, [*added, *chosen, *last]).data.source)
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
    overrides: Sequence[str],
    sources: Mapping[str, str] | None = None,
) -> Recipe:
    """The recipe of one run of an entry of the plan in `path`.

    Args:
        sources: data sources and what is read in their place.
    """
    settings = [*entry.overrides, *overrides]
    recipe = load_recipe(path.parent / entry.recipe, settings)
    if instead := (sources or {}).get(recipe.data.source):
        recipe = load_recipe(path.parent / entry.recipe, [*settings, f"data.source={instead}"])
    if entry.claims is not None:
        recipe = recipe.model_copy(update={"claims": entry.claims})
    return recipe


def made_small(plan: Plan) -> Plan:
    """The plan of a smoke test: of every grid and of the seeds the first two."""

    def small(entry: Entry) -> Entry:
        grid = {key: values[:_SMALL] for key, values in entry.grid.items()}
        return entry.model_copy(update={"grid": grid, "seeds": entry.seeds[:_SMALL]})

    return plan.model_copy(update={"runs": tuple(small(entry) for entry in plan.runs)})


def _problems(entry: Entry) -> Iterator[str]:
    if not entry.seeds:
        yield "seeds: is empty; give at least one"
    elif len(set(entry.seeds)) < len(entry.seeds):
        yield "seeds: one stands there twice; remove it"
    if entry.probe is not None:
        if entry.probe.expected and len(entry.probe.expected) != len(entry.probe.shots):
            yield "probe.expected: give a range for each of the shots"
        if entry.grid:
            yield "probe: chooses nothing; remove the grid"
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
