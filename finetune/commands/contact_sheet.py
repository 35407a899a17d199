"""A contact sheet: the pictures in a grid, with what was predicted under each.

The least sure predictions come first, unreadable files last. A picture in a folder that has the
name of a class is of that class: a prediction of another one is marked.
"""

# H W pixels

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from finetune.commands.predict_io import Row, one_line
from finetune.evaluation.intervals import interval
from finetune.files import write_atomically
from finetune.text import confidence, counted, percent_range

__all__ = [
    "GREY",
    "INK",
    "MOUNT",
    "PAGE",
    "ContactSheet",
    "Font",
    "Fonts",
    "card",
    "enlarged",
    "fitted",
    "save_sheet",
    "small_copy",
    "wrapped",
]

LIMIT = 200  # tiles: a picture that an image viewer still opens
_BOX = 192  # side of the square that a picture is fitted into, px: 6 x 32, 4 x 48, 3 x 64
_PAD, _GAP, _MARGIN = 12, 16, 32
_CARD = _BOX + 2 * _PAD
_LINE = 19
_RANKS = 3  # predictions under a picture
_LABELS = 6  # labels under a picture, where it may have several
_MIN_COLUMNS, _MAX_COLUMNS = 3, 10

PAGE, _WHITE, _EDGE, MOUNT = "#f4f4f5", "#ffffff", "#dcdce0", "#f7f7f8"
INK, GREY = "#18181b", "#63636b"
_BAR, _TRACK = "#2563eb", "#e4e4e7"
_RED, _PINK, _ROSE = "#b42318", "#fdf0ef", "#f3c7c3"

Font = ImageFont.FreeTypeFont
_ELLIPSIS = "…"


