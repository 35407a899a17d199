"""The worst mistakes of a run with their pictures, read from the data that it was measured on."""

# H W pixels, C channels

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from PIL import Image

from finetune.data.from_recipe import data_of, whole_data_of
from finetune.data.source import Split
from finetune.data.streaming.row_groups import ShardItems
from finetune.errors import FinetuneError
from finetune.report.run_data import SPLIT_NAMES, Run, listed

__all__ = ["class_pictures", "mistake_rows", "open_split", "why_none"]

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
        row |= {key: run.class_name(one.get(key)) for key in ("label", "predicted")}
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
    if split is None or isinstance(split.items, ShardItems):
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
    if int(split.labels[index]) != mistake.get("label"):
        return "", False  # another image has taken its place
    try:
        pixels_HWC: np.ndarray = split.read(index)
    except FinetuneError:
        return "", False
    image = Image.fromarray(pixels_HWC)
    small = max(image.size) < _SMALL
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    image.save(stream, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}", small


def why_none(run: Run) -> str:
    """The reason why no mistakes are shown."""
    figures = run.figures(run.shown_split)
    if not figures:
        return "Neither a test nor a validation split was measured."
    if figures.get("top1") == 1:
        name = SPLIT_NAMES[run.shown_split]
        return f"There are none: every {name} image was classified correctly."
    return "This run did not record single mistakes."
