"""`optim.stages`: earlier training stages, for example the head first (LP-FT).

Each stage is a run of its own in the folder `stages` of the run directory, with its own checkpoints
and cached features. It starts from the best weights of the previous stage, resumes like any run,
and is skipped if it is done.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.recipe.schema import Recipe
from finetune.run.directory import RunDir

__all__ = ["first_stage_started", "has_stage", "stage_folder", "stage_recipes"]


def stage_folder(out: str | Path, number: int) -> Path:
    """Return the run directory of a stage; stages are numbered from 1."""
    return Path(out) / "stages" / str(number)


def first_stage_started(recipe: Recipe, out: str | Path) -> bool:
    """Return whether the first stage of a recipe has a checkpoint in a run directory."""
    return bool(recipe.optim.stages) and has_stage(out)


def has_stage(out: str | Path) -> bool:
    """Return whether a run directory has a checkpoint of a first stage."""
    return bool(RunDir(stage_folder(out, 1)).checkpoint_steps())


def stage_recipes(recipe: Recipe) -> list[Recipe]:
    """Return the recipe of each stage: the run's recipe with the stage's own settings.

    A stage has its own length, learning rate, freezing and training transforms. It does not use the
    test split, an adapter, a teacher or claims, and is not pushed.

    Source: Kumar et al. 2022, "Fine-tuning can distort pretrained features" (LP-FT).
    """
    recipes = []
    for stage in recipe.optim.stages:
        model: dict[str, Any] = {"freeze": stage.freeze, "adapter": None}
        if stage.freeze == "backbone":  # no batch norm is trained, and these keys would be errors
            model |= {"sync_bn": False, "freeze_bn": False}
        optim: dict[str, Any] = {
            "steps": stage.steps,
            "epochs": stage.epochs,
            "lr": stage.lr or recipe.optim.lr,
        }
        if stage.freeze == "backbone":
            optim["layer_decay"] = None
        run = {"test": False, "push_to": None, "push_private": False}
        sections = {
            "model": recipe.model.model_copy(update=model),
            "data": recipe.data.model_copy(update={"train": stage.train or recipe.data.train}),
            "optim": recipe.optim.model_copy(update={**optim, "stages": ()}),
            "run": recipe.run.model_copy(update=run),
        }
        recipes.append(recipe.model_copy(update={**sections, "distill": None, "claims": ()}))
    return recipes
