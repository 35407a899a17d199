from __future__ import annotations

import re
import sys
import warnings
import xml.etree.ElementTree as ET
from pathlib import Path

import matplotlib
import pytest
from matplotlib.figure import Figure
from PIL import Image

from finetune.errors import SetupError
from finetune.report.figure_style import (
    COLORS,
    SERIES_COLORS,
    add_legend,
    create_figure,
    create_panels,
    matplotlib_style,
    save_png,
    shorten_label,
    to_svg,
    write_empty_note,
)

SVG = "{http://www.w3.org/2000/svg}"


def draw_figure(text: str = "a title") -> Figure:
    with matplotlib_style():
        figure, (axes,) = create_panels(1, 1)
        axes.plot([0, 1], [0, 1], color=COLORS["train"], marker="o", label="one")
        axes.set_title(text)
        add_legend(axes)
        figure.set_label("A line")
    return figure


class TestColors:
    def test_each_role_has_its_own_hex_color(self) -> None:
        assert len(set(COLORS.values())) == len(COLORS)
        assert all(re.fullmatch("#[0-9a-f]{6}", color) for color in COLORS.values())
        assert set(SERIES_COLORS) <= set(COLORS)

    def test_css_defines_each_color_for_light_and_dark(self, repository: Path) -> None:
        css = (repository / "finetune" / "report" / "templates" / "page.css").read_text(
            encoding="utf-8"
        )
        for role in COLORS:
            assert len(re.findall(rf"--{role}: #", css)) == 2, role


class TestShortenLabel:
    @pytest.mark.parametrize(
        "text, shown",
        [
            ("cat", "cat"),
            ("a\nb\tc\x00d", "a b c d"),
            ("x" * 40, "x" * 17 + "…"),
            ("\ud83d!", "?!"),
            ("\u202eabc", "abc"),
        ],
    )
    def test_label_is_one_printable_line(self, text: str, shown: str) -> None:
        assert shorten_label(text) == shown


class TestStyle:
    def test_restores_rc_params(self) -> None:
        before = dict(matplotlib.rcParams)
        with matplotlib_style():
            assert matplotlib.rcParams["svg.fonttype"] == "none"
        assert dict(matplotlib.rcParams) == before

    def test_ignores_user_rc_params(self) -> None:
        plain = to_svg(draw_figure())
        with matplotlib.rc_context({"axes.facecolor": "red", "font.size": 30, "lines.marker": "x"}):
            assert to_svg(draw_figure()) == plain

    def test_missing_glyphs_and_dollars_cause_no_warning(self, tmp_path: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            figure = draw_figure("$\\frac{1}{ \u732b \u05e9\u05dc\u05d5\u05dd $")
            save_png(figure, tmp_path / "a.png")
            assert "$\\frac{1}{ \u732b" in to_svg(figure)

    def test_pyplot_is_not_imported(self) -> None:
        import subprocess

        code = "import sys, finetune.report.plots; print('matplotlib.pyplot' in sys.modules)"
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert out.stdout.strip() == "False", out.stderr


class TestPng:
    def test_output_is_deterministic_and_has_no_metadata(self, tmp_path: Path) -> None:
        for name in ("a.png", "b.png"):
            save_png(draw_figure(), tmp_path / name)
        assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
        with Image.open(tmp_path / "a.png") as image:
            assert image.size == (880, 540)
            assert not {"Software", "Creation Time", "date"} & set(image.info)

    def test_full_disk_is_a_setup_error(self, tmp_path: Path) -> None:
        import errno
        from unittest.mock import patch

        full = OSError(errno.ENOSPC, "No space left on device")
        with patch.object(Path, "open", side_effect=full), pytest.raises(SetupError):
            save_png(draw_figure(), tmp_path / "a.png")


class TestSvg:
    def test_is_one_labeled_element_with_text(self) -> None:
        svg = to_svg(draw_figure("<b>&"))
        assert svg.startswith("<svg ")
        assert "<?xml" not in svg
        assert "<!" not in svg
        root = ET.fromstring(svg)
        assert root.get("role") == "img"
        assert root.get("aria-label") == "A line"
        assert root[0].tag == f"{SVG}title"
        assert root[0].text == "A line"
        assert "width" not in root.attrib
        texts = {text.text for text in root.iter(f"{SVG}text")}
        assert {"<b>&", "one"} <= texts
        assert "font-family" not in svg
        assert not list(root.iter(f"{SVG}style"))
        assert not list(root.iter(f"{SVG}metadata"))

    def test_colors_are_css_variables(self) -> None:
        svg = to_svg(draw_figure())
        assert "var(--train)" in svg
        assert "var(--ink)" in svg
        assert not re.search(r"#[0-9a-f]{6}", re.sub(r'(href="#|url\(#)[^")]*', "", svg))

    def test_text_that_resembles_css_is_unchanged(self) -> None:
        text = f'style="fill: {COLORS["train"]}" id="x"'
        found = [one.text for one in ET.fromstring(to_svg(draw_figure(text))).iter(f"{SVG}text")]
        assert text in found

    def test_ids_are_unique_to_a_figure_and_all_used(self) -> None:
        one, other = to_svg(draw_figure("one")), to_svg(draw_figure("other"))
        assert to_svg(draw_figure("one")) == one
        ids = [re.findall(r'\bid="([^"]*)"', svg) for svg in (one, other)]
        assert ids[0]
        assert not set(ids[0]) & set(ids[1])
        for svg, names in zip((one, other), ids, strict=True):
            used = set(re.findall(r'(?:href="#|url\(#)([^")]*)', svg))
            assert used == set(names)


class TestPanels:
    def test_panel_axes_are_aligned(self) -> None:
        with matplotlib_style():
            figure, grid = create_panels(2, 2)
        assert tuple(figure.get_size_inches() * 72) == (880, 540)
        boxes = [axes.get_position() for axes in grid]
        assert boxes[0].x0 == boxes[2].x0
        assert boxes[0].y0 == boxes[1].y0
        pixels = [boxes[0].x0 * 880, boxes[1].x0 * 880 - 440]
        assert pixels == pytest.approx([60, 60])

    def test_empty_axes_show_a_note(self) -> None:
        with matplotlib_style():
            figure = create_figure(200, 100)
            write_empty_note(figure.subplots(), "not measured")
        assert "not measured" in to_svg(figure)
