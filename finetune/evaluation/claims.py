"""Answers to a recipe's claims: the figures that a source reports beside the run's own.

An evaluation closes a window of steps, from the one before it. A claim names a moment, which is
one of these windows: "val" is the evaluation itself, "train" the mean of the log lines within the
window (what papers print beside an epoch's validation), "test" the one reading at the end.
Missing data raises nothing: the verdict is then "not measured", with the reason.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.text import MISSING, counted, markdown_table, percent

__all__ = ["ACCURACIES", "VERDICTS", "answer", "main_figure", "table", "wording"]

# ends of metrics that are shares
ACCURACIES = ("top1", "top5", "balanced_accuracy", "macro_f1", "micro_f1", "map")
VERDICTS = ("met", "not met", "not measured")

_ROUNDING = 1e-9  # 0.8 is within 0.1 of 0.7, whatever binary fractions say


def main_figure(figures: Container[str]) -> str:
    """Return the figure that chooses among models: the mAP of several labels an image, or top1."""
    return "map" if "map" in figures else "top1"


@dataclass(frozen=True)
class _Figure:
    """A measured value, or None, and its origin in words."""

    value: float | None
    how: str


@dataclass(frozen=True)
class _Window:
    """The steps after `low` up to and including `high`, where an evaluation may be."""

    low: int
    high: int


class _Record:
    """A run's lines and results, asked by metric and moment."""

    def __init__(
        self,
        history: Iterable[Mapping[str, Any]],
        results: Mapping[str, Any],
        steps_per_epoch: float,
    ) -> None:
        self.lines: dict[str, dict[int, Mapping[str, Any]]] = {"train": {}, "val": {}}
        for line in history:
            # after a resume the later line of a step is the one that counts
            if line.get("split") in self.lines and isinstance(line.get("step"), int):
                self.lines[line["split"]][line["step"]] = line
        self.results = results
        self.steps_per_epoch = steps_per_epoch
        highs = sorted(self.lines["val"])
        # zip stops at the shorter one: no evaluation, no window
        self.windows = [_Window(low, high) for low, high in zip([0, *highs], highs, strict=False)]
        if not highs and self.lines["train"]:  # never evaluated: the last epoch's log lines
            last = max(self.lines["train"])
            self.windows = [_Window(max(0, math.floor(last - steps_per_epoch)), last)]

    def window(self, when: str, metric: str) -> _Window | str:
        """The window of a moment; "best" is the metric's own best. A string says why there is none.

        Args:
            when: end, first, best or "epoch N".
            metric: "val.top1" and the like.
        """
        if not self.windows:
            return "the run has no evaluation"
        if when == "first":
            return self.windows[0]
        if when == "end" or (when == "best" and metric.startswith("test")):
            return self.windows[-1]
        if when == "best":
            values = [(self.figure(metric, w, final=False).value, w) for w in self.windows]
            known = [(value, window) for value, window in values if value is not None]
            if not known:  # of the kept checkpoint only, in the results
                return self.windows[-1]
            lowest = metric.endswith(("loss", "ece"))
            return (min if lowest else max)(known, key=lambda pair: pair[0])[1]
        epoch = _epoch(when, "epoch")
        if epoch is None:
            return f"'{when}' is not a moment"
        end = epoch * self.steps_per_epoch
        for window in self.windows:
            # an epoch that is no whole number of steps may be rounded either way
            if end - 1 < window.high < end + self.steps_per_epoch:
                return window
        return f"no evaluation at the end of epoch {epoch}"

    def figure(self, metric: str, window: _Window, *, final: bool) -> _Figure:
        """Read a metric at a window.

        Args:
            metric: "val.top1" and the like.
            window: of this run.
            final: whether the figures of the end of the run, in the results, may answer.
        """
        split, _, key = metric.partition(".")
        if metric == "run.epochs":
            return _Figure(window.high / self.steps_per_epoch, f"{window.high} optimiser steps")
        if split == "train":
            return self._train_mean(key, window)
        value = _number(self.lines.get(split, {}).get(window.high, {}).get(key))
        if value is not None:
            return _Figure(value, f"evaluation at step {window.high}")
        return self.result(metric) if final else _Figure(None, f"{metric} is read once, at the end")

    def result(self, metric: str) -> _Figure:
        """Read a metric from the results of the kept checkpoint."""
        split, _, key = metric.partition(".")
        section = self.results.get(split)
        value = _number(section.get(key)) if isinstance(section, Mapping) else None
        if value is None:
            return _Figure(None, f"the run has no {metric}")
        return _Figure(value, f"{split} split, kept checkpoint")

    def _train_mean(self, key: str, window: _Window) -> _Figure:
        """Mean of the log lines within a window, each weighted by the steps it covers."""
        inside = [
            (step, value)
            for step in sorted(self.lines["train"])
            if window.low < step <= window.high
            and (value := _number(self.lines["train"][step].get(key))) is not None
        ]
        if not inside:
            return _Figure(None, f"no train line in steps {window.low + 1}–{window.high}")
        starts = [window.low, *(step for step, _ in inside)]
        weights = [step - start for (step, _), start in zip(inside, starts, strict=False)]
        total = math.fsum(w * value for w, (_, value) in zip(weights, inside, strict=True))
        lines = counted(len(inside), "train line")
        how = f"mean of {lines}, steps {window.low + 1}–{window.high}"
        return _Figure(total / sum(weights), how)

    def slope(self, metric: str, after: int) -> _Figure:
        """Least-squares slope per epoch over the evaluations after epoch `after`."""
        if metric.startswith("test"):
            return _Figure(None, "the test split is read once, at the end; it has no trend")
        points = []
        for window in self.windows:
            # the evaluation that closes epoch `after` is not after it
            if window.high >= after * self.steps_per_epoch + 1:
                value = self.figure(metric, window, final=False).value
                if value is not None:
                    points.append((window.high / self.steps_per_epoch, value))
        period = f"after epoch {after}" if after else "in the run"
        if len(points) < 2:
            return _Figure(None, f"{counted(len(points), 'evaluation')} {period}; a trend needs 2")
        slope = statistics.linear_regression(*zip(*points, strict=True)).slope
        how = f"slope per epoch over {len(points)} evaluations {period}"
        return _Figure(slope, how)


