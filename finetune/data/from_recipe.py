"""The data that a recipe or the caller names, with the splits that are taken from it."""

from __future__ import annotations

from finetune.data.source import Source, open_source
from finetune.data.splits import merge_val, split_train, take_train
from finetune.errors import RecipeError
from finetune.recipe.load import DataSection, Recipe

__all__ = ["data_of", "section_of", "whole_data_of"]


def data_of(section: DataSection, seed: int) -> Source:
    """Open the data of a recipe as training sees it; no image is decoded yet.

    Args:
        section: names the source, and what to take from its splits.
        seed: the run's, where the section has none for its splits.
    Raises: DataError or HubError for what cannot be opened or taken.
    """
    seed = seed if section.split_seed is None else section.split_seed
    source = whole_data_of(section)
    if section.merge_val:
        source = merge_val(source)
    return split_train(take_train(source, section.num_train, seed), section.val_fraction, seed)


def section_of(model: str, recipe: Recipe | None, data: str | None) -> tuple[DataSection, int]:
    """How a model's data is read where it is measured on `data`.

    Args:
        model: for the message.
        recipe: of the run that the model is; None for any other model.
        data: a source string; None for the run's own.
    Returns: for the run's own data its section and seed, so that the splits are those of training;
        for other data a section whose pixels are made as the run makes them, and 0.
    Raises: RecipeError if there is no data to take.
    """
    if recipe is not None and data in (None, recipe.data.source):
        return recipe.data, recipe.run.seed
    if data is None:
        raise RecipeError(f"{model}: is not a run directory; say what to measure it on with --data")
    pixels = recipe.data.model_dump(include={"eval", "decode_size"}) if recipe else {}
    return DataSection(source=data, **pixels), 0


def whole_data_of(section: DataSection) -> Source:
    """Open the data of a recipe with the splits that it has by itself."""
    return open_source(
        section.source,
        image_column=section.image_column,
        label_column=section.label_column,
        streaming=section.streaming,
        decode_size=section.decode_size,
    )
