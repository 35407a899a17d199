"""The figures of a run: curves, confusion matrix, calibration; drawn without pyplot."""

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

from finetune.evaluation.claims import main_figure
from finetune.evaluation.confusion import DENSE_CLASSES, Confusion
from finetune.report.run_data import number
from finetune.report.style import COLORS, SERIES, blank, empty, legend, legible, panels, style

__all__ = [
    "COUNTED_CLASSES",
    "compare_curves",
    "confusion",
    "curve_keys",
    "curves",
    "lr_range",
    "reliability",
]

_PERCENT = FuncFormatter(lambda share, _: f"{100 * share:g} %")
_HEAT = "#3b82d0"  # of a picture, which no page can recolour: seen on white and on black
_DASHES = ("-", "--", ":", "-.")  # when there are more series than colours
_PANELS = {  # key of a log line: title, colour of the training line
    "loss": ("Loss", "train"),
    "top1": ("Top-1 accuracy", "train"),
    "map": ("Mean average precision", "train"),
    "lr": ("Learning rate", "lr"),
    "images_per_second": ("Images per second", "speed"),
}
_VALIDATED = ("loss", "top1", "map")
_TOO_SHORT = "too short to plot: one point"
COUNTED_CLASSES = 20  # beyond it the numbers in the cells could not be read
_LABELLED_CLASSES = 25
_LARGEST_IMAGE = 400  # cells a side that a picture of a page can show
_MOST_POINTS = 600  # of a line; more is averaged


def curves(
    history: Sequence[Mapping[str, Any]],
    results: Mapping[str, Any],
    *,
    keys: Sequence[str] | None = None,
    steps_per_epoch: float | None = None,
) -> Figure:
    """Draw loss, accuracy, learning rate and speed over the steps of a run.

    Args:
        history: the lines of metrics.jsonl; values may be missing or not finite.
        results: its "best_step" is marked; may be empty.
        keys: which of `curve_keys`; None for all.
        steps_per_epoch: named under the axis when it is known.
    """
    keys = curve_keys(history) if keys is None else keys
    with style():
        columns = min(2, len(keys))
        rows = math.ceil(len(keys) / columns)
        figure, grid = panels(rows, columns)
        for axes, key in zip(grid, keys, strict=False):
            _panel(axes, history, key, results.get("best_step"), steps_per_epoch)
        for axes in grid[len(keys) :]:
            axes.set_visible(False)
        named = ", ".join(_PANELS[key][0].lower() for key in keys)
        last = max((int(line["step"]) for line in history if _ok(line.get("step"))), default=0)
        figure.set_label(f"{named} over {last} steps".capitalize())
    return figure


