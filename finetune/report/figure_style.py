"""Style of plots: colors by role, matplotlib settings, and output as PNG or inline SVG.

Each color has a role, such as "train". PNGs use the colors of the light theme. `to_svg` replaces
each color by a CSS variable, which the page defines for its light and dark theme.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import unicodedata
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from finetune.files import write_atomically

__all__ = [
    "COLORS",
    "SERIES_COLORS",
    "add_legend",
    "create_figure",
    "create_panels",
    "matplotlib_style",
    "save_png",
    "shorten_label",
    "to_svg",
    "write_empty_note",
]

_SVG = "{http://www.w3.org/2000/svg}"
_XLINK = "{http://www.w3.org/1999/xlink}"
# matplotlib < 3.10 writes a single `font` property, later versions several properties
_FONT = re.compile(r"font: ([^;]*?)([\d.]+)px[^;]*")
_FAMILY = re.compile(r"font-family: [^;]*;? ?")
MAX_LABEL_LENGTH = 18

# Blue and orange, and neighboring series colors, are distinguishable with color blindness.
COLORS = {
    "ink": "#1d232b",
    "muted": "#5c6774",
    "hairline": "#dde2e8",
    "train": "#2264b0",
    "val": "#c2570b",
    "lr": "#158060",
    "speed": "#7b4fa0",
    "gap": "#c4570c",
    "fill": "#174c8f",
    "on-fill": "#fffffe",
    "c1": "#2264b2",
    "c2": "#c2570d",
    "c3": "#168061",
    "c4": "#a03a84",
    "c5": "#8a6d00",
    "c6": "#1a84a6",
    "c7": "#6a4fc0",
    "c8": "#5c6775",
}
SERIES_COLORS = tuple(f"c{number}" for number in range(1, 9))
_CSS_VARIABLES = {color: f"var(--{role})" for role, color in COLORS.items()}

_DPI = 72  # so that one point is one pixel of the page
_RC_PARAMS: Any = {
    "font.family": "DejaVu Sans",  # ships with matplotlib, so a PNG is the same everywhere
    "font.size": 12.5,
    "text.parse_math": False,  # a class name may be "$5"
    "text.color": COLORS["ink"],
    "axes.edgecolor": COLORS["hairline"],
    "axes.labelcolor": COLORS["muted"],
    "axes.titlelocation": "left",
    "axes.titlesize": 13.5,
    "axes.titleweight": "bold",
    "axes.titlepad": 10,
    "axes.labelsize": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.formatter.use_mathtext": False,
    "grid.color": COLORS["hairline"],
    "grid.linewidth": 0.8,
    "xtick.color": COLORS["hairline"],
    "ytick.color": COLORS["hairline"],
    "xtick.labelcolor": COLORS["muted"],
    "ytick.labelcolor": COLORS["muted"],
    "xtick.labelsize": 11.5,
    "ytick.labelsize": 11.5,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 11.5,
    "legend.labelcolor": COLORS["muted"],
    "lines.linewidth": 1.7,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",  # keep text as <text>, not as paths
    "svg.hashsalt": "finetune",  # fixed, so that ids are deterministic
    "figure.dpi": _DPI,
}


@contextlib.contextmanager
def matplotlib_style() -> Iterator[None]:
    """Use our rcParams instead of the user's matplotlibrc; ignore warnings about missing glyphs."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*[Gg]lyph")
        warnings.filterwarnings("ignore", message="(?s).*does not currently support")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC_PARAMS)
        yield


def shorten_label(text: str, max_length: int = MAX_LABEL_LENGTH) -> str:
    """Reduce a text to one printable line of at most `max_length` characters, for a plot label."""
    shown = "".join(
        char if unicodedata.category(char)[0] != "C" or char in "\u200c\u200d" else " "
        for char in str(text).encode("utf-8", "replace").decode()
    )
    shown = " ".join(shown.split())
    return shown if len(shown) <= max_length else shown[: max_length - 1].rstrip() + "…"


def create_figure(width: float, height: float) -> Figure:
    """Create a figure without pyplot, with width and height in pixels and a constrained layout."""
    layout = ConstrainedLayoutEngine(w_pad=8 / _DPI, h_pad=8 / _DPI)
    figure = Figure(figsize=(width / _DPI, height / _DPI), layout=layout)
    FigureCanvasAgg(figure)
    return figure