def answer(
    claims: Sequence[Mapping[str, Any]],
    history: Iterable[Mapping[str, Any]],
    results: Mapping[str, Any],
    steps_per_epoch: float,
) -> list[dict[str, Any]]:
    """Measure every claim.

    Args:
        claims: a recipe's, as plain mappings.
        history: the lines of metrics.jsonl.
        results: the content of results.json so far; its "test" and "val" answer for the end.
        steps_per_epoch: optimiser steps, need not be whole.
    Returns: each claim with "measured" (a figure; for a trend its slope per epoch), "how" (in
        words, or why it could not be measured), "verdict" (one of VERDICTS), and with `below`
        also "measured_other".
    """
    record = _Record(history, results, steps_per_epoch if steps_per_epoch > 0 else 1.0)
    return [{**claim, **_judge(claim, record)} for claim in claims]


def table(answers: Iterable[Mapping[str, Any]]) -> str:
    """A markdown table of what `answer` returned; accuracies in per cent.

    Args:
        answers: the rows; where they name a "run", the table does too.
    """
    answers = list(answers)
    heads = ["claim", "source", "reported", "measured", "verdict"]
    named = any("run" in row for row in answers)
    heads += ["run"] if named else []
    rows = []
    for row in answers:
        what, reported, measured = wording(row)
        if row.get("measured") is None and row.get("how"):
            measured += f" ({row['how']})"
        verdict = str(row.get("verdict", VERDICTS[2]))
        cells = [what, str(row.get("source") or ""), reported, measured, verdict]
        cells += [str(row.get("run", ""))] if named else []
        rows.append(cells)
    return "\n".join(markdown_table(heads, rows)) + "\n"


