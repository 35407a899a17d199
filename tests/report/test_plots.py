from __future__ import annotations

import math
import warnings
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from report_runs import HOSTILE_NAMES, calibration_bins, metric_lines

from finetune.evaluation.confusion import ConfusionMatrix
from finetune.report.figure_style import COLORS, save_png, to_svg
from finetune.report.plots import (
    plot_confusion_matrix,
    plot_curves,
    plot_reliability_diagram,
    plot_run_comparison,
)

SVG = "{http://www.w3.org/2000/svg}"
EMPTY_BIN = {"low": 0, "high": 1, "count": 0, "accuracy": None, "confidence": None}


def svg_texts(figure: Figure) -> list[str]:
    root = ET.fromstring(to_svg(figure))
    return [text.text or "" for text in root.iter(f"{SVG}text")]


def plotted_lines(figure: Figure, axes: int = 0) -> dict[str, np.ndarray]:
    return {
        str(line.get_label()): np.asarray(line.get_xydata(), dtype=float)
        for line in figure.axes[axes].lines
        if len(np.asarray(line.get_xdata()))
    }


class TestCurves:
    def test_plots_logged_metrics(self) -> None:
        figure = plot_curves(metric_lines(), {"best_step": 20}, steps_per_epoch=20.2)
        shown = plotted_lines(figure)
        assert shown["train"][:, 0].tolist() == [10, 20, 30, 40]
        assert shown["validation"][:, 0].tolist() == [20, 40]
        assert shown["train"][:, 1] == pytest.approx([1.9, 1.5, 1.1, 0.7])
        found = svg_texts(figure)
        for title in ("Loss", "Top-1 accuracy", "Learning rate", "Images per second"):
            assert title in found
        assert "step (an epoch has 20)" in found
        assert all(axes.get_xlim()[0] == 0 for axes in figure.axes)
        assert all(axes.get_ylim()[0] == 0 for axes in figure.axes[2:])
        best_step_lines = [
            line for line in figure.axes[0].lines if list(line.get_xdata()) == [20, 20]
        ]
        assert len(best_step_lines) == 1
        assert "kept" in found

    def test_legend_omits_missing_validation_and_best_step(self) -> None:
        found = svg_texts(plot_curves(metric_lines(validate=False), {}))
        assert "train" in found
        assert "validation" not in found
        assert "kept" not in found

    def test_skips_missing_and_non_finite_values(self) -> None:
        log = metric_lines(validate=False)
        log[0]["loss"] = None
        log[1]["loss"] = math.nan
        log[2]["loss"] = math.inf
        log.append({"split": "train", "step": 50, "loss": 0.5})
        del log[3]["top1"]
        figure = plot_curves(log, {"best_step": None})
        assert plotted_lines(figure)["train"].tolist() == [[40, pytest.approx(0.7)], [50, 0.5]]
        assert to_svg(figure)

    def test_empty_log(self) -> None:
        assert svg_texts(plot_curves([], {})).count("not measured") == 4

    def test_last_logged_value_of_a_step_wins(self) -> None:
        steps = ((10, 9.0), (20, 2.0), (10, 1.0))
        log = [{"split": "train", "step": step, "loss": value} for step, value in steps]
        assert plotted_lines(plot_curves(log, {}))["train"].tolist() == [[10, 1.0], [20, 2.0]]

    def test_single_point_is_too_short_to_plot(self) -> None:
        figure = plot_curves(metric_lines(steps=10), {"best_step": 10})
        assert "".join(svg_texts(figure)).count("too short to plot") == 4
        assert plotted_lines(figure) == {}
        named = [("one", metric_lines(steps=10)), ("other", metric_lines(steps=10))]
        figure = plot_run_comparison(named, key="loss", split="train")
        assert "".join(svg_texts(figure)).count("too short to plot") == 1
        assert plotted_lines(figure) == {}
        assert "not measured" in svg_texts(plot_run_comparison(named, key="loss", split="val"))

    def test_long_run_is_downsampled(self) -> None:
        log = [{"split": "train", "step": step, "loss": 2.0} for step in range(1, 50_001)]
        figure = plot_curves(log, {}, keys=["loss"])
        assert len(plotted_lines(figure)["train"]) == 600
        assert plotted_lines(figure)["train"][:, 1].tolist() == [2.0] * 600
        assert len(to_svg(figure)) < 60_000


