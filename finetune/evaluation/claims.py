"""Check a recipe's claims: compare the published numbers that it cites with the run's metrics.

Each evaluation ends a window of steps, which begins after the previous evaluation. A claim's "when"
selects one window. For this window, a "val" metric is read from the evaluation at its end, and a
"train" metric is the mean of the log lines within it, as papers report the training loss of an
epoch. A "test" metric is always the one measured at the end of the run. Missing data raises no
error: the verdict is "not measured", with the reason.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.formatting import MISSING, format_percent, markdown_table, pluralize
from finetune.run.record import describe_split_decisions

__all__ = [
    "PERCENT_METRICS",
    "VERDICTS",
    "as_finite_number",
    "check_claims",
    "claims_table",
    "format_claim",
    "primary_metric",
]

# suffixes of the metrics in [0, 1], which are printed as percentages
PERCENT_METRICS = ("top1", "top5", "balanced_accuracy", "macro_f1", "micro_f1", "map")
VERDICTS = ("met", "not met", "not measured")

_ABSOLUTE_TOLERANCE = 1e-9  # 0.8 is within 0.1 of 0.7 despite floating-point rounding


def primary_metric(metrics: Container[str]) -> str:
    """Return the metric that selects the best model: "map" for multi-label, else "top1"."""
    return "map" if "map" in metrics else "top1"


def as_finite_number(value: Any) -> float | None:
    """Return the value if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    # a JSON integer may be too large for a float
    return value if abs(value) < 1e300 else None


@dataclass(frozen=True)
class _Measurement:
    """A measured value, or None, and a description of where it comes from."""

    value: float | None
    description: str


@dataclass(frozen=True)
class _StepWindow:
    """The steps after `after_step`, up to and including `last_step`."""

    after_step: int
    last_step: int


