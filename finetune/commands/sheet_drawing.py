"""Draw the parts of contact sheets: text in suitable fonts, thumbnails and cards."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from finetune.files import write_atomically
from finetune.formatting import escape_to_one_line

__all__ = [
    "CARD_BORDER_COLOR",
    "CARD_COLOR",
    "IMAGE_BACKGROUND",
    "MUTED_COLOR",
    "PAGE_COLOR",
    "TEXT_COLOR",
    "THUMBNAIL_PIXELS",
    "Font",
    "FontSet",
    "draw_empty_card",
    "make_thumbnail",
    "save_sheet",
    "truncate_middle",
    "upscale_by_integer",
    "wrap_text",
]

THUMBNAIL_PIXELS = 192  # longer side of a thumbnail; a multiple of 32, 48 and 64
PAGE_COLOR = "#f4f4f5"
CARD_COLOR, CARD_BORDER_COLOR = "#ffffff", "#dcdce0"
IMAGE_BACKGROUND = "#f7f7f8"
TEXT_COLOR, MUTED_COLOR = "#18181b", "#63636b"
_ELLIPSIS = "…"

Font = ImageFont.FreeTypeFont


@dataclass
class FontSet:
    """Matplotlib's default font, with system fonts as a fallback for characters it lacks.

    Args:
        texts: all texts to draw; they determine which fallback fonts are loaded.
    """

    texts: Iterable[str]
    _fallback_fonts: list[tuple[str, set[int]]] = field(default_factory=list)
    _default_characters: set[int] = field(default_factory=set)
    _loaded: dict[tuple[str, int], Font] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._default_characters = _supported_characters(_default_font_path(bold=False))
        missing = {
            ord(char) for text in self.texts for char in escape_to_one_line(text)
        } - self._default_characters
        if missing:
            self._fallback_fonts = _find_fallback_fonts(missing)

    def at_size(self, pixels: int, *, bold: bool = False) -> Callable[[str], Font]:
        """Return a function that maps a text to the font to draw it with."""

        def font_for(text: str) -> Font:
            path = _default_font_path(bold=bold)
            missing = {ord(char) for char in text} - self._default_characters
            if missing and self._fallback_fonts:
                best, covered = max(self._fallback_fonts, key=lambda other: len(other[1] & missing))
                path = best if covered & missing else path
            if (path, pixels) not in self._loaded:
                self._loaded[path, pixels] = ImageFont.truetype(path, pixels)
            return self._loaded[path, pixels]

        return font_for


def _default_font_path(*, bold: bool) -> str:
    import matplotlib

    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return os.path.join(matplotlib.get_data_path(), "fonts", "ttf", name)


def _supported_characters(path: str) -> set[int]:
    from matplotlib.ft2font import FT2Font

    return set(FT2Font(path).get_charmap())


def _find_fallback_fonts(missing: set[int]) -> list[tuple[str, set[int]]]:
    """Return the system fonts that have some of the missing characters, and which they have."""
    from matplotlib.font_manager import findSystemFonts

    fonts = []
    for path in sorted(findSystemFonts()):
        try:
            known = _supported_characters(path) & missing
            if known:
                ImageFont.truetype(path, 14)  # bitmap fonts exist only in fixed sizes
                fonts.append((path, known))
        except (OSError, RuntimeError, ValueError):
            continue  # skip unreadable fonts
    return fonts


def truncate_middle(text: str, font: Callable[[str], Font], width: float) -> str:
    """Cut out the middle of a text that is too wide, so that a file name keeps its suffix."""
    if len(text) > 400:
        text = text[:200] + _ELLIPSIS + text[-200:]
    if font(text).getlength(text) <= width:
        return text
    low, high = 0, len(text) - 1  # number of characters to keep
    while low < high:
        num_kept = (low + high + 1) // 2
        shorter = _drop_middle(text, num_kept)
        low, high = (
            (num_kept, high) if font(text).getlength(shorter) <= width else (low, num_kept - 1)
        )
    return _drop_middle(text, low)


def _drop_middle(text: str, num_kept: int) -> str:
    head = (num_kept + 1) // 2
    return text[:head] + _ELLIPSIS + (text[head - num_kept :] if num_kept > head else "")


def wrap_text(text: str, font: Callable[[str], Font], width: float, *, max_lines: int) -> list[str]:
    """Wrap a text into at most `max_lines` lines; the last one is shortened if it is too wide."""
    words = text.split()
    broken: list[str] = []
    while words and len(broken) < max_lines - 1:
        count = 1
        while count < len(words):
            line = " ".join(words[: count + 1])
            if font(line).getlength(line) > width:
                break
            count += 1
        broken.append(truncate_middle(" ".join(words[:count]), font, width))
        words = words[count:]
    if words and max_lines > 0:
        broken.append(truncate_middle(" ".join(words), font, width))
    return broken


def make_thumbnail(pixels_HWC: np.ndarray, max_pixels: int = THUMBNAIL_PIXELS) -> Image.Image:
    """Return a thumbnail of at most `max_pixels` a side, which shares no memory with the image."""
    # stride first; otherwise each thread would copy up to 48 megapixels
    step = max(1, max(pixels_HWC.shape[:2]) // (4 * max_pixels))
    image = Image.fromarray(np.ascontiguousarray(pixels_HWC[::step, ::step]))
    image.thumbnail((max_pixels, max_pixels), Image.Resampling.LANCZOS)
    return image.copy()


def upscale_by_integer(image: Image.Image, max_pixels: int = THUMBNAIL_PIXELS) -> Image.Image:
    """Scale a small image up by an integer factor, so that its pixels stay visible."""
    factor = max_pixels // max(image.size)
    size = (image.width * factor, image.height * factor)
    return image.resize(size, Image.Resampling.NEAREST) if factor > 1 else image


def draw_empty_card(width: int, height: int) -> Image.Image:
    """Draw an empty card, at 4x resolution and scaled down, to get smooth round corners."""
    scale = 4
    large = Image.new("RGB", (width * scale, height * scale), PAGE_COLOR)
    frame = (0, 0, width * scale - 1, height * scale - 1)
    ImageDraw.Draw(large).rounded_rectangle(frame, 10 * scale, CARD_COLOR, CARD_BORDER_COLOR, scale)
    return large.reduce(scale)


def save_sheet(image: Image.Image, path: Path, *, option: str) -> None:
    """Write a sheet atomically, as PNG for the suffix .png and as JPEG otherwise.

    Args:
        option: the command-line option of `path`, for error messages.
    Raises: SetupError if the file cannot be written.
    """
    image_format = "PNG" if path.suffix.lower() == ".png" else "JPEG"
    buffer = io.BytesIO()
    image.save(buffer, format=image_format, quality=90)  # PNG ignores the quality
    write_atomically(path, buffer.getvalue(), option=option)