def curve_keys(history: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The keys of log lines that have a curve, with top1 or, for several labels an image, map."""
    measured = main_figure({key for line in history for key in line})
    return ("loss", measured, "lr", "images_per_second")


def _panel(
    axes: Axes,
    history: Sequence[Mapping[str, Any]],
    key: str,
    kept: Any,
    steps_per_epoch: float | None,
) -> None:
    title, color = _PANELS[key]
    steps, values = _line(history, "train", key)
    validated = _line(history, "val", key) if key in _VALIDATED else ([], [])
    if max(len(steps), len(validated[0])) < 2:
        axes.set_title(title)
        empty(axes, _TOO_SHORT if steps or validated[0] else "not measured")
        axes.set_axis_off()  # ticks and grid would have nothing to say
        return
    many = len(steps) > 1
    label = "train" if key in _VALIDATED else None
    if steps:
        axes.plot(steps, values, color=COLORS[color], marker="" if many else "o", label=label)
    if validated[0]:
        marker = "o" if len(validated[0]) <= 40 else ""
        axes.plot(
            *validated, color=COLORS["val"], marker=marker, markersize=4.5, label="validation"
        )
    if _ok(kept):
        axes.axvline(kept, color=COLORS["muted"], linewidth=1, linestyle=(0, (3, 3)), zorder=0)
        axes.plot([], [], color=COLORS["muted"], linewidth=1, linestyle=(0, (3, 3)), label="kept")
    _dress(axes, key, title, steps_per_epoch)
    if label:
        legend(axes)


def _dress(axes: Axes, key: str, title: str, steps_per_epoch: float | None) -> None:
    axes.set_title(title)
    epoch = f" (an epoch has {steps_per_epoch:,.0f})" if steps_per_epoch else ""
    axes.set_xlabel(f"step{epoch}")
    axes.grid(axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    if key in ("top1", "map"):
        axes.yaxis.set_major_formatter(_PERCENT)
    elif key == "lr":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:.3g}"))
    axes.set_xlim(left=0)
    if key in ("lr", "images_per_second"):
        axes.set_ylim(0, 1.02 * axes.get_ylim()[1])


def lr_range(points: Sequence[tuple[float, float]], chosen: float) -> Figure:
    """Draw a range test of the learning rate.

    Args:
        points: of learning rate and smoothed loss.
        chosen: the learning rate of the run.
    """
    with style():
        figure, (axes,) = panels(1, 1)
        axes.set_title("Range test: loss by learning rate")
        axes.plot(*zip(*points, strict=True), color=COLORS["train"])
        axes.axvline(chosen, color=COLORS["muted"], linewidth=1, linestyle=(0, (3, 3)), zorder=0)
        axes.set_xscale("log")
        axes.minorticks_off()
        axes.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:g}"))
        axes.set_xlabel(f"learning rate (chosen: {chosen:g})")
        axes.grid(axis="y")
        axes.yaxis.set_major_locator(MaxNLocator(5))
        figure.set_label(f"Loss of a learning rate range test; {chosen:g} was chosen")
    return figure


def compare_curves(
    named_histories: Sequence[tuple[str, Sequence[Mapping[str, Any]]]],
    *,
    key: str = "top1",
    split: str = "val",
) -> Figure:
    """Draw one figure of several runs over one another.

    Args:
        named_histories: (name, lines of metrics.jsonl) of each run; runs of one name share a
            colour and an entry of the legend, as the seeds of one recipe do.
        key: one of `curve_keys`.
        split: train or val.
    """
    with style():
        figure, (axes,) = panels(1, 1)
        names = list(dict.fromkeys(name for name, _ in named_histories))
        seen: set[str] = set()
        named = [(name, _line(history, split, key)) for name, history in named_histories]
        longest = max((len(steps) for _, (steps, _) in named), default=0)
        if longest < 2:
            empty(axes, _TOO_SHORT if longest else "not measured")
            axes.set_axis_off()
            named = []
        for name, (steps, values) in named:
            place = names.index(name)
            axes.plot(
                steps,
                values,
                color=COLORS[SERIES[place % len(SERIES)]],
                linestyle=_DASHES[place // len(SERIES) % len(_DASHES)],
                linewidth=1.4,
                marker="o" if len(steps) <= 20 else "",
                markersize=4,
                label=None if name in seen else legible(name, 30),
            )
            seen.add(name)
        which = "validation" if split == "val" else "training"
        title = f"{_PANELS[key][0]}, {which}" if key in _VALIDATED else _PANELS[key][0]
        _dress(axes, key, title, None)
        figure.set_label(f"{title}, of {len(named_histories)} runs over their steps")
    return figure


def confusion(matrix: Confusion | Sequence[Sequence[int]], names: Sequence[str]) -> Figure:
    """Draw a confusion matrix; colour is the share of a row, which is a true class.

    Args:
        matrix: K x K counts, a row per true class and a column per predicted one. Beyond 1,000
            classes 20 are drawn, of the most confused pairs.
        names: of the K classes; shortened where they are long.
    """
    whole = matrix if isinstance(matrix, Confusion) else Confusion.of(matrix)
    title = f"{whole.num_classes} classes"
    classes = np.arange(whole.num_classes)
    if whole.num_classes > DENSE_CLASSES:
        classes = whole.classes_to_show(COUNTED_CLASSES)
        names = [names[index] for index in classes.tolist()]
        title = f"{len(classes)} of {title}"
    counts_KK = whole.dense(classes).astype(np.float64)
    shares_KK = counts_KK / np.maximum(whole.support_K[classes, None], 1)
    num_classes = len(counts_KK)
    few = num_classes <= COUNTED_CLASSES
    side = min(44 * num_classes, 600) if few else 600
    labels = [legible(name) for name in names]
    margin = 24 + 6.9 * max(map(len, labels), default=1)
    with style():
        side = max(side, 180)
        figure = blank(side + margin, side + 16 + 0.72 * margin)
        axes = figure.subplots()
        (_cells if few else _heat)(axes, counts_KK, shares_KK)
        every = max(1, math.ceil(num_classes / _LABELLED_CLASSES))
        shown = range(0, num_classes, every)
        some = [labels[index] for index in shown]
        long = max(map(len, some), default=0) > 3
        axes.set_xticks(shown, some, rotation=45 if long else 0, ha="left" if long else "center")
        axes.set_yticks(shown, some)
        axes.tick_params(length=0, labelcolor=COLORS["ink"], top=True, labeltop=True)
        axes.tick_params(bottom=False, labelbottom=False)
        axes.spines[:].set_visible(False)
        axes.set_xlabel("predicted")
        axes.set_ylabel("true class")
        axes.set_aspect("equal")
        figure.set_label(f"Confusion matrix of {title}: rows true, columns predicted")
    return figure


def _cells(axes: Axes, counts_KK: np.ndarray, shares_KK: np.ndarray) -> None:
    """A square with its count for each pair of classes."""
    num_classes = len(counts_KK)
    longest = max(len(f"{count:.0f}") for count in counts_KK.flat) if num_classes else 1
    size = min(11.5, 600 / num_classes / longest / 0.85)
    for row, column in np.ndindex(*counts_KK.shape):
        share, count = shares_KK[row, column], counts_KK[row, column]
        corner = (column - 0.475, row - 0.475)
        # an empty cell stays visible, so that the grid does
        alpha = 0.05 + 0.9 * float(share)
        axes.add_patch(Rectangle(corner, 0.95, 0.95, color=COLORS["fill"], alpha=alpha, lw=0))
        if count:
            ink = "on-fill" if share > 0.6 else "ink"
            text = f"{count:.0f}"
            axes.text(
                *(column, row, text), ha="center", va="center_baseline", size=size, c=COLORS[ink]
            )
    axes.set_xlim(-0.5, num_classes - 0.5)
    axes.set_ylim(num_classes - 0.5, -0.5)


def _heat(axes: Axes, counts_KK: np.ndarray, shares_KK: np.ndarray) -> None:
    """A picture of the shares, by the square root: confusions are small beside the diagonal."""
    num_classes = len(shares_KK)
    block = math.ceil(num_classes / _LARGEST_IMAGE)
    pad = -num_classes % block
    padded = np.pad(shares_KK, (0, pad))
    side = len(padded) // block
    # the largest of a block: a lone confusion must not be averaged away
    largest = padded.reshape(side, block, side, block).max((1, 3))
    rgba = np.zeros((side, side, 4))
    rgba[..., :3] = to_rgb(_HEAT)
    rgba[..., 3] = 0.04 + 0.96 * np.sqrt(largest)
    edge = side * block - 0.5
    axes.imshow(rgba, extent=(-0.5, edge, edge, -0.5), interpolation="nearest", aspect="equal")
    axes.set_xlim(-0.5, num_classes - 0.5)
    axes.set_ylim(num_classes - 0.5, -0.5)


def reliability(
    bins: Sequence[Mapping[str, Any]],
    calibrated: Sequence[Mapping[str, Any]] | None = None,
    *,
    title: str | None = None,
) -> Figure:
    """Draw how often the model is right against how sure it is, with the counts below.

    Args:
        bins: "low", "high", "count", "accuracy" and "confidence" of each; the last two are None
            in an empty bin.
        calibrated: the same after temperature scaling, drawn beside it.
        title: in place of "Calibration", or "Before temperature scaling" where there are two.
    """
    sides = [(title or ("Before temperature scaling" if calibrated else "Calibration"), bins)]
    if calibrated:
        sides.append(("After temperature scaling", calibrated))
    with style():
        figure = blank(440 * len(sides), 400)
        grid = figure.add_gridspec(2, len(sides), height_ratios=(4, 1))
        for column, (name, side) in enumerate(sides):
            upper = figure.add_subplot(grid[0, column])
            lower = figure.add_subplot(grid[1, column], sharex=upper)
            _diagram(upper, lower, side)
            upper.set_title(name)
        figure.set_label("Reliability diagram: accuracy over confidence; count of images below")
    return figure


def _diagram(upper: Axes, lower: Axes, bins: Sequence[Mapping[str, Any]]) -> None:
    filled = [one for one in bins if one.get("count") and _ok(one.get("accuracy"))]
    for one in filled:
        left, width = one["low"], one["high"] - one["low"]
        sure = one["confidence"] if _ok(one.get("confidence")) else left + width / 2
        place, room = left + 0.06 * width, 0.88 * width
        right = one["accuracy"]
        upper.bar(place, min(sure, right), room, align="edge", color=COLORS["train"], lw=0)
        gap = COLORS["gap"] if sure > right else COLORS["train"]
        corner = (place, min(sure, right))
        upper.add_patch(Rectangle(corner, room, abs(sure - right), color=gap, alpha=0.45, lw=0))
        lower.bar(place, one["count"], room, align="edge", color=COLORS["muted"], lw=0)
    upper.plot([0, 1], [0, 1], color=COLORS["ink"], linewidth=1, linestyle=(0, (3, 3)))
    if not filled:
        empty(upper, "not measured")
    upper.bar(0, 0, color=COLORS["train"], label="accuracy")
    upper.bar(0, 0, color=COLORS["gap"], alpha=0.45, label="too sure by")
    upper.bar(0, 0, color=COLORS["train"], alpha=0.45, label="not sure enough by")
    upper.legend(loc="upper left", handlelength=1, handleheight=1)
    for axis in (upper.xaxis, upper.yaxis):
        axis.set_major_locator(MaxNLocator(5))
        axis.set_major_formatter(_PERCENT)
    upper.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy")
    upper.tick_params(labelbottom=False, bottom=False)
    upper.grid(axis="y")
    lower.yaxis.set_major_locator(MaxNLocator(2, integer=True))
    lower.yaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:,.0f}"))
    lower.set(xlabel="confidence", ylabel="images")
    lower.grid(axis="y")


def _ok(value: Any) -> bool:
    """True for a finite number."""
    return number(value) is not None


def _line(
    history: Sequence[Mapping[str, Any]], split: str, key: str
) -> tuple[list[float], list[float]]:
    """Steps and values of one line, without what is missing; long ones as means of neighbours."""
    known = {
        line["step"]: line[key]  # the last line of a step counts
        for line in history
        if line.get("split") == split and _ok(line.get("step")) and _ok(line.get(key))
    }
    points = np.array(sorted(known.items()), dtype=np.float64).reshape(-1, 2)
    if len(points) > _MOST_POINTS:
        parts = np.array_split(points, _MOST_POINTS)
        points = np.array([part.mean(0) for part in parts])
    return points[:, 0].tolist(), points[:, 1].tolist()