class _MetricsLog:
    """The log lines and results of a run, read by metric and step window."""

    def __init__(
        self,
        history: Iterable[Mapping[str, Any]],
        results: Mapping[str, Any],
        steps_per_epoch: float,
    ) -> None:
        self.log_lines: dict[str, dict[int, Mapping[str, Any]]] = {"train": {}, "val": {}}
        for line in history:
            # after a resume, the later line of a step replaces the earlier one
            if line.get("split") in self.log_lines:
                self.log_lines[line["split"]][line["step"]] = line
        self.results = results
        self.steps_per_epoch = steps_per_epoch
        eval_steps = sorted(self.log_lines["val"])
        # zip stops at the shorter list: without evaluations there are no windows
        self.eval_windows = [
            _StepWindow(after_step, last_step)
            for after_step, last_step in zip([0, *eval_steps], eval_steps, strict=False)
        ]
        if not eval_steps and self.log_lines["train"]:  # never evaluated: use the last epoch
            last_train_step = max(self.log_lines["train"])
            self.eval_windows = [
                _StepWindow(max(0, math.floor(last_train_step - steps_per_epoch)), last_train_step)
            ]

    def find_window(self, when: str, metric: str) -> _StepWindow | str:
        """Find the window that a claim's "when" selects.

        Args:
            when: "end", "first", "best" or "epoch N"; "best" is the window with the metric's best
                value.
            metric: split and name of a metric, for example "val.top1".
        Returns: the window, or the reason why it does not exist.
        """
        if not self.eval_windows:
            return "the run has no evaluation"
        if when == "first":
            return self.eval_windows[0]
        if when == "end" or (when == "best" and metric.startswith("test")):
            return self.eval_windows[-1]
        if when == "best":
            values = [
                (self.measure(metric, w, allow_final_results=False).value, w)
                for w in self.eval_windows
            ]
            known = [(value, window) for value, window in values if value is not None]
            if not known:  # the metric is only in the final results, of the kept checkpoint
                return self.eval_windows[-1]
            lower_is_better = metric.endswith(("loss", "ece"))
            return (min if lower_is_better else max)(known, key=lambda pair: pair[0])[1]
        epoch = _parse_epoch(when, "epoch")
        if epoch is None:
            return f"when: '{when}' selects no evaluation; use end, first, best or epoch N"
        end_step = epoch * self.steps_per_epoch
        for window in self.eval_windows:
            # steps per epoch may be fractional: accept a window that ends one step early or late
            if end_step - 1 < window.last_step < end_step + self.steps_per_epoch:
                return window
        return f"no evaluation at the end of epoch {epoch}"

    def measure(
        self, metric: str, window: _StepWindow, *, allow_final_results: bool
    ) -> _Measurement:
        """Read a metric in a window.

        Args:
            metric: split and name of a metric, for example "val.top1".
            window: one of `eval_windows`.
            allow_final_results: True to use the final results if the window has no value.
        """
        split, _, key = metric.partition(".")
        if metric == "run.epochs":
            return _Measurement(
                window.last_step / self.steps_per_epoch, f"{window.last_step} optimizer steps"
            )
        if split == "train":
            return self._mean_train_value(key, window)
        value = as_finite_number(self.log_lines.get(split, {}).get(window.last_step, {}).get(key))
        if value is not None:
            return _Measurement(value, f"evaluation at step {window.last_step}")
        return (
            self.read_final_result(metric)
            if allow_final_results
            else _Measurement(None, f"{metric} is measured only at the end")
        )

    def read_final_result(self, metric: str) -> _Measurement:
        """Read a metric from the results of the kept checkpoint."""
        split, _, key = metric.partition(".")
        metrics = self.results.get(split) or {}
        value = as_finite_number(metrics.get(key))
        if value is None:
            return _Measurement(None, f"the run has no {metric}")
        notes = [f"{split} split", "kept checkpoint", describe_split_decisions(metrics)]
        return _Measurement(value, ", ".join(filter(None, notes)))

    def _mean_train_value(self, key: str, window: _StepWindow) -> _Measurement:
        """Average a key of the train log lines in a window, weighted by the steps they cover."""
        steps_and_values = [
            (step, value)
            for step in sorted(self.log_lines["train"])
            if window.after_step < step <= window.last_step
            and (value := as_finite_number(self.log_lines["train"][step].get(key))) is not None
        ]
        if not steps_and_values:
            return _Measurement(
                None, f"no train line in steps {window.after_step + 1}–{window.last_step}"
            )
        starts = [window.after_step, *(step for step, _ in steps_and_values)]
        weights = [step - start for (step, _), start in zip(steps_and_values, starts, strict=False)]
        total = math.fsum(
            weight * value for weight, (_, value) in zip(weights, steps_and_values, strict=True)
        )
        lines = pluralize(len(steps_and_values), "train line")
        description = f"mean of {lines}, steps {window.after_step + 1}–{window.last_step}"
        return _Measurement(total / sum(weights), description)

    def fit_slope(self, metric: str, after_epoch: int) -> _Measurement:
        """Fit the least-squares slope per epoch over the evaluations after an epoch."""
        if metric.startswith("test"):
            return _Measurement(None, "the test split is measured only at the end: no trend")
        points = []
        for window in self.eval_windows:
            # exclude the evaluation at the end of `after_epoch` itself
            if window.last_step >= after_epoch * self.steps_per_epoch + 1:
                value = self.measure(metric, window, allow_final_results=False).value
                if value is not None:
                    points.append((window.last_step / self.steps_per_epoch, value))
        period = f"after epoch {after_epoch}" if after_epoch else "in the run"
        if len(points) < 2:
            return _Measurement(
                None, f"{pluralize(len(points), 'evaluation')} {period}; a trend needs 2"
            )
        slope = statistics.linear_regression(*zip(*points, strict=True)).slope
        description = f"slope per epoch over {len(points)} evaluations {period}"
        return _Measurement(slope, description)


def check_claims(
    claims: Sequence[Mapping[str, Any]],
    history: Iterable[Mapping[str, Any]],
    results: Mapping[str, Any],
    steps_per_epoch: float,
) -> list[dict[str, Any]]:
    """Compare every claim with what the run measured.

    Args:
        claims: the recipe's claims, as dicts.
        history: the lines of metrics.jsonl.
        results: the content of results.json so far; "test" and "val" are the final metrics.
        steps_per_epoch: optimizer steps per epoch; may be fractional.
    Returns: each claim's dict with the added keys "measured" (a number; for a trend the slope per
        epoch), "how" (how it was measured, or why it was not) and "verdict" (one of VERDICTS); a
        claim with "below" also has "measured_other".
    """
    metrics_log = _MetricsLog(history, results, steps_per_epoch if steps_per_epoch > 0 else 1.0)
    return [{**claim, **_check_claim(claim, metrics_log)} for claim in claims]


def claims_table(checked_claims: Iterable[Mapping[str, Any]]) -> str:
    """Write checked claims as a Markdown table, accuracies as percentages.

    Args:
        checked_claims: the result of `check_claims`. The table has a column "run" if any of the
            dicts has that key.
    """
    checked_claims = list(checked_claims)
    headers = ["claim", "source", "reported", "measured", "verdict"]
    has_run = any("run" in row for row in checked_claims)
    headers += ["run"] if has_run else []
    rows = []
    for row in checked_claims:
        subject, reported, measured = format_claim(row)
        if row.get("measured") is None and row.get("how"):
            measured += f" ({row['how']})"
        verdict = str(row.get("verdict", VERDICTS[2]))
        cells = [subject, str(row.get("source") or ""), reported, measured, verdict]
        cells += [str(row.get("run", ""))] if has_run else []
        rows.append(cells)
    return "\n".join(markdown_table(headers, rows)) + "\n"


