"""Arguments and options that several commands share; they are checked before torch is imported."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from finetune.errors import RecipeError, WeightsError
from finetune.recipe.paths import check_model_name, resolve_data_source
from finetune.transforms.operations import MAX_IMAGE_SIDE

__all__ = [
    "IMAGE_SIZE",
    "PORT",
    "check_model_argument",
    "check_run_or_model_folder",
    "checked_by",
    "data_option",
    "model_argument",
    "moved_data_option",
    "ort_web_option",
    "source_argument",
]

IMAGE_SIZE = click.IntRange(1, MAX_IMAGE_SIDE)  # side in pixels
PORT = click.IntRange(0, 65535)


def checked_by(check: Callable[[str], object]) -> Callable[..., Any]:
    """Return a click callback that calls `check` on the value, or on each of several values.

    Args:
        check: function that raises a FinetuneError for an invalid value.
    """

    def callback(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        for each in value if isinstance(value, tuple) else (value,):
            if each is not None:
                check(each)
        return value

    return callback


def check_model_argument(model: str) -> None:
    """Check a MODEL argument. Raises: RecipeError for a recipe, WeightsError for a missing path."""
    _check_not_a_recipe(model)
    check_model_name(model)


def check_run_or_model_folder(path: str) -> None:
    """Check a RUN argument. Raises: RecipeError for a recipe, WeightsError for a missing folder."""
    _check_not_a_recipe(path)
    if not os.path.lexists(path):
        raise WeightsError(
            f"{path}: no such folder; give a run directory that `finetune train` wrote",
            code="weights.not_found",
        )


def _check_not_a_recipe(model: str) -> None:
    if not model.endswith((".yaml", ".yml")):
        return
    run = Path("runs") / Path(model).stem
    if (run / "run.json").is_file():
        advice = f"give its run directory, {run}"
    else:
        advice = f"train it first (finetune train {model}), then give the run directory"
    raise RecipeError(
        f"{model}: this is a recipe, but the command needs a trained model; {advice}",
        code="recipe.conflict",
    )


def _resolve_source(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    return None if value is None else resolve_data_source(value)


model_argument = click.argument("model", callback=checked_by(check_model_argument))
source_argument = click.argument("source", callback=_resolve_source)
data_option = click.option(
    "--data",
    metavar="SOURCE",
    callback=_resolve_source,
    help="Data source. Default: the data that MODEL was trained on.",
)
moved_data_option = click.option(
    "--data",
    metavar="SOURCE",
    callback=_resolve_source,
    help="Data of the run, if it has moved or its URL needs a signature. Default: as recorded.",
)
ort_web_option = click.option(
    "--ort-web",
    metavar="DIR",
    help="Folder of the npm package onnxruntime-web. Default: node_modules here or above.",
)
