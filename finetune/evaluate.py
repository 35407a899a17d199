"""Measure a saved model on a split of any data set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from finetune.data.feed import Feed
from finetune.data.sources import Source, open_source, split_train
from finetune.data.store import open_store
from finetune.engine import evaluate, launch
from finetune.errors import DataError, RecipeError
from finetune.models.build import build
from finetune.preprocess import make_pipeline
from finetune.progress import say
from finetune.recipe import DataSection, Recipe, RunSection, load_recipe

__all__ = ["evaluate_model"]


def evaluate_model(model: str, *, data: str | None = None, split: str = "test") -> dict[str, Any]:
    """Measure a saved model on a split, each image counted once.

    Args:
        model: run directory, model folder, hub or timm name.
        data: a source string; None for the one that the run was trained on.
        split: "train", "val" or "test".
    Returns: as `engine.evaluate`, with "model", "data" and "split".
    Raises: RecipeError if the data is not known, DataError if its classes are not the model's.
    """
    recorded = Path(model) / "recipe.yaml"
    recipe = load_recipe(recorded) if recorded.is_file() else None
    built = build(model)
    section, seed = _data_section(model, recipe, data)
    settings = {} if recipe is None else recipe.run.model_dump(include={"precision", "threads"})
    accelerator = launch(RunSection(**settings))
    source = open_source(
        section.source, image_column=section.image_column, label_column=section.label_column
    )
    source = split_train(source, section.val_fraction, seed)
    if split not in source.splits:
        have = ", ".join(source.splits)
        raise DataError(f"{section.source}: has no split '{split}'; it has {have}")
    _check_classes(model, built.class_names, source)
    preprocessing = built.preprocessing
    pipeline = make_pipeline(preprocessing, section.eval, train=False)
    store = open_store(
        source.splits[split],
        keep=section.keep,
        device=accelerator.device,
        workers=section.workers,
        unreadable=section.unreadable,
        local_processes=accelerator.num_processes,
        progress=accelerator.is_main_process,
        notice=say,
    )
    feed = Feed(store, pipeline, num_classes=len(source.class_names), device=accelerator.device)
    network = built.model.to(accelerator.device, torch.float32)
    result = evaluate(network, feed, accelerator, batch_size=section.eval_batch_size)
    return {"model": model, "data": section.source, "split": split, **result}


def _data_section(model: str, recipe: Recipe | None, data: str | None) -> tuple[DataSection, int]:
    """How to read the data, and the seed that splits it: the run's own for the run's data."""
    if recipe is not None and data in (None, recipe.data.source):
        return recipe.data, recipe.run.seed
    if data is None:
        raise RecipeError(f"{model}: is not a run directory; say what to measure it on with --data")
    return DataSection(source=data), 0


def _check_classes(model: str, names: list[str] | None, source: Source) -> None:
    """A model's logits mean its own classes; another data set's would be counted at random."""
    if names is not None and list(names) != list(source.class_names):
        raise DataError(
            f"{source.name}: its {len(source.class_names)} classes are not those of {model} "
            f"({len(names)}: {', '.join(names[:5])}…); measure it on data with the same classes"
        )
