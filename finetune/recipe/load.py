"""Load a recipe from YAML.

Does not import torch. A single error lists every problem of a recipe, each with its location, key,
value and the closest valid key. Environment variables never change a recipe.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from finetune.errors import RecipeError, holds_secret
from finetune.recipe import strict_yaml as recipe_yaml
from finetune.recipe.paths import check_source_url
from finetune.recipe.schema import (
    Claim,
    DataSection,
    DistillSection,
    ModelSection,
    OptimSection,
    Recipe,
    RunSection,
    Section,
)
from finetune.recipe.validate import apply_override, validate_document

__all__ = [
    "MINIMAL_RECIPE",
    "Claim",
    "DataSection",
    "DistillSection",
    "ModelSection",
    "OptimSection",
    "RunSection",
    "Section",
    "load_recipe",
    "override_recipe",
    "parse_overrides",
    "parse_recipe",
]


# Keys that `tune` may vary: all of model, optim and distill, and these, with which all trials have
# the same validation images.
_TUNED_DATA_KEYS = {"train", "eval", "batch_size", "sampling"}
_TUNED_DATA_KEYS |= {"mean", "std", "interpolation", "crop_pct", "decode_size"}
# the required keys
MINIMAL_RECIPE = "{model: {name: x}, data: {source: x}, optim: {name: adamw, lr: 1, epochs: 1}}"


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Load a recipe file.

    Args:
        path: a local YAML file.
        overrides: strings `section.key=value` with the value in YAML syntax; later ones win.
    Raises: RecipeError with one line per problem.
    """
    return parse_recipe(recipe_yaml.read_recipe_text(path), name=str(path), overrides=overrides)


def parse_recipe(text: str, *, name: str = "recipe", overrides: Iterable[str] = ()) -> Recipe:
    """Load a recipe from YAML text.

    Args:
        text: the YAML text.
        name: name of the recipe in error messages.
        overrides: same as for `load_recipe`.
    Raises: RecipeError with one line per problem; DataError for a wrong URL in data.source.
    """
    document = recipe_yaml.parse_document(text, name=name)
    if "runs" in document.data and "model" not in document.data:
        raise RecipeError(
            f"{name}: this is a plan of several recipes, not a recipe; run it with: finetune "
            f"reproduce {_plan_name(name)}",
            code="recipe.not_a_recipe",
        )
    for override in overrides:
        apply_override(document, override, Recipe)
    _check_search_space(document)
    recipe = validate_document(document, Recipe)
    check_source_url(recipe.data.source)  # before anything logs or stores it
    # YAML folds and quotes some strings, so that a secret in them differs
    strings = _find_strings(recipe.redacted().model_dump(mode="json"))
    keys = [key for key, text in strings if holds_secret(text)]
    if keys or holds_secret(f"{recipe.to_yaml()}{recipe.tune}"):
        raise RecipeError(
            f"{name}: {', '.join(keys) or 'it'} contains a token or password, which the run "
            "directory would store and a push would publish; remove it, revoke it and create a new "
            "one (the Hub token is read from HF_TOKEN or from the login)",
            code="recipe.holds_secret",
        )
    return recipe


def _find_strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the text of all strings in a structure of dicts and lists."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from _find_strings(each, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for each in value:
            yield from _find_strings(each, key)


def _check_search_space(document: recipe_yaml.YamlDocument) -> None:
    """Add the problems of `tune`: each value is checked as if the key had it."""
    space = document.data.get("tune")
    for key, values in space.items() if isinstance(space, dict) else ():
        location = document.location_of(("tune", key))
        section, _, name = key.partition(".")
        if section in ("run", "claims", "tune") or (
            section == "data" and name in DataSection.model_fields.keys() - _TUNED_DATA_KEYS
        ):
            problem = "has to be the same in all trials, so that they can be compared; remove it"
            document.add_problem(("tune", key), problem, code="recipe.conflict")
            continue
        if isinstance(values, dict):
            ends = (values.get("low"), values.get("high"))
            values = [end for end in ends if isinstance(end, (int, float)) and math.isfinite(end)]
        for value in values if isinstance(values, list) else ():
            probe = recipe_yaml.parse_document(MINIMAL_RECIPE, name=document.name)
            override = f"{key}={json.dumps(value, ensure_ascii=False)}"
            apply_override(probe, override, Recipe, location=location)
            try:
                validate_document(probe, Recipe)
            except RecipeError as error:
                if error.code != "recipe.conflict":
                    document.problems.append(
                        recipe_yaml.Problem(location.sort_key, str(error), error.code)
                    )


def override_recipe(recipe: Recipe, overrides: Iterable[str]) -> Recipe:
    """Return a recipe with overrides, but without `tune`.

    Raises: RecipeError with one line per problem.
    """
    data = recipe.model_dump(mode="json", exclude={"tune"})
    document = recipe_yaml.YamlDocument("recipe", data)
    for override in overrides:
        apply_override(document, override, Recipe)
    return validate_document(document, Recipe)


def _plan_name(path: str) -> str:
    """Return the argument of `finetune reproduce` for a plan file.

    This is the name of its folder if the file is in recipes/ and the name is unique, else its path.
    """
    folder = Path(path).parent.name
    matches = [file for file in Path("recipes").rglob("plan.yaml") if file.parent.name == folder]
    return folder if matches == [Path(path)] else path


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """Return the values of overrides by section and key, such as "model.adapter": {"kind": "lora"}.

    Args:
        overrides: same as for `load_recipe`.
    Raises: RecipeError for unknown keys and invalid values; conflicts are checked in the full
        recipe.
    """
    try:
        parse_recipe(MINIMAL_RECIPE, overrides=overrides)
    except RecipeError as error:
        if error.code != "recipe.conflict":
            raise
    document = recipe_yaml.parse_document("{}", name="overrides")
    for override in overrides:
        apply_override(document, override, Recipe)
    return {
        f"{section}.{key}": value
        for section, values in document.data.items()
        for key, value in values.items()
    }
