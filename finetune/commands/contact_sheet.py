"""Draw a contact sheet: a grid of images with their predictions.

The least confident predictions come first, unreadable files last. An image in a folder named after
a class has that class as its label; a wrong prediction is marked in red.
"""

# H W pixels

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

from finetune.commands.sheet_drawing import (
    IMAGE_BACKGROUND,
    MUTED_COLOR,
    PAGE_COLOR,
    TEXT_COLOR,
    THUMBNAIL_PIXELS,
    FontSet,
    draw_empty_card,
    make_thumbnail,
    truncate_middle,
    upscale_by_integer,
    wrap_text,
)
from finetune.evaluation.confidence_intervals import accuracy_interval
from finetune.formatting import (
    escape_to_one_line,
    format_percent_range,
    format_probability,
    pluralize,
)
from finetune.inference import PredictionRow

__all__ = ["ContactSheet"]

MAX_TILES = 200  # a sheet of this size still opens in an image viewer
_PADDING, _GAP, _MARGIN = 12, 16, 32
_CARD_WIDTH = THUMBNAIL_PIXELS + 2 * _PADDING
_LINE_HEIGHT = 19
_MAX_PREDICTIONS = 3  # predictions below an image
_MAX_LABELS = 6  # labels below an image, for multi-label models
_MIN_COLUMNS, _MAX_COLUMNS = 3, 10

_BAR_COLOR, _BAR_BACKGROUND = "#2563eb", "#e4e4e7"
_ERROR_COLOR, _ERROR_BACKGROUND, _ERROR_BORDER_COLOR = "#b42318", "#fdf0ef", "#f3c7c3"


