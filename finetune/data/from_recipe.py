"""Open the data that a recipe or a command names, with the splits that the recipe takes."""

from __future__ import annotations

import os

from finetune.data.source import Source, open_source
from finetune.data.splits import keep_classes, long_tail, merge_val, split_train, take
from finetune.errors import DataError, RecipeError
from finetune.recipe.load import DataSection, Recipe

__all__ = ["data_of", "section_of", "whole_data_of"]


def data_of(section: DataSection, seed: int) -> Source:
    """Open the data of a recipe as training sees it; no image is decoded yet.

    Args:
        section: names the source, and how its splits are made.
        seed: the run's, for a section without `split_seed`.
    Raises: DataError or HubError if the source cannot be opened or split, or of several labels an
        image a split has none.
    """
    source = whole_data_of(section, seed)
    seed = _split_seed(section, seed)
    if section.merge_val:
        source = merge_val(source)
    source = take(source, "train", section.num_train, seed)
    source = split_train(source, section.val_fraction, seed)
    source = take(source, "val", section.num_val, seed)
    for split in source.splits.values():
        if split.is_multilabel and not split.labels.any():
            raise DataError(
                f"split '{split.name}': no image has a label, so nothing can be measured; correct "
                "the labels, or leave the split out",
                code="data.no_labels",
            )
    return long_tail(source, section.long_tail, seed)


def section_of(model: str, recipe: Recipe | None, data: str | None) -> tuple[DataSection, int]:
    """Return the data section and the seed with which a model is measured on `data`.

    Args:
        recipe: of the run that the model is; None for any other model.
        data: a source string; None for the run's own.
    Returns: for the run's own data its section and seed, so that the splits are those of training;
        for other data a section with the run's preprocessing, and 0.
    Raises: RecipeError if no data is named.
    """
    if recipe is not None and (data is None or _place(data) == _place(recipe.data.source)):
        return recipe.data, recipe.run.seed
    if data is None:
        raise RecipeError(
            f"{model}: is not a run directory; say what to measure it on with --data",
            code="recipe.missing_option",
        )
    preprocessing = recipe.data.model_dump(include={"eval", "decode_size"}) if recipe else {}
    return DataSection(source=data, **preprocessing), 0


def _place(source: str) -> str:
    """A source string by which two names of one path are equal, as photos and ./photos/."""
    kind, _, path = source.partition(":")
    if kind not in ("folder", "csv", "parquet"):
        return source
    return f"{kind}:{os.path.abspath(os.path.expanduser(path))}"


def whole_data_of(section: DataSection, seed: int) -> Source:
    """Open the data of a recipe with the splits of its source: of its classes, and its test images.

    Args:
        section, seed: as for `data_of`.
    """
    source = open_source(
        section.source,
        image_column=section.image_column,
        label_column=section.label_column,
        streaming=section.streaming,
        decode_size=section.decode_size,
        multilabel=section.task == "multilabel",
    )
    source = keep_classes(source, section.classes)
    return take(source, "test", section.num_test, _split_seed(section, seed))


def _split_seed(section: DataSection, seed: int) -> int:
    return seed if section.split_seed is None else section.split_seed
