"""Open the dataset of a recipe or a command, with the recipe's splits."""

from __future__ import annotations

import os

from finetune.data.decisions import apply_decisions, read_decisions
from finetune.data.open_source import open_source
from finetune.data.source import Source
from finetune.data.splits import (
    hold_out_validation,
    make_long_tailed,
    merge_val,
    select_classes,
    subsample,
)
from finetune.errors import DataError, RecipeError, redact_urls
from finetune.formatting import pluralize
from finetune.log import warn_once
from finetune.recipe.load import DataSection
from finetune.recipe.schema import Recipe

__all__ = ["open_data", "open_full_data", "resolve_data_section"]


def open_data(section: DataSection, seed: int) -> Source:
    """Open the dataset of a recipe, with the splits and subsets used in training. Decodes no image.

    Args:
        section: `data` section of the recipe.
        seed: seed of the run, used if `data.split_seed` is not set.
    Raises: DataError or HubError if the source cannot be opened or split, or if a multi-label split
        has no label at all.
    """
    source = open_full_data(section, seed)
    seed = _split_seed(section, seed)
    if section.merge_val:
        source = merge_val(source)
    source = subsample(source, "train", section.num_train, seed)
    source = hold_out_validation(source, section.val_fraction, seed)
    source = subsample(source, "val", section.num_val, seed)
    for split in source.splits.values():
        if split.is_multilabel and not split.labels.any():
            raise DataError(
                f"split '{split.name}': no image has a label, so nothing can be measured; fix the "
                "labels, or leave the split out",
                code="data.no_labels",
            )
    return make_long_tailed(source, section.long_tail, seed)


def resolve_data_section(
    model: str, recipe: Recipe | None, data: str | None
) -> tuple[DataSection, int]:
    """Return the data section and the seed for evaluating a model on `data`.

    Args:
        model: model argument as the user typed it, for the message.
        recipe: recipe of the run if the model is a run directory, else None.
        data: source string; None for the dataset of the run.
    Returns: the data section and the seed. For the dataset of the run, these are the run's own,
        which give the same splits as in training; for another dataset, the section has only the
        run's preprocessing, its columns if the kind of source is the same, and the seed is 0.
    Raises: RecipeError if `data` is None and the model is not a run directory.
    """
    if recipe is not None and (
        data is None or _normalize_source(data) == _normalize_source(recipe.data.source)
    ):
        section = recipe.data
        if data is not None and redact_urls(data) != data:  # the run stored only the redacted URL
            section = section.model_copy(update={"source": data})
        return section, recipe.run.seed
    if data is None:
        raise RecipeError(
            f"{model}: not a run directory, so its dataset is unknown; set --data",
            code="recipe.missing_option",
        )
    if recipe is None:
        return DataSection(source=data), 0
    kept = {"eval", "decode_size"}
    if data.partition(":")[0] == recipe.data.source.partition(":")[0]:  # the data may have moved
        kept |= {"image_column", "label_column", "task"}
    return DataSection(source=data, **recipe.data.model_dump(include=kept)), 0


def _normalize_source(source: str) -> str:
    """Make the path of a source absolute, and redact URLs.

    So folder:photos equals folder:./photos/, and a URL equals the same URL with a new signature.
    """
    kind, _, path = source.partition(":")
    if kind not in ("folder", "csv", "parquet", "tar") or "://" in path:
        return redact_urls(source)
    return f"{kind}:{os.path.abspath(os.path.expanduser(path))}"


def open_full_data(section: DataSection, seed: int) -> Source:
    """Open the dataset of a recipe with the splits that its source has.

    Applies the recipe's decisions, selects its classes and subsamples the test split, but leaves
    train and val complete.

    Args:
        section, seed: see `open_data`.
    """
    decisions = None if section.decisions is None else read_decisions(section.decisions)
    source = open_source(
        section.source,
        image_column=section.image_column,
        label_column=section.label_column,
        group=section.group,
        streaming=section.streaming,
        decode_size=section.decode_size,
        multilabel=section.task == "multilabel",
    )
    if decisions is not None:
        source, summary = apply_decisions(source, decisions, on_test=section.decisions_on_test)
        if summary.not_applied:
            warn_once(
                f"data.decisions: {pluralize(summary.not_applied, 'change')} of test images not "
                "applied, so the test metrics stay comparable; to apply them, set "
                "data.decisions_on_test=true"
            )
    source = select_classes(source, section.classes)
    return subsample(source, "test", section.num_test, _split_seed(section, seed))


def _split_seed(section: DataSection, seed: int) -> int:
    return seed if section.split_seed is None else section.split_seed
