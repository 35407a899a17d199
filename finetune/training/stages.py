"""`optim.stages`: stages before a run, such as the head alone before all (LP-FT).

Each stage is a run of its own in the folder `stages` of the run directory, with its checkpoints and
its cached features, and begins with the best weights of the stage before. So a stage is resumed as
any run is, and one that is done is passed over.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.recipe.load import Recipe
from finetune.recipe.schema import StageSection

__all__ = ["folder_of", "stage_recipes"]


def folder_of(out: str | Path, number: int) -> Path:
    """Return the run directory of a stage of a run, counted from 1."""
    return Path(out) / "stages" / str(number)


def stage_recipes(recipe: Recipe) -> list[Recipe]:
    """Return the recipe of each stage: the run's, with the stage's length, rate, freezing and data.

    Stages leave the test split alone, are not published, train no adapter, and have no teacher.

    Source: Kumar et al. 2022, "Fine-tuning can distort pretrained features" (LP-FT).
    """
    recipes = []
    for stage in recipe.optim.stages:
        own = {"steps": stage.steps, "epochs": stage.epochs, "lr": stage.lr or recipe.optim.lr}
        whole = {"test": False, "push_to": None, "push_private": False}
        sections = {
            "model": recipe.model.model_copy(update=_trained(stage)),
            "data": recipe.data.model_copy(update={"train": stage.train or recipe.data.train}),
            "optim": recipe.optim.model_copy(update={**own, "stages": ()}),
            "run": recipe.run.model_copy(update=whole),
        }
        recipes.append(recipe.model_copy(update={**sections, "distill": None, "claims": ()}))
    return recipes


def _trained(stage: StageSection) -> dict[str, Any]:
    """Return the keys of a stage's network that differ from the run's."""
    keys = {"freeze": stage.freeze, "adapter": None}
    # all batch norms are frozen then, and the keys for the others have nothing to do
    return keys | ({"sync_bn": False, "freeze_bn": False} if stage.freeze == "backbone" else {})