class ContactSheet:
    """Collect thumbnails and prediction rows from a stream, then draw them.

    The sheet shows the first 200 images and only counts the rest.

    Args:
        class_names: the model's class names; a folder with one of these names labels its images.
    """

    def __init__(self, class_names: Iterable[str] = ()) -> None:
        self._class_names = frozenset(class_names)
        self._num_labeled = self._num_correct = 0
        self._thumbnails: dict[int, Image.Image] = {}
        self._rows: list[PredictionRow] = []
        self._num_files = 0
        self._num_unreadable = 0

    def add_image(self, index: int, pixels_HWC: np.ndarray) -> None:
        """Store a thumbnail of the decoded image of row `index`; may be called from any thread."""
        if index < MAX_TILES:
            self._thumbnails[index] = make_thumbnail(pixels_HWC)

    def add_row(self, row: PredictionRow) -> None:
        """Add the prediction row of the next image; call in the order of the images."""
        self._num_files += 1
        self._num_unreadable += "error" in row
        truth = self._label_from_folder(row)
        if truth and "error" not in row:
            self._num_labeled += 1
            self._num_correct += row["predictions"][0]["label"] == truth
        if len(self._rows) < MAX_TILES:
            self._rows.append(row)

    def _label_from_folder(self, row: PredictionRow) -> str:
        """Return the name of the image's folder if it is a class name, else an empty string."""
        folder = os.path.basename(os.path.dirname(row["path"]))
        return folder if folder in self._class_names else ""

    def draw(self, *, title: str, note: str = "") -> Image.Image:
        """Draw the sheet, with `note` at the end of its summary line. Returns: an RGB image."""
        names = _strip_common_folder([row["path"] for row in self._rows])
        columns = round((1.6 * len(self._rows)) ** 0.5)
        columns = min(_MAX_COLUMNS, max(_MIN_COLUMNS, columns))
        width = 2 * _MARGIN + columns * (_CARD_WIDTH + _GAP) - _GAP
        truths = [self._label_from_folder(row) for row in self._rows]
        fonts = FontSet([title, note, *names, *truths, *_row_texts(self._rows)])
        small = fonts.at_size(15)
        summary_lines = wrap_text(
            self._format_summary(note), small, width - 2 * _MARGIN, max_lines=4
        )
        top = _MARGIN + 44 + 22 * len(summary_lines) + 14

        ranks = max((len(_caption_predictions(row)) for row in self._rows), default=0)
        # plus one line for the confidence bar or the error, and one for the file name
        height = THUMBNAIL_PIXELS + 2 * _PADDING + (max(ranks, 1) + 1) * _LINE_HEIGHT + 24
        rows = -(-len(self._rows) // columns)
        page = Image.new("RGB", (width, top + rows * (height + _GAP) + _MARGIN - _GAP), PAGE_COLOR)
        draw = ImageDraw.Draw(page)
        bold = fonts.at_size(24, bold=True)
        heading = truncate_middle(escape_to_one_line(title), bold, width - 2 * _MARGIN)
        draw.text((_MARGIN, _MARGIN - 6), heading, TEXT_COLOR, bold(heading))
        for line_number, line in enumerate(summary_lines):
            draw.text((_MARGIN, _MARGIN + 38 + 22 * line_number), line, MUTED_COLOR, small(line))
        empty_card = draw_empty_card(_CARD_WIDTH, height)
        order = sorted(range(len(self._rows)), key=lambda position: _sort_key(self._rows[position]))
        for position, index in enumerate(order):
            row, name = self._rows[index], names[index]
            x = _MARGIN + position % columns * (_CARD_WIDTH + _GAP)
            y = top + position // columns * (height + _GAP)
            page.paste(empty_card, (x, y))
            tile = _Tile(page, draw, fonts, x + _PADDING, y + _PADDING, y + height - _PADDING)
            tile.draw(row, self._thumbnails.get(index), name, truths[index])
        return page

    def _format_summary(self, note: str) -> str:
        parts = [pluralize(self._num_files, "file")]
        if self._num_unreadable:
            parts.append(f"{self._num_unreadable} unreadable")
        if self._num_labeled:
            correct_text = f"{self._num_correct} of {self._num_labeled} match their folder"
            if bounds := accuracy_interval(
                self._num_correct / self._num_labeled, self._num_labeled
            ):
                correct_text += f" (95 % interval {format_percent_range(*bounds)})"
            parts.append(correct_text)
        if self._num_files > len(self._rows):
            parts.append(f"showing the first {len(self._rows)}")
        if len(self._rows) > 1:
            parts.append("least confident first")
        return " · ".join(parts + [escape_to_one_line(note)] * bool(note))


@dataclass(frozen=True)
class _Tile:
    """One card of the sheet; left, top and bottom bound its content, in pixels of the page."""

    page: Image.Image
    canvas: ImageDraw.ImageDraw
    fonts: FontSet
    left: int
    top: int
    bottom: int

    def draw(
        self, row: PredictionRow, thumbnail: Image.Image | None, name: str, label: str = ""
    ) -> None:
        """Draw a row's image and text into the card.

        Args:
            name: the file name to draw.
            label: the image's true class; empty if unknown.
        """
        frame = (
            self.left,
            self.top,
            self.left + THUMBNAIL_PIXELS - 1,
            self.top + THUMBNAIL_PIXELS - 1,
        )
        if thumbnail is None or "error" in row:
            self._draw_unreadable(row.get("error", ""))
        else:
            thumbnail = upscale_by_integer(thumbnail)
            self.canvas.rectangle(frame, fill=IMAGE_BACKGROUND)
            x = self.left + (THUMBNAIL_PIXELS - thumbnail.width) // 2
            self.page.paste(thumbnail, (x, self.top + (THUMBNAIL_PIXELS - thumbnail.height) // 2))
            self._draw_predictions(_caption_predictions(row))
        wrong = bool(label) and "error" not in row and row["predictions"][0]["label"] != label
        if wrong:
            self.canvas.rectangle(frame, outline=_ERROR_COLOR, width=3)
        font = self.fonts.at_size(12, bold=wrong)
        text = truncate_middle(
            escape_to_one_line(f"is {label}: {name}" if wrong else name), font, THUMBNAIL_PIXELS
        )
        ink = _ERROR_COLOR if wrong else MUTED_COLOR
        self.canvas.text((self.left, self.bottom), text, ink, font(text), anchor="ld")

    def _draw_predictions(self, predictions: Sequence[PredictionRow]) -> None:
        y = self.top + THUMBNAIL_PIXELS + 10
        for rank, prediction in enumerate(predictions):
            font = self.fonts.at_size(14 if rank == 0 else 13, bold=rank == 0)
            color = TEXT_COLOR if rank == 0 else MUTED_COLOR
            confidence = prediction["confidence"]
            confidence_text = "" if confidence is None else format_probability(confidence)
            max_width = THUMBNAIL_PIXELS - font(confidence_text).getlength(confidence_text) - 10
            label = truncate_middle(escape_to_one_line(prediction["label"]), font, max_width)
            self.canvas.text((self.left, y + 14), label, color, font(label), anchor="ls")
            right = self.left + THUMBNAIL_PIXELS
            self.canvas.text(
                (right, y + 14), confidence_text, color, font(confidence_text), anchor="rs"
            )
            y += _LINE_HEIGHT
            if rank == 0:
                self._draw_confidence_bar(y + 2, confidence or 0.0)
                y += 10

    def _draw_confidence_bar(self, y: int, confidence: float) -> None:
        self.canvas.rectangle(
            (self.left, y, self.left + THUMBNAIL_PIXELS - 1, y + 3), fill=_BAR_BACKGROUND
        )
        length = round(confidence * THUMBNAIL_PIXELS)
        if length:
            self.canvas.rectangle((self.left, y, self.left + length - 1, y + 3), fill=_BAR_COLOR)

    def _draw_unreadable(self, error: str) -> None:
        left, top, end = self.left, self.top, THUMBNAIL_PIXELS - 1
        self.canvas.rectangle(
            (left, top, left + end, top + end), fill=_ERROR_BACKGROUND, outline=_ERROR_BORDER_COLOR
        )
        self.canvas.line((left, top, left + end, top + end), fill=_ERROR_BORDER_COLOR)
        self.canvas.line((left, top + end, left + end, top), fill=_ERROR_BORDER_COLOR)
        font = self.fonts.at_size(14, bold=True)
        middle, caption = (left + THUMBNAIL_PIXELS // 2, top + THUMBNAIL_PIXELS // 2), "unreadable"
        box = self.canvas.textbbox(middle, caption, font(caption), anchor="mm")
        self.canvas.rectangle(
            (box[0] - 8, box[1] - 6, box[2] + 8, box[3] + 6), fill=_ERROR_BACKGROUND
        )
        self.canvas.text(middle, caption, _ERROR_COLOR, font(caption), anchor="mm")
        small = self.fonts.at_size(13)
        y = self.top + THUMBNAIL_PIXELS + 10
        max_lines = (self.bottom - 18 - y) // _LINE_HEIGHT
        for line in wrap_text(
            escape_to_one_line(error), small, THUMBNAIL_PIXELS, max_lines=max_lines
        ):
            self.canvas.text((left, y + 14), line, _ERROR_COLOR, small(line), anchor="ls")
            y += _LINE_HEIGHT


def _sort_key(row: PredictionRow) -> float:
    """Return the sort key of a row: its top confidence, or 2 for an unreadable file."""
    return float(row["predictions"][0]["confidence"]) if row.get("predictions") else 2.0


def _caption_predictions(row: PredictionRow) -> list[PredictionRow]:
    """Return the predictions to draw below an image: the top 3 or, for multi-label, its labels."""
    predictions: list[PredictionRow] = row.get("predictions", [])
    if (labels := row.get("labels")) is None:
        return predictions[:_MAX_PREDICTIONS]
    if len(labels) > _MAX_LABELS:
        more = {"label": f"and {len(labels) - _MAX_LABELS + 1} more", "confidence": None}
        return [*labels[: _MAX_LABELS - 1], more]
    return labels or [{"label": "no label", "confidence": None}]


def _row_texts(rows: Iterable[PredictionRow]) -> Iterable[str]:
    for row in rows:
        yield row.get("error", "")
        yield from (prediction["label"] for prediction in _caption_predictions(row))


def _strip_common_folder(paths: Sequence[str]) -> list[str]:
    """Return the paths relative to their common parent folder."""
    try:
        common = os.path.commonpath([os.path.dirname(path) for path in paths])
    except ValueError:  # no paths, or both absolute and relative ones
        return list(paths)
    return [os.path.relpath(path, common) if common else path for path in paths]