class ContactSheet:
    """Collects small pictures and rows while predictions stream by, then draws them.

    What comes after 200 of them is counted and left out.

    Args:
        class_names: of the model; a folder called like one of them holds its pictures.
    """

    def __init__(self, class_names: Iterable[str] = ()) -> None:
        self._class_names = frozenset(class_names)
        self._labelled = self._correct = 0
        self._pictures: dict[int, Image.Image] = {}
        self._rows: list[Row] = []
        self._seen = 0
        self._unreadable = 0

    def look(self, place: int, pixels_HWC: np.ndarray) -> None:
        """Keep a small copy of a decoded image, of row `place`; called from any thread."""
        if place < LIMIT:
            self._pictures[place] = small_copy(pixels_HWC)

    def add(self, row: Row) -> None:
        """Take the next row, in order."""
        self._seen += 1
        self._unreadable += "error" in row
        truth = self._truth(row)
        if truth and "error" not in row:
            self._labelled += 1
            self._correct += row["predictions"][0]["label"] == truth
        if len(self._rows) < LIMIT:
            self._rows.append(row)

    def _truth(self, row: Row) -> str:
        """The class that the picture's folder names; empty if it names none."""
        folder = os.path.basename(os.path.dirname(row["path"]))
        return folder if folder in self._class_names else ""

    def draw(self, *, title: str, remark: str = "") -> Image.Image:
        """Draw the sheet, with a remark behind the counts. Returns: an RGB image."""
        names = _short_names([row["path"] for row in self._rows])
        columns = round((1.6 * len(self._rows)) ** 0.5)
        columns = min(_MAX_COLUMNS, max(_MIN_COLUMNS, columns))
        width = 2 * _MARGIN + columns * (_CARD + _GAP) - _GAP
        truths = [self._truth(row) for row in self._rows]
        fonts = Fonts([title, remark, *names, *truths, *_texts(self._rows)])
        small = fonts.size(15)
        facts = wrapped(self._facts(remark), small, width - 2 * _MARGIN, lines=4)
        top = _MARGIN + 44 + 22 * len(facts) + 14

        ranks = max((len(_below(row)) for row in self._rows), default=0)
        # one line more for the bar or the cause, one for the name
        height = _BOX + 2 * _PAD + (max(ranks, 1) + 1) * _LINE + 24
        rows = -(-len(self._rows) // columns)
        page = Image.new("RGB", (width, top + rows * (height + _GAP) + _MARGIN - _GAP), PAGE)
        draw = ImageDraw.Draw(page)
        bold = fonts.size(24, bold=True)
        heading = fitted(one_line(title), bold, width - 2 * _MARGIN)
        draw.text((_MARGIN, _MARGIN - 6), heading, INK, bold(heading))
        for number, line in enumerate(facts):
            draw.text((_MARGIN, _MARGIN + 38 + 22 * number), line, GREY, small(line))
        paper = card(_CARD, height)
        order = sorted(range(len(self._rows)), key=lambda place: _sureness(self._rows[place]))
        for place, source in enumerate(order):
            row, name = self._rows[source], names[source]
            x = _MARGIN + place % columns * (_CARD + _GAP)
            y = top + place // columns * (height + _GAP)
            page.paste(paper, (x, y))
            tile = _Tile(page, draw, fonts, x + _PAD, y + _PAD, y + height - _PAD)
            tile.draw(row, self._pictures.get(source), name, truths[source])
        return page

    def _facts(self, remark: str) -> str:
        facts = [counted(self._seen, "file")]
        if self._unreadable:
            facts.append(f"{self._unreadable} unreadable")
        if self._labelled:
            share = f"{self._correct} of {self._labelled} as their folder says"
            if ends := interval(self._correct / self._labelled, self._labelled):
                share += f" (95 % interval {percent_range(*ends)})"
            facts.append(share)
        if self._seen > len(self._rows):
            facts.append(f"the first {len(self._rows)} are shown")
        if len(self._rows) > 1:
            facts.append("least sure first")
        return " · ".join(facts + [one_line(remark)] * bool(remark))


@dataclass(frozen=True)
class _Tile:
    """One card of the sheet: where its content begins, and where it ends."""

    page: Image.Image
    pen: ImageDraw.ImageDraw
    fonts: Fonts
    left: int
    top: int
    bottom: int

    def draw(self, row: Row, picture: Image.Image | None, name: str, truth: str = "") -> None:
        """Put the picture and the text of a row into the card.

        Args:
            truth: the picture's class; empty where it is not known.
        """
        frame = (self.left, self.top, self.left + _BOX - 1, self.top + _BOX - 1)
        if picture is None or "error" in row:
            self._mark_unreadable(row.get("error", ""))
        else:
            picture = enlarged(picture)
            self.pen.rectangle(frame, fill=MOUNT)
            x = self.left + (_BOX - picture.width) // 2
            self.page.paste(picture, (x, self.top + (_BOX - picture.height) // 2))
            self._predictions(_below(row))
        wrong = bool(truth) and "error" not in row and row["predictions"][0]["label"] != truth
        if wrong:
            self.pen.rectangle(frame, outline=_RED, width=3)
        font = self.fonts.size(12, bold=wrong)
        text = fitted(one_line(f"is {truth}: {name}" if wrong else name), font, _BOX)
        ink = _RED if wrong else GREY
        self.pen.text((self.left, self.bottom), text, ink, font(text), anchor="ld")

    def _predictions(self, predictions: Sequence[Row]) -> None:
        y = self.top + _BOX + 10
        for rank, one in enumerate(predictions):
            font = self.fonts.size(14 if rank == 0 else 13, bold=rank == 0)
            colour = INK if rank == 0 else GREY
            sure = one["confidence"]
            share = "" if sure is None else confidence(sure)
            room = _BOX - font(share).getlength(share) - 10
            label = fitted(one_line(one["label"]), font, room)
            self.pen.text((self.left, y + 14), label, colour, font(label), anchor="ls")
            right = self.left + _BOX
            self.pen.text((right, y + 14), share, colour, font(share), anchor="rs")
            y += _LINE
            if rank == 0:
                self._bar(y + 2, sure or 0.0)
                y += 10

    def _bar(self, y: int, confidence: float) -> None:
        self.pen.rectangle((self.left, y, self.left + _BOX - 1, y + 3), fill=_TRACK)
        length = round(confidence * _BOX)
        if length:
            self.pen.rectangle((self.left, y, self.left + length - 1, y + 3), fill=_BAR)

    def _mark_unreadable(self, cause: str) -> None:
        left, top, end = self.left, self.top, _BOX - 1
        self.pen.rectangle((left, top, left + end, top + end), fill=_PINK, outline=_ROSE)
        self.pen.line((left, top, left + end, top + end), fill=_ROSE)
        self.pen.line((left, top + end, left + end, top), fill=_ROSE)
        font = self.fonts.size(14, bold=True)
        middle, word = (left + _BOX // 2, top + _BOX // 2), "unreadable"
        box = self.pen.textbbox(middle, word, font(word), anchor="mm")
        self.pen.rectangle((box[0] - 8, box[1] - 6, box[2] + 8, box[3] + 6), fill=_PINK)
        self.pen.text(middle, word, _RED, font(word), anchor="mm")
        small = self.fonts.size(13)
        y = self.top + _BOX + 10
        room = (self.bottom - 18 - y) // _LINE
        for line in wrapped(one_line(cause), small, _BOX, lines=room):
            self.pen.text((left, y + 14), line, _RED, small(line), anchor="ls")
            y += _LINE


@dataclass
class Fonts:
    """Matplotlib's font, and for characters that it lacks the system's that have them.

    Args:
        texts: all that will be written.
    """

    texts: Iterable[str]
    _others: list[tuple[str, set[int]]] = field(default_factory=list)
    _known: set[int] = field(default_factory=set)
    _loaded: dict[tuple[str, int], Font] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._known = _characters(_own_font(bold=False))
        missing = {ord(char) for text in self.texts for char in one_line(text)} - self._known
        if missing:
            self._others = _fonts_with(missing)

    def size(self, pixels: int, *, bold: bool = False) -> Callable[[str], Font]:
        """Returns: from a text, the font to write it in."""

        def font_for(text: str) -> Font:
            path = _own_font(bold=bold)
            missing = {ord(char) for char in text} - self._known
            if missing and self._others:
                best, covered = max(self._others, key=lambda other: len(other[1] & missing))
                path = best if covered & missing else path
            if (path, pixels) not in self._loaded:
                self._loaded[path, pixels] = ImageFont.truetype(path, pixels)
            return self._loaded[path, pixels]

        return font_for


def _own_font(*, bold: bool) -> str:
    import matplotlib

    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return os.path.join(matplotlib.get_data_path(), "fonts", "ttf", name)


def _characters(path: str) -> set[int]:
    from matplotlib.ft2font import FT2Font

    return set(FT2Font(path).get_charmap())


def _fonts_with(missing: set[int]) -> list[tuple[str, set[int]]]:
    """The system's fonts that have some of these characters, and which of them."""
    from matplotlib.font_manager import findSystemFonts

    fonts = []
    for path in sorted(findSystemFonts()):
        try:
            known = _characters(path) & missing
            if known:
                ImageFont.truetype(path, 14)  # fonts of pictures come in sizes of their own
                fonts.append((path, known))
        except (OSError, RuntimeError, ValueError):
            continue  # a font that cannot be read is no font
    return fonts


def _sureness(row: Row) -> float:
    """The confidence of the prediction; of a file that was not read more than any."""
    return float(row["predictions"][0]["confidence"]) if row.get("predictions") else 2.0


def _below(row: Row) -> list[Row]:
    """Of a row what stands under its picture: its best predictions, or all its labels."""
    best: list[Row] = row.get("predictions", [])
    if (labels := row.get("labels")) is None:
        return best[:_RANKS]
    if len(labels) > _LABELS:
        more = {"label": f"and {len(labels) - _LABELS + 1} more", "confidence": None}
        return [*labels[: _LABELS - 1], more]
    return labels or [{"label": "no label", "confidence": None}]


def _texts(rows: Iterable[Row]) -> Iterable[str]:
    for row in rows:
        yield row.get("error", "")
        yield from (one["label"] for one in _below(row))


def _short_names(paths: Sequence[str]) -> list[str]:
    """Paths without the folders that all of them have in common."""
    try:
        common = os.path.commonpath([os.path.dirname(path) for path in paths])
    except ValueError:  # none at all, or some from the root and some not
        return list(paths)
    return [os.path.relpath(path, common) if common else path for path in paths]


def fitted(text: str, font: Callable[[str], Font], width: float) -> str:
    """Text with its middle left out where it is too wide, so that a file keeps its suffix."""
    if len(text) > 400:
        text = text[:200] + _ELLIPSIS + text[-200:]
    if font(text).getlength(text) <= width:
        return text
    low, high = 0, len(text) - 1  # characters that may stay
    while low < high:
        kept = (low + high + 1) // 2
        shorter = _without_middle(text, kept)
        low, high = (kept, high) if font(text).getlength(shorter) <= width else (low, kept - 1)
    return _without_middle(text, low)


def _without_middle(text: str, kept: int) -> str:
    head = (kept + 1) // 2
    return text[:head] + _ELLIPSIS + (text[head - kept :] if kept > head else "")


def wrapped(text: str, font: Callable[[str], Font], width: float, *, lines: int) -> list[str]:
    """Text broken between words into at most so many lines; the last is cut where it must be."""
    words = text.split()
    broken: list[str] = []
    while words and len(broken) < lines - 1:
        count = 1
        while count < len(words):
            line = " ".join(words[: count + 1])
            if font(line).getlength(line) > width:
                break
            count += 1
        broken.append(fitted(" ".join(words[:count]), font, width))
        words = words[count:]
    if words and lines > 0:
        broken.append(fitted(" ".join(words), font, width))
    return broken


def small_copy(pixels_HWC: np.ndarray, box: int = _BOX) -> Image.Image:
    """A copy that fits into a square of so many pixels, and holds on to nothing of the original."""
    # every nth pixel first: a copy of 48 megapixels for each thread would be too much
    step = max(1, max(pixels_HWC.shape[:2]) // (4 * box))
    image = Image.fromarray(np.ascontiguousarray(pixels_HWC[::step, ::step]))
    image.thumbnail((box, box), Image.Resampling.LANCZOS)
    return image.copy()


def enlarged(picture: Image.Image, box: int = _BOX) -> Image.Image:
    """Small pictures by a whole factor: their pixels are what the network saw."""
    factor = box // max(picture.size)
    size = (picture.width * factor, picture.height * factor)
    return picture.resize(size, Image.Resampling.NEAREST) if factor > 1 else picture


def card(width: int, height: int) -> Image.Image:
    """An empty card with round corners, drawn large and reduced so that they are smooth."""
    scale = 4
    drawn = Image.new("RGB", (width * scale, height * scale), PAGE)
    frame = (0, 0, width * scale - 1, height * scale - 1)
    ImageDraw.Draw(drawn).rounded_rectangle(frame, 10 * scale, _WHITE, _EDGE, scale)
    return drawn.reduce(scale)


def save_sheet(image: Image.Image, path: Path, *, option: str) -> None:
    """Replace a file by a sheet in one step, as a JPEG where its name says so and else as a PNG.

    Raises: SetupError naming the option, if it cannot be written.
    """
    kind = "PNG" if path.suffix.lower() == ".png" else "JPEG"
    content = io.BytesIO()
    image.save(content, format=kind, quality=90)  # a PNG has none
    write_atomically(path, content.getvalue(), option=option)
