"""The recipe: typed sections that describe a whole run, loaded from YAML without surprises.

No torch here. Every problem of a recipe is found at once and named with its place, key, value and
the nearest right key. Environment variables never change a recipe.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from finetune.errors import RecipeError, masked
from finetune.recipe import yaml as recipe_yaml
from finetune.recipe.schema import (
    Claim,
    Conflict,
    DataSection,
    ModelSection,
    OptimSection,
    RunSection,
    Section,
)
from finetune.recipe.types import number
from finetune.recipe.validate import apply_override, validate

__all__ = [
    "Claim",
    "DataSection",
    "ModelSection",
    "OptimSection",
    "Recipe",
    "RunSection",
    "Section",
    "load_recipe",
    "parse_recipe",
]


class Recipe(Section):
    """Everything about a run."""

    model: ModelSection
    data: DataSection
    optim: OptimSection
    run: RunSection = Field(default_factory=RunSection)
    claims: tuple[Claim, ...] = Field((), description="what a source reports of this run")

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> list[Conflict]:
        model, data, optim = (dict(values.get(name) or {}) for name in ("model", "data", "optim"))
        conflicts: list[Conflict] = []
        stages = [dict(stage).get("freeze") for stage in optim.get("stages") or ()]
        if model.get("adapter") and any(freeze != "backbone" for freeze in stages):
            problem = "an adapter belongs to the weights as they were; stages before it train the "
            problem += "head alone: set their freeze to backbone"
            conflicts.append(("optim", {"model", "optim"}, problem))
        balances = optim.get("class_weights") == "balanced"
        balances |= bool(number(optim.get("logit_adjustment") or 0))
        if data.get("sampling") == "class_balanced" and balances:
            problem = "sampling class_balanced draws all classes alike, so that class_weights="
            problem += "balanced and logit_adjustment change nothing; keep one of them"
            conflicts.append(("data", {"data", "optim"}, problem))
        return conflicts

    def to_yaml(self) -> str:
        """Write the recipe with every key resolved; loading it gives an equal recipe."""
        data = self.model_dump()
        data["claims"] = [
            {key: item for key, item in claim.items() if item is not None}
            for claim in data["claims"]
        ]
        return recipe_yaml.dump(data)


def load_recipe(path: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Load a recipe file.

    Args:
        path: a local YAML file.
        overrides: `section.key=value` each, the value written as in YAML; later ones win.
    Raises: RecipeError with one line for every problem.
    """
    return parse_recipe(recipe_yaml.read_text(path), name=str(path), overrides=overrides)


def parse_recipe(text: str, *, name: str = "recipe", overrides: Iterable[str] = ()) -> Recipe:
    """Load a recipe from YAML text.

    Args:
        text: the YAML.
        name: what to call it in messages.
        overrides: as for `load_recipe`.
    Raises: RecipeError with one line for every problem.
    """
    document = recipe_yaml.read_document(text, name=name)
    for override in overrides:
        apply_override(document, override, Recipe)
    recipe = validate(document, Recipe)
    written = recipe.to_yaml()
    if masked(written) != written:
        raise RecipeError(
            f"{name}: holds a token or password, which the run directory would keep and a push "
            "publish; take it out, and make a new one (the hub's is read from HF_TOKEN or from the "
            "login)",
            code="recipe.holds_secret",
        )
    return recipe
