"""The look of figures: colours by role, matplotlib's settings, output as PNG and as inline SVG.

Each colour stands for a role. In a PNG it is the light theme's; `to_svg` puts a CSS variable in its
place, and the page says what it is in the light and in the dark.
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
    "SERIES",
    "blank",
    "empty",
    "legend",
    "legible",
    "panels",
    "save_png",
    "style",
    "to_svg",
]

_SVG = "{http://www.w3.org/2000/svg}"
_XLINK = "{http://www.w3.org/1999/xlink}"
# as matplotlib writes it in one piece or, since 3.10, in several
_FONT = re.compile(r"font: ([^;]*?)([\d.]+)px[^;]*")
_FAMILY = re.compile(r"font-family: [^;]*;? ?")
LABEL_LENGTH = 18

# Blue and orange stay apart for every kind of colour vision; so do the series, in this order.
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
SERIES = tuple(f"c{number}" for number in range(1, 9))
_ROLES = {color: f"var(--{role})" for role, color in COLORS.items()}

_DPI = 72  # one point is one pixel of the page
_STYLE: Any = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that a PNG is alike everywhere
    "font.size": 12.5,
    "text.parse_math": False,  # a class may be called "$5"
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
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "finetune",  # the same figure gives the same bytes
    "figure.dpi": _DPI,
}


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Use our settings in place of a matplotlibrc's; do not warn of missing glyphs."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*[Gg]lyph")
        warnings.filterwarnings("ignore", message="(?s).*does not currently support")  # scripts
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def legible(text: str, length: int = LABEL_LENGTH) -> str:
    """One line of printable text of at most `length` characters, for a label in a figure."""
    shown = "".join(
        char if unicodedata.category(char)[0] != "C" or char in "\u200c\u200d" else " "
        for char in str(text).encode("utf-8", "replace").decode()
    )
    shown = " ".join(shown.split())
    return shown if len(shown) <= length else shown[: length - 1].rstrip() + "…"


def blank(width: float, height: float) -> Figure:
    """Make a figure of this size in pixels, without pyplot; axes make room for their labels."""
    layout = ConstrainedLayoutEngine(w_pad=8 / _DPI, h_pad=8 / _DPI)
    figure = Figure(figsize=(width / _DPI, height / _DPI), layout=layout)
    FigureCanvasAgg(figure)
    return figure


def panels(rows: int, columns: int) -> tuple[Figure, list[Axes]]:
    """A figure of 440 x 270 pixels for each of its axes, whose edges all stand in line."""
    width, height, left, right, top, bottom = 440, 270, 60, 12, 38, 50
    figure = Figure(figsize=(columns * width / _DPI, rows * height / _DPI))
    FigureCanvasAgg(figure)
    across, down = width - left - right, height - top - bottom
    figure.subplots_adjust(
        left=left / (columns * width),
        right=1 - right / (columns * width),
        top=1 - top / (rows * height),
        bottom=bottom / (rows * height),
        wspace=(left + right) / across,
        hspace=(top + bottom) / down,
    )
    return figure, list(np.ravel(figure.subplots(rows, columns)))


def empty(axes: Axes, text: str) -> None:
    """Write into the middle of axes why they are empty."""
    axes.text(
        *(0.5, 0.5, text), transform=axes.transAxes, ha="center", va="center", c=COLORS["muted"]
    )


def legend(axes: Axes) -> None:
    """A legend in line with the title, where no curve can be."""
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
    """Write a figure as PNG on white; the same figure gives the same bytes.

    Raises: SetupError if the disk is full or the folder cannot be written.
    """
    stream = io.BytesIO()
    with style():
        figure.savefig(
            stream, format="png", dpi=144, facecolor="white", metadata={"Software": None}
        )
    write_atomically(path, stream.getvalue())


def to_svg(figure: Figure) -> str:
    """Write a figure as an `<svg>` element for the body of a page, named by the figure's label.

    Text stays text in the page's font, colours become CSS variables, the paper is transparent.

    Returns: the element; the same figure gives the same text.
    """
    stream = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with style():
        figure.savefig(stream, format="svg", transparent=True, metadata=nothing)
    root = ET.fromstring(stream.getvalue())
    for child in [child for child in root if child.tag.endswith(("metadata", "defs"))]:
        if child.tag.endswith("metadata") or child.find(f"{_SVG}style") is not None:
            root.remove(child)
    for attribute in ("width", "height", "version"):
        root.attrib.pop(attribute, None)
    root.attrib |= {"role": "img", "stroke-linejoin": "round"}
    named = ET.Element(f"{_SVG}title")
    named.text = str(figure.get_label()) or "figure"
    root.attrib["aria-label"] = named.text
    root.insert(0, named)
    digest = hashlib.sha256(stream.getvalue().encode("utf-8", "replace")).hexdigest()[:8]
    _restyle(root, f"f{digest}-")
    ET.register_namespace("", _SVG.strip("{}"))
    ET.register_namespace("xlink", _XLINK.strip("{}"))
    return ET.tostring(root, encoding="unicode")


def _restyle(root: ET.Element, prefix: str) -> None:
    """Put CSS variables for colours, the page's font, and ids that are the figure's own."""
    used = set()
    for element in root.iter():
        for value in element.attrib.values():
            used |= set(re.findall(r"^#([\w-]+)$|url\(#([\w-]+)\)", value))
    wanted = {one or other for one, other in used}
    for element in root.iter():
        for key, value in list(element.attrib.items()):
            if key == "id":
                if value not in wanted:
                    del element.attrib[key]  # several figures share a page
                    continue
                value = prefix + value
            elif key == f"{_XLINK}href" and value.startswith("#"):
                value = f"#{prefix}{value[1:]}"
            elif key in ("style", "clip-path"):
                value = value.replace("url(#", f"url(#{prefix}")
                value = _FAMILY.sub("", _FONT.sub(_page_font, value))
                value = re.sub(r"#[0-9a-f]{6}", lambda hit: _ROLES.get(hit[0], hit[0]), value)
            element.attrib[key] = value


def _page_font(font: re.Match[str]) -> str:
    """Size and weight; the family is the page's."""
    weight = "; font-weight: 600" if re.search(r"bold|[67]00", font[1]) else ""
    return f"font-size: {font[2]}px{weight}"
