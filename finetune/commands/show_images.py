"""Sheets of images: those of a source by class, and those of training as the network sees them."""

# H W pixels

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from finetune.commands.contact_sheet import (
    GREY,
    INK,
    MOUNT,
    PAGE,
    Fonts,
    card,
    enlarged,
    fitted,
    save_sheet,
    small_copy,
    wrapped,
)
from finetune.commands.predict_io import check_target, one_line
from finetune.console import say
from finetune.data.decode_all import expected_size
from finetune.data.source import Source, Split, open_source
from finetune.errors import DataError
from finetune.recipe.load import Recipe
from finetune.run.environment import DTYPES, pick_precision
from finetune.text import counted
from finetune.training.setup import open_setup
from finetune.training.training_images import EPOCHS, augmented, one_of_each

__all__ = ["Strip", "draw_strips", "show_source", "show_training"]

SUFFIXES = (".png", ".jpg", ".jpeg")
_CLASSES, _EACH = 24, 8  # of a source
_SHOWN = 6  # training images
_BOX, _GAP, _PAD, _MARGIN, _SIDE = 128, 8, 12, 32, 190  # pixels; the side is for the name


class Strip(NamedTuple):
    """A row of pictures under one name, with a remark; None is one that cannot be read."""

    name: str
    remark: str
    pictures: Sequence[NDArray[np.uint8] | Image.Image | None]


def show_source(
    source: str, out: str | Path, *, option: str = "--out", multilabel: bool = False
) -> Path:
    """Draw some images of each class of a source, spread over it, with the numbers of images.

    Args:
        source: as `data.source` takes it; of its splits the first is shown, train where it is.
        out: a .png or .jpg file, replaced in one step.
        option: what the user wrote it behind.
        multilabel: an image has any number of labels; it stands beside each of them.
    Returns: the file.
    Raises: DataError if the source cannot be opened; RecipeError or SetupError if the sheet cannot
        be written.
    """
    path = check_target(out, option=option, suffixes=SUFFIXES)
    opened = open_source(source, decode_size=_BOX, multilabel=multilabel)
    strips = _by_class(opened)
    facts = [counted(len(opened.class_names), "class", "classes")]
    facts += [f"{len(split):,} {name}" for name, split in opened.splits.items()]
    if len(opened.class_names) > len(strips):
        facts.append(f"the first {len(strips)} classes are shown")
    save_sheet(draw_strips(strips, title=opened.name, facts=facts), path, option=option)
    return path


def _by_class(source: Source) -> list[Strip]:
    split = next(iter(source.splits.values()))
    strips = []
    for label, name in enumerate(source.class_names[:_CLASSES]):
        members = np.flatnonzero(_has(split, label))
        places = np.linspace(0, len(members) - 1, min(_EACH, len(members))).round().astype(int)
        pictures: list[Image.Image | None] = []
        for index in members[places].tolist():
            try:
                pictures.append(small_copy(split.read(index), _BOX))
            except DataError:
                pictures.append(None)
        of_splits = [
            f"{int(_has(one, label).sum()):,} {name}" for name, one in source.splits.items()
        ]
        strips.append(Strip(name, " · ".join(of_splits), pictures))
    return strips


def _has(split: Split, label: int) -> NDArray[np.bool_]:
    """True for the images of a class, (N,)."""
    return split.labels[:, label] == 1 if split.is_multilabel else split.labels == label


def show_training(recipe: Recipe, out: str | Path) -> Path:
    """Draw training images of a recipe before and after its augmentation, in eight epochs.

    The pixels are those that the training on this machine computes; weights are not read.

    Args:
        recipe: checked and complete.
        out: a .png or .jpg file, replaced in one step.
    Returns: the file.
    Raises: FinetuneError for data that cannot be read, or what does not fit together.
    """
    path = check_target(out, option="--out", suffixes=SUFFIXES)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    untrained = recipe.model.model_copy(update={"pretrained": False})
    recipe = recipe.model_copy(update={"model": untrained})
    setup = open_setup(recipe, device=device, notice=say, progress=True)
    split = setup.source.splits["train"]
    if recipe.data.unreadable == "quarantine":  # which changes the numbers of the images
        split = setup.loader(split, train=True).store.split
        setup = setup.with_num_samples(len(split), split.labels)
    try:
        images = augmented(
            setup,
            split,
            one_of_each(split, _SHOWN),
            one_size=expected_size(split) is not None,
            dtype=DTYPES[pick_precision(recipe.run.precision, device)],
        )
    except DataError as error:
        hint = f"see all with: finetune data scan {recipe.data.source}"
        raise DataError(f"{error}; {hint}", code="data.unreadable") from None
    strips = [
        Strip(
            ", ".join(setup.source.class_names[label] for label in one.labels),
            one.name,
            [one.decoded, *one.epochs, one.evaluation],
        )
        for one in images
    ]
    epochs = [f"epoch {number}" for number in range(1, EPOCHS + 1)]
    is_random = setup.train_pipeline.random
    height, width = setup.preprocessing.image_size
    sheet = draw_strips(
        strips,
        title=f"{recipe.model.name} on {recipe.data.source}",
        facts=[f"seen at {width} × {height} pixels", setup.train_pipeline.sentence],
        heads=["decoded", *(epochs if is_random else ["every epoch"]), "evaluation"],
    )
    save_sheet(sheet, path, option="--out")
    return path