def format_claim(checked_claim: Mapping[str, Any]) -> tuple[str, str, str]:
    """Format a checked claim as text: (subject, reported value, measured value)."""
    metric, when = str(checked_claim.get("metric", "")), str(checked_claim.get("when") or "end")
    subject = metric if when == "end" else f"{metric}, {when}"
    return subject, _format_reported(checked_claim), _format_measured(checked_claim)


def _check_claim(claim: Mapping[str, Any], metrics_log: _MetricsLog) -> dict[str, Any]:
    """Measure one claim and return its verdict."""
    metric, when = str(claim.get("metric", "")), str(claim.get("when") or "end")
    if claim.get("trend") is not None:
        after = 0 if when == "end" else _parse_epoch(when, "after epoch")
        if after is None:
            return _not_measured(f"a trend needs 'after epoch N', not '{when}'")
        trend = metrics_log.fit_slope(metric, after)
        is_rising = claim["trend"] == "rising"
        is_met = trend.value is not None and (trend.value > 0 if is_rising else trend.value < 0)
        return _verdict_for(trend, is_met)
    window = metrics_log.find_window(when, metric)

    def measure(name: str) -> _Measurement:
        allow_final_results = when in ("end", "best")
        if isinstance(window, _StepWindow):
            return metrics_log.measure(name, window, allow_final_results=allow_final_results)
        if allow_final_results and not metrics_log.eval_windows:
            return metrics_log.read_final_result(name)  # the run has only final results
        return _Measurement(None, window)

    measurement = measure(metric)
    if measurement.value is None:
        return _not_measured(measurement.description)
    if claim.get("below") is not None:
        other = measure(claim["below"])
        if other.value is None:
            return {**_not_measured(other.description), "measured": measurement.value}
        verdict = _verdict_for(measurement, measurement.value < other.value)
        how = f"{measurement.description}; {claim['below']}: {other.description}"
        return {**verdict, "how": how, "measured_other": other.value}
    if claim.get("between") is not None:
        low, high = claim["between"]
        return _verdict_for(
            measurement,
            low - _ABSOLUTE_TOLERANCE <= measurement.value <= high + _ABSOLUTE_TOLERANCE,
        )
    if claim.get("value") is None:
        return {**_not_measured("the claim has no value"), "measured": measurement.value}
    tolerance = claim.get("tolerance") or 0.0
    return _verdict_for(
        measurement, abs(measurement.value - claim["value"]) <= tolerance + _ABSOLUTE_TOLERANCE
    )


def _verdict_for(measurement: _Measurement, is_met: bool) -> dict[str, Any]:
    if measurement.value is None:
        return _not_measured(measurement.description)
    return {
        "measured": measurement.value,
        "how": measurement.description,
        "verdict": VERDICTS[0 if is_met else 1],
    }


def _not_measured(reason: str) -> dict[str, Any]:
    return {"measured": None, "how": reason, "verdict": VERDICTS[2]}


def _parse_epoch(when: str, prefix: str) -> int | None:
    """Parse N from "{prefix} N"; None if the text does not match."""
    match = re.fullmatch(rf"{prefix} (\d{{1,9}})", when)
    return int(match[1]) if match else None


def _format_value(metric: str, value: Any) -> str:
    value = as_finite_number(value)
    if value is None:
        return MISSING
    if metric.endswith(PERCENT_METRICS):
        return format_percent(value)
    return f"{value:.4g}" if metric == "run.epochs" else f"{value:.4f}"


def _format_reported(row: Mapping[str, Any]) -> str:
    metric, between = str(row.get("metric", "")), row.get("between")
    if row.get("trend") is not None:
        return str(row["trend"])
    if row.get("below") is not None:
        return f"below {row['below']}"
    if isinstance(between, (list, tuple)) and len(between) == 2:
        return f"{_format_value(metric, between[0])} to {_format_value(metric, between[1])}"
    if row.get("value") is None:
        return MISSING
    return (
        f"{_format_value(metric, row['value'])} ± "
        f"{_format_value(metric, row.get('tolerance') or 0.0)}"
    )


def _format_measured(row: Mapping[str, Any]) -> str:
    value, metric = as_finite_number(row.get("measured")), str(row.get("metric", ""))
    if value is not None and row.get("trend") is not None:
        return f"{value:+.2g} per epoch"
    if row.get("measured_other") is not None:
        return (
            f"{_format_value(metric, value)} and "
            f"{_format_value(str(row.get('below')), row['measured_other'])}"
        )
    return _format_value(metric, value)