def wording(answer: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return a row of `answer` as text: its subject, the reported figure and the measured one."""
    metric, when = str(answer.get("metric", "")), str(answer.get("when") or "end")
    what = metric if when == "end" else f"{metric}, {when}"
    return what, _reported(answer), _measured(answer)


def _judge(claim: Mapping[str, Any], record: _Record) -> dict[str, Any]:
    """Measure one claim and give the verdict."""
    metric, when = str(claim.get("metric", "")), str(claim.get("when") or "end")
    if claim.get("trend") is not None:
        after = 0 if when == "end" else _epoch(when, "after epoch")
        if after is None:
            return _missing(f"a trend is measured 'after epoch N', not at '{when}'")
        slope = record.slope(metric, after)
        rises = claim["trend"] == "rising"
        met = slope.value is not None and (slope.value > 0 if rises else slope.value < 0)
        return _verdict(slope, met)
    figure, other = _at(record, when, metric, claim.get("below"))
    if figure.value is None:
        return _missing(figure.how)
    if claim.get("below") is not None:
        if other is None or other.value is None:
            return {**_missing(other.how if other else ""), "measured": figure.value}
        answered = _verdict(figure, figure.value < other.value)
        how = f"{figure.how}; {claim['below']}: {other.how}"
        return {**answered, "how": how, "measured_other": other.value}
    if claim.get("between") is not None:
        low, high = claim["between"]
        return _verdict(figure, low - _ROUNDING <= figure.value <= high + _ROUNDING)
    if claim.get("value") is None:
        return {**_missing("the claim says no figure"), "measured": figure.value}
    tolerance = claim.get("tolerance") or 0.0
    return _verdict(figure, abs(figure.value - claim["value"]) <= tolerance + _ROUNDING)


def _at(
    record: _Record, when: str, metric: str, below: str | None
) -> tuple[_Figure, _Figure | None]:
    """Read a metric, and the one it is compared with, at the same moment."""
    window = record.window(when, metric)
    final = when in ("end", "best")
    figures = [
        record.figure(name, window, final=final)
        if isinstance(window, _Window)
        # no evaluation on the way, yet the end may have been measured
        else (record.result(name) if final and not record.windows else _Figure(None, window))
        for name in (metric, below)
        if name is not None
    ]
    return figures[0], figures[1] if len(figures) > 1 else None


def _verdict(figure: _Figure, met: bool) -> dict[str, Any]:
    if figure.value is None:
        return _missing(figure.how)
    return {"measured": figure.value, "how": figure.how, "verdict": VERDICTS[0 if met else 1]}


def _missing(why: str) -> dict[str, Any]:
    return {"measured": None, "how": why, "verdict": VERDICTS[2]}


def _epoch(when: str, prefix: str) -> int | None:
    """N of "{prefix} N"."""
    match = re.fullmatch(rf"{prefix} (\d+)", when)
    return int(match[1]) if match else None


def _number(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value


def _format(metric: str, figure: Any) -> str:
    value = _number(figure)
    if value is None:
        return MISSING
    if metric.endswith(ACCURACIES):
        return percent(value)
    return f"{value:.4g}" if metric == "run.epochs" else f"{value:.4f}"


def _reported(row: Mapping[str, Any]) -> str:
    metric, between = str(row.get("metric", "")), row.get("between")
    if row.get("trend") is not None:
        return str(row["trend"])
    if row.get("below") is not None:
        return f"below {row['below']}"
    if isinstance(between, (list, tuple)) and len(between) == 2:
        return f"{_format(metric, between[0])} to {_format(metric, between[1])}"
    if row.get("value") is None:
        return MISSING
    return f"{_format(metric, row['value'])} ± {_format(metric, row.get('tolerance') or 0.0)}"


def _measured(row: Mapping[str, Any]) -> str:
    value, metric = _number(row.get("measured")), str(row.get("metric", ""))
    if value is not None and row.get("trend") is not None:
        return f"{value:+.2g} per epoch"
    if row.get("measured_other") is not None:
        return (
            f"{_format(metric, value)} and {_format(str(row.get('below')), row['measured_other'])}"
        )
    return _format(metric, value)
