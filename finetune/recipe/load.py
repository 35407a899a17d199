"""The recipe: typed sections that describe a whole run, loaded from YAML without surprises.

No torch here. Every problem of a recipe is found at once and named with its place, key, value and
the nearest right key. Environment variables never change a recipe.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from finetune.errors import RecipeError, masked
from finetune.recipe import yaml as recipe_yaml
from finetune.recipe.schema import (
    Claim,
    Conflict,
    DataSection,
    DistillSection,
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
    "DistillSection",
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
    distill: DistillSection | None = Field(None, description="a teacher; null: none")
    claims: tuple[Claim, ...] = Field((), description="what a source reports of this run")

    @classmethod
    def conflicts(cls, values: Mapping[str, Any]) -> Iterator[Conflict]:
        model, data, optim = (dict(values.get(name) or {}) for name in ("model", "data", "optim"))
        stages = [dict(stage).get("freeze") for stage in optim.get("stages") or ()]
        if model.get("adapter") and any(freeze != "backbone" for freeze in stages):
            problem = "an adapter belongs to the weights as they were; stages before it train the "
            problem += "head alone: set their freeze to backbone"
            yield "optim", {"model", "optim"}, problem
        balances = optim.get("class_weights") == "balanced"
        balances |= bool(number(optim.get("logit_adjustment") or 0))
        if data.get("sampling") == "class_balanced" and balances:
            problem = "sampling class_balanced draws all classes alike, so that class_weights="
            problem += "balanced and logit_adjustment change nothing; keep one of them"
            yield "data", {"data", "optim"}, problem
        yield from _label_conflicts(data, optim, values)
        distill = dict(values.get("distill") or {})
        if distill.get("kind") == "features" and model.get("freeze") == "backbone":
            problem = "with model.freeze=backbone no feature changes; set distill.kind to logits"
            yield "distill", {"distill", "model"}, problem
        of_labels = ("label_smoothing", "class_weights", "focal_gamma", "logit_adjustment")
        if number(distill.get("weight", 0)) == 1 and any(
            value if key == "class_weights" else number(value or 0)
            for key in of_labels
            if (value := optim.get(key)) is not None
        ):
            problem = f"weight 1 leaves the labels out, and so {', '.join(of_labels)} of optim; "
            problem += "lower it, or remove them"
            yield "distill", {"distill", "optim"}, problem

    @model_validator(mode="before")
    @classmethod
    def _fill_best(cls, values: Any) -> Any:
        """Let several labels be judged by their own figure, unless another one is named."""
        data, run = (values.get(name) or {} for name in ("data", "run"))
        if isinstance(data, dict) and isinstance(run, dict) and data.get("task") == "multilabel":
            return {**values, "run": {"best": "val.map", **run}}
        return values

    def to_yaml(self) -> str:
        """Write the recipe with every key resolved; loading it gives an equal recipe."""
        data = self.model_dump(exclude={"distill"} if self.distill is None else None)
        data["claims"] = [
            {key: item for key, item in claim.items() if item is not None}
            for claim in data["claims"]
        ]
        return recipe_yaml.dump(data)


def _label_conflicts(
    data: Mapping[str, Any], optim: Mapping[str, Any], values: Mapping[str, Any]
) -> Iterator[Conflict]:
    """The keys that do not go with as many labels as an image has."""
    best = str(dict(values.get("run") or {}).get("best", ""))
    if data.get("task") != "multilabel":
        if optim.get("asymmetric_loss") is not None:
            problem = "asymmetric_loss is for several labels an image; remove it, or set data.task "
            problem += "to multilabel"
            yield "optim", {"data", "optim"}, problem
        if best in ("val.map", "val.micro_f1"):
            problem = f"best: {best} is for data.task multilabel; set val.top1 or val.macro_f1"
            yield "run", {"data", "run"}, problem
        return
    keys = ("class_weights", "focal_gamma", "logit_adjustment")
    written = [key for key in keys if optim.get(key) not in (None, 0, "0")]
    if written:
        problem = f"{', '.join(written)}: of one class an image; with data.task multilabel set "
        yield "optim", {"optim", "data"}, f"{problem}asymmetric_loss in their place"
    if best in ("val.top1", "val.top5", "val.balanced_accuracy"):
        problem = f"best: {best} is of one class an image; with data.task multilabel set val.map, "
        yield "run", {"run", "data"}, f"{problem}val.macro_f1, val.micro_f1 or val.loss"
    if values.get("distill"):
        problem = "is for one class an image; remove it, or data.task"
        yield "distill", {"distill", "data"}, problem


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
