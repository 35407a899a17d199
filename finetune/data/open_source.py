"""Open a data source as labeled splits of images, which are decoded on demand.

    hub:owner/name[@revision][:config]    a dataset on the Hugging Face Hub
    parquet:PATH                          a file, a glob, or a folder in the Hub's layout
    folder:PATH                           train/, val/ and test/ with a folder per class in each,
                                          or only class folders (then all images are train),
                                          or images with a metadata.csv or labels.csv
    csv:PATH                              a file with a path, a label and optionally a split for
                                          each image
    tar:PATTERN                           WebDataset shards (KEY.jpg with KEY.cls or KEY.json): a
                                          file, a folder, a pattern with {000..099} or *, or URLs
    embedded:digits                       scikit-learn's 1,797 handwritten digits
    embedded:digit_pairs                  two digits side by side, with several labels per image

A split named `valid` or `validation` becomes val. If a source has no test split, a run reports no
test metrics. A new kind of source needs an entry in finetune/source_kinds.py and a branch in
`_open_by_kind`.
"""

# K classes

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from finetune.data.class_balance import count_images_per_class
from finetune.data.columns import ColumnNames
from finetune.data.csv_file import read_csv
from finetune.data.embedded import open_embedded
from finetune.data.groups import groups_from_names
from finetune.data.image_folder import open_image_folder, source_from_files
from finetune.data.parquet import read_hub, read_parquet
from finetune.data.source import Source, Split
from finetune.data.tar import read_tar
from finetune.errors import DataError
from finetune.formatting import pluralize
from finetune.log import warn_once
from finetune.recipe.field_types import is_group_pattern
from finetune.recipe.paths import check_data_source
from finetune.source_kinds import SOURCE_KINDS

__all__ = ["check_classes", "open_source"]


def open_source(
    source: str,
    *,
    image_column: str | None = None,
    label_column: str | tuple[str, ...] | None = None,
    group: str | None = None,
    streaming: bool = False,
    decode_size: int | None = None,
    multilabel: bool = False,
) -> Source:
    """Open a dataset without decoding any image.

    Args:
        source: source string, see the docstring of this module.
        image_column, label_column: columns of hub:, parquet: and csv: sources, suffixes of tar:
            members; None to detect them.
        group: column of hub:, parquet: and csv: sources with the group of each image, or a regular
            expression that finds it in the image's name, see `groups_from_names`; None: no groups.
        streaming: stream the images of hub:, parquet: and tar: sources.
        decode_size: see `Split`.
        multilabel: allow any number of labels per image; several label columns then hold 0 and 1.
    Returns: the splits that the source has; `hold_out_validation` adds a missing validation split.
    Raises: DataError if the source does not exist or is unsuitable for training.
    """
    check_data_source(source)
    kind, _, rest = source.partition(":")
    if not SOURCE_KINDS[kind].has_columns and (image_column or label_column):
        raise DataError(
            f"data.image_column, data.label_column: '{kind}:' sources have no columns; remove "
            "these keys",
            code="data.no_column",
        )
    is_pattern = group is not None and is_group_pattern(group)
    if group is not None and not is_pattern and kind in ("folder", "tar", "embedded"):
        raise DataError(
            f"data.group: '{kind}:' sources have no column '{group}'; give a regular expression "
            r"that finds the group in the names of images, such as '(patient\d+)'",
            code="data.no_column",
        )
    try:
        columns = ColumnNames(image_column, label_column, None if is_pattern else group)
        opened = _open_by_kind(
            source, kind, rest, columns, streaming=streaming, multilabel=multilabel
        )
    except (OSError, ValueError) as error:  # for example an invalid file name
        cause = getattr(error, "strerror", None) or error
        message = f"{source[:200]!r}: cannot be read ({cause}); check the path"
        raise DataError(message, code="data.unreadable") from error
    check_classes(opened)
    splits = {
        name: dataclasses.replace(split, decode_size=decode_size)
        for name, split in opened.splits.items()
    }
    opened = dataclasses.replace(opened, splits=splits)
    return groups_from_names(opened, group) if group is not None and is_pattern else opened


def _open_by_kind(
    source: str, kind: str, rest: str, columns: ColumnNames, *, streaming: bool, multilabel: bool
) -> Source:
    if kind == "folder":
        return open_image_folder(source, rest, multilabel=multilabel)
    if kind == "csv":
        file = Path(rest).expanduser().absolute()
        images_by_split, indicator_columns, groups = read_csv(file, columns, multilabel=multilabel)
        description = f"images of {file.name}"
        return source_from_files(
            source, file.parent, images_by_split, description, indicator_columns, groups
        )
    if kind == "embedded":
        return open_embedded(source, rest, multilabel=multilabel)
    read = {"hub": read_hub, "tar": read_tar}.get(kind, read_parquet)
    loaded = read(rest, columns, streaming=streaming, multilabel=multilabel)
    splits = {
        name: Split(name, labels, loaded.images[name], groups=loaded.groups.get(name))
        for name, labels in loaded.labels.items()
    }
    return Source(source, splits, loaded.class_names, loaded.description, loaded.indicator_columns)


def check_classes(source: Source) -> None:
    """Raise a DataError if the classes are unsuitable for training or evaluation."""
    if len(source.class_names) < 2:
        raise DataError(
            f"{source.name}: only one class, {source.class_names}; at least two are "
            "needed: add images of another class, or name another column with data.label_column",
            code="data.one_class",
        )
    train = source.splits.get("train")
    if train is None:
        return
    num_classes = len(source.class_names)
    in_train_K = count_images_per_class(train.labels, num_classes) > 0
    for name, split in source.splits.items():
        counts_K = count_images_per_class(split.labels, num_classes)
        untrained = np.flatnonzero((counts_K > 0) & ~in_train_K).tolist()
        if untrained:
            names = ", ".join(source.class_names[label] for label in untrained[:5])
            count_text = pluralize(len(untrained), "class", "classes")
            raise DataError(
                f"{source.name}: {count_text} in '{name}' but not in 'train': {names}; add "
                "training images of them, or remove these classes",
                code="data.split_mismatch",
            )
        absent = [source.class_names[i] for i in np.flatnonzero((counts_K == 0) & in_train_K)]
        if absent:
            count_text = pluralize(len(absent), "class", "classes")
            warn_once(
                f"{source.name}: {count_text} without an image in '{name}': "
                f"{', '.join(absent[:5])}; its metrics say nothing about them"
            )
    missing = [source.class_names[label] for label in np.flatnonzero(~in_train_K).tolist()]
    if missing:
        count_text = pluralize(len(missing), "declared class", "declared classes")
        warn_once(f"{source.name}: {count_text} without an image: {', '.join(missing[:5])}")
