"""The evaluation transforms of a model or run directory."""

from __future__ import annotations

from pathlib import Path

from finetune.run.record import load_run_recipe
from finetune.transforms.eval_transforms import build_pipeline
from finetune.transforms.pipeline import Pipeline
from finetune.transforms.preprocessing import Preprocessing

__all__ = ["load_eval_pipeline"]


def load_eval_pipeline(model: str | Path, preprocessing: Preprocessing) -> Pipeline:
    """Build the evaluation transforms from a run's recipe, or else from `preprocessing`."""
    recipe = load_run_recipe(model)
    if recipe is None:
        return build_pipeline(preprocessing)
    return build_pipeline(preprocessing, recipe.data.eval, decode_size=recipe.data.decode_size)