def create_panels(num_rows: int, num_columns: int) -> tuple[Figure, list[Axes]]:
    """Create a figure with aligned axes, 440 x 270 pixels each."""
    width, height, left, right, top, bottom = 440, 270, 60, 12, 38, 50
    figure = Figure(figsize=(num_columns * width / _DPI, num_rows * height / _DPI))
    FigureCanvasAgg(figure)
    across, down = width - left - right, height - top - bottom
    figure.subplots_adjust(
        left=left / (num_columns * width),
        right=1 - right / (num_columns * width),
        top=1 - top / (num_rows * height),
        bottom=bottom / (num_rows * height),
        wspace=(left + right) / across,
        hspace=(top + bottom) / down,
    )
    return figure, list(np.ravel(figure.subplots(num_rows, num_columns)))


def write_empty_note(axes: Axes, text: str) -> None:
    """Write into the middle of empty axes why they are empty."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", c=COLORS["muted"])


def add_legend(axes: Axes) -> None:
    """Add a legend next to the title, where it covers no curve."""
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=3,
        borderaxespad=0.6,
        borderpad=0,
        handlelength=1.3,
        columnspacing=1.0,
        handletextpad=0.5,
    )


def save_png(figure: Figure, path: Path) -> None:
    """Write a figure as PNG with a white background; the bytes are deterministic.

    Raises: SetupError if the disk is full or the folder cannot be written.
    """
    stream = io.BytesIO()
    with matplotlib_style():
        figure.savefig(
            stream, format="png", dpi=144, facecolor="white", metadata={"Software": None}
        )
    write_atomically(path, stream.getvalue())


def to_svg(figure: Figure) -> str:
    """Render a figure as an inline `<svg>` element for an HTML page.

    Text stays text, in the font of the page; colors become CSS variables; the background is
    transparent; the label of the figure becomes the `<title>`.

    Returns: the element as text, which is deterministic.
    """
    stream = io.StringIO()
    no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib_style():
        figure.savefig(stream, format="svg", transparent=True, metadata=no_metadata)
    root = ET.fromstring(stream.getvalue())
    for child in [child for child in root if child.tag.endswith(("metadata", "defs"))]:
        if child.tag.endswith("metadata") or child.find(f"{_SVG}style") is not None:
            root.remove(child)
    for attribute in ("width", "height", "version"):
        root.attrib.pop(attribute, None)
    root.attrib |= {"role": "img", "stroke-linejoin": "round"}
    title = ET.Element(f"{_SVG}title")
    title.text = str(figure.get_label()) or "figure"
    root.attrib["aria-label"] = title.text
    root.insert(0, title)
    digest = hashlib.sha256(stream.getvalue().encode("utf-8", "replace")).hexdigest()[:8]
    _apply_page_style(root, f"f{digest}-")
    ET.register_namespace("", _SVG.strip("{}"))
    ET.register_namespace("xlink", _XLINK.strip("{}"))
    return ET.tostring(root, encoding="unicode")


def _apply_page_style(root: ET.Element, prefix: str) -> None:
    """Replace colors by CSS variables, use the page's font, and add `prefix` to all ids."""
    referenced_ids = {
        name
        for element in root.iter()
        for value in element.attrib.values()
        for match in re.findall(r"^#([\w-]+)$|url\(#([\w-]+)\)", value)
        for name in match
    }
    for element in root.iter():
        for key, value in list(element.attrib.items()):
            if key == "id":
                if value not in referenced_ids:
                    del element.attrib[key]  # several figures share a page
                    continue
                value = prefix + value
            elif key == f"{_XLINK}href" and value.startswith("#"):
                value = f"#{prefix}{value[1:]}"
            elif key in ("style", "clip-path"):
                value = value.replace("url(#", f"url(#{prefix}")
                value = _FAMILY.sub("", _FONT.sub(_page_font, value))
                value = re.sub(
                    r"#[0-9a-f]{6}", lambda hit: _CSS_VARIABLES.get(hit[0], hit[0]), value
                )
            element.attrib[key] = value


def _page_font(font: re.Match[str]) -> str:
    """Keep size and weight of a CSS font, and drop its family, so the page's font is used."""
    weight = "; font-weight: 600" if re.search(r"bold|[67]00", font[1]) else ""
    return f"font-size: {font[2]}px{weight}"
