"""The model, the recipe and the evaluation transforms of a run directory."""

from __future__ import annotations

from pathlib import Path

from finetune.errors import weights_changed_error
from finetune.models.exported import load_model
from finetune.models.save import BuiltModel
from finetune.recipe.schema import Recipe
from finetune.run.directory import RunDir
from finetune.run.record import load_run_recipe, read_record
from finetune.transforms.eval_transforms import build_pipeline
from finetune.transforms.pipeline import Pipeline

__all__ = ["load_eval_pipeline", "load_run_model"]


def load_eval_pipeline(model: str | Path, built: BuiltModel) -> Pipeline:
    """Build the evaluation transforms from a run's recipe, or else from the weights' configuration.

    Raises: WeightsError if the run has other weights by now.
    """
    recipe = load_run_recipe(model)
    if recipe is None:
        return build_pipeline(built.preprocessing)
    recorded = read_record(RunDir(model)).get("model_sha256")
    if recorded not in (None, built.provenance.get("sha256")):
        raise weights_changed_error(model)
    return build_pipeline(
        built.preprocessing, recipe.data.eval, decode_size=recipe.data.decode_size
    )


def load_run_model(model: str) -> tuple[Recipe | None, BuiltModel]:
    """Load a model, and the recipe of a run directory, else None.

    Raises: the errors of `load_run_recipe` and `load_model`; WeightsError if another run takes the
        place of this one meanwhile.
    """
    recipe, built = load_run_recipe(model), load_model(model)
    if load_run_recipe(model) != recipe:
        raise weights_changed_error(model)
    return recipe, built
