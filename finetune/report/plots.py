"""Plots of a run: curves, confusion matrix and reliability diagram, without pyplot."""

# K classes

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from finetune.evaluation.claims import as_finite_number, primary_metric
from finetune.evaluation.confusion import MAX_DENSE_CLASSES, ConfusionMatrix, parse_confusion_matrix
from finetune.report.figure_style import (
    COLORS,
    SERIES_COLORS,
    add_legend,
    create_figure,
    create_panels,
    matplotlib_style,
    shorten_label,
    write_empty_note,
)

__all__ = [
    "MAX_CLASSES_WITH_COUNTS",
    "curve_keys",
    "plot_confusion_matrix",
    "plot_curves",
    "plot_learning_curve",
    "plot_metrics",
    "plot_reliability_diagram",
    "plot_run_comparison",
]

_PERCENT_FORMATTER = FuncFormatter(lambda share, _: f"{100 * share:g} %")
_HEATMAP_COLOR = "#3b82d0"  # visible on white and black; CSS cannot recolor a raster image
_LINE_STYLES = ("-", "--", ":", "-.")  # for more series than colors
_PANELS = {  # key in metrics.jsonl: (title, color role of the training curve)
    "loss": ("Loss", "train"),
    "top1": ("Top-1 accuracy", "train"),
    "map": ("Mean average precision", "train"),
    "lr": ("Learning rate", "lr"),
    "images_per_second": ("Images per second", "speed"),
}
_EVALUATED_METRICS = ("loss", "top1", "map")
_TOO_SHORT_TEXT = "too short to plot: one point"
MAX_CLASSES_WITH_COUNTS = 20  # with more classes, counts in the cells would be unreadable
_MAX_CLASS_LABELS = 25
_MAX_HEATMAP_CELLS = 400  # per side of the heatmap
_MAX_POINTS = 600  # per curve; longer curves are averaged


def plot_curves(
    history: Sequence[Mapping[str, Any]],
    results: Mapping[str, Any],
    *,
    keys: Sequence[str] | None = None,
    steps_per_epoch: float | None = None,
) -> Figure:
    """Plot loss, accuracy, learning rate and throughput over the steps of a run.

    Args:
        history: the lines of metrics.jsonl; metrics may be missing or not finite.
        results: the content of results.json, to mark "best_step"; may be empty.
        keys: the curves to plot, from `curve_keys`; None plots all.
        steps_per_epoch: optimizer steps per epoch, for the axis label; None if unknown.
    """
    keys = curve_keys(history) if keys is None else keys
    with matplotlib_style():
        num_columns = min(2, len(keys))
        num_rows = math.ceil(len(keys) / num_columns)
        figure, all_axes = create_panels(num_rows, num_columns)
        for axes, key in zip(all_axes, keys, strict=False):
            _plot_panel(axes, history, key, results.get("best_step"), steps_per_epoch)
        for axes in all_axes[len(keys) :]:
            axes.set_visible(False)
        titles = ", ".join(_PANELS[key][0].lower() for key in keys)
        last_step = max((line["step"] for line in history), default=0)
        figure.set_label(f"{titles} over {last_step} steps".capitalize())
    return figure


