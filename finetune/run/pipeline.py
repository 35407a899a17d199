"""The pipeline that a run directory is evaluated with."""

from __future__ import annotations

from pathlib import Path

from finetune.recipe.identity import recipe_of
from finetune.transforms.evaluation import make_pipeline
from finetune.transforms.pipeline import Pipeline
from finetune.transforms.preprocessing import Preprocessing

__all__ = ["pipeline_of"]


def pipeline_of(model: str | Path, preprocessing: Preprocessing) -> Pipeline:
    """The evaluation pipeline of a model: a run's by its recipe, others' by their weights."""
    recipe = recipe_of(model)
    if recipe is None:
        return make_pipeline(preprocessing)
    return make_pipeline(preprocessing, recipe.data.eval, decode_size=recipe.data.decode_size)
