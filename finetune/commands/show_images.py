"""`finetune show --images`: draw images by class, or training images after augmentation."""

# H W pixels

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from finetune.commands.contact_sheet import (
    ERROR_COLOR,
    THUMBNAIL_PIXELS,
    Tile,
    draw_grid,
    make_thumbnail,
    save_sheet,
)
from finetune.data.decode_split import estimate_common_size
from finetune.data.open_source import open_source
from finetune.data.source import Source, Split
from finetune.errors import DataError, redact_urls
from finetune.files import check_output_file
from finetune.formatting import pluralize
from finetune.log import logger
from finetune.precision import DTYPES, resolve_precision
from finetune.recipe.paths import check_is_outside
from finetune.recipe.schema import Recipe
from finetune.run.directory import RunDir
from finetune.run.record import has_changed, read_record
from finetune.training.setup import build_setup
from finetune.training.training_images import NUM_EPOCHS, augment_images, pick_one_per_class

__all__ = ["ImageRow", "draw_image_rows", "show_source", "show_training"]

SHEET_SUFFIXES = (".png", ".jpg", ".jpeg")
_MAX_CLASSES, _IMAGES_PER_CLASS = 24, 8  # for `show_source`
_NUM_TRAINING_IMAGES = 6  # for `show_training`


class ImageRow(NamedTuple):
    """A row of images with a name and a note; None stands for an unreadable image."""

    name: str
    note: str
    images: Sequence[NDArray[np.uint8] | Image.Image | None]


def show_source(
    source: str, out: str | Path, *, option: str = "--out", multilabel: bool = False
) -> Path:
    """Draw some images of each class of a source, and the number of images per class.

    Args:
        source: a source string as in `data.source`; the images come from train or, if there is no
            train split, from the first split.
        out: a .png or .jpg file, written atomically.
        option: the command-line option of `out`, for error messages.
        multilabel: True for multi-label data; an image appears in the row of each of its labels.
    Returns: path of the file.
    Raises: DataError if the source cannot be opened; RecipeError or SetupError if the sheet cannot
        be written.
    """
    path = check_output_file(out, option=option, suffixes=SHEET_SUFFIXES)
    check_is_outside(source, path, option=option)
    loaded_source = open_source(source, decode_size=THUMBNAIL_PIXELS, multilabel=multilabel)
    rows = _rows_by_class(loaded_source)
    subtitle_parts = [pluralize(len(loaded_source.class_names), "class", "classes")]
    subtitle_parts += [f"{len(split):,} {name}" for name, split in loaded_source.splits.items()]
    if len(loaded_source.class_names) > len(rows):
        subtitle_parts.append(f"showing the first {len(rows)} classes")
    save_sheet(
        draw_image_rows(rows, title=redact_urls(loaded_source.name), facts=subtitle_parts),
        path,
        option=option,
    )
    return path


def _rows_by_class(source: Source) -> list[ImageRow]:
    split = next(iter(source.splits.values()))
    rows = []
    for label, name in enumerate(source.class_names[:_MAX_CLASSES]):
        members = np.flatnonzero(_class_mask(split, label))
        positions = (
            np.linspace(0, len(members) - 1, min(_IMAGES_PER_CLASS, len(members)))
            .round()
            .astype(int)
        )
        thumbnails: list[Image.Image | None] = []
        for index in members[positions].tolist():
            try:
                thumbnails.append(make_thumbnail(split.decode(index)))
            except DataError:
                thumbnails.append(None)
        counts = [
            f"{int(_class_mask(other_split, label).sum()):,} {name}"
            for name, other_split in source.splits.items()
        ]
        rows.append(ImageRow(name, " · ".join(counts), thumbnails))
    return rows


def _class_mask(split: Split, label: int) -> NDArray[np.bool_]:
    """Return a mask (N,) of the images that have the class index `label`."""
    return split.labels[:, label] == 1 if split.is_multilabel else split.labels == label


def show_training(recipe: Recipe, out: str | Path, *, run: RunDir | None = None) -> Path:
    """Draw training images as decoded, as augmented in eight epochs, and as in evaluation.

    The pixels are identical to those in training on this machine. Pretrained weights are not
    loaded.

    Args:
        recipe: the recipe.
        out: a .png or .jpg file, written atomically.
        run: the folder that may have the run of the recipe, to warn of images that have changed.
    Returns: path of the file.
    Raises: FinetuneError for unreadable data or a recipe that does not fit the data.
    """
    path = check_output_file(out, option="--out", suffixes=SHEET_SUFFIXES)
    check_is_outside(recipe.data.source, path)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model_section = recipe.model.model_copy(update={"pretrained": False})
    recipe = recipe.model_copy(update={"model": model_section})
    setup = build_setup(recipe, device=device, show_progress=True)
    split = setup.source.splits["train"]
    if run is not None and has_changed(read_record(run), split):
        logger.warning(
            f"{run.path}: images or labels of 'train' have changed since the run, so these are not "
            "the images that it was trained on"
        )
    if recipe.data.unreadable == "quarantine":  # excluded images shift the indices
        split = setup.build_loader(split, train=True).store.split
        setup = setup.with_num_samples(len(split), split.labels)
    try:
        images = augment_images(
            setup,
            split,
            pick_one_per_class(split, _NUM_TRAINING_IMAGES),
            same_size=estimate_common_size(split) is not None,
            dtype=DTYPES[resolve_precision(recipe.run.precision, device)],
        )
    except DataError as error:
        hint = f"list all with: finetune data scan {recipe.data.source}"
        raise DataError(f"{error}; {hint}", code="data.unreadable") from None
    strips = [
        ImageRow(
            ", ".join(setup.source.class_names[label] for label in training_image.labels),
            training_image.name,
            [training_image.decoded, *training_image.trained, training_image.evaluated],
        )
        for training_image in images
    ]
    epochs = [f"epoch {number}" for number in range(1, NUM_EPOCHS + 1)]
    is_augmented = setup.train_pipeline.is_random
    height, width = setup.preprocessing.image_size
    sheet = draw_image_rows(
        strips,
        title=f"{recipe.model.name} on {redact_urls(recipe.data.source)}",
        facts=[f"network input {width} × {height} pixels", setup.train_pipeline.transform_spec],
        column_titles=["decoded", *(epochs if is_augmented else ["every epoch"]), "evaluation"],
    )
    save_sheet(sheet, path, option="--out")
    return path


def draw_image_rows(
    rows: Sequence[ImageRow], *, title: str, facts: Sequence[str], column_titles: Sequence[str] = ()
) -> Image.Image:
    """Draw rows of images onto one sheet.

    Args:
        rows: the rows, at least one.
        title: title of the sheet.
        facts: short texts to show below the title.
        column_titles: titles of the columns, if any; repeated in every row.
    Returns: an RGB image.
    """
    num_columns = 1 + max(*(len(row.images) for row in rows), 4)
    tiles = []
    for row in rows:
        text = [*textwrap.wrap(row.name, 20)[:2], *textwrap.wrap(row.note, 20)[:6]]
        tiles.append(Tile(None, text))
        tiles += [
            Tile(None, ["unreadable"], ERROR_COLOR)
            if image is None
            else Tile(_as_thumbnail(image), column_titles[column : column + 1])
            for column, image in enumerate(row.images)
        ]
        tiles += [Tile(None, [])] * (num_columns - 1 - len(row.images))
    return draw_grid(tiles, num_columns=num_columns, title=title, facts=facts)


def _as_thumbnail(image: NDArray[np.uint8] | Image.Image) -> Image.Image:
    return image if isinstance(image, Image.Image) else make_thumbnail(image)