def draw_strips(
    strips: Sequence[Strip], *, title: str, facts: Sequence[str], heads: Sequence[str] = ()
) -> Image.Image:
    """Draw rows of pictures below one another.

    Args:
        strips: at least one.
        title: over the sheet.
        facts: below the title.
        heads: over the pictures, if they have names.
    Returns: an RGB image.
    """
    columns = max(max(len(strip.pictures) for strip in strips), 4)
    wide = _SIDE + columns * (_BOX + _GAP) - _GAP + 2 * _PAD
    high = _BOX + 2 * _PAD
    fonts = Fonts([title, *facts, *heads, *(text for strip in strips for text in strip[:2])])
    bold, small = fonts.size(24, bold=True), fonts.size(15)
    lines = wrapped(one_line(" · ".join(facts)), small, wide, lines=4)
    top = _MARGIN + 44 + 22 * len(lines) + (30 if heads else 8)
    bottom = top + len(strips) * (high + _GAP) - _GAP + _MARGIN
    page = Image.new("RGB", (wide + 2 * _MARGIN, bottom), PAGE)
    draw = ImageDraw.Draw(page)
    heading = fitted(one_line(title), bold, wide)
    draw.text((_MARGIN, _MARGIN - 6), heading, INK, bold(heading))
    for number, line in enumerate(lines):
        draw.text((_MARGIN, _MARGIN + 38 + 22 * number), line, GREY, small(line))
    left = _MARGIN + _PAD + _SIDE
    for column, head in enumerate(heads):
        middle = left + column * (_BOX + _GAP) + _BOX // 2
        draw.text((middle, top - 8), head, GREY, small(head), anchor="ms")
    paper = card(wide, high)
    for number, strip in enumerate(strips):
        y = top + number * (high + _GAP)
        page.paste(paper, (_MARGIN, y))
        _write(draw, fonts, strip, _MARGIN + _PAD, y + _PAD)
        for column, picture in enumerate(strip.pictures):
            _put(page, draw, picture, left + column * (_BOX + _GAP), y + _PAD)
    return page


def _write(draw: ImageDraw.ImageDraw, fonts: Fonts, strip: Strip, x: int, y: int) -> None:
    """Write the name of a strip and its remark in front of the pictures."""
    room = _SIDE - 2 * _GAP
    bold, small = fonts.size(15, bold=True), fonts.size(13)
    for line in wrapped(one_line(strip.name), bold, room, lines=2):
        draw.text((x, y), line, INK, bold(line))
        y += 20
    for line in wrapped(one_line(strip.remark), small, room, lines=4):
        draw.text((x, y + 4), line, GREY, small(line))
        y += 18


def _put(
    page: Image.Image,
    draw: ImageDraw.ImageDraw,
    picture: NDArray[np.uint8] | Image.Image | None,
    x: int,
    y: int,
) -> None:
    """Put a picture into the middle of its square."""
    frame = (x, y, x + _BOX - 1, y + _BOX - 1)
    draw.rectangle(frame, fill=MOUNT)
    if picture is None:
        draw.line(frame, fill=GREY)
        draw.line((x, y + _BOX - 1, x + _BOX - 1, y), fill=GREY)
        return
    image = picture if isinstance(picture, Image.Image) else small_copy(picture, _BOX)
    image = enlarged(image, _BOX)
    page.paste(image, (x + (_BOX - image.width) // 2, y + (_BOX - image.height) // 2))
