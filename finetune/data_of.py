"""The data that a recipe names, with the splits that it takes from it."""

from __future__ import annotations

from finetune.data.sources import Source, open_source
from finetune.data.splits import merge_val, split_train, take_train
from finetune.recipe import DataSection

__all__ = ["data_of", "whole_data_of"]


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


def whole_data_of(section: DataSection) -> Source:
    """Open the data of a recipe with the splits that it has by itself."""
    return open_source(
        section.source,
        image_column=section.image_column,
        label_column=section.label_column,
        streaming=section.streaming,
        decode_size=section.decode_size,
    )
