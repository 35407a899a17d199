"""`optim.stages`: earlier training stages, for example the head first (LP-FT).

Each stage is a run of its own in the folder `stages` of the run directory, with its own checkpoints
and cached features. It starts from the best weights of the previous stage, resumes like any run,
and is skipped if it is done.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.recipe.schema import Recipe, StageSection

__all__ = ["stage_folder", "stage_recipes"]


def stage_folder(out: str | Path, number: int) -> Path:
    """Return the run directory of a stage; stages are numbered from 1."""
    return Path(out) / "stages" / str(number)


def stage_recipes(recipe: Recipe) -> list[Recipe]:
    """Return the recipe of each stage: the run's recipe with the stage's own settings.

    A stage has its own length, learning rate, freezing and training transforms. It does not use the
    test split, an adapter, a teacher or claims, and is not pushed.

    Source: Kumar et al. 2022, "Fine-tuning can distort pretrained features" (LP-FT).
    """
    recipes = []
    for stage in recipe.optim.stages:
        schedule = {"steps": stage.steps, "epochs": stage.epochs, "lr": stage.lr or recipe.optim.lr}
        run_overrides = {"test": False, "push_to": None, "push_private": False}
        sections = {
            "model": recipe.model.model_copy(update=_model_overrides(stage)),
            "data": recipe.data.model_copy(update={"train": stage.train or recipe.data.train}),
            "optim": recipe.optim.model_copy(update={**schedule, "stages": ()}),
            "run": recipe.run.model_copy(update=run_overrides),
        }
        recipes.append(recipe.model_copy(update={**sections, "distill": None, "claims": ()}))
    return recipes


def _model_overrides(stage: StageSection) -> dict[str, Any]:
    """Return the `model` keys of a stage that differ from the run's."""
    keys = {"freeze": stage.freeze, "adapter": None}
    # with a frozen backbone, no batch norm is trained, and these keys would be errors
    return keys | ({"sync_bn": False, "freeze_bn": False} if stage.freeze == "backbone" else {})
