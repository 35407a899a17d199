"""The worst mistakes of a run with their pictures, read from the data that it was measured on."""

# H W pixels, C channels

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from PIL import Image

from finetune.data.from_recipe import whole_data_of
from finetune.data.source import Split
from finetune.errors import FinetuneError
from finetune.report.run_data import Run, listed

__all__ = ["mistake_rows", "why_none"]

_THUMBNAIL = 192  # pixels, of the longer side
_SMALL = 96  # pixels; below it single pixels are shown as squares


def mistake_rows(run: Run, split: Split | None) -> tuple[list[dict[str, Any]], str]:
    """The worst mistakes of the test split.

    Args:
        run: its results say which.
        split: the test split if it is open already; else the recipe's source is opened.
    Returns: rows with "picture" (a data URI, or empty) and "small" (whether to enlarge it), and
        what to say when there are no pictures.
    """
    found = [one for one in listed(run.figures("test"), "mistakes") if isinstance(one, dict)]
    note = ""
    if found and split is None:
        split, note = _open_test(run)
    rows = []
    for one in found:
        row = {key: one.get(key) for key in ("name", "confidence", "loss")}
        row |= {key: run.class_name(one.get(key)) for key in ("label", "predicted")}
        picture, small = _picture(split, one) if split is not None else ("", False)
        rows.append({**row, "name": row["name"] or "", "picture": picture, "small": small})
    if split is not None and rows and not any(row["picture"] for row in rows):
        note = "The pictures are left out: the data is no longer what the run was measured on."
    return rows, note


def _open_test(run: Run) -> tuple[Split | None, str]:
    data = run.recipe.data
    try:
        source = whole_data_of(data)
    except (FinetuneError, OSError, ValueError):
        return None, (
            "Their pictures are not shown: the data cannot be opened from here; write the report "
            "in the folder that the run was started in."
        )
    if "test" not in source.splits:
        return None, "Their pictures are not shown: the data has no test split any more."
    return source.splits["test"], ""


def _picture(split: Split, mistake: dict[str, Any]) -> tuple[str, bool]:
    """A thumbnail as a data URI, empty if it cannot be read; and whether it is to be enlarged."""
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
    image.thumbnail((_THUMBNAIL, _THUMBNAIL), Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    image.save(stream, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}", small


def why_none(run: Run) -> str:
    """Say why no mistakes are shown."""
    test = run.figures("test")
    if not test:
        return "The test split was not measured."
    if test.get("top1") == 1:
        return "There are none: every test image was classified correctly."
    return "This run did not record single mistakes."