class TestRunComparison:
    def test_runs_with_the_same_name_share_a_color(self) -> None:
        named = [
            ("one", metric_lines()),
            ("one", metric_lines()),
            ("other", metric_lines(steps=30)),
        ]
        figure = plot_run_comparison(named, key="loss", split="train")
        colors = [line.get_color() for line in figure.axes[0].lines]
        assert colors[0] == colors[1] == COLORS["c1"]
        assert colors[2] == COLORS["c2"]
        assert "Loss, training" in svg_texts(figure)

    def test_names_beyond_the_palette_differ_in_line_style(self) -> None:
        figure = plot_run_comparison([(f"run {n}", metric_lines()) for n in range(12)])
        styles = {(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines}
        assert len(styles) == 12

    def test_missing_metric_is_shown_as_not_measured(self) -> None:
        assert "not measured" in svg_texts(
            plot_run_comparison([("a", metric_lines(validate=False))])
        )


class TestConfusionMatrix:
    def test_cells_show_counts_and_row_shares(self) -> None:
        matrix = ConfusionMatrix.from_dense([[8, 2], [0, 0]])
        figure = plot_confusion_matrix(matrix, ["cat", "dog"])
        found = svg_texts(figure)
        assert {"8", "2", "cat", "dog", "predicted", "true class"} <= set(found)
        assert "0" not in found
        cells = [patch for patch in figure.axes[0].patches if isinstance(patch, Rectangle)]
        alphas = [cell.get_alpha() for cell in cells]
        # a class without images gives an empty row instead of a division by zero
        assert alphas == pytest.approx([0.05 + 0.9 * 0.8, 0.05 + 0.9 * 0.2, 0.05, 0.05])

    def test_hostile_class_names_stay_plain_text(self, tmp_path: Path) -> None:
        matrix = ConfusionMatrix.from_dense((np.eye(10, dtype=int) * 5).tolist())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            figure = plot_confusion_matrix(matrix, HOSTILE_NAMES)
            svg = to_svg(figure)
            save_png(figure, tmp_path / "a.png")
        found = svg_texts(figure)
        assert "<script>" not in svg
        assert "$5 and $6" in found
        assert "<b>bold</b>" in found
        assert "line break and tab" in found
        assert HOSTILE_NAMES[5] in found
        assert all(len(text) <= 18 for text in found)

    def test_many_classes_become_an_image_with_few_labels(self) -> None:
        matrix = ConfusionMatrix.from_dense(np.eye(60, dtype=int).tolist())
        figure = plot_confusion_matrix(matrix, [f"class {n}" for n in range(60)])
        assert len(figure.axes[0].images) == 1
        found = svg_texts(figure)
        assert "class 0" in found
        assert "class 1" not in found
        assert len(found) < 60

    @pytest.mark.parametrize("num_classes", [401, 1000])
    def test_single_error_stays_visible_when_downsampled(self, num_classes: int) -> None:
        counts = np.eye(num_classes, dtype=int)
        counts[7] = 0
        counts[7, 390] = 1
        matrix = ConfusionMatrix.from_dense(counts.tolist())
        figure = plot_confusion_matrix(matrix, [str(n) for n in range(num_classes)])
        rgba = np.asarray(figure.axes[0].images[0].get_array())
        block = math.ceil(num_classes / 400)
        assert rgba.shape[0] == math.ceil(num_classes / block)
        assert rgba[7 // block, 390 // block, 3] == pytest.approx(1.0)
        assert len(to_svg(figure)) < 400_000

    def test_single_class(self) -> None:
        matrix = ConfusionMatrix.from_dense([[3]])
        assert "3" in svg_texts(plot_confusion_matrix(matrix, ["only"]))


class TestReliabilityDiagram:
    def test_bars_show_accuracy_gap_and_count(self) -> None:
        figure = plot_reliability_diagram(calibration_bins(0.05))
        upper, lower = figure.axes
        heights = [bar.get_height() for bar in upper.patches if isinstance(bar, Rectangle)]
        assert max(heights) == pytest.approx(14.5 / 15 - 0.05)
        gaps = [bar.get_height() for bar in upper.patches if bar.get_alpha() == 0.45]
        assert [gap for gap in gaps if gap] == pytest.approx([0.05] * 12)
        counts = [bar.get_height() for bar in lower.patches if isinstance(bar, Rectangle)]
        assert counts == [10 * n for n in range(3, 15)]
        assert "Calibration" in svg_texts(figure)

    def test_overconfident_and_underconfident_bins_differ_in_color(self) -> None:
        def colors(shift: float) -> set[tuple[float, ...]]:
            patches = plot_reliability_diagram(calibration_bins(shift)).axes[0].patches
            return {
                tuple(bar.get_facecolor())
                for bar in patches
                if bar.get_alpha() and bar.get_height()
            }

        assert len(colors(0.05)) == len(colors(-0.02)) == 1
        assert colors(0.05) != colors(-0.02)

    def test_before_and_after_temperature_scaling(self) -> None:
        figure = plot_reliability_diagram(calibration_bins(0.1), calibration_bins(0.0))
        assert len(figure.axes) == 4
        found = svg_texts(figure)
        assert "Before temperature scaling" in found
        assert "After temperature scaling" in found

    @pytest.mark.parametrize("empty", [[], [EMPTY_BIN]])
    def test_empty_bins_are_shown_as_not_measured(
        self, empty: list[dict[str, float | None]]
    ) -> None:
        assert "not measured" in svg_texts(plot_reliability_diagram(empty))