def curve_keys(history: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the metrics to plot as curves, with "top1" or, for multi-label, "map"."""
    metric = primary_metric({key for line in history for key in line})
    return ("loss", metric, "lr", "images_per_second")


def _plot_panel(
    axes: Axes,
    history: Sequence[Mapping[str, Any]],
    key: str,
    best_step: int | None,
    steps_per_epoch: float | None,
) -> None:
    title, color = _PANELS[key]
    steps, values = _metric_series(history, "train", key)
    val_points = _metric_series(history, "val", key) if key in _EVALUATED_METRICS else ([], [])
    if max(len(steps), len(val_points[0])) < 2:
        axes.set_title(title)
        write_empty_note(axes, _TOO_SHORT_TEXT if steps or val_points[0] else "not measured")
        axes.set_axis_off()  # ticks and grid would be meaningless
        return
    has_line = len(steps) > 1
    label = "train" if key in _EVALUATED_METRICS else None
    if steps:
        axes.plot(steps, values, color=COLORS[color], marker="" if has_line else "o", label=label)
    if val_points[0]:
        marker = "o" if len(val_points[0]) <= 40 else ""
        axes.plot(
            *val_points, color=COLORS["val"], marker=marker, markersize=4.5, label="validation"
        )
    if best_step is not None:
        axes.axvline(best_step, color=COLORS["muted"], linewidth=1, linestyle=(0, (3, 3)), zorder=0)
        axes.plot([], [], color=COLORS["muted"], linewidth=1, linestyle=(0, (3, 3)), label="kept")
    _format_axes(axes, key, title, steps_per_epoch)
    if label:
        add_legend(axes)


def _format_axes(axes: Axes, key: str, title: str, steps_per_epoch: float | None) -> None:
    axes.set_title(title)
    epoch = f" (an epoch has {steps_per_epoch:,.0f})" if steps_per_epoch else ""
    axes.set_xlabel(f"step{epoch}")
    axes.grid(axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    if key in ("top1", "map"):
        axes.yaxis.set_major_formatter(_PERCENT_FORMATTER)
    elif key == "lr":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:.3g}"))
    axes.set_xlim(left=0)
    if key in ("lr", "images_per_second"):
        axes.set_ylim(0, 1.02 * axes.get_ylim()[1])


def plot_run_comparison(
    named_histories: Sequence[tuple[str, Sequence[Mapping[str, Any]]]],
    *,
    key: str = "top1",
    split: str = "val",
) -> Figure:
    """Plot a metric of several runs on the same axes.

    Args:
        named_histories: (name, lines of metrics.jsonl) of each run; runs of the same name, such as
            the seeds of one recipe, share a color and a legend entry.
        key: a metric, from `curve_keys`.
        split: "train" or "val".
    """
    with matplotlib_style():
        figure, (axes,) = create_panels(1, 1)
        names = list(dict.fromkeys(name for name, _ in named_histories))
        labeled_names: set[str] = set()
        series = [(name, _metric_series(history, split, key)) for name, history in named_histories]
        max_points = max((len(steps) for _, (steps, _) in series), default=0)
        if max_points < 2:
            write_empty_note(axes, _TOO_SHORT_TEXT if max_points else "not measured")
            axes.set_axis_off()
            series = []
        for name, (steps, values) in series:
            index = names.index(name)
            axes.plot(
                steps,
                values,
                color=COLORS[SERIES_COLORS[index % len(SERIES_COLORS)]],
                linestyle=_LINE_STYLES[index // len(SERIES_COLORS) % len(_LINE_STYLES)],
                linewidth=1.4,
                marker="o" if len(steps) <= 20 else "",
                markersize=4,
                label=None if name in labeled_names else shorten_label(name, 30),
            )
            labeled_names.add(name)
        split_title = "validation" if split == "val" else "training"
        title = (
            f"{_PANELS[key][0]}, {split_title}" if key in _EVALUATED_METRICS else _PANELS[key][0]
        )
        _format_axes(axes, key, title, None)
        figure.set_label(f"{title}, of {len(named_histories)} runs over their steps")
    return figure


def plot_metrics(metrics: Mapping[str, Any], class_names: Sequence[str]) -> dict[str, Figure]:
    """Plot the confusion matrix and the reliability diagram of a split, as far as it has them.

    Args:
        metrics: the split's metrics, such as "test" of results.json.
        class_names: names of the classes.
    Returns: a dict from file name to figure.
    """
    figures = {}
    if (matrix := parse_confusion_matrix(metrics)) is not None:
        figures["confusion.png"] = plot_confusion_matrix(matrix, class_names)
    if "calibration" in metrics:
        calibrated = metrics.get("calibrated", {}).get("calibration")
        figures["reliability.png"] = plot_reliability_diagram(metrics["calibration"], calibrated)
    return figures


def plot_confusion_matrix(
    matrix: ConfusionMatrix | Sequence[Sequence[int]], class_names: Sequence[str]
) -> Figure:
    """Plot a confusion matrix, colored by the share of the true class (row-normalized).

    Args:
        matrix: K x K counts, with a row per true class and a column per predicted class. With more
            than 1,000 classes, only the 20 most confused ones are drawn.
        class_names: names of the K classes; long names are shortened.
    """
    confusion = (
        matrix if isinstance(matrix, ConfusionMatrix) else ConfusionMatrix.from_dense(matrix)
    )
    title = f"{confusion.num_classes} classes"
    classes = np.arange(confusion.num_classes)
    if confusion.num_classes > MAX_DENSE_CLASSES:
        classes = confusion.select_classes(MAX_CLASSES_WITH_COUNTS)
        class_names = [class_names[index] for index in classes.tolist()]
        title = f"{len(classes)} of {title}"
    counts_KK = confusion.to_dense(classes).astype(np.float64)
    shares_KK = counts_KK / np.maximum(confusion.support_K[classes, None], 1)
    num_classes = len(counts_KK)
    has_counts = num_classes <= MAX_CLASSES_WITH_COUNTS
    size_pixels = min(44 * num_classes, 600) if has_counts else 600
    labels = [shorten_label(name) for name in class_names]
    margin_pixels = 24 + 6.9 * max(map(len, labels), default=1)
    with matplotlib_style():
        size_pixels = max(size_pixels, 180)
        figure = create_figure(size_pixels + margin_pixels, size_pixels + 16 + 0.72 * margin_pixels)
        axes = figure.subplots()
        (_draw_count_cells if has_counts else _draw_heatmap)(axes, counts_KK, shares_KK)
        label_step = max(1, math.ceil(num_classes / _MAX_CLASS_LABELS))
        label_positions = range(0, num_classes, label_step)
        shown_labels = [labels[index] for index in label_positions]
        has_long_labels = max(map(len, shown_labels), default=0) > 3
        axes.set_xticks(
            label_positions,
            shown_labels,
            rotation=45 if has_long_labels else 0,
            ha="left" if has_long_labels else "center",
        )
        axes.set_yticks(label_positions, shown_labels)
        axes.tick_params(length=0, labelcolor=COLORS["ink"], top=True, labeltop=True)
        axes.tick_params(bottom=False, labelbottom=False)
        axes.spines[:].set_visible(False)
        axes.set_xlabel("predicted")
        axes.set_ylabel("true class")
        axes.set_aspect("equal")
        figure.set_label(f"Confusion matrix of {title}: rows true, columns predicted")
    return figure


def _draw_count_cells(axes: Axes, counts_KK: np.ndarray, shares_KK: np.ndarray) -> None:
    """Draw each cell as a square with its count."""
    num_classes = len(counts_KK)
    max_digits = max(len(f"{count:.0f}") for count in counts_KK.flat) if num_classes else 1
    font_size = min(11.5, 600 / num_classes / max_digits / 0.85)
    for row, column in np.ndindex(*counts_KK.shape):
        share, count = shares_KK[row, column], counts_KK[row, column]
        corner = (column - 0.475, row - 0.475)
        # keep empty cells visible, to show the grid
        alpha = 0.05 + 0.9 * float(share)
        axes.add_patch(Rectangle(corner, 0.95, 0.95, color=COLORS["fill"], alpha=alpha, lw=0))
        if count:
            color = "on-fill" if share > 0.6 else "ink"
            text = f"{count:.0f}"
            axes.text(
                column,
                row,
                text,
                ha="center",
                va="center_baseline",
                size=font_size,
                c=COLORS[color],
            )
    axes.set_xlim(-0.5, num_classes - 0.5)
    axes.set_ylim(num_classes - 0.5, -0.5)


def _draw_heatmap(axes: Axes, counts_KK: np.ndarray, shares_KK: np.ndarray) -> None:
    """Draw the shares as a heatmap, with square roots to make small off-diagonal shares visible."""
    num_classes = len(shares_KK)
    block_size = math.ceil(num_classes / _MAX_HEATMAP_CELLS)
    padding = -num_classes % block_size
    padded_shares = np.pad(shares_KK, (0, padding))
    side = len(padded_shares) // block_size
    # downsample by the maximum of each block, because a mean would hide single confusions
    max_shares = padded_shares.reshape(side, block_size, side, block_size).max((1, 3))
    rgba = np.zeros((side, side, 4))
    rgba[..., :3] = to_rgb(_HEATMAP_COLOR)
    rgba[..., 3] = 0.04 + 0.96 * np.sqrt(max_shares)
    edge = side * block_size - 0.5
    axes.imshow(rgba, extent=(-0.5, edge, edge, -0.5), interpolation="nearest", aspect="equal")
    axes.set_xlim(-0.5, num_classes - 0.5)
    axes.set_ylim(num_classes - 0.5, -0.5)


def plot_learning_curve(curve: Mapping[str, Any], *, split: str) -> Figure:
    """Plot accuracy against the number of training images, up to twice as many as there are.

    Args:
        curve: the result of `measure_learning_curve`.
        split: name of the evaluated split, for the axis label.
    """
    sizes = curve["sizes"]
    num_draws = len(curve["accuracies"][0])
    with matplotlib_style():
        figure, (axes,) = create_panels(1, 1)
        axes.plot(
            np.repeat(sizes, num_draws),
            np.ravel(curve["accuracies"]),
            color=COLORS["val"],
            linestyle="",
            marker="o",
            markersize=4.5,
            label="measured",
        )
        axes.plot(sizes, curve["fitted"][:-1], color=COLORS["train"], label="fitted")
        ends = [sizes[-1], curve["gain"]["images"]]
        axes.plot(
            ends, curve["fitted"][-2:], color=COLORS["train"], linestyle="--", label="extrapolated"
        )
        axes.set_xscale("log", base=2)
        axes.set_xticks([*sizes, curve["gain"]["images"]])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}"))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_formatter(_PERCENT_FORMATTER)
        axes.set(xlabel="training images", title=f"Accuracy on {split}")
        axes.grid(axis="y")
        add_legend(axes)
        figure.set_label("Accuracy over the number of training images, with a fitted curve")
    return figure


def plot_reliability_diagram(
    bins: Sequence[Mapping[str, Any]],
    calibrated_bins: Sequence[Mapping[str, Any]] | None = None,
    *,
    title: str | None = None,
) -> Figure:
    """Plot accuracy over confidence and, below it, the number of images in each bin.

    Args:
        bins: calibration bins, each a dict with keys "low", "high", "count", "accuracy" and
            "confidence"; the last two are None in an empty bin.
        calibrated_bins: bins after temperature scaling, for a second diagram; None draws only one.
        title: title of the first diagram; None uses "Calibration" or, for two diagrams, "Before
            temperature scaling".
    """
    diagrams = [
        (title or ("Before temperature scaling" if calibrated_bins else "Calibration"), bins)
    ]
    if calibrated_bins:
        diagrams.append(("After temperature scaling", calibrated_bins))
    with matplotlib_style():
        figure = create_figure(440 * len(diagrams), 400)
        grid = figure.add_gridspec(2, len(diagrams), height_ratios=(4, 1))
        for column, (name, diagram_bins) in enumerate(diagrams):
            upper = figure.add_subplot(grid[0, column])
            lower = figure.add_subplot(grid[1, column], sharex=upper)
            _draw_reliability_diagram(upper, lower, diagram_bins)
            upper.set_title(name)
        figure.set_label("Reliability diagram: accuracy over confidence; count of images below")
    return figure


def _draw_reliability_diagram(upper: Axes, lower: Axes, bins: Sequence[Mapping[str, Any]]) -> None:
    filled_bins = [bin_ for bin_ in bins if None not in (bin_["accuracy"], bin_["confidence"])]
    for bin_ in filled_bins:
        width = bin_["high"] - bin_["low"]
        bar_left, bar_width = bin_["low"] + 0.06 * width, 0.88 * width
        accuracy, confidence = bin_["accuracy"], bin_["confidence"]
        upper.bar(
            bar_left,
            min(confidence, accuracy),
            bar_width,
            align="edge",
            color=COLORS["train"],
            lw=0,
        )
        gap = COLORS["gap"] if confidence > accuracy else COLORS["train"]
        corner = (bar_left, min(confidence, accuracy))
        upper.add_patch(
            Rectangle(corner, bar_width, abs(confidence - accuracy), color=gap, alpha=0.45, lw=0)
        )
        lower.bar(bar_left, bin_["count"], bar_width, align="edge", color=COLORS["muted"], lw=0)
    upper.plot([0, 1], [0, 1], color=COLORS["ink"], linewidth=1, linestyle=(0, (3, 3)))
    if not filled_bins:
        write_empty_note(upper, "not measured")
    upper.bar(0, 0, color=COLORS["train"], label="accuracy")
    upper.bar(0, 0, color=COLORS["gap"], alpha=0.45, label="overconfident by")
    upper.bar(0, 0, color=COLORS["train"], alpha=0.45, label="underconfident by")
    upper.legend(loc="upper left", handlelength=1, handleheight=1)
    for axis in (upper.xaxis, upper.yaxis):
        axis.set_major_locator(MaxNLocator(5))
        axis.set_major_formatter(_PERCENT_FORMATTER)
    upper.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy")
    upper.tick_params(labelbottom=False, bottom=False)
    upper.grid(axis="y")
    lower.yaxis.set_major_locator(MaxNLocator(2, integer=True))
    lower.yaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:,.0f}"))
    lower.set(xlabel="confidence", ylabel="images")
    lower.grid(axis="y")


def _metric_series(
    history: Sequence[Mapping[str, Any]], split: str, key: str
) -> tuple[list[float], list[float]]:
    """Return steps and values of a curve, without missing values; average very long curves."""
    value_at_step = {
        line["step"]: line[key]  # a later line of the same step wins
        for line in history
        if line.get("split") == split and as_finite_number(line.get(key)) is not None
    }
    points = np.array(sorted(value_at_step.items()), dtype=np.float64).reshape(-1, 2)
    if len(points) > _MAX_POINTS:
        parts = np.array_split(points, _MAX_POINTS)
        points = np.array([part.mean(0) for part in parts])
    return points[:, 0].tolist(), points[:, 1].tolist()
