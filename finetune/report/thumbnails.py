"""The worst mistakes of a run with their pictures, read from the data that it was measured on."""

# B batch, H W pixels, C channels

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from finetune.data.from_recipe import data_of, whole_data_of
from finetune.data.source import Split
from finetune.data.streaming.row_groups import ShardItems
from finetune.errors import FinetuneError
from finetune.report.run_data import SPLIT_NAMES, Run, listed

__all__ = [
    "class_pictures",
    "mistake_rows",
    "open_split",
    "to_uri",
    "training_images",
    "visible",
    "why_none",
]

_THUMBNAIL = 192  # pixels, of the longer side
_CLASS_THUMBNAIL = 64
_SMALL = 96  # pixels; below it single pixels are shown as squares
_MOST_CLASS_PICTURES = 50


def mistake_rows(run: Run, split: Split | None, note: str = "") -> tuple[list[dict[str, Any]], str]:
    """The worst mistakes of the split that the page is about.

    Args:
        run: its results say which.
        split: that split, None if it cannot be opened.
        note: the reason why it cannot.
    Returns: rows with "picture" (a data URI, or empty) and "small" (true if it is to be enlarged),
        and a note for the page if pictures are missing.
    """
    mistakes = listed(run.figures(run.shown_split), "mistakes")
    recorded = [one for one in mistakes if isinstance(one, dict)]
    rows = []
    for one in recorded:
        row = {key: one.get(key) for key in ("name", "confidence", "loss")}
        row |= {"label": _classes(run, one), "predicted": run.class_name(one.get("predicted"))}
        picture, small = _picture(split, one) if split is not None else ("", False)
        rows.append({**row, "name": row["name"] or "", "picture": picture, "small": small})
    if split is not None and rows and not any(row["picture"] for row in rows):
        note = "The pictures are left out: the data is no longer what the run was measured on."
    return rows, note if rows else ""


def class_pictures(run: Run, split: Split | None) -> list[tuple[str, bool]]:
    """The first image of each class, and true if it is to be enlarged.

    There are none for many classes or a streamed split, of which a whole shard would be read for an
    image, and none where the split has not as many images of each class as the run measured: then
    its labels may mean something else.
    """
    rows = listed(run.figures(run.shown_split), "per_class")
    if split is None or isinstance(split.items, ShardItems) or split.is_multilabel:
        return []
    if not 0 < len(rows) <= _MOST_CLASS_PICTURES:
        return []
    support = [row.get("support") if isinstance(row, dict) else None for row in rows]
    classes, first, counts = np.unique(split.labels, return_index=True, return_counts=True)
    places = dict(zip(classes.tolist(), first.tolist(), strict=True))
    present = dict(zip(classes.tolist(), counts.tolist(), strict=True))
    if support != [present.get(label, 0) for label in range(len(rows))]:
        return []
    return [
        _picture(split, {"index": places.get(label), "label": label}, side=_CLASS_THUMBNAIL)
        for label in range(len(rows))
    ]


def training_images(run: Run) -> tuple[list[dict[str, Any]], str]:
    """Images as training and evaluation saw them, which the end of the run wrote down.

    Returns: rows with "class", "name" and "pictures", each a data URI and true if it is to be
        enlarged: as decoded, in some epochs, in evaluation; and a note for the page, if there are
        no rows. Both are empty for a run of an earlier version.
    """
    rows = []
    for one in listed(run.training_images, "rows"):
        uris = listed(one, "pictures") if isinstance(one, dict) else []
        if len(uris) > 2 and all(str(uri).startswith("data:image/") for uri in uris):
            pictures = [(str(uri), str(uri).startswith("data:image/png")) for uri in uris]
            row = {"class": _classes(run, one), "name": str(one.get("name"))}
            rows.append({**row, "pictures": pictures})
    note = run.training_images.get("note")
    return rows, "" if rows or not isinstance(note, str) else note


def _classes(run: Run, one: dict[str, Any]) -> str:
    """The class of an image or, where it may have several, all of them."""
    return run.class_name(one.get("labels", one.get("label")))


def open_split(run: Run) -> tuple[Split | None, str]:
    """Open the split that the page is about; None and the reason where it cannot be opened."""
    name = run.shown_split
    if not run.figures(name):
        return None, ""
    data, seed = run.recipe.data, run.recipe.run.seed
    try:
        source = whole_data_of(data, seed) if name == "test" else data_of(data, seed)
    except (FinetuneError, OSError, ValueError):
        return None, (
            "Their pictures are not shown: the data cannot be opened from here; write the report "
            "in the folder that the run was started in."
        )
    if name not in source.splits:
        word = SPLIT_NAMES[name]
        return None, f"Their pictures are not shown: the data has no {word} split any more."
    return source.splits[name], ""


def _picture(split: Split, mistake: dict[str, Any], side: int = _THUMBNAIL) -> tuple[str, bool]:
    """A thumbnail as a data URI, empty if it cannot be read; and true if it is to be enlarged."""
    index = mistake.get("index")
    if not isinstance(index, int) or not 0 <= index < len(split):
        return "", False
    if split.classes_of(index) != mistake.get("labels", [mistake.get("label")]):
        return "", False  # another image has taken its place
    try:
        pixels_HWC: np.ndarray = split.read(index)
    except FinetuneError:
        return "", False
    return to_uri(pixels_HWC, side=side), max(pixels_HWC.shape) < _SMALL


def to_uri(pixels_HWC: NDArray[np.uint8], *, side: int) -> str:
    """A picture as a data URI.

    Args:
        pixels_HWC: uint8 RGB.
        side: the longer one of the picture in pixels, at most. What is smaller stays as it is, as a
            PNG; a photo becomes a JPEG of a tenth of a PNG's size.
    """
    image = Image.fromarray(pixels_HWC)
    kind = "png" if max(image.size) < _SMALL else "jpeg"
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    image.save(stream, kind, optimize=True, quality=85)  # a PNG has none
    return f"data:image/{kind};base64,{base64.b64encode(stream.getvalue()).decode()}"


def visible(
    batch_BCHW: Tensor, *, mean: Sequence[float], std: Sequence[float]
) -> NDArray[np.float32]:
    """Undo the normalisation of images, for people.

    Args:
        batch_BCHW: normalised images.
        mean, std: what they were normalised with.
    Returns: (B, H, W, C) in [0, 1].
    """
    scale, shift = (torch.tensor(values).view(3, 1, 1) for values in (std, mean))
    plain: NDArray[np.float32] = (
        (batch_BCHW * scale + shift).clamp(0, 1).permute(0, 2, 3, 1).numpy()
    )
    return plain


def why_none(run: Run) -> str:
    """The reason why no mistakes are shown."""
    figures = run.figures(run.shown_split)
    if not figures:
        return "Neither a test nor a validation split was measured."
    if figures.get("top1") == 1 or figures.get("mistakes") == []:
        name = SPLIT_NAMES[run.shown_split]
        return f"There are none: every {name} image was classified correctly."
    return "This run did not record single mistakes."
