"""Contact sheets: a grid of images with text below them, and the sheet of `finetune predict`."""

# H W pixels

from __future__ import annotations

import contextlib
import functools
import io
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from finetune.files import write_atomically
from finetune.formatting import escape_to_one_line, format_probability, pluralize
from finetune.inference import PredictionRow

__all__ = [
    "ERROR_COLOR",
    "THUMBNAIL_PIXELS",
    "ContactSheet",
    "Tile",
    "draw_grid",
    "make_thumbnail",
    "save_sheet",
]

THUMBNAIL_PIXELS = 160
_MAX_TILES = 200  # a sheet of this size still opens in an image viewer
_MAX_LABELS = 6  # labels shown for a multi-label prediction
_GAP, _LINE_HEIGHT = 14, 17
_INK, _MUTED, ERROR_COLOR = "#18181b", "#63636b", "#b42318"
_CJK_FONTS = ("NotoSansCJK-Regular.ttc", "wqy-microhei.ttc", "Arial Unicode.ttf", "msyh.ttc")


class Tile(NamedTuple):
    """A thumbnail with lines of text below it, or only text; `color` is that of the first line."""

    image: Image.Image | None
    lines: Sequence[str]
    color: str = _INK


def make_thumbnail(pixels_HWC: np.ndarray) -> Image.Image:
    """Return a thumbnail that shares no memory with the image; small images keep their size."""
    # stride first; otherwise each thread would copy up to 48 megapixels
    step = max(1, max(pixels_HWC.shape[:2]) // (4 * THUMBNAIL_PIXELS))
    image = Image.fromarray(np.ascontiguousarray(pixels_HWC[::step, ::step]))
    image.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS), Image.Resampling.LANCZOS)
    return image.copy()


def draw_grid(
    tiles: Sequence[Tile], *, num_columns: int, title: str, facts: Sequence[str]
) -> Image.Image:
    """Draw tiles row by row, below a title and short facts. Returns: an RGB image."""
    num_lines = max((len(tile.lines) for tile in tiles if tile.image is not None), default=0)
    tile_height = THUMBNAIL_PIXELS + num_lines * _LINE_HEIGHT
    width, height = THUMBNAIL_PIXELS + _GAP, tile_height + _GAP
    page_width = num_columns * width + _GAP
    header = [title, *textwrap.wrap(escape_to_one_line(" · ".join(facts)), page_width // 8)[:4]]
    top = 2 * _GAP + len(header) * _LINE_HEIGHT
    num_rows = -(-len(tiles) // num_columns)
    page = Image.new("RGB", (page_width, top + num_rows * height), "white")
    _draw_lines(page, header, x=_GAP, y=_GAP)
    for index, tile in enumerate(tiles):
        row, column = divmod(index, num_columns)
        page.paste(_draw_tile(tile, tile_height), (_GAP + column * width, top + row * height))
    return page


def _draw_tile(tile: Tile, height: int) -> Image.Image:
    """Draw a tile as a separate image, which cuts off text that is too wide."""
    drawn = Image.new("RGB", (THUMBNAIL_PIXELS, height), "white")
    if tile.image is not None:
        # NEAREST: the pixels of a small image stay visible
        size = (THUMBNAIL_PIXELS, THUMBNAIL_PIXELS)
        drawn.paste(ImageOps.pad(tile.image, size, Image.Resampling.NEAREST, "white"))
    y = 0 if tile.image is None else THUMBNAIL_PIXELS
    _draw_lines(drawn, tile.lines, x=0, y=y, color=tile.color)
    return drawn


def _draw_lines(
    page: Image.Image, lines: Sequence[str], *, x: int, y: int, color: str = _INK
) -> None:
    """Draw the first line in a color and the others in gray."""
    for number, line in enumerate(lines):
        text = escape_to_one_line(line)[:400]
        is_cjk = any("\u2e80" <= char <= "\uffef" for char in text)
        position, ink = (x, y + number * _LINE_HEIGHT), _MUTED if number else color
        ImageDraw.Draw(page).text(position, text, ink, _load_font(is_cjk=is_cjk))


@functools.cache
def _load_font(*, is_cjk: bool) -> ImageFont.FreeTypeFont:
    """Load matplotlib's font, or an installed one for Chinese, Japanese and Korean text."""
    import matplotlib

    for name in _CJK_FONTS if is_cjk else ():
        with contextlib.suppress(OSError):
            return ImageFont.truetype(name, 13)
    return ImageFont.truetype(f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans.ttf", 13)


def save_sheet(image: Image.Image, path: Path, *, option: str) -> None:
    """Write a sheet atomically, as PNG for the suffix .png and as JPEG otherwise.

    Raises: SetupError, which names the command-line `option`, if the file cannot be written.
    """
    buffer = io.BytesIO()
    image.save(buffer, format="PNG" if path.suffix.lower() == ".png" else "JPEG", quality=90)
    write_atomically(path, buffer.getvalue(), option=option)


class ContactSheet:
    """Collect thumbnails and predictions from a stream, then draw the first 200 images.

    The least confident predictions come first, unreadable files last.
    """

    def __init__(self) -> None:
        self._thumbnails: dict[int, Image.Image] = {}
        self._rows: list[PredictionRow] = []
        self._num_files = 0

    def add_image(self, index: int, pixels_HWC: np.ndarray) -> None:
        """Store a thumbnail of the decoded image of row `index`; may be called from any thread."""
        if index < _MAX_TILES:
            self._thumbnails[index] = make_thumbnail(pixels_HWC)

    def add_row(self, row: PredictionRow) -> None:
        """Add the prediction row of the next image; call in the order of the images."""
        self._num_files += 1
        if len(self._rows) < _MAX_TILES:
            self._rows.append(row)

    def draw(self, *, title: str, note: str = "") -> Image.Image:
        """Draw the sheet, with `note` at the end of its summary line. Returns: an RGB image."""
        confidences = [
            row["predictions"][0]["confidence"] if "predictions" in row else 2.0
            for row in self._rows
        ]
        order = sorted(range(len(confidences)), key=confidences.__getitem__)
        facts = [pluralize(self._num_files, "file"), "least confident first"]
        if self._num_files > len(order):
            facts.insert(1, f"showing the first {len(order)}")
        return draw_grid(
            [self._tile(index) for index in order],
            num_columns=min(10, max(4, round((1.6 * len(order)) ** 0.5))),
            title=title,
            facts=[*facts, note] if note else facts,
        )

    def _tile(self, index: int) -> Tile:
        row = self._rows[index]
        name = os.path.basename(row["path"])
        # the end of a long name may tell more than its beginning
        name = name if len(name) <= 22 else f"{name[:10]}…{name[-11:]}"
        if "error" in row:
            error = escape_to_one_line(f"unreadable: {row['error']}")
            return Tile(None, [name, *textwrap.wrap(error, 22)[:8]], ERROR_COLOR)
        # a multi-label model predicts any number of labels
        shown = row.get("labels", row["predictions"][:3])
        lines = [f"{format_probability(top['confidence'])} {top['label']}" for top in shown]
        if len(lines) > _MAX_LABELS:
            lines[_MAX_LABELS:] = [f"and {len(lines) - _MAX_LABELS} more"]
        marks = [mark for mark in ("unknown", "abstained") if row.get(mark)]
        lines = [*marks, *(lines or ["no label"]), name]
        return Tile(self._thumbnails.get(index), lines, _MUTED if marks else _INK)
